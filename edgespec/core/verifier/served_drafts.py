"""Server-side drafts: what the verifier itself guesses for a session's next pass.

Theory of operation. There are two sources, and their guesses are nodes like a device's, judged by
the same rule. A *chain* of the verifier's own draft model (``own_drafts.py``) stands behind the
likeliest nodes that are there, or behind the end of the text. Guesses from the *text* alone
(``core/protocol/text_guesses.py``) cost no model; they ride in a pass that has no node of the
device. All nodes of a pass are one tree, in which equal tokens behind one node are one node.

**What is forced.** Where a grammar leaves no choice about the next tokens, they are nodes of every
pass, behind the likeliest path: they cost a row each and no draft step.

**The text's tree.** The likeliest guess of all places becomes the next node, and the tables are
asked behind it, until no guess is worth its row; a node's chance is the product along its path.

**The price.** No node's chance is below ``least_chance``, what a row costs on the target, nor below
``LEAST_CHANCE``. What is named is judged whether it was worth a row or not, so the chances of a
text that cannot be guessed fall without a row being spent on it.

**Who may share.** A token that came sooner tells its reader that somebody was told the same before.
So the sessions of one named credential share both tables; a session that showed no key has a
recycled one of its own. Chances are counted for all sessions, which tells nobody what they said.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, NamedTuple

from edgespec.core.protocol.constraint import ConstrainedText, ConstraintError
from edgespec.core.protocol.messages import DraftTotals, Open, RunAhead
from edgespec.core.protocol.text_guesses import Place, TextChances, TextReader, TextTables
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.drafts import PassTree, Source
from edgespec.core.verifier.own_drafts import Chain, ChainChances, ChainRecord, ChainStart

MOST_OWNERS: Final = 32
"""Credentials whose tables are kept, those that opened a session most recently."""
MOST_NODES: Final = 15
"""With the token that is fed a tile of 16 rows, which CPUs compute at the price of one row
(``targets/row_tiles.py``)."""
LEAST_CHANCE: Final = 0.08
LOADED_PER_PASS: Final = 1024
"""About a quarter of a millisecond."""
_ENTERED_PER_PASS: Final = 32
"""Committed tokens that go into the tables too; of a longer backlog the last ones."""


class Proposal(NamedTuple):
    """Nodes as in ``PassRequest``: node i hangs on node ``parents[i]``; -1: on the text's end."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


class TextDrafts:
    """Guesses from the text for one session, and what they learned."""

    def __init__(self, tables: TextTables, everybodys: TextChances | None = None) -> None:
        self.chances = TextChances(everybodys)
        self._tables, self.reader = tables, TextReader(tables, self.chances)

    def propose(self, text: Sequence[int], room: int, depth: int, least_chance: float) -> Proposal:
        """Guesses behind ``text``, the committed tokens: at most ``room`` nodes, none deeper than
        ``depth``. Empty: there are none worth their rows."""
        if room <= 0 or depth <= 0 or not self._catch_up(text):
            return Proposal([], [], [])
        return self._grow(text, min(room, MOST_NODES), depth, max(least_chance, LEAST_CHANCE))

    def missed(self, token: int, answer: int) -> None:
        """This token of the last ``propose`` was not accepted, and behind it the target said that;
        what it said behind an accepted one is in the text."""
        self._tables.recycled.add(token, answer)

    def _catch_up(self, text: Sequence[int]) -> bool:
        """Learn what was committed since; False while there is still more to learn."""
        lookup, start = self.reader.lookup, len(text) - _ENTERED_PER_PASS
        if lookup.known < start:
            lookup.load(text, min(start, lookup.known + LOADED_PER_PASS))
            if lookup.known < start:
                return False
        self.reader.learn(text)
        return len(text) >= 2

    def _grow(self, text: Sequence[int], room: int, depth: int, least_chance: float) -> Proposal:
        """At most ``room`` nodes, none deeper than ``depth`` or less likely than
        ``least_chance``. The text has two tokens or more, all of them indexed."""
        reader, chances, count = self.reader, self.chances.of, 0
        proposal = Proposal([], [], [])
        # Likeliest first, then oldest: chance, count, parent, token, the place behind it, depth.
        heap: list[tuple[float, int, int, int, Place, int]] = []
        node, chance, place, level = -1, 1.0, reader.end(text), 0
        while True:
            if level < depth:
                named, place = reader.guesses(text, place)
                for cell, token in named:
                    its = chance * chances[cell]
                    if its >= least_chance:
                        count += 1
                        behind = reader.behind(text, place, token)
                        heappush(heap, (-its, count, node, token, behind, level + 1))
            if not heap or len(proposal.tokens) >= room:
                return proposal
            chance, _, parent, token, place, level = heappop(heap)
            chance, node = -chance, len(proposal.tokens)
            proposal.tokens.append(token)
            proposal.parents.append(parent)
            proposal.chances.append(chance)


