"""The sessions' block tables as one array, with a copy on the device that holds the pool.

Theory of operation. A session has a row of the array from its first pass until it is closed. A
pass brings its table as a tuple; only a table that differs from the one of the session's last pass
is written, and only when some table was written since is the array copied to the device, once a
pass. On a CPU the copy is the array itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

Blocks = npt.NDArray[np.int64]
_LEAST_ROWS, _LEAST_COLUMNS = 8, 16


class BlockTables:
    """Rows are handed out by number; a row that nobody holds is given out again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = np.zeros((_LEAST_ROWS, _LEAST_COLUMNS), dtype=np.int64)
        self._on_device: torch.Tensor | None = None
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
        self._free.append(row)

    def table(self, row: int) -> tuple[int, ...]:
        """The blocks of ``row`` in the order of their positions."""
        return self._tables[row]

    def write(self, row: int, blocks: tuple[int, ...]) -> None:
        """From now on ``row`` lists ``blocks``."""
        if blocks == self._tables[row]:
            return
        width = self._host.shape[1]
        if len(blocks) > width:
            self._grow(self._host.shape[0], max(2 * width, len(blocks)))
        self._host[row, : len(blocks)] = blocks
        self._tables[row] = blocks
        self._on_device = None

    def rows(self, rows: list[int], count: int) -> Blocks:
        """int64 [len(rows), count]: the first ``count`` blocks of each; behind the end of a table
        stands whatever stood there before."""
        return self._host[rows, :count]

    def on_device(self) -> torch.Tensor:
        """int32 [rows, blocks] on the pool's device; valid until the next ``write``."""
        if self._on_device is None:
            table = torch.from_numpy(self._host.astype(np.int32))
            self._on_device = table.to(self._device)
        return self._on_device

    def _grow(self, rows: int, columns: int) -> None:
        grown = np.zeros((rows, columns), dtype=np.int64)
        grown[: self._host.shape[0], : self._host.shape[1]] = self._host
        self._host, self._on_device = grown, None
