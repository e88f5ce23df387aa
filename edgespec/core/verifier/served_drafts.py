"""Server-side drafts: guesses of the verifier's own for a pass that has no draft of the device.

Theory of operation. A pass without a draft commits one token. Guesses from the text alone (prompt
lookup, n-grams, recycled answers) cost no model and may make it several, whatever the round trip:
useful to a device that is weak, far away, or does not draft at all. They are nodes like a device's,
judged by the same rule, so they cannot change the text. They ride only in a pass that runs anyway
and has no node of the device.

They are priced like a device's nodes: none is put into a pass whose chance of being right is below
``least_chance`` (what a row costs on the target), nor below ``LEAST_CHANCE`` where rows are free,
since proposing costs time too. Where they do not pay, none are proposed, and what they may lose is
bounded (``served_worth.py``). A session's chances begin where those of the verifier are: all its
sessions count together how often guesses of a cell come true, which tells nobody what they said.

The drafters learn when they are asked, never in between, and at most ``LOADED_PER_PASS`` tokens of
a long text at a time: a session that needs no guesses spends nothing on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from edgespec.core.protocol.messages import EXACT_RULE, Open, RunAhead
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.follower_tables import Tables, TablesByOwner
from edgespec.core.verifier.guess_chances import GuessChances
from edgespec.core.verifier.prompt_lookup import PromptLookup
from edgespec.core.verifier.proposal import Proposal, ProposalGrower
from edgespec.core.verifier.served_worth import ServedWorth

MOST_NODES: Final = 15
"""With the token that is fed a tile of 16 rows, which CPUs compute at the price of one row
(``targets/row_tiles.py``)."""
LEAST_CHANCE: Final = 0.1
LOADED_PER_PASS: Final = 1024
"""About a quarter of a millisecond."""
_ENTERED_PER_PASS: Final = 32
"""Committed tokens that go into the tables too; of a longer backlog the last ones."""


class ServedDrafts:
    """The drafters of one session and what they learned."""

    def __init__(self, tables: Tables, everybodys: GuessChances | None = None) -> None:
        self.worth = ServedWorth()
        self.lookup = PromptLookup()
        self.chances = GuessChances(everybodys)
        self._tables = tables
        self._grower = ProposalGrower(self.lookup, tables, self.chances)
        self._last: Proposal | None = None
        self._row_price = 0.0
        self._asked = False

    def propose(self, text: Sequence[int], room: int, depth: int, least_chance: float) -> Proposal:
        """Guesses behind ``text``, the committed tokens: at most ``room`` nodes, none deeper than
        ``depth``. Empty: there are none worth their rows."""
        self._asked = False
        if room <= 0 or depth <= 0 or not self.worth.asks() or not self._catch_up(text):
            return Proposal()
        self._asked, self._row_price = True, least_chance
        least, paid = max(least_chance, LEAST_CHANCE), self.worth.rows(least_chance)
        room = min(room, MOST_NODES if paid is None else min(paid, MOST_NODES))
        self._last = self._grower.grow(text, room, depth, least)
        return self._last

    def learn(
        self, tokens: Sequence[int], answers: Sequence[int], accepted: Collection[int]
    ) -> None:
        """The pass of the last ``propose`` is over: the nodes that were proposed for it, what the
        target said after each of them, and which were accepted. Their answers are in the text."""
        if not self._asked:
            return
        self._asked = False
        self.worth.count(len(tokens), len(accepted), self._row_price)
        add = self._tables.recycled.add
        if len(accepted) < len(tokens):
            for node, token in enumerate(tokens):
                if node not in accepted:
                    add(token, answers[node])

    def _catch_up(self, text: Sequence[int]) -> bool:
        """Learn what was committed since; False while there is still more to learn."""
        lookup, end = self.lookup, len(text)
        if self._last is not None:
            self._last.score(text, self.chances)
            self._last = None
        start = end - _ENTERED_PER_PASS
        if lookup.known < start:
            lookup.load(text, min(start, lookup.known + LOADED_PER_PASS))
            if lookup.known < start:
                return False
        recycled, ngrams = self._tables.recycled, self._tables.ngrams
        for at in range(lookup.known, end):
            if at >= 2:
                recycled.add(text[at - 1], text[at])
                if ngrams is not None:
                    ngrams.add(text[at - 2] << 32 | text[at - 1], text[at])
            lookup.add(text)
        return end >= 2


class ServedDraftsMaker:
    """Makes the drafters of the sessions, which share the tables of their owner."""

    def __init__(self) -> None:
        self._tables = TablesByOwner()
        self._chances = GuessChances()

    def __call__(self, request: Open, credential: Credential) -> ServedDrafts | None:
        """None where the device decides what is in the tree: under a relaxed rule, which may commit
        what it finds there, and where the device wants the verifier to wait for its drafts."""
        if request.rule != EXACT_RULE or request.run_ahead is RunAhead.NEVER:
            return None
        return ServedDrafts(self._tables.of(credential), self._chances)
