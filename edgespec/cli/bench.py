"""`edgespec bench`: every way of splitting the work, on this machine, over the same link.

It composes what ``edgespec.bench`` runs: the verifier as a child process, the drafter here, and
gRPC between them, with the delays of each round-trip time in turn.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from edgespec.bench import report
from edgespec.bench.arms import DEVICE_ARMS, Arm
from edgespec.bench.measurement import LentDrafter
from edgespec.bench.prompts import BUILT_IN, BenchPrompt, Workload, choose_workload, read_prompts
from edgespec.bench.runner import BenchProgress, BenchRunner, BenchSettings, Station, parsed
from edgespec.bench.theory import TheoryRecorder, beside_theory, theory_lines, theory_table
from edgespec.cli.main import FAILED
from edgespec.cli.options import option
from edgespec.cli.running import Interrupted, reporting_errors, run
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, ConfigError, DraftSection, LinkSection, VerifierConfig
from edgespec.core.ports import Drafter, ModelInfo
from edgespec.core.protocol.messages import DraftTotals, VerifierInfo
from edgespec.device import build
from edgespec.device.agent import Agent, AgentOptions, GenerationError
from edgespec.models.folders import BUNDLED
from edgespec.models.tokenizer import prompt_encoder
from edgespec.models.toy import TOY
from edgespec.verifier.build import load_target
from edgespec.wire.shaped import ShapedTransport, TrafficMeter
from edgespec_sim.commands.record_tape import record_tape, tape_report
from edgespec_sim.token_sources.match_tape import write_tape

DEFAULTS = BenchSettings()
QUICK = replace(DEFAULTS, rtts_ms=(20.0, 100.0), repeats=2, prompt_limit=3, max_tokens=32)
_ARM_NAMES = ", ".join(arm.value for arm in Arm)
_RTTS = ",".join(f"{rtt_ms:g}" for rtt_ms in DEFAULTS.rtts_ms)
# What the wire takes by default, whatever the context.
_MAX_PROMPT_TOKENS = 32_768
_BUILT_IN_NAMES = {"short": "built-in", "long": "built-in, long"}
_WHAT, _TEXT, _TIMES = "What is compared", "The text", "Emulated times"


def _option(panel: str, text: str, *names: str, default: object = None, **more: Any) -> Any:
    shown = "" if default is None else f" \\[default: {default}]"
    return option(text + shown, *names, panel=panel, **more)


_ARMS = _option(_WHAT, "Ways of decoding", metavar="ARM,ARM,...", default=_ARM_NAMES)
_RTTS_MS = _option(_WHAT, "Round trips of the link", "--rtt-ms", metavar="MS,MS,...", default=_RTTS)
_REPEATS = _option(_WHAT, "How many times to measure everything", default=DEFAULTS.repeats)
_TAPE = _option(
    *(_WHAT, "Write a match tape for the simulator there", "--record-tape"), metavar="FILE"
)
_THEORY = _option(
    _WHAT, "Say what theory lets the two models agree on, beside what they do", "--theory"
)
_MODEL = _option(_TEXT, "Target, as of a verifier", envvar="EDGESPEC_MODEL")
_DRAFT = _option(_TEXT, "Draft, as of a device", envvar="EDGESPEC_DRAFT")
_SERVER_DRAFT = _option(
    _TEXT,
    "Draft of the verifier, as its --draft; empty: no arm in which the server drafts",
    metavar="MODEL",
    default="bundled or toy as --draft is, else empty",
)
_PROMPTS = _option(
    _TEXT,
    "Built-in prompts of some 30 tokens or of 400 to 500, or a file of your own",
    metavar="short|long|FILE.jsonl",
)
_LIMIT = _option(_TEXT, "Use the first so many prompts", default=DEFAULTS.prompt_limit)
_TOKENS = _option(_TEXT, "Length of each text", "--max-tokens", "-n", default=DEFAULTS.max_tokens)
_TEMPERATURE = _option(_TEXT, "0 is greedy", "--temperature", "-t")
_PASS_MS = _option(_TIMES, "A target pass; 0: as fast as the machine goes")
_DRAFT_MS = _option(
    _TIMES,
    "A draft step; 0: as fast as the machine goes",
    default=f"{DEFAULTS.draft_ms:g}; with --draft lookup 0",
)
_SERVER_DRAFT_MS = _option(
    _TIMES, "A draft step on the server; 0: as fast as the machine goes", "--server-draft-ms"
)


def bench(
    arms: Annotated[str | None, _ARMS] = None,
    rtt_ms: Annotated[str | None, _RTTS_MS] = None,
    json: Annotated[Path | None, _option(_WHAT, "Write the results there", metavar="FILE")] = None,
    tape: Annotated[Path | None, _TAPE] = None,
    theory: Annotated[bool, _THEORY] = False,
    model: Annotated[str, _MODEL] = "bundled",
    draft: Annotated[str, _DRAFT] = "bundled",
    server_draft: Annotated[str | None, _SERVER_DRAFT] = None,
    prompts: Annotated[str, _PROMPTS] = "short",
    limit: Annotated[int | None, _LIMIT] = None,
    chat: Annotated[bool, _option(_TEXT, "Wrap prompts by the chat template", "--chat")] = False,
    max_tokens: Annotated[int | None, _TOKENS] = None,
    repeats: Annotated[int | None, _REPEATS] = None,
    temperature: Annotated[float, _TEMPERATURE] = DEFAULTS.temperature,
    seed: Annotated[int, _option(_TEXT, "The same seed gives the same text")] = DEFAULTS.seed,
    pass_ms: Annotated[float, _PASS_MS] = DEFAULTS.pass_ms,
    draft_ms: Annotated[float | None, _DRAFT_MS] = None,
    server_draft_ms: Annotated[float, _SERVER_DRAFT_MS] = DEFAULTS.server_draft_ms,
    quick: Annotated[bool, _option(_WHAT, "Two minutes: less of everything", "--quick")] = False,
) -> None:
    """Compare target-only streaming, split decoding, a server that drafts itself (server-draft),
    a device that does (edgespec), and both, at several round-trip times.

    All arms run the same code, link, models and prompts, in turns, and must give the same tokens.
    By default the times of passes and draft steps are emulated; the tokens are real.
    """
    if draft_ms is None:  # no emulated model stands behind what is looked up
        draft_ms = 0.0 if draft == build.LOOKUP else DEFAULTS.draft_ms
    if server_draft is None:  # what a device drafts with may be a graph without weights
        server_draft = draft if draft in (BUNDLED, TOY) else ""
    with reporting_errors():
        try:
            given: dict[str, Any] = {
                "rtts_ms": rtt_ms and parsed("rtt-ms", rtt_ms, float, "milliseconds"),
                "repeats": repeats,
                "prompt_limit": limit,
                "max_tokens": max_tokens,
            }
            settings = replace(
                QUICK if quick else DEFAULTS,
                arms=_arms(arms, server_draft),
                temperature=temperature,
                seed=seed,
                pass_ms=pass_ms,
                draft_ms=draft_ms,
                server_draft_ms=server_draft_ms,
                **{name: value for name, value in given.items() if value is not None},
            )
            if theory and not temperature:
                raise ValueError(
                    "temperature is 0, but --theory compares two laws, which are one token each"
                    " then: give --temperature 0.7"
                )
            named = _BUILT_IN_NAMES.get(prompts, prompts)
            subject = report.Subject(model, draft, server_draft, "", "", named, chat)
            config = AgentConfig(draft=DraftSection(model=draft, draft_ms=draft_ms))
            whole = _Bench(settings, subject, config, _prompts(prompts), tape, theory)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for path in (json, tape):
            if path is not None:  # told before the long run
                if path.is_dir():
                    raise ConfigError(f"to write to is {path}, which is a folder")
                path.parent.mkdir(parents=True, exist_ok=True)
        if status := whole.execute(json):
            raise typer.Exit(status)


def _arms(asked: str | None, server_draft: str) -> tuple[Arm, ...]:
    """Raises ``ValueError`` for those that the server would need a draft for."""
    if asked is None:
        return tuple(Arm) if server_draft else DEVICE_ARMS
    arms = parsed("arms", asked, Arm, _ARM_NAMES)
    if not server_draft and (there := [arm.value for arm in arms if arm.on_server]):
        raise ValueError(f"arms names {', '.join(there)}, which needs --server-draft MODEL")
    return arms


@dataclass(slots=True)
class _Bench:
    """One bench from its parts to its report."""

    settings: BenchSettings
    subject: report.Subject
    config: AgentConfig
    prompts: Iterator[BenchPrompt]
    tape_path: Path | None
    theory: bool
    recorder: TheoryRecorder | None = None
    runner: BenchRunner | None = None
    drafts: DraftTotals | None = None
    stderr: Console = field(default_factory=lambda: Console(stderr=True))

    def execute(self, path: Path | None) -> int:
        """Run, print, write; the exit status."""
        draft, recorded = self.subject.draft, self.tape_path is not None or self.theory
        drafter = build.load_drafter(self.config, say=self._say)
        if recorded and draft in (build.NONE, build.LOOKUP):
            what = "compare" if self.theory else "tape"
            raise ValueError(f"draft is {draft!r}, so there is nothing to {what}")
        if drafter is None and any(arm.drafts for arm in self.settings.arms):
            raise ValueError(f"draft is {draft!r}, so target-only is the only arm there is")
        self._say(f"{self.settings.timing}; Ctrl-C reports what there is")
        failure, stopped_by = None, 0
        try:
            if self.theory and drafter is not None:
                target = load_target(VerifierConfig(model=self.subject.model))
                self.recorder = TheoryRecorder(target, drafter, self.settings.sampling)
            tokenizer = build.load_tokenizer(build.tokenizer_reference(self.config))
            with BenchProgress(self.stderr) as progress:
                run(self._measure(drafter, tokenizer, progress))
        except Interrupted as signalled:
            stopped_by = signalled.number
        except GenerationError as error:
            failure = str(error)
        finally:
            if drafter is not None:
                drafter.close()
        mismatches = self._report(path, interrupted=bool(stopped_by), failure=failure)
        return 128 + stopped_by if stopped_by else FAILED * bool(mismatches or failure)

    async def _measure(
        self, drafter: Drafter | None, tokenizer: build.PromptTokenizer, progress: BenchProgress
    ) -> None:
        settings = self.settings
        async with self._verifiers() as (plain, drafting):
            info = (await fetch_verifier_info(plain)).model
            workload = self._choose(info, tokenizer)
            name = "" if drafter is None else drafter.info.name
            self.subject = replace(self.subject, target_name=info.name, draft_name=name)

            def station(arm: Arm, options: AgentOptions, rtt_ms: float) -> Station:
                meter = TrafficMeter()
                up, down = build.link_models(LinkSection(rtt_ms=rtt_ms))
                # Also without delay: all arms and links go through the same code.
                address = drafting if arm.on_server else plain
                transport = ShapedTransport(build.connect(address), up, down, meter=meter)
                lent = LentDrafter(drafter) if drafter is not None and arm.drafts else None
                encode, stream = tokenizer.encode, tokenizer.stream
                options = replace(options, text_tables=build.text_tables(self.config))
                return Station(Agent(transport, lent, encode, stream, options), meter)

            self.runner = runner = BenchRunner(settings, workload, station, progress)
            await runner.run()
            if drafting:
                self.drafts = (await fetch_verifier_info(drafting)).drafts
            if drafter is not None and (self.tape_path is not None or self.recorder):
                about = report.tape_about(settings.sampling, self.subject.prompts)
                texts, sampling = runner.references, settings.sampling
                tape = await record_tape(
                    *(drafter, info.name, workload, texts, sampling, progress.say),
                    about=about,
                    recorder=self.recorder,
                )
                if self.tape_path is not None:
                    write_tape(tape, self.tape_path)
                    self._say(tape_report(tape, runner.rows))

    @contextlib.asynccontextmanager
    async def _verifiers(self) -> AsyncIterator[tuple[str, str]]:
        """Two of the same model; the second, whose address is empty if no arm needs it, drafts."""
        settings, subject = self.settings, self.subject
        pass_ms = f"{settings.pass_ms:g}"
        arguments = ["--model", subject.model, "--pass-ms", pass_ms, PLAIN_STREAMING]
        async with contextlib.AsyncExitStack() as stack:
            plain, _ = await stack.enter_async_context(verifier_process(arguments))
            drafting = ""
            if settings.drafts_on_server:
                step = f"--set=pacing.draft_ms={settings.server_draft_ms:g}"
                arguments += ["--draft", subject.server_draft, step]
                drafting, _ = await stack.enter_async_context(verifier_process(arguments))
            yield plain, drafting

    def _choose(self, info: ModelInfo, tokenizer: build.PromptTokenizer) -> Workload:
        context_length = min(info.context_length, _MAX_PROMPT_TOKENS)
        workload = choose_workload(
            self.prompts,
            prompt_encoder(tokenizer, chat=self.subject.chat),
            limit=self.settings.prompt_limit,
            room=context_length - self.settings.max_tokens,
            eos_token_ids=info.eos_token_ids,
        )
        if workload.too_long:
            self._say(f"{workload.too_long} prompts left out: longer than the context allows")
        return workload

    def _report(self, path: Path | None, *, interrupted: bool, failure: str | None) -> int:
        """Print and write what there is; the number of mismatches."""
        runner = self.runner
        rows = runner.rows if runner else []
        content = report.document(
            ("edgespec", *sys.argv[1:]),
            self.settings,
            self.subject,
            runner,
            interrupted=interrupted,
        )
        if self.drafts is not None:
            content["server_drafts"] = asdict(self.drafts)
        if failure is not None:
            content["failure"] = failure
        compared = None
        if self.recorder is not None and self.recorder.texts:
            content["theory"] = compared = beside_theory(self.recorder.texts)
        if path is not None:
            report.write_json(path, content)
        stdout = Console(width=None if sys.stdout.isatty() else 140)
        if rows:
            stdout.print(report.summary_table(self.settings, rows))
        if compared is not None:
            stdout.print(theory_table(compared))
            for line in theory_lines(compared):
                stdout.print(line, markup=False, highlight=False, soft_wrap=True)
        for line in report.footer(content):
            stdout.print(line, markup=False, highlight=False, soft_wrap=True)
        mismatches, sentence = report.verdict(rows)
        stdout.print(sentence, style="red" if mismatches else "green", highlight=False)
        if failure is not None:
            self._say(f"error: {failure}")
        elif interrupted:
            self._say("interrupted: only what had been measured is reported")
        return mismatches

    def _say(self, text: str) -> None:
        self.stderr.print(text, markup=False, highlight=False, soft_wrap=True)


async def fetch_verifier_info(address: str) -> VerifierInfo:
    """What the verifier there says of itself."""
    transport = build.connect(address)
    try:
        return await transport.info()
    finally:
        await transport.close()


def _prompts(asked: str) -> Iterator[BenchPrompt]:
    """The first one is read at once: a wrong file is an error before anything is loaded."""
    prompts = iter(BUILT_IN[asked]) if asked in BUILT_IN else read_prompts(Path(asked))
    return chain([next(prompts)], prompts)
