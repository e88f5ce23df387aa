"""The bounds of a message on the wire, and the error that names the one that was crossed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from edgespec.core.messages import EXACT_RULE
from edgespec.core.sampling import MAX_BIASES, MAX_STOP_IDS

MAX_UINT32 = (1 << 32) - 1
MAX_UINT64 = (1 << 64) - 1

_E = TypeVar("_E", bound=Enum)


class ProtocolViolation(ValueError):
    """A message that breaks the protocol; the text names the field, the value and the bound."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What one end sends and accepts. Both directions of the codec enforce it."""

    max_message_bytes: int = 1 << 20
    max_prompt_tokens: int = 32768
    max_resumed_tokens: int = 32768
    """Committed tokens in an Open."""
    max_draft_nodes: int = 256
    """Nodes in one Draft."""
    max_commit_tokens: int = 4096
    """Tokens in one Commit; a resuming device may have several seconds of them to catch up."""
    max_stop_ids: int = MAX_STOP_IDS
    max_biases: int = MAX_BIASES
    max_session_id_bytes: int = 128
    max_name_bytes: int = 256
    """Model names and vocabulary fingerprints."""
    max_rule_bytes: int = 64
    max_fault_bytes: int = 1024
    """A longer fault text is cut when it is sent."""
    vocabulary_size: int = 1 << 24
    """Token ids are below it. Unless told, more than any vocabulary has."""
    rules: tuple[str, ...] = (EXACT_RULE,)
    """Acceptance rules this end knows."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if name != "rules" and value < 1:
                raise ValueError(f"{name} is {value}, but must be at least 1")
        if not self.rules:
            raise ValueError(f"rules is empty, but must name at least one, such as {EXACT_RULE!r}")


def check_number(field: str, value: int, low: int, high: int) -> int:
    """``value`` itself. Raises ``ProtocolViolation`` outside [low, high]."""
    if not low <= value <= high:
        raise ProtocolViolation(f"{field} is {value}, but must be in [{low}, {high}]")
    return value


def check_count(field: str, count: int, high: int, low: int = 0) -> None:
    if not low <= count <= high:
        raise ProtocolViolation(f"{field} has {count} entries, but must have {low} to {high}")


def check_text(field: str, text: str, max_bytes: int) -> str:
    size = len(text.encode(errors="surrogatepass"))
    if size > max_bytes:
        raise ProtocolViolation(f"{field} has {size} bytes, but must have at most {max_bytes}")
    if not text.isprintable():
        raise ProtocolViolation(f"{field} is {text!r}, but must be printable")
    return text


def check_tokens(field: str, tokens: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """The tokens as a tuple. Raises ``ProtocolViolation`` naming the first one out of range."""
    found = tuple(tokens)
    if found and not (min(found) >= 0 and max(found) < vocabulary_size):
        index = next(i for i, token in enumerate(found) if not 0 <= token < vocabulary_size)
        check_number(f"{field}[{index}]", found[index], 0, vocabulary_size - 1)
    return found


def check_member(field: str, members: Mapping[int, _E], number: int) -> _E:
    """The enum member with that wire number. Raises ``ProtocolViolation`` for unknown numbers."""
    if number not in members:
        known = ", ".join(f"{n} ({member.name})" for n, member in members.items())
        raise ProtocolViolation(f"{field} is {number}, but must be one of: {known}")
    return members[number]
