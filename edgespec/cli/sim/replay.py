"""``edgespec-sim replay``: one device behind a recorded network, with recorded agreement."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import reported, say
from edgespec.cli.sim.pool import default_processes
from edgespec.cli.sim.simulate import SUMMARY, TRACE, show, simulate
from edgespec.report.write import write_report
from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.scenario.sections import (
    CostSection,
    DeviceSection,
    Scenario,
    TokensFrom,
    TokensSection,
    VerifierSection,
    WorkloadSection,
)


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
    seconds: Annotated[float, typer.Option(min=1.0, help="How long, in virtual time")] = 60.0,
    seed: Annotated[int, typer.Option()] = 1,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a report there")] = None,
) -> None:
    """Replay a network trace with a match tape, on every arm.

    The tape says where a real draft model agreed with a real target, so the same tokens are
    accepted and rejected as were; the trace says what the network did.

    edgespec-sim replay generate:lte --out runs/lte

    edgespec-sim replay ride.ping.txt --tape mine.tape.jsonl --profile mine.json
    """
    with reported():
        given = CostSection(profile=str(Path(profile).resolve())) if profile else None
        scenario = Scenario(
            name="replay",
            about=f"One device on {trace}, tokens of {tape}.",
            duration_s=seconds,
            tokens=TokensSection(source=TokensFrom.TAPE, tape=tape),
            links={"trace": LinkSection(trace=trace, rtt_ms=extra_rtt_ms)},
            devices={
                "device": DeviceSection(
                    path=("trace",),
                    draft=given or CostSection(ms=draft_ms),
                    workload=WorkloadSection(
                        prompt_tokens=0, output_tokens=4096, think_s=0.5, start_within_s=0.0
                    ),
                )
            },
            verifiers={"verifier": VerifierSection(pass_time=given or CostSection(ms=pass_ms))},
        )
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        target = None if out is None else out / TRACE
        summary = simulate(scenario, seed, Path.cwd(), default_processes(), target)
        summary = replace(summary, name=f"replay of {trace}")
        show(summary)
        if out is not None:
            (out / SUMMARY).write_text(summary.to_json(), encoding="utf-8")
            for written in write_report(out):
                say(f"wrote {written}")
