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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import GOLDEN, SamplingParams, mix

_EMPTY_HASH = 0x65646765


class CommittedPrefix:
    """Prompt and the target's own tokens. ``hash_at(n)`` is the 32-bit hash of the first n: it
    shows that the other side holds other tokens, which lengths alone do not."""

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
        for token in self.tokens[len(hashes) - 1 : length]:
            hashes.append(mix(hashes[-1] * GOLDEN + token))
        return hashes[length]

    def starts_with(self, tokens: Sequence[int]) -> bool:
        return self.tokens[: len(tokens)] == list(tokens)


ROOT = 0
UNRANKED = NOT_NAMED = -1

# Committed ids that late drafts may still name. A device hears of a commit within a round trip, so
# only ids of the last round trip matter; this is thousands of tokens at any real link.
MAX_COMMITTED_IDS = 4096


class Growth(Enum):
    ALIVE = "alive"
    FORWARDED = "forwarded"
    """The node agrees with tokens already committed."""
    STALE = "stale"
    """Its parent is dead or unknown, it disagrees with a committed token, or it is a repeat."""


# Asked for at every node: in Python 3.11 a look into the class is a function call.
ALIVE, FORWARDED, STALE = Growth


@dataclass(slots=True, eq=False)
class Node:
    """A guess; the tree alone changes it."""

    id: int
    parent: int
    """``ROOT`` for children of the root."""
    token: int
    position: int
    rank: int
    """0 for the draft's first choice among its siblings; ``UNRANKED``: no choice of the draft's."""
    children: list[Node]
    logprob: float = 0.0
    """What the draft thought of it, where this side drafted it."""
    chance: float = 1.0
    """How likely this side holds it to be right behind its parent, where it drafted it."""
    named_by: int = NOT_NAMED
    """The cell of ``text_guesses.TextChances`` that it is a guess of, where the text named it."""


class SpeculationTree:
    __slots__ = ("_committed", "last_id", "nodes", "prefix", "roots")

    def __init__(self, prefix: CommittedPrefix) -> None:
        self.prefix = prefix
        self.nodes: dict[int, Node] = {}
        """Alive nodes by id, oldest (lowest id) first: every parent before its children."""
        self.roots: list[Node] = []
        self.last_id = 0
        """The highest id that was taken. A stale node takes none: one that found no parent may come
        again when the parent has, as after a verifier had no room for it."""
        self._committed: dict[int, int] = {}

    # --- looking ---------------------------------------------------------------------------

    def place(self, parent: int, base_position: int) -> int | None:
        """The position of a child of ``parent`` (at ``base_position`` for ``ROOT``); None when
        the parent is dead or unknown."""
        if parent in self.nodes:
            return self.nodes[parent].position + 1
        if parent == ROOT:
            return base_position
        return self._committed[parent] + 1 if parent in self._committed else None

    def path(self, node_id: int) -> list[int]:
        """Tokens from the root to the node, itself included; empty for the root."""
        tokens: list[int] = []
        nodes = self.nodes
        while node_id in nodes:
            node = nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tokens[::-1]

    def children(self, parent: int) -> list[Node]:
        """Of an alive node, else of the root."""
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
        named_by: int = NOT_NAMED,
    ) -> Growth:
        """Add one guess. ``base_position`` counts only for parent ``ROOT``: the committed length
        it was drafted on, at most the present one (the caller checks). ``rank`` None: its place
        among the siblings that are there."""
        if node_id <= self.last_id:
            return STALE
        before = self.nodes.get(parent)
        if before is not None:
            position, siblings = before.position + 1, before.children
        else:
            place = base_position if parent == ROOT else self.place(parent, base_position)
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
        node = Node(node_id, parent, token, position, rank, [], logprob, chance, named_by)
        self.nodes[node_id] = node
        siblings.append(node)
        return ALIVE

    def _grow_late(self, node_id: int, token: int, position: int) -> Growth:
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
        """Kill every node and forget all ids (a new stream)."""
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
class Ending:
    stops: frozenset[int]
    end: int
    """The committed length at which the generation is full."""

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        prompt_length: int,
        context_length: int,
        eos_token_ids: Sequence[int],
    ) -> Ending:
        end = min(prompt_length + sampling.max_tokens, context_length)
        return cls(sampling.end_tokens(eos_token_ids), end)

    def reached(self, prefix: CommittedPrefix) -> FinishReason | None:
        """How a generation that holds these tokens has ended already, if it has."""
        if prefix.output and prefix.output[-1] in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if prefix.length >= self.end else None

    def cut(
        self, position: int, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """What of ``tokens``, which start at ``position``, belongs to the output, and whether the
        output ends with it. The stop id itself belongs to it."""
        room = self.end - position
        if len(tokens) < room and self.stops.isdisjoint(tokens):  # as nearly always
            return tokens, None
        room = max(0, room)
        for index, token in enumerate(tokens[:room]):
            if token in self.stops:
                return tokens[: index + 1], FinishReason.STOP
        return tokens[:room], FinishReason.LENGTH if len(tokens) >= room else None
