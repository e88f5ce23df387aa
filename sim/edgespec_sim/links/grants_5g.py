"""The waiting of messages on a 5G air: for grants, for slots, for repetitions, for a sleeping
device.

Theory of operation. A device may not send when it likes. With nothing granted it waits for its next
opportunity to ask (scheduling request), asks, receives a grant in a downlink slot, and sends some
slots later in an uplink slot. The first grant has a fixed size. What does not fit is reported in it
and sent with a second grant. A message that comes while a granted slot is still ahead rides in it
if it fits, and is reported in it otherwise, so a device that keeps sending asks less often.

A message to the device waits until the device is awake (DRX), and for a downlink slot. Both
directions keep it awake. Each transmission fails with a fixed probability and is repeated later;
messages behind it wait, since the receiver delivers in order.

``DeviceAir.up`` stands before a link's model and ``DeviceAir.down`` behind it, so the link's queue
is the capacity of the air and nothing is counted twice. Times come from the slots' own clock, which
starts at 0. Random numbers come from the counter-based hash of ``protocol/sampling.py``, so equal
seeds and equal calls give equal results.

Sources: 3GPP TS 38.321 (5.4.4 scheduling request, 5.4.5 buffer status, 5.7 DRX, 5.8.2 configured
grant), TS 38.214 (6.1.2.1), TS 38.211 (4.3.2), TS 38.213 (11.1).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from edgespec.core.protocol.sampling import keyed_bits, seed_key
from edgespec_sim.scenario.radio_5g import DrxSection, Radio5gSection

REPORT_BYTES: Final = 2
"""A short buffer status report with its subheader (TS 38.321, 6.1.3.1)."""
_MAX_REPETITIONS: Final = 16
"""Repetitions of one transmission. HARQ gives up earlier, but RLC then sends the data again, so no
message is lost."""
_ROUNDING: Final = 1e-6
"""Share of a slot by which a time may lie behind a slot's start and still belong to it."""
_UP, _DOWN = 0, 1


class SlotGrid:
    """The slots of an air. ``pattern`` repeats; without slots every time is a start."""

    def __init__(self, section: Radio5gSection) -> None:
        self.slot_s = section.slot_s
        pattern = section.pattern or "B"
        self._length = len(pattern)
        self._skips = tuple(
            tuple(
                next(
                    skip
                    for skip in range(len(pattern))
                    if pattern[(at + skip) % len(pattern)] in kinds
                )
                for at in range(len(pattern))
            )
            for kinds in ("UB", "DSB")
        )
        """For each direction, the slots from each place of the pattern to the next fitting one."""

    def next_start_s(self, way: int, time_s: float) -> float:
        """Return the start of the first slot of a direction that begins at ``time_s`` or later."""
        slot_s = self.slot_s
        if not slot_s:
            return time_s
        number = math.ceil(time_s / slot_s - _ROUNDING)
        number += self._skips[way][number % self._length]
        return max(time_s, number * slot_s)


class Sleep:
    """The times at which one device listens. Times are seconds on the air's clock."""

    def __init__(self, section: DrxSection, offset_share: float) -> None:
        """``offset_share`` in [0, 1) places the cycles of this device."""
        self._on_s, self._long_s = section.on_ms / 1e3, section.long_cycle_ms / 1e3
        self._short_s = section.short_cycle_ms / 1e3
        self._inactivity_s = section.inactivity_ms / 1e3
        self._shorts_s = section.short_cycles * self._short_s
        self._offset_s = offset_share * self._long_s
        self.awake_until_s = -math.inf

    def stay_awake(self, from_s: float) -> None:
        """Restart the inactivity timer at ``from_s``, the time of a grant or an assignment."""
        self.awake_until_s = max(self.awake_until_s, from_s + self._inactivity_s)

    def wake_s(self, time_s: float) -> float:
        """Return the first time from ``time_s`` on at which the device listens."""
        if time_s <= self.awake_until_s:
            return time_s
        long_from_s = self.awake_until_s + self._shorts_s
        if time_s < long_from_s:
            found_s = self._next_on_s(time_s, self._short_s)
            if found_s < long_from_s:
                return found_s
            time_s = long_from_s
        return self._next_on_s(time_s, self._long_s)

    def _next_on_s(self, time_s: float, cycle_s: float) -> float:
        phase_s = (time_s - self._offset_s) % cycle_s
        return time_s if phase_s < self._on_s else time_s + (cycle_s - phase_s)


@dataclass(slots=True)
class WayWaits:
    """Messages of one direction of a device's air, and the seconds that they waited there."""

    messages: int = 0
    seconds: float = 0.0


class DeviceAir:
    """The air of one device; ``up`` and ``down`` are the two hops of its messages."""

    def __init__(self, section: Radio5gSection, seed: int, framing_bytes: int = 0) -> None:
        """``framing_bytes`` are added to the size of each message, as on its link."""
        dice = random.Random(seed)
        self.section = section
        self.grid = SlotGrid(section)
        self._key = seed_key(seed)
        self._transmissions = 0
        sr_share, drx_share = dice.random(), dice.random()
        self.sleep = None if section.drx is None else Sleep(section.drx, drx_share)
        self.up, self.down = UpHop(self, sr_share, framing_bytes), DownHop(self)

    def end_of(self, way: int, start_s: float) -> float:
        """Return when a transmission that starts at ``start_s`` has been received, after its
        repetitions."""
        section, grid = self.section, self.grid
        if section.bler:
            self._transmissions += 1
            for repetition in range(_MAX_REPETITIONS):
                bits = keyed_bits(self._key, self._transmissions, repetition)
                if (bits + 0.5) * 2.0**-32 >= section.bler:
                    break
                start_s = grid.next_start_s(way, start_s + section.harq_ms / 1e3)
        return start_s + grid.slot_s


