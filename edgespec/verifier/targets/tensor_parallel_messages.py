"""What rank 0 tells the other ranks of a tensor parallel target, and what they answer: plain data.

A message is a number and tuples of built-in values, written with ``marshal`` behind its length:
reading one creates numbers, strings and tuples and can do nothing else. Both ends run the same
interpreter. Sampling parameters are not sent, because only rank 0 samples.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, assert_never

from edgespec.core.ports import PassRequest

MAX_MESSAGE_BYTES = 1 << 30
_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The first message: which share of which model to load, and where the ranks meet."""

    rank: int
    world_size: int
    meeting_port: int
    """Of the rendezvous store, on the loopback interface."""
    collective_within_s: float
    options: tuple[tuple[str, str | int | float | bool | None], ...]
    """Arguments of ``TorchTarget``, by name."""
    stage_delay_s: float | None = None
    """What links between stages add, one way; None: the rank has a share of all layers."""


@dataclass(frozen=True, slots=True)
class GoOn:
    """All ranks have loaded their weights, so that none will wait long for another."""


@dataclass(frozen=True, slots=True)
class OpenReplica:
    """A sequence begins (``ports.TargetModel.open``)."""

    key: str
    prompt_length: int
    text: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunPass:
    """A packed pass begins now, on all ranks."""

    number: int
    """Passes count from 1."""
    batch: tuple[PassRequest, ...]


@dataclass(frozen=True, slots=True)
class KeepReplica:
    """Nodes of a sequence's last pass are committed (``ports.TargetModel.keep``)."""

    key: str
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseReplica:
    """A sequence ends (``ports.TargetModel.close``)."""

    key: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The weights of this rank are in memory."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The target of this rank is built, canonical mode chosen and tested."""


@dataclass(frozen=True, slots=True)
class PassFailed:
    """Pass ``number`` raised on this rank behind ``collectives`` of its exchanges."""

    number: int
    collectives: int
    reason: str


@dataclass(frozen=True, slots=True)
class RankFailed:
    """This rank cannot go on."""

    reason: str


ToRank: TypeAlias = LoadModel | GoOn | OpenReplica | RunPass | KeepReplica | CloseReplica
FromRank: TypeAlias = Loaded | Ready | PassFailed | RankFailed


class MessageError(ValueError):
    """What came is not a message of this module."""


def encode(message: ToRank | FromRank) -> bytes:
    """The message behind its length. Raises ``ValueError`` for one that is too long."""
    body = marshal.dumps(_plain(message))
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes, limit {MAX_MESSAGE_BYTES}")
    return _LENGTH.pack(len(body)) + body


def body_length(head: bytes) -> int:
    """Of the message whose first ``LENGTH_BYTES`` bytes are ``head``. Raises ``MessageError``."""
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {length} bytes, limit {MAX_MESSAGE_BYTES}")
    return length


def decode(body: bytes) -> ToRank | FromRank:
    """The message of ``body``, which follows its length. Raises ``MessageError``."""
    try:
        kind, *fields = marshal.loads(body)
        message: ToRank | FromRank = _READERS[kind](*fields)
    except (EOFError, ValueError, TypeError, IndexError) as error:
        raise MessageError(f"not a message between ranks: {error}") from error
    return message


def receive(read: Callable[[int], bytes]) -> ToRank | FromRank | None:
    """The next message of a stream; None at its end. ``read(n)`` gives n bytes, or fewer at the
    end of the stream. Raises ``MessageError``."""
    head = read(LENGTH_BYTES)
    if not head:
        return None
    if len(head) < LENGTH_BYTES or len(body := read(body_length(head))) < body_length(head):
        raise MessageError("the stream ended within a message")
    return decode(body)


def _pass(number: int, rows: tuple[tuple[object, ...], ...]) -> RunPass:
    return RunPass(number, tuple(PassRequest(*row) for row in rows))  # type: ignore[arg-type]


_READERS: tuple[Callable[..., ToRank | FromRank], ...] = (
    LoadModel,
    GoOn,
    OpenReplica,
    _pass,
    KeepReplica,
    CloseReplica,
    Loaded,
    Ready,
    PassFailed,
    RankFailed,
)
"""By the number that a message begins with."""


def _plain(message: ToRank | FromRank) -> tuple[Any, ...]:
    match message:
        case LoadModel(rank, world_size, port, within_s, options, delay_s):
            return 0, rank, world_size, port, within_s, options, delay_s
        case GoOn():
            return (1,)
        case OpenReplica(key, prompt_length, text):
            return 2, key, prompt_length, text
        case RunPass(number, batch):
            return 3, number, tuple(_request(one) for one in batch)
        case KeepReplica(key, nodes):
            return 4, key, nodes
        case CloseReplica(key):
            return 5, key
        case Loaded():
            return (6,)
        case Ready():
            return (7,)
        case PassFailed(number, collectives, reason):
            return 8, number, collectives, reason
        case RankFailed(reason):
            return 9, reason
        case _:
            assert_never(message)


def _request(one: PassRequest) -> tuple[object, ...]:
    """Without what only the sampler asks for."""
    return one.key, one.cache_length, one.feed, one.tokens, one.parents, one.sample, one.blocks
