"""Services that every command uses: errors as one clear line, signals, sockets, logs and traces."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, TypeVar

import typer

from edgespec.cli.main import FAILED, USAGE
from edgespec.config import ConfigError
from edgespec.config.common import HASHED, PLAIN, SetupError, host_names, join_host_port
from edgespec.config.files import remove_temporary_folders
from edgespec.core.protocol.checks import make_printable
from edgespec.device.agent import GenerationError
from edgespec.models.conversion_reports import ConversionReport, watch_conversions
from edgespec.operating_system import HANGUP, STOPPING_SIGNALS, claim_port
from edgespec.telemetry.logs import JSON, TEXT, JsonFormatter, TextFormatter, log_failure
from edgespec.telemetry.trace import HiddenTokens, TraceFile, Tracer

_SHOWN_EVERY_S: Final = 0.1
_T = TypeVar("_T")


class Interrupted(BaseException):
    """A signal ended the work. ``number`` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    """Print one line for the user on stderr, so that stdout holds the output alone.

    A line that cannot be written, because the disk is full or the reader has gone, is lost without
    an error: the work that it reports, such as a drain, must go on."""
    if (formatter := _json_formatter()) is not None:  # all of stderr has to be JSON
        text = formatter.format(logging.LogRecord(__name__, logging.INFO, "", 0, text, None, None))
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _json_formatter() -> JsonFormatter | None:
    """Return the formatter of the log if the log is JSON, else None."""
    for handler in logging.root.handlers:
        if isinstance(handler.formatter, JsonFormatter):
            return handler.formatter
    return None


class ConversionDisplay:
    """Shows on stderr how far the conversion of a GGUF file is, and at its end what became of the
    file. The progress is shown on a terminal only."""

    def __init__(self) -> None:
        self._shown_s = -math.inf
        """``elapsed_s`` of the report that was shown last."""

    def show(self, report: ConversionReport) -> None:
        """Show one report."""
        has_line = sys.stderr.isatty() and _json_formatter() is None
        if report.folder is not None:
            if has_line:
                self._write("\r\x1b[K")
            say(describe_conversion(report))
        elif has_line and report.elapsed_s - self._shown_s >= _SHOWN_EVERY_S:
            self._shown_s = report.elapsed_s
            self._write(
                f"\rconverting {make_printable(report.file)}: {report.done_tensors} of"
                f" {report.tensors} tensors, {report.done_bytes >> 20:,} of"
                f" {report.total_bytes >> 20:,} MiB, {report.elapsed_s:.0f} s\x1b[K"
            )

    def _write(self, text: str) -> None:
        with suppress(OSError):
            print(text, end="", file=sys.stderr, flush=True)


def describe_conversion(report: ConversionReport) -> str:
    """Return the line about a finished conversion: what the file's types became, and the loss."""
    loss = "nothing is lost"
    if report.relative_error:
        loss = f"rounding changed the weights by {report.relative_error:.2%} (root mean square)"
    return (
        f"converted {make_printable(report.file)} ({report.types}) to {report.written_type}:"
        f" {report.total_bytes >> 20:,} MiB in {report.elapsed_s:.1f} s, {loss}; kept in"
        f" {report.folder}"
    )


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Turn errors that users can cause in this block into one clear message and an exit code. At
    log level debug the traceback is logged as well. Conversions of models are shown on stderr."""
    watch_conversions(ConversionDisplay().show)
    try:
        yield
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        raise  # The reader of our output has gone (`| head`), which is no error to report.
    except ConfigError as error:
        fail(error, USAGE)
    except (GenerationError, SetupError, ValueError, OSError) as error:
        fail(error)


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, ...]]:
    """Yield sockets that listen at ``host`` and ``port``; port 0 takes a free one.

    A server for 127.0.0.1 or localhost also listens at ::1 where there is IPv6, because clients
    resolve ``localhost`` to either address. Raises ``SetupError``."""
    with ExitStack() as opened:
        addresses = host_names(host)
        first = opened.enter_context(_open_listener(addresses[0], port))
        listeners = [first]
        for other in addresses[1:]:
            try:
                listener = _open_listener(other, first.getsockname()[1])
                listeners.append(opened.enter_context(listener))
            except SetupError:
                if port:
                    raise
        yield tuple(listeners)


def _open_listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        claim_port(listener)
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise cannot_listen(join_host_port(host, port), error, "--port") from error
    return listener


def cannot_listen(address: str, error: OSError, option: str, do: str = "listen") -> SetupError:
    """Return an error that says why a port cannot be used, and which ``option`` chooses another.
    ``do`` is what the port was for."""
    # Windows answers EACCES for a port that another program has claimed for itself.
    is_taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
    hint = f"; choose another with {option}" if is_taken else ""
    return SetupError(f"cannot {do} on {address}: {error.strerror or error}{hint}")


def fail(error: Exception | str, code: int = FAILED) -> NoReturn:
    """Print an error message and exit with ``code``."""
    if isinstance(error, Exception):
        # The error may quote a prompt, but only the person who typed it reads this log.
        log = logging.getLogger(__name__)
        what, level = "the error in full", logging.DEBUG
        log_failure(log, what, error=error, may_quote_client=False, level=level)
        if isinstance(error, OSError) and error.strerror:  # without its number
            why = error.strerror
            if error.errno == errno.ENOSPC:
                why += "; free some, or write to another disk"
            error = f"{error.filename}: {why}" if error.filename else why
    say(f"error: {error}")
    raise typer.Exit(code) from None


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run ``work`` to its end and return its result. The first stopping signal cancels it, so that
    it can clean up; the second ends the process at once. Raises ``Interrupted``."""
    return asyncio.run(_run_supervised(work))


