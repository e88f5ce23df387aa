"""``edgespec generate``: one prompt in, the target's text out, as it comes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli import constraint_options, options
from edgespec.cli.device import agent_settings, check_prompt, greet, greet_if_there, stream
from edgespec.cli.offline_view import OfflineView
from edgespec.cli.running import reported, run, say, stoppable, trace_to
from edgespec.cli.streaming import JsonView, ScoredView, TextView, View, summary, use_color
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.bounded_file import TooLargeError, read_text
from edgespec.core.device.offline import Offline
from edgespec.core.protocol.scores import MAX_LOGPROBS
from edgespec.device.build import build_agent, load_tokenizer, tokenizer_reference

MAX_PROMPT_BYTES = 4 << 20

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT|-", help="The prompt; - reads it from stdin")
]
PromptFile = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="F", help="Read the prompt from a file")
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON object a chunk", rich_help_panel="Output")
]
Logprobs = Annotated[
    int,
    typer.Option(
        "--logprobs",
        min=0,
        max=MAX_LOGPROBS,
        metavar="N",
        help="With each token its log-probability and the N likeliest, on stderr or in the JSON",
        rich_help_panel="Output",
    ),
]


def generate(
    context: typer.Context,
    prompt: Prompt = None,
    file: PromptFile = None,
    verifier: options.VerifierAddress = None,
    association: options.Association = None,
    model: options.TargetName = None,
    tls: options.Tls = None,
    ca: options.Ca = None,
    client_cert: options.ClientCert = None,
    client_key: options.ClientKey = None,
    server_name: options.ServerName = None,
    api_key_file: options.ApiKeyFile = None,
    insecure: options.Insecure = None,
    offline: options.OfflineOption = None,
    rtt_ms: options.RttMs = None,
    draft: options.Draft = None,
    draft_variant: options.DraftVariant = None,
    draft_bits: options.DraftBits = None,
    draft_lookup: options.DraftLookup = None,
    tokenizer: options.Tokenizer = None,
    policy: options.Policy = None,
    prefer: options.PreferOption = None,
    gamma: options.Gamma = None,
    width: options.Width = None,
    window: options.Window = None,
    run_ahead: options.RunAheadOption = None,
    draft_ms: options.DraftMs = None,
    memory_budget: options.MemoryBudget = None,
    provider: options.Provider = None,
    ladder: options.Ladder = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    logit_bias: options.LogitBias = None,
    seed: options.Seed = None,
    stop: options.StopText = None,
    max_tokens: options.MaxTokens = None,
    ignore_eos: options.IgnoreEos = None,
    json_schema: constraint_options.JsonSchema = None,
    grammar: constraint_options.Grammar = None,
    json_lines: Json = False,
    logprobs: Logprobs = 0,
    stats: options.Stats = False,
    color: options.Color = None,
    trace: options.Trace = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
) -> None:
    """Stream the target's continuation of a prompt to stdout; the draft model runs here.

    [dim]edgespec generate "def fibonacci(n):" --max-tokens 64 --stats[/]

    [dim]edgespec generate - --temperature 0.8 --seed 7 < prompt.txt[/]
    """
    with reported():
        view = _view(json_lines, use_color(color), logprobs)
        settings = _held(agent_settings(context), json_schema, grammar)
        run(_generate(settings, _prompt(prompt, file), view, stats, logprobs))


def _held(config: AgentConfig, json_schema: Path | None, grammar: Path | None) -> AgentConfig:
    """``config``, its text held to what these files say. Raises ``ConfigError``, ``OSError``."""
    if (constraint := constraint_options.constraint_of(json_schema, grammar)) is None:
        return config
    try:
        return replace(config, sampling=replace(config.sampling, constraint=constraint))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _view(json_lines: bool, colored: bool, logprobs: int) -> View:
    if json_lines:
        return JsonView()
    return ScoredView(TextView(colored)) if logprobs else TextView(colored)


async def _generate(
    config: AgentConfig, prompt: str, view: View, stats: bool, logprobs: int
) -> None:
    if config.offline is Offline.DRAFT:
        config, info = await greet_if_there(config)
        view = OfflineView(view)
    else:
        config, info = await greet(config)
    tokens = load_tokenizer(tokenizer_reference(config)).encode(prompt)
    if info is not None:
        check_prompt(tokens, info)
    with trace_to(config.trace, config.trace_tokens) as tracer:
        with stoppable():
            loaded = build_agent(config, tracer=tracer, say=say)
        async with loaded as agent:
            progress = await stream(agent, tokens, config.sampling, view, logprobs=logprobs)
            if stats:
                say(summary(progress, agent.stats))


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from wherever it was given. Raises ``ConfigError``, ``OSError``."""
    if (prompt is None) == (file is None):
        raise ConfigError("give a PROMPT, or - to read stdin, or --file F; one of them")
    if file is not None:
        try:
            text = read_text(file, MAX_PROMPT_BYTES)
        except TooLargeError as error:
            raise ConfigError(f"{file}: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{file}: is not UTF-8: {error}") from None
    else:
        text = _stdin() if prompt == "-" else str(prompt)
    if not text:
        raise ConfigError("the prompt is empty; it must hold at least one character")
    return text


def _stdin() -> str:
    """Raises ``ConfigError`` for more than is read: half a prompt is another prompt."""
    try:
        text = sys.stdin.read(MAX_PROMPT_BYTES + 1)
        size = len(text.encode())
    except UnicodeError as error:
        raise ConfigError(f"stdin: is not UTF-8: {error}") from None
    if size > MAX_PROMPT_BYTES:
        raise ConfigError(
            f"stdin: more than {MAX_PROMPT_BYTES} bytes, but so many are read at most"
        )
    return text
