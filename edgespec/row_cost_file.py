"""What a row more of a draft step takes is kept on disk, by machine and draft.

A device that may draft behind several leaves learns it from its first steps, some of which have
more leaves than pay. What one process has learned, the next one begins with, and goes on learning.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from contextlib import suppress
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from edgespec.config import DraftSection
from edgespec.core.device.learned import Learned
from edgespec.core.device.row_times import RowTimes
from edgespec.whole_file import replace_file

_LONGEST_S = 60.0
_CPU_INFO = Path("/proc/cpuinfo")


class RowCostFile:
    """``cache`` is the user's folder for edgespec. A file that is missing, damaged or not writable
    costs some steps, and nothing else."""

    def __init__(self, cache: Path, draft: DraftSection) -> None:
        self._path = cache / "rows" / f"{_key(draft)}.json"

    def read(self) -> RowTimes:
        """What is known; unlearned times where nothing is."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            one_s, row_s = float(found["one_s"]), float(found["row_s"])
        except (OSError, ValueError, TypeError, KeyError):
            return RowTimes()
        if not all(math.isfinite(one) and 0.0 <= one <= _LONGEST_S for one in (one_s, row_s)):
            return RowTimes()
        return RowTimes.known(one_s, row_s)

    def keep(self, learned: Learned) -> None:
        """For the next process."""
        if (found := learned.rows.learned) is None:
            return
        one_s, row_s = found
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps({"one_s": one_s, "row_s": row_s}) + "\n")


def _key(draft: DraftSection) -> str:
    """Of the processor, the runtime, the settings of the draft and the files it is made of."""
    digest = hashlib.blake2b(digest_size=12)
    try:
        runtime = version("onnxruntime")
    except PackageNotFoundError:
        runtime = ""
    for part in (_processor(), str(os.cpu_count()), runtime, repr(astuple(draft))):
        digest.update(f"{part}\n".encode())
    folder = Path(draft.model).expanduser()
    for path in sorted(folder.glob("*.onnx*")) if folder.is_dir() else ():
        with suppress(OSError):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _processor() -> str:
    """Its name as the system tells it, or what Python knows."""
    with suppress(OSError):
        for line in _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return f"{platform.machine()} {platform.processor()}"
