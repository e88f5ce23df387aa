"""The air between moving devices and the base stations of the verifiers.

Theory of operation. Every second the devices move, gains are drawn again, and each (device,
station) pair gets a rate each way: the bandwidth times log2(1 + SINR), within the limits of
modulation. A cell has one queue of *airtime* each way. A message occupies it for its bits divided
by its sender's rate, so a device at the edge of a cell takes time from all others in it. Other
traffic uses its share of the airtime evenly, which lengthens our messages by the same factor.

Interference follows the traffic: a station, or a device of another cell, counts as noise for the
share of the last step in which it sent, plus ``load`` (for the uplink, this share comes from the
positions of the cell's own devices). A device's signal does not interfere with itself. Phones send
at full power.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import Handover, Path
from edgespec_sim.run_summary import LinkLoad
from edgespec_sim.scenario.sections import FRAMING_BYTES, CellHandoverSection, RadioSection
from edgespec_sim.world.recorded_mobility import RecordedWalk

# --- gains between devices and base stations: 3GPP TR 38.901, urban micro street canyon --------
# Path loss (table 7.4.1-1) with or without line of sight by table 7.4.2-1, drawn again as the
# device moves, with a correlation distance of 50 m (7.6.3.1-2). Shadowing: log-normal, an
# autoregression along the device's path (7.5-6: 10 m and 13 m), with half of its variance common to
# all stations. Fading: Rician, with a K of 9 dB and a spread of 5 dB, or Rayleigh without line of
# sight; new in every slot.

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]

LIGHT_M_S = 3.0e8
"""Speed of light as rounded by the report (7.4.1)."""
LOS_SHADOWING_DB, NLOS_SHADOWING_DB = 4.0, 7.82
LOS_SHADOWING_M, NLOS_SHADOWING_M = 10.0, 13.0
LOS_STATE_M = 50.0
RICIAN_K_DB = (9.0, 5.0)
DISTANCE_MIN_M = 10.0
SHARED_VARIANCE = 0.5
"""Share of the shadowing variance common to all sites (ITU-R M.2135 and 3GPP TR 36.942)."""
CARRIER_GHZ: Final = 3.5
STATION_HEIGHT_M, DEVICE_HEIGHT_M = 10.0, 1.5
BREAKPOINT_M: Final = (
    4.0 * (STATION_HEIGHT_M - 1.0) * (DEVICE_HEIGHT_M - 1.0) * CARRIER_GHZ * 1e9 / LIGHT_M_S
)
"""Distance at which the slope changes: 4 h'BS h'UT f / c, with 1 m of effective environment
height."""


def los_probability(distance_m: Floats) -> Floats:
    """Return the probability of a line of sight over the ground distance (table 7.4.2-1)."""
    distance = np.maximum(distance_m, 18.0)
    return np.asarray(18.0 / distance + np.exp(-distance / 36.0) * (1.0 - 18.0 / distance))


def path_loss_db(distance_m: Floats, line_of_sight: Flags) -> Floats:
    """Return the path loss over the ground distance (table 7.4.1-1). Less than 10 m counts as 10
    m."""
    ground = np.maximum(distance_m, DISTANCE_MIN_M)
    rise = STATION_HEIGHT_M - DEVICE_HEIGHT_M
    log_distance = np.log10(np.hypot(ground, rise))
    log_carrier = np.log10(CARRIER_GHZ)
    near = 32.4 + 21.0 * log_distance + 20.0 * log_carrier
    corner = 9.5 * np.log10(BREAKPOINT_M**2 + rise**2)
    far = 32.4 + 40.0 * log_distance + 20.0 * log_carrier - corner
    sight = np.where(ground <= BREAKPOINT_M, near, far)
    height = 0.3 * (DEVICE_HEIGHT_M - 1.5)
    blocked = 35.3 * log_distance + 22.4 + 21.3 * log_carrier - height
    return np.asarray(np.where(line_of_sight, sight, np.maximum(sight, blocked)))


class UmiGains:
    """Linear power gains of shape (devices, stations), slot after slot, for one set of devices."""

    def __init__(self, rng: np.random.Generator, devices: int, stations: int) -> None:
        self._rng = rng
        self._shape = (devices, stations)
        self._sight_draws: Floats = rng.random(self._shape)
        self._own: Floats = rng.standard_normal(self._shape)
        self._common: Floats = rng.standard_normal((devices, 1))
        self._k_db: Floats = rng.normal(*RICIAN_K_DB, self._shape)

    def next_gains(self, devices_m: Floats, stations_m: Floats, moved_m: Floats) -> Floats:
        """Return the gains of the next slot. Positions have shape (n, 2); ``moved_m`` is the
        distance that each device moved since the last slot."""
        gaps = devices_m[:, None, :] - stations_m[None, :, :]
        distance_m = np.hypot(gaps[..., 0], gaps[..., 1])
        redrawn = self._rng.random(self._shape) > np.exp(-moved_m / LOS_STATE_M)[:, None]
        self._sight_draws = np.where(redrawn, self._rng.random(self._shape), self._sight_draws)
        sight = self._sight_draws < los_probability(distance_m)
        shadowing_db = self._shadowing_db(sight, moved_m)
        loss_db = path_loss_db(distance_m, sight) + shadowing_db
        return np.asarray(10.0 ** (-loss_db / 10.0) * self._fading(sight))

    def _shadowing_db(self, sight: Flags, moved_m: Floats) -> Floats:
        correlation_m = np.where(sight, LOS_SHADOWING_M, NLOS_SHADOWING_M)
        self._own = self._autoregress(self._own, np.exp(-moved_m[:, None] / correlation_m))
        common_memory = np.exp(-moved_m / NLOS_SHADOWING_M)[:, None]
        self._common = self._autoregress(self._common, common_memory)
        normal = np.sqrt(SHARED_VARIANCE) * self._common + np.sqrt(1 - SHARED_VARIANCE) * self._own
        return np.asarray(np.where(sight, LOS_SHADOWING_DB, NLOS_SHADOWING_DB) * normal)

    def _autoregress(self, normal: Floats, memory: Floats) -> Floats:
        """Return one step of a unit-variance autoregression (Gudmundson, 1991)."""
        moved: Floats = memory * normal + np.sqrt(1.0 - memory**2) * self._rng.standard_normal(
            normal.shape
        )
        return moved

    def _fading(self, sight: Flags) -> Floats:
        """Return power of mean 1: a fixed ray with a share of K/(K+1), and many weak ones."""
        k = np.where(sight, 10.0 ** (self._k_db / 10.0), 0.0)
        real, imaginary = self._rng.standard_normal((2, *self._shape)) / np.sqrt(2.0 * (k + 1.0))
        return np.asarray((np.sqrt(k / (k + 1.0)) + real) ** 2 + imaginary**2)


class RandomWaypoint:
    """The random waypoint model. ``positions_m`` has shape (devices, 2), in a square with a corner
    at the origin."""

    def __init__(
        self,
        rng: np.random.Generator,
        devices: int,
        *,
        side_m: float,
        speed_m_s: tuple[float, float],
    ) -> None:
        self._rng = rng
        self._side_m = side_m
        self._speeds = speed_m_s
        self.positions_m: Floats = rng.uniform(0.0, side_m, (devices, 2))
        self._goals_m: Floats = rng.uniform(0.0, side_m, (devices, 2))
        self._speed_m_s: Floats = rng.uniform(*speed_m_s, devices)

    def advance(self, seconds: float) -> Floats:
        """Move all devices. Returns the distance that each has moved in metres, of shape
        (devices,)."""
        left_s = np.full(len(self.positions_m), seconds)
        moved_m = np.zeros(len(self.positions_m))
        while True:
            gap = self._goals_m - self.positions_m
            distance_m = np.hypot(gap[:, 0], gap[:, 1])
            step_m = np.minimum(distance_m, self._speed_m_s * left_s)
            share = np.divide(step_m, distance_m, out=np.ones_like(step_m), where=distance_m > 0)
            self.positions_m = self.positions_m + gap * share[:, None]
            moved_m += step_m
            left_s = left_s - step_m / self._speed_m_s
            arrived = np.flatnonzero(left_s > 1e-9)
            if not arrived.size:
                return moved_m
            self._goals_m[arrived] = self._rng.uniform(0.0, self._side_m, (arrived.size, 2))
            self._speed_m_s[arrived] = self._rng.uniform(*self._speeds, arrived.size)


MARGIN_DB: Final = 3.0
FILTER_K = 4


class CellChange(NamedTuple):
    """A phone's move from one cell to another, by number."""

    device: int
    old: int
    new: int


