"""``edgespec plan capacity``: how many verifiers, and which arm, keep what was promised."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edgespec.bench.arms import Arm
from edgespec.cli.running import reported, say
from edgespec.config import ConfigError

if TYPE_CHECKING:
    from edgespec_sim.planning.capacity import ArmPlan, CapacityPlan, CapacityQuestion, Observed
    from edgespec_sim.scenario.sections import Scenario
    from edgespec_sim.world.assembly import WorldOutcome
    from edgespec_sim.world.run import Job

_ARMS = "target-only,edgespec"
_LINK = "network"
_LINES_EVERY_S = 10.0
"""Of progress, where there is no terminal."""


def capacity(
    users: Annotated[
        int | None, typer.Option("--users", min=1, help="Who ask, read, think and ask again")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second instead, whoever asks them")
    ] = None,
    ttft_p95: Annotated[
        float | None,
        typer.Option("--ttft-p95", metavar="MS", help="95 % of the requests begin within so long"),
    ] = None,
    tpot_p95: Annotated[
        float | None,
        typer.Option("--tpot-p95", metavar="MS", help="95 % take at most so long a token"),
    ] = None,
    gpu: Annotated[str, typer.Option("--gpu", help="h200, h100, a100-80g, rtx-4090")] = "h200",
    model: Annotated[
        str, typer.Option("--model", help="Its pass on the GPU is computed from data sheets")
    ] = "llama-3.1-70b-fp8",
    pass_profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Measured passes (`edgespec profile`)"),
    ] = None,
    cost_per_hour: Annotated[
        float | None, typer.Option("--cost-per-hour", min=0.0, help="Of one verifier, in $")
    ] = None,
    rtt_ms: Annotated[
        float | None, typer.Option("--rtt-ms", help="Round trip of all users")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option("--link", help="wifi, lte, 5g, starlink, broadband, wan, or a trace file"),
    ] = None,
    arms: Annotated[str, typer.Option("--arms", help="Ways of decoding to choose from")] = _ARMS,
    scenario: Annotated[
        str, typer.Option("--scenario", help="Where users, links and drafts are taken from")
    ] = "laptop-floor",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of it")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="The first one")] = 1,
    max_seconds: Annotated[
        float,
        typer.Option("--max-seconds", min=1.0, help="Play no events after so long"),
    ] = 60.0,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Side by side \\[default: all cores]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Say how many verifiers keep objectives of service, with which arm, at what cost an hour.

    The averages of small worlds name a number (mean field); that number and one below are then
    played event by event with the product's own sessions. Nothing is connected or loaded.

    [bold]Users who think[/]   edgespec plan capacity --users 200 --tpot-p95 40 --ttft-p95 1000

    [bold]Requests a second[/] edgespec plan capacity --rate 12 --tpot-p95 40 --gpu h100

    [bold]Other users[/]       edgespec plan capacity --users 500 --tpot-p95 30 --link lte
    --set devices.laptop.workload.think_s=60 --set tokens.acceptance=0.7

    An objective that no number of verifiers keeps is answered with the term that forbids it.
    """
    with reported():
        began_s = time.monotonic()
        try:
            price, source = _price(gpu, cost_per_hour)
            question = _question(
                _scenario(scenario, settings, users, gpu, model, pass_profile, rtt_ms, link),
                rate, ttft_p95, tpot_p95, _arms(arms), users, scenario, seed,
            )  # fmt: skip
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from None
        found = _search(question, processes, began_s, max_seconds)
        took_s = time.monotonic() - began_s
    if as_json:
        typer.echo(json.dumps(_plain(question, found, price, source, took_s), indent=2))
    else:
        _show(question, found, gpu, price, source)
        say(f"answered in {took_s:.0f} s")


# --- the question ---------------------------------------------------------------------------


def _arms(names: str) -> tuple[Arm, ...]:
    known = {arm.value: arm for arm in Arm}
    found = []
    for name in (part.strip() for part in names.split(",")):
        if name not in known:
            raise ValueError(f"arms has {name!r}, but must be of {', '.join(known)}")
        found.append(known[name])
    return tuple(dict.fromkeys(found))


def _price(gpu: str, given: float | None) -> tuple[float, str]:
    from edgespec_sim.planning.capacity import gpu_named

    known = gpu_named(gpu)
    if given is not None:
        return given, "--cost-per-hour"
    return known.price_per_hour, f"{known.source}, {known.date}"


