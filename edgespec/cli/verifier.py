"""``edgespec verifier``: load, listen, reload, drain and stop; and a verifier as a child process.

A request to stop begins a *drain*: the health service answers NOT_SERVING, new streams are refused,
and running ones may end. A verifier that another process started (``--with-parent``) and one whose
terminal was closed do not drain, because no user waits for them. The result of a reload is logged
as a warning, so that it shows at the default log level.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec import __version__, operating_system
from edgespec.cli import running
from edgespec.cli.main import FAILED
from edgespec.cli.options import Flag, from_config
from edgespec.config import DEFAULT_ADDRESS, ConfigError, VerifierConfig
from edgespec.config.common import SetupError, join_host_port, local_host_of, require_library
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.models import folders
from edgespec.models.catalogue import find_pair
from edgespec.models.folders import BUNDLED
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.toy import TOY
from edgespec.operating_system import HANGUP, has_controlling_terminal
from edgespec.telemetry import verifier_counts
from edgespec.telemetry.logs import log_failure
from edgespec.telemetry.metric_table import Table, make_registry
from edgespec.telemetry.trace import Tracer
from edgespec.verifier.build import build_verifier, load_server_drafter, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.wire.access import ServerAccess

if TYPE_CHECKING:
    from edgespec.wire.grpc_server import GrpcServer

_LOG = logging.getLogger(__name__)
_STREAMS_END_WITHIN_S = 3.0
# The target's thread begins its next pass while the event loop still sends the commits of the last
# one. It waits this long for the interpreter; at Python's own 5 ms, a pass of 25 ms began late.
_SWITCH_S = 5e-4


_SERVICE = "Service"
_FLAGS = (
    Flag("engine_flags", ("--engine-flags",), metavar="[-- FLAGS]", is_argument=True),
    Flag("model"),
    Flag("draft", metavar="MODEL"),
    Flag("engine"),
    Flag("device"),
    Flag("quantize"),
    Flag("max_model_len"),
    Flag("rules", metavar="NAME[:PARAMETER]"),
    Flag("limits.kv_budget", metavar="SIZE"),
    Flag("pacing.pass_ms"),
    Flag("host", panel=_SERVICE),
    Flag("port", ("--port", "-p"), panel=_SERVICE),
    Flag("keys", metavar="FILE", panel=_SERVICE),
    Flag("tls.cert", ("--tls-cert",), metavar="FILE", panel=_SERVICE),
    Flag("tls.key", ("--tls-key",), metavar="FILE", panel=_SERVICE),
    Flag("insecure", panel=_SERVICE),
    Flag("metrics_port", panel=_SERVICE),
    Flag("log_level", panel=_SERVICE),
)

WITH_PARENT = "--with-parent"
"""Option that ends the verifier with the process that holds the other end of its stdin."""

WithParent = Annotated[
    bool, typer.Option(WITH_PARENT, hidden=True, help="Stop when standard input ends")
]


@from_config(VerifierConfig, *_FLAGS)
def verifier(settings: VerifierConfig, with_parent: WithParent = False) -> None:
    """Serve a target model to devices, until Ctrl-C or SIGTERM.

    Prints one line when it is ready. Ctrl-C begins a drain: new streams are refused, running
    generations continue for up to drain_s seconds (30), and devices resume the others elsewhere. A
    second Ctrl-C ends the verifier at once. SIGHUP makes it read keys and certificates again.
    Without TLS only this machine can connect. It runs on Linux.

    [dim]edgespec verifier --model Qwen/Qwen3-8B[/]

    [dim]edgespec verifier --host 0.0.0.0 --tls-cert server.pem --tls-key server.key
    --keys keys.yaml[/]

    [dim]edgespec verifier --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B[/]

    [dim]edgespec verifier --engine vllm --model Qwen/Qwen3-32B -- --tensor-parallel-size 4[/]
    """
    check_runs_verifiers()
    with running.trace_to(settings.trace, settings.trace_tokens) as tracer:
        failure = asyncio.run(serve(settings, tracer, with_parent))
    if failure is not None:
        running.say(f"error: the verifier failed: {failure}")
        logging.shutdown()
        os._exit(FAILED)  # a thread may hang in the target, so none is waited for


def check_runs_verifiers() -> None:
    """Raise ``SetupError`` on a system where verifiers do not run."""
    if not operating_system.RUNS_VERIFIERS:
        raise SetupError(operating_system.VERIFIER_SYSTEMS)


async def serve(config: VerifierConfig, tracer: Tracer | None, with_parent: bool) -> str | None:
    """Serve until a signal asks this process to stop, or the verifier fails.

    Returns None after a signal, or the reason of the failure. Raises ``ConfigError`` for keys and
    certificates that cannot be used, ``SetupError`` and ``OSError``."""
    if not sys.stderr.isatty():  # progress bars would fill a log file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end, reload = running.StopRequest(is_graceful=False), asyncio.Event()
    running.on_stopping_signals(end.request, (signal.SIGINT, signal.SIGTERM))
    _on_hangup(end, reload)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, end)
    access = ServerAccess(config)
    for warning in access.warnings:
        _LOG.warning("%s", warning)
    with running.listen(config.host, config.port):
        pass  # a port that cannot be used is reported before a model is loaded
    with contextlib.closing(MetricsServer(config)) as metrics:
        running.say(f"loading {config.model} ...")
        target = await asyncio.to_thread(load_target, config)
        verifier, server = build_verifier(
            config,
            target=target,
            # The verifier alone holds the drafter, so that it can free it after a failure.
            drafter=await asyncio.to_thread(load_server_drafter, config, target),
            tracer=tracer,
            access=access,
            watch=metrics.watch,
        )
        if config.model != TOY:  # the toy has nothing to warm up
            await asyncio.to_thread(verifier.warm_up)
        await server.start()
        _collect_less_often()
        sys.setswitchinterval(_SWITCH_S)
        metrics.start(verifier)
        end.is_graceful = True
        typer.echo(line := ready_line(config, server.port, target, verifier.info))
        running.say(f"  try it: {next_command(config, server.port, _can_chat(config.model))}")
        manager = ServiceManager()
        manager.ready(line)
        alive = asyncio.create_task(manager.keep_alive())
        reloading = asyncio.create_task(_reload_whenever(reload, access, verifier, manager, line))
        await running.wait_for_first(end.requested.wait(), verifier.broken.wait())
        manager.stopping(f"stopping: {verifier.why_broken or 'on request'}")
        if not verifier.broken.is_set():
            is_unattended = with_parent or end.terminal_closed
            await _drain(verifier, server, 0.0 if is_unattended else config.drain_s)
        reloading.cancel()
        if not verifier.broken.is_set():
            await verifier.stop()
        await server.stop(_STREAMS_END_WITHIN_S)
        alive.cancel()
    return verifier.why_broken


def _collect_less_often() -> None:
    """Let the garbage collector run less often, every 20,000 new objects.

    Objects that exist now stay to the end, and most objects of streams are freed without the
    collector. At Python's own thresholds it took 7 % of a busy event loop
    (``benchmarks/daemon_load.py``)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _drain(verifier: Verifier, server: GrpcServer, drain_s: float) -> None:
    """Refuse new streams, and wait at most ``drain_s`` for the running ones to end."""
    count = server.stream_count
    if not (count and drain_s):
        running.say("stopping")
        await server.drain()
        return
    streams = f"{count} running stream" + ("s" if count > 1 else "")
    running.say(
        f"stopping: waiting up to {drain_s:g} s for {streams}; a second Ctrl-C stops at once"
    )
    await server.drain()
    try:
        async with asyncio.timeout(drain_s):
            await running.wait_for_first(server.drained(), verifier.broken.wait())
    except TimeoutError:
        running.say(f"stopping: ending {server.stream_count} streams, which can resume elsewhere")


