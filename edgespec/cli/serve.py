"""``edgespec serve``: OpenAI's HTTP API in front of this device. It takes the port, looks for the
verifier, loads the draft, says what was chosen and why, serves, and stops in good order.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import typer

from edgespec import __version__
from edgespec.cli import running
from edgespec.cli.device import misfit, no_verifier
from edgespec.cli.options import DEVICE_FLAGS, RULE, Flag, from_config
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.api_keys import load_api_key
from edgespec.config.common import SetupError, is_loopback, join_host_port, local_host_of, needs
from edgespec.core.device.memory import MIB
from edgespec.core.ports import LinkError, ModelInfo
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.agent import Agent
from edgespec.device.borrowed_tokenizer import (
    BorrowingAgent,
    borrows_tokenizer,
    takes_target_texts,
    with_tokenizer,
)
from edgespec.device.prober import VerifierMonitor
from edgespec.device.status import StatusSource
from edgespec.telemetry.agent_status import VerifierState, VerifierStatus
from edgespec.telemetry.process_memory import machine_memory
from edgespec.telemetry.trace import Tracer
from edgespec.wire.access import load_device_access
from edgespec.worker_pool import exit_despite_stuck_work

_MOST_NAMED = 8
_AGAIN_S = 2.0


async def serve_until_stopped(config: AgentConfig, tracer: Tracer) -> None:
    """Until a signal. Raises ``ConfigError``, ``SetupError``, ``OSError``."""
    with needs("starlette, uvicorn and prometheus-client", "edgespec[serve]"):
        import edgespec.endpoint.app  # what a memory budget is planned beside  # noqa: F401
    key = load_api_key(config.endpoint.key_file, "EDGESPEC_ENDPOINT_KEY")
    host = config.endpoint.host
    if not (key or config.endpoint.insecure or is_loopback(host)):
        raise ConfigError(
            f"endpoint.host is {host!r}, where others can ask: set a key (EDGESPEC_ENDPOINT_KEY or"
            " --key-file), or --set endpoint.insecure=true if all of them may"
        )
    with running.listen(host, config.endpoint.port) as listeners:
        target: ModelInfo | None = None
        if borrows_tokenizer(config):
            async with _waiting(config, key, listeners):
                config, target = await _with_lent_tokenizer(config)
        elif takes_target_texts(config):
            config, target = await _with_target_texts(config)
        late = takes_target_texts(config)  # no verifier was there yet
        with running.stoppable():  # one on the Hub is fetched
            text = build.load_tokenizer(build.tokenizer_reference(config))
        held = [config]
        async with _watching(held) as watch:
            with running.stoppable():
                agent: Agent
                if late:
                    agent = BorrowingAgent(config, tracer=tracer, say=running.say)
                else:
                    agent = build.build_agent(config, tracer=tracer, say=running.say, target=target)
            async with agent:
                await _serve(held, key, agent, text, watch, listeners)


async def _serve(
    held: list[AgentConfig],
    key: str,
    agent: Agent,
    text: build.PromptTokenizer,
    watch: VerifierMonitor,
    listeners: Sequence[socket.socket],
) -> None:
    from edgespec.endpoint.app import build_app
    from edgespec.endpoint.server import EndpointServer
    from edgespec.endpoint.service import Endpoint

    config = held[0]
    sampling = _sampling(config)
    has_budget = bool(config.draft.memory_budget)
    endpoint = Endpoint(
        agent, text, watch, config.endpoint, sampling, key=key, has_budget=has_budget
    )

    async def take_texts() -> None:
        """Put the target's texts into the endpoint, as soon as a verifier sends them."""
        if isinstance(agent, BorrowingAgent) and takes_target_texts(held[0]):
            await agent.take_texts()
            taken = replace(config, tokenizer=agent.reference)
            tokenizer = await asyncio.to_thread(build.load_tokenizer, agent.reference)
            endpoint.tokenizer, endpoint.sampling = tokenizer, _sampling(taken)
            held[0] = taken

    endpoint.load_target_texts = take_texts
    status = StatusSource(agent, tuple(map(build.with_port, config.verifiers)), __version__, watch)
    server = EndpointServer(endpoint, build_app(endpoint, status), listeners, config.endpoint)
    stop = running.Stopping()
    numbers = running.on_stopping_signals(stop.ask)
    try:
        await server.start()
        watch.start()
        url = f"http://{join_host_port(local_host_of(config.endpoint.host), server.port)}"
        for line in _chosen(config, watch, bool(key)):
            running.say(line)
        typer.echo(f"edgespec endpoint ready on {url}/v1")
        running.say(f"  see: {url} shows how it is doing, {url}/status.json says it to programs")
        running.say(_curl(url, text.chat_template() is not None, bool(key)))
        await running.first_of(stop.asked.wait(), server.died.wait())
        if server.died.is_set():
            raise SetupError("the HTTP server ended by itself")
        count, drain_s = endpoint.running_count, endpoint.settings.drain_s
        going_on = f": {count} requests may go on for {drain_s:g} s"
        running.say(f"stopping{going_on if count and not stop.hurried else ''}")
    finally:
        try:
            await server.stop(0.0 if stop.hurried else None)
        finally:
            for number in numbers:
                asyncio.get_running_loop().remove_signal_handler(number)


