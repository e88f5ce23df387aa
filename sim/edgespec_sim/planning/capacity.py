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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.bounds import lower_bounds
from edgespec_sim.planning.mean_field import (
    LEAST_THINK_S,
    P95_QUANTILE,
    Point,
    ServiceCurve,
    Station,
    Users,
    check_mean_field,
    curve_of,
    dealt,
    mixed,
    mixed_counts,
    point_of,
    point_world,
    pools,
    weighted_spread,
)
from edgespec_sim.scenario.sections import (
    MAX_DEVICES,
    ArrivalKind,
    ArrivalsSection,
    AtDevice,
    Scenario,
    SloSection,
)
from edgespec_sim.scenario.verifiers import MODELS, Operation, law_of, measured
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.network import Network
from edgespec_sim.world.run import Job, clusters, p95, token_source

# --- what a plan of capacity is asked, and what it answers -------------------------------------


MOST_VERIFIERS: Final = 10_000

# Devices of an open loop: so many that a request hardly ever finds its device busy.
_DEVICES_A_RATE: Final = 60.0
_LEAST_DEVICES: Final = 64
WARM_UP_CYCLES: Final = 2.0
"""Of requests, before those that count: nobody is served at the start."""


class Meets(Enum):
    """Whether objectives are met, as far as an interval decides it."""

    YES = "yes"
    LIKELY = "likely"
    UNLIKELY = "unlikely"
    NO = "no"

    @property
    def by_value(self) -> bool:
        return self in (Meets.YES, Meets.LIKELY)

    @property
    def decided(self) -> bool:
        return self in (Meets.YES, Meets.NO)


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """How many verifiers, and which arm, keep ``slo`` for the users of ``scenario``, or for
    ``rate`` requests a second of theirs? Raises ``ValueError`` for what cannot be answered."""

    scenario: Scenario
    """One kind of verifier; its ``count`` does not matter."""
    slo: SloSection
    arms: tuple[Arm, ...]
    folder: Path
    seed: int = 1
    rate: float | None = None
    """None: a closed loop of the scenario's devices."""

    def __post_init__(self) -> None:
        check_mean_field(self.scenario)
        if not self.slo.given:
            raise ValueError("no objective is given: a plan needs --ttft-p95 or --tpot-p95")
        kinds = ", ".join(self.scenario.verifiers)
        if len(self.scenario.verifiers) != 1:
            raise ValueError(f"verifiers are {kinds}, but a plan of capacity takes one kind")
        if self.scenario.radio is not None:
            raise ValueError("the scenario has a radio, but a plan of capacity takes wired links")
        if self.rate is not None:
            ArrivalsSection(rate=self.rate)

    @property
    def kind(self) -> str:
        return next(iter(self.scenario.verifiers))

    @property
    def users(self) -> int:
        return sum(section.count for section in self.scenario.devices.values())

    @property
    def weights(self) -> dict[str, float]:
        """Devices of each group."""
        return {name: float(section.count) for name, section in self.scenario.devices.items()}

    def world(self, arm: Arm, verifiers: int, of: int, window_s: float, cycle_s: float) -> Scenario:
        """``verifiers`` out of ``of`` alike with their part of the load, near the long run from the
        start; ``cycle_s`` is about what a request takes."""
        part = verifiers / of
        scenario, arrivals = self.scenario, None
        if self.rate is None:
            count = max(1, round(self.users * part))
        else:
            arrivals = ArrivalsSection(ArrivalKind.POISSON, self.rate * part, at=AtDevice.FREE)
            count = math.ceil(self.rate * part * _DEVICES_A_RATE) + _LEAST_DEVICES
        if count > MAX_DEVICES:
            raise ValueError(f"a world of {count} devices is asked for, the limit is {MAX_DEVICES}")
        counts = dealt(self.weights, count)
        section = scenario.verifiers[self.kind]
        warm_up_s = WARM_UP_CYCLES * cycle_s
        return replace(
            scenario,
            shards=1,
            arms=(arm,),
            slo=self.slo,
            arrivals=arrivals,
            warm_up_s=warm_up_s,
            duration_s=warm_up_s + window_s,
            drain_s=cycle_s,
            devices={
                name: replace(
                    scenario.devices[name],
                    count=count,
                    workload=replace(scenario.devices[name].workload, start_thinking=True),
                )
                for name, count in counts.items()
            },
            verifiers={self.kind: replace(section, count=verifiers)},
        )


