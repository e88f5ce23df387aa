"""Server-side drafts: the nodes that the verifier itself proposes for a session's next pass.

Theory of operation. Each source is a ``DraftSource``, and its candidates become nodes like a
device's. A *chain* of the server model (``server_model.py``) stands behind the likeliest nodes that
are there, or behind the end of the text. Candidates of *server lookup*
(``core/protocol/text_lookup.py``) come from the text alone and need no model; they are used in a
pass that has no node of the device. All nodes of a pass form one tree, in which equal tokens behind
one node are one node.

**Forced tokens.** If a grammar leaves no choice about the next tokens, they become nodes of every
pass, behind the likeliest path. They cost a row each and no draft step.

**The lookup tree** (``core/protocol/text_lookup.py``). The likeliest candidate of all places
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
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.messages import DraftTotals, Open, RunAhead
from edgespec.core.protocol.text_lookup import LookupTree, TextChances, TextReader, TextTables
from edgespec.core.verifier.draft_round import Chain, ChainStart
from edgespec.core.verifier.pass_tree import PassSource, PassVerdict, PassView
from edgespec.core.verifier.server_model import (
    ChainChances,
    ChainSource,
    DraftTimes,
    EngineSpeculator,
    ServerModel,
)

MAX_OWNERS: Final = 32
"""Number of credentials whose tables are kept; the least recently used are dropped."""
MAX_LOOKUP_NODES: Final = 15
"""Most nodes of a lookup tree. With the fed token they fill a tile of 16 rows, which CPUs compute
in the time of one row (``targets/row_tiles.py``).
"""
MIN_LOOKUP_CHANCE: Final = 0.08
"""Least probability of a node of server lookup, however cheap a row is."""
INDEXED_PER_PASS: Final = 1024
"""Most tokens indexed per pass, which takes about a quarter of a millisecond."""
_TABLED_PER_PASS: Final = 32
"""Most committed tokens per pass that also enter the shared tables. If there are more, as in a long
prompt, the last ones enter.
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
        self.kind = SourceKind.SERVER_LOOKUP
        self.chances = TextChances(shared)
        self._tables, self.reader = tables, TextReader(tables, self.chances)
        self._proposal: Proposal | None = None
        """The proposal for the next pass; None until it is computed."""

    def add_nodes(self, view: PassView) -> None:
        """Add the proposal for the next pass, unless the device had nodes when this pass was first
        considered."""
        if self._proposal is None:
            if view.has_drafts:
                return
            self._proposal = self.propose(
                view.text, view.tree.room, view.depth, view.least_lookup_chance
            )
        view.tree.add_tree(*self._proposal, self.kind)

    def learn(self, verdict: PassVerdict) -> None:
        """Learn what the target had in place of rejected nodes. Candidates are judged by the text
        when that is indexed."""
        self._proposal = None
        for node, kind in enumerate(verdict.kinds):
            if kind is self.kind and node not in verdict.accepted:
                self.note_rejected(verdict.request.tokens[node], verdict.targets[1 + node])

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


class ForcedTokens:
    """The tokens that a grammar forces on the output, which begins at ``prompt_length``."""

    def __init__(self, grammar: ConstrainedText, prompt_length: int) -> None:
        self.kind = SourceKind.SERVER_LOOKUP
        self.path: list[int] = []
        """Nodes of the likeliest path as of the last ``add_nodes``, up to the first token that the
        grammar forbids."""
        self._grammar, self._prompt_length = grammar, prompt_length

    def add_nodes(self, view: PassView) -> None:
        """Add the tokens that the grammar forces behind the likeliest path.

        The path ends before the first token that the grammar forbids: no candidate follows a
        forbidden token, and a draft model that is asked for one has to be fed its whole text again.
        """
        tree = view.tree
        self.path = nodes = tree.likeliest_path()
        output = view.text[self._prompt_length :]
        path = [*output, *[tree.tokens[node] for node in nodes]]
        try:
            taken = self._grammar.follow(path)
            del nodes[max(0, taken - len(output)) :]
            reach = tree.reach[nodes[-1]] if nodes else 1.0
            room = min(view.depth - len(nodes), tree.room)
            if reach < view.least_lookup_chance:
                room = 0
            forced = self._grammar.forced(path[: len(output) + len(nodes)], room)
        except ConstraintError:
            nodes.clear()
            return
        for token in forced:
            node = tree.add(nodes[-1] if nodes else -1, token, reach, self.kind)
            assert node is not None
            nodes.append(node)

    def learn(self, verdict: PassVerdict) -> None:
        """Do nothing: a forced token is accepted if the path before it is."""


