"""``edgespec chat``: a conversation, turn by turn, in the model's own chat format.

At a terminal it is kept as one JSON file in ``$XDG_STATE_HOME/edgespec/conversations`` (by default
``~/.local/state``), with mode 0600 in a folder of mode 0700, replaced in one step after each reply,
so that a file is never half written. Of those files the newest ``MAX_KEPT`` stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

from edgespec import __version__
from edgespec.cli import chat_terminal as terminal
from edgespec.cli import device
from edgespec.cli.options import DEVICE_FLAGS, MAX_TOKENS, RULE, TEMPERATURE, from_config, option
from edgespec.cli.running import answered_by, say, stoppable, trace_to
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import read_text, replace_file, user_folder
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.checks import is_unicode, one_line, printable
from edgespec.device import build
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.borrowed_tokenizer import takes_target_texts
from edgespec.device.status import StatusSource
from edgespec.models.tokenizer import render_chat

MAX_KEPT: Final = 200
MAX_BYTES: Final = 16 << 20
_FORMAT: Final = {"format": "edgespec-conversation", "version": 1}
_SHOWN: Final = 60
"""Characters of a message that are quoted."""
_AGAIN: Final = "an empty line sends your message again"
COMMANDS: Final = {
    "/help": ("", "this list"),
    "/system": ("[TEXT|-]", "tell the model how to be; alone: show it; -: no more"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "go on with a conversation from a file"),
    "/model": ("[NAME]", "which models talk, and where; NAME: talk with this one"),
    "/stats": ("", "numbers of the last reply, and of this chat"),
    "/reset": ("", "forget the conversation and begin another"),
    "/quit": ("", "leave, like Ctrl-D"),
}
_KEYS: Final = """
  Enter sends; Alt-Enter, Ctrl-J or a \\ at the end of a line begins another line
  Ctrl-C ends a reply and keeps what came of it; Ctrl-D leaves
  Up, Down and Ctrl-R find earlier messages; Tab completes; Ctrl-X Ctrl-E opens $EDITOR
  // at the beginning sends a message that begins with a slash"""


# --- a conversation as a file ------------------------------------------------------------------


class ConversationError(ValueError):
    """A command of the chat cannot be obeyed; the message says why."""


