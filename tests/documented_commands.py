"""The commands of the pages: blocks of a shell in Markdown, their lines, and which words of a line
the command line knows."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import click
import typer

from tests.sources import ROOT

_BLOCK = re.compile(r"^ *```([^\n`]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SHELL, _WITH_PROMPTS = ("sh", "bash"), ("console", "")
_OURS = re.compile(r"(?:\S*/)?(edgespec(?:-sim)?) (.*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of shell commands. ``page``: its path in the repository; ``line``: where the block
    begins. ``commands``: its commands, without prompts, and without what they print."""

    page: str
    line: int
    commands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read_blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page.

    In a ``console`` block a command begins with ``$``; in an ``sh`` block each line is a command.
    A command goes on in the next line behind a backslash, or inside quotation marks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        if found[1] not in (*_SHELL, *_WITH_PROMPTS):
            continue
        commands: list[str] = []
        is_open = False
        for line in found[2].replace("\\\n", " ").splitlines():
            if is_open:
                commands[-1] += f"\n{line}"
            elif line.strip().startswith("$ "):
                commands.append(line.strip()[2:])
            elif line.strip() and found[1] in _SHELL:
                commands.append(line.strip())
            is_open = bool(commands) and not _has_closed_quotes(commands[-1])
        if commands:
            line_number = text.count("\n", 0, found.start()) + 1
            yield Block(page=page, line=line_number, commands=tuple(commands))


def _has_closed_quotes(command: str) -> bool:
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return False
    return True


def split_ours(command: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the program (``edgespec`` or ``edgespec-sim``) and the words of each call of ours in a
    command."""
    for part in re.split(r"&&|[;|(]", strip_comment(command)):
        if found := _OURS.match(part.strip()):
            words = itertools.takewhile(lambda word: word != ">", shlex.split(found[2]))
            yield found[1], [word.removesuffix(")") for word in words]


def strip_comment(command: str) -> str:
    """Return a command without the remark behind it. A hash without two spaces before it belongs to
    the command."""
    return re.split(r"\s{1,}# ", command, maxsplit=1)[0].rstrip()


@cache
def programs() -> dict[str, Any]:
    """Return both programs as click's commands."""
    from edgespec.cli.main import app
    from edgespec_sim.commands.main import app as simulator

    return {
        "edgespec": typer.main.get_command(app),
        "edgespec-sim": typer.main.get_command(simulator),
    }


def list_unknown_words(words: list[str], program: str = "edgespec") -> list[str]:
    """Return the command or the options of a line that the command line does not have."""
    command, rest = programs()[program], list(words)
    while hasattr(command, "get_command") and rest and not rest[0].startswith("-"):
        found = command.get_command(click.Context(command), rest[0])
        if found is None:
            return [rest[0]]
        command = found
        del rest[0]
    known = {"--help"} | {
        name for one in command.params for name in (*one.opts, *one.secondary_opts)
    }
    if "--" in rest:
        rest = rest[: rest.index("--")]
    given = [word.partition("=")[0] for word in rest if word.startswith("-") and word != "-"]
    return [word for word in given if word not in known]
