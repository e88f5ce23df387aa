"""What one device of a world goes through: sampled while the world is played, for pictures.

Nothing here touches the world: samples are taken between events, and no die is cast. What is kept
is bounded however long the world lasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from edgespec.core.device.session import DraftSession
from edgespec.telemetry.run_summary import Interruption, Series, Watched, WatchedRequest
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.network import Network
from edgespec_sim.world.user import User

MOST: Final = 300
"""Requests, and interruptions, that are kept."""
MOST_WATCHED: Final = 6
"""Devices of a world, of which a page tells of one: it is to have a request that counts."""
ROUND_TRIP: Final = "round trip of the network"
QUEUE: Final = "wait for a pass"
RUNG: Final = "rung of the ladder"
"""0: all is drafted, 3: nothing."""


class Watch:
    """``sample`` is called at the end of each step of the run."""

    def __init__(self, user: User, scenario: Scenario, network: Network) -> None:
        self.user, self._scenario, self._network = user, scenario, network
        self._round_trips_ms: list[float | None] = []
        self._queues_ms: list[float | None] = []
        self._rungs: list[float | None] = []
        self._session: DraftSession | None = None
        self._waited: tuple[float, int] = (0.0, 0)
        self.moved: list[Interruption] = []
        """Changes of cell, and of what the device may draft, as they happen."""

    def sample(self, now_s: float) -> None:
        user = self.user
        group, site = user.settings.group, user.site
        rtt_s = (
            None
            if site is None
            else self._network.ways.round_trip_s(group, user.number, site.name, now_s)
        )
        self._round_trips_ms.append(None if rtt_s is None else 1e3 * rtt_s)
        self._queues_ms.append(self._queue_ms())
        if user.governors is not None:
            self._rungs.append(float(user.governors.ladder.rung))

    def _queue_ms(self) -> float | None:
        """The mean wait of the passes since the last sample, of one session."""
        device = self.user.device
        if device is None:
            return None
        counters = device.session.counters
        before_s, before = self._waited if device.session is self._session else (0.0, 0)
        self._session = device.session
        self._waited = (counters.queue_s, counters.passes)
        passes = counters.passes - before
        if passes <= 0 or not counters.tried:  # without drafts nothing waits
            return None
        return 1e3 * (counters.queue_s - before_s) / passes

    def result(self, records: Sequence[RequestRecord]) -> Watched:
        user, duration_s = self.user, self._scenario.duration_s
        requests = [_request(one) for one in records if one.device == user.name]
        told = self._network.interruptions(user.settings.group, user.number)
        told += self.moved + _restarts(self._scenario)
        told = sorted((one for one in told if one.start_s < duration_s), key=lambda o: o.start_s)
        step_s = duration_s / max(1, len(self._round_trips_ms))
        rungs = (Series(RUNG, "rung", step_s, tuple(self._rungs)),) if self._rungs else ()
        return Watched(
            device=user.name,
            requests=tuple(requests[:MOST]),
            series=(
                Series(ROUND_TRIP, "ms", step_s, tuple(self._round_trips_ms)),
                Series(QUEUE, "ms", step_s, tuple(self._queues_ms)),
                *rungs,
            ),
            interruptions=tuple(told[:MOST]),
            left_out=max(0, len(requests) - MOST) + max(0, len(told) - MOST),
        )


def _request(record: RequestRecord) -> WatchedRequest:
    first_s = None if record.ttft_s is None else record.started_s + record.ttft_s
    return WatchedRequest(record.started_s, first_s, record.ended_s, record.verifier, record.tokens)


def _restarts(scenario: Scenario) -> list[Interruption]:
    """Of verifiers, and of nodes that hold a part of one."""
    told = []
    for name, section in scenario.verifiers.items():
        told += [
            Interruption(at_s, at_s + section.restart_s, f"{name} restarts")
            for at_s in section.restarts_at_s
        ]
        stages = section.stages
        if stages is not None:
            told += [
                Interruption(at_s, at_s + stages.reroute_s, f"{name} loses a node")
                for at_s in stages.lost_at_s
            ]
    return told
