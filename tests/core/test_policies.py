"""Draft policies and their learned estimates, called directly.

Oracle: brute force for the best draft length; otherwise the rules and formulas in each policy's
docstring, on hand-made trees.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device import estimates as est
from edgespec.core.device import goodput_policy
from edgespec.core.device.comparison_policies import (
    MAX_GAMMA,
    FixedPolicy,
    PearlPolicy,
    WindowedPolicy,
    best_gamma,
)
from edgespec.core.device.events import Start, StartStep
from edgespec.core.device.policy import (
    DEFAULT_WIDTH,
    GATHER_SHARE,
    DraftPolicy,
    DraftView,
)
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.estimators import ASSUMED_RTT_S, CalibratedChances, MovingAverage
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree
from tests.core.draft_scripts import RECONNECT, REQUEST

CHAIN = (0, 1, 2, 3)


def _make_view(
    *parents: int,
    in_flight: int = 0,
    room: int = 100,
    end: int = 1000,
    step_s: float = 0.01,
    pass_s: float = 0.02,
    rtt_s: float = 0.04,
    commit_s: float = 0.02,
    ranks: tuple[int, ...] = (),
    logprobs: tuple[float, ...] = (),
    row_s: float | None = None,
    rate: float | None = None,
    prefix_length: int = 2,
    commit_tokens: int = 2,
) -> DraftView:
    """Return a view in which node i + 1 hangs on ``parents[i]``, and the first ``in_flight`` nodes
    have been sent. Two tokens arrive every 20 ms."""
    tree = SpeculationTree(CommittedPrefix((1,) * prefix_length))
    for index, parent in enumerate(parents):
        rank = ranks[index] if ranks else 0
        logprob = logprobs[index] if logprobs else 0.0
        tree.grow(index + 1, parent, 10 + index, prefix_length, rank, logprob)
    estimates = est.DraftEstimates()
    estimates.step_s.add(step_s)
    estimates.pass_s.add(pass_s)
    estimates.rtt_s.add(rtt_s)
    estimates.commit_s.add(commit_s)
    estimates.commit_tokens.add(commit_tokens)
    for rows in range(20 if row_s is not None else 0):
        estimates.row_s.add(rows, rows * (row_s or 0.0))
    for trial in range(2000 if rate is not None else 0):
        estimates.acceptance.add(0 if trial % 100 < 100 * (rate or 0.0) else None)
    for node in tree.nodes.values():
        rank_rate = estimates.acceptance.rate(node.rank)
        node.chance = estimates.guesses.draft_chance(node.rank, node.logprob, rank_rate)
    return DraftView(tree, len(parents) - in_flight, in_flight, room, end, estimates)


def _view_chain(*logprobs: float, decoding: bool = True, **world: Any) -> DraftView:
    """Return a view with a chain of nodes with these log-probabilities. Passes and commits take 25
    ms, steps 10 ms."""
    world = {"rtt_s": 0.02, "commit_s": 0.025 if decoding else 0.1, **world}
    chain = tuple(range(len(logprobs)))
    return _make_view(*chain, logprobs=logprobs, pass_s=0.025, commit_tokens=1, **world)


def _expected_tokens(rate: float, gamma: int) -> float:
    """Sum the accepted tokens and the one after them over all places of the first miss."""
    missed_after = [rate**length * (1 - rate) * (length + 1) for length in range(gamma)]
    return sum(missed_after) + rate**gamma * (gamma + 1)


@given(st.floats(0.0, 0.99), st.floats(0.001, 0.2), st.floats(0.001, 2.0))
def test_best_gamma_is_the_best(rate: float, step_s: float, round_s: float) -> None:
    def speed(gamma: int) -> float:
        return _expected_tokens(rate, gamma) / (gamma * step_s + round_s)

    chosen = best_gamma(rate, step_s, round_s)
    assert 1 <= chosen <= MAX_GAMMA
    assert speed(chosen) >= max(map(speed, range(1, MAX_GAMMA + 1))) * (1 - 1e-9)


def test_fixed_drafts_gamma_tokens_sends_them_and_waits() -> None:
    policy = FixedPolicy(3)
    assert [policy.choose_parent(_make_view(*CHAIN[:n])) for n in range(4)] == [ROOT, 1, 2, None]
    assert [policy.should_send(_make_view(*CHAIN[:n])) for n in range(4)] == [
        False,
        False,
        False,
        True,
    ]
    waiting = _make_view(*CHAIN[:3], in_flight=3)
    assert (policy.choose_parent(waiting), policy.should_send(waiting)) == (None, False)
    best = tuple(range(best_gamma(waiting.estimates.acceptance.rate(0), 0.01, 0.06)))
    assert FixedPolicy().should_send(_make_view(*best))
    assert not FixedPolicy().should_send(_make_view(*best[:-1]))


def test_pearl_sends_its_first_node_at_once_and_drafts_on() -> None:
    policy = PearlPolicy(3)
    assert policy.should_send(_make_view(0))
    behind = [policy.choose_parent(_make_view(*CHAIN[:n], in_flight=1)) for n in (1, 2, 3, 4)]
    assert behind == [1, 2, 3, None]
    assert not policy.should_send(_make_view(*CHAIN, in_flight=1))
    assert PearlPolicy().choose_parent(_make_view(*range(5))) == 5  # its length fits into a round
    assert PearlPolicy().choose_parent(_make_view(*range(6))) is None


def _does_wait(since_commit_s: float | None = 0.0, in_flight: int = 1, **world: Any) -> bool:
    """Return whether a device that gathers holds a node back. Passes take 20 ms, steps 2 ms, and
    the round trip to the verifier 5 ms."""
    world = {"step_s": 0.002, "rtt_s": 0.005, **world}
    view = replace(_make_view(*CHAIN, in_flight=in_flight, **world), since_commit_s=since_commit_s)
    return not WindowedPolicy(gather_share=0.1).should_send(view)


def test_drafts_gather_until_the_next_pass_is_near() -> None:
    """A node that leaves within 20 - 5 = 15 ms of a commit is in the next pass. It is held back
    until a step and a tenth of a pass before that: 15 - 2 - 2 = 11 ms. A distant verifier has a
    later pass."""
    assert [_does_wait(since / 1e3) for since in (0, 5, 10, 12, 14)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    # the pass after that
    assert [_does_wait(since / 1e3) for since in (16, 30, 32)] == [True, True, False]
    for rtt_s in (0.025, 0.045, 0.205):
        assert [_does_wait(since, rtt_s=rtt_s) for since in (0.005, 0.013)] == [True, False]


def test_drafts_do_not_gather_when_somebody_may_wait_for_them() -> None:
    assert _does_wait()
    assert not _does_wait(in_flight=0)
    assert not _does_wait(None)
    assert not _does_wait(
        pass_s=0.018
    )  # commits come every 20 ms, so the verifier waited in between
    view = replace(_make_view(*CHAIN, in_flight=1, rtt_s=0.005), since_commit_s=0.0, resting=True)
    assert WindowedPolicy(gather_share=0.1).should_send(view)
    nothing = replace(view, unsent=0, in_flight=len(CHAIN))
    assert not WindowedPolicy(gather_share=0.1).should_send(nothing)


def test_windowed_sends_everything_at_once_and_stops_at_its_window() -> None:
    assert WindowedPolicy().should_send(_make_view(*CHAIN, in_flight=3))
    assert not WindowedPolicy().should_send(_make_view(*CHAIN, in_flight=4))
    policy, default = WindowedPolicy(window=3), tuple(range(2 * 6 + 4))
    assert [policy.choose_parent(_make_view(*CHAIN[:n])) for n in range(4)] == [ROOT, 1, 2, None]
    assert (
        WindowedPolicy(least_chance=0.0).choose_parent(_make_view(*default[:-1]))
        == len(default) - 1
    )
    assert WindowedPolicy(least_chance=0.0).choose_parent(_make_view(*default)) is None


def test_windowed_drafts_where_it_is_most_likely_to_count() -> None:
    # Node 1 (rank 0) leads its sibling 2; its children 3 and 4 follow: 0.7, 0.1, 0.49, 0.07.
    policy = WindowedPolicy(2)
    assert policy.choose_parent(_make_view(0, 0, ranks=(0, 1))) == 1
    view = _make_view(0, 0, 1, 1, ranks=(0, 1, 0, 1))
    assert policy.choose_parent(view) == 3
    for _ in range(200):
        view.estimates.acceptance.add(1)
    assert policy.choose_parent(view) == 2


@pytest.mark.parametrize(
    ("policy", "length", "world", "found"),
    [
        # 0.7 ** 3 = 0.34
        ({"least_chance": 0.3}, 3, {}, 3),
        ({"least_chance": 0.4}, 3, {}, None),
        # The draft guesses wildly while a long pass runs: 0.7 ** 10 = 0.028 against 0.1 * 0.01 /
        # 0.03.
        ({"least_chance": 0.05, "step_price": 0.1}, 10, {"pass_s": 0.03, "row_s": 0.0}, None),
        ({"least_chance": 0.05, "step_price": 0.1}, 10, {"pass_s": 0.04, "row_s": 0.0}, 10),
        # The policy has no price of a row, so rows may be expensive.
        ({"least_chance": 0.05, "step_price": 0.1}, 10, {"pass_s": 0.04}, None),
        # A token takes 10 ms. After a chain of 0.34, a step is right with 0.7: 0.23 / 0.7 = 0.33.
        ({}, 3, {"row_s": 0.0023}, 3),
        ({}, 3, {"row_s": 0.0025}, None),
    ],
)
def test_windowed_rests_where_a_guess_does_not_pay(
    policy: dict[str, float], length: int, world: dict[str, float], found: int | None
) -> None:
    assert WindowedPolicy(**policy).choose_parent(_make_view(*range(length), **world)) == found  # type: ignore[arg-type]
    wide = _make_view(0, 0, 1, 1, ranks=(0, 1, 0, 1), row_s=0.0023)  # 0.49 is the best leaf
    assert WindowedPolicy(2).choose_parent(wide) is None  # 2 * 0.23 / 0.8 = 0.58


@pytest.mark.parametrize(
    "policy",
    [
        FixedPolicy(8),
        FixedPolicy(8, 3),
        PearlPolicy(8, 3),
        WindowedPolicy(3),
        WindowedPolicy(3, gather_share=0.1),
        FixedPolicy(),
    ],
)
def test_nobody_drafts_without_room_or_past_the_end_or_sends_nothing(policy: DraftPolicy) -> None:
    assert policy.choose_parent(_make_view(0, room=policy.width)) == 1
    assert policy.choose_parent(_make_view(0, room=policy.width - 1)) is None
    assert policy.choose_parent(_make_view(0, end=4)) == 1
    assert policy.choose_parent(_make_view(0, end=3)) is None
    assert policy.choose_parent(_make_view(end=3)) == ROOT
    assert policy.choose_parent(_make_view(end=2)) is None
    assert not policy.should_send(_make_view())
    assert not policy.should_send(_make_view(0, in_flight=1))


def test_goodput_goes_on_where_a_node_is_in_time() -> None:
    """The verifier waits for drafts, so each node is in time, and a step saves its hits."""
    for logprobs, leaf in (((), ROOT), ((-0.1,), 1)):
        view = _view_chain(*logprobs, rate=0.8, decoding=False)
        rate = view.estimates.acceptance.rate(0)
        best = rate ** (1 + len(logprobs))
        assert list(goodput_policy.GoodputPolicy(1).best_leaf(view)) == pytest.approx([leaf, best])


def test_goodput_counts_the_steps_that_only_catch_up() -> None:
    """RTT 20 ms, steps 10, passes 25. A node drafted now arrives after ceil(30 / 25) = 2 tokens,
    and the second after ceil(40 / 25) = 2. The third also arrives after 2, and is in time."""
    view = _view_chain(rate=0.8)
    rate = view.estimates.acceptance.rate(0)
    gains = [sum(rate**j for j in range(3, k + 1)) / k for k in range(3, 25)]
    leaf, gain = goodput_policy.GoodputPolicy(1).best_leaf(view)
    assert leaf == ROOT
    assert gain == pytest.approx(max(gains))
    assert goodput_policy.GoodputPolicy(1, min_gain=gain).choose_parent(view) == ROOT
    assert (
        goodput_policy.GoodputPolicy(1, min_gain=gain * 1.01).choose_parent(replace(view, end=2))
        is None
    )


def test_before_the_first_pass_a_draft_is_as_quick_as_what_opened_the_stream() -> None:
    """Steps take 10 ms, passes 25 and a round trip 200 ms. A node drafted at once arrives 10 ms
    after the ``Open``, within the first pass. The later it is, the more tokens have been decoded.
    """
    policy, view = goodput_policy.GoodputPolicy(1), _view_chain(rate=0.5, rtt_s=0.2)
    assert policy.best_leaf(view)[1] < policy.min_gain
    opening = [replace(view, since_open_s=since_s) for since_s in (0.0, 0.015, 0.19)]
    assert [one.arrival_s for one in opening] == pytest.approx([0.01, 0.025, 0.2])
    gains = [policy.best_leaf(one)[1] for one in opening]
    assert gains[0] > gains[1] > policy.min_gain > gains[2]


def test_goodput_rests_where_it_does_not_pay_and_probes() -> None:
    """At a rate of 0.2 and a round trip of 200 ms no step saves anything. One guess in eight
    positions keeps the acceptance rate known, and is not sent."""
    policy, far = goodput_policy.GoodputPolicy(1), cast(Any, {"rate": 0.2, "rtt_s": 0.2})
    asked = {n: policy.choose_parent(_view_chain(prefix_length=n, **far)) for n in range(8, 40)}
    assert [n for n, node in asked.items() if node == ROOT] == [8, 16, 24, 32]
    probe = _view_chain(-0.1, **far)
    assert (policy.choose_parent(probe), policy.should_send(probe)) == (None, False)
    better = _view_chain(-0.1, rate=0.95, rtt_s=0.02)
    assert (policy.choose_parent(better), policy.should_send(better)) == (1, True)


def test_goodput_goes_by_what_the_draft_thought_and_has_a_window() -> None:
    """Two guesses 1 and 2 hang on the root, right with 0.45 and 0.4 by the draft's confidence, and
    two uncertain ones follow the first. By rank alone the chain's end has 0.8 * 0.8. By confidence
    it has 0.45 * 0.45, and the second choice at the root has 0.4."""
    view, first, second = _view_chain(rate=0.8, decoding=False), math.log(0.35), math.log(0.3)
    for trial in range(2000):
        view.estimates.guesses.alone.add(0, first, hit=trial % 20 < 9)
        view.estimates.guesses.alone.add(1, second, hit=trial % 20 < 8)
    for node, parent in enumerate((ROOT, ROOT, 1, 1), 1):
        rank, rate = (node + 1) % 2, view.estimates.acceptance.rate((node + 1) % 2)
        logprob = second if rank else first
        chance = view.estimates.guesses.draft_chance(rank, logprob, rate)
        view.tree.grow(node, parent, 10 + node, 2, rank, logprob, chance)
    assert WindowedPolicy(2).choose_parent(replace(view, unsent=4)) == 3
    assert goodput_policy.GoodputPolicy(2).choose_parent(replace(view, unsent=4)) == 2
    assert goodput_policy.GoodputPolicy(2, window=3).choose_parent(view) == 2
    assert goodput_policy.GoodputPolicy(2, window=2).choose_parent(view) is None


def test_who_names_no_policy_has_goodput() -> None:
    policy = goodput_policy.make_policy()
    assert policy == goodput_policy.make_policy(goodput_policy.DEFAULT_POLICY)
    assert isinstance(policy, goodput_policy.GoodputPolicy)
    assert (policy.width, policy.gather_share, policy.window) == (DEFAULT_WIDTH, GATHER_SHARE, None)
    kinds = [type(goodput_policy.make_policy(name)) for name in goodput_policy.PolicyName]
    assert kinds == [WindowedPolicy, PearlPolicy, FixedPolicy, goodput_policy.GoodputPolicy]


@pytest.mark.parametrize(
    ("price", "rate", "why"),
    [
        ((), 0.9, None),
        ((0.0, 0), 0.9, "the verifier's passes are busy: it takes no drafts now"),
        ((0.5, 0), 0.9, "takes no drafts now, a row is worth its price from a chance of 0.50 on"),
        ((0.8,), 0.5, "from a chance of 0.80 on, .* expected to be right with 0\\."),
        ((), 0.01, "a draft step would save 0.0.* tokens, and has to save"),
    ],
)
def test_a_device_says_why_it_rests(price: tuple[Any, ...], rate: float, why: str | None) -> None:
    estimates = _view_chain(rate=rate).estimates
    found = goodput_policy.explain_resting(
        goodput_policy.GoodputPolicy(1), est.RowPrice(*price), estimates
    )
    assert found is None if why is None else re.search(why, str(found))


@pytest.mark.parametrize(
    ("step_s", "rtt_s", "why"),
    [
        (0.008, 0.02, None),
        (0.03, 0.02, "takes 30 ms here, and the verifier makes one in 25 ms by itself"),
        (0.02, 0.5, r"would have to be 100\.0 tokens ahead .* chance of that is 0\.00"),
    ],
)
def test_a_device_says_that_its_model_is_never_ahead(
    step_s: float, rtt_s: float, why: str | None
) -> None:
    estimates = _view_chain(rate=0.8, step_s=step_s, rtt_s=rtt_s).estimates
    for _ in range(9):
        estimates.own_speed.add(0.025, 1)
    policy = goodput_policy.GoodputPolicy()
    found = goodput_policy.explain_resting(policy, est.RowPrice(), estimates)
    assert found is None if why is None else re.search(why, str(found)), found
    assert policy.is_hopeless(estimates) == (why is not None)


def test_a_guess_of_any_rank_has_the_chance_of_its_cell() -> None:
    found = CalibratedChances()
    hardly, likely = math.log(0.01), math.log(0.3)
    assert found.chance(1, hardly, 0.1) == pytest.approx(0.1)
    for _ in range(60):
        found.add(1, hardly, hit=False)
    assert found.chance(1, math.log(0.015), 0.1) == pytest.approx(0.6 / 66, rel=0.15)
    assert found.chance(1, likely, 0.1) == pytest.approx(0.1)
    assert found.chance(2, hardly, 0.1) == pytest.approx(0.1)
    found.add(2, likely, hit=True)
    assert found.chance(7, likely, 0.1) == pytest.approx(1.6 / 7)
    found.add(0, likely, hit=False)
    assert found.chance(0, math.log(0.35), 0.8) == pytest.approx(4.8 / 7)


@pytest.mark.parametrize("logprob", [-math.inf, -1e9, -1e-300, 0.0, 3.0, math.nan])
def test_any_guess_has_a_chance(logprob: float) -> None:
    for rank in (0, 1, 9):
        guesses = CalibratedChances()
        guesses.add(rank, logprob, hit=False)
        assert 0.0 < guesses.chance(rank, logprob, 0.5) < 0.5


def test_what_is_learned_is_kept_apart_by_model_and_by_noise() -> None:
    usual = est.KeptEstimates()
    learned = est.KeptEstimatesByModel("base", usual)
    assert learned.for_model("base") is usual
    sql = learned.for_model("sql")
    assert sql is learned.for_model("sql")
    assert sql.greedy is not usual.greedy
    greedy, sampled = (usual.guesses(SamplingParams(t)) for t in (0.0, 0.7))
    assert greedy is usual.guesses(SamplingParams(0.0, seed=9)) is not sampled
    assert sampled is usual.guesses(SamplingParams(1.0))


def test_of_many_models_the_one_asked_for_longest_ago_is_forgotten() -> None:
    learned = est.KeptEstimatesByModel("", est.KeptEstimates())
    found = [learned.for_model(f"a{number}") for number in range(est.MAX_OTHER_MODELS)]
    assert learned.for_model("a0") is found[0]
    learned.for_model("one more")
    assert learned.for_model("a0") is found[0]
    assert learned.for_model("a1") is not found[1]


def _is_held_back(nodes: int, **world: Any) -> bool:
    """Return whether a device with nothing in flight extends its chain before it sends it. Rates
    are 0.8, a commit has just arrived, and the round trip to the verifier takes 0.5 ms."""
    view = _make_view(*range(nodes), **{"rtt_s": 0.0005, **world})
    view.estimates.acceptance.rates[0] = 0.8
    for node in view.tree.nodes.values():
        node.chance = 0.8
    view.idle_s = 0.001 * nodes
    return not WindowedPolicy(gather_share=0.1).should_send(view)


def _miss_s(nodes: int, pass_s: float, step_s: float) -> float:
    """Return the time until the next miss is found, as a sum: a chain, then passes that each begin
    (but for the first) with the nodes drafted during the one before."""
    passes = 1.0 + sum(math.pow(0.8, nodes + more * pass_s / step_s) for more in range(1000))
    return nodes * step_s + passes * pass_s


@pytest.mark.parametrize(
    ("pass_s", "step_s"), [(0.04, 0.001), (0.04, 0.003), (0.015, 0.001), (0.008, 0.002)]
)
def test_the_first_chain_after_a_miss_is_as_long_as_is_best(pass_s: float, step_s: float) -> None:
    best = min(range(1, 30), key=lambda nodes: _miss_s(nodes, pass_s, step_s))
    held = [_is_held_back(nodes, pass_s=pass_s, step_s=step_s) for nodes in range(1, 30)]
    assert held == [nodes < best for nodes in range(1, 30)]


def test_a_chain_that_is_held_is_in_time_for_the_next_pass() -> None:
    assert _is_held_back(2, pass_s=0.04, step_s=0.001)
    assert not _is_held_back(2, pass_s=0.04, step_s=0.001, rtt_s=0.04)
    resting = replace(_make_view(0, 1, step_s=0.001, pass_s=0.04), idle_s=0.0, resting=True)
    assert WindowedPolicy(gather_share=0.1).should_send(resting), "no step would make it longer"


@pytest.mark.parametrize(
    ("steps", "expected_s"),
    [
        ([(1, 0.004), (2, 0.004)], 0.004),
        ([(64, 0.3), (1, 0.004)], 0.004),  # a prompt's step is no measure
        ([(1, 0.004), (9, 0.02)], 0.004),
        ([(1, 0.012), (9, 0.004)], 0.008),  # nine tokens in 4 ms: one takes no longer
    ],
)
def test_a_step_is_timed_by_what_it_feeds(
    steps: list[tuple[int, float]], expected_s: float
) -> None:
    estimates = est.DraftEstimates()
    for fed, took_s in steps:
        estimates.note_step(fed, took_s)
    assert estimates.step_s.get(0.0) == pytest.approx(expected_s)


@pytest.mark.parametrize("pass_s", [0.0005, 0.003, 0.01, 0.025, 0.2])
def test_a_draft_that_was_never_timed_is_tried_however_short_a_pass(pass_s: float) -> None:
    view = _make_view(pass_s=pass_s, commit_s=pass_s, commit_tokens=1, rtt_s=0.0005)
    view = replace(view, estimates=replace(view.estimates, step_s=MovingAverage()))
    assert goodput_policy.GoodputPolicy().choose_parent(view) == ROOT


def test_step_times_outlive_a_generation_and_a_model() -> None:
    usual = est.KeptEstimates()
    known = est.DraftEstimates.of(est.VerifierEstimates(), usual, SamplingParams())
    known.note_step(1, 0.002)
    other = est.KeptEstimatesByModel("base", usual).for_model("sql")
    for learned in (usual, other):
        following = est.DraftEstimates.of(est.VerifierEstimates(), learned, SamplingParams())
        assert following.step_s.get(0.0) == 0.002


def test_no_round_trip_is_longer_than_the_greeting() -> None:
    fresh = _make_view()
    for open_s, expected_s in ((0.001, 0.001), (5.0, ASSUMED_RTT_S)):
        estimates = replace(fresh.estimates, rtt_s=MovingAverage(), open_s=open_s)
        assert replace(fresh, estimates=estimates).rtt_s == expected_s
    estimates = replace(fresh.estimates, open_s=0.001)
    assert replace(fresh, estimates=estimates).rtt_s == 0.04, "what was measured counts"


def test_a_text_begins_with_what_the_one_before_found_out() -> None:
    """The verifier commits six tokens every 45 ms, so it is past a draft of 8 ms per step. The
    first generation has no estimates. The second one inherits all, also the good acceptance rate.
    """
    known, learned = est.VerifierEstimates(), est.KeptEstimates()
    steps = []
    for _ in range(2):
        session = DraftSession(
            REQUEST, goodput_policy.GoodputPolicy(), RECONNECT, 1000, 0, 0, known, learned
        )
        actions = session.handle(Start(), 0.0)
        steps.append(any(isinstance(action, StartStep) for action in actions))
        for estimate, value in (
            (session.estimates.step_s, 0.008),
            (session.estimates.rtt_s, 0.02),
            (session.estimates.pass_s, 0.045),
            (session.estimates.commit_s, 0.045),
            (session.estimates.server_tokens, 6.0),
        ):
            estimate.add(value)
        for _ in range(40):
            session.estimates.acceptance.add(0)
    assert steps == [True, False]
