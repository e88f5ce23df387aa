"""From requests to numbers: one row an arm, RTT and repeat; then one an arm and RTT.

Times are of tokens before the end token; TPOT is (last - first) / (tokens - 1) of a request, and
its percentiles, mean and interval go over requests. Passes are those that committed a token of this
session. Bytes are payload: up per *drafted* token (drafts, acknowledgements and cancels; the
request with its prompt and gRPC's framing stand apart), down per committed token (everything).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from edgespec.bench.arms import Arm
from edgespec.bench.intervals import mean_interval, ratio_interval
from edgespec.bench.measurement import Measurement, mismatch_count

Row = dict[str, object]
Traffic = Mapping[str, float]
"""Totals by name, as the link's meter reports them."""

KEYS = ("arm", "rtt_ms", "repeat")
TIMES = ("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p95", "itl_ms_p95")
SPREAD = (*TIMES, "tokens_per_second")
_SUMMED = frozenset({"mismatches"})


@dataclass(frozen=True, slots=True)
class Cell:
    """The requests of one arm at one RTT in one repeat."""

    arm: Arm
    rtt_ms: float
    repeat: int
    measurements: tuple[Measurement, ...]
    references: tuple[tuple[int, ...], ...]
    """What target-only delivered for the same prompts."""
    traffic: Traffic
    """Of these requests alone."""

    def row(self) -> Row:
        done = self.measurements
        committed = self._sum(lambda m: m.counters.committed)
        passes = self._sum(lambda m: m.counters.passes)
        pairs = zip(done, self.references, strict=True)
        return {
            "arm": self.arm.value,
            "rtt_ms": self.rtt_ms,
            "repeat": self.repeat,
            "requests": len(done),
            **self._times(),
            "tokens": self._sum(lambda m: len(m.times_s)),
            "passes_per_token": _ratio(passes, committed),
            "tokens_per_pass": _ratio(committed, passes),
            "acceptance": _ratio(
                self._sum(lambda m: m.counters.hits), self._sum(lambda m: m.counters.tried)
            ),
            "wasted_nodes": self._sum(lambda m: m.counters.wasted),
            "wasted_nodes_per_token": _ratio(self._sum(lambda m: m.counters.wasted), committed),
            "pass_ms_mean": _ratio(1e3 * sum(m.counters.verify_s for m in done), passes),
            **self._bytes(committed),
            "reconnects": self._sum(lambda m: m.counters.reconnects),
            "mismatches": sum(mismatch_count(m.tokens, reference) for m, reference in pairs),
        }

    def _sum(self, count: Callable[[Measurement], int]) -> int:
        return sum(count(m) for m in self.measurements)

    def _times(self) -> Row:
        firsts_ms = [1e3 * m.ttft_s for m in self.measurements if m.ttft_s is not None]
        tpots_ms = [1e3 * m.tpot_s for m in self.measurements if m.tpot_s is not None]
        gaps_ms = [1e3 * gap_s for m in self.measurements for gap_s in m.gaps_s]
        flow_s = sum(m.times_s[-1] for m in self.measurements if m.times_s)
        return {
            "ttft_ms_p50": percentile(firsts_ms, 50),
            "tpot_ms_p50": percentile(tpots_ms, 50),
            "tpot_ms_p95": percentile(tpots_ms, 95),
            "tpots_ms": [m.tpot_s and 1e3 * m.tpot_s for m in self.measurements],
            "itl_ms_p95": percentile(gaps_ms, 95),
            "tokens_per_second": _ratio(self._sum(lambda m: len(m.times_s)), flow_s),
        }

    def _bytes(self, committed: int) -> Row:
        traffic = self.traffic
        drafted = traffic.get("drafted_nodes", 0)
        up_bytes = traffic.get("up_payload_bytes", 0)
        down_bytes = traffic.get("down_payload_bytes", 0)
        open_bytes = traffic.get("open_payload_bytes", 0)
        return {
            "drafted_nodes": int(drafted),
            "up_bytes_per_token": _ratio(up_bytes - open_bytes, drafted),
            "up_bytes_per_committed_token": _ratio(up_bytes - open_bytes, committed),
            "down_bytes_per_token": _ratio(down_bytes, committed),
            "open_bytes_per_request": _ratio(open_bytes, len(self.measurements)),
            "framing_bytes_per_committed_token": _ratio(
                traffic.get("up_framed_bytes", 0)
                - up_bytes
                + traffic.get("down_framed_bytes", 0)
                - down_bytes,
                committed,
            ),
        }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row an arm and RTT, in order of first appearance: medians over the repeats, the sum of
    the mismatches, ``spread`` (lowest and highest repeat), and over the texts ``tpot_ms_mean`` and
    ``speedup`` (target-only's mean over the arm's own) with an ``interval`` of 95 % each."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rtt_ms"]), []).append(row)
    texts = {key: _by_text(group) for key, group in groups.items()}
    summary = []
    for (arm, rtt_ms), group in groups.items():
        own, plain = texts[arm, rtt_ms], texts.get((Arm.TARGET_ONLY.value, rtt_ms), {})
        summary.append({**_summary(group), **_over_texts(own, plain)})
    return summary


def _by_text(group: Sequence[Row]) -> dict[int, float]:
    """The mean TPOT in ms over the repeats, by the number of the prompt, of those that have one."""
    found: dict[int, list[float]] = {}
    for row in group:
        tpots_ms = row["tpots_ms"]
        assert isinstance(tpots_ms, list)
        for number, tpot_ms in enumerate(tpots_ms):
            if tpot_ms is not None:
                found.setdefault(number, []).append(tpot_ms)
    return {number: fmean(values) for number, values in found.items()}


def _over_texts(own: Mapping[int, float], plain: Mapping[int, float]) -> Row:
    if not own:
        return {"tpot_ms_mean": None, "speedup": None, "interval": {}}
    mine = list(own.values())
    interval = {"tpot_ms_mean": list(mean_interval(mine))}
    speedup = None
    both = [number for number in own if number in plain]
    if both and min(mine) > 0.0:
        base, mine_of_both = [plain[one] for one in both], [own[one] for one in both]
        speedup = fmean(base) / fmean(mine_of_both)
        interval["speedup"] = list(ratio_interval(base, mine_of_both))
    return {"tpot_ms_mean": fmean(mine), "speedup": speedup, "interval": interval}


def _summary(group: Sequence[Row]) -> Row:
    summary: Row = {"arm": group[0]["arm"], "rtt_ms": group[0]["rtt_ms"], "repeats": len(group)}
    for name in group[0]:
        if name in KEYS or name == "tpots_ms":
            continue
        values = numbers(group, name)
        if name in _SUMMED:
            summary[name] = int(sum(values))
        else:
            summary[name] = float(median(values)) if values else None
    spread: dict[str, list[float]] = {}
    for name in SPREAD:
        if values := numbers(group, name):
            spread[name] = [min(values), max(values)]
    summary["spread"] = spread
    return summary


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of one column, without those that could not be measured."""
    values = [row.get(name) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest ranks, linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
