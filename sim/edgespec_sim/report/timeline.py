"""Who did what when: the trace of a run as spans in lanes, a set of lanes a session.

Theory of operation. Each side's lines become spans of their own (draft, stall; queue, pass) and
halves of spans that cross the link (uplink, downlink). At the end the halves are matched: a draft
by its session, first node id and size, a commit by its session, position and size; each arrival
takes the latest sending before it, so a message that was lost and sent again is matched to the
copy that came. With one side's trace there are the lanes that side can know.

    draft     a draft step: StartStep to StepDone
    uplink    a draft on its way: Transmit to its arrival at the verifier
    queue     from the arrival of the oldest node of a pass to the start of that pass
    pass      RunBatch to BatchDone, of every session in the batch
    downlink  a commit on its way: SendTo to its arrival at the device
    stall     the device waits: the generation runs, but no draft step does; cut where a commit
              arrives

Clocks. Two machines' monotonic clocks have nothing in common. Unless told that the clocks are
shared, the offset of a session is estimated as half the difference of its least uplink and least
downlink delay, which is right if the least delays are equal (NTP's assumption, RFC 5905 section
8). Several verifiers are taken to share a clock. Times come out on the verifiers' clock, from 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from edgespec_sim.report.device_spans import DeviceSpans
from edgespec_sim.report.spans import Crossing, CrossingKey, Lane, Mark, Span
from edgespec_sim.report.trace_lines import DEVICE, Line
from edgespec_sim.report.verifier_spans import VerifierSpans

MAX_SPANS: Final = 200_000
# A clock read twice for one moment, and rounding to whole microseconds.
_SLACK_S: Final = 2e-6


class Clocks(Enum):
    """Whether both sides wrote the times of one clock."""

    SHARED = "shared"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class Timeline:
    """``spans`` by start; sessions by their first span or mark."""

    sessions: tuple[str, ...]
    spans: tuple[Span, ...]
    marks: tuple[Mark, ...]
    clock_offsets_s: Mapping[str, float]
    """What was added to a device's clock, by session; only those that were estimated."""
    truncated: bool = False
    """The trace goes on after ``max_spans``."""


def build_timeline(
    lines: Iterable[Line], clocks: Clocks = Clocks.ESTIMATED, max_spans: int = MAX_SPANS
) -> Timeline:
    """Reads ``lines`` once, in any interleaving of the sides, each side in its own order."""
    devices: dict[str, DeviceSpans] = defaultdict(lambda: DeviceSpans(marks))
    verifiers: dict[str, VerifierSpans] = defaultdict(lambda: VerifierSpans(marks))
    marks: list[tuple[bool, Mark]] = []
    truncated, count = False, 0
    for line in lines:
        if line["side"] == DEVICE:
            count += devices[line["session"]].read(line)
        else:
            count += verifiers[line["session"]].read(line)
        if count + len(marks) >= max_spans:
            truncated = True
            break
    readers: list[DeviceSpans | VerifierSpans] = [*devices.values(), *verifiers.values()]
    sent = _merged(reader.sent for reader in readers)
    arrived = _merged(reader.arrived for reader in readers)
    offsets = _offsets(sent, arrived) if clocks is Clocks.ESTIMATED else {}
    spans = [span for reader in verifiers.values() for span in reader.spans]
    for session, device in devices.items():
        offset_s = offsets.get(session, 0.0)
        spans += [_moved(span, offset_s) for span in device.spans]
    spans += _crossings(sent, arrived, offsets)
    placed = [
        replace(mark, at_s=mark.at_s + (offsets.get(mark.session, 0.0) if on_device else 0.0))
        for on_device, mark in marks
    ]
    return _from_zero(spans, placed, offsets, truncated)


def _merged(
    parts: Iterable[Mapping[CrossingKey, list[Crossing]]],
) -> dict[CrossingKey, list[Crossing]]:
    merged: dict[CrossingKey, list[Crossing]] = defaultdict(list)
    for part in parts:
        for key, crossings in part.items():
            merged[key] += crossings
    return merged


def _offsets(
    sent: Mapping[CrossingKey, list[Crossing]], arrived: Mapping[CrossingKey, list[Crossing]]
) -> dict[str, float]:
    """Seconds to add to the device's clock, by session. Only messages that were sent once and
    arrived once are asked."""
    least: dict[tuple[str, Lane], float] = {}
    for key, ends in arrived.items():
        starts = sent.get(key, ())
        if len(starts) == len(ends) == 1:
            delay_s = ends[0].at_s - starts[0].at_s
            which = (key.session, key.lane)
            least[which] = min(delay_s, least.get(which, delay_s))
    return {
        session: (up_s - least[session, Lane.DOWNLINK]) / 2
        for (session, lane), up_s in least.items()
        if lane is Lane.UPLINK and (session, Lane.DOWNLINK) in least
    }


def _crossings(
    sent: Mapping[CrossingKey, list[Crossing]],
    arrived: Mapping[CrossingKey, list[Crossing]],
    offsets: Mapping[str, float],
) -> Iterable[Span]:
    for key, ends in arrived.items():
        shift_s = offsets.get(key.session, 0.0)
        up_s, down_s = (shift_s, 0.0) if key.lane is Lane.UPLINK else (0.0, shift_s)
        starts = sorted(sent.get(key, ()), key=lambda crossing: crossing.at_s)
        times = [crossing.at_s + up_s for crossing in starts]
        for end in sorted(ends, key=lambda crossing: crossing.at_s):
            end_s = end.at_s + down_s
            index = bisect_right(times, end_s + _SLACK_S) - 1
            if index < 0:
                continue  # its sending lies before the trace begins
            del times[:index]
            start = times.pop(0)
            taken = starts[index]
            del starts[: index + 1]
            args = {**taken.args, **end.args}
            yield Span(key.session, key.lane, start, max(start, end_s), taken.name, args)


def _moved(span: Span, offset_s: float) -> Span:
    if not offset_s:
        return span
    return replace(span, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s)


def _from_zero(
    spans: list[Span], marks: list[Mark], offsets: Mapping[str, float], truncated: bool
) -> Timeline:
    starts = [span.start_s for span in spans] + [mark.at_s for mark in marks]
    zero_s = min(starts, default=0.0)
    ordered = sorted((_moved(span, -zero_s) for span in spans), key=lambda span: span.start_s)
    placed = sorted(
        (replace(mark, at_s=mark.at_s - zero_s) for mark in marks), key=lambda mark: mark.at_s
    )
    first: dict[str, float] = {}
    for session, at_s in [
        *((span.session, span.start_s) for span in ordered),
        *((mark.session, mark.at_s) for mark in placed),
    ]:
        first[session] = min(at_s, first.get(session, at_s))
    sessions = tuple(sorted(first, key=lambda session: (first[session], session)))
    return Timeline(sessions, tuple(ordered), tuple(placed), dict(offsets), truncated)
