"""The tree of draft nodes that one pass verifies, whatever source each node came from.

Before the pass every draft source of the session adds its nodes (``PassView``), and after it every
source learns from the verdict (``PassVerdict``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgespec.core.protocol.draft_source import DraftSource, SourceKind
from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen


class PassTree:
    """The draft nodes of one pass, at most ``max_nodes``; the device's nodes come first.

    Equal tokens behind one node are one node, which belongs to the source that added it first.
    Nodes are numbered as in ``PassRequest``. ``reach`` holds the estimated probability of each node
    that the output goes through it.
    """

    def __init__(self, max_nodes: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.reach: list[float] = []
        self.sources: list[SourceKind] = []
        self.device_node_count = 0
        """Number of nodes that came from the device."""
        self._max_nodes = max_nodes
        self._places: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        return self._max_nodes - len(self.tokens)

    def add(self, parent: int, token: int, reach: float, source: SourceKind) -> int | None:
        """Return the node with ``token`` behind ``parent``, adding it if needed; None if there is
        no room."""
        node = self._places.get((parent, token))
        if node is not None:
            self.reach[node] = max(self.reach[node], reach)
            return node
        node = len(self.tokens)
        if node >= self._max_nodes:
            return None
        self._places[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(reach)
        self.sources.append(source)
        self.device_node_count += source is SourceKind.DEVICE
        return node

    def add_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        reaches: Sequence[float],
        source: SourceKind,
    ) -> None:
        """Add nodes, given as in ``PassRequest``; nodes that do not fit are left out."""
        places: list[int | None] = []
        for token, parent, reach in zip(tokens, parents, reaches, strict=True):
            before = -1 if parent < 0 else places[parent]
            places.append(None if before is None else self.add(before, token, reach, source))

    def likeliest_path(self) -> list[int]:
        """Return the nodes of the path that the output most likely takes, in order."""
        best: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            rival = best.setdefault(parent, node)
            if self.reach[node] > self.reach[rival]:
                best[parent] = node
        path: list[int] = []
        at = -1
        while (child := best.get(at)) is not None:
            path.append(child)
            at = child
        return path

    def cut_to_chain(self) -> None:
        """Keep the likeliest path only, for a target that verifies no trees."""
        path = self.likeliest_path()
        self.tokens = [self.tokens[node] for node in path]
        self.reach = [self.reach[node] for node in path]
        self.sources = [self.sources[node] for node in path]
        self.parents = list(range(-1, len(path) - 1))
        self.device_node_count = self.sources.count(SourceKind.DEVICE)


@dataclass(slots=True)
class PassView:
    """State of a session's next pass, to which the sources add their nodes."""

    tree: PassTree
    """The nodes of the pass so far, and the room for more."""
    text: Sequence[int]
    """The committed tokens, behind which the tree stands."""
    depth: int
    """Greatest depth at which a node can matter."""
    least_chance: float
    """The price of a row: least probability of a node to be reached and accepted."""
    least_lookup_chance: float
    """The price of a row for nodes of server lookup."""
    has_drafts: bool = False
    """Whether nodes of the tree are alive drafts of the device, and not only its kept text."""


@statically_frozen
class PassVerdict:
    """The outcome of a session's part of a pass."""

    request: PassRequest
    kinds: Sequence[SourceKind]
    """Kind of the source of each node; empty if all came from the device."""
    targets: Sequence[int]
    """The target's tokens, as in ``PassResult``."""
    accepted: Collection[int]
    """Accepted nodes, as indices."""
    committed: tuple[int, ...]
    """The tokens that the output went on with."""
    now: float

    def count_device_tokens(self) -> int:
        """Return how many of the accepted nodes came from the device."""
        device_nodes = self.request.device_nodes
        return sum([node < device_nodes for node in self.accepted])


PassSource = DraftSource[PassView, PassVerdict]
"""A draft source on a verifier."""
