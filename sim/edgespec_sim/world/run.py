"""Plays the jobs of a scenario and summarises them: every arm on the same seeds, side by side.

Theory of operation. A scenario is cut into *jobs*, one for each arm and shard. They are
independent: processes may play them in any order, and ``summarise`` gets the same result. The
outcome of a job is plain data, so it can travel between processes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any, assert_never

from edgespec.bench.arms import Arm
from edgespec.config.loading import dump_config
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.telemetry.trace import Tracer
from edgespec_sim import replication
from edgespec_sim import run_summary as rs
from edgespec_sim.scenario import sections
from edgespec_sim.token_sources import source as sources
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.world.assembly import World, WorldOutcome, make_shard
from edgespec_sim.world.attainment import measure_attainment
from edgespec_sim.world.device_power import apply_profiles
from edgespec_sim.world.meters import Meters, compute_pace
from edgespec_sim.world.parts import NO_PARTS, Parts
from edgespec_sim.world.run_notes import (
    air_notes,
    is_lossy,
    make_loss_notes,
    make_notes,
    profile_notes,
    service_notes,
    trace_notes,
)
from edgespec_sim.world.site import WorldSetup

LABELS = {
    Arm.TARGET_ONLY: "plain cloud streaming",
    Arm.VANILLA: "stop-and-wait split decoding",
    Arm.PEARL: "pre-verify and post-verify (PEARL)",
    Arm.WINDOWED: "streamed drafts, waits for them",
    Arm.EDGESPEC: "ours: streamed drafts, width 2, run-ahead",
    Arm.SERVER_DRAFT: "speculation on the server alone",
    Arm.BOTH: "ours beside a draft on the server",
}

# Stream watches are kept until the end of a world, which is too much for a city. The laws of a
# household are the same.
_CHECKED_DEVICES = 64
_TOY = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)


@dataclass(frozen=True, slots=True)
class Job:
    """One arm of one shard, on one seed."""

    scenario: sections.Scenario
    arm: Arm
    shard: int
    seed: int
    folder: Path
    checks: bool = True
    """Whether every message is checked, if the world is small enough for that."""
    parts: Parts = NO_PARTS


def make_jobs(
    scenario: sections.Scenario, seed: int, folder: Path, parts: Parts = NO_PARTS
) -> tuple[Job, ...]:
    """Return the jobs of one seed of a scenario."""
    return tuple(
        Job(scenario, arm, shard, seed, folder, parts=parts)
        for arm in scenario.arms
        for shard in range(scenario.shards)
    )


def play(
    job: Job, tracer: Tracer | None = None, progress: Callable[[float], None] = lambda now_s: None
) -> WorldOutcome:
    """Play a job. Raises ``ConservationError``, and what ``check`` raises."""
    # Finished sessions leave few reference cycles, but a search for cycles visits every object and
    # evicts the sessions from the processor's cache. It took a tenth of the time of 10,000 devices.
    usual = gc.get_threshold()
    gc.set_threshold(100_000, 50, 1000)
    try:
        return _build_world(job, tracer).run(progress)
    finally:
        gc.set_threshold(*usual)


def check(scenario: sections.Scenario, folder: Path, parts: Parts = NO_PARTS) -> None:
    """Raise the error with which ``play`` would refuse the scenario.

    Worlds are built like those to be played, and discarded: one for an arm with and one without
    drafts, for each end. Arms differ in nothing else that can be refused. Raises ``TraceError``,
    ``TapeError``, ``ProfileError``, ``ValueError`` and ``OSError``."""
    parts.check(scenario)
    arms = {(arm.drafts, arm.on_server): arm for arm in reversed(scenario.arms)}
    for arm in arms.values():
        _build_world(Job(scenario, arm, 0, 1, folder, parts=parts), None)


def _build_world(job: Job, tracer: Tracer | None) -> World:
    scenario = make_shard(job.scenario)
    if (part := job.parts.token_source) is not None:
        source = part.make_source(job.seed)
    else:
        source = make_token_source(scenario, job.seed, job.folder, lossy=job.arm.drafts)
    setup = WorldSetup(
        source=source,
        folder=job.folder,
        checks=job.checks and job.scenario.device_count <= _CHECKED_DEVICES,
        parts=job.parts,
    )
    seed = f"{job.seed}/{job.shard}"
    return World(scenario, job.arm, seed, setup, tracer)


def make_token_source(
    scenario: sections.Scenario, seed: int, folder: Path, *, lossy: bool = False
) -> sources.TokenSource:
    """Return the scenario's source of tokens; with ``lossy``, its relaxed rule applies, if any."""
    tokens = scenario.tokens
    match tokens.source:
        case sections.TokensFrom.TAPE:
            return sources.TapeSource(sources.load_tape(tokens.tape, folder), seed)
        case sections.TokensFrom.PROCESS:
            return sources.ProcessSource(_process_law(tokens.tape, folder, tokens.acceptance), seed)
        case sections.TokensFrom.TOY:
            sampling = SamplingParams(temperature=tokens.temperature, seed=seed)
            threshold = tokens.lossy_threshold if lossy else None
            return sources.ToySource(_TOY, tokens.noise, sampling, threshold)
        case _:
            assert_never(tokens.source)


