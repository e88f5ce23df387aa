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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import attrgetter
from typing import Any, Final, TypeVar, assert_never

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    MAX_ADAPTERS,
    MAX_COMMIT_TOKENS,
    MAX_NAME_BYTES,
    MAX_PRICE,
    MAX_SECRET_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Downlink,
    Draft,
    DraftTotals,
    Fault,
    FaultCode,
    FinishReason,
    Limits,
    Message,
    Open,
    Opened,
    Received,
    RunAhead,
    Uplink,
    VerifierInfo,
)
from edgespec.core.protocol.sampling import MAX_BIASES, MAX_STOP_IDS, SamplingParams
from edgespec.core.protocol.work import MAX_LOGPROBS, TokenScore
from edgespec.wire.pb import speculation_pb2 as pb

MAX_UINT32 = (1 << 32) - 1
MAX_UINT64 = (1 << 64) - 1
WINDOW_BYTES = 1 << 18
"""Unread data of one stream that its sender may have under way (HTTP/2 flow control)."""
# Of a token id below 2^28, and of what an Open holds besides tokens: names, biases, stop ids.
_TOKEN_BYTES, _OPEN_BYTES = 4, 1 << 16
_MAX_SESSION_ID_BYTES: Final = 128
_MAX_RULE_BYTES: Final = 64
_MAX_FAULT_BYTES: Final = 1024
"""A longer fault text is cut when it is sent."""
_E = TypeVar("_E", bound=Enum)


class ProtocolViolation(ValueError):
    """A message breaks the protocol; the text names the field, the value and the bound."""

    code = FaultCode.INVALID
    """What the peer is told when it sent the message."""


class ContextExceeded(ProtocolViolation):
    """An Open holds more tokens than the context that is served."""

    code = FaultCode.CONTEXT_TOO_LONG


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The bounds of what one end sends and accepts. Both directions of the codec enforce them."""

    max_message_bytes: int = 1 << 20
    max_prompt_tokens: int = 32768
    max_resumed_tokens: int = 32768
    """Committed tokens in an Open."""
    context_length: int = 65536
    """Tokens in an Open: prompt and committed together."""
    max_draft_nodes: int = 256
    """Nodes in one Draft."""
    max_commit_tokens: int = MAX_COMMIT_TOKENS
    """Tokens in one Commit."""
    vocabulary_size: int = 1 << 24
    """Token ids are below it. Unless told, more than any vocabulary has."""

    @classmethod
    def for_context(cls, context_length: int) -> WireLimits:
        """The limits of an end that handles no more than ``context_length`` tokens a session.

        A message may have the bytes of the longest Open that fits. It may also have those of one
        flow-control window, which a peer can make us hold anyway: so an Open that is somewhat too
        long is refused by its count of tokens, in words about tokens. For a context of 1,024 that
        is 262,144 bytes, for one of 131,072 it is 4 * 131,072 + 65,536 = 589,824.
        """
        return cls(
            max_message_bytes=max(WINDOW_BYTES, _TOKEN_BYTES * context_length + _OPEN_BYTES),
            max_prompt_tokens=context_length,
            max_resumed_tokens=context_length,
            context_length=context_length,
        )


def check_number(field: str, value: int, low: int, high: int) -> int:
    """``value`` itself. Raises ``ProtocolViolation`` outside [low, high]."""
    if not low <= value <= high:
        raise ProtocolViolation(f"{field} is {value}, but must be in [{low}, {high}]")
    return value


def check_count(field: str, count: int, high: int, low: int = 0) -> None:
    if not low <= count <= high:
        raise ProtocolViolation(f"{field} has {count} entries, but must have {low} to {high}")


def check_context(count: int, limits: WireLimits) -> None:
    if count > limits.context_length:
        raise ContextExceeded(
            f"Open has {count} tokens (prompt and committed), "
            f"but the context is {limits.context_length}"
        )


def check_text(field: str, text: str, max_bytes: int) -> str:
    """``text`` itself. Raises ``ProtocolViolation`` for one that is too long or not printable."""
    size = len(text.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise ProtocolViolation(f"{field} has {size} bytes, but must have at most {max_bytes}")
    if not text.isprintable():
        raise ProtocolViolation(f"{field} is {text!r}, but must be printable")
    return text


def check_tokens(field: str, tokens: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """The tokens as a tuple. Raises ``ProtocolViolation`` naming the first one out of range."""
    found = tuple(tokens)
    if found and not (min(found) >= 0 and max(found) < vocabulary_size):
        index = next(i for i, token in enumerate(found) if not 0 <= token < vocabulary_size)
        check_number(f"{field}[{index}]", found[index], 0, vocabulary_size - 1)
    return found


def check_member(field: str, members: Mapping[int, _E], number: int) -> _E:
    """The enum member with that wire number. Raises ``ProtocolViolation`` for unknown numbers."""
    if number not in members:
        known = ", ".join(f"{n} ({member.name})" for n, member in members.items())
        raise ProtocolViolation(f"{field} is {number}, but must be one of: {known}")
    return members[number]


DEFAULT_LIMITS: Final = WireLimits()
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Verifier"].full_name


def _by_number(members: type[_E], wire: Any) -> dict[int, _E]:
    """The members by their numbers on the wire, where a name has the enum's own before it; 0 is
    "unspecified" everywhere."""
    found: dict[int, str] = {number: name for name, number in wire.items() if number}
    return {
        number: next(one for one in members if name.endswith(f"_{one.name}"))
        for number, name in found.items()
    }


_FINISH: Final = _by_number(FinishReason, pb.FinishReason)
_RUN_AHEAD: Final = _by_number(RunAhead, pb.RunAhead)
_CONSTRAINT: Final = _by_number(ConstraintKind, pb.ConstraintKind)
_FAULT: Final = _by_number(FaultCode, pb.FaultCode)
_NUMBER: Final[dict[Enum, Any]] = {
    member: number
    for members in (_FINISH, _RUN_AHEAD, _CONSTRAINT, _FAULT)
    for number, member in members.items()
}
# The wire has one word for both; the device tells them apart.
_NUMBER[FinishReason.CONTEXT] = _NUMBER[FinishReason.LENGTH]


def encode_uplink(message: Uplink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
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
            wire = pb.DeviceMessage(open=_encode_open(message, limits))
        case _:
            assert_never(message)
    return _serialised(wire, limits)


def decode_uplink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Uplink:
    """Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    _check_size(payload, limits)
    wire = pb.DeviceMessage()
    parse(wire, payload)
    if wire.HasField("draft"):  # as nearly always
        return _decode_draft(wire.draft, limits)
    match wire.WhichOneof("kind"):
        case "received":
            return Received(wire.received.position, wire.received.echo)
        case "cancel":
            return Cancel()
        case "open":
            return _decode_open(wire.open, limits)
    raise ProtocolViolation("DeviceMessage has no kind known here: draft, received, cancel or open")


