"""A device's battery, heat and other programs in virtual time, and the product's ladder on them.

The ladder (``core.device.draft_ladder``) is the one that a real device walks; here its readings are
a function of the time and of how long the drafter has been at work, so that drafting may empty the
battery that it is to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from edgespec.core.device.draft_ladder import DraftLadder, MachineReading, Rung
from edgespec_sim.event_queue import EventQueue

LOOK_EVERY_S = 2.0
"""As often as a real device looks."""

ReadAt = Callable[[float, float], MachineReading]
"""What the machine says at a time, after so many seconds of drafting."""


@dataclass(frozen=True, slots=True)
class LadderMoved:
    """A line of the trace: the rung that holds from now on, and what asked for it."""

    rung: str
    why: str


@dataclass(frozen=True, slots=True)
class DraftRestricted:
    """A line of the trace: what the guard leaves of the draft from now on; window 0 rests."""

    window: int
    width: int


@dataclass(slots=True)
class DeviceMachine:
    """``ladder`` is that of the device's ``LadderPolicy``; ``rungs`` has (time, rung), one for each
    change."""

    ladder: DraftLadder
    read: ReadAt
    rungs: list[tuple[float, Rung]] = field(default_factory=list)
    every_s: float = LOOK_EVERY_S
    looked_at_s: float = -math.inf

    def watch(
        self,
        queue: EventQueue,
        drafting_s: Callable[[], float],
        ended: Callable[[], bool],
        on_move: Callable[[Rung], None] = lambda rung: None,
    ) -> None:
        """Look now and then from now on, until ``ended``; not before a look is due, as a device
        does whose text before has just ended."""

        def look() -> None:
            if ended():
                return
            self.looked_at_s = queue.now
            rung = self.ladder.observe(self.read(queue.now, drafting_s()), queue.now)
            if rung is not None:
                self.rungs.append((queue.now, rung))
                on_move(rung)
            queue.after(self.every_s, look)

        due_s = self.looked_at_s + self.every_s
        if due_s <= queue.now:
            look()
        else:
            queue.at(due_s, look)


def battery(charge: float, per_drafting_s: float, per_s: float = 0.0) -> ReadAt:
    """A battery with ``charge`` (0 to 1) at first; a second of drafting takes ``per_drafting_s`` of
    it, a second of anything ``per_s``. Charge 0.32 less 0.001 * 40 s of drafting is 0.28."""

    def read(now: float, drafting_s: float) -> MachineReading:
        left = charge - per_drafting_s * drafting_s - per_s * now
        return MachineReading(battery=max(0.0, left))

    return read
