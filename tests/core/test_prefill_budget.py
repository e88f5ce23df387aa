"""Long prompts beside sessions that decode. Oracle: rows of the passes, and the formula by hand."""

from __future__ import annotations

import pytest

from edgespec.core.protocol.messages import Limits, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest, PassResult
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    EngineAction,
    EngineLimits,
    RunBatch,
    StreamMessage,
    StreamOpened,
)
from edgespec.core.verifier.prefill_budget import FIRST_ROWS, LEAST_ROWS, PrefillBudget

DECODE_S = 0.020
ENDLESS = SamplingParams(max_tokens=1_000, ignore_eos=True)


def opening(name: str, length: int) -> Open:
    return Open(name, "", "", (1,) * length, sampling=ENDLESS, drafting=False)


class World:
    """An engine and a target on which a pass takes 20 ms and ``row_s`` for each prompt row."""

    def __init__(self, row_s: float) -> None:
        self.now, self._row_s, self._streams = 0.0, row_s, 0
        self._batch: tuple[PassRequest, ...] = ()
        self._stream_of: dict[str, int] = {}
        model = ModelInfo("big", "", 50, 4096)
        self.engine = VerifyEngine(
            model, Limits(max_unreceived=4096), EngineLimits(), contain=False
        )

    def open(self, name: str, length: int) -> None:
        self._streams += 1
        self._stream_of[name] = self._streams
        self._take(self.engine.handle(StreamOpened(self._streams, opening(name, length)), self.now))

    def run_pass(self) -> dict[str, int]:
        """The rows that each session had in the pass that ends now."""
        batch, self._batch = self._batch, ()
        rows = {request.key: len(request.feed) for request in batch}
        self.now += DECODE_S + self._row_s * sum(count - 1 for count in rows.values())
        results = [PassResult(one.key, (7,) if one.sample else ()) for one in batch]
        self._take(self.engine.handle(BatchDone(tuple(results)), self.now))
        for name, stream in self._stream_of.items():
            position = self.engine.sessions[name].prefix.length
            self._take(self.engine.handle(StreamMessage(stream, Received(position, 0)), self.now))
        return rows

    def _take(self, actions: tuple[EngineAction, ...]) -> None:
        for action in actions:
            if isinstance(action, RunBatch):
                self._batch = action.requests


def settled(budget: PrefillBudget, base_s: float, row_s: float) -> int:
    """The larger of its two sizes after passes that last so long."""
    sizes: list[int] = []
    for _ in range(200):
        sizes.append(min(1024, budget.rows))
        budget.note(sizes[-1], base_s + row_s * sizes[-1])
    return max(sizes[-2:])


def test_the_budget_is_half_a_pass_without_prompts() -> None:
    budget = PrefillBudget()
    assert budget.rows == FIRST_ROWS
    for _ in range(20):
        budget.note(0, 0.024)
    assert budget.rows == FIRST_ROWS
    assert settled(budget, 0.024, 0.0005) == pytest.approx(0.5 * 0.024 / 0.0005, abs=1)
    assert settled(budget, 0.024, 0.01) == LEAST_ROWS
    assert settled(budget, 0.024, 0.0) == 1024


def test_more_sessions_do_not_make_prompts_look_dear() -> None:
    budget = PrefillBudget()
    assert settled(budget, 0.020, 0.00002) == pytest.approx(500, abs=2)
    for step in range(40):  # there is never a pass without prompts
        assert settled(budget, 0.020 + 0.001 * step, 0.00002) >= 495
    assert settled(budget, 0.060, 0.00002) == 1024


def test_a_long_prompt_alone_has_the_whole_pass() -> None:
    world = World(0.001)
    world.open("long", 2_000)
    assert world.run_pass() == {"long": 512}


def test_long_prompts_make_the_passes_of_others_no_more_than_half_as_long_again() -> None:
    world = World(0.0005)
    world.open("victim", 1)
    for _ in range(20):
        assert world.run_pass() == {"victim": 1}
    for number in range(8):
        world.open(f"long {number}", 2_000)
    world.run_pass()
    for _ in range(3):  # the price of a row is learned
        assert sum(world.run_pass().values()) <= 1 + FIRST_ROWS
    for _ in range(200):
        rows = world.run_pass()
        assert rows.pop("victim") == 1
        assert 1 <= sum(rows.values()) <= 0.5 * DECODE_S / 0.0005 + 1


def test_prompts_take_turns_and_a_short_one_need_not_wait_for_long_ones() -> None:
    world = World(0.0005)
    world.open("victim", 1)
    for number in range(8):
        world.open(f"long {number}", 2_000)
    for _ in range(30):
        world.run_pass()
    world.open("short", 18)
    waited = 0
    while world.engine.sessions["short"].prefix.length == 18:
        world.run_pass()
        waited += 1
    assert waited <= 5
    fed: dict[str, int] = {}
    for _ in range(60):
        for name, rows in world.run_pass().items():
            fed[name] = fed.get(name, 0) + rows
    assert all(fed[f"long {number}"] > 0 for number in range(8))
