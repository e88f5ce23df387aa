"""Writing with the draft alone. Oracle: the target's own stream by the scalar law; and a reader who
keeps what was verified apart from what was not must never find the two in conflict."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.offline import (
    Correction,
    Offline,
    OfflineAction,
    OfflinePolicy,
    OfflineSession,
    PauseWriting,
    Provisional,
    WritingPolicy,
)
from edgespec.core.device.policy import DraftPolicy, FixedPolicy, WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import (
    EXACT_RULE,
    Commit,
    Draft,
    FinishReason,
    Limits,
    Open,
    Opened,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import Candidate, PassRequest
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.drafts import ExactRule, run_ahead_policy
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream
from tests.sim.faults.checks import check_tree, target_stream

PROMPT = (3, 1, 2)
PATIENT = ReconnectPolicy(0.05, 0.4, give_up_first_s=1e6, give_up_s=1e6, answer_s=2.0)
GRACE_S = 0.1
DRAFT = OfflinePolicy(Offline.DRAFT, GRACE_S)


def offline_session(
    sampling: SamplingParams,
    policy: DraftPolicy | None = None,
    offline: OfflinePolicy = DRAFT,
    reconnect: ReconnectPolicy = PATIENT,
    stops: frozenset[int] = frozenset(),
) -> OfflineSession:
    request = Open("s", "", "", PROMPT, sampling=sampling)
    end = len(PROMPT) + sampling.max_tokens
    writer = WritingPolicy(policy or WindowedPolicy(width=2), end, stops)
    return OfflineSession(DraftSession(request, writer, reconnect, 1000), writer, offline)


@dataclass
class Reader:
    """Keeps what is verified apart from what is not, and checks each action against both."""

    prompt_length: int
    verified: list[int] = field(default_factory=list)
    unverified: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def read(self, action: OfflineAction) -> None:
        at = self.prompt_length + len(self.verified)
        match action:
            case Provisional(position, tokens):
                assert position == at + len(self.unverified)
                assert tokens
                self.unverified += tokens
                self.counts["written"] += len(tokens)
            case Correction(position):
                assert at <= position < at + len(self.unverified)
                self.counts["taken back"] += at + len(self.unverified) - position
                del self.unverified[position - at :]
            case ev.Deliver(position, tokens):
                assert position == at
                same = min(len(tokens), len(self.unverified))
                assert self.unverified[:same] == list(tokens[:same])
                self.counts["agreed"] += same
                del self.unverified[:same]
                self.verified += tokens
            case ev.Finish() | ev.Fail():
                assert self.unverified == []


class OfflineDevice(SimulatedDevice):
    """``SimulatedDevice`` with a reader."""

    reader: Reader

    def _do(self, action: OfflineAction) -> None:
        self.reader.read(action)
        if not isinstance(action, Provisional | Correction):
            super()._do(action)


class World:
    """One device, one verifier, and a link that is cut and blocked at random moments."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        dice, self.queue = self.dice, EventQueue()
        model = ToyModel(vocabulary_size=8, order=2, eos_token=dice.choice((None, 5)))
        self.stops = frozenset(() if model.eos_token is None else (5,))
        self.sampling = SamplingParams(
            max_tokens=dice.randrange(1, 60),
            temperature=dice.choice((0.0, 0.9)),
            seed=seed,
        )
        self.limits = Limits(
            max_nodes_outstanding=dice.choice((2, 16, 128)),
            context_length=dice.choice((24, 4096)),
        )
        self.expected = target_stream(model, PROMPT, self.sampling, self.limits.context_length)
        target = ToyTarget(model, context_length=self.limits.context_length)
        engine = VerifyEngine(
            target.info, self.limits, EngineLimits(), {EXACT_RULE: ExactRule()}, run_ahead_policy
        )
        self.server = SimulatedVerifier(
            self.queue, engine, target, PassTime(self.queue, self._pass_s)
        )
        policy = dice.choice((WindowedPolicy(width=2), FixedPolicy(gamma=3)))
        self.session = offline_session(self.sampling, policy, stops=self.stops)
        drafter = ToyDrafter(model.perturbed(dice.choice((0.0, 0.3, 3.0))))
        self.blocked_until_s = dice.choice((0.0, dice.uniform(0.0, 2.0)))
        self.device = OfflineDevice(
            self.queue,
            self.session,  # type: ignore[arg-type] # it has what a device needs of a session
            drafter,
            lambda kept, fed: 0.005,
            self._connect,
        )
        self.device.reader = self.reader = Reader(len(PROMPT))
        for _ in range(dice.randrange(6)):
            self.queue.at(dice.uniform(0.0, 3.0), self._break)
        self.paused = False
        for _ in range(dice.randrange(3)):
            self.queue.at(dice.uniform(0.0, 2.0), self._pause)

    def _pass_s(self, requests: tuple[PassRequest, ...]) -> float:
        return 0.02

    def _connect(self) -> tuple[Stream, float] | None:
        if self.queue.now < self.blocked_until_s:
            return None
        paths = FixedDelay(self.queue, 0.02), FixedDelay(self.queue, 0.02)
        stream = Stream(self.queue, *paths)
        self.server.accept(stream)
        return stream, 0.04

    def _break(self) -> None:
        self.blocked_until_s = self.queue.now + self.dice.uniform(0.0, 1.0)
        if self.device.stream is not None:
            self.device.stream.cut(self.dice.uniform(0.0, 0.1), self.dice.uniform(0.0, 0.3))

    def _pause(self) -> None:
        """As if a stop string had been found in what was written."""
        self.session.handle(PauseWriting(), self.queue.now)
        self.paused = bool(self.session.written)

    def run(self) -> Counter[str]:
        self.device.start()
        for _ in range(20_000):
            if self.device.delivery.ended is not None:
                break
            assert self.queue.step(60.0), "nothing happens any more"
            self._check()
        assert self.device.delivery.ended == ev.Finish(self.expected.reason)
        assert tuple(self.reader.verified) == self.expected.tokens
        return self.reader.counts

    def _check(self) -> None:
        reader, session = self.reader, self.session.session
        assert tuple(reader.verified) == self.expected.tokens[: len(reader.verified)]
        assert tuple(reader.unverified) == self.session.written
        assert len(reader.verified) + len(reader.unverified) <= self.sampling.max_tokens
        assert not self.stops & set(reader.unverified[:-1])
        check_tree(session.tree, "the device")


