"""A TCP connection in virtual time: packets both ways over lossy links, and messages in order.

Theory of operation. Each end has a sender and a receiver. A packet of one end carries bytes of its
stream and the receiver's acknowledgement of the other stream. A message is a range of the stream,
delivered when all bytes before it have arrived. So a loss delays everything behind it, of any
session, like on the one HTTP/2 connection of a device. Each message is its own packet, as measured
with gRPC (1.1 packets per message, with 16 sessions in one pass), unless the window makes messages
wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol

from edgespec_sim.event_queue import EventQueue

# --- unacknowledged packets of one end of a TCP connection, and the constants of Linux ------------

SEGMENT_BYTES: Final = 1448
"""Payload of a packet of 1500 bytes with IPv4 and TCP's timestamps (RFC 7323)."""
FIRST_WINDOW: Final = 10
"""Initial window in packets (RFC 6928)."""
MIN_TIMEOUT_S: Final = 0.2
"""TCP_RTO_MIN of Linux; RFC 6298 requires a second."""
MAX_TIMEOUT_S: Final = 120.0
FIRST_TIMEOUT_S: Final = 1.0
DUPLICATES: Final = 3
"""Packets behind a missing one whose arrival ends the wait for reordering (RFC 5681)."""
_TICK_S: Final = 0.004
"""Granularity of timers, which run on jiffies: 250 per second in most distributions."""
SLACK_S: Final = 0.002
"""TCP_TIMEOUT_MIN_US, which is added to the wait of a loss timer."""


@dataclass(slots=True)
class Segment:
    """Bytes [start, end) of the stream that were sent in one packet."""

    start: int
    end: int
    sent_s: float
    """Time of the last sending."""
    order: int
    """Number of the last sending among all sendings, since packets may leave at the same time."""
    retransmitted: bool = False
    sacked: bool = False
    lost: bool = False
    """Whether the packet is considered lost and was not sent again since."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Acknowledgement that a packet carries for the other direction (RFC 2018, 2883)."""

    upto: int
    """All bytes before this one have arrived."""
    ranges: tuple[tuple[int, int], ...] = ()
    """Ranges of bytes that arrived after a gap."""
    duplicate: bool = False
    """Whether the acknowledged packet had arrived before."""


def ticks_s(wait_s: float) -> float:
    """Return when a timer set to ``wait_s`` runs, averaged over the phase of the clock."""
    return (math.ceil(max(wait_s, 1e-6) / _TICK_S) - 0.5) * _TICK_S


class RoundTrips:
    """Smoothed round trip and timeout as computed by Linux (RFC 6298, tcp_rtt_estimator)."""

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
        # The deviation's share is bounded from below, not the whole timeout.
        self.timeout_s = self.smoothed_s + max(4.0 * self._deviation_s, MIN_TIMEOUT_S)


# --- the receiving half of a TCP connection, as in Linux ----------------------------------------
# A packet that arrives behind a gap, fills one or arrived before is acknowledged at once. Any other
# one is acknowledged as soon as the application has read it, unless this end is in a conversation
# (it sent data shortly after it had received some). In that case the acknowledgement waits for data
# to be sent with it, or for a second packet, for at most 40 ms.

_DELAY_S: Final = 0.040
"""TCP_DELACK_MIN and TCP_ATO_MIN."""
_MAX_RANGES: Final = 3
"""Number of ranges that fit into a header beside the timestamps."""


