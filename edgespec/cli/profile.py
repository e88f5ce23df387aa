"""`edgespec profile`: what steps, passes and messages cost here, for the simulator.

Composes what ``edgespec.bench`` runs: the verifier as a child process and the drafter here,
both traced, gRPC on loopback between them.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from edgespec.bench.measurement import LentDrafter
from edgespec.bench.profile_fit import (
    fit_errors,
    fit_profile,
    read_lines,
    run_workloads,
    samples_of,
    workloads,
)
from edgespec.bench.prompts import DEFAULT_PROMPTS
from edgespec.bench.report import BenchProgress, origin
from edgespec.cli.bench import served
from edgespec.cli.running import reported, run
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, ConfigError, DraftSection
from edgespec.core.ports import Drafter
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect, load_drafter, load_tokenizer, tokenizer_reference
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
        BenchProgress(stderr) as progress,
        TraceFile(traces / DEVICE_TRACE) as tracer,
    ):
        async with verifier_process(arguments) as (address, _):

            def open_agent(options: AgentOptions, *, drafts: bool) -> Agent:
                lent = LentDrafter(drafter) if drafts else None
                transport = connect(address)
                encode, stream = tokenizer.encode, tokenizer.stream
                return Agent(transport, lent, encode, stream, options, tracer=tracer)

            context_length = (await served(address)).context_length
            fits = min(context_length, drafter.info.context_length)
            await run_workloads(plan, text, fits, open_agent, progress)


def _write(device: Path, verifier: Path, out: Path, name: str, stderr: Console) -> None:
    """Fit, write and show. Raises ``ProfileError``, ``OSError``."""
    samples = samples_of(read_lines(device), read_lines(verifier))
    found = fit_profile(samples, name, origin())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(found.to_json(), encoding="utf-8")
    steps, passes = found.draft_step, found.target_pass
    for what, law, mine in (
        ("draft step", steps, samples.draft_steps),
        ("target pass", passes, samples.passes),
    ):
        mean, worst = fit_errors(mine, law)
        typer.echo(
            f"{what}: {law.seconds(1) * 1e3:.2f} ms at one row and {law.context_s * 1e6:.2f} us for"
            f" each cached token; misses the medians of {len(mine)} samples by {mean:.1%} on"
            f" average, at worst by {worst:.1%}"
        )
    typer.echo(
        f"a further session adds {passes.session_s * 1e3:.2f} ms to a pass; a message takes"
        f" {found.message.seconds(1) * 1e3:.2f} ms, a stream opens in"
        f" {found.connect_s * 1e3:.2f} ms"
    )
    stderr.print(f"written: {out}", markup=False, highlight=False, soft_wrap=True)
