"""A stream that counts what it carries, and lets a watch see it.

Payload bytes are those of drafts, acknowledgements and commits; the request with its prompt, which
any system has to send, stands apart. Air time is what sending takes on the device's first link, and
what is radiated meanwhile is known where that is the air. A radio's meter hears of every packet,
both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from edgespec.core.protocol.messages import Commit, Downlink, Open, Uplink
from edgespec_sim.actors.stream import Stream
from edgespec_sim.actors.wire_size import message_bytes
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Path
from edgespec_sim.radio.power import RadioMeter
from edgespec_sim.scenario.network_sections import FRAMING_BYTES
from edgespec_sim.world.conservation import StreamWatch


class Sending(NamedTuple):
    """What one message makes a device's radio do."""

    airtime_s: float
    radiated_j: float


class MeteredStream(Stream):
    """One generation's stream, with its counts and, in watched worlds, its ``StreamWatch``."""

    __slots__ = (
        "_radio",
        "_sending",
        "_watch",
        "airtime_s",
        "down_bytes",
        "radiated_j",
        "up_bytes",
    )

    def __init__(
        self,
        queue: EventQueue,
        up: Path,
        down: Path,
        sending: Callable[[int], Sending],
        watch: StreamWatch | None = None,
        radio: RadioMeter | None = None,
    ) -> None:
        super().__init__(queue, up, down)
        self._sending, self._watch, self._radio = sending, watch, radio
        self.up_bytes = self.down_bytes = 0
        self.airtime_s = self.radiated_j = 0.0

    def send_up(self, message: Uplink) -> None:
        size_bytes = message_bytes(message)
        if not isinstance(message, Open):
            self.up_bytes += size_bytes
        airtime_s, radiated_j = self._sending(size_bytes)
        self.airtime_s += airtime_s
        self.radiated_j += radiated_j
        if self._radio is not None:
            self._radio.packet(self._queue.now, up_bytes=size_bytes + FRAMING_BYTES)
        if self._watch is not None:
            self._watch.up.sent(message, self._queue.now, size_bytes)
            self._watch.on_air_s.append(airtime_s)
        self._up.send(size_bytes, lambda: self._arrive_up(message))

    def send_down(self, message: Downlink) -> None:
        size_bytes = message_bytes(message)
        if isinstance(message, Commit):
            self.down_bytes += size_bytes
        if self._watch is not None:
            self._watch.sent_down(message, self._queue.now, size_bytes)
        self._down.send(size_bytes, lambda: self._arrive_down(message))

    def _arrive_up(self, message: Uplink) -> None:
        if self._watch is not None:
            self._watch.up.arrived(message, self._queue.now)
            self._watch.on_air_s.popleft()
        if self.open:
            self.to_verifier(message)

    def _arrive_down(self, message: Downlink) -> None:
        if self._watch is not None:
            self._watch.arrived_down(message, self._queue.now)
        if self._radio is not None:
            size_bytes = message_bytes(message) + FRAMING_BYTES
            self._radio.packet(self._queue.now, down_bytes=size_bytes)
        if self.open:
            self.to_device(message)
