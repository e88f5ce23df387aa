"""Speed of one generation, and an estimate of the speed that plain streaming would have had.

Plain streaming commits one token a pass, and its passes have no draft rows. So its time per token
is estimated from the pass durations that the verifier reports:

    plain_token_s = pass_s - rows * row_s

Here pass_s and rows are means over the passes, and row_s is the slope of a line through (rows,
duration) of each pass. Passes of 25 ms with 6 rows at 0.5 ms a row make 22 ms a token. The result
is never shorter than the shortest pass. While the number of rows has hardly varied the slope is not
known, and the mean duration is taken as it is.

The first pass of a generation is left out on both sides, because it computes the prompt. The pauses
between passes are left out too, so plain streaming is estimated rather too fast than too slow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_MIN_PASSES: Final = 8
"""Passes from which on a slope is fitted."""
_MIN_VARIANCE: Final = 0.25
"""Variance of the number of rows below which it has hardly varied."""


@dataclass(slots=True)
class StreamingSpeed:
    """Sums over the passes of one generation, first pass excluded. Times are in seconds."""

    tokens: int = 0
    """Tokens that arrived after the first pass."""
    passes: int = 0
    draft_tokens: int = 0
    """Tokens of ``tokens`` that were drafted, on the device or by the verifier."""
    first_at_s: float | None = None
    """Time at which the first pass's tokens arrived."""
    last_at_s: float = 0.0
    shortest_pass_s: float = 0.0
    _rows: float = 0.0
    _pass_s: float = 0.0
    _rows_squared: float = 0.0
    _rows_times_pass_s: float = 0.0

    def add(self, at_s: float, tokens: int, pass_s: float, rows: int) -> None:
        """Add a pass of ``pass_s`` seconds with ``rows`` draft rows, whose ``tokens`` arrived at
        ``at_s``."""
        if not tokens:
            return
        if self.first_at_s is None:
            self.first_at_s = self.last_at_s = at_s
            return
        self.tokens += tokens
        self.draft_tokens += tokens - 1
        self.passes += 1
        self.last_at_s = at_s
        shortest = self.shortest_pass_s
        self.shortest_pass_s = min(shortest, pass_s) if self.passes > 1 else pass_s
        self._rows += rows
        self._pass_s += pass_s
        self._rows_squared += rows * rows
        self._rows_times_pass_s += rows * pass_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second after the first pass; None before the second pass."""
        took_s = self.last_at_s - (self.first_at_s or 0.0)
        return self.tokens / took_s if self.tokens and took_s > 0.0 else None

    @property
    def plain_tokens_per_s(self) -> float | None:
        """Estimated tokens a second of plain streaming; None before the second pass."""
        if not self.passes or self._pass_s <= 0.0:
            return None
        rows, pass_s = self._rows / self.passes, self._pass_s / self.passes
        variance = self._rows_squared / self.passes - rows * rows
        if self.passes >= _MIN_PASSES and variance >= _MIN_VARIANCE:
            covariance = self._rows_times_pass_s / self.passes - rows * pass_s
            row_s = max(0.0, covariance / variance)
            pass_s = max(pass_s - rows * row_s, self.shortest_pass_s)
        return 1.0 / pass_s

    @property
    def times_plain(self) -> float | None:
        """How many times as fast as plain streaming the generation is, by the estimate."""
        speed, plain = self.tokens_per_s, self.plain_tokens_per_s
        return None if speed is None or plain is None else speed / plain
