"""Verifiers, a network and a generation around a ``Failover``, in virtual time, all by seed.

Each verifier is in one mood after the other. The world carries out the machine's actions as a
driver would, and asserts after each event what must hold whatever happens.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from edgespec.core.association import failover_events as ev
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.protocol.messages import FaultCode, Limits, ModelIdentity, VerifierInfo
from edgespec.core.protocol.work import ModelInfo

MODEL = ModelInfo("big", "words", 100, 4096, (), "fp-1")
OTHER = ModelInfo("big", "words", 100, 4096, (), "fp-2")
DIAL_S, PROBE_S, STEP_S = 5.0, 1.5, 0.05
CALM_AFTER_S = 60.0
RETRY_AFTER_S = 3.0


class Mood(Enum):
    UP = "up"
    DOWN = "refuses connections"
    HOLE = "swallows everything"
    DRAINS = "shuts down, with advice"
    FULL = "is full, with advice"
    OTHER = "serves another model"
    KEYLESS = "refuses the key"
    SICK = "greets, then breaks"


ANSWERING = (Mood.UP, Mood.DRAINS, Mood.FULL, Mood.OTHER, Mood.SICK)


@dataclass
class Verifier:
    """``moods`` are (from when, which), in order."""

    address: str
    rtt_s: float
    moods: list[tuple[float, Mood]]
    held_until: float = 0.0

    def mood(self, now: float) -> Mood:
        return [mood for since, mood in self.moods if since <= now][-1]

    @property
    def model(self) -> ModelInfo:
        return MODEL


@dataclass
class Session:
    """The generation: what it holds, and what it waits for."""

    route: int
    tokens: int = 0
    using: str | None = None
    stream: int = 0
    waiting: bool = False
    asked_at: float = 0.0
    failed: ev.Leave | None = None
    longest_wait_s: float = 0.0
    last_token_at: float = 0.0
    models: set[str] = field(default_factory=set)


class World:
    """``run`` plays until ``until_s``; ``sessions`` tell what became of the generations."""

    def __init__(self, seed: int, count: int, sessions: int = 2) -> None:
        self.dice = random.Random(seed)
        names = [f"v{number}" for number in range(count)]
        self.verifiers = {name: self._verifier(name, index) for index, name in enumerate(names)}
        association = self.dice.choice(tuple(Association))
        self.machine = Failover(FailoverPolicy(), association, seed)
        self.now, self._ids = 0.0, itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tick_at: float | None = None
        self.dials: set[tuple[int, str]] = set()
        self.dialed: set[tuple[int, str]] = set()
        self.probes: set[str] = set()
        self.sessions = {number: Session(number) for number in range(1, sessions + 1)}
        self.told_not_before: dict[str, float] = {}
        self.handle(ev.Known(tuple(names)))
        for session in self.sessions.values():
            self.after(self.dice.uniform(0, 2), partial(self.want, session))

    def _verifier(self, name: str, index: int) -> Verifier:
        possible = list(Mood)
        if index == 0 and self.dice.random() < 0.9:  # else most texts would find it of no use
            possible = [mood for mood in Mood if mood not in (Mood.OTHER, Mood.KEYLESS)]
        moods, at = [(0.0, self.dice.choice(possible))], 0.0
        while (at := at + self.dice.uniform(0.2, 15)) < CALM_AFTER_S:
            moods.append((at, self.dice.choice(possible)))
        calm = Mood.UP if index == 0 else self.dice.choice((Mood.UP, Mood.DOWN, Mood.HOLE))
        return Verifier(name, self.dice.uniform(0.001, 0.2), [*moods, (CALM_AFTER_S, calm)])

    # --- time ------------------------------------------------------------------------------

    def after(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._ids), work))

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, work = heapq.heappop(self._queue)
            work()

    def handle(self, event: ev.FailoverEvent) -> None:
        actions = self.machine.handle(event, self.now)
        for action in actions:
            self._do(action)
        deadline = self.machine.deadline
        if isinstance(event, ev.Tick):
            assert deadline is None or deadline > self.now, "a tick that changes nothing"
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._tick_at = max(deadline, self.now)
            self.after(self._tick_at - self.now, self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        deadline = self.machine.deadline
        if deadline is not None:
            self.handle(ev.Tick()) if deadline <= self.now else self._rearm(deadline)

    def _rearm(self, deadline: float) -> None:
        self._tick_at = deadline
        self.after(deadline - self.now, self._tick)

    # --- the machine's actions -------------------------------------------------------------

    def _do(self, action: ev.FailoverAction) -> None:
        match action:
            case ev.Dial(route, address):
                key, session = (route, address), self.sessions[route]
                assert key not in self.dials | self.dialed, "dialed twice"
                assert session.waiting, "dialed for a generation that waits for nothing"
                self._allowed(address)
                self.dials.add(key)
                self._dial(route, self.verifiers[address])
            case ev.Drop(route, address):
                self.dials.discard((route, address))
                self.dialed.discard((route, address))
            case ev.Use(route, address):
                assert (route, address) in self.dialed, "used without a stream"
                self.dialed.discard((route, address))
                self._use(self.sessions[route], self.verifiers[address])
            case ev.Leave(route):
                self._leave(self.sessions[route], action)
            case ev.Probe(address):
                assert address not in self.probes, "asked twice at once"
                self._allowed(address)
                self.probes.add(address)
                self._probe(self.verifiers[address])

    def _allowed(self, address: str) -> None:
        assert self.now >= self.told_not_before.get(address, 0.0), "not before, it was told"

    def _dial(self, route: int, verifier: Verifier) -> None:
        key = (route, verifier.address)

        def ended() -> None:
            if key not in self.dials:
                return
            self.dials.discard(key)
            if verifier.mood(self.now) in (Mood.DOWN, Mood.HOLE):
                self.handle(ev.DialFailed(route, verifier.address, "nobody there"))
            else:
                self.dialed.add(key)
                self.handle(ev.Dialed(route, verifier.address))

        hole = verifier.mood(self.now) is Mood.HOLE
        self.after(DIAL_S if hole else verifier.rtt_s, ended)

    def _probe(self, verifier: Verifier) -> None:
        mood = verifier.mood(self.now)

        def ended() -> None:
            self.probes.discard(verifier.address)
            if mood in ANSWERING:
                model = OTHER if mood is Mood.OTHER else MODEL
                info = VerifierInfo(model, Limits(), 0, 8, 20_000)
                self.handle(ev.ProbeAnswered(verifier.address, info, verifier.rtt_s))
            else:
                alive = mood is Mood.KEYLESS
                self.handle(ev.ProbeFailed(verifier.address, f"{mood.value}", alive))

        self.after(PROBE_S if mood is Mood.HOLE else verifier.rtt_s, ended)

    # --- a generation ----------------------------------------------------------------------

    def want(self, session: Session) -> None:
        if session.failed is None:
            session.waiting, session.asked_at = True, self.now
            self.handle(ev.Wanted(session.route, 200, f"text {session.route}"))

    def _leave(self, session: Session, leave: ev.Leave) -> None:
        self._answered(session)
        session.using, session.stream = None, session.stream + 1
        if not leave.retryable:
            session.failed = leave
            return
        wait_s = self.dice.uniform(0.05, 1.0) if leave.again_s is None else leave.again_s
        self.after(wait_s, lambda: self.want(session))

    def _answered(self, session: Session) -> None:
        if session.waiting:
            session.waiting = False
            waited_s = self.now - session.asked_at
            session.longest_wait_s = max(session.longest_wait_s, waited_s)

    def _use(self, session: Session, verifier: Verifier) -> None:
        assert session.waiting, "a stream for a generation that waits for none"
        self._answered(session)
        session.using, session.stream = verifier.address, session.stream + 1
        stream = session.stream
        self.after(verifier.rtt_s, lambda: self._open(session, stream, verifier))

    def _open(self, session: Session, stream: int, verifier: Verifier) -> None:
        if session.stream != stream:
            return
        refusals = {
            Mood.DRAINS: (FaultCode.SHUTTING_DOWN, RETRY_AFTER_S),
            Mood.FULL: (FaultCode.OVERLOADED, RETRY_AFTER_S),
            Mood.KEYLESS: (FaultCode.UNAUTHENTICATED, 0.0),
        }
        mood = verifier.mood(self.now)
        if mood is Mood.DOWN:
            return self.handle(ev.Broke(session.route, "reset"))
        if mood is Mood.HOLE:
            return self._quiet(session, stream, verifier)
        if mood in refusals:
            code, retry_after_s = refusals[mood]
            not_before = self.now + retry_after_s
            known = self.told_not_before.get(verifier.address, 0.0)
            self.told_not_before[verifier.address] = max(known, not_before)
            return self.handle(ev.Refused(session.route, code, mood.value, retry_after_s))
        model = OTHER if mood is Mood.OTHER else MODEL
        self.handle(ev.Greeted(session.route, ModelIdentity(model.name, model.fingerprint, 4096)))
        if session.stream == stream:
            if session.tokens:
                assert model.fingerprint in session.models, "another model for the same text"
            if mood is Mood.SICK:
                return self.handle(ev.Broke(session.route, "broke"))
            self._token(session, stream, verifier, model)
        return None

    def _quiet(self, session: Session, stream: int, verifier: Verifier) -> None:
        def still() -> None:
            if session.stream == stream:
                if verifier.mood(self.now) is Mood.HOLE:
                    self.handle(ev.Quiet(session.route))
                    self._quiet(session, stream, verifier)
                else:
                    self.handle(ev.Broke(session.route, "came back without the stream"))

        self.after(1.5, still)

    def _token(self, session: Session, stream: int, verifier: Verifier, model: ModelInfo) -> None:
        if session.stream != stream:
            return
        mood = verifier.mood(self.now)
        serving = Mood.OTHER if model is OTHER else Mood.UP
        if mood is Mood.HOLE:
            return self._quiet(session, stream, verifier)
        if mood is not serving:
            code = FaultCode.SHUTTING_DOWN
            if mood is Mood.DRAINS:
                self.told_not_before[verifier.address] = self.now + 1.0
                return self.handle(ev.Refused(session.route, code, "resume elsewhere", 1.0))
            return self.handle(ev.Broke(session.route, "killed"))
        session.tokens += 1
        session.last_token_at = self.now
        session.models.add(model.fingerprint)
        self.handle(ev.Progressed(session.route))
        self.after(STEP_S, lambda: self._token(session, stream, verifier, model))
        return None
