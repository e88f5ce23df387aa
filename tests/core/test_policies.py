"""Draft policies, asked directly. Oracle: brute force for the best draft length; for the rest the
rules of each policy as its docstring states them, on hand-made trees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import (
    MAX_GAMMA,
    DraftPolicy,
    FixedPolicy,
    PearlPolicy,
    WindowedPolicy,
    best_gamma,
)
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree


def _view(
    *parents: int,
    in_flight: int = 0,
    room: int = 100,
    end: int = 1000,
    step_s: float = 0.01,
    pass_s: float = 0.02,
    rtt_s: float = 0.04,
    ranks: tuple[int, ...] = (),
    row_s: float | None = None,
) -> DraftView:
    """Node i + 1 hangs on ``parents[i]``; the first ``in_flight`` nodes have been sent. Every
    20 ms two tokens come."""
    tree = SpeculationTree(CommittedPrefix((1, 2)))
    for index, parent in enumerate(parents):
        rank = ranks[index] if ranks else 0
        tree.grow(index + 1, parent, 10 + index, 2, rank)
    estimates = DraftEstimates()
    estimates.step_s.add(step_s)
    estimates.pass_s.add(pass_s)
    estimates.rtt_s.add(rtt_s)
    estimates.commit_s.add(0.02)
    estimates.commit_tokens.add(2)
    if row_s is not None:
        for rows in range(20):
            estimates.row_s.add(rows, rows * row_s)
    return DraftView(tree, len(parents) - in_flight, in_flight, room, end, estimates)


CHAIN = (0, 1, 2, 3)


# --- the best draft length --------------------------------------------------------------------


def _expected_tokens(rate: float, gamma: int) -> float:
    """Accepted tokens and the one after them, summed over where the first miss may be."""
    missed_after = [rate**length * (1 - rate) * (length + 1) for length in range(gamma)]
    return sum(missed_after) + rate**gamma * (gamma + 1)


@given(st.floats(0.0, 0.99), st.floats(0.001, 0.2), st.floats(0.001, 2.0))
def test_best_gamma_is_the_best(rate: float, step_s: float, round_s: float) -> None:
    def speed(gamma: int) -> float:
        return _expected_tokens(rate, gamma) / (gamma * step_s + round_s)

    chosen = best_gamma(rate, step_s, round_s)
    assert 1 <= chosen <= MAX_GAMMA
    assert speed(chosen) >= max(map(speed, range(1, MAX_GAMMA + 1))) * (1 - 1e-9)


def test_longer_rounds_and_better_drafts_want_longer_drafts() -> None:
    rounds = [best_gamma(0.8, 0.01, round_s) for round_s in (0.02, 0.1, 0.5)]
    rates = [best_gamma(rate, 0.01, 0.1) for rate in (0.1, 0.5, 0.9)]
    assert rounds == sorted(rounds)
    assert rates == sorted(rates)
    assert rounds[0] < rounds[-1]
    assert rates[0] < rates[-1]


# --- fixed ------------------------------------------------------------------------------------


def test_fixed_drafts_gamma_tokens_sends_them_and_waits() -> None:
    policy = FixedPolicy(3)
    assert [policy.extend(_view(*CHAIN[:n])) for n in range(4)] == [ROOT, 1, 2, None]
    assert [policy.flush(_view(*CHAIN[:n])) for n in range(4)] == [False, False, False, True]
    waiting = _view(*CHAIN[:3], in_flight=3)
    assert (policy.extend(waiting), policy.flush(waiting)) == (None, False)


def test_fixed_picks_the_best_length() -> None:
    view = _view()
    length = best_gamma(view.estimates.acceptance.rate(0), 0.01, 0.06)
    chain = tuple(range(length))
    assert FixedPolicy().flush(_view(*chain))
    assert not FixedPolicy().flush(_view(*chain[:-1]))


# --- pearl ------------------------------------------------------------------------------------


def test_pearl_sends_its_first_node_at_once_and_drafts_on() -> None:
    policy = PearlPolicy(3)
    assert policy.flush(_view(0))
    behind = [policy.extend(_view(*CHAIN[:n], in_flight=1)) for n in (1, 2, 3, 4)]
    assert behind == [1, 2, 3, None]
    assert not policy.flush(_view(*CHAIN, in_flight=1))


def test_pearl_fits_its_length_into_a_round() -> None:
    six = tuple(range(6))
    assert PearlPolicy().extend(_view(*six[:5])) == 5
    assert PearlPolicy().extend(_view(*six)) is None


# --- windowed ---------------------------------------------------------------------------------


def test_windowed_sends_everything_at_once() -> None:
    assert WindowedPolicy().flush(_view(*CHAIN, in_flight=3))
    assert not WindowedPolicy().flush(_view(*CHAIN, in_flight=4))


def _waits(since_commit_s: float | None = 0.0, in_flight: int = 1, **world: float) -> bool:
    """Whether a device that gathers holds a node back: passes of 20 ms, steps of 2 ms, 5 ms to the
    verifier and back."""
    world = {"step_s": 0.002, "rtt_s": 0.005, **world}
    view = _view(*CHAIN, in_flight=in_flight, **world)  # type: ignore[arg-type]
    view = replace(view, since_commit_s=since_commit_s)
    return not WindowedPolicy(gather=0.1).flush(view)


def test_drafts_gather_until_the_next_pass_is_near() -> None:
    """What leaves within 20 - 5 = 15 ms of a commit is in the next pass. Held back until a step and
    a tenth of a pass before: 15 - 2 - 2 = 11 ms."""
    assert [_waits(since / 1e3) for since in (0, 5, 10, 12, 14)] == [True, True, True, False, False]
    assert [_waits(since / 1e3) for since in (16, 30, 32)] == [True, True, False]  # the one after


@pytest.mark.parametrize("rtt_ms", [25, 45, 205])
def test_drafts_gather_for_a_later_pass_when_the_verifier_is_far(rtt_ms: int) -> None:
    assert _waits(0.005, rtt_s=rtt_ms / 1e3)
    assert not _waits(0.013, rtt_s=rtt_ms / 1e3)


def test_drafts_do_not_gather_when_somebody_may_wait_for_them() -> None:
    assert _waits()
    assert not _waits(in_flight=0)
    assert not _waits(None)
    assert not _waits(pass_s=0.018)  # commits come every 20 ms: the verifier waited in between
    view = replace(_view(*CHAIN, in_flight=1, rtt_s=0.005), since_commit_s=0.0, resting=True)
    assert WindowedPolicy(gather=0.1).flush(view)
    nothing = replace(view, unsent=0, in_flight=len(CHAIN))
    assert not WindowedPolicy(gather=0.1).flush(nothing)


def test_windowed_stops_at_its_window() -> None:
    policy = WindowedPolicy(window=3)
    assert [policy.extend(_view(*CHAIN[:n])) for n in range(4)] == [ROOT, 1, 2, None]
    default = 2 * 6 + 4
    chain = tuple(range(default))
    assert WindowedPolicy(least_chance=0.0).extend(_view(*chain[:-1])) == default - 1
    assert WindowedPolicy(least_chance=0.0).extend(_view(*chain)) is None


def test_windowed_drafts_where_it_is_most_likely_to_count() -> None:
    # Node 1 (rank 0) leads its sibling 2; behind 1 lie 3 and 4: 0.7, 0.1, 0.49, 0.07.
    policy = WindowedPolicy(2)
    view = _view(0, 0, ranks=(0, 1))
    assert policy.extend(view) == 1
    view = _view(0, 0, 1, 1, ranks=(0, 1, 0, 1))
    assert policy.extend(view) == 3
    for _ in range(200):
        view.estimates.acceptance.add(1)
    assert policy.extend(view) == 2


def test_windowed_rests_rather_than_guess_wildly() -> None:
    chain = tuple(range(3))  # 0.7 ** 3 = 0.34
    assert WindowedPolicy(least_chance=0.3).extend(_view(*chain)) == 3
    assert WindowedPolicy(least_chance=0.4).extend(_view(*chain)) is None


def test_windowed_guesses_wildly_while_a_long_pass_runs() -> None:
    chain = tuple(range(10))  # 0.7 ** 10 = 0.028
    policy = WindowedPolicy(least_chance=0.05, step_price=0.1)
    assert policy.extend(_view(*chain, pass_s=0.03, row_s=0.0)) is None  # 0.1 * 0.01 / 0.03
    assert policy.extend(_view(*chain, pass_s=0.04, row_s=0.0)) == 10
    assert policy.extend(_view(*chain, pass_s=0.04)) is None  # rows may be dear, for all it knows


def test_windowed_spares_the_target_rows_that_do_not_pay() -> None:
    """A token takes 10 ms; behind a chain of 0.7 ** 3 = 0.34 a step hits with 0.7."""
    chain = tuple(range(3))
    assert WindowedPolicy().extend(_view(*chain, row_s=0.0023)) == 3  # 0.23 / 0.7 = 0.33
    assert WindowedPolicy().extend(_view(*chain, row_s=0.0025)) is None
    wide = _view(0, 0, 1, 1, ranks=(0, 1, 0, 1), row_s=0.0023)  # 0.49 is the best leaf
    assert WindowedPolicy(2).extend(wide) is None  # 2 * 0.23 / 0.8 = 0.58


# --- all --------------------------------------------------------------------------------------

POLICIES = [
    FixedPolicy(8),
    FixedPolicy(8, 3),
    PearlPolicy(8, 3),
    WindowedPolicy(3),
    WindowedPolicy(3, gather=0.1),
    FixedPolicy(),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_drafts_without_room_or_past_the_end(policy: DraftPolicy) -> None:
    assert policy.extend(_view(0, room=policy.width)) == 1
    assert policy.extend(_view(0, room=policy.width - 1)) is None
    assert policy.extend(_view(0, end=4)) == 1
    assert policy.extend(_view(0, end=3)) is None
    assert policy.extend(_view(end=3)) == ROOT
    assert policy.extend(_view(end=2)) is None


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_sends_nothing(policy: DraftPolicy) -> None:
    assert not policy.flush(_view())
    assert not policy.flush(_view(0, in_flight=1))
