"""Plans as a library: the way of decoding that suits a link, and the verifiers that users need.

The commands ``plan link`` and ``plan capacity`` compute the same answers and print them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgespec_sim.playing import (
    ScenarioPoint,
    SeedPlan,
    Watcher,
    Workers,
    default_processes,
    ignore_progress,
    play_seeds,
    summary_of,
)
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario.sections import SloSection, load_scenario, scenario_path

if TYPE_CHECKING:
    from edgespec_sim.commands.plan_link import LinkAdvice

# The modules of the commands are imported by the functions that need them, because they load the
# command line's libraries.


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """Advice for a link, and the results that it is based on."""

    advice: LinkAdvice
    summary: RunSummary


def plan_link(
    rtt_ms: float = 50.0,
    draft_ms: float = 8.0,
    pass_ms: float = 25.0,
    acceptance: float = 0.8,
    server_draft_ms: float = 2.5,
    *,
    seeds: int | None = None,
    max_seconds: float = 30.0,
    processes: int | None = None,
    progress: Watcher = ignore_progress,
) -> LinkPlan:
    """Compute where drafting pays on a link: on the device, the server, both or neither.

    Args:
        rtt_ms: Round-trip time in milliseconds.
        draft_ms: Milliseconds of a draft step on the device.
        pass_ms: Milliseconds of a pass of the target.
        acceptance: Share of the draft's first candidates that the target accepts, 0.01 to 0.99.
        server_draft_ms: Milliseconds of a step of the same draft on the server; 0: it does not
            draft.
        seeds: Number of seeds. None plays until every speed is known within 5 %.
        max_seconds: Seconds after which no further seed is started, if ``seeds`` is None.
        processes: Number of processes; None is one for each core.
        progress: As for ``run``.

    Raises ``ConfigError`` for a value out of range, and ``ValueError`` if no request ends."""
    from edgespec_sim.commands.plan_link import SCENARIO, advise, link_settings

    settings = link_settings(rtt_ms, draft_ms, pass_ms, acceptance, server_draft_ms)
    scenario = load_scenario(SCENARIO, settings)
    seed_plan = SeedPlan(1, seeds, seconds=max_seconds)
    point = ScenarioPoint("link", scenario, scenario_path(SCENARIO).parent)
    with Workers(processes or default_processes(), progress) as workers:
        play_seeds([point], seed_plan, workers)
    totals = {
        arm: [outcome.meters.tpot for one, outcome in point.outcomes if one is arm]
        for arm in scenario.arms
    }
    summary = summary_of(point, seed_plan)
    return LinkPlan(advise(summary, totals, draft_ms, pass_ms), summary)


def plan_capacity(
    *,
    users: int | None = None,
    rate: float | None = None,
    ttft_p95_ms: float | None = None,
    tpot_p95_ms: float | None = None,
    gpu: str = "h200",
    scenario: str | Path = "laptop-floor",
    arms: Sequence[str] | None = None,
    max_seconds: float = 60.0,
    processes: int | None = None,
    progress: Watcher = ignore_progress,
    **overrides: object,
) -> dict[str, Any]:
    """Compute how many verifiers meet objectives, with which arm, at what cost per hour.

    Args:
        users: Number of users who send a request, read, pause and send the next one.
        rate: Requests per second, in place of ``users``.
        ttft_p95_ms: Objective for the 95th percentile of the time to the first token.
        tpot_p95_ms: Objective for that of the time per output token.
        gpu: ``[MODEL@]GPU``, as ``h100`` or ``llama-3.1-8b-bf16@h100``.
        scenario: Scenario that describes users, links and drafts.
        arms: Arms to compare; None compares streaming, edgespec, and both with a server's draft.
        max_seconds: Seconds after which no further large world is started.
        processes: Number of processes; None is one for each core.
        progress: As for ``run``.
        overrides: Changed keys of the scenario, as for ``run``.

    Returns the answer, with the keys that ``edgespec plan capacity --json`` prints. Raises
    ``ConfigError`` and ``ValueError``."""
    from edgespec_sim.commands.plan_capacity import (
        GPUS,
        answer_as_json,
        ask_capacity,
        plan_with,
    )

    given = {key.replace("__", "."): value for key, value in overrides.items()}
    if arms is not None:
        given["arms"] = list(arms)
    question, named = ask_capacity(
        scenario=str(scenario),
        given=given,
        users=users,
        rate=rate,
        slo=SloSection(ttft_p95_ms, tpot_p95_ms),
        gpu=gpu,
    )
    at_once, until_s = processes or default_processes(), time.monotonic() + max_seconds
    with Workers(at_once, progress) as workers:
        planner = plan_with(workers, at_once, question, until_s)
    return answer_as_json(question, planner, GPUS[named])
