"""Trace files as lines, with errors that give the line, and conversion of probes to a trace.

Every reader of a format gets a ``TraceText`` and returns a ``NetworkTrace``.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import math
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from edgespec.config.files import TooLargeError, read_bytes
from edgespec_sim.links.network_trace import MAX_ROWS, NetworkTrace, TraceError

# --- a trace file as lines, and errors that give the line ---------------------------------------

MAX_FILE_BYTES: Final = 2**28
"""Largest size of a file, and of its unpacked content."""


@dataclass(frozen=True, slots=True)
class TraceText:
    """The lines of one file; line numbers count from 1."""

    path: Path
    source: str
    """The format as which the lines are read. Empty if no known format begins like that."""
    lines: tuple[str, ...]
    ends_cut: bool
    """Whether the last line has no line end, so that it may be incomplete, as after a killed
    recording."""

    @property
    def name(self) -> str:
        return self.path.name

    def error(self, number: int, expected: str) -> TraceError:
        line = self.lines[number - 1] if 1 <= number <= len(self.lines) else ""
        found = f"{self.path}:{number}: expected {expected}, found {line[:80]!r}"
        return TraceError(f"{found} (read as {self.source})" if self.source else found)

    def number(
        self, number: int, text: str, what: str, *, has_decimal_commas: bool = False
    ) -> float:
        """Return ``text`` of line ``number`` as a finite number of at least 0. Raises
        ``TraceError``."""
        try:
            value = float(text.replace(",", ".", 1) if has_decimal_commas else text)
        except ValueError:
            raise self.error(number, f"{what} as a number") from None
        if not 0.0 <= value < math.inf:
            raise self.error(number, f"{what} finite and at least 0")
        return value

    def may_be_cut(self, number: int) -> bool:
        return self.ends_cut and number == len(self.lines)

    def no_rows(self) -> TraceError:
        return TraceError(f"{self.path}: holds no measurement")


_GZIP: Final = b"\x1f\x8b"
_PACKED: Final = {
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_WIDE: Final = {
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Encodings by their byte order marks. PowerShell's redirection writes logs in UTF-16."""


def read_lines(path: Path) -> tuple[tuple[str, ...], bool]:
    """Return the lines of a text file, which may be packed with gzip, and whether the last one has
    no line end. Raises ``TraceError``."""
    try:
        data = read_bytes(path, MAX_FILE_BYTES)
    except TooLargeError as error:
        raise TraceError(f"{path}: {error}") from None
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if data.startswith(_GZIP):
        data = _unpack(path, data)
    for magic, name in _PACKED.items():
        if data.startswith(magic):
            raise TraceError(f"{path}: is packed ({name}): unpack it first")
    coding = _WIDE.get(data[:2], "utf-8-sig")
    try:
        content = data.decode(coding)
    except UnicodeDecodeError as error:
        if b"\0" in data or not _IS_OLD_PING.search(data):
            line = data.count(b"\n", 0, error.start) + 1
            raise TraceError(
                f"{path}:{line}: expected UTF-8 text, found byte {error.start}"
            ) from None
        # This is Windows' ping in the code page of its console; only words are affected.
        content = data.decode("latin-1")
    lines = tuple(line.rstrip("\r") for line in content.split("\n"))
    ends_cut = lines[-1] != ""
    return (lines if ends_cut else lines[:-1]), ends_cut


_IS_OLD_PING: Final = re.compile(rb"[=<] ?\d+ ?ms TTL=\d+")


def _unpack(path: Path, data: bytes) -> bytes:
    unpacking = zlib.decompressobj(wbits=31)
    try:
        found = unpacking.decompress(data, MAX_FILE_BYTES + 1)
    except zlib.error as error:
        raise TraceError(f"{path}: cannot be unpacked: {error}") from None
    if len(found) > MAX_FILE_BYTES:
        raise TraceError(f"{path}: unpacks to more than {MAX_FILE_BYTES} bytes, which is the limit")
    return found


