"""Recorded movement of devices: SUMO's floating car data, GPX, and tables of positions.

A track is the positions of one device over time, in metres. Between two positions a device moves
evenly; before its first one and behind its last one it stands there. Latitude and longitude become
metres east and north of the first position, on a sphere of the Earth's mean radius. That is right
within 0.3 % over some tens of kilometres.

XML is read in parts and by events. Document types and entities are refused, so that no file can
expand to more than it holds.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.parsers import expat

import numpy as np
import numpy.typing as npt

from edgespec_sim.links.column_tables import NamedTable, cut_cells, find_gaps, first_line
from edgespec_sim.links.columns import Columns, TableKind
from edgespec_sim.links.network_trace import TraceError
from edgespec_sim.links.trace_text import TraceText, parse_date_s

AUTO: Final = "auto"
MAX_POINTS: Final = 5_000_000
MAX_TRACKS: Final = 100_000
_EARTH_M: Final = 6_371_008.8
_PART_LINES: Final = 4096
_HEADER: Final = "time_s,device,x_m,y_m"
Floats = npt.NDArray[np.float64]


class Track:
    """The positions of one device in order of time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.time_s, self.x_m, self.y_m = array("d"), array("d"), array("d")
        self.last_line = 0


@dataclass(frozen=True, slots=True)
class Mobility:
    """Tracks of several devices; the earliest time is 0."""

    name: str
    source: str
    tracks: tuple[Track, ...]

    @property
    def span_s(self) -> float:
        """Time from the first to the last position."""
        return max(track.time_s[-1] for track in self.tracks)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Values that are probably not intended."""
        if self.source != "sumo-fcd" or sum(len(track.time_s) for track in self.tracks) < 2:
            return ()
        low_x, high_x = _find_range(track.x_m for track in self.tracks)
        low_y, high_y = _find_range(track.y_m for track in self.tracks)
        if 0.0 < max(high_x - low_x, high_y - low_y) < 1.0:
            return (
                "all positions lie within 1 m: if they are longitude and latitude"
                " (--fcd-output.geo), name the format sumo-fcd-geo",
            )
        return ()


class RecordedWalk:
    """Moves devices along the first tracks of a recording.

    The smallest rectangle around these tracks lies in the middle of a square of ``side_m`` with a
    corner at the origin. Raises ``ValueError`` if there are too few tracks or the square is too
    small."""

    def __init__(self, mobility: Mobility, devices: int, side_m: float) -> None:
        tracks = mobility.tracks[:devices]
        if len(tracks) < devices:
            raise ValueError(
                f"radio.mobility: {mobility.name} has {len(tracks)} tracks, but the scenario has"
                f" {devices} devices"
            )
        low_x, high_x = _find_range(track.x_m for track in tracks)
        low_y, high_y = _find_range(track.y_m for track in tracks)
        widest_m = max(high_x - low_x, high_y - low_y)
        if widest_m > side_m:
            raise ValueError(
                f"radio.area_m is {side_m:g}, but the tracks of {mobility.name} are"
                f" {widest_m:.0f} m wide: set radio.area_m to at least {math.ceil(widest_m)}"
            )
        self._tracks = [
            (
                np.array(track.time_s),
                np.array(track.x_m) - (low_x + high_x - side_m) / 2.0,
                np.array(track.y_m) - (low_y + high_y - side_m) / 2.0,
            )
            for track in tracks
        ]
        self._now_s = 0.0
        self.positions_m = self._find_positions()
        """Positions of shape (devices, 2)."""

    def advance(self, seconds: float) -> Floats:
        """Move all devices. Returns the distance in metres from each one's last position to its new
        one, of shape (devices,)."""
        before_m = self.positions_m
        self._now_s += seconds
        self.positions_m = self._find_positions()
        gap_m = self.positions_m - before_m
        return np.asarray(np.hypot(gap_m[:, 0], gap_m[:, 1]))

    def _find_positions(self) -> Floats:
        return np.array(
            [
                (np.interp(self._now_s, times_s, x_m), np.interp(self._now_s, times_s, y_m))
                for times_s, x_m, y_m in self._tracks
            ]
        )


def _find_range(columns: Iterator[array[float]]) -> tuple[float, float]:
    ranges = [(min(column), max(column)) for column in columns]
    return min(low for low, _ in ranges), max(high for _, high in ranges)


class _Tracks:
    """Collects positions by device. Errors name the line."""

    def __init__(self, text: TraceText) -> None:
        self.text = text
        self.by_name: dict[str, Track] = {}
        self._count = 0

    def add(self, number: int, name: str, time_s: float, x_m: float, y_m: float) -> None:
        track = self.by_name.get(name)
        if track is None:
            if len(self.by_name) == MAX_TRACKS:
                raise TraceError(f"{self.text.path}: more than {MAX_TRACKS} tracks")
            track = self.by_name[name] = Track(name)
        times_s = track.time_s
        if times_s and time_s < times_s[-1]:
            expected = f"a time not before {times_s[-1]:.12g} s, the one of {name} in line"
            raise self.text.error(number, f"{expected} {track.last_line}")
        track.last_line = number
        if times_s and time_s == times_s[-1]:
            track.x_m[-1], track.y_m[-1] = x_m, y_m
            return
        if self._count == MAX_POINTS:
            raise TraceError(f"{self.text.path}: more than {MAX_POINTS} positions")
        self._count += 1
        times_s.append(time_s)
        track.x_m.append(x_m)
        track.y_m.append(y_m)

    def finish(self, *, starts_alone: bool = False) -> Mobility:
        """Return the tracks with the earliest time at 0, or with ``starts_alone`` that of each
        track."""
        if not self.by_name:
            raise self.text.no_rows()
        tracks = tuple(self.by_name.values())
        first_s = min(track.time_s[0] for track in tracks)
        for track in tracks:
            begin_s = track.time_s[0] if starts_alone else first_s
            track.time_s = array("d", (time_s - begin_s for time_s in track.time_s))
        return Mobility(self.text.name, self.text.source, tracks)


class _Sphere:
    """Converts degrees to metres east and north of the first position."""

    def __init__(self) -> None:
        self._origin: tuple[float, float] | None = None

    def to_metres(self, lat_deg: float, lon_deg: float) -> tuple[float, float]:
        if self._origin is None:
            self._origin = lat_deg, lon_deg
        lat0_deg, lon0_deg = self._origin
        # The shortest way around, for tracks across the date line.
        east_deg = (lon_deg - lon0_deg + 180.0) % 360.0 - 180.0
        x_m = math.radians(east_deg) * math.cos(math.radians(lat0_deg)) * _EARTH_M
        return x_m, math.radians(lat_deg - lat0_deg) * _EARTH_M


def _parse_degrees(text: TraceText, number: int, value: str, name: str, most: float) -> float:
    try:
        degrees = float(value)
    except ValueError:
        degrees = math.nan
    if not -most <= degrees <= most:
        raise text.error(number, f"degrees from -{most:g} to {most:g}, not {value!r}", name)
    return degrees


def _parse_metres(text: TraceText, number: int, value: str, name: str) -> float:
    try:
        metres = float(value)
    except ValueError:
        metres = math.nan
    if not math.isfinite(metres):
        raise text.error(number, f"a finite number, not {value!r}", name)
    return metres


# --- XML by events -------------------------------------------------------------------------------


class _XmlEvents:
    """Parses a file as XML and calls ``start`` with each element's line, name and attributes, and
    ``end`` with its line, name and text. Names have no prefix. Raises ``TraceError``."""

    def __init__(
        self,
        text: TraceText,
        start: Callable[[int, str, Mapping[str, str]], None],
        end: Callable[[int, str, str], None] | None = None,
    ) -> None:
        self._text, self._start, self._end = text, start, end
        self._parser = parser = expat.ParserCreate()
        parser.StartElementHandler = self._begin_element
        parser.StartDoctypeDeclHandler = self._refuse
        parser.EntityDeclHandler = self._refuse
        self._content: list[str] = []
        if end is not None:
            parser.EndElementHandler = self._end_element
            parser.CharacterDataHandler = self._content.append

    def parse(self) -> None:
        lines = (line for _, line in self._text.numbered_lines())
        try:
            while part := list(itertools.islice(lines, _PART_LINES)):
                self._parser.Parse("\n".join(part) + "\n", False)
            self._parser.Parse("", True)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise self._text.error(error.lineno, f"XML ({reason})") from None

    def _begin_element(self, name: str, attributes: dict[str, str]) -> None:
        self._content.clear()
        self._start(self._parser.CurrentLineNumber, name.rpartition(":")[2], attributes)

    def _end_element(self, name: str) -> None:
        assert self._end is not None, "as the handler is set only then"
        content = "".join(self._content).strip()
        self._content.clear()
        self._end(self._parser.CurrentLineNumber, name.rpartition(":")[2], content)

    def _refuse(self, *_: object) -> None:
        line = self._parser.CurrentLineNumber
        raise self._text.error(line, "no document type and no entities, which are not expanded")


# --- SUMO ----------------------------------------------------------------------------------------
# ``sumo --fcd-output FILE`` writes ``<timestep time="S">`` with a ``<vehicle id= x= y= .../>`` (or
# person, or container) for each one on the road. Positions are metres of the network, or longitude
# and latitude with ``--fcd-output.geo``, which nothing in the file shows. Time 0 is the first step.

_MOVING: Final = ("vehicle", "person", "container")


def _read_fcd(text: TraceText, is_geo: bool = False) -> Mobility:
    tracks, sphere = _Tracks(text), _Sphere()
    now_s: float | None = None

    def start(number: int, name: str, attributes: Mapping[str, str]) -> None:
        nonlocal now_s
        if name == "timestep":
            time = _require(text, number, name, attributes, "time")
            now_s = text.number(number, time, "a time in s", column="time")
        elif name in _MOVING:
            if now_s is None:
                raise text.error(number, f"a {name} within a timestep")
            identity = _require(text, number, name, attributes, "id")
            x, y = (_require(text, number, name, attributes, one) for one in ("x", "y"))
            if is_geo:
                lat_deg = _parse_degrees(text, number, y, "y", 90.0)
                place = sphere.to_metres(lat_deg, _parse_degrees(text, number, x, "x", 180.0))
            else:
                place = _parse_metres(text, number, x, "x"), _parse_metres(text, number, y, "y")
            tracks.add(number, identity, now_s, *place)

    _XmlEvents(text, start).parse()
    return tracks.finish()


def _require(
    text: TraceText, number: int, element: str, attributes: Mapping[str, str], name: str
) -> str:
    value = attributes.get(name)
    if value is None:
        raise text.error(number, f"a {element} with the attribute {name}", name)
    return value


# --- GPX -----------------------------------------------------------------------------------------
# GPX 1.0 and 1.1: each ``<trk>`` is a track of its ``<trkpt lat= lon=>`` with a ``<time>``. Routes,
# waypoints, elevations and extensions are ignored. Every track begins at 0, since a file usually
# holds recordings of several days.


def _read_gpx(text: TraceText) -> Mobility:
    tracks, sphere = _Tracks(text), _Sphere()
    inside: list[str] = []
    number_of_track = 0
    point: tuple[int, float, float] | None = None
    time_s: float | None = None
    names: dict[str, str] = {}

    def start(number: int, name: str, attributes: Mapping[str, str]) -> None:
        nonlocal number_of_track, point, time_s
        inside.append(name)
        if name == "trk":
            number_of_track += 1
        elif name == "trkpt":
            lat, lon = (_require(text, number, name, attributes, one) for one in ("lat", "lon"))
            lat_deg = _parse_degrees(text, number, lat, "lat", 90.0)
            point = number, lat_deg, _parse_degrees(text, number, lon, "lon", 180.0)
            time_s = None

    def end(number: int, name: str, content: str) -> None:
        nonlocal point, time_s
        inside.pop()
        parent = inside[-1] if inside else ""
        key = f"track {number_of_track}"
        if name == "name" and parent == "trk":
            names[key] = content
        elif name == "time" and parent == "trkpt":
            try:
                time_s = parse_date_s(content)
            except (ValueError, OverflowError):
                expected = f"a time in ISO 8601, not {content!r}"
                raise text.error(number, expected, "time") from None
        elif name == "trkpt" and point is not None:
            if time_s is None:
                raise text.error(point[0], "a trkpt with a time", "time")
            tracks.add(point[0], key, time_s, *sphere.to_metres(point[1], point[2]))
            point = None

    _XmlEvents(text, start, end).parse()
    for key, track in tracks.by_name.items():
        track.name = names.get(key) or key
    return tracks.finish(starts_alone=True)


# --- tables --------------------------------------------------------------------------------------


def _read_positions(text: TraceText) -> Mobility:
    columns = Columns.of("time=time_s:s,device=device,x=x_m:m,y=y_m:m", TableKind.MOBILITY)
    return _read_columns(text, columns)


def _read_columns(text: TraceText, columns: Columns) -> Mobility:
    tracks, sphere = _Tracks(text), _Sphere()
    table = NamedTable(text, columns)
    device = columns.find("device")
    is_geo = columns.find("lat") is not None
    uses = [columns.find(what) for what in (("lat", "lon") if is_geo else ("x", "y"))]
    for number, cells in table.rows():
        time_s = table.time_s(number, cells)
        name = "device" if device is None else table.cell(cells, "device")
        if not name:
            raise text.error(
                number, "the name of a device", "" if device is None else device.column
            )
        values = []
        for use in uses:
            assert use is not None, "as Columns makes sure"
            cell = table.cell(cells, use.what)
            if use.what in ("lat", "lon"):
                most = 90.0 if use.what == "lat" else 180.0
                values.append(_parse_degrees(text, number, cell, use.column, most))
            else:
                values.append(_parse_metres(text, number, cell, use.column) * use.factor)
        first, second = values
        x_m, y_m = sphere.to_metres(first, second) if is_geo else (first, second)
        tracks.add(number, name, time_s, x_m, y_m)
    return tracks.finish()


@dataclass(frozen=True, slots=True)
class _Format:
    read: Callable[[TraceText], Mobility]
    is_like: Callable[[str], bool] | None
    """Returns whether the beginning of a file is of this format. None: it must be named."""


MOBILITY_FORMATS: Final[dict[str, _Format]] = {
    "sumo-fcd": _Format(_read_fcd, lambda head: "<fcd-export" in head),
    "sumo-fcd-geo": _Format(lambda text: _read_fcd(text, is_geo=True), None),
    "gpx": _Format(_read_gpx, lambda head: "<gpx" in head),
    "positions": _Format(
        _read_positions,
        lambda head: (
            set(_HEADER.split(",")) <= set(cut_cells(first_line(head.split("\n"))[1], ","))
        ),
    ),
}
"""The formats of movement by name."""


def find_mobility_format(text: TraceText) -> str:
    """Return the format that the beginning of a file shows, or an empty text."""
    head = "\n".join(text.head)
    return next(
        (
            name
            for name, one in MOBILITY_FORMATS.items()
            if one.is_like is not None and one.is_like(head)
        ),
        "",
    )


def read_mobility(path: Path, columns: Columns | None = None, format: str = AUTO) -> Mobility:
    """Read recorded movement. ``columns`` is the meaning of a table's columns, in place of a
    ``format``. Raises ``TraceError`` that names the line."""
    if format not in (*MOBILITY_FORMATS, AUTO):
        known = ", ".join(MOBILITY_FORMATS)
        raise TraceError(f"format is {format!r}, but must be auto or one of {known}")
    text = TraceText(path)
    if not any(text.head):
        raise text.no_rows()
    if columns is not None:
        text.source = "table"
        return _read_columns(text, columns)
    text.source = find_mobility_format(text) if format == AUTO else format
    if not text.source:
        known = ", ".join(MOBILITY_FORMATS)
        raise text.error(1, f"the beginning of a known format of movement ({known})")
    return MOBILITY_FORMATS[text.source].read(text)


# --- a summary, and the plain table --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MobilitySummary:
    """Statistics of recorded movement."""

    span_s: float
    tracks: int
    positions: int
    width_m: float
    """East-west extent of all tracks."""
    height_m: float
    speed_m_per_s: tuple[float, float]
    """Median and 95th percentile of the speeds between positions. 0 without movement."""
    gaps: int
    """Pauses within a track of more than five usual ones, and than a second."""


def summarise_mobility(mobility: Mobility) -> MobilitySummary:
    """Return statistics of recorded movement."""
    tracks = mobility.tracks
    low_x, high_x = _find_range(track.x_m for track in tracks)
    low_y, high_y = _find_range(track.y_m for track in tracks)
    speeds = np.concatenate([_find_speeds(track) for track in tracks])
    median, p95 = np.percentile(speeds, (50, 95)) if len(speeds) else (0.0, 0.0)
    return MobilitySummary(
        span_s=mobility.span_s,
        tracks=len(tracks),
        positions=sum(len(track.time_s) for track in tracks),
        width_m=high_x - low_x,
        height_m=high_y - low_y,
        speed_m_per_s=(float(median), float(p95)),
        gaps=sum(len(find_gaps(track.time_s)) for track in tracks),
    )


def _find_speeds(track: Track) -> Floats:
    steps_m = np.hypot(np.diff(np.array(track.x_m)), np.diff(np.array(track.y_m)))
    return np.asarray(steps_m / np.diff(np.array(track.time_s)))


def write_positions(mobility: Mobility) -> str:
    """Return the plain table of positions, by device and in order of time. Names are quoted as CSV
    demands."""
    lines = [_HEADER]
    for track in mobility.tracks:
        name = track.name
        if any(one in name for one in ',"\n'):
            name = '"' + name.replace('"', '""') + '"'
        rows = zip(track.time_s, track.x_m, track.y_m, strict=True)
        lines += [f"{time_s!r},{name},{x_m!r},{y_m!r}" for time_s, x_m, y_m in rows]
    return "\n".join(lines) + "\n"
