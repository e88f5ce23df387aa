"""``edgespec plan capacity``: the number of verifiers, and the arm, that meet given objectives.

Theory of operation. Each arm has its own search, and every number in it comes from simulated
worlds. Small, short worlds propose a number: starting from a fixed number of sessions per verifier,
the number of verifiers is halved while the objectives are met, doubled until they are, and then
bisected. After that the proposed number and one less are played in large worlds: all verifiers with
all users or, where these are too many, a few verifiers with their part of the load. If a large
world contradicts a small one, the number moves. Seeds are added while an interval still contains
its objective, until the time is up.

A request that has a verifier to itself and misses an objective misses it on any number of
verifiers. The answer then lists the times that such a request waits for.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from edgespec.bench.arms import Arm
from edgespec.cli.options import option, read_settings
from edgespec.cli.running import reporting_errors, say
from edgespec_sim.commands.play import named_as_typed, shown_workers
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.playing import Task, Workers, default_processes
from edgespec_sim.run_summary import LOSSY
from edgespec_sim.scenario import sections
from edgespec_sim.scenario.verifiers import MODELS, Operation, describe_cost_source, law_of
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.attainment import cluster_requests, quantile_95
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.network import Network
from edgespec_sim.world.run import Job, check
from edgespec_sim.world.run_notes import is_lossy

_ARMS: Final = (Arm.TARGET_ONLY, Arm.EDGESPEC, Arm.SERVER_DRAFT, Arm.BOTH)
"""The arms to compare. The last two apply only where the verifiers draft."""
_MODEL: Final = "llama-3.1-70b-fp8"
MAX_VERIFIERS: Final = 10_000
# An open loop gets enough devices that a request hardly ever finds its device busy.
_DEVICES_A_RATE, _LEAST_DEVICES = 60.0, 64
# Lengths of the warm-up and of the measured window (least, most), in durations of one request. The
# warm-up is cut off because no session is running when a world begins.
_WARM_UP_CYCLES, _CYCLES = 2.0, (2.0, 30.0)
_MOST_ROUNDS: Final = 32
_FIRST_SESSIONS: Final = 16.0
"""Sessions per verifier at which the search begins."""
_SMALL, _LARGE = (12.0, 60.0), (64.0, 600.0)
"""Sessions that run at once in a world, and session-seconds in its measured window."""
Estimate = tuple[float, float, float]
PlayWorlds = Callable[[str, Sequence[Job], float], list[WorldOutcome]]
"""Called with a description, the worlds to play and a deadline on the monotonic clock. Returns the
outcomes in the order of the worlds. Raises ``TimeoutError``."""


# --- what a GPU costs an hour -------------------------------------------------------------------
# List prices for one GPU on demand, in US dollars, without tax, storage and egress; they change and
# differ by a factor of three between providers.


@dataclass(frozen=True, slots=True)
class Gpu:
    price_per_hour: float
    source: str
    """The provider and the date of the price."""


_HYPERSTACK: Final = "Hyperstack, on demand (hyperstack.cloud/gpu-pricing), 2026-08-26"
GPUS: Final = {
    "h200": Gpu(3.99, _HYPERSTACK),
    "h100": Gpu(3.20, _HYPERSTACK),
    "a100-80g": Gpu(1.60, _HYPERSTACK),
    "rtx-4090": Gpu(0.29, "OpenRelay (openrelay.inc/gpu-pricing-calculator), 2026-09-20"),
}
"""Prices by the GPU names of ``verifiers.MACHINES``; ``h100`` and ``a100-80g`` are the SXM
variants."""


def parse_model_and_gpu(named: str) -> tuple[str, str]:
    """Split ``h100`` or ``llama-3.1-8b-bf16@h100`` into model and GPU. Without a model it is
    ``_MODEL``.

    Raises ``ValueError`` that lists the known names."""
    model, _, gpu = named.rpartition("@")
    if gpu not in GPUS:
        raise ValueError(f"gpu is {gpu!r}, but must be one of {', '.join(GPUS)}")
    if (model or _MODEL) not in MODELS:
        raise ValueError(f"model is {model!r}, but must be one of {', '.join(MODELS)}")
    return model or _MODEL, gpu


# --- the question ---------------------------------------------------------------------------


def apportion(weights: dict[str, float], size: int) -> dict[str, int]:
    """Divide ``size`` devices in the proportion of ``weights``, by the method of largest
    remainders. Groups without a device are left out."""
    total = math.fsum(weights.values())
    exact = {group: size * weight / total for group, weight in weights.items()}
    counts = {group: int(share) for group, share in exact.items()}
    by_rest = sorted(exact, key=lambda group: counts[group] - exact[group])
    for group in by_rest[: size - sum(counts.values())]:
        counts[group] += 1
    return {group: count for group, count in counts.items() if count}


@dataclass(frozen=True, slots=True)
class CapacityQuestion:
    """How many verifiers, and which arm, meet ``slo`` for the users of ``scenario``, or for
    ``rate`` requests per second from such users.

    Raises ``ValueError`` if the scenario is one that a plan of capacity does not support."""

    scenario: sections.Scenario
    """The scenario has one kind of verifier, whose ``count`` is ignored."""
    slo: sections.SloSection
    arms: tuple[Arm, ...]
    folder: Path
    rate: float | None = None
    """Requests per second of an open loop. None: a closed loop of the scenario's devices."""

    def __post_init__(self) -> None:
        scenario = self.scenario
        if not self.slo.has_objectives:
            raise ValueError("no objective is given: a plan needs --ttft-p95 or --tpot-p95")
        if len(scenario.verifiers) != 1:
            kinds = ", ".join(scenario.verifiers)
            raise ValueError(f"verifiers are {kinds}, but a plan of capacity takes one kind")
        if scenario.radio is not None:
            raise ValueError("the scenario has a radio, but a plan of capacity takes wired links")
        if scenario.tokens.source is sections.TokensFrom.TAPE:
            raise ValueError("tokens.source is tape, but a plan needs process or toy")
        if self.rate is not None:
            sections.ArrivalsSection(rate=self.rate)

    @property
    def kind(self) -> str:
        return next(iter(self.scenario.verifiers))

    @property
    def cycle_s(self) -> float:
        """Rough duration of a request, at 20 ms per token. It is used only to choose how long the
        worlds run. The log-normal spread of an output's length keeps its median and raises its
        mean, hence the root."""
        loads = [one.workload for one in self.scenario.devices.values()]
        return 0.5 + 0.02 * max(
            one.output_tokens * math.sqrt(1.0 + one.length_spread**2) for one in loads
        )

    @property
    def active_sessions(self) -> float:
        """Estimated number of sessions that run at once on all verifiers together."""
        if self.rate is not None:
            return self.rate * self.cycle_s
        think_s = max(one.workload.think_s for one in self.scenario.devices.values())
        return self.scenario.device_count * self.cycle_s / (self.cycle_s + think_s)

    @property
    def max_verifiers(self) -> int:
        """A number of verifiers at which requests hardly ever share one."""
        return max(
            1,
            min(
                MAX_VERIFIERS,
                math.ceil(max(self.scenario.device_count, 4.0 * self.active_sessions)),
            ),
        )

    def make_world(self, number: int, sessions: float, session_seconds: float) -> sections.Scenario:
        """Return the world that stands for ``number`` verifiers.

        It holds as many of them as serve ``sessions`` sessions at once, with their part of the
        load. Devices start in the middle of their thinking time, near the steady state. The
        measured window lasts ``session_seconds`` divided by the sessions that run at once, within
        limits. Raises ``ValueError`` if that takes too many devices."""
        scenario, arrivals = self.scenario, None
        each = max(self.active_sessions / number, 1e-3)
        played = max(1, min(number, math.ceil(sessions / each)))
        part = played / number
        if self.rate is None:
            count = max(1, round(self.scenario.device_count * part))
        else:
            arrivals = sections.ArrivalsSection(
                sections.ArrivalKind.POISSON, self.rate * part, at=sections.AtDevice.FREE
            )
            count = math.ceil(self.rate * part * _DEVICES_A_RATE) + _LEAST_DEVICES
        if count > sections.MAX_DEVICES:
            raise ValueError(
                f"the world would have {count} devices, but the limit is {sections.MAX_DEVICES}"
            )
        weights = {name: float(section.count) for name, section in scenario.devices.items()}
        cycle_s = self.cycle_s
        low, high = (cycles * cycle_s for cycles in _CYCLES)
        window_s = min(max(session_seconds / (played * each), low), high)
        return replace(
            scenario,
            slo=self.slo,
            arrivals=arrivals,
            # A user has sent requests before, so its agent has a connection already.
            connected=True,
            warm_up_s=_WARM_UP_CYCLES * cycle_s,
            duration_s=_WARM_UP_CYCLES * cycle_s + window_s,
            drain_s=cycle_s,
            devices={
                name: replace(
                    scenario.devices[name],
                    count=count,
                    workload=replace(scenario.devices[name].workload, start_thinking=True),
                )
                for name, count in apportion(weights, count).items()
            },
            verifiers={self.kind: replace(scenario.verifiers[self.kind], count=played)},
        )


