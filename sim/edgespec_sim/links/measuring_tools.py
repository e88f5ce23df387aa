"""Output of other tools that measure networks: irtt, and iperf3 as JSON and as text.

irtt sends small packets at a steady pace, so its file is a trace of delays. iperf3 fills the link,
so its file is a trace of capacity, which is the rate it carried. The round trips in it are those of
packets behind a full queue. They are left out, since a trace's delay is that of a single packet.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgespec_sim.links.network_trace import NetworkTrace, TraceError
from edgespec_sim.links.trace_text import OUTAGE_S, Probe, TraceText, from_probes


def is_json(head: str) -> bool:
    return head.lstrip().startswith("{")


def is_irtt(head: str) -> bool:
    return is_json(head) and '"irtt"' in head


def read_json(text: TraceText) -> NetworkTrace:
    """Read the output of ``irtt client -o FILE``, ``iperf3 -J`` or ``iperf3 --json-stream``. Raises
    ``TraceError`` that names the element."""
    data = _parse_json(text)
    if isinstance(data.get("round_trips"), list):
        text.source = "irtt"
        return _read_irtt(text, _Element(text, "", data))
    if isinstance(data.get("intervals"), list):
        text.source = "iperf3-json"
        return _read_iperf3(text, _Element(text, "", data))
    raise text.error(1, "JSON of irtt (round_trips) or of iperf3 (intervals)")


class _Element:
    """A value in a JSON document with its place, such as ``round_trips[3].delay``. Its errors name
    that place."""

    def __init__(self, text: TraceText, place: str, value: object) -> None:
        self._text, self.place, self.value = text, place, value

    def __getitem__(self, name: str) -> _Element:
        found = self.get(name)
        if found is None:
            raise self.error(f"a field {name!r}")
        return found

    def get(self, name: str) -> _Element | None:
        """Return a field of this object, or None if it has no such field or the field is null."""
        if not isinstance(self.value, dict):
            raise self.error("an object")
        place = f"{self.place}.{name}" if self.place else name
        value = self.value.get(name)
        return None if value is None else _Element(self._text, place, value)

    def items(self) -> list[_Element]:
        """Return the elements of this array."""
        if not isinstance(self.value, list):
            raise self.error("an array")
        return [
            _Element(self._text, f"{self.place}[{index}]", value)
            for index, value in enumerate(self.value)
        ]

    def number(self) -> float:
        """Return this as a finite number."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise self.error("a number")
        try:
            found = float(value)
        except (ValueError, OverflowError):
            raise self.error("a number") from None
        if not math.isfinite(found):
            raise self.error("a finite number")
        return found

    def error(self, expected: str) -> TraceError:
        shown = repr(self.value)[:60]
        where = f"{self._text.path}: {self.place or 'the document'}"
        return TraceError(f"{where}: expected {expected}, found {shown}")


def _parse_json(text: TraceText) -> dict[str, Any]:
    whole = "\n".join(text.lines)
    try:
        data = json.loads(whole)
    except RecursionError:
        raise text.error(1, "JSON that is nested less deep") from None
    except json.JSONDecodeError as error:
        if (stream := _parse_stream(text)) is not None:
            return stream
        raise text.error(error.lineno, f"JSON ({error.msg})") from None
    if not isinstance(data, dict):
        raise text.error(1, "a JSON object")
    return {"start": {}, "intervals": [data["data"]]} if _is_event(data, "interval") else data


