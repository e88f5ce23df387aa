"""``edgespec chat``: a conversation, turn by turn, in the model's own chat format."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated

import typer

from edgespec import __version__
from edgespec.cli.device import greet, greet_if_there
from edgespec.cli.options import (
    DEVICE_FLAGS,
    LOG_FLAGS,
    OUTPUT,
    SAMPLING_FLAGS,
    Color,
    from_config,
)
from edgespec.cli.running import say, set_up_logging, stoppable, trace_to
from edgespec.cli.streaming import use_color
from edgespec.cli.talk import record
from edgespec.cli.talk.editor import is_drawable, make_editor
from edgespec.cli.talk.loop import Conversation, described
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.setup_error import SetupError
from edgespec.core.device.offline import Offline
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.checks import one_line
from edgespec.device.borrowed_tokenizer import borrows_tokenizer
from edgespec.device.build import (
    PromptTokenizer,
    build_agent,
    load_tokenizer,
    tokenizer_reference,
)
from edgespec.device.many_verifiers import with_port
from edgespec.device.status import StatusSource
from edgespec.telemetry.trace import Tracer

_KEPT = "The conversation"

Markdown = Annotated[
    bool,
    typer.Option(
        "--markdown/--no-markdown",
        help="On a terminal with colors, draw replies as markdown; off: tell accepted from "
        "corrected tokens",
        rich_help_panel=OUTPUT,
    ),
]
Continue = Annotated[
    bool,
    typer.Option("--continue", help="Go on with the last one", rich_help_panel=_KEPT),
]
History = Annotated[
    bool | None,
    typer.Option(
        "--history/--no-history",
        help="Keep conversations and what was typed, for you alone (default: at a terminal)",
        rich_help_panel=_KEPT,
    ),
]


@from_config(AgentConfig, *SAMPLING_FLAGS, *DEVICE_FLAGS, *LOG_FLAGS)
def chat(
    settings: AgentConfig,
    resume: Continue = False,
    history: History = None,
    markdown: Markdown = True,
    color: Color = None,
) -> None:
    """Talk with the target model.

    Enter sends, Alt-Enter begins another line, Ctrl-C ends a reply and keeps what came of it,
    Ctrl-D leaves. /help lists the commands: /system, /save, /load, /model, /stats, /reset, /quit.

    Conversations are kept under $XDG_STATE_HOME/edgespec, readable for you alone.

    [dim]edgespec chat --continue[/]

    [dim]edgespec chat --no-history --temperature 0.7[/]
    """
    set_up_logging(settings.log_level, settings.log_format)
    _chat(settings, color, markdown, resume, history)


def _chat(
    settings: AgentConfig, color: bool | None, markdown: bool, resume: bool, history: bool | None
) -> None:
    if resume and history is False:
        raise ConfigError("--continue needs the history that --no-history turns off")
    keeps = (resume or sys.stdin.isatty()) if history is None else history
    if not borrows_tokenizer(settings):
        _chat_tokenizer(settings)  # a wrong one is told before the verifier is asked
    signal.signal(signal.SIGTERM, _leave)
    colored = use_color(color)
    drawn = markdown and colored and is_drawable()
    with asyncio.Runner() as runner, trace_to(settings.trace, settings.trace_tokens) as tracer:
        hello = greet_if_there if settings.offline is Offline.DRAFT else greet
        settings, info = runner.run(hello(settings))
        text = _chat_tokenizer(settings)
        found, kept = _record(info, resume=resume, history=keeps)
        partner = info.name if info is not None else "the draft until a verifier answers"
        say(f"talking with {partner}; /help lists the commands, /quit or Ctrl-D leaves")
        if found.messages:
            say(described(found))
            if info is not None and found.model and found.model != info.name:
                say(f"(it was with {one_line(found.model)})")
        _talk(settings, info, text, runner, tracer, (found, kept), (colored, drawn))


def _chat_tokenizer(settings: AgentConfig) -> PromptTokenizer:
    """Raises ``SetupError`` for one that does not know how its model chats."""
    text = load_tokenizer(reference := tokenizer_reference(settings))
    if not text.has_chat_template:
        why = f"the tokenizer of {reference!r} has no chat template"
        raise SetupError(f"{why}; use `edgespec generate`")
    return text


def _talk(
    settings: AgentConfig,
    info: ModelInfo | None,
    text: PromptTokenizer,
    runner: asyncio.Runner,
    tracer: Tracer,
    going_on: tuple[record.Record, record.KeptFile | None],
    shown: tuple[bool, bool],
) -> None:
    found, kept = going_on
    colored, drawn = shown
    with stoppable():
        agent = build_agent(settings, tracer=tracer, say=say)
    try:
        addresses = tuple(with_port(one) for one in settings.verifiers)
        source = StatusSource(agent, addresses, __version__)

        talk = Conversation(
            agent=agent,
            tokenizer=text,
            config=settings,
            runner=runner,
            info=info,
            status=source,
            record=found,
            kept=kept,
            color=colored,
            markdown=drawn,
        )
        talk.editor = make_editor(runner, talk.line, remember=kept is not None)
        talk.run()
    finally:
        runner.run(agent.close())


def _record(
    info: ModelInfo | None, *, resume: bool, history: bool
) -> tuple[record.Record, record.KeptFile | None]:
    """The conversation to go on with and where it is kept; a new one if there is none."""
    fresh = record.Record("" if info is None else info.name, begun=record.now_text())
    if not history:
        return fresh, None
    record.forget_oldest()
    path = record.newest() if resume else None
    if path is not None:
        kept = record.KeptFile(path)  # before it is read: what comes between is seen later
        return record.read(path), kept
    if resume:
        say("there is no earlier conversation; this is a new one")
    return fresh, record.KeptFile(record.new_path())


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
