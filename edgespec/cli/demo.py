"""``edgespec demo``: the same outputs with and without drafts, over an emulated slow link.

A verifier runs in a process of its own, the device in this one. If a real pair can be had, its
passes and draft steps take the time that they take, and only the link is emulated. The bundled toy
pair alone would be too fast to show an effect, so its passes and steps take the time of larger
models. Every statement about speed names what is real and what is emulated.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import Measurement, Row, row_of
from edgespec.cli.device import TextView, choose_verifier, make_legend, should_use_color, stream
from edgespec.cli.models import fetch_pair, in_mb, list_missing
from edgespec.cli.options import option
from edgespec.cli.running import reporting_errors, run, say, set_up_logging
from edgespec.cli.verifier import PLAIN_STREAMING, check_runs_verifiers, verifier_process
from edgespec.config import AgentConfig, DraftSection, LinkSection
from edgespec.config.common import SetupError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import (
    NONE,
    PromptTokenizer,
    build_agent,
    load_tokenizer,
    tokenizer_reference,
    with_port,
)
from edgespec.models.catalogue import find_pair
from edgespec.models.folders import BUNDLED
from edgespec.models.tokenizer import prompt_encoder
from edgespec.models.toy import TOY
from edgespec.operating_system import usable_cores

PASS_MS, DRAFT_MS, RTT_MS, MAX_TOKENS = 25.0, 8.0, 50.0, 64
# A small model under greedy decoding soon repeats itself.
REPETITION_PENALTY = 1.15
ARMS = ("target only", "with drafts")
PROMPTS = (
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    "# git commit\n\n> Commit files to the repository.\n",
    "It was a cold morning in November, and the old man",
)
QUESTIONS = (
    "Explain in a few sentences why the sky is blue.",
    "What is the capital of France, and what is it known for?",
    "Give me three tips for learning a new language.",
)
REAL_PAIR = "smollm2-135m"
_PULL_PATIENCE_S = 10.0
# Two verifiers run at once, and the usual cache of a real target takes gigabytes.
_CACHED_TOKENS = 4096
_LONGEST_REASON = 300


_PROMPT = option("Prompt to continue instead of the built-in ones; may be repeated", "--prompt")
_RTT_MS = option("Milliseconds of round trip of the emulated link", "--rtt-ms", panel="Emulation")
_MODEL = option(
    "Target model: a folder, a .gguf file, a Hub id, a name of `edgespec models` or"
    f" bundled; by default {REAL_PAIR} if it can be had, else bundled",
    "--model",
    metavar="MODEL",
    envvar="EDGESPEC_MODEL",
    show_default=False,
)
_DRAFT = option(
    "Draft model: a folder, a .gguf file, a Hub id, a name of `edgespec models`, bundled or"
    " lookup; by default that of the target's pair, else bundled",
    "--draft",
    metavar="MODEL",
    envvar="EDGESPEC_DRAFT",
    show_default=False,
)
_YES = option(f"Pull {REAL_PAIR} without a question if it is not in the cache", "--yes", "-y")


@dataclass(frozen=True, slots=True)
class Setting:
    """The models of a demonstration, and whether their times are emulated."""

    model: str
    draft: str
    is_emulated: bool
    """Passes and draft steps take emulated times, because the models are toys."""

    @property
    def sampling(self) -> SamplingParams:
        penalty = REPETITION_PENALTY if self.is_emulated else 1.0
        return SamplingParams(repetition_penalty=penalty, max_tokens=MAX_TOKENS)

    @property
    def prompts(self) -> Sequence[str]:
        return PROMPTS if self.is_emulated else QUESTIONS

    @property
    def verifier_options(self) -> list[str]:
        """Options of the verifiers. A real target leaves one core to the device."""
        pace = ["--pass-ms", str(PASS_MS)] if self.is_emulated else [f"--set=threads={_threads()}"]
        return ["--model", self.model, *pace, f"--set=limits.max_cached_tokens={_CACHED_TOKENS}"]

    def describe(self, rtt_ms: float) -> str:
        """Return one line about what is real and what is emulated."""
        if self.is_emulated:
            return (
                f"emulated: round trip {rtt_ms:g} ms · target pass {PASS_MS:g} ms ·"
                f" draft step {DRAFT_MS:g} ms"
            )
        threads = _threads()
        return (
            f"real: passes of {self.model} ({threads} thread{'s' * (threads > 1)}), draft steps of"
            f" {self.draft} (1 thread) · emulated: round trip {rtt_ms:g} ms"
        )

    @property
    def basis(self) -> str:
        """Description of the conditions that both columns of the table share."""
        times = "emulated pass time" if self.is_emulated else "real passes and draft steps"
        return f"same prompts, same link, {times}"


def _threads() -> int:
    """Return the threads of a target's pass: one for each core but that of the device."""
    return max(1, usable_cores() - 1)