@dataclass(frozen=True, slots=True)
class Predicted:
    """What the mean field says of one arm on so many verifiers."""

    verifiers: int
    ttft_p95_s: float
    tpot_p95_s: float
    active: float
    """Sessions a verifier."""
    utilisation: float
    cycle_s: float
    """Of a mean request."""
    within: bool
    """False: more sessions than the curve was measured for, so the times are too short."""

    def meets(self, slo: SloSection, ttft_factor: float = 1.0, tpot_factor: float = 1.0) -> bool:
        """``..._factor``: what events say over what the mean field says."""
        return (
            self.within
            and ttft_factor * self.ttft_p95_s <= slo.ttft_s
            and tpot_factor * self.tpot_p95_s <= slo.tpot_s
        )


@dataclass(frozen=True, slots=True)
class Observed:
    """What events say of one arm on so many verifiers. Triples are a value and its 95 % interval,
    in seconds."""

    verifiers: int
    played: int
    """Of them, with their part of the load."""
    seeds: int
    requests: int
    unfinished: int
    """That had no second token when the world ended."""
    ttft_p95_s: tuple[float, float, float]
    tpot_p95_s: tuple[float, float, float]
    utilisation: float
    meets: Meets


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm. ``verifiers`` None: no number of them meets the objectives, and ``why`` says what
    forbids it."""

    arm: Arm
    verifiers: int | None
    predicted: Predicted | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """The arm to take, on how many verifiers, and how sure that is."""

    arms: tuple[ArmPlan, ...]
    arm: Arm | None
    """None: none of them meets the objectives."""
    verifiers: int
    interval: tuple[int, int]
    """95 %: what the intervals of the events leave open."""
    observed: Mapping[int, Observed]
    """By number of verifiers, of ``arm``."""
    confirmed: bool
    """Events say that so many meet the objectives and one less does not."""
    why_not: str = ""
    """If it is not confirmed."""


# --- which term forbids an objective, whatever the number of verifiers? ------------------------
# A request that has a verifier to itself waits for links, draft steps and passes, and no further
# verifier shortens any of them. The lower bounds of ``bounds.py`` say what no policy of the arm
# can go below; where an objective lies between the bound and what the arm attains alone, the
# parts of a round are told.


def why_never(question: CapacityQuestion, arm: Arm, alone: Predicted) -> str:
    """``alone``: of so many verifiers that hardly two requests meet."""
    slo = question.slo
    if not alone.within:
        return (
            f"even {alone.verifiers} verifiers are too few for this load: each would have"
            f" {alone.active:.0f} requests at once"
        )
    parts = []
    if alone.tpot_p95_s > slo.tpot_s:
        parts.append(_tpot(question, arm, alone))
    if alone.ttft_p95_s > slo.ttft_s:
        parts.append(_ttft(question, alone))
    return "; ".join(parts)


def _tpot(question: CapacityQuestion, arm: Arm, alone: Predicted) -> str:
    scenario = question.scenario
    rtt_s, step_s, pass_s = _costs(question)
    said = (
        f"TPOT p95 is to be {_ms(question.slo.tpot_s)} at most, but is {_ms(alone.tpot_p95_s)} for"
        " requests that have a verifier to themselves: "
    )
    acceptance = _acceptance(question)
    bounds = lower_bounds(
        arm.value, rtt_s=rtt_s, step_s=step_s, pass_s=pass_s, acceptance=acceptance
    )
    name, bound_s = max(bounds.items(), key=lambda one: one[1])
    passes = measured(scenario.verifiers[question.kind].pass_time)
    terms = {
        f"a round trip {_ms(rtt_s)}": rtt_s if arm.drafts else 0.0,
        f"a draft step {_ms(step_s)}": step_s if arm.drafts else 0.0,
        f"a pass {_ms(pass_s)}, {passes}": pass_s,
    }
    listed = ", ".join(text for text, term_s in terms.items() if term_s)
    if bound_s > question.slo.tpot_s:
        return f"{said}the bound '{name}' alone is {_ms(bound_s)} on the mean ({listed})"
    longest = max(terms, key=lambda text: terms[text])
    return (
        f"{said}at {acceptance:.0%} of first guesses right a miss costs {listed}; the longest is"
        f" {longest.partition(',')[0]}"
    )


def _ttft(question: CapacityQuestion, alone: Predicted) -> str:
    scenario = question.scenario
    rtt_s, _, _ = _costs(question)
    law = law_of(
        scenario.verifiers[question.kind].pass_time, Operation.TARGET_PASS, question.folder
    )
    prompt = max(section.workload.prompt_tokens for section in scenario.devices.values())
    prompt_s = law.seconds(max(1, prompt))
    terms = {
        f"connecting, a round trip of {_ms(rtt_s)}": rtt_s,
        f"the prompt and its answer, a round trip of {_ms(rtt_s)}": rtt_s,
        f"a pass over {prompt} prompt tokens, {_ms(prompt_s)}": prompt_s,
    }
    longest = max(terms, key=lambda text: terms[text])
    return (
        f"TTFT p95 is to be {_ms(question.slo.ttft_s)} at most, but is {_ms(alone.ttft_p95_s)} for"
        f" requests that have a verifier to themselves: {'; '.join(terms)}. The longest is"
        f" {longest}"
    )


def _costs(question: CapacityQuestion) -> tuple[float, float, float]:
    """The slowest group's usual round trip and draft step, and a pass of one row."""
    scenario: Scenario = question.scenario
    network = Network(EventQueue(), scenario, "limits", question.folder)
    verifier = scenario.verifier_name(question.kind, 0)
    rtt_s = max(network.view(group, 0, verifier).rtt_s for group in scenario.devices)
    step_s = max(
        law_of(section.draft, Operation.DRAFT_STEP, question.folder).seconds(1)
        for section in scenario.devices.values()
    )
    section = scenario.verifiers[question.kind]
    pass_s = law_of(section.pass_time, Operation.TARGET_PASS, question.folder).seconds(1)
    return rtt_s, step_s, pass_s


