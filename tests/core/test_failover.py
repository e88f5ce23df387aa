"""The failover of a device, and replicas behind one name.

Oracles, beside ``failover_scripts``, which ``test_scripts.py`` plays: laws of random worlds; the
promises of conversation hashing (which conversations move, and where to) and the binomial law of
its spread. A random world is a seeded mixture of verifiers, a network and generations around a
``Failover`` in virtual time. It carries out the machine's actions as a driver would, and asserts
the invariants after each event.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

import pytest

from edgespec.core.association import failover_events as ev
from edgespec.core.association import known_verifiers as kv
from edgespec.core.association import policies
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.known_verifiers import CLOSED, HALF_OPEN, OPEN, CircuitBreaker
from edgespec.core.association.policies import Association, VerifierView, rendezvous_weight
from edgespec.core.protocol.messages import (
    FaultCode,
    Limits,
    ModelIdentity,
    VerifierInfo,
    describe_model_mismatch,
)
from edgespec.core.protocol.work import ModelInfo
from tests.present import require

MODEL = ModelInfo("big", "words", 100, 4096, (), "fp-1")
OTHER = ModelInfo("big", "words", 100, 4096, (), "fp-2")
SERVED = ModelIdentity("big", "fp-1", 4096)
MOVED, FULL = FaultCode.SHUTTING_DOWN, FaultCode.OVERLOADED


Identity = tuple[str, str, int]


@pytest.mark.parametrize(
    ("begun", "here", "reason"),
    [
        (("big", "fp-1", 4096), ("renamed", "fp-1", 4096), None),
        (("big", "fp-1", 4096), ("big", "fp-2", 4096), "but the generation began on 'big' (fp-1)"),
        (("big", "fp-1", 4096), ("big", "", 4096), "the model 'big' (no fingerprint)"),
        (("big", "fp-1", 4096), ("big", "fp-1", 200), None),
        (("big", "fp-1", 4096), ("big", "fp-1", 199), "its context is 199 tokens"),
        # Verifiers without a fingerprint are distinguished by name.
        (("big", "", 0), ("big", "", 0), None),
        (("big", "", 0), ("small", "", 0), "'small'"),
    ],
)
def test_who_may_continue(begun: Identity, here: Identity, reason: str | None) -> None:
    why = describe_model_mismatch(ModelIdentity(*begun), ModelIdentity(*here), 200)
    assert why is None if reason is None else reason in str(why)


def test_a_breaker_opens_asks_and_closes() -> None:
    breaker = CircuitBreaker(kv.BreakerPolicy(failures=2, open_s=1.0, longest_open_s=4.0), 7)
    breaker.record_failure(0.0)
    assert breaker.state is CLOSED
    for now, longest_s in ((0.0, 1.0), (10.0, 2.0), (20.0, 4.0), (30.0, 4.0), (40.0, 4.0)):
        breaker.record_failure(now)
        assert breaker.state is OPEN
        assert longest_s / 2 <= require(breaker.probe_at) - now <= longest_s
        breaker.start_probe()
        assert breaker.state is HALF_OPEN
    breaker.close_after_probe()
    assert breaker.state is CLOSED
    breaker.record_failure(50.0)
    assert breaker.state is OPEN  # it answers questions and breaks streams
    breaker.reset()
    breaker.record_failure(60.0)
    assert breaker.state is CLOSED


DIAL_S, PROBE_S, STEP_S, RETRY_AFTER_S, CALM_AFTER_S = 5.0, 1.5, 0.05, 3.0, 60.0


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
REFUSALS = {
    Mood.DRAINS: (MOVED, RETRY_AFTER_S),
    Mood.FULL: (FULL, RETRY_AFTER_S),
    Mood.KEYLESS: (FaultCode.UNAUTHENTICATED, 0.0),
}


@dataclass
class Verifier:
    """A verifier whose ``moods`` are pairs of (start time, mood), in order."""

    address: str
    rtt_s: float
    moods: list[tuple[float, Mood]]

    def mood(self, now: float) -> Mood:
        return [mood for since, mood in self.moods if since <= now][-1]


@dataclass
class Session:
    """One generation: the tokens that it holds, and the event that it waits for."""

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
    """A random world. ``run`` plays until ``until_s``; ``sessions`` then hold the outcome of each
    generation."""

    def __init__(self, seed: int, count: int) -> None:
        self.dice = random.Random(seed)
        names = [f"v{number}" for number in range(count)]
        self.verifiers = {name: self._verifier(name, index) for index, name in enumerate(names)}
        self.machine = Failover(FailoverPolicy(), self.dice.choice(tuple(Association)), seed)
        self.now, self._ids = 0.0, itertools.count()
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._tick_at: float | None = None
        self.dials: set[tuple[int, str]] = set()
        self.dialed: set[tuple[int, str]] = set()
        self.probes: set[str] = set()
        self.sessions = {number: Session(number) for number in (1, 2)}
        self.retry_not_before_s: dict[str, float] = {}
        self.handle(ev.Known(tuple(names)))
        for session in self.sessions.values():
            self.schedule(self.dice.uniform(0, 2), partial(self.request_verifier, session))

    def _verifier(self, name: str, index: int) -> Verifier:
        possible = list(Mood)
        # otherwise most generations would find the verifier of no use
        if index == 0 and self.dice.random() < 0.9:
            possible = [mood for mood in Mood if mood not in (Mood.OTHER, Mood.KEYLESS)]
        moods, at = [(0.0, self.dice.choice(possible))], 0.0
        while (at := at + self.dice.uniform(0.2, 15)) < CALM_AFTER_S:
            moods.append((at, self.dice.choice(possible)))
        calm = Mood.UP if index == 0 else self.dice.choice((Mood.UP, Mood.DOWN, Mood.HOLE))
        return Verifier(name, self.dice.uniform(0.001, 0.2), [*moods, (CALM_AFTER_S, calm)])

    def schedule(self, delay_s: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._ids), work))

    def run(self, until_s: float) -> None:
        while self._queue and self._queue[0][0] <= until_s:
            self.now, _, work = heapq.heappop(self._queue)
            work()

    def handle(self, event: ev.FailoverEvent) -> None:
        for action in self.machine.handle(event, self.now):
            self._do(action)
        deadline = self.machine.deadline
        if isinstance(event, ev.Tick):
            assert deadline is None or deadline > self.now, "a tick that changes nothing"
        if deadline is not None and (self._tick_at is None or deadline < self._tick_at):
            self._arm(max(deadline, self.now))

    def _arm(self, at: float) -> None:
        self._tick_at = at
        self.schedule(at - self.now, self._tick)

    def _tick(self) -> None:
        self._tick_at = None
        deadline = self.machine.deadline
        if deadline is not None:
            self.handle(ev.Tick()) if deadline <= self.now else self._arm(deadline)

    def _do(self, action: ev.FailoverAction) -> None:
        match action:
            case ev.Dial(route, address):
                key, session = (route, address), self.sessions[route]
                assert key not in self.dials | self.dialed, "dialed twice"
                assert session.waiting, "dialed for a generation that waits for nothing"
                self._check_retry_time(address)
                self.dials.add(key)
                self._dial(route, self.verifiers[address])
            case ev.Drop(route, address):
                self.dials.discard((route, address))
                self.dialed.discard((route, address))
            case ev.Use(route, address):
                assert (route, address) in self.dialed, "used without a stream"
                self.dialed.discard((route, address))
                self._begin_stream(self.sessions[route], self.verifiers[address])
            case ev.Leave(route):
                self._end_use(self.sessions[route], action)
            case ev.Probe(address):
                assert address not in self.probes, "asked twice at once"
                self._check_retry_time(address)
                self.probes.add(address)
                self._probe(self.verifiers[address])

    def _check_retry_time(self, address: str) -> None:
        assert self.now >= self.retry_not_before_s.get(address, 0.0), "used before its retry time"

    def _dial(self, route: int, verifier: Verifier) -> None:
        key = (route, verifier.address)

        def end_dial() -> None:
            if key not in self.dials:
                return
            self.dials.discard(key)
            if verifier.mood(self.now) in (Mood.DOWN, Mood.HOLE):
                self.handle(ev.DialFailed(route, verifier.address, "nobody there"))
            else:
                self.dialed.add(key)
                self.handle(ev.Dialed(route, verifier.address))

        self.schedule(DIAL_S if verifier.mood(self.now) is Mood.HOLE else verifier.rtt_s, end_dial)

    def _probe(self, verifier: Verifier) -> None:
        mood = verifier.mood(self.now)

        def end_probe() -> None:
            self.probes.discard(verifier.address)
            if mood in ANSWERING:
                info = VerifierInfo(OTHER if mood is Mood.OTHER else MODEL, Limits(), 0, 8, 20_000)
                self.handle(ev.ProbeAnswered(verifier.address, info, verifier.rtt_s))
            else:
                self.handle(ev.ProbeFailed(verifier.address, mood.value, mood is Mood.KEYLESS))

        self.schedule(PROBE_S if mood is Mood.HOLE else verifier.rtt_s, end_probe)

    def request_verifier(self, session: Session) -> None:
        if session.failed is None:
            session.waiting, session.asked_at = True, self.now
            self.handle(ev.Wanted(session.route, 200, f"text {session.route}"))

    def _end_use(self, session: Session, leave: ev.Leave) -> None:
        self._end_wait(session, None)
        if not leave.retryable:
            session.failed = leave
            return
        wait_s = self.dice.uniform(0.05, 1.0) if leave.again_s is None else leave.again_s
        self.schedule(wait_s, lambda: self.request_verifier(session))

    def _end_wait(self, session: Session, using: str | None) -> None:
        if session.waiting:
            session.waiting = False
            session.longest_wait_s = max(session.longest_wait_s, self.now - session.asked_at)
        session.using, session.stream = using, session.stream + 1

    def _begin_stream(self, session: Session, verifier: Verifier) -> None:
        assert session.waiting, "a stream for a generation that waits for none"
        self._end_wait(session, verifier.address)
        stream = session.stream
        self.schedule(verifier.rtt_s, lambda: self._open(session, stream, verifier))

    def _open(self, session: Session, stream: int, verifier: Verifier) -> None:
        if session.stream != stream:
            return
        mood = verifier.mood(self.now)
        if mood is Mood.DOWN:
            return self.handle(ev.Broke(session.route, "reset"))
        if mood is Mood.HOLE:
            return self._watch_silence(session, stream, verifier)
        if mood in REFUSALS:
            code, retry_after_s = REFUSALS[mood]
            known = self.retry_not_before_s.get(verifier.address, 0.0)
            self.retry_not_before_s[verifier.address] = max(known, self.now + retry_after_s)
            return self.handle(ev.Refused(session.route, code, mood.value, retry_after_s))
        model = OTHER if mood is Mood.OTHER else MODEL
        self.handle(ev.Greeted(session.route, ModelIdentity(model.name, model.fingerprint, 4096)))
        if session.stream == stream:
            if session.tokens:
                assert model.fingerprint in session.models, "another model for the same text"
            if mood is Mood.SICK:
                return self.handle(ev.Broke(session.route, "broke"))
            self._generate_token(session, stream, verifier, model)
        return None

    def _watch_silence(self, session: Session, stream: int, verifier: Verifier) -> None:
        def check_silence() -> None:
            if session.stream == stream:
                if verifier.mood(self.now) is Mood.HOLE:
                    self.handle(ev.Quiet(session.route))
                    self._watch_silence(session, stream, verifier)
                else:
                    self.handle(ev.Broke(session.route, "came back without the stream"))

        self.schedule(1.5, check_silence)

    def _generate_token(
        self, session: Session, stream: int, verifier: Verifier, model: ModelInfo
    ) -> None:
        if session.stream != stream:
            return None
        mood = verifier.mood(self.now)
        if mood is Mood.HOLE:
            return self._watch_silence(session, stream, verifier)
        if mood is Mood.DRAINS:
            self.retry_not_before_s[verifier.address] = self.now + 1.0
            return self.handle(ev.Refused(session.route, MOVED, "resume elsewhere", 1.0))
        if mood is not (Mood.OTHER if model is OTHER else Mood.UP):
            return self.handle(ev.Broke(session.route, "killed"))
        session.tokens += 1
        session.last_token_at = self.now
        session.models.add(model.fingerprint)
        self.handle(ev.Progressed(session.route))
        return self.schedule(STEP_S, lambda: self._generate_token(session, stream, verifier, model))


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("first_seed", range(0, 30, 10))
def test_in_random_worlds_every_text_goes_on_when_one_verifier_is_there(
    count: int, first_seed: int
) -> None:
    """The world's own assertions state what must never happen; this test states what must. The
    first verifier is available at the end, so a generation continues unless that verifier was found
    to be of no use for it before."""
    went_on = 0
    for seed in range(first_seed, first_seed + 10):
        world = World(seed, count)
        world.run(CALM_AFTER_S + 20.0)
        for session in world.sessions.values():
            limit_s = DIAL_S + 2.0 * (count + 1)
            assert session.longest_wait_s <= limit_s, seed
            if session.failed is not None:
                assert _all_refused(session.failed.why, count), (seed, session.failed)
            elif "v0" not in world.machine.routes[session.route].unfit:
                assert session.last_token_at > CALM_AFTER_S + 19.0, (seed, session)
                went_on += 1
    assert went_on >= 3


def _all_refused(why: str, count: int) -> bool:
    """Return whether each verifier refused the generation for good, the only way in which it may
    fail."""
    final = f"{Mood.KEYLESS.value}|it serves the model"
    return len(re.findall(final, why)) == count


NAMES = [f"10.0.0.{number}:7420" for number in range(1, 8)]
CONVERSATIONS = [policies.hash_conversation_name(f"chat {number}") for number in range(600)]


def first_choices(names: Sequence[str]) -> dict[str, str]:
    """Return the first choice of each conversation."""
    views = [VerifierView(name, 0.03, 0) for name in names]
    return {
        one: policies.rank_verifiers(Association.RENDEZVOUS, one, views)[0] for one in CONVERSATIONS
    }


def test_what_the_hashing_promises() -> None:
    before = first_choices(NAMES)
    assert first_choices(NAMES[::-1]) == before  # the order of the names does not matter
    for gone in NAMES:  # only its conversations move, and to all the others
        after = first_choices([name for name in NAMES if name != gone])
        assert all(after[one] == home for one, home in before.items() if home != gone)
        assert len({after[one] for one, home in before.items() if home == gone}) == len(NAMES) - 1
    assert rendezvous_weight("ab", "c") != rendezvous_weight("a", "bc")
    # The share of each replica of n conversations is within five standard deviations of n/r.
    count, share = len(CONVERSATIONS), 1 / len(NAMES)
    off = 5 * math.sqrt(count * share * (1 - share))
    counts = Counter(before.values())
    assert len(counts) == len(NAMES)
    assert all(abs(number - count * share) < off for number in counts.values())


def test_texts_that_begin_alike_are_one_conversation() -> None:
    of, named = policies.hash_prompt_beginning, policies.hash_conversation_name
    prompt = list(range(1, policies.BEGINNING_TOKENS + 1))
    assert of(prompt) == of([*prompt, 7, 8, 9])
    assert of(prompt) != of([*prompt[:-1], 99])
    assert of([1, 23]) != of([12, 3])
    assert of([1]) != named("1")
    assert len(of(prompt)) == len(named("\ud800 half a pair")) == 16
