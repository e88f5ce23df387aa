"""Trial compilation of grammars, in processes that may run out of time or memory without harm to
others.

Each grammar has its own process (``limited_process.py``), which takes some 0.1 s of processor time
to start. It runs this file as a script, at a low priority (``nice``). A client with grammars that
never finish compiling delays neither the event loop nor, until ``_MAX_TRIALS`` of them are tried at
once, other clients.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # the script in the child process imports nothing of edgespec
    from edgespec.models.limited_process import Bounds, LimitedProcesses

DATA_BYTES: Final = 768 << 20
_CPU_S: Final = 4
"""Processor seconds for one grammar."""
_STEPS: Final = 16
_NICENESS: Final = 10
_MAX_TRIALS: Final = 4
"""Number of grammars that are tried at once."""
_STARTED: Final = b"read\n"
"""Output of the process before it begins the trial. From then on its death is the grammar's
fault."""


class TrialFailedError(Exception):
    """The process died of the grammar, or was not done in time."""


class GrammarTrials:
    """Trials of grammars, from any thread. ``most_bytes`` limits the data of a process. Its
    processes end with ``close``."""

    def __init__(self, most_bytes: int = DATA_BYTES) -> None:
        from edgespec.models.limited_process import LimitedProcesses

        self._most_bytes = most_bytes
        self.processes: LimitedProcesses = LimitedProcesses()
        self._slots = threading.BoundedSemaphore(_MAX_TRIALS)

    def find_fault(self, request: Mapping[str, Any], within_s: float) -> str:
        """Return the fault of a grammar, or an empty text. Raises ``TrialFailedError`` if the
        process dies of the grammar, and ``OSError`` if there is no process for it."""
        until = time.monotonic() + within_s
        if not self._slots.acquire(timeout=within_s):
            raise OSError(f"{_MAX_TRIALS} others have been tried for {within_s:g} s")
        try:
            with self.processes.start(__file__, self._most_bytes, niceness=_NICENESS) as process:
                try:
                    text = json.dumps(request).encode()
                    output, _ = process.communicate(text, max(0.0, until - time.monotonic()))
                except subprocess.TimeoutExpired as late:
                    process.kill()
                    output = late.output or b""
                finally:
                    self.processes.forget(process)
        finally:
            self._slots.release()
        _, started, fault = output.partition(_STARTED)
        if fault:
            return str(json.loads(fault))
        if self.processes.is_closed:
            raise OSError("no grammar is tried any more, for this side is stopping")
        if started:
            raise TrialFailedError("no answer")
        raise OSError(f"the process that tries grammars ended with code {process.returncode}")

    def close(self) -> None:
        """End all processes. A second call does nothing."""
        self.processes.close()


def main(bounds: Bounds) -> None:
    """Read a JSON object ``{"vocabulary": ... or null, "grammar": ..., "bounds": ...}`` from
    standard input, and write ``_STARTED`` and then, as JSON, the fault of the grammar."""
    from llguidance import LLTokenizer, TokenizerWrapper

    request = json.loads(sys.stdin.buffer.read())
    vocabulary = request["vocabulary"]
    tokenizer = LLTokenizer(
        "byte" if vocabulary is None else TokenizerWrapper(bytes_and_special(**vocabulary))
    )
    sys.stdout.buffer.write(_STARTED)
    sys.stdout.flush()
    bounds.allow_cpu(_CPU_S)
    sys.stdout.write(json.dumps(_find_fault(request, tokenizer)))


class ByteVocabulary:
    """A vocabulary in which single bytes are tokens, under the names that llguidance uses."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], end: int, special: list[int]) -> None:
        self.tokens, self.eos_token_id, self.special_token_ids = tokens, end, special
        self._ids = {token: number for number, token in enumerate(tokens)}

    def __call__(self, text: bytes | str) -> list[int]:
        written = text if isinstance(text, bytes) else text.encode()
        return [self._ids[bytes((value,))] for value in written]


def bytes_and_special(size: int, end: int, special: dict[str, str]) -> ByteVocabulary:
    """Return a vocabulary of ``size`` ids: the ``special`` tokens at their ids, the 256 bytes at
    the first free ids, and nothing else."""
    names = {int(token): name.encode() for token, name in special.items()}
    size = max(size, len(names) + 256)
    tokens = [names.get(token, b"") for token in range(size)]
    free = (token for token in range(size) if token not in names)
    for value, token in zip(range(256), free, strict=False):
        tokens[token] = bytes((value,))
    return ByteVocabulary(tokens, end, sorted(names))


def _find_fault(request: dict[str, Any], tokenizer: Any) -> str:
    """Return the fault of a grammar, or an empty text. It computes a few steps, because some
    grammars exceed a limit only then."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**request["bounds"], verbose_errors=False)
    matcher = LLMatcher(tokenizer, request["grammar"], log_level=0, limits=limits)
    for _ in range(_STEPS):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if not mask or matcher.is_error():
            break
        matcher.try_consume_tokens([mask.bit_length() - 1])
    return matcher.get_error() if matcher.is_error() else ""
