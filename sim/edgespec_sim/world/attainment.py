"""Compares the requests of a run with its objectives (``slo``), with intervals.

A request that counts is judged once it has ended. If requests were given time to end (a drain),
every one is judged, and a request that is still running then has missed. Requests of one world
depend on one another, so intervals are those of clusters (``replication.py``). A cluster is a world
or, with few worlds, a section of one's window (batch means: Law and Kelton, "Simulation Modeling
and Analysis", 9.5), which is long compared with a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from edgespec_sim import replication
from edgespec_sim import run_summary as rs
from edgespec_sim.scenario import sections
from edgespec_sim.world.assembly import WorldOutcome
from edgespec_sim.world.meters import RequestRecord

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
