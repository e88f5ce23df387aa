"""The core's messages as protobuf bytes, within bounds.

Theory of operation. ``encode_*`` and ``decode_*`` are total: they return a result or raise
``ProtocolViolation``, whatever the bytes or the message. The size of a message is checked before it
is parsed, the counts in it before anything is copied to Python, and token ids against the largest
id. Fields that another version may add are unknown here and are ignored. Unknown enum values and
versions would change the meaning, so they are refused by name.

Two things do not travel: ``SamplingParams.stop``, since the device ends its output at these
strings, and the base of a draft that no node is attached to. A parent is sent as ``node id - parent
id``, a small varint, and as 0 for the base. If all of them are 1, they are left out. See
``protos/edgespec/v1/speculation.proto``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, Final, TypeVar, assert_never, get_args, get_type_hints

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import MAX_TOKEN_ID
from edgespec.core.protocol.pictures import (
    DIGEST_BYTES,
    MAX_PICTURE_BYTES,
    MAX_PICTURES,
    PART_BYTES,
    Picture,
    PictureInput,
)
from edgespec.core.protocol.prefix_names import MAX_BLOCK_TOKENS, NAME_BYTES
from edgespec.core.protocol.sampling import (
    MAX_BIASES,
    MAX_STOP_IDS,
    MAX_TOKENS,
    SamplingParams,
)
from edgespec.core.protocol.work import MAX_LOGPROBS, TokenScore
from edgespec.wire.pb import speculation_pb2 as pb

MAX_UINT32 = (1 << 32) - 1
MAX_UINT64 = (1 << 64) - 1
WINDOW_BYTES = 1 << 18
"""Unread bytes of one stream that its sender may have under way (HTTP/2 flow control)."""
_MAX_DRAFT_NODES: Final = 256
# Bytes of a token id, and of everything in an Open besides tokens: names, biases, stop ids.
_TOKEN_BYTES, _OPEN_BYTES = 4, 1 << 16
_MAX_SESSION_ID_BYTES: Final = 128
_MAX_RULE_BYTES: Final = 64
_MAX_FAULT_BYTES: Final = 1024
"""Most bytes of a fault text. A longer one is cut when it is sent."""
_PICTURE_DISCOUNT: Final = 64
"""Bytes of a picture that cost a verifier as much as one byte of other messages: a part of 65,536
bytes counts as one message more, so that one stream may send some 3 MB in a second."""
_E = TypeVar("_E", bound=Enum)
_T = TypeVar("_T")
_P = TypeVar("_P", bound=ProtobufMessage)


class ProtocolViolation(ValueError):
    """A message breaks the protocol. The text names the field, the value and the bound."""

    code = m.FaultCode.INVALID
    """Code of the fault that the peer receives if it sent the message."""


class ContextExceeded(ProtocolViolation):
    """An Open holds more tokens than the context that is served."""

    code = m.FaultCode.CONTEXT_TOO_LONG


@dataclass(frozen=True, slots=True)
class WireLimits:
    """Limits of one end on the messages that it sends and accepts. Both directions enforce them."""

    max_message_bytes: int = 1 << 20
    context_length: int = 65536
    """Most tokens in an Open: prompt and committed together."""

    @classmethod
    def for_context(cls, context_length: int) -> WireLimits:
        """Return the limits of an end that handles at most ``context_length`` tokens a session.

        A message may have the bytes of the longest Open that fits. It may also have those of one
        flow-control window, which a peer can make us hold anyway: so an Open that is somewhat too
        long is refused by its count of tokens, in an error about tokens. For a context of 1,024
        that is 262,144 bytes, for one of 131,072 it is 4 * 131,072 + 65,536 = 589,824."""
        size = max(WINDOW_BYTES, _TOKEN_BYTES * context_length + _OPEN_BYTES)
        return cls(max_message_bytes=size, context_length=context_length)


def check_number(field: str, value: int, low: int, high: int) -> int:
    """Return ``value``. Raises ``ProtocolViolation`` outside [low, high]."""
    if not low <= value <= high:
        raise ProtocolViolation(f"{field} is {value}, but must be in [{low}, {high}]")
    return value


def check_count(field: str, count: int, high: int, low: int = 0) -> None:
    if not low <= count <= high:
        raise ProtocolViolation(f"{field} has {count} entries, but must have {low} to {high}")


def check_text(field: str, text: str, max_bytes: int) -> str:
    """Return ``text``. Raises ``ProtocolViolation`` if it is too long or not printable."""
    size = len(text.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise ProtocolViolation(f"{field} has {size} bytes, but must have at most {max_bytes}")
    if not text.isprintable():
        raise ProtocolViolation(f"{field} is {text!r}, but must be printable")
    return text


def check_tokens(field: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """Return the tokens as a tuple. Raises ``ProtocolViolation`` naming the first one out of
    range."""
    checked = tuple(tokens)
    if checked and not (min(checked) >= 0 and max(checked) <= MAX_TOKEN_ID):
        for index, token in enumerate(checked):
            check_number(f"{field}[{index}]", token, 0, MAX_TOKEN_ID)
    return checked


def check_member(field: str, members: Mapping[int, _E], number: int) -> _E:
    """Return the enum member with that wire number. Raises ``ProtocolViolation`` for unknown
    numbers."""
    if number not in members:
        names = ", ".join(f"{n} ({member.name})" for n, member in members.items())
        raise ProtocolViolation(f"{field} is {number}, but must be one of: {names}")
    return members[number]


DEFAULT_LIMITS: Final = WireLimits()
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Verifier"].full_name


def _by_number(members: type[_E], wire: Any) -> dict[int, _E]:
    """Return the members by their wire numbers. Wire names begin with the name of the enum."""
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    return {number: members[name.removeprefix(prefix)] for name, number in wire.items() if number}


_MEMBERS: Final[dict[type[Any], dict[int, Any]]] = {
    members: _by_number(members, wire)
    for members, wire in (
        (m.FinishReason, pb.FinishReason),
        (m.RunAhead, pb.RunAhead),
        (ConstraintKind, pb.ConstraintKind),
        (m.FaultCode, pb.FaultCode),
    )
}
_NUMBERS: Final[dict[Enum, Any]] = {
    member: number for members in _MEMBERS.values() for number, member in members.items()
}
# The wire has one value for both, and the device distinguishes them.
_NUMBERS[m.FinishReason.CONTEXT] = _NUMBERS[m.FinishReason.LENGTH]


def encode_uplink(message: m.Uplink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    match message:
        case m.Draft():
            wire = pb.DeviceMessage(draft=_encode_draft(message))
        case m.Received(position, echo):
            check_number("Received.position", position, 0, MAX_UINT32)
            check_number("Received.echo", echo, 0, MAX_UINT64)
            wire = pb.DeviceMessage(received=pb.Received(position=position, echo=echo))
        case m.Cancel():
            wire = pb.DeviceMessage(cancel=pb.Cancel())
        case m.Open():
            wire = pb.DeviceMessage(open=_encode_open(message, limits))
        case m.PrefixTokens(tokens):
            check_count("PrefixTokens.tokens", len(tokens), limits.context_length, low=1)
            tokens = check_tokens("PrefixTokens.tokens", tokens)
            wire = pb.DeviceMessage(prefix_tokens=pb.PrefixTokens(tokens=tokens))
        case m.PicturePart(number, offset, data):
            _check_part(message)
            part = pb.PicturePart(number=number, offset=offset, data=data)
            wire = pb.DeviceMessage(picture_part=part)
        case _:
            assert_never(message)
    return _serialise(wire, limits)


def decode_uplink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> m.Uplink:
    """Return the message in ``payload``.

    Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    wire = parse_message(pb.DeviceMessage, payload, limits.max_message_bytes)
    if wire.HasField("draft"):  # This is the usual case.
        return _decode_draft(wire.draft)
    match wire.WhichOneof("kind"):
        case "received":
            return m.Received(wire.received.position, wire.received.echo)
        case "cancel":
            return m.Cancel()
        case "open":
            return _decode_open(wire.open, limits)
        case "prefix_tokens":
            tokens = wire.prefix_tokens.tokens
            check_count("PrefixTokens.tokens", len(tokens), limits.context_length, low=1)
            return m.PrefixTokens(check_tokens("PrefixTokens.tokens", tokens))
        case "picture_part":
            part = wire.picture_part
            return _check_part(m.PicturePart(part.number, part.offset, part.data))
    known = ", ".join(pb.DeviceMessage.DESCRIPTOR.fields_by_name)
    raise ProtocolViolation(f"DeviceMessage has no kind known here: {known}")


