"""The verifiers that a device may use: what is known of each, and which is the best now.

Theory of operation. A verifier is excluded while it is held (it asked for time) or if the
generation at hand avoids it. Of the others those with the best rank count. A closed breaker ranks
before an open one; before both comes whether the last answer fits the model and the name that is
requested. An answer may be old, so a verifier that does not fit is tried last and not left out.
Among equals the one that was used last is preferred, since its cache may hold the prompt; otherwise
the association chooses. A verifier that was not probed yet, or whose reported load is old, counts
with the average of the others.

Each verifier has a circuit breaker: one that fails is left alone for a while, then probed cheaply.

    closed     streams go there
    open       it failed ``failures`` times in a row, or announced that it shuts down: no stream
               goes there while there is another verifier
    half-open  the time is over and one cheap probe (``Info``) is under way: an answer closes the
               breaker, a failure opens it again for twice as long

Independently of that, a verifier may ask for time (``retry_after``). Then ``is_held`` is True,
whatever the state, and nothing is sent to it before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import fmean
from typing import Final

from edgespec.core.association import failover_events as ev
from edgespec.core.association.policies import Association, VerifierView, rank_verifiers
from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.estimators import ASSUMED_PASS_S, ASSUMED_RTT_S
from edgespec.core.protocol.messages import ModelIdentity, VerifierInfo
from edgespec.core.protocol.sampling import noise_bits

_MIN_S: Final = 1e-3
_MAX_S: Final = 86_400.0
_MAX_DOUBLINGS: Final = 30


class Circuit(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


CLOSED, OPEN, HALF_OPEN = Circuit


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens, and for how long; times in seconds. Raises ``ValueError`` for a value
    out of range."""

    failures: int = 2
    """Number of failures in a row that open the breaker."""
    open_s: float = 0.5
    """Seconds that the breaker stays open the first time; each further time is twice as long, less
    up to a half by chance. A process that its supervisor restarts takes about as long."""
    longest_open_s: float = 8.0
    """Longest time that the breaker stays open: a verifier that is back is found within it. A probe
    at this interval costs nothing."""

    def __post_init__(self) -> None:
        check_range("failures", self.failures, 1, 1000)
        check_range("open_s", self.open_s, _MIN_S, _MAX_S)
        check_range("longest_open_s", self.longest_open_s, self.open_s, _MAX_S)


class CircuitBreaker:
    """The circuit breaker of one verifier. ``seed`` makes its jitter differ from others'."""

    def __init__(self, policy: BreakerPolicy, seed: int) -> None:
        self.state = CLOSED
        self.probe_at: float | None = None
        """Time of the next probe; only while open."""
        self.held_until = 0.0
        """Time before which the verifier asked not to be contacted."""
        self._policy, self._seed = policy, seed
        self._failures = 0
        self._openings = 0
        """Number of openings in a row, each longer than the one before."""

    def is_held(self, now: float) -> bool:
        return now < self.held_until

    def hold(self, now: float, seconds: float) -> None:
        """Hold the verifier for the time that it asked for. NaN changes nothing."""
        if now + seconds > self.held_until:
            self.held_until = now + min(seconds, _MAX_S)
            if self.probe_at is not None:
                self.probe_at = max(self.probe_at, self.held_until)

    def reset(self) -> None:
        """A token arrived: forget all failures."""
        self.state, self.probe_at = CLOSED, None
        self._failures = self._openings = 0

    def close_after_probe(self) -> None:
        """A probe was answered: streams may go there. The openings in a row are forgotten only when
        the verifier has brought a token."""
        if self.state is not CLOSED:
            self.state, self.probe_at = CLOSED, None
            self._failures = max(0, self._policy.failures - 1)

    def record_failure(self, now: float) -> None:
        self._failures += 1
        if self.state is not CLOSED or self._failures >= self._policy.failures:
            self.open(now)

    def open(self, now: float) -> None:
        """Open the breaker: no stream goes there from now on."""
        if self.state is OPEN:
            return
        doublings = min(self._openings, _MAX_DOUBLINGS)
        self._openings += 1
        wait_s = min(self._policy.open_s * 2**doublings, self._policy.longest_open_s)
        wait_s *= 1 - noise_bits(self._seed, self._openings, 1) / 2**33
        self.state, self.probe_at = OPEN, max(now + wait_s, self.held_until)

    def start_probe(self) -> None:
        """Record that the probe is under way."""
        assert self.state is OPEN
        self.state, self.probe_at = HALF_OPEN, None


