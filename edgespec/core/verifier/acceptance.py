"""Acceptance rules: given the target's choice after every node of a pass, what is committed?

The exact rule follows the target: from the root, go to the child that *is* the target's token, as
long as there is one; what the target said at the last node reached is the correction (after a
miss) or the bonus. No ratio test and no residual, so nothing to bias: the committed tokens are
the target's own whatever was drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from edgespec.core.statically_frozen import statically_frozen


@statically_frozen
class Walk:
    nodes: tuple[int, ...]
    """Indices of the accepted nodes of the pass, root to leaf."""
    tokens: tuple[int, ...]
    """What to commit: one token an accepted node, and one more. Never empty."""


class AcceptanceRule(Protocol):
    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        """``tokens[i]``/``parents[i]`` describe node i of the pass (-1 is the root);
        ``targets[0]`` is the target's token at the root, ``targets[1 + i]`` after node i."""


@statically_frozen
class ExactRule:
    """Commit the target's own tokens and nothing else."""

    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        nodes: list[int] = []
        committed = [targets[0]]
        at, wanted = -1, targets[0]
        for node, parent in enumerate(parents):  # a child comes behind its parent
            if parent == at and tokens[node] == wanted:
                nodes.append(node)
                at, wanted = node, targets[1 + node]
                committed.append(wanted)
        return Walk(tuple(nodes), tuple(committed))