def read_table(
    text: TraceText, header: int = 1, delimiter: str = ","
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of each line after line ``header``, and its cells by column.

    A row may be shorter than the header, but not longer. Empty lines, comments (``#``), repetitions
    of the header and an incomplete last line are left out. Raises ``TraceError``."""
    lines = csv.reader(text.lines[header - 1 :], delimiter=delimiter)
    columns: list[str] = []
    try:
        for number, cells in ((header - 1 + lines.line_num, cells) for cells in lines):
            if not columns:
                columns = cells
            elif text.may_be_cut(number):
                return
            elif not cells or cells[0].startswith("#") or cells == columns:
                continue
            elif len(cells) > len(columns):
                raise text.error(number, f"at most {len(columns)} columns")
            else:
                yield number, dict(zip(columns, cells, strict=False))
    except csv.Error as error:
        number = header - 1 + lines.line_num
        raise text.error(number, f"a table in CSV ({error})") from None


def usual_step_s(times_s: Sequence[float]) -> float:
    """Return the median step. A single time has a step of one second."""
    return statistics.median([b - a for a, b in itertools.pairwise(times_s)] or [1.0])


def find_outages(
    times_s: Sequence[float], end_s: float, lost: Iterable[bool]
) -> tuple[tuple[float, float], ...]:
    """Return the outages of rows that were lost. A row lasts until the next one, and neighbours are
    one outage."""
    found: list[tuple[float, float]] = []
    for time_s, until_s, is_lost in zip(times_s, (*times_s[1:], end_s), lost, strict=True):
        if is_lost and found and found[-1][1] == time_s:
            found[-1] = (found[-1][0], until_s)
        elif is_lost:
            found.append((time_s, until_s))
    return tuple(found)


def stamp_s(text: TraceText, number: int, stamp: str, expected: str) -> float:
    """Return the seconds since the epoch of a time in ISO 8601. Raises ``TraceError``."""
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (ValueError, OverflowError):
        raise text.error(number, expected) from None


# --- conversion of probes to a trace ------------------------------------------------------------
# A probe has a sending time and a round-trip time, which is None if no answer came. A run of lost
# probes that lasts at least ``OUTAGE_S`` is an outage, from the first lost probe to the next
# answered one: a link that drops everything for a second is down, and messages wait. All other lost
# probes are loss. They count as the share of the probes in their window of ``LOSS_WINDOW_S``,
# without those of outages, because single losses carry little information about their neighbours.

OUTAGE_S: Final = 1.0
LOSS_WINDOW_S: Final = 5.0
_PACE_ERROR_S: Final = 0.02
"""Tolerance for a pace of a second that time stamps make slightly shorter or longer. It must not
decide whether one lost probe is an outage."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe. ``rtt_s`` is None if no answer came."""

    sent_s: float
    rtt_s: float | None


def from_probes(
    text: TraceText,
    probes: Sequence[Probe],
    step_s: float,
    *,
    counts_loss: bool = True,
    remarks: tuple[str, ...] = (),
) -> NetworkTrace:
    """Make a trace of ``probes`` in order of sending, the first of them at 0.

    The last one lasts for ``step_s``. Without ``counts_loss`` there is no loss column, because the
    format does not record losses. Raises ``TraceError`` if no probe was answered."""
    if len(probes) > MAX_ROWS:
        raise TraceError(f"{text.path}: {len(probes)} probes, but the limit is {MAX_ROWS}")
    end_s = probes[-1].sent_s + step_s
    outages_s: list[tuple[float, float]] = []
    lost: list[float] = []
    run: list[Probe] = []
    for probe in (*probes, Probe(end_s, 0.0)):
        if probe.rtt_s is None:
            run.append(probe)
            continue
        if run and probe.sent_s - run[0].sent_s >= OUTAGE_S - _PACE_ERROR_S:
            outages_s.append((run[0].sent_s, probe.sent_s))
        elif run:
            lost += [one.sent_s for one in run]
        run = []
    answered = [(probe.sent_s, probe.rtt_s) for probe in probes if probe.rtt_s is not None]
    if not answered:
        raise text.no_rows()
    times_s = [time_s for time_s, _ in answered]
    times_s[0] = 0.0  # Probes lost before the first answer have no delay of their own.
    return NetworkTrace(
        name=text.name,
        source=text.source,
        time_s=tuple(times_s),
        rtt_s=tuple(rtt_s for _, rtt_s in answered),
        duration_s=end_s,
        loss=_probes_loss(times_s, lost) if counts_loss else None,
        outages_s=tuple(outages_s),
        remarks=remarks,
    )


def _probes_loss(answered_s: Sequence[float], lost_s: Sequence[float]) -> tuple[float, ...]:
    answered_in, lost_in = _count_per_window(answered_s), _count_per_window(lost_s)
    # A window without an answer has no row; its losses count in the next window.
    for window in sorted(lost_in.keys() - answered_in.keys(), reverse=True):
        later = [other for other in answered_in if other > window]
        lost_in[min(later) if later else max(answered_in)] += lost_in.pop(window)
    windows = [int(time_s // LOSS_WINDOW_S) for time_s in answered_s]
    return tuple(lost_in[window] / (lost_in[window] + answered_in[window]) for window in windows)


def _count_per_window(times_s: Sequence[float]) -> Counter[int]:
    return Counter(int(time_s // LOSS_WINDOW_S) for time_s in times_s)
