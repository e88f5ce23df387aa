"""Whether a verifier takes an ``Open``; if not, the fault says which bound and what value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edgespec.core.protocol.messages import PROTOCOL_VERSION, Fault, FaultCode, Limits, Open
from edgespec.core.protocol.scores import MAX_LOGPROBS
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier.credential import ANYBODY, Credential


def limits_of(credential: Credential, limits: Limits) -> Limits:
    """The verifier's limits as they are for this credential: its context may be shorter."""
    own = credential.context_length
    return replace(limits, context_length=own) if 0 < own < limits.context_length else limits


def refuse_open(
    request: Open,
    model: ModelInfo,
    limits: Limits,
    rules: frozenset[str],
    credential: Credential = ANYBODY,
    served: Sequence[str] = (),
) -> Fault | None:
    """None when the request is fine. ``model`` is the one that it asks for, if that is served;
    ``served`` are the names of all, empty: there is one. ``limits`` are those of the credential."""
    if request.version != PROTOCOL_VERSION:
        why = f"protocol version {request.version} is not {PROTOCOL_VERSION}"
        return Fault(FaultCode.INVALID, why)
    if request.rule not in rules:
        why = f"unknown acceptance rule {request.rule!r}; known: {', '.join(sorted(rules))}"
        return Fault(FaultCode.INVALID, why)
    if request.model and request.model != model.name:
        known = ", ".join(map(repr, served or (model.name,)))
        why = f"unknown model {request.model!r}; this verifier serves {known}"
        return Fault(FaultCode.UNKNOWN_MODEL, why)
    if credential.models and model.name not in credential.models:
        known = ", ".join(map(repr, credential.models))
        why = f"key {credential.name!r} is for the models {known}, and this one is {model.name!r}"
        return Fault(FaultCode.UNKNOWN_MODEL, why)
    if request.vocabulary and request.vocabulary != model.vocabulary:
        why = (
            f"the draft's vocabulary {request.vocabulary} is not that of {model.name!r}, "
            f"{model.vocabulary}: both models must share one tokenizer"
        )
        return Fault(FaultCode.VOCABULARY_MISMATCH, why)
    if not 0 <= request.logprobs <= MAX_LOGPROBS:
        why = f"logprobs is {request.logprobs}, but must be in [0, {MAX_LOGPROBS}]"
        return Fault(FaultCode.INVALID, why)
    constraint = request.sampling.constraint
    if constraint is not None and constraint.matcher is None:
        why = f"this verifier holds no text to a {constraint.kind.value}"
        return Fault(FaultCode.INVALID, why)
    if constraint is not None and not model.eos_token_ids:
        why = f"{model.name!r} has no end token, with which a {constraint.kind.value} could end"
        return Fault(FaultCode.INVALID, why)
    return _refuse_tokens(request, model, limits, _whose(credential))


def _whose(credential: Credential) -> str:
    """Behind a context's length: whose limit it is, unless it is the verifier's own."""
    return f", the limit of key {credential.name!r}" if credential.context_length else ""


def _refuse_tokens(request: Open, model: ModelInfo, limits: Limits, whose: str) -> Fault | None:
    if not request.session_id:
        return Fault(FaultCode.INVALID, "session id is empty")
    if not request.prompt:
        return Fault(FaultCode.INVALID, "prompt is empty; it must have at least 1 token")
    length = len(request.prompt) + len(request.committed)
    if length >= limits.context_length and not request.committed:
        why = (
            f"prompt of {length} tokens does not leave room for output in the context of "
            f"{limits.context_length}{whose}"
        )
        return Fault(FaultCode.CONTEXT_TOO_LONG, why)
    if length > limits.context_length:
        why = f"{length} tokens held, but the context is {limits.context_length}{whose}"
        return Fault(FaultCode.CONTEXT_TOO_LONG, why)
    if len(request.committed) > request.sampling.max_tokens:
        why = (
            f"{len(request.committed)} generated tokens held, more than max_tokens "
            f"{request.sampling.max_tokens}"
        )
        return Fault(FaultCode.INVALID, why)
    size = model.vocabulary_size
    bad = next((t for t in (*request.prompt, *request.committed) if not 0 <= t < size), None)
    if bad is not None:
        return Fault(FaultCode.INVALID, f"token {bad} is outside the vocabulary of {size}")
    sampling = request.sampling
    for name, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("logit_bias", sampling.logit_bias),
    ):
        bad = next((t for t in ids if not 0 <= t < size), None)
        if bad is not None:
            why = f"token {bad} of {name} is outside the vocabulary of {size}"
            return Fault(FaultCode.INVALID, why)
    return None
