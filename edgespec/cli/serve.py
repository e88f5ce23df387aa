"""``edgespec serve``: HTTP APIs in front of this device.

The command binds the port, finds the verifier, loads the draft, prints the settings in use, serves,
and drains when it is asked to stop.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import typer

from edgespec import __version__
from edgespec.cli import running
from edgespec.cli.device import explain_misfit, no_verifier_message
from edgespec.cli.options import DEVICE_FLAGS, FALLBACK, RULE, Flag, from_config
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.api_keys import load_api_key
from edgespec.config.common import (
    SetupError,
    is_loopback,
    join_host_port,
    local_host_of,
    require_library,
)
from edgespec.core.device.memory import MIB
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.agent import Agent
from edgespec.device.borrowed_tokenizer import (
    BorrowingAgent,
    takes_target_texts,
    with_tokenizer,
)
from edgespec.device.connections import Connections, borrows_tokenizer
from edgespec.device.local_model import LocalModel
from edgespec.device.prober import VerifierMonitor
from edgespec.device.status import StatusSource
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from edgespec.telemetry.process_memory import machine_memory
from edgespec.telemetry.trace import Tracer
from edgespec.worker_pool import exit_despite_stuck_work

_MAX_NAMES = 8
"""Names of models or origins that a line of the start-up lists."""
_RETRY_S = 2.0
"""Seconds between two attempts to find a verifier."""


async def serve_until_stopped(config: AgentConfig, tracer: Tracer | None) -> None:
    """Serve until a signal asks this process to stop. Raises ``ConfigError``, ``SetupError`` and
    ``OSError``."""
    with require_library("starlette, uvicorn and prometheus-client", "edgespec[serve]"):
        # The import comes before the memory plan, which measures what the process holds.
        import edgespec.endpoint.app  # noqa: F401
    key = load_api_key(config.endpoint.key_file, "EDGESPEC_ENDPOINT_KEY")
    host = config.endpoint.host
    if not (key or config.endpoint.insecure or is_loopback(host)):
        raise ConfigError(
            f"endpoint.host is {host!r}, which others can reach, and there is no API key: set one"
            " (EDGESPEC_ENDPOINT_KEY or --key-file), or --set endpoint.insecure=true to serve"
            " everybody"
        )
    with running.listen(host, config.endpoint.port) as listeners:
        async with Connections(config, with_texts=takes_target_texts(config)) as connections:
            connections.start()
            connections.keep_warm()
            await _serve_on(listeners, key, config, tracer, connections)


async def _serve_on(
    listeners: Sequence[socket.socket],
    key: str,
    config: AgentConfig,
    tracer: Tracer | None,
    connections: Connections,
) -> None:
    target: ModelInfo | None = None
    if borrows_tokenizer(config):
        async with _answering_waiting(config, key, listeners):
            config, target = await _with_lent_tokenizer(config, connections)
    elif takes_target_texts(config):
        config, target = await _with_target_texts(config, connections)
    lacks_texts = takes_target_texts(config)  # no verifier has answered yet
    with running.stopping_at_once():  # it may download a tokenizer from the Hub
        tokenizer = build.load_tokenizer(build.tokenizer_reference(config))
    current = [config]
    async with _open_watch(current, connections) as watch:
        with running.stopping_at_once():
            agent: Agent
            # It is loaded first, so that a memory budget counts it.
            fallback = build.load_fallback(config, running.say)
            how: dict[str, Any] = {
                "tracer": tracer,
                "say": running.say,
                "beside": fallback,
            }
            if lacks_texts:
                agent = BorrowingAgent(config, connections=connections, **how)
            else:
                lease = connections.lease
                agent = build.build_agent(config, target=target, lease=lease, **how)
        async with agent:
            warming = asyncio.create_task(agent.warm_up())
            try:
                with _opened_fallback(fallback, agent) as local:
                    await _serve(current, key, agent, tokenizer, watch, listeners, local)
            finally:
                warming.cancel()
                await asyncio.gather(warming, return_exceptions=True)


async def _serve(
    current: list[AgentConfig],
    key: str,
    agent: Agent,
    tokenizer: build.PromptTokenizer,
    watch: VerifierMonitor,
    listeners: Sequence[socket.socket],
    local: LocalModel | None,
) -> None:
    from edgespec.endpoint.app import build_app
    from edgespec.endpoint.server import EndpointServer
    from edgespec.endpoint.service import Endpoint

    config = current[0]
    sampling = _default_sampling(config)
    has_budget = bool(config.draft.memory_budget)
    endpoint = Endpoint(
        agent, tokenizer, watch, config.endpoint, sampling, key=key, has_budget=has_budget
    )

    async def take_texts() -> None:
        """Give the endpoint the target's tokenizer and chat template, once a verifier sent them."""
        if isinstance(agent, BorrowingAgent) and takes_target_texts(current[0]):
            await agent.take_texts()
            completed = replace(config, tokenizer=agent.reference)
            endpoint.tokenizer = await asyncio.to_thread(build.load_tokenizer, agent.reference)
            endpoint.sampling = _default_sampling(completed)
            current[0] = completed

    if local is not None:
        own = config.sampling
        if config.endpoint.model_sampling:
            own = build.with_model_sampling(own, build.fallback_reference(config))
        endpoint.use_fallback(local, own)
        endpoint.report = running.say
    endpoint.load_target_texts = take_texts
    status = StatusSource(agent, tuple(map(build.with_port, config.verifiers)), __version__, watch)
    server = EndpointServer(endpoint, build_app(endpoint, status), listeners, config.endpoint)
    stop = running.StopRequest()
    numbers = running.on_stopping_signals(stop.request)
    try:
        await server.start()
        watch.start()
        url = f"http://{join_host_port(local_host_of(config.endpoint.host), server.port)}"
        for line in _settings_lines(config, watch, bool(key)):
            running.say(line)
        typer.echo(f"edgespec endpoint ready on {url}/v1")
        running.say(f"  chat: {url}, status: {url}/status")
        running.say(_try_line(url, tokenizer.chat_template() is not None, bool(key)))
        await running.wait_for_first(stop.requested.wait(), server.died.wait())
        if server.died.is_set():
            raise SetupError("the HTTP server ended by itself")
        waits = (
            f": waiting up to {endpoint.settings.drain_s:g} s for {endpoint.running_count} requests"
        )
        running.say(
            f"stopping{waits if endpoint.running_count and not stop.terminal_closed else ''}"
        )
    finally:
        try:
            await server.stop(0.0 if stop.terminal_closed else None)
        finally:
            for number in numbers:
                asyncio.get_running_loop().remove_signal_handler(number)