class Attachment:
    """The cell of each device. ``gains`` are linear, of shape (devices, stations); each device
    begins in the cell with the strongest signal."""

    def __init__(self, gains: Floats) -> None:
        self._filtered_db = _to_db(gains)
        self.cells = self._filtered_db.argmax(axis=1)

    def measure(self, gains: Floats) -> list[CellChange]:
        """Update the filtered gains and ``cells`` one step later. Returns the devices that change
        cells."""
        self._filtered_db += 2.0 ** (-FILTER_K / 4.0) * (_to_db(gains) - self._filtered_db)
        best = self._filtered_db.argmax(axis=1)
        devices = np.arange(len(best))
        lead_db = self._filtered_db[devices, best] - self._filtered_db[devices, self.cells]
        changes = [
            CellChange(int(device), int(self.cells[device]), int(best[device]))
            for device in np.flatnonzero((best != self.cells) & (lead_db > MARGIN_DB))
        ]
        for change in changes:
            self.cells[change.device] = change.new
        return changes


def _to_db(gains: Floats) -> Floats:
    return np.asarray(10.0 * np.log10(np.maximum(gains, 1e-30)))


# 3GPP TS 38.214: the highest spectral efficiency of table 5.1.3.1-2, the lowest of 5.1.3.1-3. A
# device with a weaker signal is served at the lowest, like coverage extensions do.
MAX_BITS_PER_HZ, MIN_BITS_PER_HZ = 7.4063, 0.0586
NOISE_DBM_HZ = -174.0

