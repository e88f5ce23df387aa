"""Generated traces, and the statistics they are checked with.

Oracle: ranges for many seeds, the recordings of the class where the
shared data is present, closed forms for the statistics of made-up traces. A generator that draws
each row on its own, or leaves the tail out, must miss its target.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import numpy as np
import pytest

from edgespec_sim.links.formats import read_trace
from edgespec_sim.links.generators import KINDS, generate
from edgespec_sim.links.network_trace import NetworkTrace, TraceError, TraceStatistics

DAY_S, TARGET_DURATION_S = 86_400.0, 7200.0
# What the data behind the laws say of the class, widened by what differs from one recording of it
# to the next: (least, most) of one trace of at least that duration and any seed. The last two:
# outages an hour, and their median length where there are any.
NAMES = ("rtt_median_s", "rtt_p95_s", "rtt_p99_s", "autocorrelation", "loss")
TARGETS = {
    "wifi": ((0.0025, 0.004), (0.005, 0.03), (0.06, 0.12), (-0.1, 0.1), (0, 0), (0, 0), (0, 0)),
    "lte": (
        (0.045, 0.067),
        (0.085, 0.16),
        (0.16, 0.4),
        (0.27, 0.6),
        (0.002, 0.005),
        (0, 8),
        (1, 45),
    ),
    "5g": ((0.015, 0.018), (0.021, 0.026), (0.025, 0.07), (-0.1, 0.2), (0, 0), (0, 4), (1, 4)),
    "starlink": (
        (0.023, 0.036),
        (0.038, 0.062),
        (0.045, 0.085),
        (0.9, 1),
        (0.001, 0.005),
        (0, 2.5),
        (1, 10),
    ),
    "broadband": (
        (0.014, 0.03),
        (0.024, 0.05),
        (0.035, 0.09),
        (0.3, 0.8),
        (0.0004, 0.002),
        (0, 0),
        (0, 0),
    ),
    "wan": ((0.0085, 0.02), (0.06, 0.1), (0.075, 0.136), (0.9, 1), (0, 0), (0, 0), (0, 0)),
}


def misses(kind: str, trace: NetworkTrace) -> list[str]:
    found = TraceStatistics.of(trace)
    values = [getattr(found, name) for name in NAMES]
    values += [found.outage_count * 3600.0 / trace.duration_s]
    values += [found.outage_median_s] if found.outage_count else []
    named = zip((*NAMES, "outages", "outage_median_s"), values, TARGETS[kind], strict=False)
    return [f"{name} is {x:.4g}" for name, x, (least, most) in named if not least <= x <= most]


def duration_s(kind: str) -> float:
    return DAY_S if kind == "wan" else TARGET_DURATION_S


# --- statistics -------------------------------------------------------------------------------


def test_statistics_are_over_time_not_over_rows() -> None:
    trace = NetworkTrace("made", "test", (0.0, 9.0, 9.1, 9.2), (0.01, 1.0, 2.0, 3.0), 10.0)
    found = TraceStatistics.of(trace)
    assert found.rtt_median_s == 0.01
    assert found.rtt_p99_s == 3.0


# --- generators -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_of_every_seed_is_on_target(kind: str) -> None:
    for seed in range(5):
        trace = generate(kind, seed, duration_s(kind))
        assert not misses(kind, trace), (kind, seed)


def test_a_generator_without_memory_or_tail_misses_its_target() -> None:
    trace = generate("lte", 1, TARGET_DURATION_S)
    shuffled = list(trace.rtt_s)
    random.Random(1).shuffle(shuffled)
    capped = tuple(min(rtt_s, 0.08) for rtt_s in trace.rtt_s)
    for rtt_s, word in ((tuple(shuffled), "autocorrelation"), (capped, "rtt_p99_s")):
        faulty = dataclasses.replace(trace, rtt_s=rtt_s)
        assert any(word in miss for miss in misses("lte", faulty))


def test_lengths_of_outages_follow_their_law() -> None:
    lengths = [
        end_s - start_s
        for seed in range(3)
        for start_s, end_s in generate("lte", seed, 72_000.0).outages_s
    ]
    short = [length for length in lengths if length < 10.0]
    assert len(lengths) * 3600 / (3 * 72_000) == pytest.approx(4.0, rel=0.2)
    assert np.median(short) == pytest.approx(1.8, abs=0.2)
    assert min(short) >= 1.0
    assert len(short) / len(lengths) == pytest.approx(7 / 11, abs=0.1)


@pytest.mark.parametrize(
    ("kind", "seed", "lasts_s", "text"),
    [
        ("6g", 0, 60.0, "no generator '6g'; known are wifi, lte"),
        ("lte", 0, 0.0, "duration_s is 0.0"),
        ("lte", -1, 60.0, "seed is -1"),
    ],
)
def test_a_wrong_request_is_named(kind: str, seed: int, lasts_s: float, text: str) -> None:
    with pytest.raises(TraceError, match=text):
        generate(kind, seed, lasts_s)


# --- against the recordings -------------------------------------------------------------------

RECORDED = {
    "lte": ("cellular_us_drive/*.txt",),
    "5g": ("cicv5g/urban*.txt", "cicv5g/arterial*.txt", "cicv5g/30ms*.txt"),
    "starlink": ("starlink_fjordlink/*.csv",),
    "wan": ("wan_jitterbug/*.csv",),
}


@pytest.mark.parametrize("kind", RECORDED)
def test_a_generator_agrees_with_the_recordings_of_its_class(data_dir: Path, kind: str) -> None:
    """Percentiles of all recordings together; autocorrelation and loss as their mean."""
    folder = data_dir / "traces"
    recorded = [read_trace(file) for glob in RECORDED[kind] for file in sorted(folder.glob(glob))]
    made = [generate(kind, seed, duration_s(kind)) for seed in range(3)]
    percent = (50, 95, 99)
    there = np.percentile(np.concatenate([trace.rtt_s for trace in recorded]), percent)
    here = np.percentile(np.concatenate([trace.rtt_s for trace in made]), percent)
    assert here == pytest.approx(there, rel=0.25)
    theirs, ours = ([TraceStatistics.of(trace) for trace in traces] for traces in (recorded, made))
    assert np.mean([one.autocorrelation for one in ours]) == pytest.approx(
        np.mean([one.autocorrelation for one in theirs]), abs=0.1
    )
    if recorded[0].loss is not None:
        assert np.mean([one.loss for one in ours]) == pytest.approx(
            np.mean([one.loss for one in theirs]), rel=0.35
        )
