"""Compiles grammars in a process of its own, which may run out of time or memory alone.

Run as a script, with a socket as standard input; its arguments are the number of a pipe's reading
end and how many bytes of data it may have. A line of JSON asks, ``{"vocabulary": ... or null,
"grammar": ..., "bounds": ...}``; an empty line says that it was read, and then a JSON list what is
wrong with the grammar, empty for nothing, and whether this process can be asked again. A grammar
that needs too much kills the process, and so does the end of the pipe, at once and whatever it is
doing: whoever holds the other end has gone.
"""

from __future__ import annotations

import json
import math
import os
import select
import socket
import sys
import time
from typing import Any, Final

_CPU_S: Final = 4
_STEPS: Final = 16
_KEPT_BYTES: Final = 128 << 20
"""Of resident memory, which a process may have kept of what it tried."""


def main() -> None:
    """Answer one line after the other, until there are no more."""
    import resource  # where there are limits to set

    _end_with_parent(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_bytes = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    vocabularies = _Vocabularies()
    vocabularies.tokenizer(None)  # the library is loaded before anybody waits for it
    with socket.socket(fileno=0) as talk, talk.makefile("rb") as lines:
        for line in lines:
            talk.sendall(b"\n")
            _allow_more_cpu()
            why = _tried(json.loads(line), vocabularies)
            talk.sendall(json.dumps([why, _resident_bytes() < _KEPT_BYTES]).encode() + b"\n")


def _end_with_parent(life: int) -> None:
    """Nothing is ever written to the pipe ``life``: its one signal is its end, which kills."""
    import fcntl

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0.0)[0]:  # it ended before
        os._exit(1)


def _allow_more_cpu() -> None:
    """The limit counts from the start of a process."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time()) + _CPU_S
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _resident_bytes() -> int:
    """0 where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _Vocabularies:
    """The tokenizer used last, and one of 256 bytes."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def tokenizer(self, vocabulary: dict[str, Any] | None) -> Any:
        from llguidance import LLTokenizer, TokenizerWrapper

        key = json.dumps(vocabulary)
        if (found := self._known.get(key)) is None:
            asked = "byte" if vocabulary is None else TokenizerWrapper(_Words(**vocabulary))
            found = LLTokenizer(asked)
            if vocabulary is not None:
                self._known = {one: kept for one, kept in self._known.items() if one == "null"}
            self._known[key] = found
        return found


class _Words:
    """A vocabulary of ``size`` ids: the ``special`` tokens by their ids, the 256 bytes at the first
    ids that are free, and nothing else. By the names that llguidance asks for."""

    bos_token_id = None

    def __init__(self, size: int, end: int, special: dict[str, str]) -> None:
        names = {int(token): name.encode() for token, name in special.items()}
        size = max(size, len(names) + 256)
        free = (token for token in range(size) if token not in names)
        self._bytes = [next(free) for _ in range(256)]
        self.tokens = [b""] * size
        for value, token in enumerate(self._bytes):
            self.tokens[token] = bytes((value,))
        for token, name in names.items():
            self.tokens[token] = name
        self.eos_token_id, self.special_token_ids = end, sorted(names)

    def __call__(self, text: bytes | str) -> list[int]:
        written = text if isinstance(text, bytes) else text.encode()
        return [self._bytes[value] for value in written]


def _tried(asked: dict[str, Any], vocabularies: _Vocabularies) -> str:
    """What is wrong. Goes a few steps: some grammars show only then what they cost."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**asked["bounds"], verbose_errors=False)
    tokenizer = vocabularies.tokenizer(asked["vocabulary"])
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
    main()