# --- what the played worlds show ------------------------------------------------------------


class Meets(Enum):
    """Whether objectives are met, as far as an interval decides it."""

    YES = "yes"
    LIKELY = "likely"
    UNLIKELY = "unlikely"
    NO = "no"

    @property
    def is_met(self) -> bool:
        return self in (Meets.YES, Meets.LIKELY)

    @property
    def is_decided(self) -> bool:
        return self in (Meets.YES, Meets.NO)


@dataclass(frozen=True, slots=True)
class Observation:
    """The results of one arm on one number of verifiers. A triple is a value and the
    ends of its 95 % interval, in seconds."""

    verifiers: int
    played: int
    """Verifiers that were played, with their part of the load."""
    seeds: int
    requests: int
    unfinished: int
    """Requests that had no second token when the world ended."""
    ttft_p95_s: Estimate
    tpot_p95_s: Estimate
    utilisation: float
    meets: Meets


def judge(
    slo: sections.SloSection,
    number: int,
    scenario: sections.Scenario,
    outcomes: Sequence[WorldOutcome],
) -> Observation:
    """Compare ``outcomes`` with the objectives. They come from worlds of ``scenario``, which stands
    for ``number`` verifiers."""
    groups = cluster_requests(scenario, outcomes)
    endless_s = math.inf  # the time of a request that never got a first token
    ttft = (
        quantile_95(groups, lambda one: endless_s if one.ttft_s is None else one.ttft_s)
        or (math.inf,) * 3
    )
    tpot = quantile_95(groups, _tpot_s) or (math.inf,) * 3
    busy = [one.utilisation for outcome in outcomes for one in outcome.verifiers]
    return Observation(
        verifiers=number,
        played=len(outcomes[0].verifiers),
        seeds=len(outcomes),
        requests=sum(map(len, groups)),
        unfinished=sum(one.pace_s is None for group in groups for one in group),
        ttft_p95_s=ttft,
        tpot_p95_s=tpot,
        utilisation=math.fsum(busy) / len(busy),
        meets=_compare_with_objectives((ttft, slo.ttft_s), (tpot, slo.tpot_s)),
    )


