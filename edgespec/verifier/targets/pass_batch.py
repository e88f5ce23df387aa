"""The requests of a pass as columns, so that one operation on an array serves all sessions.

A pass over many sessions must cost little beside the model. So every field of the requests is read
once, by a loop in C, and everything else is computed on arrays. ``is_surely_valid`` only answers
whether a batch is certainly in order. If it is not, ``pass_requests.check_batch`` looks at the
requests one by one and names what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from edgespec.core.ports import ModelInfo, PassRequest, PassResult
from edgespec.core.protocol.work import NodeScore, TokenScore
from edgespec.verifier.targets.pass_requests import node_depths

Indices = npt.NDArray[np.int64]


@lru_cache(maxsize=2048)  # drafters draw the same few trees again and again
def tree_depths(parents: tuple[int, ...]) -> Indices:
    """Return the depth of each node of a tree, int64 [nodes]: 1 for a node behind the last token
    before the tree, whose parent is -1.

    Raises ``ValueError`` for a parent that does not come before its node."""
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has the parent {parent}, but must have -1 to {node - 1}")
    return np.array(node_depths(parents), dtype=np.int64)


_columns = attrgetter(
    *("key", "cache_length", "feed", "tokens", "parents", "sample", "blocks", "node_scores")
)


class PassBatch(tuple[PassRequest, ...]):
    """The requests of a pass, and their fields as columns with one entry for each request.

    Arrays are int64 [sessions]."""

    keys: tuple[str, ...]
    feeds: tuple[tuple[int, ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    """Tokens of the nodes (``PassRequest.tokens``)."""
    parents: tuple[tuple[int, ...], ...]
    samples: tuple[bool, ...]
    tables: tuple[tuple[int, ...], ...]
    """Block tables (``PassRequest.blocks``)."""
    node_scores: tuple[bool, ...]
    depths: tuple[Indices | None, ...]
    """Depths of the nodes; None for a request without nodes."""
    cached: Indices
    """Cached tokens (``PassRequest.cache_length``)."""
    fed: Indices
    """Fed tokens."""
    node_counts: Indices
    has_nodes: bool
    """True if any request has nodes."""

    @classmethod
    def of(cls, requests: Sequence[PassRequest]) -> PassBatch:
        """Return the batch of ``requests``, at least one. A batch is returned as it is.

        Raises ``ValueError`` for a parent behind its node, and ``OverflowError`` for a number
        beyond 64 bits."""
        if isinstance(requests, PassBatch):
            return requests
        batch = cls(requests)
        columns = zip(*map(_columns, requests), strict=True)
        batch.keys, cached, batch.feeds, batch.nodes, *others = columns
        batch.parents, batch.samples, batch.tables, batch.node_scores = others
        count = len(batch)
        batch.cached = np.array(cached, dtype=np.int64)
        batch.fed = np.fromiter(map(len, batch.feeds), np.int64, count)
        batch.has_nodes = any(batch.nodes) or any(batch.parents)
        if batch.has_nodes:
            batch.depths = tuple([tree_depths(tree) if tree else None for tree in batch.parents])
            batch.node_counts = np.fromiter(map(len, batch.nodes), np.int64, count)
        else:
            batch.depths, batch.node_counts = (None,) * count, np.zeros(count, dtype=np.int64)
        return batch

    @cached_property
    def ends(self) -> Indices:
        """int64 [sessions]: cached tokens, fed tokens and nodes together."""
        return self.cached + self.fed + self.node_counts

    @cached_property
    def tokens(self) -> Indices:
        """int64 [rows]: the tokens of the pass. Each request has its feed, then its nodes."""
        parts = (
            chain.from_iterable(zip(self.feeds, self.nodes, strict=True))
            if self.has_nodes
            else self.feeds
        )
        return np.fromiter(chain.from_iterable(parts), np.int64)

    def is_surely_valid(self, cached_lengths: Indices, info: ModelInfo) -> bool:
        """Return whether ``check_batch`` would certainly find nothing wrong, if at most
        ``cached_lengths`` [sessions] tokens of the sessions are cached."""
        lengths = self.cached + self.fed
        if self.has_nodes:
            if list(map(len, self.parents)) != self.node_counts.tolist():
                return False
            lengths += np.fromiter([0 if t is None else t.max() for t in self.depths], np.int64)
        return (
            len(set(self.keys)) == len(self.keys)
            and int(self.cached.min()) >= 0
            and bool((self.cached <= cached_lengths).all())
            and all(self.feeds)
            and all(
                [sample or not one for sample, one in zip(self.samples, self.nodes, strict=True)]
            )
            # A negative token id, read as an unsigned number, is too large as well.
            and int(self.tokens.view(np.uint64).max()) < info.vocabulary_size
            and int(lengths.max()) <= info.context_length
        )


def split_results(
    batch: PassBatch,
    tokens: list[int],
    scores: Mapping[str, tuple[TokenScore, ...]],
    nodes_scored: Mapping[str, tuple[NodeScore, ...]],
) -> list[PassResult]:
    """Return the result of each request, given the ``tokens`` that were chosen for all sampled
    rows. ``scores`` and ``nodes_scored`` are by key, for the requests that want them."""
    results, first = [], 0
    for key, nodes, sample in zip(batch.keys, batch.nodes, batch.samples, strict=True):
        last = first + 1 + len(nodes) if sample else first
        results.append(
            PassResult(
                key,
                tuple(tokens[first:last]),
                scores.get(key, ()),
                node_scores=nodes_scored.get(key, ()),
            )
        )
        first = last
    return results
