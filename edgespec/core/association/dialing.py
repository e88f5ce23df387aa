"""How one generation gets a stream: from the best candidate, hedged by the next ones.

The answer to ``wanted`` is one ``Use`` or one ``Leave``, at the latest when all that were dialed
have failed.
"""

from __future__ import annotations

from edgespec.core.association import failover_events as ev
from edgespec.core.association.candidates import Candidate, Candidates
from edgespec.core.association.circuit_breaker import CLOSED
from edgespec.core.association.route import FailoverPolicy, Route
from edgespec.core.protocol.checks import one_line

Actions = list[ev.FailoverAction]
_ROUND_TRIPS = 4.0
_HEDGE_LONGEST_S = 2.0


class Dialing:
    """For all generations of one device."""

    def __init__(self, policy: FailoverPolicy, candidates: Candidates, ask_first: bool) -> None:
        self._policy, self._candidates, self._ask_first = policy, candidates, ask_first

    def wanted(self, number: int, route: Route, now: float) -> Actions:
        route.wanted, route.using = True, None
        listed = self._candidates.listed.values()
        first = route.last is None and all(one.info is None for one in listed)
        if self._ask_first and first:
            asked = [one for one in listed if not one.breaker.held(now) and not one.error]
            if len(asked) > 1:
                route.asking_until = now + self._policy.ask_s
                return [probe(one) for one in asked if not one.probing]
        return self.next(number, route, now)

    def next(self, number: int, route: Route, now: float) -> Actions:
        route.hedge_at = route.asking_until = None
        avoid = {*route.tried, *route.unfit, *route.dialing}
        address = self._candidates.choose(now, avoid, route)
        if address is None:
            return [] if route.dialing else [self.none_left(number, route, now)]
        if route.dialing and not self._candidates.fits(address, route):
            return []  # it would win a race only to say no
        route.dialing.append(address)
        rtt_s = self._candidates.listed[address].rtt_s or 0.0
        patience_s = min(rtt_s * _ROUND_TRIPS, _HEDGE_LONGEST_S)
        route.hedge_at = now + max(self._policy.hedge_s, patience_s)
        return [ev.Dial(number, address)]

    def dialed(self, number: int, route: Route, address: str, now: float) -> Actions:
        if not route.wanted or address not in route.dialing:
            return [ev.Drop(number, address)]
        losers = [other for other in route.dialing if other != address]
        for other in losers[: route.dialing.index(address)]:  # it had a start, and did not use it
            if (slow := self._candidates.listed.get(other)) is not None:
                slow.error = f"did not answer before {address} did"
                slow.breaker.failed(now)
        route.wanted, route.using, route.dialing, route.hedge_at = False, address, [], None
        route.progressed = route.suspects = False
        route.greeted = None
        return [ev.Use(number, address), *(ev.Drop(number, other) for other in losers)]

    def failed(
        self, number: int, route: Route, address: str, why: str, retryable: bool, now: float
    ) -> Actions:
        if address not in route.dialing:
            return []
        route.dialing.remove(address)
        self.blame(route, address, why, retryable, now)
        route.tried.add(address)
        return self.next(number, route, now) if route.wanted else []

    def none_left(self, number: int, route: Route, now: float) -> ev.Leave:
        """Nobody can be dialed now."""
        route.wanted, route.using = False, None
        route.tried.clear()
        fit = [one for one in self._candidates.listed if one not in route.unfit]
        again_s = self._candidates.free_in_s(now, route.unfit)
        retryable = bool(fit) or not self._candidates.listed
        return ev.Leave(number, self.reasons(route), again_s, retryable)

    # --- parts -----------------------------------------------------------------------------

    def reasons(self, route: Route) -> str:
        """Each address with what it failed with last."""
        if not self._candidates.listed:
            return "no verifier is known"
        told = [
            (address, route.unfit.get(address) or one.error or "not tried")
            for address, one in self._candidates.listed.items()
        ]
        if len(told) == 1:
            return told[0][1]
        return "; ".join(why if address in why else f"{address}: {why}" for address, why in told)

    def blame(self, route: Route, address: str, why: str, retryable: bool, now: float) -> None:
        candidate = self._candidates.listed.get(address)
        if not retryable:
            route.unfit[address] = one_line(why)
        if candidate is None:
            return
        candidate.error = one_line(why)
        if retryable:
            candidate.breaker.failed(now)
        elif candidate.breaker.state is CLOSED:
            candidate.breaker.open(now)


def probe(candidate: Candidate) -> ev.Probe:
    """The question to this verifier; it is under way from now on."""
    candidate.probing = True
    return ev.Probe(candidate.address)
