"""The keys of a link's 5G air: slots, grants of the uplink, repetitions, and the device's sleep."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from edgespec.core.protocol.checks import Section, check_limits, choice_field, range_field

MAX_SLOTS: Final = 80
"""Most slots of a pattern: 10 ms at 120 kHz, the longest period of TS 38.331 (5 ms) twice."""
_MAX_MS: Final = 10_240.0


@dataclass(frozen=True, slots=True)
class DrxSection(Section):
    """Discontinuous reception of a connected device (TS 38.321, 5.7): it receives while one of its
    timers runs, and sleeps otherwise. A message to a sleeping device waits for its next waking.

    The defaults are those with which TR 38.840 evaluates transfers of files."""

    on_ms: float = range_field(8.0, 0.0, 1600.0)
    """Time for which the device listens at the beginning of each cycle (drx-onDurationTimer)."""
    inactivity_ms: float = range_field(100.0, 0.0, 2560.0)
    """Time after the last grant or assignment for which the device stays awake
    (drx-InactivityTimer)."""
    long_cycle_ms: float = range_field(160.0, 1.0, _MAX_MS)
    short_cycle_ms: float = range_field(0.0, 0.0, 640.0)
    """Length of the cycles right after ``inactivity_ms``; 0: none."""
    short_cycles: int = range_field(0, 0, 16)
    """Number of short cycles before the long ones (drx-ShortCycleTimer)."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.on_ms > self.long_cycle_ms:
            raise ValueError(
                f"on_ms is {self.on_ms:g}, but must not exceed long_cycle_ms,"
                f" {self.long_cycle_ms:g}"
            )
        if bool(self.short_cycle_ms) != bool(self.short_cycles):
            raise ValueError(
                f"short_cycle_ms is {self.short_cycle_ms:g} and short_cycles {self.short_cycles},"
                " but both must be above 0, or neither"
            )
        if self.short_cycle_ms and not self.on_ms <= self.short_cycle_ms <= self.long_cycle_ms:
            raise ValueError(
                f"short_cycle_ms is {self.short_cycle_ms:g}, but must lie between on_ms,"
                f" {self.on_ms:g}, and long_cycle_ms, {self.long_cycle_ms:g}"
            )


