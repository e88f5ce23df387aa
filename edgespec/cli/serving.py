"""The verifier's life in its process: load, listen, reload, drain, stop.

A request to stop begins a *drain*: health says NOT_SERVING, new streams are refused, and running
ones may end. What is left after ``drain_s`` hears that the verifier stops, and resumes elsewhere; a
second request ends everything at once. A verifier that somebody else started (``--with-parent``)
and one whose terminal was closed do not drain: nobody is there to wait.

SIGHUP reads keys and certificates anew (``edgespec/wire/access.py``); streams whose key is gone
end. What comes of it is logged as a warning, so that it shows at the usual log level.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from edgespec import __version__
from edgespec.cli.running import on_stopping_signals, say
from edgespec.config import DEFAULT_ADDRESS, ConfigError, VerifierConfig
from edgespec.config.setup_error import SetupError, needs
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.models.folders import BUNDLED
from edgespec.models.toy import TOY
from edgespec.telemetry.trace import Tracer
from edgespec.telemetry.verifier_counts import StreamMeter, Watch, log_stream
from edgespec.verifier.build import build_verifier, load_target, target_mode
from edgespec.verifier.daemon import Verifier
from edgespec.wire.access import ServerAccess

if TYPE_CHECKING:
    from edgespec.telemetry.metrics_server import MetricsServer
    from edgespec.wire.grpc_server import GrpcServer


# What a service manager hears of a daemon: ready, reloading, stopping, alive.
#
# The protocol is systemd's ``sd_notify``: datagrams of ``NAME=value`` lines to the socket that
# ``$NOTIFY_SOCKET`` names, a path or, behind an ``@``, an abstract name. Without the variable every
# call does nothing. A manager that cannot be told is no reason to end: the error is logged once.

_LOG = logging.getLogger(__name__)


class ServiceManager:
    """The manager that started this process, if the ``environment`` names one."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._socket = environment.get("NOTIFY_SOCKET", "")
        self._failed = self._stops = False
        self.watchdog_s = _watchdog_s(environment)
        """Longest time between two signs of life that the manager accepts; 0: it asks for none."""

    def ready(self, status: str) -> None:
        """The process serves from now on, or serves again after ``reloading``; not after
        ``stopping``: files are read anew during a drain, too."""
        if not self._stops:
            self._send("READY=1", f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """The process reads its configuration anew; ``ready`` follows."""
        if not self._stops:
            self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The process has begun to end."""
        self._stops = True
        self._send("STOPPING=1", f"STATUS={_one_line(status)}")

    async def keep_alive(self) -> None:
        """Say twice in ``watchdog_s`` that the event loop turns, until cancelled; returns at once
        where nobody wants to know."""
        while self._socket and self.watchdog_s:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 2)

    def _send(self, *lines: str) -> None:
        if not self._socket:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as end:
                end.setblocking(False)  # a manager that does not read must not hold this up
                end.connect(_unix_address(self._socket))
                end.send("\n".join(lines).encode())
        except OSError as error:
            if not self._failed:
                _LOG.warning("cannot tell the service manager at %s: %s", self._socket, error)
            self._failed = True


def _unix_address(name: str) -> str:
    """A leading ``@`` stands for the zero byte of an abstract address."""
    return "\0" + name[1:] if name.startswith("@") else name


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """0 unless ``$WATCHDOG_USEC`` is a number of microseconds meant for this process."""
    microseconds = environment.get("WATCHDOG_USEC", "")
    meant_for = environment.get("WATCHDOG_PID", str(os.getpid()))
    if not microseconds.isdecimal() or meant_for != str(os.getpid()):
        return 0.0
    return int(microseconds) / 1e6


# How the operator of a verifier watches it: metrics over HTTP, and a line of log for each stream.
#
# What nobody asked for is not built, and a verifier that nobody watches counts nothing.


class Watching:
    """``watch`` is for ``build_verifier``; None when nothing is to be counted."""

    def __init__(self, metrics: MetricsServer | None) -> None:
        logged = logging.getLogger("edgespec").isEnabledFor(logging.INFO)
        meter = StreamMeter(log_stream if logged else None)
        self.watch = Watch(meter) if logged or metrics is not None else None
        self._metrics = metrics

    @property
    def metrics_port(self) -> int | None:
        """Where the metrics are; None without."""
        return None if self._metrics is None else self._metrics.port

    def start(self, verifier: Verifier) -> None:
        """The verifier serves from now on; call on its event loop."""
        if self._metrics is None or self.watch is None:
            return
        self.watch.lag.start(asyncio.get_running_loop())
        model = verifier.info.model.name
        self._metrics.start(self.watch, verifier.engine, model, __version__)

    def close(self) -> None:
        """Let go of the port."""
        if self.watch is not None:
            self.watch.lag.stop()
        if self._metrics is not None:
            self._metrics.close()


@contextmanager
def watching(config: VerifierConfig) -> Iterator[Watching]:
    """Takes the port of the metrics at once, before a model is loaded. Raises ``SetupError``."""
    metrics = None if config.metrics_port is None else _metrics_server(config)
    found = Watching(metrics)
    try:
        yield found
    finally:
        found.close()


def _metrics_server(config: VerifierConfig) -> MetricsServer:
    assert config.metrics_port is not None
    with needs("prometheus-client", "edgespec[server]"):
        from edgespec.telemetry.metrics_server import MetricsServer
    host, port = config.metrics_host, config.metrics_port
    shown = f"[{host}]" if ":" in host else host
    try:
        server = MetricsServer(host, port)
    except OSError as error:
        why = error.strerror or str(error)
        hint = "; choose another with --metrics-port" if error.errno == errno.EADDRINUSE else ""
        raise SetupError(f"cannot serve metrics on {shown}:{port}: {why}{hint}") from error
    say(f"metrics on http://{shown}:{server.port}/metrics")
    return server


_STREAMS_END_WITHIN_S = 3.0

# The target's thread takes its next pass while the event loop still sends the last one's commits:
# it waits for the interpreter for so long, and at Python's own 5 ms a pass of 25 ms began late.
_SWITCH_S = 5e-4


async def serve(config: VerifierConfig, tracer: Tracer, with_parent: bool) -> str | None:
    """Until somebody asks for the end, or the verifier fails: then why. Raises ``ConfigError`` for
    keys and certificates that cannot be used, ``SetupError``, ``OSError``."""
    if not sys.stderr.isatty():  # a log file wants no progress bars
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    end, reload = Stopping(), asyncio.Event()
    on_stopping_signals(end.ask, (signal.SIGINT, signal.SIGTERM))
    _on_hangup(end, reload)
    if with_parent:
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _read_stdin, end)
    access = ServerAccess(config)
    for warning in access.warnings:
        _LOG.warning("%s", warning)
    check_free(config)
    with watching(config) as watch:
        return await _serve_until(end, reload, config, tracer, access, watch, with_parent)


async def _serve_until(
    end: Stopping,
    reload: asyncio.Event,
    config: VerifierConfig,
    tracer: Tracer,
    access: ServerAccess,
    watch: Watching,
    with_parent: bool,
) -> str | None:
    say(f"loading {config.model} ...")
    target = await asyncio.to_thread(load_target, config)
    serving, server = build_verifier(
        config, target=target, tracer=tracer, access=access, watch=watch.watch
    )
    _fail_with_ranks(target, serving)
    if config.model != TOY:  # whose few words are no work
        await asyncio.to_thread(serving.get_ready)
    await server.start()
    _collect_less_often()
    sys.setswitchinterval(_SWITCH_S)
    watch.start(serving)
    end.devices_know = True
    typer.echo(line := ready_line(config, server.port, target, serving.info))
    say(f"  try: {next_command(config, server.port)}")
    manager = ServiceManager()
    manager.ready(line)
    alive = asyncio.create_task(manager.keep_alive())
    reloading = asyncio.create_task(_reload_whenever(reload, access, serving, manager, line))
    await _first_of(end.asked.wait(), serving.broken.wait())
    manager.stopping(f"stopping: {serving.why_broken or 'asked to'}")
    if not serving.broken.is_set():
        nobody_waits = with_parent or end.number == signal.SIGHUP
        await _drain(serving, server, 0.0 if nobody_waits else config.drain_s)
    reloading.cancel()
    if not serving.broken.is_set():
        await serving.stop()
    await server.stop(_STREAMS_END_WITHIN_S)
    alive.cancel()
    return serving.why_broken


def _fail_with_ranks(target: TargetModel, serving: Verifier) -> None:
    """A target over several processes that loses one ends the verifier, also between passes."""
    loop = asyncio.get_running_loop()

    def lost(why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before
            loop.call_soon_threadsafe(serving.fail, why)

    when_lost = getattr(getattr(target, "inner", target), "when_lost", None)
    if when_lost is not None:
        when_lost(lost)


def _collect_less_often() -> None:
    """What is loaded by now stays to the end, and what streams leave behind is mostly freed without
    the garbage collector, which at Python's thresholds took 7 % of a busy event loop
    (``benchmarks/daemon_load.py``). It still looks, every 20,000 new objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class Stopping:
    """The first request to stop is obeyed in order, the second at once.

    So is the first one while the model is still being loaded: nobody has to be told yet.
    """

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.number = 0
        """The signal that asked."""
        self.devices_know = False

    def ask(self, number: int) -> None:
        if self.asked.is_set() or not self.devices_know:
            os._exit(128 + number)
        self.number = number
        self.asked.set()


async def _drain(serving: Verifier, server: GrpcServer, drain_s: float) -> None:
    """Take no new streams, and wait for those that run as long as they may."""
    count = server.stream_count
    if not (count and drain_s):
        say("stopping; the devices are told")
        await server.drain()
        return
    streams = f"{count} stream" + ("s" if count > 1 else "")
    say(f"stopping: {streams} may go on for {drain_s:g} s; a second request ends them at once")
    await server.drain()
    try:
        async with asyncio.timeout(drain_s):
            await _first_of(server.drained(), serving.broken.wait())
    except TimeoutError:
        say(f"stopping: {server.stream_count} of them are told to resume elsewhere")


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is over, and forget the others."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _reload_whenever(
    asked: asyncio.Event,
    access: ServerAccess,
    serving: Verifier,
    manager: ServiceManager,
    status: str,
) -> None:
    """Until cancelled. What is asked while a reload runs is done once more behind it."""
    while True:
        await asked.wait()
        asked.clear()
        manager.reloading()
        await _reload(access, serving)
        manager.ready(status)


