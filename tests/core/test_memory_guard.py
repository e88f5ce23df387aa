"""The guard of a draft's memory. Oracle: a model of a process whose resident memory is what others
hold plus the rows that the draft holds; the guard must keep it below the budget whenever that can
be done, and the draft must come back when there is room again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.memory import (
    RECOVERY_S,
    SMALLEST_WINDOW,
    MemoryGuard,
    Observation,
    Restriction,
)

ROW, BUDGET, MARGIN = 1000, 1_000_000, 50_000
FULL = Restriction(500, 4)


class Process:
    """Rows come and go at once, as the pages of ``KvBuffers`` do."""

    def __init__(self) -> None:
        self.guard = MemoryGuard(BUDGET, MARGIN, FULL, ROW)
        self.held = 0
        self.now = 0.0

    def step(self, others: int, tokens: int) -> None:
        """A draft step that would hold ``tokens`` rows in all."""
        self.now += 1.0
        for _ in range(8):  # a driver asks before every step; here until nothing changes
            wanted = min(tokens, self.guard.current.window)
            growth = max(0, wanted - self.held) * ROW
            seen = Observation(others + self.held * ROW, growth, self.held)
            found = self.guard.observe(seen, self.now)
            if found is None:
                break
            self.held = min(self.held, found.window)
        self.held = max(self.held, min(tokens, self.guard.current.window))


@given(st.lists(st.tuples(st.integers(0, 1_200_000), st.integers(1, 500)), max_size=60))
def test_the_process_stays_below_the_margin_or_the_draft_rests(
    steps: list[tuple[int, int]],
) -> None:
    process = Process()
    for others, tokens in steps:
        process.step(others, tokens)
        current = process.guard.current
        below = others + process.held * ROW <= BUDGET - MARGIN
        assert below or current == Restriction(0, 0)
        assert current.window <= FULL.window
        assert current.width <= FULL.width


def test_it_takes_no_more_than_needed_and_in_order() -> None:
    guard = MemoryGuard(BUDGET, MARGIN, FULL, ROW)
    assert guard.observe(Observation(900_000, 24_000, 400), 0.0) is None
    # 424 rows reached, 10 too many.
    assert guard.observe(Observation(936_000, 24_000, 400), 1.0) == Restriction(414, 4)
    assert guard.observe(Observation(2_000_000, 0, 400), 2.0) == Restriction(SMALLEST_WINDOW, 4)
    assert guard.observe(Observation(2_000_000, 0, 64), 3.0) == Restriction(SMALLEST_WINDOW, 1)
    assert guard.observe(Observation(2_000_000, 0, 64), 4.0) == Restriction(0, 0)
    assert guard.observe(Observation(2_000_000, 0, 0), 5.0) is None
    assert guard.tightened == 4


def test_the_draft_comes_back_rung_by_rung_after_a_while() -> None:
    process = Process()
    process.step(2_000_000, 400)
    assert process.guard.current == Restriction(0, 0)
    seen = [process.guard.current]
    for _ in range(int(RECOVERY_S) * 8):
        process.step(100_000, 400)
        if process.guard.current != seen[-1]:
            seen.append(process.guard.current)
            process.step(100_000, 400)
    assert seen == [
        Restriction(0, 0),
        Restriction(64, 1),
        Restriction(64, 4),
        Restriction(128, 4),
        Restriction(256, 4),
        FULL,
    ]


def test_it_does_not_come_back_to_where_it_would_not_fit() -> None:
    process = Process()
    process.step(700_000, 500)
    held = process.guard.current
    assert SMALLEST_WINDOW <= held.window < FULL.window
    for _ in range(200):
        process.step(700_000, 500)
    assert process.guard.current == held
    assert process.guard.tightened == 1
