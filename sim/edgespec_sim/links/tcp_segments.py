"""What one end of a TCP connection has sent and not yet heard of, and the constants of Linux."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

SEGMENT_BYTES: Final = 1448
"""Of a packet of 1500 bytes with IPv4 and TCP's timestamps (RFC 7323)."""
HEADER_BYTES: Final = 52
FIRST_WINDOW: Final = 10
"""Packets (RFC 6928)."""
LEAST_TIMEOUT_S: Final = 0.2
"""TCP_RTO_MIN; RFC 6298 asks for a second."""
MOST_TIMEOUT_S: Final = 120.0
FIRST_TIMEOUT_S: Final = 1.0
DUPLICATES: Final = 3
"""As many packets that arrived behind a missing one end the wait for reordering (RFC 5681)."""
_TICK_S: Final = 0.004
"""Timers run on jiffies, 250 a second as most distributions build it."""
SLACK_S: Final = 0.002
"""TCP_TIMEOUT_MIN_US: on top of what a loss timer has to wait."""


@dataclass(slots=True)
class Segment:
    """Bytes [start, end) of the stream, as they went in one packet."""

    start: int
    end: int
    sent_s: float
    """The last time."""
    retransmitted: bool = False
    sacked: bool = False
    lost: bool = False
    """Called lost, and not sent again since."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """What a packet says of the other direction (RFC 2018, 2883)."""

    upto: int
    """All bytes before this one have arrived."""
    ranges: tuple[tuple[int, int], ...] = ()
    """What arrived behind a gap."""
    duplicate: bool = False
    """What it answers had arrived before."""


def ticks_s(wait_s: float) -> float:
    """When a timer set to ``wait_s`` runs, on the average over the phase of the clock."""
    return (math.ceil(max(wait_s, 1e-6) / _TICK_S) - 0.5) * _TICK_S


class RoundTrips:
    """Smoothed round trip and timeout as Linux computes them (RFC 6298, tcp_rtt_estimator)."""

    def __init__(self) -> None:
        self.smoothed_s = self.least_s = math.inf
        self.timeout_s = FIRST_TIMEOUT_S
        self._deviation_s = 0.0

    def sample(self, rtt_s: float) -> None:
        self.least_s = min(self.least_s, rtt_s)
        if self.smoothed_s == math.inf:
            self.smoothed_s, self._deviation_s = rtt_s, rtt_s / 2.0
        else:
            error_s = rtt_s - self.smoothed_s
            self.smoothed_s += error_s / 8.0
            self._deviation_s += (abs(error_s) - self._deviation_s) / 4.0
        # The deviation's share, and not the whole, is bounded from below.
        self.timeout_s = self.smoothed_s + max(4.0 * self._deviation_s, LEAST_TIMEOUT_S)
