"""`edgespec bench`: every way of splitting the work, on this machine, over the same link.

Composes what ``edgespec.bench`` runs: the verifier as a child process, the drafter here, and
between them gRPC with the delays of each round-trip time in turn.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import LentDrafter
from edgespec.bench.prompts import BUILT_IN, BenchPrompt, Workload, choose_workload, read_prompts
from edgespec.bench.report import (
    BenchProgress,
    Subject,
    document,
    footer,
    summary_table,
    verdict,
    write_json,
)
from edgespec.bench.runner import BenchRunner, Station, record_tape, tape_about, tape_report
from edgespec.bench.settings import (
    ASSUMED_ACCEPTANCE,
    BenchSettings,
    bench_s,
    parse_arms,
    parse_rtts_ms,
)
from edgespec.cli.output_file import check_output
from edgespec.cli.running import FAILED, Interrupted, reported, run
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, ConfigError, DraftSection, LinkSection
from edgespec.core.ports import Drafter, ModelInfo
from edgespec.device.agent import Agent, AgentOptions, GenerationError
from edgespec.device.build import (
    LOOKUP,
    PromptTokenizer,
    connect,
    link_models,
    load_drafter,
    load_tokenizer,
    tokenizer_reference,
)
from edgespec.telemetry.match_tape import write_tape

DEFAULTS = BenchSettings()
QUICK = replace(DEFAULTS, rtts_ms=(20.0, 100.0), repeats=2, prompt_limit=3, max_tokens=32)
_RTTS = ",".join(f"{rtt_ms:g}" for rtt_ms in DEFAULTS.rtts_ms)
ALL_ARMS = ",".join(arm.value for arm in Arm)
# What the wire takes by default, whatever the context.
_MAX_PROMPT_TOKENS = 32_768
_BUILT_IN_NAMES = {"short": "built-in", "long": "built-in, long"}
_WHAT, _TEXT, _TIMES = "What is compared", "The text", "Emulated times"
Arms = Annotated[
    str, typer.Option(metavar="ARM,ARM,...", help="Ways of decoding", rich_help_panel=_WHAT)
]
RttsMs = Annotated[
    str | None,
    typer.Option(
        "--rtt-ms",
        metavar="MS,MS,...",
        help=f"Round-trip times of the link \\[default: {_RTTS}]",
        rich_help_panel=_WHAT,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        help=f"Measure everything so often \\[default: {DEFAULTS.repeats}]", rich_help_panel=_WHAT
    ),
]
Quick = Annotated[
    bool,
    typer.Option("--quick", help="Two minutes: less of everything", rich_help_panel=_WHAT),
]
Json = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the results there", rich_help_panel=_WHAT),
]
RecordTape = Annotated[
    Path | None,
    typer.Option(
        "--record-tape",
        metavar="FILE",
        help="Write a match tape for the simulator there",
        rich_help_panel=_WHAT,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        envvar="EDGESPEC_MODEL",
        show_envvar=False,
        help="bundled, a folder, a Hub id, toy",
        rich_help_panel=_TEXT,
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        envvar="EDGESPEC_DRAFT",
        show_envvar=False,
        help="bundled, a folder, a Hub id; toy, random: for tests",
        rich_help_panel=_TEXT,
    ),
]
Prompts = Annotated[
    str,
    typer.Option(
        metavar="short|long|FILE.jsonl",
        help="Built-in prompts of some 30 tokens or of 400 to 500, or a file of your own",
        rich_help_panel=_TEXT,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        help=f"Use the first so many prompts \\[default: {DEFAULTS.prompt_limit}]",
        rich_help_panel=_TEXT,
    ),
]
Chat = Annotated[
    bool, typer.Option("--chat", help="Wrap prompts by the chat template", rich_help_panel=_TEXT)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help=f"Length of each text \\[default: {DEFAULTS.max_tokens}]",
        rich_help_panel=_TEXT,
    ),
]
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 is greedy", rich_help_panel=_TEXT)
]
Seed = Annotated[int, typer.Option(help="Same seed, same text", rich_help_panel=_TEXT)]
PassMs = Annotated[
    float,
    typer.Option(help="A target pass; 0: as fast as the machine goes", rich_help_panel=_TIMES),
]
DraftMs = Annotated[
    float | None,
    typer.Option(
        help="A draft step; 0: as fast as the machine goes "
        f"\\[default: {DEFAULTS.draft_ms:g}; with --draft lookup 0]",
        rich_help_panel=_TIMES,
    ),
]


def bench(
    arms: Arms = ALL_ARMS,
    rtt_ms: RttsMs = None,
    json: Json = None,
    tape: RecordTape = None,
    model: Model = "bundled",
    draft: Draft = "bundled",
    prompts: Prompts = "short",
    limit: Limit = None,
    chat: Chat = False,
    max_tokens: MaxTokens = None,
    repeats: Repeats = None,
    temperature: Temperature = DEFAULTS.temperature,
    seed: Seed = DEFAULTS.seed,
    pass_ms: PassMs = DEFAULTS.pass_ms,
    draft_ms: DraftMs = None,
    quick: Quick = False,
) -> None:
    """Compare target-only streaming, split decoding and edgespec at several round-trip times.

    All arms run the same code, link, models and prompts, in turns, and must give the same tokens.
    By default the times of passes and draft steps are emulated; the tokens are real.
    """
    base = QUICK if quick else DEFAULTS
    if draft_ms is None:  # no emulated model stands behind what is looked up
        draft_ms = 0.0 if draft == LOOKUP else DEFAULTS.draft_ms
    with reported():
        try:
            settings = replace(
                base,
                arms=parse_arms(arms),
                rtts_ms=base.rtts_ms if rtt_ms is None else parse_rtts_ms(rtt_ms),
                repeats=base.repeats if repeats is None else repeats,
                prompt_limit=base.prompt_limit if limit is None else limit,
                max_tokens=base.max_tokens if max_tokens is None else max_tokens,
                temperature=temperature,
                seed=seed,
                pass_ms=pass_ms,
                draft_ms=draft_ms,
            )
            check_output("json", json)
            check_output("record-tape", tape)
            bench_run = _Bench(settings, model, draft, prompts, chat, tape)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if status := bench_run.execute(json):
            raise typer.Exit(status)


class _Bench:
    """One bench from its parts to its report."""

    def __init__(
        self,
        settings: BenchSettings,
        model: str,
        draft: str,
        prompts: str,
        chat: bool,
        tape_path: Path | None,
    ) -> None:
        self._settings, self._tape_path = settings, tape_path
        self._stderr = Console(stderr=True)
        self._config = AgentConfig(draft=DraftSection(model=draft, draft_ms=settings.draft_ms))
        self._prompts, self._chat = _prompts(prompts), chat
        self._subject = Subject(model, draft, "", "", _BUILT_IN_NAMES.get(prompts, prompts), chat)
        self._tokenizer: PromptTokenizer | None = None
        self._workload: Workload | None = None
        self._runner: BenchRunner | None = None

    def execute(self, path: Path | None) -> int:
        """Run, print, write; the exit status."""
        settings, subject = self._settings, self._subject
        drafter = load_drafter(self._config, say=self._say)
        if drafter is None and self._tape_path is not None:
            raise ValueError(f"draft is {subject.draft!r}, so there is nothing to tape")
        if drafter is None and any(arm.drafts for arm in settings.arms):
            raise ValueError(f"draft is {subject.draft!r}, so target-only is the only arm there is")
        expected_s = bench_s(settings)
        self._say(
            f"about {_duration(expected_s)} if {ASSUMED_ACCEPTANCE:.0%} of the drafts are accepted"
            f" ({settings.timing}); Ctrl-C reports what there is"
        )
        failure, stopped_by = None, 0
        try:
            self._tokenizer = load_tokenizer(tokenizer_reference(self._config))
            with BenchProgress(self._stderr, expected_s) as progress:
                run(self._measure(drafter, progress))
        except Interrupted as signalled:
            stopped_by = signalled.number
        except GenerationError as error:
            failure = str(error)
        finally:
            if drafter is not None:
                drafter.close()
        mismatches = self._report(path, interrupted=bool(stopped_by), failure=failure)
        return 128 + stopped_by if stopped_by else FAILED * bool(mismatches or failure)

    async def _measure(self, drafter: Drafter | None, progress: BenchProgress) -> None:
        pass_ms = f"{self._settings.pass_ms:g}"
        arguments = ["--model", self._subject.model, "--pass-ms", pass_ms, PLAIN_STREAMING]
        async with verifier_process(arguments) as (address, _):
            info = await _served(address)
            self._workload = self._choose(info)
            self._subject = replace(
                self._subject,
                target_name=info.name,
                draft_name="" if drafter is None else drafter.info.name,
            )
            stations = _Stations(address, drafter, self._tokenizer)
            self._runner = BenchRunner(self._settings, self._workload, stations, progress)
            await self._runner.run()
            if self._tape_path is not None and drafter is not None:
                await self._record(drafter, progress, self._tape_path)

    async def _record(self, drafter: Drafter, progress: BenchProgress, path: Path) -> None:
        assert self._runner is not None
        assert self._workload is not None
        command = shlex.join(("edgespec", *sys.argv[1:]))
        sampling = self._settings.sampling
        tape = await record_tape(
            drafter,
            self._subject.target_name,
            self._workload,
            self._runner.references,
            sampling,
            progress,
            about=tape_about(command, sampling, self._subject.prompts),
        )
        write_tape(tape, path)
        self._say(tape_report(tape, self._runner.rows))

    def _choose(self, info: ModelInfo) -> Workload:
        context_length = min(info.context_length, _MAX_PROMPT_TOKENS)
        workload = choose_workload(
            self._prompts,
            self._encode,
            limit=self._settings.prompt_limit,
            room=context_length - self._settings.max_tokens,
            eos_token_ids=info.eos_token_ids,
        )
        if workload.too_long:
            self._say(f"{workload.too_long} prompts left out: longer than the context allows")
        return workload

    def _encode(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        if self._chat:
            text = self._tokenizer.render_chat([{"role": "user", "content": text}])
        return self._tokenizer.encode(text, add_special_tokens=not self._chat)

    def _report(self, path: Path | None, *, interrupted: bool, failure: str | None) -> int:
        """Print and write what there is; the number of mismatches."""
        rows = self._runner.rows if self._runner else []
        gammas = self._runner.vanilla_gammas if self._runner else {}
        costs = self._runner.gamma_costs if self._runner else {}
        content = document(
            ("edgespec", *sys.argv[1:]),
            self._settings,
            self._subject,
            self._workload,
            rows,
            gammas,
            costs,
            interrupted=interrupted,
        )
        if failure is not None:
            content["failure"] = failure
        if path is not None:
            write_json(path, content)
        stdout = Console(width=None if sys.stdout.isatty() else 120)
        if rows:
            stdout.print(summary_table(self._settings, rows))
        for line in footer(content):
            stdout.print(line, markup=False, highlight=False, soft_wrap=True)
        mismatches, sentence = verdict(rows)
        stdout.print(sentence, style="red" if mismatches else "green", highlight=False)
        if failure is not None:
            self._say(f"error: {failure}")
        elif interrupted:
            self._say("interrupted: only what had been measured is reported")
        return mismatches

    def _say(self, text: str) -> None:
        self._stderr.print(text, markup=False, highlight=False, soft_wrap=True)


class _Stations:
    """``runner.OpenStation``: agents with links of their own and one drafter."""

    def __init__(
        self, address: str, drafter: Drafter | None, tokenizer: PromptTokenizer | None
    ) -> None:
        assert tokenizer is not None
        self._address, self._drafter, self._tokenizer = address, drafter, tokenizer

    def __call__(self, options: AgentOptions, *, drafts: bool, rtt_ms: float) -> Station:
        from edgespec.wire.shaped import ShapedTransport, TrafficMeter

        meter = TrafficMeter()
        up, down = link_models(LinkSection(rtt_ms=rtt_ms))
        # Also without delay: all arms and links go through the same code.
        transport = ShapedTransport(connect(self._address), up, down, meter=meter)
        drafter = None if self._drafter is None or not drafts else LentDrafter(self._drafter)
        tokenizer = self._tokenizer
        agent = Agent(transport, drafter, tokenizer.encode, tokenizer.stream, options)
        return Station(agent, meter)


async def _served(address: str) -> ModelInfo:
    transport = connect(address)
    try:
        return (await transport.info()).model
    finally:
        await transport.close()


def _prompts(asked: str) -> Iterator[BenchPrompt]:
    """The first one is read at once: a wrong file is an error before anything is loaded."""
    prompts = iter(BUILT_IN[asked]) if asked in BUILT_IN else read_prompts(Path(asked))
    return chain([next(prompts)], prompts)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
