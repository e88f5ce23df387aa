"""``edgespec verifier``: load, listen, reload, drain, stop; and a verifier as a child process.

A request to stop begins a *drain*: health says NOT_SERVING, new streams are refused, and running
ones may end. A verifier that another process started (``--with-parent``) and one whose terminal was
closed do not drain: nobody is there to wait. What comes of a reload is logged as a warning, so that
it shows at the usual log level.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edgespec import __version__
from edgespec.cli import running
from edgespec.cli.main import FAILED
from edgespec.cli.options import Flag, from_config
from edgespec.config import DEFAULT_ADDRESS, ConfigError, VerifierConfig
from edgespec.config.common import SetupError, join_host_port, local_host_of, needs
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.models.folders import BUNDLED
from edgespec.models.toy import TOY
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
# The target's thread takes its next pass while the event loop still sends the last one's commits:
# it waits for the interpreter for so long, and at Python's own 5 ms a pass of 25 ms began late.
_SWITCH_S = 5e-4


_SERVICE = "Whom it serves"
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
"""Ends the verifier with the process that holds the other end of its standard input."""

WithParent = Annotated[
    bool, typer.Option(WITH_PARENT, hidden=True, help="Stop when standard input ends")
]


@from_config(VerifierConfig, *_FLAGS)
def verifier(settings: VerifierConfig, with_parent: WithParent = False) -> None:
    """Serve a target model to devices, until Ctrl-C or SIGTERM.

    Prints one line when it is ready. To stop, it takes no new streams, lets the running ones go on
    for drain_s seconds and tells the rest to reconnect: their texts go on later. A second Ctrl-C
    ends at once. SIGHUP reads keys and certificates again. Without TLS it listens on this machine
    alone.

    [dim]edgespec verifier --model Qwen/Qwen3-8B[/]

    [dim]edgespec verifier --host 0.0.0.0 --tls-cert server.pem --tls-key server.key
    --keys keys.yaml[/]

    [dim]edgespec verifier --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B[/]

    [dim]edgespec verifier --engine vllm --model Qwen/Qwen3-32B -- --tensor-parallel-size 4[/]
    """
    with running.trace_to(settings.trace, settings.trace_tokens) as tracer:
        failure = asyncio.run(serve(settings, tracer, with_parent))
    if failure is not None:
        running.say(f"error: the verifier failed: {failure}")
        logging.shutdown()
        os._exit(FAILED)  # no thread is waited for that may hang in the target


async def serve(config: VerifierConfig, tracer: Tracer, with_parent: bool) -> str | None:
    """Until somebody asks for the end, or the verifier fails: then why. Raises ``ConfigError`` for
    keys and certificates that cannot be used, ``SetupError``, ``OSError``."""
    if not sys.stderr.isatty():  # a log file wants no progress bars
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end, reload = running.Stopping(in_order=False), asyncio.Event()
    running.on_stopping_signals(end.ask, (signal.SIGINT, signal.SIGTERM))
    _on_hangup(end, reload)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, end)
    access = ServerAccess(config)
    for warning in access.warnings:
        _LOG.warning("%s", warning)
    with running.listen(config.host, config.port):
        pass  # a port that cannot be had is reported before a model is loaded
    with contextlib.closing(Watching(config)) as watching:
        running.say(f"loading {config.model} ...")
        target = await asyncio.to_thread(load_target, config)
        verifier, server = build_verifier(
            config,
            target=target,
            # Held by the verifier alone, which gives it back when it fails.
            drafter=await asyncio.to_thread(load_server_drafter, config, target),
            tracer=tracer,
            access=access,
            watch=watching.watch,
        )
        if config.model != TOY:  # whose few words are no work
            await asyncio.to_thread(verifier.warm_up)
        await server.start()
        _collect_less_often()
        sys.setswitchinterval(_SWITCH_S)
        watching.start(verifier)
        end.in_order = True
        typer.echo(line := ready_line(config, server.port, target, verifier.info))
        running.say(f"  try: {next_command(config, server.port)}")
        manager = ServiceManager()
        manager.ready(line)
        alive = asyncio.create_task(manager.keep_alive())
        reloading = asyncio.create_task(_reload_whenever(reload, access, verifier, manager, line))
        await running.first_of(end.asked.wait(), verifier.broken.wait())
        manager.stopping(f"stopping: {verifier.why_broken or 'asked to'}")
        if not verifier.broken.is_set():
            nobody_waits = with_parent or end.hurried
            await _drain(verifier, server, 0.0 if nobody_waits else config.drain_s)
        reloading.cancel()
        if not verifier.broken.is_set():
            await verifier.stop()
        await server.stop(_STREAMS_END_WITHIN_S)
        alive.cancel()
    return verifier.why_broken


def _collect_less_often() -> None:
    """What is loaded by now stays to the end, and what streams leave behind is mostly freed without
    the garbage collector, which at Python's thresholds took 7 % of a busy event loop
    (``benchmarks/daemon_load.py``). It still looks, every 20,000 new objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _drain(verifier: Verifier, server: GrpcServer, drain_s: float) -> None:
    """Take no new streams, and wait for those that run as long as they may."""
    count = server.stream_count
    if not (count and drain_s):
        running.say("stopping; the devices are told")
        await server.drain()
        return
    streams = f"{count} stream" + ("s" if count > 1 else "")
    running.say(
        f"stopping: {streams} may go on for {drain_s:g} s; a second request ends them at once"
    )
    await server.drain()
    try:
        async with asyncio.timeout(drain_s):
            await running.first_of(server.drained(), verifier.broken.wait())
    except TimeoutError:
        running.say(f"stopping: {server.stream_count} of them are told to resume elsewhere")


