"""Time costs of the parts of a deployment, measured once and replayed by the simulator.

Theory of operation. ``edgespec profile`` runs the real models and a real transport, times each
operation from the traces of both sides, and writes a ``CostProfile``. The simulator takes from it
the seconds of each draft step, pass and message. A law has a body, a table of medians over the
number of rows, and a spread, the measured ratios to the body at evenly spaced quantiles. A random
number picks among the ratios, so a simulated run scatters like the measured one.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from edgespec.config.files import read_text
from edgespec.config.loading import ConfigError, build

FORMAT: Final = "edgespec-profile"
VERSION: Final = 1
MAX_PROFILE_BYTES: Final = 1 << 20
_HEAD: Final = (FORMAT, VERSION)


class ProfileError(ValueError):
    """A profile cannot be used. The message names the file, the key, the value and the limit."""


@dataclass(frozen=True, slots=True)
class TimeLaw:
    """The duration of one kind of operation. Raises ``ProfileError``."""

    table: tuple[tuple[float, float], ...]
    """Pairs of (rows, median seconds) with increasing rows. Between them the law is linear. The
    first value holds below the first pair, and the last slope continues above the last."""
    context_s: float = 0.0
    """Seconds that each cached token of the operation's sessions adds."""
    spread: tuple[float, ...] = (1.0,)
    """Ratios of measured to expected seconds at evenly spaced quantiles, from the least to the
    greatest."""
    session_s: float = 0.0
    """Seconds that each session of a pass after the first adds."""

    def __post_init__(self) -> None:
        if not self.table or not self.spread:
            raise ProfileError("a time law needs at least one row of its table and one of spread")
        rows = [row for row, _ in self.table]
        if rows != sorted(set(rows)) or not all(map(math.isfinite, rows)):
            raise ProfileError(f"the rows of a time law must increase, but are {rows}")
        seconds = [one for _, one in self.table]
        for value in (*seconds, self.context_s, self.session_s, *self.spread):
            if not 0.0 <= value < math.inf:
                raise ProfileError(f"a time law holds {value}, but must be finite and at least 0")
        if list(self.spread) != sorted(self.spread):
            raise ProfileError("the spread of a time law must not decrease")

    def seconds(
        self, rows: int, context_length: int = 0, chance: float = 0.5, sessions: int = 1
    ) -> float:
        """Return the seconds of an operation. ``chance`` in [0, 1) picks from the spread; 0.5 is
        the median."""
        more_s = self.context_s * context_length
        if sessions > 1:
            more_s += self.session_s * (sessions - 1)
        body_s, spread = self._body_s(rows) + more_s, self.spread
        if len(spread) == 1:
            return body_s * spread[0]
        place = chance * (len(spread) - 1)
        low = int(place)
        high = min(low + 1, len(spread) - 1)
        return body_s * (spread[low] + (place - low) * (spread[high] - spread[low]))

    def _body_s(self, rows: int) -> float:
        table = self.table
        if len(table) == 1 or rows <= table[0][0]:
            return table[0][1]
        index = min(bisect.bisect_right(table, (rows, math.inf)), len(table) - 1)
        (x0, y0), (x1, y1) = table[index - 1], table[index]
        return max(0.0, y0 + (rows - x0) * (y1 - y0) / (x1 - x0))


def constant_law(seconds: float) -> TimeLaw:
    return TimeLaw(((1.0, seconds),))


@dataclass(frozen=True, slots=True)
class CostProfile:
    """Costs of a device, a verifier and everything between them except the link. Raises
    ``ProfileError``."""

    name: str
    draft_step: TimeLaw
    """Duration of a draft step. Rows: tokens fed, and mask tokens of a parallel draft; context:
    tokens kept in the cache."""
    target_pass: TimeLaw
    """Duration of a pass. Rows and context (cached tokens) are those of all its sessions
    together."""
    message: TimeLaw = field(default_factory=lambda: constant_law(0.0))
    """One-way time of a message on top of the link: codec, event loop, socket. Rows: always 1."""
    turnaround: TimeLaw = field(default_factory=lambda: constant_law(0.0))
    """Time from the end of a pass to the start of the next one when work waits. Rows: always 1."""
    connect_s: float = 0.0
    """Seconds to open a stream, on top of its round trips."""
    about: dict[str, str] = field(default_factory=dict)
    """Machine, versions, models, command and date: what a reader needs to trust the profile."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.connect_s < math.inf:
            raise ProfileError(f"connect_s is {self.connect_s}, but must be finite and at least 0")

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n"


def read_profile(path: Path) -> CostProfile:
    """Read a profile from a file. Raises ``ProfileError``."""
    try:
        data = json.loads(read_text(path, MAX_PROFILE_BYTES))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path}: not readable as a profile: {error}") from error
    if not isinstance(data, dict) or (data.pop("format", 0), data.pop("version", 0)) != _HEAD:
        raise ProfileError(f"{path}: not a profile of format {FORMAT} version {VERSION}")
    try:
        return build(CostProfile, data, str(path))
    except ConfigError as error:
        raise ProfileError(str(error)) from error
