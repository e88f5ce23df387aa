"""What draft lengths have brought: tokens and time of the rounds that had them.

Theory of operation. A *round* of a scheme that waits begins where the one before it ended, drafts
some nodes, sends them together and ends with the commit that leaves none of them in flight. Its
tokens over its time are what its draft length was worth, whatever the link, the verifier and the
text did: drafting time, waiting and misses are all in it. Rounds in which nodes were sent more than
once belong to no length. Older rounds count less and less, as links and texts change.
"""

from __future__ import annotations

from typing import Final

MAX_LENGTH: Final = 64
_MEMORY: Final = 0.985


class LengthOutcomes:
    """Rounds so far, by draft length. It depends on models and link, and outlives a generation."""

    def __init__(self) -> None:
        self._rounds = [0.0] * (MAX_LENGTH + 1)
        self._tokens = [0.0] * (MAX_LENGTH + 1)
        self._seconds = [0.0] * (MAX_LENGTH + 1)

    def add(self, length: int, tokens: int, seconds: float) -> None:
        """A round of ``length`` nodes, at most ``MAX_LENGTH``, is over."""
        for sums in (self._rounds, self._tokens, self._seconds):
            for index, value in enumerate(sums):
                sums[index] = value * _MEMORY
        self._rounds[length] += 1.0
        self._tokens[length] += tokens
        self._seconds[length] += max(seconds, 1e-6)

    def rounds(self, length: int) -> float:
        """How many there were of late."""
        return self._rounds[length]

    def tokens_per_s(self, length: int) -> float:
        """Of the rounds of this length; 0 where there were none."""
        seconds = self._seconds[length]
        return self._tokens[length] / seconds if seconds > 0.0 else 0.0


class RoundMeter:
    """Finds the rounds of one session and adds them to ``outcomes``."""

    def __init__(self, outcomes: LengthOutcomes) -> None:
        self._outcomes = outcomes
        self.new_stream()

    def new_stream(self) -> None:
        """What was under way on the stream before will not end as a round."""
        self._sent = self._batches = self._committed = 0
        self._since: float | None = None

    def sent(self, nodes: int) -> None:
        """Nodes have left together."""
        self._sent += nodes
        self._batches += nodes > 0

    def committed(self, tokens: int, in_flight: int, now: float) -> None:
        """A commit came, and left so many sent nodes undecided."""
        self._committed += tokens
        if in_flight:
            return
        since = self._since
        if since is not None and not self._batches:
            return  # drafting still, while the verifier decodes on
        if since is not None and self._batches == 1 and self._sent <= MAX_LENGTH:
            self._outcomes.add(self._sent, self._committed, now - since)
        self.new_stream()
        self._since = now
