"""What a link carried: messages, payload bytes and tokens, by kind and direction."""

from __future__ import annotations

from collections import Counter
from typing import Final

from edgespec.core.protocol.messages import Commit, Draft, Fault, Message, Opened

# gRPC's message prefix and the header of the HTTP/2 DATA frame that carries it. What is below
# (TLS records, TCP, IP) depends on how messages coalesce and is not estimated.
FRAMING_BYTES: Final = 5 + 9


class TrafficMeter:
    """Implements ``ByteMeter``. Payload is the encoded message; framing is an estimate apart."""

    def __init__(self) -> None:
        self._messages: Counter[str] = Counter()
        self._payload_bytes: Counter[str] = Counter()
        self._up = _Direction()
        self._down = _Direction()

    def count(self, message: Message, payload_bytes: int) -> None:
        kind = type(message).__name__.lower()
        self._messages[kind] += 1
        self._payload_bytes[kind] += payload_bytes
        down = isinstance(message, Opened | Commit | Fault)
        direction = self._down if down else self._up
        direction.messages += 1
        direction.payload_bytes += payload_bytes
        if isinstance(message, Draft | Commit):
            direction.tokens += len(message.tokens)

    def report(self) -> dict[str, float]:
        """Totals by name; ``..._per_...`` are payload bytes of Drafts a drafted node and of Commits
        a committed token, 0 when there was none."""
        report: dict[str, float] = {
            "drafted_nodes": self._up.tokens,
            "committed_tokens": self._down.tokens,
            "draft_bytes_per_drafted_node": _ratio(self._payload_bytes["draft"], self._up.tokens),
            "commit_bytes_per_committed_token": _ratio(
                self._payload_bytes["commit"], self._down.tokens
            ),
        }
        for name, direction in (("up", self._up), ("down", self._down)):
            report[f"{name}_messages"] = direction.messages
            report[f"{name}_payload_bytes"] = direction.payload_bytes
            report[f"{name}_framed_bytes"] = (
                direction.payload_bytes + FRAMING_BYTES * direction.messages
            )
        for kind in sorted(self._messages):
            report[f"{kind}_messages"] = self._messages[kind]
            report[f"{kind}_payload_bytes"] = self._payload_bytes[kind]
        return report


class _Direction:
    def __init__(self) -> None:
        self.messages = 0
        self.payload_bytes = 0
        self.tokens = 0


def _ratio(bytes_: int, count: int) -> float:
    return bytes_ / count if count else 0.0
