"""One verifier of a scenario: the product's engine on hardware of a given speed, restarts and all.

Theory of operation. A site holds one engine, or, when the target's layers lie on several nodes, one
engine for each pass that may be under way at once (as pipeline-parallel servers do it): sessions
are dealt out to the engines, whose passes follow one another through the same stages. Where compute
is given out in slices, each device has an engine of its own. A restart forgets every session;
devices come back with what they hold and the engine feeds it anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from edgespec.core.association.policies import VerifierView
from edgespec.core.protocol.messages import Limits
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.session import VerifySession
from edgespec.telemetry.cost_profile import TimeLaw
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.server import Compute, SimulatedVerifier
from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import VerifierSection
from edgespec_sim.token_sources.relaxed_rule import rules_of
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.world.audit import Slots

# A device notices within a few seconds (docs/measurements.md: 3 to 4 s) when nothing says so; a
# process that dies resets its connections at once.
_NOTICE_S = 0.05
REQUEST_MARK = "#"
"""In a session id: behind the device's name, before the number of its request."""


@dataclass(slots=True)
class SiteCounters:
    passes: int = 0
    rows: int = 0
    sessions: int = 0
    """Sessions in passes, summed."""
    busy_s: float = 0.0
    restarts: int = 0


class Machine:
    """Runs one pass at a time, in the order in which they come; counts what it did. ``law`` may
    change: passes that come later take it. ``audit`` sees every pass."""

    def __init__(
        self,
        queue: EventQueue,
        law: TimeLaw,
        seed: str,
        audit: Slots | None = None,
        *,
        charges: bool = False,
    ) -> None:
        """``charges``: note what its passes take for each session."""
        self.counters = SiteCounters()
        self.pass_s_of: dict[str, float] | None = {} if charges else None
        """By session: its part of the passes, by rows."""
        self.law = law
        self._queue, self._audit = queue, audit
        self._dice = random.Random(seed) if len(law.spread) > 1 else None
        self._free_at_s = 0.0
        self.brought: dict[str, int] = {}
        """By session: of how many positions the keys and values came from elsewhere, and so need no
        row when they are fed."""

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        rows = sum(len(request.feed) + len(request.tokens) for request in requests)
        if self.brought:
            rows -= sum(self._brought(request) for request in requests)
        context = sum(request.cache_length for request in requests) if self.law.context_s else 0
        chance = self._dice.random() if self._dice else 0.5
        pass_s = self.law.seconds(rows, context, chance, len(requests))
        start_s = max(self._queue.now, self._free_at_s)
        self._free_at_s = start_s + pass_s
        if self._audit is not None:
            self._audit.add(start_s, self._free_at_s, pass_s)
        counters = self.counters
        counters.passes += 1
        counters.rows += rows
        counters.sessions += len(requests)
        counters.busy_s += pass_s
        if self.pass_s_of is not None:
            self._charge(self.pass_s_of, requests, pass_s)
        self._queue.at(self._free_at_s, done)

    @staticmethod
    def _charge(taken_s: dict[str, float], requests: Sequence[PassRequest], pass_s: float) -> None:
        rows = [max(1, len(request.feed) + len(request.tokens)) for request in requests]
        for request, own in zip(requests, rows, strict=True):
            taken_s[request.key] = taken_s.get(request.key, 0.0) + pass_s * own / sum(rows)

    def _brought(self, request: PassRequest) -> int:
        """Rows of this request that are there already. The last position is computed where it is
        asked for what follows, and then nothing is left of what came."""
        positions = self.brought.get(request.key, 0)
        computed = 1 if request.sample else 0
        spared = min(positions - request.cache_length, len(request.feed) - computed)
        if request.sample:
            self.brought.pop(request.key, None)
        return max(0, spared)


class Site:
    """``accept`` takes a stream; ``reachable`` is False while the process is down. There is an
    engine for each of ``computes``; devices in ``engine_of`` have the one of that index."""

    def __init__(
        self,
        queue: EventQueue,
        name: str,
        section: VerifierSection,
        limits: Limits,
        source: TokenSource,
        computes: tuple[Compute, ...],
        pass_s: float,
        session_s: float,
        engine_of: Mapping[str, int],
        tracer: Tracer | None = None,
    ) -> None:
        self.name, self.section, self.restarts = name, section, 0
        self._queue, self._limits, self._tracer = queue, limits, tracer
        self._source, self._computes = source, computes
        self.pass_s, self._session_s, self._engine_of = pass_s, session_s, engine_of
        self._down_until_s = 0.0
        self._next = 0
        self._servers = self._start()
        for at_s in section.restarts_at_s:
            queue.at(at_s, partial(self.restart, section.restart_s))

    @property
    def reachable(self) -> bool:
        return self._queue.now >= self._down_until_s

    @property
    def sessions(self) -> int:
        return sum(len(server.engine.sessions) for server in self._servers)

    @property
    def view(self) -> VerifierView:
        sessions, most = self.sessions, self.section.max_sessions
        return VerifierView(self.name, self.pass_s, sessions, most, self._session_s)

    def session(self, key: str) -> VerifySession | None:
        for server in self._servers:
            if (session := server.engine.sessions.get(key)) is not None:
                return session
        return None

    def accept(self, stream: Stream, key: str) -> None:
        """A stream whose session id will be ``key``: one that is known goes where it was."""
        for server in self._servers:
            if key in server.engine.sessions:
                server.accept(stream)
                return
        given = self._engine_of.get(key.partition(REQUEST_MARK)[0])
        if given is not None:
            self._servers[given].accept(stream)
            return
        self._next = (self._next + 1) % len(self._servers)
        self._servers[self._next].accept(stream)

    def restart(self, down_s: float) -> None:
        self.restarts += 1
        self._down_until_s = max(self._down_until_s, self._queue.now + down_s)
        for server in self._servers:
            server.stop(_NOTICE_S)
        self._servers = self._start()

    def _start(self) -> tuple[SimulatedVerifier, ...]:
        slots = len(self._computes)
        engine_limits = EngineLimits(
            max_sessions=max(1, self.section.max_sessions // slots),
            max_rows_per_pass=self.section.max_rows_per_pass,
            max_rows_per_session=self.section.max_rows_per_session,
        )
        servers = []
        for number, compute in enumerate(self._computes):
            target = self._source.target()
            engine = VerifyEngine(target.info, self._limits, engine_limits, rules_of(self._source))
            name = self.name if slots == 1 else f"{self.name}/{number}"
            servers.append(
                SimulatedVerifier(self._queue, engine, target, compute, self._tracer, name)
            )
        return tuple(servers)
