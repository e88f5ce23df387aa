"""Traces that researchers publish, and Wireshark's tables, under the names of their columns.

The rates in them are what an application carried, which is at most the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from edgespec_sim.links.column_tables import NOTHING, Row, cut_cells, make_trace
from edgespec_sim.links.columns import ColumnUse
from edgespec_sim.links.network_trace import NetworkTrace
from edgespec_sim.links.trace_text import TraceText, parse_date_s, read_table

_CARRIED: Final = (
    "the rates are what an application carried, so the capacity was at least that; the capacity up"
    " was not measured"
)


def _cell_number(
    text: TraceText, number: int, cells: dict[str, str], column: str, what: str
) -> float:
    """Return a number of a row, or NaN if it has none."""
    cell = cells.get(column, "").strip()
    if cell.lower() in NOTHING:
        return math.nan
    return text.number(number, cell, what, column=column)


# --- UCC's 4G and 5G datasets --------------------------------------------------------------------
# G-NetTrack Pro writes a row about every second: Raca et al., MMSys 2018 and 2020. ``Timestamp`` is
# a local time such as 2019.12.14_10.16.30, ``DL_bitrate`` is in kbit/s, ``State`` is D while the
# phone downloads and I while it is idle, and ``PINGAVG`` is in ms. An idle phone does not show its
# capacity, so such a rate is left out. ``UL_bitrate`` has little more than acknowledgements and is
# left out too. Rows of the same second are one.

_UCC_TIME: Final = "%Y.%m.%d_%H.%M.%S"
_UCC_COLUMNS: Final = ("Timestamp", "NetworkMode", "CQI", "DL_bitrate", "UL_bitrate", "State")


def is_ucc(head: str) -> bool:
    return set(_UCC_COLUMNS) <= set(cut_cells(head.partition("\n")[0], ","))


def read_ucc(text: TraceText) -> NetworkTrace:
    measures = (ColumnUse("down", "DL_bitrate", "kbit/s"), ColumnUse("rtt", "PINGAVG", "ms"))
    return make_trace(text, measures, _ucc_rows(text), remarks=(_CARRIED,))


def _ucc_rows(text: TraceText) -> Iterator[Row]:
    for number, cells in read_table(text):
        stamp = cells.get("Timestamp", "").strip()
        try:
            time_s = datetime.strptime(stamp, _UCC_TIME).replace(tzinfo=UTC).timestamp()
        except ValueError:
            expected = "a time like 2019.12.14_10.16.30"
            raise text.error(number, expected, "Timestamp") from None
        rate = _cell_number(text, number, cells, "DL_bitrate", "a rate in kbit/s") * 1e3
        if cells.get("State", "").strip() == "I":
            rate = math.nan
        rtt_s = _cell_number(text, number, cells, "PINGAVG", "a round-trip time in ms") / 1e3
        yield number, time_s, (rate, rtt_s)


# --- Lumos5G -------------------------------------------------------------------------------------
# Narayanan et al., IMC 2020: ``Throughput`` in Mbit/s down, once a second. ``seq_num`` counts the
# seconds of a run ``run_num``. Runs are joined end to end, since the pauses between them were not
# measured.

_LUMOS_COLUMNS: Final = ("run_num", "seq_num", "Throughput")


def is_lumos5g(head: str) -> bool:
    return set(_LUMOS_COLUMNS) <= set(cut_cells(head.partition("\n")[0], ","))


def read_lumos5g(text: TraceText) -> NetworkTrace:
    measures = (ColumnUse("down", "Throughput", "Mbit/s"),)
    return make_trace(text, measures, _lumos_rows(text), remarks=(_CARRIED,))


def _lumos_rows(text: TraceText) -> Iterator[Row]:
    run: str | None = None
    latest_s = begin_s = first_s = 0.0
    for number, cells in read_table(text):
        second_s = _cell_number(text, number, cells, "seq_num", "the number of a second")
        if math.isnan(second_s):
            raise text.error(number, "the number of a second", "seq_num")
        if cells.get("run_num", "") != run:
            begin_s = latest_s + 1.0 if run is not None else 0.0
            run, first_s = cells.get("run_num", ""), second_s
        elif begin_s + second_s - first_s <= latest_s:
            expected = f"a second after {latest_s - begin_s + first_s:g} of run {run}"
            raise text.error(number, expected, "seq_num")
        latest_s = begin_s + second_s - first_s
        rate = _cell_number(text, number, cells, "Throughput", "a rate in Mbit/s") * 1e6
        yield number, latest_s, (rate,)


# --- Wireshark -----------------------------------------------------------------------------------
# ``File > Export Packet Dissections > As CSV`` writes the columns that are shown. The round-trip
# time is a column that the user has added: the field ``tcp.analysis.ack_rtt`` or
# ``tcp.analysis.initial_rtt`` in seconds, or ``icmp.resptime`` in ms, under the field's name or its
# title. ``Time`` is in seconds, or a date and a time of day. Packets without a round-trip time are
# left out.

_WIRESHARK_COLUMNS: Final = ("No.", "Time", "Protocol", "Info")
_WIRESHARK_RTTS: Final = {
    "tcp.analysis.ack_rtt": "s",
    "The RTT to ACK the segment was": "s",
    "tcp.analysis.initial_rtt": "s",
    "iRTT": "s",
    "icmp.resptime": "ms",
    "Response time": "ms",
}


def is_wireshark(head: str) -> bool:
    return set(_WIRESHARK_COLUMNS) <= set(cut_cells(head.partition("\n")[0], ","))


def read_wireshark(text: TraceText) -> NetworkTrace:
    names = cut_cells(text.head[0], ",")
    column = next((name for name in _WIRESHARK_RTTS if name in names), None)
    if column is None:
        raise text.error(
            1,
            "a column of round-trip times: add tcp.analysis.ack_rtt in Wireshark (Apply as Column)"
            " before the export, or name another one with --columns time=Time:s,rtt=NAME:s",
        )
    measure = ColumnUse("rtt", column, _WIRESHARK_RTTS[column])
    senders: set[str] = set()
    trace = make_trace(text, (measure,), _wireshark_rows(text, measure, senders))
    if len(senders) < 2:
        return trace
    shown = ", ".join(sorted(senders)[:3])
    warning = (
        f"packets of {len(senders)} senders have a round-trip time ({shown}): those of the"
        " capturing machine itself take almost none, so export the packets of the other end alone"
        " (display filter ip.src == ADDRESS)"
    )
    return replace(trace, warnings=(*trace.warnings, warning))


def _wireshark_rows(text: TraceText, measure: ColumnUse, senders: set[str]) -> Iterator[Row]:
    for number, cells in read_table(text):
        stamp = cells.get("Time", "").strip()
        try:
            time_s = float(stamp)
        except ValueError:
            try:
                time_s = parse_date_s(stamp)
            except (ValueError, OverflowError):
                expected = "seconds or a date and a time (View > Time Display Format)"
                raise text.error(number, expected, "Time") from None
        if not math.isfinite(time_s):
            raise text.error(number, "a finite time", "Time")
        rtt = _cell_number(text, number, cells, measure.column, f"a time in {measure.unit}")
        if not math.isnan(rtt):
            senders.add(cells.get("Source", ""))
        yield number, time_s, (rtt * measure.factor,)


# --- pensieve ------------------------------------------------------------------------------------
# A line is a time in seconds and a rate in Mbit/s. As in pensieve's own simulator, a rate holds
# from the time of the line before to that of its own line, so the first rate is never used (Mao et
# al., SIGCOMM 2017). Nothing in the content shows this format, so it must be named.

_PENSIEVE_COLUMNS: Final = 2


def read_pensieve(text: TraceText) -> NetworkTrace:
    measures = (ColumnUse("down", "2", "Mbit/s"),)
    remark = "pensieve's rates are down; the capacity up was not measured"
    ends_s: list[float] = []
    rows = _pensieve_rows(text, ends_s)
    return make_trace(text, measures, rows, remarks=(remark,), ends_s=ends_s)


def _pensieve_rows(text: TraceText, ends_s: list[float]) -> Iterator[Row]:
    """Yield the rows, and keep the end of the last one in ``ends_s``."""
    before_s: float | None = None
    for number, line in text.numbered_lines():
        cells = line.split()
        if not cells:
            continue
        if text.may_be_cut(number) and len(cells) < _PENSIEVE_COLUMNS:
            break
        if len(cells) != _PENSIEVE_COLUMNS:
            raise text.error(number, "a time in s and a rate in Mbit/s")
        time_s = text.number(number, cells[0], "a time in s", column="1")
        rate = text.number(number, cells[1], "a rate in Mbit/s", column="2")
        if before_s is not None:
            if time_s <= before_s:
                raise text.error(number, f"a time after {before_s:g} s", "1")
            yield number, before_s, (rate * 1e6,)
            ends_s[:] = (time_s,)
        before_s = time_s
    if not ends_s and before_s is not None:
        raise text.error(1, "at least two lines: a rate holds from the line before to its own")
