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
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final, assert_never

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    MAX_PRICE,
    MAX_SECRET_BYTES,
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Downlink,
    Draft,
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
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import MAX_LOGPROBS, TokenScore
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import (
    MAX_UINT32,
    MAX_UINT64,
    ProtocolViolation,
    WireLimits,
    check_context,
    check_count,
    check_member,
    check_number,
    check_text,
    check_tokens,
)


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


# Enum members by wire number.
_RUN_AHEAD: Final = {1: RunAhead.AUTO, 2: RunAhead.ALWAYS, 3: RunAhead.NEVER}
_RUN_AHEAD_NAME: Final = {m: pb.RunAhead.Name(n) for n, m in _RUN_AHEAD.items()}
_CONSTRAINT: Final = {
    1: ConstraintKind.JSON_SCHEMA,
    2: ConstraintKind.GRAMMAR,
    3: ConstraintKind.REGEX,
}
_CONSTRAINT_NAME: Final = {m: pb.ConstraintKind.Name(n) for n, m in _CONSTRAINT.items()}
_DEFAULT: Final = SamplingParams()


def encode_open(message: Open, limits: WireLimits) -> pb.Open:
    """Raises ``ProtocolViolation`` for a field over its bound."""
    _check_open(message, len(message.prompt), len(message.committed), limits)
    return pb.Open(
        version=message.version,
        session_id=message.session_id,
        model=message.model,
        vocabulary=message.vocabulary,
        prompt=check_tokens("Open.prompt", message.prompt, limits.vocabulary_size),
        committed=check_tokens("Open.committed", message.committed, limits.vocabulary_size),
        sampling=encode_sampling(message.sampling, limits),
        run_ahead=_RUN_AHEAD_NAME[message.run_ahead],
        rule="" if message.rule == EXACT_RULE else message.rule,
        drafting=message.drafting,
        session_secret=message.session_secret,
        logprobs=message.logprobs,
    )


def decode_open(wire: pb.Open, limits: WireLimits) -> Open:
    """Raises ``ProtocolViolation`` for a field over its bound, unknown versions and rules."""
    _check_open(wire, len(wire.prompt), len(wire.committed), limits)
    return Open(
        session_id=wire.session_id,
        model=wire.model,
        vocabulary=wire.vocabulary,
        prompt=check_tokens("Open.prompt", wire.prompt, limits.vocabulary_size),
        committed=check_tokens("Open.committed", wire.committed, limits.vocabulary_size),
        sampling=decode_sampling(wire.sampling, limits),
        run_ahead=check_member("Open.run_ahead", _RUN_AHEAD, wire.run_ahead or pb.RUN_AHEAD_AUTO),
        rule=wire.rule or EXACT_RULE,
        drafting=wire.drafting,
        version=wire.version,
        session_secret=wire.session_secret,
        logprobs=wire.logprobs,
    )


def _check_open(
    message: Open | pb.Open, prompt_length: int, committed_length: int, limits: WireLimits
) -> None:
    check_number("Open.version", message.version, PROTOCOL_VERSION, PROTOCOL_VERSION)
    if not message.session_id:
        raise ProtocolViolation("Open.session_id is empty, but must have at least 1 byte")
    check_text("Open.session_id", message.session_id, limits.max_session_id_bytes)
    check_text("Open.model", message.model, limits.max_name_bytes)
    check_text("Open.vocabulary", message.vocabulary, limits.max_name_bytes)
    check_text("Open.rule", message.rule, limits.max_rule_bytes)
    if (message.rule or EXACT_RULE) not in limits.rules:
        known = ", ".join(limits.rules)
        raise ProtocolViolation(f"Open.rule is {message.rule!r}, but must be one of: {known}")
    check_number("bytes of Open.session_secret", len(message.session_secret), 0, MAX_SECRET_BYTES)
    check_number("Open.logprobs", message.logprobs, 0, MAX_LOGPROBS)
    check_context(prompt_length + committed_length, limits)
    check_count("Open.prompt", prompt_length, limits.max_prompt_tokens, low=1)
    check_count("Open.committed", committed_length, limits.max_resumed_tokens)


def encode_sampling(sampling: SamplingParams, limits: WireLimits) -> pb.Sampling:
    """All but the stop strings, which end the text on the device."""
    _check(len(sampling.logit_bias), len(sampling.stop_token_ids), limits)
    check_tokens("Sampling.logit_bias", tuple(sampling.logit_bias), limits.vocabulary_size)
    wire = pb.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        seed=sampling.seed,
        stop_token_ids=check_tokens(
            "Sampling.stop_token_ids", sampling.stop_token_ids, limits.vocabulary_size
        ),
        ignore_eos=sampling.ignore_eos,
    )
    # These have defaults other than 0, so presence is explicit.
    if sampling.top_p != _DEFAULT.top_p:
        wire.top_p = sampling.top_p
    if sampling.repetition_penalty != _DEFAULT.repetition_penalty:
        wire.repetition_penalty = sampling.repetition_penalty
    if sampling.max_tokens != _DEFAULT.max_tokens:
        wire.max_tokens = sampling.max_tokens
    if (constraint := sampling.constraint) is not None:
        kind = _CONSTRAINT_NAME[constraint.kind]
        wire.constraint.CopyFrom(pb.Constraint(kind=kind, text=constraint.text))
    return wire


def decode_sampling(wire: pb.Sampling, limits: WireLimits) -> SamplingParams:
    """Raises ``ProtocolViolation`` with the text of ``SamplingParams`` for a value out of range."""
    _check(len(wire.logit_bias), len(wire.stop_token_ids), limits)
    check_tokens("Sampling.logit_bias", tuple(wire.logit_bias), limits.vocabulary_size)
    penalty = _DEFAULT.repetition_penalty
    try:
        return SamplingParams(
            temperature=wire.temperature,
            top_k=wire.top_k,
            top_p=wire.top_p if wire.HasField("top_p") else _DEFAULT.top_p,
            min_p=wire.min_p,
            repetition_penalty=(
                wire.repetition_penalty if wire.HasField("repetition_penalty") else penalty
            ),
            presence_penalty=wire.presence_penalty,
            frequency_penalty=wire.frequency_penalty,
            logit_bias=dict(wire.logit_bias),
            seed=wire.seed,
            stop_token_ids=check_tokens(
                "Sampling.stop_token_ids", wire.stop_token_ids, limits.vocabulary_size
            ),
            max_tokens=wire.max_tokens if wire.HasField("max_tokens") else _DEFAULT.max_tokens,
            ignore_eos=wire.ignore_eos,
            constraint=_decode_constraint(wire) if wire.HasField("constraint") else None,
        )
    except ProtocolViolation:
        raise
    except ValueError as error:
        raise ProtocolViolation(f"Sampling: {error}") from None


def _decode_constraint(wire: pb.Sampling) -> Constraint:
    kind = check_member("Constraint.kind", _CONSTRAINT, wire.constraint.kind)
    return Constraint(kind, wire.constraint.text)


def _check(bias_count: int, stop_count: int, limits: WireLimits) -> None:
    check_count("Sampling.logit_bias", bias_count, limits.max_biases)
    check_count("Sampling.stop_token_ids", stop_count, limits.max_stop_ids)


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