def encode_downlink(message: m.Downlink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    match message:
        case m.Commit():
            wire = _encode_commit(message)
        case m.Opened():
            wire = pb.VerifierMessage(opened=_to_wire(message))
        case m.Fault():
            # The text is cut and not refused, since a fault has to arrive.
            text = message.message.encode(errors="replace")[:_MAX_FAULT_BYTES]
            cut = replace(message, message=text.decode(errors="ignore"))
            wire = pb.VerifierMessage(fault=_to_wire(cut))
        case m.PrefixMissing():
            wire = pb.VerifierMessage(prefix_missing=pb.PrefixMissing())
        case m.PicturesMissing(numbers):
            _check_missing(numbers)
            wire = pb.VerifierMessage(pictures_missing=pb.PicturesMissing(numbers=numbers))
        case _:
            assert_never(message)
    return _serialise(wire, limits)


def decode_downlink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> m.Downlink:
    """Return the message in ``payload``.

    Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    wire = parse_message(pb.VerifierMessage, payload, limits.max_message_bytes)
    match wire.WhichOneof("kind"):
        case "commit":
            return _decode_commit(wire.commit)
        case "opened":
            check_number("Opened.prefix_block", wire.opened.prefix_block, 0, MAX_BLOCK_TOKENS)
            check_number("Opened.picture_tokens", wire.opened.picture_tokens, 0, MAX_TOKENS)
            return _from_wire(m.Opened, wire.opened)
        case "fault":
            size = len(wire.fault.message.encode())
            check_number("bytes of Fault.message", size, 0, _MAX_FAULT_BYTES)
            return _from_wire(m.Fault, wire.fault)
        case "prefix_missing":
            return m.PrefixMissing()
        case "pictures_missing":
            return m.PicturesMissing(_check_missing(tuple(wire.pictures_missing.numbers)))
    known = ", ".join(pb.VerifierMessage.DESCRIPTOR.fields_by_name)
    raise ProtocolViolation(f"VerifierMessage has no kind known here: {known}")


def payload_bytes(message: m.Message, limits: WireLimits = DEFAULT_LIMITS) -> int:
    """Return the length of the encoded message in bytes, before any framing."""
    if isinstance(message, m.Downlink):
        return len(encode_downlink(message, limits))
    return len(encode_uplink(message, limits))


def encode_info(info: m.VerifierInfo, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    _check_info(info)
    wire: pb.InfoReply = _to_wire(info)
    wire.protocol_version = m.PROTOCOL_VERSION
    return _serialise(wire, limits)


def decode_info(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> m.VerifierInfo:
    wire = parse_message(pb.InfoReply, payload, limits.max_message_bytes)
    _check_info(wire)
    return _from_wire(m.VerifierInfo, wire)


def parse_message(kind: type[_P], payload: bytes, max_bytes: int) -> _P:
    """Return the protobuf message of that kind. Raises ``ProtocolViolation``."""
    if len(payload) > max_bytes:
        check_number("bytes of the message", len(payload), 0, max_bytes)
    wire = kind()
    try:
        wire.ParseFromString(payload)
    except DecodeError as error:
        why = f"{len(payload)} bytes are not a {kind.__name__}: {error}"
        raise ProtocolViolation(why) from None
    return wire


def _serialise(wire: ProtobufMessage, limits: WireLimits) -> bytes:
    payload = wire.SerializeToString()
    if len(payload) > limits.max_message_bytes:
        check_number("bytes of the message", len(payload), 0, limits.max_message_bytes)
    return payload


_COMMIT_COUNTS: Final = ("position", "stale", "queue_us", "verify_us", "rows", "held_us")
_commit_counts: Final = attrgetter(*_COMMIT_COUNTS)


def _encode_draft(draft: m.Draft) -> pb.Draft:
    count, first = len(draft.tokens), draft.first_node_id
    _check_length("Draft.parents", len(draft.parents), "one per token", count)
    _check_node_ids(first, count)
    deltas = []
    for node_id, parent in enumerate(draft.parents, first):
        if not 0 <= parent < node_id:  # The name of the field is built only for an error.
            check_number(f"Draft.parents[{node_id - first}]", parent, 0, node_id - 1)
        deltas.append(node_id - parent if parent else 0)
    wire = pb.Draft(
        first_node_id=first,
        tokens=check_tokens("Draft.tokens", draft.tokens),
        parent_deltas=() if set(deltas) == {1} else deltas,
    )
    if 0 in draft.parents:
        wire.base_position = check_number("Draft.base_position", draft.base_position, 1, MAX_UINT32)
        wire.base_hash = check_number("Draft.base_hash", draft.base_hash, 0, MAX_UINT32)
    return wire


def _decode_draft(wire: pb.Draft) -> m.Draft:
    sent, sent_deltas = wire.tokens, wire.parent_deltas
    count, first = len(sent), wire.first_node_id
    if not (0 < count <= _MAX_DRAFT_NODES and 0 < first <= MAX_UINT32 - count):
        _check_node_ids(first, count)
    if sent_deltas and len(sent_deltas) != count:
        raise ProtocolViolation(
            f"Draft.parent_deltas has {len(sent_deltas)} entries, but must have none or {count}"
        )
    tokens, deltas = tuple(sent[:]), sent_deltas[:] or [1] * count
    parents = tuple([at - delta if delta else 0 for at, delta in enumerate(deltas, first)])
    if count and min(parents) <= 0:
        for at, delta in enumerate(deltas):
            if not 0 <= delta < first + at:
                check_number(f"Draft.parent_deltas[{at}]", delta, 0, first + at - 1)
    if count and max(tokens) > MAX_TOKEN_ID:  # No token is negative on the wire.
        check_tokens("Draft.tokens", tokens)
    if 0 not in parents:
        return m.Draft(first, parents, tokens)
    position = check_number("Draft.base_position", wire.base_position, 1, MAX_UINT32)
    return m.Draft(first, parents, tokens, base_position=position, base_hash=wire.base_hash)


def _check_node_ids(first: int, count: int) -> None:
    check_count("Draft.tokens", count, _MAX_DRAFT_NODES)
    high = MAX_UINT32 - max(count - 1, 0)
    check_number("Draft.first_node_id", first, 1 if count else 0, high)


def _encode_commit(commit: m.Commit) -> pb.VerifierMessage:
    """Encode a commit.

    Fields are assigned one by one, since naming all fields in the constructors takes three times
    as long."""
    count, counts = len(commit.tokens), _commit_counts(commit)
    fits = count <= m.MAX_COMMIT_TOKENS and 0 <= commit.accepted <= count
    if not fits or min(counts) < 0 or max(counts) > MAX_UINT32 - count:
        _check_commit(commit, count)
        for name, value in zip(_COMMIT_COUNTS, counts, strict=True):
            check_number(f"Commit.{name}", value, 0, MAX_UINT32)
    message = pb.VerifierMessage()
    wire = message.commit
    wire.SetInParent()
    wire.position, wire.stale, wire.queue_us, wire.verify_us, wire.rows, wire.held_us = counts
    wire.tokens.extend(check_tokens("Commit.tokens", commit.tokens))
    wire.accepted = commit.accepted
    wire.echo = check_number("Commit.echo", commit.echo, 0, MAX_UINT64)
    if commit.finish is not None:
        wire.finish = _NUMBERS[commit.finish]
    if commit.row_price is not None:
        wire.row_price = check_number("Commit.row_price", commit.row_price, 0, m.MAX_PRICE)
    if commit.credit is not None:
        wire.credit = check_number("Commit.credit", commit.credit, 0, MAX_UINT32)
    if commit.logprobs:
        wire.logprobs.extend(_encode_scores(commit.logprobs, count))
    if commit.replaced:
        wire.replaced.extend(_check_replaced(commit.replaced, count))
    if commit.read:
        wire.read = check_number("Commit.read", commit.read, 0, MAX_UINT32)
    return message


def _decode_commit(wire: pb.Commit) -> m.Commit:
    _check_commit(wire, len(wire.tokens))
    scores = wire.logprobs
    return m.Commit(
        position=wire.position,
        tokens=check_tokens("Commit.tokens", wire.tokens),
        accepted=wire.accepted,
        stale=wire.stale,
        queue_us=wire.queue_us,
        verify_us=wire.verify_us,
        rows=wire.rows,
        echo=wire.echo,
        held_us=wire.held_us,
        finish=check_member("Commit.finish", _MEMBERS[m.FinishReason], wire.finish)
        if wire.finish
        else None,
        row_price=min(wire.row_price, m.MAX_PRICE) if wire.HasField("row_price") else None,
        credit=wire.credit if wire.HasField("credit") else None,
        logprobs=_decode_scores(scores, len(wire.tokens)) if scores else (),
        replaced=_check_replaced(wire.replaced, len(wire.tokens)) if wire.replaced else (),
        read=wire.read,
    )


def _check_commit(commit: m.Commit | pb.Commit, count: int) -> None:
    check_count("Commit.tokens", count, m.MAX_COMMIT_TOKENS)
    check_number("Commit.position", commit.position, 0, MAX_UINT32 - count)
    check_number("Commit.accepted", commit.accepted, 0, count)


def _check_replaced(places: Sequence[int], count: int) -> tuple[int, ...]:
    check_count("Commit.replaced", len(places), count)
    for place in places:
        check_number("Commit.replaced", place, 0, count - 1)
    return tuple(places)


def _encode_scores(scores: Sequence[TokenScore], token_count: int) -> list[pb.TokenScore]:
    _check_length("Commit.logprobs", len(scores), "none or one per token", token_count)
    encoded = []
    for one in scores:
        tokens, logprobs = [token for token, _ in one.top], [logprob for _, logprob in one.top]
        _check_score(tokens, (one.logprob, one.margin, *logprobs))
        encoded.append(
            pb.TokenScore(logprob=one.logprob, margin=one.margin, tokens=tokens, logprobs=logprobs)
        )
    return encoded


def _decode_scores(wire: Sequence[pb.TokenScore], token_count: int) -> tuple[TokenScore, ...]:
    _check_length("Commit.logprobs", len(wire), "none or one per token", token_count)
    decoded = []
    for one in wire:
        _check_length("TokenScore.logprobs", len(one.logprobs), "one per token", len(one.tokens))
        _check_score(one.tokens, (one.logprob, one.margin, *one.logprobs))
        top = tuple(zip(one.tokens, one.logprobs, strict=True))
        decoded.append(TokenScore(one.logprob, one.margin, top))
    return tuple(decoded)


def _check_score(tokens: Sequence[int], numbers: Iterable[float]) -> None:
    check_count("TokenScore.tokens", len(tokens), MAX_LOGPROBS)
    check_tokens("TokenScore.tokens", tokens)
    for number in numbers:
        if not math.isfinite(number):
            why = f"TokenScore has a logprob or margin of {number}"
            raise ProtocolViolation(f"{why}, but must have finite ones")


def _check_length(field: str, count: int, wanted: str, length: int) -> None:
    if count != length:
        raise ProtocolViolation(f"{field} has {count} entries, but must have {wanted}: {length}")


# --- messages whose fields have the same names here and on the wire ------------------------------

_WIRE_TYPES: Final[dict[type[Any], type[ProtobufMessage]]] = {
    m.Open: pb.Open,
    m.Prefix: pb.Prefix,
    SamplingParams: pb.Sampling,
    Constraint: pb.Constraint,
    m.Opened: pb.Opened,
    m.Limits: pb.Limits,
    m.Fault: pb.Fault,
    m.VerifierInfo: pb.InfoReply,
    ModelInfo: pb.ModelInfo,
    PictureInput: pb.PictureInput,
    m.DraftTotals: pb.DraftTotals,
}
_TEXT_BYTES: Final = {
    **{"session_id": _MAX_SESSION_ID_BYTES, "rule": _MAX_RULE_BYTES},
    **dict.fromkeys(("model", "name", "vocabulary", "fingerprint"), m.MAX_NAME_BYTES),
}
_MAX_ENTRIES: Final = {
    "logit_bias": MAX_BIASES,
    "stop_token_ids": MAX_STOP_IDS,
    "eos_token_ids": MAX_STOP_IDS,
    "adapters": m.MAX_ADAPTERS,
}
_TOKEN_FIELDS: Final = ("prompt", "committed", "logit_bias", "stop_token_ids", "eos_token_ids")
_MAX_OF_TYPE: Final = {
    FieldDescriptor.TYPE_UINT32: MAX_UINT32,
    FieldDescriptor.TYPE_UINT64: MAX_UINT64,
}


@dataclass(frozen=True, slots=True)
class _SharedField:
    name: str
    kind: type[Any]
    """Type of the value, or of each of several values."""
    is_repeated: bool
    is_optional: bool
    """Whether the wire shows that the field is missing. A missing field has its default."""
    default: object
    largest: int
    """Largest number on the wire, or -1 if the value is no number."""


def _shared_fields(message: type[Any]) -> tuple[_SharedField, ...]:
    """Return the fields of ``message`` that travel."""
    hints, on_wire = get_type_hints(message), _WIRE_TYPES[message].DESCRIPTOR.fields_by_name
    shared_fields = []
    for field in fields(message):
        if (wire := on_wire.get(field.name)) is None:
            continue
        # The value type of ``X | None`` and of ``tuple[X, ...]``.
        kind = (*get_args(hints[field.name]), hints[field.name])[0]
        required = field.default is MISSING and field.default_factory is MISSING
        shared = _SharedField(
            name=field.name,
            kind=kind,
            is_repeated=wire.is_repeated,
            is_optional=wire.has_presence and not required,
            default=field.default,
            largest=_MAX_OF_TYPE.get(wire.type, -1),
        )
        shared_fields.append(shared)
    return tuple(shared_fields)


_FIELDS: Final = {message: _shared_fields(message) for message in _WIRE_TYPES}


def _check_field(name: str, value: Any, one: _SharedField) -> None:
    """Raise ``ProtocolViolation`` if a value exceeds its bound. ``name`` is its full name."""
    if (most := _TEXT_BYTES.get(one.name)) is not None and one.kind is str:
        check_text(name, value, most)
    elif one.kind is float and one.name.endswith("_s"):
        if not 0.0 <= value < math.inf:
            raise ProtocolViolation(f"{name} is {value}, but must be finite and not negative")
    elif one.largest >= 0 and not one.is_repeated:
        check_number(name, value, 0, one.largest)
    if (most := _MAX_ENTRIES.get(one.name)) is not None:
        check_count(name, len(value), most)
    if one.name in _TOKEN_FIELDS:
        check_tokens(name, tuple(value))


def _to_wire(message: Any) -> Any:
    """Return the protobuf message of a core message. Raises ``ProtocolViolation``."""
    kind, values = _WIRE_TYPES[type(message)], dict[str, Any]()
    for one in _FIELDS[type(message)]:
        value = getattr(message, one.name)
        if value is None or (one.is_optional and value == one.default):
            continue
        if isinstance(value, Enum):
            value = _NUMBERS[value]
        else:
            _check_field(f"{kind.DESCRIPTOR.name}.{one.name}", value, one)
            if one.kind in _WIRE_TYPES:
                parts = value if one.is_repeated else (value,)
                wires = [_to_wire(part) for part in parts]
                value = wires if one.is_repeated else wires[0]
        values[one.name] = value
    return kind(**values)


def _from_wire(kind: type[_T], wire: Any) -> _T:
    """Return the core message of a protobuf message.

    Raises ``ProtocolViolation``, also with the error of a dataclass that refuses a value."""
    place, values = wire.DESCRIPTOR.name, dict[str, Any]()
    for one in _FIELDS[kind]:
        if one.is_optional and not wire.HasField(one.name):
            continue
        name, value = f"{place}.{one.name}", getattr(wire, one.name)
        if issubclass(one.kind, Enum):
            value = check_member(name, _MEMBERS[one.kind], value)
        else:
            if one.is_repeated:
                value = dict(value) if isinstance(value, Mapping) else tuple(value)
            _check_field(name, value, one)
            if one.kind in _WIRE_TYPES:
                parts = value if one.is_repeated else (value,)
                decoded = tuple([_from_wire(one.kind, part) for part in parts])
                value = decoded if one.is_repeated else decoded[0]
        values[one.name] = value
    try:
        return kind(**values)
    except ValueError as error:
        raise ProtocolViolation(f"{place}: {error}") from None


def _encode_open(message: m.Open, limits: WireLimits) -> pb.Open:
    """Encode an Open without its stop strings, which end the output on the device.

    Ids behind a prefix travel with it and not in their usual fields. So a verifier that does not
    know prefixes finds no prompt and refuses, instead of reading a prompt without its beginning."""
    _check_open(message, limits)
    if message.pictures:
        _check_pictures(message.pictures, message)
    wire: pb.Open = _to_wire(message)
    if wire.rule == m.EXACT_RULE:
        wire.ClearField("rule")
    if message.prefix is not None:
        for name in ("prompt", "committed"):
            getattr(wire.prefix, name).extend(getattr(wire, name))
            wire.ClearField(name)
    if message.pictures:
        _move_to_media(wire, message.pictures)
    return wire


def _move_to_media(wire: pb.Open, pictures: Sequence[Picture]) -> None:
    """Add the pictures to an encoded Open, and let its ids travel beside them, where a verifier
    that does not know pictures does not look."""
    has_prefix = wire.HasField("prefix")
    parent = wire.prefix if has_prefix else wire
    for name in ("prompt", "committed"):
        getattr(wire.media, name).extend(getattr(parent, name))
        parent.ClearField(name)
    if has_prefix:
        wire.media.prefix.CopyFrom(wire.prefix)
        wire.ClearField("prefix")
    for one in pictures:
        wire.media.pictures.add(sha256=one.sha256, bytes=one.size_bytes, position=one.position)


def _move_from_media(wire: pb.Open) -> tuple[Picture, ...]:
    """Return the pictures of an Open, and put the ids that travel beside them in their places."""
    if wire.prompt or wire.committed or wire.HasField("prefix"):
        raise ProtocolViolation("Open has ids outside media, but its media have them")
    media = wire.media
    check_count("Open.media.pictures", len(media.pictures), MAX_PICTURES, low=1)
    if media.prefix.prompt or media.prefix.committed:
        raise ProtocolViolation("Open.media.prefix has ids, but media have them")
    if media.HasField("prefix"):
        wire.prefix.CopyFrom(media.prefix)
    parent = wire.prefix if media.HasField("prefix") else wire
    parent.prompt.extend(media.prompt)
    parent.committed.extend(media.committed)
    return tuple([Picture(one.sha256, one.bytes, one.position) for one in media.pictures])


def _decode_open(wire: pb.Open, limits: WireLimits) -> m.Open:
    pictures: tuple[Picture, ...] = ()
    if wire.HasField("media"):
        pictures = _move_from_media(wire)
    if wire.HasField("prefix"):
        if wire.prompt or wire.committed:
            raise ProtocolViolation("Open has ids in prompt or committed, but its prefix has them")
        wire.prompt.extend(wire.prefix.prompt)
        wire.committed.extend(wire.prefix.committed)
    _check_open(wire, limits)
    wire.rule = wire.rule or m.EXACT_RULE
    wire.run_ahead = wire.run_ahead or pb.RUN_AHEAD_AUTO
    opening = _from_wire(m.Open, wire)
    if not pictures:
        return opening
    _check_pictures(pictures, opening)
    return replace(opening, pictures=pictures)


def _check_pictures(pictures: Sequence[Picture], message: m.Open) -> None:
    check_count("Open.media.pictures", len(pictures), MAX_PICTURES)
    if not message.prefix_key:
        raise ProtocolViolation("Open.prefix_key is empty, but pictures are named under a key")
    position = -1
    for one in pictures:
        check_number("bytes of Picture.sha256", len(one.sha256), DIGEST_BYTES, DIGEST_BYTES)
        check_number("Picture.bytes", one.size_bytes, 1, MAX_PICTURE_BYTES)
        check_number("Picture.position", one.position, position + 1, message.prompt_length - 1)
        position = one.position


def _check_part(part: m.PicturePart) -> m.PicturePart:
    check_number("PicturePart.number", part.number, 0, MAX_PICTURES - 1)
    check_number("PicturePart.offset", part.offset, 0, MAX_PICTURE_BYTES - 1)
    check_number("bytes of PicturePart.data", len(part.data), 1, PART_BYTES)
    return part


def _check_missing(numbers: tuple[int, ...]) -> tuple[int, ...]:
    check_count("PicturesMissing.numbers", len(numbers), MAX_PICTURES, low=1)
    before = -1
    for number in numbers:
        check_number("PicturesMissing.numbers", number, before + 1, MAX_PICTURES - 1)
        before = number
    return numbers


def _check_open(message: m.Open | pb.Open, limits: WireLimits) -> None:
    check_number("Open.version", message.version, m.PROTOCOL_VERSION, m.PROTOCOL_VERSION)
    if not message.session_id:
        raise ProtocolViolation("Open.session_id is empty, but must have at least 1 byte")
    check_number("bytes of Open.session_secret", len(message.session_secret), 0, m.MAX_SECRET_BYTES)
    check_number("Open.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    check_number("bytes of Open.prefix_key", len(message.prefix_key), 0, m.MAX_SECRET_BYTES)
    prefix = message.prefix if isinstance(message, m.Open) or message.HasField("prefix") else None
    count = len(message.prompt) + len(message.committed)
    if prefix is not None:
        _check_prefix(prefix, message, limits)
        count += prefix.length
    if count > limits.context_length:
        why = f"Open has {count} tokens (prompt and committed)"
        raise ContextExceeded(f"{why}, but the context is {limits.context_length}")
    if prefix is None:
        check_count("Open.prompt", len(message.prompt), limits.context_length, low=1)


def _check_prefix(
    prefix: m.Prefix | pb.Prefix, message: m.Open | pb.Open, limits: WireLimits
) -> None:
    if prefix.length > limits.context_length:
        why = f"Open.prefix names {prefix.length} tokens"
        raise ContextExceeded(f"{why}, but the context is {limits.context_length}")
    check_number("Open.prefix.length", prefix.length, 1, limits.context_length)
    check_number("bytes of Open.prefix.name", len(prefix.name), NAME_BYTES, NAME_BYTES)
    if not message.prefix_key:
        raise ProtocolViolation("Open.prefix_key is empty, but a prefix is named under a key")
    most = prefix.length + len(message.prompt)
    least = most if message.prompt else 1
    check_number("Open.prefix.prompt_length", prefix.prompt_length, least, most)


def _check_picture_input(model: ModelInfo | pb.ModelInfo) -> None:
    if isinstance(model, pb.ModelInfo) and not model.HasField("pictures"):
        return
    if (bounds := model.pictures) is None:
        return
    check_number("PictureInput.token", bounds.token, 0, MAX_TOKEN_ID)
    check_number("PictureInput.max_count", bounds.max_count, 1, MAX_PICTURES)
    check_number("PictureInput.max_bytes", bounds.max_bytes, 1, MAX_PICTURE_BYTES)
    check_number("PictureInput.max_pixels", bounds.max_pixels, 1, MAX_UINT32)


def charged_bytes(message: m.Uplink, size: int) -> float:
    """Return the bytes that a message of ``size`` bytes counts in a budget of messages. The bytes
    of a picture are stored as they are, so they cost far less than as many bytes of token ids."""
    return size / _PICTURE_DISCOUNT if isinstance(message, m.PicturePart) else float(size)


def _check_info(info: m.VerifierInfo | pb.InfoReply) -> None:
    check_number("InfoReply.sessions", info.sessions, 0, info.max_sessions)
    models: list[ModelInfo | pb.ModelInfo] = [info.model, *info.adapters]
    for model in models:
        check_number("ModelInfo.vocabulary_size", model.vocabulary_size, 1, MAX_UINT32)
        check_number("ModelInfo.context_length", model.context_length, 1, MAX_UINT32)
        _check_picture_input(model)
    if (drafts := info.drafts) is not None:
        for source in ("device", "model", "text"):
            most = getattr(drafts, f"{source}_nodes")
            name = f"{source}_accepted"
            check_number(f"DraftTotals.{name}", getattr(drafts, name), 0, most)
