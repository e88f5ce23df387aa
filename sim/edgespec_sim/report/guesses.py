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
        self._step_base = 0
        self._pending: dict[int, list[_Guess]] = defaultdict(list)

    def opened(self, held: int) -> None:
        """A stream was opened with this many tokens held."""
        if self.held is None:
            self.held = self._first = held

    def step(self, line: Line) -> None:
        """``StartStep``."""
        del self._cache[line["keep_length"] :]
        self._cache += line["feed"]
        if self.held is None:  # the first step is on the prompt
            self.opened(len(self._cache))
        self._step_base = self.held or 0

    def step_done(self, line: Line) -> None:
        """``StepDone``: the guesses wait to be decided, or have been meanwhile."""
        text, tokens = self._cache, [candidate["token"] for candidate in line["candidates"]]
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