# The load of a verifier is unknown if it was reported longer ago than a generation takes (some
# hundred tokens at 25 to 60 ms): its sessions are others by then.
_LOAD_KEPT_S = 30.0


@dataclass(slots=True)
class KnownVerifier:
    address: str
    breaker: CircuitBreaker
    info: VerifierInfo | None = None
    """The verifier's last answer to a probe."""
    answered_at: float | None = None
    """Time of the last answer."""
    rtt_s: float | None = None
    error: str = ""
    """The verifier's last error."""
    is_probing: bool = False
    """True while a probe is under way."""

    def recent_session_count(self, now: float) -> int | None:
        """Return the verifier's sessions; None if they are not known, or too old."""
        if self.info is None or self.answered_at is None or now - self.answered_at > _LOAD_KEPT_S:
            return None
        return self.info.sessions

    def may_serve(
        self, model: ModelIdentity | None, name: str = "", *, has_pictures: bool = False
    ) -> bool:
        """Return whether the last answer allows that the verifier serves ``model`` under ``name``.

        An empty ``name`` means that no name was requested; a ``model`` of None accepts any model.
        With ``has_pictures`` the model must read pictures. True if there was no answer yet."""
        if self.info is None:
            return True
        return any(
            model is None or ModelIdentity(served.name, served.fingerprint, 0).is_model_of(model)
            for served in self.info.models
            if name in ("", served.name) and not (has_pictures and served.pictures is None)
        )


@dataclass(slots=True)
class Route:
    """State of one generation: which verifiers it has tried, uses and got tokens from."""

    request: ev.Wanted = field(default_factory=lambda: ev.Wanted(0))
    is_waiting: bool = False
    """True while the generation waits for a stream."""
    dialing: list[str] = field(default_factory=list)
    is_race: bool = False
    """True while verifiers of which nothing is known were dialed at the same time."""
    hedge_at: float | None = None
    tried: set[str] = field(default_factory=set)
    """Addresses tried in vain since the last token or the last pause."""
    unfit: dict[str, str] = field(default_factory=dict)
    """Addresses that this generation cannot use, with the reason."""
    address_in_use: str | None = None
    has_progressed: bool = False
    """True once the stream in use has brought a token."""
    is_suspect: bool = False
    """True while the stream in use is quiet and its verifier is being probed."""
    last_address: str | None = None
    """Address of the verifier whose cache may hold the generation."""
    moved_at: float | None = None
    """Time of the last ``Leave`` that allowed another stream at once."""
    current_model: ModelIdentity | None = None
    first_model: ModelIdentity | None = None
    """The model that the generation began with."""
    served: list[str] = field(default_factory=list)
    """Addresses that brought tokens, each once."""
    failovers: int = 0
    """Number of times that a token came from another address than the one before."""

    @property
    def number(self) -> int:
        return self.request.route

    def brought_token(self) -> None:
        """Record the first token of the stream in use."""
        address = self.address_in_use
        if address is None or self.has_progressed:
            return
        self.has_progressed = True
        self.tried.clear()
        self.first_model = self.first_model or self.current_model
        self.failovers += self.last_address is not None and self.last_address != address
        if address not in self.served:
            self.served.append(address)
        self.last_address = address