@pytest.mark.parametrize("seeds", [range(25), pytest.param(range(25, 200), marks=pytest.mark.slow)])
def test_in_random_worlds_the_text_is_the_targets_and_the_rest_is_taken_back(seeds: range) -> None:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += World(seed).run()
        except AssertionError as error:
            raise AssertionError(f"world {seed}") from error
    assert total["written"] > 6 * len(seeds)
    assert total["agreed"] > 2 * len(seeds)
    assert total["taken back"] > 2 * len(seeds)
    assert total["written"] == total["agreed"] + total["taken back"]


def step(session: OfflineSession, token: int, now: float) -> list[OfflineAction]:
    return list(session.handle(ev.StepDone((Candidate(token, -0.1),)), now))


def written(actions: list[OfflineAction]) -> list[int]:
    return [t for one in actions if isinstance(one, Provisional) for t in one.tokens]


def test_it_waits_out_the_grace_and_then_gives_what_was_drafted_already() -> None:
    session = offline_session(SamplingParams(max_tokens=20))
    session.handle(ev.Start(), 0.0)
    assert session.deadline == GRACE_S
    assert written(step(session, 11, 0.01)) == []
    actions = list(session.handle(ev.Tick(), GRACE_S))
    assert actions == [Provisional(3, (11,))]
    assert written(step(session, 12, 0.2)) == [12]  # the step that ran meanwhile
    assert session.deadline == PATIENT.answer_s


