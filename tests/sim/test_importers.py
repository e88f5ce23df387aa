"""Recordings of other tools and datasets, one small file of each kind in ``recordings``.

Oracle: the files were written by hand in the form that the tool's source or documentation shows,
with the numbers below. A broken file differs from a recording by one change, and the error must
name the line (or the element) and the column. Every kind is played by ``run`` as well.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import edgespec_sim as sim
from edgespec_sim.commands.main import app
from edgespec_sim.links.column_tables import write_plain
from edgespec_sim.links.columns import Columns, TableKind
from edgespec_sim.links.formats import FORMATS, read_trace
from edgespec_sim.links.network_trace import NetworkTrace, TraceError
from edgespec_sim.links.signal_quality import (
    EFFICIENCIES,
    cqi_efficiency,
    parse_quality_unit,
    sinr_efficiency,
)
from edgespec_sim.world.recorded_arrivals import (
    ARRIVAL_FORMATS,
    RecordedArrival,
    read_arrivals,
    summarise_arrivals,
    write_arrivals,
)
from edgespec_sim.world.recorded_mobility import (
    MOBILITY_FORMATS,
    RecordedWalk,
    read_mobility,
    summarise_mobility,
    write_positions,
)
from tests.present import require

RECORDINGS = Path(__file__).parent / "recordings"


@dataclass(frozen=True)
class Network:
    """A file, how it is read, and its numbers: rtt in ms, rates in Mbit/s."""

    file: str
    source: str
    time_s: tuple[float, ...]
    rtt_ms: tuple[float, ...] | None = None
    up: tuple[float, ...] | None = None
    down: tuple[float, ...] | None = None
    loss: tuple[float, ...] | None = None
    outages_s: tuple[tuple[float, float], ...] = ()
    end_s: float = 4.0
    columns: str = ""
    format: str = "auto"


NO_LOSS = (0.0, 0.0, 0.0)


def ping(file: str, source: str) -> Network:
    """Four probes a second apart, the third one without an answer."""
    return Network(
        file, source, (0.0, 1.0, 3.0), (12.0, 30.0, 14.0), loss=NO_LOSS, outages_s=((2.0, 3.0),)
    )


def windows(file: str) -> Network:
    """The same probes on Windows, where a lost one takes 4 s."""
    return Network(
        file,
        "windows-ping",
        (0.0, 1.0, 6.0),
        (12.0, 30.0, 14.0),
        loss=NO_LOSS,
        outages_s=((2.0, 6.0),),
        end_s=7.0,
    )


def iperf3(file: str, source: str) -> Network:
    return Network(file, source, (0.0, 1.0, 2.0), down=(8.0, 12.0, 10.0), end_s=3.0)


def dish(file: str) -> Network:
    return Network(
        file,
        "starlink",
        (0.0, 1.0, 3.0),
        (40.0, 44.0, 42.0),
        loss=(0.0, 0.25, 0.0),
        outages_s=((2.0, 3.0),),
    )


CQI = "down=ue[0].cellularNic.nrMac.averageCqiDl:cqi@20MHz"
CQI_7_MBPS, CQI_15_MBPS = 20 * 1.4766, 20 * 5.5547
# 20 dB: log2(1 + 100 / 5.529) is 4.25, between CQI 12 and 13. 5 dB: 0.65, between CQI 4 and 5.
DB_20_MBPS, DB_5_MBPS = 10 * 3.9023, 10 * 0.6016

NETWORKS = [
    ping("ping.txt", "ping"),
    ping("fping.txt", "fping"),
    ping("fping.json", "fping-json"),
    ping("irtt.json", "irtt"),
    windows("windows-english.txt"),
    windows("windows-german.txt"),
    windows("windows-french.txt"),
    iperf3("iperf3.json", "iperf3-json"),
    iperf3("iperf3.txt", "iperf3-text"),
    dish("dish-status.csv"),
    dish("dish-bulk.csv"),
    Network(
        "ucc.csv",
        "ucc",
        (0.0, 1.0, 3.0),
        rtt_ms=(31.0, 31.0, 35.0),
        down=(26.0, 26.0, 40.0),
        outages_s=((1.0, 3.0),),
        end_s=4.5,
    ),
    Network(
        "lumos5g.csv",
        "lumos5g",
        (0.0, 1.0, 2.0, 3.0),
        down=(400.0, 500.0, 500.0, 600.0),
        outages_s=((2.0, 3.0),),
    ),
    Network(
        "pensieve",
        "pensieve",
        (0.0, 0.5, 1.5, 2.0),
        down=(2.0, 3.0, 3.0, 4.0),
        outages_s=((1.5, 2.0),),
        end_s=3.0,
        format="pensieve",
    ),
    Network("wireshark.csv", "wireshark", (0.0, 1.0, 3.0), rtt_ms=(12.0, 30.0, 14.0), end_s=4.5),
    Network("tshark.tsv", "table", (0.0, 1.0, 3.0), rtt_ms=(12.0, 30.0, 14.0), end_s=4.5),
    Network(
        "lte.down",
        "mahimahi",
        (0.0, 0.1, 2.1),
        down=(0.24, 0.36, 0.2),
        outages_s=((0.2, 2.1),),
        end_s=2.16,
    ),
    Network(
        "plain.csv",
        "plain",
        (0.0, 1.0, 2.0),
        rtt_ms=(12.0, 30.0, 14.0),
        loss=NO_LOSS,
        up=(8.0, 8.0, 10.0),
        down=(40.0, 40.0, 60.0),
        outages_s=((1.0, 2.0),),
        end_s=3.0,
    ),
    Network("rtt.csv", "rtt-csv", (0.0, 1.0, 2.0), rtt_ms=(12.0, 30.0, 14.0), end_s=3.0),
    Network("cicv5g.txt", "cicv5g", (0.0, 0.05, 0.1), rtt_ms=(12.0, 30.0, 14.0), end_s=0.15),
    Network(
        "simu5g.vec",
        "omnet-vec",
        (0.0, 0.5, 1.5, 2.5),
        down=(CQI_7_MBPS, CQI_15_MBPS, CQI_15_MBPS, CQI_7_MBPS),
        outages_s=((1.5, 2.5),),
        end_s=3.5,
        columns=CQI,
    ),
    Network(
        "simu5g.vec",
        "omnet-vec",
        (0.0, 1.5, 2.5),
        down=(DB_20_MBPS, DB_20_MBPS, DB_5_MBPS),
        outages_s=((1.5, 2.5),),
        end_s=3.75,
        columns="down=measuredSinrDl:vector:dB@10MHz",
    ),
    Network(
        "simu5g.csv",
        "omnet-csv",
        (0.0, 0.5, 1.5, 2.5),
        down=(CQI_7_MBPS, CQI_15_MBPS, CQI_15_MBPS, CQI_7_MBPS),
        outages_s=((1.5, 2.5),),
        end_s=3.5,
        columns="down=averageCqiDl:cqi@20MHz",
    ),
    Network(
        "sionna.csv",
        "table",
        (0.0, 0.5, 1.0),
        down=(DB_20_MBPS, DB_20_MBPS, DB_5_MBPS),
        outages_s=((0.5, 1.0),),
        end_s=1.5,
        columns="time=time:s,down=sinr_db:dB@10MHz",
    ),
    Network(
        "drive.tsv",
        "table",
        (0.0, 1.0, 9.0),
        rtt_ms=(12.0, 12.0, 14.0),
        loss=(0.0, 0.5, 0.0),
        down=(8.0, 12.0, 10.0),
        end_s=13.5,
        columns="time=Timestamp:date,rtt=delay avg:ms,loss=lost:%,down=4:kbit/s",
    ),
]


def read(one: Network, path: Path) -> NetworkTrace:
    columns = Columns.of(one.columns) if one.columns else None
    return read_trace(path, columns, one.format)


def name_network(one: Network) -> str:
    return f"{one.file} {one.columns}".strip()


@pytest.mark.parametrize("one", NETWORKS, ids=name_network)
def test_a_recording_has_its_numbers(one: Network) -> None:
    trace = read(one, RECORDINGS / one.file)
    assert trace.source == one.source
    assert trace.time_s == pytest.approx(one.time_s, abs=1e-6)
    assert trace.duration_s == pytest.approx(one.end_s, abs=1e-6)
    flat = [edge_s for outage in trace.outages_s for edge_s in outage]
    assert flat == pytest.approx([s for outage in one.outages_s for s in outage], abs=1e-6)
    for found, wanted, scale in (
        (trace.rtt_s, one.rtt_ms, 1e3),
        (trace.up_bits_per_s, one.up, 1e-6),
        (trace.down_bits_per_s, one.down, 1e-6),
        (trace.loss, one.loss, 1.0),
    ):
        assert (found is None) == (wanted is None)
        if found is not None and wanted is not None:
            assert [value * scale for value in found] == pytest.approx(wanted)


@pytest.mark.parametrize("one", NETWORKS, ids=name_network)
def test_a_packed_recording_is_the_same(one: Network, tmp_path: Path) -> None:
    packed = tmp_path / one.file
    packed.write_bytes(gzip.compress((RECORDINGS / one.file).read_bytes()))
    assert read(one, packed) == read(one, RECORDINGS / one.file)


def test_every_format_has_a_recording() -> None:
    assert {one.source for one in NETWORKS} == {*FORMATS}


@pytest.mark.parametrize("one", NETWORKS, ids=name_network)
def test_a_recording_is_played(one: Network) -> None:
    """The run's first note on the trace, if there is one, names the file."""
    link = {"rtt_ms": 0.0 if one.rtt_ms else 40.0, "up_mbps": 50.0, "down_mbps": 50.0}
    result = sim.run(
        "replay",
        seeds=1,
        arms=["target-only"],
        processes=1,
        duration_s=6.0,
        links={
            "network": {
                **link,
                "trace": str(RECORDINGS / one.file),
                "trace_columns": one.columns,
                "trace_format": one.format,
            }
        },
    )
    assert result.summary.arms[0].all.tokens > 0
    assert all(one.file in note for note in result.summary.notes if "links.network.trace" in note)


