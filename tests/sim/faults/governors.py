"""Devices of random worlds whose governors have much to do: hot, empty, crowded, short of memory.

Governors look and recover in fractions of a second here, so that they walk up and down within a
world. What they decide may change no token, which is what the worlds check.
"""

from __future__ import annotations

from typing import Final

from edgespec.core.device.draft_ladder import DraftLadder, LadderPolicy
from edgespec.core.device.memory import SMALLEST_WINDOW, MemoryGuard, Restriction
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.ports import Drafter
from edgespec.device.drafters.guarded import MEASURE_EVERY_S, GuardedDrafter
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.world.governors import DeviceMachine, WindowedDrafter
from tests.sim.faults.options import WorldOptions

BUDGET: Final = 1 << 20
_ROW_BYTES, _MARGIN = 1024, 1 << 14
_FULL = Restriction(4 * SMALLEST_WINDOW, 3)
_LOOK_S, _RECOVERY_S = 0.05, 0.1
_CLOCK_RATE = MEASURE_EVERY_S / _LOOK_S
"""How much faster a guarded drafter's clock runs than the world's."""


def with_ladder(
    policy: DraftPolicy, options: WorldOptions
) -> tuple[DraftPolicy, DeviceMachine | None]:
    """The policy on a ladder, and what walks it; as it is where devices read nothing."""
    read = options.reading
    if read is None:
        return policy, None
    ladder = DraftLadder(recovery_s=_RECOVERY_S)
    machine = DeviceMachine(ladder, lambda now, drafting_s: read(now), every_s=_LOOK_S)
    return LadderPolicy(policy, ladder), machine


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
