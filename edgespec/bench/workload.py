"""What every arm is asked to do: the same prompts, as token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from edgespec.bench.prompts import BenchPrompt


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