async def _reload_whenever(
    requested: asyncio.Event,
    access: ServerAccess,
    verifier: Verifier,
    manager: ServiceManager,
    status: str,
) -> None:
    """Read keys and certificates again at each request, until cancelled.

    A request during a reload causes another one after it. A reload that fails changes nothing, and
    the next one may succeed."""
    while True:
        await requested.wait()
        requested.clear()
        manager.reloading()
        try:
            # The new keys are in force from here on, so ``revoke`` misses no later stream.
            done = await asyncio.to_thread(access.reload)
            ended = verifier.revoke(done.keys.revoked) if done.keys.revoked else 0
        except ConfigError as error:
            _LOG.error("reload failed, and nothing has changed: %s", error)
        except Exception as error:
            message = "reload failed; streams of revoked keys may continue"
            log_failure(_LOG, message, error=error, may_quote_client=True)
        else:
            _LOG.warning("reload: %s%s", done, f"; {ended} streams were ended" if ended else "")
            for warning in done.warnings:
                _LOG.warning("%s", warning)
        manager.ready(status)


def _on_hangup(end: running.StopRequest, reload: asyncio.Event) -> None:
    """Handle SIGHUP, which has two meanings: an operator's request to read files again and, for a
    process that was started on a terminal, the end of that terminal. A process under ``nohup``
    outlives its terminal."""
    assert HANGUP is not None  # ``check_runs_verifiers``
    outlives_terminal = signal.getsignal(HANGUP) is signal.SIG_IGN
    had_terminal = has_controlling_terminal() and not outlives_terminal

    def handle() -> None:
        if had_terminal and not has_controlling_terminal():
            end.request(HANGUP)
        else:
            reload.set()

    asyncio.get_running_loop().add_signal_handler(HANGUP, handle)


