"""The speculation tree: draft nodes behind the committed prefix, with a root that moves.

Theory of operation. The *root* is the end of the committed prefix. A *node* is a drafted token
whose parent is another node or the root. Node ids count up from 1 for the life of a stream; 0
stands for the root at a stated base position. Committing tokens moves the root: along a child that
has the token (that child becomes *committed*), or off the tree, which kills every node. A node is

    alive      its whole path from the root consists of nodes of this tree
    committed  its path is part of the committed prefix; late children may still name it as parent
    dead       in any other case; dead ids are forgotten, and their late children are dropped

Invariants: a parent's id is smaller than its children's; siblings have different tokens; the
position of a root child is ``prefix.length``. Both sides run this same class: the device adds what
it drafted, the verifier adds what arrived, and both commit the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import GOLDEN, MASK_32, MIX_A, MIX_B, SamplingParams

_EMPTY_HASH = 0x65646765


class CommittedPrefix:
    """The prompt and the target's own tokens behind it.

    ``hash_at(n)`` is the 32-bit hash of the first n tokens. It detects that the other end holds
    other tokens, which lengths alone do not."""

    __slots__ = ("_hashes", "length", "prompt_length", "tokens")

    def __init__(self, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        self.prompt_length = len(prompt)
        self.length = 0
        self.tokens: list[int] = []
        self._hashes: list[int] = [_EMPTY_HASH]
        self.extend(prompt)
        self.extend(output)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def extend(self, tokens: Iterable[int]) -> None:
        self.tokens += tokens
        self.length = len(self.tokens)

    def hash_at(self, length: int) -> int:
        hashes = self._hashes
        if length < len(hashes):
            return hashes[length]
        value = hashes[-1]
        for token in self.tokens[len(hashes) - 1 : length]:
            # This is ``mix_bits``, whose calls would take half of the time for a long prompt.
            value = (value * GOLDEN + token) & MASK_32
            value = ((value ^ value >> 16) * MIX_A) & MASK_32
            value = ((value ^ value >> 13) * MIX_B) & MASK_32
            value ^= value >> 16
            hashes.append(value)
        return hashes[length]

    def starts_with(self, tokens: Sequence[int]) -> bool:
        return self.tokens[: len(tokens)] == list(tokens)


ROOT = 0
UNRANKED = NO_CELL = -1

# Committed ids that late drafts may still name. A device receives a commit within a round trip, so
# only ids of the last round trip matter; this is thousands of tokens on any real link.
MAX_COMMITTED_IDS = 4096


class GrowResult(Enum):
    ALIVE = "alive"
    FORWARDED = "forwarded"
    """The node agrees with tokens that are committed already."""
    STALE = "stale"
    """The node's parent is dead or unknown, or it disagrees with a committed token, or it is a
    repeat."""


# These names are used at every node: in Python 3.11 looking a member up in its Enum is a function
# call.
ALIVE, FORWARDED, STALE = GrowResult


@dataclass(slots=True, eq=False)
class Node:
    """A draft node."""

    id: int
    parent: int
    """Id of the parent node; ``ROOT`` for children of the root."""
    token: int
    position: int
    rank: int
    """Rank among the draft model's candidates for the position, 0 for the first; ``UNRANKED`` if
    the draft model did not offer this token."""
    children: list[Node]
    logprob: float = 0.0
    """Log-probability under the draft model, if this end drafted the node."""
    chance: float = 1.0
    """Estimated chance that the node is right if its parent is, if this end drafted it."""
    lookup_cell: int = NO_CELL
    """Cell of ``text_lookup.TextChances`` if text lookup offered the token, else ``NO_CELL``."""
    prediction_cell: int = NO_CELL
    """Cell of ``predicted_text.INITIAL_CHANCES`` if the prediction of a device offered the token,
    else ``NO_CELL``."""
    place: int = 0
    """Place in the draft step that offered the token: 0 for the next position, 1 for the one behind
    it, and so on."""


class SpeculationTree:
    __slots__ = ("_committed", "last_id", "nodes", "prefix", "roots")

    def __init__(self, prefix: CommittedPrefix) -> None:
        self.prefix = prefix
        self.nodes: dict[int, Node] = {}
        """Alive nodes by id, lowest id first, so every parent comes before its children."""
        self.roots: list[Node] = []
        self.last_id = 0
        """Highest id that was added. A stale node's id does not count: a node whose parent was not
        found may be sent again when the parent is there, as after the verifier had no room for the
        parent."""
        self._committed: dict[int, int] = {}

    # --- looking ---------------------------------------------------------------------------

    def child_position(self, parent: int, base_position: int) -> int | None:
        """Return the position of a child of ``parent``, or None if the parent is dead or unknown.

        A child of ``ROOT`` stands at ``base_position``."""
        if parent in self.nodes:
            return self.nodes[parent].position + 1
        if parent == ROOT:
            return base_position
        return self._committed[parent] + 1 if parent in self._committed else None

    def path(self, node_id: int) -> list[int]:
        """Return the tokens from the root to the node, itself included; empty for the root."""
        tokens: list[int] = []
        nodes = self.nodes
        while node_id in nodes:
            node = nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tokens[::-1]

    def children(self, parent: int) -> list[Node]:
        """Return the children of an alive node, or of the root for any other id."""
        node = self.nodes.get(parent)
        return self.roots if node is None else node.children

    # --- changing --------------------------------------------------------------------------

    def grow(
        self,
        node_id: int,
        parent: int,
        token: int,
        base_position: int,
        rank: int | None = None,
        logprob: float = 0.0,
        chance: float = 1.0,
        lookup_cell: int = NO_CELL,
        prediction_cell: int = NO_CELL,
    ) -> GrowResult:
        """Add one draft node.

        ``base_position`` is used only for parent ``ROOT``: the committed length on which the node
        was drafted, at most the present one (the caller checks that). ``rank`` None gives the node
        the next rank behind its present siblings."""
        if node_id <= self.last_id:
            return STALE
        before = self.nodes.get(parent)
        if before is not None:
            position, siblings = before.position + 1, before.children
        else:
            place = base_position if parent == ROOT else self.child_position(parent, base_position)
            if place is None:
                return STALE
            if place < self.prefix.length:
                return self._grow_late(node_id, token, place)
            parent, position, siblings = ROOT, place, self.roots
        for other in siblings:
            if other.token == token:
                return STALE
        if rank is None:
            rank = len(siblings)
        self.last_id = node_id
        # This takes 0.24 us by position and 0.52 us with names, for every draft node.
        node = Node(
            node_id,
            parent,
            token,
            position,
            rank,
            [],
            logprob,
            chance,
            lookup_cell,
            prediction_cell,
        )
        self.nodes[node_id] = node
        siblings.append(node)
        return ALIVE

    def _grow_late(self, node_id: int, token: int, position: int) -> GrowResult:
        if self.prefix.tokens[position] != token:
            return STALE
        self.last_id = node_id
        self._remember(node_id, position)
        return FORWARDED

    def commit(self, tokens: Sequence[int]) -> None:
        """Append the target's tokens and move the root along them."""
        if self.nodes:
            for position, token in enumerate(tokens, self.prefix.length):
                self._step(token, position)
        self.prefix.extend(tokens)

    def clear(self) -> None:
        """Kill every node and forget all ids, for a new stream."""
        self.nodes.clear()
        self.roots = []
        self._committed.clear()
        self.last_id = 0

    def _step(self, token: int, position: int) -> None:
        """Move the root over one committed token."""
        match = None
        for child in self.roots:
            if child.token == token:
                match = child
            else:
                self._kill(child)
        if match is None:
            self.roots = []
            return
        self._remember(match.id, position)
        del self.nodes[match.id]
        self.roots = match.children
        for child in self.roots:
            child.parent = ROOT

    def _kill(self, node: Node) -> None:
        if not node.children:
            del self.nodes[node.id]
            return
        pending = [node]
        while pending:
            dead = pending.pop()
            del self.nodes[dead.id]
            pending += dead.children

    def _remember(self, node_id: int, position: int) -> None:
        self._committed[node_id] = position
        if len(self._committed) > MAX_COMMITTED_IDS:
            del self._committed[next(iter(self._committed))]


@dataclass(frozen=True, slots=True)
class EndCondition:
    stop_ids: frozenset[int]
    end: int
    """Committed length at which the generation is complete."""

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        prompt_length: int,
        context_length: int,
        eos_token_ids: Sequence[int],
    ) -> EndCondition:
        end = min(prompt_length + sampling.max_tokens, context_length)
        return cls(sampling.end_tokens(eos_token_ids), end)

    def finish_reason(self, prefix: CommittedPrefix) -> FinishReason | None:
        """Return the finish reason of a generation that holds these tokens, or None if it is not
        complete."""
        if prefix.output and prefix.output[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if prefix.length >= self.end else None

    def cut(
        self, position: int, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Return the part of ``tokens``, which start at ``position``, that belongs to the output.

        Also returns the finish reason if the output ends with that part. A stop id belongs to the
        output."""
        room = self.end - position
        if len(tokens) < room and self.stop_ids.isdisjoint(tokens):  # the usual case
            return tokens, None
        room = max(0, room)
        for index, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                return tokens[: index + 1], FinishReason.STOP
        return tokens[:room], FinishReason.LENGTH if len(tokens) >= room else None