# --- broken networks ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A recording with one text replaced, and the words of the error."""

    file: str
    old: str
    new: str
    said: str
    columns: str = ""
    format: str = "auto"

    def write(self, folder: Path) -> Path:
        text = (RECORDINGS / self.file).read_bytes().decode()
        assert self.old in text
        path = folder / self.file
        path.write_bytes(text.replace(self.old, self.new, 1).encode())
        return path

    @property
    def named(self) -> Columns | None:
        return Columns.of(self.columns) if self.columns else None


_BROKEN_TEXT = (Path(__file__).parent / "broken_recordings.yaml").read_text(encoding="utf-8")
BROKEN_FILES = {
    kind: [Broken(*one) for one in rows] for kind, rows in yaml.safe_load(_BROKEN_TEXT).items()
}
BROKEN = BROKEN_FILES["networks"]


@pytest.mark.parametrize("one", BROKEN, ids=lambda one: f"{one.file}: {one.said[:40]}")
def test_an_error_names_the_line_and_the_column(one: Broken, tmp_path: Path) -> None:
    path = one.write(tmp_path)
    with pytest.raises(TraceError) as caught:
        read_trace(path, one.named, one.format)
    assert one.said in str(caught.value)


def test_a_line_that_is_not_from_ping_is_named(tmp_path: Path) -> None:
    path = Broken("ping.txt", "time=30.0", "time=9e9", "").write(tmp_path)
    assert any("not from ping and were left out: 3" in one for one in read_trace(path).remarks)


