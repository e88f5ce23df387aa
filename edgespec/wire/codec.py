"""Messages to protobuf bytes and back, within bounds.

Theory of operation. ``encode_*`` and ``decode_*`` are total: they return a result or raise
``ProtocolViolation``, whatever the bytes or the message. The size of a message is checked before it
is parsed, the counts in it before anything is copied to Python, token ids against the vocabulary.
What another version may add (unknown fields) is ignored; what would change the meaning (unknown
enum values, rules, versions) is refused by name.

Two things do not travel: ``SamplingParams.stop`` (the device ends its text at these strings) and
the base of a draft on which no node hangs. A parent is sent as ``node id - parent id``, a small
varint, and as 0 for the base; when all of them are 1 they are left out. See
``protos/edgespec/v1/speculation.proto``.
"""

from __future__ import annotations

import math
from typing import Final, assert_never

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Downlink,
    Draft,
    Fault,
    FaultCode,
    Limits,
    Message,
    Open,
    Opened,
    Received,
    Uplink,
    VerifierInfo,
)
from edgespec.wire.commit_codec import decode_commit, encode_commit
from edgespec.wire.open_codec import decode_open, encode_open
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import (
    MAX_UINT32,
    MAX_UINT64,
    ProtocolViolation,
    WireLimits,
    check_count,
    check_member,
    check_number,
    check_text,
    check_tokens,
)

DEFAULT_LIMITS: Final = WireLimits()
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Verifier"].full_name

# Enum members by wire number; 0 is "unspecified" everywhere.
_FAULT: Final = {
    1: FaultCode.RESYNC,
    2: FaultCode.INVALID,
    3: FaultCode.UNKNOWN_MODEL,
    4: FaultCode.VOCABULARY_MISMATCH,
    5: FaultCode.CONTEXT_TOO_LONG,
    6: FaultCode.OVERLOADED,
    7: FaultCode.SHUTTING_DOWN,
    8: FaultCode.INTERNAL,
    9: FaultCode.UNAUTHENTICATED,
}
_FAULT_NAME: Final = {m: pb.FaultCode.Name(n) for n, m in _FAULT.items()}


# --- whole messages -------------------------------------------------------------------------