def _parse_stream(text: TraceText) -> dict[str, Any] | None:
    """Return the events of ``--json-stream``, one per line, as one report. None if the file is no
    such stream."""
    found: dict[str, Any] = {"start": {}, "intervals": []}
    for number, line in enumerate(text.lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            if text.may_be_cut(number):
                break
            return None
        if not isinstance(event, dict) or "event" not in event:
            return None
        if _is_event(event, "start"):
            found["start"] = event["data"]
        elif _is_event(event, "interval"):
            found["intervals"].append(event["data"])
    return found if found["intervals"] else None


def _is_event(event: Mapping[str, Any], name: str) -> bool:
    return event.get("event") == name and isinstance(event.get("data"), dict)


def _read_irtt(text: TraceText, data: _Element) -> NetworkTrace:
    """Read a report of irtt. Times are in nanoseconds, of the monotonic clock if it has them, else
    of the wall clock."""
    interval = data["config"]["params"]["interval"]
    interval_s = interval.number() / 1e9
    if interval_s <= 0.0:
        raise interval.error("an interval above 0")
    trips = data["round_trips"].items()
    clock = "monotonic" if trips and _find_sent_s(trips[0], "monotonic") is not None else "wall"
    probes: list[Probe] = []
    first_s = 0.0
    for index, trip in enumerate(trips):
        sent_s = _find_sent_s(trip, clock)
        sent_s = index * interval_s if sent_s is None else sent_s
        first_s = first_s if probes else sent_s
        if probes and sent_s - first_s <= probes[-1].sent_s:
            raise trip.error("a time of sending after that of the probe before")
        rtt = trip["delay"].get("rtt") if trip["lost"].value in (False, "false") else None
        # Clocks may be corrected by more than a round trip.
        rtt_s = None if rtt is None else max(0.0, rtt.number() / 1e9)
        probes.append(Probe(sent_s - first_s, rtt_s))
    if not probes:
        raise text.no_rows()
    return from_probes(text, probes, interval_s)


def _find_sent_s(trip: _Element, clock: str) -> float | None:
    sent_ns = trip["timestamps"]["client"]["send"].get(clock)
    return None if sent_ns is None else sent_ns.number() / 1e9


Rates = list[tuple[float, float, float]]
"""Start and end of each interval in seconds, and its bits per second."""


def _read_iperf3(text: TraceText, data: _Element) -> NetworkTrace:
    """Read a report of iperf3. ``sum`` is the direction up unless the test is reversed;
    ``sum_bidir_reverse`` is down."""
    test = data["start"].get("test_start")
    settings = test.value if test is not None and isinstance(test.value, dict) else {}
    is_down = bool(settings.get("reverse"))
    up: Rates = []
    down: Rates = []
    for interval in data["intervals"].items():
        for key, rates in (("sum", down if is_down else up), ("sum_bidir_reverse", down)):
            one = interval.get(key)
            if one is None or ((omitted := one.get("omitted")) is not None and omitted.value):
                continue
            start_s, end_s = one["start"].number(), one["end"].number()
            rate = one["bits_per_second"].number()
            latest_s = rates[-1][1] if rates else start_s
            if not latest_s - 1e-6 <= start_s < end_s or rate < 0.0:
                raise one.error(f"an interval from {latest_s:g} s on with a rate of at least 0")
            rates.append((start_s, end_s, rate))
    warnings: tuple[str, ...] = ()
    if str(settings.get("protocol", "")).upper() == "UDP":
        target = settings.get("target_bitrate")
        at = f" ({target / 1e6:g} Mbit/s)" if isinstance(target, int | float) and target else ""
        warnings = (
            f"iperf3 sent UDP at a rate of its own{at}: its result may be that rate and not the"
            " capacity",
        )
    return _make_capacity_trace(text, up, down, warnings)


def _make_capacity_trace(
    text: TraceText, up: Rates, down: Rates, warnings: tuple[str, ...] = ()
) -> NetworkTrace:
    """Make a trace of the rates carried. Intervals without any are joined to the next one, so that
    bytes are conserved; ``OUTAGE_S`` or more of them are an outage."""
    ways = [way for way in (_make_steps(text, up), _make_steps(text, down)) if way is not None]
    if not ways:
        raise text.no_rows()
    end_s = min(end_s for _, _, _, end_s in ways)
    up_way, down_way = (_make_steps(text, rates) for rates in (up, down))
    times_s = sorted({time_s for way in ways for time_s in way[0] if time_s < end_s})
    outages_s = sorted({outage for way in ways for outage in way[2] if outage[0] < end_s})
    return NetworkTrace(
        text.name,
        text.source,
        tuple(times_s),
        None,
        end_s,
        up_bits_per_s=_rates_at(up_way, times_s),
        down_bits_per_s=_rates_at(down_way, times_s),
        outages_s=_merge_outages(outages_s, end_s),
        remarks=(
            "iperf3 measures the rate of a full link; its round trips are those of a full"
            " queue and were left out",
        ),
        warnings=warnings,
    )


_Way = tuple[list[float], list[float], list[tuple[float, float]], float]
"""Times, rates, outages and the end of one direction."""


def _make_steps(text: TraceText, rates: Rates) -> _Way | None:
    if not any(rate > 0.0 for _, _, rate in rates):
        return None
    first_s = rates[0][0]
    times_s: list[float] = []
    values: list[float] = []
    outages_s: list[tuple[float, float]] = []
    free_s = 0.0
    end_s = 0.0
    for start_s, stop_s, rate in rates:
        if not end_s - 1e-6 <= start_s - first_s < stop_s - first_s or rate < 0.0:
            raise TraceError(f"{text.path}: the interval from {start_s:g} to {stop_s:g} s is odd")
        start_s, end_s = start_s - first_s, stop_s - first_s
        if rate == 0.0:
            continue
        if start_s - free_s >= OUTAGE_S - 1e-9:
            outages_s.append((free_s, start_s))
            free_s = start_s
        times_s.append(free_s)
        values.append(rate * (end_s - start_s) / (end_s - free_s))
        free_s = end_s
    if end_s - free_s >= OUTAGE_S - 1e-9:
        outages_s.append((free_s, end_s))
    times_s[0] = 0.0
    return times_s, values, outages_s, end_s


def _rates_at(way: _Way | None, times_s: Sequence[float]) -> tuple[float, ...] | None:
    """Return the rate that holds at each of these times."""
    if way is None:
        return None
    known, values = way[0], way[1]
    found, place = [], 0
    for time_s in times_s:
        while place + 1 < len(known) and known[place + 1] <= time_s:
            place += 1
        found.append(values[place])
    return tuple(found)


def _merge_outages(
    outages_s: Sequence[tuple[float, float]], end_s: float
) -> tuple[tuple[float, float], ...]:
    """Merge the outages of both directions into one list. An outage of one direction is an outage
    of both, as no answer passes."""
    found: list[tuple[float, float]] = []
    for start_s, stop_s in outages_s:
        stop_s = min(stop_s, end_s)
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop_s))
        else:
            found.append((start_s, stop_s))
    return tuple(found)