def encode_downlink(message: Downlink, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    match message:
        case Commit():
            wire = _encode_commit(message, limits)
        case Opened():
            _check_opened(message)
            bounds = _encode_limits(message.limits)
            wire = pb.VerifierMessage(opened=pb.Opened(limits=bounds, **_same(message, _OPENED)))
        case Fault():
            wire = pb.VerifierMessage(fault=_encode_fault(message))
        case _:
            assert_never(message)
    return _serialised(wire, limits)


def decode_downlink(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> Downlink:
    """Raises ``ProtocolViolation`` for malformed bytes and for a message over a bound."""
    _check_size(payload, limits)
    wire = pb.VerifierMessage()
    parse(wire, payload)
    match wire.WhichOneof("kind"):
        case "commit":
            return _decode_commit(wire.commit, limits)
        case "opened":
            _check_opened(wire.opened)
            return Opened(_decode_limits(wire.opened.limits), **_same(wire.opened, _OPENED))
        case "fault":
            return _decode_fault(wire.fault)
    raise ProtocolViolation("VerifierMessage has no kind known here: commit, opened or fault")


def payload_bytes(message: Message, limits: WireLimits = DEFAULT_LIMITS) -> int:
    """Length of the encoded message, in bytes, before any framing."""
    if isinstance(message, Opened | Commit | Fault):
        return len(encode_downlink(message, limits))
    return len(encode_uplink(message, limits))


def encode_info(info: VerifierInfo, limits: WireLimits = DEFAULT_LIMITS) -> bytes:
    if info.drafts is not None:
        _check_totals(info.drafts)
    check_number("InfoReply.max_sessions", info.max_sessions, 0, MAX_UINT32)
    check_number("InfoReply.pass_us", info.pass_us, 0, MAX_UINT32)
    _check_info(info, limits)
    wire = pb.InfoReply(
        model=pb.ModelInfo(**_same(info.model, _MODEL)),
        protocol_version=PROTOCOL_VERSION,
        limits=_encode_limits(info.limits),
        adapters=[pb.ModelInfo(**_same(one, _MODEL)) for one in info.adapters],
        drafts=None if info.drafts is None else pb.DraftTotals(**_same(info.drafts, _TOTALS)),
        **_same(info, _INFO),
    )
    return _serialised(wire, limits)


def decode_info(payload: bytes, limits: WireLimits = DEFAULT_LIMITS) -> VerifierInfo:
    _check_size(payload, limits)
    wire = pb.InfoReply()
    parse(wire, payload)
    _check_info(wire, limits)
    return VerifierInfo(
        model=_decode_model(wire.model),
        limits=_decode_limits(wire.limits),
        adapters=tuple(map(_decode_model, wire.adapters)),
        drafts=_decode_totals(wire.drafts) if wire.HasField("drafts") else None,
        **_same(wire, _INFO),
    )


def parse(wire: ProtobufMessage, payload: bytes) -> None:
    """Read ``payload`` into ``wire``. Raises ``ProtocolViolation``."""
    try:
        wire.ParseFromString(payload)
    except DecodeError as error:
        raise ProtocolViolation(
            f"{len(payload)} bytes are not a {type(wire).__name__}: {error}"
        ) from None


def _serialised(wire: ProtobufMessage, limits: WireLimits) -> bytes:
    payload = wire.SerializeToString()
    _check_size(payload, limits)
    return payload


def _check_size(payload: bytes, limits: WireLimits) -> None:
    if len(payload) > limits.max_message_bytes:
        check_number("bytes of the message", len(payload), 0, limits.max_message_bytes)


# Fields that have the same name and the same form here and on the wire.
_OPENED: Final = ("model", "position", "fingerprint", "constrained")
_INFO: Final = ("max_sessions", "sessions", "pass_us")
_DRAFTED: Final = (
    *(("device_nodes", "device_accepted"), ("model_nodes", "model_accepted")),
    ("text_nodes", "text_accepted"),
)
_TOTALS: Final = (*chain(*_DRAFTED), "model_steps", "model_us", "model_failures")
_MODEL: Final = (
    *("name", "vocabulary", "fingerprint"),
    *("vocabulary_size", "context_length", "eos_token_ids"),
)
_OPEN: Final = (
    *("version", "session_id", "model", "vocabulary"),
    *("drafting", "session_secret", "logprobs"),
)
_SAMPLING: Final = (
    *("temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "seed", "stop_token_ids", "ignore_eos"),
)
_SAMPLING_OTHER_THAN_0: Final = ("top_p", "repetition_penalty", "max_tokens")
"""Their defaults are, so presence is explicit."""
_LIMITS: Final = (
    *("context_length", "max_nodes_outstanding"),
    *("max_nodes_per_pass", "max_unreceived"),
)
_COMMIT_COUNTS: Final = ("position", "stale", "queue_us", "verify_us", "rows", "held_us")
_commit_counts: Final = attrgetter(*_COMMIT_COUNTS)


def _same(source: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


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


def _encode_commit(commit: Commit, limits: WireLimits) -> pb.VerifierMessage:
    """To name all fields in the constructors takes three times as long."""
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
        wire.finish = _NUMBER[commit.finish]
    if commit.row_price is not None:
        wire.row_price = check_number("Commit.row_price", commit.row_price, 0, MAX_PRICE)
    if commit.credit is not None:
        wire.credit = check_number("Commit.credit", commit.credit, 0, MAX_UINT32)
    if commit.logprobs:
        wire.logprobs.extend(_encode_scores(commit.logprobs, count, limits))
    return message


def _decode_commit(wire: pb.Commit, limits: WireLimits) -> Commit:
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
        logprobs=_decode_scores(scores, len(wire.tokens), limits) if scores else (),
    )


def _check_commit(commit: Commit | pb.Commit, count: int, limits: WireLimits) -> None:
    check_count("Commit.tokens", count, limits.max_commit_tokens)
    check_number("Commit.position", commit.position, 0, MAX_UINT32 - count)
    check_number("Commit.accepted", commit.accepted, 0, count)


def _encode_scores(
    scores: Sequence[TokenScore], token_count: int, limits: WireLimits
) -> list[pb.TokenScore]:
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


def _decode_scores(
    wire: Sequence[pb.TokenScore], token_count: int, limits: WireLimits
) -> tuple[TokenScore, ...]:
    _check_length(len(wire), token_count)
    return tuple([_decode_score(score, limits) for score in wire])


def _decode_score(wire: pb.TokenScore, limits: WireLimits) -> TokenScore:
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


def _encode_open(message: Open, limits: WireLimits) -> pb.Open:
    _check_open(message, len(message.prompt), len(message.committed), limits)
    return pb.Open(
        prompt=check_tokens("Open.prompt", message.prompt, limits.vocabulary_size),
        committed=check_tokens("Open.committed", message.committed, limits.vocabulary_size),
        sampling=_encode_sampling(message.sampling, limits),
        run_ahead=_NUMBER[message.run_ahead],
        rule="" if message.rule == EXACT_RULE else message.rule,
        **_same(message, _OPEN),
    )


def _decode_open(wire: pb.Open, limits: WireLimits) -> Open:
    _check_open(wire, len(wire.prompt), len(wire.committed), limits)
    return Open(
        prompt=check_tokens("Open.prompt", wire.prompt, limits.vocabulary_size),
        committed=check_tokens("Open.committed", wire.committed, limits.vocabulary_size),
        sampling=_decode_sampling(wire.sampling, limits),
        run_ahead=check_member("Open.run_ahead", _RUN_AHEAD, wire.run_ahead or pb.RUN_AHEAD_AUTO),
        rule=wire.rule or EXACT_RULE,
        **_same(wire, _OPEN),
    )


def _check_open(
    message: Open | pb.Open, prompt_length: int, committed_length: int, limits: WireLimits
) -> None:
    check_number("Open.version", message.version, PROTOCOL_VERSION, PROTOCOL_VERSION)
    if not message.session_id:
        raise ProtocolViolation("Open.session_id is empty, but must have at least 1 byte")
    check_text("Open.session_id", message.session_id, _MAX_SESSION_ID_BYTES)
    _check_names("Open", message, ("model", "vocabulary"))
    check_text("Open.rule", message.rule, _MAX_RULE_BYTES)
    if message.rule not in ("", EXACT_RULE):
        raise ProtocolViolation(f"Open.rule is {message.rule!r}, but must be one of: {EXACT_RULE}")
    check_number("bytes of Open.session_secret", len(message.session_secret), 0, MAX_SECRET_BYTES)
    check_number("Open.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    check_context(prompt_length + committed_length, limits)
    check_count("Open.prompt", prompt_length, limits.max_prompt_tokens, low=1)
    check_count("Open.committed", committed_length, limits.max_resumed_tokens)


def _encode_sampling(sampling: SamplingParams, limits: WireLimits) -> pb.Sampling:
    """All but the stop strings, which end the text on the device."""
    _check_sampling(sampling, limits)
    wire = pb.Sampling(**_same(sampling, _SAMPLING))
    for name in _SAMPLING_OTHER_THAN_0:
        if (value := getattr(sampling, name)) != getattr(_DEFAULT, name):
            setattr(wire, name, value)
    if (constraint := sampling.constraint) is not None:
        kind = _NUMBER[constraint.kind]
        wire.constraint.CopyFrom(pb.Constraint(kind=kind, text=constraint.text))
    return wire


def _decode_sampling(wire: pb.Sampling, limits: WireLimits) -> SamplingParams:
    """Raises ``ProtocolViolation`` with the text of ``SamplingParams`` for a value out of range."""
    _check_sampling(wire, limits)
    given = _same(wire, _SAMPLING)
    given |= {name: getattr(wire, name) for name in _SAMPLING_OTHER_THAN_0 if wire.HasField(name)}
    given["logit_bias"] = dict(wire.logit_bias)
    given["stop_token_ids"] = tuple(wire.stop_token_ids)
    try:
        if wire.HasField("constraint"):
            kind = check_member("Constraint.kind", _CONSTRAINT, wire.constraint.kind)
            given["constraint"] = Constraint(kind, wire.constraint.text)
        return SamplingParams(**given)
    except ProtocolViolation:
        raise
    except ValueError as error:
        raise ProtocolViolation(f"Sampling: {error}") from None


_DEFAULT: Final = SamplingParams()


def _check_sampling(sampling: SamplingParams | pb.Sampling, limits: WireLimits) -> None:
    stops, biases = sampling.stop_token_ids, sampling.logit_bias
    check_count("Sampling.logit_bias", len(biases), MAX_BIASES)
    check_count("Sampling.stop_token_ids", len(stops), MAX_STOP_IDS)
    check_tokens("Sampling.logit_bias", tuple(biases), limits.vocabulary_size)
    check_tokens("Sampling.stop_token_ids", stops, limits.vocabulary_size)


def _check_names(where: str, message: object, names: Sequence[str]) -> None:
    for name in names:
        check_text(f"{where}.{name}", getattr(message, name), MAX_NAME_BYTES)


def _check_opened(opened: Opened | pb.Opened) -> None:
    _check_names("Opened", opened, ("model", "fingerprint"))
    check_number("Opened.position", opened.position, 0, MAX_UINT32)


def _encode_fault(fault: Fault) -> pb.Fault:
    # Cut, not refused: a fault has to arrive.
    text = fault.message.encode(errors="replace")[:_MAX_FAULT_BYTES]
    return pb.Fault(
        code=_NUMBER[fault.code],
        message=text.decode(errors="ignore"),
        retry_after_s=_seconds("Fault.retry_after_s", fault.retry_after_s),
    )


def _decode_fault(wire: pb.Fault) -> Fault:
    size = len(wire.message.encode())
    check_number("bytes of Fault.message", size, 0, _MAX_FAULT_BYTES)
    return Fault(
        code=check_member("Fault.code", _FAULT, wire.code),
        message=wire.message,
        retry_after_s=_seconds("Fault.retry_after_s", wire.retry_after_s),
    )


def _encode_limits(bounds: Limits) -> pb.Limits:
    for name in _LIMITS:
        check_number(f"Limits.{name}", getattr(bounds, name), 0, MAX_UINT32)
    lease_s = _seconds("Limits.lease_s", bounds.lease_s)
    return pb.Limits(lease_s=lease_s, **_same(bounds, _LIMITS))


def _decode_limits(wire: pb.Limits) -> Limits:
    return Limits(lease_s=_seconds("Limits.lease_s", wire.lease_s), **_same(wire, _LIMITS))


def _decode_model(wire: pb.ModelInfo) -> ModelInfo:
    return ModelInfo(**_same(wire, _MODEL) | {"eos_token_ids": tuple(wire.eos_token_ids)})


def _decode_totals(wire: pb.DraftTotals) -> DraftTotals:
    _check_totals(wire)
    return DraftTotals(**_same(wire, _TOTALS))


def _check_totals(totals: DraftTotals | pb.DraftTotals) -> None:
    for name in _TOTALS:
        check_number(f"DraftTotals.{name}", getattr(totals, name), 0, MAX_UINT64)
    for nodes, accepted in _DRAFTED:
        most = getattr(totals, nodes)
        check_number(f"DraftTotals.{accepted}", getattr(totals, accepted), 0, most)


def _check_info(info: VerifierInfo | pb.InfoReply, limits: WireLimits) -> None:
    check_number("InfoReply.sessions", info.sessions, 0, info.max_sessions)
    check_count("InfoReply.adapters", len(info.adapters), MAX_ADAPTERS)
    models: list[ModelInfo | pb.ModelInfo] = [info.model, *info.adapters]
    for model in models:
        _check_names("ModelInfo", model, ("name", "vocabulary", "fingerprint"))
        check_number("ModelInfo.vocabulary_size", model.vocabulary_size, 1, MAX_UINT32)
        check_number("ModelInfo.context_length", model.context_length, 1, MAX_UINT32)
        check_count("ModelInfo.eos_token_ids", len(model.eos_token_ids), MAX_STOP_IDS)
        check_tokens("ModelInfo.eos_token_ids", model.eos_token_ids, limits.vocabulary_size)


def _seconds(field: str, value: float) -> float:
    if not 0.0 <= value < math.inf:
        raise ProtocolViolation(f"{field} is {value}, but must be finite and not negative")
    return value
