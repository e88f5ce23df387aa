"""The texts a bench runs on: a built-in set, or a JSON Lines file.

A line is an object with the prompt in ``prompt`` (HumanEval, OASST), ``question`` (GSM8K), ``text``
(MBPP) or the first of ``turns`` (MT-bench, Spec-Bench); the first of these it has counts, other
fields are ignored. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def _long_python() -> str:
    """A module of small functions, cut off in the last one."""
    shapes = (
        ("total", "the sum of all values", "return sum(values)"),
        ("largest", "the largest value", "return max(values)"),
        ("smallest", "the smallest value", "return min(values)"),
        ("mean", "the mean of all values", "return sum(values) / len(values)"),
        ("squares", "the square of each value", "return [value * value for value in values]"),
        ("positive", "the values above zero", "return [value for value in values if value > 0]"),
        (
            "even",
            "the values that are even",
            "return [value for value in values if value % 2 == 0]",
        ),
        ("distinct", "each value once, in order", "return list(dict.fromkeys(values))"),
        ("backwards", "the values in reverse order", "return list(reversed(values))"),
    )
    functions = [
        f'def {name}(values):\n    """Return {what}."""\n    if not values:\n'
        f'        raise ValueError("{name} needs at least one value")\n    {code}\n\n\n'
        for name, what, code in shapes
    ]
    return "".join(functions) + 'def median(values):\n    """Return the middle value."""\n    '


def _long_sums() -> str:
    """Sums that are worked out, and one that is not."""
    names = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Greta", "Henry", "Ida")
    solved = [
        f"{name} has {12 + 3 * n} apples, gives {4 + n} of them away and buys {7 + 2 * n} more. How"
        f" many apples does {name} have now? First there are {12 + 3 * n} - {4 + n} = {8 + 2 * n}"
        f" apples, then {8 + 2 * n} + {7 + 2 * n} = {15 + 4 * n}. The answer is {15 + 4 * n}.\n\n"
        for n, name in enumerate(names)
    ]
    return (
        "".join(solved) + "John has 40 apples, gives 15 of them away and buys 20 more. How many"
        " apples does John have now?"
    )


# Of 400 to 500 tokens of the bundled tokenizer, longer than what the bundled draft was trained on.
LONG_PROMPTS = (
    BenchPrompt(
        "long-story",
        "The village lay at the end of a long valley, and in winter nobody came there for "
        "weeks. In the last house by the wood lived an old clockmaker and his granddaughter, "
        "whose name was Clara. Every evening, when the lamps were lit, he wound the clocks in "
        "the shop, one after the other, and told her where each of them had come from. This "
        "one had stood in the house of a captain, he said, and had crossed the sea nine "
        "times. That one had belonged to a judge, who was never late in his life and never "
        "early. One evening, when the snow stood as high as the windows, there was a knock at "
        "the door. The old man took the lamp and went to open it. Outside stood a stranger in "
        'a grey coat, with a box under his arm. "I have heard that you mend what others '
        'cannot mend," said the stranger. He put the box on the table and opened it. In it '
        "lay a clock as small as a walnut, made of silver, and it did not go. The old man "
        'looked at it for a long time through his glass. "Who made this?" he asked. "I do not '
        'know," said the stranger. "My mother had it from her mother, and it has not gone '
        "since the day that I was born. I can pay you well for it, but I must have it before "
        'the spring." Then he told them that he lived beyond the mountains, that the road '
        "would soon be closed, and that he would come back when the snow had melted. Clara "
        "looked at the little clock and thought that she had never seen anything so "
        "beautiful. The stranger drank a cup of tea, thanked them, and went out again into "
        "the night. In the morning the old man began his work. He took the clock apart, wheel "
        "by wheel, and laid the wheels on a white cloth. There were forty of them, and the "
        'smallest could hardly be seen. "Come here, Clara," he said, "your eyes are better '
        'than mine. Do you see what is written on the rim?" She bent down over the cloth, and',
    ),
    BenchPrompt("long-python", _long_python()),
    BenchPrompt("long-sums", _long_sums()),
)
BUILT_IN = {"short": DEFAULT_PROMPTS, "long": LONG_PROMPTS}
"""Sets of prompts by the name that ``edgespec bench --prompts`` knows them by."""


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


# --- what every arm is asked to do -------------------------------------------------------------
# the same prompts, as token ids.


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts as token ids, with their names, and the ids that end a text."""

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    eos_token_ids: frozenset[int]
    too_long: int = 0
    """Prompts left out because they do not fit with their output into the context."""


def choose_workload(
    prompts: Iterable[BenchPrompt],
    encode: Callable[[str], Sequence[int]],
    *,
    limit: int,
    room: int,
    eos_token_ids: Iterable[int],
) -> Workload:
    """The first ``limit`` prompts of at most ``room`` tokens.

    Raises ``ValueError`` when there is none.
    """
    names: list[str] = []
    chosen: list[tuple[int, ...]] = []
    too_long = 0
    for prompt in prompts:
        tokens = tuple(encode(prompt.text))
        if len(tokens) > room:
            too_long += 1
            continue
        names.append(prompt.name)
        chosen.append(tokens)
        if len(chosen) >= limit:
            break
    if not chosen:
        raise ValueError(
            f"none of the {too_long} prompts fits: with max-tokens of output the context has "
            f"room for {room} prompt tokens"
        )
    return Workload(tuple(names), tuple(chosen), frozenset(eos_token_ids), too_long)
