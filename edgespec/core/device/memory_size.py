"""How much memory a user grants: a size, a share of the machine's, or whatever is free."""

from __future__ import annotations

import re
from dataclasses import dataclass

MIB = 1 << 20
AUTO = "auto"
_UNITS = {
    "b": 1,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+|%)")
_FORM = "must be a size such as 600MiB, 0.5GiB or 600 MB, a share such as 25%, or auto"
# More than any device has: a slip of a unit is more likely.
_MOST_BYTES = 1 << 44
AUTO_SHARE = 0.9
"""Of what is free beside this process, how much ``auto`` takes: other programs grow too."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """What a machine and its limits leave to this process, in bytes."""

    total: int
    """Of the machine, or what the control group may hold, whichever is less."""
    available: int
    """What this process may take beside what it has: free memory, the rest of the control group's
    and of the process's own limits, whichever is least."""
    resident: int
    """What this process has."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """``text`` as the user wrote it; exactly one of the others says what it means."""

    text: str
    bytes: int | None = None
    share: float | None = None
    """Of the machine's memory."""
    automatic: bool = False

    def resolve(self, machine: MachineMemory) -> int:
        """The budget of the whole process, in bytes.

        Formula of auto: resident + 0.9 * available. A process of 80 MiB with 1000 MiB free gets
        980 MiB."""
        if self.bytes is not None:
            return self.bytes
        if self.share is not None:
            return int(self.share * machine.total)
        return machine.resident + int(AUTO_SHARE * machine.available)


def parse_budget(text: str) -> MemoryBudget:
    """``600MiB``, ``600 MB``, ``25%`` or ``auto``. Raises ``ValueError`` naming the text and what
    it must be."""
    if text == AUTO:
        return MemoryBudget(text, automatic=True)
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        hint = ": it lacks a unit" if re.fullmatch(r"[0-9.]+", text.strip()) else ""
        raise ValueError(f"memory budget is {text!r}{hint}, but {_FORM}")
    number, unit = float(found[1]), found[2]
    if unit == "%":
        if not 0.0 < number <= 100.0:
            raise ValueError(f"memory budget is {text!r}, but a share must be in (0%, 100%]")
        return MemoryBudget(text, share=number / 100.0)
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ValueError(
            f"memory budget is {text!r}: unknown unit {unit!r}; known are B, KB, MB, GB (powers of"
            " 1000), KiB, MiB, GiB (powers of 1024) and %"
        )
    if not 1 <= number * factor <= _MOST_BYTES:
        raise ValueError(f"memory budget is {text!r}, but must be in [1B, {_MOST_BYTES >> 30}GiB]")
    return MemoryBudget(text, bytes=int(number * factor))


def in_mib(size_bytes: float) -> str:
    """A size as a user reads it: 614.4 MiB."""
    return f"{size_bytes / MIB:.1f} MiB"
