"""One request, timed on the device: when which token was delivered, and what it took."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, GenerationError


@dataclass(frozen=True, slots=True)
class Measurement:
    """``times_s`` are of the tokens before the end token only, since the request was made."""

    tokens: tuple[int, ...]
    """All that was delivered, an end token too."""
    times_s: tuple[float, ...]
    counters: DraftCounters

    @property
    def ttft_s(self) -> float | None:
        """From the request, connecting included, to the first token; None without one."""
        return self.times_s[0] if self.times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None with fewer than two."""
        if len(self.times_s) < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (len(self.times_s) - 1)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between neighbouring tokens; 0 within a commit."""
        return tuple(later - earlier for earlier, later in pairwise(self.times_s))


async def measure(
    agent: Agent,
    prompt: Sequence[int],
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    clock: Callable[[], float] = time.monotonic,
) -> Measurement:
    """Run one generation to its end. Raises ``GenerationError`` as the agent does, and when the
    drafter failed: what follows would be measured under the wrong name."""
    tokens: list[int] = []
    times_s: list[float] = []
    start_s = clock()
    async for chunk in agent.generate(prompt, sampling):
        tokens.extend(chunk.tokens)
        times_s.extend([clock() - start_s] * len(chunk.tokens))
    assert agent.stats is not None
    if why := agent.stats.counters.draft_failure:
        raise GenerationError(f"the draft model failed: {why}", None)
    ends = (index for index, token in enumerate(tokens) if token in eos_token_ids)
    counted = next(ends, len(tokens))
    return Measurement(tuple(tokens), tuple(times_s[:counted]), agent.stats.counters)


def mismatch_count(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """Positions at which two streams differ, those that only one of them has included."""
    differing = sum(a != b for a, b in zip(tokens, reference, strict=False))
    return differing + abs(len(tokens) - len(reference))


# --- one drafter for many agents ---------------------------------------------------------------
# each of them closes what it holds, but this one is only lent.


class LentDrafter:
    """``Drafter`` that passes everything on but ``close``; agents must use it one at a time."""

    def __init__(self, owned: Drafter) -> None:
        self._owned = owned

    @property
    def info(self) -> ModelInfo:
        return self._owned.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._owned.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        return self._owned.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        """Nothing: the owner closes it."""


# --- the best draft length of stop-and-wait, so that the baseline is not handicapped by a guess ---
# Stop-and-wait drafts nothing while a draft is under way, and which drafts hit is a function of
# the prompt and the seed. So a request takes what it takes without a link, plus one round trip
# for each of its passes, whatever the link: one sweep without a link, on the bench's own prompts,
# ranks the draft lengths at every RTT, free of the link's noise.


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


# --- how sure a mean over texts is -------------------------------------------------------------
# texts differ more than runs of the same text do.
# Intervals are 95 % by a bootstrap (Efron, 1979): the mean of as many texts drawn with
# replacement, 2,000 times. A ratio of two arms draws the same texts for both, which ran them all.
# Draws are seeded, so a result printed twice says the same.


_DRAWS = 2000
_SHARE = 0.95
Interval = tuple[float, float]


def mean_interval(values: Sequence[float]) -> Interval:
    """Of the mean of at least one value; a single one is its own interval."""
    return _bootstrap(len(values), lambda drawn: fmean([values[index] for index in drawn]))


def ratio_interval(upper: Sequence[float], lower: Sequence[float]) -> Interval:
    """Of mean(upper) / mean(lower), value by value of the same texts; lower ones are above 0."""

    def ratio(drawn: Sequence[int]) -> float:
        return sum([upper[index] for index in drawn]) / sum([lower[index] for index in drawn])

    return _bootstrap(len(upper), ratio)


def _bootstrap(count: int, of: Callable[[Sequence[int]], float]) -> Interval:
    dice = random.Random(0)
    everyone = range(count)
    found = sorted(of(dice.choices(everyone, k=count)) for _ in range(_DRAWS if count > 1 else 1))
    outside = round(len(found) * (1.0 - _SHARE) / 2.0)
    return found[outside], found[-1 - outside]
