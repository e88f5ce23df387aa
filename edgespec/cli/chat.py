"""``edgespec chat``: a conversation, turn by turn, in the model's own chat format."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from edgespec import __version__
from edgespec.cli.device import (
    Progress,
    TextView,
    View,
    check_prompt,
    for_trying,
    greet,
    stream,
    summary,
    tell_worth,
    use_color,
)
from edgespec.cli.options import DEVICE_FLAGS, MAX_TOKENS, TEMPERATURE, from_config
from edgespec.cli.running import say, set_up_logging, stoppable, trace_to
from edgespec.cli.talk import record as records
from edgespec.cli.talk.editor import (
    Command,
    CommandError,
    CtrlC,
    Editor,
    Name,
    PlainEditor,
    TerminalEditor,
    command_help,
    is_command,
    is_drawable,
    make_editor,
    message_of,
    parse,
    silent_keyboard,
)
from edgespec.cli.talk.reply_view import FRAME_S, MarkdownView, status_line
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.common import SetupError
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.checks import one_line, printable
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.borrowed_tokenizer import borrows_tokenizer
from edgespec.device.build import (
    PromptTokenizer,
    build_agent,
    load_tokenizer,
    tokenizer_reference,
    with_port,
)
from edgespec.device.status import StatusSource
from edgespec.telemetry.trace import Tracer

_SHOWN = 60
"""Characters of a message that are quoted."""

_AGAIN = "an empty line sends your message again"


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the loop that adds to them. ``kept`` None: they are not kept."""

    agent: Agent
    tokenizer: PromptTokenizer
    config: AgentConfig
    runner: asyncio.Runner
    info: ModelInfo
    """What is served."""
    status: StatusSource
    record: records.Record
    editor: Editor = field(default_factory=PlainEditor)
    kept: records.KeptFile | None = None
    name: str = ""
    """Of the model that was asked for in the chat; empty: as the agent is configured."""
    drawn: bool = False
    """Replies are drawn as markdown on a terminal; else their text is plain."""
    last: Progress | None = None
    unanswered: str = ""
    """The message that got no reply; an empty line sends it again."""
    _name: str = field(default_factory=partial(secrets.token_hex, 8))
    """Of a conversation that is not kept; one that is has its file's name."""
    _ctrl_c: CtrlC = field(default_factory=CtrlC)
    _warned: bool = field(default=False)

    def run(self) -> None:
        """Until /quit or the end of the input."""
        edited = isinstance(self.editor, TerminalEditor)
        with self._ctrl_c.heeded(), silent_keyboard() if edited else contextlib.nullcontext():
            while self._next():
                pass

    def _next(self) -> bool:
        """One message or command; whether to go on."""
        try:
            self._ctrl_c.arm()
            line = self.editor.ask().strip()
            self._ctrl_c.disarm()
        except EOFError:
            self._ctrl_c.disarm()
            say("")
            return False
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit leaves)")
            return True
        if not records.is_utf8(line):  # bytes of a terminal that is set to another encoding
            say("error: your message is not UTF-8, which it must be; it was not kept")
        elif is_command(line):
            return self.command(line)
        elif line or self.unanswered:
            self.turn(message_of(line) if line else self.unanswered)
        return True

    # --- commands --------------------------------------------------------------------------

    def command(self, line: str) -> bool:
        """Whether to go on."""
        try:
            self._ctrl_c.arm()
            command = parse(line)
            if command.name is Name.QUIT:
                return False
            self._do(command)
        except (CommandError, records.ConversationError) as error:
            self._ctrl_c.disarm()
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("(stopped)")
        return True

    def _do(self, command: Command) -> None:
        match command.name:
            case Name.HELP:
                say(command_help())
            case Name.SYSTEM:
                self._system(command.argument)
            case Name.SAVE:
                path = _file(command.argument)
                records.write_new(path, self.record)
                say(f"{len(self.record.messages)} messages written to {path}")
            case Name.LOAD:
                path = _file(command.argument)
                self._begin_anew(records.read(path))
                say(described(self.record))
            case Name.MODEL:
                say(self._talk_with(command.argument) if command.argument else self._model())
            case Name.STATS:
                say("nothing yet" if self.last is None else self._stats(self.last))
            case Name.RESET:
                self._begin_anew(records.Record(self.info.name, begun=records.now_text()))
                say("the conversation is forgotten")

    def _begin_anew(self, found: records.Record) -> None:
        """Go on with ``found``; the conversation before stays in its own file."""
        self.record, self._name = found, secrets.token_hex(8)
        if self.kept is not None:
            self.kept = records.KeptFile(records.new_path())

    def _system(self, text: str) -> None:
        if not text:
            text = printable(self.record.system)
            say(f"system: {text}" if text else "no system message")
            return
        self.record.system = "" if text == "-" else text
        say("the system message counts from the next reply on")
        self._keep()

    def _talk_with(self, name: str) -> str:
        """From the next reply on. Raises ``CommandError`` for a name that is not served, or where
        nobody tells."""
        try:
            served = {one.name: one for one in self.runner.run(self.agent.models())}
        except GenerationError as error:
            raise CommandError(str(error)) from error
        found = served.get(name)
        if found is None:
            raise CommandError(f"unknown model {name!r}; there are {', '.join(map(repr, served))}")
        if found.vocabulary != self.info.vocabulary:
            raise CommandError(f"{name!r} has another vocabulary; begin a chat with --model {name}")
        self.info, self.name = found, name
        self.record.model = name
        self._keep()
        return f"talking with {name} from the next reply on"

    def _model(self) -> str:
        drafter = self.agent.drafter
        lines = [
            f"target  {self.info.name}, context {self.info.context_length} tokens",
            f"draft   {'none: it only streams' if drafter is None else drafter.info.name}",
            f"policy  {self.config.policy.name.value}, width {self.config.policy.width}",
        ]
        for one in self.status.snapshot().verifiers:
            lines.append(f"served  by {one.address} ({one.state.value})")
        return "\n".join(lines)

    def _stats(self, last: Progress) -> str:
        totals, drafting = self.status.snapshot().totals, self.status.snapshot().drafting
        lines = [summary(last, self.agent.stats)]
        acceptance = "" if totals.acceptance is None else f", acceptance {totals.acceptance:.0%}"
        replies = "reply" if totals.generations == 1 else "replies"
        lines.append(
            f"this chat: {totals.tokens} tokens in {totals.generations} {replies}{acceptance},"
            f" {totals.reconnects} reconnects"
        )
        verdict = {True: "drafting pays", False: "drafting rests", None: "drafting"}
        lines.append(f"{verdict[drafting.worth]}: {drafting.why}")
        return "\n".join(lines)

    # --- turns -----------------------------------------------------------------------------

    def turn(self, line: str) -> None:
        """One message and its reply; a turn that fails leaves the conversation as it was, and keeps
        the message for an empty line."""
        message = {"role": "user", "content": line}
        self.unanswered = line
        reply = _Reply(self._view())
        try:
            self._ctrl_c.arm()
            text = self.tokenizer.render_chat([*self.record.asked, message])
            prompt = self.tokenizer.encode(text, add_special_tokens=False)
            check_prompt(prompt, self.info)
            self.last = Progress()
            self.runner.run(self._reply(prompt, reply, self.last))
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("(stopped)" if reply.parts else f"(stopped; {_AGAIN})")
            if not reply.parts:
                return
        except (GenerationError, SetupError, ValueError) as error:
            self._ctrl_c.disarm()
            room = "" if isinstance(error, GenerationError) else "/reset makes room; "
            say(f"error: {error}\n({room}{_AGAIN})")
            return
        self.unanswered = ""
        if self.last is not None and sys.stdout.isatty() and sys.stderr.isatty():
            tell_worth(self.last, self.agent.stats, color=self.drawn, explain=False)
        said = "".join(reply.parts)
        self.record.messages += [message, {"role": "assistant", "content": said}]
        self._keep()

    def _view(self) -> View:
        return MarkdownView(self.line) if self.drawn else TextView(color=False)

    def line(self, width: int) -> str:
        """The numbers of the moment, in one line."""
        last_s = None if self.last is None else self.last.per_token_s
        status = self.status.snapshot(after=1 << 62)  # without events
        if (stats := self.agent.stats) is not None:  # of this reply, as /stats says it
            drafting = replace(status.drafting, acceptance=stats.counters.acceptance)
            status = replace(status, drafting=drafting)
        return status_line(status, width, 1.0 / last_s if last_s else None)

    async def _reply(self, prompt: Sequence[int], view: _Reply, progress: Progress) -> None:
        self._ctrl_c.task = asyncio.current_task()
        ticking = asyncio.create_task(_tick(view.view))
        try:
            await stream(
                self.agent,
                prompt,
                self.config.sampling,
                view,
                progress,
                conversation=self.kept.path.stem if self.kept else self._name,
                model=self.name,
            )
        finally:
            ticking.cancel()

    def _keep(self) -> None:
        """Write the conversation down; a disk that is full costs no chat."""
        if self.kept is None or not self.record.messages:
            return
        try:
            if self.kept.write(self.record):
                say(f"(another chat goes on with that file; this one is in {self.kept.path})")
        except records.ConversationError as error:
            if not self._warned:
                say(f"this conversation is not kept: {error}")
            self._warned = True


