"""From a scenario to a summary: every arm on the same seed, ours beside the baselines.

Theory of operation. A scenario is cut into *jobs*, one an arm and shard, that know nothing of one
another: any process may play any of them in any order, and ``summarise`` gets the same result. A
job's outcome is plain data, so it can travel between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import assert_never

from edgespec.config.loading import dump_config
from edgespec.core.arms import Arm
from edgespec.core.association import association_policy
from edgespec.core.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.telemetry.run_summary import ArmSummary, RunSummary
from edgespec.telemetry.trace import Tracer
from edgespec_sim.acceptance_process import AcceptanceLaw, fit
from edgespec_sim.bounds import lower_bounds
from edgespec_sim.city.world import Surrounding, World, WorldOutcome, shard_of
from edgespec_sim.process_source import ProcessSource
from edgespec_sim.scenario.costs import Operation, law_of, measured
from edgespec_sim.scenario.sections import Scenario, TokensFrom
from edgespec_sim.tape_source import TapeSource, tape_named
from edgespec_sim.tokens import TokenSource
from edgespec_sim.toy_source import ToySource

LABELS = {
    Arm.TARGET_ONLY: "plain cloud streaming",
    Arm.VANILLA: "stop-and-wait split decoding",
    Arm.PEARL: "pre-verify and post-verify (PEARL)",
    Arm.WINDOWED: "streamed drafts, waits for them",
    Arm.EDGESPEC: "ours: streamed drafts, width 2, run-ahead",
}
# Judging every step costs a third of the time; a city's laws are those of a household.
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
    """Raises ``ConservationError``, ``TraceError``, ``TapeError``, ``ProfileError``."""
    scenario = shard_of(job.scenario)
    devices = sum(section.count for section in job.scenario.devices.values())
    surrounding = Surrounding(
        source=token_source(scenario, job.seed, job.folder),
        association=association_policy(scenario.association),
        folder=job.folder,
        checks=devices <= _CHECKED_DEVICES,
    )
    seed = f"{job.seed}/{job.shard}"
    traced = _TRACED_DEVICES if tracer is not None else 0
    world = World(scenario, job.arm, seed, surrounding, tracer, traced)
    return world.run(progress)


def token_source(scenario: Scenario, seed: int, folder: Path) -> TokenSource:
    tokens = scenario.tokens
    match tokens.source:
        case TokensFrom.TAPE:
            return TapeSource(tape_named(tokens.tape, folder), seed)
        case TokensFrom.PROCESS:
            law = fit(tape_named(tokens.tape, folder))
            if tokens.acceptance is not None:
                law = AcceptanceLaw.of(tokens.acceptance)
            return ProcessSource(law, seed)
        case TokensFrom.TOY:
            sampling = SamplingParams(temperature=tokens.temperature, seed=seed)
            return ToySource(_TOY, tokens.noise, sampling)
        case _:
            assert_never(tokens.source)


def summarise(
    scenario: Scenario,
    seed: int,
    folder: Path,
    outcomes: Sequence[tuple[Arm, WorldOutcome]],
    environment: dict[str, str] | None = None,
) -> RunSummary:
    """``outcomes`` of all jobs, in the order of ``jobs_of``."""
    arms = []
    for arm in scenario.arms:
        mine = [outcome for one, outcome in outcomes if one is arm]
        arms.append(_arm_summary(scenario, folder, arm, mine))
    return RunSummary(
        name=scenario.name,
        about=scenario.about.strip(),
        tokens_from=token_source(scenario, seed, folder).about,
        seed=seed,
        simulated=True,
        duration_s=scenario.duration_s,
        arms=_with_speedups(arms),
        settings={"yaml": dump_config(scenario)},
        notes=_notes(scenario),
        environment=environment or {},
    )


def _arm_summary(
    scenario: Scenario, folder: Path, arm: Arm, outcomes: Sequence[WorldOutcome]
) -> ArmSummary:
    meters = outcomes[0].meters
    for outcome in outcomes[1:]:
        meters.merge(outcome.meters)
    whole = meters.whole()
    return ArmSummary(
        arm=arm.value,
        label=LABELS[arm],
        all=whole,
        groups=meters.groups(),
        verifiers=tuple(one for outcome in outcomes for one in outcome.verifiers),
        bounds=_bounds(scenario, folder, arm, whole.acceptance),
        series=meters.series(),
        rows=meters.rows(),
    )


def _with_speedups(arms: list[ArmSummary]) -> tuple[ArmSummary, ...]:
    base = next((one for one in arms if one.arm == Arm.TARGET_ONLY.value), None)
    if base is None or base.all.tpot_s is None:
        return tuple(arms)
    base_s = base.all.tpot_s.median
    return tuple(
        replace(one, speedup=base_s / one.all.tpot_s.median)
        if one.all.tpot_s and one.all.tpot_s.median
        else one
        for one in arms
    )


def _notes(scenario: Scenario) -> tuple[str, ...]:
    notes = [
        f"Draft steps of {name}: {measured(section.draft)}."
        for name, section in scenario.devices.items()
    ]
    notes += [
        f"Passes of {name}: {measured(section.pass_time)}."
        for name, section in scenario.verifiers.items()
    ]
    return tuple(notes)