def _sampling(config: AgentConfig) -> SamplingParams:
    """What holds for requests that leave sampling open."""
    if not config.endpoint.model_sampling:
        return config.sampling
    return build.with_model_sampling(config.sampling, build.tokenizer_reference(config))


@asynccontextmanager
async def _waiting(
    config: AgentConfig, key: str, listeners: Sequence[socket.socket]
) -> AsyncIterator[None]:
    """Answer ``/health`` with ``waiting`` and everything else with 503, until the block ends. The
    sockets go on listening."""
    from edgespec.endpoint.app import waiting_app
    from edgespec.endpoint.server import EndpointServer

    own = [one.dup() for one in listeners]  # the server closes what it is given
    server = EndpointServer(None, waiting_app(key, config.endpoint), own, config.endpoint)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0.0)


@asynccontextmanager
async def _watching(held: Sequence[AgentConfig]) -> AsyncIterator[VerifierMonitor]:
    """The verifiers, asked once; ``held[0]`` is the configuration, which may get other texts.
    Raises ``SetupError`` where none will ever do."""
    access = load_device_access(held[0])
    addresses = [build.with_port(one) for one in held[0].verifiers]
    watch = VerifierMonitor(
        {one: build.connect(one, access=access) for one in addresses},
        lambda info: misfit(held[0], info, "the verifier"),
    )
    try:
        await watch.refresh()
        _refuse_hopeless(watch)
        yield watch
    finally:
        await watch.close()


def _refuse_hopeless(watch: VerifierMonitor) -> None:
    hopeless = (VerifierState.MISFIT, VerifierState.REFUSES)
    if all(one.state in hopeless for one in watch.statuses):
        raise SetupError("\n".join(f"{one.address}: {one.why}" for one in watch.statuses))


async def _with_target_texts(config: AgentConfig) -> tuple[AgentConfig, ModelInfo | None]:
    """Return ``config`` with the texts of the first verifier that is there and fits, and what it
    serves; unchanged where none answers. Raises ``SetupError`` where each of them will never do."""
    answers, whys = await build.probe_verifiers(config), list[str]()
    for address, answer in answers.items():
        model = None if answer.info is None else answer.info.find_model(config.model)
        if model is None:
            continue
        try:
            found = await with_tokenizer(config, model, running.say, address)
            with running.stoppable():
                build.check_draft(found, model)
        except SetupError as error:
            whys.append(f"{address}: {error}")
        except LinkError:  # it has gone again
            continue
        else:
            return found, model
    if whys and len(whys) == len(answers):
        raise SetupError("\n".join(whys))
    return config, None


async def _with_lent_tokenizer(config: AgentConfig) -> tuple[AgentConfig, ModelInfo]:
    """Return ``config`` with the tokenizer of the first verifier that is there, which is waited
    for, and what it serves. Raises ``SetupError`` where it lends none."""
    async with _watching([config]) as watch:
        if not watch.ready:
            running.say(
                "no verifier answers yet; one is waited for, since it has to lend its tokenizer:"
            )
            running.say("neither draft.model nor tokenizer names one")
        while True:
            for address, info in watch.infos.items():
                if (model := info.find_model(config.model)) is not None:
                    with suppress(LinkError):  # it has gone again
                        return await with_tokenizer(config, model, running.say, address), model
            await asyncio.sleep(_AGAIN_S)
            watch.infos.clear()
            await watch.refresh()
            _refuse_hopeless(watch)