def test_by_default_nothing_is_written() -> None:
    session = offline_session(SamplingParams(max_tokens=20), offline=OfflinePolicy())
    session.handle(ev.Start(), 0.0)
    session.handle(ev.LinkDown("gone"), 0.0)
    for index in range(1, 9):
        assert not any(
            isinstance(one, Provisional) for one in session.handle(ev.Tick(), float(index))
        )


def test_an_end_token_max_tokens_and_a_stop_string_pause_the_writing() -> None:
    for stops, count in ((frozenset({14}), 4), (frozenset[int](), 6)):
        session = offline_session(SamplingParams(max_tokens=6), stops=stops)
        session.handle(ev.Start(), 0.0)
        session.handle(ev.Tick(), GRACE_S)
        found: list[int] = []
        for token in range(11, 11 + count):
            found += written(step(session, token, 0.2))
        assert found == list(range(11, 11 + count))
        assert not any(isinstance(one, ev.StartStep) for one in session.handle(ev.Tick(), 0.3)), (
            "it drafts behind the end"
        )
    session = offline_session(SamplingParams(max_tokens=6))
    session.handle(ev.Start(), 0.0)
    session.handle(ev.Tick(), GRACE_S)
    assert written(step(session, 11, 0.2)) == [11]
    session.handle(PauseWriting(), 0.2)
    assert step(session, 12, 0.2) == []
    session.handle(ev.Connected(), 0.3)
    session.handle(Opened(Limits(), "", 3), 0.3)
    corrected = session.handle(Commit(3, (40,)), 0.4)
    assert Correction(3) in corrected
    session.handle(ev.LinkDown("gone"), 0.5)
    session.handle(ev.Tick(), 0.5 + GRACE_S)
    step(session, 13, 0.7)  # what ran behind the text that was taken back
    assert written(step(session, 41, 0.8)) == [41], "the correction did not lift the pause"


def test_what_was_written_is_taken_back_before_patience_ends() -> None:
    hasty = ReconnectPolicy(give_up_first_s=0.5, first_s=0.1, longest_s=0.2)
    session = offline_session(SamplingParams(max_tokens=9), reconnect=hasty)
    session.handle(ev.Start(), 0.0)
    session.handle(ev.LinkDown("nobody there"), 0.0)
    session.handle(ev.Tick(), GRACE_S)
    assert written(step(session, 11, 0.2)) == [11]
    actions: list[OfflineAction] = []
    now = 0.2
    while not any(isinstance(one, ev.Fail) for one in actions):
        now += 0.1
        actions = [*session.handle(ev.Tick(), now), *session.handle(ev.LinkDown("no"), now)]
        assert now < 5.0
    kinds = [type(one) for one in actions]
    assert kinds.index(Correction) < kinds.index(ev.Fail)
    assert session.written == ()


def test_what_the_verifier_says_in_between_is_checked_from_the_last_verified_position() -> None:
    session = offline_session(SamplingParams(max_tokens=9))
    session.handle(ev.Start(), 0.0)
    session.handle(ev.Tick(), GRACE_S)
    for token in (11, 12, 13, 14):
        step(session, token, 0.2)
    sent = [*session.handle(ev.Connected(), 0.3), *session.handle(Opened(Limits(), "", 3), 0.3)]
    drafted = [
        token
        for one in sent
        if isinstance(one, ev.Transmit) and isinstance(one.message, Draft)
        for token in one.message.tokens
    ]
    assert drafted == [11, 12, 13, 14]
    assert Correction(5) not in session.handle(Commit(3, (11, 12)), 0.4)
    assert session.written == (13, 14)
    actions = session.handle(Commit(5, (13, 99), finish=FinishReason.STOP), 0.5)
    relevant = [one for one in actions if isinstance(one, Correction | ev.Deliver | ev.Finish)]
    assert [type(one) for one in relevant] == [Correction, ev.Deliver, ev.Finish]
    assert relevant[0] == Correction(6)
