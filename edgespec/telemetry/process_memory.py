"""Memory that this process uses, and memory that the machine and its limits leave to it."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Final

import psutil

from edgespec.core.device.memory import MachineMemory

_CGROUP: Final = Path("/sys/fs/cgroup")
_OWN_GROUPS: Final = Path("/proc/self/cgroup")
# Limits of a control group above this value mean that there is none: version 1 reports the largest
# page count.
_NO_LIMIT: Final = 1 << 60


def resident_bytes() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def trim_heap() -> None:
    """Return free memory of the C library's heap to the system, such as the memory that loading a
    tokenizer used for a moment. Does nothing if the library is not glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def machine_memory(cgroup: Path = _CGROUP, own_groups: Path = _OWN_GROUPS) -> MachineMemory:
    """Return total, available and resident memory, limited by the control group (versions 1 and 2,
    and its parents) and by the process's own limits (``RLIMIT_AS``, ``RLIMIT_DATA``)."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for limit, used in _group_limits(cgroup, own_groups):
        total, available = min(total, limit), min(available, max(0, limit - used))
    for limit, used in _process_limits():
        available = min(available, max(0, limit - used))
    return MachineMemory(total, available, resident_bytes())


def _group_limits(cgroup: Path, own_groups: Path) -> list[tuple[int, int]]:
    """Return (limit, used) of the control groups of this process and of their parents."""
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    limits = []
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, limit_name, used_name = cgroup, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
            limit_name, used_name = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # A container may not show the group's own path; then the root is the group.
        folder = root / path.lstrip("/")
        for place in (folder, *folder.parents):
            limit, used = _read_number(place / limit_name), _read_number(place / used_name)
            if limit is not None and used is not None and limit < _NO_LIMIT:
                limits.append((limit, max(0, used - _read_reclaimable(place))))
            if place == root:
                break
    return limits


def _read_reclaimable(group: Path) -> int:
    """Return the bytes of cached files that a group can drop."""
    try:
        for line in (group / "memory.stat").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(" ")
            if name in ("inactive_file", "total_inactive_file"):
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None, also for the word ``max``."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _process_limits() -> list[tuple[int, int]]:
    process = psutil.Process()
    if not hasattr(process, "rlimit"):
        return []
    memory = process.memory_info()
    limits = []
    for name, used in (("RLIMIT_AS", memory.vms), ("RLIMIT_DATA", getattr(memory, "data", 0))):
        limit = process.rlimit(getattr(psutil, name))[0]
        if limit != psutil.RLIM_INFINITY:
            limits.append((int(limit), int(used)))
    return limits