def encode_uplink(message: Uplink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes of one DeviceMessage. Raises ``ProtocolViolation`` for one over a bound."""
    match message:
        case Draft():
            wire = pb.DeviceMessage(draft=_encode_draft(message, limits))
        case Received(position, echo):
            check_number("Received.position", position, 0, MAX_UINT32)
            check_number("Received.echo", echo, 0, MAX_UINT64)
            wire = pb.DeviceMessage(received=pb.Received(position=position, echo=echo))
        case Cancel():
            wire = pb.DeviceMessage(cancel=pb.Cancel())
        case Open():
            wire = pb.DeviceMessage(open=encode_open(message, limits))
        case _:
            assert_never(message)
    return _serialised(wire, limits)


def decode_uplink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Uplink:
    """Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    _check_size(payload, limits)
    wire = pb.DeviceMessage()
    _parse(wire, payload)
    if wire.HasField("draft"):  # as nearly always
        return _decode_draft(wire.draft, limits)
    match wire.WhichOneof("kind"):
        case "received":
            return Received(wire.received.position, wire.received.echo)
        case "cancel":
            return Cancel()
        case "open":
            return decode_open(wire.open, limits)
    raise ProtocolViolation("DeviceMessage has no kind known here: draft, received, cancel or open")


def encode_downlink(message: Downlink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes of one VerifierMessage. Raises ``ProtocolViolation`` for one over a bound."""
    match message:
        case Commit():
            payload = encode_commit(message, limits)
            _check_size(payload, limits)
            return payload
        case Opened():
            wire = pb.VerifierMessage(opened=_encode_opened(message, limits))
        case Fault():
            wire = pb.VerifierMessage(fault=_encode_fault(message, limits))
        case _:
            assert_never(message)
    return _serialised(wire, limits)


def decode_downlink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Downlink:
    """Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    _check_size(payload, limits)
    wire = pb.VerifierMessage()
    _parse(wire, payload)
    match wire.WhichOneof("kind"):
        case "commit":
            return decode_commit(wire.commit, limits)
        case "opened":
            return _decode_opened(wire.opened, limits)
        case "fault":
            return _decode_fault(wire.fault, limits)
    raise ProtocolViolation("VerifierMessage has no kind known here: commit, opened or fault")


def payload_bytes(message: Message, limits: WireLimits = DEFAULT_LIMITS) -> int:
    """Length of the encoded message, in bytes, before any framing."""
    if isinstance(message, Opened | Commit | Fault):
        return len(encode_downlink(message, limits))
    return len(encode_uplink(message, limits))


def encode_info(info: VerifierInfo, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    """Bytes of the InfoReply. Raises ``ProtocolViolation`` for one over a bound."""
    wire = pb.InfoReply(
        model=_encode_model(info.model, limits),
        protocol_version=PROTOCOL_VERSION,
        limits=_encode_limits(info.limits),
        max_sessions=check_number("InfoReply.max_sessions", info.max_sessions, 0, MAX_UINT32),
        sessions=check_number("InfoReply.sessions", info.sessions, 0, info.max_sessions),
        pass_us=check_number("InfoReply.pass_us", info.pass_us, 0, MAX_UINT32),
        adapters=[_encode_model(one, limits) for one in info.adapters],
    )
    check_count("InfoReply.adapters", len(info.adapters), limits.max_adapters)
    return _serialised(wire, limits)


def decode_info(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> VerifierInfo:
    """Raises ``ProtocolViolation`` for malformed bytes and for a reply over a bound."""
    _check_size(payload, limits)
    wire = pb.InfoReply()
    _parse(wire, payload)
    check_count("InfoReply.adapters", len(wire.adapters), limits.max_adapters)
    return VerifierInfo(
        model=_decode_model(wire.model, limits),
        limits=_decode_limits(wire.limits),
        sessions=check_number("InfoReply.sessions", wire.sessions, 0, wire.max_sessions),
        max_sessions=wire.max_sessions,
        pass_us=wire.pass_us,
        adapters=tuple(_decode_model(one, limits) for one in wire.adapters),
    )


# --- device -> verifier ---------------------------------------------------------------------


def _encode_draft(draft: Draft, limits: WireLimits) -> pb.Draft:
    count, first = len(draft.tokens), draft.first_node_id
    if len(draft.parents) != count:
        raise ProtocolViolation(
            f"Draft.parents has {len(draft.parents)} entries, but must have one per token: {count}"
        )
    _check_node_ids(first, count, limits)
    deltas = []
    for node_id, parent in enumerate(draft.parents, first):
        if not 0 <= parent < node_id:  # the name of the field is put together for an error alone
            check_number(f"Draft.parents[{node_id - first}]", parent, 0, node_id - 1)
        deltas.append(node_id - parent if parent else 0)
    wire = pb.Draft(
        first_node_id=first,
        tokens=check_tokens("Draft.tokens", draft.tokens, limits.vocabulary_size),
        parent_deltas=() if set(deltas) == {1} else deltas,
    )
    if 0 in draft.parents:
        wire.base_position = check_number("Draft.base_position", draft.base_position, 1, MAX_UINT32)
        wire.base_hash = check_number("Draft.base_hash", draft.base_hash, 0, MAX_UINT32)
    return wire


def _decode_draft(wire: pb.Draft, limits: WireLimits) -> Draft:
    sent, given = wire.tokens, wire.parent_deltas
    count, first = len(sent), wire.first_node_id
    if not (0 < count <= limits.max_draft_nodes and 0 < first <= MAX_UINT32 - count):
        _check_node_ids(first, count, limits)
    if given and len(given) != count:
        raise ProtocolViolation(
            f"Draft.parent_deltas has {len(given)} entries, but must have none or {count}"
        )
    tokens, deltas = tuple(sent[:]), given[:] or [1] * count
    parents = tuple([at - delta if delta else 0 for at, delta in enumerate(deltas, first)])
    if count and min(parents) <= 0:
        for at, delta in enumerate(deltas):
            if not 0 <= delta < first + at:
                check_number(f"Draft.parent_deltas[{at}]", delta, 0, first + at - 1)
    if count and max(tokens) >= limits.vocabulary_size:  # and none is negative on the wire
        check_tokens("Draft.tokens", tokens, limits.vocabulary_size)
    if 0 not in parents:
        return Draft(first, parents, tokens)
    position = check_number("Draft.base_position", wire.base_position, 1, MAX_UINT32)
    return Draft(first, parents, tokens, position, wire.base_hash)


def _check_node_ids(first: int, count: int, limits: WireLimits) -> None:
    check_count("Draft.tokens", count, limits.max_draft_nodes)
    high = MAX_UINT32 - max(count - 1, 0)
    check_number("Draft.first_node_id", first, 1 if count else 0, high)


# --- verifier -> device ---------------------------------------------------------------------


def _encode_opened(opened: Opened, limits: WireLimits) -> pb.Opened:
    return pb.Opened(
        limits=_encode_limits(opened.limits),
        model=check_text("Opened.model", opened.model, limits.max_name_bytes),
        position=check_number("Opened.position", opened.position, 0, MAX_UINT32),
        fingerprint=check_text("Opened.fingerprint", opened.fingerprint, limits.max_name_bytes),
        constrained=opened.constrained,
    )


def _decode_opened(wire: pb.Opened, limits: WireLimits) -> Opened:
    return Opened(
        limits=_decode_limits(wire.limits),
        model=check_text("Opened.model", wire.model, limits.max_name_bytes),
        position=wire.position,
        fingerprint=check_text("Opened.fingerprint", wire.fingerprint, limits.max_name_bytes),
        constrained=wire.constrained,
    )


def _encode_fault(fault: Fault, limits: WireLimits) -> pb.Fault:
    # Cut, not refused: a fault has to arrive.
    text = fault.message.encode(errors="replace")[: limits.max_fault_bytes]
    return pb.Fault(
        code=_FAULT_NAME[fault.code],
        message=text.decode(errors="ignore"),
        retry_after_s=_seconds("Fault.retry_after_s", fault.retry_after_s),
    )


def _decode_fault(wire: pb.Fault, limits: WireLimits) -> Fault:
    size = len(wire.message.encode())
    check_number("bytes of Fault.message", size, 0, limits.max_fault_bytes)
    return Fault(
        code=check_member("Fault.code", _FAULT, wire.code),
        message=wire.message,
        retry_after_s=_seconds("Fault.retry_after_s", wire.retry_after_s),
    )


# --- parts ----------------------------------------------------------------------------------


_LIMIT_COUNTS: Final = (
    "context_length",
    "max_nodes_outstanding",
    "max_nodes_per_pass",
    "max_unreceived",
)


def _encode_limits(bounds: Limits) -> pb.Limits:
    wire = pb.Limits(lease_s=_seconds("Limits.lease_s", bounds.lease_s))
    for name in _LIMIT_COUNTS:
        setattr(wire, name, check_number(f"Limits.{name}", getattr(bounds, name), 0, MAX_UINT32))
    return wire


def _decode_limits(wire: pb.Limits) -> Limits:
    return Limits(
        **{name: getattr(wire, name) for name in _LIMIT_COUNTS},
        lease_s=_seconds("Limits.lease_s", wire.lease_s),
    )


def _encode_model(model: ModelInfo, limits: WireLimits) -> pb.ModelInfo:
    _check_model(model, limits)
    return pb.ModelInfo(
        name=model.name,
        vocabulary=model.vocabulary,
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        eos_token_ids=model.eos_token_ids,
        fingerprint=model.fingerprint,
    )


def _decode_model(wire: pb.ModelInfo, limits: WireLimits) -> ModelInfo:
    _check_model(wire, limits)
    return ModelInfo(
        name=wire.name,
        vocabulary=wire.vocabulary,
        vocabulary_size=wire.vocabulary_size,
        context_length=wire.context_length,
        eos_token_ids=tuple(wire.eos_token_ids),
        fingerprint=wire.fingerprint,
    )


def _check_model(model: ModelInfo | pb.ModelInfo, limits: WireLimits) -> None:
    check_text("ModelInfo.name", model.name, limits.max_name_bytes)
    check_text("ModelInfo.vocabulary", model.vocabulary, limits.max_name_bytes)
    check_text("ModelInfo.fingerprint", model.fingerprint, limits.max_name_bytes)
    check_number("ModelInfo.vocabulary_size", model.vocabulary_size, 1, MAX_UINT32)
    check_number("ModelInfo.context_length", model.context_length, 1, MAX_UINT32)
    check_count("ModelInfo.eos_token_ids", len(model.eos_token_ids), limits.max_stop_ids)
    check_tokens("ModelInfo.eos_token_ids", model.eos_token_ids, limits.vocabulary_size)


def _serialised(wire: ProtobufMessage, limits: WireLimits) -> bytes:
    payload = wire.SerializeToString()
    _check_size(payload, limits)
    return payload


def _check_size(payload: bytes, limits: WireLimits) -> None:
    if len(payload) > limits.max_message_bytes:
        check_number("bytes of the message", len(payload), 0, limits.max_message_bytes)


def _parse(wire: ProtobufMessage, payload: bytes) -> None:
    try:
        wire.ParseFromString(payload)
    except DecodeError as error:
        raise ProtocolViolation(
            f"{len(payload)} bytes are not a {type(wire).__name__}: {error}"
        ) from None


def _seconds(field: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise ProtocolViolation(f"{field} is {value}, but must be finite and not negative")
    return value
