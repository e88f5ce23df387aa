"""Which tokens of a drafter's text are the target's own, told from what the drafter is fed.

Theory of operation. A drafter sees drafted tokens as well as committed ones, and nobody tells it
which is which. But whatever was drafted is something that it *offered* at that position. So a token
that it is fed where it never offered it comes from the target, and then so does everything before
it. A draft that is always right gives no such sign; there a token counts as *settled* when the text
is ``LAG`` tokens further, by when a wrong one has mostly been taken back. Where even that was wrong
the text is cut back below ``settled``, which then says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import Constraint
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.token_cache import TokenCache

LAG = 32


class SettledText:
    """The tokens of one sequence and how many of them, from the first on, are settled."""

    def __init__(self, info: ModelInfo) -> None:
        self._cache = TokenCache(info)
        self.prompt_length = 0
        self.settled = 0
        self.kept = 0
        """How many leading tokens the last ``advance`` left as they were."""
        self._offered: dict[int, dict[int, float]] = {}
        """By position and token: the chance with which it was offered last."""

    @property
    def tokens(self) -> Sequence[int]:
        return self._cache.tokens

    def begin(self, prompt_length: int, constraint: Constraint | None = None) -> None:
        """Start an empty sequence. Raises ``ValueError`` when the prompt cannot fit."""
        # Nothing here counts penalties.
        self._cache.begin(prompt_length, SamplingParams(constraint=constraint))
        self.prompt_length = prompt_length
        self.settled = self.kept = 0
        self._offered = {}

    def mask(self) -> bytes | None:
        """As ``TokenCache.mask``."""
        return self._cache.mask()

    def advance(self, keep_length: int, feed: Sequence[int]) -> int:
        """Truncate to ``keep_length``, append ``feed``, return the new length. Raises
        ``ValueError`` as ``TokenCache.advance`` does, and then changes nothing."""
        before = list(self.tokens[keep_length:]) if keep_length >= 0 else []
        length = self._cache.advance(keep_length, feed)
        same = 0
        for old, new in zip(before, feed, strict=False):
            if old != new:
                break
            same += 1
        self.kept = keep_length + same
        settled = min(self.settled, self.kept)
        for position in range(length - 1, max(settled, keep_length) - 1, -1):
            if feed[position - keep_length] not in self._offered.get(position, ()):
                settled = position + 1
                break
        self.settled = max(settled, length - LAG)
        if len(self._offered) > LAG:
            self._offered = {at: ids for at, ids in self._offered.items() if at >= self.settled}
        return length

    def forget(self, length: int) -> None:
        """Truncate to ``length`` (a step did not end)."""
        self._cache.forget(length)
        self.settled = min(self.settled, length)
        self.kept = min(self.kept, length)

    def offer(self, guesses: Iterable[tuple[int, float]]) -> None:
        """These tokens are guessed for the next position, each with its chance."""
        self._offered.setdefault(len(self.tokens), {}).update(guesses)

    @property
    def reach(self) -> float:
        """The chance that all of the text is the target's: the product of those with which its
        tokens behind the settled ones were offered."""
        tokens, chance = self.tokens, 1.0
        for position in range(self.settled, len(tokens)):
            chance *= self._offered.get(position, {}).get(tokens[position], 1.0)
        return chance
