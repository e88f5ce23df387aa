"""Traces as other tools write them: dialects of ping, fping, irtt, iperf3, dishes, tables.

Oracle: one series of probes, written in each dialect as its tool prints it, and read back as the
same times, delays and outages; arithmetic by hand for capacities. The forms are those of the tools'
documentation and source.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from edgespec.bench.arms import Arm
from edgespec_sim.commands.main import app
from edgespec_sim.commands.play import show
from edgespec_sim.links.column_tables import write_plain
from edgespec_sim.links.columns import Columns
from edgespec_sim.links.formats import read_trace
from edgespec_sim.links.network_trace import NetworkTrace, TraceError, rtt_line
from edgespec_sim.scenario import sections as sc
from edgespec_sim.world.network import LinkInstances
from edgespec_sim.world.run import Job, make_jobs, play, summarise
from edgespec_sim.world.run_notes import trace_notes
from tests.present import require

SERIES = (12.0, 30.4, 11.9, None, None, None, 45.7, 13.0, None, 12.2)
"""Round trips in ms of ten probes at intervals of a second; None means no answer."""
TIMES_S = (0.0, 1.0, 2.0, 6.0, 7.0, 9.0)
OUTAGES_S = ((3.0, 6.0), (8.0, 9.0))
"""Outages: with a probe each second, a lost one is a second without an answer."""
Line = Callable[[int, float], str]


def read(folder: Path, text: str | bytes, name: str = "log.txt", columns: str = "") -> NetworkTrace:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_trace(path, Columns.of(columns) if columns else None)


def write_log(first: int, head: str, line: Line, lost: Callable[[int], str], tail: str = "") -> str:
    lines = [
        lost(first + index) if ms is None else line(first + index, ms)
        for index, ms in enumerate(SERIES)
    ]
    return head + "\n" + "\n".join(one for one in lines if one) + "\n" + tail


def stamp(number: int, ms: float) -> str:
    return f"{1700000000.0 + number + ms / 1e3:.6f}"


DIALECTS = {
    "linux": write_log(
        1,
        "PING h (192.0.2.1) 56(84) bytes of data.",
        lambda n, ms: f"64 bytes from h (192.0.2.1): icmp_seq={n} ttl=57 time={ms} ms",
        lambda n: "",
        "\n--- h ping statistics ---\n10 packets transmitted, 6 received, 40% packet loss, time"
        " 9000ms\nrtt min/avg/max/mdev = 11.9/20.8/45.7/12.7 ms\n",
    ),
    "linux -D -O": write_log(
        1,
        "PING h (192.0.2.1) 56(84) bytes of data.",
        lambda n, ms: f"[{stamp(n, ms)}] 64 bytes from 192.0.2.1: icmp_seq={n} ttl=57 time={ms} ms",
        lambda n: f"[{stamp(n, 999)}] no answer yet for icmp_seq={n}",
    ),
    "decimal commas": write_log(
        1,
        "PING h (192.0.2.1) 56(84) bytes of data.",
        lambda n, ms: f"64 bytes from 192.0.2.1: icmp_seq={n} ttl=57 time={ms} ms".replace(
            f"{ms}", f"{ms}".replace(".", ",")
        ),
        lambda n: "",
    ),
    "a clock that was set back": write_log(
        1,
        "PING h (192.0.2.1) 56(84) bytes of data.\n"
        "ping: Warning: time of day goes back (-12us), taking countermeasures",
        lambda n, ms: (
            f"64 bytes from 192.0.2.1: icmp_seq={n} ttl=57 time={ms} ms"
            "\nWarning: time of day goes back (-9us), taking countermeasures"
        ),
        lambda n: f"From 192.0.2.9 icmp_seq={n} Destination Host Unreachable",
    ),
    "busybox": write_log(
        0,
        "PING h (192.0.2.1): 56 data bytes",
        lambda n, ms: f"64 bytes from 192.0.2.1: seq={n} ttl=57 time={ms:.3f} ms",
        lambda n: "",
        "\n--- h ping statistics ---\n10 packets transmitted, 6 packets received, 40% packet loss\n"
        "round-trip min/avg/max = 11.900/20.866/45.700 ms\n",
    ),
    "macos": write_log(
        0,
        "PING h (192.0.2.1): 56 data bytes",
        lambda n, ms: f"64 bytes from 192.0.2.1: icmp_seq={n} ttl=57 time={ms:.3f} ms",
        lambda n: f"Request timeout for icmp_seq {n}",
    ),
    "macos --apple-time": write_log(
        0,
        "PING h (192.0.2.1): 56 data bytes",
        lambda n, ms: (
            f"10:00:{n + ms / 1e3:09.6f} 64 bytes from 192.0.2.1: icmp_seq={n} ttl=57"
            f" time={ms:.3f} ms"
        ),
        lambda n: f"Request timeout for icmp_seq {n}",
    ),
    "ping6": write_log(
        0,
        "PING6(56=40+8+8 bytes) 2001:db8::2 --> 2001:db8::1",
        lambda n, ms: f"16 bytes from 2001:db8::1, icmp_seq={n} hlim=57 time={ms} ms",
        lambda n: f"Request timeout for icmp_seq={n}",
    ),
    "a pipe to ts": write_log(
        1,
        "Nov 28 18:00:00 PING h (192.0.2.1) 56(84) bytes of data.",
        lambda n, ms: (
            f"Nov 28 18:00:{n:02d} 64 bytes from 192.0.2.1: icmp_seq={n} ttl=57 time={ms} ms"
        ),
        lambda n: "",
    ),
    "fping": write_log(
        0,
        "",
        lambda n, ms: f"192.0.2.1 : [{n}], 64 bytes, {ms} ms (20.1 avg, 0% loss)",
        lambda n: f"192.0.2.1 : [{n}], timed out (20.1 avg, 40% loss)",
        "\n192.0.2.1 : xmt/rcv/%loss = 10/6/40%, min/avg/max = 11.9/20.8/45.7\n",
    ).lstrip(),
    "old fping -D": write_log(
        0,
        "",
        lambda n, ms: f"[{stamp(n, ms)}] h   : [{n}], 84 bytes, {ms} ms (20.1 avg, 0% loss)",
        lambda n: "",
    ).lstrip(),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_of_ping_gives_the_series(name: str, tmp_path: Path) -> None:
    trace = read(tmp_path, DIALECTS[name])
    assert trace.time_s == pytest.approx(TIMES_S, abs=0.05)  # ts writes whole seconds
    assert [1e3 * s for s in require(trace.rtt_s)] == pytest.approx(
        [ms for ms in SERIES if ms is not None]
    )
    assert [one for outage in trace.outages_s for one in outage] == pytest.approx(
        [one for outage in OUTAGES_S for one in outage], abs=0.05
    )
    assert trace.duration_s == pytest.approx(10.0, abs=0.05)
    assert not trace.warnings


@pytest.mark.parametrize("shift", [0, 5000])
@pytest.mark.parametrize("name", DIALECTS)
def test_a_log_that_begins_in_the_middle_begins_there(
    name: str, shift: int, tmp_path: Path
) -> None:
    """The log lacks its first lines (`tail`), and its numbers are in the thousands."""
    lines = DIALECTS[name].splitlines()
    cut = next(n for n, line in enumerate(lines) if "30.4" in line or "30,4" in line)

    def shifted(found: re.Match[str]) -> str:
        return f"{found[1]}{int(found[2]) + shift}"

    text = "\n".join(
        re.sub(r"(seq=|icmp_seq |: \[)(\d+)", shifted, line)
        for line in lines[cut:]
        if "transmitted" not in line and "xmt" not in line
    )
    trace = read(tmp_path, text + "\n")
    assert trace.duration_s == pytest.approx(9.0, abs=0.05)
    assert sum(b - a for a, b in trace.outages_s) == pytest.approx(4.0, abs=0.05)


def test_lost_probes_before_the_first_answer_and_behind_the_last(tmp_path: Path) -> None:
    """By hand: with the dialect's head the first number is known, and lines that name lost probes
    count after the last answer."""
    head = "PING h (192.0.2.1): 56 data bytes\n"
    reply = "64 bytes from 192.0.2.1: seq={} ttl=57 time=12.0 ms\n"
    trace = read(tmp_path, head + reply.format(2) + reply.format(3))
    assert (trace.outages_s, trace.duration_s) == (((0.0, 2.0),), 4.0)
    mac = head + reply.format(0).replace("seq", "icmp_seq") + "Request timeout for icmp_seq 1\n" * 2
    trace = read(tmp_path, mac + "Request timeout for icmp_seq 2\n")
    assert (trace.outages_s, trace.duration_s) == (((1.0, 3.0),), 3.0)


def test_runs_without_heads_are_runs_still(tmp_path: Path) -> None:
    """The log has the answers of two runs, no heads: numbers that repeat begin another run."""
    reply = "64 bytes from 192.0.2.1: icmp_seq={} ttl=57 time={} ms"
    text = "\n".join(reply.format(n, ms) for ms in (10, 20) for n in (1, 2, 3))
    trace = read(tmp_path, text + "\n")
    assert trace.rtt_s == (0.01, 0.01, 0.01, 0.02, 0.02, 0.02)
    assert (trace.duration_s, trace.outages_s) == (6.0, ())


def test_lines_that_are_not_pings_are_counted(tmp_path: Path) -> None:
    text = DIALECTS["linux"].replace("\n--- h", "\nconnection to host closed.\n--- h")
    trace = read(tmp_path, "$ ping h\n" + text)
    assert trace.duration_s == 10.0
    assert any("2 lines are not from ping and were left out: 1, " in one for one in trace.remarks)


def write_windows_log(reply: str, lost: str, head: str, tail: str) -> str:
    lines = [lost if ms is None else reply.format(round(ms)) for ms in SERIES]
    return f"\r\n{head}\r\n" + "\r\n".join(lines) + f"\r\n\r\n{tail}\r\n"


ENGLISH = write_windows_log(
    "Reply from 192.0.2.1: bytes=32 time={}ms TTL=57",
    "Request timed out.",
    "Pinging h [192.0.2.1] with 32 bytes of data:",
    "Ping statistics for 192.0.2.1:\r\n    Packets: Sent = 10, Received = 6, Lost = 4 (40% loss),"
    "\r\nApproximate round trip times in milli-seconds:\r\n"
    "    Minimum = 12ms, Maximum = 46ms, Average = 21ms\r\nControl-C\r\n^C",
)
GERMAN = write_windows_log(
    "Antwort von 192.0.2.1: Bytes=32 Zeit={}ms TTL=57",
    "Zeitüberschreitung der Anforderung.",
    "Ping wird ausgeführt für h [192.0.2.1] mit 32 Bytes Daten:",
    "Ping-Statistik für 192.0.2.1:\r\n    Pakete: Gesendet = 10, Empfangen = 6, Verloren = 4\r\n"
    "    (40% Verlust),\r\nCa. Zeitangaben in Millisek.:\r\n"
    "    Minimum = 12ms, Maximum = 46ms, Mittelwert = 21ms",
)
VERSION_6 = write_windows_log(
    "Reply from 2001:db8::1: time={}ms",
    "Destination host unreachable.",
    "Pinging h [2001:db8::1] with 32 bytes of data:",
    "Ping statistics for 2001:db8::1:\r\n    Packets: Sent = 10, Received = 6, Lost = 4",
)
WINDOWS: dict[str, str | bytes] = {
    "english": ENGLISH,
    "german": GERMAN,
    "german, old code page": GERMAN.encode("cp850"),
    "powershell redirection": ENGLISH.encode("utf-16"),
    "version 6": VERSION_6,
    "french": ENGLISH.replace("Reply from 192.0.2.1:", "Réponse de 192.0.2.1 :").replace(
        "ms TTL", " ms TTL"
    ),
    "cut at both ends": ENGLISH.split("data:\r\n")[1].split("\r\n\r\n")[0] + "\r\n",
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_prints_a_probe_a_line(name: str, tmp_path: Path) -> None:
    """An answered probe takes a second, a lost one the 4 s of the default timeout."""
    trace = read(tmp_path, WINDOWS[name])
    assert trace.source == "windows-ping"
    assert trace.time_s == (0.0, 1.0, 2.0, 15.0, 16.0, 21.0)
    assert trace.rtt_s == (0.012, 0.030, 0.012, 0.046, 0.013, 0.012)
    assert trace.outages_s == ((3.0, 15.0), (17.0, 21.0))
    assert trace.duration_s == 22.0


def test_less_than_a_millisecond_is_half_of_one(tmp_path: Path) -> None:
    trace = read(tmp_path, ENGLISH.replace("time=30ms", "time<1ms"))
    assert require(trace.rtt_s)[1] == 0.0005
    assert any("1 answers in less than 1 ms" in one for one in trace.remarks)


def test_two_hosts_are_no_trace(tmp_path: Path) -> None:
    text = DIALECTS["fping"].replace("192.0.2.1 : [9]", "192.0.2.7 : [9]")
    with pytest.raises(TraceError, match=r"answers of only one host \(192\.0\.2\.1\)"):
        read(tmp_path, text)


# --- irtt and iperf3 ---------------------------------------------------------------------------


def irtt() -> str:
    trips = [
        {
            "seqno": number,
            "lost": "true_up" if ms is None else "false",
            "timestamps": {
                "client": {
                    "receive": {},
                    "send": {"wall": 10**18 + number * 10**9, "monotonic": 777 + number * 10**9},
                },
                "server": {},
            },
            "delay": {} if ms is None else {"rtt": round(1e6 * ms)},
            "ipdv": {},
        }
        for number, ms in enumerate(SERIES)
    ]
    config = {"params": {"interval": 10**9}}
    return json.dumps({"version": {"irtt": "0.9.1"}, "config": config, "round_trips": trips})


@pytest.mark.parametrize("packed", [False, True])
def test_irtt_gives_the_series(packed: bool, tmp_path: Path) -> None:
    data = irtt().encode()
    trace = read(tmp_path, gzip.compress(data) if packed else data, "rtt.json.gz")
    assert trace.time_s == pytest.approx(TIMES_S)
    assert [one for outage in trace.outages_s for one in outage] == pytest.approx([3, 6, 8, 9])
    assert [1e3 * s for s in require(trace.rtt_s)] == pytest.approx([m for m in SERIES if m])


MBPS = (10.0, 12.0, 0.0, 0.0, 8.0, 9.0)
"""Mbit/s carried in each of six seconds."""


def iperf3(**start: object) -> dict[str, object]:
    def interval(at_s: int, mbps: float) -> dict[str, object]:
        ends = {"start": at_s, "end": at_s + 1, "seconds": 1.0, "bytes": round(mbps * 125e3)}
        one = {**ends, "bits_per_second": mbps * 1e6, "omitted": False, "sender": True}
        return {"streams": [{**one, "rtt": 250_000}], "sum": one}

    warm_up = interval(0, 99.0)
    warm_up["sum"] = {**warm_up["sum"], "omitted": True}  # type: ignore[dict-item]
    intervals = [warm_up, *(interval(at_s, mbps) for at_s, mbps in enumerate(MBPS))]
    return {"start": {"test_start": start}, "intervals": intervals, "end": {}}


def iperf3_text(reverse: bool, prefix: str = "[  5]") -> str:
    head = "Connecting to host h, port 5201\n"
    head += "Reverse mode, remote host h is sending\n" * reverse
    lines = [
        f"{prefix}   {at_s}.00-{at_s + 1}.00   sec  1.2 MBytes  {mbps} Mbits/sec    0    173 KBytes"
        for at_s, mbps in enumerate(MBPS)
    ]
    end = f"{prefix}   0.00-6.00   sec  4.9 MBytes  6.5 Mbits/sec    0             sender\n"
    return head + "[ ID] Interval           Transfer     Bitrate\n" + "\n".join(lines) + "\n" + end


def stream(data: dict[str, object]) -> str:
    events = [{"event": "start", "data": data["start"]}]
    events += [{"event": "interval", "data": one} for one in data["intervals"]]  # type: ignore[attr-defined]
    return "\n".join(map(json.dumps, [*events, {"event": "end", "data": {}}])) + "\n"


IPERF3 = {
    "up": (json.dumps(iperf3(protocol="TCP", reverse=0)), "up"),
    "down": (json.dumps(iperf3(protocol="TCP", reverse=1), indent=1), "down"),
    "stream": (stream(iperf3(protocol="TCP", reverse=1)), "down"),
    "text up": (iperf3_text(False), "up"),
    "text down": (iperf3_text(True), "down"),
    "text, several": (iperf3_text(True) + iperf3_text(True, "[SUM]"), "down"),
    "text, both ways": (iperf3_text(False, "[  7][RX-C]"), "down"),
}


@pytest.mark.parametrize("name", IPERF3)
def test_iperf3_gives_a_capacity_and_no_delay(name: str, tmp_path: Path) -> None:
    text, way = IPERF3[name]
    trace = read(tmp_path, text, "iperf.json")
    ways = {"up": trace.up_bits_per_s, "down": trace.down_bits_per_s}
    other = ways.pop("down" if way == "up" else "up")
    assert (trace.rtt_s, other) == (None, None)
    assert trace.time_s == (0.0, 1.0, 4.0, 5.0)
    assert require(ways[way]) == pytest.approx((10e6, 12e6, 8e6, 9e6))
    assert (trace.outages_s, trace.duration_s) == (((2.0, 4.0),), 6.0)
    assert any("full queue" in one for one in trace.remarks)


def test_a_rate_of_udp_is_warned_of(tmp_path: Path) -> None:
    data = iperf3(protocol="UDP", reverse=0, target_bitrate=12_000_000)
    trace = read(tmp_path, json.dumps(data))
    assert any("a rate of its own (12 Mbit/s)" in one for one in trace.warnings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "expected JSON of irtt .round_trips. or of iperf3"),
        ('{"round_trips": [{}], "config": 3}', "config: expected an object, found 3"),
        (
            '{"round_trips": [{}], "config": {"params": {"interval": 1}}}',
            r"round_trips\[0\]: expected a field 'timestamps'",
        ),
        ('{"round_trips": [], "config": {"params": {"interval": 1}}}', "holds no measurement"),
        ('{"intervals": [], "start": {}}', "holds no measurement"),
        (
            '{"intervals": [{"sum": {"start": 3, "end": 1, "bits_per_second": 1}}], "start": {}}',
            r"intervals\[0\]\.sum: expected an interval from 3 s on",
        ),
        (
            '{"intervals": [{"sum": {"start": 0, "end": 1, "bits_per_second": NaN}}], "start": {}}',
            r"intervals\[0\]\.sum\.bits_per_second: expected a finite number, found nan",
        ),
        ("{" * 100_000, "expected JSON"),
        ('{"a": ' * 100_000, "expected JSON"),
    ],
)
def test_json_that_is_none_of_theirs_is_refused(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=said):
        read(tmp_path, text)


# --- dishes and tables -------------------------------------------------------------------------


def test_a_dish_of_starlink_grpc_tools(tmp_path: Path) -> None:
    """The file has polls of `dish_grpc_text.py status`, and a header that was appended twice;
    values by hand."""
    head = (
        "datetimestamp_utc,id,state,pop_ping_drop_rate,downlink_throughput_bps,pop_ping_latency_ms"
    )
    rows = (
        "2025-01-01T00:00:00,ut1,CONNECTED,0.0,9,30",
        "2025-01-01T00:00:01,ut1,CONNECTED,0.25,9,40",
        "2025-01-01T00:00:02,,DISH_UNREACHABLE",
        "2025-01-01T00:00:03,ut1,SEARCHING,1.0,0,",
        head,
        "2025-01-01T00:00:04,ut1,CONNECTED,0.0,9,50",
    )
    trace = read(tmp_path, "\n".join((head, *rows)) + "\n")
    assert trace.source == "starlink"
    assert (trace.time_s, trace.rtt_s) == ((0.0, 1.0, 4.0), (0.03, 0.04, 0.05))
    assert (trace.loss, trace.outages_s) == ((0.0, 0.25, 0.0), ((2.0, 4.0),))


TABLES = {
    "tshark with header": (
        "frame.time_epoch\ttcp.analysis.ack_rtt\n1700000000.5\t0.012\n1700000001.5\t\n"
        "1700000002.5\t0.014\n",
        "",
    ),
    "tshark without header": (
        "1700000000.5\t0.012\n1700000001.5\t\n1700000002.5\t0.014\n",
        "time_s=1,rtt_s=2",
    ),
    "ns-3": ("3.0 0.012\n4.0 0.012\n5.0 0.014\n", "time_s=1,rtt_s=2"),
    "a 5G log": (
        "Timestamp,RSRP,latency\n2024-05-01 10:00:00,-90,12\n2024-05-01 10:00:01,-91,-\n"
        "2024-05-01 10:00:02,-91,14\n",
        "time=Timestamp,rtt_ms=latency",
    ),
    "semicolons and commas": (
        "t;r\n0,0;0,012\n1,0;nan\n2,0;0,014\n",
        "time_s=t,rtt_s=r",
    ),
    "microseconds": ("# note\nms,us\n5000,12000\n7000,14000\n", "time_ms=ms,rtt_us=us"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_read_by_its_columns(name: str, tmp_path: Path) -> None:
    text, columns = TABLES[name]
    trace = read(tmp_path, text, columns=columns)
    assert (trace.time_s[0], trace.time_s[-1]) == (0.0, 2.0)
    assert require(trace.rtt_s)[0] == pytest.approx(0.012)
    assert require(trace.rtt_s)[-1] == pytest.approx(0.014)
    assert len(trace.time_s) in (2, 3)


def test_loss_and_capacity_of_a_table(tmp_path: Path) -> None:
    text = "s,lost,ul,dl\n0,0,1000,5\n1,100,1000,5\n2,50,2000,6\n"
    columns = "time_s=s,loss_percent=lost,up_kbps=ul,down_mbps=dl"
    trace = read(tmp_path, text, columns=columns)
    assert trace.rtt_s is None
    assert (trace.loss, trace.outages_s) == ((0.0, 0.0, 0.5), ((1.0, 2.0),))
    assert (trace.up_bits_per_s, trace.down_bits_per_s) == ((1e6, 1e6, 2e6), (5e6, 5e6, 6e6))
    again = read(tmp_path, write_plain(trace), "plain.csv")
    assert replace(again, name="", source="") == replace(trace, name="", source="")


@pytest.mark.parametrize(
    ("text", "columns", "said"),
    [
        ("a,b\n1,2\n", "", r"\(it has a, b\)"),
        ("1 2\n3 4\n", "", r"--columns time=1:s,rtt=2:s \(it has 2 columns without names\)"),
        ("hello\n", "", r"edgespec-sim trace FILE --columns time=NAME:s,rtt=NAME:ms"),
        ("time_s,rtt_ms,color\n0,1,2\n", "", "read with --columns"),
        (
            "a,b\n1,2\n",
            "time_s=a,rtt_ms=c",
            "expected a column 'c', which --columns names, among a, b",
        ),
        ("a,b\n1,2\n", "time_s=a,rtt_ms=3", "expected a column '3'"),
        ("a,b\n1,2\n0,2\n", "time_s=a,rtt_ms=b", ":3: expected a time not before 1 s"),
        ("a,b\n1,x\n", "time_s=a,rtt_ms=b", ":2: column 'b': expected rtt in ms as a number"),
        ("a,b\nx,1\n", "time=a,rtt_ms=b", ":2: column 'a': expected a date and a time"),
        (
            "a,b,c\n1,2,30\n",
            "time_s=a,rtt_ms=b,loss=c",
            "column 'c': expected a loss of at most 1; is it in %",
        ),
        ("a,b\n1,0\n", "time_s=a,up_mbps=b", "column 'b': the capacity up is 0 in every row"),
        ("a,b\n1,0\n", "rtt_ms=b", "must name the column of time"),
        ("a,b\n1,\n", "time_s=a,rtt_ms=b", "holds no measurement"),
    ],
)
def test_an_error_says_which_columns_are_wanted(
    text: str, columns: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(TraceError, match=said):
        read(tmp_path, text, columns=columns)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("time_s=a", "must name a delay or a capacity"),
        (
            "time_s=a,speed=b",
            "has 'speed=b', but must be QUANTITY=COLUMN:UNIT with a",
        ),
        ("time_s=a,rtt_ms=b,rtt_s=c", "names 2 columns for rtt"),
        ("", "has ''"),
    ],
)
def test_columns_that_say_nothing_are_refused(columns: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Columns.of(columns)


# --- capacity without a delay, and what is improbable --------------------------------------------


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("lte.up", "up"),
        ("lte.down", "down"),
        ("cell-uplink-3.txt", "up"),
        ("cell_dl.trace", "down"),
        ("TMobile-LTE-driving.Download", "down"),
        ("update.log", "both"),
        ("12mbps", "both"),
    ],
)
def test_a_packet_file_goes_where_its_name_says(name: str, ways: str, tmp_path: Path) -> None:
    trace = read(tmp_path, "10\n60\n110\n160\n", name)
    assert (trace.up_bits_per_s is not None) == (ways in ("up", "both"))
    assert (trace.down_bits_per_s is not None) == (ways in ("down", "both"))
    assert any("does not give the direction of its packets" in one for one in trace.warnings) == (
        ways == "both"
    )


@dataclass(frozen=True)
class Improbable:
    text: str
    said: str


@pytest.mark.parametrize(
    "case",
    [
        Improbable("time_s,rtt_ms\n0,0.048\n1,0.05\n", "less than 50 us: are these seconds"),
        Improbable("time_s,rtt_ms\n0,48000\n1,50000\n", "more than 10 s: are these microseconds"),
        Improbable("time_s,up_mbps\n0,0.009\n1,0.009\n", "up is 9000 bit/s, less than 10000"),
        Improbable("time_s,down_mbps\n0,9e6\n1,9e6\n", "down is 9e.12 bit/s, more than 1e"),
        Improbable("time_s,rtt_ms\n0,48\n7200,50\n", "rows are 7200 s apart"),
        Improbable("time_s,rtt_ms\n0,48\n.00001,50\n", "rows are 1e-05 s apart"),
        Improbable("time_s,rtt_ms,loss\n0,48,.7\n1,48,.7\n", "70% of the packets are lost"),
        Improbable("# duration_s=9\ntime_s,rtt_ms,loss\n0,48,1\n8,48,0\n", "passes for 8 of its 9"),
        Improbable("time_s,rtt_ms\n0,48\n1,50\n", ""),
    ],
    ids=lambda case: case.said[:20] or "usual",
)
def test_the_improbable_is_warned_of(case: Improbable, tmp_path: Path) -> None:
    trace = read(tmp_path, case.text)
    assert bool(trace.warnings) == bool(case.said)
    assert re.search(case.said, " ".join(trace.warnings))


def test_no_shared_trace_is_improbable(data_dir: Path) -> None:
    """The traces are of real networks, a train under bridges and a car park among them. The only
    warning is about a day of which more than half is slow."""
    for path in sorted((data_dir / "traces").glob("*/*.[ct][sx][vt]")):
        assert read_trace(path).warnings == (), path


def replay(path: Path, **link: object) -> sc.Scenario:
    section = sc.LinkSection(trace=str(path), **link)  # type: ignore[arg-type]
    device = sc.DeviceSection(path=("wan",), workload=sc.WorkloadSection(start_within_s=0.0))
    return sc.Scenario(
        "s",
        {"one": device},
        links={"wan": section},
        arms=(Arm.TARGET_ONLY,),
        duration_s=20.0,
        message_ms=0.0,
        connected=True,
    )


def test_a_capacity_trace_has_the_delay_of_its_link_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link with 1e9 bit/s and no delay in the trace has half of rtt_ms each way, or no delay and
    a warning that a run prints."""
    path = tmp_path / "cap.csv"
    path.write_text("time_s,up_mbps,down_mbps\n0,1000,1000\n1,1000,1000\n")
    scenario = replay(path, rtt_ms=80.0)
    link = LinkInstances(scenario.links["wan"], 20.0, "1", tmp_path)
    assert (link.least_way_s, link.typical_rtt_s) == (0.04, 0.08)
    up, down = link.make_models(0, 1)
    assert up.arrival(0.0, 100) == pytest.approx(0.04, abs=1e-5)
    assert down.arrival(0.0, 100) == pytest.approx(0.04, abs=1e-5)
    record = play(Job(scenario, Arm.TARGET_ONLY, 0, 1, tmp_path)).meters.records[0]
    assert require(record.ttft_s) == pytest.approx(0.080 + 0.025, abs=1e-4)
    notes = trace_notes(scenario, tmp_path)
    assert [note for note in notes if note.startswith("Warning")] == []
    assert any("has capacity but no delay; links.wan.rtt_ms is 80" in note for note in notes)
    bare = replay(path)
    outcomes = [(job.arm, play(job)) for job in make_jobs(bare, 1, tmp_path)]
    show(summarise(bare, (1,), tmp_path, outcomes))
    said = capsys.readouterr().err
    assert "Warning: links.wan.trace: cap.csv: has capacity but no delay" in said
    assert "--set links.wan.rtt_ms=MS" in said


