"""Checks that every target model makes of the requests of a pass, before anything changes.

They raise ``ValueError`` for a request that contradicts itself or the cache, and ``CapacityError``
for one that is longer than the context. Both name the session, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from edgespec.core.ports import CapacityError, ModelInfo, ModelOutputError, PassRequest
from edgespec.core.protocol.constraint import ConstrainedText, ConstraintError
from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams


@dataclass(slots=True)
class SequenceText:
    """The text of one sequence, as a target keeps it."""

    prompt_length: int
    sampling: SamplingParams
    text: Sequence[int] = ()
    """Committed tokens, whether their keys are cached or not."""
    tokens: list[int] = field(default_factory=list)
    """Committed tokens whose keys are cached."""
    nodes: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Parents of ``nodes``, the tree of the last pass, until it is kept or dropped."""
    first: int = 0
    """The position of the first token, for the noise: a draft model's window begins later."""

    def reach(self, request: PassRequest) -> int:
        """Return how many tokens a pass may find cached, from its own passes or in its blocks."""
        return max(len(self.tokens), len(self.text) if request.blocks else 0)

    def cut(self, length: int) -> None:
        """Record that the first ``length`` committed tokens are cached, and no more."""
        if length < len(self.tokens) and len(self.text) < len(self.tokens):
            self.text = tuple(self.tokens)
        del self.tokens[length:]
        self.tokens += self.text[len(self.tokens) : length]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        """Commit ``nodes`` of the last pass and forget the others. Raises ``ValueError`` when they
        are not a path from the root."""
        drawn, parents, parent = self.nodes, self.parents, -1
        for node in nodes:
            if not 0 <= node < len(drawn) or parents[node] != parent:
                raise ValueError(f"nodes {list(nodes)} of {key!r} are not a path from the root")
            parent = node
        self.tokens += [drawn[node] for node in nodes]
        self.nodes = self.parents = ()


def check_opening(
    key: str, prompt_length: int, opened: Collection[str], max_sessions: int, info: ModelInfo
) -> None:
    """Check that a sequence can be opened beside ``opened``.

    Raises ``ValueError`` for a key that is in use, and ``CapacityError`` if there are too many
    sequences or the prompt is too long. One sequence more than ``max_sessions`` is admitted: the
    probe that finds out whether the target still works."""
    if key in opened:
        raise ValueError(f"sequence {key!r} is already open")
    if len(opened) > max_sessions:
        raise CapacityError(f"{len(opened)} sessions are open, limit max_sessions {max_sessions}")
    if not 0 < prompt_length <= info.context_length:
        raise CapacityError(
            f"prompt of {prompt_length} tokens, limit 1 to {info.context_length} (context_length)"
        )


def check_batch(
    batch: Sequence[PassRequest], cached_length: Callable[[PassRequest], int], info: ModelInfo
) -> None:
    """Check all requests of a pass; raise the error at the head of this file for the first one that
    is not valid.

    ``cached_length`` returns how many tokens of a request's session are cached at most, and raises
    ``ValueError`` for a session that is not open."""
    if len({request.key for request in batch}) != len(batch):
        raise ValueError("two requests of one pass have the same key")
    for request in batch:
        cached = cached_length(request)
        key, parents = request.key, request.parents
        if not 0 <= request.cache_length <= cached:
            raise ValueError(
                f"{key!r}: cache_length is {request.cache_length}, but {cached} tokens are cached"
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
            raise CapacityError(
                f"{key!r}: {length} tokens, limit context_length {info.context_length}"
            )


def check_table(request: PassRequest, block_count: int, block_tokens: int) -> None:
    """Check the block table of a request. Raises ``ValueError`` if it is too short for the rows, or
    names a block that does not exist."""
    key, blocks, rows = request.key, request.blocks, request.cache_length + request.row_count
    if rows > (room := len(blocks) * block_tokens):
        raise ValueError(f"{key!r}: {rows} rows, but its blocks hold {room}")
    if min(blocks) < 1 or max(blocks) > block_count:
        raise ValueError(f"{key!r}: blocks {min(blocks)} to {max(blocks)}, limit {block_count}")


def node_depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of every node of a tree; 1 for a node behind the last fed token."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


class ConstrainedRows:
    """The token masks of sessions with a constraint or ``min_tokens``, for each row of a pass.

    The state of each text is kept from pass to pass, so a pass pays for its new tokens and for one
    mask a row."""

    def __init__(self, info: ModelInfo) -> None:
        self._info = info
        self._constrained: dict[str, ConstrainedText] = {}
        self._minimums: dict[str, MinTokensMask] = {}

    def open(self, key: str, sampling: SamplingParams) -> None:
        """Begin a session. Raises ``ConstraintError`` for a constraint that this target cannot
        follow."""
        self.close(key)
        if sampling.min_tokens:
            self._minimums[key] = MinTokensMask(
                sampling, self._info.vocabulary_size, self._info.eos_token_ids
            )
        if sampling.constraint is not None:
            self._constrained[key] = ConstrainedText(sampling.constraint, self._info.eos_token_ids)

    def masks(
        self, key: str, sequence: SequenceText, nodes: Sequence[int], parents: Sequence[int]
    ) -> list[bytes | None]:
        """Return a mask for each row of a pass: behind the text of ``sequence``, and behind each
        node of the tree on it.

        A mask is None if every token is allowed, or if the constraint forbids the path to the row.
        Raises ``ModelOutputError`` if the text itself does not follow the constraint."""
        found = self._constraint_masks(key, sequence, nodes, parents)
        generated, held = len(sequence.tokens) - sequence.prompt_length, self._minimums.get(key)
        if held is None or generated >= sequence.sampling.min_tokens:
            return found
        depths = (0, *node_depths(parents))
        pairs = zip(found, depths, strict=True)
        return [held.mask(mask, generated + depth) for mask, depth in pairs]

    def _constraint_masks(
        self, key: str, sequence: SequenceText, nodes: Sequence[int], parents: Sequence[int]
    ) -> list[bytes | None]:
        if sequence.sampling.constraint is None:
            return [None] * (1 + len(nodes))
        text, output = self._constrained[key], sequence.tokens[sequence.prompt_length :]
        try:
            if (taken := text.follow(output)) < len(output):
                why = f"the grammar takes {taken} of the {len(output)} tokens generated"
                raise ModelOutputError(key, why)
            return text.masks(nodes, parents)
        except ConstraintError as error:
            raise ModelOutputError(key, str(error), requested=True) from error

    def close(self, key: str) -> None:
        self._constrained.pop(key, None)
        self._minimums.pop(key, None)