def _read_stdin(end: running.StopRequest) -> None:
    """Read stdin, whose content means nothing. Its end shows that the process that started this one
    has ended, even if that was killed."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        assert HANGUP is not None  # ``check_runs_verifiers``
        end.request(HANGUP)


def _can_chat(model: str) -> bool:
    """Return whether the target has a chat template. False if its files cannot be read here."""
    try:
        folder = resolve_source(model, Purpose.TARGET).folder
        settings = folders.read_json(folder / "tokenizer_config.json")
    except (OSError, ValueError):
        return False
    return "chat_template" in settings or (folder / "chat_template.jinja").is_file()


def next_command(config: VerifierConfig, port: int, can_chat: bool) -> str:
    """Return a command that tries this verifier from another terminal. ``can_chat``: its target has
    a chat template, and so answers questions."""
    where = join_host_port(local_host_of(config.host), port)
    options = "" if where == DEFAULT_ADDRESS else f" --verifier {where}"
    if config.tls.used:
        options += " --ca ca.pem"
    if config.model != BUNDLED and find_pair(config.model) is None:  # lookup needs no draft model
        options += f" --draft {TOY if config.model == TOY else 'lookup'}"
    request = 'chat "Why is the sky blue?"' if can_chat else 'generate "def fibonacci(n):"'
    return f"edgespec {request}{options}"


def ready_line(config: VerifierConfig, port: int, target: TargetModel, info: VerifierInfo) -> str:
    """Return the line that says what this verifier serves, where, and how."""
    context, most = info.model.context_length, target.info.context_length
    shorter = f" of {most} (limited by the KV cache)" if context < most else ""
    own = config.draft or ("its speculator" if target.pass_shape.speculator_tokens else "")
    draft = f", drafts itself with {own}" if own else ""
    return (
        f"edgespec verifier ready on {join_host_port(config.host, port)}: {info.model.name},"
        f" {target.mode}{draft}, context {context}{shorter}"
    )


# --- service manager and metrics -----------------------------------------------------------------


class ServiceManager:
    """Messages to the service manager that started this process, if the ``environment`` names one.

    They follow systemd's ``sd_notify``: datagrams of ``NAME=value`` lines. An error is logged once
    and otherwise ignored, because the verifier can serve without a manager."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ means the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._has_failed = self._is_stopping = False
        microseconds = environment.get("WATCHDOG_USEC", "")
        is_ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() else 0.0
        """Longest time between two signs of life that the manager accepts. 0 requires none."""

    def ready(self, status: str) -> None:
        """Report that the process serves, for the first time or again after ``reloading``.

        Nothing is sent after ``stopping``, because files may be read again during a drain."""
        if not self._is_stopping:
            self._send("READY=1", f"STATUS={make_one_line(status)}")

    def reloading(self) -> None:
        """Report that the process reads its configuration again. ``ready`` must follow."""
        if not self._is_stopping:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """Report that the process has begun to end."""
        self._is_stopping = True
        self._send("STOPPING=1", f"STATUS={make_one_line(status)}")

    async def keep_alive(self) -> None:
        """Report twice in each ``watchdog_s`` that the event loop runs, until cancelled. Return at
        once if the manager requires no such reports."""
        while self._address and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            # A manager that does not read must not block the loop.
            operating_system.send_datagram(self._address, "\n".join(lines).encode())
        except OSError as error:
            if not self._has_failed:
                _LOG.warning("cannot notify the service manager at %r: %s", self._address, error)
            self._has_failed = True


