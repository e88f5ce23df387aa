"""A circuit breaker per verifier: one that fails is left alone for a while, then asked cheaply.

    closed     streams go there
    open       it failed ``failures`` times in a row, or said that it is going away: no stream goes
               there while there is another verifier
    half-open  the time is over and one cheap question (``Info``) is under way: an answer closes the
               breaker, silence opens it again for twice as long

Apart from that a verifier may ask not to be bothered for a time (``retry_after``); ``held`` says
so, whatever the state, and nobody asks it anything before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import noise_bits

_LEAST_S: Final = 1e-3
_LONGEST_S: Final = 86_400.0
_MAX_DOUBLINGS: Final = 30


class Circuit(Enum):
    """Where a breaker is."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


CLOSED, OPEN, HALF_OPEN = Circuit


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When a breaker opens and for how long; seconds. Raises ``ValueError``."""

    failures: int = 2
    """So many in a row open it."""
    open_s: float = 0.5
    """For so long the first time, then for twice as long each time, less up to a half by chance."""
    longest_open_s: float = 8.0

    def __post_init__(self) -> None:
        bounded("failures", self.failures, 1, 1000)
        bounded("open_s", self.open_s, _LEAST_S, _LONGEST_S)
        bounded("longest_open_s", self.longest_open_s, self.open_s, _LONGEST_S)


class CircuitBreaker:
    """Of one verifier; ``seed`` makes its jitter its own."""

    def __init__(self, policy: BreakerPolicy, seed: int) -> None:
        self.state = CLOSED
        self.probe_at: float | None = None
        """When to ask again; only while open."""
        self.held_until = 0.0
        """Not before, says the verifier."""
        self._policy, self._seed = policy, seed
        self._failures = 0
        self._openings = 0
        """In a row, each longer than the one before."""

    def held(self, now: float) -> bool:
        return now < self.held_until

    def hold(self, now: float, seconds: float) -> None:
        """The verifier asks not to be bothered for so long; NaN asks nothing."""
        if now + seconds > self.held_until:
            self.held_until = now + min(seconds, _LONGEST_S)
            if self.probe_at is not None:
                self.probe_at = max(self.probe_at, self.held_until)

    def succeeded(self) -> None:
        """A token came, or a probe was answered: whatever was held against it is forgotten."""
        self.state, self.probe_at = CLOSED, None
        self._failures = self._openings = 0

    def answered(self) -> None:
        """A probe was answered: streams may go there. How long it stays away the next time is
        forgotten only when it has brought a token."""
        if self.state is not CLOSED:
            self.state, self.probe_at = CLOSED, None
            self._failures = max(0, self._policy.failures - 1)

    def failed(self, now: float) -> None:
        """A stream or a probe failed."""
        self._failures += 1
        if self.state is not CLOSED or self._failures >= self._policy.failures:
            self.open(now)

    def open(self, now: float) -> None:
        """Keep streams away, from now on."""
        if self.state is OPEN:
            return
        doublings = min(self._openings, _MAX_DOUBLINGS)
        self._openings += 1
        wait_s = min(self._policy.open_s * 2**doublings, self._policy.longest_open_s)
        wait_s *= 1 - noise_bits(self._seed, self._openings, 1) / 2**33
        self.state, self.probe_at = OPEN, max(now + wait_s, self.held_until)

    def probing(self) -> None:
        """The cheap question is under way."""
        assert self.state is OPEN
        self.state, self.probe_at = HALF_OPEN, None