async def _run_supervised(work: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(work)
    stopping = StopRequest(task.cancel)
    before = {int(number): signal.getsignal(number) for number in STOPPING_SIGNALS}
    numbers = on_stopping_signals(stopping.request)
    try:
        return await task
    except asyncio.CancelledError:
        stopping.raise_if_requested()
        raise
    finally:
        for number in numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, before[number])


def on_stopping_signals(
    stop: Callable[[int], None], numbers: Sequence[int] = STOPPING_SIGNALS
) -> list[int]:
    """Make the running event loop call ``stop`` with the number of each stopping signal.

    Signals that are ignored, as under ``nohup``, stay ignored. Returns the numbers of the others,
    whose handlers the caller has to remove from the loop."""
    loop, handled = asyncio.get_running_loop(), list[int]()
    for number in numbers:
        if signal.getsignal(number) is signal.SIG_IGN:
            continue
        try:
            loop.add_signal_handler(number, stop, number)
        except NotImplementedError:  # Event loops of Windows have no signal handlers.
            signal.signal(number, _make_forwarder(loop, stop, signal.getsignal(number)))
        else:
            handled.append(number)
    return handled


def _make_forwarder(
    loop: asyncio.AbstractEventLoop, stop: Callable[[int], None], before: Any
) -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that makes ``loop`` call ``stop``. Once the loop has ended the
    handler ``before`` is back, and gets the signal."""

    def forward(number: int, _: FrameType | None) -> None:
        if loop.is_closed():
            signal.signal(number, before)
            signal.raise_signal(number)
        else:
            loop.call_soon_threadsafe(stop, number)

    return forward


async def wait_for_first(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of ``waits`` has ended, and cancel the others."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class StopRequest:
    """Whether a signal has asked this process to end.

    The first signal sets ``requested`` and calls ``on_request``, so that the process can shut down
    gracefully; the second signal ends it at once. While ``is_graceful`` is false, as in a process
    that serves no client yet, the first signal ends it at once too."""

    def __init__(
        self, on_request: Callable[[], object] = lambda: None, *, is_graceful: bool = True
    ) -> None:
        self.requested = asyncio.Event()
        self.is_graceful = is_graceful
        self._on_request, self._number = on_request, 0

    @property
    def terminal_closed(self) -> bool:
        """Whether the terminal has closed, so that no user waits for this process."""
        return HANGUP is not None and self._number == HANGUP

    def request(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal of this ``number``."""
        if self.requested.is_set() or not self.is_graceful:
            remove_temporary_folders()
            os._exit(128 + number)
        self._number = number
        self.requested.set()
        self._on_request()

    def raise_if_requested(self) -> None:
        """Raise ``Interrupted`` if a signal has come. Long work without an event loop calls this at
        points where it can stop without a loss."""
        if self._number:
            raise Interrupted(self._number) from None


@contextmanager
def stopping_at_once() -> Iterator[None]:
    """Let a stopping signal end the process at once in this block, which loads something.

    Loading and downloading block the event loop, so its signal handlers would not run. A folder
    that is half written is removed by the next start. The first process of a container needs a
    handler of its own, because the kernel gives it no default one."""
    is_first = os.getpid() == 1
    with signals_handled_by(
        (lambda number, _: os._exit(128 + number)) if is_first else signal.SIG_DFL
    ):
        yield


async def load_in_thread(load: Callable[[], _T]) -> _T:
    """Return what ``load`` returns, which is called in a thread. The event loop goes on, so
    connections are made meanwhile. A stopping signal ends the process at once."""
    with stopping_at_once():
        return await asyncio.to_thread(load)


@contextmanager
def signals_handled_by(handler: Any, numbers: Sequence[int] = STOPPING_SIGNALS) -> Iterator[None]:
    """Install ``handler`` in this block for each of ``numbers`` whose signal is not ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    handled = {number: one for number, one in before.items() if one not in (signal.SIG_IGN, None)}
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, one in handled.items():
            signal.signal(number, one)


def set_up_logging(level: str, log_format: str = TEXT) -> None:
    """Log to stderr messages of this level and above, as ``text`` or ``json``."""
    if level != "debug":  # gRPC's own log repeats errors that are reported anyway, in C++ terms
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(log_format != TEXT)


@contextmanager
def trace_to(path: str, tokens: str = HASHED) -> Iterator[Tracer | None]:
    """Yield a tracer that writes to ``path``, or None if ``path`` is empty.

    ``tokens`` is the form of tokens, ``hashed`` or ``plain``. Raises ``OSError``."""
    if not path:
        yield None
        return
    hidden = None if tokens == PLAIN else HiddenTokens()
    with TraceFile(Path(path), hidden) as tracer:
        yield tracer
