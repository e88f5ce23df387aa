"""How many bytes a message takes on the wire, without encoding it.

The simulator sends millions of messages and needs only their sizes. The rules are those of
``protos/edgespec/v1/speculation.proto`` (protobuf's varints and tags); a test holds them against
the codec's own bytes: exact for what travels all the time, within 2 % and 32 bytes for ``Open``,
``Opened`` and ``Fault``, which travel once.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.core.protocol.messages import (
    Cancel,
    Commit,
    Draft,
    Fault,
    Message,
    Open,
    Opened,
    Received,
)
from edgespec.core.protocol.work import TokenScore

_FIXED32 = 5  # a tag and four bytes
_SAMPLING_BYTES = 24
_LIMITS_BYTES = 28
# Bytes of a varint by its number of bits: seven each, and one for 0.
_VARINT = tuple(max(1, (bits + 6) // 7) for bits in range(65))


def message_bytes(message: Message) -> int:
    """Payload of one message, before any framing."""
    match message:
        case Draft():
            return _wrapped(_draft_bytes(message))
        case Commit():
            return _wrapped(_commit_bytes(message))
        case Received(position, echo):
            return _wrapped(_number(position) + _number(echo))
        case Cancel():
            return _wrapped(0)
        case Open():
            texts = message.session_id, message.model, message.vocabulary
            text_bytes = sum(2 + len(text.encode()) for text in texts if text)
            tokens = _packed(message.prompt) + _packed(message.committed)
            secret = message.session_secret
            secret_bytes = 2 + len(secret) if secret else 0
            constraint = message.sampling.constraint
            secret_bytes += 0 if constraint is None else 8 + len(constraint.text.encode())
            rest = 8 + _SAMPLING_BYTES + 3 * bool(message.logprobs)
            return _wrapped(rest + text_bytes + secret_bytes + tokens)
        case Opened(_, model, position, fingerprint):
            text_bytes = sum(2 + len(text.encode()) for text in (model, fingerprint))
            return _wrapped(_LIMITS_BYTES + text_bytes + _number(position))
        case Fault(_, text):
            return _wrapped(14 + len(text.encode()))


def _draft_bytes(draft: Draft) -> int:
    size = _number(draft.first_node_id) + _packed(draft.tokens)
    # A parent travels as the distance back to it, 0 for the root; those of a chain are left out.
    numbered = enumerate(draft.parents, draft.first_node_id)
    distances = [node_id - parent if parent else 0 for node_id, parent in numbered]
    if distances.count(1) < len(distances):
        size += _packed(distances)
    if 0 in distances:
        size += _number(draft.base_position)
        size += _FIXED32 if draft.base_hash else 0
    return size


def _commit_bytes(commit: Commit) -> int:
    numbers = (
        commit.position,
        commit.accepted,
        commit.stale,
        commit.queue_us,
        commit.verify_us,
        commit.rows,
        commit.echo,
        commit.held_us,
    )
    size = _packed(commit.tokens) + (2 if commit.finish is not None else 0)
    for number in numbers:
        if number:
            size += 1 + _VARINT[number.bit_length()]
    for optional in (commit.row_price, commit.credit):
        if optional is not None:  # 0 travels too
            size += 1 + _VARINT[optional.bit_length()]
    for score in commit.logprobs:
        inner = _score_bytes(score)
        size += 1 + _VARINT[inner.bit_length()] + inner
    return size


def _score_bytes(score: TokenScore) -> int:
    size = _FIXED32 * (bool(score.logprob) + bool(score.margin))
    size += _packed([token for token, _ in score.top])
    floats = 4 * len(score.top)
    return size + (1 + _VARINT[floats.bit_length()] + floats if floats else 0)


def _wrapped(size: int) -> int:
    """A message inside the ``oneof`` of its direction: tag and length."""
    return 1 + _VARINT[size.bit_length()] + size


def _packed(values: Iterable[int]) -> int:
    size = 0
    for value in values:
        size += _VARINT[value.bit_length()]
    return 1 + _VARINT[size.bit_length()] + size if size else 0


def _number(value: int) -> int:
    """A field with a tag of one byte; 0 is left out."""
    return 1 + _VARINT[value.bit_length()] if value else 0
