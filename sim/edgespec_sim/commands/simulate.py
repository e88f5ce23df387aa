"""What ``run``, ``sweep`` and ``replay`` share: play a scenario, write what came out."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import yaml
from rich import box
from rich.console import Console
from rich.table import Table

from edgespec import __version__
from edgespec.cli.running import say
from edgespec.config.loading import NULL
from edgespec.telemetry.run_summary import ArmSummary, RunSummary, Spread
from edgespec_sim.commands.seeds import Ask, Point, play_seeds
from edgespec_sim.report import figures
from edgespec_sim.report.write import first_question, first_questions
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.run import check, summarise

SUMMARY, TRACE = "summary.json", "trace.jsonl"


def simulate(
    scenario: Scenario,
    ask: Ask,
    folder: Path,
    processes: int,
    trace: Path | None = None,
    *,
    quiet: bool = False,
) -> RunSummary:
    """All arms on the seeds that ``ask`` wants; ``trace`` gets the first devices of one arm."""
    check(scenario, folder)
    if trace is not None:
        _clear(trace.parent)
    point = Point(scenario.name, scenario, folder, trace)
    play_seeds([point], ask, processes, quiet=quiet)
    return summary_of(point, ask)


def _clear(out: Path) -> None:
    """What an earlier run with other arms left would be taken for ours."""
    for old in first_questions(out).values():
        old.unlink()
    first_question(out, "").parent.mkdir(parents=True, exist_ok=True)


def summary_of(point: Point, ask: Ask) -> RunSummary:
    seeds = range(ask.first, ask.first + point.seeds)
    summary = summarise(
        point.scenario, seeds, point.folder, point.outcomes, environment(), point.said
    )
    return replace(summary, settings={**summary.settings, "ask": asdict(ask)})


def environment() -> dict[str, str]:
    return {
        "edgespec": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def parse_settings(settings: Sequence[str]) -> dict[str, object]:
    """``links.wan.rtt_ms=80`` and the like; values are read as YAML. Raises ``ValueError``."""
    parsed: dict[str, object] = {}
    for setting in settings:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"setting is {setting!r}, but must be KEY=VALUE")
        read = yaml.safe_load(value)
        parsed[key] = NULL if read is None else read
    return parsed


def arms_table(summary: RunSummary) -> Table:
    table = Table(
        title=f"{summary.name}, {figures.seeds(summary)}: {summary.tokens_from}",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\narm", no_wrap=True)
    for name in (
        "TTFT\np50 ms",
        "TPOT\nmean",
        "\np95",
        "bound\nms",
        "speed-up\n(95 %)",
        "tokens\n/pass",
        "first\nright",
        "wasted\n/token",
        "tokens\n/s",
        "GPU\nbusy",
        "\nrequests",
        "\ndiffer",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    table.caption = (
        "bound: mean TPOT that an arm of its kind cannot go below; speed-up: of the mean TPOT, in"
        " brackets its 95 % interval; first right: share of positions at which the draft's first"
        " guess was; differ: tokens that are not the target's"
    )
    for arm in summary.arms:
        table.add_row(*_cells(arm))
    return table


def service_table(summary: RunSummary) -> Table | None:
    """Arms beside their objectives; None where neither objectives nor arrivals are given."""
    judged = [(arm, arm.attainment) for arm in summary.arms if arm.attainment is not None]
    if not judged:
        return None
    first = judged[0][1]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for name in (
        "\narm",
        "TTFT ms\np50",
        f"p95 (95 %)\n{_objective(first.slo_ttft_s)}",
        "TPOT ms\np50",
        f"p95 (95 %)\n{_objective(first.slo_tpot_s)}",
        "attained\n(95 %)",
        "goodput\nrequests/s",
        "\nasked",
        "un-\nfinished",
    ):
        table.add_column(name, justify="left" if name == "\narm" else "right", no_wrap=True)
    table.caption = (
        "attained: share of the requests that ended and kept to every objective; goodput: those a"
        " second; TTFT is from arrival"
    )
    for arm, found in judged:
        low, high = found.share_interval
        table.add_row(
            arm.arm,
            _ms(arm.all.ttft_s, 2),
            _p95(arm.all.ttft_s, found.ttft_p95_interval),
            _ms(arm.all.tpot_s, 2),
            _p95(arm.all.tpot_s, found.tpot_p95_interval),
            f"{100 * found.share:.1f} % ({100 * low:.0f}–{100 * high:.0f})",
            f"{found.goodput:.2f}",
            str(found.asked),
            str(arm.all.unfinished),
        )
    return table


def _objective(slo_s: float | None) -> str:
    return "no objective" if slo_s is None else f"objective {1e3 * slo_s:g}"


def _p95(spread: Spread | None, ends: tuple[float, float] | None) -> str:
    if spread is None or ends is None:
        return "–"
    return f"{1e3 * spread.p95:.1f} ({1e3 * ends[0]:.1f}–{1e3 * ends[1]:.1f})"


def _cells(arm: ArmSummary) -> tuple[str, ...]:
    whole = arm.all
    busy = [one.utilisation for one in arm.verifiers]
    mismatches = "–" if whole.mismatches is None else str(whole.mismatches)
    return (
        arm.arm,
        _ms(whole.ttft_s, 2),
        "–" if whole.tpot_s is None else f"{1e3 * whole.tpot_s.mean:.1f}",
        _ms(whole.tpot_s, 4),
        f"{1e3 * max(arm.bounds.values()):.1f}" if arm.bounds else "–",
        figures.speedup(arm).replace(" ", "\n"),
        f"{whole.tokens_per_pass:.2f}",
        "–" if whole.acceptance is None else f"{whole.acceptance:.2f}",
        f"{whole.wasted_per_token:.2f}",
        f"{whole.tokens_per_second:.0f}",
        f"{100 * sum(busy) / len(busy):.0f} %" if busy else "–",
        f"{whole.requests}" + (f" ({whole.failed} failed)" if whole.failed else ""),
        mismatches,
    )


def _ms(spread: Spread | None, index: int) -> str:
    return "–" if spread is None else f"{1e3 * spread.quantiles[index]:.1f}"


def output() -> Console:
    """Where tables go: as wide as the terminal, and wide enough where there is none."""
    return Console(width=None if sys.stdout.isatty() else 120)


def show(summary: RunSummary) -> None:
    output().print(arms_table(summary))
    service = service_table(summary)
    if service is not None:
        output().print(service)
    for arm in summary.arms:
        if arm.attainment is not None and arm.attainment.unstable:
            say(f"{arm.arm}: {arm.attainment.unstable}.")
    for note in summary.notes[:1]:
        if "peed-ups" in note:
            say(note)
