"""A pass while it is formed, and while it runs: which sessions take part, and with what."""

from __future__ import annotations

from dataclasses import dataclass, field

from edgespec.core.protocol.work import PassRequest
from edgespec.core.statically_frozen import statically_frozen
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import Offer


@statically_frozen
class Batch:
    """A pass that is running: each session with its part."""

    started_at: float
    parts: tuple[tuple[VerifySession, PassRequest], ...]

    def count_rows(self) -> tuple[int, int, int]:
        """Rows in all, those that are fed beside the last token of a text, and draft nodes."""
        rows = prompt_rows = drafted = 0
        for _, request in self.parts:
            fed, nodes = len(request.feed), len(request.tokens)
            rows += fed + nodes
            drafted += nodes
            if fed > 1:
                prompt_rows += fed - 1
        return rows, prompt_rows, drafted


@dataclass(slots=True)
class Forming:
    """The pass that is being formed: rows that are left, the last offer of them, who takes part,
    who was asked."""

    room: int
    offer: Offer
    parts: dict[str, tuple[VerifySession, PassRequest]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


def decodes(session: VerifySession) -> bool:
    """Whether the session's text moves on by the next pass."""
    return session.missing_rows == 1
