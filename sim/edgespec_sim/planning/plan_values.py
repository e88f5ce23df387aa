"""What a plan of a link is asked and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.link_model import LinkSettings
from edgespec.core.protocol.checks import bounded
from edgespec_sim.actors.one_session import Setting
from edgespec_sim.planning.bounds import Costs
from edgespec_sim.planning.replication import Interval
from edgespec_sim.scenario.network_sections import FRAMING_BYTES

LEAST_GAIN: Final = 1.03
"""A mode this much faster than cloud streaming is worth the effort of drafting."""
AS_GOOD: Final = 1.02
"""Modes this near to the fastest count as equal."""
# More than one commit can hold (65), or there would be no time between the first and the last.
MIN_TOKENS: Final = 100
MAX_TOKENS: Final = 10_000


class ModeName(Enum):
    LOCAL = "draft model alone"
    STREAMING = "cloud streaming"
    STOP_AND_WAIT = "split, stop-and-wait"
    PEARL = "split, PEARL"
    WINDOWED = "split, windowed"
    RUN_AHEAD = "split + run-ahead"


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """A device, a verifier and the link between them. Raises ``ValueError`` naming the field, the
    value and the range."""

    rtt_ms: float = 50.0
    draft_ms: float = 8.0
    """One draft step."""
    pass_ms: float = 25.0
    """One pass of the target."""
    acceptance: float = 0.8
    """Share of positions at which the draft's first guess is the target's token."""
    jitter_ms: float = 0.0
    """Mean extra delay of each direction."""
    loss: float = 0.0
    up_mbps: float = 0.0
    """Uplink; 0 is without limit."""
    tokens: int = 400
    """Length of each text."""
    local_tpot_ms: float | None = None
    """Time a token of the draft model alone; None: ``draft_ms``."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounded("rtt_ms", self.rtt_ms, 0.0, 10_000.0)
        bounded("draft_ms", self.draft_ms, 0.1, 10_000.0)
        bounded("pass_ms", self.pass_ms, 0.1, 10_000.0)
        bounded("acceptance", self.acceptance, 0.01, 0.99)
        bounded("jitter_ms", self.jitter_ms, 0.0, 10_000.0)
        bounded("loss", self.loss, 0.0, 0.5)
        if self.up_mbps != 0.0:
            bounded("up_mbps", self.up_mbps, 0.01, 1e6)
        bounded("tokens", self.tokens, MIN_TOKENS, MAX_TOKENS)
        if self.local_tpot_ms is not None:
            bounded("local_tpot_ms", self.local_tpot_ms, 0.1, 10_000.0)

    @property
    def costs(self) -> Costs:
        return Costs(self.rtt_ms / 1e3, self.draft_ms / 1e3, self.pass_ms / 1e3)

    def setting(self) -> Setting:
        def way(seed: int) -> LinkSettings:
            return LinkSettings(
                one_way_s=self.rtt_ms / 2e3,
                jitter_s=self.jitter_ms / 1e3,
                loss=self.loss,
                overhead_bytes=FRAMING_BYTES,
                seed=seed,
            )

        bits_per_s = self.up_mbps * 1e6 if self.up_mbps else math.inf
        costs = self.costs
        return Setting(
            way(2 * self.seed), way(2 * self.seed + 1), bits_per_s, costs.step_s, costs.pass_s
        )


@dataclass(frozen=True, slots=True)
class Mode:
    """How one way of decoding does, as means over all texts."""

    name: ModeName
    detail: str
    """What sets it apart from others of its name."""
    tpot_s: float
    speed_up: float
    """Over cloud streaming."""
    passes: float
    """A token."""
    wasted: float
    """Nodes sent in vain, a token."""
    up_bits_per_s: float
    """On the link, framing included."""
    bound_s: float | None
    """The largest lower bound on ``tpot_s``."""
    speed_up_interval: tuple[float, float] | None = None
    """95 %, over several seeds; None of one, and where there is nothing to compare."""

    @property
    def title(self) -> str:
        return f"{self.name.value}{', ' + self.detail if self.detail else ''}"


@dataclass(frozen=True, slots=True)
class Plan:
    """The modes in a fixed order, and which of them to take."""

    settings: PlanSettings
    source: str
    acceptance: float
    """Of the texts played."""
    modes: tuple[Mode, ...]
    best: Mode
    reason: str
    """One sentence."""
    waiting_pays_below_s: float | None
    """The round trip at which stop-and-wait is as fast as cloud streaming; None: at none."""
    drafting_pays_below_s: float | None
    """Beyond this round trip no policy can be ``LEAST_GAIN`` faster than cloud streaming with these
    drafts; None: at no round trip, infinite: at any."""
    seeds: int = 1

    @property
    def gamma(self) -> int:
        """Draft length of stop-and-wait."""
        waiting = next(mode for mode in self.modes if mode.name is ModeName.STOP_AND_WAIT)
        return int(waiting.detail.partition(" ")[0])

    @property
    def half_width(self) -> float | None:
        """The greatest relative half-width of a drafting mode's speed-up; None of one seed."""
        intervals = [
            Interval(mode.speed_up, *mode.speed_up_interval)
            for mode in self.modes
            if mode.speed_up_interval is not None
        ]
        return max((one.half_width for one in intervals), default=None)
