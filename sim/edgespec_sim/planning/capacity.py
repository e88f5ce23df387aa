"""How many verifiers, and which arm? By the mean field first, and then by events.

Theory of operation. Small worlds of one verifier and 1, 4, 16, 32, ... sessions give each arm's
service curve (``service_curves.py``), up to a size that misses the objectives by a margin, or that
no user could bring about. Verifiers with the users' thinking are stations (``stations.py``), so the
p95 of the TTFT and of the TPOT follow for any number of verifiers, and by bisection the least
number that meets the objectives. An open loop is the limit of many users who each think long
(Engset's system becomes Erlang's).

Events have the last word: ``capacity_events.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edgespec.bench.arms import Arm
from edgespec_sim.planning.capacity_limits import why_never
from edgespec_sim.planning.capacity_values import (
    MOST_VERIFIERS,
    ArmPlan,
    CapacityQuestion,
    Predicted,
)
from edgespec_sim.planning.mean_field import LEAST_THINK_S, mixed, pools, weighted_spread
from edgespec_sim.planning.service_curves import (
    P95_QUANTILE,
    Point,
    ServiceCurve,
    curve_of,
    mixed_counts,
    point_of,
    point_world,
)
from edgespec_sim.planning.stations import Station, Users
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.run import Job

Play = Callable[[str, Sequence[Job]], list[WorldOutcome]]
"""What is being done, and the worlds; outcomes in their order."""

SESSION_SECONDS = 60.0
_FIRST_SIZES = (1, 4, 16)
# A size that misses an objective by so much is large enough.
_MARGIN = 1.25
# An open loop: a request finds so many users thinking for each that is served.
_CROWD = 1000.0


@dataclass(slots=True)
class _Curves:
    """What was measured of one arm."""

    points: dict[int, list[Point]] = field(default_factory=dict)
    done: bool = False

    @property
    def largest(self) -> int:
        return max(self.points)


class CapacityPlanner:
    """Answers one question by the mean field; ``play`` plays the small worlds."""

    def __init__(
        self, question: CapacityQuestion, play: Play, *, session_seconds: float = SESSION_SECONDS
    ) -> None:
        """``session_seconds``: how much each small world plays; its square root is precision."""
        self._question, self._play = question, play
        self._session_seconds = session_seconds
        self._curves = {arm: _Curves() for arm in question.arms}
        self._made: dict[Arm, ServiceCurve] = {}

    def by_mean_field(self) -> tuple[ArmPlan, ...]:
        """Each arm's least number of verifiers."""
        self._measure([size for size in _FIRST_SIZES if size < 2 * self._most_sessions])
        while any(not one.done for one in self._curves.values()):
            self._measure(())
        return tuple(self._arm_plan(arm) for arm in self._question.arms)

    def predict(self, arm: Arm, verifiers: int) -> Predicted:
        question, curve = self._question, self._curve(arm)
        pooled = verifiers if pools(question.scenario) else 1
        station = Station(verifiers, pooled, self._users(curve), curve)
        law = station.stationary()
        ttft = weighted_spread([mixed(station, law, lambda one: one.ttft_s)])
        tpot = weighted_spread([mixed(station, law, lambda one: one.tpot_s)])
        active = float(law.active @ law.time)
        ending = sum(float(rate @ law.time) for rate in law.ending.values())
        return Predicted(
            verifiers,
            ttft.p95,
            tpot.p95,
            active,
            float(curve.busy_at(law.active) @ law.time),
            verifiers * active / ending,
            station.mean_active() <= curve.sizes[-1],
        )

    def least(self, arm: Arm, ttft_factor: float = 1.0, tpot_factor: float = 1.0) -> int | None:
        """The least number of verifiers that meets the objectives; None: no number does."""

        def meets(verifiers: int) -> bool:
            found = self.predict(arm, verifiers)
            return found.meets(self._question.slo, ttft_factor, tpot_factor)

        high = 1
        while not meets(high):
            if high == MOST_VERIFIERS:
                return None
            high = min(2 * high, MOST_VERIFIERS)
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if meets(middle) else (middle, high)
        return high

    def _measure(self, sizes: Sequence[int]) -> None:
        """These sizes of all arms, or the next one of each that is not done, side by side."""
        question = self._question
        wanted = [
            (arm, size, counts)
            for arm, curves in self._curves.items()
            if not curves.done
            for size in (sizes or (2 * curves.largest,))
            for counts in mixed_counts(question.weights, size)
        ]
        wanted.sort(key=lambda one: -one[1])  # the longest first: no core waits for it alone
        jobs = [
            Job(self._small(arm, counts), arm, 0, question.seed, question.folder, checks=False)
            for arm, _, counts in wanted
        ]
        largest = max(size for _, size, _ in wanted)
        outcomes = self._play(f"service curves, up to {largest} sessions", jobs)
        for (arm, size, counts), outcome in zip(wanted, outcomes, strict=True):
            point = point_of(question.scenario, counts, outcome)
            self._curves[arm].points.setdefault(size, []).append(point)
        self._made.clear()
        for arm, curves in self._curves.items():
            curves.done = curves.done or self._is_enough(arm, curves.largest)

    def _small(self, arm: Arm, counts: dict[str, int]) -> Scenario:
        question = self._question
        return point_world(question.scenario, arm, question.kind, counts, self._session_seconds)

    def _is_enough(self, arm: Arm, largest: int) -> bool:
        if largest >= self._most_sessions:
            return True
        groups = self._curve(arm).groups.values()
        ttft_s = max(float(one.ttft_s[-1][P95_QUANTILE]) for one in groups)
        tpot_s = max(float(one.tpot_s[-1][P95_QUANTILE]) for one in groups)
        slo = self._question.slo
        return ttft_s > _MARGIN * slo.ttft_s or tpot_s > _MARGIN * slo.tpot_s

    @property
    def _most_sessions(self) -> int:
        """At one verifier at once."""
        question = self._question
        most = question.scenario.verifiers[question.kind].max_sessions
        return most if question.rate is not None else min(most, question.users)

    def _curve(self, arm: Arm) -> ServiceCurve:
        if arm not in self._made:
            self._made[arm] = curve_of(self._curves[arm].points, self._question.weights)
        return self._made[arm]

    def _users(self, curve: ServiceCurve) -> tuple[Users, ...]:
        question = self._question
        users = []
        for group, count in question.weights.items():
            think_s = max(question.scenario.devices[group].workload.think_s, LEAST_THINK_S)
            if question.rate is not None:
                rate = question.rate * count / question.users
                # In the long run so many are served that each asks once in ``think_s``.
                count = max(_CROWD, _CROWD * rate * float(curve.groups[group].cycle_s[-1]))
                think_s = count / rate
            users.append(Users(group, count, think_s, 0.0))
        return tuple(users)

    def _arm_plan(self, arm: Arm) -> ArmPlan:
        verifiers = self.least(arm)
        if verifiers is None:
            alone = self.predict(arm, MOST_VERIFIERS)
            return ArmPlan(arm, None, alone, why_never(self._question, arm, alone))
        return ArmPlan(arm, verifiers, self.predict(arm, verifiers))
