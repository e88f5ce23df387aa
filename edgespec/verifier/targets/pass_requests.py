"""What every target model asks of the requests of a pass, before anything changes.

Raises ``ValueError`` for a request that contradicts itself or the cache, and ``CapacityError`` for
one that is longer than the context; both name the session, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.core.ports import CapacityError, ModelInfo, ModelOutputError, PassRequest
from edgespec.core.protocol.constraint import ConstrainedText, ConstraintError
from edgespec.core.protocol.sampling import SamplingParams


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


class ConstrainedRows:
    """What each constrained session of a target may say at each row of a pass. The state of a text
    is kept from pass to pass, so a pass pays for the tokens that are new and for a mask a row."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._texts: dict[str, ConstrainedText] = {}

    def open(self, key: str, sampling: SamplingParams) -> None:
        """Begin a session. Raises ``ConstraintError`` for a constraint that cannot be kept here."""
        self._texts.pop(key, None)
        if sampling.constraint is not None:
            ends = self._info.eos_token_ids
            self._texts[key] = ConstrainedText(sampling.constraint, ends)

    def masks(
        self, key: str, output: Sequence[int], nodes: Sequence[int], parents: Sequence[int]
    ) -> list[bytes | None]:
        """The mask behind ``output``, the generated tokens so far, and behind each node of the tree
        on it; None where no text gets. Raises ``ModelOutputError`` where the grammar cannot go
        on, or never led there."""
        text = self._texts[key]
        try:
            if (taken := text.follow(output)) < len(output):
                why = f"the grammar takes {taken} of the {len(output)} tokens generated"
                raise ModelOutputError(key, why)
            return text.masks(nodes, parents)
        except ConstraintError as error:
            raise ModelOutputError(key, str(error), requested=True) from error

    def close(self, key: str) -> None:
        self._texts.pop(key, None)
