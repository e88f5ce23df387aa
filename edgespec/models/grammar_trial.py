"""Grammars are compiled first in processes that may run out of time or memory alone.

One process tries one grammar at a time and is kept for the next, so that nobody waits for a start
of Python. It runs this file as a script, behind everything else that runs (``nice``), with bounds
on its memory and on the processor time of each grammar: whoever sends grammars that take for ever
holds up neither the event loop nor, before ``_MOST`` of them are tried at once, anybody else. The
end of its pipe ends it, and a grammar it was busy with outlives the parent by ``_CPU_S`` at most.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from typing import Any, Final

DATA_BYTES: Final = 768 << 20
_CPU_S: Final = 4
"""Of processor time for one grammar."""
_STEPS: Final = 16
_NICENESS: Final = 10
_KEPT_BYTES: Final = 128 << 20
"""Of resident memory: a process that has kept more of what it tried is not used again."""
_MOST: Final = 4
"""Grammars tried at once."""
_READS_WITHIN_S: Final = 10.0
_MOST_ANSWER_BYTES: Final = 1 << 20
_STOPPING: Final = "no grammar is tried any more, for this side is stopping"


class TrialFailedError(Exception):
    """The process did not outlive the grammar, or was not done in time."""


class GrammarTrials:
    """Calls come from any thread. ``idle_s``: a process that had nothing to do for so long ends;
    None: never. ``most_bytes``: data that one may have. Close it."""

    def __init__(self, idle_s: float | None = None, most_bytes: int = DATA_BYTES) -> None:
        self._idle_s, self._most_bytes = idle_s, most_bytes
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_MOST)
        self._ready: _Process | None = None
        self._all: set[_Process] = set()
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """Of all processes that there are."""
        with self._lock:
            return frozenset(process.pid for process in self._all)

    def get_ready(self) -> None:
        """Start a process unless one waits already. Raises ``OSError``."""
        with self._lock:
            if self._ready is None and not self._closed:
                self._ready = self._started()

    def tried(self, asked: Mapping[str, Any], within_s: float) -> str:
        """What is wrong with the grammar, empty for nothing. Raises ``TrialFailedError`` where the
        process does not outlive it, and ``OSError`` where there is none."""
        until = time.monotonic() + within_s
        if not self._turns.acquire(timeout=within_s):
            raise OSError(f"{_MOST} others have been tried for {within_s:g} s")
        try:
            while True:
                process, fresh = self._taken()
                try:
                    return process.ask(asked, until)
                except TrialFailedError:
                    if self._closed:
                        raise OSError(_STOPPING) from None
                    raise
                except OSError:  # it had ended as it waited, which says nothing of the grammar
                    if fresh:
                        raise
                finally:
                    self._give_back(process)
        finally:
            self._turns.release()

    def close(self) -> None:
        """End all of them, also those that are busy; a second call does nothing."""
        with self._lock:
            self._closed = True
            waiting, self._ready = self._ready, None
            for process in self._all:
                process.kill()  # whoever asked it lets go of it
        if waiting is not None:
            self._give_back(waiting)

    def _taken(self) -> tuple[_Process, bool]:
        """A process, and whether it has just been started."""
        with self._lock:
            if self._closed:
                raise OSError(_STOPPING)
            process, self._ready = self._ready, None
            return (process, False) if process is not None else (self._started(), True)

    def _started(self) -> _Process:
        process = _Process(self._idle_s, self._most_bytes)
        self._all.add(process)
        return process

    def _give_back(self, process: _Process) -> None:
        with self._lock:
            if process.reusable and self._ready is None and not self._closed:
                self._ready = process
                return
            self._all.discard(process)
        process.end()


class _Process:
    """Starts at once and is ready soon. Raises ``OSError``."""

    def __init__(self, idle_s: float | None, most_bytes: int) -> None:
        self.reusable = False
        self._talk, theirs = Pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", __file__, *map(str, (theirs.fileno(), most_bytes, idle_s))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a panic's words may be those of the grammar
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is not for it
            )
        except BaseException:
            self._talk.close()
            raise
        finally:
            theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, asked: Mapping[str, Any], until: float) -> str:
        """As ``GrammarTrials.tried``."""
        self.reusable = False
        try:
            self._talk.send_bytes(json.dumps(asked).encode())
            self._received(min(until, time.monotonic() + _READS_WITHIN_S))
        except (OSError, EOFError) as error:
            self.kill()
            code = self._process.wait()
            raise OSError(f"the process that tries grammars ended with code {code}") from error
        try:
            why, self.reusable = json.loads(self._received(until))
        except (OSError, EOFError) as error:
            raise TrialFailedError(f"no answer ({type(error).__name__})") from error
        return str(why)

    def kill(self) -> None:
        """From any thread, at any time before ``end``."""
        self._process.kill()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._talk.close()

    def _received(self, until: float) -> bytes:
        if not self._talk.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError
        return self._talk.recv_bytes(_MOST_ANSWER_BYTES)


# --- in the process -------------------------------------------------------------------------


def _main(handle: int, most_bytes: int, idle_s: float | None) -> None:
    """Answer what comes through the pipe: a JSON object ``{"vocabulary": ... or null, "grammar":
    ..., "bounds": ...}``, with "read" and a list: what is wrong, whether this process can go on."""
    import resource  # where there are limits to set

    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    _tokenizer("null")  # the library is loaded before anybody waits for it
    talk = Connection(handle)
    with suppress(EOFError, OSError):
        while talk.poll(idle_s):
            asked = json.loads(talk.recv_bytes())
            talk.send_bytes(b"read")
            # The limit counts from the start of a process.
            soft, hard = math.ceil(time.process_time()) + _CPU_S, resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            why = _tried(asked)
            talk.send_bytes(json.dumps([why, _resident_bytes() < _KEPT_BYTES]).encode())


def _resident_bytes() -> int:
    """0 where the system does not say."""
    with suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


@lru_cache(maxsize=2)
def _tokenizer(vocabulary: str) -> Any:
    """Of a JSON object with the arguments of ``bytes_and_special``; null: of 256 bytes."""
    from llguidance import LLTokenizer, TokenizerWrapper

    known = json.loads(vocabulary)
    return LLTokenizer("byte" if known is None else TokenizerWrapper(bytes_and_special(**known)))


class Words:
    """A vocabulary in which single bytes are tokens, by the names that llguidance asks for."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int, special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, special
        self._ids = {token: number for number, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        written = text if isinstance(text, bytes) else text.encode()
        return [self._ids[bytes((value,))] for value in written]


def bytes_and_special(size: int, end: int, special: dict[str, str]) -> Words:
    """``size`` ids: the ``special`` tokens by their ids, the 256 bytes at the first ids that are
    free, and nothing else."""
    names = {int(token): name.encode() for token, name in special.items()}
    size = max(size, len(names) + 256)
    tokens = [names.get(token, b"") for token in range(size)]
    free = (token for token in range(size) if token not in names)
    for value, token in zip(range(256), free, strict=False):
        tokens[token] = bytes((value,))
    return Words(tokens, end, sorted(names))


def _tried(asked: dict[str, Any]) -> str:
    """What is wrong. Goes a few steps: some grammars show only then what they cost."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**asked["bounds"], verbose_errors=False)
    tokenizer = _tokenizer(json.dumps(asked["vocabulary"]))
    matcher = LLMatcher(tokenizer, asked["grammar"], log_level=0, limits=limits)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_error():
            break
        matcher.try_consume_tokens([mask.bit_length() - 1])
    return matcher.get_error() if matcher.is_error() else ""


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), None if sys.argv[3] == "None" else float(sys.argv[3]))