@lru_cache(maxsize=16)
def _process_law(tape: str, folder: Path, acceptance: float | None) -> AcceptanceLaw:
    """Fit the acceptance law of a tape. A fit takes a second and every arm needs it, so it is
    cached."""
    law = fit(sources.load_tape(tape, folder))
    return law if acceptance is None else law.at(acceptance)


def summarise(
    scenario: sections.Scenario,
    seeds: Sequence[int],
    folder: Path,
    outcomes: Sequence[tuple[Arm, WorldOutcome]],
    environment: dict[str, str] | None = None,
    notes: tuple[str, ...] = (),
    parts: Parts = NO_PARTS,
) -> rs.RunSummary:
    """Summarise the outcomes of all jobs, ordered by seed and then as in ``make_jobs``. The
    outcomes are consumed. ``notes`` come first among the summary's notes."""
    part = parts.token_source
    source = part.make_source(seeds[0]) if part else make_token_source(scenario, seeds[0], folder)
    replaced = f"Own parts in place of the scenario's: {', '.join(parts.names)}."
    losses = make_loss_notes(scenario, outcomes)
    worlds = {arm: [outcome for one, outcome in outcomes if one is arm] for arm in scenario.arms}
    speedups = _measure_speedups(worlds, Arm.TARGET_ONLY)
    alone = find_fastest_without_device(
        {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
    )
    gains = {} if alone is None else _measure_speedups(worlds, alone)
    attained = {arm: measure_attainment(scenario, mine, len(seeds)) for arm, mine in worlds.items()}
    arms = []
    for arm in scenario.arms:
        value, ends = speedups.get(arm, (None, None))
        gain, gain_ends = gains.get(arm, (None, None))
        arms.append(
            replace(
                _arm_summary(scenario, arm, worlds[arm], len(seeds)),
                speedup=value,
                speedup_interval=None if ends is None else (ends.low, ends.high),
                gain=gain,
                gain_interval=None if gain_ends is None else (gain_ends.low, gain_ends.high),
                attainment=attained[arm],
            )
        )
    return rs.RunSummary(
        name=scenario.name,
        about=scenario.about.strip(),
        tokens_from=source.about,
        seed=seeds[0],
        simulated=True,
        duration_s=scenario.duration_s,
        arms=tuple(arms),
        settings={"yaml": dump_config(scenario)},
        notes=(
            *notes,
            *((replaced,) if parts.names else ()),
            *trace_notes(scenario, folder),
            *air_notes(scenario),
            *make_notes(apply_profiles(scenario, folder), profile_notes(scenario, folder)),
            *losses,
            *service_notes(scenario, arms),
        ),
        environment=environment or {},
        seeds=len(seeds),
        alone="" if alone is None else alone.value,
    )


_Speedup = tuple[float | None, replication.Interval | None]


def _measure_speedups(
    worlds: Mapping[Arm, Sequence[WorldOutcome]], baseline: Arm
) -> dict[Arm, _Speedup]:
    """Return every arm's speed-up over the arm ``baseline``. Empty if that arm was not played."""
    totals = {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
    base = totals.get(baseline)
    if base is None:
        return {}
    found = {arm: replication.measure_speedup(base, mine) for arm, mine in totals.items()}
    return {**found, baseline: (found[baseline][0], None)}


def find_fastest_without_device(
    totals: Mapping[Arm, Sequence[replication.TpotTotal]],
) -> Arm | None:
    """Return the fastest arm that needs no device, with plain streaming first among equals. None if
    none of them has a time per token. ``totals`` holds each arm's totals, one per world."""

    def mean_s(arm: Arm) -> float:
        seconds = math.fsum(one.seconds for one in totals[arm])
        return seconds / sum(one.requests for one in totals[arm])

    timed = [arm for arm, mine in totals.items() if sum(one.requests for one in mine)]
    return min((arm for arm in timed if not arm.drafts), key=mean_s, default=None)


def widest_half_width(outcomes: Sequence[tuple[Arm, WorldOutcome]]) -> float | None:
    """Return the greatest relative half-width of any arm's interval so far. None if there is no
    interval yet, or an arm has no complete request. 0 if there is no arm to compare with."""
    arms = dict.fromkeys(arm for arm, _ in outcomes)
    worlds = {arm: [outcome for one, outcome in outcomes if one is arm] for arm in arms}
    speedups = _measure_speedups(worlds, Arm.TARGET_ONLY)
    others = [found for arm, found in speedups.items() if arm is not Arm.TARGET_ONLY]
    if not others:
        return 0.0
    intervals = [interval for _, interval in others if interval is not None]
    if len(intervals) < len(others):
        return None
    return max(interval.half_width for interval in intervals)


def _arm_summary(
    scenario: sections.Scenario, arm: Arm, outcomes: Sequence[WorldOutcome], seeds: int
) -> rs.ArmSummary:
    shards = len(outcomes) // seeds
    each = [outcomes[first : first + shards] for first in range(0, len(outcomes), shards)]
    by_seed = []
    for same in each:
        meters = same[0].meters
        for outcome in same[1:]:
            meters.merge(outcome.meters)
        by_seed.append(meters)
    paces = compute_pace(by_seed)
    tpot = replication.ratio_interval([(one.tpot.seconds, one.tpot.requests) for one in by_seed])
    verifiers = tuple(one for outcome in each[0] for one in outcome.verifiers)
    meters = by_seed[0]
    for other in by_seed[1:]:
        meters.pool(other)
    if seeds > 1:
        verifiers = _pool_verifiers([one for o in outcomes for one in o.verifiers], meters, seeds)
    return rs.ArmSummary(
        arm=arm.value,
        label=f"{LABELS[arm]}, {rs.LOSSY}" if is_lossy(scenario, arm) else LABELS[arm],
        lossy=is_lossy(scenario, arm),
        all=meters.whole(),
        groups=meters.groups(),
        verifiers=verifiers,
        pace=paces,
        rows=meters.rows(),
        tpot_interval=(tpot.low, tpot.high) if tpot is not None and seeds > 1 else None,
        links=_pool_links([outcome.links for outcome in outcomes]),
        power=meters.power_course(),
    )


def _pool_links(found: Sequence[tuple[rs.LinkLoad, ...]]) -> tuple[rs.LinkLoad, ...]:
    """Return the mean load of each link over the worlds."""
    by_name: dict[str, list[rs.LinkLoad]] = {}
    for one in (one for same in found for one in same):
        by_name.setdefault(one.name, []).append(one)
    return tuple(
        rs.LinkLoad(name, fmean(one.up for one in same), fmean(one.down for one in same))
        for name, same in by_name.items()
    )


_SUMMED = ("energy_j", "idle_j", "idle_s", "busy_s", "draft_s", "ran_s")


def _pool_verifiers(
    found: Sequence[rs.VerifierSummary], meters: Meters, seeds: int
) -> tuple[rs.VerifierSummary, ...]:
    """Combine the summaries of each verifier, which ``found`` lists seed by seed and shard by
    shard. Loads are means over the seeds; passes are summed."""
    count = len(found) // seeds
    pooled = []
    for index in range(count):
        same = found[index::count]
        passes = sum(one.passes for one in same)
        each = {name: [getattr(one, name) for one in same] for name in _SUMMED}
        sums: dict[str, Any] = {
            name: None if None in values else math.fsum(values) for name, values in each.items()
        }
        pooled.append(
            replace(
                same[0],
                utilisation=math.fsum(one.utilisation for one in same) / seeds,
                passes=passes,
                rows_per_pass=math.fsum(o.rows_per_pass * o.passes for o in same) / max(1, passes),
                sessions_per_pass=math.fsum(o.sessions_per_pass * o.passes for o in same)
                / max(1, passes),
                guessed=sum(one.guessed for one in same),
                accepted=sum(one.accepted for one in same),
                queue_s=meters.queue_s(same[0].name),
                **sums,
            )
        )
    return tuple(pooled)
