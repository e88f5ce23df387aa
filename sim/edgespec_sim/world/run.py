"""From a scenario to a summary: every arm on the same seed, ours beside the baselines.

Theory of operation. A scenario is cut into *jobs*, one an arm and shard, that know nothing of one
another: any process may play any of them in any order, and ``summarise`` gets the same result. A
job's outcome is plain data, so it can travel between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import assert_never

from edgespec.bench.arms import Arm
from edgespec.config import LEARNED
from edgespec.config.loading import dump_config
from edgespec.core.association.network import LearnedAssociation
from edgespec.core.association.policies import AssociationPolicy, association_policy
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.telemetry.run_summary import (
    ArmSummary,
    LinkLoad,
    RunSummary,
    VerifierSummary,
    Watched,
)
from edgespec.telemetry.trace import Tracer
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.planning.bounds import RunLengths, lower_bounds
from edgespec_sim.planning.replication import Interval, ratio_interval, speedup
from edgespec_sim.scenario.costs import Operation, law_of
from edgespec_sim.scenario.sections import Scenario, TokensFrom, VerifierSection
from edgespec_sim.scenario.stage_links import link_delays_s
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.token_sources.process import ProcessSource
from edgespec_sim.token_sources.relaxed_rule import LossySource
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.token_sources.tape import TapeSource, tape_named
from edgespec_sim.token_sources.toy import ToySource
from edgespec_sim.world.assembly import World, WorldOutcome, shard_of
from edgespec_sim.world.attainment import attainment, service_notes
from edgespec_sim.world.meters import Meters, pace, pooled_series
from edgespec_sim.world.network import Network
from edgespec_sim.world.notes import is_lossy, losses_of, notes_of
from edgespec_sim.world.surrounding import Surrounding

LABELS = {
    Arm.TARGET_ONLY: "plain cloud streaming",
    Arm.VANILLA: "stop-and-wait split decoding",
    Arm.PEARL: "pre-verify and post-verify (PEARL)",
    Arm.WINDOWED: "streamed drafts, waits for them",
    Arm.EDGESPEC: "ours: streamed drafts, width 2, run-ahead",
}
# Watches of a city's streams would be kept to its end; its laws are those of a household.
_CHECKED_DEVICES = 64
_TRACED_DEVICES = 2
_TOY = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)


@dataclass(frozen=True, slots=True)
class Job:
    """One arm of one shard."""

    scenario: Scenario
    arm: Arm
    shard: int
    seed: int
    folder: Path
    checks: bool = True
    """Watch every message, where the world is small enough for that."""


def jobs_of(scenario: Scenario, seed: int, folder: Path) -> tuple[Job, ...]:
    return tuple(
        Job(scenario, arm, shard, seed, folder)
        for arm in scenario.arms
        for shard in range(scenario.shards)
    )


def play(
    job: Job,
    tracer: Tracer | None = None,
    progress: Callable[[float], None] = lambda now_s: None,
) -> WorldOutcome:
    """Raises ``ConservationError``, and what ``check`` raises."""
    return _world(job, tracer).run(progress)


def check(scenario: Scenario, folder: Path) -> None:
    """Raise whatever ``play`` would refuse the scenario for: a world is built as it would be
    played, and thrown away, of an arm with drafts and of one without, as arms differ in nothing
    else that can be refused. ``TraceError``, ``TapeError``, ``ProfileError``, ``ValueError``,
    ``OSError``."""
    for arm in {arm.drafts: arm for arm in reversed(scenario.arms)}.values():
        _world(Job(scenario, arm, 0, 1, folder), None)


def _world(job: Job, tracer: Tracer | None) -> World:
    scenario = shard_of(job.scenario)
    devices = sum(section.count for section in job.scenario.devices.values())
    surrounding = Surrounding(
        source=token_source(scenario, job.seed, job.folder, lossy=job.arm.drafts),
        association=association_named(scenario.association, job.folder, job.seed),
        folder=job.folder,
        checks=job.checks and devices <= _CHECKED_DEVICES,
    )
    seed = f"{job.seed}/{job.shard}"
    traced = _TRACED_DEVICES if tracer is not None else 0
    return World(scenario, job.arm, seed, surrounding, tracer, traced)


def association_named(name: str, folder: Path, seed: int) -> AssociationPolicy:
    """By its name, or from the file in ``learned:FILE``. Raises ``ValueError``, ``OSError``."""
    if not name.startswith(LEARNED):
        return association_policy(name, seed)
    text = (folder / name.removeprefix(LEARNED)).read_text(encoding="utf-8")
    return LearnedAssociation.from_json(text)


def token_source(
    scenario: Scenario, seed: int, folder: Path, *, lossy: bool = False
) -> TokenSource:
    """``lossy``: with the scenario's relaxed rule, where it has one."""
    tokens = scenario.tokens
    match tokens.source:
        case TokensFrom.TAPE:
            return TapeSource(tape_named(tokens.tape, folder), seed)
        case TokensFrom.PROCESS:
            return ProcessSource(_process_law(tokens.tape, folder, tokens.acceptance), seed)
        case TokensFrom.TOY:
            sampling = SamplingParams(temperature=tokens.temperature, seed=seed)
            if lossy and tokens.lossy_threshold is not None:
                return LossySource(
                    _TOY,
                    tokens.noise,
                    sampling,
                    tokens.lossy_threshold,
                    by_importance=tokens.lossy_by_importance,
                )
            return ToySource(_TOY, tokens.noise, sampling)
        case _:
            assert_never(tokens.source)


