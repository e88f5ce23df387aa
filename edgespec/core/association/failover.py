"""Failover: moves the generations of a device from a lost verifier to another one.

Theory of operation. A generation that needs a stream gets one from the best candidate
(``known_verifiers.py``). While nothing is known of any verifier, all are dialed and probed at the
same time, and the first that connects is used: it is the nearest one, and a wait for the probes
would cost the user a round trip. Later generations choose by the answers to the probes. If a dialed
verifier has not answered after a moment, the next one is dialed as well, and the first to answer is
used (a hedged connect). The outcome of streams and probes drives the circuit breakers. When a
generation's stream ends, ``Leave`` carries whether another verifier can be tried at once. The
generation then opens the session there with all tokens it has delivered. Since the output is a
function of the model, the prompt and the seed alone, it goes on with the same tokens. A verifier
that serves another model than the generation began with is never used for it.

    one generation:   wanted -> dialing (hedged, or a race) -> in use -> wanted ... -> ended

Invariants: a wanted stream is answered with one ``Use`` or one ``Leave``; no verifier is dialed or
probed before the time it asked for; a verifier is dialed once at a time for one generation; a
stream that breaks without a token excludes its verifier until another was tried or a pause was
made, so two of them cannot pass a generation to and fro without end. The machine is pure: the
driver connects and measures, and the simulator does both in virtual time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import assert_never

from edgespec.core.association import failover_events as ev
from edgespec.core.association.known_verifiers import (
    CLOSED,
    BreakerPolicy,
    KnownVerifier,
    KnownVerifiers,
    Route,
)
from edgespec.core.association.policies import Association
from edgespec.core.protocol.checks import check_range, make_one_line
from edgespec.core.protocol.messages import FaultCode, ModelIdentity, describe_model_mismatch

_MIN_S, _MAX_S = 1e-3, 3600.0
# How long the first dialed verifier may take if it is far away: TCP, TLS, HTTP/2's settings (behind
# a proxy) and opening the session are a round trip each. A user waits for the first token at most
# ``_MAX_HEDGE_S`` longer.
_ROUND_TRIPS, _MAX_HEDGE_S = 4.0, 2.0
# A verifier that breaks within this time after it was tried at once is not tried at once again.
# That bounds a loop of breaks to two tries per second; a breaker waits as long at first.
_MIN_STREAM_S = 0.5
Actions = list[ev.FailoverAction]


@dataclass(frozen=True, slots=True)
class FailoverPolicy:
    """How a device with several verifiers changes from one to another; times in seconds.

    Raises ``ValueError`` with the field, the value and the range."""

    hedge_s: float = 0.25
    """Seconds without an answer from the dialed verifier (or four of its round trips, if that is
    more) after which the next one is dialed too. Happy Eyeballs (RFC 8305) waits as long between
    two addresses."""
    quiet_s: float = 1.5
    """Seconds without any message on a stream after which its verifier is probed. Passes of the
    slowest targets take less (a CPU's 63 ms a token), and a verifier in a long prompt's passes
    answers the probe."""
    probe_s: float = 1.5
    """Seconds after which an unanswered probe has failed. With ``quiet_s`` a hang is noticed within
    three seconds, and two lost packets in a row are no failure."""
    full_s: float = 1.0
    """Seconds that a full verifier is left alone if it gives no time itself. Ours give one
    (``retry_after_s`` is 1 s there too)."""
    breaker: BreakerPolicy = field(default_factory=BreakerPolicy)

    def __post_init__(self) -> None:
        for name in ("hedge_s", "quiet_s", "probe_s", "full_s"):
            check_range(name, getattr(self, name), _MIN_S, _MAX_S)


class Failover:
    """Failover of all generations of one device.

    ``seed`` makes its jitter its own."""

    def __init__(self, policy: FailoverPolicy, association: Association, seed: int = 0) -> None:
        self.policy = policy
        self.candidates = KnownVerifiers(association, policy.breaker, seed)
        self.routes: dict[int, Route] = {}
        self._needs_probes = association is Association.LOWEST_DELAY

    @property
    def deadline(self) -> float | None:
        """Time at which to send ``Tick``; None if nothing is awaited."""
        if not self.routes:
            return None
        times: list[float | None] = [at for at, _ in self.candidates.open_breakers()]
        for route in self.routes.values():
            times.append(route.hedge_at)
        return min((time for time in times if time is not None), default=None)

    def handle(self, event: ev.FailoverEvent, now: float) -> tuple[ev.FailoverAction, ...]:
        match event:
            case ev.Known(addresses):
                self.candidates.replace_all(addresses)
                return ()
            case ev.Expected():
                return tuple(self._probe_unknown(now))
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
                self._record_failure(route, address, why, retryable, now)
                route.tried.add(address)
                return self._dial_next(route, now) if route.is_waiting else []
            case ev.Greeted(_, model):
                return self._on_greeted(route, model, now)
            case ev.Progressed():
                route.brought_token()
                if (candidate := self._verifier_in_use(route)) is not None:
                    candidate.breaker.reset()
                return []
            case ev.Refused(_, code, why, retry_after_s):
                return self._on_refused(route, code, why, retry_after_s, now)
            case ev.Broke(_, why, retryable):
                return self._on_broken(route, why, retryable, now)
            case ev.Quiet():
                return self._on_quiet(route, now)
            case ev.Unwanted() | ev.Ended():
                dropped = [ev.Drop(route.number, address) for address in route.dialing]
                route.is_waiting, route.address_in_use = False, None
                route.dialing, route.hedge_at, route.is_race = [], None, False
                if isinstance(event, ev.Ended):
                    del self.routes[route.number]
                return [*dropped]
            case _:
                assert_never(event)

    # --- how one generation gets a stream --------------------------------------------------

    def _on_wanted(self, route: Route, now: float) -> Actions:
        route.is_waiting, route.address_in_use = True, None
        listed = self.candidates.listed.values()
        is_first = route.last_address is None and all(one.info is None for one in listed)
        if self._needs_probes and is_first:
            avoid = {*route.tried, *route.unfit}
            unknown = [
                one.address for one in self._unknown_verifiers(now) if one.address not in avoid
            ]
            if len(unknown) > 1:
                route.dialing, route.hedge_at, route.is_race = unknown, None, True
                probes = self._probe_unknown(now)
                return [*(ev.Dial(route.number, one) for one in unknown), *probes]
        return self._dial_next(route, now)

    def _probe_unknown(self, now: float) -> Actions:
        """Probe the verifiers of which nothing is known, if the association uses the answers."""
        if not self._needs_probes or len(self.candidates.listed) < 2:
            return []
        return [_probe(one) for one in self._unknown_verifiers(now) if not one.is_probing]

    def _unknown_verifiers(self, now: float) -> list[KnownVerifier]:
        """Return the verifiers of which nothing is known, neither good nor bad."""
        return [
            one
            for one in self.candidates.listed.values()
            if one.info is None and not one.error and not one.breaker.is_held(now)
        ]

    def _dial_next(self, route: Route, now: float) -> Actions:
        route.hedge_at = None
        address = self.candidates.choose(now, {*route.tried, *route.unfit, *route.dialing}, route)
        if address is None:
            return [] if route.dialing else [self._leave_without_verifier(route, now)]
        if route.dialing and not self.candidates.may_serve(address, route):
            return []  # it would answer first and then refuse
        route.dialing.append(address)
        rtt_s = self.candidates.listed[address].rtt_s or 0.0
        patience_s = min(rtt_s * _ROUND_TRIPS, _MAX_HEDGE_S)
        route.hedge_at = now + max(self.policy.hedge_s, patience_s)
        return [ev.Dial(route.number, address)]

    def _on_dialed(self, route: Route, address: str, now: float) -> Actions:
        if not route.is_waiting or address not in route.dialing:
            return [ev.Drop(route.number, address)]
        losers = [other for other in route.dialing if other != address]
        slower = [] if route.is_race else losers[: route.dialing.index(address)]
        for other in slower:  # dialed earlier
            if (slow := self.candidates.listed.get(other)) is not None:
                slow.error = f"did not answer before {address} did"
                slow.breaker.record_failure(now)
        route.is_waiting, route.address_in_use = False, address
        route.dialing, route.hedge_at, route.is_race = [], None, False
        route.has_progressed = route.is_suspect = False
        route.current_model = None
        return [ev.Use(route.number, address), *(ev.Drop(route.number, other) for other in losers)]

    def _leave_without_verifier(self, route: Route, now: float) -> ev.Leave:
        route.is_waiting, route.address_in_use = False, None
        route.tried.clear()
        listed = self.candidates.listed
        retryable = not listed or any(one not in route.unfit for one in listed)
        again_s = self.candidates.held_for_s(now, route.unfit)
        return ev.Leave(route.number, self._describe_errors(route), again_s, retryable)

    def _describe_errors(self, route: Route) -> str:
        """Return each address with its last error."""
        errors = [
            (address, route.unfit.get(address) or one.error or "not tried")
            for address, one in self.candidates.listed.items()
        ]
        if len(errors) < 2:
            return errors[0][1] if errors else "no verifier is known"
        return "; ".join(why if address in why else f"{address}: {why}" for address, why in errors)

    # --- what happens to a stream ----------------------------------------------------------

    def _on_greeted(self, route: Route, model: ModelIdentity, now: float) -> Actions:
        route.current_model = model
        if route.first_model is None or route.address_in_use is None:
            return []
        why = describe_model_mismatch(route.first_model, model, route.request.needed_length)
        if why is None:
            return []
        route.unfit[route.address_in_use] = why
        return [self._leave(route, f"{route.address_in_use}: {why}", now)]

    def _on_refused(
        self, route: Route, code: FaultCode, why: str, retry_after_s: float, now: float
    ) -> Actions:
        """Handle a fault that a verifier sent: note what it means for this verifier, and leave it.

        INVALID says nothing about the verifier: every other one would answer it too."""
        candidate = self._verifier_in_use(route)
        if candidate is None or code is FaultCode.INVALID:
            return [ev.Leave(route.number, make_one_line(why), None, code.retryable)]
        candidate.error = make_one_line(why)
        candidate.breaker.hold(now, retry_after_s)
        match code:
            case FaultCode.RESYNC:  # not the verifier's fault; its cache may still be useful
                return [ev.Leave(route.number, candidate.error, None)]
            case FaultCode.SHUTTING_DOWN:
                candidate.breaker.open(now)
            case FaultCode.OVERLOADED:
                candidate.breaker.hold(now, retry_after_s or self.policy.full_s)
            case FaultCode.INTERNAL:
                candidate.breaker.record_failure(now)
            case FaultCode.UNKNOWN_MODEL:  # it works but has another model now: probe it
                route.unfit[candidate.address] = candidate.error
                probes = [] if candidate.is_probing else [_probe(candidate)]
                return [*probes, self._leave(route, candidate.error, now)]
            case _:
                self._record_failure(route, candidate.address, why, False, now)
        route.tried.add(candidate.address)
        return [self._leave(route, candidate.error, now)]

    def _on_broken(self, route: Route, why: str, retryable: bool, now: float) -> Actions:
        if route.address_in_use is None:
            return []
        self._record_failure(route, route.address_in_use, why, retryable, now)
        if not route.has_progressed:
            route.tried.add(route.address_in_use)
        return [self._leave(route, make_one_line(why), now)]

    def _on_quiet(self, route: Route, now: float) -> Actions:
        candidate = self._verifier_in_use(route)
        if candidate is None or len(self.candidates.listed) == 1 or candidate.breaker.is_held(now):
            return []
        route.is_suspect = True
        return [] if candidate.is_probing else [_probe(candidate)]

    def _leave(self, route: Route, why: str, now: float) -> ev.Leave:
        """The stream in use is gone. Another one can be tried at once while there is a verifier
        that is not known to be useless."""
        previous, route.address_in_use = route.address_in_use, None
        found = self.candidates.choose(now, {*route.tried, *route.unfit}, route, closed_only=True)
        moved_at = route.moved_at
        again = found == previous and moved_at is not None and now - moved_at < _MIN_STREAM_S
        if found is None or again:
            none = self._leave_without_verifier(route, now)
            return none if found is None else ev.Leave(route.number, why)
        route.moved_at = now
        return ev.Leave(route.number, why, 0.0)

    def _record_failure(
        self, route: Route, address: str, why: str, retryable: bool, now: float
    ) -> None:
        if not retryable:
            route.unfit[address] = make_one_line(why)
        if (candidate := self.candidates.listed.get(address)) is None:
            return
        candidate.error = make_one_line(why)
        if retryable:
            candidate.breaker.record_failure(now)
        elif candidate.breaker.state is CLOSED:
            candidate.breaker.open(now)

    # --- probes ----------------------------------------------------------------------------

    def _on_tick(self, now: float) -> Actions:
        actions: Actions = []
        for route in self.routes.values():
            if route.is_waiting and route.hedge_at is not None and route.hedge_at <= now:
                actions += self._dial_next(route, now)
        if self.routes:
            for at, candidate in tuple(self.candidates.open_breakers()):
                if at <= now:
                    candidate.breaker.start_probe()
                    actions.append(_probe(candidate))
        return actions

    def _on_probe(self, event: ev.ProbeAnswered | ev.ProbeFailed, now: float) -> Actions:
        """Handle the answer or the failure of a probe."""
        candidate = self.candidates.listed.get(event.address)
        if candidate is None:
            return []
        candidate.is_probing = False
        alive = isinstance(event, ev.ProbeAnswered)
        if isinstance(event, ev.ProbeAnswered):
            candidate.info, candidate.rtt_s, candidate.answered_at = event.info, event.rtt_s, now
            candidate.breaker.close_after_probe()
        else:
            alive = event.alive
            if not (alive and candidate.breaker.state is CLOSED):
                candidate.error = make_one_line(event.why)
                candidate.breaker.open(now)
        actions: Actions = []
        for route in self.routes.values():
            if route.is_suspect and route.address_in_use == event.address:
                route.is_suspect = False
                if not alive and self._has_alternative(route, now):
                    route.tried = {event.address}
                    actions.append(self._leave(route, candidate.error, now))
        return actions

    def _has_alternative(self, route: Route, now: float) -> bool:
        """Return whether another verifier can replace a stream that may only be slow.

        Verifiers that were tried before count again: the probe took longer than any pause."""
        avoid = {*route.unfit, str(route.address_in_use)}
        found = self.candidates.choose(now, avoid, route, closed_only=True)
        return found is not None and self.candidates.may_serve(found, route)

    def _verifier_in_use(self, route: Route) -> KnownVerifier | None:
        """Return the verifier of the stream in use."""
        address = route.address_in_use
        return None if address is None else self.candidates.listed.get(address)


def _probe(candidate: KnownVerifier) -> ev.Probe:
    """Return the probe of this verifier and record that it is under way."""
    candidate.is_probing = True
    return ev.Probe(candidate.address)
