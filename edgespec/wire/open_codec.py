"""``Open`` and its sampling parameters to protobuf and back; defaults are left out."""

from __future__ import annotations

from typing import Final

from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    MAX_SECRET_BYTES,
    PROTOCOL_VERSION,
    Open,
    RunAhead,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import MAX_LOGPROBS
from edgespec.wire.pb import speculation_pb2 as pb
from edgespec.wire.wire_limits import (
    ProtocolViolation,
    WireLimits,
    check_context,
    check_count,
    check_member,
    check_number,
    check_text,
    check_tokens,
)

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