ANY = [(one.file, one.columns, one.format) for one in NETWORKS]


@pytest.mark.parametrize(("file", "columns", "format"), ANY)
@pytest.mark.parametrize("content", [b"", b"\n\n", b"\0\0\xff\xfe\x80\n" * 9, b"{", b"<gpx>"])
def test_no_file_of_nothing_is_read(
    file: str, columns: str, format: str, content: bytes, tmp_path: Path
) -> None:
    """Empty, blank, binary and cut files are refused by name."""
    path = tmp_path / file
    path.write_bytes(content)
    with pytest.raises(TraceError, match=file.replace(".", r"\.")):
        read_trace(path, Columns.of(columns) if columns else None, format)


@given(st.data())
def test_cut_and_mixed_recordings_raise_nothing_but_trace_errors(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A recording that is cut anywhere, or into which bytes are mixed, is read or refused."""
    one = data.draw(st.sampled_from(NETWORKS))
    content = (RECORDINGS / one.file).read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    mixed = data.draw(st.one_of(st.just(b""), st.binary(max_size=8), st.just(b"\n-1,nan,1e999\n")))
    rest = content[cut:] if data.draw(st.booleans()) else b""
    path = tmp_path_factory.mktemp("mixed") / one.file
    path.write_bytes(content[:cut] + mixed + rest)
    with contextlib.suppress(TraceError):
        assert read(one, path).duration_s > 0.0


# --- the language of columns --------------------------------------------------------------------


TIME, OUTPUT = ("time", "t", "s"), ("output", "o", "tokens")


@pytest.mark.parametrize(
    ("text", "uses"),
    [
        ("time=t:s,rtt=r:ms", [("time", "t", "s"), ("rtt", "r", "ms")]),
        ("time_s=t,rtt_ms=r", [("time", "t", "s"), ("rtt", "r", "ms")]),
        ("time=1:ns,up=2:MB/s", [("time", "1", "ns"), ("up", "2", "MB/s")]),
        ("time=t,rtt=r:us", [("time", "t", "date"), ("rtt", "r", "us")]),
        (
            "time=Date, local,rtt=RTT: mean:ms",
            [("time", "Date, local", "date"), ("rtt", "RTT: mean", "ms")],
        ),
        ("time=t:s,down=a:ms:Mbit/s", [("time", "t", "s"), ("down", "a:ms", "Mbit/s")]),
        ("time=t:s,down=c:cqi@20MHz", [("time", "t", "s"), ("down", "c", "cqi@20MHz")]),
        ("time=t:s,prompt=p,output=o:tokens", [TIME, ("prompt", "p", "tokens"), OUTPUT]),
        ("time=t:s,lat=a,lon=b", [("time", "t", "s"), ("lat", "a", "deg"), ("lon", "b", "deg")]),
    ],
)  # fmt: skip
def test_columns_are_named_with_units(text: str, uses: list[tuple[str, str, str]]) -> None:
    assert [(use.what, use.column, use.unit) for use in Columns.of(text).uses] == uses


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time=t:s,rtt=r", "rtt needs a unit: rtt=r:UNIT with one of s, ms, us"),
        ("time=t:s,rtt=r:mile", "rtt needs a unit"),
        ("time=t:s,up=u:cqi@20", "one of bit/s, kbit/s, .*cqi@20MHz"),
        ("time=t:s,rtt=r:ms,prompt=p", "rtt is no quantity of a workload"),
        ("time=t:s,device=d,x=x", "must name x and y, or lat and lon"),
        ("time=t:s,x=x,y=y,lat=a,lon=b", "must name x and y, or lat and lon"),
        ("time=t:s,time_ms=u,rtt=r:ms", "names 2 columns for time"),
        ("time=t:s,rtt=", "must be QUANTITY=COLUMN:UNIT"),
    ],
)
def test_columns_without_a_meaning_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Columns.of(text)


def test_columns_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="prompt is no quantity of a network"):
        Columns.of("time=t:s,prompt=p", TableKind.NETWORK)


@pytest.mark.parametrize(
    ("unit", "bits_per_s"),
    [
        ("bit/s", 3.0),
        ("kbit/s", 3e3),
        ("Mbit/s", 3e6),
        ("Gbps", 3e9),
        ("B/s", 24.0),
        ("MB/s", 24e6),
    ],
)
def test_rates_have_their_units(unit: str, bits_per_s: float, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("t,u\n0,3\n1,3\n")
    trace = read_trace(path, Columns.of(f"time=t:s,up=u:{unit}"))
    assert require(trace.up_bits_per_s) == pytest.approx((bits_per_s, bits_per_s))


def test_gaps_and_missing_cells_are_named_by_line(tmp_path: Path) -> None:
    """The rows are a second apart, with a pause of 60 s before line 5, a missing cell in line 3,
    and a row without any in line 6."""
    path = tmp_path / "t.csv"
    path.write_text("t,r,d\n0,10,1\n1,-,1\n2,12,1\n62,13,1\n63,,\n64,14,2\n")
    trace = read_trace(path, Columns.of("time=t:s,rtt=r:ms,down=d:Mbit/s"))
    assert trace.rtt_s == pytest.approx((0.01, 0.01, 0.012, 0.013, 0.014))
    assert trace.outages_s == ()
    remarks = " | ".join(trace.remarks)
    assert "column 'r' without a number have the value before: 1, the first in line 3" in remarks
    assert "gaps, in which the row before holds: 1, the first before line 5" in remarks
    assert "rows without a measurement were left out: 1" in remarks
    shown = run_trace(path, "--columns", "time=t:s,rtt=r:ms,down=d:Mbit/s")
    assert "the longest (60 s) before line 5" in " ".join(shown.output.split())


def test_rows_of_a_step_are_merged(tmp_path: Path) -> None:
    """A step has the upper median of its delays, and the mean of its losses and rates."""
    path = tmp_path / "t.csv"
    rows = "0.0,10,0,4\n0.2,30,1,6\n0.4,20,0.5,8\n1.1,50,0,2\n1.9,40,0,2\n"
    path.write_text("t,r,l,d\n" + rows)
    columns = Columns.of("time=t:s,rtt=r:ms,loss=l:share,down=d:Mbit/s")
    trace = read_trace(path, columns, step_s=1.0)
    assert trace.time_s == pytest.approx((0.0, 1.1))
    assert trace.rtt_s == pytest.approx((0.02, 0.05))
    assert trace.loss == pytest.approx((0.5, 0.0))
    assert trace.down_bits_per_s == pytest.approx((6e6, 2e6))
    with pytest.raises(TraceError, match="--step is for tables with --columns"):
        read_trace(RECORDINGS / "ping.txt", step_s=1.0)


def test_too_many_rows_are_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec_sim.links.column_tables.MAX_ROWS", 3)
    path = tmp_path / "t.csv"
    path.write_text("t,r\n" + "".join(f"{second / 10},1\n" for second in range(40)))
    columns = Columns.of("time=t:s,rtt=r:ms")
    with pytest.raises(TraceError, match=r"more than 3 rows, .* --step 0\.1"):
        read_trace(path, columns)
    assert len(read_trace(path, columns, step_s=2.0).time_s) == 2


# --- signal qualities ---------------------------------------------------------------------------


def test_the_map_of_signal_qualities_is_that_of_the_standard() -> None:
    """Oracle: code rate / 1024 times bits of the modulation, TS 38.214 table 5.2.2.1-2; the SINR at
    which ns-3's formula reaches an efficiency, solved by hand for it."""
    bits = [2] * 6 + [4] * 3 + [6] * 6
    rates = (78, 120, 193, 308, 449, 602, 378, 490, 616, 466, 567, 666, 772, 873, 948)
    for cqi, (bits_of, rate) in enumerate(zip(bits, rates, strict=True), start=1):
        assert cqi_efficiency(cqi) == pytest.approx(bits_of * rate / 1024, abs=1e-4)
        needed = (2 ** EFFICIENCIES[cqi] - 1) * -math.log(5 * 5e-5) / 1.5
        sinr_db = 10 * math.log10(needed)
        assert sinr_efficiency(sinr_db + 1e-6) == EFFICIENCIES[cqi]
        assert sinr_efficiency(sinr_db - 1e-6) == EFFICIENCIES[cqi - 1]
    assert cqi_efficiency(7.9) == EFFICIENCIES[7]
    assert parse_quality_unit("cqi@20") is None


# --- workloads ----------------------------------------------------------------------------------

REQUESTS = (
    RecordedArrival(0.0, 374, 44),
    RecordedArrival(0.5, 396, 109),
    RecordedArrival(3.0, 91, 16),
)
REQUEST_COLUMNS = "time=when:ms,prompt=n_in,output=n_out"
WORKLOADS = [("azure.csv", ""), ("burstgpt.csv", ""), ("requests.csv", REQUEST_COLUMNS)]


@pytest.mark.parametrize(("file", "columns"), WORKLOADS)
def test_a_workload_has_its_requests(file: str, columns: str, tmp_path: Path) -> None:
    """A request that failed where it was recorded is left out."""
    named = Columns.of(columns) if columns else None
    found = list(read_arrivals(RECORDINGS / file, named))
    assert [one.at_s for one in found] == pytest.approx([one.at_s for one in REQUESTS])
    lengths = [(one.prompt_tokens, one.output_tokens) for one in found]
    assert lengths == [(one.prompt_tokens, one.output_tokens) for one in REQUESTS]
    plain = tmp_path / "plain.csv"
    plain.write_text(write_arrivals(found))
    assert list(read_arrivals(plain)) == found
    summary = summarise_arrivals(found)
    assert (summary.requests, summary.span_s, summary.longest_pause_s) == (3, 3.0, 2.5)
    assert summary.rate_per_s == pytest.approx(2 / 3)


@pytest.mark.parametrize(("file", "columns"), WORKLOADS)
def test_a_workload_is_played(file: str, columns: str) -> None:
    result = sim.run(
        "single-device",
        seeds=1,
        arms=["target-only"],
        processes=1,
        duration_s=20.0,
        devices__laptop__workload__requests=0,
        arrivals={"kind": "recorded", "file": str(RECORDINGS / file), "columns": columns},
    )
    assert [one.row.tokens for one in result.requests] == [44, 109, 16]


def test_a_workload_may_begin_later() -> None:
    late = list(read_arrivals(RECORDINGS / "azure.csv", from_s=0.25))
    assert [one.at_s for one in late] == pytest.approx([0.25, 2.75])
    with pytest.raises(TraceError, match=r"no arrivals from 9 s on: its last one is at 3 s"):
        list(read_arrivals(RECORDINGS / "azure.csv", from_s=9.0))


def test_a_workload_is_read_as_far_as_it_is_played(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text((RECORDINGS / "azure.csv").read_text() + "broken\n")
    arrivals = read_arrivals(path)
    assert [next(arrivals).prompt_tokens for _ in range(3)] == [374, 396, 91]
    with pytest.raises(TraceError, match=":6: column 'TIMESTAMP'"):
        next(arrivals)


BROKEN_WORKLOADS = BROKEN_FILES["workloads"]


@pytest.mark.parametrize("one", BROKEN_WORKLOADS, ids=lambda one: f"{one.file}: {one.said[:40]}")
def test_an_error_of_a_workload_names_the_line(one: Broken, tmp_path: Path) -> None:
    path = one.write(tmp_path)
    with pytest.raises(TraceError) as caught:
        list(read_arrivals(path, one.named))
    assert one.said in str(caught.value)


# --- movement -----------------------------------------------------------------------------------

EAST_M = math.radians(1e-4) * 6_371_008.8
TRACKS = {
    "fcd.xml": {
        "car.0": [(0.0, 100.0, 50.0), (1.0, 110.0, 50.0), (3.0, 130.0, 50.0)],
        "walker": [(1.0, 130.0, 60.0), (3.0, 130.0, 62.0)],
    },
    "walk.gpx": {"to work": [(0.0, 0.0, 0.0), (10.0, EAST_M, 0.0), (20.5, EAST_M, EAST_M)]},
    "positions.csv": {
        "a": [(0.0, 0.0, 0.0), (2.0, 10.0, 0.0), (4.0, 10.0, 20.0)],
        "b": [(0.0, 5.0, 5.0)],
    },
    "positions-geo.csv": {"phone": [(0.0, 0.0, 0.0), (10.0, EAST_M, 0.0)]},
}
GEO = "time=t:date,device=id,lat=latitude,lon=longitude"


def columns_of(file: str) -> Columns | None:
    return Columns.of(GEO) if file == "positions-geo.csv" else None


@pytest.mark.parametrize("file", TRACKS)
def test_movement_has_its_tracks(file: str, tmp_path: Path) -> None:
    mobility = read_mobility(RECORDINGS / file, columns_of(file))
    plain = tmp_path / "plain.csv"
    plain.write_text(write_positions(mobility))
    for found in (mobility, read_mobility(plain)):
        assert [track.name for track in found.tracks] == list(TRACKS[file])
        for track, wanted in zip(found.tracks, TRACKS[file].values(), strict=True):
            rows = np.array([track.time_s, track.x_m, track.y_m]).T
            assert rows == pytest.approx(np.array(wanted), abs=1e-6)


def test_devices_move_evenly_between_positions() -> None:
    """The rectangle around both tracks is 30 x 12 m, in the middle of a square of 50 m."""
    mobility = read_mobility(RECORDINGS / "fcd.xml")
    walk = RecordedWalk(mobility, 2, 50.0)
    assert walk.positions_m == pytest.approx(np.array([[10.0, 19.0], [40.0, 29.0]]))
    assert walk.advance(2.0) == pytest.approx([20.0, 1.0])
    assert walk.positions_m == pytest.approx(np.array([[30.0, 19.0], [40.0, 30.0]]))
    assert walk.advance(9.0) == pytest.approx([10.0, 1.0])
    assert walk.advance(9.0) == pytest.approx([0.0, 0.0])
    summary = summarise_mobility(mobility)
    assert (summary.tracks, summary.positions, summary.span_s) == (2, 5, 3.0)
    assert (summary.width_m, summary.height_m) == (30.0, 12.0)
    with pytest.raises(ValueError, match="has 2 tracks, but the scenario has 3 devices"):
        RecordedWalk(mobility, 3, 50.0)
    with pytest.raises(
        ValueError, match=r"area_m is 20, but .* 30 m wide: set radio\.area_m to at"
    ):
        RecordedWalk(mobility, 2, 20.0)


@pytest.mark.parametrize("file", TRACKS)
def test_movement_is_played(file: str) -> None:
    """The devices of a world stand where the tracks are: another track gives other radio."""
    columns = GEO if file == "positions-geo.csv" else ""

    def play(mobility: str) -> list[object]:
        result = sim.run(
            "mec",
            seeds=1,
            arms=["target-only"],
            processes=1,
            duration_s=8.0,
            devices__phone__count=len(TRACKS[file]),
            radio__mobility=mobility,
            radio__mobility_columns=columns if mobility else "",
        )
        assert result.summary.arms[0].all.tokens > 0
        return [(one.row.up_way_s, one.row.down_way_s) for one in result.requests]

    recorded = play(str(RECORDINGS / file))
    assert recorded == play(str(RECORDINGS / file))
    assert recorded != play("")


BROKEN_MOVEMENT = BROKEN_FILES["movement"]


@pytest.mark.parametrize("one", BROKEN_MOVEMENT, ids=lambda one: f"{one.file}: {one.said[:40]}")
def test_an_error_of_movement_names_the_line(one: Broken, tmp_path: Path) -> None:
    path = one.write(tmp_path)
    with pytest.raises(TraceError) as caught:
        read_mobility(path, columns_of(one.file))
    assert one.said in str(caught.value)


def test_routes_and_waypoints_are_no_tracks(tmp_path: Path) -> None:
    path = tmp_path / "route.gpx"
    path.write_text((RECORDINGS / "walk.gpx").read_text().replace("trkpt", "rtept"))
    with pytest.raises(TraceError, match=r"route\.gpx: holds no measurement"):
        read_mobility(path)


def test_entities_are_not_expanded(tmp_path: Path) -> None:
    """A file of a few hundred bytes that would expand to gigabytes is refused at its head."""
    levels = "".join(
        f'<!ENTITY x{n} "{f"&x{n - 1};" * 10}">\n' if n else '<!ENTITY x0 "lol">\n'
        for n in range(10)
    )
    path = tmp_path / "laughs.gpx"
    path.write_text(f"<!DOCTYPE gpx [\n{levels}]>\n<gpx><trk><name>&x9;</name></trk></gpx>\n")
    with pytest.raises(TraceError, match=r"laughs\.gpx:1: expected no document type"):
        read_mobility(path)


def test_degrees_of_sumo_are_read_if_they_are_named(tmp_path: Path) -> None:
    text = (RECORDINGS / "fcd.xml").read_text()
    for old, new in (("100.00", "10.0000"), ("110.00", "10.0001"), ("130.00", "10.0003")):
        text = text.replace(f'x="{old}"', f'x="{new}"')
    for old in ("50.00", "60.00", "62.00"):
        text = text.replace(f'y="{old}"', 'y="0.0"')
    path = tmp_path / "geo.xml"
    path.write_text(text)
    assert any("sumo-fcd-geo" in one for one in read_mobility(path).warnings)
    found = read_mobility(path, format="sumo-fcd-geo")
    assert found.warnings == ()
    assert list(found.tracks[0].x_m) == pytest.approx([0.0, EAST_M, 3 * EAST_M])


def test_every_format_is_known_by_one_name() -> None:
    names = [*FORMATS, *ARRIVAL_FORMATS, *MOBILITY_FORMATS]
    assert len(set(names)) == len(names)


# --- what `edgespec-sim trace` prints -----------------------------------------------------------


def run_trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


SHOWN: list[tuple[str, tuple[str, ...], str]] = [
    ("azure.csv", (), "1 requests without input or output failed"),
    ("requests.csv", ("--columns", REQUEST_COLUMNS), "requests/s"),
    ("fcd.xml", (), "tracks"),
    ("walk.gpx", (), "speed m/s"),
    ("positions-geo.csv", ("--columns", GEO), "positions"),
    ("pensieve", ("--format", "pensieve"), "down Mbit/s"),
    ("simu5g.vec", ("--columns", CQI), "down Mbit/s"),
]


@pytest.mark.parametrize(("file", "options", "said"), SHOWN)
def test_a_recording_is_shown_and_written(
    file: str, options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    """The written table is read again without any option."""
    result = run_trace(RECORDINGS / file, *options, "--out", tmp_path / "plain.csv")
    assert result.exit_code == 0, result.output
    assert said in " ".join(result.output.split())
    again = run_trace(tmp_path / "plain.csv", "--out", tmp_path / "again.csv")
    assert again.exit_code == 0, again.output
    first, second = (
        [line for line in (tmp_path / name).read_text().splitlines() if line[:1] != "#"]
        for name in ("plain.csv", "again.csv")
    )
    assert first == second


def test_an_unknown_format_is_wrong_usage() -> None:
    result = run_trace(RECORDINGS / "ucc.csv", "--format", "ucc5g")
    assert result.exit_code == 2
    assert "but must be one of auto, plain, ping" in " ".join(result.output.split())


def test_a_bundle_holds_the_movement(tmp_path: Path) -> None:
    shutil.copy(RECORDINGS / "fcd.xml", tmp_path / "fcd.xml")
    result = sim.run(
        "mec",
        seeds=1,
        arms=["target-only"],
        processes=1,
        duration_s=5.0,
        devices__phone__count=2,
        radio__mobility=str(tmp_path / "fcd.xml"),
    )
    sim.write_bundle(tmp_path / "b.zip", result)
    (tmp_path / "fcd.xml").unlink()
    assert sim.rerun(tmp_path / "b.zip", processes=1).is_same


def test_a_plain_table_of_capacities_is_written(tmp_path: Path) -> None:
    trace = read_trace(RECORDINGS / "lumos5g.csv")
    path = tmp_path / "plain.csv"
    path.write_text(write_plain(trace))
    assert read_trace(path).outages_s == trace.outages_s