class UpHop:
    """The uplink of one device: messages wait for grants."""

    def __init__(self, air: DeviceAir, offset_share: float, framing_bytes: int) -> None:
        section = air.section
        self.waits = WayWaits()
        self._air, self._framing_bytes = air, framing_bytes
        self._configured = section.configured_grant_ms > 0.0
        period_ms = section.configured_grant_ms or section.sr_period_ms
        self._period_s = period_ms / 1e3
        self._offset_s = offset_share * self._period_s
        self._size_bytes = section.first_grant_bytes or math.inf
        self._block_s = -math.inf
        """Start of the latest granted slot. Its block is built then."""
        self._room_bytes = 0.0
        """Bytes of that slot that no message has yet."""
        self._arrived_s = -math.inf

    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        """Return when the station has received a message that is handed over now."""
        need_bytes = size_bytes + self._framing_bytes
        if now_s <= self._block_s:
            end_s = self._join(need_bytes)
        else:
            end_s = self._ask(now_s, need_bytes)
        self._arrived_s = max(self._arrived_s, end_s)
        self.waits.messages += 1
        self.waits.seconds += self._arrived_s - now_s
        return self._arrived_s

    packet = arrival  # The air loses nothing: it repeats.

    def _ask(self, now_s: float, need_bytes: float) -> float:
        """Ask for a grant, and send what fits into it. Returns when all has been received."""
        air, section = self._air, self._air.section
        opportunity_s = air.grid.next_start_s(_UP, self._next_opportunity_s(now_s))
        if self._configured:
            block_s = opportunity_s
        else:
            block_s = self._grant(opportunity_s + section.sr_to_grant_ms / 1e3)
        self._block_s, self._room_bytes = block_s, self._size_bytes
        return self._join(need_bytes)

    def _join(self, need_bytes: float) -> float:
        """Put a message into the granted slot. What does not fit is reported there, and leaves with
        the grant for it, whose size is what was reported."""
        air, block_s = self._air, self._block_s
        if air.sleep is not None:
            air.sleep.stay_awake(block_s)
        if need_bytes <= self._room_bytes:
            self._room_bytes -= need_bytes
            return air.end_of(_UP, block_s)
        end_s = block_s + air.grid.slot_s
        if self._room_bytes > REPORT_BYTES:  # A part of the message leaves at once.
            end_s = air.end_of(_UP, block_s)
        report_s = block_s + air.grid.slot_s + air.section.report_to_grant_ms / 1e3
        self._block_s, self._room_bytes = self._grant(report_s), 0.0
        if air.sleep is not None:
            air.sleep.stay_awake(self._block_s)
        return max(end_s, air.end_of(_UP, self._block_s))

    def _grant(self, ready_s: float) -> float:
        """Return the uplink slot of a grant that the station can send from ``ready_s`` on."""
        grid = self._air.grid
        sent_s = grid.next_start_s(_DOWN, ready_s)
        return grid.next_start_s(_UP, sent_s + self._air.section.k2_slots * grid.slot_s)

    def _next_opportunity_s(self, now_s: float) -> float:
        period_s = self._period_s
        if not period_s:
            return now_s
        count = math.ceil((now_s - self._offset_s) / period_s - _ROUNDING)
        return max(now_s, self._offset_s + count * period_s)


class DownHop:
    """The downlink to one device: messages wait until it is awake, and for a slot."""

    def __init__(self, air: DeviceAir) -> None:
        self.waits = WayWaits()
        self._air = air
        self._arrived_s = -math.inf

    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        """Return when the device has received a message that the station holds now."""
        air, start_s = self._air, now_s
        if air.sleep is not None:
            start_s = air.sleep.wake_s(now_s)
        start_s = air.grid.next_start_s(_DOWN, start_s)
        if air.sleep is not None:
            air.sleep.stay_awake(start_s)
        self._arrived_s = max(self._arrived_s, air.end_of(_DOWN, start_s))
        self.waits.messages += 1
        self.waits.seconds += self._arrived_s - now_s
        return self._arrived_s

    packet = arrival


_LONE_MESSAGES: Final = 512
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


@lru_cache(maxsize=64)
def mean_waits_s(section: Radio5gSection, size_bytes: int = 200) -> tuple[float, float]:
    """Return the mean time that a lone small message takes on the air, up and down, in seconds. A
    device that may sleep is asleep before each one.

    The mean is taken over messages at evenly spread phases, with the mean time of repetitions."""
    air = DeviceAir(section.without_losses(), 0)
    up_s = down_s = now_s = 0.0
    for _ in range(_LONE_MESSAGES):
        # The golden ratio spreads the phases of every period evenly.
        now_s += 16.0 + 10.24 * _GOLDEN
        down_s += air.down.arrival(now_s, size_bytes) - now_s
        now_s += 16.0 + 10.24 * _GOLDEN
        up_s += air.up.arrival(now_s, size_bytes) - now_s
    more_s = section.mean_repetition_s
    return up_s / _LONE_MESSAGES + more_s, down_s / _LONE_MESSAGES + more_s
