"""Admission checks for an ``Open`` message, and the slots that bound how many sessions are held."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from edgespec.core.protocol.acceptance import explain_rule_refusal
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.estimators import MovingAverage
from edgespec.core.protocol.messages import PROTOCOL_VERSION, Fault, FaultCode, Limits, Open
from edgespec.core.protocol.work import MAX_LOGPROBS, ModelInfo
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.session import VerifySession

_SHOWN = 8
"""Positions that an error shows."""


def limits_of(credential: Credential, limits: Limits) -> Limits:
    """Return ``limits`` with the credential's own context length, if that is smaller."""
    own = credential.context_length
    return replace(limits, context_length=own) if 0 < own < limits.context_length else limits


def refuse_open(
    request: Open,
    model: ModelInfo,
    limits: Limits,
    rules: Collection[str],
    credential: Credential = ANYBODY,
    served: Sequence[str] = (),
    extra_tokens: int = 0,
) -> Fault | None:
    """Return the fault that refuses ``request``, or None if it is admissible.

    ``model`` is the served model that the request names, or the default model. ``served`` lists the
    names of all served models; empty means that ``model`` is the only one. ``limits`` are the
    limits of the credential (``limits_of``). ``rules`` are the offered acceptance rules, as in
    ``EngineLimits``. ``extra_tokens`` are the rows of the pictures, less their placeholders; 0
    until they are read.
    """
    if extra_tokens and (why := _explain_no_room(request, limits, extra_tokens)):
        return Fault(FaultCode.CONTEXT_TOO_LONG, why)
    limits = shorten_context(limits, extra_tokens)
    faults = _request_faults(request, model, rules, credential, served or (model.name,))
    return next(chain(faults, _token_faults(request, model, limits, credential)), None)


def shorten_context(limits: Limits, extra_tokens: int) -> Limits:
    """Return ``limits`` with the context that is left beside the rows of pictures."""
    if not extra_tokens:
        return limits
    return replace(limits, context_length=max(1, limits.context_length - extra_tokens))


def _explain_no_room(request: Open, limits: Limits, extra_tokens: int) -> str | None:
    length = len(request.prompt) + len(request.committed)
    if length + extra_tokens < limits.context_length:
        return None
    count = len(request.pictures)
    return (
        f"{length} tokens and {count} pictures, which take {extra_tokens} rows more, do not leave"
        f" room for output in the context of {limits.context_length}"
    )


def _request_faults(
    request: Open,
    model: ModelInfo,
    rules: Collection[str],
    credential: Credential,
    served: Sequence[str],
) -> Iterator[Fault]:
    invalid = partial(Fault, FaultCode.INVALID)
    if request.version != PROTOCOL_VERSION:
        yield invalid(f"protocol version {request.version} is not {PROTOCOL_VERSION}")
    if (why := explain_rule_refusal(request.rule, rules)) is not None:
        yield invalid(why)
    if request.model and request.model != model.name:
        known = ", ".join(map(repr, served))
        why = f"unknown model {request.model!r}; this verifier serves {known}"
        yield Fault(FaultCode.UNKNOWN_MODEL, why)
    if credential.models and model.name not in credential.models:
        known = ", ".join(map(repr, credential.models))
        why = f"key {credential.name!r} is for the models {known}, and this one is {model.name!r}"
        yield Fault(FaultCode.UNKNOWN_MODEL, why)
    if request.vocabulary and request.vocabulary != model.vocabulary:
        why = (
            f"the draft's vocabulary {request.vocabulary} is not that of {model.name!r}, "
            f"{model.vocabulary}: both models must share one tokenizer"
        )
        yield Fault(FaultCode.VOCABULARY_MISMATCH, why)
    if not 0 <= request.logprobs <= MAX_LOGPROBS:
        yield invalid(f"logprobs is {request.logprobs}, but must be in [0, {MAX_LOGPROBS}]")
    yield from map(invalid, _picture_faults(request, model))
    if (constraint := request.sampling.constraint) is not None:
        kind = constraint.kind.value
        if constraint.matcher is None:
            why = "send the request without it, or to another verifier"
            yield invalid(f"this verifier does not support {kind} constraints: {why}")
        if not model.eos_token_ids:
            yield invalid(
                f"{model.name!r} has no end token, so an output under a {kind} cannot end"
            )


def _picture_faults(request: Open, model: ModelInfo) -> Iterator[str]:
    """Yield what is wrong with the pictures of a prompt, by their names and placeholders."""
    pictures, bounds = request.pictures, model.pictures
    if not pictures:
        return
    if bounds is None:
        yield f"{model.name!r} reads text only here, but the prompt has {len(pictures)} pictures"
        return
    if len(pictures) > bounds.max_count:
        yield f"the prompt has {len(pictures)} pictures, but may have at most {bounds.max_count}"
    for number, one in enumerate(pictures):
        if one.size_bytes > bounds.max_bytes:
            yield (
                f"picture {number} has {one.size_bytes} bytes, but a picture may have at most"
                f" {bounds.max_bytes}"
            )
    if request.prefix is None:
        found = [at for at, token in enumerate(request.prompt) if token == bounds.token]
        if found != [one.position for one in pictures]:
            yield (
                f"the placeholders of pictures (token {bounds.token}) stand at {found[:_SHOWN]} in"
                f" the prompt, but the pictures at {[one.position for one in pictures][:_SHOWN]}"
            )