# --- iperf3's text -----------------------------------------------------------------------------
# A line is `[  5]   0.00-1.00   sec  1.25 MBytes  10.5 Mbits/sec    0    173 KBytes`. With several
# streams, a line `[SUM]` follows theirs. `[TX-C]` or `[RX-C]` gives the direction in a
# bidirectional test.

_LINE: Final = re.compile(
    r"^\[ *(?P<stream>\d+|SUM)\](?:\[(?P<way>[TR]X)-[CS]\])? +(?P<start>[0-9.]+)- *(?P<end>[0-9.]+)"
    r" +sec +[0-9.]+ \w*Bytes +(?P<rate>[0-9.]+) (?P<unit>[KMGT]?)bits/sec(?P<rest>.*)$"
)
_FACTORS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SUMMED_UP: Final = re.compile(r"\b(sender|receiver)\b|\(omitted\)")


def is_iperf3_text(head: str) -> bool:
    return any(_LINE.match(line) for line in head.splitlines())


def read_iperf3_text(text: TraceText) -> NetworkTrace:
    """Read the text that iperf3 prints. Raises ``TraceError``."""
    found: dict[tuple[bool, bool], Rates] = {}
    is_reversed = any(line.startswith("Reverse mode") for line in text.lines)
    for number, line in text.numbered_lines():
        one = _LINE.match(line)
        if one is None or text.may_be_cut(number) or _SUMMED_UP.search(one["rest"]):
            continue
        start_s = text.number(number, one["start"], "the beginning of an interval in s")
        end_s = text.number(number, one["end"], "the end of an interval in s")
        rate = text.number(number, one["rate"], "a rate") * _FACTORS[one["unit"]]
        is_down = one["way"] == "RX" if one["way"] else is_reversed
        is_sum = one["stream"] == "SUM"
        found.setdefault((is_down, is_sum), []).append((start_s, end_s, rate))
    up, down = (found.get((way, True)) or found.get((way, False)) or [] for way in (False, True))
    return _make_capacity_trace(text, up, down)
