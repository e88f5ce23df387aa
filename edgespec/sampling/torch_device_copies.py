"""Copies from the host to the device that holds the pool, without waiting for it.

Theory of operation. ``Tensor.to`` makes the host wait until a GPU has done all that it was given
before, and then the copy. Nobody needs that: what follows on the device is in order behind the
copy. The device reads pinned memory by itself, some time later: torch gives such memory out again
only when that has happened.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """``array`` on ``device``, where what is asked of the device from now on finds it; on a CPU it
    is the same memory."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
