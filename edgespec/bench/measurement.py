"""Measurement of one request, timed on the device, and the rows of a result.

Only tokens before the end token are timed. TPOT is (last - first) / (tokens - 1) of a request; its
percentiles, mean and interval are over requests. A pass counts if it committed a token of this
session. Bytes are payload. Bytes up are per *drafted* token and include drafts, acknowledgements
and cancels; the request with its prompt, and gRPC's framing, are counted separately. Bytes down are
per committed token and include every message.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from edgespec.bench.arms import Arm
from edgespec.bench.intervals import Interval, mean_interval, ratio_interval
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    count_places,
    draft_places,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens, times and counters of one request."""

    tokens: tuple[int, ...]
    """All tokens received, an end token included."""
    times_s: tuple[float, ...]
    """Seconds from the request to each token before the end token."""
    counters: DraftCounters

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per token after the first, or None with fewer than two tokens."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


async def measure(
    agent: Agent,
    prompt: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
) -> Measurement:
    """Run one generation to its end. Raises ``GenerationError`` as the agent does, and if the
    drafter failed, because the rest would be measured without drafts."""
    tokens: list[int] = []
    times_s: list[float] = []
    start_s = time.monotonic()
    async for chunk in agent.generate(prompt, sampling):
        tokens.extend(chunk.tokens)
        times_s.extend([time.monotonic() - start_s] * len(chunk.tokens))
    assert agent.stats is not None
    if why := agent.stats.counters.draft_failure:
        raise GenerationError(f"the draft model failed: {why}", None)
    ends = (index for index, token in enumerate(tokens) if token in eos_token_ids)
    counted = next(ends, len(tokens))
    return Measurement(tuple(tokens), tuple(times_s[:counted]), agent.stats.counters)


