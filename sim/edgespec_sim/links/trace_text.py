"""Trace files as lines, with errors that give the line, and conversion of probes to a trace.

Every reader of a format gets a ``TraceText`` and returns a ``NetworkTrace``.
"""

from __future__ import annotations

import codecs
import csv
import itertools
import math
import os
import re
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from edgespec.config.files import TooLargeError, open_to_read, read_bytes
from edgespec_sim.links.network_trace import MAX_ROWS, NetworkTrace, TraceError

# --- a trace file as lines, and errors that give the line ---------------------------------------
# A file is read in parts, as often as a reader needs it, so that a large table takes no more memory
# than its numbers. Only readers that need the whole text (``lines``) hold it. A pipe can be read
# only once, so its content is kept.

MAX_FILE_BYTES: Final = 2**28
"""Largest size of a file that is held as a whole, and of its unpacked content."""
MAX_STREAMED_BYTES: Final = 2**33
"""Largest size of a file that is read in parts, and of its unpacked content."""
_PART_BYTES: Final = 2**18

# Part of a file that is examined to recognise its format: number of lines, characters of each.
_HEAD_LINES, _HEAD_CHARACTERS = 200, 4096
_MAX_SHOWN: Final = 80


class TraceText:
    """The lines of one file, which may be packed with gzip; line numbers count from 1.

    Raises ``TraceError`` if the file cannot be read."""

    def __init__(self, path: Path, source: str = "") -> None:
        self.path, self.source = path, source
        """``source`` is the format as which the lines are read. Empty: not known yet."""
        self._kept: bytes | None = None
        self._lines: tuple[str, ...] | None = None
        self._cut_number: int | None = None
        self._size_bytes = 0
        try:
            if not path.is_file():
                self._kept = read_bytes(path, MAX_FILE_BYTES)
        except TooLargeError as error:
            raise TraceError(f"{path}: {error}") from None
        except OSError as error:
            raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
        first = next(self._read_parts(), b"")
        for magic, name in _PACKED.items():
            if first.startswith(magic):
                raise TraceError(f"{path}: is packed ({name}): unpack it first")
        self._coding = _WIDE.get(first[:2], "utf-8-sig")
        # Windows' ping writes in the code page of its console; only words are affected.
        is_old_ping = b"\0" not in first and _IS_OLD_PING.search(first) is not None
        self._decoding_errors = "replace" if is_old_ping else "strict"
        self.head = tuple(line[:_HEAD_CHARACTERS] for line in self._take_lines(_HEAD_LINES))
        """The beginning of the first lines."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines. Raises ``TraceError`` for a file of more than ``MAX_FILE_BYTES``."""
        if self._lines is None:
            self._lines = tuple(self._read_lines(MAX_FILE_BYTES))
        return self._lines

    def numbered_lines(self, first: int = 1) -> Iterator[tuple[int, str]]:
        """Yield the number and the text of each line from line ``first`` on. Raises
        ``TraceError``."""
        lines = self._read_lines(MAX_STREAMED_BYTES) if self._lines is None else self._lines
        return itertools.islice(enumerate(lines, start=1), first - 1, None)

    def line(self, number: int) -> str:
        """Return one line. Empty if the file has fewer."""
        return next((line for _, line in self.numbered_lines(number)), "")

    def may_be_cut(self, number: int) -> bool:
        """Return whether a line that was read has no line end, so that it may be incomplete, as
        after a killed recording."""
        return number == self._cut_number

    def error(self, number: int, expected: str, column: str = "") -> TraceError:
        """Return an error that names the line, and the column if there is one."""
        line = self.line(number) if number > 0 else ""
        where = f"{self.path}:{number}: " + (f"column {column!r}: " if column else "")
        found = f"{where}expected {expected}, found {line[:_MAX_SHOWN]!r}"
        return TraceError(f"{found} (read as {self.source})" if self.source else found)

    def number(
        self,
        number: int,
        text: str,
        what: str,
        *,
        column: str = "",
        has_decimal_commas: bool = False,
    ) -> float:
        """Return ``text`` of line ``number`` as a finite number of at least 0. Raises
        ``TraceError``."""
        try:
            value = float(text.replace(",", ".", 1) if has_decimal_commas else text)
        except ValueError:
            raise self.error(number, f"{what} as a number", column) from None
        if not 0.0 <= value < math.inf:
            raise self.error(number, f"{what} finite and at least 0", column)
        return value

    def no_rows(self) -> TraceError:
        return TraceError(f"{self.path}: holds no measurement")

    # --- reading in parts -------------------------------------------------------------------

    def _take_lines(self, count: int) -> Iterator[str]:
        return itertools.islice(self._read_lines(MAX_STREAMED_BYTES), count)

    def _read_parts(self) -> Iterator[bytes]:
        """Yield the bytes of the file in parts."""
        if self._kept is not None:
            yield from (
                self._kept[start : start + _PART_BYTES]
                for start in range(0, len(self._kept), _PART_BYTES)
            )
            return
        try:
            with open_to_read(self.path) as file:
                self._size_bytes = os.fstat(file.fileno()).st_size
                while part := file.buffer.read(_PART_BYTES):
                    yield part
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be read: {error.strerror}") from error

    def _unpack_parts(self, most_bytes: int) -> Iterator[bytes]:
        """Yield the content of the file in parts, unpacked if it is packed."""
        unpack: Callable[[bytes], Iterator[bytes]] | None = None
        total_bytes = 0
        for index, packed in enumerate(self._read_parts()):
            if self._size_bytes > most_bytes:
                raise TraceError(
                    f"{self.path}: {self._size_bytes} bytes, but at most {most_bytes} are read"
                )
            if index == 0 and packed.startswith(_GZIP):
                unpack = _make_unpacker()
            try:
                for content in (packed,) if unpack is None else unpack(packed):
                    total_bytes += len(content)
                    if total_bytes > most_bytes:
                        raise TraceError(
                            f"{self.path}: unpacks to more than {most_bytes} bytes, which is the"
                            " limit"
                        )
                    yield content
            except zlib.error as error:
                raise TraceError(f"{self.path}: cannot be unpacked: {error}") from None

    def _read_lines(self, most_bytes: int) -> Iterator[str]:
        """Yield the lines without their ends, and note whether the last one has none."""
        decoder = codecs.getincrementaldecoder(self._coding)(self._decoding_errors)
        pieces: list[str] = []
        number = held = 0
        parts = ((part, False) for part in self._unpack_parts(most_bytes))
        for part, is_end in itertools.chain(parts, ((b"", True),)):
            try:
                content = decoder.decode(part, is_end)
            except UnicodeDecodeError as error:
                line = number + 1 + error.object.count(b"\n", 0, error.start)
                byte = error.object[error.start]
                raise TraceError(
                    f"{self.path}:{line}: expected UTF-8 text, found the byte 0x{byte:02x}"
                ) from None
            before, newline, rest = content.rpartition("\n")
            if not newline:
                pieces.append(rest)
                held += len(rest)
                if held > MAX_FILE_BYTES:
                    raise TraceError(
                        f"{self.path}:{number + 1}: a line of more than {MAX_FILE_BYTES}"
                        " characters, which is the limit: is this a text file?"
                    )
                continue
            for complete in ("".join(pieces) + before).split("\n"):
                number += 1
                yield complete.rstrip("\r")
            pieces, held = [rest], len(rest)
        last = "".join(pieces)
        self._cut_number = number + 1 if last else None
        if last:
            yield last.rstrip("\r")


