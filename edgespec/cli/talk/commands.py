"""What a line that begins with a slash asks for."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from typing import Final


class Name(Enum):
    HELP = "/help"
    SYSTEM = "/system"
    SAVE = "/save"
    LOAD = "/load"
    MODEL = "/model"
    STATS = "/stats"
    RESET = "/reset"
    QUIT = "/quit"


_ABOUT: Final = {
    Name.HELP: ("", "this list"),
    Name.SYSTEM: ("[TEXT|-]", "tell the model how to be; alone: show it; -: no more"),
    Name.SAVE: ("FILE", "write the conversation to a file"),
    Name.LOAD: ("FILE", "go on with a conversation from a file"),
    Name.MODEL: ("[NAME]", "which models talk, and where; NAME: talk with this one"),
    Name.STATS: ("", "numbers of the last reply, and of this chat"),
    Name.RESET: ("", "forget the conversation and begin another"),
    Name.QUIT: ("", "leave, like Ctrl-D"),
}
_NEEDS_FILE: Final = (Name.SAVE, Name.LOAD)
_TAKES_TEXT: Final = (Name.SYSTEM, Name.MODEL, *_NEEDS_FILE)


class CommandError(ValueError):
    """The line is no command; the message says what would be one."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command and what stood behind it, without spaces around."""

    name: Name
    argument: str = ""


def is_command(line: str) -> bool:
    """Two slashes begin a message that begins with one."""
    return line.startswith("/") and not line.startswith("//")


def message_of(line: str) -> str:
    """What is sent to the model for a line that is no command."""
    return line[1:] if line.startswith("//") else line


def parse(line: str) -> Command:
    """Raises ``CommandError``."""
    word, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    try:
        name = Name(word)
    except ValueError:
        close = difflib.get_close_matches(word, [one.value for one in Name], 1)
        hint = f"did you mean {close[0]}?" if close else "/help lists the commands"
        raise CommandError(f"unknown command {word!r}; {hint}") from None
    if name in _NEEDS_FILE and not argument:
        raise CommandError(f"{word} needs the name of a file: {word} FILE")
    if argument and name not in _TAKES_TEXT:
        raise CommandError(f"{word} takes nothing behind it, but got {argument!r}")
    return Command(name, argument)


def command_help() -> str:
    """The commands and keys, a line each."""
    width = max(len(f"{name.value} {_ABOUT[name][0]}") for name in Name)
    lines = [f"  {f'{name.value} {_ABOUT[name][0]}':{width}}  {_ABOUT[name][1]}" for name in Name]
    keys = (
        "Enter sends; Alt-Enter, Ctrl-J or a \\ at the end of a line begins another line",
        "Ctrl-C ends a reply and keeps what came of it; Ctrl-D leaves",
        "// at the beginning sends a message that begins with a slash",
    )
    return "\n".join([*lines, *(f"  {key}" for key in keys)])
