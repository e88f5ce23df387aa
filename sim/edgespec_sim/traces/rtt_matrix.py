"""NetLatency's archives of RTT matrices: one file a time slice, tab-separated, one pair a trace.

Members are named ``SeattleData_N`` (seconds; 99 personal devices; 688 slices over about 3 hours in
the paper, so ``SLICE_S`` each) or ``PlanetLabData_N`` (ms; 490 sites). 0 means not measured; a
slice without a measurement leaves the one before it in force. The archive is never unpacked to
disk, and its members' number and sizes are bounded, so a bomb stays small.
"""

from __future__ import annotations

import io
import lzma
import re
import tarfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from edgespec_sim.traces.network_trace import NetworkTrace, TraceError

MATRIX_FORMAT: Final = "rtt-matrix"
SLICE_S: Final = 16.0
_MAX_SLICES: Final = 10_000
_MAX_SLICE_BYTES: Final = 2**23
_MAX_NODES: Final = 2000
_MEMBER: Final = re.compile(r"(?:.*/)?(?P<set>Seattle|PlanetLab)Data_(?P<slice>[0-9]{1,9})")
_UNIT_S: Final = {"Seattle": 1.0, "PlanetLab": 1e-3}
MAGIC: Final = b"\xfd7zXZ\x00"
Matrix = npt.NDArray[np.float64]


def slices(path: Path, data: bytes) -> list[tuple[int, Matrix]]:
    """(number, RTT in s) of each slice, in order; raises ``TraceError``."""
    found: dict[int, Matrix] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r|xz") as archive:
            for member in archive:
                if not member.isfile():
                    continue
                named = _MEMBER.fullmatch(member.name)
                if named is None:
                    raise TraceError(f"{path}: {member.name}: not SeattleData_N or PlanetLabData_N")
                if member.size > _MAX_SLICE_BYTES or len(found) >= _MAX_SLICES:
                    raise TraceError(
                        f"{path}: {member.name}: slice {len(found) + 1} of {member.size} bytes, "
                        f"but at most {_MAX_SLICES} slices of {_MAX_SLICE_BYTES} bytes go"
                    )
                content = archive.extractfile(member)
                assert content is not None, member.name
                unit_s = _UNIT_S[named["set"]]
                found[int(named["slice"])] = _matrix(path, member.name, content.read(), unit_s)
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise TraceError(f"{path}: expected a tar archive packed with xz: {error}") from error
    if not found:
        raise TraceError(f"{path}: holds no matrix")
    return sorted(found.items())


def _matrix(path: Path, member: str, content: bytes, unit_s: float) -> Matrix:
    rows: list[Matrix] = []
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
        where = f"{path}: {member}:{number}"
        try:
            row = np.array([float(field) for field in line.split()])
        except ValueError:
            raise TraceError(f"{where}: expected numbers, found {line[:80]!r}") from None
        if not np.isfinite(row).all() or (row < 0.0).any():
            raise TraceError(f"{where}: expected times, finite and at least 0")
        if len(row) > _MAX_NODES or (rows and len(row) != len(rows[0])):
            raise TraceError(
                f"{where}: {len(row)} columns, not those of a square of <= {_MAX_NODES}"
            )
        rows.append(row)
    if not rows or len(rows) != len(rows[0]):
        raise TraceError(f"{path}: {member}: {len(rows)} rows, not those of a square matrix")
    return np.stack(rows) * unit_s


def read_matrix(
    path: Path, name: str, data: bytes, pair: tuple[int, int] | None = None
) -> NetworkTrace:
    """The RTT from node ``pair[0]`` to ``pair[1]`` (from 0) over the slices; None: the first pair
    that the first slice has measured."""
    every = slices(path, data)
    nodes = len(every[0][1])
    if any(len(matrix) != nodes for _, matrix in every):
        raise TraceError(f"{path}: slices of different sizes")
    if pair is None:
        measured = np.argwhere(every[0][1] > 0.0)
        if not len(measured):
            raise TraceError(f"{path}: the first slice has measured no pair")
        pair = int(measured[0][0]), int(measured[0][1])
    here, there = pair
    if not (0 <= here < nodes and 0 <= there < nodes and here != there):
        raise TraceError(f"{path}: pair {pair}, but two different nodes of 0 to {nodes - 1} go")
    first = every[0][0]
    rows = [
        ((number - first) * SLICE_S, float(matrix[here, there]))
        for number, matrix in every
        if matrix[here, there] > 0.0
    ]
    if not rows:
        raise TraceError(f"{path}: pair {pair} was never measured")
    return NetworkTrace(
        f"{name}[{here},{there}]",
        MATRIX_FORMAT,
        (0.0, *(time_s for time_s, _ in rows[1:])),
        tuple(rtt_s for _, rtt_s in rows),
        (every[-1][0] - first + 1) * SLICE_S,
    )
