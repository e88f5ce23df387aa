"""What requests came to beside their objectives, how sure that is, and whether load was too much.

Theory of operation. A request that counts is judged once it has ended, or, where it was given time
to end (a drain), in any case: one that is still under way then has missed. Requests of one world
depend on one another, so intervals are those of clusters (``replication.py``): a cluster is a
world, or, of few worlds, a stretch of one's window (batch means: Law and Kelton, "Simulation
Modeling and Analysis", 9.5), which is long beside a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgespec.telemetry.run_summary import ArmSummary, Attainment
from edgespec_sim.planning.replication import quantile_interval, share_interval
from edgespec_sim.scenario.arrival_sections import SloSection
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.meters import SERIES_STEPS, RequestRecord

P95 = 0.95
# Fewer say little of a spread: Student's t for 7 degrees of freedom is 2.4, for one 12.7.
_CLUSTERS = 8
# Steps of the series around the middle of the window and at its end.
_STEPS = 5
_GROWTH_SHARE, _DEVIATIONS = 0.05, 3.0

Records = Sequence[RequestRecord]


def attainment(
    scenario: Scenario, outcomes: Sequence[WorldOutcome], seeds: int
) -> Attainment | None:
    """Of one arm, whose worlds these are; None where neither objectives nor arrivals are given."""
    slo = scenario.slo
    if scenario.arrivals is None and not slo.given:
        return None
    groups = clusters(scenario, outcomes)
    judged = [[one for one in group if is_judged(one, scenario)] for group in groups]
    good = [(sum(attains(one, slo) for one in group), len(group)) for group in judged]
    share, ends = share_interval(good)
    ttft = p95(groups, lambda one: one.ttft_s)
    tpot = p95(groups, lambda one: one.tpot_s)
    return Attainment(
        asked=sum(map(len, judged)),
        share=0.0 if math.isnan(share) else share,
        share_interval=ends,
        goodput=sum(hits for hits, _ in good) / (scenario.window_s * seeds),
        ttft_p95_interval=ttft and ttft[1:],
        tpot_p95_interval=tpot and tpot[1:],
        slo_ttft_s=None if slo.ttft_p95_ms is None else slo.ttft_s,
        slo_tpot_s=None if slo.tpot_p95_ms is None else slo.tpot_s,
        unstable="" if scenario.arrivals is None else instability(scenario, outcomes, seeds),
    )


def clusters(scenario: Scenario, outcomes: Sequence[WorldOutcome]) -> list[Records]:
    """The requests that count, world by world, or stretch by stretch."""
    parts = math.ceil(_CLUSTERS / len(outcomes))
    found: list[Records] = []
    for outcome in outcomes:
        stretches: list[list[RequestRecord]] = [[] for _ in range(parts)]
        for one in outcome.meters.records:
            place = (one.started_s - scenario.warm_up_s) / scenario.window_s
            stretches[min(int(place * parts), parts - 1)].append(one)
        found += stretches
    return found


def p95(
    groups: Sequence[Records], value: Callable[[RequestRecord], float | None]
) -> tuple[float, float, float] | None:
    """With its interval, of the requests that have one."""
    known = [[v for one in group if (v := value(one)) is not None] for group in groups]
    return quantile_interval(known, P95)


def is_judged(one: RequestRecord, scenario: Scenario) -> bool:
    """Whether it ended, or had time to."""
    return one.complete or bool(one.failed) or scenario.longest_drain_s > 0.0


def attains(one: RequestRecord, slo: SloSection) -> bool:
    """It ended well and kept to each objective; a single token has no TPOT to miss with."""
    if not one.complete or one.failed or one.ttft_s is None:
        return False
    return one.ttft_s <= slo.ttft_s and (one.tpot_s is None or one.tpot_s <= slo.tpot_s)


def instability(scenario: Scenario, outcomes: Sequence[WorldOutcome], seeds: int) -> str:
    """In words, if what is under way grows by more than two numbers of a steady state differ by (as
    of Poisson), and by a share of what comes."""
    middle_s = scenario.duration_s - scenario.window_s / 2.0
    middle = int(middle_s / scenario.duration_s * SERIES_STEPS)
    active = [sum(o.meters.active_at[step] for o in outcomes) for step in range(SERIES_STEPS)]
    around = active[max(0, middle - _STEPS // 2) : middle + _STEPS // 2 + 1]
    before, after = sum(around) / len(around), sum(active[-_STEPS:]) / _STEPS
    came = sum(one.started_s >= middle_s for o in outcomes for one in o.meters.records)
    growth = after - before
    noise = _DEVIATIONS * math.sqrt(2.0 * before + 1.0)
    if growth <= max(noise, _GROWTH_SHARE * came):
        return ""
    half_s = seeds * scenario.window_s / 2.0
    return (
        f"more comes than is served: {came / half_s:.2f} requests/s came in the second half and"
        f" {max(0.0, came - growth) / half_s:.2f}/s ended; {before / seeds:.0f} were under way at"
        f" its start and {after / seeds:.0f} at its end. There is no steady state at this load, and"
        " times grow for as long as it lasts"
    )


def service_notes(scenario: Scenario, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """What a reader has to know of load and window."""
    notes = []
    if scenario.arrivals is not None:
        notes.append(f"Open loop: {scenario.arrivals.about}. TTFT is from arrival.")
    if scenario.warm_up_s or scenario.longest_drain_s:
        notes.append(
            f"Requests that were asked from {scenario.warm_up_s:g} to {scenario.duration_s:g} s"
            f" count; they had up to {scenario.longest_drain_s:g} s more to end."
        )
    for one in arms:
        if one.attainment is not None and one.attainment.unstable:
            notes.append(f"{one.arm}: {one.attainment.unstable}.")
        if scenario.longest_drain_s and one.all.unfinished:
            notes.append(
                f"{one.arm}: {one.all.unfinished} requests were not over by then; they have missed"
                " their objectives, and stand in no percentile that they have no time for."
            )
    return tuple(notes)
