"""``edgespec demo``: the same outputs with and without drafts, over an emulated slow link.

A verifier runs in a process of its own, the device in this one. The bundled target alone would be
too fast to show an effect, so each pass takes the time of a large model's. Every statement about
speed says "emulated".
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from rich import box
from rich.console import Console
from rich.table import Table

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import Measurement, Row, row_of
from edgespec.cli.device import TextView, choose_verifier, legend, should_use_color, stream
from edgespec.cli.options import option
from edgespec.cli.running import reporting_errors, run, say, set_up_logging
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, DraftSection, LinkSection
from edgespec.config.common import SetupError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import NONE, build_agent, load_tokenizer, tokenizer_reference, with_port

PASS_MS, DRAFT_MS, RTT_MS, MAX_TOKENS = 25.0, 8.0, 50.0, 64
# A small model under greedy decoding soon repeats itself.
REPETITION_PENALTY = 1.15
ARMS = ("target only", "with drafts")
PROMPTS = (
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "# git commit\n\n> Commit files to the repository.\n",
    "It was a cold morning in November, and the old man",
)


_PROMPT = option("Prompt to continue instead of the built-in ones; may be repeated", "--prompt")
_RTT_MS = option("Milliseconds of round trip of the emulated link", "--rtt-ms", panel="Emulation")
_MODEL = option(
    "Target model: a folder, a Hub id or bundled",
    "--model",
    metavar="MODEL",
    envvar="EDGESPEC_MODEL",
)
_DRAFT = option(
    "Draft model: a folder, a Hub id, bundled or lookup",
    "--draft",
    metavar="MODEL",
    envvar="EDGESPEC_DRAFT",
)


def demo(
    prompt: Annotated[list[str] | None, _PROMPT] = None,
    rtt_ms: Annotated[float, _RTT_MS] = RTT_MS,
    model: Annotated[str, _MODEL] = "bundled",
    draft: Annotated[str, _DRAFT] = "bundled",
) -> None:
    """Show the same outputs with and without drafts, all on this machine.

    Starts a verifier and a device with a slow link between them. Takes under a minute and needs no
    download. The durations of passes and draft steps are emulated, so that this machine behaves
    like a device with a large model behind a link; the tokens are real.

    [dim]edgespec demo --rtt-ms 150[/]
    """
    with reporting_errors():
        set_up_logging("error")
        config = AgentConfig(
            draft=DraftSection(model=draft, draft_ms=DRAFT_MS),
            link=LinkSection(rtt_ms=rtt_ms),
            sampling=SamplingParams(repetition_penalty=REPETITION_PENALTY, max_tokens=MAX_TOKENS),
        )
        styled = should_use_color()
        console = Console(force_terminal=styled or None, no_color=not styled, highlight=False)
        run(_demo(config, model, prompt or PROMPTS, console, styled))


async def _demo(
    config: AgentConfig, model: str, prompts: Sequence[str], console: Console, color: bool
) -> None:
    load_tokenizer(tokenizer_reference(config))  # a missing model is reported before the start
    console.print(
        f"emulated: round trip {config.link.rtt_ms:g} ms · target pass {PASS_MS:g} ms ·"
        f" draft step {DRAFT_MS:g} ms",
        soft_wrap=True,
    )
    if color:
        console.print(legend())
    console.print("starting a verifier ...", style="dim")
    arguments = ["--model", model, "--pass-ms", str(PASS_MS), PLAIN_STREAMING]
    async with verifier_process(arguments) as (address, serves):
        console.print(f"verifier on {with_port(address)}: {serves}", style="dim")
        config = replace(config, verifier=address)
        config, _ = await choose_verifier(config)
        plain, drafted = list[Measurement](), list[Measurement]()
        plain_config = replace(
            config, draft=DraftSection(model=NONE), tokenizer=tokenizer_reference(config)
        )
        async with build_agent(plain_config) as streaming, build_agent(config, say=say) as drafting:
            for text in prompts:
                arms = ((ARMS[0], streaming, plain), (ARMS[1], drafting, drafted))
                for name, agent, done in arms:
                    console.rule(f"[bold]{name}[/]", align="left", style="dim")
                    console.print(text, end="", style="dim", soft_wrap=True, markup=False)
                    sys.stdout.flush()
                    generation = agent.generate(text, config.sampling)
                    progress = await stream(generation, TextView(color))
                    assert agent.stats is not None
                    times_s, counters = tuple(progress.times_s), agent.stats.counters
                    done.append(Measurement(tuple(progress.tokens), times_s, counters))
    print_report(console, plain, drafted)


def print_report(
    console: Console, plain: Sequence[Measurement], drafted: Sequence[Measurement]
) -> None:
    """Print the numbers, with one column per arm so that 40 columns suffice, and whether the tokens
    are the same. Raises ``SetupError`` if they are not."""
    console.rule(style="dim")
    console.print("same prompts, same link, emulated pass time", style="italic")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for name in ARMS:
        table.add_column(name, justify="right")
    texts = [one.tokens for one in plain]
    arms = (Arm.TARGET_ONLY, plain), (Arm.EDGESPEC, drafted)
    base, row = (row_of(arm, 0.0, 0, done, texts, {}) for arm, done in arms)
    names = ("tokens", "ms/token", "speed-up", "passes/token", "acceptance")
    for name, *values in zip(names, _column(base, base), _column(row, base), strict=True):
        table.add_row(name, *values)
    console.print(table)
    count, are_same = sum(len(one.tokens) for one in drafted), not row["mismatches"]
    console.print(f"token for token the same: {'yes' if are_same else 'NO'} ({count} tokens)")
    if not are_same:
        raise SetupError(
            "drafts changed the output, which must never happen in canonical mode; please report"
            " this as a bug"
        )


def _column(row: Row, base: Row) -> tuple[str, ...]:
    ms, base_ms = row["tpot_ms_p50"] or 0.0, base["tpot_ms_p50"] or 0.0
    return (
        str(row["tokens"]),
        f"{ms:.1f}" if ms else "-",
        f"{base_ms / ms:.2f} x" if ms else "-",
        f"{row['passes_per_token']:.2f}" if row["tokens"] else "-",
        f"{row['acceptance']:.0%}" if row is not base else "-",
    )
