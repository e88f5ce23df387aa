"""Constraints on an output: a JSON schema, a grammar, a regular expression, or a list of tokens.

A constraint is one of the sampling parameters, so it is a part of the law: a token that it forbids
at a position cannot be chosen there (``sampling.choose``), whatever the draft was. Only its kind
and its text cross the wire; each end that has a grammar library parses the text for itself
(``matcher``). A list of tokens needs no library.

A mask is ``bytes``: token t may come next if bit ``t % 8`` of byte ``t // 8`` is set. Ids beyond
its end, such as those that only pad a model's vocabulary, are forbidden.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Final, Protocol

from edgespec.core.protocol.checks import check_range
from edgespec.core.protocol.errors import EdgespecError

MAX_CONSTRAINT_BYTES: Final = 32 << 10
"""Bound on the length of a constraint's text in UTF-8, which travels in the first message of a
stream, beside the prompt."""


class ConstraintError(EdgespecError, ValueError):
    """The constraint cannot be used: it cannot be parsed or needs too much work. The message says
    why."""


class ConstraintBusyError(ConstraintError):
    """The constraint could not be parsed now, because the parser is busy. The same one may work
    later."""


class ConstraintKind(Enum):
    """Notation of a constraint's text."""

    JSON_SCHEMA = "json_schema"
    GRAMMAR = "grammar"
    """Lark's notation, as llguidance accepts it."""
    REGEX = "regex"
    """The whole output must match, in the notation of Rust's ``regex``."""
    TOKENS = "tokens"
    """The output is exactly these tokens (``tokens_constraint``), end tokens included. With scores
    such an output shows how likely a text is."""


class Matcher(Protocol):
    """State of one output in its grammar.

    The methods raise ``ConstraintError`` when going on would take more work than the bounds of the
    grammar library allow."""

    @property
    def can_end(self) -> bool:
        """Whether the output may end here."""

    def mask(self) -> bytes:
        """Return the tokens that may come next, without end tokens."""

    def consume(self, tokens: Sequence[int]) -> int:
        """Advance by as many of ``tokens`` as the grammar accepts, and return their number."""

    def rollback(self, count: int) -> None:
        """Undo the last ``count`` tokens."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint as it crosses the wire, and at the end that can parse it a way to follow it.

    Raises ``ValueError`` with the field, the value and the limit."""

    kind: ConstraintKind
    text: str = field(repr=False)  # as private as a prompt: not for logs and traces
    matcher: Callable[[], Matcher] | None = field(default=None, compare=False, repr=False)
    """Makes a matcher at the start of an output. It never leaves this end and is ignored when
    constraints are compared. None until this end has parsed the text."""

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            kind = self.kind.value
            raise ValueError(f"the {kind} constraint is not valid Unicode: {error}") from None
        check_range(f"bytes of the {self.kind.value} constraint", size, 1, MAX_CONSTRAINT_BYTES)


_BYTES_PER_TOKEN: Final = 3
MAX_FORCED_TOKENS: Final = MAX_CONSTRAINT_BYTES // 4
"""Limit on the tokens of one constraint. Each takes four characters."""


def tokens_constraint(tokens: Sequence[int]) -> Constraint:
    """Return the constraint of an output that is exactly ``tokens``, with its matcher. Its text is
    the base64 of three bytes for each token. Raises ``ValueError`` for too many tokens, for none,
    and for an id above 24 bits."""
    check_range("number of forced tokens", len(tokens), 1, MAX_FORCED_TOKENS)
    for token in tokens:
        check_range("forced token", token, 0, (1 << 8 * _BYTES_PER_TOKEN) - 1)
    packed = b"".join(token.to_bytes(_BYTES_PER_TOKEN, "big") for token in tokens)
    text = base64.b64encode(packed).decode()
    return with_tokens_matcher(Constraint(ConstraintKind.TOKENS, text))


def with_tokens_matcher(constraint: Constraint) -> Constraint:
    """Return a constraint of kind TOKENS with its matcher. Raises ``ConstraintError``."""
    try:
        packed = base64.b64decode(constraint.text, validate=True)
    except ValueError as error:
        raise ConstraintError(f"the text of a tokens constraint is no base64: {error}") from None
    if len(packed) % _BYTES_PER_TOKEN:
        raise ConstraintError(f"a tokens constraint has {len(packed)} bytes, no multiple of 3")
    tokens = tuple(
        int.from_bytes(packed[place : place + _BYTES_PER_TOKEN], "big")
        for place in range(0, len(packed), _BYTES_PER_TOKEN)
    )
    return replace(constraint, matcher=partial(TokensMatcher, tokens))


