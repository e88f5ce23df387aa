"""One request, timed on the device: when which token was delivered, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgespec.core.device.events import DraftCounters
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
