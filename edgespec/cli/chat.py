"""``edgespec chat``: a conversation, turn by turn, in the model's own chat format.

At a terminal each conversation is saved as one JSON file in
``$XDG_STATE_HOME/edgespec/conversations`` (by default ``~/.local/state``), with mode 0600 in a
folder of mode 0700. The file is replaced in one step after each reply, so it is never half written.
The newest ``MAX_KEPT`` files stay.
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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from edgespec import __version__
from edgespec.cli import chat_terminal as terminal
from edgespec.cli import device
from edgespec.cli.generate import read_prompt
from edgespec.cli.options import DEVICE_FLAGS, MAX_TOKENS, RULE, TEMPERATURE, from_config, option
from edgespec.cli.running import say, signals_handled_by, stopping_at_once, trace_to
from edgespec.config import AgentConfig, ConfigError
from edgespec.config.common import SetupError
from edgespec.config.files import read_bytes, read_text, replace_file, user_folder
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.checks import is_unicode, make_one_line, make_printable
from edgespec.core.protocol.pictures import (
    MAX_PICTURE_BYTES,
    PlacedPicture,
    check_picture,
    place_pictures,
)
from edgespec.core.protocol.predicted_text import check_prediction_length
from edgespec.device import build
from edgespec.device.agent import Agent, GenerationError, check_prediction_text
from edgespec.device.borrowed_tokenizer import takes_target_texts
from edgespec.device.connections import Connections
from edgespec.device.status import StatusSource
from edgespec.models.tokenizer import render_chat
from edgespec.operating_system import STOPPING_SIGNALS

MAX_KEPT: Final = 200
MAX_BYTES: Final = 16 << 20
_FORMAT: Final = {"format": "edgespec-conversation", "version": 1}
_QUOTED_CHARS: Final = 60
"""Characters of the last message that are quoted when a conversation continues."""
_RESEND_HINT: Final = "an empty line sends your message again"
COMMANDS: Final = {
    "/help": ("", "show this list"),
    "/picture": ("FILE", "attach a picture to your next message"),
    "/system": ("[TEXT|-]", "set the system message; alone: show it; -: remove it"),
    "/save": ("FILE", "write the conversation to a file"),
    "/load": ("FILE", "continue a conversation from a file"),
    "/predict": ("[FILE|-]", "expect the next reply to be like a file; alone: show it; -: forget"),
    "/model": ("[NAME]", "show target, draft and verifiers; NAME: use this target"),
    "/stats": ("", "show statistics of the last reply and of this chat"),
    "/reset": ("", "begin a new conversation"),
    "/quit": ("", "leave, like Ctrl-D"),
}
"""Arguments and help of each command."""
_KEYS: Final = """
  Enter sends the message; Alt-Enter, Ctrl-J or a \\ at the end of a line begins another line
  Ctrl-C stops a reply and keeps what has arrived; Ctrl-D leaves
  Up, Down and Ctrl-R find earlier messages; Tab completes; Ctrl-X Ctrl-E opens $EDITOR
  // at the beginning sends a message that begins with a slash"""


# --- a conversation as a file ------------------------------------------------------------------


class ConversationError(ValueError):
    """A command of the chat cannot be carried out. The message says why."""


