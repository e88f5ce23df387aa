"""The world of the paper, slot by slot: devices that move, servers, tasks, gains and queues.

``UaraSettings`` holds the paper's parameters (Koh and Yang, arXiv 2511.01695, section V), and those
that it leaves open, marked "ours". ``UaraWorld`` draws one ``Snapshot`` per slot, and everything in
it is constant within the slot. Decisions change only the servers' queues: work that does not fit
into a slot waits for the next ones. Capacities are peak float32: units x 2 x clock.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from edgespec.core.protocol.checks import check_limits, choice_field, range_field
from edgespec_sim.world.radio_network import RandomWaypoint, UmiGains, grid_m

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DRAFT_PARAMETERS, TARGET_PARAMETERS = 137e6, 1.6e9
"""Parameters of GPT-2 and GPT2-XL, as the paper counts them. A token takes two operations per
parameter."""
TARGET_BYTES = 2 * TARGET_PARAMETERS
TOKEN_BITS = 16
"""Ours: size of an id among GPT-2's 50257."""


@dataclass(frozen=True, slots=True)
class Task:
    """A device's task in one slot. The number of tokens is drawn uniformly from ``tokens``."""

    name: str
    tokens: tuple[int, int]
    draft_length: int
    """Best fixed lengths of the paper's figure: 25 (HumanEval), 15 (DailyMail); that of chat is
    ours."""
    acceptance: float
    """Ours: the acceptance rate of a drafted token, of the order of GPT-2 pairs."""


# Peak float32 of phones' GPUs. Galaxy S23, Adreno 740: 1536 units at 0.719 GHz; iPhone 14, A15,
# five cores: 640 at 1.338; Mate 60, Maleoon 910: 1024 at 0.75.
DEVICE_FLOPS = np.array([1536 * 2 * 0.719e9, 640 * 2 * 1.338e9, 1024 * 2 * 0.75e9])
# RTX 2080, 3090 and 4090: CUDA cores and boost clocks of NVIDIA's own tables, and memory bandwidth.
SERVER_FLOPS = np.array([2944 * 2 * 1.71e9, 10496 * 2 * 1.695e9, 16384 * 2 * 2.52e9])
SERVER_BYTES_PER_S = np.array([448e9, 936e9, 1008e9])
TASKS = (
    Task("code", (96, 192), 25, 0.85),
    Task("summary", (48, 96), 15, 0.75),
    Task("chat", (64, 160), 15, 0.7),
)


@dataclass(frozen=True, slots=True)
class UaraSettings:
    """The settings of a world. The paper's ranges are: devices 30-180, servers 4-20, w 20-100."""

    devices: int = range_field(90, 1, 1000)
    servers: int = range_field(12, 1, 1000)
    bandwidth_hz: float = range_field(10e6, 1.0, 1e12)
    """Bandwidth of all servers together, divided evenly."""
    transmit_dbm: tuple[float, float] = range_field((16.0, 24.0), -40.0, 60.0)
    noise_dbm_hz: float = range_field(-174.0, -250.0, 0.0)
    balance_weight: float = range_field(1e-2, 0.0, 1e9)
    """Lambda, per millisecond; in seconds the term would be negligible."""
    energy_weight: float = range_field(60.0, 0.0, 1e9)
    """w, in milliseconds x percent of battery per millijoule."""
    slot_s: float = range_field(2.0, 1e-3, 1e4)
    """Ours: the length of a slot."""
    side_m: float = range_field(200.0, 1.0, 1e5)
    """Ours: the side of the square. The paper's claim depends on it (docs/uara.md)."""
    servers_at: str = choice_field("random", ("random", "grid"))
    """Ours: places of the servers, drawn like the devices' places or on a ``grid``."""
    message_bits: float = range_field(512.0, 0.0, 1e9)
    """Ours: the headers of one draft."""
    probability_bits: float = range_field(16.0, 0.0, 1e9)
    """Ours: the probability of a drafted token, which the paper's acceptance test needs."""
    acceptance_shift: float = range_field(0.0, -0.6, 0.14)
    """Ours: added to every task's acceptance."""
    speed_m_s: tuple[float, float] = range_field((1.0, 15.0), 1e-3, 1e3)
    """Ours: from walking to driving in a street."""
    battery_percent: tuple[float, float] = range_field((20.0, 100.0), 0.1, 100.0)
    """Ours: the range of the devices' batteries."""
    backhaul_rtt_s: tuple[float, float] = range_field((0.001, 0.010), 0.0, 100.0)
    """Ours: round trip from a base station to its server."""

    def __post_init__(self) -> None:
        check_limits(self)
        for one in fields(self):
            ends = getattr(self, one.name)
            if isinstance(ends, tuple) and ends[0] > ends[1]:
                raise ValueError(f"{one.name} is {ends}, but the first must not exceed the second")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One slot with M devices and E servers, in SI units; the battery is in percent."""

    settings: UaraSettings
    devices_m: Floats
    servers_m: Floats
    gains: Floats
    """Shape (M, E), linear power gain."""
    transmit_w: Floats
    device_flops: Floats
    server_flops: Floats
    server_bytes_per_s: Floats
    backhaul_rtt_s: Floats
    battery_percent: Floats
    queue_slots: Floats
    """Shape (E,): slots of work that wait before this slot's work."""
    tokens: Floats
    """Shape (M,): tokens to produce in this slot."""
    drafted: Floats
    """Shape (M,): tokens that are drafted, sent and verified for them, rejected ones included."""
    passes: Floats
    """Shape (M,): verify passes, of one draft each."""

    @property
    def draft_flop(self) -> Floats:
        return 2 * DRAFT_PARAMETERS * self.drafted

    @property
    def verify_flop(self) -> Floats:
        return 2 * TARGET_PARAMETERS * self.drafted

    @property
    def plain_flop(self) -> Floats:
        """Operations of decoding without speculation."""
        return 2 * TARGET_PARAMETERS * self.tokens

    @property
    def upload_bits(self) -> Floats:
        token = TOKEN_BITS + self.settings.probability_bits
        return token * self.drafted + self.settings.message_bits * self.passes

    @property
    def download_bits(self) -> Floats:
        return TOKEN_BITS * self.tokens + self.settings.message_bits * self.passes

    @property
    def band_hz(self) -> float:
        """Bandwidth of one server."""
        return self.settings.bandwidth_hz / self.settings.servers

    @property
    def noise_w(self) -> float:
        """Noise over one server's band. Devices spread their power over the band and use their
        share of it, so signal and noise shrink together and the SNR does not depend on the
        share."""
        return float(10.0 ** (self.settings.noise_dbm_hz / 10.0 - 3.0) * self.band_hz)

    @property
    def snr(self) -> Floats:
        """Signal-to-noise ratio (M, E), linear, without interference."""
        return self.gains * self.transmit_w[:, None] / self.noise_w


