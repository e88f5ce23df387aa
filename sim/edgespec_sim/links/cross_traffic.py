"""A shared queue that others load too: Poisson packets, without an event a packet.

Theory of operation. Packets of cross traffic matter only to the messages behind them, so they are
put into the queue when one of ours asks for a slot: all that came before that moment, in order,
which is exactly what an event a packet would have done. After a long pause only the last stretch is
played, from an empty queue: its length is ``_MEMORY`` / (1 - share)^2 packets' time, several times
the relaxation time of such a queue (M/D/1), so what lay before it has no say any more. A message's
cost is so bounded whatever the pause, and a queue nobody uses costs nothing.

Every asker's ``now_s`` has to be non-decreasing, as for any shared queue.
"""

from __future__ import annotations

import random
from typing import Final

from edgespec.core.link_model import CapacitySchedule, SharedQueue

PACKET_BYTES: Final = 1400
MAX_SHARE: Final = 0.95
_MEMORY: Final = 20.0


class LoadedQueue(SharedQueue):
    """A ``SharedQueue`` of which cross traffic takes ``share`` of the capacity, in the mean."""

    def __init__(
        self,
        bits_per_s: float | CapacitySchedule,
        share: float,
        *,
        packet_bytes: int = PACKET_BYTES,
        seed: int = 0,
        offset_s: float = 0.0,
    ) -> None:
        super().__init__(bits_per_s, offset_s=offset_s)
        if not 0.0 <= share <= MAX_SHARE:
            raise ValueError(f"share is {share}, but must be in [0, {MAX_SHARE}]")
        if packet_bytes < 1:
            raise ValueError(f"packet_bytes is {packet_bytes}, but must be at least 1")
        self._share = share
        self._packet_bytes = packet_bytes
        self._chance = random.Random(seed)
        self._next_s = self._gap_s(0.0) if share else float("inf")
        self.cross_bytes = 0
        """Of the packets played; those of long pauses are left out."""

    def first_free_s(self, now_s: float, ready_s: float, size_bytes: int) -> float:
        if self._next_s <= now_s:
            self._play(now_s)
        return super().first_free_s(now_s, ready_s, size_bytes)

    def _play(self, until_s: float) -> None:
        packet_s = self.serialisation_s(until_s, self._packet_bytes)
        memory_s = _MEMORY * packet_s / (1.0 - self._share) ** 2
        if until_s - self._next_s > memory_s:
            # Poisson arrivals have no memory: the next after any moment is one gap away.
            start_s = until_s - memory_s
            self._next_s = start_s + self._gap_s(start_s)
        while self._next_s <= until_s:
            at_s = self._next_s
            size_bytes = self._packet_bytes
            start_s = super().first_free_s(at_s, at_s, size_bytes)
            end_s = start_s + self.serialisation_s(start_s, size_bytes)
            self.take(start_s, end_s, size_bytes)
            self.cross_bytes += size_bytes
            self._next_s = at_s + self._gap_s(at_s)

    def _gap_s(self, time_s: float) -> float:
        packets_per_s = self._share * self.capacity_bits_per_s(time_s) / (8 * self._packet_bytes)
        return self._chance.expovariate(packets_per_s)
