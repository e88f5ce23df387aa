"""``edgespec plan``: which way of decoding suits a link, how many verifiers users need, and what
memory a draft would take.

All before anything is installed; the others stand in ``plan_capacity.py`` and ``plan_memory.py``.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edgespec.cli.running import EXIT_CODES, reported
from edgespec.config import ConfigError
from edgespec_sim.commands.plan_capacity import capacity
from edgespec_sim.commands.plan_memory import memory

if TYPE_CHECKING:
    from edgespec_sim.planning.plan_values import Mode, Plan

_LEGEND = (
    "Speed against cloud streaming; passes and wasted draft nodes a token; uplink with framing; the"
    " time a token that nothing of its kind can go below."
)

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


Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Texts and link of this one alone")]
Seeds = Annotated[
    int | None,
    typer.Option("--seeds", min=1, max=1000, help="So many; else as many as it takes"),
]
Within = Annotated[
    float,
    typer.Option("--within", min=0.1, max=100.0, help="Percent: how sure (95 %) speeds are"),
]
MaxSeconds = Annotated[
    float, typer.Option("--max-seconds", min=1.0, help="No further seed after so long")
]


@plan.command(epilog=EXIT_CODES)
def link(
    rtt_ms: Annotated[float, typer.Option("--rtt-ms", help="Round trip, 0 to 10000")] = 50.0,
    draft_ms: Annotated[float, typer.Option("--draft-ms", help="One draft step")] = 8.0,
    pass_ms: Annotated[float, typer.Option("--pass-ms", help="One pass of the target")] = 25.0,
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", help="Share of first guesses that are right, 0.01 to 0.99"),
    ] = 0.8,
    jitter_ms: Annotated[
        float, typer.Option("--jitter-ms", help="Mean extra delay of each direction")
    ] = 0.0,
    loss: Annotated[
        float, typer.Option("--loss", help="Share of packets sent again, 0 to 0.5")
    ] = 0.0,
    up_mbps: Annotated[float, typer.Option("--up-mbps", help="Uplink; 0: without limit")] = 0.0,
    tokens: Annotated[int, typer.Option("--tokens", help="Length of each text played")] = 400,
    local_tpot_ms: Annotated[
        float | None,
        typer.Option("--local-tpot-ms", help="The draft model alone (default: --draft-ms)"),
    ] = None,
    seed: Seed = None,
    seeds: Seeds = None,
    within: Within = 5.0,
    max_seconds: MaxSeconds = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Say which way of decoding suits a link, and why.

    Plays every way in virtual time: nothing is connected, loaded or measured. Seeds are played
    until every speed is known within 5 %, or the time is up.

    [dim]edgespec plan link --rtt-ms 120 --draft-ms 12 --pass-ms 30 --acceptance 0.7[/]
    """
    with reported():
        from edgespec_sim.commands.plan_seeds import plan_many
        from edgespec_sim.planning.plan_values import PlanSettings

        try:
            settings = PlanSettings(
                rtt_ms=rtt_ms,
                draft_ms=draft_ms,
                pass_ms=pass_ms,
                acceptance=acceptance,
                jitter_ms=jitter_ms,
                loss=loss,
                up_mbps=up_mbps,
                tokens=tokens,
                local_tpot_ms=local_tpot_ms,
                seed=seed or 0,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from None
        count = 1 if seed is not None and seeds is None else seeds
        found = plan_many(settings, count, within / 100.0, max_seconds)
    if as_json:
        typer.echo(json.dumps(_plain(found), indent=2))
    else:
        _show(found)


def _show(found: Plan) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("way of decoding", no_wrap=True)
    for heading in ("ms/token", "speed", "passes", "wasted", "kbit/s", "bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for mode in found.modes:
        best = mode is found.best
        table.add_row(*_row(mode), style="bold" if best else None)
    console.print(table)
    console.print(f"* not the target's text. {_LEGEND}", style="dim")
    console.print(f"\n[bold]take:[/] {found.best.title}")
    console.print(found.reason)
    for line in _break_even(found):
        console.print(line)
    console.print(f"texts: {found.source}; {found.acceptance:.1%} in those played", style="dim")
    console.print(_how_sure(found), style="dim")


def _how_sure(found: Plan) -> str:
    if found.half_width is None:
        return "one seed: nobody knows how sure these speeds are"
    return (
        f"{found.seeds} seeds; ± is the 95 % interval of the speed (delta method), the widest"
        f" {found.half_width:.1%}"
    )


def _row(mode: Mode) -> tuple[str, ...]:
    sure = ""
    if mode.speed_up_interval is not None:
        half = max(abs(end - mode.speed_up) for end in mode.speed_up_interval)
        sure = f" ±{half:.2f}"
    times = f"{mode.tpot_s * 1e3:.1f}", f"{mode.speed_up:.2f}x{sure}"
    if mode.bound_s is None:
        return (f"{mode.title} *", *times, "-", "-", "-", "-")
    return (
        mode.title,
        *times,
        f"{mode.passes:.2f}",
        f"{mode.wasted:.2f}",
        f"{mode.up_bits_per_s / 1e3:.1f}",
        f"{mode.bound_s * 1e3:.1f}",
    )


def _break_even(found: Plan) -> list[str]:
    waiting_s, drafting_s = found.waiting_pays_below_s, found.drafting_pays_below_s
    lines = []
    if waiting_s is None:
        lines.append("Stop-and-wait is slower than cloud streaming at any round trip.")
    else:
        lines.append(
            "Stop-and-wait is as fast as cloud streaming at a round trip of"
            f" {waiting_s * 1e3:.0f} ms."
        )
    if drafting_s is not None and not math.isinf(drafting_s):
        lines.append(f"Beyond {drafting_s * 1e3:.0f} ms no policy can gain 3 % with these drafts.")
    return lines


def _plain(found: Plan) -> dict[str, Any]:
    """JSON has no infinity: "at any round trip" is null with ``drafting_can_pay`` true."""
    drafting_s = found.drafting_pays_below_s
    modes = [
        {
            "name": mode.name.value,
            "detail": mode.detail,
            "exact": mode.bound_s is not None,
            "tpot_ms": round(mode.tpot_s * 1e3, 3),
            "speed_up": round(mode.speed_up, 4),
            "speed_up_interval": None
            if mode.speed_up_interval is None
            else [round(end, 4) for end in mode.speed_up_interval],
            "passes_per_token": round(mode.passes, 4),
            "wasted_per_token": round(mode.wasted, 4),
            "up_kbit_per_s": round(mode.up_bits_per_s / 1e3, 3),
            "bound_ms": _milliseconds(mode.bound_s),
        }
        for mode in found.modes
    ]
    return {
        "settings": asdict(found.settings),
        "source": found.source,
        "acceptance": found.acceptance,
        "seeds": found.seeds,
        "modes": modes,
        "take": found.best.title,
        "reason": found.reason,
        "waiting_pays_below_ms": _milliseconds(found.waiting_pays_below_s),
        "drafting_can_pay": drafting_s is not None,
        "drafting_pays_below_ms": _milliseconds(drafting_s),
    }


def _milliseconds(time_s: float | None) -> float | None:
    return None if time_s is None or math.isinf(time_s) else round(time_s * 1e3, 3)
