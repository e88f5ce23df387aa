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

from edgespec.core.protocol.ranges import bounded

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
    """Whether ``mask`` has the bit of ``token``."""
    place = token >> 3
    return place < len(mask) and bool(mask[place] >> (token & 7) & 1)


def mask_of(tokens: Iterable[int]) -> bytes:
    """The mask that has these bits and no others."""
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")