def _tpot_s(one: RequestRecord) -> float | None:
    """Return a request's time per token, measured so far if the world's end cut it off. It is
    infinite if the request failed or never got a second token."""
    if one.failed or (one.pace_s is None and not one.complete):
        return math.inf
    return one.pace_s


def _compare_with_objectives(*pairs: tuple[Estimate, float]) -> Meets:
    """Compare pairs of a triple (value and interval) and its objective."""
    if all(estimate[2] <= limit for estimate, limit in pairs):
        return Meets.YES
    if any(estimate[1] > limit for estimate, limit in pairs):
        return Meets.NO
    within = all(estimate[0] <= limit for estimate, limit in pairs)
    return Meets.LIKELY if within else Meets.UNLIKELY


# --- the search -----------------------------------------------------------------------------


@dataclass(slots=True)
class Search:
    """The search of one arm: the numbers of verifiers played so far, and the number to play
    next."""

    arm: Arm
    first: int
    """The number that the search begins with."""
    max_verifiers: int
    proposed: dict[int, bool] = field(default_factory=dict)
    """Results of small worlds: whether a number of verifiers met the objectives."""
    observed: dict[int, Observation] = field(default_factory=dict)
    uncontended: Observation | None = None
    """The observation on ``max_verifiers`` verifiers, where a request has a verifier to itself."""

    @property
    def never_meets(self) -> bool:
        return self.uncontended is not None and self.uncontended.meets is Meets.NO

    def next_proposal(self) -> int | None:
        """Return the number for the next small world. None once the proposal is complete, or if not
        even ``max_verifiers`` verifiers meet the objectives."""
        if not self.proposed:
            return self.first
        low, high = self._bracket()
        if high is None:
            return None if low == self.max_verifiers else min(2 * low, self.max_verifiers)
        if low == 0:
            return high // 2 if high > 1 else None
        return (low + high) // 2 if high > 1.2 * low + 1 else None

    def _bracket(self) -> tuple[int, int | None]:
        low = max((n for n, good in self.proposed.items() if not good), default=0)
        return low, min((n for n, good in self.proposed.items() if good and n > low), default=None)

    @property
    def candidate(self) -> int:
        """The least number that meets the objectives, as far as the worlds played so far show."""
        first = self._bracket()[1] or self.first
        low = max((n for n, one in self.observed.items() if not one.meets.is_met), default=0)
        high = min(
            (n for n, one in self.observed.items() if one.meets.is_met and n > low), default=None
        )
        if high is None:
            return first if low < first else low + max(1, low - first + 1)
        if high - low > 1:
            step = max(1, first - high + 1)
            return (low + high) // 2 if low else max(1, high - step)
        return high

    def numbers_to_play(self) -> list[int]:
        """Return the numbers of verifiers to play, or to play with one more seed. Empty once all is
        decided."""
        if self.never_meets:
            return []
        near = [one for one in (self.candidate, self.candidate - 1) if one >= 1]
        return self.unplayed[::-1] or [
            one for one in near if not self.observed[one].meets.is_decided
        ]

    @property
    def unplayed(self) -> list[int]:
        """The candidate and one less, without those that a large world was played for."""
        near = () if self.never_meets else (self.candidate - 1, self.candidate)
        return [one for one in near if one >= 1 and one not in self.observed]

    @property
    def interval(self) -> tuple[int, int]:
        """The range of numbers that the intervals of the large worlds leave open."""
        found = self.candidate
        fail = [n for n, one in self.observed.items() if one.meets is Meets.NO and n < found]
        good = [n for n, one in self.observed.items() if one.meets is Meets.YES and n >= found]
        low = max(fail, default=max(1, found - 1) - 1) + 1
        return min(low, found), min(good, default=found + 1)