async def _tick(view: View) -> None:
    """The line of numbers goes on while no token comes."""
    while isinstance(view, MarkdownView):
        await asyncio.sleep(2 * FRAME_S)
        view.tick()


def described(found: records.Record) -> str:
    """What a conversation is that is gone on with."""
    count = len(found.messages)
    about = f"going on with a conversation of {count} message{'' if count == 1 else 's'}"
    if found.begun:
        about += f", begun {one_line(found.begun)}"
    if found.messages:
        last = one_line(found.messages[-1]["content"])
        about += f"; the last: {last[:_SHOWN]}{'…' if len(last) > _SHOWN else ''}"
    return about


@dataclass(slots=True)
class _Reply:
    """A view that also remembers the text."""

    view: View
    parts: list[str] = field(default_factory=list)

    def show(self, chunk: Any) -> None:
        self.parts.append(chunk.text)
        self.view.show(chunk)

    def end(self) -> None:
        self.view.end()


def _file(argument: str) -> Path:
    """Raises ``ConversationError`` for the home of a user that there is not."""
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        why = f"{argument}: the system knows no such home folder"
        raise records.ConversationError(why) from error


_KEPT = "The conversation"
Continue = Annotated[
    bool,
    typer.Option("--continue", help="Go on with the last one", rich_help_panel=_KEPT),
]
NoHistory = Annotated[
    bool,
    typer.Option(
        "--no-history",
        help="Keep neither this conversation nor what is typed",
        rich_help_panel=_KEPT,
    ),
]


