"""What ``describe`` and the text forms say of a trace. Oracle: made-up traces, and JSON."""

from __future__ import annotations

import json
import math

import pytest

from edgespec_sim.traces.generators import generate
from edgespec_sim.traces.network_trace import NetworkTrace, describe, rtt_line, sparkline

TRACE = NetworkTrace(
    "made",
    "test",
    (0.0, 5.0, 5.001, 8.0),
    (0.01, 2.0, 0.02, 0.03),
    10.0,
    loss=(0.0, 0.0, 0.5, 0.0),
    outages_s=((6.0, 7.5),),
)


def test_no_spike_is_lost_however_short() -> None:
    series = describe(TRACE, buckets=4)["series"]
    assert series["rtt_s"]["start_s"] == [0.0, 2.5, 5.0, 7.5]
    assert series["rtt_s"]["min"] == [0.01, 0.01, 0.02, 0.02]
    assert series["rtt_s"]["max"] == [0.01, 0.01, 2.0, 0.03]
    assert series["loss"]["max"] == [0.0, 0.0, 0.5, 0.5]
    assert set(series) == {"rtt_s", "loss"}


def test_the_distribution_is_one() -> None:
    found = describe(generate("lte", 1, 3600.0))
    values, shares = zip(*found["rtt_cdf"], strict=True)
    assert list(values) == sorted(values)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert values[shares.index(0.5)] == pytest.approx(found["statistics"]["rtt_median_s"])
    histogram = found["rtt_histogram"]
    assert sum(histogram["share"]) == pytest.approx(1.0)
    assert len(histogram["edges_s"]) == len(histogram["share"]) + 1
    assert histogram["edges_s"][0] == pytest.approx(values[0])


def test_the_description_is_plain_and_bounded() -> None:
    short, long = (
        describe(generate("5g", 1, duration_s), buckets=100) for duration_s in (600.0, 6000.0)
    )
    assert len(json.dumps(long, allow_nan=False)) < 1.2 * len(json.dumps(short, allow_nan=False))
    assert long["outages_left_out"] == 0
    many = tuple((float(n), n + 0.5) for n in range(1200))
    found = describe(NetworkTrace("made", "test", (0.0,), (0.01,), 1200.0, outages_s=many))
    assert (len(found["outages_s"]), found["outages_left_out"]) == (1000, 200)


def test_text_forms() -> None:
    assert sparkline([0.0, 1.0, 2.0, math.nan, 7.0]) == "▁▂▃×█"
    assert sparkline([1.0, 10.0, 100.0], logarithmic=True) == "▁▅█"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([math.nan]) == "×"
    assert rtt_line(TRACE, width=10) == "▁▁▁▁▁█×▂▂▂"
