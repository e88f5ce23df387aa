"""What was measured on a machine with a model is kept under a key of both.

The key covers the processor, the cores that this process may use, the version of onnxruntime, what
the caller says of the settings, and the names, sizes and times of the model's files. Another one of
these is another key, so it is measured again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
RUNTIMES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
)
"""Distributions of onnxruntime, which write the same files: one of them is installed."""


def measured_key(files: Iterable[Path], *settings: str) -> str:
    """24 hexadecimal digits. A file that cannot be looked at counts as not there."""
    digest = hashlib.blake2b(digest_size=12)
    for part in (_processor(), str(usable_cores()), _runtime(), *settings):
        digest.update(f"{part}\n".encode())
    for path in sorted(files):
        with suppress(OSError):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def usable_cores() -> int:
    """Cores that this process may run on, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _runtime() -> str:
    found = []
    for name in RUNTIMES:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def _processor() -> str:
    """Its name as the system tells it, or what Python knows."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}"