# Receivers' noise figures, 3GPP TR 38.802, table A.2.1-1.
STATION_NOISE_DB, DEVICE_NOISE_DB = 5.0, 9.0
ACCESS_S = 8e-3
"""Round-trip time on the air without a queue: 4 ms each way (3GPP TR 38.913, 7.5, eMBB)."""
_STATION_DBM = 33.0
_STEP_S = 1.0
"""Seconds between two computations of the gains."""

# The queues count nanoseconds of airtime in place of bytes.
_TICKS_PER_S = 1e9


class RadioNetwork:
    def __init__(
        self,
        queue: EventQueue,
        section: RadioSection,
        devices: int,
        stations: int,
        seed: str,
        walk: RecordedWalk | None = None,
    ) -> None:
        """``walk`` moves the devices in place of the random waypoint model."""
        self._queue, self._section = queue, section
        number = random.Random(seed).getrandbits(32)
        walk_rng, gains_rng = np.random.default_rng(number).spawn(2)
        self.stations_m = grid_m(stations, section.area_m)
        speed = section.speed_m_per_s
        self._walk: RandomWaypoint | RecordedWalk = walk or RandomWaypoint(
            walk_rng,
            devices,
            side_m=section.area_m,
            speed_m_s=(0.5 * speed, 1.5 * speed) if speed else (1.0, 1.0),
        )
        self._moves = walk is not None or speed > 0.0
        self._gains = UmiGains(gains_rng, devices, stations)
        self.serving = np.full(devices, -1)
        """The station that each device used last; -1: none yet."""
        self.on_change: Callable[[CellChange], None] = lambda change: None
        """Called for each device that changes cells, with ``handover``."""
        self._attachment: Attachment | None = None
        self._queues = defaultdict[tuple[bool, int], SharedQueue](
            lambda: SharedQueue(8.0 * _TICKS_PER_S)
        )
        """Queues of airtime by (is_down, station)."""
        self._device_s, self._station_s = np.zeros(devices), np.zeros(stations)
        """Seconds of sending within the current step."""
        self._up = self._down = np.zeros((devices, stations))
        self._step(np.zeros(devices))
        self._queue.after(_STEP_S, self._advance)

    # --- the network's view of the air ------------------------------------------------------

    def hop(self, device: int, station: int) -> Hop:
        """Return the hops up and down for one stream of a device that now uses that station."""
        if self._attachment is None:
            self.serving[device] = station
        settings, stretch = LinkSettings(one_way_s=ACCESS_S / 2.0), 1.0 / (1.0 - self._section.load)
        up, down = (
            AirLink(
                LinkModel(settings, self._queues[is_down, station]),
                partial(self._airtime_s, is_down, device, station),
                stretch,
            )
            for is_down in (False, True)
        )
        return up, down

    def bits_per_s(self, device: int, station: int) -> tuple[float, float]:
        """Return the current rates up and down of one device at one station."""
        share, place = 1.0 - self._section.load, (device, station)
        return share * float(self._up[place]), share * float(self._down[place])

    def measure_loads(self, names: Sequence[str], duration_s: float) -> list[LinkLoad]:
        """Return the load of each station's air, in order. Other traffic's share is included."""
        load = self._section.load

        def busy(down: bool, cell: int) -> float:
            queue = self._queues.get((down, cell))
            return min(1.0, load + (queue.reserved_s if queue else 0.0) * (1.0 - load) / duration_s)

        return [
            LinkLoad(f"air of {name}", busy(False, cell), busy(True, cell))
            for cell, name in enumerate(names)
        ]

    # --- parts -----------------------------------------------------------------------------

    def _airtime_s(self, is_down: bool, device: int, station: int, size_bytes: int) -> float:
        """Return the airtime of a message, and add it to its sender's sending time."""
        rates, sent_s, sender = self._up, self._device_s, device
        if is_down:
            rates, sent_s, sender = self._down, self._station_s, station
        airtime_s = (size_bytes + FRAMING_BYTES) * 8 / float(rates[device, station])
        sent_s[sender] += airtime_s
        return airtime_s

    def _advance(self) -> None:
        still_m = np.zeros(len(self.serving))
        changes = self._step(self._walk.advance(_STEP_S) if self._moves else still_m)
        self._queue.after(_STEP_S, self._advance)
        for change in changes:
            self.on_change(change)

    def _attach(self, gains: Floats) -> list[CellChange]:
        handover = self._section.handover
        if handover is None:
            return []
        before, self._attachment = self._attachment, self._attachment or Attachment(gains)
        changes = [] if before is None else before.measure(gains)
        self.serving = self._attachment.cells
        return changes

    def _step(self, moved_m: Floats) -> list[CellChange]:
        section = self._section
        gains = self._gains.next_gains(self._walk.positions_m, self.stations_m, moved_m)
        changes = self._attach(gains)
        band_hz = section.bandwidth_mhz * 1e6
        device_w, station_w = _to_watts(section.device_dbm), _to_watts(_STATION_DBM)
        noise_w = _to_watts(NOISE_DBM_HZ) * band_hz
        up_noise_w = noise_w * 10.0 ** (STATION_NOISE_DB / 10.0)
        down_noise_w = noise_w * 10.0 ** (DEVICE_NOISE_DB / 10.0)
        sends = np.minimum(self._device_s / _STEP_S, 1.0)
        radiates = np.minimum(section.load + self._station_s / _STEP_S, 1.0)
        up_w = device_w * _uplink_noise(gains, self.serving, sends, section.load)
        heard = gains * radiates
        down_w = station_w * (heard.sum(axis=1, keepdims=True) - heard)
        up = device_w * gains / (up_noise_w + up_w)
        down = station_w * gains / (down_noise_w + down_w)
        self._up, self._down = (
            band_hz * np.clip(np.log2(1.0 + snr), MIN_BITS_PER_HZ, MAX_BITS_PER_HZ)
            for snr in (up, down)
        )
        self._device_s[:] = 0.0
        self._station_s[:] = 0.0
        return changes


