"""Logs of ping in its dialects, with one run or several runs one after another.

The readers support ``ping`` and ``ping -D`` of Linux (iputils), BusyBox, macOS and the BSDs with
``ping6``, GNU inetutils, ``fping -l``, ``-c`` and ``--json``, and Windows, in any language.

Except on Windows, a run numbers its probes. Probes are sent at a steady pace, so a probe's time is
its number times the pace. If arrivals have time stamps (``[epoch]``, ``[local time]``, or a time
before the line), the pace is the median difference of arrival minus round-trip time between
numbers. Otherwise it is the pace that the run's summary implies, or else 1 s, the default of every
ping. Numbers that never appear are lost probes; those after the last answer are known from the
summary, and from lines that name a lost probe. A run begins with a line ``PING`` (or ``Start
time:``, in operators' logs), and its first number is then the dialect's. A log without such a line
was cut, and begins with its first number. Duplicates (``DUP!``) are ignored. Runs are joined end to
end, since the pauses between them were not measured. A last line without a line end may be
incomplete.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from typing import Any, Final

from edgespec_sim.links.network_trace import MAX_ROWS, NetworkTrace, TraceError
from edgespec_sim.links.trace_text import Probe, TraceText, from_probes, stamp_s

_DEFAULT_STEP_S: Final = 1.0
_SEQUENCE_NUMBERS: Final = 2**16
_MAX_SEQUENCE: Final = 10**9

_STAMP: Final = (
    r"(?:\[(?P<stamp>[^\]]+)\] ?"
    r"|(?P<epoch>[0-9]{9,11}(?:\.[0-9]{1,9})?):? +"
    r"|(?P<iso>[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?):? +"
    r"|(?:[A-Z][a-z]{2} +[0-9]{1,2} )?"
    r"(?P<clock>[0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?):? +)?"
)
_RTT: Final = r"time ?[=<] ?(?P<rtt>[0-9]+(?:[.,][0-9]+)?) ?ms"
_REPLY: Final = re.compile(
    _STAMP
    + r"\d+ bytes from .*?(?:icmp_seq|icmp_req|seq)=(?P<seq>[0-9]{1,9})\b.*?"
    + _RTT
    + r"(?P<dup>.*DUP!.*)?.*$"
)
# A probe that the log reports as unanswered: by `ping -O`, by macOS, by a router.
_LOST: Final = re.compile(
    _STAMP
    + r"(?:no answer yet for icmp_seq=|Request timeout for icmp_seq |[Ff]rom .*\bicmp_seq=)"
    + r"(?P<seq>[0-9]{1,9})\b"
)
_SUMMARY: Final = re.compile(
    _STAMP
    + r"(?P<sent>[0-9]{1,15}) packets transmitted, [0-9]+ (?P<bsd>packets )?received.*loss"
    + r"(?:, time (?P<time>[0-9]{1,15}) ?ms)?"
)
_EPOCH: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")

# Lines without information of their own.
_OTHER: Final = re.compile(
    _STAMP
    + r"(|--- .*|rtt .*|round-trip .*|(Start|End) time: \d+|\^C.*|[Ff]rom .*|, pipe \d+"
    + r"|Request timeout .*|ping6?: .*|(ping: )?[Ww]arning: .*|WARNING: .*"
    + r"|\d+ bytes from (?!.*\btime ?[=<]).*)$"
)

# `fping -l host`: `host : [0], 84 bytes, 12.3 ms (12.3 avg, 0% loss)`, and `[1], timed out (...)`.
_FPING: Final = re.compile(
    _STAMP
    + r"(?P<host>\S+) +: \[(?P<seq>[0-9]{1,9})\], (?:\d+ bytes, (?P<rtt>[0-9.]+) ms|timed out)"
)
_FPING_SUMMARY: Final = re.compile(
    r"(?P<host>\S+) +: xmt/rcv/%(?:loss|return) = (?P<sent>[0-9]{1,15})/"
)


class _Run:
    """The replies of one run: probe number -> (time of the reply or None, round-trip time)."""

    def __init__(self, first: int | None = None) -> None:
        self.replies: dict[int, tuple[float | None, float]] = {}
        self.first = first
        """Number of the first probe. None: the log does not contain the beginning of the run."""
        self.lost: set[int] = set()
        """Numbers that the log reports as unanswered."""
        self.sent = 0
        self.sent_from = 1
        """Number at which the summary's count begins."""
        self.took_s: float | None = None
        self.latest = 0

    def unwrap(self, sequence: int) -> int:
        """Return the full probe number. Numbers have 16 bits, so one far below the latest has
        wrapped around."""
        wraps, low = divmod(self.latest, _SEQUENCE_NUMBERS)
        if sequence < low - _SEQUENCE_NUMBERS // 2:
            wraps += 1
        elif sequence > low + _SEQUENCE_NUMBERS // 2 and wraps:
            wraps -= 1
        return wraps * _SEQUENCE_NUMBERS + sequence

    def step_s(self) -> float | None:
        """Return the pace of the probes. None if it cannot be determined."""
        times = [
            (number, at_s - rtt_s)
            for number, (at_s, rtt_s) in sorted(self.replies.items())
            if at_s is not None
        ]
        # The median of neighbours ignores the few pauses. Stamps in whole seconds need long
        # distances.
        whole = all(at_s is None or at_s.is_integer() for at_s, _ in self.replies.values())
        apart = max(1, len(times) // 2) if whole else 1
        steps = [
            (later_s - earlier_s) / (later - earlier)
            for (earlier, earlier_s), (later, later_s) in zip(times, times[apart:], strict=False)
        ]
        if steps and (usual_s := statistics.median_high(steps)) > 0.0:
            return usual_s
        if self.took_s and self.sent > 1:
            return self.took_s / (self.sent - 1)
        return None

    def probes(self, text: TraceText, from_s: float, step_s: float) -> list[Probe]:
        """Return the probes in order of sending, the first at ``from_s``. Raises ``TraceError``."""
        named = {*self.replies, *self.lost}
        first = min(named, default=self.sent_from)
        if self.first is not None:
            first = min(first, self.first)
        # The summary counts from the first probe of all. A wrong count must never drop a reply.
        counted_from = self.first if self.first is not None else self.sent_from
        last = max((counted_from + self.sent - 1, *named))
        if last - first >= MAX_ROWS:
            count = last - first + 1
            raise TraceError(f"{text.path}: a run of {count} probes, but the limit is {MAX_ROWS}")
        found = []
        for number in range(first, last + 1):
            reply = self.replies.get(number)
            sent_s = from_s + (number - first) * step_s
            found.append(Probe(sent_s, None if reply is None else reply[1]))
        return found


def is_ping(head: str) -> bool:
    starts = (_REPLY, _LOST, _HEADER)
    return any(
        start.match(line[:_LONGEST_LINE]) for line in head.splitlines()[:10] for start in starts
    )


def read_ping(text: TraceText) -> NetworkTrace:
    """Read a log of Linux, BusyBox, macOS, a BSD or inetutils. Raises ``TraceError``."""
    runs, strange = _read_runs(text)
    return _join_runs(text, runs, strange)


_LONGEST_LINE: Final = 1000


def _bounded_lines(text: TraceText) -> Iterator[tuple[int, str]]:
    """Yield the number and the beginning of each line. No line of ping is longer, and the regular
    expressions here take quadratic time at worst."""
    for number, line in text.numbered_lines():
        yield number, line[:_LONGEST_LINE]


def _join_runs(text: TraceText, runs: list[_Run], strange: list[int]) -> NetworkTrace:
    probes: list[Probe] = []
    end_s, last_step_s = 0.0, _DEFAULT_STEP_S
    unpaced = 0
    for run in runs:
        step_s = run.step_s()
        unpaced += step_s is None
        last_step_s = step_s or _DEFAULT_STEP_S
        found = run.probes(text, end_s, last_step_s)
        probes += found
        end_s = found[-1].sent_s + last_step_s
    remarks = []
    if unpaced:
        remarks.append(
            "the log does not contain the pace of the probes: they are assumed to be"
            f" {_DEFAULT_STEP_S:g} s apart, ping's default (ping -D adds time stamps)"
        )
    if strange:
        where = ", ".join(map(str, strange[:3])) + (", ..." if len(strange) > 3 else "")
        remarks.append(f"{len(strange)} lines are not from ping and were left out: {where}")
    return from_probes(text, probes, last_step_s, remarks=tuple(remarks))


def _read_runs(text: TraceText) -> tuple[list[_Run], list[int]]:
    """Return the runs, and the numbers of lines that are not from ping. Raises ``TraceError``."""
    runs, strange = [_Run()], []
    for number, line in _bounded_lines(text):
        if reply := _REPLY.match(line):
            if reply["dup"]:
                continue
            run = runs[-1]
            sequence = run.unwrap(int(reply["seq"]))
            if (
                sequence in run.replies
            ):  # Duplicates are marked, so this reply belongs to another run.
                runs.append(run := _Run())
                sequence = int(reply["seq"])
            run.latest = max(run.latest, sequence)
            ms = text.number(number, reply["rtt"].replace(",", "."), "a round-trip time in ms")
            run.replies[sequence] = _time_stamp_s(text, number, reply), ms / 1000.0
        elif lost := _LOST.match(line):
            run = runs[-1]
            run.lost.add(run.unwrap(int(lost["seq"])))
        elif summary := _SUMMARY.match(line):
            run = runs[-1]
            run.sent, run.sent_from = int(summary["sent"]), 0 if summary["bsd"] else 1
            run.took_s = int(summary["time"]) / 1000.0 if summary["time"] else None
        elif (first := _first_number(line)) is not None:
            runs.append(_Run(first))
        elif not _OTHER.match(line) and not text.may_be_cut(number):
            strange.append(number)
    # A run that was cut before its first answer or summary has no information. A run whose summary
    # shows that no answer came is an outage.
    return [run for run in runs if run.replies or run.sent], strange


# `PING h (192.0.2.1): 56 data bytes` and PING6 count from 0, `... 56(84) bytes of data` from 1.
_HEADER: Final = re.compile(_STAMP + r"PING6?[ (]")
_HEADER_FROM_0: Final = re.compile(_STAMP + r"(?:PING6\(|PING .*\): \d+ data bytes)")


def _first_number(line: str) -> int | None:
    """Return the number of the first probe if a run begins in this line, else None."""
    if not _HEADER.match(line):
        return None
    return 0 if _HEADER_FROM_0.match(line) else 1


def _time_stamp_s(text: TraceText, number: int, found: re.Match[str]) -> float | None:
    """Return the time stamp of a line in seconds, or None if it has none. A time of day counts from
    midnight. Raises ``TraceError``."""
    if (stamp := found["stamp"]) is not None:
        if _EPOCH.fullmatch(stamp):
            return float(stamp)
        return stamp_s(text, number, stamp, "[epoch seconds] or [YYYY-MM-DD HH:MM:SS.ffffff]")
    if (epoch := found["epoch"]) is not None:
        return float(epoch)
    if (iso := found["iso"]) is not None:
        return stamp_s(text, number, iso.replace(",", "."), "YYYY-MM-DD HH:MM:SS.ffffff")
    if (clock := found["clock"]) is not None:
        hours, minutes, seconds = clock.split(":")
        return 3600.0 * int(hours) + 60.0 * int(minutes) + float(seconds)
    return None


# --- fping -------------------------------------------------------------------------------------


def is_fping(head: str) -> bool:
    return any(_FPING.match(line) for line in head.splitlines()[:10])


def read_fping(text: TraceText) -> NetworkTrace:
    """Read the output of ``fping -l`` or ``fping -c`` for one host. Raises ``TraceError``."""
    run, hosts, strange = _Run(), dict[str, int](), list[int]()
    for number, line in _bounded_lines(text):
        if probe := _FPING.match(line):
            hosts.setdefault(probe["host"], number)
            sequence = run.unwrap(int(probe["seq"]))
            run.latest = max(run.latest, sequence)
            if probe["rtt"] is None:
                run.lost.add(sequence)
            else:
                ms = text.number(number, probe["rtt"], "a round-trip time in ms")
                run.replies.setdefault(sequence, (_time_stamp_s(text, number, probe), ms / 1000.0))
        elif summary := _FPING_SUMMARY.match(line):
            run.sent, run.sent_from = int(summary["sent"]), 0
        elif line.strip() and not line.startswith("ICMP ") and not text.may_be_cut(number):
            strange.append(number)
        if len(hosts) > 1:
            raise text.error(number, f"answers of only one host ({next(iter(hosts))})")
    return _join_runs(text, [run], strange)


# `fping --json` prints one object a line: `{"resp": {"host": ..., "seq": 0, "rtt": ms}}` for an
# answer, `{"timeout": {"host": ..., "seq": 1}}` and a summary. Other objects and fields are
# ignored, as its documentation demands. With -C, `{"vSum": {"values": [ms, null, ...]}}` has all
# probes.
_FPING_JSON: Final = re.compile(r'\{ *"(?:resp|timeout|summary|vSum|intSum|stats)" *: *\{')


def is_fping_json(head: str) -> bool:
    return any(_FPING_JSON.match(line) for line in head.splitlines()[:10])


def read_fping_json(text: TraceText) -> NetworkTrace:
    """Read the output of ``fping --json`` for one host. Raises ``TraceError``."""
    run, host = _Run(), ""
    for number, line in text.numbered_lines():
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            if text.may_be_cut(number):
                break
            raise text.error(number, "a JSON object of fping") from None
        kind, data = next(iter(event.items()), ("", None)) if isinstance(event, dict) else ("", 0)
        if not isinstance(data, dict):
            raise text.error(number, "a JSON object of fping")
        if kind in ("resp", "timeout", "summary", "vSum"):
            host = host or str(data.get("host", ""))
            if data.get("host") != host:
                raise text.error(number, f"answers of only one host ({host})")
        if kind in ("resp", "timeout"):
            sequence = run.unwrap(_json_count(text, number, kind, "seq", data))
            run.latest = max(run.latest, sequence)
            if kind == "timeout":
                run.lost.add(sequence)
            else:
                rtt_s = _json_rtt_s(text, number, "resp.rtt", data.get("rtt"))
                run.replies.setdefault(sequence, (None, rtt_s))
        elif kind == "summary":
            run.sent, run.sent_from = _json_count(text, number, kind, "xmt", data), 0
        elif kind == "vSum" and not run.replies and isinstance(data.get("values"), list):
            run.sent, run.sent_from = len(data["values"]), 0
            for sequence, value in enumerate(data["values"]):
                if value is not None:
                    rtt_s = _json_rtt_s(text, number, f"vSum.values[{sequence}]", value)
                    run.replies[sequence] = (None, rtt_s)
    if not run.replies:
        raise text.no_rows()
    return _join_runs(text, [run], [])


def _json_count(text: TraceText, number: int, kind: str, name: str, data: Mapping[str, Any]) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _MAX_SEQUENCE:
        raise text.error(number, f"a whole number of at least 0, not {value!r}", f"{kind}.{name}")
    return value


def _json_rtt_s(text: TraceText, number: int, name: str, value: object) -> float:
    if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise text.error(number, f"a round-trip time in ms, not {value!r}", name)
    return value / 1000.0


# --- Windows -----------------------------------------------------------------------------------
# There is one line per probe, in order, without numbers and times. An answer ends with its time in
# whole ms and the TTL, which no language translates; with IPv6 it follows an address with two
# colons or more. Every other line between the first one, which ends with a colon, and the
# statistics, which begin with such a line too, is a probe without an answer. The next probe is sent
# a second after the one before, or when its answer has arrived, or after 4 s without one (the
# default of `-w`).

_WINDOWS_REPLY: Final = re.compile(
    r"^(?:.*[=<] ?(?P<v4>\d+) ?(?:ms|мс) TTL=\d+"
    r"|.* ?(?:[0-9a-fA-F]*:){2,}[0-9a-fA-F.%]*: [^ ]+[=<] ?(?P<v6>\d+) ?(?:ms|мс))\s*$"
)
_WINDOWS_BEGINNING: Final = re.compile(r"^\S.*\d.*[:\uff1a]\s*$")
_BELOW_1_MS: Final = re.compile(r"< ?1 ?(?:ms|мс)")
_WINDOWS_STEP_S: Final = 1.0
_WINDOWS_TIMEOUT_S: Final = 4.0
_OTHER_WINDOWS: Final = re.compile(r"^(?:\s|\^C|Control-C|[A-Za-z]:\\|PS )|^$")


def is_windows_ping(head: str) -> bool:
    lines = head.splitlines()[:12]
    return any(_WINDOWS_REPLY.match(line) and "bytes from" not in line for line in lines)


def read_windows_ping(text: TraceText) -> NetworkTrace:
    """Read the output of ping on Windows. Raises ``TraceError``."""
    probes: list[Probe] = []
    at_s, below, is_inside = 0.0, 0, True
    for number, line in _bounded_lines(text):
        if reply := _WINDOWS_REPLY.match(line):
            is_inside = True
            rtt_s = int(reply["v4"] or reply["v6"]) / 1000.0
            if _BELOW_1_MS.search(line):
                below += 1
                rtt_s = 0.0005
            probes.append(Probe(at_s, rtt_s))
            at_s += max(_WINDOWS_STEP_S, rtt_s)
        elif _WINDOWS_BEGINNING.match(line):
            # This line begins a run, or the statistics after one.
            is_inside = not is_inside if probes else True
        elif is_inside and not _OTHER_WINDOWS.match(line) and not text.may_be_cut(number):
            probes.append(Probe(at_s, None))
            at_s += _WINDOWS_TIMEOUT_S
    if not probes:
        raise text.no_rows()
    remarks = [
        "Windows writes whole milliseconds and no times; a lost probe is assumed to take 4 s"
    ]
    if below:
        remarks.append(f"{below} answers in less than 1 ms are assumed to take 0.5 ms")
    step_s = max(_WINDOWS_STEP_S, probes[-1].rtt_s or _WINDOWS_TIMEOUT_S)
    return from_probes(text, probes, step_s, remarks=tuple(remarks))
