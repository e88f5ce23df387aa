"""How busy a link of a scenario was, from the time for which messages occupied its queues."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.core.link_model import SharedQueue
from edgespec.telemetry.run_summary import LinkLoad
from edgespec_sim.scenario.network_sections import LinkSection

Queues = tuple[SharedQueue, SharedQueue]
"""Up and down."""


def load_of(
    name: str,
    section: LinkSection,
    queues: Sequence[Queues],
    duration_s: float,
    *,
    measured: bool = False,
) -> LinkLoad | None:
    """The mean over its ``queues``, a device's or one for all, with the share of other people's
    traffic. None where the capacity has no limit (unless a trace ``measured`` it), or nobody
    sent."""
    if not queues or (not measured and min(section.up_mbps, section.down_mbps) == math.inf):
        return None
    crosses = (section.cross_up, section.cross_down)
    up, down = (
        min(1.0, sum(queue.sent_s for queue in way) / (len(way) * duration_s) + cross)
        for way, cross in zip(zip(*queues, strict=True), crosses, strict=True)
    )
    return LinkLoad(name, up, down)
