"""When to try again after a broken link: exponential back-off with jitter, and when to give up."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.noise import noise_bits


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """Delays double from ``first_s`` to ``longest_s``; each is shortened by up to a half."""

    first_s: float = 0.1
    longest_s: float = 5.0
    give_up_first_s: float = 5.0
    """Without ever having had a stream."""
    give_up_s: float = 60.0
    """After a stream broke."""
    answer_s: float = 10.0
    """How long a connection may take to come up and the verifier to greet."""


class Reconnect:
    """The state of one session's attempts. ``seed`` makes the jitter its own."""

    def __init__(self, policy: ReconnectPolicy, seed: int) -> None:
        self._policy, self._seed = policy, seed
        self._attempts = 0
        self._failing_since: float | None = None
        self._ever_connected = False

    def succeeded(self) -> None:
        self._attempts, self._failing_since, self._ever_connected = 0, None, True

    def failed(self, now: float, retry_after_s: float = 0.0) -> float | None:
        """When to try again, or None to give up."""
        if self._failing_since is None:
            self._failing_since = now
        self._attempts += 1
        delay_s = min(self._policy.first_s * 2 ** (self._attempts - 1), self._policy.longest_s)
        jitter = noise_bits(self._seed, self._attempts, 0) / 2**32
        at = now + max(delay_s * (1 - jitter / 2), retry_after_s)
        policy = self._policy
        allowed_s = policy.give_up_s if self._ever_connected else policy.give_up_first_s
        return at if at - self._failing_since <= allowed_s else None