class TcpReceiver:
    """Receives packets. ``arrived`` returns whether to acknowledge now; ``timer_s`` is when to
    acknowledge at the latest."""

    def __init__(self) -> None:
        self.timer_s = math.inf
        self.upto = 0
        """All bytes before this one can be read."""
        self._out_of_order: list[tuple[int, int]] = []
        self._last: tuple[int, int] | None = None
        self._duplicate = False
        self.conversing = False
        self._last_data_s = -math.inf
        self._waiting = 0
        """Packets that are not yet acknowledged."""

    def arrived(self, now_s: float, start: int, end: int) -> bool:
        """Receive a packet with these bytes. Returns whether it must be acknowledged now."""
        self._last_data_s = now_s
        if end <= self.upto:
            self._duplicate = True
            self.conversing = False
            return True
        if start > self.upto:
            self._duplicate = any(a <= start and end <= b for a, b in self._out_of_order)
            self._add(start, end)
            self.conversing = False
            return True
        self.upto = end
        if self._out_of_order:
            while self._out_of_order and self._out_of_order[0][0] <= self.upto:
                self.upto = max(self.upto, self._out_of_order.pop(0)[1])
            self.conversing = False
            return True
        self._waiting += 1
        if not self.conversing or self._waiting > 1 or end - start >= SEGMENT_BYTES:
            return True
        self.timer_s = now_s + ticks_s(_DELAY_S)
        return False

    def sent_data(self, now_s: float) -> None:
        if now_s - self._last_data_s < _DELAY_S:
            self.conversing = True

    def answer(self) -> Acknowledgement:
        """Return the acknowledgement for a packet that leaves now."""
        duplicate, self._duplicate = self._duplicate, False
        self.timer_s, self._waiting = math.inf, 0
        ranges = list(self._out_of_order)
        if self._last in ranges:  # The latest range comes first.
            ranges.remove(self._last)
            ranges.insert(0, self._last)
        return Acknowledgement(self.upto, tuple(ranges[:_MAX_RANGES]), duplicate)

    def _add(self, start: int, end: int) -> None:
        joined = []
        for a, b in self._out_of_order:
            if b < start or end < a:
                joined.append((a, b))
            else:
                start, end = min(a, start), max(b, end)
        joined.append((start, end))
        self._last = (start, end)
        self._out_of_order = sorted(joined)


# --- the number of packets that TCP allows in flight ---------------------------------------------
# This is slow start and a friendly CUBIC (RFC 9438, 4.3: its region for small products of bandwidth
# and delay, where it grows as Reno would), with a reduction in proportion to arrivals (RFC 6937). A
# window that is not used behaves as in Linux: it does not grow, decays if a full window is not sent
# for a timeout, and is halved for each timeout of silence (RFC 2861). CUBIC's convex growth in long
# fast transfers is not modelled.

_LOSS_FACTOR: Final = 717 / 1024
"""Share of the window that remains after a loss (CUBIC's beta)."""
_ACKED_PER_GROWTH: Final = 1.875
"""Windows that must arrive for growth by one packet (bictcp_update's friendly region)."""
_MIN_WINDOW: Final = 2


