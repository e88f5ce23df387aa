"""Devices of random worlds that are short of memory, so that their governor has much to do.

It looks and recovers in fractions of a second here, so that it walks up and down within a
world. What it decides may change no token, which is what the worlds check.
"""

from __future__ import annotations

from typing import Final

from edgespec.core.device.memory import SMALLEST_WINDOW, MemoryGuard, Restriction
from edgespec.core.ports import Drafter
from edgespec.device.drafters.guarded import MEASURE_EVERY_S, GuardedDrafter
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.world.user import WindowedDrafter
from tests.sim.faults.options import WorldOptions

BUDGET: Final = 1 << 20
_ROW_BYTES, _MARGIN = 1024, 1 << 14
_FULL = Restriction(4 * SMALLEST_WINDOW, 3)
_LOOK_S, _RECOVERY_S = 0.05, 0.1
_CLOCK_RATE = MEASURE_EVERY_S / _LOOK_S
"""How much faster a guarded drafter's clock runs than the world's."""


def guarded(drafter: Drafter, options: WorldOptions, queue: EventQueue) -> Drafter:
    """Below a memory budget, where the options have one."""
    others = options.resident_bytes
    if others is None:
        return drafter
    rows = WindowedDrafter(drafter, _FULL.window, _FULL.width, _ROW_BYTES)
    guard = MemoryGuard(BUDGET, _MARGIN, _FULL, _ROW_BYTES, _RECOVERY_S * _CLOCK_RATE)
    return GuardedDrafter(
        rows,
        rows,
        guard,
        lambda: others(queue.now) + rows.held_bytes,
        lambda: queue.now * _CLOCK_RATE,
    )