class Planner:
    """Answers one question. ``play`` plays worlds, and ``at_once`` is how many it plays in
    parallel."""

    def __init__(self, question: CapacityQuestion, play: PlayWorlds, at_once: int = 1) -> None:
        self._question, self._play, self._at_once = question, play, at_once
        first = min(
            question.max_verifiers, max(1, round(question.active_sessions / _FIRST_SESSIONS))
        )
        self.searches = [Search(arm, first, question.max_verifiers) for arm in question.arms]
        self._worlds: dict[tuple[Arm, int], list[WorldOutcome]] = {}

    def search(self, until_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        """Run the search of every arm. All proposals are made, whatever time they take; no large
        world is started after ``until_s`` on the clock ``now_s``."""
        while proposals := [(s, n) for s in self.searches if (n := s.next_proposal()) is not None]:
            self._propose(proposals)
        rounds, round_s = 0, 0.0
        while wanted := [(s, n) for s in self.searches for n in s.numbers_to_play()]:
            began_s = now_s()
            if rounds == _MOST_ROUNDS or began_s + round_s > until_s:
                return
            try:
                self._play_events(wanted, until_s)
            except TimeoutError:
                # Only the quick worlds of this round have finished, and to use them would be a
                # bias.
                return
            rounds, round_s = rounds + 1, now_s() - began_s

    def _propose(self, proposals: Sequence[tuple[Search, int]]) -> None:
        question = self._question
        worlds = [question.make_world(number, *_SMALL) for _, number in proposals]
        jobs = [
            self._make_job(search.arm, world, 1)
            for (search, _), world in zip(proposals, worlds, strict=True)
        ]
        outcomes = self._play("small worlds", jobs, math.inf)
        for (search, number), world, outcome in zip(proposals, worlds, outcomes, strict=True):
            found = judge(question.slo, number, world, [outcome])
            search.proposed[number] = found.meets.is_met
            if (
                number == search.max_verifiers
            ):  # A mere value excludes nothing; only an interval does.
                search.uncontended = found
                search.proposed[number] = found.meets is not Meets.NO

    def _play_events(self, wanted: Sequence[tuple[Search, int]], until_s: float) -> None:
        question = self._question
        seeds = max(1, self._at_once // len(wanted))
        worlds = {number: question.make_world(number, *_LARGE) for _, number in wanted}
        keys = [(search.arm, number) for search, number in wanted for _ in range(seeds)]
        done = {key: len(self._worlds.get(key, ())) for key in keys}
        jobs = [
            self._make_job(arm, worlds[number], 1 + done[arm, number] + index % seeds)
            for index, (arm, number) in enumerate(keys)
        ]
        named = " and ".join(map(str, sorted(worlds)))
        outcomes = self._play(f"{named} verifiers, by events", jobs, until_s)
        for key, outcome in zip(keys, outcomes, strict=True):
            self._worlds.setdefault(key, []).append(outcome)
        for search, number in wanted:
            mine = self._worlds[search.arm, number]
            search.observed[number] = judge(question.slo, number, worlds[number], mine)

    def _make_job(self, arm: Arm, world: sections.Scenario, seed: int) -> Job:
        return Job(replace(world, arms=(arm,)), arm, 0, seed, self._question.folder, checks=False)

    @property
    def best(self) -> Search | None:
        """The search with the fewest verifiers, and among equals the one with the least time per
        token. One that only small worlds proposed counts only if there is no other."""

        def cost(one: Search) -> tuple[bool, int, float]:
            mine = one.observed.get(one.candidate)
            tpot_s = math.inf if mine is None else mine.tpot_p95_s[0]
            return mine is None, one.candidate, tpot_s

        return min([one for one in self.searches if not one.never_meets], key=cost, default=None)


# --- the explanation of an objective that no number of verifiers meets -------------------------


def explain_never(question: CapacityQuestion, arm: Arm, uncontended: Observation) -> str:
    """Explain why ``arm`` misses an objective on any number of verifiers.

    ``uncontended`` was observed on enough verifiers that hardly two requests meet. More verifiers
    shorten none of the links, draft steps and passes that such a request waits for."""
    if question.active_sessions > uncontended.verifiers:
        each = question.active_sessions / uncontended.verifiers
        return (
            f"even {uncontended.verifiers} verifiers are too few for this load: each would have"
            f" {each:.0f} requests at once"
        )
    scenario, slo, folder = question.scenario, question.slo, question.folder
    network = Network(EventQueue(), scenario, "limits", folder)
    verifier = scenario.verifier_name(question.kind, 0)
    rtt_s = max(network.view(group, 0, verifier).rtt_s for group in scenario.devices)
    steps = [law_of(one.draft, Operation.DRAFT_STEP, folder) for one in scenario.devices.values()]
    step_s = max(law.seconds(1) for law in steps)
    passes = scenario.verifiers[question.kind].pass_time
    law = law_of(passes, Operation.TARGET_PASS, folder)
    prompt = max(section.workload.prompt_tokens for section in scenario.devices.values())
    prefill = f"sending a request takes a round trip, its prompt {_show_ms(law.seconds(prompt))}"
    parts = [
        f"{what} p95 has an objective of {_show_ms(limit_s)}, but is {_show_ms(found[0])} for"
        f" requests that have a verifier to themselves{why}"
        for what, found, limit_s, why in (
            ("TPOT", uncontended.tpot_p95_s, slo.tpot_s, ""),
            ("TTFT", uncontended.ttft_p95_s, slo.ttft_s, f": {prefill}"),
        )
        if found[0] > limit_s
    ]
    drafting = f", a draft step {_show_ms(step_s)}" if arm.drafts else ""
    parts.append(f"a round trip is {_show_ms(rtt_s)}{drafting}, a pass {_show_ms(law.seconds(1))}")
    return "; ".join(parts) + f" ({describe_cost_source(passes)})"


def _show_ms(time_s: float) -> str:
    return f"{1e3 * time_s:.1f} ms"


# --- the command ----------------------------------------------------------------------------

_TTFT = option("Objective: p95 of the time to first token", metavar="MS")
_TPOT = option("Objective: p95 of the time per output token", metavar="MS")
_GPU_HELP = "h200, h100, a100-80g or rtx-4090; pass times are computed from its data sheet"
_GPU = option(_GPU_HELP, metavar="[MODEL@]GPU")
_SCENARIO = option("Scenario that describes the users, links and drafts")
_SETTINGS = option("Change a key of the scenario", "--set", metavar="KEY=VALUE")


_OPTIONS: Final = {
    "ttft_p95_ms": "--ttft-p95",
    "tpot_p95_ms": "--tpot-p95",
    "rate": "--rate",
    "users": "--users",
    "gpu": "--gpu",
    "model": "--gpu: the model",
}
"""Options by the names under which errors mention their values."""


def capacity(
    users: Annotated[
        int | None,
        option(
            "Number of users; each sends a request, reads the output, pauses, and sends the next",
            min=1,
        ),
    ] = None,
    rate: Annotated[float | None, option("Requests per second, instead of users")] = None,
    ttft_p95: Annotated[float | None, _TTFT] = None,
    tpot_p95: Annotated[float | None, _TPOT] = None,
    gpu: Annotated[str, _GPU] = "h200",
    scenario: Annotated[str, _SCENARIO] = "laptop-floor",
    settings: Annotated[list[str] | None, _SETTINGS] = None,
    max_seconds: Annotated[
        float, option("Seconds after which no further large world is started", min=1.0)
    ] = 60.0,
    as_json: Annotated[bool, option("One JSON object on stdout", "--json")] = False,
) -> None:
    """Compute how many verifiers meet service objectives, with which arm, at what cost per hour.

    Small worlds propose a number for each arm. That number and one less are then simulated at
    length with the product's own sessions. Nothing is connected or loaded.

    [bold]Users who pause[/]   edgespec plan capacity --users 200 --tpot-p95 40 --ttft-p95 1000

    [bold]Requests a second[/] edgespec plan capacity --rate 12 --tpot-p95 40 --gpu h100

    [bold]Other users[/]       edgespec plan capacity --users 500 --tpot-p95 30
    --set devices.laptop.workload.think_s=60 --set links.office.rtt_ms=40

    To use pass times that `edgespec profile` measured, add --set
    verifiers.h200.pass_time.profile=FILE. If no number of verifiers meets an objective, the answer
    names the times that prevent it."""
    with reporting_errors():
        began_s = time.monotonic()
        with named_as_typed(_OPTIONS):
            question, named = ask_capacity(
                scenario=scenario,
                given=read_settings(settings or ()),
                users=users,
                rate=rate,
                slo=sections.SloSection(ttft_p95, tpot_p95),
                gpu=gpu,
            )
        with shown_workers() as workers:
            planner = plan_with(workers, default_processes(), question, began_s + max_seconds)
    if as_json:
        typer.echo(json.dumps(answer_as_json(question, planner, GPUS[named]), indent=2))
    else:
        _show(question, planner, named)
        say(f"answered in {time.monotonic() - began_s:.0f} s")


def ask_capacity(
    *,
    scenario: str,
    given: dict[str, object],
    users: int | None,
    rate: float | None,
    slo: sections.SloSection,
    gpu: str,
) -> tuple[CapacityQuestion, str]:
    """Return the question and the name of its GPU. ``given`` are changed keys of the scenario.
    Raises ``ValueError`` and ``ConfigError``."""
    model, named = parse_model_and_gpu(gpu)
    asked = load_planned_scenario(scenario, given, users, model, named)
    drafting = any(one.server_draft is not None for one in asked.verifiers.values())
    arms = tuple(arm for arm in _ARMS if drafting or not arm.on_server)
    question = CapacityQuestion(
        asked,
        slo,
        asked.arms if "arms" in given else arms,
        sections.scenario_path(scenario).parent,
        rate,
    )
    if (rate is None) == (users is None):
        given_options = "both were" if rate is not None else "neither was"
        raise ValueError(f"give either --users or --rate: {given_options} given")
    check(replace(question.scenario, arms=question.arms), question.folder)
    return question, named


def plan_with(
    workers: Workers, at_once: int, question: CapacityQuestion, until_s: float
) -> Planner:
    """Answer a question with worlds that ``workers`` play, ``at_once`` in parallel. No large world
    is started after ``until_s`` on the monotonic clock."""

    def play(doing: str, jobs: Sequence[Job], until_s: float) -> list[WorldOutcome]:
        tasks = [Task(doing, job) for job in jobs]
        outcomes = dict(workers.play(tasks, doing, until_s))
        return [outcomes[index] for index in range(len(tasks))]

    planner = Planner(question, play, at_once)
    planner.search(until_s)
    return planner


def load_planned_scenario(
    name: str, settings: dict[str, object], users: int | None, model: str, gpu: str
) -> sections.Scenario:
    """Load a scenario and replace its number of users and its verifier's model and GPU. Raises
    ``ValueError``."""
    loaded = sections.load_scenario(name, settings)
    devices = dict(loaded.devices)
    if users is not None:
        counts = apportion({group: float(one.count) for group, one in devices.items()}, users)
        if users > sections.MAX_DEVICES:
            raise ValueError(f"users is {users}, but must be at most {sections.MAX_DEVICES}")
        devices = {group: replace(devices[group], count=count) for group, count in counts.items()}
    passes = sections.CostSection(roofline=f"{model}@{gpu}")
    verifiers = {
        kind: replace(
            one,
            count=1,
            pass_time=one.pass_time if one.pass_time.profile else passes,
            machine=f"{model}@{gpu}",
        )
        for kind, one in loaded.verifiers.items()
    }
    return replace(loaded, shards=1, arrivals=None, devices=devices, verifiers=verifiers)


# --- the answer -----------------------------------------------------------------------------


def _show(question: CapacityQuestion, planner: Planner, gpu: str) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    price = GPUS[gpu].price_per_hour
    best = planner.best
    table = Table(box=None, pad_edge=False)
    for name in ("arm", gpu.upper(), "TTFT p95 ms", "TPOT p95 ms", "busy", "$/h", "requests"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for search in planner.searches:
        for number, one in sorted(search.observed.items()):
            taken = search is best and number == search.candidate
            part = "" if one.played == number else f" at {one.played} of them"
            table.add_row(
                *(_arm_name(question, search.arm), str(number)),
                *(_format_estimate(one.ttft_p95_s, 0), _format_estimate(one.tpot_p95_s, 1)),
                *(f"{one.utilisation:.0%}", f"{number * price:.2f}", f"{one.requests}{part}"),
                style="bold" if taken else None,
            )
    console.print(table)
    console.print("all of them simulated; in brackets: 95 % intervals", style="dim")
    for search in planner.searches:
        name = _arm_name(question, search.arm)
        if search.uncontended is not None and search.never_meets:
            why = explain_never(question, search.arm, search.uncontended)
            console.print(f"\n{name}: {why}", soft_wrap=True)
        elif search.unplayed:
            late = (
                f"{' and '.join(map(str, search.unplayed))} {gpu.upper()} not simulated at length"
            )
            why = "the time was up; raise --max-seconds"
            console.print(f"\n{name}: {late}: {why}", soft_wrap=True)
    if best is None:
        console.print("\n[bold]take:[/] nothing: no number of verifiers meets the objectives")
        _show_assumptions(question, console)
        return
    low, high = best.interval
    sure = f"95 %: {low}" if low == high else f"95 %: {low} to {high}"
    if best.candidate in best.unplayed:
        sure = "proposed by small worlds, not simulated at length"
    console.print(
        f"\n[bold]take:[/] {_arm_name(question, best.arm)} on {best.candidate} {gpu.upper()}"
        f" ({sure}), ${best.candidate * price:.2f} an hour"
    )
    if (saved := count_saved_verifiers(planner)) is not None:
        than, count = saved
        if than is Arm.TARGET_ONLY:
            named = "plain streaming"
        else:
            named = f"{than.value}, the best without a device,"
        dollars = f"${count * price:.2f} an hour"
        console.print(
            f"against {named} that saves {count} {gpu.upper()}, {dollars}"
            if count
            else f"against {named} that saves no {gpu.upper()}"
        )
    console.print(f"${price:.2f} a GPU and hour: {GPUS[gpu].source}", style="dim", soft_wrap=True)
    _show_assumptions(question, console)


def _show_assumptions(question: CapacityQuestion, console: Console) -> None:
    """Print the pass times that the answer rests on, and how many sessions fit a GPU's memory."""
    passes = describe_cost_source(question.scenario.verifiers[question.kind].pass_time)
    console.print(f"passes: {passes}", style="dim", soft_wrap=True)
    console.print(question.scenario.memory_note(question.kind), style="dim", soft_wrap=True)


def count_saved_verifiers(planner: Planner) -> tuple[Arm, int] | None:
    """Return the arm that the best arm is compared with, and how many verifiers it saves.

    The comparison is with the arm that needs the fewest verifiers among those without a device, or
    with plain streaming if the best arm needs no device itself. None if either number was not
    simulated at length, or if plain streaming is the best."""
    best = planner.best
    if best is None or best.unplayed or best.arm is Arm.TARGET_ONLY:
        return None
    others = [
        one
        for one in planner.searches
        if not one.arm.drafts and one is not best and not one.never_meets and not one.unplayed
    ]
    if not others:
        return None
    least = min(others, key=lambda one: one.candidate)
    return least.arm, least.candidate - best.candidate


def _arm_name(question: CapacityQuestion, arm: Arm) -> str:
    return f"{arm.value} {LOSSY}" if is_lossy(question.scenario, arm) else arm.value


def _format_estimate(found: Estimate, digits: int) -> str:
    value, low, high = ("never" if math.isinf(one) else f"{1e3 * one:.{digits}f}" for one in found)
    return f"{value} ({low}-{high})"


def answer_as_json(question: CapacityQuestion, planner: Planner, gpu: Gpu) -> dict[str, Any]:
    """Return the answer as a JSON object. JSON has no infinity, so "never" is null."""
    best, saved = planner.best, count_saved_verifiers(planner)
    return {
        "users": question.scenario.device_count if question.rate is None else None,
        "rate": question.rate,
        "ttft_p95_ms": question.slo.ttft_p95_ms,
        "tpot_p95_ms": question.slo.tpot_p95_ms,
        "take": best and best.arm.value,
        "verifiers": best and best.candidate,
        "verifiers_interval": best and list(best.interval),
        "confirmed": best is not None and not best.unplayed,
        "saved_verifiers": None if saved is None else saved[1],
        "saved_against": None if saved is None else saved[0].value,
        "cost_per_hour": best and round(best.candidate * gpu.price_per_hour, 4),
        "memory": question.scenario.memory_note(question.kind),
        "price": {"per_verifier_and_hour": gpu.price_per_hour, "source": gpu.source},
        "arms": [
            {
                "arm": one.arm.value,
                "verifiers": None if one.never_meets else one.candidate,
                "lossy": is_lossy(question.scenario, one.arm),
                "confirmed": not one.never_meets and not one.unplayed,
                "not_played": one.unplayed,
                "why": explain_never(question, one.arm, one.uncontended)
                if one.never_meets and one.uncontended
                else "",
                "events": [_observation_as_json(one.observed[n]) for n in sorted(one.observed)],
            }
            for one in planner.searches
        ],
    }


def _observation_as_json(one: Observation) -> dict[str, Any]:
    plain = asdict(one) | {"utilisation": round(one.utilisation, 4), "meets": one.meets.value}
    for name in ("ttft_p95", "tpot_p95"):
        ends_s = plain.pop(f"{name}_s")
        plain[f"{name}_ms"] = [None if math.isinf(s) else round(1e3 * s, 3) for s in ends_s]
    return plain
