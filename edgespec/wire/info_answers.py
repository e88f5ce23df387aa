"""Answers to ``Info``: what is served and how busy it is, for many callers at little cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgespec.core.protocol.messages import VerifierInfo
from edgespec.wire.call_line import CallLine
from edgespec.wire.codec import encode_info
from edgespec.wire.door import Door, shown_key
from edgespec.wire.wire_limits import WireLimits


class InfoAnswers:
    """Answers each caller that is let in, in its turn. The reply is encoded again only when it
    would differ."""

    def __init__(
        self, info: Callable[[], VerifierInfo], limits: WireLimits, line: CallLine, door: Door
    ) -> None:
        self._info, self._limits, self._line, self._door = info, limits, line, door
        self._told: VerifierInfo | None = None
        self._answer = b""

    async def answer(self, _request: bytes, context: Any) -> bytes:
        """The encoded reply to one call."""
        if (credential := self._door.credential(shown_key(context))) is None:
            await self._door.turn_away(context)
        await self._line.turn(context, credential)
        info = self._info()
        if info != self._told:
            self._told, self._answer = info, encode_info(info, self._limits)
        return self._answer
