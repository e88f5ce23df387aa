"""The scores of a commit's tokens to protobuf and back, within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.core.protocol.work import MAX_LOGPROBS, TokenScore
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import ProtocolViolation, WireLimits, check_count, check_tokens


def encode_scores(
    scores: Sequence[TokenScore], token_count: int, limits: WireLimits
) -> list[pb.TokenScore]:
    """One for each token of the commit. Raises ``ProtocolViolation``."""
    _check_length(len(scores), token_count)
    return [
        pb.TokenScore(
            logprob=_finite("logprob", score.logprob),
            margin=_finite("margin", score.margin),
            tokens=_checked([token for token, _ in score.top], limits),
            logprobs=[_finite("logprobs", logprob) for _, logprob in score.top],
        )
        for score in scores
    ]


def decode_scores(
    wire: Sequence[pb.TokenScore], token_count: int, limits: WireLimits
) -> tuple[TokenScore, ...]:
    """Raises ``ProtocolViolation`` for scores of other tokens than there are, or over a bound."""
    _check_length(len(wire), token_count)
    return tuple([_decode(score, limits) for score in wire])


def _decode(wire: pb.TokenScore, limits: WireLimits) -> TokenScore:
    tokens = _checked(wire.tokens, limits)
    if len(wire.logprobs) != len(tokens):
        raise ProtocolViolation(
            f"TokenScore.logprobs has {len(wire.logprobs)} entries, but must have one per token: "
            f"{len(tokens)}"
        )
    logprobs = [_finite("logprobs", logprob) for logprob in wire.logprobs]
    return TokenScore(
        _finite("logprob", wire.logprob),
        _finite("margin", wire.margin),
        tuple(zip(tokens, logprobs, strict=True)),
    )


def _checked(tokens: Sequence[int], limits: WireLimits) -> tuple[int, ...]:
    check_count("TokenScore.tokens", len(tokens), MAX_LOGPROBS)
    return check_tokens("TokenScore.tokens", tokens, limits.vocabulary_size)


def _check_length(count: int, token_count: int) -> None:
    if count != token_count:
        raise ProtocolViolation(
            f"Commit.logprobs has {count} entries, but must have none or one per token: "
            f"{token_count}"
        )


def _finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise ProtocolViolation(f"TokenScore.{field} is {value}, but must be finite")
    return value
