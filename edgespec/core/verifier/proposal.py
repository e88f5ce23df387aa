"""A small tree of the verifier's own guesses, grown where they are most likely right.

Theory of operation. At each place of the tree the drafters name tokens for the next position, at
most ``RANKS`` different ones: first prompt lookup, by far the best where its match is long, then
the n-grams, then what was recycled. A named token is a *guess* with a chance
(``guess_chances.py``); the likeliest guess of all places becomes the next node, and the drafters
are asked behind it, until no guess is worth its row or there is no more room. So a parent always
stands before its children, and its chance is at least theirs.

A match goes on behind the guess that follows it. Where it reaches the end of the text, which is
where a loop bites its own tail, the pair of tokens is looked up again. Beside a match of ``SURE``
tokens nothing else is named: it is right nearly always, and asking costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final

from edgespec.core.verifier.follower_tables import Tables
from edgespec.core.verifier.guess_chances import (
    BEHIND,
    MATCH_CELLS,
    NGRAM_CELL,
    RANKS,
    RECYCLED_CELL,
    GuessChances,
)
from edgespec.core.verifier.prompt_lookup import LONGEST, PromptLookup, pair_of

SURE: Final = 6
Guess = list[int]
"""Cell, token, and the node it became; -1: it was not worth its row."""


@dataclass(slots=True, eq=False)
class Proposal:
    """Nodes as in ``PassRequest``: node i hangs on node ``parents[i]``, or on the end of the text
    for -1."""

    position: int = 0
    """How long the text was."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    guesses: list[list[Guess]] = field(default_factory=list)
    """All that was named at the end of the text, then behind each node."""

    def score(self, text: Sequence[int], chances: GuessChances) -> None:
        """The text has grown: count which guesses it confirms, as far as it came by."""
        place, at, end = 0, self.position, len(text)
        while at < end and place >= 0:
            token, here, place = text[at], self.guesses[place], -1
            for cell, guess, node in here:
                hit = guess == token
                chances.note(cell, hit)
                if hit and node >= 0:
                    place = node + 1
            at += 1


class ProposalGrower:
    """Grows the proposals of one session."""

    def __init__(self, lookup: PromptLookup, tables: Tables, chances: GuessChances) -> None:
        self._lookup, self._chances = lookup, chances
        self._recycled = tables.recycled.after
        self._ngrams = None if tables.ngrams is None else tables.ngrams.after

    def grow(self, text: Sequence[int], room: int, depth: int, least_chance: float) -> Proposal:
        """At most ``room`` nodes, none deeper than ``depth`` or less likely than
        ``least_chance``. The text has two tokens or more, all of them indexed."""
        lookup, end = self._lookup, len(text)
        proposal = Proposal(end)
        tokens, parents, chances = proposal.tokens, proposal.parents, proposal.chances
        # Likeliest first, then oldest: chance, count, parent, guess, token before it, match, depth.
        heap: list[tuple[float, int, int, Guess, int, int, int, int]] = []
        node, chance, before, last, level, count = -1, 1.0, text[end - 2], text[end - 1], 0, 0
        position, length = lookup.position, lookup.length
        while True:
            match = text[position] if length else -1
            here = self._named(before, last, match, length, BEHIND if level else 0)
            proposal.guesses.append(here)
            if level < depth:
                for guess in here:
                    its = chance * self._chances.of[guess[0]]
                    if its >= least_chance:
                        count += 1
                        goes_on = (position + 1, length + 1) if guess[1] == match else (end, 2)
                        heappush(heap, (-its, count, node, guess, last, *goes_on, level + 1))
            if not heap or len(tokens) >= room:
                return proposal
            chance, _, parent, guess, before, position, length, level = heappop(heap)
            chance, last, node = -chance, guess[1], len(tokens)
            guess[2] = node
            tokens.append(last)
            parents.append(parent)
            chances.append(chance)
            if position >= end:
                position = lookup.place(pair_of(before, last))
                length = 0 if position < 0 else length
            length = min(length, LONGEST)

    def _named(self, before: int, last: int, match: int, length: int, place: int) -> list[Guess]:
        """Different tokens for one position, in the order of their drafters."""
        named: list[Guess] = [[place + MATCH_CELLS[length], match, -1]] if length else []
        if length >= SURE:
            return named
        rank, most, other = place + len(named), place + RANKS, -1
        if self._ngrams is not None:
            for token in self._ngrams(pair_of(before, last)):
                if token != match:
                    named.append([rank + NGRAM_CELL, token, -1])
                    rank += 1
                    if rank == most:
                        return named
                    if other < 0:
                        other = token
        for token in self._recycled(last):
            if token not in (match, other):
                named.append([rank + RECYCLED_CELL, token, -1])
                rank += 1
                if rank == most:
                    return named
        return named
