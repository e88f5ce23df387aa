"""The verifiers that a device may use: what is known of each, and which one is the best now.

Theory of operation. A verifier is out of the question while it is held (it asked for time) or for
the generation at hand (``avoid``). Of the others those count that have the best rank: a closed
breaker before an open one, and before both of them no verifier whose last answer told of another
model, or of none by the name that is asked for; an answer may be old, so such a one is tried last
and not left out. Among equals the one that was used last is preferred, since its cache may hold the
text; else the association policy chooses, the very object that a planner or the simulator uses. Of
a verifier that was not asked yet, or whose load was told long ago, it is told the average of the
others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from edgespec.core.association.circuit_breaker import CLOSED, BreakerPolicy, CircuitBreaker
from edgespec.core.association.policies import AssociationPolicy, DeviceView, LinkView, VerifierView
from edgespec.core.association.route import Route
from edgespec.core.protocol.estimators import GUESSED_PASS_S
from edgespec.core.protocol.messages import ModelIdentity, VerifierInfo

_GUESSED_RTT_S = 0.05
# Of a verifier that does not tell how many sessions it takes.
_NOT_TOLD = 1 << 31
# Sessions come and go; nothing is known of the load of one that told it longer ago.
_LOAD_KEPT_S = 30.0


@dataclass(slots=True)
class Candidate:
    """One verifier, as far as it is known."""

    address: str
    breaker: CircuitBreaker
    info: VerifierInfo | None = None
    """Its last answer to a probe."""
    told_at: float | None = None
    """When that was."""
    rtt_s: float | None = None
    error: str = ""
    """What it failed with last."""
    probing: bool = False
    """A question is under way."""

    def load(self, now: float) -> int | None:
        """Its sessions; None: not known, or not any more."""
        if self.info is None or self.told_at is None or now - self.told_at > _LOAD_KEPT_S:
            return None
        return self.info.sessions

    def fits(self, model: ModelIdentity | None, name: str = "") -> bool:
        """Whether nothing that it told speaks against this model, asked for by this name; empty:
        by none, None: any model will do."""
        if self.info is None:
            return True
        return any(
            model is None or ModelIdentity(told.name, told.fingerprint, 0).is_model_of(model)
            for told in self.info.served
            if name in ("", told.name)
        )


class Candidates:
    """``seed`` makes the jitter of their breakers this device's own."""

    def __init__(
        self, association: AssociationPolicy, device: DeviceView, policy: BreakerPolicy, seed: int
    ) -> None:
        self.listed: dict[str, Candidate] = {}
        self._association, self._device = association, device
        self._policy, self._seed = policy, seed
        self._made = 0

    def know(self, addresses: Iterable[str]) -> None:
        """These are the candidates, in order of preference; what is known of them is kept."""
        self.listed = {one: self.listed.get(one) or self._make(one) for one in addresses}

    def choose(
        self,
        now: float,
        avoid: Collection[str],
        route: Route,
        *,
        closed_only: bool = False,
    ) -> str | None:
        """The address that ``route`` should try next, or None."""
        ranked: dict[tuple[bool, bool], list[Candidate]] = {}
        for one in self.listed.values():
            if one.address in avoid or one.breaker.held(now):
                continue
            if closed_only and one.breaker.state is not CLOSED:
                continue
            rank = (not self.fits(one.address, route), one.breaker.state is not CLOSED)
            ranked.setdefault(rank, []).append(one)
        if not ranked:
            return None
        best = ranked[min(ranked)]
        if len(best) == 1 or any(one.address == route.last for one in best):
            return route.last if len(best) > 1 else best[0].address
        device = replace(self._device, conversation=route.conversation)
        (index,) = self._association.assign([device], *self._views(best, now))
        return best[index].address

    def fits(self, address: str, route: Route) -> bool:
        """Whether nothing that this one told speaks against the model of ``route``."""
        return self.listed[address].fits(route.began, route.model)

    def free_in_s(self, now: float, avoid: Collection[str]) -> float | None:
        """How long all of them but ``avoid`` are held; None: at least one is not."""
        held_s = [
            one.breaker.held_until - now for one in self.listed.values() if one.address not in avoid
        ]
        return min(held_s) if held_s and min(held_s) > 0.0 else None

    def due(self, now: float) -> list[Candidate]:
        """Those whose breaker has been open for long enough to ask again."""
        return [
            one
            for one in self.listed.values()
            if one.breaker.probe_at is not None and one.breaker.probe_at <= now and not one.probing
        ]

    @property
    def next_probe_at(self) -> float | None:
        times = [
            one.breaker.probe_at
            for one in self.listed.values()
            if one.breaker.probe_at is not None and not one.probing
        ]
        return min(times, default=None)

    def _make(self, address: str) -> Candidate:
        self._made += 1
        return Candidate(address, CircuitBreaker(self._policy, self._seed + self._made))

    def _views(
        self, candidates: list[Candidate], now: float
    ) -> tuple[list[VerifierView], list[list[LinkView]]]:
        """What they told, as policies see it. The pass told is one under the load of late, so
        nothing is added for the sessions there."""
        loads = [one.load(now) for one in candidates]
        told = [load for load in loads if load is not None]
        usual_load = round(fmean(told)) if told else 0
        infos = [one.info for one in candidates if one.info is not None]
        timed_s = [info.pass_us / 1e6 for info in infos if info.pass_us]
        usual_s = fmean(timed_s) if timed_s else GUESSED_PASS_S
        rtts_s = [one.rtt_s for one in candidates if one.rtt_s is not None]
        usual_rtt_s = fmean(rtts_s) if rtts_s else _GUESSED_RTT_S
        views, links = [], []
        for one, load in zip(candidates, loads, strict=True):
            info = one.info
            pass_s = usual_s if info is None else info.pass_us / 1e6 or usual_s
            sessions = usual_load if load is None else load
            most = _NOT_TOLD if info is None or load is None else info.max_sessions or _NOT_TOLD
            views.append(VerifierView(one.address, pass_s, sessions, most))
            links.append(LinkView(usual_rtt_s if one.rtt_s is None else one.rtt_s))
        return views, [links]
