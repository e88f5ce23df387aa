"""Generations of one prompt, such as the choices of a request, begin one after another if the
prompt is long or has pictures.

The first one sends the prompt. When the verifier has opened it, the others can name the prompt
instead of sending it again (``core/device/kept_prefixes.py``). If all began at once, each
would send the whole prompt, and on a slow uplink the first token of all would wait for that.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from edgespec.device.session_driver import SessionDriver

LEAST_TOKENS: Final = 1024
"""A shorter prompt is sent again: its 3 kB take less time than the round trip of waiting."""
_TIMEOUT_S: Final = 10.0
"""Longest wait, as long as a verifier may take to open a session."""


class SamePrompts:
    """The generations of an agent that were the first to send their prompt."""

    def __init__(self) -> None:
        self._first: dict[tuple[int, ...], SessionDriver] = {}

    async def wait_for_first(
        self, prompt: tuple[int, ...], driver: SessionDriver, *, has_pictures: bool = False
    ) -> None:
        """Return at once if no other generation is sending ``prompt``, else when that one was
        opened or has ended. ``leave`` must follow."""
        if len(prompt) < LEAST_TOKENS and not has_pictures:
            return
        first = self._first.setdefault(prompt, driver)
        if first is not driver:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TIMEOUT_S):
                    await first.was_opened.wait()

    def leave(self, prompt: tuple[int, ...], driver: SessionDriver) -> None:
        """Forget a generation that has ended."""
        if self._first.get(prompt) is driver:
            del self._first[prompt]