class LentDrafter:
    """``Drafter`` that shares another one and does not close it. Only one agent may use it at a
    time."""

    def __init__(self, owned: Drafter) -> None:
        self.info, self.begin, self.step = owned.info, owned.begin, owned.step
        self.inner, self.max_places = owned, count_places(owned)

    def step_places(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        places: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[tuple[Candidate, ...], ...]:
        return draft_places(self.inner, keep_length, feed, width, places, cancelled)

    def close(self) -> None:
        """Do nothing, because the owner closes the drafter."""


Row = dict[str, Any]
Traffic = Mapping[str, float]
"""Totals of a ``TrafficMeter``."""
_KEYS = ("arm", "rtt_ms", "repeat")
_SPREAD = ("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p95", "itl_ms_p95", "tokens_per_second")


def row_of(
    arm: Arm,
    rtt_ms: float,
    repeat: int,
    done: Sequence[Measurement],
    references: Sequence[Sequence[int]],
    traffic: Traffic,
) -> Row:
    """Return the row of one arm at one RTT in one repeat.

    ``done`` are the measurements of its requests, ``references`` the tokens of target-only for the
    same prompts, and ``traffic`` the totals of only its requests."""
    names = ("committed", "passes", "hits", "tried", "wasted", "reconnects", "verify_s")
    sums = {name: sum(getattr(m.counters, name) for m in done) for name in names}
    committed, passes, verify_ms = sums["committed"], sums["passes"], 1e3 * sums["verify_s"]
    drafted = traffic.get("drafted_nodes", 0)
    up, down = (traffic.get(f"{which}_payload_bytes", 0) for which in ("up", "down"))
    opens = sum(traffic.get(f"{which}_payload_bytes", 0) for which in ("open", "prefixtokens"))
    framed = traffic.get("up_framed_bytes", 0) + traffic.get("down_framed_bytes", 0)
    pairs = zip(done, references, strict=True)
    return {
        "arm": arm.value,
        "rtt_ms": rtt_ms,
        "repeat": repeat,
        "requests": len(done),
        **_measure_times(done),
        "tokens": sum(len(m.times_s) for m in done),
        "passes_per_token": _ratio(passes, committed),
        "tokens_per_pass": _ratio(committed, passes),
        "acceptance": _ratio(sums["hits"], sums["tried"]),
        "wasted_nodes": sums["wasted"],
        "wasted_nodes_per_token": _ratio(sums["wasted"], committed),
        "pass_ms_mean": _ratio(verify_ms, passes),
        "server_ms_per_token": _ratio(verify_ms, committed),
        "drafted_nodes": int(drafted),
        "up_bytes_per_token": _ratio(up - opens, drafted),
        "up_bytes_per_committed_token": _ratio(up - opens, committed),
        "down_bytes_per_token": _ratio(down, committed),
        "open_bytes_per_request": _ratio(opens, len(done)),
        "framing_bytes_per_committed_token": _ratio(framed - up - down, committed),
        "reconnects": sums["reconnects"],
        # Tokens that only one of the two outputs has are counted too.
        "mismatches": sum(a != b for m, text in pairs for a, b in zip_longest(m.tokens, text)),
    }


def _measure_times(done: Sequence[Measurement]) -> Row:
    tpots_ms = [1e3 * m.tpot_s for m in done if m.tpot_s is not None]
    flow_s = sum(m.times_s[-1] for m in done if m.times_s)
    # Gaps between neighbouring tokens, which are 0 within a commit.
    gaps_ms = [1e3 * (later - one) for m in done for one, later in pairwise(m.times_s)]
    return {
        "ttft_ms_p50": percentile([1e3 * m.times_s[0] for m in done if m.times_s], 50),
        "tpot_ms_p50": percentile(tpots_ms, 50),
        "tpot_ms_p95": percentile(tpots_ms, 95),
        "tpots_ms": [m.tpot_s and 1e3 * m.tpot_s for m in done],
        "itl_ms_p95": percentile(gaps_ms, 95),
        "tokens_per_second": _ratio(sum(len(m.times_s) for m in done), flow_s),
    }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Return one row per arm and RTT, in order of first appearance.

    A row holds medians over the repeats, the sum of the mismatches, and ``spread`` (lowest and
    highest repeat). Over the prompts it holds ``tpot_ms_mean`` and ``speedup`` (target-only's mean
    over the arm's own), each with an ``interval`` of 95 %."""
    groups = _group_rows(rows)
    texts = {key: _by_text(group) for key, group in groups.items()}
    summary = []
    for (arm, rtt_ms), group in groups.items():
        row, interval, own = _summarise_group(group), dict[str, Interval](), texts[arm, rtt_ms]
        row |= {"tpot_ms_mean": None, "speedup": None, "interval": interval}
        if values := list(own.values()):
            row["tpot_ms_mean"], interval["tpot_ms_mean"] = fmean(values), mean_interval(values)
        if found := _ratio_over(texts.get((Arm.TARGET_ONLY.value, rtt_ms), {}), own):
            row["speedup"], interval["speedup"] = found
        summary.append(row)
    return summary


def compare_both_ends(rows: Sequence[Row]) -> list[Row]:
    """Compare ``both`` with each end alone. Return one row per RTT and end, with the ratio of the
    mean times per token over the prompts and its ``interval`` of 95 %."""
    texts = {key: _by_text(group) for key, group in _group_rows(rows).items()}
    found: list[Row] = []
    for (arm, rtt_ms), both in texts.items():
        for end in (Arm.SERVER_DRAFT, Arm.EDGESPEC) if arm == Arm.BOTH.value else ():
            if compared := _ratio_over(both, texts.get((end.value, rtt_ms), {})):
                ratio, interval = compared
                row = {"rtt_ms": rtt_ms, "to": end.value, "ratio": ratio, "interval": interval}
                found.append(row)
    return found


def _group_rows(rows: Sequence[Row]) -> dict[tuple[object, object], list[Row]]:
    """Return the rows by arm and RTT, in order of first appearance."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rtt_ms"]), []).append(row)
    return groups


def _by_text(group: Sequence[Row]) -> dict[int, float]:
    """Return the mean TPOT in ms over the repeats, by the number of the prompt. Prompts without a
    TPOT are left out."""
    found: dict[int, list[float]] = {}
    for row in group:
        for number, tpot_ms in enumerate(row["tpots_ms"]):
            if tpot_ms is not None:
                found.setdefault(number, []).append(tpot_ms)
    return {number: fmean(values) for number, values in found.items()}


def _ratio_over(
    upper: Mapping[int, float], lower: Mapping[int, float]
) -> tuple[float, Interval] | None:
    """Return mean(upper) / mean(lower) over the prompts that both have, with its interval, or None
    if that is undefined."""
    same = [number for number in upper if number in lower]
    above, below = [upper[one] for one in same], [lower[one] for one in same]
    if min(below, default=0.0) <= 0.0:
        return None
    return fmean(above) / fmean(below), ratio_interval(above, below)


def _summarise_group(group: Sequence[Row]) -> Row:
    summary: Row = {"arm": group[0]["arm"], "rtt_ms": group[0]["rtt_ms"], "repeats": len(group)}
    kept = [name for name in group[0] if name not in (*_KEYS, "tpots_ms")]
    columns = {name: numbers(group, name) for name in kept}
    summary |= {name: float(median(one)) if one else None for name, one in columns.items()}
    summary["mismatches"] = int(sum(columns["mismatches"]))
    spread = {name: columns[name] for name in _SPREAD if columns[name]}
    summary["spread"] = {name: [min(values), max(values)] for name, values in spread.items()}
    return summary


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """Return the values of one column, without missing measurements."""
    values = [row.get(name) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return a percentile, interpolated linearly between the two nearest ranks, or None without
    values."""
    return float(np.percentile(values, percent)) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