def _acceptance(question: CapacityQuestion) -> float:
    given = question.scenario.tokens.acceptance
    if given is not None:
        return given
    law = getattr(token_source(question.scenario, question.seed, question.folder), "law", None)
    return float(law.acceptance()) if law is not None else 0.7


def _ms(time_s: float) -> str:
    return f"{1e3 * time_s:.1f} ms"


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


# --- what a GPU costs an hour and what it holds ------------------------------------------------
# list prices, each with its source and date.
# Prices are for one GPU on demand, in US dollars, without tax, storage and egress; they change
# and differ by a factor of three between providers, so a plan that matters gives its own
# (``--cost-per-hour``). Memory is the data sheet's.


# Room for activations, the runtime and fragmentation.
_USABLE: Final = 0.9


@dataclass(frozen=True, slots=True)
class Gpu:
    price_per_hour: float
    source: str
    date: str
    """When the source said so."""
    memory_bytes: float


_HYPERSTACK: Final = "Hyperstack, on demand (hyperstack.cloud/gpu-pricing)"
GPUS: Final = {
    "h200": Gpu(3.99, _HYPERSTACK, "2026-08-26", 141e9),
    "h100": Gpu(3.20, _HYPERSTACK, "2026-08-26", 80e9),
    "a100-80g": Gpu(1.60, _HYPERSTACK, "2026-08-26", 80e9),
    "rtx-4090": Gpu(0.29, "OpenRelay (openrelay.inc/gpu-pricing-calculator)", "2026-09-20", 24e9),
}
"""By the names of ``rooflines.MACHINES``; ``h100`` and ``a100-80g`` are the SXM ones."""


def gpu_named(name: str) -> Gpu:
    """Raises ``ValueError`` that names the known ones."""
    if name not in GPUS:
        raise ValueError(f"gpu is {name!r}, but must be one of {', '.join(GPUS)}")
    return GPUS[name]


def sessions_that_fit(model_name: str, gpu_name: str, tokens: float) -> int:
    """Sessions of so many cached tokens beside the weights. Raises ``ValueError`` where not even
    the weights fit, or for names that are not known."""
    gpu = gpu_named(gpu_name)
    if model_name not in MODELS:
        raise ValueError(f"model is {model_name!r}, but must be one of {', '.join(MODELS)}")
    model = MODELS[model_name]
    weights = model.parameters * model.weight_bytes
    free = _USABLE * gpu.memory_bytes - weights
    fit = int(free / (model.context_bytes * tokens))
    if fit < 1:
        raise ValueError(
            f"the weights of {model_name} take {weights / 1e9:.0f} GB and a session of"
            f" {tokens:.0f} tokens {model.context_bytes * tokens / 1e9:.2f} GB, but of the"
            f" {gpu.memory_bytes / 1e9:.0f} GB of {gpu_name} at most {_USABLE:.0%} are to be used"
        )
    return fit


# --- a plan of capacity, confirmed by events at the number of verifiers and at one below -------
# The arm that needs fewest verifiers by the mean field is played event by event: all verifiers
# with all users, or, where these are too many, a few of them with their part. What events say
# over what the mean field says is a factor; where events contradict, the mean field times this
# factor names the next number to play. Seeds are added while an interval holds an objective. The
# ends of the events' intervals, taken the same way, give the interval of the number of verifiers.


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
