"""Whether a verifier takes an ``Open``; if not, the fault says which bound and what value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from edgespec.core.protocol.estimators import MovingAverage
from edgespec.core.protocol.messages import PROTOCOL_VERSION, Fault, FaultCode, Limits, Open
from edgespec.core.protocol.work import MAX_LOGPROBS, ModelInfo
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.session import VerifySession


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


# Who is refused because the verifier is full is remembered until it gets in, or has not asked again
# for ``FORGET_S``. It is told how many were refused before it, and to come back in
#
#     retry_after_s = (waiting before it + 1) * gap_s, between ``LEAST_S`` and ``MOST_S``
#
# with ``gap_s`` the mean time between those that got in. Nothing is reserved.

LEAST_S, MOST_S = 1.0, 10.0
FORGET_S = 2.0 * MOST_S
MOST = 1024


class RefusedLine:
    """Sessions are known by their keys."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        """In the order of the first refusal."""
        self._gap_s = MovingAverage()
        self._entered_at: float | None = None

    def refuse(self, key: str, max_sessions: int, now: float) -> Fault:
        """What the session is told that finds all places taken."""
        for other, at in tuple(self._asked_at.items()):
            if now - at > FORGET_S:
                del self._asked_at[other]
        if key in self._asked_at or len(self._asked_at) < MOST:
            self._asked_at[key] = now
        before = next((n for n, other in enumerate(self._asked_at) if other == key), MOST)
        why = f"all {max_sessions} sessions are taken; {before} wait before it"
        wait_s = (before + 1) * self._gap_s.get(0.0)
        return Fault(FaultCode.OVERLOADED, why, min(MOST_S, max(LEAST_S, wait_s)))

    def entered(self, key: str, now: float) -> None:
        """The session got a place."""
        self._asked_at.pop(key, None)
        if self._entered_at is not None:
            self._gap_s.add(min(MOST_S, now - self._entered_at))
        self._entered_at = now


# Several round trips of a slow link: a device that reads acknowledges sooner.
PATIENCE_S = 3.0
DISPLACED = Fault(
    FaultCode.OVERLOADED,
    f"the device acknowledged nothing for {PATIENCE_S:g} s, and another needs the session's place",
    retry_after_s=1.0,
)


class SessionSlots:
    """How many sessions a verifier holds, and which one makes room for a new one.

    A session is *useless* while its device is gone, or has left tokens unacknowledged for
    ``PATIENCE_S``: ending it costs its device time and nothing else. When all slots are taken, or
    all of one peer or credential, the session (of theirs) that has been useless longest gives way;
    when none is, the newcomer is refused. ``sessions`` is the engine's own table."""

    def __init__(self, limits: EngineLimits, sessions: Mapping[str, VerifySession]) -> None:
        self._limits, self._sessions = limits, sessions
        self.credential_of: dict[str, Credential] = {}
        """Whose each session is, by key."""
        self._peer_of: dict[str, str] = {}
        self._refused = RefusedLine()

    def take(self, key: str, peer: str, credential: Credential, now: float) -> None:
        """The session now counts for the peer and the credential."""
        self._peer_of[key], self.credential_of[key] = peer, credential
        self._refused.entered(key, now)

    def free(self, key: str) -> None:
        """The session is over."""
        self._peer_of.pop(key, None)
        self.credential_of.pop(key, None)

    def displaced_by(
        self, key: str, peer: str, credential: Credential, now: float
    ) -> str | Fault | None:
        """What has to happen before the session may be opened: nothing (None), the end of the
        session of this key, or the refusal of the newcomer."""
        limits, name = self._limits, credential.name
        if most := credential.max_sessions:
            mine = [one for one, owner in self.credential_of.items() if owner.name == name]
            if len(mine) >= most:
                why = f"{len(mine)} sessions of key {name!r} are open, its limit (max_sessions)"
                return self._longest_useless(mine, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if limits.max_sessions_per_peer:
            mine = [one for one, owner in self._peer_of.items() if owner == peer]
            if len(mine) >= limits.max_sessions_per_peer:
                why = f"{len(mine)} sessions of {peer} are open, its limit (max_sessions_per_peer)"
                return self._longest_useless(mine, now) or Fault(FaultCode.OVERLOADED, why, 1.0)
        if len(self._sessions) >= limits.max_sessions:
            displaced = self._longest_useless(self._sessions, now)
            return displaced or self._refused.refuse(key, limits.max_sessions, now)
        return None

    def _longest_useless(self, keys: Iterable[str], now: float) -> str | None:
        found: list[tuple[float, str]] = []
        for key in keys:
            device = self._sessions[key].device
            if device.detached_at is not None:
                found.append((device.detached_at, key))
            elif device.unread_since is not None and now - device.unread_since >= PATIENCE_S:
                found.append((device.unread_since, key))
        return min(found)[1] if found else None
