"""Reading a trace of any known format into a ``NetworkTrace``.

The format is told by the content, never by the file's name. Every error is a ``TraceError`` that
names the file, the line and what was expected there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from edgespec_sim.traces.network_trace import NetworkTrace, TraceError
from edgespec_sim.traces.readers import (
    cicv5g,
    mahimahi,
    matrix,
    ping,
    plain,
    rtt_csv,
    starlink,
)
from edgespec_sim.traces.readers.plain import write_plain
from edgespec_sim.traces.readers.source import TraceText, as_text, read_bytes

__all__ = ["FORMATS", "read_pair", "read_trace", "write_plain"]

_TEXT_FORMATS: Final[
    dict[str, tuple[Callable[[str], bool], Callable[[TraceText], NetworkTrace]]]
] = {
    plain.FORMAT: (plain.sniff, plain.read),
    ping.FORMAT: (ping.sniff, ping.read),
    rtt_csv.FORMAT: (rtt_csv.sniff, rtt_csv.read),
    cicv5g.FORMAT: (cicv5g.sniff, cicv5g.read),
    starlink.FORMAT: (starlink.sniff, starlink.read),
    mahimahi.FORMAT: (mahimahi.sniff, mahimahi.read),
}
FORMATS: Final = (*_TEXT_FORMATS, matrix.FORMAT)
# What is looked at to tell the format.
_HEAD_CHARACTERS: Final = 8192


def read_trace(
    path: Path | str,
    *,
    format: str | None = None,
    name: str | None = None,
    pair: tuple[int, int] | None = None,
) -> NetworkTrace:
    """The trace in a file; ``format`` None: told from the content. ``pair`` chooses two nodes of
    an RTT matrix and goes with that format only. Raises ``TraceError``."""
    path = Path(path)
    name = path.name if name is None else name
    if format is not None and format not in FORMATS:
        raise TraceError(f"{path}: no format {format!r}; known are {', '.join(FORMATS)}")
    data = read_bytes(path)
    if format == matrix.FORMAT or (format is None and data.startswith(matrix.MAGIC)):
        return matrix.read(path, name, data, pair)
    if pair is not None:
        raise TraceError(f"{path}: pair {pair} is given, but only {matrix.FORMAT} has pairs")
    text = as_text(path, name, data)
    if not any(text.lines):
        raise text.no_rows()
    if format is None:
        head = "\n".join(text.lines[:200])[:_HEAD_CHARACTERS]
        format = next((known for known, (sniff, _) in _TEXT_FORMATS.items() if sniff(head)), None)
    if format is None:
        raise text.error(1, f"the beginning of a known format ({', '.join(FORMATS)})")
    return _TEXT_FORMATS[format][1](text)


def read_pair(up: Path | str, down: Path | str, *, rtt_s: float = 0.0) -> NetworkTrace:
    """Two packet-delivery files of Mahimahi, one a direction, as one trace; ``rtt_s`` is the delay
    that such files do not know. Raises ``TraceError``."""
    return mahimahi.paired(
        read_trace(up, format=mahimahi.FORMAT), read_trace(down, format=mahimahi.FORMAT), rtt_s
    )