async def _reload_whenever(
    asked: asyncio.Event,
    access: ServerAccess,
    verifier: Verifier,
    manager: ServiceManager,
    status: str,
) -> None:
    """Until cancelled. What is asked while a reload runs is done once more behind it; one that
    fails is not the last."""
    while True:
        await asked.wait()
        asked.clear()
        manager.reloading()
        try:
            # The new keys hold from here on, so no stream that comes now is missed below.
            done = await asyncio.to_thread(access.reload)
            ended = verifier.revoke(done.keys.revoked) if done.keys.revoked else 0
        except ConfigError as error:
            _LOG.error("reload: nothing has changed, because of %s", error)
        except Exception as error:
            what = "reload: it failed, and streams of revoked keys may go on"
            log_failure(_LOG, what, error=error, may_quote_client=True)
        else:
            _LOG.warning("reload: %s%s", done, f"; {ended} streams were ended" if ended else "")
            for warning in done.warnings:
                _LOG.warning("%s", warning)
        manager.ready(status)


def _on_hangup(end: running.Stopping, reload: asyncio.Event) -> None:
    """SIGHUP has two meanings: an operator's "read your files again" and, for a process that was
    started on a terminal, the end of that terminal. ``nohup`` wants to outlive it."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    had_terminal = _has_terminal() and not outlives

    def heed() -> None:
        if had_terminal and not _has_terminal():
            end.ask(signal.SIGHUP)
        else:
            reload.set()

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, heed)


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _read_stdin(end: running.Stopping) -> None:
    """What comes means nothing; the end of it is the end of the process that started this one,
    even where that was killed and could not say so."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        end.ask(signal.SIGHUP)


def next_command(config: VerifierConfig, port: int) -> str:
    """What to type on a device, in another terminal."""
    where = join_host_port(local_host_of(config.host), port)
    options = "" if where == DEFAULT_ADDRESS else f" --verifier {where}"
    if config.tls.used:
        options += " --ca ca.pem"
    if config.model != BUNDLED:  # guesses from the text itself need no draft model
        options += f" --draft {TOY if config.model == TOY else 'lookup'}"
    return f'edgespec generate "def fibonacci(n):"{options}'


def ready_line(config: VerifierConfig, port: int, target: TargetModel, info: VerifierInfo) -> str:
    context, most = info.model.context_length, target.info.context_length
    shorter = f" of {most}: the cache holds no more (limits)" if context < most else ""
    own = config.draft or ("its speculator" if target.pass_shape.own_drafts else "")
    draft = f", drafts itself with {own}" if own else ""
    return (
        f"edgespec verifier ready on {join_host_port(config.host, port)}: {info.model.name},"
        f" {target.mode}{draft}, context {context}{shorter}"
    )


