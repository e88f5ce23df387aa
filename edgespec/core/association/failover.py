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

from typing import assert_never

from edgespec.core.association import failover_events as ev
from edgespec.core.association.candidates import Candidate, Candidates
from edgespec.core.association.circuit_breaker import CLOSED
from edgespec.core.association.dialing import Actions, Dialing, probe
from edgespec.core.association.policies import AssociationPolicy, DeviceView
from edgespec.core.association.route import FailoverPolicy, Route
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import FaultCode, ModelIdentity, why_not

# A verifier that breaks so soon after it was tried at once is not tried at once again.
_SOON_S = 0.5


class Failover:
    """All generations of one device. ``seed`` makes its jitter its own. ``ask_first``: before the
    first stream all are asked, because the association wants to know of them."""

    def __init__(
        self,
        policy: FailoverPolicy,
        association: AssociationPolicy,
        device: DeviceView,
        seed: int = 0,
        *,
        ask_first: bool = True,
    ) -> None:
        self.policy = policy
        self.candidates = Candidates(association, device, policy.breaker, seed)
        self._dialing = Dialing(policy, self.candidates, ask_first)
        self.routes: dict[int, Route] = {}

    @property
    def deadline(self) -> float | None:
        """When to send ``Tick``; None: nothing is to be waited for."""
        if not self.routes:
            return None
        times = [self.candidates.next_probe_at]
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
            case ev.Wanted(number, needed_length, conversation, model):
                route = self.routes.setdefault(number, Route(needed_length, conversation, model))
                return tuple(self._dialing.wanted(number, route, now))
        route_or_none = self.routes.get(event.route)
        if route_or_none is None:
            if isinstance(event, ev.Dialed):
                return (ev.Drop(event.route, event.address),)
            return ()
        return tuple(self._on_route(event, route_or_none, now))

    def _on_route(self, event: ev.RouteEvent, route: Route, now: float) -> Actions:
        number = event.route
        match event:
            case ev.Dialed(_, address):
                return self._dialing.dialed(number, route, address, now)
            case ev.DialFailed(_, address, why, retryable):
                return self._dialing.failed(number, route, address, why, retryable, now)
            case ev.Greeted(_, model):
                return self._on_greeted(number, route, model, now)
            case ev.Progressed():
                route.brought_token()
                if (candidate := self._of(route)) is not None:
                    candidate.breaker.succeeded()
                return []
            case ev.Refused(_, code, why, retry_after_s):
                return self._on_refused(number, route, code, why, retry_after_s, now)
            case ev.Broke(_, why, retryable):
                return self._on_broken(number, route, why, retryable, now)
            case ev.Quiet():
                return self._on_quiet(route, now)
            case ev.Unwanted() | ev.Over():
                dropped = [ev.Drop(number, address) for address in route.dialing]
                route.wanted, route.using = False, None
                route.dialing, route.hedge_at, route.asking_until = [], None, None
                if isinstance(event, ev.Over):
                    del self.routes[number]
                return [*dropped]
            case _:
                assert_never(event)

    # --- what happens to a stream ----------------------------------------------------------

    def _on_greeted(self, number: int, route: Route, model: ModelIdentity, now: float) -> Actions:
        route.greeted = model
        if route.began is None or route.using is None:
            return []
        why = why_not(route.began, model, route.needed_length)
        if why is None:
            return []
        route.unfit[route.using] = why
        return [self._leave(number, route, f"{route.using}: {why}", now)]

    def _on_refused(
        self,
        number: int,
        route: Route,
        code: FaultCode,
        why: str,
        retry_after_s: float,
        now: float,
    ) -> Actions:
        candidate = self._of(route)
        if candidate is None or code is FaultCode.INVALID:
            return [ev.Leave(number, one_line(why), None, code.retryable)]
        candidate.error = one_line(why)
        candidate.breaker.hold(now, retry_after_s)
        match code:
            case FaultCode.RESYNC:  # no fault of the verifier's; its cache may still be of use
                return [ev.Leave(number, candidate.error, None)]
            case FaultCode.SHUTTING_DOWN:
                candidate.breaker.open(now)
            case FaultCode.OVERLOADED:
                candidate.breaker.hold(now, retry_after_s or self.policy.full_s)
            case FaultCode.INTERNAL:
                candidate.breaker.failed(now)
            case FaultCode.UNKNOWN_MODEL:  # nothing is wrong with it; what it has now is asked
                route.unfit[candidate.address] = candidate.error
                asked = [] if candidate.probing else [probe(candidate)]
                return [*asked, self._leave(number, route, candidate.error, now)]
            case _:
                self._dialing.blame(route, candidate.address, why, False, now)
        route.tried.add(candidate.address)
        return [self._leave(number, route, candidate.error, now)]

    def _on_broken(
        self, number: int, route: Route, why: str, retryable: bool, now: float
    ) -> Actions:
        if route.using is None:
            return []
        self._dialing.blame(route, route.using, why, retryable, now)
        if not route.progressed:
            route.tried.add(route.using)
        return [self._leave(number, route, one_line(why), now)]

    def _on_quiet(self, route: Route, now: float) -> Actions:
        candidate = self._of(route)
        if candidate is None or len(self.candidates.listed) == 1 or candidate.breaker.held(now):
            return []
        route.suspects = True
        return [] if candidate.probing else [probe(candidate)]

    def _leave(self, number: int, route: Route, why: str, now: float) -> ev.Leave:
        """The stream in use is gone. Another one can be tried at once while there is a verifier
        that is not known to be of no use."""
        left, route.using = route.using, None
        avoid = {*route.tried, *route.unfit}
        found = self.candidates.choose(now, avoid, route, closed_only=True)
        again = found == left and route.moved_at is not None and now - route.moved_at < _SOON_S
        if found is None or again:
            none = self._dialing.none_left(number, route, now)
            return none if found is None else ev.Leave(number, why)
        route.moved_at = now
        return ev.Leave(number, why, 0.0)

    # --- probes ----------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Actions:
        actions: Actions = []
        for number, route in self.routes.items():
            times = (route.hedge_at, route.asking_until)
            if route.wanted and any(time is not None and time <= now for time in times):
                actions += self._dialing.next(number, route, now)
        if self.routes:
            for candidate in self.candidates.due(now):
                candidate.breaker.probing()
                actions.append(probe(candidate))
        return actions

    def _on_probe(self, event: ev.ProbeAnswered | ev.ProbeFailed, now: float) -> Actions:
        candidate = self.candidates.listed.get(event.address)
        if candidate is None:
            return []
        candidate.probing = False
        if isinstance(event, ev.ProbeAnswered):
            candidate.info, candidate.rtt_s = event.info, event.rtt_s
            candidate.told_at = now
            candidate.breaker.answered()
        elif not (event.alive and candidate.breaker.state is CLOSED):
            candidate.error = one_line(event.why)
            candidate.breaker.open(now)
        answered = isinstance(event, ev.ProbeAnswered)
        alive = answered or (isinstance(event, ev.ProbeFailed) and event.alive)
        actions: Actions = []
        for number, route in self.routes.items():
            if route.asking_until is not None:
                actions += self._asked(number, route, answered, now)
            elif route.suspects and route.using == event.address:
                route.suspects = False
                if not alive and self._has_other(route, now):
                    route.tried = {event.address}
                    actions.append(self._leave(number, route, candidate.error, now))
        return actions

    def _asked(self, number: int, route: Route, answered: bool, now: float) -> Actions:
        """One of those who were asked before the first stream has answered, or not."""
        assert route.asking_until is not None
        if not any(one.probing for one in self.candidates.listed.values()):
            return self._dialing.next(number, route, now)
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
