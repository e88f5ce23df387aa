"""Logs of ``ping`` and ``ping -D``, one run or many of them one after the other.

Theory of operation. A run begins with a line ``PING`` (or ``Start time:``, as operators' logs have
it) and numbers its probes. Probes leave at a steady pace, so a probe's time is its number times
the pace: the median of arrival minus round-trip time from number to number when arrivals are
stamped (``[epoch]`` or ``[local time]``), else the one that the run's summary implies, else 1 s,
ping's default. Numbers that never appear are lost probes; those after the last answer are known
from the summary. Duplicates (``DUP!``) are ignored. Runs are joined end to end: the pauses between
them were not measured. A last line without a line end may be cut anywhere.
"""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from typing import Final

from edgespec_sim.traces.network_trace import MAX_ROWS, NetworkTrace, TraceError
from edgespec_sim.traces.readers.probes import Probe, from_probes
from edgespec_sim.traces.readers.source import TraceText

FORMAT: Final = "ping"
_STAMP: Final = r"(?:\[(?P<stamp>[^\]]+)\] ?)?"
_REPLY: Final = re.compile(
    _STAMP
    + r"\d+ bytes from .*icmp_seq=(?P<seq>[0-9]{1,9}) .*time=(?P<rtt>[\d.]+) ?ms(?P<dup>.*DUP!.*)?$"
)
_SUMMARY: Final = re.compile(
    _STAMP
    + r"(?P<sent>[0-9]{1,15}) packets transmitted,.*loss(?:, time (?P<time>[0-9]{1,15}) ?ms)?"
)
_EPOCH: Final = re.compile(r"[0-9]{1,15}(?:\.[0-9]{1,15})?")
_START: Final = re.compile(_STAMP + r"PING ")
# Lines that say nothing of their own: a probe reported lost is missing from the replies anyway.
_OTHER: Final = re.compile(
    _STAMP
    + r"(|--- .*|rtt .*|round-trip .*|(Start|End) time: \d+|\^C.*|[Ff]rom .*|no answer yet .*"
    + r"|Request timeout .*|ping: .*)$"
)
_SEQUENCE_NUMBERS: Final = 2**16
_DEFAULT_STEP_S: Final = 1.0


class _Run:
    """One run's replies: number of the probe -> (time of the reply or None, round-trip time)."""

    def __init__(self) -> None:
        self.replies: dict[int, tuple[float | None, float]] = {}
        self.sent = 0
        self.took_s: float | None = None
        self.latest = 0

    def unwrapped(self, sequence: int) -> int:
        """Numbers have 16 bits: one far below the latest has begun anew."""
        wraps, low = divmod(self.latest, _SEQUENCE_NUMBERS)
        if sequence < low - _SEQUENCE_NUMBERS // 2:
            wraps += 1
        elif sequence > low + _SEQUENCE_NUMBERS // 2 and wraps:
            wraps -= 1
        return wraps * _SEQUENCE_NUMBERS + sequence

    def step_s(self) -> float:
        times = [
            (number, at_s - rtt_s)
            for number, (at_s, rtt_s) in sorted(self.replies.items())
            if at_s is not None
        ]
        steps = sorted(
            (later_s - earlier_s) / (later - earlier)
            for (earlier, earlier_s), (later, later_s) in itertools.pairwise(times)
        )
        if steps and steps[len(steps) // 2] > 0.0:
            return steps[len(steps) // 2]
        if self.took_s and self.sent > 1:
            return self.took_s / (self.sent - 1)
        return _DEFAULT_STEP_S

    def probes(self, text: TraceText, from_s: float) -> tuple[list[Probe], float]:
        """In order of sending, the first at ``from_s``; and the pace."""
        step_s = self.step_s()
        first = 0 if 0 in self.replies else 1
        # The summary counts from the first probe; a wrong count never drops a reply.
        last = max((first + self.sent - 1, *self.replies))
        if last - first >= MAX_ROWS:
            count = last - first + 1
            raise TraceError(f"{text.path}: a run of {count} probes, but at most {MAX_ROWS} go")
        found = []
        for number in range(first, last + 1):
            reply = self.replies.get(number)
            sent_s = from_s + (number - first) * step_s
            found.append(Probe(sent_s, None if reply is None else reply[1]))
        return found, step_s


def sniff(head: str) -> bool:
    return any(_REPLY.match(line) or _START.match(line) for line in head.splitlines()[:10])


def read(text: TraceText) -> NetworkTrace:
    probes: list[Probe] = []
    end_s = step_s = 0.0
    for run in _runs(text):
        found, step_s = run.probes(text, end_s)
        probes += found
        end_s = found[-1].sent_s + step_s
    if not any(probe.rtt_s is not None for probe in probes):
        raise text.no_rows()
    return from_probes(text.name, FORMAT, probes, step_s)


def _runs(text: TraceText) -> list[_Run]:
    runs = [_Run()]
    for number, line in enumerate(text.lines, start=1):
        if reply := _REPLY.match(line):
            if reply["dup"]:
                continue
            run = runs[-1]
            sequence = run.unwrapped(int(reply["seq"]))
            run.latest = max(run.latest, sequence)
            rtt_s = text.number(number, reply["rtt"], "a round-trip time in ms") / 1000.0
            at_s = _stamp_s(text, number, reply["stamp"]) if reply["stamp"] else None
            run.replies.setdefault(sequence, (at_s, rtt_s))
        elif summary := _SUMMARY.match(line):
            runs[-1].sent = int(summary["sent"])
            runs[-1].took_s = int(summary["time"]) / 1000.0 if summary["time"] else None
        elif _START.match(line):
            runs.append(_Run())
        elif not _OTHER.match(line) and not text.may_be_cut(number):
            raise text.error(number, "a line of ping's output")
    # A run that was cut before its first answer or summary says nothing; one of which the summary
    # says that nothing came back is an outage.
    return [run for run in runs if run.replies or run.sent]


def _stamp_s(text: TraceText, number: int, stamp: str) -> float:
    if _EPOCH.fullmatch(stamp):
        return float(stamp)
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, "[epoch seconds] or [YYYY-MM-DD HH:MM:SS.ffffff]") from None
