"""`edgespec profile`: what steps, passes and messages cost here, for the simulator.

Composes what ``edgespec.bench`` runs: the verifier as a child process and the drafter here,
both traced, gRPC on loopback between them.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from edgespec.bench.measurement import LentDrafter
from edgespec.bench.profile_fit import (
    FitRow,
    fit_profile,
    fit_rows,
    read_lines,
    run_workloads,
    samples_of,
    workloads,
    worth,
)
from edgespec.bench.prompts import DEFAULT_PROMPTS
from edgespec.bench.report import BenchProgress, machine, versions
from edgespec.cli.running import reported, run
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, ConfigError, DraftSection
from edgespec.core.ports import Drafter
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect, load_drafter, load_tokenizer, tokenizer_reference
from edgespec.telemetry.cost_profile import CostProfile
from edgespec.telemetry.trace import TraceFile

DEVICE_TRACE, VERIFIER_TRACE = "device.jsonl", "verifier.jsonl"


def profile(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where the profile goes")
    ] = Path("profile.json"),
    model: Annotated[
        str,
        typer.Option(envvar="EDGESPEC_MODEL", show_envvar=False, help="Target, as of a verifier"),
    ] = "bundled",
    draft: Annotated[
        str,
        typer.Option(envvar="EDGESPEC_DRAFT", show_envvar=False, help="Draft, as of a device"),
    ] = "bundled",
    pass_ms: Annotated[
        float, typer.Option(help="Emulate a slower target: time of a pass; 0: as it is")
    ] = 0.0,
    draft_ms: Annotated[
        float, typer.Option(help="Emulate a slower draft: time of a step; 0: as it is")
    ] = 0.0,
    quick: Annotated[bool, typer.Option("--quick", help="Faster: less of everything")] = False,
) -> None:
    """Measure draft steps, target passes and messages, and write what they cost as a profile.

    Runs the real models over a real connection on this machine, under a minute for the bundled
    pair. The simulator replays a profile on any number of devices, links and verifiers.
    """
    with reported():
        if out.is_dir():
            raise ConfigError(f"out is {str(out)!r}, which is a folder, but must be a file")
        stderr = Console(stderr=True)
        drafter = load_drafter(AgentConfig(draft=DraftSection(model=draft, draft_ms=draft_ms)))
        if drafter is None:
            raise ConfigError(f"draft is {draft!r}, but a profile needs one that drafts")
        arguments = ["--model", model, "--pass-ms", f"{pass_ms:g}"]
        with tempfile.TemporaryDirectory() as folder:
            traces = Path(folder)
            try:
                run(_measure(drafter, draft, arguments, traces, quick, stderr))
            finally:
                drafter.close()
            name = f"{draft} drafting for {model}"
            _write(traces / DEVICE_TRACE, traces / VERIFIER_TRACE, out, name, stderr)


async def _measure(
    drafter: Drafter,
    draft: str,
    arguments: list[str],
    traces: Path,
    quick: bool,
    stderr: Console,
) -> None:
    tokenizer = load_tokenizer(tokenizer_reference(AgentConfig(draft=DraftSection(model=draft))))
    text = [token for prompt in DEFAULT_PROMPTS for token in tokenizer.encode(prompt.text)]
    arguments = [*arguments, PLAIN_STREAMING, f"--set=trace={traces / VERIFIER_TRACE}"]
    plan = workloads(quick)
    with (
        BenchProgress(stderr, sum(worth(one) for one in plan)) as progress,
        TraceFile(traces / DEVICE_TRACE) as tracer,
    ):
        async with verifier_process(arguments) as (address, _):

            def open_agent(options: AgentOptions, *, drafts: bool) -> Agent:
                lent = LentDrafter(drafter) if drafts else None
                transport = connect(address)
                encode, stream = tokenizer.encode, tokenizer.stream
                return Agent(transport, lent, encode, stream, options, tracer=tracer)

            probe = connect(address)
            try:
                context_length = (await probe.info()).model.context_length
            finally:
                await probe.close()
            fits = min(context_length, drafter.info.context_length)
            await run_workloads(plan, text, fits, open_agent, progress)


def _write(device: Path, verifier: Path, out: Path, name: str, stderr: Console) -> None:
    """Fit, write and show. Raises ``ProfileError``, ``OSError``."""
    samples = samples_of(read_lines(device), read_lines(verifier))
    here = machine()
    about = {
        "machine": f"{here['processor']}, {here['cpu_count']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "command": shlex.join(("edgespec", *sys.argv[1:])),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    found = fit_profile(samples, name, about)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json(), encoding="utf-8")
    rows = fit_rows(samples, found)
    stdout = Console(width=None if sys.stdout.isatty() else 100)
    stdout.print(_table(rows))
    for line in _words(found, rows):
        stdout.print(line, markup=False, highlight=False)
    stderr.print(f"written: {out}", markup=False, highlight=False, soft_wrap=True)


def _table(rows: list[FitRow]) -> Table:
    table = Table(title="medians", title_style="", box=box.SIMPLE_HEAD)
    for name in ("law", "rows", "samples", "measured ms", "fitted ms", "error"):
        table.add_column(name, justify="left" if name == "law" else "right", no_wrap=True)
    last = ""
    for row in rows:
        if last and row.law != last:
            table.add_section()
        table.add_row(
            row.law if row.law != last else "",
            str(row.rows),
            str(row.count),
            f"{row.measured_s * 1e3:.3f}",
            f"{row.fitted_s * 1e3:.3f}",
            f"{row.error:.1%}",
        )
        last = row.law
    return table


def _words(found: CostProfile, rows: list[FitRow]) -> list[str]:
    words = [
        f"a cached token adds {found.draft_step.context_s * 1e6:.2f} us to a draft step and"
        f" {found.target_pass.context_s * 1e6:.2f} us to a pass, a further session"
        f" {found.target_pass.session_s * 1e3:.2f} ms to a pass",
        f"a stream opens in {found.connect_s * 1e3:.2f} ms, beside its messages",
    ]
    for law in ("draft step", "target pass"):  # a message has one row, and its median by itself
        mine = [row for row in rows if row.law == law]
        mean = sum(row.error * row.count for row in mine) / sum(row.count for row in mine)
        worst = max(mine, key=lambda row: row.error)
        words.append(
            f"{law}: medians fitted to {mean:.1%} on average over its samples,"
            f" at worst {worst.error:.1%} ({worst.rows} rows, {worst.count} samples)"
        )
    return words
