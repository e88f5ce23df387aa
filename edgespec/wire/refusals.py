"""When a call that is refused hears of it: later, the more of one payer's are.

A refusal costs the event loop some 0.4 ms, so who is refused at once and asks again in a loop could
fill it. Each refused call is held for half a second and, where many of one payer's are held, for so
long that ``PER_S`` of them end a second. Held calls cost memory only. Beyond ``MAX_HELD`` they are
refused at once again: that takes a client with as many calls open at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

FIRST_S: Final = 0.5
PER_S: Final = 20.0
LAST_S: Final = 10.0
MAX_HELD: Final = 512
"""Of one payer."""
MAX_HELD_IN_ALL: Final = 4_096


class Refusals:
    """Counts by any name for whom the refused calls are."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()
        self._total = 0

    @property
    def held(self) -> int:
        """Calls that are held now."""
        return self._total

    async def hold(
        self, payer: str, wait: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> None:
        """Return when a call of ``payer`` may hear of its refusal; ``wait`` waits for so many
        seconds, or until the call is over."""
        if self._held[payer] >= MAX_HELD or self._total >= MAX_HELD_IN_ALL:
            return
        self._held[payer] += 1
        self._total += 1
        try:
            await wait(min(max(FIRST_S, self._held[payer] / PER_S), LAST_S))
        finally:
            self._total -= 1
            self._held[payer] -= 1
            if not self._held[payer]:
                del self._held[payer]
