"""How the generations of a device get from a verifier that is lost to another one.

Theory of operation. A generation that wants a stream gets one from the best candidate
(``candidates.py``); when that one has not answered for a moment, the next one is dialed as well,
and whoever answers first is used (a hedged connect). What happens to streams and probes teaches the
circuit breakers. A generation whose stream ends is told whether another verifier can be tried at
once. It then opens the session there with all it has delivered, and since the text is a function of
the model, the prompt and the seed alone, it goes on with the same tokens; a verifier that greets
with another model than the text was begun with is never used for it.

    one generation:   wanted -> (asking) -> dialing, hedged -> in use -> wanted ... -> over

Invariants: a stream that is wanted is answered with one ``Use`` or one ``Leave``; nobody is dialed
or probed before the time it asked for; a verifier is dialed once at a time for one generation; a
stream that breaks without a token keeps its verifier out until another was tried or a pause was
made, so no two of them can throw a generation to and fro without end. Pure: the driver connects and
measures, the simulator can do both in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from edgespec.core.association import failover_events as ev
from edgespec.core.association.candidates import CLOSED, BreakerPolicy, Candidate, Candidates, Route
from edgespec.core.association.policies import Association
from edgespec.core.protocol.checks import bounded, one_line
from edgespec.core.protocol.messages import FaultCode, ModelIdentity, describe_model_mismatch

_LEAST_S, _LONGEST_S = 1e-3, 3600.0
# How long the one that was dialed first may take, where it is far: TCP, TLS, HTTP/2 and the
# greeting are a round trip each. At most it is what ``ask_s`` allows.
_ROUND_TRIPS, _HEDGE_LONGEST_S = 4.0, 2.0
# A verifier that breaks so soon after it was tried at once is not tried at once again. That bounds
# a loop of breaks to two tries a second; a breaker waits as long at first.
_SOON_S = 0.5
Actions = list[ev.FailoverAction]


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """How a device that knows several verifiers gets from one to another; seconds. Raises
    ``ValueError`` naming field, value and range."""

    hedge_s: float = 0.25
    """When the verifier that was dialed has not answered for so long (or four of its round trips,
    where that is more), the next one is dialed too. Happy Eyeballs (RFC 8305) waits as long between
    two addresses."""
    ask_s: float = 2.0
    """Before the first stream all are asked who they are, and waited for so long at most. Somebody
    waits for a first token meanwhile."""
    settle_s: float = 0.1
    """Once one of them has answered, the others have so long: the best one on a continent answers
    within 100 ms of the first."""
    quiet_s: float = 1.5
    """A stream on which nothing came for so long has its verifier probed. Passes of the slowest
    targets take less (a CPU's 63 ms a token), and a long prompt's passes answer the probe."""
    probe_s: float = 1.5
    """A probe that is not answered for so long has failed. With ``quiet_s`` a hang is noticed
    within three seconds, and two lost packets in a row are no failure."""
    full_s: float = 1.0
    """A verifier that is full and does not say for how long is left alone for so long; ours say so
    (``retry_after_s`` is 1 s there too)."""
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)

    def __post_init__(self) -> None:
        for name in ("hedge_s", "ask_s", "settle_s", "quiet_s", "probe_s", "full_s"):
            bounded(name, getattr(self, name), _LEAST_S, _LONGEST_S)


class Failover:
    """All generations of one device. ``seed`` makes its jitter its own. Before the first stream all
    are asked, where the association wants to know of them."""

    def __init__(self, policy: FailoverPolicy, association: Association, seed: int = 0) -> None:
        self.policy = policy
        self.candidates = Candidates(association, policy.breaker, seed)
        self.routes: dict[int, Route] = {}
        self._ask_first = association is Association.LOWEST_DELAY

    @property
    def deadline(self) -> float | None:
        """When to send ``Tick``; None: nothing is to be waited for."""
        if not self.routes:
            return None
        times: list[float | None] = [at for at, _ in self.candidates.to_probe()]
        for route in self.routes.values():
            times += [route.hedge_at, route.asking_until]
        return min((time for time in times if time is not None), default=None)

    def handle(self, event: ev.FailoverEvent, now: float) -> tuple[ev.FailoverAction, ...]:
        match event:
            case ev.Known(addresses):
                self.candidates.know(addresses)
                return ()
            case ev.ProbeAnswered() | ev.ProbeFailed():
                return tuple(self._on_probe(event, now))
            case ev.Tick():
                return tuple(self._on_tick(now))
            case ev.Wanted(number):
                route = self.routes.setdefault(number, Route(event))
                return tuple(self._on_wanted(route, now))
        if (known := self.routes.get(event.route)) is not None:
            return tuple(self._on_route(event, known, now))
        if isinstance(event, ev.Dialed):
            return (ev.Drop(event.route, event.address),)
        return ()

    def _on_route(self, event: ev.RouteEvent, route: Route, now: float) -> Actions:
        match event:
            case ev.Dialed(_, address):
                return self._on_dialed(route, address, now)
            case ev.DialFailed(_, address, why, retryable):
                if address not in route.dialing:
                    return []
                route.dialing.remove(address)
                self._blame(route, address, why, retryable, now)
                route.tried.add(address)
                return self._dial_next(route, now) if route.wanted else []
            case ev.Greeted(_, model):
                return self._on_greeted(route, model, now)
            case ev.Progressed():
                route.brought_token()
                if (candidate := self._of(route)) is not None:
                    candidate.breaker.succeeded()
                return []
            case ev.Refused(_, code, why, retry_after_s):
                return self._on_refused(route, code, why, retry_after_s, now)
            case ev.Broke(_, why, retryable):
                return self._on_broken(route, why, retryable, now)
            case ev.Quiet():
                return self._on_quiet(route, now)
            case ev.Unwanted() | ev.Over():
                dropped = [ev.Drop(route.number, address) for address in route.dialing]
                route.wanted, route.using = False, None
                route.dialing, route.hedge_at, route.asking_until = [], None, None
                if isinstance(event, ev.Over):
                    del self.routes[route.number]
                return [*dropped]
            case _:
                assert_never(event)

    # --- how one generation gets a stream --------------------------------------------------

    def _on_wanted(self, route: Route, now: float) -> Actions:
        route.wanted, route.using = True, None
        listed = self.candidates.listed.values()
        if self._ask_first and route.last is None and all(one.info is None for one in listed):
            asked = [one for one in listed if not one.breaker.held(now) and not one.error]
            if len(asked) > 1:
                route.asking_until = now + self.policy.ask_s
                return [_probe(one) for one in asked if not one.probing]
        return self._dial_next(route, now)

    def _dial_next(self, route: Route, now: float) -> Actions:
        route.hedge_at = route.asking_until = None
        address = self.candidates.choose(now, {*route.tried, *route.unfit, *route.dialing}, route)
        if address is None:
            return [] if route.dialing else [self._none_left(route, now)]
        if route.dialing and not self.candidates.fits(address, route):
            return []  # it would win a race only to say no
        route.dialing.append(address)
        rtt_s = self.candidates.listed[address].rtt_s or 0.0
        patience_s = min(rtt_s * _ROUND_TRIPS, _HEDGE_LONGEST_S)
        route.hedge_at = now + max(self.policy.hedge_s, patience_s)
        return [ev.Dial(route.number, address)]

    def _on_dialed(self, route: Route, address: str, now: float) -> Actions:
        if not route.wanted or address not in route.dialing:
            return [ev.Drop(route.number, address)]
        losers = [other for other in route.dialing if other != address]
        for other in losers[: route.dialing.index(address)]:  # it had a start, and did not use it
            if (slow := self.candidates.listed.get(other)) is not None:
                slow.error = f"did not answer before {address} did"
                slow.breaker.failed(now)
        route.wanted, route.using, route.dialing, route.hedge_at = False, address, [], None
        route.progressed = route.suspects = False
        route.greeted = None
        return [ev.Use(route.number, address), *(ev.Drop(route.number, other) for other in losers)]

    def _none_left(self, route: Route, now: float) -> ev.Leave:
        route.wanted, route.using = False, None
        route.tried.clear()
        listed = self.candidates.listed
        retryable = not listed or any(one not in route.unfit for one in listed)
        again_s = self.candidates.free_in_s(now, route.unfit)
        return ev.Leave(route.number, self._reasons(route), again_s, retryable)

    def _reasons(self, route: Route) -> str:
        """Each address with what it failed with last."""
        told = [
            (address, route.unfit.get(address) or one.error or "not tried")
            for address, one in self.candidates.listed.items()
        ]
        if len(told) < 2:
            return told[0][1] if told else "no verifier is known"
        return "; ".join(why if address in why else f"{address}: {why}" for address, why in told)

    # --- what happens to a stream ----------------------------------------------------------

    def _on_greeted(self, route: Route, model: ModelIdentity, now: float) -> Actions:
        route.greeted = model
        if route.began is None or route.using is None:
            return []
        why = describe_model_mismatch(route.began, model, route.asked.needed_length)
        if why is None:
            return []
        route.unfit[route.using] = why
        return [self._leave(route, f"{route.using}: {why}", now)]

    def _on_refused(
        self, route: Route, code: FaultCode, why: str, retry_after_s: float, now: float
    ) -> Actions:
        candidate = self._of(route)
        if candidate is None or code is FaultCode.INVALID:
            return [ev.Leave(route.number, one_line(why), None, code.retryable)]
        candidate.error = one_line(why)
        candidate.breaker.hold(now, retry_after_s)
        match code:
            case FaultCode.RESYNC:  # no fault of the verifier's; its cache may still be of use
                return [ev.Leave(route.number, candidate.error, None)]
            case FaultCode.SHUTTING_DOWN:
                candidate.breaker.open(now)
            case FaultCode.OVERLOADED:
                candidate.breaker.hold(now, retry_after_s or self.policy.full_s)
            case FaultCode.INTERNAL:
                candidate.breaker.failed(now)
            case FaultCode.UNKNOWN_MODEL:  # nothing is wrong with it; what it has now is asked
                route.unfit[candidate.address] = candidate.error
                asked = [] if candidate.probing else [_probe(candidate)]
                return [*asked, self._leave(route, candidate.error, now)]
            case _:
                self._blame(route, candidate.address, why, False, now)
        route.tried.add(candidate.address)
        return [self._leave(route, candidate.error, now)]

    def _on_broken(self, route: Route, why: str, retryable: bool, now: float) -> Actions:
        if route.using is None:
            return []
        self._blame(route, route.using, why, retryable, now)
        if not route.progressed:
            route.tried.add(route.using)
        return [self._leave(route, one_line(why), now)]

    def _on_quiet(self, route: Route, now: float) -> Actions:
        candidate = self._of(route)
        if candidate is None or len(self.candidates.listed) == 1 or candidate.breaker.held(now):
            return []
        route.suspects = True
        return [] if candidate.probing else [_probe(candidate)]

    def _leave(self, route: Route, why: str, now: float) -> ev.Leave:
        """The stream in use is gone. Another one can be tried at once while there is a verifier
        that is not known to be of no use."""
        left, route.using = route.using, None
        found = self.candidates.choose(now, {*route.tried, *route.unfit}, route, closed_only=True)
        again = found == left and route.moved_at is not None and now - route.moved_at < _SOON_S
        if found is None or again:
            none = self._none_left(route, now)
            return none if found is None else ev.Leave(route.number, why)
        route.moved_at = now
        return ev.Leave(route.number, why, 0.0)

    def _blame(self, route: Route, address: str, why: str, retryable: bool, now: float) -> None:
        if not retryable:
            route.unfit[address] = one_line(why)
        if (candidate := self.candidates.listed.get(address)) is None:
            return
        candidate.error = one_line(why)
        if retryable:
            candidate.breaker.failed(now)
        elif candidate.breaker.state is CLOSED:
            candidate.breaker.open(now)

    # --- probes ----------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Actions:
        actions: Actions = []
        for route in self.routes.values():
            times = (route.hedge_at, route.asking_until)
            if route.wanted and any(time is not None and time <= now for time in times):
                actions += self._dial_next(route, now)
        if self.routes:
            for at, candidate in tuple(self.candidates.to_probe()):
                if at <= now:
                    candidate.breaker.probing()
                    actions.append(_probe(candidate))
        return actions

    def _on_probe(self, event: ev.ProbeAnswered | ev.ProbeFailed, now: float) -> Actions:
        candidate = self.candidates.listed.get(event.address)
        if candidate is None:
            return []
        candidate.probing = False
        alive = answered = isinstance(event, ev.ProbeAnswered)
        if isinstance(event, ev.ProbeAnswered):
            candidate.info, candidate.rtt_s, candidate.told_at = event.info, event.rtt_s, now
            candidate.breaker.answered()
        else:
            alive = event.alive
            if not (alive and candidate.breaker.state is CLOSED):
                candidate.error = one_line(event.why)
                candidate.breaker.open(now)
        actions: Actions = []
        for route in self.routes.values():
            if route.asking_until is not None:
                actions += self._asked(route, answered, now)
            elif route.suspects and route.using == event.address:
                route.suspects = False
                if not alive and self._has_other(route, now):
                    route.tried = {event.address}
                    actions.append(self._leave(route, candidate.error, now))
        return actions

    def _asked(self, route: Route, answered: bool, now: float) -> Actions:
        """One of those who were asked before the first stream has answered, or not."""
        assert route.asking_until is not None
        if not any(one.probing for one in self.candidates.listed.values()):
            return self._dial_next(route, now)
        if answered:
            route.asking_until = min(route.asking_until, now + self.policy.settle_s)
        return []

    def _has_other(self, route: Route, now: float) -> bool:
        """Whether it is worth while to give up a stream that may only be slow. What was tried
        before counts again: finding out took longer than any pause."""
        avoid = {*route.unfit, str(route.using)}
        found = self.candidates.choose(now, avoid, route, closed_only=True)
        return found is not None and self.candidates.fits(found, route)

    def _of(self, route: Route) -> Candidate | None:
        """The verifier of the stream in use."""
        return None if route.using is None else self.candidates.listed.get(route.using)


def _probe(candidate: Candidate) -> ev.Probe:
    """The question to this verifier; it is under way from now on."""
    candidate.probing = True
    return ev.Probe(candidate.address)
