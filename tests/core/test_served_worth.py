"""When a session's own guesses rest. Oracle: the formula of the module, by hand."""

from __future__ import annotations

from edgespec.core.verifier.served_drafts import (
    EXPLORED,
    FIRST_BALANCE,
    LONGEST_REST_PASSES,
    MOST_BALANCE,
    SHORTEST_REST_PASSES,
    TRIAL_PASSES,
    ServedWorth,
)


def _trial(worth: ServedWorth, rows: int, accepted: int, price: float) -> None:
    """One trial with so many rows and accepted tokens in all, in its first pass."""
    for number in range(TRIAL_PASSES):
        assert worth.asks()
        first = number == 0
        worth.count(rows if first else 0, accepted if first else 0, price)


def _rest(worth: ServedWorth) -> int:
    passes = 0
    while not worth.asks():
        passes += 1
    return passes


def test_guesses_that_cost_more_than_they_bring_rest() -> None:
    worth = ServedWorth()
    _trial(worth, 60, 5, 0.1)
    assert worth.resting == SHORTEST_REST_PASSES
    free = ServedWorth()
    _trial(free, 60, 5, 0.0)
    assert not free.resting


def test_rests_grow_while_nothing_is_right_and_are_bounded() -> None:
    worth, rests = ServedWorth(), []
    for _ in range(9):
        _trial(worth, 0, 0, 0.1)
        rests.append(worth.resting)
        assert _rest(worth) == rests[-1]
    assert rests[:3] == [SHORTEST_REST_PASSES * n for n in (1, 2, 4)]
    assert rests[-1] == LONGEST_REST_PASSES
    _trial(worth, 60, 20, 0.1)
    _trial(worth, 0, 0, 0.1)
    assert worth.resting == SHORTEST_REST_PASSES


def test_rows_at_risk_are_what_the_balance_pays_and_one() -> None:
    worth = ServedWorth()
    assert worth.rows(0.0) is None
    assert worth.rows(0.2) == 1 + int(FIRST_BALANCE / 0.2)
    lost, passes = 0.0, 0
    for _ in range(2_000):
        if worth.asks() and (rows := worth.rows(0.2)):
            worth.count(rows, 0, 0.2)
            lost += 0.2 * rows
        passes += 1
    assert 0.0 < lost <= FIRST_BALANCE + EXPLORED * passes + 0.2
    worth = ServedWorth()
    worth.count(1, 1, 0.2)
    assert worth.rows(0.2) == 1 + int((FIRST_BALANCE + 0.8) / 0.2)
    worth.count(0, 100, 0.2)
    assert worth.rows(0.2) == 1 + int(MOST_BALANCE / 0.2)
