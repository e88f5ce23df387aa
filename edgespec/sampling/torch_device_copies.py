"""Copies from the host to the device that holds the pool, without waiting for it.

Theory of operation. ``Tensor.to`` makes the host wait until a GPU has done all that it was given
before, and then the copy. Nobody needs that: what follows on the device is in order behind the
copy. The device reads pinned memory by itself, some time later: torch gives such memory out again,
and ``StagedBytes`` lets its own be written again, only when that has happened.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, where what is asked of the device from now on finds it; on a CPU it
    is the same memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make ``device`` this thread's current one for a while where that matters: Triton launches its
    kernels there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class StagedBytes:
    """So many bytes on the host, and as many at a fixed place of the device; one copy between.

    ``host`` (uint8, numpy) is written between ``begin`` and ``send``.
    """

    def __init__(self, size_bytes: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._source = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        self._read = torch.cuda.Event() if on_gpu else None
        self.host: npt.NDArray[np.uint8] = self._source.numpy()
        self.device = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def begin(self) -> None:
        """Return when the last copy has read ``host``; mostly it has long done so."""
        if self._read is not None:
            self._read.synchronize()

    def send(self, count: int) -> None:
        """Copy the first ``count`` bytes, in order with what the device is asked for."""
        self.device[:count].copy_(self._source[:count], non_blocking=True)
        if self._read is not None:
            self._read.record()
