"""Match tapes: the agreement of a draft model with the target, token by token, on real text.

Theory of operation. For every position of a generation the tape holds the target's token and its
rank among the draft's best ``width`` candidates *after the committed prefix* (-1: it was not among
them). A policy that uses ranks, and no values off the path, cannot distinguish a tape from the
models, so a replay commits, accepts and rejects exactly like the models.

A tape may also hold the draft's log-probability of its first candidate at each position. A policy
that uses confidences replays exactly as long as its nodes are right. The confidences after a wrong
node are on no tape.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from edgespec.config.files import TooLargeError, read_text, write_output
from edgespec.config.loading import build
from edgespec.core.protocol.work import Candidate
from edgespec.telemetry.trace import to_plain_data

FORMAT: Final = "edgespec-tape"
VERSION: Final = 1
MAX_TAPE_BYTES: Final = 1 << 30
MISS: Final = -1


class TapeError(ValueError):
    """A tape cannot be used. The message names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class TapedGeneration:
    """One generation. ``ranks`` is as long as ``tokens``. Raises ``TapeError``."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The target's tokens, from the first one after the prompt; the last may be an end token."""
    ranks: tuple[int, ...]
    """Rank of ``tokens[i]`` among the draft's candidates there: 0 is its first one, ``MISS``
    none."""
    logprobs: tuple[float, ...] = ()
    """The draft's log-probability of its first candidate at ``tokens[i]``. Empty: not recorded."""
    second_logprobs: tuple[float, ...] = ()
    """The draft's log-probability of its second candidate. Empty: not recorded."""

    def __post_init__(self) -> None:
        if not self.prompt or not self.tokens:
            raise TapeError(f"{self.name}: prompt and tokens must hold at least one token each")
        if len(self.ranks) != len(self.tokens):
            raise TapeError(f"{self.name}: {len(self.tokens)} tokens, but {len(self.ranks)} ranks")
        for name in ("logprobs", "second_logprobs"):
            count = len(getattr(self, name))
            if count and count != len(self.tokens):
                raise TapeError(f"{self.name}: {len(self.tokens)} tokens, but {count} {name}")


@dataclass(frozen=True, slots=True)
class MatchTape:
    target: str
    draft: str
    width: int
    """Candidates recorded at each position; ranks are below it."""
    generations: tuple[TapedGeneration, ...]
    eos_token_ids: tuple[int, ...] = ()
    about: dict[str, str] = field(default_factory=dict)
    """Sampling, machine, versions, command and date."""

    def __post_init__(self) -> None:
        if not self.generations:
            raise TapeError("a tape must hold at least one generation")
        for generation in self.generations:
            if not all(MISS <= rank < self.width for rank in generation.ranks):
                raise TapeError(f"{generation.name}: a rank is not in [{MISS}, {self.width})")

    def acceptance(self, rank: int = 0) -> float:
        """Return the share of positions whose token had this rank."""
        ranks = [r for generation in self.generations for r in generation.ranks]
        return sum(r == rank for r in ranks) / len(ranks)


class Agreement(NamedTuple):
    """The agreement of a draft with a text, position by position, as in ``TapedGeneration``."""

    ranks: tuple[int, ...]
    logprobs: tuple[float, ...]
    second_logprobs: tuple[float, ...]


def walk_along(
    step: Callable[[int, Sequence[int], int], Sequence[Candidate]],
    prompt: Sequence[int],
    tokens: Sequence[int],
    width: int,
) -> Agreement:
    """Run a drafter along ``tokens`` after ``prompt``, one token per step.

    Returns the rank of each token among the ``width`` candidates, and the log-probabilities of the
    first and second candidates, rounded to a thousandth. These are empty if a candidate was missing
    anywhere. ``step`` is that of a drafter which has begun."""
    ranks: list[int] = []
    logprobs: tuple[list[float], list[float]] = ([], [])
    keep, feed = 0, tuple(prompt)
    for token in tokens:
        candidates = step(keep, feed, width)
        guesses = [candidate.token for candidate in candidates]
        for kept, candidate in zip(logprobs, candidates, strict=False):
            kept.append(round(candidate.logprob, 3))
        ranks.append(guesses.index(token) if token in guesses else MISS)
        keep, feed = keep + len(feed), (token,)
    first, second = (
        tuple(kept) if len(kept) == len(ranks) and all(map(math.isfinite, kept)) else ()
        for kept in logprobs
    )
    return Agreement(tuple(ranks), first, second)


def write_tape(tape: MatchTape, path: Path) -> None:
    """Write one JSON object per line: a head, then one line for each generation."""
    head = {"format": FORMAT, "version": VERSION, **to_plain_data(tape)}
    del head["generations"]
    texts = [{k: v for k, v in to_plain_data(one).items() if v != []} for one in tape.generations]
    lines = [json.dumps(one, separators=(",", ":")) + "\n" for one in (head, *texts)]
    write_output(path, "".join(lines))


def read_tape(path: Path) -> MatchTape:
    """Read a tape from a file. Raises ``TapeError``."""
    try:
        lines = read_text(path, MAX_TAPE_BYTES).splitlines()
    except (OSError, TooLargeError, UnicodeDecodeError) as error:
        raise TapeError(f"{path}: not readable: {error}") from error
    if not lines:
        raise TapeError(f"{path}: empty, but must begin with a line of format {FORMAT}")
    number = 1
    try:
        head = json.loads(lines[0])
        if (head.pop("format", ""), head.pop("version", 0)) != (FORMAT, VERSION):
            raise TapeError(f"not a tape of format {FORMAT} version {VERSION}")
        generations = []
        for line in lines[1:]:
            number += 1
            generations.append(json.loads(line))
            build(TapedGeneration, generations[-1], "generation")
        number = 1
        return build(MatchTape, {**head, "generations": generations}, "tape")
    except (AttributeError, TypeError, ValueError) as error:
        raise TapeError(f"{path}:{number}: {error}") from error
