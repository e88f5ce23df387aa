"""How often the draft's first choice was the target's token, from the lines of a device's trace.

The rule is that of ``core/device/commit_reader.py``: every position that was decided while the
drafter had a guess there, or was making one, is one trial. The tree is not in the trace, but what
each step was fed is: its guesses count where all tokens before them were committed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from edgespec_sim.report.trace_lines import Line


@dataclass(frozen=True, slots=True)
class _Guess:
    base: int
    """Committed length when the step began."""
    path: tuple[int, ...]
    """Tokens from there to the guess."""
    first: int | None


class Guesses:
    """Of one generation. ``held`` is the committed length, None before it is known."""

    def __init__(self) -> None:
        self.tried = 0
        self.hits = 0
        self.held: int | None = None
        self._first = 0
        self._committed: list[int] = []
        """Tokens from position ``_first`` on."""
        self._cache: list[int] = []
        self._parents: list[int] = []
        """Of the rows of the cache, where steps have several leaves."""
        self._texts: list[list[int]] = []
        """What each leaf of the last step was the end of."""
        self._step_base = 0
        self._pending: dict[int, list[_Guess]] = defaultdict(list)

    def opened(self, held: int) -> None:
        """A stream was opened with this many tokens held."""
        if self.held is None:
            self.held = self._first = held

    def step(self, line: Line) -> None:
        """``StartStep``."""
        rows = line.get("rows")
        if rows is None:
            del self._cache[line["keep_length"] :]
            self._cache += line["feed"]
            self._texts = [self._cache]
        else:
            self._texts = self._tree(line["keep_length"], line["feed"], rows)
        if self.held is None:  # the first step is on the prompt
            self.opened(len(self._texts[0]))
        self._step_base = self.held or 0

    def _tree(self, keep: int, feed: list[int], rows: Line) -> list[list[int]]:
        """Carry out a step of several leaves (``TreeRows``); the text up to each of them."""
        places = {row: place for place, row in enumerate(rows["moved"], keep)}
        parents = [places.get(p, p) for p in (self._parents[row] for row in rows["moved"])]
        tokens = [self._cache[row] for row in rows["moved"]]
        self._cache[keep:], self._parents[keep:] = tokens, parents
        self._parents += range(len(self._cache) - 1, len(self._cache) - 1 + len(feed))
        self._cache += feed
        self._parents += rows["parents"]
        self._cache += rows["tokens"]
        return [self._text(leaf) for leaf in rows["leaves"]]

    def _text(self, row: int) -> list[int]:
        found: list[int] = []
        while row >= 0:
            found.append(self._cache[row])
            row = self._parents[row]
        return found[::-1]

    def step_done(self, line: Line) -> None:
        """``StepDone``: the guesses wait to be decided, or have been meanwhile."""
        answers = (line["candidates"], *line.get("others", ()))
        for text, candidates in zip(self._texts, answers, strict=False):
            self._answered(text, [candidate["token"] for candidate in candidates])

    def _answered(self, text: list[int], tokens: list[int]) -> None:
        position = len(text)
        path = tuple(text[self._step_base :])
        guess = _Guess(self._step_base, path, tokens[0] if tokens else None)
        if position < (self.held or 0):
            if self._agrees(guess):
                self._score(guess, self._committed[position - self._first])
        elif tokens:
            self._pending[position].append(guess)

    def delivered(self, line: Line) -> None:
        """``Deliver``."""
        self.opened(line["position"])
        for position, token in enumerate(line["tokens"], start=line["position"]):
            for guess in self._pending.pop(position, ()):
                if self._agrees(guess):
                    self._score(guess, token)
                    break  # one trial a position
            self._committed.append(token)
        self.held = line["position"] + len(line["tokens"])

    def _agrees(self, guess: _Guess) -> bool:
        start = guess.base - self._first
        return tuple(self._committed[start : start + len(guess.path)]) == guess.path

    def _score(self, guess: _Guess, token: int) -> None:
        self.tried += 1
        self.hits += guess.first == token