def _make_unpacker() -> Callable[[bytes], Iterator[bytes]]:
    """Return a function that unpacks the parts of a gzip file. A part may unpack to several."""
    unpacking = zlib.decompressobj(wbits=31)

    def unpack(packed: bytes) -> Iterator[bytes]:
        nonlocal unpacking
        while packed:
            yield unpacking.decompress(packed, _PART_BYTES)
            packed = unpacking.unconsumed_tail
            if unpacking.eof:
                # A file may have several members, one after another.
                rest = unpacking.unused_data
                packed = rest if rest.startswith(_GZIP) else b""
                unpacking = zlib.decompressobj(wbits=31)

    return unpack


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
_IS_OLD_PING: Final = re.compile(rb"[=<] ?\d+ ?ms TTL=\d+")


def read_table(
    text: TraceText, header: int = 1, delimiter: str = ",", *, drops_cut: bool = True
) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the number of each line after line ``header``, and its cells by column.

    A row may be shorter than the header, but not longer. Empty lines, comments (``#``), repetitions
    of the header and, with ``drops_cut``, an incomplete last line are left out. Raises
    ``TraceError``."""
    lines = csv.reader((line for _, line in text.numbered_lines(header)), delimiter=delimiter)
    columns: list[str] = []
    try:
        for number, cells in ((header - 1 + lines.line_num, cells) for cells in lines):
            if not columns:
                columns = cells
            elif drops_cut and text.may_be_cut(number):
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


def stamp_s(text: TraceText, number: int, stamp: str, expected: str, column: str = "") -> float:
    """Return the seconds since the epoch of a time in ISO 8601. Raises ``TraceError``."""
    try:
        return parse_date_s(stamp)
    except (ValueError, OverflowError):
        raise text.error(number, expected, column) from None


def parse_date_s(stamp: str) -> float:
    """Return the seconds since the epoch of a time in ISO 8601. A time without a zone is UTC, so
    that no change of the clocks comes between two rows. Raises ``ValueError``, also before 1970,
    and ``OverflowError``."""
    date = datetime.fromisoformat(stamp)
    time_s = (date if date.tzinfo is not None else date.replace(tzinfo=UTC)).timestamp()
    if time_s < 0.0:
        raise ValueError(f"{stamp} is before 1970")
    return time_s


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
