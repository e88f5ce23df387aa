"""Plays the jobs of a scenario and summarises them: every arm on the same seeds, side by side.

Theory of operation. A scenario is cut into *jobs*, one per arm and shard, which are independent:
any process may play any of them in any order, and ``summarise`` gets the same result. The outcome
of a job is plain data, so it can travel between processes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from edgespec_sim.scenario.device_power import load_profile
from edgespec_sim.scenario.verifiers import describe_cost_source
from edgespec_sim.token_sources import source as sources
from edgespec_sim.token_sources.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.world.assembly import World, WorldOutcome, make_shard
from edgespec_sim.world.device_power import apply_profiles
from edgespec_sim.world.meters import Meters, RequestRecord, compute_pace
from edgespec_sim.world.network import air_notes, trace_notes
from edgespec_sim.world.parts import NO_PARTS, Parts
from edgespec_sim.world.site import WorldSetup

# --- notes for the reader of a run -------------------------------------------------------------


def make_notes(scenario: sections.Scenario, profiles: Sequence[str] = ()) -> tuple[str, ...]:
    """Return notes on the sources of times and energies. ``profiles`` are notes on the profiles
    that were applied to the scenario."""
    notes = [
        f"Draft steps of {name}: {describe_cost_source(section.draft)}."
        for name, section in scenario.devices.items()
    ]
    notes += [
        f"Passes of {name}: {describe_cost_source(section.pass_time)}."
        for name, section in scenario.verifiers.items()
    ]
    notes += map(scenario.memory_note, scenario.verifiers)
    notes += [
        f"Steps of {name}'s own draft: assumed ({draft.ms:g} ms); its memory is not counted."
        for name, section in scenario.verifiers.items()
        if (draft := section.server_draft) is not None
    ]
    notes += [
        f"GPU of {name}: a radio access network takes {ran.about}; a pass takes as much longer."
        for name, section in scenario.verifiers.items()
        if (ran := section.ran) is not None
    ]
    notes += profiles
    notes += [_energy_note(name, section) for name, section in scenario.devices.items()]
    notes += [
        note for name, section in scenario.devices.items() for note in _power_notes(name, section)
    ]
    notes += [
        _power_note(name, section)
        for name, section in scenario.verifiers.items()
        if section.power_busy_w
    ]
    return tuple(notes)


def _energy_note(name: str, section: sections.DeviceSection) -> str:
    if section.radio_power and section.draft_w:
        return (
            f"Energy of {name}: {section.draft_w:g} W assumed while drafting, and the published"
            f" power of a {section.radio_power} radio (phones of 2012) while it sends, receives,"
            " stays connected and idles, until the next request."
        )
    missing = "radio_power" if not section.radio_power else "draft_w"
    return f"Energy of {name}: not reported, because the scenario has no {missing} for it."


def _power_notes(name: str, section: sections.DeviceSection) -> Iterator[str]:
    """Yield notes on the battery and the temperature of a group of devices."""
    if (battery := section.battery) is not None:
        radio = "radio included" if section.radio_power else "radio left out"
        yield (
            f"Battery of {name}: {battery.full_j / 3600.0:.1f} Wh, from {battery.start:.0%} down to"
            f" {battery.cutoff_v:g} V; idle at {section.idle_w:g} W, {radio}."
        )
    if (thermal := section.thermal) is not None:
        yield (
            f"Heat of {name}: {thermal.k_per_w:g} K/W and {thermal.time_constant_s:g} s in air of"
            f" {thermal.ambient_c:g} °C; steps take {thermal.slowdown:g} times as long from"
            f" {thermal.limit_c:g} °C until it has cooled down to {thermal.cooled_c:g} °C."
        )


def profile_notes(scenario: sections.Scenario, folder: Path) -> tuple[str, ...]:
    """Return a note on each profile of devices that a scenario names. Raises ``ConfigError``."""
    notes = []
    for name, section in scenario.devices.items():
        if section.profile:
            profile = load_profile(section.profile, folder)
            figures = ", ".join(
                f"{key} {figure.value:g} ({figure.kind.value})" for key, figure in profile.figures
            )
            notes.append(f"Profile of {name}: {profile.name}; {figures} (docs/energy.md).")
    return tuple(notes)


def _power_note(name: str, section: sections.VerifierSection) -> str:
    idle_w, busy_w = section.power_idle_w, section.power_busy_w
    if idle_w is None:
        return f"Energy of {name}: at most {busy_w:g} W while a pass runs; idle power is unknown."
    return (
        f"Energy of {name}: at most {busy_w:g} W while a pass runs, and {idle_w:g} W while it is"
        " on and idle. Host, fans and power supply are not included."
    )


def is_lossy(scenario: sections.Scenario, arm: Arm) -> bool:
    """Whether the arm's output may differ from the target's own."""
    return scenario.tokens.lossy_threshold is not None and arm.drafts


def make_loss_notes(
    scenario: sections.Scenario, outcomes: Sequence[tuple[Arm, WorldOutcome]]
) -> tuple[str, ...]:
    """Return one note for each arm whose output is not the target's own."""
    notes = []
    for arm in scenario.arms:
        if is_lossy(scenario, arm):
            counts = [outcome.meters.replaced_tokens for one, outcome in outcomes if one is arm]
            changed, tokens = (sum(column) for column in zip(*counts, strict=True))
            share = changed / tokens if tokens else 0.0
            notes.append(
                f"{rs.LOSSY}: {arm.value} accepts drafts of at least"
                f" {scenario.tokens.lossy_threshold:g} of the best token's probability; {share:.1%}"
                " of its tokens are not the target's."
            )
    return tuple(notes)