class MetricsServer:
    """HTTP server of the Prometheus metrics, if the configuration asks for one.

    It binds its port at once, before a model is loaded, and raises ``SetupError`` if it cannot.
    ``watch`` is for ``build_verifier``; it is None if nothing is to be counted.

    The client library's server runs in a thread of its own and reads plain counters. So a fetch
    neither waits for the event loop nor blocks it, and works even if the loop is stuck."""

    def __init__(self, config: VerifierConfig) -> None:
        self._metrics: Any = None
        if (port := config.metrics_port) is not None:
            with require_library("prometheus-client", "edgespec[server]"):
                from prometheus_client import CollectorRegistry, start_http_server
            host, self._registry = config.metrics_host, CollectorRegistry()
            try:
                self._metrics, _ = start_http_server(port, host, self._registry)
            except OSError as error:
                option, do = "--metrics-port", "serve metrics"
                raise running.cannot_listen(
                    join_host_port(host, port), error, option, do
                ) from error
            running.say(f"metrics on http://{join_host_port(host, self.metrics_port or 0)}/metrics")
        logged = logging.getLogger("edgespec").isEnabledFor(logging.INFO)
        meter = verifier_counts.StreamMeter(verifier_counts.log_stream if logged else None)
        self.watch = (
            verifier_counts.VerifierTelemetry(meter)
            if logged or self._metrics is not None
            else None
        )

    @property
    def metrics_port(self) -> int | None:
        return None if self._metrics is None else int(self._metrics.server_port)

    def start(self, verifier: Verifier) -> None:
        """Begin to serve the metrics of ``verifier``. Call this on its event loop."""
        if self._metrics is None or (watch := self.watch) is None:
            return
        watch.lag.start(asyncio.get_running_loop())

        def sample() -> verifier_counts.EngineSample:
            return verifier_counts.EngineSample(
                watch, verifier.engine, __version__, verifier.cache_share
            )

        table = Table(
            verifier_counts.PREFIX,
            verifier_counts.METRICS,
            sample,
            model_name=verifier.info.model.name,
        )
        self._registry.register(make_registry(table))

    def close(self) -> None:
        """Stop the server and release its port."""
        if self.watch is not None:
            self.watch.lag.stop()
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()


# --- a verifier in a process of its own ----------------------------------------------------------

READY_WITHIN_S = 180.0
"""Longest start of a child verifier. A slow or busy machine needs a while to load torch and a real
model."""
PLAIN_STREAMING = "--set=server_drafts=false"
"""Option of a verifier with which plain streaming is measured: a pass without a device's draft
commits one token."""

_STOPS_WITHIN_S = 5.0
_MESSAGES_BYTES = 4000
_READY = re.compile(r"ready on (\S+):(\d+): (.*)")


@contextlib.asynccontextmanager
async def verifier_process(options: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Run ``edgespec verifier`` on a free port, and yield its address and its description.

    The child ends with the block, whatever ends that, and with this process, even if it is killed:
    the child reads a pipe that only this process holds open. Raises ``SetupError`` with the child's
    messages if it does not start."""
    check_runs_verifiers()
    command = [sys.executable, "-m", "edgespec", "verifier", WITH_PARENT, "--port", "0", *options]
    with tempfile.TemporaryFile() as messages:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=messages,
            # A Ctrl-C in the terminal must reach the child through this process only.
            **operating_system.own_session(),
        )
        try:
            assert process.stdout is not None
            try:
                async with asyncio.timeout(READY_WITHIN_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                line = b""
            found = _READY.search(line.decode(errors="replace"))
            if found is None:
                messages.seek(0)
                printed = messages.read(_MESSAGES_BYTES).decode(errors="replace").strip()
                raise SetupError(f"the verifier did not start\n{printed or 'it printed nothing'}")
            yield f"{found[1]}:{found[2]}", found[3]
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOPS_WITHIN_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
