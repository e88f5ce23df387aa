"""Bytes and microseconds of the messages that go back and forth for every few tokens.

python benchmarks/codec_cost.py
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from functools import partial

from edgespec.benchmark.report import machine, versions
from edgespec.core.protocol.messages import Commit, Draft, Received
from edgespec.transport.codec import (
    decode_downlink,
    decode_uplink,
    encode_downlink,
    encode_uplink,
)
from edgespec.transport.wire_limits import WireLimits

LIMITS = WireLimits()
CALLS = 5000
POSITION, HASH, TOKEN = 700, 0x9ABC_DEF0, 30_000


def draft(count: int, *, root: bool) -> Draft:
    """A chain of ``count`` guesses, at the committed prefix or behind earlier nodes."""
    parents = tuple((0 if root else 99) if i == 0 else 100 + i - 1 for i in range(count))
    tokens = tuple(TOKEN + i for i in range(count))
    return Draft(100, parents, tokens, POSITION if root else 0, HASH if root else 0)


def commit(count: int) -> Commit:
    tokens = tuple(TOKEN + i for i in range(count))
    return Commit(POSITION, tokens, count - 1, 1, 900, 25_000, count, POSITION - 8, 30_000)


def microseconds(call: Callable[[], object]) -> float:
    """The best of five rounds: what the code costs when nothing else runs."""
    return min(timeit.repeat(call, number=CALLS, repeat=5)) / CALLS * 1e6


def main() -> int:
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print(f"{'message':28} {'bytes':>6} {'a token':>8} {'encode us':>10} {'decode us':>10}")
    for count in (1, 2, 4, 8):
        for root in (True, False):
            message = draft(count, root=root)
            data = encode_uplink(message, LIMITS)
            where = "at the prefix" if root else "behind a node"
            _line(
                f"Draft, {count} {where}",
                len(data),
                count,
                microseconds(partial(encode_uplink, message, LIMITS)),
                microseconds(partial(decode_uplink, data, LIMITS)),
            )
    for count in (1, 2, 4, 8):
        answer = commit(count)
        data = encode_downlink(answer, LIMITS)
        _line(
            f"Commit, {count}",
            len(data),
            count,
            microseconds(partial(encode_downlink, answer, LIMITS)),
            microseconds(partial(decode_downlink, data, LIMITS)),
        )
    received = Received(POSITION, POSITION)
    data = encode_uplink(received, LIMITS)
    _line(
        "Received",
        len(data),
        8,  # one for so many committed tokens
        microseconds(partial(encode_uplink, received, LIMITS)),
        microseconds(partial(decode_uplink, data, LIMITS)),
    )
    return 0


def _line(name: str, size: int, tokens: int, encode_us: float, decode_us: float) -> None:
    print(f"{name:28} {size:6d} {size / tokens:8.1f} {encode_us:10.1f} {decode_us:10.1f}")


if __name__ == "__main__":
    sys.exit(main())
