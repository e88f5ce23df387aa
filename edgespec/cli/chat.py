"""``edgespec chat``: a conversation, turn by turn, in the model's own chat format."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import typer

from edgespec.agent.agent import Agent, GenerationError
from edgespec.cli import options
from edgespec.cli.device import agent_settings, check_prompt, greet, stream
from edgespec.cli.running import reported, say, trace_to
from edgespec.cli.streaming import Progress, TextView, legend, summary, use_color
from edgespec.compose import (
    PromptTokenizer,
    SetupError,
    build_agent,
    load_tokenizer,
    tokenizer_reference,
)
from edgespec.config import AgentConfig
from edgespec.export_cache import cache_folder
from edgespec.ports import ModelInfo

HELP = "/reset forgets the conversation, /stats shows numbers, /quit or Ctrl-D leaves"
_HISTORY_LINES = 1000
_PROMPT = "> "


def chat(
    context: typer.Context,
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
    rtt_ms: options.RttMs = None,
    draft: options.Draft = None,
    draft_variant: options.DraftVariant = None,
    draft_bits: options.DraftBits = None,
    draft_lookup: options.DraftLookup = None,
    tokenizer: options.Tokenizer = None,
    policy: options.Policy = None,
    gamma: options.Gamma = None,
    width: options.Width = None,
    window: options.Window = None,
    run_ahead: options.RunAheadOption = None,
    draft_ms: options.DraftMs = None,
    memory_budget: options.MemoryBudget = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    seed: options.Seed = None,
    max_tokens: options.MaxTokens = None,
    ignore_eos: options.IgnoreEos = None,
    color: options.Color = None,
    trace: options.Trace = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
) -> None:
    """Talk with the target model.

    /reset forgets the conversation, /stats shows numbers, /quit or Ctrl-D leaves. Ctrl-C ends a
    reply; what has come of it stays in the conversation.
    """
    with reported():
        settings = agent_settings(context)
        text = load_tokenizer(reference := tokenizer_reference(settings))
        if not text.has_chat_template:
            why = f"the tokenizer of {reference!r} has no chat template"
            raise SetupError(f"{why}; use `edgespec generate`")
        signal.signal(signal.SIGTERM, _leave)
        with asyncio.Runner() as runner, trace_to(settings.trace) as tracer, _history():
            settings, info = runner.run(greet(settings))
            agent = build_agent(settings, tracer=tracer, say=say)
            try:
                say(f"talking with {info.name}; {HELP}")
                Conversation(agent, text, settings, use_color(color), runner, info).run()
            finally:
                runner.run(agent.close())


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the loop that adds to them."""

    agent: Agent
    tokenizer: PromptTokenizer
    config: AgentConfig
    color: bool
    runner: asyncio.Runner
    info: ModelInfo
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Progress | None = None

    def run(self) -> None:
        """Until /quit or the end of the input."""
        while True:
            try:
                line = input(_PROMPT).strip()
            except EOFError:
                say("")
                return
            except KeyboardInterrupt:
                say("\n(Ctrl-D or /quit leaves)")
                continue
            if line == "/quit":
                return
            if line.startswith("/"):
                self.command(line)
            elif line:
                self.turn(line)

    def command(self, line: str) -> None:
        match line:
            case "/reset":
                self.messages.clear()
                say("the conversation is forgotten")
            case "/stats":
                say("nothing yet" if self.last is None else summary(self.last, self.agent.stats))
            case _:
                say(f"unknown command {line.split()[0]!r}; {HELP}")

    def turn(self, line: str) -> None:
        """One message and its reply; a turn that fails leaves the conversation as it was."""
        asked = [*self.messages, {"role": "user", "content": line}]
        reply = _Reply(TextView(self.color))
        try:
            prompt = self.tokenizer.encode_chat(asked)
            check_prompt(prompt, self.info)
            self.last = Progress()
            sampling = self.config.sampling
            self.runner.run(stream(self.agent, prompt, sampling, reply, self.last))
        except KeyboardInterrupt:
            say("(stopped)")
        except (GenerationError, SetupError, ValueError) as error:
            say(f"error: {error}\n(your message was not kept; /reset makes room)")
            return
        if self.color and not self.messages:
            from rich.console import Console

            Console(stderr=True).print(legend())
        self.messages = [*asked, {"role": "assistant", "content": "".join(reply.parts)}]


@dataclass(slots=True)
class _Reply:
    """A view that also remembers the text."""

    view: TextView
    parts: list[str] = field(default_factory=list)

    def show(self, chunk: Any) -> None:
        self.parts.append(chunk.text)
        self.view.show(chunk)

    def end(self) -> None:
        self.view.end()


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Line editing and the lines of earlier chats, where there is a terminal and readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    path = cache_folder() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