# -----------------------------------------------------------------------------------------------
# Comparison of requests with their objectives, with intervals.
#
# A request that counts is judged once it has ended. If requests were given time to end (a drain),
# it is judged in any case, and one that is still running then has missed. Requests of one world
# depend on one another, so intervals are those of clusters (``replication.py``). A cluster is a
# world or, with few worlds, a section of one's window (batch means: Law and Kelton, "Simulation
# Modeling and Analysis", 9.5), which is long compared with a request.


P95 = 0.95

# Fewer clusters estimate a spread badly: Student's t is 2.4 for 7 degrees of freedom, 12.7 for one.
_CLUSTERS = 8

Records = Sequence[RequestRecord]


def measure_attainment(
    scenario: sections.Scenario, outcomes: Sequence[WorldOutcome], seeds: int
) -> rs.Attainment | None:
    """Return how one arm's worlds meet the objectives. None if neither objectives nor arrivals are
    given."""
    slo = scenario.slo
    if scenario.arrivals is None and not slo.has_objectives:
        return None
    groups = cluster_requests(scenario, outcomes)
    drains = scenario.drain_limit_s > 0.0  # Then each request had time to end.
    judged = [[one for one in group if drains or one.complete or one.failed] for group in groups]
    good = [(sum(meets_objectives(one, slo) for one in group), len(group)) for group in judged]
    share, ends = replication.share_interval(good)
    ttft = quantile_95(groups, lambda one: one.ttft_s)
    tpot = quantile_95(groups, lambda one: one.tpot_s)
    return rs.Attainment(
        asked=sum(map(len, judged)),
        share=0.0 if math.isnan(share) else share,
        share_interval=ends,
        goodput=sum(hits for hits, _ in good) / (scenario.window_s * seeds),
        ttft_p95_interval=ttft and ttft[1:],
        tpot_p95_interval=tpot and tpot[1:],
        slo_ttft_s=None if slo.ttft_p95_ms is None else slo.ttft_s,
        slo_tpot_s=None if slo.tpot_p95_ms is None else slo.tpot_s,
    )


def cluster_requests(
    scenario: sections.Scenario, outcomes: Sequence[WorldOutcome]
) -> list[Records]:
    """Return the requests that count, divided by world or by section of a world's window."""
    parts = math.ceil(_CLUSTERS / len(outcomes))
    found: list[Records] = []
    for outcome in outcomes:
        stretches: list[list[RequestRecord]] = [[] for _ in range(parts)]
        for one in outcome.meters.records:
            place = (one.started_s - scenario.warm_up_s) / scenario.window_s
            stretches[min(int(place * parts), parts - 1)].append(one)
        found += stretches
    return found


def quantile_95(
    groups: Sequence[Records], value: Callable[[RequestRecord], float | None]
) -> tuple[float, float, float] | None:
    """Return the 95th percentile with its interval, over the requests that have a value."""
    known = [[v for one in group if (v := value(one)) is not None] for group in groups]
    return replication.quantile_interval(known, P95)


def meets_objectives(one: RequestRecord, slo: sections.SloSection) -> bool:
    """Whether a request ended well and met each objective. A single token has no TPOT to
    compare."""
    if not one.complete or one.failed or one.ttft_s is None:
        return False
    return one.ttft_s <= slo.ttft_s and (one.tpot_s is None or one.tpot_s <= slo.tpot_s)


def service_notes(scenario: sections.Scenario, arms: Sequence[rs.ArmSummary]) -> tuple[str, ...]:
    """Return notes on the load and the window."""
    notes = []
    if scenario.arrivals is not None:
        notes.append(f"Open loop: {scenario.arrivals.about}. TTFT is from arrival.")
    if scenario.warm_up_s or scenario.drain_limit_s:
        notes.append(
            f"Requests sent from {scenario.warm_up_s:g} to {scenario.duration_s:g} s count;"
            f" they had up to {scenario.drain_limit_s:g} s more to end."
        )
    for one in arms:
        if scenario.drain_limit_s and one.all.unfinished:
            notes.append(
                f"{one.arm}: {one.all.unfinished} requests had not ended by then; they count as"
                " misses, and percentiles do not include the times that they lack."
            )
    return tuple(notes)


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
