"""What one request took, timed on the device, and how requests become the rows of a result.

Times are of tokens before the end token; TPOT is (last - first) / (tokens - 1) of a request, and
its percentiles, mean and interval go over requests. Passes are those that committed a token of this
session. Bytes are payload: up per *drafted* token (drafts, acknowledgements and cancels; the
request with its prompt and gRPC's framing stand apart), down per committed token (everything).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from statistics import fmean, median
from typing import Any

import numpy as np

from edgespec.bench.arms import Arm
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError


@dataclass(frozen=True, slots=True)
class Measurement:
    """``times_s`` are of the tokens before the end token only, since the request was made."""

    tokens: tuple[int, ...]
    """All that was delivered, an end token too."""
    times_s: tuple[float, ...]
    counters: DraftCounters

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)


async def measure(
    agent: Agent,
    prompt: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
) -> Measurement:
    """Run one generation to its end. Raises ``GenerationError`` as the agent does, and when the
    drafter failed: what follows would be measured under the wrong name."""
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
    """``Drafter`` that passes everything on but ``close``; agents must use it one at a time."""

    def __init__(self, owned: Drafter) -> None:
        self.info, self.begin, self.step = owned.info, owned.begin, owned.step

    def close(self) -> None:
        """Nothing: the owner closes it."""


Row = dict[str, Any]
Traffic = Mapping[str, float]
"""A ``TrafficMeter``'s totals."""
Interval = list[float]
"""Lowest and highest value."""
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
    """Of the requests of one arm at one RTT in one repeat: ``references`` is what target-only
    delivered for the same prompts, ``traffic`` that of these requests alone."""
    names = ("committed", "passes", "hits", "tried", "wasted", "reconnects", "verify_s")
    sums = {name: sum(getattr(m.counters, name) for m in done) for name in names}
    committed, passes, verify_ms = sums["committed"], sums["passes"], 1e3 * sums["verify_s"]
    drafted = traffic.get("drafted_nodes", 0)
    up, down, opens = (traffic.get(f"{which}_payload_bytes", 0) for which in ("up", "down", "open"))
    framed = traffic.get("up_framed_bytes", 0) + traffic.get("down_framed_bytes", 0)
    pairs = zip(done, references, strict=True)
    return {
        "arm": arm.value,
        "rtt_ms": rtt_ms,
        "repeat": repeat,
        "requests": len(done),
        **_times(done),
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
        # Those that only one of the texts has included.
        "mismatches": sum(a != b for m, text in pairs for a, b in zip_longest(m.tokens, text)),
    }


def _times(done: Sequence[Measurement]) -> Row:
    tpots_ms = [1e3 * m.tpot_s for m in done if m.tpot_s is not None]
    flow_s = sum(m.times_s[-1] for m in done if m.times_s)
    # Between neighbouring tokens; 0 within a commit.
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
    """One row an arm and RTT, in order of first appearance: medians over the repeats, the sum of
    the mismatches, ``spread`` (lowest and highest repeat), and over the texts ``tpot_ms_mean`` and
    ``speedup`` (target-only's mean over the arm's own) with an ``interval`` of 95 % each."""
    groups = _grouped(rows)
    texts = {key: _by_text(group) for key, group in groups.items()}
    summary = []
    for (arm, rtt_ms), group in groups.items():
        row, interval, own = _summary(group), dict[str, Interval](), texts[arm, rtt_ms]
        row |= {"tpot_ms_mean": None, "speedup": None, "interval": interval}
        if values := list(own.values()):
            row["tpot_ms_mean"], interval["tpot_ms_mean"] = fmean(values), mean_interval(values)
        if found := _ratio_over(texts.get((Arm.TARGET_ONLY.value, rtt_ms), {}), own):
            row["speedup"], interval["speedup"] = found
        summary.append(row)
    return summary


def beside(rows: Sequence[Row]) -> list[Row]:
    """How ``both`` does beside each end alone: one row an RTT and end, with the ratio of the mean
    times per token over the texts and its ``interval`` of 95 %."""
    texts = {key: _by_text(group) for key, group in _grouped(rows).items()}
    found: list[Row] = []
    for (arm, rtt_ms), both in texts.items():
        for end in (Arm.SERVER_DRAFT, Arm.EDGESPEC) if arm == Arm.BOTH.value else ():
            if compared := _ratio_over(both, texts.get((end.value, rtt_ms), {})):
                ratio, interval = compared
                row = {"rtt_ms": rtt_ms, "to": end.value, "ratio": ratio, "interval": interval}
                found.append(row)
    return found


