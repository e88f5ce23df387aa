"""What every target model asks of the requests of a pass, before anything changes.

Raises ``ValueError`` for a request that contradicts itself or the cache, and ``CapacityError`` for
one that is longer than the context; both name the session, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.ports import CapacityError, ModelInfo, PassRequest


def check_batch(
    batch: Sequence[PassRequest], cached_length: Callable[[PassRequest], int], info: ModelInfo
) -> None:
    """Check all requests of a pass; ``cached_length`` says how many tokens of a request's session
    are cached at most, and raises ``ValueError`` for one that is not open."""
    if len({request.key for request in batch}) != len(batch):
        raise ValueError("two requests of one pass have the same key")
    for request in batch:
        _check_request(request, cached_length(request), info)


def node_depths(parents: Sequence[int]) -> list[int]:
    """The depth of every node of a tree; 1 for a node that hangs on the last fed token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


def _check_request(request: PassRequest, cached_length: int, info: ModelInfo) -> None:
    key, parents = request.key, request.parents
    if not 0 <= request.cache_length <= cached_length:
        raise ValueError(
            f"{key!r}: cache_length is {request.cache_length}, "
            f"but {cached_length} tokens are cached"
        )
    if not request.feed:
        raise ValueError(f"{key!r}: feed is empty, but must hold at least one token")
    if len(request.tokens) != len(parents) or (request.tokens and not request.sample):
        raise ValueError(f"{key!r}: nodes need parents, and sample=True")
    if parents and any([not -1 <= parent < node for node, parent in enumerate(parents)]):
        raise ValueError(f"{key!r}: parents {parents} must come before their nodes")
    tokens = request.feed + request.tokens
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= info.vocabulary_size:
        raise ValueError(
            f"{key!r}: token ids {low} to {high}, limit 0 to {info.vocabulary_size - 1}"
        )
    depth = max(node_depths(parents)) if parents else 0
    length = request.cache_length + len(request.feed) + depth
    if length > info.context_length:
        raise CapacityError(f"{key!r}: {length} tokens, limit context_length {info.context_length}")
