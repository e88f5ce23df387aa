"""Prompts of a benchmark: a built-in set, or a JSON Lines file.

A line is an object with the prompt in ``prompt`` (HumanEval, OASST), ``question`` (GSM8K), ``text``
(MBPP) or the first of ``turns`` (MT-bench, Spec-Bench). The first of these fields that the object
has is used, and all others are ignored. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgespec.config.files import TooLargeError, read_text

MAX_FILE_BYTES = 256 << 20
MAX_PROMPTS = 100_000
_FIELDS = ("prompt", "question", "text")


class PromptError(ValueError):
    """A prompt file cannot be used. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """Prompt to continue, with its name in the report."""

    name: str
    text: str


def _built_in(name: str) -> tuple[BenchPrompt, ...]:
    lines = Path(__file__).with_name(f"{name}_prompts.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, lines.splitlines())
    return tuple([BenchPrompt(row["name"], row["prompt"]) for row in rows])


# Prompts of three kinds that a small model can continue, in turn, so that the first few hold each
# kind. The long ones have 400 to 500 tokens of the bundled tokenizer, which is more than the
# bundled draft was trained on.
DEFAULT_PROMPTS = _built_in("short")
BUILT_IN = {
    "short": DEFAULT_PROMPTS,
    **{name: _built_in(name) for name in ("long", "chat", "code", "maths")},
}
"""Sets of prompts by their names for ``edgespec bench --prompts``. Chat, code and maths are nine
requests of a user each, for a model with a chat template (``--chat``)."""


def whole_text(path: Path) -> str:
    """Return the text of a file of at most ``MAX_FILE_BYTES``. Raises ``PromptError``."""
    try:
        return read_text(path, MAX_FILE_BYTES)
    except FileNotFoundError:
        raise PromptError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, TooLargeError) as error:
        raise PromptError(f"{path}: not readable as UTF-8 text: {error}") from error


def read_prompts(path: Path) -> Iterator[BenchPrompt]:
    """Yield the prompts of a file in order, named ``file:line``. Lines are parsed one by one, so an
    error in a later line shows late. Raises ``PromptError``."""
    lines = whole_text(path).split("\n")
    texts = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not 1 <= len(texts) <= MAX_PROMPTS:
        count = f"more than {MAX_PROMPTS} prompts" if texts else "no prompt"
        raise PromptError(f"{path}: holds {count}")
    for number, line in texts:
        yield BenchPrompt(f"{path.name}:{number}", _text(line, f"{path}:{number}"))


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


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts that every arm continues, as token ids with their names, and the token ids that end
    an output."""

    names: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    eos_token_ids: frozenset[int]
    too_long: int = 0
    """Number of prompts that were left out, because they and their output exceed the context."""


def choose_workload(
    prompts: Iterable[BenchPrompt],
    encode: Callable[[str], Sequence[int]],
    *,
    limit: int,
    room: int,
    eos_token_ids: Iterable[int],
) -> Workload:
    """Return the first ``limit`` prompts of at most ``room`` tokens. Raises ``ValueError`` if there
    is none."""
    chosen: list[tuple[str, tuple[int, ...]]] = []
    too_long = 0
    for prompt in prompts:
        tokens = tuple(encode(prompt.text))
        if len(tokens) > room:
            too_long += 1
            continue
        chosen.append((prompt.name, tokens))
        if len(chosen) >= limit:
            break
    if not chosen:
        raise ValueError(
            f"none of the {too_long} prompts fits: with max-tokens of output the context has "
            f"room for {room} prompt tokens"
        )
    names, texts = zip(*chosen, strict=True)
    return Workload(names, texts, frozenset(eos_token_ids), too_long)
