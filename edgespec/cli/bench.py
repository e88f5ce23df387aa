"""`edgespec bench`: compare ways of decoding on this machine, over the same emulated links.

The command composes the parts that ``edgespec.bench`` measures: the verifier in a child process,
the drafter in this one, and gRPC between them, with the delays of each round-trip time in turn.
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
from edgespec.bench.runner import BenchProgress, BenchRunner, BenchSettings, Station, parse_list
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
# The wire's default limit of a prompt, whatever the context.
_MAX_PROMPT_TOKENS = 32_768
_BUILT_IN_NAMES = {
    "short": "built-in",
    **{name: f"built-in, {name}" for name in BUILT_IN if name != "short"},
}
_WHAT, _TEXT, _TIMES = "Comparison", "Models and prompts", "Emulation"


def _option(panel: str, text: str, *names: str, default: object = None, **more: Any) -> Any:
    shown = "" if default is None else f" \\[default: {default}]"
    return option(text + shown, *names, panel=panel, **more)


_ARMS = _option(
    _WHAT,
    "Ways of decoding to compare; vanilla, pearl and windowed exist for comparison only",
    metavar="ARM,ARM,...",
    default=_ARM_NAMES,
)
_RTTS_MS = _option(
    _TIMES,
    "Milliseconds of round trip of the emulated links",
    "--rtt-ms",
    metavar="MS,MS,...",
    default=_RTTS,
)
_REPEATS = _option(
    _WHAT, "Times to repeat every measurement, to see the spread", default=DEFAULTS.repeats
)
_JSON = _option(_WHAT, "Write the results to this file as JSON", metavar="FILE")
_TAPE = _option(
    *(_WHAT, "Write a match tape, which the simulator can replay, to this file", "--record-tape"),
    metavar="FILE",
)
_THEORY = _option(
    _WHAT,
    "Compare the acceptance with what theory allows for these two models (needs --temperature)",
    "--theory",
)
_QUICK = _option(_WHAT, "Measure less of everything, in about two minutes", "--quick")
_MODEL = _option(
    *(_TEXT, "Target model, as of `edgespec verifier`"), metavar="MODEL", envvar="EDGESPEC_MODEL"
)
_DRAFT = _option(
    *(_TEXT, "Draft model, as of `edgespec generate`"), metavar="MODEL", envvar="EDGESPEC_DRAFT"
)
_SERVER_DRAFT = _option(
    _TEXT,
    "Draft model of the verifier; empty leaves out the arms in which the verifier drafts",
    metavar="MODEL",
    default="that of --draft if it is bundled or toy, else empty",
)
_PROMPTS = _option(
    _TEXT,
    "Built-in texts to continue, of about 30 tokens (short) or 400 to 500 (long), requests of a"
    " user (chat, code, maths; with --chat), or a file of your own, of JSON Lines (FILE.jsonl)",
    metavar="NAME|FILE",
)
_LIMIT = _option(_TEXT, "Number of prompts to use, from the first", default=DEFAULTS.prompt_limit)
_CHAT = _option(_TEXT, "Wrap each prompt in the model's chat template", "--chat")
_TOKENS = _option(
    *(_TEXT, "Tokens of each output", "--max-tokens", "-n"), default=DEFAULTS.max_tokens
)
_TEMPERATURE = _option(_TEXT, "Sampling temperature; 0 is greedy", "--temperature", "-t")
_SEED = _option(_TEXT, "Seed of the sampling; the same seed gives the same outputs")
_PASS_MS = _option(_TIMES, "Milliseconds of a target pass; 0 runs at this machine's own speed")
_DRAFT_MS = _option(
    _TIMES,
    "Milliseconds of a draft step; 0 runs at this machine's own speed",
    default=f"{DEFAULTS.draft_ms:g}; with --draft lookup 0",
)
_SERVER_DRAFT_MS = _option(
    _TIMES,
    "Milliseconds of a draft step on the verifier; 0 runs at this machine's own speed",
    "--server-draft-ms",
)


def bench(
    arms: Annotated[str | None, _ARMS] = None,
    rtt_ms: Annotated[str | None, _RTTS_MS] = None,
    json: Annotated[Path | None, _JSON] = None,
    tape: Annotated[Path | None, _TAPE] = None,
    theory: Annotated[bool, _THEORY] = False,
    model: Annotated[str, _MODEL] = "bundled",
    draft: Annotated[str, _DRAFT] = "bundled",
    server_draft: Annotated[str | None, _SERVER_DRAFT] = None,
    prompts: Annotated[str, _PROMPTS] = "short",
    limit: Annotated[int | None, _LIMIT] = None,
    chat: Annotated[bool, _CHAT] = False,
    max_tokens: Annotated[int | None, _TOKENS] = None,
    repeats: Annotated[int | None, _REPEATS] = None,
    temperature: Annotated[float, _TEMPERATURE] = DEFAULTS.temperature,
    seed: Annotated[int, _SEED] = DEFAULTS.seed,
    pass_ms: Annotated[float, _PASS_MS] = DEFAULTS.pass_ms,
    draft_ms: Annotated[float | None, _DRAFT_MS] = None,
    server_draft_ms: Annotated[float, _SERVER_DRAFT_MS] = DEFAULTS.server_draft_ms,
    quick: Annotated[bool, _QUICK] = False,
) -> None:
    """Compare ways of decoding at several round-trip times.

    The arms are plain streaming (target-only), split decoding (vanilla, pearl, windowed), drafts by
    the device (edgespec), by the verifier (server-draft), and by both. All run the same code,
    links, models and prompts, in turns, and must give the same tokens. By default the durations of
    passes and draft steps are emulated; the tokens are real.
    """
    if draft_ms is None:  # lookup runs no model whose step could be emulated
        draft_ms = 0.0 if draft == build.LOOKUP else DEFAULTS.draft_ms
    if server_draft is None:  # a verifier cannot run a device's graph, which has no weights
        server_draft = draft if draft in (BUNDLED, TOY) else ""
    with reporting_errors():
        try:
            given: dict[str, Any] = {
                "rtts_ms": rtt_ms and parse_list("rtt-ms", rtt_ms, float, "milliseconds"),
                "repeats": repeats,
                "prompt_limit": limit,
                "max_tokens": max_tokens,
            }
            settings = replace(
                QUICK if quick else DEFAULTS,
                arms=_choose_arms(arms, server_draft),
                temperature=temperature,
                seed=seed,
                pass_ms=pass_ms,
                draft_ms=draft_ms,
                server_draft_ms=server_draft_ms,
                **{name: value for name, value in given.items() if value is not None},
            )
            if theory and not temperature:
                raise ValueError(
                    "temperature is 0, but --theory compares two laws, and a greedy law is a single"
                    " token: give --temperature 0.7"
                )
            named = _BUILT_IN_NAMES.get(prompts, prompts)
            subject = report.Subject(model, draft, server_draft, "", "", named, chat)
            # A draft without a tokenizer of its own has the target's, which lies here.
            has_tokenizer = draft not in (build.NONE, build.LOOKUP, build.RANDOM)
            config = AgentConfig(
                tokenizer="" if has_tokenizer else model,
                draft=DraftSection(model=draft, draft_ms=draft_ms),
            )
            run_bench = _Bench(settings, subject, config, _read_prompts(prompts), tape, theory)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for path in (json, tape):
            if path is not None:  # an error must show before the long run
                if path.is_dir():
                    raise ConfigError(f"the output file is {path}, which is a folder; name a file")
                path.parent.mkdir(parents=True, exist_ok=True)
        if status := run_bench.execute(json):
            raise typer.Exit(status)


def _choose_arms(asked: str | None, server_draft: str) -> tuple[Arm, ...]:
    """Return the arms that were asked for. Raises ``ValueError`` for an unknown one, and for one in
    which the verifier drafts if it has no draft model."""
    if asked is None:
        return tuple(Arm) if server_draft else DEVICE_ARMS
    arms = parse_list("arms", asked, Arm, _ARM_NAMES)
    if not server_draft and (there := [arm.value for arm in arms if arm.on_server]):
        raise ValueError(f"arms names {', '.join(there)}, which needs --server-draft MODEL")
    return arms


@dataclass(slots=True)
class _Bench:
    """One run of the command, from its parts to its report."""

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
        """Measure, print and write the results, and return the exit status."""
        draft, recorded = self.subject.draft, self.tape_path is not None or self.theory
        drafter = build.load_drafter(self.config, say=self._say)
        if recorded and draft in (build.NONE, build.LOOKUP):
            what = "compare" if self.theory else "tape"
            raise ValueError(f"draft is {draft!r}, so there is nothing to {what}")
        if drafter is None and any(arm.drafts for arm in self.settings.arms):
            raise ValueError(
                f"draft is {draft!r}, so target-only is the only arm there is: give --arms"
                " target-only, or another --draft"
            )
        self._say(f"{self.settings.timing}; Ctrl-C stops and reports what was measured")
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
                # A link without delay is shaped too, so that all arms run the same code.
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
        """Yield the addresses of two verifiers of the same model. The second one drafts; its
        address is empty if no arm needs it."""
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
            self._say(f"{workload.too_long} prompts are not used: too long for the context")
        return workload

    def _report(self, path: Path | None, *, interrupted: bool, failure: str | None) -> int:
        """Print and write the results so far, and return the number of mismatches."""
        runner = self.runner
        rows = runner.rows if runner else []
        content = report.make_document(
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
        for line in report.write_footer(content):
            stdout.print(line, markup=False, highlight=False, soft_wrap=True)
        mismatches, sentence = report.judge_mismatches(rows)
        stdout.print(sentence, style="red" if mismatches else "green", highlight=False)
        if failure is not None:
            self._say(f"error: {failure}")
        elif interrupted:
            self._say("interrupted: the report covers what was measured before")
        return mismatches

    def _say(self, text: str) -> None:
        self.stderr.print(text, markup=False, highlight=False, soft_wrap=True)


async def fetch_verifier_info(address: str) -> VerifierInfo:
    """Return the description of the verifier at ``address``."""
    transport = build.connect(address)
    try:
        return await transport.info()
    finally:
        await transport.close()


def _read_prompts(name: str) -> Iterator[BenchPrompt]:
    """Return the prompts of a built-in set or of a file. The first one is read at once, so that a
    wrong file is an error before anything is loaded."""
    prompts = iter(BUILT_IN[name]) if name in BUILT_IN else read_prompts(Path(name))
    return chain([next(prompts)], prompts)