async def _reload(access: ServerAccess, serving: Verifier) -> None:
    """Never raises: a reload that fails must not be the last one."""
    try:
        # The new keys hold from here on, so no stream that comes now is missed below.
        done = await asyncio.to_thread(access.reload)
    except ConfigError as error:
        _LOG.error("reload: nothing has changed, because of %s", error)
        return
    except Exception:
        _LOG.exception("reload: nothing has changed")
        return
    try:
        ended = serving.revoke(done.keys.revoked) if done.keys.revoked else 0
    except Exception:
        _LOG.exception("reload: %s; but streams of revoked keys may go on", done)
        return
    _LOG.warning("reload: %s%s", done, f"; {ended} streams were ended" if ended else "")
    for warning in done.warnings:
        _LOG.warning("%s", warning)


def _on_hangup(end: Stopping, reload: asyncio.Event) -> None:
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


def _read_stdin(end: Stopping) -> None:
    """What comes means nothing; the end of it is the end of the process that started this one,
    even where that was killed and could not say so."""
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        end.ask(signal.SIGHUP)


def check_free(config: VerifierConfig) -> None:
    """Raises ``SetupError`` when the address cannot be had: said before a model is loaded."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as error:
            why = error.strerror or str(error)
            hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
            raise SetupError(f"cannot listen on {config.address}: {why}{hint}") from error


def next_command(config: VerifierConfig, port: int) -> str:
    """What to type on a device, in another terminal."""
    host = config.address.rpartition(":")[0].strip("[]")
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    options = "" if where == DEFAULT_ADDRESS else f" --verifier {where}"
    if config.tls.used:
        options += " --ca ca.pem"
    if config.model != BUNDLED:  # guesses from the text itself need no draft model
        options += f" --draft {TOY if config.model == TOY else 'lookup'}"
    return f'edgespec generate "def fibonacci(n):"{options}'


def ready_line(config: VerifierConfig, port: int, target: TargetModel, info: VerifierInfo) -> str:
    host = config.address.rpartition(":")[0]
    context, most = info.model.context_length, target.info.context_length
    shorter = f" of {most}: the cache holds no more (limits)" if context < most else ""
    return (
        f"edgespec verifier ready on {host}:{port}: {info.model.name},"
        f" {target_mode(target)}, context {context}{shorter}"
    )