class TokensMatcher:
    """A ``Matcher`` that allows one list of tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._count = tokens, 0

    @property
    def can_end(self) -> bool:
        return self._count == len(self._tokens)

    def mask(self) -> bytes:
        return b"" if self.can_end else pack_mask(self._tokens[self._count : self._count + 1])

    def consume(self, tokens: Sequence[int]) -> int:
        before = self._count
        for token in tokens:
            if self.can_end or token != self._tokens[self._count]:
                break
            self._count += 1
        return self._count - before

    def rollback(self, count: int) -> None:
        self._count -= count


def allows(mask: bytes, token: int) -> bool:
    place = token >> 3
    return place < len(mask) and bool(mask[place] >> (token & 7) & 1)


def pack_mask(tokens: Iterable[int]) -> bytes:
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


class ConstrainedText:
    """Follows one output through its grammar.

    The matcher's state is that behind ``_matched``. Moving to another output costs the tokens that
    are new and a rollback of those that are gone. A tree of drafts is walked depth first.

    Where the grammar is complete, or can neither go on nor end, only end tokens are allowed. A
    position behind an end token or a forbidden token has no mask, because no output gets there.

    Raises ``ConstraintError`` if this end has not parsed the constraint, and for a model without an
    end token."""

    def __init__(self, constraint: Constraint, end_tokens: Iterable[int]) -> None:
        if constraint.matcher is None:
            kind = constraint.kind.value
            raise ConstraintError(f"no grammar library is installed here to parse a {kind}")
        # A list of tokens may have end tokens in it, which do not end the output.
        is_list = constraint.kind is ConstraintKind.TOKENS
        self._end_tokens = frozenset() if is_list else frozenset(end_tokens)
        if not self._end_tokens and not is_list:
            raise ConstraintError("a constraint needs a model with an end token")
        self._ends = pack_mask(self._end_tokens)
        self._matcher: Matcher = constraint.matcher()
        self._matched: list[int] = []
        self._has_unmatched = False
        """Whether the last followed output has tokens behind ``_matched``: rejected ones, or an end
        token."""

    def follow(self, output: Sequence[int]) -> int:
        """Move behind ``output``, the generated tokens so far.

        Returns the number of tokens that the grammar accepts, an end token behind a complete output
        included."""
        matched = self._matched
        kept = len(matched)
        if list(output[:kept]) != matched:
            pairs = zip(matched, output, strict=False)
            kept = next((at for at, (a, b) in enumerate(pairs) if a != b), min(kept, len(output)))
            self._matcher.rollback(len(matched) - kept)
            del matched[kept:]
        fresh = list(output[kept:])
        end = next((at for at, t in enumerate(fresh) if t in self._end_tokens), len(fresh))
        count = self._matcher.consume(fresh[:end]) if end else 0
        matched += fresh[:count]
        self._has_unmatched = len(matched) < len(output)
        if count == end < len(fresh) and allows(self._mask(), fresh[end]):
            return len(matched) + 1
        return len(matched)

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """Return the tokens behind ``output`` that the grammar forces, at most ``limit`` tokens.

        A token is forced if the mask allows only it. End tokens are not counted as forced."""
        found: list[int] = []
        matched = self.follow(output) == len(output)
        while matched and len(found) < limit:
            bits = int.from_bytes(self.mask() or b"", "little")
            token = bits.bit_length() - 1
            if bits & (bits - 1) or token < 0 or token in self._end_tokens:
                break
            found.append(token)
            matched = self.follow([*output, *found]) == len(output) + len(found)
        return found

    def mask(self) -> bytes | None:
        """Return the mask behind the last followed output; None if the grammar rejects it or it has
        ended."""
        return None if self._has_unmatched else self._mask()

    def masks(self, nodes: Sequence[int], parents: Sequence[int]) -> list[bytes | None]:
        """Return the mask behind the output and behind each of ``nodes``.

        ``nodes`` form a tree behind the output, in which parents (-1: the output) come before their
        children. A mask is None as in ``mask``."""
        found: list[bytes | None] = [self.mask(), *[None] * len(nodes)]
        if not nodes or found[0] is None:
            return found
        children: list[list[int]] = [[] for _ in found]
        for node in range(len(nodes) - 1, -1, -1):
            children[1 + parents[node]].append(node)
        path: list[int] = []  # nodes that the matcher has consumed
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
        if not matcher.can_end:
            return mask
        bits = int.from_bytes(mask, "little") | int.from_bytes(self._ends, "little")
        return bits.to_bytes(max(len(mask), len(self._ends)), "little")