def _scenario(
    name: str,
    settings: Sequence[str] | None,
    users: int | None,
    gpu: str,
    model: str,
    profile: Path | None,
    rtt_ms: float | None,
    link: str | None,
) -> Scenario:
    """The scenario with the users, the links and the verifier that were asked for."""
    from edgespec_sim.commands.simulate import parse_settings
    from edgespec_sim.planning.capacity import sessions_that_fit
    from edgespec_sim.planning.mean_field import dealt
    from edgespec_sim.scenario.sections import CostSection, load_scenario

    loaded = load_scenario(name, parse_settings(settings or ()))
    devices = dict(loaded.devices)
    if users is not None:
        counts = dealt({group: float(one.count) for group, one in devices.items()}, users)
        devices = {group: replace(devices[group], count=count) for group, count in counts.items()}
    links = dict(loaded.links)
    if rtt_ms is not None or link is not None:
        links = {_LINK: _link(rtt_ms, link)}
        devices = {group: replace(one, path=(_LINK,)) for group, one in devices.items()}
    lengths = [
        (one.workload.prompt_tokens + one.workload.output_tokens)
        * math.sqrt(1.0 + one.workload.length_spread**2)
        for one in devices.values()
    ]
    most = sessions_that_fit(model, gpu, max(lengths))
    if profile is None:
        passes = CostSection(roofline=f"{model}@{gpu}")
    else:
        passes = CostSection(profile=str(profile.absolute()))
    verifiers = {
        kind: replace(one, count=1, pass_time=passes, max_sessions=most)
        for kind, one in loaded.verifiers.items()
    }
    return replace(
        loaded, shards=1, arrivals=None, devices=devices, links=links, verifiers=verifiers
    )


def _link(rtt_ms: float | None, link: str | None) -> Any:
    from edgespec_sim.scenario.network import LinkSection

    if link is None:
        return LinkSection(rtt_ms=rtt_ms or 0.0)
    trace = link if Path(link).is_file() else f"generate:{link}"
    # Users do not all see the same weather.
    return LinkSection(trace=trace, rtt_ms=rtt_ms or 0.0, trace_spread_s=7.0)


def _question(
    of: Scenario,
    rate: float | None,
    ttft_p95: float | None,
    tpot_p95: float | None,
    arms: tuple[Arm, ...],
    users: int | None,
    scenario: str,
    seed: int,
) -> CapacityQuestion:
    from edgespec_sim.planning.capacity import CapacityQuestion
    from edgespec_sim.scenario.sections import SloSection, scenario_path
    from edgespec_sim.world.run import check

    if (rate is None) == (users is None):
        said = "both" if rate is not None else "neither"
        raise ValueError(f"give --users or --rate: {said} of them is given")
    folder = scenario_path(scenario).parent
    check(replace(of, arms=arms), folder)
    return CapacityQuestion(of, SloSection(ttft_p95, tpot_p95), arms, folder, seed, rate)


