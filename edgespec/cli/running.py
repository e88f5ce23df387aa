"""What every command needs to run well: errors as one clear line, signals, logging, traces."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import typer

from edgespec.cli.main import FAILED, USAGE
from edgespec.config import ConfigError
from edgespec.config.common import HASHED, PLAIN, SetupError, host_names, join_host_port
from edgespec.config.files import remove_temporary_folders
from edgespec.device.agent import GenerationError
from edgespec.telemetry.logs import JSON, TEXT, JsonFormatter, TextFormatter, log_failure
from edgespec.telemetry.trace import HiddenTokens, NoTrace, TraceFile, Tracer

# A closed terminal (SIGHUP) must not leave a child process behind.
_STOPPING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_T = TypeVar("_T")


class Interrupted(BaseException):
    """A signal ended the work; ``number`` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def say(text: str) -> None:
    """Print one line for the user on stderr, beside the output proper. Where it cannot be written,
    on a full disk or behind a reader that is gone, it is lost: what it tells of, the drain of a
    verifier, say, goes on."""
    for handler in logging.root.handlers:
        if isinstance(handler.formatter, JsonFormatter):  # then all of stderr is for machines
            record = logging.LogRecord(__name__, logging.INFO, "", 0, text, None, None)
            text = handler.formatter.format(record)
            break
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def reported() -> Iterator[None]:
    """Errors that users can cause become one clear message and an exit code in this block. At log
    level debug the traceback is shown as well."""
    try:
        yield
    except Interrupted as stopped:
        raise typer.Exit(128 + stopped.number) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    except BrokenPipeError:
        raise  # The reader of our output has gone (`| head`): not an error to tell anybody about.
    except ConfigError as error:
        fail(error, USAGE)
    except (GenerationError, SetupError, ValueError, OSError) as error:
        fail(error)


@contextmanager
def listen(host: str, port: int) -> Iterator[tuple[socket.socket, ...]]:
    """Yield sockets that listen there; port 0 is a free one. What listens at 127.0.0.1, or at
    localhost, also listens at ::1 where there is IPv6, since ``localhost`` may mean either. Raises
    ``SetupError``."""
    with ExitStack() as opened:
        own = host_names(host)
        first = opened.enter_context(_listening(own[0], port))
        found = [first]
        for other in own[1:]:
            try:
                found.append(opened.enter_context(_listening(other, first.getsockname()[1])))
            except SetupError:
                if port:
                    raise
        yield tuple(found)


def _listening(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()
    except OSError as error:
        found.close()
        raise cannot_listen(join_host_port(host, port), error, "--port") from error
    return found


def cannot_listen(where: str, error: OSError, option: str, do: str = "listen") -> SetupError:
    """Why a port cannot be had, with the ``option`` that takes another."""
    hint = f"; choose another with {option}" if error.errno == errno.EADDRINUSE else ""
    return SetupError(f"cannot {do} on {where}: {error.strerror or error}{hint}")


def fail(error: Exception | str, code: int = FAILED) -> NoReturn:
    """Say what is wrong and leave."""
    if isinstance(error, Exception):
        # The words are those of the person who reads this.
        log = logging.getLogger(__name__)
        what, level = "the error in full", logging.DEBUG
        log_failure(log, what, error=error, may_quote_client=False, level=level)
        if isinstance(error, OSError) and error.strerror:  # without its number
            why = error.strerror
            error = f"{error.filename}: {why}" if error.filename else why
    say(f"error: {error}")
    raise typer.Exit(code) from None


def run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run to the end. The first stopping signal cancels ``work``, which tidies up; the second
    ends the process at once. Raises ``Interrupted``."""
    return asyncio.run(_supervised(work))


async def _supervised(work: Coroutine[Any, Any, _T]) -> _T:
    task = asyncio.ensure_future(work)
    stopping = Stopping(task.cancel)
    before = {int(number): signal.getsignal(number) for number in _STOPPING_SIGNALS}
    numbers = on_stopping_signals(stopping.ask)
    try:
        return await task
    except asyncio.CancelledError:
        stopping.check()
        raise
    finally:
        for number in numbers:
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, before[number])


def on_stopping_signals(
    stop: Callable[[int], None], numbers: Sequence[int] = _STOPPING_SIGNALS
) -> list[int]:
    """From now on the running loop calls ``stop`` with the number of each signal that asks this
    process to end. Signals that are ignored, as under ``nohup``, stay so. Returns the others."""
    heeded = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    loop = asyncio.get_running_loop()
    for number in heeded:
        loop.add_signal_handler(number, stop, number)
    return list(heeded)


async def first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Wait until one of these is over, and forget the others."""
    tasks = [asyncio.create_task(one) for one in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Stopping:
    """The first request to stop is obeyed in order, by ``then`` and by who waits or looks for it,
    the second at once; so is the first while not ``in_order``, because nobody has to be told
    yet."""

    def __init__(self, then: Callable[[], object] = lambda: None, *, in_order: bool = True) -> None:
        self.asked = asyncio.Event()
        self.in_order = in_order
        self._then, self._number = then, 0

    @property
    def hurried(self) -> bool:
        """Nobody waits: the terminal has gone."""
        return self._number == signal.SIGHUP

    def ask(self, number: int, frame: FrameType | None = None) -> None:
        """A signal of this ``number`` came."""
        if self.asked.is_set() or not self.in_order:
            remove_temporary_folders()
            os._exit(128 + number)
        self._number = number
        self.asked.set()
        self._then()

    def check(self) -> None:
        """Raises ``Interrupted`` once a signal has come. Long work without an event loop calls this
        where a stop loses nothing."""
        if self._number:
            raise Interrupted(self._number) from None


@contextmanager
def stoppable() -> Iterator[None]:
    """What loads or fetches for long holds up the event loop, which then hears no signal. In this
    block, in which nothing is awaited, a stopping signal ends the process at once, as it ends any
    other program; a half-written folder is taken away by the next start. The first process of a
    container gets no signal that it does not handle."""
    first = os.getpid() == 1
    with answered_by((lambda number, _: os._exit(128 + number)) if first else signal.SIG_DFL):
        yield


@contextmanager
def answered_by(handler: Any, numbers: Sequence[int] = _STOPPING_SIGNALS) -> Iterator[None]:
    """``handler`` answers these signals in this block, but for those that are ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = {number: one for number, one in before.items() if one not in (signal.SIG_IGN, None)}
    for number in heeded:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, one in heeded.items():
            signal.signal(number, one)


def set_up_logging(level: str, log_format: str = TEXT) -> None:
    """Log to stderr from this level on, as ``text`` or ``json``."""
    if level != "debug":  # gRPC's own log repeats, in C++ terms, what is reported anyway
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(log_format != TEXT)


@contextmanager
def trace_to(path: str, tokens: str = HASHED) -> Iterator[Tracer]:
    """A tracer that writes to ``path``; empty: none. ``tokens`` says how it shows them. Raises
    ``OSError``."""
    if not path:
        yield NoTrace()
        return
    hidden = None if tokens == PLAIN else HiddenTokens()
    with TraceFile(Path(path), hidden) as tracer:
        yield tracer
