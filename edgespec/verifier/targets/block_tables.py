"""The sessions' block tables as one array.

Theory of operation. A session has a row of the array from its first pass until it is closed. A
pass brings its table as a tuple; only a table that differs from the one of the session's last pass
is written, and of that only what differs.

Beside it stand the *slots* of each session's keys, one by one, and 0 behind its last key: what
attention gathers by. A pass adds those of its own rows (``extend``), so that a long text costs no
more than a short one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16
Blocks = npt.NDArray[np.int64]
KeySlots = npt.NDArray[np.int32]
_LEAST_ROWS, _LEAST_COLUMNS = 8, 16


class BlockTables:
    """Rows are handed out by number; a row that nobody holds is given out again."""

    def __init__(self) -> None:
        self._host = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS), dtype=np.int64)
        self._slots = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS * BLOCK_SIZE), dtype=np.int32)
        self._filled = np.zeros(_LEAST_ROWS, dtype=np.int64)
        """[rows]: how many slots stand in each row of ``_slots``; behind them are zeros."""
        self._tables: list[tuple[int, ...]] = []
        self._free: list[int] = []

    def take(self) -> int:
        """A row without blocks."""
        if self._free:
            return self._free.pop()
        self._tables.append(())
        if len(self._tables) > self._host.shape[0]:
            self._grow(2 * self._host.shape[0], self._host.shape[1])
        return len(self._tables) - 1

    def give_back(self, row: int) -> None:
        self._tables[row] = ()
        self._forget(row, 0)
        self._free.append(row)

    def write(self, row: int, blocks: tuple[int, ...]) -> None:
        """From now on ``row`` lists ``blocks``."""
        before = self._tables[row]
        if blocks == before:
            return
        width = self._host.shape[1]
        if len(blocks) > width:
            self._grow(self._host.shape[0], max(2 * width, len(blocks)))
        same = len(before)
        if blocks[:same] != before:
            pairs = enumerate(zip(blocks, before, strict=False))
            same = next((i for i, (new, old) in pairs if new != old), min(len(blocks), same))
            self._forget(row, same * BLOCK_SIZE)
        self._host[row, same : len(blocks)] = blocks[same:]
        self._tables[row] = blocks

    def extend(self, rows: Blocks, ends: Blocks) -> None:
        """Each of ``rows``, all different, has as many keys as ``ends`` says."""
        filled = self._filled[rows]
        more = ends - filled
        if int(more.min()) < 0:
            for place in np.flatnonzero(more < 0).tolist():
                self._forget(int(rows[place]), int(ends[place]))
            more = np.maximum(more, 0)
        row = np.repeat(rows, more)
        # Of each row the keys from ``filled`` on.
        key = np.arange(len(row)) + np.repeat(ends - np.cumsum(more), more)
        self._slots[row, key] = self.slots_of(row, key)
        self._filled[rows] = ends

    def slots_of(self, rows: Blocks, keys: Blocks) -> Blocks:
        """[any]: where key ``keys[i]`` of row ``rows[i]`` lies."""
        return self._host[rows, keys // BLOCK_SIZE] * BLOCK_SIZE + keys % BLOCK_SIZE

    def key_slots(self, rows: Blocks, count: int) -> KeySlots:
        """[len(rows), count]: the slots of the first ``count`` keys, as of the last ``extend``; 0
        behind a row's last key."""
        return self._slots[:, :count].take(rows, axis=0)

    def _forget(self, row: int, first: int) -> None:
        """The row has no keys from ``first`` on."""
        filled = int(self._filled[row])
        if first < filled:
            self._slots[row, first:filled] = 0
            self._filled[row] = first

    def _grow(self, rows: int, columns: int) -> None:
        height, width = self._host.shape
        grown = np.zeros((rows, columns), dtype=np.int64)
        grown[:height, :width] = self._host
        slots = np.zeros((rows, columns * BLOCK_SIZE), dtype=np.int32)
        slots[:height, : width * BLOCK_SIZE] = self._slots
        filled = np.zeros(rows, dtype=np.int64)
        filled[:height] = self._filled
        self._host, self._slots, self._filled = grown, slots, filled
