"""``edgespec-sim run``: one scenario, all arms, a report."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from edgespec.cli.running import reported, say
from edgespec.config.loading import dump_config
from edgespec.core.device.policy_names import DEFAULT_POLICY, PolicyName
from edgespec_sim.commands.pool import default_processes
from edgespec_sim.commands.simulate import (
    SECONDS,
    SUMMARY,
    TRACE,
    Ask,
    ForceOption,
    SeedOption,
    SeedsOption,
    TimeOption,
    WithinOption,
    output,
    parse_settings,
    show,
    simulate,
)
from edgespec_sim.planning.replication import WITHIN
from edgespec_sim.report import figures
from edgespec_sim.report.page import refuse_to_replace, report_on, write_report
from edgespec_sim.scenario.network import LinkSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
    bundled_scenarios,
    load_scenario,
    scenario_path,
)
from edgespec_sim.traces.formats import read_trace
from edgespec_sim.traces.generators import KINDS
from edgespec_sim.traces.network_trace import TraceError
from edgespec_sim.world.run import check


def run(
    scenario: Annotated[
        str, typer.Argument(help="A YAML file, or the name of a bundled scenario (see `list`)")
    ],
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    within: WithinOption = 100 * WITHIN,
    max_seconds: TimeOption = SECONDS,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write summary.json, trace.jsonl and report.html there"),
    ] = None,
    force: ForceOption = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, as links.wan.rtt_ms=80"),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option("--slo-ttft-p95", metavar="MS", help="95 % are to begin within so long"),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option("--slo-tpot-p95", metavar="MS", help="95 % are to take so long a token"),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Worlds side by side \\[default: all cores]")
    ] = None,
) -> None:
    """Play a scenario with every arm and compare them.

    The sessions, policies and schedulers are the product's own; only the clock is virtual. One seed
    is no result: unless --seed or --seeds says otherwise, seeds are played until every speed-up is
    known within 5 %, or the time is up.

    [bold]Examples[/]

    edgespec-sim run household --out runs/household

    edgespec-sim run household --seed 1

    edgespec-sim run laptop-floor --slo-ttft-p95 1000 --slo-tpot-p95 40 --set verifiers.h200.count=2

    edgespec-sim run single-device --set links.internet.rtt_ms=100 --set tokens.acceptance=0.6
    """
    with reported():
        path = scenario_path(scenario)
        objectives = {"slo.ttft_p95_ms": slo_ttft, "slo.tpot_p95_ms": slo_tpot}
        loaded = load_scenario(scenario, {**parse_settings(settings or ()), **objectives})
        if out is not None:
            if not force:
                refuse_to_replace(out)
            out.mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        trace = None if out is None else out / TRACE
        ask = Ask.of(seed, seeds, within, max_seconds)
        summary = simulate(loaded, ask, path.parent, processes or default_processes(), trace)
        took_s = time.monotonic() - started_s
        virtual_s = loaded.duration_s * len(loaded.arms) * summary.seeds
        show(summary)
        times = virtual_s / took_s
        say(f"{virtual_s:.0f} virtual seconds in {took_s:.1f} s ({times:.1f} times real time)")
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in write_report(out):
                say(f"wrote {written}")


# --- ``edgespec-sim list`` and ``scenario`` ----------------------------------------------------
# what there is to play, and every key of it.


def list_scenarios() -> None:
    """List the scenarios that come with the simulator."""
    with reported():
        table = Table()
        for name in ("scenario", "devices", "verifiers", "about"):
            table.add_column(name)
        for name, path in bundled_scenarios().items():
            scenario = load_scenario(str(path))
            devices = sum(section.count for section in scenario.devices.values())
            verifiers = sum(section.count for section in scenario.verifiers.values())
            table.add_row(name, f"{devices:,}", str(verifiers), scenario.about.strip())
        output().print(table)


def scenario(
    name: Annotated[str, typer.Argument(help="A YAML file, or the name of a bundled scenario")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key")
    ] = None,
) -> None:
    """Check a scenario and print every key of it, defaults too, as YAML.

    What `run` would refuse is refused here, in the same words: names of traces, tapes, profiles and
    policies too.

    edgespec-sim scenario household > mine.yaml
    """
    with reported():
        loaded = load_scenario(name, parse_settings(settings or ()))
        check(loaded, scenario_path(name).parent)
        typer.echo(dump_config(loaded), nl=False)


# --- ``edgespec-sim report`` -------------------------------------------------------------------
# pages and tables of a run that is over, simulated or real.


Runs = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN...",
        help="A run's folder, its summary.json, or one or two traces (device's, verifier's)",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", help="Where to write (default: beside the run)"),
]


def report(runs: Runs, out: Out = None, force: ForceOption = False) -> None:
    """Write the report of a run: a page, tables, and a timeline for ui.perfetto.dev.

    A trace is what --set trace=FILE wrote, of `edgespec generate`, `chat` or `verifier`. What a run
    left is never replaced by less: a trace in a run's folder gets a folder of its own there.

    [dim]edgespec-sim report runs/household[/]

    [dim]edgespec-sim report device.jsonl verifier.jsonl --out report[/]
    """
    with reported():
        for path in report_on(runs, out, force=force):
            size = path.stat().st_size
            say(
                f"wrote {path} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"wrote {path} ({size} B)"
            )


# --- ``edgespec-sim replay`` -------------------------------------------------------------------
# one device behind a recorded network, with recorded agreement.


GENERATED = "generate:"
GENERATED_S = 60.0
MOST_S = 3600.0
"""Of a trace, unless --seconds says more: an hour takes minutes, and ten days would take one."""


def replay(
    trace: Annotated[str, typer.Argument(help="A network trace, or generate:KIND")],
    tape: Annotated[
        str, typer.Option(help="A tape of `edgespec bench --record-tape`, or a bundled one")
    ] = "bundled-greedy",
    profile: Annotated[
        str | None, typer.Option(help="Times of `edgespec profile`; else the two below")
    ] = None,
    draft_ms: Annotated[float, typer.Option(min=0.0, help="A draft step")] = 8.0,
    pass_ms: Annotated[float, typer.Option(min=0.0, help="A pass of the target")] = 25.0,
    extra_rtt_ms: Annotated[
        float, typer.Option(min=0.0, help="On top of the trace: the way on to the verifier")
    ] = 0.0,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="How much, from the start \\[default: all up to an hour; generated: 60]",
        ),
    ] = None,
    policy: Annotated[
        PolicyName, typer.Option(help="By which the arm edgespec drafts")
    ] = DEFAULT_POLICY,
    seed: SeedOption = None,
    seeds: SeedsOption = None,
    within: WithinOption = 100 * WITHIN,
    max_seconds: TimeOption = SECONDS,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a report there")] = None,
    force: ForceOption = False,
) -> None:
    """Replay a network trace with a match tape, on every arm.

    The tape says where a real draft model agreed with a real target, so the same tokens are
    accepted and rejected as were; the trace says what the network did. Seeds deal the tape's texts
    out in another order each.

    edgespec-sim replay generate:lte --out runs/lte

    edgespec-sim replay ride.ping.txt --tape mine.tape.jsonl --profile mine.json
    """
    with reported():
        given = CostSection(profile=str(Path(profile).resolve())) if profile else None
        duration_s, part = _how_long(trace, seconds)
        say(part)
        scenario = _scenario(
            f"One device on {trace}, tokens of {tape}. {part}",
            duration_s,
            tape,
            LinkSection(trace=trace, rtt_ms=extra_rtt_ms),
            given or CostSection(ms=draft_ms),
            given or CostSection(ms=pass_ms),
            policy,
        )
        if out is not None:
            if not force:
                refuse_to_replace(out)
            out.mkdir(parents=True, exist_ok=True)
        target = None if out is None else out / TRACE
        ask = Ask.of(seed, seeds, within, max_seconds)
        summary = simulate(scenario, ask, Path.cwd(), default_processes(), target)
        summary = replace(summary, name=f"replay of {trace}")
        show(summary)
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in write_report(out):
                say(f"wrote {written}")


def _scenario(
    about: str,
    duration_s: float,
    tape: str,
    link: LinkSection,
    draft: CostSection,
    pass_time: CostSection,
    policy: PolicyName,
) -> Scenario:
    """One device that asks for the tape's texts, one after another."""
    workload = WorkloadSection(prompt_tokens=0, output_tokens=4096, think_s=0.5, start_within_s=0.0)
    device = DeviceSection(path=("trace",), draft=draft, workload=workload, policy=policy)
    return Scenario(
        name="replay",
        about=about,
        duration_s=duration_s,
        tokens=TokensSection(source=TokensFrom.TAPE, tape=tape),
        links={"trace": link},
        devices={"device": device},
        verifiers={"verifier": VerifierSection(pass_time=pass_time)},
    )


def _how_long(trace: str, seconds: float | None) -> tuple[float, str]:
    """How long to play, and a sentence about it for the reader."""
    if trace.startswith(GENERATED):
        if (kind := trace.removeprefix(GENERATED)) not in KINDS:
            raise TraceError(f"no generator {kind!r}; known are {', '.join(KINDS)}")
        played_s = GENERATED_S if seconds is None else seconds
        return played_s, f"Played: {figures.duration(played_s)} of a generated network."
    whole_s = read_trace(Path(trace)).duration_s
    if seconds is None and whole_s > MOST_S:
        return MOST_S, (
            f"Played: the first {figures.duration(MOST_S)} of {figures.duration(whole_s)}, as more"
            " would take long; --seconds plays more."
        )
    if seconds is None or seconds == whole_s:
        return whole_s, f"Played: the whole trace, {figures.duration(whole_s)}."
    if seconds > whole_s:
        times = seconds / whole_s
        return seconds, f"Played: {figures.duration(seconds)}, the trace {times:.1f} times over."
    share = seconds / whole_s
    return seconds, (
        f"Played: the first {figures.duration(seconds)} of {figures.duration(whole_s)}"
        f" ({share:.1%}), as --seconds asked for."
    )