@dataclass(slots=True)
class Record:
    """A conversation: who said what, oldest first. ``system`` comes before all messages."""

    model: str = ""
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def asked(self) -> list[dict[str, str]]:
        """What the model is told: the system's text, if there is one, and the messages."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def write(self, path: Path) -> None:
        """Replace ``path`` in one step. Raises ``ConversationError``; then it is as it was."""
        text = json.dumps(_FORMAT | asdict(self), ensure_ascii=False, indent=1) + "\n"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            why = error.strerror or error
            raise ConversationError(f"{path}: cannot be written: {why}") from error

    @property
    def described(self) -> str:
        """What it is, for who goes on with it."""
        count = len(self.messages)
        about = f"going on with a conversation of {count} message{'' if count == 1 else 's'}"
        about += f", begun {one_line(self.begun)}" if self.begun else ""
        if self.messages:
            last = one_line(self.messages[-1]["content"])
            about += f"; the last: {last[:_SHOWN]}{'…' if len(last) > _SHOWN else ''}"
        return about


def read_record(path: Path) -> Record:
    """Raises ``ConversationError`` naming the file and what is wrong with it."""
    try:
        return _record(json.loads(read_text(path, MAX_BYTES)))
    except (OSError, RecursionError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConversationError(f"{path}: no conversation: {why}") from error


def _record(data: Any) -> Record:
    if not isinstance(data, dict) or any(data.get(key) != value for key, value in _FORMAT.items()):
        raise ValueError(f"its format is not {' '.join(map(str, _FORMAT.values()))}")
    json.dumps(data, ensure_ascii=False).encode()  # half a surrogate pair could not be written
    found, messages = Record(begun=""), data.get("messages")
    for name in ("model", "system", "begun"):
        if not isinstance(value := data.get(name, ""), str):
            raise ValueError(f"{name} is {value!r}, but must be text")
        setattr(found, name, value)
    if not isinstance(messages, list):
        raise ValueError("messages must be a list")
    for number, one in enumerate(messages):
        match one:
            case {"role": "system" | "user" | "assistant" as role, "content": str(content)}:
                found.messages.append({"role": role, "content": content})
            case _:
                roles = "a role of system, user, assistant, and text as content"
                raise ValueError(f"messages[{number}] must have {roles}")
    return found


def state_folder() -> Path:
    """``$XDG_STATE_HOME/edgespec``, by default ``~/.local/state/edgespec``. Raises ``OSError``
    where this user has no home."""
    return user_folder("XDG_STATE_HOME", ".local/state", ", or give --no-history")


def kept_conversations() -> list[Path]:
    """The newest last: their names begin with the time."""
    return sorted((state_folder() / "conversations").glob("*.json"))


class KeptFile:
    """Where one chat keeps its conversation, in a file of its own. The one that it goes on with,
    ``replaces``, is removed when the new one is there: two chats that go on with the same one lose
    nothing."""

    def __init__(self, replaces: Path | None = None) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{stamp}-{secrets.token_hex(3)}.json"
        self.path = state_folder() / "conversations" / name
        self._replaces = replaces

    def write(self, record: Record) -> None:
        """Raises ``ConversationError``."""
        record.write(self.path)
        if self._replaces is not None:
            with contextlib.suppress(OSError):
                self._replaces.unlink()
            self._replaces = None


def parse(line: str) -> tuple[str, str]:
    """A command and what stood behind it. Raises ``ConversationError`` saying what would be one."""
    word, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        raise ConversationError(f"unknown command {word!r}; {hint}")
    if COMMANDS[word][0] == "FILE" and not argument:
        raise ConversationError(f"{word} needs the name of a file: {word} FILE")
    if argument and not COMMANDS[word][0]:
        raise ConversationError(f"{word} takes nothing behind it, but got {argument!r}")
    return word, argument


@dataclass(slots=True)
class Conversation:
    """The turns so far, and the loop that adds to them."""

    agent: Agent
    tokenizer: build.PromptTokenizer
    config: AgentConfig
    runner: asyncio.Runner
    info: ModelInfo
    """What is served."""
    status: StatusSource
    record: Record
    kept: KeptFile | None = None
    """Where the conversation is kept; None: nowhere."""
    ask: Callable[[], str] = lambda: input(terminal.PROMPT)
    """The next message. Raises ``EOFError`` at the end, ``KeyboardInterrupt`` for a Ctrl-C."""
    name: str = ""
    """Of the model that was asked for in the chat; empty: as the agent is configured."""
    drawn: bool = False
    """Replies are drawn as markdown on a terminal; else their text is plain."""
    last: device.Progress | None = None
    unanswered: str = ""
    """The message that got no reply; an empty line sends it again."""
    _ctrl_c: terminal.CtrlC = field(default_factory=terminal.CtrlC)
    _warned: bool = False
    _prompt_length: int = 0
    """Tokens of the prompt of the reply that is being written."""

    def run(self) -> None:
        """Until /quit or the end of the input."""
        with answered_by(self._ctrl_c.pressed, (signal.SIGINT,)):
            while self._next():
                pass

    def _next(self) -> bool:
        """One message or command; whether to go on."""
        try:
            with self._ctrl_c.armed():
                line = self.ask().strip()
        except EOFError:
            say("")
            return False
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit leaves)")
            return True
        if not is_unicode(line):
            say("error: your message is not UTF-8, which it must be; it was not kept")
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._command(line)
        if line or self.unanswered:
            self._turn((line[1:] if line.startswith("//") else line) or self.unanswered)
        return True

    def _command(self, line: str) -> bool:
        """Whether to go on."""
        try:
            with self._ctrl_c.armed():
                name, argument = parse(line)
                if name == "/quit":
                    return False
                say(self._obey(name, argument))
        except (ConversationError, GenerationError) as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("(stopped)")
        return True

    def _obey(self, name: str, argument: str) -> str:
        match name:
            case "/system":
                return self._system(argument)
            case "/save":
                path = _file(argument)
                if path.exists():
                    read_record(path)  # whatever else it is stays as it is
                self.record.write(path)
                return f"{len(self.record.messages)} messages written to {path}"
            case "/load":
                self._begin_anew(read_record(_file(argument)))
                return self.record.described
            case "/model":
                return self._talk_with(argument) if argument else self._model()
            case "/stats":
                return "nothing yet" if self.last is None else self._stats(self.last)
            case "/reset":
                self._begin_anew(Record(self.info.name))
                return "the conversation is forgotten"
        lines = [f"  {name + ' ' + more:16}  {about}" for name, (more, about) in COMMANDS.items()]
        return "\n".join(lines) + _KEYS

    def _begin_anew(self, found: Record) -> None:
        """Go on with ``found``; the conversation before stays in its own file."""
        self.record = found
        if self.kept is not None:
            self.kept = KeptFile()

    def _system(self, text: str) -> str:
        if not text:
            text = printable(self.record.system)
            return f"system: {text}" if text else "no system message"
        self.record.system = "" if text == "-" else text
        self._keep()
        return "the system message counts from the next reply on"

    def _talk_with(self, name: str) -> str:
        """From the next reply on. Raises ``ConversationError`` for a name that is not served, and
        ``GenerationError`` where no verifier says what is."""
        served = {one.name: one for one in self.runner.run(self.agent.models())}
        if (found := served.get(name)) is None:
            known = ", ".join(map(repr, served))
            raise ConversationError(f"unknown model {name!r}; there are {known}")
        if found.vocabulary != self.info.vocabulary:
            why = f"{name!r} has another vocabulary; begin a chat with --model {name}"
            raise ConversationError(why)
        self.info, self.name, self.record.model = found, name, name
        self._keep()
        return f"talking with {name} from the next reply on"

    def _model(self) -> str:
        drafter = self.agent.drafter
        served = self.status.snapshot().verifiers
        lines = [
            f"target  {self.info.name}, context {self.info.context_length} tokens",
            f"draft   {'none: it only streams' if drafter is None else drafter.info.name}",
            f"policy  {self.config.policy.name.value}, width {self.config.policy.width}",
            *(f"served  by {one.address} ({one.state.value})" for one in served),
        ]
        return "\n".join(lines)

    def _stats(self, last: device.Progress) -> str:
        status = self.status.snapshot()
        totals, drafting = status.totals, status.drafting
        acceptance = "" if totals.acceptance is None else f", acceptance {totals.acceptance:.0%}"
        replies = "reply" if totals.generations == 1 else "replies"
        verdict = {True: "drafting pays", False: "drafting rests", None: "drafting"}
        return (
            f"{device.summary(last, self.agent.stats)}\n"
            f"this chat: {totals.tokens} tokens in {totals.generations} {replies}{acceptance},"
            f" {totals.reconnects} reconnects\n{verdict[drafting.worth]}: {drafting.why}"
        )

    def _turn(self, line: str) -> None:
        """One message and its reply; a turn that fails leaves the conversation as it was, and keeps
        the message for an empty line."""
        message = {"role": "user", "content": line}
        self.unanswered, progress = line, device.Progress()
        try:
            with self._ctrl_c.armed():
                text = render_chat(self.tokenizer, [*self.record.asked, message])
                prompt = self.tokenizer.encode(text, add_special_tokens=False)
                device.check_prompt(prompt, self.info)
                self.last = progress
                self.runner.run(self._reply(prompt, progress))
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("(stopped)" if progress.parts else f"(stopped; {_AGAIN})")
            if not progress.parts:
                return
        except (GenerationError, SetupError, ValueError) as error:
            room = "" if isinstance(error, GenerationError) else "/reset makes room; "
            say(f"error: {error}\n({room}{_AGAIN})")
            return
        self.unanswered = ""
        if sys.stdout.isatty() and sys.stderr.isatty():
            device.tell_worth(progress, self.agent.stats, color=self.drawn, explain=False)
        self.record.messages += [message, {"role": "assistant", "content": "".join(progress.parts)}]
        self._keep()

    def line(self, width: int) -> str:
        """The numbers of the moment, in one line."""
        last_s = None if self.last is None else self.last.per_token_s
        status = self.status.snapshot(after=1 << 62)  # without events
        if (stats := self.agent.stats) is not None:  # of this reply, as /stats says it
            counters = stats.counters
            if counters.prompt_read and not counters.committed:
                return terminal.reading_line(counters.prompt_read, self._prompt_length, width)
            drafting = replace(status.drafting, acceptance=counters.acceptance)
            status = replace(status, drafting=drafting)
        return terminal.status_line(status, width, 1.0 / last_s if last_s else None)

    async def _reply(self, prompt: Sequence[int], progress: device.Progress) -> None:
        self._ctrl_c.task, self._prompt_length = asyncio.current_task(), len(prompt)
        view = terminal.MarkdownView(self.line) if self.drawn else device.TextView(color=False)
        ticking = asyncio.create_task(_tick(view))
        generation = self.agent.generate(
            prompt, self.config.sampling, conversation=self.record.begun, model=self.name
        )
        try:
            await device.stream(generation, view, progress)
        finally:
            ticking.cancel()

    def _keep(self) -> None:
        """Write the conversation down; a disk that is full costs no chat."""
        if self.kept is None or not self.record.messages:
            return
        try:
            self.kept.write(self.record)
        except ConversationError as error:
            if not self._warned:
                say(f"this conversation is not kept: {error}")
            self._warned = True


async def _tick(view: device.View) -> None:
    """The line of numbers goes on while no token comes."""
    while isinstance(view, terminal.MarkdownView):
        await asyncio.sleep(2 * terminal.FRAME_S)
        view.tick()


def _file(argument: str) -> Path:
    """Raises ``ConversationError`` for the home of a user that there is not."""
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise ConversationError(f"{argument}: the system knows no such home folder") from error


_CONTINUE = option("Go on with the last one", "--continue", panel="The conversation")
_NO_HISTORY = option(
    "Keep neither this conversation nor what is typed", "--no-history", panel="The conversation"
)


@from_config(AgentConfig, MAX_TOKENS, TEMPERATURE, RULE, *DEVICE_FLAGS)
def chat(
    settings: AgentConfig,
    resume: Annotated[bool, _CONTINUE] = False,
    no_history: Annotated[bool, _NO_HISTORY] = False,
) -> None:
    """Talk with the target model.

    Enter sends, Alt-Enter begins another line, Ctrl-C ends a reply and keeps what came of it,
    Ctrl-D leaves. /help lists the commands: /system, /save, /load, /model, /stats, /reset, /quit.

    Conversations at a terminal are kept under $XDG_STATE_HOME/edgespec, readable for you alone.

    [dim]edgespec chat --continue[/]

    [dim]edgespec chat --no-history --temperature 0.7[/]
    """
    if resume and no_history:
        raise ConfigError("--continue needs the history that --no-history turns off")
    if no_history:
        settings = replace(settings, record="")
    if not takes_target_texts(settings):
        _chat_tokenizer(settings)  # a wrong one is told before the verifier is asked
    with (
        # Each of them unwinds, so that the terminal is as it was: also one that stays when a shell
        # or a script ends this process by SIGHUP.
        answered_by(lambda number, _: sys.exit(128 + number), (signal.SIGTERM, signal.SIGHUP)),
        asyncio.Runner() as runner,
        trace_to(settings.trace, settings.trace_tokens) as tracer,
    ):
        settings, info = runner.run(device.greet(settings))
        settings = device.for_trying(settings, info)
        text = _chat_tokenizer(settings, info.name)
        record, kept = Record(info.name), None
        if resume or (sys.stdin.isatty() and not no_history):
            record, kept = _kept(record, resume)
        say(f"talking with {info.name}; /help lists the commands, /quit or Ctrl-D leaves")
        if record.messages:
            say(record.described)
            if record.model and record.model != info.name:
                say(f"(it was with {one_line(record.model)})")
        with stoppable():
            agent = build.build_agent(settings, tracer=tracer, say=say, target=info)
        try:
            status = StatusSource(
                agent, tuple(map(build.with_port, settings.verifiers)), __version__
            )
            talk = Conversation(agent, text, settings, runner, info, status, record, kept)
            _at_keyboard(talk)
        finally:
            runner.run(agent.close())


def _at_keyboard(talk: Conversation) -> None:
    """Talk, with an editor where there is a terminal that can be drawn on."""
    if not terminal.is_drawable():
        talk.run()
        return
    talk.drawn = device.use_color()
    history = state_folder() / "chat_history" if talk.kept is not None else None
    commands = {name: more == "FILE" for name, (more, _) in COMMANDS.items()}
    talk.ask = terminal.TerminalEditor(talk.runner, talk.line, history, commands).ask
    with terminal.silent_keyboard():
        talk.run()


def _chat_tokenizer(settings: AgentConfig, model: str = "") -> build.PromptTokenizer:
    """Return the tokenizer of ``settings``, which is that of ``model``, by default of the setting
    itself. Raises ``SetupError`` for one without a chat template."""
    text = build.load_tokenizer(reference := build.tokenizer_reference(settings))
    if text.chat_template() is None:
        why = f"the tokenizer of {model or reference!r} has no chat template"
        raise SetupError(f"{why}; use `edgespec generate`")
    return text


def _kept(fresh: Record, resume: bool) -> tuple[Record, KeptFile]:
    """The conversation to go on with and where it is kept; ``fresh`` if there is none."""
    earlier = kept_conversations()
    for path in earlier[:-MAX_KEPT]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # told of when it is written
        (state_folder() / "conversations").mkdir(mode=0o700, parents=True, exist_ok=True)
    if resume and earlier:
        return read_record(earlier[-1]), KeptFile(earlier[-1])
    if resume:
        say("there is no earlier conversation; this is a new one")
    return fresh, KeptFile()
