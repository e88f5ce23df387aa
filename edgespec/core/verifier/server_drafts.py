"""Server-side drafts: the nodes that the verifier itself proposes for a session's next pass.

Theory of operation. There are two kinds of source, and their candidates become nodes like a
device's. A *chain* of the server model (``server_model.py``) stands behind the likeliest nodes that
are there, or behind the end of the text. Candidates of *server lookup*
(``core/protocol/text_lookup.py``) come from the text alone and need no model; they are used in a
pass that has no node of the device. All nodes of a pass form one tree, in which equal tokens behind
one node are one node.

**Forced tokens.** If a grammar leaves no choice about the next tokens, they become nodes of every
pass, behind the likeliest path. They cost a row each and no draft step.

**The lookup tree** (``core/protocol/lookup_tree.py``). The likeliest candidate of all places
becomes the next node, and the tables are looked up behind it, until no candidate is worth its row.
The probability of a node is the product along its path.

**The price.** No node has a probability below ``least_chance``, the price of a row on the target,
nor below ``MIN_LOOKUP_CHANCE``. Candidates are judged whether or not they were worth a row, so the
estimates for a text that cannot be predicted fall without spending rows on it.

**Privacy.** A faster token reveals that another session got the same text. So tables are shared
within one named credential only, and a session without an API key has tables of its own. Acceptance
statistics are shared by all sessions; they reveal no text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from edgespec.core.protocol.constraint import ConstrainedText, ConstraintError
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.lookup_tree import LookupTree
from edgespec.core.protocol.messages import DraftTotals, Open, RunAhead
from edgespec.core.protocol.text_lookup import TextChances, TextReader, TextTables
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.pass_tree import DraftSource, PassTree
from edgespec.core.verifier.server_model import Chain, ChainChances, ChainRecord, ChainStart

MAX_OWNERS: Final = 32
"""Number of credentials whose tables are kept; the least recently used are dropped."""
MAX_LOOKUP_NODES: Final = 15
"""Most nodes of a lookup tree. With the fed token they fill a tile of 16 rows, which CPUs compute
in the time of one row (``targets/row_tiles.py``).
"""
MIN_LOOKUP_CHANCE: Final = 0.08
INDEXED_PER_PASS: Final = 1024
"""Most tokens indexed per pass, which takes about a quarter of a millisecond."""
_TABLED_PER_PASS: Final = 32
"""Most committed tokens per pass that also enter the shared tables; of more, the last ones enter.
"""


class Proposal(NamedTuple):
    """Nodes as in ``PassRequest``: node i is a child of node ``parents[i]``, or of the text's end
    for -1."""

    tokens: list[int]
    parents: list[int]
    chances: list[float]


class ServerLookup:
    """Server lookup for one session: proposes nodes from the text, and learns from verdicts."""

    def __init__(self, tables: TextTables, shared: TextChances | None = None) -> None:
        self.chances = TextChances(shared)
        self._tables, self.reader = tables, TextReader(tables, self.chances)

    def propose(self, text: Sequence[int], room: int, depth: int, least_chance: float) -> Proposal:
        """Return nodes behind ``text``, the committed tokens: at most ``room``, none deeper than
        ``depth``.

        The result is empty if no node is worth its row, or while the text is still being indexed.
        """
        if room <= 0 or depth <= 0 or not self._index_text(text):
            return Proposal([], [], [])
        return self._grow_tree(
            text, min(room, MAX_LOOKUP_NODES), depth, max(least_chance, MIN_LOOKUP_CHANCE)
        )

    def note_rejected(self, token: int, answer: int) -> None:
        """Learn that ``token`` of the last proposal was rejected and that the target had ``answer``
        behind it. Answers behind accepted tokens are in the text."""
        self._tables.recycled.add(token, answer)

    def _index_text(self, text: Sequence[int]) -> bool:
        """Index the newly committed tokens; return False while there is more to index."""
        lookup, start = self.reader.lookup, len(text) - _TABLED_PER_PASS
        if lookup.indexed_length < start:
            lookup.load(text, min(start, lookup.indexed_length + INDEXED_PER_PASS))
            if lookup.indexed_length < start:
                return False
        self.reader.learn(text)
        return len(text) >= 2

    def _grow_tree(
        self, text: Sequence[int], room: int, depth: int, least_chance: float
    ) -> Proposal:
        """Return at most ``room`` nodes, none deeper than ``depth`` or less likely than
        ``least_chance``.

        The text has two tokens or more, which are all indexed.
        """
        chances, proposal = self.chances.by_cell, Proposal([], [], [])
        # The node before a place is described by its parent and its token, and gets its index when
        # the place is visited; None stands for the end of the text.
        root: tuple[int, int] | None = None
        lookup_tree = LookupTree(self.reader, text, root)
        for node, path_chance, level, candidates in lookup_tree.visit_places():
            index = -1
            if node is not None:
                index = len(proposal.tokens)
                proposal.parents.append(node[0])
                proposal.tokens.append(node[1])
                proposal.chances.append(path_chance)
                if index + 1 == room:
                    break
            if level < depth:
                for cell, token in candidates:
                    chance = path_chance * chances[cell]
                    if chance >= least_chance:
                        lookup_tree.add_place((index, token), token, chance)
        return proposal


@dataclass(slots=True)
class SourceCounts:
    """Nodes of one source in passes and their acceptances, over all sessions."""

    nodes: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftCounts:
    """Counts by draft source.

    ``model`` is the server model or the engine speculator, ``text`` server lookup. ``steps`` counts
    steps of either model; ``seconds`` and ``failures`` those of the server model alone.
    """

    device: SourceCounts = field(default_factory=SourceCounts)
    model: SourceCounts = field(default_factory=SourceCounts)
    text: SourceCounts = field(default_factory=SourceCounts)
    steps: int = 0
    seconds: float = 0.0
    failures: int = 0

    @property
    def server_tokens(self) -> int:
        """Committed tokens that the verifier itself had proposed."""
        return self.text.accepted + self.model.accepted

    @property
    def totals(self) -> DraftTotals:
        return DraftTotals(
            *(self.device.nodes, self.device.accepted, self.model.nodes, self.model.accepted),
            *(self.text.nodes, self.text.accepted, self.steps),
            round(self.seconds * 1e6),
            self.failures,
        )


class ServerDrafts:
    """The server-side draft sources of one session, each of which may be absent."""

    def __init__(
        self,
        key: str,
        counts: DraftCounts,
        text: ServerLookup | None,
        chain: ChainRecord | None,
        grammar: ConstrainedText | None = None,
        prompt_length: int = 0,
    ) -> None:
        """``grammar`` is the constraint on the output, which begins at ``prompt_length``."""
        self.text, self.chain = text, chain
        self._grammar, self._prompt_length = grammar, prompt_length
        self._key, self._counts = key, counts
        self._proposal: Proposal | None = None
        """The proposal of server lookup for the next pass; None until it is computed."""
        self._sources: tuple[DraftSource, ...] = ()
        """Sources of the nodes in the pass that runs."""

    @property
    def has_chain(self) -> bool:
        """True if a chain stands behind the text."""
        return self.chain is not None and bool(self.chain.tokens)

    def begin_chain(
        self,
        tree: PassTree,
        text: Sequence[int],
        depth: int,
        least_lookup_chance: float,
        device_tokens: float = 0.0,
    ) -> ChainStart | None:
        """Return where a chain would begin behind ``text`` and what the draft model must be fed for
        it.

        ``text`` holds the committed tokens, ``tree`` the device's nodes. No node may be deeper than
        ``depth``; ``device_tokens`` is as in ``ChainStart``. Returns None if there is no model, no
        room, or a chain already.
        """
        chain = self.chain
        if chain is None or chain.tokens:
            return None
        self._add_text(tree, text, depth, least_lookup_chance)
        nodes = self._add_forced(tree, text, depth, least_lookup_chance)
        path = tuple([tree.tokens[node] for node in nodes])
        reaches = [tree.reach[node] for node in nodes]
        room = min(depth, tree.room)
        return chain.begin_chain(self._key, text, path, reaches, room, device_tokens)

    def record_round(self, chain: Chain, *, wanted: bool) -> None:
        """Record the result of a round; the chain is dropped unless ``wanted``, since the output
        has ended."""
        assert self.chain is not None
        self.chain.record_round(chain)
        if not wanted:
            self.chain.learn(())

    def set_proposal(self, guesses: tuple[int, ...]) -> None:
        """Set the tokens that an engine speculator proposes behind the text."""
        if self.chain is not None:
            self.chain.set_proposal(guesses)

    def add_nodes(
        self,
        tree: PassTree,
        text: Sequence[int],
        depth: int,
        least_chance: float,
        least_lookup_chance: float,
    ) -> None:
        """Add the server-side nodes to the device's nodes in ``tree``, none deeper than ``depth``.

        Nodes of the chain need a probability of ``least_chance``, nodes of server lookup
        ``least_lookup_chance``.
        """
        if self.chain is not None and self.chain.tokens:
            tree.add_tree(*self.chain.select_nodes(least_chance, depth), DraftSource.SERVER_MODEL)
        self._add_text(tree, text, depth, least_lookup_chance)
        self._add_forced(tree, text, depth, least_lookup_chance)

    def note_sent(self, tree: PassTree) -> None:
        """Remember the sources of the nodes that the pass has."""
        self._sources = tuple(tree.sources)

    def learn(
        self,
        request: PassRequest,
        targets: Sequence[int],
        accepted: Collection[int],
        committed: Sequence[int],
    ) -> int:
        """Learn from a finished pass, and return how many accepted nodes were server-side.

        ``accepted`` holds the accepted nodes, ``committed`` the committed tokens; ``targets`` are
        as in ``PassResult``.
        """
        self._proposal, own = None, 0
        for node, source in enumerate(self._sources):
            if source is DraftSource.DEVICE:
                continue
            hit, counts = node in accepted, self._counts.model
            if source is DraftSource.SERVER_LOOKUP:
                counts = self._counts.text
                if self.text is not None and not hit:
                    self.text.note_rejected(request.tokens[node], targets[1 + node])
            counts.nodes += 1
            counts.accepted += hit
            own += hit
        if self.chain is not None:
            self.chain.learn(committed)
        return own

    def _add_forced(
        self, tree: PassTree, text: Sequence[int], depth: int, least_lookup_chance: float
    ) -> list[int]:
        """Add the tokens that the grammar forces behind the likeliest path; return the nodes of
        that path.

        The path ends before the first token that the grammar forbids: no candidate follows a
        forbidden token, and a draft model that is asked for one has to be fed its whole text again.
        """
        nodes = tree.likeliest_path()
        if self._grammar is None:
            return nodes
        output = text[self._prompt_length :]
        path = [*output, *[tree.tokens[node] for node in nodes]]
        try:
            taken = self._grammar.follow(path)
            del nodes[max(0, taken - len(output)) :]
            reach = tree.reach[nodes[-1]] if nodes else 1.0
            room = min(depth - len(nodes), tree.room) if reach >= least_lookup_chance else 0
            forced = self._grammar.forced(path[: len(output) + len(nodes)], room)
        except ConstraintError:
            return []
        for token in forced:
            node = tree.add(nodes[-1] if nodes else -1, token, reach, DraftSource.SERVER_LOOKUP)
            assert node is not None
            nodes.append(node)
        return nodes

    def _add_text(
        self, tree: PassTree, text: Sequence[int], depth: int, least_lookup_chance: float
    ) -> None:
        """Add nodes of server lookup, unless the device had nodes when this pass was first
        considered."""
        if self.text is None:
            return
        if self._proposal is None:
            if tree.device_node_count:
                return
            self._proposal = self.text.propose(text, tree.room, depth, least_lookup_chance)
        tree.add_tree(*self._proposal, DraftSource.SERVER_LOOKUP)


class ServerDraftsFactory:
    """Makes the server-side draft sources of the sessions.

    ``text`` enables server lookup, whose tables are shared within a credential. ``model`` enables
    chains of the server model or the engine speculator.
    """

    def __init__(
        self, *, text: bool = True, model: bool = False, max_owners: int = MAX_OWNERS
    ) -> None:
        self.counts = DraftCounts()
        self.tables: OrderedDict[str, TextTables] = OrderedDict()
        self._text, self._model, self._most_owners = text, model, max_owners
        self._chances = TextChances()
        self._greedy, self._sampled = ChainChances(), ChainChances()

    def __call__(
        self, request: Open, credential: Credential, end_tokens: Collection[int] = ()
    ) -> ServerDrafts | None:
        """Return the sources of a session, or None if there are none or if the session waits for
        the device's drafts. ``end_tokens`` end an output of its model."""
        if request.run_ahead is RunAhead.NEVER or not (self._text or self._model):
            return None
        text = ServerLookup(self.tables_of(credential), self._chances) if self._text else None
        chances = self._sampled if request.sampling.temperature > 0.0 else self._greedy
        chain = ChainRecord(chances) if self._model else None
        grammar, constraint = None, request.sampling.constraint
        if constraint is not None:
            # A target that reads the grammar itself works without these nodes.
            with suppress(ConstraintError):
                grammar = ConstrainedText(constraint, end_tokens)
        prompt_length = len(request.prompt)
        return ServerDrafts(
            key=request.session_id,
            counts=self.counts,
            text=text,
            chain=chain,
            grammar=grammar,
            prompt_length=prompt_length,
        )

    def tables_of(self, credential: Credential) -> TextTables:
        """Return the tables of the credential's name, or new ones for a session without an API
        key."""
        name = credential.name
        if not name:
            return TextTables(ngrams=False)
        if name not in self.tables:
            self.tables[name] = TextTables(ngrams=True)
        self.tables.move_to_end(name)
        if len(self.tables) > self._most_owners:
            self.tables.popitem(last=False)
        return self.tables[name]
