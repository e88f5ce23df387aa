"""The bounds of a message on the wire, and the error that names the one that was crossed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from edgespec.core.protocol.messages import (
    EXACT_RULE,
    MAX_ADAPTERS,
    MAX_COMMIT_TOKENS,
    MAX_NAME_BYTES,
    FaultCode,
)
from edgespec.core.protocol.sampling import MAX_BIASES, MAX_STOP_IDS

MAX_UINT32 = (1 << 32) - 1
MAX_UINT64 = (1 << 64) - 1
WINDOW_BYTES = 1 << 18
"""Unread data of one stream that its sender may have under way (HTTP/2 flow control)."""
# Of a token id below 2^28, and of what an Open holds besides tokens: names, biases, stop ids.
_TOKEN_BYTES, _OPEN_BYTES = 4, 1 << 16
_E = TypeVar("_E", bound=Enum)


class ProtocolViolation(ValueError):
    """A message breaks the protocol; the text names the field, the value and the bound."""

    code = FaultCode.INVALID
    """What the peer is told when it sent the message."""


class ContextExceeded(ProtocolViolation):
    """An Open holds more tokens than the context that is served."""

    code = FaultCode.CONTEXT_TOO_LONG


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The bounds of what one end sends and accepts. Both directions of the codec enforce them."""

    max_message_bytes: int = 1 << 20
    max_prompt_tokens: int = 32768
    max_resumed_tokens: int = 32768
    """Committed tokens in an Open."""
    context_length: int = 65536
    """Tokens in an Open: prompt and committed together."""
    max_draft_nodes: int = 256
    """Nodes in one Draft."""
    max_commit_tokens: int = MAX_COMMIT_TOKENS
    """Tokens in one Commit."""
    max_stop_ids: int = MAX_STOP_IDS
    max_biases: int = MAX_BIASES
    max_session_id_bytes: int = 128
    max_name_bytes: int = MAX_NAME_BYTES
    """Model names and vocabulary fingerprints."""
    max_adapters: int = MAX_ADAPTERS
    """Models in an InfoReply beside the first."""
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

    @classmethod
    def for_context(cls, context_length: int) -> WireLimits:
        """The limits of an end that handles no more than ``context_length`` tokens a session.

        A message may have the bytes of the longest Open that fits. It may also have those of one
        flow-control window, which a peer can make us hold anyway: so an Open that is somewhat too
        long is refused by its count of tokens, in words about tokens. For a context of 1,024 that
        is 262,144 bytes, for one of 131,072 it is 4 * 131,072 + 65,536 = 589,824.
        """
        return cls(
            max_message_bytes=max(WINDOW_BYTES, _TOKEN_BYTES * context_length + _OPEN_BYTES),
            max_prompt_tokens=context_length,
            max_resumed_tokens=context_length,
            context_length=context_length,
        )


def check_number(field: str, value: int, low: int, high: int) -> int:
    """``value`` itself. Raises ``ProtocolViolation`` outside [low, high]."""
    if not low <= value <= high:
        raise ProtocolViolation(f"{field} is {value}, but must be in [{low}, {high}]")
    return value


def check_count(field: str, count: int, high: int, low: int = 0) -> None:
    if not low <= count <= high:
        raise ProtocolViolation(f"{field} has {count} entries, but must have {low} to {high}")


def check_context(count: int, limits: WireLimits) -> None:
    if count > limits.context_length:
        raise ContextExceeded(
            f"Open has {count} tokens (prompt and committed), "
            f"but the context is {limits.context_length}"
        )


def check_text(field: str, text: str, max_bytes: int) -> str:
    """``text`` itself. Raises ``ProtocolViolation`` for one that is too long or not printable."""
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