@dataclass(frozen=True, slots=True)
class Radio5gSection(Section):
    """The 5G air of a link: what a message waits for before and behind the link's own queue. The
    link's ``up_mbps`` and ``down_mbps`` stay the capacity of the air.

    The defaults are a common mid-band network: 30 kHz, one uplink slot in five, an opportunity to
    ask for a grant every 5 ms, and no sleep. They give the round trips of a recorded network
    (docs/simulator-radio.md)."""

    scs_khz: int = choice_field(30, (0, 15, 30, 60, 120))
    """Spacing of the subcarriers: a slot lasts 15 / scs_khz ms (TS 38.211, 4.3.2). 0: no slots."""
    pattern: str = "DDDSU"
    """Slots of a TDD period: D down, U up, S special, which carries the downlink (TS 38.213, 11.1).
    Empty: every slot carries both directions (FDD)."""
    sr_period_ms: float = range_field(5.0, 0.0, 640.0)
    """Time between two opportunities of a device to ask for a grant (scheduling request, TS 38.321,
    5.4.4; the periods that networks may set are in TS 38.331). 0: at once."""
    sr_to_grant_ms: float = range_field(3.0, 0.0, _MAX_MS)
    """Time from a scheduling request until the station can send the grant. The grant itself waits
    for a downlink slot."""
    k2_slots: int = range_field(2, 0, 32)
    """Slots between a grant and its uplink slot (TS 38.214, 6.1.2.1)."""
    first_grant_bytes: int = range_field(300, 0, 1 << 20)
    """Bytes of the grant that answers a scheduling request, which does not say how much waits. A
    larger message reports its size in it (buffer status report, TS 38.321, 5.4.5) and sends the
    rest with a second grant. 0: no limit."""
    report_to_grant_ms: float = range_field(3.0, 0.0, _MAX_MS)
    """Time from the end of a report until the station can send the grant for the rest."""
    configured_grant_ms: float = range_field(0.0, 0.0, 640.0)
    """Period of uplink slots that a device has without asking (configured grant, TS 38.321, 5.8.2),
    each of ``first_grant_bytes``. 0: none, and the device asks."""
    bler: float = range_field(0.1, 0.0, 0.9)
    """Share of transmissions that must be repeated (HARQ). Networks choose their rate so that it is
    about 0.1, the target of TS 38.214, 5.2.2.1."""
    harq_ms: float = range_field(5.0, 0.0, _MAX_MS)
    """Time from the begin of a transmission to that of its repetition, at the least."""
    drx: DrxSection | None = None
    """Sleep of a connected device; null: the device always listens."""

    def __post_init__(self) -> None:
        check_limits(self)
        pattern = self.pattern
        if pattern and (wrong := set(pattern) - set("DSU")):
            raise ValueError(f"pattern is {pattern!r}, but has {min(wrong)!r} beside D, S and U")
        if pattern and not ("U" in pattern and set(pattern) & set("DS")):
            raise ValueError(f"pattern is {pattern!r}, but must have a U and a D or S")
        if len(pattern) > MAX_SLOTS:
            raise ValueError(f"pattern has {len(pattern)} slots, but at most {MAX_SLOTS} are read")
        if pattern and not self.scs_khz:
            raise ValueError(f"pattern is {pattern!r}, but scs_khz is 0, which has no slots")

    @property
    def slot_s(self) -> float:
        """Length of a slot; 0 without slots."""
        return 15e-3 / self.scs_khz if self.scs_khz else 0.0

    @property
    def is_free(self) -> bool:
        """Whether no message ever waits, so that the link is one without this section."""
        asks_at_once = self.sr_period_ms == self.sr_to_grant_ms == self.configured_grant_ms == 0.0
        reports_at_once = not self.first_grant_bytes or self.report_to_grant_ms == 0.0
        return (
            not self.scs_khz
            and asks_at_once
            and reports_at_once
            and not self.bler
            and (self.drx is None or self.drx.on_ms == self.drx.long_cycle_ms)
        )

    @property
    def about(self) -> str:
        """Description of the air for a report."""
        slots = "no slots"
        if self.scs_khz:
            slots = f"{self.pattern or 'FDD'} at {self.scs_khz} kHz"
        asks = f"a scheduling request every {self.sr_period_ms:g} ms"
        if self.configured_grant_ms:
            asks = f"a configured grant every {self.configured_grant_ms:g} ms"
        sleeps = "no sleep"
        if (drx := self.drx) is not None:
            sleeps = (
                f"sleep after {drx.inactivity_ms:g} ms, in cycles of {drx.long_cycle_ms:g} ms with"
                f" {drx.on_ms:g} ms awake"
            )
        return f"{slots}, {asks}, {self.bler:.0%} of transmissions repeated, {sleeps}"

    def without_losses(self) -> Radio5gSection:
        """Return the section without repetitions, whose mean is added in closed form."""
        return replace(self, bler=0.0)

    @property
    def mean_repetition_s(self) -> float:
        """Mean time that repetitions add to one transmission, before slots are waited for."""
        return self.harq_ms / 1e3 * self.bler / (1.0 - self.bler) if self.bler else 0.0


FREE: Final = Radio5gSection(
    scs_khz=0,
    pattern="",
    sr_period_ms=0.0,
    sr_to_grant_ms=0.0,
    k2_slots=0,
    first_grant_bytes=0,
    report_to_grant_ms=0.0,
    bler=0.0,
)
"""An air that costs nothing."""
assert math.isclose(Radio5gSection().slot_s, 0.5e-3)