def _chosen(config: AgentConfig, watch: VerifierMonitor, has_key: bool) -> list[str]:
    endpoint, draft, policy = config.endpoint, config.draft, config.policy
    memory = machine_memory()
    budget = f"at most {draft.memory_budget}" if draft.memory_budget else "no budget"
    beside = ", and guesses from the text" if draft.from_text else ""
    beside += f" and {', '.join(draft.corpus)}" if draft.corpus else ""
    ahead = "" if policy.run_ahead is RunAhead.NEVER else ", the verifier runs ahead"
    own = ("this machine and its applications",) if is_loopback(endpoint.host) else ()
    pages = ", ".join((*own, *endpoint.allow_origins[:_MOST_NAMED])) or "none"
    who = "this machine" if is_loopback(endpoint.host) else f"all that reach {endpoint.host}"
    return [
        f"  draft     {draft.model}{beside}; policy {policy.name.value}{ahead}",
        *(f"  verifier  {_verifier(config, one)}" for one in watch.statuses),
        f"  memory    {budget}; {memory.resident // MIB} MiB held, {memory.available // MIB} free",
        f"  clients   {who}, {'with the key' if has_key else 'no key'};"
        f" {endpoint.max_concurrent} texts at a time, {endpoint.max_queue} requests may wait",
        f"  pages     of {pages} may ask; --allow-origin lets others in",
    ]


def _verifier(config: AgentConfig, status: VerifierStatus) -> str:
    if status.state is VerifierState.READY:
        names = [status.model, *status.adapters]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return (
            f"{status.address}: serves {', '.join(names[:_MOST_NAMED])}{more}, context"
            f" {status.context_length}, answered in {(status.rtt_s or 0.0) * 1e3:.0f} ms"
        )
    if status.state is VerifierState.AWAY:
        first, second = no_verifier(status.address, LinkError(status.why)).splitlines()[:2]
        within_s = config.reconnect.give_up_first_s
        waits = f"a request waits {within_s:g} s for one, then fails with 503"
        return f"{first}; {waits}; {second.strip()}"
    return f"{status.address}: of no use: {status.why}"


def _curl(url: str, chats: bool, has_key: bool) -> str:
    """A line that works as it is."""
    path, what = "completions", dict[str, Any](prompt="Once upon a time")
    if chats:
        path, what = "chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}
    data = {"model": "edgespec", "max_tokens": 64, **what}
    key = ' -H "Authorization: Bearer $EDGESPEC_ENDPOINT_KEY"' if has_key else ""
    return (
        f"  try: curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d"
        f" '{json.dumps(data)}'"
    )


_SERVICE = "The endpoint"
_ENDPOINT_FLAGS = (
    Flag("endpoint.host", panel=_SERVICE),
    Flag("endpoint.port", ("--port", "-p"), panel=_SERVICE),
    Flag("endpoint.key_file", metavar="FILE", panel=_SERVICE),
    Flag("endpoint.allow_origins", ("--allow-origin",), metavar="URL", panel=_SERVICE),
)


@from_config(AgentConfig, *_ENDPOINT_FLAGS, RULE, *DEVICE_FLAGS)
def serve(settings: AgentConfig) -> None:
    """Serve OpenAI's HTTP API on this device, until Ctrl-C or SIGTERM.

    Programs that speak it (openai's clients, chat interfaces, editors) get the target's text from
    http://127.0.0.1:7421/v1, drafted here. A verifier that is not there yet is waited for. What a
    request leaves open comes from sampling in the settings; what that does not set either, from the
    model's generation_config.json; a seed is drawn. Beyond this machine a key is needed:
    EDGESPEC_ENDPOINT_KEY, or --key-file.

    [dim]edgespec serve --verifier gpu-box:7420 --ca ca.pem[/]

    [dim]edgespec serve --host 0.0.0.0 --key-file endpoint.key --allow-origin https://chat.example[/]
    """
    with running.trace_to(settings.trace, settings.trace_tokens) as tracer:
        asyncio.run(serve_until_stopped(settings, tracer))
    exit_despite_stuck_work()
