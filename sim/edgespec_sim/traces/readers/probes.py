"""From probes that were answered or not to a trace: which losses are loss, and which an outage.

Theory of operation. A probe is sent at a time and has a round-trip time, or None when no answer
came. A run of lost probes that lasts at least ``OUTAGE_S`` is an outage, from the first lost probe
to the next answered one: a link that drops everything for a second is gone, and what is sent then
waits. All other lost probes are loss, as the share of the probes in the window of ``WINDOW_S`` they
fall into (those of outages left out), because single losses say little about their neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace

OUTAGE_S: Final = 1.0
WINDOW_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Probe:
    """``rtt_s`` None: no answer came."""

    sent_s: float
    rtt_s: float | None


def from_probes(
    name: str, source: str, probes: Sequence[Probe], step_s: float, *, counts_loss: bool = True
) -> NetworkTrace:
    """``probes`` in order of sending, at least one answered, the first at 0; the last one counts
    for ``step_s``. ``counts_loss`` False: the format cannot tell, so there is no loss column."""
    end_s = probes[-1].sent_s + step_s
    outages_s: list[tuple[float, float]] = []
    loss_runs: list[list[Probe]] = []
    run: list[Probe] = []
    for probe in (*probes, Probe(end_s, 0.0)):
        if probe.rtt_s is None:
            run.append(probe)
            continue
        if run and probe.sent_s - run[0].sent_s >= OUTAGE_S - 1e-9:
            outages_s.append((run[0].sent_s, probe.sent_s))
        elif run:
            loss_runs.append(run)
        run = []
    answered = [(probe.sent_s, probe.rtt_s) for probe in probes if probe.rtt_s is not None]
    lost = [probe.sent_s for loss_run in loss_runs for probe in loss_run]
    times_s = [time_s for time_s, _ in answered]
    times_s[0] = 0.0  # What was lost before the first answer has no delay of its own.
    return NetworkTrace(
        name=name,
        source=source,
        time_s=tuple(times_s),
        rtt_s=tuple(rtt_s for _, rtt_s in answered),
        duration_s=end_s,
        loss=_loss(times_s, lost) if counts_loss else None,
        outages_s=tuple(outages_s),
    )


def _loss(answered_s: Sequence[float], lost_s: Sequence[float]) -> tuple[float, ...]:
    answered_in, lost_in = _per_window(answered_s), _per_window(lost_s)
    # A window in which nothing was answered has no row; its losses are the next window's.
    for window in sorted(lost_in.keys() - answered_in.keys(), reverse=True):
        later = [other for other in answered_in if other > window]
        target = min(later) if later else max(answered_in)
        lost_in[target] = lost_in.get(target, 0) + lost_in.pop(window)
    windows = [int(time_s // WINDOW_S) for time_s in answered_s]
    return tuple(
        lost_in.get(window, 0) / (lost_in.get(window, 0) + answered_in[window])
        for window in windows
    )


def _per_window(times_s: Sequence[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for time_s in times_s:
        window = int(time_s // WINDOW_S)
        counts[window] = counts.get(window, 0) + 1
    return counts