def _grouped(rows: Sequence[Row]) -> dict[tuple[object, object], list[Row]]:
    """By arm and RTT, in order of first appearance."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rtt_ms"]), []).append(row)
    return groups


def _by_text(group: Sequence[Row]) -> dict[int, float]:
    """The mean TPOT in ms over the repeats, by the number of the prompt, of those that have one."""
    found: dict[int, list[float]] = {}
    for row in group:
        for number, tpot_ms in enumerate(row["tpots_ms"]):
            if tpot_ms is not None:
                found.setdefault(number, []).append(tpot_ms)
    return {number: fmean(values) for number, values in found.items()}


def _ratio_over(
    upper: Mapping[int, float], lower: Mapping[int, float]
) -> tuple[float, Interval] | None:
    """mean(upper) / mean(lower) over the texts that both have; None where that cannot be said."""
    same = [number for number in upper if number in lower]
    above, below = [upper[one] for one in same], [lower[one] for one in same]
    if min(below, default=0.0) <= 0.0:
        return None
    return fmean(above) / fmean(below), ratio_interval(above, below)


def _summary(group: Sequence[Row]) -> Row:
    summary: Row = {"arm": group[0]["arm"], "rtt_ms": group[0]["rtt_ms"], "repeats": len(group)}
    kept = [name for name in group[0] if name not in (*_KEYS, "tpots_ms")]
    columns = {name: numbers(group, name) for name in kept}
    summary |= {name: float(median(one)) if one else None for name, one in columns.items()}
    summary["mismatches"] = int(sum(columns["mismatches"]))
    spread = {name: columns[name] for name in _SPREAD if columns[name]}
    summary["spread"] = {name: [min(values), max(values)] for name, values in spread.items()}
    return summary


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of one column, without those that could not be measured."""
    values = [row.get(name) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest ranks, linearly; None without values."""
    return float(np.percentile(values, percent)) if values else None


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


# --- the best draft length of stop-and-wait ------------------------------------------------------
# Stop-and-wait drafts nothing while a draft is under way, and which drafts hit is a function of
# the prompt and the seed. So a request takes what it takes without a link, plus one round trip
# for each of its passes, whatever the link: one sweep without a link, on the bench's own prompts,
# ranks the draft lengths at every RTT, free of the link's noise.

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPT_COUNT = 9
"""How many prompts the sweep runs."""


@dataclass(frozen=True, slots=True)
class GammaCost:
    """Of one draft length, over the sweep's requests."""

    flow_s: float
    """From first to last tokens, without a link."""
    rounds: int
    """Passes after the first tokens: each costs a round trip more on a link."""
    tokens: int

    def tpot_s(self, rtt_s: float) -> float:
        return (self.flow_s + self.rounds * rtt_s) / self.tokens


def gamma_cost(measurements: Iterable[Measurement]) -> GammaCost | None:
    """None when no request had two tokens to measure between."""
    usable = [m for m in measurements if len(m.times_s) >= 2]
    if not usable:
        return None
    return GammaCost(
        flow_s=sum(m.times_s[-1] - m.times_s[0] for m in usable),
        rounds=sum(m.counters.passes - 1 for m in usable),
        tokens=sum(len(m.times_s) - 1 for m in usable),
    )


def best_gamma_at(costs: Mapping[int, GammaCost], rtt_s: float) -> int:
    """The draft length with the least time per token, the first one of equals, and of all where
    nothing was measured."""
    return min(costs, key=lambda gamma: costs[gamma].tpot_s(rtt_s), default=GAMMAS[0])


# --- how sure a mean over texts is -------------------------------------------------------------
# Texts differ more than runs of the same text do. Intervals are 95 % by a bootstrap (Efron, 1979):
# the mean of as many texts drawn with replacement, 2,000 times. A ratio of two arms draws the same
# texts for both, which ran them all. Draws are seeded, so a result printed twice says the same.

_DRAWS = 2000
_SHARE = 0.95


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the mean of at least one value; a single one is its own interval."""
    return _bootstrap(len(values), lambda drawn: fmean([values[index] for index in drawn]))


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Of mean(upper) / mean(lower), value by value of the same texts; lower ones are above 0."""

    def ratio(drawn: Sequence[int]) -> float:
        return sum([upper[index] for index in drawn]) / sum([lower[index] for index in drawn])

    return _bootstrap(len(upper), ratio)


def _bootstrap(count: int, of: Callable[[Sequence[int]], float]) -> Interval:
    dice = random.Random(0)
    everyone = range(count)
    found = sorted(of(dice.choices(everyone, k=count)) for _ in range(_DRAWS if count > 1 else 1))
    outside = round(len(found) * (1.0 - _SHARE) / 2.0)
    return [found[outside], found[-1 - outside]]
