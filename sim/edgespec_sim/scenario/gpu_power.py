"""What a verifier's GPU draws while a pass runs and while it waits, each figure with its source.

Busy is the data sheet's most, and so an upper bound: a pass that is bound by memory draws less
(517 of 700 W were published for an H200 that decodes a batch of 128). Data sheets say nothing of
idle boards; where no measurement was found that could be cited there is none here, and idle energy
is not reported. Host, fans and power supply are in none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class GpuPower:
    """In watts, of one board."""

    busy_w: float
    idle_w: float | None
    """Powered, its memory refreshed, no kernel running."""


GPU_POWERS: Final = {
    # Busy: NVIDIA H200 data sheet, SXM, "up to 700 W". Idle: 80.3 W measured on an H200 SXM by
    # nvidia-smi ("ghost power" of the ALICE GPU energy benchmark, June 2026); a second published
    # figure is 73.7 W, over boards of one provider (ConserveMode, 2026).
    "h200": GpuPower(700.0, 80.3),
    # NVIDIA H100 data sheet, SXM.
    "h100": GpuPower(700.0, None),
    # NVIDIA A100 data sheet, 80 GB SXM.
    "a100-80g": GpuPower(400.0, None),
    # NVIDIA L4 data sheet.
    "l4": GpuPower(72.0, None),
}