@dataclass(slots=True)
class SourceCounts:
    """Of one source, for all sessions: nodes in passes, and those of them that became tokens."""

    nodes: int = 0
    accepted: int = 0


@dataclass(slots=True)
class ServedCounts:
    """By who drafted. ``steps`` are those of the verifier's own draft model or its target's
    speculator, ``seconds`` of the draft model alone, ``failures`` the times that it failed."""

    device: SourceCounts = field(default_factory=SourceCounts)
    model: SourceCounts = field(default_factory=SourceCounts)
    text: SourceCounts = field(default_factory=SourceCounts)
    steps: int = 0
    seconds: float = 0.0
    failures: int = 0

    @property
    def served_tokens(self) -> int:
        """Committed tokens that the verifier itself had guessed."""
        return self.text.accepted + self.model.accepted

    @property
    def totals(self) -> DraftTotals:
        return DraftTotals(
            *(self.device.nodes, self.device.accepted, self.model.nodes, self.model.accepted),
            *(self.text.nodes, self.text.accepted, self.steps),
            round(self.seconds * 1e6),
            self.failures,
        )


class ServedDrafts:
    """The sources of one session, each of which may be absent."""

    def __init__(
        self,
        key: str,
        counts: ServedCounts,
        text: TextDrafts | None,
        chain: ChainRecord | None,
        grammar: ConstrainedText | None = None,
        prompt_length: int = 0,
    ) -> None:
        """``grammar``: what the text behind its prompt is held to."""
        self.text, self.chain = text, chain
        self._grammar, self._prompt_length = grammar, prompt_length
        self._key, self._counts = key, counts
        self._proposal: Proposal | None = None
        """What the text offers for the next pass, once it was asked."""
        self._sources: tuple[Source, ...] = ()
        """Of the nodes in the pass that runs."""

    @property
    def chained(self) -> bool:
        """Whether a chain stands behind the text."""
        return self.chain is not None and bool(self.chain.tokens)

    def begin_chain(
        self, tree: PassTree, text: Sequence[int], depth: int, least_guess: float
    ) -> ChainStart | None:
        """Where a chain would begin behind ``text``, the committed tokens, and what the model has
        to be fed for it. ``tree`` has the device's nodes; nothing may be deeper than ``depth``.
        None: there is no model, no room, or a chain already."""
        chain = self.chain
        if chain is None or chain.tokens:
            return None
        self._add_text(tree, text, depth, least_guess)
        nodes = self._add_forced(tree, text, depth, least_guess)
        path = tuple([tree.tokens[node] for node in nodes])
        reaches = [tree.reach[node] for node in nodes]
        return chain.begin(self._key, text, path, reaches, min(depth, tree.room))

    def drafted(self, chain: Chain, *, wanted: bool) -> None:
        """What a round did; the chain is ``wanted`` while the text has not ended."""
        assert self.chain is not None
        self.chain.drafted(chain)
        if not wanted:
            self.chain.judge(())

    def propose(self, guesses: tuple[int, ...]) -> None:
        """The target's own speculator guesses these behind the text."""
        if self.chain is not None:
            self.chain.propose(guesses)

    def fill(
        self,
        tree: PassTree,
        text: Sequence[int],
        depth: int,
        least_chance: float,
        least_guess: float,
    ) -> None:
        """Add what is guessed here to the device's nodes in ``tree``, none deeper than ``depth``:
        of the chain what is at least ``least_chance`` likely, of the text ``least_guess``."""
        if self.chain is not None and self.chain.tokens:
            tree.add_tree(*self.chain.worth(least_chance, depth), Source.MODEL)
        self._add_text(tree, text, depth, least_guess)
        self._add_forced(tree, text, depth, least_guess)

    def note_sent(self, tree: PassTree) -> None:
        """The pass has these nodes."""
        self._sources = tuple(tree.sources)

    def learn(
        self,
        request: PassRequest,
        targets: Sequence[int],
        accepted: Collection[int],
        committed: Sequence[int],
    ) -> int:
        """The pass of this request is over: it accepted these nodes and committed these tokens;
        ``targets`` are as in ``PassResult``. Returns how many of the accepted were guessed here."""
        self._proposal, own = None, 0
        for node, source in enumerate(self._sources):
            if source is Source.DEVICE:
                continue
            hit, counts = node in accepted, self._counts.model
            if source is Source.TEXT:
                counts = self._counts.text
                if self.text is not None and not hit:
                    self.text.missed(request.tokens[node], targets[1 + node])
            counts.nodes += 1
            counts.accepted += hit
            own += hit
        if self.chain is not None:
            self.chain.judge(committed)
        return own

    def _add_forced(
        self, tree: PassTree, text: Sequence[int], depth: int, least_guess: float
    ) -> list[int]:
        """The nodes of the likeliest path, as far as the grammar takes it: behind what it forbids
        there is no guess, and a model that is asked for one has to be fed its whole text again.
        Behind them comes what the grammar leaves no choice about."""
        nodes = tree.likeliest()
        if self._grammar is None:
            return nodes
        output = text[self._prompt_length :]
        path = [*output, *[tree.tokens[node] for node in nodes]]
        try:
            taken = self._grammar.follow(path)
            del nodes[max(0, taken - len(output)) :]
            reach = tree.reach[nodes[-1]] if nodes else 1.0
            room = min(depth - len(nodes), tree.room) if reach >= least_guess else 0
            forced = self._grammar.forced(path[: len(output) + len(nodes)], room)
        except ConstraintError:
            return []
        for token in forced:
            node = tree.add(nodes[-1] if nodes else -1, token, reach, Source.TEXT)
            assert node is not None
            nodes.append(node)
        return nodes

    def _add_text(
        self, tree: PassTree, text: Sequence[int], depth: int, least_guess: float
    ) -> None:
        """Guesses from the text, where the device has drafted nothing when first asked."""
        if self.text is None:
            return
        if self._proposal is None:
            if tree.drafted:
                return
            self._proposal = self.text.propose(text, tree.room, depth, least_guess)
        tree.add_tree(*self._proposal, Source.TEXT)


