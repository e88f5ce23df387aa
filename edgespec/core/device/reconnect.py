"""A device decides here when to try again after a broken link, and when to give up.

It waits before attempt n = 1, 2, ... for

    wait_s = min(first_s * 2**(n - 1), longest_s) * (1 - jitter / 2),    jitter in [0, 1)

where the jitter is the device's own, so that many devices do not come back together. With
``first_s`` 0.1 and ``longest_s`` 1 the fifth wait is min(1.6, 1) = 1 s, shortened to between 0.5
and 1 s: a verifier that is back hears from everybody within the second. A verifier that asks for
more time gets it, and up to half a ``longest_s`` on top, again so that not all come at once.

The waits start over when a token was delivered, not when a stream was opened: a verifier that
greets and then says nothing useful is asked less and less often, and in the end no more.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import noise_bits

LEAST_S: Final = 1e-3
LONGEST_S: Final = 1e7
MAX_STREAMS: Final = 10_000
# 2**30 milliseconds are twelve days: no longer wait is of any use, and no float overflows.
_MAX_DOUBLINGS: Final = 30


@dataclass(frozen=True, slots=True)
class ReconnectPolicy:
    """How patient a device is; seconds. Raises ``ValueError`` naming field, value and limit."""

    first_s: float = 0.1
    """The first wait; each further one is twice as long."""
    longest_s: float = 1.0
    """No wait is longer, unless the verifier asks for more time."""
    give_up_first_s: float = 5.0
    """How long to try for a first stream."""
    give_up_s: float = 60.0
    """How long to try for the next one after a stream broke."""
    answer_s: float = 10.0
    """How long a connection may take to come up and the verifier to greet."""
    grammar_s: float = 60.0
    """How much longer it may take to greet a text with a constraint: a grammar that it has not seen
    is tried before, beside whatever keeps the machine busy."""
    silence_s: float = 30.0
    """A verifier that has greeted and then says nothing for so long counts as a broken link. An
    empty ``Commit`` is a sign of life."""
    progress_s: float = 300.0
    """A generation fails when no token has come for so long from a verifier that answers."""
    max_streams_without_token: int = 8
    """So many streams in a row that brought no token are enough: the generation fails."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name.endswith("_s"):
                bounded(field.name, getattr(self, field.name), LEAST_S, LONGEST_S)
        bounded("max_streams_without_token", self.max_streams_without_token, 1, MAX_STREAMS)
        _ordered("first_s", self.first_s, "longest_s", self.longest_s)
        _ordered("silence_s", self.silence_s, "progress_s", self.progress_s)


class Reconnect:
    """The attempts of one session; ``seed`` makes the jitter its own."""

    def __init__(self, policy: ReconnectPolicy, seed: int) -> None:
        self._policy, self._seed = policy, seed
        self._attempts = 0
        self._failing_since: float | None = None
        self._ever_greeted = False
        self._streams_without_token = 0

    def greeted(self) -> None:
        """The verifier is there: the time to give up after starts over, the waits do not."""
        self._failing_since, self._ever_greeted = None, True

    def progressed(self) -> None:
        """A token came: everything starts over."""
        self._attempts, self._failing_since, self._streams_without_token = 0, None, 0

    def brought_nothing(self) -> None:
        """A stream that the verifier answered ended without a token."""
        self._streams_without_token += 1

    def out_of_patience(self) -> str | None:
        """Why no further stream is worth a try, if too many in a row brought nothing."""
        count = self._streams_without_token
        if count < self._policy.max_streams_without_token:
            return None
        return f"after {count} streams without a new token"

    def failed(
        self, now: float, retry_after_s: float = 0.0, *, at_once: bool = False
    ) -> float | None:
        """When to try again, or None when the time to give up after is over. ``at_once``: another
        verifier is there to be tried, so there is no wait, and none of the later ones grows."""
        policy = self._policy
        if self._failing_since is None:
            self._failing_since = now
        allowed_s = policy.give_up_s if self._ever_greeted else policy.give_up_first_s
        if at_once:
            return now if now - self._failing_since <= allowed_s else None
        self._attempts += 1
        doublings = min(self._attempts - 1, _MAX_DOUBLINGS)
        wait_s = min(policy.first_s * 2**doublings, policy.longest_s)
        jitter = noise_bits(self._seed, self._attempts, 0) / 2**32
        at = now + wait_s * (1 - jitter / 2)
        if now + retry_after_s > at:
            at = now + retry_after_s + policy.longest_s * jitter / 2
        return at if at - self._failing_since <= allowed_s else None


def _ordered(name: str, value: float, limit_name: str, limit: float) -> None:
    if value > limit:
        raise ValueError(f"{name} is {value}, but must be at most {limit_name}, which is {limit}")