class CongestionWindow:
    """The congestion window in packets, driven by the sender's calls."""

    def __init__(self) -> None:
        self.packets = FIRST_WINDOW
        self._threshold = math.inf
        self._grown_by = 0
        self._limited = False
        self._most_used = 0
        self._used_since_s = 0.0
        self._before = 0
        """Window at the start of a reduction."""
        self._delivered = self._sent = 0

    @property
    def slow_start(self) -> bool:
        return self.packets < self._threshold

    def sent(self, now_s: float, in_flight: int, timeout_s: float, *, reducing: bool) -> None:
        """Record a packet that left; ``in_flight`` includes it."""
        if reducing:
            self._sent += 1
        self._limited = in_flight >= self.packets
        self._most_used = max(self._most_used, in_flight)
        if self._limited:
            self._most_used, self._used_since_s = 0, now_s
        elif now_s - self._used_since_s >= timeout_s and not reducing:
            used = max(self._most_used, FIRST_WINDOW)
            if used < self.packets:
                self._remember()
                self.packets = (self.packets + used) // 2
            self._most_used, self._used_since_s = 0, now_s

    def idle(self, for_s: float, timeout_s: float) -> None:
        """Decay the window before a packet that leaves after ``for_s`` of silence."""
        if for_s <= timeout_s:
            return
        self._remember()
        least = min(FIRST_WINDOW, self.packets)
        left_s = for_s - timeout_s
        while left_s > 0.0 and self.packets > least:
            self.packets //= 2
            left_s -= timeout_s
        self.packets = max(self.packets, least)

    def acknowledged(self, count: int) -> None:
        """Record that ``count`` packets arrived while none was missing."""
        if not self._limited and not (self.slow_start and self.packets < 2 * self._most_used):
            return
        if self.slow_start:
            self.packets += count
            return
        self._grown_by += count
        if self._grown_by >= _ACKED_PER_GROWTH * self.packets:
            self._grown_by = 0
            self.packets += 1

    def begin_reduction(self) -> None:
        self._before = self.packets
        self._threshold = max(int(self.packets * _LOSS_FACTOR), _MIN_WINDOW)
        self._delivered = self._sent = 0

    def reduce(self, in_flight: int, delivered: int, *, advanced: bool) -> None:
        """Record, during a reduction, that ``delivered`` packets arrived."""
        if not delivered:
            return
        self._delivered += delivered
        room = int(self._threshold) - in_flight
        if room < 0:
            share = -(-int(self._threshold) * self._delivered // self._before)
            allowed = share - self._sent
        else:
            allowed = min(room, max(self._delivered - self._sent, delivered) + advanced)
        self.packets = in_flight + max(allowed, 0 if self._sent else 1)

    def end_reduction(self) -> None:
        self.packets = int(self._threshold)

    def collapse(self, in_flight: int, *, again: bool) -> None:
        """Shrink the window after a timeout. ``again`` means that it follows another timeout."""
        if not again:
            self.begin_reduction()
        self.packets = in_flight + 1

    def _remember(self) -> None:
        if self._threshold < math.inf:
            self._threshold = max(self._threshold, 3 * self.packets // 4)


# --- the sending half of a TCP connection, as in Linux ------------------------------------------
# Bytes are cut into packets when the congestion window lets them leave; Nagle's algorithm is off,
# as in gRPC. A packet is lost once a packet sent after it has arrived and a quarter of a round trip
# has passed (RACK, RFC 8985), or once three have arrived; that wait has a timer. If the tail is not
# acknowledged, a probe sends the last packet again after two round trips, so that its
# acknowledgement shows the losses before it. A single packet waits as long as a timeout, since its
# acknowledgement may be delayed. The timeout (RFC 6298, at least 200 ms above the round trip)
# declares the first packet lost, and doubles.
# Not modelled: undoing an unnecessary reduction (F-RTO, Eifel), and pacing.


class _State(Enum):
    OPEN = "open"
    RECOVERY = "recovery"
    LOSS = "loss"


class _Timer(Enum):
    TIMEOUT = "timeout"
    PROBE = "probe"
    REORDERING = "reordering"


class TcpSender:
    """Sends a stream. ``write``, ``acknowledged`` and ``timer_ran`` return the packets that leave,
    as ranges of bytes; ``timer_ran`` must be called at ``timer_s``."""

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
        """Recovery ends when all bytes before this one have arrived."""
        self._backoff = 1.0
        self._last_sent_s = -math.inf
        # RACK: the packet with the latest sending time that has arrived.
        self._sent, self._rack_order, self._rack_rtt_s = 0, 0, 0.0
        self._probe_end: int | None = None
        self._probe_repeats = False
        self._outgoing: list[tuple[int, int]] = []

    # --- events ----------------------------------------------------------------------------

    def write(self, now_s: float, size_bytes: int) -> list[tuple[int, int]]:
        self._written += size_bytes
        return self._transmit(now_s)

    def acknowledged(self, now_s: float, ack: Acknowledgement) -> list[tuple[int, int]]:
        advanced, delivered = self._process_acknowledgement(now_s, ack)
        self._end_probe(ack, advanced=advanced)
        if not delivered and not advanced:
            return self._transmit(now_s)
        if self._state is not _State.OPEN and self._first >= self._recover_at:
            if self._state is _State.RECOVERY:
                self.window.end_reduction()
            self._state = _State.OPEN
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
        """Packets that were sent and have neither arrived nor been declared lost."""
        return sum(not segment.sacked and not segment.lost for segment in self._segments)

    # --- acknowledgements ------------------------------------------------------------------

    @property
    def _first(self) -> int:
        return self._segments[0].start if self._segments else self._next

    def _process_acknowledgement(self, now_s: float, ack: Acknowledgement) -> tuple[bool, int]:
        """Process an acknowledgement. Returns whether the first missing byte moved, and how many
        packets are now known to have arrived."""
        advanced, found = False, list[Segment]()
        while self._segments and self._segments[0].end <= ack.upto:
            segment = self._segments.popleft()
            advanced = True
            if not segment.sacked:
                found.append(segment)
        for start, end in ack.ranges:
            for segment in self._segments:
                if not segment.sacked and start <= segment.start and segment.end <= end:
                    segment.sacked, segment.lost = True, False
                    found.append(segment)
        for segment in found:
            self._arrived(now_s, segment)
        first = next((one for one in found if not one.retransmitted), None)
        if first is not None:
            self.round_trips.sample(now_s - first.sent_s)
        return advanced, len(found)

    def _arrived(self, now_s: float, segment: Segment) -> None:
        rtt_s = now_s - segment.sent_s
        if segment.retransmitted and rtt_s < self.round_trips.least_s:
            return  # The first copy arrived, so its round trip is unknown.
        if segment.order > self._rack_order:
            self._rack_order, self._rack_rtt_s = segment.order, rtt_s

    def _find_losses(self, now_s: float) -> bool:
        """Mark packets as lost by RACK, and set the timer for those that may only be late. Returns
        whether any packet was marked."""
        trips, found, wait_s = self.round_trips, False, 0.0
        sacked = sum(segment.sacked for segment in self._segments)
        patience_s = 0.0
        if self._state is _State.OPEN and sacked < DUPLICATES:
            patience_s = min(trips.least_s / 4.0, trips.smoothed_s)
        for segment in self._segments:
            if segment.sacked or segment.lost or segment.order > self._rack_order:
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

    # --- timers ----------------------------------------------------------------------------

    def _set_timer(self, now_s: float) -> None:
        """Set the timer of a probe if one may be sent, else the timeout."""
        if not self._segments:
            self.timer_s = math.inf
            return
        trips = self.round_trips
        sacked = any(segment.sacked for segment in self._segments)
        if self._state is not _State.OPEN or sacked or trips.smoothed_s == math.inf:
            self._set_timeout(now_s)
            return
        wait_s = 2.0 * trips.smoothed_s
        wait_s += MIN_TIMEOUT_S if len(self._segments) == 1 else SLACK_S
        timeout_s = self._segments[0].sent_s + trips.timeout_s * self._backoff - now_s
        if timeout_s > 0.0:
            wait_s = min(wait_s, timeout_s)
        self._timer, self.timer_s = _Timer.PROBE, now_s + ticks_s(wait_s)

    def _set_timeout(self, now_s: float) -> None:
        wait_s = min(self.round_trips.timeout_s * self._backoff, MAX_TIMEOUT_S)
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
                self._retransmit(now_s, self._segments[-1])
            self._probe_end = self._next
        self._set_timeout(now_s)

    def _end_probe(self, ack: Acknowledgement, *, advanced: bool) -> None:
        """End a probe. A probe that repaired a loss reduces the window; otherwise tail losses would
        be free."""
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
            before = segment.order <= self._rack_order
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
                self._retransmit(now_s, segment)
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
        segment = Segment(self._next, end, now_s, 0)
        self._next = end
        self._segments.append(segment)
        self._send_segment(now_s, segment)

    def _retransmit(self, now_s: float, segment: Segment) -> None:
        self.retransmissions += 1
        segment.retransmitted, segment.lost = True, False
        self._send_segment(now_s, segment)

    def _send_segment(self, now_s: float, segment: Segment) -> None:
        self._sent += 1
        segment.sent_s, segment.order = now_s, self._sent
        self._last_sent_s = now_s
        reducing = self._state is _State.RECOVERY
        timeout_s = self.round_trips.timeout_s
        self.window.sent(now_s, self.in_flight, timeout_s, reducing=reducing)
        self._outgoing.append((segment.start, segment.end))


MESSAGE_BYTES: Final = 14
"""HTTP/2's frame header and gRPC's prefix. The rest of the framing is per packet."""


class PacketLink(Protocol):
    def packet(self, now_s: float, size_bytes: int, /) -> float | None:
        """Return the arrival time of a packet that is handed over now. None: it is lost."""


class TcpConnection:
    """A connection with its paths ``up`` and ``down``. ``delay_s`` is the one-way delay of packets
    besides their links, ``message_s`` the time of a message at its ends."""

    def __init__(
        self,
        queue: EventQueue,
        up: Sequence[PacketLink],
        down: Sequence[PacketLink],
        delay_s: float = 0.0,
        message_s: float = 0.0,
    ) -> None:
        self.up = _TcpEnd(queue, up, delay_s, message_s)
        self.down = _TcpEnd(queue, down, delay_s, message_s)
        self.up.peer, self.down.peer = self.down, self.up


class _TcpEnd:
    """One end of a connection, and the ``Path`` from it over ``links`` to its peer."""

    peer: _TcpEnd

    def __init__(
        self, queue: EventQueue, links: Sequence[PacketLink], delay_s: float, message_s: float
    ) -> None:
        self.sender, self.receiver = TcpSender(), TcpReceiver()
        self.lost = 0
        self._queue, self._links, self._delay_s = queue, tuple(links), delay_s
        self._message_s = message_s
        self._written = 0
        self._messages: deque[tuple[int, Callable[[], None]]] = deque()
        """Messages in transit from here: the byte after each, and its ``deliver``."""
        self._wake_s = math.inf

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self._written += size_bytes + MESSAGE_BYTES
        self._messages.append((self._written, deliver))
        self._send(self.sender.write(self._queue.now, size_bytes + MESSAGE_BYTES))

    def _send(self, ranges: Sequence[tuple[int, int]]) -> None:
        for start, end in ranges:
            self.receiver.sent_data(self._queue.now)
            self._packet(start, end)
        self._set_timer()

    def _packet(self, start: int, end: int) -> None:
        ack = self.receiver.answer()
        self._send_over(0, end - start, lambda: self.peer.arrive(start, end, ack))

    def _send_over(self, hop: int, size_bytes: int, arrive: Callable[[], None]) -> None:
        """Send a packet over the link number ``hop`` and those after it."""
        if hop == len(self._links):
            self._queue.after(self._delay_s, arrive)
            return
        arrival_s = self._links[hop].packet(self._queue.now, size_bytes)
        if arrival_s is None:
            self.lost += 1
        elif hop + 1 == len(self._links):
            self._queue.at(arrival_s + self._delay_s, arrive)
        else:
            self._queue.at(arrival_s, lambda: self._send_over(hop + 1, size_bytes, arrive))

    def arrive(self, start: int, end: int, ack: Acknowledgement) -> None:
        """Process a packet of the peer. It carries no data if ``start`` equals ``end``."""
        now_s = self._queue.now
        outgoing = self.sender.acknowledged(now_s, ack)
        answer = False
        if end > start:
            answer = self.receiver.arrived(now_s, start, end)
            self.peer.deliver(self.receiver.upto)
        self._send(outgoing)
        if answer and not outgoing:
            self._packet(0, 0)
        self._set_timer()

    def deliver(self, upto: int) -> None:
        """Deliver the messages of this end that end at or before byte ``upto``."""
        while self._messages and self._messages[0][0] <= upto:
            self._queue.after(self._message_s, self._messages.popleft()[1])

    def _set_timer(self) -> None:
        due_s = min(self.sender.timer_s, self.receiver.timer_s)
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._queue.at(due_s, self._wake)

    def _wake(self) -> None:
        now_s = self._queue.now
        if now_s != self._wake_s:
            return  # An earlier timer was set meanwhile.
        self._wake_s = math.inf
        if self.receiver.timer_s <= now_s:
            self.receiver.conversing = False
            self._packet(0, 0)
        if self.sender.timer_s <= now_s:
            self._send(self.sender.timer_ran(now_s))
        self._set_timer()
