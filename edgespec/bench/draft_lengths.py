"""The best draft length of stop-and-wait (the arm ``vanilla``), for each round trip.

Stop-and-wait drafts nothing while a draft is under way, and whether a draft is accepted is a
function of the prompt and the seed. So on any link a request takes its time without a link, plus
one round trip for each of its passes. One sweep without a link, on the benchmark's own prompts,
therefore ranks the draft lengths at every RTT, free of the link's noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgespec.bench.measurement import Measurement

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Draft lengths that the sweep tries, in tokens."""
PROMPT_COUNT = 9
"""Number of prompts that the sweep runs."""


@dataclass(frozen=True, slots=True)
class GammaCost:
    """Cost of one draft length, over the sweep's requests."""

    flow_s: float
    """Seconds from the first to the last tokens, without a link."""
    rounds: int
    """Passes after the first tokens. Each pass costs one more round trip on a link."""
    tokens: int
    """Tokens after the first ones."""

    def tpot_s(self, rtt_s: float) -> float:
        """Return the mean seconds per token on a link with this round trip."""
        return (self.flow_s + self.rounds * rtt_s) / self.tokens


def gamma_cost(measurements: Iterable[Measurement]) -> GammaCost | None:
    """Return the cost of a draft length, or None if no request has two tokens."""
    usable = [m for m in measurements if len(m.times_s) >= 2]
    if not usable:
        return None
    return GammaCost(
        flow_s=sum(m.times_s[-1] - m.times_s[0] for m in usable),
        rounds=sum(m.counters.passes - 1 for m in usable),
        tokens=sum(len(m.times_s) - 1 for m in usable),
    )


def best_gamma_at(costs: Mapping[int, GammaCost], rtt_s: float) -> int:
    """Return the draft length with the least time per token. The first one wins among equals, and
    if nothing was measured."""
    return min(costs, key=lambda gamma: costs[gamma].tpot_s(rtt_s), default=GAMMAS[0])
