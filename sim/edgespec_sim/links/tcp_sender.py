"""The sending half of a TCP connection, as Linux does it: what leaves when, and what is lost.

Theory of operation. Bytes are cut into packets when the congestion window lets them leave; Nagle is
off, as gRPC has it. A packet is lost once one that was sent after it has arrived and a quarter of a
round trip has passed (RACK, RFC 8985) or three have; that wait is on a timer. When the tail is
silent a probe sends the last packet again after two round trips, so that its answer shows the
losses before it; a lone packet waits as long as a timeout, since its answer may be delayed. The
timeout (RFC 6298, from 200 ms beyond the round trip on) calls the first packet lost, and doubles.

Not here: undoing a reduction that was for nothing (F-RTO, Eifel), and pacing.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum

from edgespec_sim.links.tcp_segments import (
    DUPLICATES,
    LEAST_TIMEOUT_S,
    MOST_TIMEOUT_S,
    SEGMENT_BYTES,
    SLACK_S,
    Acknowledgement,
    RoundTrips,
    Segment,
    ticks_s,
)
from edgespec_sim.links.tcp_window import CongestionWindow


class _State(Enum):
    OPEN = "open"
    RECOVERY = "recovery"
    LOSS = "loss"


class _Timer(Enum):
    TIMEOUT = "timeout"
    PROBE = "probe"
    REORDERING = "reordering"


class TcpSender:
    """``write``, ``acknowledged`` and ``timer_ran`` return the packets that leave, as ranges of
    bytes; ``timer_s`` is when ``timer_ran`` wants to be called."""

    def __init__(self) -> None:
        self.timer_s = math.inf
        self.window = CongestionWindow()
        self.round_trips = RoundTrips()
        self.retransmissions = self.timeouts = self.probes = 0
        self._timer = _Timer.TIMEOUT
        self._state = _State.OPEN
        self._segments: deque[Segment] = deque()
        self._written = self._next = 0
        self._recover_at = 0
        """Recovery ends when everything before this byte has arrived."""
        self._backoff = 1.0
        self._last_sent_s = -math.inf
        # RACK: the latest-sent packet that has arrived.
        self._rack_sent_s, self._rack_end, self._rack_rtt_s = -math.inf, 0, 0.0
        self._probe_end: int | None = None
        self._probe_repeats = False
        self._outgoing: list[tuple[int, int]] = []

    # --- what happens ----------------------------------------------------------------------

    def write(self, now_s: float, size_bytes: int) -> list[tuple[int, int]]:
        self._written += size_bytes
        return self._transmit(now_s)

    def acknowledged(self, now_s: float, ack: Acknowledgement) -> list[tuple[int, int]]:
        advanced, delivered = self._take_in(now_s, ack)
        if not delivered and not advanced:
            self._end_probe(ack, advanced=False)
            return self._transmit(now_s)
        self._end_probe(ack, advanced=advanced)
        if self._state is not _State.OPEN and self._first >= self._recover_at:
            self._end_recovery()
        reducing = self._state is _State.RECOVERY
        if self._find_losses(now_s) and self._state is _State.OPEN:
            self._begin_recovery()
            reducing = True
        if reducing:
            self.window.reduce(self.in_flight, delivered, advanced=advanced)
        elif delivered:
            self.window.acknowledged(delivered)
        if advanced:
            self._backoff = 1.0
        if self._timer is not _Timer.REORDERING or self.timer_s == math.inf:
            if advanced or not self._segments:
                self._set_timer(now_s)
        return self._transmit(now_s)

    def timer_ran(self, now_s: float) -> list[tuple[int, int]]:
        timer, self.timer_s = self._timer, math.inf
        if not self._segments:
            return []
        match timer:
            case _Timer.REORDERING:
                if self._find_losses(now_s) and self._state is _State.OPEN:
                    self._begin_recovery()
                    self.window.reduce(self.in_flight, 1, advanced=False)
                if self.timer_s == math.inf:
                    self._set_timeout(now_s)
            case _Timer.PROBE:
                self._probe(now_s)
            case _Timer.TIMEOUT:
                self._time_out(now_s)
        return self._transmit(now_s)

    @property
    def in_flight(self) -> int:
        """Packets sent that have neither arrived nor been called lost."""
        return sum(not segment.sacked and not segment.lost for segment in self._segments)

    # --- acknowledgements ------------------------------------------------------------------

    @property
    def _first(self) -> int:
        return self._segments[0].start if self._segments else self._next

    def _take_in(self, now_s: float, ack: Acknowledgement) -> tuple[bool, int]:
        """Whether the first missing byte moved, and how many packets are known to have arrived."""
        advanced, delivered = False, 0
        sample_s: float | None = None
        while self._segments and self._segments[0].end <= ack.upto:
            segment = self._segments.popleft()
            advanced = True
            if not segment.sacked:
                delivered += 1
                self._arrived(now_s, segment)
                if sample_s is None and not segment.retransmitted:
                    sample_s = now_s - segment.sent_s
        for start, end in ack.ranges:
            for segment in self._segments:
                if not segment.sacked and start <= segment.start and segment.end <= end:
                    segment.sacked, segment.lost = True, False
                    delivered += 1
                    self._arrived(now_s, segment)
                    if sample_s is None and not segment.retransmitted:
                        sample_s = now_s - segment.sent_s
        if sample_s is not None:
            self.round_trips.sample(sample_s)
        return advanced, delivered

    def _arrived(self, now_s: float, segment: Segment) -> None:
        rtt_s = now_s - segment.sent_s
        if segment.retransmitted and rtt_s < self.round_trips.least_s:
            return  # it was the first copy that arrived
        if (segment.sent_s, segment.end) > (self._rack_sent_s, self._rack_end):
            self._rack_sent_s, self._rack_end = segment.sent_s, segment.end
            self._rack_rtt_s = rtt_s

    def _find_losses(self, now_s: float) -> bool:
        """Call lost what RACK says; sets the timer for what it is not sure of yet."""
        trips, found, wait_s = self.round_trips, False, 0.0
        sacked = sum(segment.sacked for segment in self._segments)
        patience_s = 0.0
        if self._state is _State.OPEN and sacked < DUPLICATES:
            patience_s = min(trips.least_s / 4.0, trips.smoothed_s)
        for segment in self._segments:
            sent = (segment.sent_s, segment.end)
            if segment.sacked or segment.lost or sent > (self._rack_sent_s, self._rack_end):
                continue
            left_s = self._rack_rtt_s + patience_s - (now_s - segment.sent_s)
            if left_s <= 1e-9:
                segment.lost = found = True
            else:
                wait_s = max(wait_s, left_s)
        if wait_s:
            self._timer, self.timer_s = _Timer.REORDERING, now_s + ticks_s(wait_s + SLACK_S)
        return found

    def _begin_recovery(self) -> None:
        self._state, self._recover_at = _State.RECOVERY, self._next
        self._probe_end = None
        self.window.begin_reduction()

    def _end_recovery(self) -> None:
        if self._state is _State.RECOVERY:
            self.window.end_reduction()
        self._state = _State.OPEN

    # --- timers ----------------------------------------------------------------------------

    def _set_timer(self, now_s: float) -> None:
        """The probe where one may be sent, and else the timeout."""
        if not self._segments:
            self.timer_s = math.inf
            return
        trips = self.round_trips
        sacked = any(segment.sacked for segment in self._segments)
        if self._state is not _State.OPEN or sacked or trips.smoothed_s == math.inf:
            self._set_timeout(now_s)
            return
        wait_s = 2.0 * trips.smoothed_s
        wait_s += LEAST_TIMEOUT_S if len(self._segments) == 1 else SLACK_S
        timeout_s = self._segments[0].sent_s + trips.timeout_s * self._backoff - now_s
        if timeout_s > 0.0:
            wait_s = min(wait_s, timeout_s)
        self._timer, self.timer_s = _Timer.PROBE, now_s + ticks_s(wait_s)

    def _set_timeout(self, now_s: float) -> None:
        wait_s = min(self.round_trips.timeout_s * self._backoff, MOST_TIMEOUT_S)
        left_s = self._segments[0].sent_s + wait_s - now_s
        self._timer, self.timer_s = _Timer.TIMEOUT, now_s + ticks_s(left_s)

    def _probe(self, now_s: float) -> None:
        if self._probe_end is None:
            self.probes += 1
            if self._next < self._written:
                self._probe_repeats = False
                self._send_new(now_s)
            else:
                self._probe_repeats = True
                self._again(now_s, self._segments[-1])
            self._probe_end = self._next
        self._set_timeout(now_s)

    def _end_probe(self, ack: Acknowledgement, *, advanced: bool) -> None:
        """A probe that repaired a loss costs window, or losses of the tail would be free."""
        if self._probe_end is None or ack.upto < self._probe_end:
            return
        if ack.duplicate or not self._probe_repeats:
            self._probe_end = None
        elif ack.upto > self._probe_end:
            self._probe_end = None
            self.window.begin_reduction()
            self.window.end_reduction()
        elif not advanced and not ack.ranges:
            self._probe_end = None

    def _time_out(self, now_s: float) -> None:
        self.timeouts += 1
        again = self._state is _State.LOSS
        for index, segment in enumerate(self._segments):
            overdue = self._rack_rtt_s - (now_s - segment.sent_s) <= 0.0
            before = (segment.sent_s, segment.end) <= (self._rack_sent_s, self._rack_end)
            if not segment.sacked and (index == 0 or (overdue and before)):
                segment.lost = True
        self.window.collapse(self.in_flight, again=again)
        self._state, self._recover_at = _State.LOSS, self._next
        self._probe_end = None
        self._backoff *= 2.0

    # --- sending ---------------------------------------------------------------------------

    def _transmit(self, now_s: float) -> list[tuple[int, int]]:
        trips, sent_new, first_again = self.round_trips, False, False
        if not self._segments and self._next < self._written and self._last_sent_s > -math.inf:
            self.window.idle(now_s - self._last_sent_s, trips.timeout_s)
        in_flight = self.in_flight
        for segment in self._segments:
            if segment.lost and in_flight < self.window.packets:
                self._again(now_s, segment)
                first_again |= segment is self._segments[0]
                in_flight += 1
        while self._next < self._written and in_flight < self.window.packets:
            self._send_new(now_s)
            sent_new = True
            in_flight += 1
        waits_for_order = self._timer is _Timer.REORDERING and self.timer_s < math.inf
        if first_again and not waits_for_order:
            self._set_timeout(now_s)
        elif sent_new and not waits_for_order:
            self._set_timer(now_s)
        elif self._segments and self.timer_s == math.inf:
            self._set_timeout(now_s)
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def _send_new(self, now_s: float) -> None:
        end = min(self._written, self._next + SEGMENT_BYTES)
        segment = Segment(self._next, end, now_s)
        self._next = end
        self._segments.append(segment)
        self._out(now_s, segment)

    def _again(self, now_s: float, segment: Segment) -> None:
        self.retransmissions += 1
        segment.sent_s, segment.retransmitted, segment.lost = now_s, True, False
        self._out(now_s, segment)

    def _out(self, now_s: float, segment: Segment) -> None:
        self._last_sent_s = now_s
        reducing = self._state is _State.RECOVERY
        timeout_s = self.round_trips.timeout_s
        self.window.sent(now_s, self.in_flight, timeout_s, reducing=reducing)
        self._outgoing.append((segment.start, segment.end))