@dataclass(slots=True)
class Record:
    """Messages of a conversation, oldest first. The message ``system`` comes before all others."""

    model: str = ""
    system: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Each has ``role`` and ``content``, and a user's may have ``pictures``: paths of files."""
    begun: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def prompt_messages(self) -> list[dict[str, Any]]:
        """Messages of the next prompt: the system message, if there is one, and all others."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def write(self, path: Path) -> None:
        """Replace the file ``path`` in one step. Raises ``ConversationError`` and leaves the file
        unchanged if it cannot be written."""
        text = json.dumps(_FORMAT | asdict(self), ensure_ascii=False, indent=1) + "\n"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(path, text)
        except OSError as error:
            why = error.strerror or error
            raise ConversationError(f"{path}: cannot be written: {why}") from error

    @property
    def description(self) -> str:
        """One line for a user who continues this conversation."""
        count = len(self.messages)
        about = f"continuing a conversation of {count} message{'' if count == 1 else 's'}"
        about += f", begun {make_one_line(self.begun)}" if self.begun else ""
        if self.messages:
            last = make_one_line(self.messages[-1]["content"])
            cut = "…" if len(last) > _QUOTED_CHARS else ""
            about += f"; the last one: {last[:_QUOTED_CHARS]}{cut}"
        return about


def read_record(path: Path) -> Record:
    """Return the conversation in the file ``path``. Raises ``ConversationError``, which names the
    file and what is wrong with it."""
    try:
        return _parse_record(json.loads(read_text(path, MAX_BYTES)))
    except (OSError, RecursionError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConversationError(f"{path}: not a conversation file: {why}") from error


def _parse_record(data: Any) -> Record:
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
                found.messages.append({"role": role, "content": content, **_read_paths(one)})
            case _:
                roles = "a role of system, user, assistant, and text as content"
                raise ValueError(f"messages[{number}] must have {roles}")
    return found


def _read_paths(message: dict[str, Any]) -> dict[str, list[str]]:
    """Return the pictures of a message, if it has any. Raises ``ValueError``."""
    if (paths := message.get("pictures")) is None:
        return {}
    if not isinstance(paths, list) or not all(isinstance(one, str) for one in paths):
        raise ValueError("pictures must be a list of paths")
    return {"pictures": paths}


def state_folder() -> Path:
    """Return ``$XDG_STATE_HOME/edgespec``, by default ``~/.local/state/edgespec``. Raises
    ``OSError`` if this user has no home folder."""
    return user_folder("XDG_STATE_HOME", ".local/state", ", or give --no-history")


def kept_conversations() -> list[Path]:
    """Return the saved conversations, the newest last."""
    return sorted((state_folder() / "conversations").glob("*.json"))  # a name begins with the time


class KeptFile:
    """File in which one chat saves its conversation.

    ``replaces`` is the file of the conversation that it continues, which is removed once the new
    file exists. So two chats that continue the same conversation lose nothing."""

    def __init__(self, replaces: Path | None = None) -> None:
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        name = f"{stamp}-{secrets.token_hex(3)}.json"
        self.path = state_folder() / "conversations" / name
        self._replaces = replaces

    def write(self, record: Record) -> None:
        """Save the conversation. Raises ``ConversationError``."""
        record.write(self.path)
        if self._replaces is not None:
            with contextlib.suppress(OSError):
                self._replaces.unlink()
            self._replaces = None


def parse(line: str) -> tuple[str, str]:
    """Return the command of a line, and its argument. Raises ``ConversationError``, which says what
    would be right."""
    word, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, 1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        raise ConversationError(f"unknown command {word!r}; {hint}")
    if COMMANDS[word][0] == "FILE" and not argument:
        raise ConversationError(f"{word} needs the name of a file: {word} FILE")
    if argument and not COMMANDS[word][0]:
        raise ConversationError(f"{word} takes no argument, but got {argument!r}")
    return word, argument


@dataclass(slots=True)
class Conversation:
    """One chat: its conversation so far, and the loop that continues it."""

    agent: Agent
    tokenizer: build.PromptTokenizer
    config: AgentConfig
    runner: terminal.SignalRunner
    info: ModelInfo
    """Target in use."""
    status: StatusSource
    record: Record
    kept: KeptFile | None = None
    """File in which the conversation is saved, or None to save nothing."""
    read_message: Callable[[], str] = lambda: input(terminal.PROMPT if sys.stdin.isatty() else "")
    """Function that returns the user's next message. It raises ``EOFError`` at the end of the
    input, and ``KeyboardInterrupt`` for a Ctrl-C."""
    name: str = ""
    """Name of the target that the user chose in this chat. Empty keeps the agent's setting."""
    draws_markdown: bool = False
    """Replies are drawn as markdown on a terminal. Otherwise they are printed as plain text."""
    last: device.ReceivedTokens | None = None
    """Tokens of the last reply."""
    prediction: str = ""
    """Text that the next reply is expected to be like. It may still differ in any way."""
    predicted_path: Path | None = None
    """File of the prediction."""
    unanswered: str = ""
    """Message that got no reply. An empty line sends it again."""
    attached: list[str] = field(default_factory=list)
    """Paths of the pictures that go with the next message."""
    _ctrl_c: terminal.CtrlC = field(default_factory=terminal.CtrlC)
    _warned: bool = False
    _prompt_length: int = 0
    """Length in tokens of the prompt that is being answered."""

    def run(self) -> None:
        """Talk until /quit or the end of the input."""
        with signals_handled_by(self._ctrl_c.pressed, (signal.SIGINT,)):
            while self._handle_next_line():
                pass

    def answer(self, text: str) -> None:
        """Answer one message, and keep nothing but the file of the conversation that it continues.

        Raises ``KeyboardInterrupt`` for a Ctrl-C, and ``ConversationError``, ``GenerationError``,
        ``SetupError`` or ``ValueError`` if there is no whole reply."""
        message, received = {"role": "user", "content": text}, device.ReceivedTokens()
        with signals_handled_by(self._ctrl_c.pressed, (signal.SIGINT,)), self._ctrl_c.armed():
            try:
                self._request_reply(message, received)
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
        self._keep_reply(message, received)

    def _handle_next_line(self) -> bool:
        """Handle one message or command, and return whether the chat continues."""
        try:
            with self._ctrl_c.armed():
                line = self.read_message().strip()
        except EOFError:
            say("")
            return False
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /quit leaves)")
            return True
        if not is_unicode(line):
            say("error: your message is not UTF-8, so it was not sent; type it again")
            return True
        if line.startswith("/") and not line.startswith("//"):
            return self._handle_command(line)
        if line or self.unanswered:
            self._send((line[1:] if line.startswith("//") else line) or self.unanswered)
        return True

    def _handle_command(self, line: str) -> bool:
        """Carry out a command, and return whether the chat continues."""
        try:
            with self._ctrl_c.armed():
                name, argument = parse(line)
                if name == "/quit":
                    return False
                say(self._run_command(name, argument))
        except (ConversationError, GenerationError) as error:
            say(f"error: {error}")
        except KeyboardInterrupt:
            say("(stopped)")
        return True

    def _run_command(self, name: str, argument: str) -> str:
        """Carry out one command, and return the text to print."""
        match name:
            case "/system":
                return self._set_system(argument)
            case "/picture":
                return self._attach(_expand_path(argument))
            case "/save":
                path = _expand_path(argument)
                if path.exists():
                    read_record(path)  # it raises an error, and so protects any other kind of file
                self.record.write(path)
                return f"{len(self.record.messages)} messages written to {path}"
            case "/load":
                self._switch_to(read_record(_expand_path(argument)))
                return self.record.description
            case "/predict":
                return self._set_prediction(argument)
            case "/model":
                return self._change_model(argument) if argument else self._describe_models()
            case "/stats":
                return "no reply yet" if self.last is None else self._describe_stats(self.last)
            case "/reset":
                self._switch_to(Record(self.info.name))
                return "this is a new conversation"
        lines = [f"  {name + ' ' + more:17}  {about}" for name, (more, about) in COMMANDS.items()]
        return "\n".join(lines) + _KEYS

    def _switch_to(self, record: Record) -> None:
        """Continue with another conversation. The one before stays in its own file."""
        self.record, self.attached = record, []
        if self.kept is not None:
            self.kept = KeptFile()

    def _attach(self, path: Path) -> str:
        """Attach a picture to the next message. Raises ``ConversationError`` if it cannot be used,
        or if the target reads text only."""
        self._read_picture(str(path))
        self.attached.append(str(path.resolve()))
        return f"{path.name} goes with your next message"

    def _read_picture(self, path: str) -> bytes:
        """Return the bytes of a picture. Raises ``ConversationError``."""
        if (bounds := self.info.pictures) is None:
            raise ConversationError(f"{self.info.name!r} reads text only here")
        try:
            data = read_bytes(Path(path), MAX_PICTURE_BYTES)
            check_picture(data, bounds)
        except OSError as error:
            raise ConversationError(f"{path}: cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConversationError(f"{path} {error}") from error
        return data

    def _write_prompt(
        self, messages: Sequence[dict[str, Any]]
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """Return the prompt of a conversation, and its pictures. Raises ``ValueError``."""
        shown: list[dict[str, Any]] = []
        pictures: list[bytes] = []
        for message in messages:
            plain = {"role": message["role"], "content": message["content"]}
            if paths := message.get("pictures"):
                pictures += map(self._read_picture, paths)
                text = {"type": "text", "text": message["content"]}
                plain["content"] = [*[{"type": "image"}] * len(paths), text]
            shown.append(plain)
        rendered = render_chat(self.tokenizer, shown)
        prompt = self.tokenizer.encode(rendered, add_special_tokens=False)
        bounds = self.info.pictures
        if not pictures or bounds is None:
            return prompt, ()
        if len(pictures) > bounds.max_count:
            most = f"at most {bounds.max_count} are read"
            raise ConversationError(f"the conversation has {len(pictures)} pictures, but {most}")
        return prompt, place_pictures(prompt, pictures, bounds)

    def _set_system(self, text: str) -> str:
        if not text:
            text = make_printable(self.record.system)
            return f"system: {text}" if text else "no system message"
        self.record.system = "" if text == "-" else text
        self._save()
        return "the system message applies from the next reply on"

    def _set_prediction(self, name: str) -> str:
        """Expect the next reply to be like a file. Raises ``ConversationError`` for a file that
        cannot be used, and keeps the prediction that there was."""
        if name and name != "-":
            path = _expand_path(name)
            try:
                text = read_text(path, MAX_BYTES)
                check_prediction_text(text)
                tokens = self.tokenizer.encode(text, add_special_tokens=False)
                check_prediction_length(len(tokens))
            except UnicodeDecodeError as error:
                raise ConversationError(f"{path}: no prediction: is not UTF-8 text") from error
            except (OSError, ValueError) as error:
                why = error.strerror if isinstance(error, OSError) else None
                raise ConversationError(f"{path}: no prediction: {why or error}") from error
            self.prediction, self.predicted_path = text, path
        elif name:
            self.prediction, self.predicted_path = "", None
        if not self.prediction:
            return "no prediction: the next reply is not expected to be like any file"
        count = len(self.prediction)
        return f"the next reply is expected to be like {self.predicted_path} ({count} characters)"

    def _change_model(self, name: str) -> str:
        """Use another target from the next reply on.

        Raises ``ConversationError`` for a name that is not served, and ``GenerationError`` if no
        verifier answers."""
        served = {one.name: one for one in self.runner.run(self.agent.models())}
        if (chosen := served.get(name)) is None:
            known = ", ".join(map(repr, served))
            raise ConversationError(f"unknown model {name!r}; served are {known}")
        if chosen.vocabulary != self.info.vocabulary:
            why = f"{name!r} has another vocabulary; begin a new chat with --model {name}"
            raise ConversationError(why)
        self.info, self.name, self.record.model = chosen, name, name
        self._save()
        return f"talking with {name} from the next reply on"

    def _describe_models(self) -> str:
        drafter = self.agent.drafter
        verifiers = self.status.snapshot().verifiers
        lines = [
            f"target    {self.info.name}, context {self.info.context_length} tokens",
            f"draft     {'none (stream only)' if drafter is None else drafter.info.name}",
            f"policy    {self.config.policy.name.value}, width {self.config.policy.width}",
            *(f"verifier  {one.address} ({one.state.value})" for one in verifiers),
        ]
        return "\n".join(lines)

    def _describe_stats(self, last: device.ReceivedTokens) -> str:
        status = self.status.snapshot()
        totals, drafting = status.totals, status.drafting
        acceptance = "" if totals.acceptance is None else f", acceptance {totals.acceptance:.0%}"
        replies = "reply" if totals.generations == 1 else "replies"
        verdict = {True: "drafting pays", False: "drafting rests", None: "drafting"}
        return (
            f"{device.describe_generation(last, self.agent.stats)}\n"
            f"this chat: {totals.tokens} tokens in {totals.generations} {replies}{acceptance},"
            f" {totals.reconnects} reconnects\n{verdict[drafting.worth]}: {drafting.why}"
        )

    def _send(self, text: str) -> None:
        """Send one message and receive its reply.

        If that fails, the conversation stays as it was, and an empty line sends the message again.
        """
        message: dict[str, Any] = {"role": "user", "content": text}
        if self.attached:
            message["pictures"] = list(self.attached)
        self.unanswered, received = text, device.ReceivedTokens()
        try:
            with self._ctrl_c.armed():
                self._request_reply(message, received)
        except (KeyboardInterrupt, asyncio.CancelledError):
            say("(stopped)" if received.parts else f"(stopped; {_RESEND_HINT})")
            if not received.parts:
                return
        except (GenerationError, SetupError, ValueError) as error:
            room = "" if isinstance(error, GenerationError) else "/reset makes room; "
            say(f"error: {error}\n({room}{_RESEND_HINT})")
            return
        self.unanswered = self.prediction = ""
        self.attached = []
        self._keep_reply(message, received)

    def _request_reply(self, message: dict[str, Any], received: device.ReceivedTokens) -> None:
        """Send one message and show its reply, whose tokens are put into ``received``."""
        prompt, pictures = self._write_prompt([*self.record.prompt_messages, message])
        device.check_prompt(prompt, self.info)
        self.last = received
        self.runner.run(self._receive_reply(prompt, pictures, received))

    def _keep_reply(self, message: dict[str, Any], received: device.ReceivedTokens) -> None:
        """Report how the drafts of a reply did, and add it to the conversation with its message."""
        if sys.stdout.isatty() and sys.stderr.isatty():
            device.report_drafting(
                received, self.agent.stats, color=self.draws_markdown, explain=False
            )
        self.record.messages += [message, {"role": "assistant", "content": "".join(received.parts)}]
        self._save()

    def status_line(self, width: int) -> str:
        """Return the current numbers in one line of at most ``width`` columns."""
        last_s = None if self.last is None else self.last.per_token_s
        status = self.status.snapshot(after=1 << 62)  # without events
        if (stats := self.agent.stats) is not None:  # the current reply's numbers, as in /stats
            counters = stats.counters
            if counters.prompt_read and not counters.committed:
                return terminal.prompt_line(counters.prompt_read, self._prompt_length, width)
            drafting = replace(status.drafting, acceptance=counters.acceptance)
            status = replace(status, drafting=drafting)
        return terminal.status_line(status, width, 1.0 / last_s if last_s else None)

    async def _receive_reply(
        self,
        prompt: Sequence[int],
        pictures: Sequence[PlacedPicture],
        received: device.ReceivedTokens,
    ) -> None:
        self._ctrl_c.task, self._prompt_length = asyncio.current_task(), len(prompt)
        view: device.View = device.TextView(color=False)
        if self.draws_markdown:
            view = terminal.MarkdownView(self.status_line)
        refreshing = asyncio.create_task(_refresh(view))
        generation = self.agent.generate(
            prompt,
            self.config.sampling,
            conversation=self.record.begun,
            model=self.name,
            prediction=self.prediction,
            pictures=pictures,
        )
        try:
            await device.stream(generation, view, received)
        finally:
            refreshing.cancel()

    def _save(self) -> None:
        """Save the conversation, if it is to be kept. An error is printed once and ends nothing."""
        if self.kept is None or not self.record.messages:
            return
        try:
            self.kept.write(self.record)
        except ConversationError as error:
            if not self._warned:
                say(f"this conversation cannot be saved: {error}")
            self._warned = True


async def _refresh(view: device.View) -> None:
    """Keep the line of numbers current while no token arrives."""
    while isinstance(view, terminal.MarkdownView):
        await asyncio.sleep(2 * terminal.FRAME_S)
        view.refresh()


def _expand_path(argument: str) -> Path:
    """Return the path with ``~`` expanded. Raises ``ConversationError`` for the home folder of an
    unknown user."""
    try:
        return Path(argument).expanduser()
    except RuntimeError as error:
        raise ConversationError(f"{argument}: the system knows no such home folder") from error


_CONTINUE = option("Continue the last conversation", "--continue", panel="Conversation")
_NO_HISTORY = option(
    "Save neither this conversation nor the messages you type",
    "--no-history",
    panel="Conversation",
)


_MESSAGE = typer.Argument(
    metavar="MESSAGE|-",
    help="One message to answer, after which the command ends; - reads it from stdin",
)


@from_config(AgentConfig, MAX_TOKENS, TEMPERATURE, RULE, *DEVICE_FLAGS)
def chat(
    settings: AgentConfig,
    message: Annotated[str | None, _MESSAGE] = None,
    resume: Annotated[bool, _CONTINUE] = False,
    no_history: Annotated[bool, _NO_HISTORY] = False,
) -> None:
    """Hold a conversation with the target model.

    Enter sends a message, Alt-Enter begins another line, Ctrl-C stops a reply and keeps what has
    arrived, Ctrl-D leaves. /help explains the commands /picture, /system, /save, /load, /predict,
    /model, /stats, /reset and /quit.

    At a terminal, conversations are saved under $XDG_STATE_HOME/edgespec (~/.local/state/edgespec),
    readable by you alone. One that answers a single MESSAGE is not, but for --continue.

    [dim]edgespec chat "Why is the sky blue?"[/]

    [dim]edgespec chat --continue[/]

    [dim]edgespec chat --no-history --temperature 0.7[/]
    """
    if resume and no_history:
        raise ConfigError("--continue needs the history that --no-history turns off")
    if no_history:
        settings = replace(settings, record="")
    text = None if message is None else read_prompt(message, "MESSAGE")
    if not takes_target_texts(settings):
        _chat_tokenizer(settings)  # an error is reported before the verifier is probed
    runner = terminal.SignalRunner()
    with (
        runner,
        # These signals unwind the stack, so that the terminal is restored: it may outlive this
        # process, which a shell or a script can end by SIGHUP.
        signals_handled_by(
            runner.end, [one for one in STOPPING_SIGNALS if one is not signal.SIGINT]
        ),
        trace_to(settings.trace, settings.trace_tokens) as tracer,
        contextlib.ExitStack() as leaving,
    ):
        connections = Connections(settings, with_texts=takes_target_texts(settings))
        leaving.callback(lambda: runner.run(connections.close()))
        settings, info = runner.run(device.choose_verifier(settings, connections))
        settings = device.with_bundled_sampling(settings, info)
        tokenizer = _chat_tokenizer(settings, info.name)
        record, kept = Record(info.name), None
        if resume or (sys.stdin.isatty() and not no_history and text is None):
            record, kept = _open_record(record, resume)
        if text is None:
            say(f"talking with {info.name}; /help explains the commands, /quit or Ctrl-D leaves")
        if record.messages:
            say(record.description)
            if record.model and record.model != info.name:
                say(f"(its earlier replies are by {make_one_line(record.model)})")
        with stopping_at_once():
            agent = build.build_agent(
                settings, tracer=tracer, say=say, target=info, lease=connections.lease
            )
        try:
            runner.run(_warm_up(agent, connections))
            status = StatusSource(
                agent, tuple(map(build.with_port, settings.verifiers)), __version__
            )
            conversation = Conversation(
                agent=agent,
                tokenizer=tokenizer,
                config=settings,
                runner=runner,
                info=info,
                status=status,
                record=record,
                kept=kept,
            )
            _converse(conversation, text)
        finally:
            runner.run(agent.close())


async def _warm_up(agent: Agent, connections: Connections) -> None:
    """Keep the connections open while the user types."""
    connections.keep_warm()
    await agent.warm_up()


def _converse(conversation: Conversation, text: str | None) -> None:
    """Answer the message ``text``, or run the conversation if there is none. It has an editor if
    the terminal can be drawn on."""
    run = conversation.run if text is None else partial(conversation.answer, text)
    if not terminal.is_drawable():
        run()
        return
    conversation.draws_markdown = device.should_use_color()
    if text is not None:
        with terminal.silent_keyboard():
            run()
        return
    history = state_folder() / "chat_history" if conversation.kept is not None else None
    commands = {name: argument == "FILE" for name, (argument, _) in COMMANDS.items()}
    editor = terminal.TerminalEditor(
        conversation.runner, conversation.status_line, history, commands
    )
    conversation.read_message = editor.read_message
    with terminal.silent_keyboard():
        conversation.run()


def _chat_tokenizer(settings: AgentConfig, model: str = "") -> build.PromptTokenizer:
    """Return the tokenizer of ``settings``. Raises ``SetupError`` if it has no chat template; the
    message calls it the tokenizer of ``model``."""
    tokenizer = build.load_tokenizer(reference := build.tokenizer_reference(settings))
    if tokenizer.chat_template() is None:
        why = f"the tokenizer of {model or reference!r} has no chat template"
        raise SetupError(f"{why}; use `edgespec generate`")
    return tokenizer


def _open_record(new: Record, resume: bool) -> tuple[Record, KeptFile]:
    """Return the conversation of a chat and the file to save it in. With ``resume`` it is the last
    one saved, if there is one, else ``new``. Old files beyond ``MAX_KEPT`` are deleted."""
    earlier = kept_conversations()
    for path in earlier[:-MAX_KEPT]:
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the error is reported when the file is written
        (state_folder() / "conversations").mkdir(mode=0o700, parents=True, exist_ok=True)
    if resume and earlier:
        return read_record(earlier[-1]), KeptFile(earlier[-1])
    if resume:
        say("there is no earlier conversation; this is a new one")
    return new, KeptFile()