def demo(
    prompt: Annotated[list[str] | None, _PROMPT] = None,
    rtt_ms: Annotated[float, _RTT_MS] = RTT_MS,
    model: Annotated[str, _MODEL] = "",
    draft: Annotated[str, _DRAFT] = "",
    yes: Annotated[bool, _YES] = False,
) -> None:
    """Show the same outputs with and without drafts, all on this machine.

    Starts verifiers and a device with a slow link between them. With a real pair (SmolLM2 135M, a
    download of 93 MB that you are asked about) the passes and draft steps are real, and only the
    link is emulated. Without it, the bundled toy pair is shown at the emulated speed of larger
    models. Takes about a minute.

    [dim]edgespec demo --rtt-ms 150[/]

    [dim]edgespec demo --model bundled[/]
    """
    with reporting_errors():
        set_up_logging("error")
        check_runs_verifiers()
        setting = _choose_setting(model, draft, is_agreed=yes)
        config = AgentConfig(
            draft=DraftSection(
                model=setting.draft,
                draft_ms=DRAFT_MS if setting.is_emulated else 0.0,
                threads=0 if setting.is_emulated else 1,
            ),
            link=LinkSection(rtt_ms=rtt_ms),
            sampling=setting.sampling,
        )
        styled = should_use_color()
        console = Console(force_terminal=styled or None, no_color=not styled, highlight=False)
        run(_run_demo(config, setting, prompt or setting.prompts, console, styled))


def _choose_setting(model: str, draft: str, *, is_agreed: bool) -> Setting:
    if not model and not draft and _is_real_pair_here(is_agreed):
        model = REAL_PAIR
    model = model or BUNDLED
    own_draft = model if model == TOY or find_pair(model) is not None else BUNDLED
    return Setting(model, draft or own_draft, is_emulated=model in (BUNDLED, TOY))


def _is_real_pair_here(is_agreed: bool) -> bool:
    """Return whether the real pair is in the cache, after pulling it if the user agrees. A failure
    is one line, since the bundled pair can be shown instead."""
    pair = find_pair(REAL_PAIR)
    assert pair is not None
    try:
        if missing := list_missing(REAL_PAIR):
            size = in_mb(sum(part.size_bytes for part in map(pair.part, missing)))
            what = f"{REAL_PAIR} ({size}, licence {pair.licence}, {pair.licence_url})"
            if not is_agreed and not (sys.stdin.isatty() and sys.stderr.isatty()):
                say(f"showing the bundled toy pair; for a real one: edgespec pull {REAL_PAIR}")
                return False
            if not is_agreed and not typer.confirm(f"Pull {what}?", default=True, err=True):
                return False
            if is_agreed:
                say(f"pulling {what}; --model bundled shows a toy without a download")
        fetch_pair(REAL_PAIR, patience_s=_PULL_PATIENCE_S)
    except (SetupError, ValueError, OSError) as error:
        reason = "; ".join(line.strip() for line in str(error).splitlines()).replace(":; ", ": ")
        if len(reason) > _LONGEST_REASON:
            reason = f"{reason[:_LONGEST_REASON]} ..."
        say(f"showing the bundled toy pair, since the real one cannot be had: {reason}")
        return False
    return True


