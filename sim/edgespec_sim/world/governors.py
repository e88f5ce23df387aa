"""The governors of a simulated device: the product's ladder and memory guard, on a stated course.

Theory of operation. Both machines are the core's own, and the memory guard is driven by the
product's own ``GuardedDrafter``, with the world's clock and the course's memory. The ladder is
looked at as a real device looks: every two seconds while a text is generated. Nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgespec.core.device.draft_ladder import DraftLadder, LadderPolicy, MachineReading, Rung
from edgespec.core.device.memory import MemoryGuard, Restriction, margin_bytes
from edgespec.core.device.policy import DEFAULT_WIDTH, DraftPolicy
from edgespec.core.ports import Drafter
from edgespec.device.drafters.guarded import GuardedDrafter
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.device_machine import DeviceMachine, DraftRestricted, LadderMoved
from edgespec_sim.actors.windowed_drafter import WindowedDrafter
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.condition_sections import ConditionsSection
from edgespec_sim.traces.condition_course import ConditionCourse

_MIB, _KIB = 1 << 20, 1 << 10
LESS_MEMORY, MORE_MEMORY = "the draft gets less memory", "the draft gets more memory"


@dataclass(slots=True)
class Walked:
    """What governors did while one request ran."""

    down: int = 0
    """Changes to a lower rung of the ladder."""
    up: int = 0
    tightened: int = 0
    """Restrictions of the draft's memory."""
    loosened: int = 0


class Governors:
    """Of one device. ``drafter`` is the one to draft with. ``battery`` tells the charge that is
    left where the course says nothing of it; None: nobody knows. ``on_change`` hears each change,
    in words for a reader."""

    def __init__(
        self,
        queue: EventQueue,
        section: ConditionsSection,
        course: ConditionCourse,
        late_s: float,
        drafter: Drafter,
        battery: Callable[[], float | None],
    ) -> None:
        self.walked = Walked()
        self.on_change: Callable[[str], None] = lambda what: None
        self._queue, self._course, self._late_s, self._battery = queue, course, late_s, battery
        self._machine = DeviceMachine(DraftLadder(), self._read)
        self._tracer: Tracer | None = None
        self._key = ""
        self._rows: WindowedDrafter | None = None
        self._standing = Restriction(section.window, DEFAULT_WIDTH)
        self.drafter = drafter
        if section.budget_mib is not None:
            self.drafter = self._guarded(section, int(section.budget_mib * _MIB), drafter)

    @property
    def ladder(self) -> DraftLadder:
        return self._machine.ladder

    def policy(self, inner: DraftPolicy) -> DraftPolicy:
        return LadderPolicy(inner, self.ladder)

    def begin(
        self,
        device: SimulatedDevice,
        drafted_before_s: float,
        tracer: Tracer | None,
    ) -> None:
        """A request starts now on ``device``; its changes are counted from here on."""
        self.walked = Walked()
        self._tracer, self._key = tracer, device.session.request.session_id
        self._machine.watch(
            self._queue,
            lambda: drafted_before_s + device.drafting_s,
            lambda: device.delivery.ended is not None,
            self._moved,
        )

    def ended(self) -> Walked:
        """What was done since ``begin``."""
        self._tracer = None
        return replace(self.walked)

    def step_of(self, kept: int, fed: int) -> tuple[int, int]:
        """Rows that the last step found and fed, where it was asked for these; none at rest."""
        rows = self._rows
        return (kept, fed) if rows is None else (rows.kept, rows.fed)

    def _guarded(
        self, section: ConditionsSection, budget_bytes: int, drafter: Drafter
    ) -> GuardedDrafter:
        row_bytes = max(1, int(section.token_kib * _KIB))
        full = self._standing
        rows = WindowedDrafter(drafter, full.window, full.width, row_bytes, self._restricted)
        self._rows = rows
        guard = MemoryGuard(budget_bytes, margin_bytes(budget_bytes) // 2, full, row_bytes)
        return GuardedDrafter(
            rows,
            rows,
            guard,
            lambda: self._course.resident_bytes(self._now_s) + rows.held_bytes,
            lambda: self._queue.now,
        )

    @property
    def _now_s(self) -> float:
        """On the course's clock."""
        return max(0.0, self._queue.now - self._late_s)

    def _read(self, now_s: float, drafting_s: float) -> MachineReading:
        return self._course.reading(self._now_s, self._battery())

    def _moved(self, rung: Rung) -> None:
        before = self._machine.rungs[-2][1] if len(self._machine.rungs) > 1 else Rung.ALL
        if rung > before:
            self.walked.down += 1
        else:
            self.walked.up += 1
        self._note(
            f"drafting: {rung.name.lower()}", LadderMoved(rung.name.lower(), self.ladder.why)
        )
        del self._machine.rungs[:-1]  # the last one is all that is asked for

    def _restricted(self, window: int, width: int) -> None:
        now = Restriction(window, width)
        less = (now.window, now.width) < (self._standing.window, self._standing.width)
        self._standing = now
        if less:
            self.walked.tightened += 1
        else:
            self.walked.loosened += 1
        self._note(LESS_MEMORY if less else MORE_MEMORY, DraftRestricted(window, width))

    def _note(self, what: str, line: object) -> None:
        self.on_change(what)
        if self._tracer is not None:
            self._tracer.record(self._queue.now, "device", self._key, "event", line)
