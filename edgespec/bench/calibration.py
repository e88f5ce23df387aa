"""The best draft length of stop-and-wait, so that the baseline is not handicapped by a guess.

Stop-and-wait drafts nothing while a draft is under way, and which drafts hit is a function of the
prompt and the seed. So a request takes what it takes without a link, plus one round trip for each
of its passes, whatever the link: one sweep without a link, on the bench's own prompts, ranks the
draft lengths at every RTT, free of the link's noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from edgespec.bench.measurement import Measurement

GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)
PROMPT_COUNT = 9
"""How many prompts the sweep runs."""


@dataclass(frozen=True, slots=True)
class GammaCost:
    """Of one draft length, over the sweep's requests."""

    flow_s: float
    """From first to last tokens, without a link."""
    rounds: int
    """Passes after the first tokens: each costs a round trip more on a link."""
    tokens: int

    def tpot_s(self, rtt_s: float) -> float:
        return (self.flow_s + self.rounds * rtt_s) / self.tokens


def gamma_cost(measurements: Iterable[Measurement]) -> GammaCost | None:
    """None when no request had two tokens to measure between."""
    usable = [m for m in measurements if len(m.times_s) >= 2]
    if not usable:
        return None
    return GammaCost(
        flow_s=sum(m.times_s[-1] - m.times_s[0] for m in usable),
        rounds=sum(m.counters.passes - 1 for m in usable),
        tokens=sum(len(m.times_s) - 1 for m in usable),
    )


def best_gamma_at(costs: Mapping[int, GammaCost], rtt_s: float) -> int | None:
    """The draft length with the least time per token, the shortest among equals."""
    if not costs:
        return None
    return min(sorted(costs), key=lambda gamma: costs[gamma].tpot_s(rtt_s))