@contextmanager
def _opened_fallback(fallback: build.Fallback | None, agent: Agent) -> Iterator[LocalModel | None]:
    """Yield the model that answers while no verifier can be reached, and close it."""
    if fallback is None:
        yield None
        return
    with running.stopping_at_once():
        local = build.local_model(fallback, agent)
    try:
        yield local
    finally:
        local.close()


def _default_sampling(config: AgentConfig) -> SamplingParams:
    """Return the sampling parameters that a request does not have to set."""
    if not config.endpoint.model_sampling:
        return config.sampling
    return build.with_model_sampling(config.sampling, build.tokenizer_reference(config))


@asynccontextmanager
async def _answering_waiting(
    config: AgentConfig, key: str, listeners: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Answer ``/health`` with ``waiting`` and everything else with 503 in this block. The sockets
    stay open after it."""
    from edgespec.endpoint.app import waiting_app
    from edgespec.endpoint.server import EndpointServer

    own = [one.dup() for one in listeners]  # the server closes its sockets
    server = EndpointServer(None, waiting_app(key, config.endpoint), own, config.endpoint)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def _open_watch(
    current: Sequence[AgentConfig], connections: Connections
) -> AsyncIterator[VerifierMonitor]:
    """Yield a watch over the verifiers, which has probed each of them once.

    ``current`` holds one configuration, which is exchanged when the target's tokenizer arrives.
    Raises ``SetupError`` if none of the verifiers can ever be used."""
    watch = VerifierMonitor(
        {one: connections.lease(one) for one in connections.addresses},
        lambda info: explain_misfit(current[0], info, "the verifier"),
    )
    try:
        await watch.refresh()
        _check_usable(watch)
        yield watch
    finally:
        await watch.close()


def _check_usable(watch: VerifierMonitor) -> None:
    """Raise ``SetupError`` if every verifier misfits or refuses this device."""
    unusable = (VerifierState.MISFIT, VerifierState.REFUSES)
    if all(one.state in unusable for one in watch.statuses):
        raise SetupError("\n".join(f"{one.address}: {one.why}" for one in watch.statuses))


async def _with_target_texts(
    config: AgentConfig, connections: Connections
) -> tuple[AgentConfig, ModelInfo | None]:
    """Return ``config`` with the tokenizer and chat template of the first verifier that answers and
    fits, and the model that it serves. If none answers, ``config`` is returned as it is. Raises
    ``SetupError`` if none of the verifiers can ever be used."""
    answers, whys = await connections.answers(), list[str]()
    for address, answer in answers.items():
        model = None if answer.info is None else answer.info.find_model(config.model)
        if model is None:
            continue
        try:
            with running.stopping_at_once():
                found = build.with_pulled_draft(config, model, running.say)
            found = await with_tokenizer(found, model, running.say, address, connections)
            with running.stopping_at_once():
                build.check_draft(found, model)
        except SetupError as error:
            whys.append(f"{address}: {error}")
        except LinkError:  # the verifier has gone again
            continue
        else:
            return found, model
    if whys and len(whys) == len(answers):
        raise SetupError("\n".join(whys))
    return config, None


async def _with_lent_tokenizer(
    config: AgentConfig, connections: Connections
) -> tuple[AgentConfig, ModelInfo]:
    """Wait for a verifier, and return ``config`` with its tokenizer, and the model that it serves.
    Raises ``SetupError`` if it lends none."""
    async with _open_watch([config], connections) as watch:
        if not watch.ready:
            running.say("no verifier answers yet; waiting for one, whose tokenizer is needed")
            running.say("(neither draft.model nor tokenizer names a tokenizer on this device)")
        while True:
            for address, info in watch.infos.items():
                if (model := info.find_model(config.model)) is not None:
                    with suppress(LinkError):  # the verifier has gone again
                        found = await with_tokenizer(
                            config, model, running.say, address, connections
                        )
                        return found, model
            await asyncio.sleep(_RETRY_S)
            watch.infos.clear()
            await watch.refresh()
            _check_usable(watch)


def _settings_lines(config: AgentConfig, watch: VerifierMonitor, has_key: bool) -> list[str]:
    """Return the lines of the start-up that show the settings in use."""
    endpoint, draft, policy = config.endpoint, config.draft, config.policy
    memory = machine_memory()
    budget = f"at most {draft.memory_budget}" if draft.memory_budget else "no budget"
    sources = f"{draft.model}{' and lookup' if draft.from_text else ''}"
    sources += f" (corpus {', '.join(draft.corpus)})" if draft.corpus else ""
    ahead = "" if policy.run_ahead is RunAhead.NEVER else ", the verifier runs ahead"
    own = ("this machine and its applications",) if is_loopback(endpoint.host) else ()
    if endpoint.allow_local_apps:
        own = ("local pages, applications and browser extensions (--allow-local-apps)",)
    pages = ", ".join((*own, *endpoint.allow_origins[:_MAX_NAMES])) or "no origin"
    switch = "" if endpoint.allow_local_apps else "--allow-local-apps or "
    clients = "this machine" if is_loopback(endpoint.host) else f"all that reach {endpoint.host}"
    return [
        f"  draft     {sources}; policy {policy.name.value}{ahead}",
        *(f"  verifier  {_verifier_line(config, one)}" for one in watch.statuses),
        *_fallback_lines(config),
        f"  memory    {budget}; {memory.resident // MIB} MiB held, {memory.available // MIB} free",
        f"  clients   {clients}, {'with the API key' if has_key else 'without an API key'};"
        f" {endpoint.max_concurrent} generations at a time, {endpoint.max_queue} requests may wait",
        f"  web pages {pages}; {switch}--allow-origin admits others",
    ]


def _fallback_lines(config: AgentConfig) -> list[str]:
    if not config.fallback:
        return []
    name = build.fallback_reference(config)
    return [
        f"  fallback  {name} answers while no verifier can be reached, and every answer names it"
    ]


def _verifier_line(config: AgentConfig, status: VerifierStatus) -> str:
    if status.state is VerifierState.READY:
        names = [status.model, *status.adapters]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return (
            f"{status.address}: serves {', '.join(names[:_MAX_NAMES])}{more}, context"
            f" {status.context_length}, answered in {(status.rtt_s or 0.0) * 1e3:.0f} ms"
        )
    if status.state is VerifierState.AWAY:
        first, second = no_verifier_message(status.address, LinkError(status.why)).splitlines()[:2]
        within_s = config.reconnect.give_up_first_s
        waits = (
            "the fallback answers"
            if config.fallback
            else f"a request waits {within_s:g} s for one, then fails with 503"
        )
        return f"{first}; {waits}; {' '.join(second.split())}"
    return f"{status.address}: cannot be used: {status.why}"


def _try_line(url: str, can_chat: bool, has_key: bool) -> str:
    """Return a line with a curl command that works as it stands."""
    path, content = "completions", dict[str, Any](prompt="Once upon a time")
    if can_chat:
        path, content = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    data = {"model": "edgespec", "max_tokens": 64, **content}
    key = ' -H "Authorization: Bearer $EDGESPEC_ENDPOINT_KEY"' if has_key else ""
    return (
        f"  try it: curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d"
        f" '{json.dumps(data)}'"
    )


_SERVICE = "Endpoint"
_ENDPOINT_FLAGS = (
    Flag("endpoint.host", panel=_SERVICE),
    Flag("endpoint.port", ("--port", "-p"), panel=_SERVICE),
    Flag("endpoint.key_file", metavar="FILE", panel=_SERVICE),
    Flag("endpoint.allow_origins", ("--allow-origin",), metavar="URL", panel=_SERVICE),
    Flag("endpoint.allow_local_apps", ("--allow-local-apps",), panel=_SERVICE),
    FALLBACK,
)


@from_config(AgentConfig, *_ENDPOINT_FLAGS, RULE, *DEVICE_FLAGS)
def serve(settings: AgentConfig) -> None:
    """Serve HTTP APIs (OpenAI's and others) on this device, until Ctrl-C or SIGTERM.

    Programs that use such an API (OpenAI clients, chat interfaces, editors) get the target's output
    from http://127.0.0.1:7421/v1, drafted on this device. If no verifier answers yet, the command
    waits for one. Sampling parameters that a request does not set come from the settings, then from
    the model's generation_config.json; the seed is random. To serve other machines, an API key is
    required: EDGESPEC_ENDPOINT_KEY, or --key-file.

    With --fallback draft the draft model answers while no verifier can be reached. Each such
    answer names it, in the header X-Edgespec-Answered-By and in usage. Without it, such requests
    get a 503.

    [dim]edgespec serve --verifier gpu-box:7420 --ca ca.pem[/]

    [dim]edgespec serve --host 0.0.0.0 --key-file endpoint.key --allow-origin https://chat.example[/]
    """
    with running.trace_to(settings.trace, settings.trace_tokens) as tracer:
        asyncio.run(serve_until_stopped(settings, tracer))
    exit_despite_stuck_work()
