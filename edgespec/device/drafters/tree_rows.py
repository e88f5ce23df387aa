"""The rows of a draft's cache as a tree: which token each holds, and which row it hangs on.

``RowTable`` carries out what ``TreeRows`` says, and checks it; a drafter that keeps keys and values
by rows follows its moves. ``PathDrafter`` makes any drafter one that takes trees, path by path: it
saves no time, and shows what a drafter that runs them at once has to answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    TreeRows,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.twins import twin_of


class RowTable:
    """Row ``i`` holds token ``tokens[i]`` at ``positions[i]`` of a text and hangs on row
    ``parents[i] < i``, the first on -1. Of the first ``trunk`` rows each hangs on the last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.positions: list[int] = []
        self.trunk = 0

    def clear(self) -> None:
        self.tokens, self.parents, self.positions, self.trunk = [], [], [], 0

    def advance(self, keep_length: int, feed: Sequence[int], rows: TreeRows) -> int:
        """Carry out a step; returns the first row that was fed. Raises ``ValueError`` naming the
        value and the limit; a refused step changes nothing."""
        tokens, parents = self._kept(keep_length, rows.moved)
        fed = len(tokens)
        for token in feed:
            parents.append(len(tokens) - 1)
            tokens.append(token)
        for token, parent in zip(rows.tokens, rows.parents, strict=True):
            if not 0 <= parent < len(tokens):
                raise ValueError(f"row {len(tokens)} hangs on {parent}, but must on one before it")
            parents.append(parent)
            tokens.append(token)
        if not rows.leaves:
            raise ValueError("leaves must name at least one row")
        for leaf in rows.leaves:
            if not fed <= leaf < len(tokens):
                raise ValueError(f"leaf {leaf} was not fed: rows {fed} to {len(tokens) - 1} are")
        self.tokens, self.parents = tokens, parents
        trunk = min(self.trunk, keep_length)
        while trunk < len(parents) and parents[trunk] == trunk - 1:
            trunk += 1
        self.trunk, self.positions = trunk, list(range(trunk))
        for parent in parents[trunk:]:
            self.positions.append(self.positions[parent] + 1)
        return fed

    def path(self, row: int) -> list[int]:
        """Tokens of the text up to ``row`` and of itself."""
        found: list[int] = []
        while row >= self.trunk:
            found.append(self.tokens[row])
            row = self.parents[row]
        return self.tokens[: row + 1] + found[::-1]

    def hidden_from(self, row: int) -> list[int]:
        """Rows before ``row`` that are not on the path to it, in increasing order."""
        path = set[int]()
        while row >= self.trunk:
            path.add(row)
            row = self.parents[row]
        last = max(path, default=row)
        return [other for other in range(row + 1, last) if other not in path]

    def _kept(self, keep_length: int, moved: Sequence[int]) -> tuple[list[int], list[int]]:
        held = len(self.tokens)
        if not 0 <= keep_length <= held:
            raise ValueError(f"keep_length is {keep_length}, but {held} rows are cached")
        places: dict[int, int] = {}
        tokens, parents = self.tokens[:keep_length], self.parents[:keep_length]
        last = keep_length - 1
        for row in moved:
            if not last < row < held:
                raise ValueError(f"moved row {row} must lie in [{last + 1}, {held - 1}]")
            parent = self.parents[row]
            if parent >= keep_length and parent not in places:
                raise ValueError(f"row {row} stays, but not row {parent}, on which it hangs")
            places[row] = len(tokens)
            parents.append(places.get(parent, parent))
            tokens.append(self.tokens[row])
            last = row
        return tokens, parents


class PathDrafter:
    """``Drafter`` and ``TreeDrafter`` over any drafter: leaf by leaf, rolling back between them."""

    def __init__(self, inner: Drafter, most_leaves: int) -> None:
        self.most_leaves = most_leaves
        self._inner, self._rows = inner, RowTable()
        self._cached: list[int] = []
        """What the inner drafter holds."""

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def twin(self) -> PathDrafter:
        """Another sequence on the same weights (``ports.Twinned``)."""
        return PathDrafter(twin_of(self._inner), self.most_leaves)

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)
        self._rows.clear()
        self._cached = []

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        rows = TreeRows((), (), (), (keep_length + len(feed) - 1,))
        return self.step_tree(keep_length, feed, rows, width, cancelled)[0]

    def step_tree(
        self,
        keep_length: int,
        feed: Sequence[int],
        rows: TreeRows,
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        self._rows.advance(keep_length, feed, rows)
        found = []
        for leaf in rows.leaves:
            path = self._rows.path(leaf)
            keep = common_length(self._cached, path[:-1])
            self._cached = path
            found.append(self._inner.step(keep, path[keep:], width, cancelled))
        return tuple(found)

    def close(self) -> None:
        self._inner.close()


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
