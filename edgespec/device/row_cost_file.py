"""What a row more of a draft step takes is kept on disk, by machine and draft.

A device that may draft behind several leaves learns it from its first steps, some of which have
more leaves than pay. What one process has learned, the next one begins with, and goes on learning.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path

from edgespec.config import DraftSection
from edgespec.config.machine_key import measured_key
from edgespec.config.whole_file import replace_file
from edgespec.core.device.learned import Learned
from edgespec.core.device.row_times import RowTimes

_LONGEST_S = 60.0


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
    """Of the machine, the settings of the draft and the files it is made of."""
    folder = Path(os.path.expanduser(draft.model))
    files = folder.glob("*.onnx*") if folder.is_dir() else ()
    return measured_key(files, repr(astuple(draft)))
