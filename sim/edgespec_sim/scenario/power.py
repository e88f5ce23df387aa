"""What a verifier's GPU draws while a pass runs and while it waits, each figure with its source.

Busy is the data sheet's most, and so an upper bound: a pass that is bound by memory draws less
(517 of 700 W were published for an H200 that decodes a batch of 128). Data sheets say nothing of
idle boards; where no measurement was found that could be cited there is none here, and idle energy
is not reported. Host, fans and power supply are in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GpuPower:
    """In watts, of one board."""

    busy_w: float
    idle_w: float | None
    """Powered, its memory refreshed, no kernel running."""


GPU_POWERS: Final = {
    # Busy: NVIDIA H200 data sheet, SXM, "up to 700 W". Idle: 80.3 W measured on an H200 SXM by
    # nvidia-smi ("ghost power" of the ALICE GPU energy benchmark, June 2026); a second published
    # figure is 73.7 W, over boards of one provider (ConserveMode, 2026).
    "h200": GpuPower(700.0, 80.3),
    # NVIDIA H100 data sheet, SXM.
    "h100": GpuPower(700.0, None),
    # NVIDIA A100 data sheet, 80 GB SXM.
    "a100-80g": GpuPower(400.0, None),
    # NVIDIA L4 data sheet.
    "l4": GpuPower(72.0, None),
}


# --- what a device's radio takes ---------------------------------------------------------------
# sending, receiving, staying connected, its tail, and idling.
# A radio that has just moved a packet stays connected for a while (RRC CONNECTED, or Wi-Fi awake)
# and then in a tail (discontinuous reception) before it idles; waking it costs a promotion. So a
# packet every 25 ms keeps it on all the time, and what a stream of tokens costs is mostly the
# time for which it lasts, not its bytes. Each packet, either way, settles what the radio took
# since the one before.
# Figures are the defaults of the LTE and Wi-Fi profiles in AT&T's Application Resource Optimizer,
# an open tool that attributes the energy of recorded traffic. The LTE ones come from work like
# Huang et al., "A Close Examination of Performance and Power Characteristics of 4G LTE Networks",
# MobiSys 2012: phones of that time; newer ones take less, in unknown proportion. For 5G no
# figures in watts were found that could be cited, so there is no such radio here.


@dataclass(frozen=True, slots=True)
class RadioPower:
    """Powers in watts, above a radio that is off."""

    connected_w: float
    connected_s: float
    """After a packet."""
    tail_w: float
    tail_s: float
    """After ``connected_s``."""
    idle_w: float
    promotion_s: float = 0.0
    promotion_w: float = 0.0
    up_j_per_bit: float = 0.0
    down_j_per_bit: float = 0.0
    """Beyond ``connected_w``."""

    def gap_j(self, gap_s: float) -> float:
        """Between two packets, or after the last one."""
        connected_s = min(gap_s, self.connected_s)
        tail_s = min(gap_s - connected_s, self.tail_s)
        idle_s = gap_s - connected_s - tail_s
        return self.connected_w * connected_s + self.tail_w * tail_s + self.idle_w * idle_s

    def wakes_after(self, gap_s: float) -> bool:
        return gap_s > self.connected_s + self.tail_s


RADIOS: Final = {
    # Promotion 0.26 s at 1.21 W; connected at 1.2 W (its "beta") until 0.1 s without a packet;
    # short and long DRX of 0.02 and 10 s at 1.06 W; idle: 43 ms of paging at 0.594 W every 1.28 s;
    # 438.39 mW a Mbit/s up, 51.97 down.
    "lte": RadioPower(1.2, 0.1, 1.06, 10.02, 0.594 * 0.043 / 1.28, 0.26, 1.21, 438.39e-9, 51.97e-9),
    # Active, and 0.25 s of tail, at 0.403 W; standby at 0.02 W.
    "wifi": RadioPower(0.403, 0.25, 0.403, 0.0, 0.02),
}


class RadioMeter:
    """Adds up what one radio took; idle at first. Times must not decrease."""

    def __init__(self, power: RadioPower) -> None:
        self._power = power
        self._packet_s: float | None = None
        self._settled_s = 0.0
        self._taken_j = 0.0

    def packet(self, now_s: float, up_bytes: int = 0, down_bytes: int = 0) -> None:
        self._settle(now_s)
        power, before_s = self._power, self._packet_s
        if before_s is None or power.wakes_after(now_s - before_s):
            self._taken_j += power.promotion_s * power.promotion_w
        self._taken_j += 8 * (power.up_j_per_bit * up_bytes + power.down_j_per_bit * down_bytes)
        self._packet_s = now_s

    def take(self, now_s: float) -> float:
        """Joules since the last call."""
        self._settle(now_s)
        taken_j, self._taken_j = self._taken_j, 0.0
        return taken_j

    def _settle(self, now_s: float) -> None:
        power, packet_s = self._power, self._packet_s
        if packet_s is None:
            self._taken_j += power.idle_w * (now_s - self._settled_s)
        else:
            since_s = self._settled_s - packet_s
            self._taken_j += power.gap_j(now_s - packet_s) - power.gap_j(since_s)
        self._settled_s = now_s
