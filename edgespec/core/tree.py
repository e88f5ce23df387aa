"""The speculation tree: guesses hanging behind the committed prefix, with a root that moves.

Theory of operation. The *root* is the end of the committed prefix; a *node* is a guessed token
whose parent is another node or the root. Node ids count up from 1 for the life of a stream; 0
names the root at a stated base position. Committing tokens moves the root: along a child that has
the token (that child becomes *committed*), or off the tree, which kills every node. A node is

    alive      its whole path from the root consists of nodes of this tree
    committed  its path is part of the committed prefix; late children may still name it
    dead       anything else; dead ids are forgotten, and so is whatever is sent behind them

Invariants: a parent's id is smaller than its children's; siblings have different tokens; the
position of a root child is ``prefix.length``. Both sides run this same class: the device grows
what it drafted, the verifier grows what arrived, and both commit the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from edgespec.core.prefix import CommittedPrefix

ROOT = 0
# Committed ids that late drafts may still name. A device hears of a commit within a round trip, so
# only ids of the last round trip matter; this is thousands of tokens at any real link.
MAX_COMMITTED_IDS = 4096


class Growth(Enum):
    ALIVE = "alive"
    """The node is part of the tree now."""
    FORWARDED = "forwarded"
    """The node agrees with tokens already committed."""
    STALE = "stale"
    """Its parent is dead or unknown, it disagrees with a committed token, or it is a repeat."""


@dataclass(frozen=True, slots=True)
class Node:
    id: int
    parent: int
    """``ROOT`` for children of the root at the time of growing."""
    token: int
    position: int
    rank: int
    """0 for the draft's first choice among its siblings."""


class SpeculationTree:
    def __init__(self, prefix: CommittedPrefix) -> None:
        self.prefix = prefix
        self._nodes: dict[int, Node] = {}
        self._children: dict[int, list[int]] = {ROOT: []}
        self._committed: dict[int, int] = {}
        self._last_id = 0

    # --- looking ---------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    def __iter__(self) -> Iterator[Node]:
        """Alive nodes, oldest (lowest id) first, so every parent before its children."""
        return iter(self._nodes.values())

    def newest_first(self) -> Iterator[Node]:
        """Alive nodes, highest id first."""
        return reversed(self._nodes.values())

    @property
    def last_id(self) -> int:
        return self._last_id

    def node(self, node_id: int) -> Node:
        return self._nodes[node_id]

    def children(self, node_id: int) -> list[Node]:
        return [self._nodes[child] for child in self._children.get(node_id, ())]

    def is_leaf(self, node_id: int) -> bool:
        return not self._children.get(node_id)

    def place(self, parent: int, base_position: int) -> int | None:
        """The position of a child of ``parent`` (at ``base_position`` for ``ROOT``); None when
        the parent is dead or unknown."""
        if parent in self._nodes:
            return self._nodes[parent].position + 1
        if parent == ROOT:
            return base_position
        return self._committed[parent] + 1 if parent in self._committed else None

    def path(self, node_id: int) -> list[int]:
        """Tokens from the root to the node, itself included; empty for the root."""
        tokens: list[int] = []
        while node_id in self._nodes:
            node = self._nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tokens[::-1]

    # --- changing --------------------------------------------------------------------------

    def grow(
        self, node_id: int, parent: int, token: int, base_position: int, rank: int = 0
    ) -> Growth:
        """Add one guess. ``base_position`` counts only for parent ``ROOT``: the committed length
        it was drafted on, at most the present one (the caller checks)."""
        if node_id <= self._last_id:
            return Growth.STALE
        self._last_id = node_id
        nodes = self._nodes
        position = self.place(parent, base_position)
        if position is None:
            return Growth.STALE
        if position < self.prefix.length:
            if self.prefix.tokens[position] != token:
                return Growth.STALE
            self._remember(node_id, position)
            return Growth.FORWARDED
        slot = parent if parent in nodes else ROOT
        siblings = self._children[slot]
        for other in siblings:
            if nodes[other].token == token:
                return Growth.STALE
        nodes[node_id] = Node(node_id, slot, token, position, rank)
        self._children[node_id] = []
        siblings.append(node_id)
        return Growth.ALIVE

    def commit(self, tokens: Sequence[int]) -> int:
        """Append the target's tokens and move the root along them; the number of nodes killed."""
        before, walked = len(self._nodes), 0
        for token in tokens:
            position = self.prefix.length
            self.prefix.extend((token,))
            walked += self._step(token, position)
        return before - len(self._nodes) - walked

    def clear(self) -> int:
        """Kill every node and forget all ids (a new stream); the number of nodes killed."""
        killed = len(self._nodes)
        self._nodes.clear()
        self._children = {ROOT: []}
        self._committed.clear()
        self._last_id = 0
        return killed

    def _step(self, token: int, position: int) -> int:
        """Move the root over one committed token; 1 if a node was there."""
        match = None
        for child in self._children[ROOT]:
            if self._nodes[child].token == token:
                match = child
            else:
                self._kill(child)
        if match is None:
            self._children[ROOT] = []
            return 0
        self._remember(match, position)
        del self._nodes[match]
        self._children[ROOT] = self._children.pop(match)
        for child in self._children[ROOT]:
            old = self._nodes[child]
            self._nodes[child] = Node(child, ROOT, old.token, old.position, old.rank)
        return 1

    def _kill(self, node_id: int) -> None:
        pending = [node_id]
        while pending:
            dead = pending.pop()
            del self._nodes[dead]
            pending.extend(self._children.pop(dead))

    def _remember(self, node_id: int, position: int) -> None:
        self._committed[node_id] = position
        if len(self._committed) > MAX_COMMITTED_IDS:
            del self._committed[next(iter(self._committed))]
