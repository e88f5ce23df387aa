"""Grammars are compiled first in processes that may run out of time or memory alone.

Each grammar has a process of its own, some 0.08 s of a processor's time to begin with. It runs this
file as a script, behind everything else that runs (``nice``), with bounds on its memory and its
processor time: whoever sends grammars that take for ever holds up neither the event loop nor,
before ``_MOST`` of them are tried at once, anybody else. What a killed parent leaves behind ends by
its bounds.
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
from typing import Any, Final

DATA_BYTES: Final = 768 << 20
_CPU_S: Final = 4
"""Of processor time for one grammar."""
_STEPS: Final = 16
_NICENESS: Final = 10
_MOST: Final = 4
"""Grammars tried at once."""
_READ: Final = b"read\n"
"""What the process says once it has begun: what ends it from there on is the grammar."""
_STOPPING: Final = "no grammar is tried any more, for this side is stopping"


class TrialFailedError(Exception):
    """The process did not outlive the grammar, or was not done in time."""


class GrammarTrials:
    """Calls come from any thread. ``most_bytes``: data that a process may have. Close it."""

    def __init__(self, most_bytes: int = DATA_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(_MOST)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._closed = False

    def tried(self, asked: Mapping[str, Any], within_s: float) -> str:
        """What is wrong with the grammar, empty for nothing. Raises ``TrialFailedError`` where the
        process does not outlive it, and ``OSError`` where there is none."""
        until = time.monotonic() + within_s
        if not self._turns.acquire(timeout=within_s):
            raise OSError(f"{_MOST} others have been tried for {within_s:g} s")
        try:
            with self._started() as process:
                try:
                    text = json.dumps(asked).encode()
                    said, _ = process.communicate(text, max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired as late:
                    process.kill()
                    said = late.output or b""
                finally:
                    with self._lock:
                        self._running.discard(process)
        finally:
            self._turns.release()
        _, read, why = said.partition(_READ)
        if why:
            return str(json.loads(why))
        if self._closed:
            raise OSError(_STOPPING)
        if read:
            raise TrialFailedError("no answer")
        raise OSError(f"the process that tries grammars ended with code {process.returncode}")

    def close(self) -> None:
        """End all of them; a second call does nothing."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._closed:
                raise OSError(_STOPPING)
            process = subprocess.Popen(
                [sys.executable, "-I", __file__, str(self._most_bytes)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # a panic's words may be those of the grammar
                start_new_session=True,  # a Ctrl-C is not for it
            )
            self._running.add(process)
        return process


def _main(most_bytes: int) -> None:
    """Answer what stands on standard input: a JSON object ``{"vocabulary": ... or null, "grammar":
    ..., "bounds": ...}``, with ``_READ`` and, as JSON, what is wrong."""
    import resource  # where there are limits to set

    from llguidance import LLTokenizer, TokenizerWrapper

    os.nice(_NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    asked = json.loads(sys.stdin.buffer.read())
    known = asked["vocabulary"]
    tokenizer = LLTokenizer(
        "byte" if known is None else TokenizerWrapper(bytes_and_special(**known))
    )
    sys.stdout.buffer.write(_READ)
    sys.stdout.flush()
    # The limit counts from the start of a process.
    limit = math.ceil(time.process_time()) + _CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    sys.stdout.write(json.dumps(_tried(asked, tokenizer)))


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


def _tried(asked: dict[str, Any], tokenizer: Any) -> str:
    """What is wrong. Goes a few steps: some grammars show only then what they cost."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**asked["bounds"], verbose_errors=False)
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
    _main(int(sys.argv[1]))
