"""``edgespec generate``: stream the target's continuation of one prompt."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli import device
from edgespec.cli import options as opts
from edgespec.cli.running import load_in_thread, run, say, stopping_at_once, trace_to
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import read_text
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from edgespec.core.protocol.errors import ConnectError
from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.predicted_text import check_prediction_length
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import MAX_LOGPROBS
from edgespec.device.agent import Agent, check_prediction_text
from edgespec.device.borrowed_tokenizer import (
    OutdatedError,
    confirmed_chunks,
    recall_target,
    takes_target_texts,
)
from edgespec.device.build import (
    build_agent,
    load_tokenizer,
    open_local_model,
    tokenizer_reference,
)
from edgespec.device.connections import Connections
from edgespec.telemetry.trace import Tracer

MAX_PROMPT_BYTES = 4 << 20
Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT|-", help="Prompt to continue; - reads it from stdin")
]
_generation = partial(opts.option, panel=opts.GENERATION)
_output = partial(opts.option, panel=opts.OUTPUT)
_SCHEMA = _generation(
    "Restrict the output to JSON that fits the schema in this file",
    "--json-schema",
    metavar="FILE",
)
_GRAMMAR = _generation(
    "Restrict the output to the grammar in this file (Lark or llama.cpp)",
    "--grammar",
    metavar="FILE",
)
_PREDICTION = _generation(
    "Draft from the text in this file, which the output is expected to be: the file that it edits,"
    " or an earlier answer. The output stays the same; the more of it was expected, the sooner it"
    " arrives",
    "--prediction",
    metavar="FILE",
)
_STATS = _output("Print statistics on stderr at the end", "--stats")
_JSON = _output("Print one JSON object per chunk, for programs", "--json")
_LOGPROBS = _output(
    "Print JSON with the log-probabilities of the N likeliest tokens at each position",
    "--logprobs",
    metavar="N",
    min=0,
    max=MAX_LOGPROBS,
    show_default=False,
)
_SAMPLING = (
    *(opts.MAX_TOKENS, opts.TEMPERATURE),
    *(opts.Flag(f"sampling.{name}", panel=opts.GENERATION) for name in ("top_p", "seed")),
    opts.RULE,
)


@opts.from_config(AgentConfig, *_SAMPLING, *opts.DEVICE_FLAGS, opts.FALLBACK)
def generate(
    settings: AgentConfig,
    prompt: Prompt = None,
    json_schema: Annotated[Path | None, _SCHEMA] = None,
    grammar: Annotated[Path | None, _GRAMMAR] = None,
    prediction: Annotated[Path | None, _PREDICTION] = None,
    stats: Annotated[bool, _STATS] = False,
    json_lines: Annotated[bool, _JSON] = False,
    logprobs: Annotated[int, _LOGPROBS] = 0,
) -> None:
    """Stream the target's continuation of a prompt to stdout.

    With --fallback draft the draft model writes it if no verifier can be reached, and a line on
    stderr names that model.

    [dim]edgespec generate "def fibonacci(n):" --max-tokens 64 --stats[/]

    [dim]edgespec generate - --temperature 0.8 --seed 7 < prompt.txt[/]

    [dim]edgespec generate - --prediction parser.py --max-tokens 2000 < edit-parser.txt[/]
    """
    if (constraint := constraint_of(json_schema, grammar)) is not None:
        try:
            settings = replace(settings, sampling=replace(settings.sampling, constraint=constraint))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    view: device.View = device.TextView(device.should_use_color())
    if json_lines or logprobs:
        view = device.JsonView(settings.rule)
    predicted = "" if prediction is None else read_prediction(prediction)
    run(_generate(settings, _Request(read_prompt(prompt), predicted, view, stats, logprobs)))


def constraint_of(json_schema: Path | None, grammar: Path | None) -> Constraint | None:
    """Return the constraint that the options ask for, or None. Raises ``ConfigError`` if both are
    given or the file cannot be used."""
    if json_schema is not None and grammar is not None:
        raise ConfigError("--json-schema and --grammar are both given, but only one can apply")
    option, path, kind = "--json-schema", json_schema, ConstraintKind.JSON_SCHEMA
    if path is None:
        option, path, kind = "--grammar", grammar, ConstraintKind.GRAMMAR
    if path is None:
        return None
    text = _read_file(option, path, MAX_CONSTRAINT_BYTES)
    try:
        return Constraint(kind, text)
    except ValueError as error:
        raise ConfigError(f"{option} {path}: {error}") from None


def read_prediction(path: Path) -> str:
    """Return the text of ``--prediction``. Raises ``ConfigError`` if the file cannot be used."""
    text = _read_file("--prediction", path, MAX_PROMPT_BYTES)
    try:
        check_prediction_text(text)
    except ValueError as error:
        raise ConfigError(f"--prediction {path}: {error}") from None
    return text


def _read_file(option: str, path: Path, most: int) -> str:
    """Return the UTF-8 text of a file of at most ``most`` bytes. Raises ``ConfigError`` that names
    the option and the file."""
    try:
        return read_text(path, most)
    except UnicodeDecodeError as error:
        why = f"is not UTF-8 text: byte {error.object[error.start]:#04x} at position {error.start}"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    raise ConfigError(f"{option} {path}: {why}")


@dataclass(frozen=True, slots=True)
class _Request:
    """The request of the user."""

    prompt: str
    prediction: str
    """Text that the output is expected to be. Empty: none is given."""
    view: device.View
    stats: bool
    logprobs: int


async def _generate(config: AgentConfig, request: _Request) -> None:
    """Generate at a verifier, or with the fallback if none can be reached.

    What the verifier answered to an earlier process is used at once, so that the prompt leaves
    together with the greeting. If the answer is another one now, everything begins anew."""
    async with Connections(config, with_texts=takes_target_texts(config)) as connections:
        connections.start()
        recalled = await load_in_thread(partial(recall_target, config, connections, say))
        if recalled is not None:
            confirming = asyncio.create_task(recalled.is_current(connections))
            try:
                await _stream_target(
                    recalled.config, recalled.info, request, connections, confirming
                )
                device.report_left_out(recalled.config, connections)
                return
            except OutdatedError:
                pass
            except (ConnectError, SetupError, ValueError):
                if await confirming:
                    raise
            finally:
                confirming.cancel()
                await asyncio.gather(confirming, return_exceptions=True)
        if config.fallback and not await device.can_reach_verifier(connections):
            await _generate_here(config, request)
            return
        config, info = await device.choose_verifier(config, connections)
        await _stream_target(config, info, request, connections)


async def _stream_target(
    config: AgentConfig,
    info: ModelInfo,
    request: _Request,
    connections: Connections,
    confirming: asyncio.Task[bool] | None = None,
) -> None:
    """Show the output of the target ``info``. Nothing is shown before ``confirming`` is true.
    Raises ``OutdatedError`` if it is false. Other errors may come before."""

    predicted: list[int] = []

    def load(tracer: Tracer | None) -> tuple[Sequence[int], SamplingParams, Agent]:
        fitting = device.with_bundled_sampling(config, info)
        tokenizer = load_tokenizer(tokenizer_reference(fitting))
        tokens = tokenizer.encode(request.prompt)
        device.check_prompt(tokens, info)
        if request.prediction:
            predicted.extend(tokenizer.encode(request.prediction, add_special_tokens=False))
            try:
                check_prediction_length(len(predicted))
            except ValueError as error:
                raise ConfigError(f"--prediction: {error}") from None
        agent = build_agent(fitting, tracer=tracer, say=say, target=info, lease=connections.lease)
        return tokens, fitting.sampling, agent

    with trace_to(config.trace, config.trace_tokens) as tracer:
        tokens, sampling, loaded = await load_in_thread(partial(load, tracer))
        async with loaded as agent:
            generation = agent.generate(
                tokens, sampling, logprobs=request.logprobs, prediction=predicted
            )
            if confirming is not None:
                generation = confirmed_chunks(generation, confirming)
            progress = await device.stream(generation, request.view)
            if request.stats:
                say(device.describe_generation(progress, agent.stats))
            elif (
                sys.stdout.isatty()
                and sys.stderr.isatty()
                and isinstance(request.view, device.TextView)
            ):
                color = request.view.color
                device.report_drafting(progress, agent.stats, color=color, explain=color)


async def _generate_here(config: AgentConfig, request: _Request) -> None:
    """Let the fallback of ``config`` continue the prompt. Raises ``ConfigError`` for what it cannot
    do."""
    with stopping_at_once():
        local = open_local_model(config, say)
    try:
        away = f"no verifier can be reached, and {local.answered_by}"
        if request.logprobs:
            raise ConfigError(f"--logprobs: {away} computes no scores")
        if config.rule != EXACT_RULE:
            raise ConfigError(f"--rule {config.rule}: {away} judges no drafts")
        say(f"no verifier can be reached: this text is by {local.answered_by}")
        if isinstance(request.view, device.JsonView):
            request.view.answered_by = local.answered_by
        generation = local.generate(local.tokenizer.encode(request.prompt), config.sampling)
        progress = await device.stream(generation, request.view)
        if request.stats:
            say(device.describe_generation(progress, None))
    finally:
        local.close()


def read_prompt(prompt: str | None, name: str = "PROMPT") -> str:
    """Return the prompt, read from stdin if it is "-". Raises ``ConfigError``, which calls the
    argument ``name``."""
    if prompt is None:
        raise ConfigError(f"give a {name}, or - to read it from stdin")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise ConfigError(f"the {name.lower()} is empty; it must hold at least one character")
    return text


def _read_stdin() -> str:
    """Return the UTF-8 text on stdin, whatever encoding the locale has.

    Raises ``ConfigError`` if it is not UTF-8 or longer than ``MAX_PROMPT_BYTES``; a prompt is never
    cut, because a part of it would be another prompt."""
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"stdin: more than {MAX_PROMPT_BYTES} bytes, which is the limit of a prompt; shorten it"
        )
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"0x{raw[error.start]:02x}"
        raise ConfigError(f"stdin: is not UTF-8: byte {byte} at position {error.start}") from None
    return text.replace("\r\n", "\n")