class AirLink:
    """One direction of a device's air, on whose queue messages become airtime."""

    def __init__(self, model: LinkModel, airtime_s: Callable[[int], float], stretch: float) -> None:
        self._model, self._airtime_s, self._stretch = model, airtime_s, stretch

    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        ticks = self._airtime_s(size_bytes) * self._stretch * _TICKS_PER_S
        return self._model.arrival(now_s, math.ceil(ticks))

    packet = arrival  # No packets are lost here.


Hop = tuple[AirLink | LinkModel, AirLink | LinkModel]
"""Hops up and down."""


def grid_m(count: int, side_m: float) -> Floats:
    """Return ``count`` places in a square, in the middle of equal cells, row by row; shape (count,
    2)."""
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    places = [
        ((index % columns + 0.5) * side_m / columns, (index // columns + 0.5) * side_m / rows)
        for index in range(count)
    ]
    return np.array(places)


def _uplink_noise(gains: Floats, serving: Floats, sends: Floats, load: float) -> Floats:
    """Return, as (devices, stations), the power received from devices of other cells, in units of
    full power. ``sends`` is each device's share of time on the air."""
    stations = np.arange(gains.shape[1])
    served = serving[:, None] == stations
    foreign = np.where(served | (serving < 0)[:, None], 0.0, gains * sends[:, None])
    ours: Floats = foreign.sum(axis=0) - foreign
    # Other traffic is sent, on average, from the positions of our devices with the best gain there.
    nearest = gains.argmax(axis=1)
    others = np.zeros(gains.shape[1])
    for station in stations:
        members = nearest == station
        if members.any():
            heard = gains[members].mean(axis=0)
            heard[station] = 0.0
            others += load * heard
    return ours + others


def _to_watts(dbm: float) -> float:
    return float(10.0 ** (dbm / 10.0 - 3.0))


Paths = tuple[Path, Path]
"""Paths up and down."""


class Cells:
    """The cells with their backhaul. ``stations`` holds each verifier's station number. ``changed``
    is called for a change of cell after the paths have been replaced."""

    def __init__(
        self,
        queue: EventQueue,
        radio: RadioNetwork,
        section: CellHandoverSection,
        stations: Mapping[str, int],
    ) -> None:
        self._queue, self._radio, self.section, self._stations = queue, radio, section, stations
        self.gap_s = section.gap_ms / 1e3
        self._one_way_s = section.backhaul.rtt_ms / 2e3
        bits_per_s = section.backhaul.mbps * 1e6
        self._lines = [(SharedQueue(bits_per_s), SharedQueue(bits_per_s)) for _ in stations]
        """Queues of each station's backhaul line: out and in."""
        self._followed: dict[int, tuple[Handover, Handover, Callable[[], Paths]]] = {}
        """For each device, its last stream's paths, and the function that makes them again."""
        self.on_change: Callable[[CellChange], None] = lambda change: None
        radio.on_change = self._change

    def cell_of(self, number: int) -> int:
        """Return the cell of a device."""
        return int(self._radio.serving[number])

    def hops(self, number: int, verifier: str) -> list[Hop]:
        """Return the hops up and down from a device in its current cell to the verifier's
        station."""
        cell, station = self.cell_of(number), self._stations[verifier]
        air = self._radio.hop(number, cell)
        if cell == station:
            return [air]
        settings = LinkSettings(one_way_s=self._one_way_s)
        out, back = self._lines[cell]
        return [air, (LinkModel(settings, out), LinkModel(settings, back))]

    def backhaul_rtt_s(self, number: int, verifier: str) -> float:
        """Return the backhaul's part of a round trip, which is 0 in the verifier's own cell."""
        return 0.0 if self.cell_of(number) == self._stations[verifier] else 2.0 * self._one_way_s

    def follow(self, number: int, make: Callable[[], Paths]) -> Paths:
        """Return the paths of a new stream, which follow the device from cell to cell."""
        up, down = (Handover(self._queue, path, self.gap_s) for path in make())
        self._followed[number] = (up, down, make)
        return up, down

    def measure_loads(self, duration_s: float) -> list[LinkLoad]:
        """Return the load of each station's backhaul line; up is out of the station."""
        return [
            LinkLoad(
                f"backhaul of {name}",
                *(min(1.0, queue.reserved_s / duration_s) for queue in self._lines[number]),
            )
            for name, number in self._stations.items()
        ]

    def _change(self, change: CellChange) -> None:
        followed = self._followed.get(change.device)
        if followed is not None:
            up, down, make = followed
            for path, new in zip((up, down), make(), strict=True):
                path.change(new)
        self.on_change(change)
