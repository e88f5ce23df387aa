"""A control group whose memory limit the kernel enforces (versions 1 and 2)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class NoControlGroup(RuntimeError):
    """None can be made here; the message says why."""


@dataclass(frozen=True)
class ControlGroup:
    path: Path
    version: int

    @property
    def limit_file(self) -> Path:
        return self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")

    @property
    def usage(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.path / name).read_text())

    @property
    def peak(self) -> int:
        """The most that was charged at once."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.path / name).read_text())

    @property
    def at_the_limit(self) -> int:
        """How often the kernel had to reclaim memory of the group, as it was at its limit."""
        if self.version == 1:
            return int((self.path / "memory.failcnt").read_text())
        return self._event("max")

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for want of memory."""
        return self._event("oom_kill")

    def _event(self, kind: str) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith(f"{kind} "):
                return int(line.split()[1])
        return 0

    def joining(self) -> tuple[str, ...]:
        """What goes before a command that shall run in the group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"')

    def set_limit(self, limit: int) -> None:
        self.limit_file.write_text(str(limit))


@contextlib.contextmanager
def control_group(name: str) -> Iterator[ControlGroup]:
    """Raises ``NoControlGroup`` where none can be made."""
    first = (ROOT / "memory").is_dir()
    group = ControlGroup((ROOT / "memory" if first else ROOT) / f"{name}-{os.getpid()}", 2 - first)
    try:
        group.path.mkdir()
    except OSError as error:
        raise NoControlGroup(f"{group.path}: {error.strerror}") from error
    try:
        if not group.limit_file.exists():
            raise NoControlGroup(f"{group.path}: the memory controller is not enabled here")
        yield group
    finally:
        group.path.rmdir()  # its processes have ended