def test_one_way_without_a_capacity_is_said(tmp_path: Path) -> None:
    path = tmp_path / "lte.down"
    path.write_text("10\n60\n110\n")
    (warning,) = (
        one for one in trace_notes(replay(path, rtt_ms=50.0), tmp_path) if one.startswith("Warning")
    )
    assert "has only the capacity down, so the capacity up has no limit" in warning
    assert not any(
        one.startswith("Warning")
        for one in trace_notes(replay(path, rtt_ms=50.0, up_mbps=8.0), tmp_path)
    )


def test_a_scenario_names_the_columns_of_its_trace(tmp_path: Path) -> None:
    path = tmp_path / "odd.txt"
    path.write_text("9 0.05\n10 0.07\n")
    scenario = replay(path, trace_columns="time_s=1,rtt_s=2")
    assert LinkInstances(scenario.links["wan"], 20.0, "1", tmp_path).least_way_s == 0.025


# --- what `edgespec-sim trace` prints ------------------------------------------------------------


def trace(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def test_a_capacity_file_shows_its_capacity_and_no_zeros(tmp_path: Path) -> None:
    path = tmp_path / "lte.down"
    path.write_text("".join(f"{ms}\n" for ms in range(10, 2000, 10)))
    result = trace(path)
    assert result.exit_code == 0, result.output
    assert "down Mbit/s" in " ".join(result.output.split())
    assert "1.2" in result.output
    assert "ms" not in result.output.split("longest")[0].replace("Mbit", "")
    assert len(set(rtt_line(read_trace(path), width=20))) == 1


def test_columns_make_a_plain_table(tmp_path: Path) -> None:
    odd, plain = tmp_path / "odd.tsv", tmp_path / "plain.csv"
    odd.write_text("when\tdelay\n5\t0.05\n6\t0.07\n")
    refused = trace(odd)
    assert refused.exit_code == 1
    assert "it has when, delay" in " ".join(refused.output.split())
    result = trace(odd, "--columns", "time_s=when,rtt_s=delay", "--out", plain)
    assert result.exit_code == 0, result.output
    assert read_trace(plain).rtt_s == (0.05, 0.07)
    wrong = trace(odd, "--columns", "time_s=when")
    assert wrong.exit_code == 2
    assert "error: --columns is" in wrong.output


def test_the_improbable_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("time_s,rtt_ms\n0,0.048\n1,0.05\n")
    result = trace(path)
    assert result.exit_code == 0
    assert (
        "Warning: the median RTT is 49 us" in result.output
        or "Warning: the median" in result.output
    )