def tokens_per_pass(draft_length: Floats, acceptance: Floats) -> Floats:
    """Return the expected tokens that a pass commits: (1 - a^(n+1)) / (1 - a) (Leviathan, 2023)."""
    return np.asarray((1.0 - acceptance ** (draft_length + 1.0)) / (1.0 - acceptance))


class UaraWorld:
    """Draws the snapshots of one world, slot after slot."""

    def __init__(self, settings: UaraSettings, seed: int) -> None:
        # The random streams are separate, so that the draws of one part never shift another's.
        radio, moves, fixed, self._tasks = np.random.default_rng(seed).spawn(4)
        self.settings = settings
        self._gains = UmiGains(radio, settings.devices, settings.servers)
        self._walk = RandomWaypoint(
            moves, settings.devices, side_m=settings.side_m, speed_m_s=settings.speed_m_s
        )
        self.snapshot = self._draw(self._fixed(fixed), np.zeros(settings.devices))

    def advance(self, association: Ints, *, speculates: bool = True) -> Snapshot:
        """Advance to the next slot, after this slot's work went to the servers in ``association``
        (M,). Without speculation, servers compute each token once."""
        now = self.snapshot
        work_s = (now.verify_flop if speculates else now.plain_flop) / now.server_flops[association]
        served = np.bincount(association, work_s, now.settings.servers)
        backlog = now.queue_slots + served / self.settings.slot_s - 1.0
        moved_m = self._walk.advance(self.settings.slot_s)
        self.snapshot = self._draw(replace(now, queue_slots=np.maximum(backlog, 0.0)), moved_m)
        return self.snapshot

    def _fixed(self, rng: np.random.Generator) -> Snapshot:
        """Draw the parts that stay the same for the life of the world."""
        settings = self.settings
        phones = rng.integers(len(DEVICE_FLOPS), size=settings.devices)
        # Each class has the same number of servers, as far as possible, in random places.
        cards = rng.permutation(np.arange(settings.servers) % len(SERVER_FLOPS))
        nothing = np.zeros(settings.devices)
        dbm = rng.uniform(*settings.transmit_dbm, settings.devices)
        return Snapshot(
            settings=settings,
            devices_m=self._walk.positions_m,
            servers_m=self._places(rng),
            gains=np.ones((settings.devices, settings.servers)),
            transmit_w=10.0 ** (dbm / 10.0 - 3.0),
            device_flops=DEVICE_FLOPS[phones],
            server_flops=SERVER_FLOPS[cards],
            server_bytes_per_s=SERVER_BYTES_PER_S[cards],
            backhaul_rtt_s=rng.uniform(*settings.backhaul_rtt_s, settings.servers),
            battery_percent=rng.uniform(*settings.battery_percent, settings.devices),
            queue_slots=np.zeros(settings.servers),
            tokens=nothing,
            drafted=nothing,
            passes=nothing,
        )

    def _places(self, rng: np.random.Generator) -> Floats:
        count, side_m = self.settings.servers, self.settings.side_m
        drawn = rng.uniform(0.0, side_m, (count, 2))
        return drawn if self.settings.servers_at == "random" else grid_m(count, side_m)

    def _draw(self, now: Snapshot, moved_m: Floats) -> Snapshot:
        kinds = self._tasks.integers(len(TASKS), size=self.settings.devices)
        low, high = np.array([TASKS[kind].tokens for kind in kinds]).T
        tokens = self._tasks.integers(low, high + 1).astype(np.float64)
        lengths = np.array([float(TASKS[kind].draft_length) for kind in kinds])
        rates = np.array([TASKS[kind].acceptance for kind in kinds])
        rates += self.settings.acceptance_shift
        passes = np.ceil(tokens / tokens_per_pass(lengths, rates))
        positions = self._walk.positions_m
        return replace(
            now,
            devices_m=positions,
            gains=self._gains.next_gains(positions, now.servers_m, moved_m),
            tokens=tokens,
            drafted=passes * lengths,
            passes=passes,
        )