def _token_faults(
    request: Open, model: ModelInfo, limits: Limits, credential: Credential
) -> Iterator[Fault]:
    invalid, sampling = partial(Fault, FaultCode.INVALID), request.sampling
    if not request.session_id:
        yield invalid("session id is empty")
    if not request.prompt:
        yield invalid("prompt is empty; it must have at least 1 token")
    whose = f", the limit of key {credential.name!r}" if credential.context_length else ""
    length, held = len(request.prompt) + len(request.committed), len(request.committed)
    if length >= limits.context_length and not held:
        why = (
            f"prompt of {length} tokens does not leave room for output in the context of "
            f"{limits.context_length}{whose}"
        )
        yield Fault(FaultCode.CONTEXT_TOO_LONG, why)
    if length > limits.context_length:
        why = f"the device holds {length} tokens, but the context is {limits.context_length}{whose}"
        yield Fault(FaultCode.CONTEXT_TOO_LONG, why)
    if held > sampling.max_tokens:
        most = sampling.max_tokens
        yield invalid(f"the device holds {held} generated tokens, more than max_tokens {most}")
    size = model.vocabulary_size
    for ids, source in (
        (chain(request.prompt, request.committed), ""),
        (sampling.stop_token_ids, " of stop_token_ids"),
        (sampling.logit_bias, " of logit_bias"),
    ):
        bad = next((token for token in ids if not 0 <= token < size), None)
        if bad is not None:
            yield invalid(f"token {bad}{source} is outside the vocabulary of {size}")


# Bounds of the retry advice that a refused session receives.
MIN_RETRY_S, MAX_RETRY_S = 1.0, 10.0
# A refused session that does not retry for this long is forgotten; the table has a fixed size.
REFUSAL_MEMORY_S, MAX_REFUSALS = 2.0 * MAX_RETRY_S, 1024
# Several round trips of a slow link: a device that reads acknowledges sooner than this.
PATIENCE_S = 3.0
DISPLACED_FAULT = Fault(
    FaultCode.OVERLOADED,
    f"the device acknowledged nothing for {PATIENCE_S:g} s, and another needs the session's place",
    retry_after_s=1.0,
)


class SessionSlots:
    """Bounds the number of sessions, and chooses the session that makes room for a new one.

    A session is *useless* while its device is detached, or has left tokens unacknowledged for
    ``PATIENCE_S``. Ending a useless session costs its device time and nothing else. If all slots
    are taken, or all slots of one peer or credential, the session of that group that has been
    useless for longest is ended. If no session is useless, the newcomer is refused.

    A refusal for lack of slots carries ``retry_after_s`` = (n + 1) times the mean time between two
    admissions, where n is the number of refused sessions that were refused earlier and still wait.
    Nothing is reserved for a refused session.

    ``sessions`` is the engine's own table, by session id.
    """

    def __init__(self, limits: EngineLimits, sessions: Mapping[str, VerifySession]) -> None:
        self._limits, self._sessions = limits, sessions
        self.credential_of: dict[str, Credential] = {}
        self._peer_of: dict[str, str] = {}
        self._refused_at: dict[str, float] = {}
        """Time of the last refusal by session id, in the order of each session's first refusal."""
        self._admission_gap_s = MovingAverage()
        self._admitted_at: float | None = None

    def occupy(self, key: str, peer: str, credential: Credential, now: float) -> None:
        """Give a new session a slot and measure the interval between admissions."""
        self._peer_of[key], self.credential_of[key] = peer, credential
        self._refused_at.pop(key, None)
        if self._admitted_at is not None:
            self._admission_gap_s.add(min(MAX_RETRY_S, now - self._admitted_at))
        self._admitted_at = now

    def release(self, key: str) -> None:
        self._peer_of.pop(key, None)
        self.credential_of.pop(key, None)

    def make_room(
        self, key: str, peer: str, credential: Credential, now: float
    ) -> str | Fault | None:
        """Return what must happen before the session may be opened: None if there is room, the id
        of a session that must be ended first, or the fault that refuses the newcomer."""
        limits, name, sessions = self._limits, credential.name, self.credential_of
        of_credential = [one for one, owner in sessions.items() if owner.name == name]
        of_peer = [one for one, owner in self._peer_of.items() if owner == peer]
        for held, most, whose in (
            (
                of_credential,
                credential.max_sessions,
                f"key {name!r} are open, its limit (max_sessions)",
            ),
            (
                of_peer,
                limits.max_sessions_per_peer,
                f"{peer} are open, its limit (max_sessions_per_peer)",
            ),
        ):
            if most and len(held) >= most:
                why = f"{len(held)} sessions of {whose}"
                return self._longest_useless(held, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if len(self._sessions) >= limits.max_sessions:
            displaced = self._longest_useless(self._sessions, now)
            return displaced or self._refuse(key, now)
        return None

    def _refuse(self, key: str, now: float) -> Fault:
        for other, at in tuple(self._refused_at.items()):
            if now - at > REFUSAL_MEMORY_S:
                del self._refused_at[other]
        if key in self._refused_at or len(self._refused_at) < MAX_REFUSALS:
            self._refused_at[key] = now
        earlier = next(
            (n for n, other in enumerate(self._refused_at) if other == key), MAX_REFUSALS
        )
        most = self._limits.max_sessions
        why = f"all {most} sessions are in use, and {earlier} devices wait before it"
        wait_s = (earlier + 1) * self._admission_gap_s.get(0.0)
        return Fault(FaultCode.OVERLOADED, why, min(MAX_RETRY_S, max(MIN_RETRY_S, wait_s)))

    def _longest_useless(self, keys: Iterable[str], now: float) -> str | None:
        useless: list[tuple[float, str]] = []
        for key in keys:
            device = self._sessions[key].device
            if device.detached_at is not None:
                useless.append((device.detached_at, key))
            elif (
                device.unacknowledged_since is not None
                and now - device.unacknowledged_since >= PATIENCE_S
            ):
                useless.append((device.unacknowledged_since, key))
        return min(useless)[1] if useless else None
