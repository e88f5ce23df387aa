"""Commits to protobuf and back, within bounds: what ``codec.py`` says holds here too."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Final

from edgespec.core.protocol.messages import MAX_PRICE, Commit, FinishReason
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.score_codec import decode_scores, encode_scores
from edgespec.wire.wire_limits import (
    MAX_UINT32,
    MAX_UINT64,
    WireLimits,
    check_count,
    check_member,
    check_number,
    check_tokens,
)

_FINISH: Final = {1: FinishReason.STOP, 2: FinishReason.LENGTH, 3: FinishReason.CANCELLED}
# The wire has one word for both; the device tells them apart.
_FINISH_NUMBER: Final[dict[FinishReason, Any]] = {m: n for n, m in _FINISH.items()}
_FINISH_NUMBER[FinishReason.CONTEXT] = _FINISH_NUMBER[FinishReason.LENGTH]
_COMMIT_COUNTS: Final = ("position", "stale", "queue_us", "verify_us", "rows", "held_us")
_commit_counts: Final = attrgetter(*_COMMIT_COUNTS)


def encode_commit(commit: Commit, limits: WireLimits) -> bytes:
    """Bytes of the VerifierMessage. Raises ``ProtocolViolation``.

    Field by field: to name them all in the constructors takes three times as long."""
    count = len(commit.tokens)
    if not (count <= limits.max_commit_tokens and 0 <= commit.accepted <= count):
        _check_commit(commit, count, limits)
    counts = _commit_counts(commit)
    if min(counts) < 0 or max(counts) > MAX_UINT32 - count:
        _check_commit(commit, count, limits)
        for name, value in zip(_COMMIT_COUNTS, counts, strict=True):
            check_number(f"Commit.{name}", value, 0, MAX_UINT32)
    message = pb.VerifierMessage()
    wire = message.commit
    wire.SetInParent()
    wire.position, wire.stale, wire.queue_us, wire.verify_us, wire.rows, wire.held_us = counts
    wire.tokens.extend(check_tokens("Commit.tokens", commit.tokens, limits.vocabulary_size))
    wire.accepted = commit.accepted
    wire.echo = check_number("Commit.echo", commit.echo, 0, MAX_UINT64)
    if commit.finish is not None:
        wire.finish = _FINISH_NUMBER[commit.finish]
    if commit.row_price is not None:
        wire.row_price = check_number("Commit.row_price", commit.row_price, 0, MAX_PRICE)
    if commit.credit is not None:
        wire.credit = check_number("Commit.credit", commit.credit, 0, MAX_UINT32)
    if commit.logprobs:
        wire.logprobs.extend(encode_scores(commit.logprobs, count, limits))
    return message.SerializeToString()


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


def _check_commit(commit: Commit | pb.Commit, count: int, limits: WireLimits) -> None:
    check_count("Commit.tokens", count, limits.max_commit_tokens)
    check_number("Commit.position", commit.position, 0, MAX_UINT32 - count)
    check_number("Commit.accepted", commit.accepted, 0, count)
