"""The texts a bench runs on: a built-in set, or a JSON Lines file.

A line is an object with the prompt in ``prompt`` (HumanEval, OASST), ``question`` (GSM8K), ``text``
(MBPP) or the first of ``turns`` (MT-bench, Spec-Bench); the first of these it has counts, other
fields are ignored. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_LINE_CHARACTERS = 1 << 20
MAX_PROMPTS = 100_000
_FIELDS = ("prompt", "question", "text")


class PromptError(ValueError):
    """A prompt file cannot be used; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """A text to go on with."""

    name: str
    text: str


# Three kinds that a small model can go on with, in turn: any first few hold each of them.
DEFAULT_PROMPTS = (
    BenchPrompt(
        "story-1",
        "Once upon a time there was a fisherman who lived with his wife in a small house by the "
        "sea. One morning he",
    ),
    BenchPrompt(
        "python-1",
        'def read_lines(path):\n    """Return the lines of the file at path as a list."""\n    ',
    ),
    BenchPrompt(
        "sums-1",
        "Anna has 12 apples. She gives 5 of them to Ben and buys 8 more. How many apples does "
        "Anna have now?\n",
    ),
    BenchPrompt(
        "story-2",
        "The old man closed the door behind him and looked out into the night. It was raining, and",
    ),
    BenchPrompt(
        "python-2",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        ",
    ),
    BenchPrompt(
        "sums-2",
        "A train travels 60 miles in one hour. How many miles does it travel in 4 hours?\n",
    ),
    BenchPrompt(
        "story-3",
        '"I do not think that we shall see him again," said the captain. "He went down to the '
        "harbour, and",
    ),
    BenchPrompt(
        "python-3",
        "import unittest\n\n\nclass TestAddition(unittest.TestCase):\n    def test_two_numbers("
        "self):\n        ",
    ),
    BenchPrompt(
        "sums-3",
        "There are 24 pupils in a class. Half of them walk to school and 6 come by bus. The rest "
        "ride a bicycle. How many ride a bicycle?\n",
    ),
)


def read_prompts(path: Path) -> Iterator[BenchPrompt]:
    """The prompts of a file, in order, read as they are asked for; named ``file:line``.

    Raises ``PromptError``.
    """
    found = 0
    try:
        with path.open(encoding="utf-8") as lines:
            # One more than the bound, to tell a line at it from one beyond it.
            number = 0
            while line := lines.readline(MAX_LINE_CHARACTERS + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > MAX_LINE_CHARACTERS:
                    raise PromptError(f"{where}: longer than {MAX_LINE_CHARACTERS} characters")
                if not line.strip():
                    continue
                found += 1
                if found > MAX_PROMPTS:
                    raise PromptError(f"{where}: more than {MAX_PROMPTS} prompts")
                yield BenchPrompt(f"{path.name}:{number}", _text(line, where))
    except FileNotFoundError:
        raise PromptError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: not readable as UTF-8 text: {error}") from error
    if not found:
        raise PromptError(f"{path}: holds no prompt")


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict):
        raise PromptError(f"{where}: a JSON {type(row).__name__}, but must be an object")
    name, value = next(((name, row[name]) for name in _FIELDS if name in row), ("", None))
    if not name:
        if "turns" not in row:
            fields = ", ".join(sorted(row)[:8]) or "none"
            raise PromptError(
                f"{where}: none of the fields {', '.join(_FIELDS)}, turns; it has: {fields}"
            )
        turns = row["turns"]
        name, value = "turns[0]", turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{where}: {name} must be a text that is not empty")
    return value