async def _run_demo(
    config: AgentConfig, setting: Setting, prompts: Sequence[str], console: Console, color: bool
) -> None:
    # A missing model is reported before the start.
    load_tokenizer(tokenizer_reference(config))
    console.print(setting.describe(config.link.rtt_ms), soft_wrap=True)
    if color:
        console.print(make_legend())
    options = setting.verifier_options
    plain, drafted = list[Measurement](), list[Measurement]()
    async with AsyncExitStack() as stack:
        wanted = [[*options, PLAIN_STREAMING]]
        if setting.is_emulated:
            console.print("starting a verifier ...", style="dim")
        else:
            # The second one has the defaults, so it also drafts from the text.
            console.print(
                "starting two verifiers, without and with their own drafts ...", style="dim"
            )
            wanted.append(options)
        started = await _start_verifiers(stack, wanted)
        address, serves = started[0]
        console.print(f"verifier on {with_port(address)}: {serves}", style="dim", soft_wrap=True)
        plain_config, _ = await choose_verifier(replace(config, verifier=address))
        config, _ = await choose_verifier(replace(config, verifier=started[-1][0]))
        reference = tokenizer_reference(config)
        plain_config = replace(plain_config, draft=DraftSection(model=NONE), tokenizer=reference)
        encode = _encoder(load_tokenizer(reference), setting)
        streaming = await stack.enter_async_context(build_agent(plain_config))
        drafting = await stack.enter_async_context(build_agent(config, say=say))
        for text in prompts:
            arms = ((ARMS[0], streaming, plain), (ARMS[1], drafting, drafted))
            for name, agent, done in arms:
                console.rule(f"[bold]{name}[/]", align="left", style="dim")
                end = "" if setting.is_emulated else "\n"
                console.print(text, end=end, style="dim", soft_wrap=True, markup=False)
                sys.stdout.flush()
                generation = agent.generate(encode(text), config.sampling)
                progress = await stream(generation, TextView(color))
                assert agent.stats is not None
                times_s, counters = tuple(progress.times_s), agent.stats.counters
                done.append(Measurement(tuple(progress.tokens), times_s, counters))
    print_report(console, plain, drafted, setting.basis)


async def _start_verifiers(
    stack: AsyncExitStack, wanted: Sequence[Sequence[str]]
) -> list[tuple[str, str]]:
    """Start verifiers with these options at the same time, and return their addresses and
    descriptions. They end with ``stack``. Raises ``SetupError``."""
    failures, tasks = list[Exception](), list[asyncio.Task[tuple[str, str]]]()
    try:
        async with asyncio.TaskGroup() as starting:
            for options in wanted:
                started = stack.enter_async_context(verifier_process(options))
                tasks.append(starting.create_task(started))
    except* SetupError as group:
        failures += group.exceptions
    if failures:
        raise failures[0]
    return [task.result() for task in tasks]


def _encoder(tokenizer: PromptTokenizer, setting: Setting) -> Callable[[str], list[int]]:
    """Return a function from a prompt to its tokens. A real model with a chat template gets the
    prompt as a user's message."""
    is_chat = not setting.is_emulated and tokenizer.chat_template() is not None
    return prompt_encoder(tokenizer, chat=is_chat)


def print_report(
    console: Console, plain: Sequence[Measurement], drafted: Sequence[Measurement], basis: str
) -> None:
    """Print the numbers, with one column per arm so that 40 columns suffice, and whether the tokens
    are the same. ``basis`` describes the conditions of both columns. Raises ``SetupError`` if
    the tokens differ."""
    console.rule(style="dim")
    console.print(basis, style="italic")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("")
    for name in ARMS:
        table.add_column(name, justify="right")
    texts = [one.tokens for one in plain]
    arms = (Arm.TARGET_ONLY, plain), (Arm.EDGESPEC, drafted)
    base, row = (row_of(arm, 0.0, 0, done, texts, {}) for arm, done in arms)
    names = ("tokens", "ms/token", "speed-up", "passes/token", "acceptance")
    for name, *values in zip(names, _make_column(base, base), _make_column(row, base), strict=True):
        table.add_row(name, *values)
    console.print(table)
    count, are_same = sum(len(one.tokens) for one in drafted), not row["mismatches"]
    console.print(f"token for token the same: {'yes' if are_same else 'NO'} ({count} tokens)")
    if not are_same:
        raise SetupError(
            "drafts changed the output, which must never happen in canonical mode; please report"
            " this as a bug"
        )


def _make_column(row: Row, base: Row) -> tuple[str, ...]:
    ms, base_ms = row["tpot_ms_p50"] or 0.0, base["tpot_ms_p50"] or 0.0
    return (
        str(row["tokens"]),
        f"{ms:.1f}" if ms else "-",
        f"{base_ms / ms:.2f} x" if ms else "-",
        f"{row['passes_per_token']:.2f}" if row["tokens"] else "-",
        f"{row['acceptance']:.0%}" if row is not base else "-",
    )
