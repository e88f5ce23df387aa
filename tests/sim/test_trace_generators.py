"""Generated traces, and the statistics they are checked with.

Oracle: the ranges of ``generator_targets.py`` for many seeds, the recordings of the class where the
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
from tests.sim.generator_targets import TARGET_DURATION_S, TARGETS

DAY_S = 86_400.0


def duration_s(kind: str) -> float:
    return DAY_S if kind == "wan" else TARGET_DURATION_S


# --- statistics -------------------------------------------------------------------------------


def test_statistics_are_over_time_not_over_rows() -> None:
    trace = NetworkTrace("made", "test", (0.0, 9.0, 9.1, 9.2), (0.01, 1.0, 2.0, 3.0), 10.0)
    found = TraceStatistics.of(trace)
    assert found.rtt_median_s == 0.01
    assert found.rtt_mean_s == pytest.approx(0.9 * 0.01 + 0.01 * 3 + 0.08 * 3, rel=0.01)


# --- generators -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_of_every_seed_is_on_target(kind: str) -> None:
    for seed in range(5):
        trace = generate(kind, seed, duration_s(kind))
        misses = TARGETS[kind].misses(TraceStatistics.of(trace), trace.duration_s)
        assert not misses, (kind, seed, misses)


def test_a_generator_without_memory_or_tail_misses_its_target() -> None:
    trace = generate("lte", 1, TARGET_DURATION_S)
    shuffled = list(trace.rtt_s)
    random.Random(1).shuffle(shuffled)
    capped = tuple(min(rtt_s, 0.08) for rtt_s in trace.rtt_s)
    for rtt_s, word in ((tuple(shuffled), "autocorrelation"), (capped, "rtt_p99_s")):
        faulty = dataclasses.replace(trace, rtt_s=rtt_s)
        misses = TARGETS["lte"].misses(TraceStatistics.of(faulty), TARGET_DURATION_S)
        assert any(word in miss for miss in misses), misses


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
