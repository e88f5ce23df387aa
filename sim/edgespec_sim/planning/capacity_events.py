"""A plan of capacity, confirmed by events at the number of verifiers and at one below.

Theory of operation. The arm that needs fewest verifiers by the mean field is played event by event:
all verifiers with all users, or, where these are too many, a few of them with their part. What
events say over what the mean field says is a factor; where events contradict, the mean field times
this factor names the next number to play. Seeds are added while an interval holds an objective.
The ends of the events' intervals, taken the same way, give the interval of the number of verifiers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.planning.capacity import CapacityPlanner, Play
from edgespec_sim.planning.capacity_values import (
    ArmPlan,
    CapacityPlan,
    CapacityQuestion,
    Meets,
    Observed,
)
from edgespec_sim.scenario.arrival_sections import SloSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.attainment import clusters, p95
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.run import Job

# Sessions of a world, seconds of sessions in its window, and the window's bounds.
_PLAYED_SESSIONS: Final = 64.0
_SESSION_SECONDS: Final = 600.0
_CYCLES: Final = (2.0, 30.0)
_MOST_ROUNDS: Final = 24

Triple = tuple[float, float, float]


def best_arm(arms: Sequence[ArmPlan]) -> ArmPlan | None:
    """Fewest verifiers; of equal ones the least time a token."""

    def cost(one: ArmPlan) -> tuple[float, float]:
        if one.verifiers is None or one.predicted is None:
            return math.inf, math.inf
        return one.verifiers, one.predicted.tpot_p95_s

    best = min(arms, key=cost)
    return None if best.verifiers is None else best


def confirm(
    planner: CapacityPlanner,
    question: CapacityQuestion,
    arms: tuple[ArmPlan, ...],
    play: Play,
    more: Callable[[int], bool],
    *,
    at_once: int = 1,
) -> CapacityPlan:
    """``more`` is asked before each round of events, with the number of rounds played; ``play`` may
    end one with a ``TimeoutError``, and what came of it is not used: the quick worlds would be
    first. ``at_once``: worlds that can be played beside one another; a round has as many, so that
    no core waits."""
    best = best_arm(arms)
    if best is None or best.verifiers is None:
        return CapacityPlan(arms, None, 0, (0, 0), {}, confirmed=False)
    search = Search(planner, question, best.arm, best.verifiers)
    rounds = 0
    while (wanted := search.wanted()) and rounds < _MOST_ROUNDS and more(rounds):
        try:
            search.play(wanted, play, max(1, at_once // len(wanted)))
        except TimeoutError:
            break
        rounds += 1
    return search.plan(arms)


class Search:
    """The numbers of verifiers of one arm that were played, and which to play next."""

    def __init__(
        self, planner: CapacityPlanner, question: CapacityQuestion, arm: Arm, first: int
    ) -> None:
        self._planner, self._question, self._arm, self._first = planner, question, arm, first
        self._worlds: dict[int, tuple[Scenario, list[WorldOutcome]]] = {}
        self.observed: dict[int, Observed] = {}

    def wanted(self) -> list[int]:
        """Numbers of verifiers to play (once more); none: all is decided."""
        near = [one for one in (self.candidate, self.candidate - 1) if one >= 1]
        new = [one for one in near if one not in self.observed]
        return new or [one for one in near if not self.observed[one].meets.decided]

    @property
    def candidate(self) -> int:
        """The least number that meets the objectives, as far as is known."""
        failing = [n for n, one in self.observed.items() if not one.meets.by_value]
        low = max(failing, default=0)
        passing = [n for n, one in self.observed.items() if one.meets.by_value and n > low]
        high = min(passing, default=None)
        if high == low + 1:
            return high
        guess = self._corrected(0) or self._first
        guess = max(guess, low + 1)
        return guess if high is None else min(guess, high)

    def play(self, numbers: Sequence[int], play: Play, seeds: int = 1) -> None:
        """So many further seeds of each number."""
        for number in numbers:
            if number not in self._worlds:
                self._worlds[number] = (self._world(number), [])
        question = self._question
        wanted = [(number, seed) for number in numbers for seed in range(seeds)]
        jobs = [
            Job(
                self._worlds[number][0],
                self._arm,
                0,
                question.seed + len(self._worlds[number][1]) + seed,
                question.folder,
                checks=False,
            )
            for number, seed in wanted
        ]
        named = " and ".join(map(str, sorted(numbers)))
        outcomes = play(f"{self._arm.value} on {named} verifiers, by events", jobs)
        for (number, _), outcome in zip(wanted, outcomes, strict=True):
            self._worlds[number][1].append(outcome)
        for number in numbers:
            self.observed[number] = judged(question.slo, number, *self._worlds[number])

    def plan(self, arms: tuple[ArmPlan, ...]) -> CapacityPlan:
        found = self.candidate
        mine, below = self.observed.get(found), self.observed.get(found - 1)
        if mine is None or (found > 1 and below is None):
            left = f"{found} and {found - 1}" if mine is None else str(found - 1)
            why_not = f"the time was up before {left} verifiers were played"
        else:
            why_not = ""
        return CapacityPlan(
            arms,
            self._arm,
            found,
            self._interval(found),
            dict(sorted(self.observed.items())),
            confirmed=not why_not,
            why_not=why_not,
        )

    # --- parts -----------------------------------------------------------------------------

    def _world(self, number: int) -> Scenario:
        """As many of the verifiers as hold some dozens of sessions, as long as can be afforded."""
        found = self._planner.predict(self._arm, number)
        active = max(found.active, 0.1)
        played = max(1, min(number, int(_PLAYED_SESSIONS / active)))
        low, high = (cycles * found.cycle_s for cycles in _CYCLES)
        window_s = min(max(_SESSION_SECONDS / (played * active), low), high)
        return self._question.world(self._arm, played, number, window_s, found.cycle_s)

    def _corrected(self, end: int) -> int | None:
        """What the mean field says, times what events say over it, at the number played that is
        nearest to its first answer. ``end``: of a triple, 0 the value, 1 its lower end, 2 its upper
        one. None: nothing was played, or no number meets the objectives."""
        usable = []
        for number, one in self.observed.items():
            found = self._planner.predict(self._arm, number)
            if found.within and one.ttft_p95_s[2] < math.inf and one.tpot_p95_s[2] < math.inf:
                usable.append((not one.meets.by_value, number, one, found))
        if not usable:
            return None
        _, _, one, found = min(usable, key=lambda use: use[:2])
        return self._planner.least(
            self._arm,
            one.ttft_p95_s[end] / found.ttft_p95_s,
            one.tpot_p95_s[end] / found.tpot_p95_s,
        )

    def _interval(self, found: int) -> tuple[int, int]:
        low, high = self._corrected(1) or found, self._corrected(2) or found
        for number, one in self.observed.items():
            if one.meets is Meets.NO and number < found:
                low = max(low, number + 1)
            if one.meets is Meets.YES and number >= found:
                high = min(high, number)
        mine = self.observed.get(found)
        if mine is not None and mine.meets is Meets.LIKELY:
            high = max(high, found + 1)
        below = self.observed.get(found - 1)
        if below is not None and below.meets is Meets.UNLIKELY:
            low = min(low, found - 1)
        return min(low, found), max(high, found)


def judged(
    slo: SloSection, number: int, scenario: Scenario, outcomes: Sequence[WorldOutcome]
) -> Observed:
    """What worlds of ``scenario``, which stands for so many verifiers, say of the objectives."""
    groups = clusters(scenario, outcomes)
    ttft = p95(groups, _ttft_s) or (math.inf,) * 3
    tpot = p95(groups, _tpot_s) or (math.inf,) * 3
    busy = [one.utilisation for outcome in outcomes for one in outcome.verifiers]
    return Observed(
        verifiers=number,
        played=len(outcomes[0].verifiers),
        seeds=len(outcomes),
        requests=sum(map(len, groups)),
        unfinished=sum(one.pace_s is None for group in groups for one in group),
        ttft_p95_s=ttft,
        tpot_p95_s=tpot,
        utilisation=sum(busy) / len(busy),
        meets=_meets((ttft, slo.ttft_s), (tpot, slo.tpot_s)),
    )


def _ttft_s(one: RequestRecord) -> float | None:
    """Of a request that never got there, without end."""
    return math.inf if one.ttft_s is None else one.ttft_s


def _tpot_s(one: RequestRecord) -> float | None:
    """So far, of a request that the world's end cut off; without end, of one that never got
    there."""
    if one.failed or (one.pace_s is None and not one.complete):
        return math.inf
    return one.pace_s


def _meets(*pairs: tuple[Triple, float]) -> Meets:
    """Of each a value with its interval, and its objective."""
    if all(triple[2] <= limit for triple, limit in pairs):
        return Meets.YES
    if any(triple[1] > limit for triple, limit in pairs):
        return Meets.NO
    within = all(triple[0] <= limit for triple, limit in pairs)
    return Meets.LIKELY if within else Meets.UNLIKELY
