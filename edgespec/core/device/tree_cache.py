"""The session knows which rows its drafter has cached, and what leads from there to several leaves.

Theory of operation. A drafter that takes trees holds rows: committed text first, nodes of the tree
behind it, each behind the row it hangs on. Rows are found by the tokens that lead to them, not by
node ids, so it does not matter how a node came about. What is committed along a branch turns from
nodes into text where it stands, once what lies between has been taken out; nothing is fed twice,
and a switch of branch feeds nothing at all.

Invariants: the first ``_text`` rows are the committed prefix; a row's parent comes before it; after
a step every row behind the text is an alive node of the tree. So there are never more than those.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import TreeRows

MAX_TREE_NODES = 256
"""A drafter of trees has so many rows behind the text; a session with one keeps no more nodes."""


class TreeCache:
    """The tokens behind a drafter's cached rows, and the row that each hangs on."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._text = 0
        self._before: tuple[list[int], list[int], int] = ([], [], 0)
        """The same three before the last ``feed``."""

    def __len__(self) -> int:
        return len(self._tokens)

    def feed(
        self, tree: SpeculationTree, leaves: Sequence[int]
    ) -> tuple[int, tuple[int, ...], TreeRows]:
        """Make the cache hold the rows of ``leaves`` (nodes, or ``ROOT``) and all that lead to
        them: (rows to keep, text to append, what else to do).

        Each leaf is fed, because its row of logits is what the step is for.
        """
        self._before = self._tokens.copy(), self._parents.copy(), self._text
        children = {
            (self._parents[row], self._tokens[row]): row
            for row in range(self._text, len(self._tokens))
        }
        kept = self._settled(tree.prefix, children)
        text = self._text + len(kept)
        if ROOT in leaves and text == tree.prefix.length:  # its row of logits is not kept
            text -= 1
            kept = kept[:-1]
        feed = tuple(tree.prefix.tokens[text:])
        row_of = {ROOT: tree.prefix.length - 1}
        if not feed:
            root = kept[-1] if kept else text - 1
            kept += _alive(tree, set(leaves), root, children, row_of)
        keep = min(text, self._text)
        self._keep(keep, kept)
        nodes = _missing(tree, leaves, row_of)
        self._append(feed)
        first = len(self._tokens)
        for row, node_id in enumerate(nodes, first):
            node = tree.nodes[node_id]
            self._tokens.append(node.token)
            self._parents.append(row_of[node.parent])
            row_of[node_id] = row
        self._text = tree.prefix.length
        while kept and kept[0] == keep:
            del kept[0]
            keep += 1
        rows = TreeRows(
            tuple(kept),
            tuple(self._tokens[first:]),
            tuple(self._parents[first:]),
            tuple([row_of[leaf] for leaf in leaves]),
        )
        return keep, feed, rows

    def take_back(self, *, forgotten: bool = False) -> None:
        """The last ``feed`` never reached the drafter. ``forgotten``: it holds nothing any more."""
        if forgotten:
            self._before = [], [], 0
        self._tokens, self._parents, self._text = self._before

    def _settled(self, prefix: CommittedPrefix, children: dict[tuple[int, int], int]) -> list[int]:
        """Rows of nodes that have been committed, in the order of the text."""
        found: list[int] = []
        row = self._text - 1
        for token in prefix.tokens[self._text :]:
            child = children.get((row, token))
            if child is None:
                break
            found.append(child)
            row = child
        return found

    def _keep(self, keep: int, moved: Sequence[int]) -> None:
        """Forget all rows behind the first ``keep`` but those ``moved``, which close up."""
        places = {row: place for place, row in enumerate(moved, keep)}
        tokens = [self._tokens[row] for row in moved]
        parents = [places.get(self._parents[row], self._parents[row]) for row in moved]
        self._tokens[keep:], self._parents[keep:] = tokens, parents

    def _append(self, feed: Sequence[int]) -> None:
        length = len(self._tokens)
        self._tokens += feed
        self._parents += range(length - 1, length - 1 + len(feed))


def _missing(tree: SpeculationTree, leaves: Sequence[int], row_of: dict[int, int]) -> list[int]:
    """Nodes on the way to ``leaves`` that have no row, parents before children."""
    found: set[int] = set()
    for leaf in leaves:
        node_id = leaf
        while node_id not in row_of and node_id not in found:
            found.add(node_id)
            node_id = tree.nodes[node_id].parent
    return sorted(found)


def _alive(
    tree: SpeculationTree,
    leaves: set[int],
    root: int,
    children: dict[tuple[int, int], int],
    row_of: dict[int, int],
) -> list[int]:
    """Rows of alive nodes behind row ``root``, but for the leaves, in increasing order; ``row_of``
    takes the rows where they will be."""
    before = {ROOT: root}
    found: list[tuple[int, int]] = []
    for node_id, node in tree.nodes.items():  # parents before children
        parent = before.get(node.parent)
        row = None if parent is None else children.get((parent, node.token))
        if row is not None and node_id not in leaves:
            before[node_id] = row
            found.append((row, node_id))
    found.sort()
    for place, (_, node_id) in enumerate(found, tree.prefix.length):
        row_of[node_id] = place
    return [row for row, _ in found]
