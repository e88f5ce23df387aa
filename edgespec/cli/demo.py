"""``edgespec demo``: a verifier process, a device, a slow link; the same text with and without
drafts, and what the drafts were worth.

The machine's own target would be too fast to show anything, so a pass is made to take the time of
a big one; everything said about speed is said with "emulated".
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
from edgespec.cli.device import TextView, greet, legend, stream, use_color
from edgespec.cli.options import option
from edgespec.cli.running import reported, run, say, set_up_logging
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, DraftSection, LinkSection
from edgespec.config.common import SetupError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import NONE, build_agent, load_tokenizer, tokenizer_reference, with_port

PASS_MS, DRAFT_MS, RTT_MS, MAX_TOKENS = 25.0, 8.0, 50.0, 64
# A small model under greedy decoding soon says the same thing again and again.
REPETITION_PENALTY = 1.15
ARMS = ("target only", "with drafts")
PROMPTS = (
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "# git commit\n\n> Commit files to the repository.\n",
    "It was a cold morning in November, and the old man",
)


_PROMPT = option("A text to go on with, as often as you like", "--prompt")


def demo(
    prompt: Annotated[list[str] | None, _PROMPT] = None,
    rtt_ms: Annotated[float, option("Round trip of the link", "--rtt-ms")] = RTT_MS,
    model: Annotated[str, option("The target", "--model", envvar="EDGESPEC_MODEL")] = "bundled",
    draft: Annotated[str, option("The draft", "--draft", envvar="EDGESPEC_DRAFT")] = "bundled",
) -> None:
    """Watch drafts at work: verifier, device and a slow link, all on this machine.

    Takes under a minute and needs no download. The times of a pass and of a draft step are
    emulated, so that the machine behaves like a device and a big model; the tokens are real.

    [dim]edgespec demo --rtt-ms 150[/]
    """
    with reported():
        set_up_logging("error")
        config = AgentConfig(
            draft=DraftSection(model=draft, draft_ms=DRAFT_MS),
            link=LinkSection(rtt_ms=rtt_ms),
            sampling=SamplingParams(repetition_penalty=REPETITION_PENALTY, max_tokens=MAX_TOKENS),
        )
        styled = use_color()
        console = Console(force_terminal=styled or None, no_color=not styled, highlight=False)
        run(_demo(config, model, prompt or PROMPTS, console, styled))


async def _demo(
    config: AgentConfig, model: str, prompts: Sequence[str], console: Console, color: bool
) -> None:
    load_tokenizer(tokenizer_reference(config))  # a missing model shows before anything starts
    console.print(
        f"link {config.link.rtt_ms:g} ms · target pass {PASS_MS:g} ms (emulated pass time) ·"
        f" draft step {DRAFT_MS:g} ms (emulated)",
        soft_wrap=True,
    )
    if color:
        console.print(legend())
    console.print("starting a verifier ...", style="dim")
    arguments = ["--model", model, "--pass-ms", str(PASS_MS), PLAIN_STREAMING]
    async with verifier_process(arguments) as (address, serves):
        console.print(f"verifier on {with_port(address)}: {serves}", style="dim")
        config = replace(config, verifier=address)
        config, _ = await greet(config)
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
    report(console, plain, drafted)


def report(console: Console, plain: Sequence[Measurement], drafted: Sequence[Measurement]) -> None:
    """Print the numbers, a column an arm so that they fit on 40 columns, and whether the text is
    the same. Raises ``SetupError`` when it is not."""
    console.rule(style="dim")
    console.print("the same prompts, the same link, emulated pass time", style="italic")
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
    count, same = sum(len(one.tokens) for one in drafted), not row["mismatches"]
    console.print(f"token for token the same: {'yes' if same else 'NO'} ({count} tokens)")
    if not same:
        raise SetupError(
            "drafts changed the text; that must never happen in canonical mode: please report it"
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
