"""What a text is held to: a JSON schema, a grammar or a regular expression.

A constraint is a part of the sampling parameters, so it is a part of the law: a token that it
forbids at a place cannot be chosen there (``sampling.choose``), whoever drafted it. What travels is
its kind and its text; each end that has a grammar library reads it for itself (``matcher``).

A mask is ``bytes``: token t may come next when bit ``t % 8`` of byte ``t // 8`` is set. Ids beyond
its end, such as those that only pad a model's vocabulary, are forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Protocol

from edgespec.core.protocol.checks import bounded

MAX_CONSTRAINT_BYTES: Final = 32 << 10
"""Of its text in UTF-8; it travels in the first message of a stream, beside the prompt."""


class ConstraintError(ValueError):
    """A constraint cannot be kept: it cannot be read or asks for too much; the message says why."""


class ConstraintBusyError(ConstraintError):
    """It could not be read now; the same one may be read later."""


class ConstraintKind(Enum):
    """How the text of a constraint is to be read."""

    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"
    """Lark's notation, as llguidance takes it."""
    REGEX = "regex"
    """Of the whole text, in the notation of Rust's ``regex``."""


class Matcher(Protocol):
    """Where one text stands in its grammar. Raises ``ConstraintError`` when going on would take
    more work than the bounds of its library allow."""

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""

    def mask(self) -> bytes:
        """The tokens with which the text may go on; no end tokens."""

    def consume(self, tokens: Sequence[int]) -> int:
        """Go on with as many of ``tokens`` as the grammar takes; their count."""

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Raises ``ValueError`` naming the field, the value and the limit."""

    kind: ConstraintKind
    text: str = field(repr=False)  # as telling as a prompt: not for logs and traces
    matcher: Callable[[], Matcher] | None = field(default=None, compare=False, repr=False)
    """Makes a matcher of a text that has not begun. It stays at this end, and counts for nothing
    when constraints are compared; None: nobody here has read the text yet."""

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(f"the {self.kind.value} constraint is no Unicode: {error}") from None
        bounded(f"bytes of the {self.kind.value} constraint", size, 1, MAX_CONSTRAINT_BYTES)


def allows(mask: bytes, token: int) -> bool:
    place = token >> 3
    return place < len(mask) and bool(mask[place] >> (token & 7) & 1)


def mask_of(tokens: Iterable[int]) -> bytes:
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


class ConstrainedText:
    """One text beside its grammar. Its matcher stands behind ``_taken``; to follow a text costs the
    tokens that are new, and a rollback of those that are gone. A tree is walked depth first.

    Where the grammar is at its end, or can neither go on nor end, only end tokens may come. A place
    behind an end token or a forbidden one has no mask: no text gets there.

    Raises ``ConstraintError`` for a constraint that nobody here has read, and for a model without
    an end token."""

    def __init__(self, constraint: Constraint, end_tokens: Iterable[int]) -> None:
        if constraint.matcher is None:
            raise ConstraintError(f"there is nothing here that reads a {constraint.kind.value}")
        self._end_tokens = frozenset(end_tokens)
        if not self._end_tokens:
            raise ConstraintError("a constraint needs a model with an end token")
        self._ends = mask_of(self._end_tokens)
        self._matcher: Matcher = constraint.matcher()
        self._taken: list[int] = []
        self._lost = False
        """The text that was followed last goes on behind ``_taken``."""

    def follow(self, output: Sequence[int]) -> int:
        """Stand behind ``output``, the generated tokens so far; how many of them the grammar takes,
        an end token behind a complete text included."""
        taken = self._taken
        kept = len(taken)
        if list(output[:kept]) != taken:
            pairs = zip(taken, output, strict=False)
            kept = next((at for at, (a, b) in enumerate(pairs) if a != b), min(kept, len(output)))
            self._matcher.rollback(len(taken) - kept)
            del taken[kept:]
        fresh = list(output[kept:])
        end = next((at for at, t in enumerate(fresh) if t in self._end_tokens), len(fresh))
        count = self._matcher.consume(fresh[:end]) if end else 0
        taken += fresh[:count]
        self._lost = len(taken) < len(output)
        if count == end < len(fresh) and allows(self._mask(), fresh[end]):
            return len(taken) + 1
        return len(taken)

    def forced(self, output: Sequence[int], most: int) -> list[int]:
        """The tokens behind ``output`` about which the grammar leaves no choice, ``most`` of them
        at most; an end token is none of them."""
        found: list[int] = []
        taken = self.follow(output) == len(output)
        while taken and len(found) < most:
            bits = int.from_bytes(self.mask() or b"", "little")
            token = bits.bit_length() - 1
            if bits & (bits - 1) or token < 0 or token in self._end_tokens:
                break
            found.append(token)
            taken = self.follow([*output, *found]) == len(output) + len(found)
        return found

    def mask(self) -> bytes | None:
        """What may come behind the text followed last; None: it is not in the grammar, or ended."""
        return None if self._lost else self._mask()

    def masks(self, nodes: Sequence[int], parents: Sequence[int]) -> list[bytes | None]:
        """What may come behind the text, and behind each of ``nodes``, a tree behind the text whose
        parents (-1: the text) come before their children. None as for ``mask``."""
        found: list[bytes | None] = [self.mask(), *[None] * len(nodes)]
        if not nodes or found[0] is None:
            return found
        children: list[list[int]] = [[] for _ in found]
        for node in range(len(nodes) - 1, -1, -1):
            children[1 + parents[node]].append(node)
        path: list[int] = []  # nodes that the matcher has taken
        open_nodes = [*children[0]]  # a stack
        while open_nodes:
            node = open_nodes.pop()
            parent = parents[node]
            back = len(path) - (path.index(parent) + 1 if parent >= 0 else 0)
            if back:
                self._matcher.rollback(back)
                del path[len(path) - back :]
            if nodes[node] in self._end_tokens or self._matcher.consume((nodes[node],)) == 0:
                continue
            path.append(node)
            found[1 + node] = self._mask()
            open_nodes += children[1 + node]
        if path:
            self._matcher.rollback(len(path))
        return found

    def _mask(self) -> bytes:
        mask, matcher = self._matcher.mask(), self._matcher
        if not any(mask):
            return self._ends
        if not matcher.accepting:
            return mask
        bits = int.from_bytes(mask, "little") | int.from_bytes(self._ends, "little")
        return bits.to_bytes(max(len(mask), len(self._ends)), "little")
