"""Commits to protobuf and back, within bounds: what ``codec.py`` says holds here too."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from edgespec.core.protocol.messages import MAX_PRICE, Commit, FinishReason
from edgespec.transport.pb import speculation_pb2 as pb
from edgespec.transport.score_codec import decode_scores, encode_scores
from edgespec.transport.wire_limits import (
    MAX_UINT32,
    MAX_UINT64,
    WireLimits,
    check_count,
    check_member,
    check_number,
    check_tokens,
)

_FINISH: Final = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.CANCELLED}
_FINISH_NAME: Final = {m: pb.FinishReason.Name(n) for n, m in _FINISH.items()}
# The wire has one word for both; the device tells them apart.
_FINISH_NAME[FinishReason.CONTEXT] = _FINISH_NAME[FinishReason.LENGTH]
_COMMIT_COUNTS: Final = ("stale", "queue_us", "verify_us", "rows", "held_us")
_commit_counts: Final = attrgetter(*_COMMIT_COUNTS)


def encode_commit(commit: Commit, limits: WireLimits) -> pb.Commit:
    _check_commit(commit, len(commit.tokens), limits)
    counts = _commit_counts(commit)
    if min(counts) < 0 or max(counts) > MAX_UINT32:
        for name, value in zip(_COMMIT_COUNTS, counts, strict=True):
            check_number(f"Commit.{name}", value, 0, MAX_UINT32)
    check_number("Commit.echo", commit.echo, 0, MAX_UINT64)
    scores = commit.logprobs
    return pb.Commit(
        position=commit.position,
        tokens=check_tokens("Commit.tokens", commit.tokens, limits.vocabulary_size),
        accepted=commit.accepted,
        stale=commit.stale,
        queue_us=commit.queue_us,
        verify_us=commit.verify_us,
        rows=commit.rows,
        echo=commit.echo,
        held_us=commit.held_us,
        finish=None if commit.finish is None else _FINISH_NAME[commit.finish],
        row_price=_optional("Commit.row_price", commit.row_price, MAX_PRICE),
        credit=_optional("Commit.credit", commit.credit, MAX_UINT32),
        logprobs=encode_scores(scores, len(commit.tokens), limits) if scores else None,
    )


def decode_commit(wire: pb.Commit, limits: WireLimits) -> Commit:
    _check_commit(wire, len(wire.tokens), limits)
    scores = wire.logprobs
    return Commit(
        position=wire.position,
        tokens=check_tokens("Commit.tokens", wire.tokens, limits.vocabulary_size),
        accepted=wire.accepted,
        stale=wire.stale,
        queue_us=wire.queue_us,
        verify_us=wire.verify_us,
        rows=wire.rows,
        echo=wire.echo,
        held_us=wire.held_us,
        finish=check_member("Commit.finish", _FINISH, wire.finish) if wire.finish else None,
        row_price=min(wire.row_price, MAX_PRICE) if wire.HasField("row_price") else None,
        credit=wire.credit if wire.HasField("credit") else None,
        logprobs=decode_scores(scores, len(wire.tokens), limits) if scores else (),
    )


def _optional(field: str, value: int | None, most: int) -> int | None:
    return None if value is None else check_number(field, value, 0, most)


def _check_commit(commit: Commit | pb.Commit, count: int, limits: WireLimits) -> None:
    check_count("Commit.tokens", count, limits.max_commit_tokens)
    check_number("Commit.position", commit.position, 0, MAX_UINT32 - count)
    check_number("Commit.accepted", commit.accepted, 0, count)
