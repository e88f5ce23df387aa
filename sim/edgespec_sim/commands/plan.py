"""``edgespec plan``: which way of decoding suits a link, how many verifiers users need, and what
memory a draft would take.

All before anything is installed; the others stand in ``plan_capacity.py`` and ``plan_memory.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edgespec.cli.running import EXIT_CODES, reported
from edgespec.config import ConfigError, DraftSection
from edgespec.core.device.memory import AUTO, MIB, KvType
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.device.build import BUNDLED, load_tokenizer
from edgespec_sim.commands.plan_capacity import capacity

if TYPE_CHECKING:
    from edgespec.core.device.memory import DraftVariant, MemoryPlan, MemoryQuestion
    from edgespec_sim.planning.link import LinkAdvice
    from edgespec_sim.run_summary import RunSummary


# --- ``edgespec plan memory`` ------------------------------------------------------------------
# what a draft would take, and what a budget would buy.


Drafts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DRAFT...",
        help="bundled, folders, Hub ids: of several, the first that fits is taken",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--memory-budget",
        envvar="EDGESPEC_MEMORY_BUDGET",
        metavar="SIZE",
        help="Of the whole process: 600MiB, 25% of the machine, or auto: what is free",
    ),
]
MAX_WIDTH, MAX_TEXT = 16, 1 << 20
_SPREAD_BYTES = 6 << 20
"""What a start holds more than this command at most, so a budget that it takes is enough."""


def memory(
    drafts: Drafts = None,
    memory_budget: Budget = AUTO,
    width: Annotated[
        int, typer.Option("--width", min=1, max=MAX_WIDTH, help="Guesses a step, at most")
    ] = DEFAULT_WIDTH,
    window: Annotated[
        int, typer.Option("--window", min=0, max=MAX_TEXT, help="Tokens held at most; 0: all")
    ] = 0,
    threads: Annotated[
        int, typer.Option("--threads", min=0, max=64, help="0: the plan chooses")
    ] = 0,
    bits: Annotated[int, typer.Option("--bits", help="Of what would be exported")] = 4,
    kv_type: Annotated[
        KvType | None, typer.Option("--kv-type", help="Of what would be exported")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Say how much memory a draft takes, term by term, and what a budget buys.

    Nothing is connected or loaded but the libraries, whose memory is measured. Texts do not depend
    on the budget, only how soon they come.

    [dim]edgespec plan memory --memory-budget 600MiB[/]

    [dim]edgespec plan memory ./draft-small ./draft-large --memory-budget 25%[/]
    """
    with reported():
        references = drafts or [BUNDLED]
        try:
            section = DraftSection(
                model=references[0],
                threads=threads,
                bits=bits,
                kv_type=kv_type,
                window=window,
                memory_budget=memory_budget,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        variants, question = _measured(section, references, width)
        _answer(variants, question, as_json)


def _measured(
    section: DraftSection, references: list[str], width: int
) -> tuple[tuple[DraftVariant, ...], MemoryQuestion]:
    """What there is to choose from, and the question. All drafts of a target have its tokenizer,
    so the first one's is loaded, with what the commands that draft load."""
    import edgespec.cli.chat
    import edgespec.cli.serve  # noqa: F401
    from edgespec.device.draft_memory import question_of, variants_of

    tokenizer = load_tokenizer(references[0])
    variants = tuple(
        variant for reference in references for variant in variants_of(section, reference)
    )
    question = question_of(section, width)
    del tokenizer
    return variants, replace(question, runtime_bytes=question.runtime_bytes + _SPREAD_BYTES)


def _answer(variants: tuple[DraftVariant, ...], question: MemoryQuestion, as_json: bool) -> None:
    from edgespec.core.device.memory import plan_memory, traded, unbounded

    plan = plan_memory(variants, question)
    changes = traded(plan, unbounded(variants, question))
    if as_json:
        typer.echo(json.dumps(_plain_memory(plan, changes), indent=2))
    else:
        _show_memory(plan, changes)


def _show_memory(plan: MemoryPlan, changes: tuple[str, ...]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for term in plan.terms:
        table.add_row(term.name, f"{term.bytes / MIB:.1f}", term.why)
    table.add_row("sum: the peak", f"{plan.predicted_bytes / MIB:.1f}", "", style="bold")
    table.add_row("kept free", f"{plan.margin_bytes / MIB:.1f}", "at least")
    table.add_row("budget", f"{plan.budget_bytes / MIB:.1f}", "")
    console.print(table)
    settings, variant = plan.settings, plan.variant
    console.print(
        f"\n[bold]take:[/] {variant.name}, {variant.bits} bits, {variant.kv_type.value} keys and"
        f" values, window {settings.window}, width {settings.width}, prefill chunk"
        f" {settings.chunk}, {settings.threads} thread{'s' if settings.threads > 1 else ''}"
    )
    console.print("traded: " + ("; ".join(changes) if changes else "nothing"))


def _plain_memory(plan: MemoryPlan, changes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "draft": plan.variant.name,
        "bits": plan.variant.bits,
        "kv_type": plan.variant.kv_type.value,
        **asdict(plan.settings),
        "terms": {term.name: term.bytes for term in plan.terms},
        "predicted_bytes": plan.predicted_bytes,
        "margin_bytes": plan.margin_bytes,
        "budget_bytes": plan.budget_bytes,
        "traded": list(changes),
    }


plan = typer.Typer(
    name="plan",
    no_args_is_help=True,
    help="Plan a deployment before anything runs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


@plan.callback()
def main() -> None:
    """Plan a deployment: a link or its verifiers in virtual time, or a device's memory."""


plan.command(name="memory", epilog=EXIT_CODES)(memory)

plan.command(name="capacity", epilog=EXIT_CODES)(capacity)


@plan.command(epilog=EXIT_CODES)
def link(
    rtt_ms: Annotated[float, typer.Option("--rtt-ms", help="Round trip of the link")] = 50.0,
    draft_ms: Annotated[float, typer.Option("--draft-ms", help="One draft step")] = 8.0,
    pass_ms: Annotated[float, typer.Option("--pass-ms", help="One pass of the target")] = 25.0,
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", help="Share of first guesses that are right, 0.01 to 0.99"),
    ] = 0.8,
    jitter_ms: Annotated[
        float, typer.Option("--jitter-ms", help="Mean extra delay of each direction")
    ] = 0.0,
    loss: Annotated[float, typer.Option("--loss", help="Share of packets that are lost")] = 0.0,
    up_mbps: Annotated[float, typer.Option("--up-mbps", help="Uplink; 0: without limit")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", min=0, help="Play this one alone")] = None,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=1.0, help="Play no further seed after so long")
    ] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Say which way of decoding suits a link, and why.

    Plays every way in virtual time, as `edgespec-sim run` would: nothing is connected or loaded.
    Seeds are played until every speed is known within 5 %, or the time is up.

    [dim]edgespec plan link --rtt-ms 120 --draft-ms 12 --pass-ms 30 --acceptance 0.7[/]
    """
    with reported():
        from edgespec_sim.commands.pool import default_processes
        from edgespec_sim.commands.simulate import Ask, Point, play_seeds, summary_of
        from edgespec_sim.planning.bounds import Costs
        from edgespec_sim.planning.link import advise, break_even_s, link_scenario
        from edgespec_sim.planning.replication import WITHIN

        try:
            scenario = link_scenario(
                rtt_ms=rtt_ms,
                draft_ms=draft_ms,
                pass_ms=pass_ms,
                acceptance=acceptance,
                jitter_ms=jitter_ms,
                loss=loss,
                up_mbps=up_mbps,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        ask = Ask.of(seed, None, 100 * WITHIN, max_seconds)
        point = Point("link", scenario, Path())
        play_seeds([point], ask, default_processes(), quiet=as_json)
        worlds = {arm: [o for one, o in point.outcomes if one is arm] for arm in scenario.arms}
        totals = {arm: [one.meters.tpot for one in mine] for arm, mine in worlds.items()}
        texts = [ranks for one in worlds[scenario.arms[0]] for ranks in one.meters.ranks]
        costs = Costs(rtt_ms / 1e3, draft_ms / 1e3, pass_ms / 1e3)
        pays_below_s = break_even_s(costs, texts, acceptance)
        summary = summary_of(point, ask)
        found = advise(summary, totals, costs, pays_below_s)
    if as_json:
        typer.echo(json.dumps(_plain(summary, found), indent=2))
    else:
        _show(summary, found)


def _show(summary: RunSummary, found: LinkAdvice) -> None:
    from edgespec_sim.commands.simulate import show

    show(summary)
    flags = _flags(found)
    typer.echo(f"take: {found.take.value}\n{found.reason}")
    typer.echo(f"flags: {flags}" if flags else "flags: none, it is the default")
    for line in _break_even(found):
        typer.echo(line)


def _flags(found: LinkAdvice) -> str:
    from edgespec_sim.planning.link import FLAGS

    return FLAGS[found.take]


def _break_even(found: LinkAdvice) -> list[str]:
    waiting_s, drafting_s = found.waiting_pays_below_s, found.drafting_pays_below_s
    lines = []
    if waiting_s is None:
        lines.append("Stop-and-wait is slower than plain streaming at any round trip.")
    else:
        lines.append(
            "Stop-and-wait is as fast as plain streaming at a round trip of"
            f" {waiting_s * 1e3:.0f} ms."
        )
    if drafting_s is not None and not math.isinf(drafting_s):
        lines.append(f"Beyond {drafting_s * 1e3:.0f} ms no policy can gain 3 % with these drafts.")
    return lines


def _plain(summary: RunSummary, found: LinkAdvice) -> dict[str, Any]:
    """JSON has no infinity: "at any round trip" is null with ``drafting_can_pay`` true."""
    drafting_s = found.drafting_pays_below_s
    return {
        "settings": summary.settings["yaml"],
        "source": summary.tokens_from,
        "seeds": summary.seeds,
        "arms": {
            arm.arm: {
                "tpot_ms": None if arm.all.tpot_s is None else 1e3 * arm.all.tpot_s.mean,
                "speed_up": arm.speedup,
                "speed_up_interval": arm.speedup_interval,
                "tokens_per_pass": arm.all.tokens_per_pass,
                "wasted_per_token": arm.all.wasted_per_token,
                "up_bytes_per_token": arm.all.up_bytes_per_token,
                "bound_ms": 1e3 * max(arm.bounds.values()),
            }
            for arm in summary.arms
        },
        "take": found.take.value,
        "flags": _flags(found),
        "reason": found.reason,
        "waiting_pays_below_ms": _milliseconds(found.waiting_pays_below_s),
        "drafting_can_pay": drafting_s is not None,
        "drafting_pays_below_ms": _milliseconds(drafting_s),
    }


def _milliseconds(time_s: float | None) -> float | None:
    return None if time_s is None or math.isinf(time_s) else round(time_s * 1e3, 3)