class KnownVerifiers:
    """All verifiers that a device may use. ``seed`` makes the jitter of their breakers this
    device's own."""

    def __init__(self, association: Association, policy: BreakerPolicy, seed: int) -> None:
        self.listed: dict[str, KnownVerifier] = {}
        self._association, self._policy, self._seed = association, policy, seed
        self._made = 0

    def replace_all(self, addresses: Iterable[str]) -> None:
        """Replace the candidates, in order of preference. What is known of the remaining ones is
        kept."""
        self.listed = {one: self.listed.get(one) or self._make(one) for one in addresses}

    def choose(
        self, now: float, avoid: Collection[str], route: Route, *, closed_only: bool = False
    ) -> str | None:
        """Return the address that ``route`` should try next, or None."""
        by_rank: dict[tuple[bool, bool], list[KnownVerifier]] = {}
        for one in self.listed.values():
            if one.address in avoid or one.breaker.is_held(now):
                continue
            if closed_only and one.breaker.state is not CLOSED:
                continue
            rank = (not self.may_serve(one.address, route), one.breaker.state is not CLOSED)
            by_rank.setdefault(rank, []).append(one)
        if not by_rank:
            return None
        best = by_rank[min(by_rank)]
        if len(best) == 1 or any(one.address == route.last_address for one in best):
            return route.last_address if len(best) > 1 else best[0].address
        views = make_views(
            [(one.address, one.info, one.recent_session_count(now), one.rtt_s) for one in best]
        )
        return rank_verifiers(self._association, route.request.conversation, views)[0]

    def may_serve(self, address: str, route: Route) -> bool:
        """Return whether the verifier's last answer fits the model of ``route``."""
        request = route.request
        return self.listed[address].may_serve(
            route.first_model, request.model, has_pictures=request.has_pictures
        )

    def held_for_s(self, now: float, avoid: Collection[str]) -> float | None:
        """Return for how long all candidates but ``avoid`` are held; None if at least one is
        not."""
        held_s = [
            one.breaker.held_until - now for one in self.listed.values() if one.address not in avoid
        ]
        return min(held_s) if held_s and min(held_s) > 0.0 else None

    def open_breakers(self) -> Iterator[tuple[float, KnownVerifier]]:
        """Yield the candidates whose breaker is open, each with the time of its next probe."""
        for one in self.listed.values():
            if (at := one.breaker.probe_at) is not None and not one.is_probing:
                yield at, one

    def _make(self, address: str) -> KnownVerifier:
        self._made += 1
        return KnownVerifier(address, CircuitBreaker(self._policy, self._seed + self._made))


def make_views(
    known: Sequence[tuple[str, VerifierInfo | None, int | None, float | None]],
) -> list[VerifierView]:
    """Return the verifiers as an association compares them.

    ``known`` holds (address, info, sessions, round trip) for each; None means unknown, and is
    replaced by the average of the others. The reported pass duration is one under the recent load,
    so the sessions are in it already."""
    loads = [sessions for _, _, sessions, _ in known if sessions is not None]
    usual_load = round(fmean(loads)) if loads else 0
    timed_s = [info.pass_us / 1e6 for _, info, _, _ in known if info and info.pass_us]
    usual_s = fmean(timed_s) if timed_s else ASSUMED_PASS_S
    rtts_s = [rtt_s for *_, rtt_s in known if rtt_s is not None]
    usual_rtt_s = fmean(rtts_s) if rtts_s else ASSUMED_RTT_S
    views = []
    for address, info, sessions, rtt_s in known:
        pass_s = usual_s if info is None else info.pass_us / 1e6 or usual_s
        most = 0 if info is None else info.max_sessions
        is_full = bool(most) and sessions is not None and sessions >= most
        round_s = pass_s + (usual_rtt_s if rtt_s is None else rtt_s)
        views.append(
            VerifierView(address, round_s, usual_load if sessions is None else sessions, is_full)
        )
    return views
