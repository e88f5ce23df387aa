"""What a tree of nodes looks like to attention: depths, and who is whose ancestor.

Drafters draw the same few trees again and again, so small ones are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from edgespec.verifier.targets.request_checks import node_depths

_KEPT_NODES_MAX = 64


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Of ``parents``: -1 is the last token before the tree."""

    depths: npt.NDArray[np.int64]
    """[nodes]: 1 for a node that hangs on the last token."""
    line: npt.NDArray[np.bool_]
    """[nodes, nodes]: True where the second is the first itself or an ancestor of it."""
    depth: int
    """The largest of ``depths``."""


def tree_shape(parents: tuple[int, ...]) -> TreeShape:
    """The shape of a tree. Raises ``ValueError`` for a parent that does not come before its
    node."""
    return _kept(parents) if len(parents) <= _KEPT_NODES_MAX else _shape(parents)


@lru_cache(maxsize=2048)
def _kept(parents: tuple[int, ...]) -> TreeShape:
    return _shape(parents)


def _shape(parents: tuple[int, ...]) -> TreeShape:
    line = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} hangs on {parent}, but must on -1 to {node - 1}")
        if parent >= 0:
            line[node] |= line[parent]
    depths = node_depths(parents)
    return TreeShape(np.array(depths, dtype=np.int64), line, max(depths, default=0))