@dataclass(slots=True)
class SourceCounts:
    """Nodes of one source in passes and their acceptances, over all sessions."""

    nodes: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftCounts:
    """Counts by draft source.

    ``model`` is the server model or the engine speculator, ``text`` server lookup. ``steps`` counts
    the steps of either model. ``seconds`` and ``failures`` count for the server model alone.
    """

    device: SourceCounts = field(default_factory=SourceCounts)
    model: SourceCounts = field(default_factory=SourceCounts)
    text: SourceCounts = field(default_factory=SourceCounts)
    steps: int = 0
    seconds: float = 0.0
    failures: int = 0

    def note_verdict(self, verdict: PassVerdict) -> None:
        """Count the server-side nodes of a pass. The device's are counted by the engine."""
        for node, kind in enumerate(verdict.kinds):
            if kind is not SourceKind.DEVICE:
                counts = self.text if kind is SourceKind.SERVER_LOOKUP else self.model
                counts.nodes += 1
                counts.accepted += node in verdict.accepted

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
    """The server-side draft sources of one session. ``text``, ``chain`` and ``forced`` may each be
    absent; ``key`` names the session to the server model."""

    def __init__(
        self,
        key: str,
        counts: DraftCounts,
        text: ServerLookup | None,
        chain: ChainSource | None,
        forced: ForcedTokens | None = None,
    ) -> None:
        self.text, self.chain = text, chain
        self._key, self._counts, self._forced = key, counts, forced
        no_model: tuple[PassSource | None, ...] = text, forced
        self._before_model = tuple([one for one in no_model if one is not None])
        """Sources whose nodes the server model's chain stands behind, in their order."""
        model: tuple[PassSource, ...] = () if chain is None else (chain,)
        self._sources = model + self._before_model

    @property
    def has_chain(self) -> bool:
        """True if a chain stands behind the text."""
        return self.chain is not None and bool(self.chain.tokens)

    def begin_chain(self, view: PassView, device_tokens: float = 0.0) -> ChainStart | None:
        """Return where a chain would begin behind ``view.text`` and what the server model must be
        fed for it.

        The tree holds the device's nodes; the nodes of the other sources are added.
        ``device_tokens`` is as in ``ChainStart``. Returns None if there is no server model, no
        room, or a chain already.
        """
        model, tree = self.chain, view.tree
        if not isinstance(model, ServerModel) or model.tokens:
            return None
        for source in self._before_model:
            source.add_nodes(view)
        nodes = tree.likeliest_path() if self._forced is None else self._forced.path
        path = tuple([tree.tokens[node] for node in nodes])
        reaches = [tree.reach[node] for node in nodes]
        room = min(view.depth, tree.room)
        return model.begin_chain(self._key, view.text, path, reaches, room, device_tokens)

    def record_round(self, chain: Chain, *, wanted: bool) -> None:
        """Record the result of a round; the chain is dropped unless ``wanted``, since the output
        has ended."""
        assert isinstance(self.chain, ServerModel)
        self.chain.record_round(chain)
        if not wanted:
            self.chain.judge(())

    def set_proposal(self, guesses: tuple[int, ...]) -> None:
        """Set the tokens that an engine speculator proposes behind the text."""
        if isinstance(self.chain, EngineSpeculator):
            self.chain.set_proposal(guesses)

    def reaches(self, count: int) -> list[float]:
        """Return ``EngineSpeculator.reaches``; empty without an engine speculator."""
        return self.chain.reaches(count) if isinstance(self.chain, EngineSpeculator) else []

    def note_no_proposal(self) -> None:
        """Record that the engine speculator ran in the pass and proposed nothing here."""
        if isinstance(self.chain, EngineSpeculator):
            self.chain.note_no_proposal()

    def add_nodes(self, view: PassView) -> None:
        """Add the server-side nodes to the device's nodes in the tree."""
        for source in self._sources:
            source.add_nodes(view)

    def learn(self, verdict: PassVerdict) -> None:
        """Count the nodes of a finished pass, and let their sources learn from it."""
        self._counts.note_verdict(verdict)
        for source in self._sources:
            source.learn(verdict)


class ServerDraftsFactory:
    """Makes the server-side draft sources of the sessions.

    ``text`` enables server lookup, whose tables are shared within a credential. ``model`` enables
    chains of the server model, or else ``speculator`` chains of the engine speculator.
    """

    def __init__(
        self,
        *,
        text: bool = True,
        model: bool = False,
        speculator: bool = False,
        max_owners: int = MAX_OWNERS,
    ) -> None:
        self.counts, self.times = DraftCounts(), DraftTimes()
        self.tables: OrderedDict[str, TextTables] = OrderedDict()
        self._text, self._most_owners = text, max_owners
        self._chain_class: type[ChainSource] | None = EngineSpeculator if speculator else None
        if model:
            self._chain_class = ServerModel
        self._chances = TextChances()
        self._greedy, self._sampled = ChainChances(), ChainChances()

    def __call__(
        self, request: Open, credential: Credential, end_tokens: Collection[int] = ()
    ) -> ServerDrafts | None:
        """Return the sources of a session, or None if there are none, if the session waits for the
        device's drafts, or if it is plain streaming. ``end_tokens`` end an output of its model."""
        if request.plain or request.run_ahead is RunAhead.NEVER:
            return None
        if not (self._text or self._chain_class):
            return None
        text = ServerLookup(self.tables_of(credential), self._chances) if self._text else None
        chances = self._sampled if request.sampling.temperature > 0.0 else self._greedy
        chain = None if self._chain_class is None else self._chain_class(chances, self.times)
        forced, constraint = None, request.sampling.constraint
        if constraint is not None:
            # A target that reads the grammar itself works without these nodes.
            with suppress(ConstraintError):
                grammar = ConstrainedText(constraint, end_tokens)
                forced = ForcedTokens(grammar, len(request.prompt))
        return ServerDrafts(
            key=request.session_id, counts=self.counts, text=text, chain=chain, forced=forced
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
