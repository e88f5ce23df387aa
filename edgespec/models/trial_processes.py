"""Processes that are ready to compile grammars, and may be killed for what they are given.

Theory of operation. A grammar is tried by one process, which nobody else uses meanwhile; one that
is done is kept for the next grammar, so that nobody waits for a start of Python. Where one has not
answered after ``_SLOW_S``, another is made ready beside it; after ``_BEHIND_S`` it goes behind all
else that runs (``nice``) and is not used again. So a grammar that takes for ever keeps nobody
waiting before ``_MOST`` of them do. Calls come from any thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from edgespec.models import grammar_trial

DATA_BYTES: Final = 768 << 20
_SCRIPT: Final = Path(grammar_trial.__file__)
_SLOW_S: Final = 0.1
_BEHIND_S: Final = 1.0
_LOOKS_EVERY_S: Final = 0.1
_NICENESS: Final = 10
_READS_WITHIN_S: Final = 5.0
"""One that has answered before and does not read by then hangs."""
_MOST: Final = 4
"""Processes that try grammars at once."""
_KEPT: Final = 2
"""Processes that wait for grammars, at most."""
_MOST_TRIES: Final = 200
"""Grammars of one process, whatever it may have left behind."""
_MOST_ANSWER_BYTES: Final = 1 << 20
_STOPPING: Final = "no grammar is tried any more, for this side is stopping"


class TrialFailedError(Exception):
    """The process did not outlive the grammar, or was not done in time."""


class _GoneError(Exception):
    """The process had ended before it read what it was asked."""


class TrialProcesses:
    """``idle_s``: a process that had nothing to do for so long is ended; None: never.
    ``most_bytes``: data that one may have. Close it."""

    def __init__(self, idle_s: float | None = None, most_bytes: int = DATA_BYTES) -> None:
        self._idle_s, self._most_bytes = idle_s, most_bytes
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_MOST)
        self._ready: list[_Process] = []
        self._busy: set[_Process] = set()
        self._closed = False
        self._ending: threading.Timer | None = None

    def get_ready(self) -> None:
        """Start a process unless one waits already. Raises ``OSError``."""
        with self._lock:
            if self._closed:
                return
            if not self._ready:
                self._ready.append(_Process(self._most_bytes))
            self._end_later()

    def tried(self, asked: Mapping[str, Any], within_s: float) -> str:
        """What the process says of ``asked``. Raises ``TrialFailedError`` where it does not outlive
        it, and ``OSError`` where there is none."""
        until = time.monotonic() + within_s
        line = json.dumps(asked).encode() + b"\n"
        while not self._turns.acquire(timeout=_LOOKS_EVERY_S):
            if time.monotonic() >= until:
                raise OSError(f"{_MOST} others have been tried for {within_s:g} s")
            self._give_up_slowest()
        try:
            for _ in range(_KEPT):
                with contextlib.suppress(_GoneError):
                    return self._tried_once(line, until)
                # It had ended as it waited (killed, out of memory): that says nothing of ``asked``.
            return self._tried_once(line, until)
        except _GoneError as error:
            raise OSError(str(error)) from error
        finally:
            self._turns.release()

    def _tried_once(self, line: bytes, until: float) -> str:
        process = self._taken()
        ok = False
        try:
            answer = process.ask(line, until, self._replace)
            ok = True
            return answer
        except TrialFailedError:
            if self._closed:
                raise OSError(_STOPPING) from None
            if process.given_up:
                raise OSError(f"others wait, and it took more than {_BEHIND_S:g} s") from None
            raise
        finally:
            self._back(process, ok)

    @property
    def pids(self) -> frozenset[int]:
        """Of all processes that there are."""
        with self._lock:
            return frozenset(one.pid for one in (*self._ready, *self._busy))

    def close(self) -> None:
        """End all of them, also those that are busy; a second call does nothing."""
        with self._lock:
            self._closed = True
            ready, self._ready = self._ready, []
            for process in self._busy:
                process.kill()  # reaped by whoever asked it
            timer, self._ending = self._ending, None
        if timer is not None:
            timer.cancel()
        for process in ready:
            process.end()

    def _give_up_slowest(self) -> None:
        with self._lock:
            behind = [one for one in self._busy if one.behind_since is not None]
            if any(one.given_up for one in behind) or not behind:
                return
            slowest = min(behind, key=lambda one: one.behind_since or 0.0)
            slowest.given_up = True
            slowest.kill()

    # --- which process ----------------------------------------------------------------------

    def _taken(self) -> _Process:
        with self._lock:
            if self._closed:
                raise OSError(_STOPPING)
            if self._ending is not None:
                self._ending.cancel()
                self._ending = None
            process = self._ready.pop() if self._ready else _Process(self._most_bytes)
            self._busy.add(process)
            return process

    def _replace(self) -> None:
        """A process is busy for long, or gone: the next grammar is not to wait for a start."""
        with contextlib.suppress(OSError):  # that one tries again, and tells
            self.get_ready()

    def _back(self, process: _Process, ok: bool) -> None:
        with self._lock:
            self._busy.discard(process)
            keeps = ok and process.reusable and len(self._ready) < _KEPT and not self._closed
            if keeps:
                self._ready.append(process)
                self._end_later()
        if not keeps:
            process.end()
            self._replace()

    # --- those that nobody needs ------------------------------------------------------------

    def _end_later(self) -> None:
        if self._idle_s is None:
            return
        if self._ending is not None:
            self._ending.cancel()
        self._ending = threading.Timer(self._idle_s, self._end_idle)
        self._ending.daemon = True
        self._ending.start()

    def _end_idle(self) -> None:
        with self._lock:
            ready, self._ready = self._ready, []
        for process in ready:
            process.end()


class _Process:
    """One of them; starts at once and is ready soon. Raises ``OSError``."""

    def __init__(self, most_bytes: int) -> None:
        self.reusable, self.given_up = True, False
        self.behind_since: float | None = None
        self._tries, self._unread = 0, bytearray()
        self._socket, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.callback(self._socket.close)
            life, self._life = os.pipe()
            undo.callback(os.close, self._life)
            try:
                self._process = subprocess.Popen(
                    # -P: what lies beside the script is no library
                    [sys.executable, "-P", str(_SCRIPT), str(life), str(most_bytes)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a panic's words may be those of the grammar
                    pass_fds=(life,),
                    start_new_session=True,  # a Ctrl-C is not for it
                )
            finally:
                os.close(life)
                theirs.close()
            undo.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, line: bytes, until: float, on_slow: Callable[[], None]) -> str:
        """Raises ``TrialFailedError`` and ``_GoneError``; after either it is of no use."""
        reads_until = min(until, time.monotonic() + _READS_WITHIN_S) if self._tries else until
        self._tries += 1
        self.reusable = self._tries < _MOST_TRIES
        try:
            self._wait_until(reads_until)
            self._socket.sendall(line)
            if self._line(reads_until):
                raise TrialFailedError("the process said what it does not say")
        except OSError as error:
            raise _GoneError(f"the process that tries grammars {self._how_it_ended()}") from error
        try:
            why, again = json.loads(self._answer(until, on_slow))
            self.reusable = self.reusable and bool(again)
            return str(why)
        except (OSError, ValueError, TypeError) as error:
            raise TrialFailedError(f"no answer ({type(error).__name__})") from error

    def _answer(self, until: float, on_slow: Callable[[], None]) -> bytes:
        """Raises ``TimeoutError``, ``OSError``."""
        now = time.monotonic()
        for after_s, act in ((_SLOW_S, on_slow), (_BEHIND_S, self._go_behind)):
            if now + after_s < until:
                with contextlib.suppress(TimeoutError):
                    return self._line(now + after_s)
                act()
        return self._line(until)

    def kill(self) -> None:
        """From any thread, at any time before ``end``."""
        self._process.kill()

    def end(self) -> None:
        """Kill it, and let go of what it had."""
        self._process.kill()
        self._process.wait()
        self._socket.close()
        os.close(self._life)

    def _go_behind(self) -> None:
        """It has had its share: from here on all others go first."""
        self.reusable, self.behind_since = False, time.monotonic()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)

    def _line(self, until: float) -> bytes:
        """The next line, without its end. Raises ``TimeoutError``, and ``OSError`` where there is
        no more."""
        while (end := self._unread.find(b"\n")) < 0:
            self._wait_until(until)
            part = self._socket.recv(1 << 16)
            if not part or len(self._unread) > _MOST_ANSWER_BYTES:
                raise ConnectionError("no more lines")
            self._unread += part
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        return line

    def _wait_until(self, until: float) -> None:
        left_s = until - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError
        self._socket.settimeout(left_s)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"ended with code {self._process.wait(0.1)}"
        return "reads nothing"
