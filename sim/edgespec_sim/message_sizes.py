"""The size of each message on the wire, computed without encoding it.

The simulator sends millions of messages and needs only their sizes. The rules are those of
``protos/edgespec/v1/speculation.proto`` (protobuf's varints and tags). A test compares the sizes
with the codec's own bytes: they are exact for frequent messages, and within 2 % and 32 bytes for
``Open``, ``Opened`` and ``Fault``, which are sent once.
"""

from __future__ import annotations

from collections.abc import Iterable

from edgespec.core.protocol import messages as m
from edgespec.core.protocol.work import TokenScore

_FIXED32 = 5
"""Bytes of a number of fixed size: its tag and four bytes."""
_SAMPLING_BYTES = 24
"""Typical bytes of the sampling parameters in an ``Open``."""
_LIMITS_BYTES = 28
"""Typical bytes of the limits in an ``Opened``."""

# Bytes of a varint by its number of bits: seven bits per byte, and one byte for 0.
_VARINT = tuple(max(1, (bits + 6) // 7) for bits in range(65))


def message_bytes(message: m.Message) -> int:
    """Return the payload bytes of one message, without any framing."""
    match message:
        case m.Draft():
            return _wrapped_bytes(_draft_bytes(message))
        case m.Commit():
            return _wrapped_bytes(_commit_bytes(message))
        case m.Received(position, echo):
            return _wrapped_bytes(_number_bytes(position) + _number_bytes(echo))
        case m.Cancel():
            return _wrapped_bytes(0)
        case m.Open():
            return _wrapped_bytes(_open_bytes(message))
        case m.PrefixTokens(tokens):
            return _wrapped_bytes(_packed_bytes(tokens))
        case m.PrefixMissing():
            return _wrapped_bytes(0)
        case m.PicturePart(number, offset, data):
            return _wrapped_bytes(5 + _number_bytes(number) + _number_bytes(offset) + len(data))
        case m.PicturesMissing(numbers):
            return _wrapped_bytes(_packed_bytes(numbers))
        case m.Opened(_, model, position, fingerprint):
            text_bytes = sum(2 + len(text.encode()) for text in (model, fingerprint))
            block_bytes = 3 * bool(message.prefix_block)
            return _wrapped_bytes(
                _LIMITS_BYTES + text_bytes + _number_bytes(position) + block_bytes
            )
        case m.Fault(_, text):
            return _wrapped_bytes(14 + len(text.encode()))


def _open_bytes(request: m.Open) -> int:
    size = 8 + _SAMPLING_BYTES + 3 * bool(request.logprobs)
    rule = "" if request.rule == m.EXACT_RULE else request.rule
    texts = request.session_id, request.model, request.vocabulary, rule
    size += sum(2 + len(text.encode()) for text in texts if text)
    size += _packed_bytes(request.prompt) + _packed_bytes(request.committed)
    if request.session_secret:
        size += 2 + len(request.session_secret)
    if (constraint := request.sampling.constraint) is not None:
        size += 8 + len(constraint.text.encode())
    if request.prefix_key:
        size += 3 + len(request.prefix_key)
    if (prefix := request.prefix) is not None:
        size += 6 + len(prefix.name)
        size += _number_bytes(prefix.length) + _number_bytes(prefix.prompt_length)
    return size


def _draft_bytes(draft: m.Draft) -> int:
    size = _number_bytes(draft.first_node_id) + _packed_bytes(draft.tokens)
    # A parent is sent as the distance back to it, or 0 for the root. A plain chain sends no
    # parents.
    numbered = enumerate(draft.parents, draft.first_node_id)
    distances = [node_id - parent if parent else 0 for node_id, parent in numbered]
    if distances.count(1) < len(distances):
        size += _packed_bytes(distances)
    if 0 in distances:
        size += _number_bytes(draft.base_position)
        size += _FIXED32 if draft.base_hash else 0
    return size


def _commit_bytes(commit: m.Commit) -> int:
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
    size = _packed_bytes(commit.tokens) + (2 if commit.finish is not None else 0)
    size += _packed_bytes(commit.replaced)
    for number in numbers:
        if number:
            size += 1 + _VARINT[number.bit_length()]
    for optional in (commit.row_price, commit.credit):
        if optional is not None:  # 0 is sent too.
            size += 1 + _VARINT[optional.bit_length()]
    for score in commit.logprobs:
        inner = _score_bytes(score)
        size += 1 + _VARINT[inner.bit_length()] + inner
    return size


def _score_bytes(score: TokenScore) -> int:
    size = _FIXED32 * (bool(score.logprob) + bool(score.margin))
    size += _packed_bytes([token for token, _ in score.top])
    floats = 4 * len(score.top)
    return size + (1 + _VARINT[floats.bit_length()] + floats if floats else 0)


def _wrapped_bytes(size: int) -> int:
    """Return the size of a message inside the ``oneof`` of its direction, with tag and length."""
    return 1 + _VARINT[size.bit_length()] + size


def _packed_bytes(values: Iterable[int]) -> int:
    size = 0
    for value in values:
        size += _VARINT[value.bit_length()]
    return 1 + _VARINT[size.bit_length()] + size if size else 0


def _number_bytes(value: int) -> int:
    """Return the size of a field with a tag of one byte; 0 is left out."""
    return 1 + _VARINT[value.bit_length()] if value else 0
