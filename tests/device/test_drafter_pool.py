"""Tests of the pool of a drafter's caches: which cache a generation gets, and whose steps wait.

Oracles: the tokens that each fake cache was fed, written down by hand.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import takewhile

import pytest

from edgespec.core.device.events import StartStep, StepDone, StepFailed
from edgespec.core.ports import (
    PREFILL_CHUNK,
    Cancelled,
    Candidate,
    Drafter,
    StepCancelledError,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafter_pool import MIN_KEPT_TOKENS, DrafterLease, DrafterPool
from edgespec.models.shared_ids import SharedIds
from edgespec.models.toy import toy_info

GREEDY = SamplingParams()


class FakeDrafter:
    """A drafter that notes what it is fed, in chunks, and resumes a step that was cancelled."""

    inner: Drafter | None = None
    resumes_feeds = True

    def __init__(self, most: int = 4, fed: list[tuple[int, int]] | None = None) -> None:
        self.info, self._most = toy_info(), most
        self.number, self.made = 0, [self]
        self.fed: list[tuple[int, int]] = [] if fed is None else fed
        """Number of a cache and of tokens, for each run."""
        self.begun = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self._rows: list[int] = []

    def twin(self) -> FakeDrafter:
        if len(self.made) == self._most:
            raise MemoryError("no room")
        twin = FakeDrafter(self._most, self.fed)
        twin.number, twin.made = len(self.made), self.made
        twin.begun, twin.may_go_on = self.begun, self.may_go_on
        self.made.append(twin)
        return twin

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        pass

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        tokens = [*self._rows[:keep_length], *feed]
        pairs = takewhile(
            lambda pair: pair[0] == pair[1], zip(self._rows, tokens[:-1], strict=False)
        )
        kept = len([*pairs])
        del self._rows[kept:]
        while len(self._rows) < len(tokens):
            if cancelled():
                raise StepCancelledError("cancelled")
            self.begun.set()
            assert self.may_go_on.wait(60)
            chunk = tokens[len(self._rows) :][:PREFILL_CHUNK]
            self.fed.append((self.number, len(chunk)))
            self._rows += chunk
        return (Candidate(1, 0.0),)

    def close(self) -> None:
        pass


async def run(pool: DrafterPool, tokens: Sequence[int], *, has_draft_ids: bool = False) -> None:
    lease = DrafterLease(pool, len(tokens), GREEDY, has_draft_ids=has_draft_ids)
    assert isinstance(await lease.step(StartStep(0, tuple(tokens), 1)), StepDone)
    lease.end()


LONG, OTHER, SHORT = [1] * 1000, [2] * 1200, [3] * 100
# Texts in the order in which they are generated, and the cache and the fed tokens of the last one.
HISTORIES = {
    "the first": ([LONG], (0, 1000)),
    "the next turn": ([LONG, [*LONG, 5, 6]], (0, 2)),
    "a short request gets a second cache": ([LONG, SHORT], (1, 100)),
    "the turn after a short request": ([LONG, SHORT, [*LONG, 5]], (0, 1)),
    "short requests share it": ([LONG, SHORT, [4] * 90, [5] * 80], (1, 80)),
    "short texts need no second cache": ([SHORT, [4] * 90], (0, 90)),
    "another long text takes the shorter": ([LONG, SHORT, OTHER], (1, 1200)),
    "a third long text takes what is worth least": (
        [LONG, OTHER, OTHER, OTHER, [7] * 600],
        (0, 600),
    ),
    "an edited text keeps its beginning": ([LONG, [*LONG[:700], 9, 9]], (0, 2)),
    "half of a text is not worth its rest": ([LONG, [*LONG[:300], 9, 9]], (1, 302)),
}


@pytest.mark.parametrize(("texts", "last"), HISTORIES.values(), ids=list(HISTORIES))
async def test_a_generation_gets_the_cache_that_costs_least(
    texts: list[list[int]], last: tuple[int, int]
) -> None:
    assert len(LONG) > MIN_KEPT_TOKENS > len(SHORT)
    drafter = FakeDrafter()
    pool = DrafterPool(drafter, 4)
    for text in texts:
        drafter.fed.clear()
        await run(pool, text)
    assert {number for number, _ in drafter.fed} == {last[0]}
    assert sum(count for _, count in drafter.fed) == last[1]
    pool.close()


async def test_ids_of_the_draft_are_not_those_of_the_target() -> None:
    drafter = FakeDrafter()
    pool = DrafterPool(drafter, 4, SharedIds(32, 16, stand_in=0))
    await run(pool, LONG)
    await run(pool, LONG, has_draft_ids=True)
    assert len(drafter.made) == 2
    pool.close()


async def test_without_room_for_a_second_cache_the_first_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drafter = FakeDrafter(most=1)
    pool = DrafterPool(drafter, 4)
    await run(pool, LONG)
    await run(pool, SHORT)
    assert drafter.fed[-1][0] == 0
    assert not caplog.records  # a warning is due only where a generation goes without drafts
    pool.close()


async def test_a_long_prompt_lets_the_steps_of_others_pass() -> None:
    """The step of a long prompt is interrupted after each run, and computes every token once."""
    drafter = FakeDrafter()
    pool = DrafterPool(drafter, 4)
    drafter.may_go_on.clear()
    first, second = (DrafterLease(pool, length, GREEDY) for length in (10 * PREFILL_CHUNK, 5))
    prompt = asyncio.create_task(first.step(StartStep(0, (1,) * 10 * PREFILL_CHUNK, 1)))
    await asyncio.to_thread(drafter.begun.wait, 60)
    short = asyncio.create_task(second.step(StartStep(0, (2,) * 5, 1)))
    await asyncio.sleep(0)  # the step is submitted
    drafter.may_go_on.set()
    assert isinstance(await short, StepDone)
    assert isinstance(await prompt, StepDone)
    assert drafter.fed == [(0, PREFILL_CHUNK), (1, 5), *[(0, PREFILL_CHUNK)] * 9]
    first.end()
    second.end()
    pool.close()


async def test_a_generation_that_ends_in_its_prompt_leaves_the_rows_to_the_next() -> None:
    drafter = FakeDrafter()
    pool = DrafterPool(drafter, 4)
    drafter.may_go_on.clear()
    lease = DrafterLease(pool, len(LONG), GREEDY)
    prompt = asyncio.create_task(lease.step(StartStep(0, tuple(LONG), 1)))
    await asyncio.to_thread(drafter.begun.wait, 60)
    lease.end()
    drafter.may_go_on.set()
    assert isinstance(await prompt, StepFailed)
    await run(pool, LONG)
    assert sum(count for _, count in drafter.fed) == len(LONG)
    pool.close()
