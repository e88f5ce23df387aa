"""The links between the nodes of a target in stages, and how their passes straggle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from edgespec.telemetry.cost_profile import TimeLaw
from edgespec_sim.scenario.sections import StagesSection
from edgespec_sim.traces.network_trace import TraceError
from edgespec_sim.traces.readers.matrix import slices

_POINTS = 101


def link_delays_s(section: StagesSection, folder: Path) -> tuple[float, ...]:
    """One way between each node and the next, in seconds, without jitter: ``link_ms``, or half the
    RTT in the first slice of the matrix. Raises ``TraceError`` or ``OSError``."""
    if not section.rtt_matrix:
        return (section.link_ms / 1e3,) * (section.nodes - 1)
    beside = folder / section.rtt_matrix
    path = beside if beside.is_file() else Path(section.rtt_matrix)
    if not path.is_file():
        raise TraceError(f"{section.rtt_matrix}: no such file in {folder}")
    matrix = slices(path, path.read_bytes())[0][1]
    rows = section.nodes_at or tuple(range(section.nodes))
    if max(rows) >= len(matrix):
        raise TraceError(f"{path}: node {max(rows)} is asked for, but it has {len(matrix)}")
    delays_s = []
    for here, there in itertools.pairwise(rows):
        rtt_s = float(matrix[here, there])
        if rtt_s <= 0.0:
            raise TraceError(f"{path}: from node {here} to {there} nothing was measured")
        delays_s.append(rtt_s / 2.0)
    return tuple(delays_s)


def straggling(law: TimeLaw, section: StagesSection) -> TimeLaw:
    """``law`` with a share of its times so many times as long, whatever their own spread."""
    if not section.stragglers:
        return law
    slow = round(section.stragglers * (_POINTS - 1))
    usual = [_at(law.spread, index / (_POINTS - 1)) for index in range(_POINTS - slow)]
    late = [_at(law.spread, index / max(1, slow - 1)) for index in range(slow)]
    spread = sorted([*usual, *(section.straggle_factor * one for one in late)])
    return replace(law, spread=tuple(spread))


def _at(spread: tuple[float, ...], share: float) -> float:
    place = min(share, 1.0) * (len(spread) - 1)
    low = int(place)
    high = min(low + 1, len(spread) - 1)
    return spread[low] + (place - low) * (spread[high] - spread[low])
