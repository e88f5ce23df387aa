"""``edgespec generate``: stream the target's continuation of one prompt."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli import device
from edgespec.cli import options as opts
from edgespec.cli.running import run, say, stopping_at_once, trace_to
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.files import read_text
from edgespec.core.protocol.constraint import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from edgespec.core.protocol.messages import EXACT_RULE
from edgespec.core.protocol.work import MAX_LOGPROBS
from edgespec.device.build import (
    build_agent,
    load_tokenizer,
    open_local_model,
    tokenizer_reference,
)

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
    stats: Annotated[bool, _STATS] = False,
    json_lines: Annotated[bool, _JSON] = False,
    logprobs: Annotated[int, _LOGPROBS] = 0,
) -> None:
    """Stream the target's continuation of a prompt to stdout.

    With --fallback draft the draft model writes it if no verifier can be reached, and a line on
    stderr names that model.

    [dim]edgespec generate "def fibonacci(n):" --max-tokens 64 --stats[/]

    [dim]edgespec generate - --temperature 0.8 --seed 7 < prompt.txt[/]
    """
    if (constraint := constraint_of(json_schema, grammar)) is not None:
        try:
            settings = replace(settings, sampling=replace(settings.sampling, constraint=constraint))
        except ValueError as error:
            raise ConfigError(str(error)) from None
    view: device.View = device.TextView(device.should_use_color())
    if json_lines or logprobs:
        view = device.JsonView(settings.rule)
    run(_generate(settings, _read_prompt(prompt), view, stats, logprobs))


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
    try:
        return Constraint(kind, read_text(path, MAX_CONSTRAINT_BYTES))
    except UnicodeDecodeError as error:
        why = f"is not UTF-8: {error}"
    except OSError as error:
        why = error.strerror or str(error)
    except ValueError as error:
        why = str(error)
    raise ConfigError(f"{option} {path}: {why}")


async def _generate(
    config: AgentConfig, prompt: str, view: device.View, stats: bool, logprobs: int
) -> None:
    if config.fallback and not await device.can_reach_verifier(config):
        await _generate_here(config, prompt, view, stats, logprobs)
        return
    config, info = await device.choose_verifier(config)
    config = device.with_bundled_sampling(config, info)
    tokens = load_tokenizer(tokenizer_reference(config)).encode(prompt)
    device.check_prompt(tokens, info)
    with trace_to(config.trace, config.trace_tokens) as tracer:
        with stopping_at_once():
            loaded = build_agent(config, tracer=tracer, say=say, target=info)
        async with loaded as agent:
            generation = agent.generate(tokens, config.sampling, logprobs=logprobs)
            progress = await device.stream(generation, view)
            if stats:
                say(device.describe_generation(progress, agent.stats))
            elif sys.stdout.isatty() and sys.stderr.isatty() and isinstance(view, device.TextView):
                device.report_drafting(progress, agent.stats, color=view.color, explain=view.color)


async def _generate_here(
    config: AgentConfig, prompt: str, view: device.View, stats: bool, logprobs: int
) -> None:
    """Let the fallback of ``config`` continue the prompt. Raises ``ConfigError`` for what it cannot
    do."""
    with stopping_at_once():
        local = open_local_model(config, say)
    try:
        away = f"no verifier can be reached, and {local.answered_by}"
        if logprobs:
            raise ConfigError(f"--logprobs: {away} computes no scores")
        if config.rule != EXACT_RULE:
            raise ConfigError(f"--rule {config.rule}: {away} judges no drafts")
        say(f"no verifier can be reached: this text is by {local.answered_by}")
        if isinstance(view, device.JsonView):
            view.answered_by = local.answered_by
        generation = local.generate(local.tokenizer.encode(prompt), config.sampling)
        progress = await device.stream(generation, view)
        if stats:
            say(device.describe_generation(progress, None))
    finally:
        local.close()


def _read_prompt(prompt: str | None) -> str:
    """Return the prompt, read from stdin if it is "-". Raises ``ConfigError``."""
    if prompt is None:
        raise ConfigError("give a PROMPT, or - to read it from stdin")
    text = _read_stdin() if prompt == "-" else prompt
    if not text:
        raise ConfigError("the prompt is empty; it must hold at least one character")
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
