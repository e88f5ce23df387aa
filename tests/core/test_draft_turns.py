"""Whose draft step runs next. Oracle: the rules restated over a random world of sessions that ask,
rest, join and leave: one step at a time, a cache is one session's, nobody starves, shares are near
the weights, and time that nobody asks for is not saved up."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from edgespec.core.device import turn_events as ev
from edgespec.core.device.draft_turns import LEAST_WEIGHT, DraftTurns
from edgespec.core.device.turn_policy import TurnPolicy

STEP_S = 0.01


class Desk:
    """Runs what the machine asks for; every step takes ``STEP_S``, one that fills ``fill_s``."""

    def __init__(self, caches: int, fill_s: float = STEP_S, turn_steps: int = 4) -> None:
        self.turns = DraftTurns(caches, TurnPolicy(turn_steps=turn_steps))
        self.fill_s, self.now = fill_s, 0.0
        self.running: ev.Run | None = None
        self.steps: Counter[str] = Counter()
        self.fills: Counter[str] = Counter()
        self.holds: dict[int, str] = {}
        self.accepted: Counter[str] = Counter()

    def tell(self, event: ev.TurnEvent) -> None:
        for action in self.turns.handle(event, self.now):
            assert isinstance(action, ev.Run)
            assert self.running is None, "two steps at once"
            assert 0 <= action.cache < self.turns.caches
            assert action.fills == (self.holds.get(action.cache) != action.key)
            self.holds = {at: key for at, key in self.holds.items() if key != action.key}
            self.holds[action.cache] = action.key
            self.running = action

    def ask(self, key: str) -> None:
        self.tell(ev.Asked(key, self.accepted[key]))

    def end(self, *, asks_again: bool = True) -> str:
        """The step that runs is over; its key."""
        run, self.running = self.running, None
        assert run is not None, "nothing runs though somebody asks"
        took_s = self.fill_s if run.fills else STEP_S
        self.now += took_s
        self.steps[run.key] += 1
        self.fills[run.key] += run.fills
        if asks_again:
            self.ask(run.key)
        self.tell(ev.Ended(run.key, took_s))
        return run.key


def crowd(desk: Desk, count: int) -> list[str]:
    keys = [f"chat {index}" for index in range(count)]
    for key in keys:
        desk.tell(ev.Joined(key))
        desk.ask(key)
    return keys


@pytest.mark.parametrize("caches", [1, 3, 20])
def test_twenty_sessions_that_always_ask_have_equal_shares(caches: int) -> None:
    desk = Desk(caches)
    keys = crowd(desk, 20)
    for _ in range(3000):
        desk.accepted[desk.end()] += 1
    for key in keys:
        assert desk.steps[key] == pytest.approx(150, rel=0.25)


def test_a_turn_is_several_steps_in_a_row() -> None:
    desk = Desk(2, turn_steps=4)
    crowd(desk, 2)
    for _ in range(20):
        desk.end()
    order = "".join(desk.end()[-1] for _ in range(16))
    assert "0000" in order
    assert "1111" in order
    assert "00000" not in order


def test_filling_a_cache_anew_takes_about_half_of_the_drafting_at_worst() -> None:
    desk = Desk(2, fill_s=0.2)
    crowd(desk, 6)
    for _ in range(6_000):
        desk.end()
    filling_s = 0.2 * sum(desk.fills.values())
    assert filling_s / desk.now < 0.6
    assert min(desk.fills.values()) > 3  # all have had a cache, again and again


def test_drafts_that_come_too_late_take_little_from_the_others() -> None:
    desk = Desk(4)
    late, *others = crowd(desk, 4)
    for index in range(2000):
        key = desk.end()
        if key != late:
            desk.accepted[key] += index % 5 != 0
    share = desk.steps[late] / sum(desk.steps.values())
    assert share < 0.12
    assert share >= LEAST_WEIGHT / 4
    for key in others:
        assert desk.steps[key] / sum(desk.steps.values()) > 0.27


def test_a_late_session_whose_drafts_come_in_time_again_is_noticed() -> None:
    desk = Desk(2)
    late, other = crowd(desk, 2)
    for index in range(2000):
        key = desk.end()
        desk.accepted[key] += index > 1000 or key == other
        if index == 1500:
            desk.steps.clear()
    assert desk.steps[late] == pytest.approx(desk.steps[other], rel=0.1)


def test_a_session_that_rested_has_saved_nothing_up() -> None:
    desk = Desk(2)
    idle, busy = crowd(desk, 2)
    while desk.end(asks_again=False) != idle:
        desk.ask(busy)
    for _ in range(500):
        desk.end()
    desk.ask(idle)
    desk.steps.clear()
    for _ in range(40):
        desk.end()
    assert desk.steps[idle] <= 24
    assert desk.steps[busy] >= 16


def test_a_hung_step_is_given_up_once_and_the_others_go_on_when_it_is_back() -> None:
    turns = DraftTurns(2, TurnPolicy(hang_s=5.0))
    for key in ("a", "b"):
        turns.handle(ev.Joined(key), 0.0)
        turns.handle(ev.Asked(key, 0), 0.0)
    deadlines = [turns.deadline]
    assert turns.handle(ev.Tick(3.0), 5.0) == ()  # it was heard of at 3
    deadlines.append(turns.deadline)
    assert turns.handle(ev.Tick(3.0), 8.0) == (ev.GiveUp("a", 5.0),)
    assert [*deadlines, turns.deadline] == [5.0, 8.0, None]
    assert turns.handle(ev.Left("a"), 8.0) == ()
    assert turns.handle(ev.Tick(3.0), 20.0) == ()
    assert turns.handle(ev.Ended("a", 30.0), 30.0) == (ev.Run("b", 0, True),)


def test_without_room_for_a_cache_those_that_are_there_are_shared() -> None:
    turns = DraftTurns(3)
    for key in ("a", "b"):
        turns.handle(ev.Joined(key), 0.0)
        turns.handle(ev.Asked(key, 0), 0.0)
    turns.handle(ev.Asked("a", 0), 0.0)
    turns.handle(ev.Ended("a", 1.0), 0.0)
    assert turns.running is not None
    assert turns.members["b"].cache == 1
    turns.handle(ev.CacheFailed(1), 0.0)
    turns.handle(ev.Ended("b", 0.0), 0.0)
    turns.handle(ev.Asked("b", 0), 0.0)
    turns.handle(ev.Ended("a", 1.0), 1.0)
    assert turns.caches == 1
    assert turns.owners == {0: "b"}


@pytest.mark.parametrize("seed", range(25))
def test_in_random_worlds_nobody_starves_and_nothing_is_left(seed: int) -> None:
    dice = random.Random(seed)
    desk = Desk(dice.choice((1, 2, 4, 9)), fill_s=dice.choice((0.0001, 0.01, 0.1)))
    asking: dict[str, int] = {}
    here: list[str] = []
    for number in range(800):
        match dice.randrange(8):
            case 0 if len(here) < 12:
                here.append(f"s{number}")
                desk.tell(ev.Joined(here[-1]))
            case 1 if here and dice.random() < 0.3:
                gone = here.pop(dice.randrange(len(here)))
                asking.pop(gone, None)
                desk.holds = {at: key for at, key in desk.holds.items() if key != gone}
                desk.tell(ev.Left(gone))
            case 2 if desk.turns.caches > 1 and dice.random() < 0.02:
                lost = desk.turns.caches - 1
                if desk.running is None or desk.running.cache != lost:
                    desk.holds.pop(lost, None)
                    desk.tell(ev.CacheFailed(lost))
            case 3 | 4 if here:
                key = dice.choice(here)
                if desk.running is None or desk.running.key != key:
                    asking.setdefault(key, sum(desk.steps.values()))
                    desk.ask(key)
        if desk.running is not None and dice.random() < 0.8:
            key = desk.running.key
            asking.pop(key, None)
            again = key in here and dice.random() < 0.7
            if key not in here:
                desk.holds = {at: one for at, one in desk.holds.items() if one != key}
            desk.end(asks_again=again)
            goes_on = desk.turns.running
            if again and (goes_on is None or goes_on.key != key):
                asking[key] = sum(desk.steps.values())
        if asking:
            waited = sum(desk.steps.values()) - min(asking.values())
            assert waited < 12 * 8 * 200, "somebody starves"
            assert desk.running is not None, "the drafter rests while somebody asks"
    for key in here:
        desk.tell(ev.Left(key))
    assert desk.turns.members == {}
    assert desk.turns.owners == {}