def _search(
    question: CapacityQuestion, processes: int | None, began_s: float, max_seconds: float
) -> CapacityPlan:
    from edgespec_sim.commands.pool import Task, Workers, default_processes
    from edgespec_sim.planning.capacity import CapacityPlanner, confirm

    ends_s: list[float] = []
    cores = processes or default_processes()
    with Workers(cores, lines_every_s=_LINES_EVERY_S) as workers:

        def played(doing: str, jobs: Sequence[Job], until_s: float) -> list[WorldOutcome]:
            tasks = [Task(doing, job) for job in jobs]
            outcomes = dict(workers.play(tasks, doing, until_s))
            return [outcomes[index] for index in range(len(tasks))]

        def averages(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
            """However long they take: without them there is no answer."""
            return played(doing, jobs, math.inf)

        def events(doing: str, jobs: Sequence[Job]) -> list[WorldOutcome]:
            return played(doing, jobs, began_s + max_seconds)

        def more(rounds: int) -> bool:
            """Whether another round, as long as those before it, ends in time."""
            ends_s.append(time.monotonic())
            round_s = (ends_s[-1] - ends_s[0]) / rounds if rounds else 0.0
            return not rounds or ends_s[-1] + round_s - began_s <= max_seconds

        planner = CapacityPlanner(question, averages)
        arms = planner.by_mean_field()
        return confirm(planner, question, arms, events, more, at_once=cores)


# --- the answer -----------------------------------------------------------------------------


def _show(
    question: CapacityQuestion, found: CapacityPlan, gpu: str, price: float, source: str
) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table(box=None, pad_edge=False)
    for name in ("arm", gpu.upper(), "TTFT p95 ms", "TPOT p95 ms", "busy", "$/h", "by"):
        table.add_column(name, justify="left" if name in ("arm", "by") else "right", no_wrap=True)
    for one in found.arms:
        table.add_row(*_predicted_row(one, price))
    for observed in found.observed.values():
        best = observed.verifiers == found.verifiers
        assert found.arm is not None
        table.add_row(*_observed_row(found.arm, observed, price), style="bold" if best else None)
    console.print(table)
    console.print("in brackets: 95 % intervals; events: requests that counted", style="dim")
    for one in found.arms:
        if one.why:
            console.print(f"\n{one.arm.value}: {one.why}", soft_wrap=True)
    if found.arm is None:
        console.print("\n[bold]take:[/] nothing: no number of verifiers meets the objectives")
        return
    low, high = found.interval
    sure = f"95 %: {low}" if low == high else f"95 %: {low} to {high}"
    console.print(
        f"\n[bold]take:[/] {found.arm.value} on {found.verifiers} {gpu.upper()} ({sure}),"
        f" ${found.verifiers * price:.2f} an hour"
    )
    console.print(_because(question, found), soft_wrap=True)
    console.print(f"${price:.2f} a GPU and hour: {source}", style="dim", soft_wrap=True)
    console.print(f"passes: {_passes(question)}", style="dim", soft_wrap=True)


def _passes(question: CapacityQuestion) -> str:
    from edgespec_sim.scenario.verifiers import measured

    return measured(question.scenario.verifiers[question.kind].pass_time)


def _predicted_row(one: ArmPlan, price: float) -> tuple[str, ...]:
    assert one.predicted is not None
    found = one.predicted
    count = "none" if one.verifiers is None else str(one.verifiers)
    cost = "-" if one.verifiers is None else f"{one.verifiers * price:.2f}"
    by = "a verifier a request" if one.verifiers is None else "mean field"
    ttft, tpot = f"{1e3 * found.ttft_p95_s:.0f}", f"{1e3 * found.tpot_p95_s:.1f}"
    return one.arm.value, count, ttft, tpot, f"{found.utilisation:.0%}", cost, by


def _observed_row(arm: Arm, one: Observed, price: float) -> tuple[str, ...]:
    part = "" if one.played == one.verifiers else f" at {one.played} of them"
    return (
        arm.value,
        str(one.verifiers),
        _triple(one.ttft_p95_s, 0),
        _triple(one.tpot_p95_s, 1),
        f"{one.utilisation:.0%}",
        f"{one.verifiers * price:.2f}",
        f"events, {one.requests}{part}",
    )


def _triple(found: tuple[float, float, float], digits: int) -> str:
    value, low, high = ("never" if math.isinf(one) else f"{1e3 * one:.{digits}f}" for one in found)
    return f"{value} ({low}-{high})"


def _because(question: CapacityQuestion, found: CapacityPlan) -> str:
    """One or two sentences: what decided."""
    if not found.confirmed:
        return f"not confirmed: {found.why_not}; --max-seconds gives it more"
    mine, below = found.observed[found.verifiers], found.observed.get(found.verifiers - 1)
    sure = "" if mine.meets.decided else ", though an interval reaches beyond them"
    verb = "meets" if found.verifiers == 1 else "meet"
    text = f"{found.verifiers} {verb} the objectives{sure}"
    if below is None:
        return f"{text}, and fewer there are not"
    missed = [
        f"{name} p95 {1e3 * triple[0]:.{digits}f} ms"
        for name, triple, limit_s, digits in (
            ("TTFT", below.ttft_p95_s, question.slo.ttft_s, 0),
            ("TPOT", below.tpot_p95_s, question.slo.tpot_s, 1),
        )
        if triple[0] > limit_s
    ]
    sure = "" if below.meets.decided else ", which the interval does not rule out"
    return f"{text}; {below.verifiers} would have a {' and a '.join(missed)}{sure}"


def _plain(
    question: CapacityQuestion, found: CapacityPlan, price: float, source: str, took_s: float
) -> dict[str, Any]:
    """JSON has no infinity: "never" is null."""
    return {
        "users": question.users if question.rate is None else None,
        "rate": question.rate,
        "ttft_p95_ms": question.slo.ttft_p95_ms,
        "tpot_p95_ms": question.slo.tpot_p95_ms,
        "take": None if found.arm is None else found.arm.value,
        "verifiers": found.verifiers if found.arm is not None else None,
        "verifiers_interval": list(found.interval) if found.arm is not None else None,
        "confirmed": found.confirmed,
        "why_not_confirmed": found.why_not,
        "cost_per_hour": round(found.verifiers * price, 4) if found.arm is not None else None,
        "price": {"per_verifier_and_hour": price, "source": source},
        "arms": [
            {
                "arm": one.arm.value,
                "verifiers": one.verifiers,
                "ttft_p95_ms": one.predicted and _milliseconds(one.predicted.ttft_p95_s),
                "tpot_p95_ms": one.predicted and _milliseconds(one.predicted.tpot_p95_s),
                "why": one.why,
            }
            for one in found.arms
        ],
        "events": [
            {
                "verifiers": one.verifiers,
                "played": one.played,
                "seeds": one.seeds,
                "requests": one.requests,
                "unfinished": one.unfinished,
                "ttft_p95_ms": [_milliseconds(end) for end in one.ttft_p95_s],
                "tpot_p95_ms": [_milliseconds(end) for end in one.tpot_p95_s],
                "utilisation": round(one.utilisation, 4),
                "meets": one.meets.value,
            }
            for one in found.observed.values()
        ],
        "seconds": round(took_s, 1),
    }


def _milliseconds(time_s: float) -> float | None:
    return None if math.isinf(time_s) else round(1e3 * time_s, 3)
