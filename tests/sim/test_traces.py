"""Reading traces of every format, and generating them.

Oracle: small files written out by hand, conservation of bytes (packet-delivery files), and that
writing in the plain format and reading it again changes nothing. Broken files must be refused at
the right line, and bytes of any kind by ``TraceError``; every trace of the shared data matches its
index. For generators: ranges over many seeds.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec_sim.links.column_tables import write_plain
from edgespec_sim.links.formats import FORMATS, PACKET_BITS, read_trace
from edgespec_sim.links.generators import KINDS, generate
from edgespec_sim.links.network_trace import NetworkTrace, TraceError, TraceStatistics
from tests.present import require


def read(folder: Path, text: str, name: str = "trace.dat") -> NetworkTrace:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_trace(path)


def write_reply(number: int, rtt_ms: float = 20, stamp: str = "", end: str = "") -> str:
    return f"{stamp}64 bytes from 192.0.2.1: icmp_seq={number} ttl=56 time={rtt_ms} ms{end}\n"


def test_plain_ping_numbers_its_probes_a_second_apart(tmp_path: Path) -> None:
    lines = [write_reply(n) for n in (1, 2, 4, 5)]
    trace = read(tmp_path, "PING host (192.0.2.1) 56(84) bytes of data.\n" + "".join(lines))
    assert trace.source == "ping"
    assert trace.time_s == (0.0, 1.0, 3.0, 4.0)
    assert trace.duration_s == 5.0
    # A second without an answer is an outage already at this probe rate.
    assert trace.outages_s == ((2.0, 3.0),)
    assert trace.loss == (0.0,) * 4


def print_stamped(numbers: list[int], rtt_ms: float = 20.0) -> str:
    times = [1691249052.0 + 0.2 * n + rtt_ms / 1000 for n in numbers]
    return "".join(
        write_reply(n, rtt_ms, f"[{t:.6f}] ") for n, t in zip(numbers, times, strict=True)
    )


def test_stamped_ping_tells_loss_from_outages(tmp_path: Path) -> None:
    numbers = [n for n in range(1, 101) if n not in (7, 40) and not 60 <= n < 70]
    trace = read(tmp_path, print_stamped(numbers))
    assert trace.duration_s == pytest.approx(20.0, rel=1e-4)
    assert np.array(trace.outages_s) == pytest.approx(np.array([[11.8, 13.8]]), rel=1e-4)
    assert trace.loss is not None
    assert trace.loss[0] == pytest.approx(1 / 25)
    assert trace.loss[30] == pytest.approx(1 / 25)
    assert trace.loss[-1] == 0.0


def test_replies_out_of_order_and_duplicates_and_wrapped_numbers(tmp_path: Path) -> None:
    text = (
        write_reply(2, 30)
        + write_reply(1, 1500)
        + write_reply(3, 40)
        + write_reply(3, 99, end=" (DUP!)")
    )
    trace = read(tmp_path, text)
    assert trace.rtt_s == (1.5, 0.03, 0.04)
    wrapped = read(tmp_path, "".join(write_reply(n % 65536) for n in range(65530, 65540)))
    assert len(wrapped.time_s) == 10
    assert wrapped.outages_s == (), "it begins in the middle, as a tail of a log does"


def test_runs_are_joined_and_a_dead_one_is_an_outage(tmp_path: Path) -> None:
    head = "PING host (192.0.2.1) 56(84) bytes of data.\n"

    def tail(sent: int, came: int) -> str:
        lost = 100 - 100 * came // sent
        return (
            f"\n--- host ping statistics ---\n{sent} packets transmitted, {came} received, "
            f"{lost}% packet loss, time {(sent - 1) * 500}ms\n"
        )

    one = head + write_reply(1) + write_reply(2) + tail(4, 2)
    dead = head + tail(4, 0)
    trace = read(tmp_path, one + dead + one)
    assert trace.duration_s == 6.0
    assert trace.time_s == (0.0, 0.5, 4.0, 4.5)
    assert trace.outages_s == ((1.0, 4.0), (5.0, 6.0))


def test_cicv5g_is_read_by_position(tmp_path: Path) -> None:
    rows = [f"{ms} {ms + 17} 17 1.0 2.0 3.0 0.0 cell 18 -94 \n" for ms in (1000, 1050, 1100, 3150)]
    trace = read(tmp_path, "pub_time(ms) whatever it says\n" + "".join(rows))
    assert trace.time_s == (0.0, 0.05, 0.1, 2.15)
    assert set(require(trace.rtt_s)) == {0.017}
    assert list(trace.outages_s[0]) == pytest.approx([0.15, 2.15])


def test_what_a_car_does_not_measure_costs_nothing(tmp_path: Path) -> None:
    """Cells are separated by a space, so an empty one leaves two; rows and header may end after the
    delay."""
    rows = ("1000 1017 17 1.0 2.0 3.0 0.0  18 -94 ", "1050  23 1.0", "1100 1129 29")
    trace = read(tmp_path, "pub_time(ms) sub_time(ms) delay(ms)\n" + "\n".join(rows) + "\n")
    assert trace.rtt_s == (0.017, 0.023, 0.029)
    aligned = "pub_time  sub_time  delay\n1000      1017      17\n1050      1073      23\n"
    assert read(tmp_path, aligned).rtt_s == (0.017, 0.023)


STARLINK_HEAD = (
    "@timestamp,dish_status.state,dish_status.pop_ping_latency_ms,"
    "dish_status.pop_ping_drop_rate,dish_status.uplink_throughput_bps\n"
)


def test_lost_seconds_of_a_dish_are_an_outage(tmp_path: Path) -> None:
    rows = [
        f"2025-01-01T00:00:0{second}+00:00,{state},{latency},{drop},1\n"
        for second, (state, latency, drop) in enumerate(
            [
                ("CONNECTED", 30, 0.0),
                ("OBSTRUCTED", 40, 0.25),
                ("CONNECTED", 50, 1.0),
                ("SEARCHING", "", ""),
                ("CONNECTED", 60, 0.0),
            ]
        )
    ]
    trace = read(tmp_path, STARLINK_HEAD + "".join(rows))
    assert trace.time_s == (0.0, 1.0, 4.0)
    assert trace.rtt_s == (0.03, 0.04, 0.06)
    assert trace.loss == (0.0, 0.25, 0.0)
    assert trace.outages_s == ((2.0, 4.0),)
    assert trace.up_bits_per_s is None  # the carried rate is not the capacity


def test_a_dish_need_not_say_more_than_its_latency(tmp_path: Path) -> None:
    head = "@timestamp,power,dish_status.pop_ping_latency_ms\n"
    times = [f"2025-01-01T00:00:0{second}+00:00" for second in range(4)]
    rows = zip(times, ("3,30", "", ",50", '"a, b",60'), strict=True)
    trace = read(tmp_path, head + "".join(f"{time},{cells}\n" for time, cells in rows))
    assert trace.rtt_s == (0.03, 0.05, 0.06)
    assert trace.loss is None
    assert trace.outages_s == ((1.0, 2.0),)
    # An unknown share of lost pings counts as none, and an unknown state as the usual one.
    row = f"{times[0]},,30,,\n"
    assert read(tmp_path, STARLINK_HEAD + row).loss == (0.0,)


def carried_bits(trace: NetworkTrace) -> float:
    assert trace.up_bits_per_s is not None
    edges = sorted({*trace.time_s, trace.duration_s, *(t for o in trace.outages_s for t in o)})
    total = 0.0
    for start_s, end_s in itertools.pairwise(edges):
        if not any(down_s <= start_s < up_s for down_s, up_s in trace.outages_s):
            row = np.searchsorted(trace.time_s, start_s, side="right") - 1
            total += trace.up_bits_per_s[row] * (end_s - start_s)
    return total


@given(st.lists(st.integers(0, 700), min_size=1, max_size=50), st.integers(1, 2000))
def test_a_delivery_file_keeps_its_bytes(
    tmp_path_factory: pytest.TempPathFactory, gaps_ms: list[int], first_ms: int
) -> None:
    times_ms = [first_ms]
    for gap_ms in gaps_ms:
        times_ms.append(times_ms[-1] + gap_ms * (10 if gap_ms > 600 else 1))
    path = tmp_path_factory.mktemp("mahimahi") / "up"
    path.write_text("".join(f"{ms}\n" for ms in times_ms))
    trace = read_trace(path)
    assert carried_bits(trace) == pytest.approx(len(times_ms) * PACKET_BITS)
    assert trace.duration_s == times_ms[-1] / 1000


def test_a_delivery_file_becomes_steps_and_outages(tmp_path: Path) -> None:
    trace = read(tmp_path, "".join(f"{ms}\n" for ms in (10, 60, 100, 150, 2150, 2300)))
    assert trace.up_bits_per_s == pytest.approx((360e3, 120e3, 120e3, 120e3))
    assert trace.time_s == pytest.approx((0.0, 0.1, 2.1, 2.2))
    assert list(trace.outages_s[0]) == pytest.approx([0.2, 2.1])


def test_a_pair_of_delivery_files_is_one_trace(tmp_path: Path) -> None:
    """Either file may be named. By hand: windows of 100 ms, the shorter file ends the trace, and an
    outage of either direction is one of both. A file alone has the direction that its name states.
    """
    (tmp_path / "lte.up").write_text("".join(f"{ms}\n" for ms in (100, 200, 2300, 2400)))
    down_ms = (50, 100, 200, *range(300, 3000, 50))
    (tmp_path / "lte.down").write_text("".join(f"{ms}\n" for ms in down_ms))
    pair = read_trace(tmp_path / "lte.down")
    assert pair == read_trace(tmp_path / "lte.up")
    assert pair.name == "lte.up and lte.down"
    assert pair.duration_s == 2.4
    assert np.array(pair.outages_s) == pytest.approx(np.array([[0.2, 2.2]]))
    ways = zip(require(pair.up_bits_per_s), require(pair.down_bits_per_s), strict=True)
    at = dict(zip(pair.time_s, ways, strict=True))
    assert at[0.0] == pytest.approx((120e3, 240e3))
    assert at[0.1] == pytest.approx((120e3, 120e3))
    assert at[max(at)] == pytest.approx((120e3, 240e3))
    (tmp_path / "lte.up").unlink()
    alone = read_trace(tmp_path / "lte.down")
    assert alone.up_bits_per_s is None
    assert alone.down_bits_per_s is not None
    (tmp_path / "lte.up").write_text("time_s,rtt_ms\n0,10\n")
    with pytest.raises(
        TraceError, match=r"lte\.up:1: expected a packet-delivery file like lte\.down"
    ):
        read_trace(tmp_path / "lte.down")


def test_plain_columns_are_optional(tmp_path: Path) -> None:
    trace = read(tmp_path, "time_s,rtt_ms\n0,10\n2,20\n")
    assert (trace.time_s, trace.rtt_s, trace.duration_s) == ((0.0, 2.0), (0.01, 0.02), 4.0)
    assert trace.loss is trace.up_bits_per_s is trace.down_bits_per_s is None
    trace = read(
        tmp_path, "# a note\n# duration_s=9\ntime_s,rtt_ms,loss,down_mbps\n0,10,1,5\n2,20,.5,8\n"
    )
    assert trace.outages_s == ((0.0, 2.0),)
    assert trace.loss == (0.0, 0.5)
    assert trace.down_bits_per_s == (5e6, 8e6)
    assert trace.duration_s == 9.0
    # An empty cell repeats the row above, and one above the first value takes that value.
    rows = "0,10,,,\n# so, or, so, or, so, or so\n\n1,10,1,5\n2,10,,,\n"
    trace = read(tmp_path, "time_s,rtt_ms,loss,up_mbps,down_mbps\n" + rows)
    assert trace.outages_s == ((1.0, 3.0),)
    assert trace.up_bits_per_s == (5e6,) * 3
    assert trace.down_bits_per_s is None


@st.composite
def traces(draw: st.DrawFn) -> NetworkTrace:
    count = draw(st.integers(1, 8))
    gaps = draw(st.lists(st.floats(0.01, 50), min_size=count + 1, max_size=count + 1))
    times = [0.0]
    for gap in gaps:
        times.append(times[-1] + gap)
    edges = sorted(draw(st.sets(st.floats(0, times[-1]), max_size=6)))
    pairs = list(zip(edges[::2], edges[1::2], strict=False))

    def column(low: float, high: float) -> tuple[float, ...]:
        return tuple(draw(st.lists(st.floats(low, high), min_size=count, max_size=count)))

    return NetworkTrace(
        draw(st.text("abc\n", max_size=5)),
        "test",
        tuple(times[:count]),
        column(0.0, 10.0),
        times[-1],
        loss=column(0.0, 0.99) if draw(st.booleans()) else None,
        up_bits_per_s=column(1e3, 1e9) if draw(st.booleans()) else None,
        outages_s=tuple(pairs),
    )


@given(traces())
def test_the_plain_format_goes_round(
    tmp_path_factory: pytest.TempPathFactory, trace: NetworkTrace
) -> None:
    path = tmp_path_factory.mktemp("plain") / "trace.csv"
    path.write_text(write_plain(trace))
    again = read_trace(path)
    assert again.duration_s == trace.duration_s
    assert again.outages_s == trace.outages_s
    for time_s in np.linspace(0, trace.duration_s, 20, endpoint=False):
        here = np.searchsorted(trace.time_s, time_s, side="right") - 1
        there = np.searchsorted(again.time_s, time_s, side="right") - 1
        before_s, after_s = require(trace.rtt_s)[here], require(again.rtt_s)[there]
        assert after_s == pytest.approx(before_s, rel=1e-9)
        if trace.up_bits_per_s is not None:
            assert require(again.up_bits_per_s)[there] == pytest.approx(trace.up_bits_per_s[here])
        out = any(start_s <= time_s < end_s for start_s, end_s in trace.outages_s)
        if trace.loss is not None and not out:
            assert again.loss is not None
            assert again.loss[there] == trace.loss[here] or again.loss[there] == pytest.approx(
                trace.loss[here], rel=1e-9
            )
    assert write_plain(replace(again, name=trace.name)) == write_plain(trace)


REFUSALS = (Path(__file__).parent / "trace_refusals.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("refusal", re.findall(r"^(?!# [FoD]).*=> .*$", REFUSALS, re.MULTILINE))
def test_a_malformed_file_is_refused_at_its_line(tmp_path: Path, refusal: str) -> None:
    text, _, message = refusal.partition("=> ")
    text = re.sub(r"@<(.*?)>\*(\d+);?", lambda found: found[1] * int(found[2]), text.rstrip(" "))
    for word, meant in (
        (r"\n", "\n"),
        (r"\r", "\r"),
        ("PING", write_reply(1)),
        ("DISH", STARLINK_HEAD),
    ):
        text = text.replace(word, meant)
    with pytest.raises(TraceError, match=re.escape(message)) as caught:
        read(tmp_path, text)
    assert "trace.dat" in str(caught.value)


def test_other_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    path.write_text("time_s,rtt_ms\n0,10\n")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"time_s,rtt_ms\n0,1\n\xff\n")
    with pytest.raises(TraceError, match="binary:3: expected UTF-8 text"):
        read_trace(tmp_path / "binary")
    monkeypatch.setattr("edgespec_sim.links.trace_text.MAX_STREAMED_BYTES", 10)
    with pytest.raises(TraceError, match="19 bytes, but at most 10 are read"):
        read_trace(path)
    monkeypatch.undo()
    (tmp_path / "json").write_text('{\n"interva\nls": []}')
    monkeypatch.setattr("edgespec_sim.links.trace_text.MAX_FILE_BYTES", 10)
    with pytest.raises(TraceError, match="19 bytes, but at most 10 are read"):
        read_trace(tmp_path / "json")


HEADS = (
    "",
    "time_s,rtt_ms\n0,1\n",
    "epoch,values\n1,1\n",
    write_reply(1),
    "5\n",
    STARLINK_HEAD,
    "pub_time\n",
)


@given(st.sampled_from(HEADS), st.one_of(st.binary(max_size=60), st.text("0123456789.,-e \n#[]")))
def test_nothing_but_a_trace_error_comes_of_garbage(
    tmp_path_factory: pytest.TempPathFactory, head: str, rest: bytes | str
) -> None:
    path = tmp_path_factory.mktemp("garbage") / "trace"
    path.write_bytes(head.encode() + (rest if isinstance(rest, bytes) else rest.encode()))
    with contextlib.suppress(TraceError):
        assert read_trace(path).duration_s > 0.0


def test_every_indexed_file_is_read_with_its_statistics(data_dir: Path) -> None:
    """Percentiles agree within 0.2 % (the index takes the sample above, like this code), durations
    within 5 % (it counts steps), lost probes within 0.3 points (it counts each; here an outage is
    time)."""
    sources = set()
    with (data_dir / "traces/index.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if "matrix" not in row["kind"]]
    for row in rows:
        trace = read_trace(data_dir / "traces" / row["file"])
        sources.add(trace.source)
        found = np.percentile(np.array(trace.rtt_s) * 1000, (50, 95, 99), method="higher")
        named = [float(row[f"rtt_{name}_ms"]) for name in ("median", "p95", "p99")]
        where = (row["file"], found, named)
        assert found == pytest.approx(named, rel=2e-3), where
        assert trace.duration_s == pytest.approx(float(row["duration_s"]), rel=0.05)
        if row["loss_pct"]:
            out = sum(end_s - start_s for start_s, end_s in trace.outages_s) / trace.duration_s
            lost = out + (1 - out) * float(np.mean(require(trace.loss)))
            assert lost * 100 == pytest.approx(float(row["loss_pct"]), abs=0.3), where
    assert sources == {"ping", "cicv5g", "starlink", "rtt-csv"} <= {*FORMATS}


DAY_S, TARGET_DURATION_S = 86_400.0, 7200.0
# Ranges from the data behind the laws of the class, widened by the differences between its
# recordings: (least, most) of one trace of at least that duration and any seed. The last two
# columns are outages per hour, and their median length if there are any.
NAMES = ("rtt_median_s", "rtt_p95_s", "rtt_p99_s", "autocorrelation", "loss")
TARGETS = """
wifi 0.0025..0.004 0.005..0.03 0.06..0.12 -0.1..0.1 0..0 0..0 0..0
lte 0.045..0.067 0.085..0.16 0.16..0.4 0.27..0.6 0.002..0.005 0..8 1..45
5g 0.015..0.018 0.021..0.026 0.025..0.07 -0.1..0.2 0..0 0..4 1..4
starlink 0.023..0.036 0.038..0.062 0.045..0.085 0.9..1 0.001..0.005 0..2.5 1..10
broadband 0.014..0.03 0.024..0.05 0.035..0.09 0.3..0.8 0.0004..0.002 0..0 0..0
wan 0.0085..0.02 0.06..0.1 0.075..0.136 0.9..1 0..0 0..0 0..0
"""


def find_misses(kind: str, trace: NetworkTrace) -> list[str]:
    found = TraceStatistics.of(trace)
    values = [getattr(found, name) for name in NAMES]
    lengths_s = [end_s - start_s for start_s, end_s in trace.outages_s]
    values += [len(lengths_s) * 3600.0 / trace.duration_s]
    values += [float(np.median(lengths_s))] if lengths_s else []
    (ranges,) = (line.split()[1:] for line in TARGETS.splitlines() if line.startswith(kind))
    bounds = [[float(bound) for bound in one.split("..")] for one in ranges]
    named = zip((*NAMES, "outages", "median outage"), values, bounds, strict=False)
    return [f"{name} is {x:.4g}" for name, x, (least, most) in named if not least <= x <= most]


def duration_s(kind: str) -> float:
    return DAY_S if kind == "wan" else TARGET_DURATION_S


def test_statistics_are_over_time_not_over_rows() -> None:
    trace = NetworkTrace("made", "test", (0.0, 9.0, 9.1, 9.2), (0.01, 1.0, 2.0, 3.0), 10.0)
    found = TraceStatistics.of(trace)
    assert found.rtt_median_s == 0.01
    assert found.rtt_p99_s == 3.0


@pytest.mark.parametrize("kind", KINDS)
def test_the_output_of_every_seed_is_on_target(kind: str) -> None:
    for seed in range(5):
        trace = generate(kind, seed, duration_s(kind))
        assert not find_misses(kind, trace), (kind, seed)


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


def test_a_wrong_request_is_named() -> None:
    with pytest.raises(TraceError, match="no generator '6g'; known are wifi, lte"):
        generate("6g", 0, 60.0)