class ServedDraftsMaker:
    """Makes the sources of the sessions: guesses from the ``text``, whose tables their owners
    share, and of the verifier's own ``model``."""

    def __init__(
        self, *, text: bool = True, model: bool = False, most_owners: int = MOST_OWNERS
    ) -> None:
        self.counts = ServedCounts()
        self.tables: OrderedDict[str, TextTables] = OrderedDict()
        self._text, self._model, self._most_owners = text, model, most_owners
        self._chances = TextChances()
        self._greedy, self._sampled = ChainChances(), ChainChances()

    def __call__(
        self, request: Open, credential: Credential, end_tokens: Collection[int] = ()
    ) -> ServedDrafts | None:
        """None without a source, and where the verifier is to wait for drafts. ``end_tokens`` are
        those of the session's model."""
        if request.run_ahead is RunAhead.NEVER or not (self._text or self._model):
            return None
        text = TextDrafts(self.of(credential), self._chances) if self._text else None
        chances = self._sampled if request.sampling.temperature > 0.0 else self._greedy
        chain = ChainRecord(chances) if self._model else None
        grammar, constraint = None, request.sampling.constraint
        if constraint is not None:
            with suppress(ConstraintError):  # a target that reads it itself needs no help of it
                grammar = ConstrainedText(constraint, end_tokens)
        prompt_length = len(request.prompt)
        return ServedDrafts(request.session_id, self.counts, text, chain, grammar, prompt_length)

    def of(self, credential: Credential) -> TextTables:
        """The tables of the credential's name, or new ones for a session that showed no key."""
        name = credential.name
        if not name:
            return TextTables(ngrams=False)
        if name not in self.tables:
            self.tables[name] = TextTables(ngrams=True)
        self.tables.move_to_end(name)
        if len(self.tables) > self._most_owners:
            self.tables.popitem(last=False)
        return self.tables[name]