# --- what a service manager is told, and what an operator watches --------------------------------


class ServiceManager:
    """The manager that started this process, if the ``environment`` names one: ready, reloading,
    stopping, alive, as systemd's ``sd_notify`` says it, in datagrams of ``NAME=value`` lines. A
    manager that cannot be told is no reason to end: the error is logged once."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # A leading @ stands for the zero byte of an abstract address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._failed = self._stops = False
        microseconds = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        self.watchdog_s = int(microseconds) / 1e6 if ours and microseconds.isdecimal() else 0.0
        """Longest time between two signs of life that the manager accepts; 0: it asks for none."""

    def ready(self, status: str) -> None:
        """The process serves from now on, or serves again after ``reloading``; not after
        ``stopping``: files are read anew during a drain, too."""
        if not self._stops:
            self._send("READY=1", f"STATUS={one_line(status)}")

    def reloading(self) -> None:
        """The process reads its configuration anew; ``ready`` follows."""
        if not self._stops:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The process has begun to end."""
        self._stops = True
        self._send("STOPPING=1", f"STATUS={one_line(status)}")

    async def keep_alive(self) -> None:
        """Say twice in ``watchdog_s`` that the event loop turns, until cancelled; returns at once
        where nobody wants to know."""
        while self._address and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
                end.setblocking(False)  # a manager that does not read must not hold this up
                end.connect(self._address)
                end.send("\n".join(lines).encode())
        except OSError as error:
            if not self._failed:
                _LOG.warning("cannot tell the service manager at %r: %s", self._address, error)
            self._failed = True


class Watching:
    """``watch`` is for ``build_verifier``; None when nothing is to be counted. Takes the port of
    the metrics at once, before a model is loaded. Raises ``SetupError``.

    The client library's server has a thread of its own and reads plain counts, so a fetch neither
    waits for the event loop nor holds it up, and works when the loop is stuck."""

    def __init__(self, config: VerifierConfig) -> None:
        self._metrics: Any = None
        if (port := config.metrics_port) is not None:
            with needs("prometheus-client", "edgespec[server]"):
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
        """The verifier serves from now on; call on its event loop."""
        if self._metrics is None or (watch := self.watch) is None:
            return
        watch.lag.start(asyncio.get_running_loop())
        sample = partial(verifier_counts.EngineSample, watch, verifier.engine, __version__)
        table = Table(
            verifier_counts.PREFIX,
            verifier_counts.METRICS,
            sample,
            model_name=verifier.info.model.name,
        )
        self._registry.register(make_registry(table))

    def close(self) -> None:
        """Let go of the port."""
        if self.watch is not None:
            self.watch.lag.stop()
        if self._metrics is not None:
            self._metrics.shutdown()
            self._metrics.server_close()


# --- a verifier in a process of its own ----------------------------------------------------------

# Loading torch and a model on a slow machine.
READY_WITHIN_S = 60.0
PLAIN_STREAMING = "--set=server_drafts=false"
"""For what compares with plain streaming, or measures it: a pass without a draft commits one
token."""

_STOPS_WITHIN_S = 5.0
_LAST_WORDS_BYTES = 4000
_READY = re.compile(r"ready on (\S+):(\d+): (.*)")


@contextlib.asynccontextmanager
async def verifier_process(options: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Start ``edgespec verifier`` on a free port; yields its address and what it says it serves.
    The process is ended with the block, whatever ends that, and with this process, even if that is
    killed: it reads a pipe that only this process holds open. Raises ``SetupError`` with the
    child's own words when it does not come up."""
    command = [sys.executable, "-m", "edgespec", "verifier", WITH_PARENT, "--port", "0", *options]
    with tempfile.TemporaryFile() as words:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            # A Ctrl-C in the terminal is ours to pass on.
            start_new_session=True,
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
                words.seek(0)
                said = words.read(_LAST_WORDS_BYTES).decode(errors="replace").strip()
                raise SetupError(f"the verifier did not start\n{said or 'it said nothing'}")
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