@from_config(AgentConfig, MAX_TOKENS, TEMPERATURE, *DEVICE_FLAGS)
def chat(settings: AgentConfig, resume: Continue = False, no_history: NoHistory = False) -> None:
    """Talk with the target model.

    Enter sends, Alt-Enter begins another line, Ctrl-C ends a reply and keeps what came of it,
    Ctrl-D leaves. /help lists the commands: /system, /save, /load, /model, /stats, /reset, /quit.

    Conversations at a terminal are kept under $XDG_STATE_HOME/edgespec, readable for you alone.

    [dim]edgespec chat --continue[/]

    [dim]edgespec chat --no-history --temperature 0.7[/]
    """
    set_up_logging(settings.log_level, settings.log_format)
    if resume and no_history:
        raise ConfigError("--continue needs the history that --no-history turns off")
    text = None
    if not borrows_tokenizer(settings):
        text = _chat_tokenizer(settings)  # a wrong one is told before the verifier is asked
    signal.signal(signal.SIGTERM, _leave)
    with asyncio.Runner() as runner, trace_to(settings.trace, settings.trace_tokens) as tracer:
        settings, info = runner.run(greet(settings))
        settings = for_trying(settings, info)
        text = _chat_tokenizer(settings)
        keeps = resume or (sys.stdin.isatty() and not no_history)
        found, kept = _record(info, resume=resume, history=keeps)
        say(f"talking with {info.name}; /help lists the commands, /quit or Ctrl-D leaves")
        if found.messages:
            say(described(found))
            if found.model and found.model != info.name:
                say(f"(it was with {one_line(found.model)})")
        _talk(settings, info, text, runner, tracer, (found, kept))


def _chat_tokenizer(settings: AgentConfig) -> PromptTokenizer:
    """Raises ``SetupError`` for one that does not know how its model chats."""
    text = load_tokenizer(reference := tokenizer_reference(settings))
    if not text.has_chat_template:
        why = f"the tokenizer of {reference!r} has no chat template"
        raise SetupError(f"{why}; use `edgespec generate`")
    return text


def _talk(
    settings: AgentConfig,
    info: ModelInfo,
    text: PromptTokenizer,
    runner: asyncio.Runner,
    tracer: Tracer,
    going_on: tuple[records.Record, records.KeptFile | None],
) -> None:
    found, kept = going_on
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
            drawn=is_drawable() and use_color(),
        )
        talk.editor = make_editor(runner, talk.line, remember=kept is not None)
        talk.run()
    finally:
        runner.run(agent.close())


def _record(
    info: ModelInfo, *, resume: bool, history: bool
) -> tuple[records.Record, records.KeptFile | None]:
    """The conversation to go on with and where it is kept; a new one if there is none."""
    fresh = records.Record(info.name, begun=records.now_text())
    if not history:
        return fresh, None
    records.forget_oldest()
    path = records.newest() if resume else None
    if path is not None:
        kept = records.KeptFile(path)  # before it is read: what comes between is seen later
        return records.read(path), kept
    if resume:
        say("there is no earlier conversation; this is a new one")
    return fresh, records.KeptFile(records.new_path())


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
