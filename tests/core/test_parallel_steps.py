"""Tests of draft steps that bring candidates for several positions, in a device's session.

Oracles: the tree that a step must make, written out; the outputs of the toy target, which no draft
may change; and the formula of ``parallel_steps`` played as a sum over all lengths of a chain.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.comparison_policies import FixedPolicy, WindowedPolicy
from edgespec.core.device.estimates import DraftEstimates, KeptEstimates
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.parallel_steps import choose_places, token_s
from edgespec.core.device.policy import DraftView
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Candidate, count_places, draft_places
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix, SpeculationTree
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.draft_scripts import GREETING, REQUEST, messages_in, new_session
from tests.sim.one_session import play_alone


class AlwaysPlaces(WindowedPolicy):
    """A policy that wants four places in each step."""

    def choose_places(self, view: DraftView) -> int:
        return 4


def _session(max_places: int = 4, width: int = 2, **limits: int) -> DraftSession:
    policy = AlwaysPlaces(width=width)
    session = DraftSession(
        REQUEST, policy, ReconnectPolicy(), 1000, vocabulary_size=1000, draft_places=max_places
    )
    session.handle(ev.Start(), 0.0)
    return session


def _step_in(actions: tuple[ev.DraftAction, ...]) -> ev.StartStep:
    (step,) = [action for action in actions if isinstance(action, ev.StartStep)]
    return step


def _places(*tokens: tuple[int, ...]) -> ev.StepDone:
    first, *further = [tuple(Candidate(token, -0.2) for token in place) for place in tokens]
    return ev.StepDone(first, tuple(further))


def _shape(session: DraftSession) -> dict[int, tuple[int, int, int]]:
    """Return (token of the parent or 0, rank, place) of each node, by token."""
    nodes = session.tree.nodes
    return {
        node.token: (nodes[node.parent].token if node.parent else 0, node.rank, node.place)
        for node in nodes.values()
    }


def test_places_become_a_chain_with_siblings() -> None:
    session = _session()
    session.handle(_places((10, 20), (11, 21), (12, 22), (13, 23)), 0.01)
    assert _shape(session) == {
        **{10: (0, 0, 0), 20: (0, 1, 0), 11: (10, 0, 1), 21: (10, 1, 1)},
        **{12: (11, 0, 2), 22: (11, 1, 2), 13: (12, 0, 3), 23: (12, 1, 3)},
    }


def test_the_next_step_feeds_all_that_was_drafted() -> None:
    """Rows of masks are gone after a step: nothing behind the fed tokens counts as cached."""
    session = _session(width=1)
    actions = session.handle(_places((10,), (11,), (12,), (13,)), 0.01)
    step = _step_in(actions)
    assert (step.keep_length, step.feed) == (2, (10, 11, 12, 13))


@pytest.mark.parametrize(
    ("committed", "left"),
    [
        ((10,), {11: (0, 0, 1), 12: (11, 0, 2), 13: (12, 0, 3)}),
        ((10, 11, 12), {13: (0, 0, 3)}),
        ((10, 11, 12, 13), {}),
        ((20,), {}),
        ((10, 99), {}),
        ((10, 11, 12, 13, 14), {}),
    ],
    ids=["first", "three", "all", "other", "second-other", "more"],
)
def test_places_that_were_decided_meanwhile_are_judged(
    committed: tuple[int, ...], left: dict[int, tuple[int, int, int]]
) -> None:
    session = _session(width=1)
    session.handle(ev.Connected(), 0.0)
    session.handle(GREETING, 0.0)
    session.handle(Commit(2, committed, verify_us=1000), 0.01)
    session.handle(_places((10,), (11,), (12,), (13,)), 0.02)
    assert _shape(session) == left
    right = sum(one == other for one, other in zip(committed, (10, 11, 12, 13), strict=False))
    judged = min(len(committed), right + 1, 4)
    assert (session.counters.tried, session.counters.hits) == (judged, right)


def test_each_place_has_a_rate_of_its_own() -> None:
    """The first place is always right, the second one never: their rates move apart, and the
    evidence about the draft counts first places only."""
    session, position = _session(width=1), 2
    session.handle(ev.Connected(), 0.0)
    session.handle(GREETING, 0.0)
    for number in range(8):
        session.handle(_places((10,), (11,)), number + 0.5)
        session.handle(Commit(position, (10, 50), verify_us=1000), number + 0.6)
        position += 2
        session.handle(_places((60,)), number + 0.7)  # a step that the commit made useless
    guesses = session.estimates.guesses
    assert guesses.at(0).acceptance.rate(0) > 0.75
    assert guesses.at(1).acceptance.rate(0) < 0.45
    assert session.estimates.evidence.hits == 8


@pytest.mark.parametrize(
    ("max_places", "room", "max_tokens", "expected"),
    [(4, 64, 20, 4), (2, 64, 20, 2), (1, 64, 20, 1), (4, 6, 20, 3), (4, 64, 3, 2), (4, 2, 20, 1)],
    ids=["wanted", "draft", "ordinary", "room", "end", "no-room"],
)
def test_places_are_bounded(max_places: int, room: int, max_tokens: int, expected: int) -> None:
    """A draft fills as many places as it can, as the verifier accepts nodes of, and as the output
    has positions for. The last position needs no draft."""
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=max_tokens))
    session = DraftSession(
        request, AlwaysPlaces(width=2), ReconnectPolicy(), 1000, draft_places=max_places
    )
    session.limits = Limits(max_nodes_outstanding=room)
    assert _step_in(session.handle(ev.Start(), 0.0)).places == expected


def test_an_ordinary_draft_is_asked_for_one_place() -> None:
    session = new_session(GoodputPolicy())
    step = _step_in(session.handle(ev.Start(), 0.0))
    assert step == ev.StartStep(0, (1, 1), 2)
    assert step.places == 1


def test_empty_places_end_the_chain() -> None:
    session = _session(width=1)
    session.handle(_places((10,), (), (12,)), 0.01)
    assert _shape(session) == {10: (0, 0, 0)}


def test_the_price_of_a_row_ends_the_chain() -> None:
    """At a price of 0.5 places with chances near 0.7, 0.56 and 0.45, one behind the other, are
    worth their rows up to the first one."""
    session = _session(width=1)
    session.estimates.price.least_chance = 0.5
    session.handle(_places((10,), (11,), (12,), (13,)), 0.01)
    assert list(_shape(session)) == [10]


# --- the number of places -----------------------------------------------------------------------


def _view(
    step_s: float, rates: tuple[float, ...], rtt_s: float, pass_s: float = 0.025
) -> DraftView:
    estimates, pass_s = DraftEstimates(), 0.025
    estimates.max_places = len(rates)
    for _ in range(100):
        estimates.rtt_s.add(rtt_s)
        estimates.pass_s.add(pass_s)
        estimates.commit_s.add(pass_s)
        for rows in (1, 3, 8):
            took_s = step_s * (1.0 + 0.2 * (rows - 1))
            estimates.step_row_s.add(rows, took_s)
        estimates.step_s.add(step_s)
    for place, rate in enumerate(rates):
        acceptance = estimates.guesses.at(place).acceptance
        acceptance.rates[0] = rate
    tree = SpeculationTree(CommittedPrefix((1,)))
    return DraftView(tree, 0, 0, 64, 1 << 20, estimates)


GOOD = tuple(0.85 * share for share in (1, 0.95, 0.9, 0.85, 0.8, 0.78, 0.75, 0.72))
FALLING = tuple(0.85 * share for share in (1, 0.85, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3))


@pytest.mark.parametrize(
    ("step_s", "rates", "rtt_s", "places", "token_ms"),
    [
        (0.008, GOOD, 0.02, 1, 15.16),
        (0.024, GOOD, 0.02, 8, 25.0),
        (0.024, GOOD, 0.002, 8, 25.0),
        (0.008, FALLING, 0.02, 1, 15.16),
        (0.008, (0.85,) * 8, 0.002, 8, 13.31),
        (0.08, FALLING, 0.05, 1, 25.0),
    ],
    ids=["quick", "slow", "slow-near", "falling", "as-good", "too-slow"],
)
def test_places_are_chosen_by_the_time_of_a_token(
    step_s: float, rates: tuple[float, ...], rtt_s: float, places: int, token_ms: float
) -> None:
    view = _view(step_s, rates, rtt_s)
    assert choose_places(view) == places
    assert token_s(view, rates[:1]) == pytest.approx(token_ms / 1e3, rel=0.01)


def test_time_per_token_is_the_sum_over_all_chains() -> None:
    """Oracle: each chain length by itself, with its chance, its tokens and its end."""
    view, rates = _view(0.016, GOOD, 0.02), GOOD[:4]
    tokens = seconds = 0.0
    for length in range(200):
        chance, committed = 1.0, 0.0
        for position in range(length + 1):
            run = position // 4
            arrival = 0.02 + 0.016 * (1 + 0.2 * 3) + run * 0.016 * (1 + 0.2 * 6)
            committed = min(committed + 0.025, max(committed, arrival + 1.5 * 0.025))
            rate = rates[position % 4]
            chance *= rate if position < length else 1.0 - rate
        tokens += chance * (length + 1)
        seconds += chance * committed
    assert token_s(view, rates) == pytest.approx(seconds / tokens, rel=1e-3)


def test_step_time_is_separated_from_rows() -> None:
    """Steps of 8 ms with 2 ms for each further row are recognised from steps of several rows."""
    estimates = DraftEstimates()
    estimates.max_places = 8
    for fed, places in [(1, 4), (4, 4), (2, 1), (1, 8)] * 20:
        estimates.note_step(fed, 0.008 + 0.002 * (fed + places - 2), places)
    assert estimates.further_row_s == pytest.approx(0.002, rel=0.05)
    assert estimates.step_s.get(0.0) == pytest.approx(0.008, rel=0.05)
    assert estimates.position_s(1.0, 4) == pytest.approx((0.008 + 6 * 0.002) / 4, rel=0.05)


# --- whole generations --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("places", [1, 2, 4, 8], ids=lambda count: f"places-{count}")
def test_outputs_are_the_target_s(places: int, temperature: float) -> None:
    """Oracle: the target's own tokens, drawn one by one."""
    model = ToyModel(vocabulary_size=40, sharpness=3.0)
    drafter = ToyDrafter(model.perturbed(0.15), max_places=places)
    assert count_places(drafter) == places
    sampling = SamplingParams(temperature=temperature, seed=5, max_tokens=60)
    opened = Open("s", "", "", (3, 4, 5), sampling=sampling)
    kept = KeptEstimates()

    class Places(GoodputPolicy):
        def choose_places(self, view: DraftView) -> int:
            return places

    device = play_alone(
        ToyTarget(model), drafter, opened, Places(), 0.02, 0.004, 0.02, kept, row_s=0.0004
    )
    plain, wanted = ToyDrafter(model), [3, 4, 5]
    plain.begin(3, sampling)
    for _ in range(60):
        wanted.append(plain.step(0, wanted, 1)[0].token)
    assert list(device.delivery.tokens) == wanted[3:]
    assert device.session.counters.accepted >= 15


def test_a_toy_step_leaves_nothing_behind() -> None:
    """After a step of several places, a step of one place returns what a fresh drafter returns."""
    model = ToyModel(vocabulary_size=40)
    drafter, fresh = ToyDrafter(model, max_places=4), ToyDrafter(model)
    penalised = SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.3)
    for one in (drafter, fresh):
        one.begin(2, penalised)
    places = drafter.step_places(0, (1, 2, 3), 2, 4)
    assert [len(one) for one in places] == [2, 2, 2, 2]
    assert drafter.step(3, (9,), 2) == fresh.step(0, (1, 2, 3, 9), 2)
    info = replace(toy_info(model), context_length=5)
    short = ToyDrafter(model, info, max_places=4)
    short.begin(2, penalised)
    assert len(draft_places(short, 0, (1, 2, 3, 4), 2, 4)) == 2


def test_published_schemes_draft_one_position_a_step() -> None:
    session = DraftSession(REQUEST, FixedPolicy(3), ReconnectPolicy(), 1000, draft_places=8)
    actions = session.handle(ev.Start(), 0.0)
    assert _step_in(actions).places == 1
    assert not [one for one in messages_in(actions) if isinstance(one, Draft)]