@lru_cache(maxsize=16)
def _process_law(tape: str, folder: Path, acceptance: float | None) -> AcceptanceLaw:
    """Fitting takes a second, and every arm asks."""
    law = fit(tape_named(tape, folder))
    return law if acceptance is None else law.at(acceptance)


def summarise(
    scenario: Scenario,
    seeds: Sequence[int],
    folder: Path,
    outcomes: Sequence[tuple[Arm, WorldOutcome]],
    environment: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> RunSummary:
    """``outcomes`` of all jobs, in the order of ``jobs_of``, seed after seed; they are used up.
    ``notes`` come first."""
    losses = losses_of(scenario, outcomes)
    worlds = {arm: [outcome for one, outcome in outcomes if one is arm] for arm in scenario.arms}
    speedups = _speedups(worlds)
    attained = {arm: attainment(scenario, mine, len(seeds)) for arm, mine in worlds.items()}
    watched = _watched_device([mine[0].watches for mine in worlds.values()])
    arms = []
    for arm in scenario.arms:
        value, interval = speedups.get(arm, (None, None))
        summary = _arm_summary(scenario, folder, arm, worlds[arm], len(seeds))
        told = next((one for one in worlds[arm][0].watches if one.device == watched), None)
        ends = (interval.low, interval.high) if interval is not None else None
        arms.append(
            replace(
                summary,
                speedup=value,
                speedup_interval=ends,
                attainment=attained[arm],
                watched=told,
            )
        )
    return RunSummary(
        name=scenario.name,
        about=scenario.about.strip(),
        tokens_from=token_source(scenario, seeds[0], folder).about,
        seed=seeds[0],
        simulated=True,
        duration_s=scenario.duration_s,
        arms=tuple(arms),
        settings={"yaml": dump_config(scenario)},
        notes=(*notes, *notes_of(scenario), *losses, *service_notes(scenario, arms)),
        environment=environment or {},
        seeds=len(seeds),
        stations=outcomes[0][1].stations,
    )


def _watched_device(worlds: Sequence[Sequence[Watched]]) -> str:
    """The device to tell of in every arm: with requests that count in as many arms as can be, and
    the first of those. ``worlds``: what each arm's first world watched."""
    asked = [one.device for watches in worlds for one in watches if one.requests]
    devices = dict.fromkeys(one.device for watches in worlds for one in watches)
    return max(devices, key=asked.count, default="")


_Speedup = tuple[float | None, Interval | None]


def _speedups(worlds: Mapping[Arm, Sequence[WorldOutcome]]) -> dict[Arm, _Speedup]:
    """Of every arm over target-only, where that was played."""
    totals = {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
    base = totals.get(Arm.TARGET_ONLY)
    if base is None:
        return {}
    found = {arm: speedup(base, mine) for arm, mine in totals.items()}
    value = found[Arm.TARGET_ONLY][0]
    return {**found, Arm.TARGET_ONLY: (value, None)}


def widest(outcomes: Sequence[tuple[Arm, WorldOutcome]]) -> float | None:
    """The greatest relative half-width of any arm's interval so far; None: there is none yet, or an
    arm has no complete request. With no arm to compare with, nothing has a width."""
    arms = dict.fromkeys(arm for arm, _ in outcomes)
    worlds = {arm: [outcome for one, outcome in outcomes if one is arm] for arm in arms}
    others = [found for arm, found in _speedups(worlds).items() if arm is not Arm.TARGET_ONLY]
    if not others:
        return 0.0
    intervals = [interval for _, interval in others if interval is not None]
    if len(intervals) < len(others):
        return None
    return max(interval.half_width for interval in intervals)


def _arm_summary(
    scenario: Scenario, folder: Path, arm: Arm, outcomes: Sequence[WorldOutcome], seeds: int
) -> ArmSummary:
    shards = len(outcomes) // seeds
    each = [outcomes[first : first + shards] for first in range(0, len(outcomes), shards)]
    of_seeds = []
    for same in each:
        meters = same[0].meters
        for outcome in same[1:]:
            meters.merge(outcome.meters)
        of_seeds.append(meters)
    series = (pace(of_seeds), *pooled_series([meters.series() for meters in of_seeds]))
    tpot = ratio_interval([(one.tpot.seconds, one.tpot.requests) for one in of_seeds])
    verifiers = tuple(one for outcome in each[0] for one in outcome.verifiers)
    meters = of_seeds[0]
    for other in of_seeds[1:]:
        meters.pool(other)
    if seeds > 1:
        verifiers = _pooled_verifiers([one for o in outcomes for one in o.verifiers], meters, seeds)
    return ArmSummary(
        arm=arm.value,
        label=f"{LABELS[arm]}, LOSSY" if is_lossy(scenario, arm) else LABELS[arm],
        all=meters.whole(),
        groups=meters.groups(),
        verifiers=verifiers,
        bounds=_bounds(scenario, folder, arm, meters),
        series=series,
        rows=meters.rows(),
        tpot_interval=(tpot.low, tpot.high) if tpot is not None and seeds > 1 else None,
        links=_pooled_links([outcome.links for outcome in outcomes]),
    )


def _pooled_links(found: Sequence[tuple[LinkLoad, ...]]) -> tuple[LinkLoad, ...]:
    """The means over worlds."""
    by_name: dict[str, list[LinkLoad]] = {}
    for one in (one for same in found for one in same):
        by_name.setdefault(one.name, []).append(one)
    return tuple(
        LinkLoad(name, fmean(one.up for one in same), fmean(one.down for one in same))
        for name, same in by_name.items()
    )


def _pooled_verifiers(
    found: Sequence[VerifierSummary], meters: Meters, seeds: int
) -> tuple[VerifierSummary, ...]:
    """One a name, as ``found`` lists them seed after seed and shard after shard: loads are means
    over the seeds, passes are all of them."""
    count = len(found) // seeds
    pooled = []
    for index in range(count):
        same = found[index::count]
        passes = sum(one.passes for one in same)
        name = same[0].name
        pooled.append(
            VerifierSummary(
                name=name,
                utilisation=sum(one.utilisation for one in same) / seeds,
                passes=passes,
                rows_per_pass=sum(o.rows_per_pass * o.passes for o in same) / max(1, passes),
                sessions_per_pass=sum(o.sessions_per_pass * o.passes for o in same)
                / max(1, passes),
                queue_s=meters.queue_s(name),
                energy_j=_summed([one.energy_j for one in same]),
                idle_j=_summed([one.idle_j for one in same]),
                idle_s=_summed([one.idle_s for one in same]),
            )
        )
    return tuple(pooled)


def _summed(values: Sequence[float | None]) -> float | None:
    return None if None in values else sum(one or 0.0 for one in values)


def _bounds(scenario: Scenario, folder: Path, arm: Arm, meters: Meters) -> dict[str, float]:
    """For a device of the luckiest group on the best verifier, alone there, and the texts that
    were played."""
    acceptance = meters.whole().acceptance
    network = Network(EventQueue(), scenario, "bounds", folder)
    rtt_s = min(
        sum(network.ways.least_ways_s(group, verifier))
        for group in scenario.devices
        for verifier in scenario.verifiers
    )
    step_s = min(
        law_of(section.draft, Operation.DRAFT_STEP, folder).seconds(1, 0, 0.0)
        for section in scenario.devices.values()
    )
    pass_s = min(_least_pass_s(section, folder) for section in scenario.verifiers.values())
    return lower_bounds(
        arm.value,
        rtt_s=rtt_s,
        step_s=step_s,
        pass_s=pass_s,
        acceptance=1.0 if acceptance is None else acceptance,
        runs=_runs(meters.ranks, arm),
        gamma=scenario.gamma,
    )


def _runs(ranks: Sequence[Sequence[int]], arm: Arm) -> RunLengths | None:
    """How long the runs of hits were, for guesses as wide as the arm's; None: unknown."""
    width = DEFAULT_WIDTH if arm is Arm.EDGESPEC else 1
    return RunLengths.of_ranks(ranks, width) if ranks else None


def _least_pass_s(section: VerifierSection, folder: Path) -> float:
    law = law_of(section.pass_time, Operation.TARGET_PASS, folder)
    if section.stages is None:
        return law.seconds(1, 0, 0.0)
    delays_s = link_delays_s(section.stages, folder)
    return law.seconds(1, 0, 0.0) + section.stages.least_links_s(delays_s)
