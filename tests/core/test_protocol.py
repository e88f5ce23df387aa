"""The shared parts of both ends of a link: the speculation tree, estimates, messages and their
sizes; and impossible values, which are refused by name (``refusals.txt``).

Oracle of the tree: a set of whole texts. Each guess is the full text that it stands for. It is
alive if it is longer than the committed text and begins with it; a repeat, an unknown parent or
another text is stale. Oracle of a drafter's cache: one that really holds tokens. Oracle of sizes:
the codec's own bytes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core import link_model
from edgespec.core.device.device_model import DraftCache
from edgespec.core.device.memory import parse_budget
from edgespec.core.protocol import messages as m
from edgespec.core.protocol import tree as tree_module
from edgespec.core.protocol.acceptance import explain_rule_refusal, make_rule
from edgespec.core.protocol.checks import (
    MAX_MESSAGE_LENGTH,
    REPLACEMENT,
    make_one_line,
    make_printable,
)
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.estimators import AcceptanceEstimator, DecayedRate, SlopeEstimator
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextChances
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, GrowResult, SpeculationTree
from edgespec.core.protocol.work import ModelInfo
from edgespec.core.verifier.admission import refuse_open
from edgespec.core.verifier.run_ahead import ArrivalEstimator
from edgespec.wire.codec import payload_bytes
from edgespec_sim.message_sizes import message_bytes
from tests.sim.faults.checks import check_tree

PROMPT = (7, 7)
Text = tuple[int, ...]


class TextModel:
    def __init__(self) -> None:
        self.committed: Text = PROMPT
        self.texts: dict[int, Text] = {}
        self.last_id = 0

    def agrees_with_committed(self, text: Text) -> bool:
        shared = min(len(text), len(self.committed))
        return text[:shared] == self.committed[:shared]

    @property
    def alive(self) -> dict[int, Text]:
        length = len(self.committed)
        return {
            i: t for i, t in self.texts.items() if len(t) > length and self.agrees_with_committed(t)
        }

    def grow(self, node_id: int, parent: int, token: int, base: int) -> GrowResult:
        if node_id <= self.last_id:
            return GrowResult.STALE
        before = self.committed[:base] if parent == ROOT else self.texts.get(parent)
        if before is None or not self.agrees_with_committed((*before, token)):
            return GrowResult.STALE
        text = (*before, token)
        if text in self.alive.values():
            return GrowResult.STALE
        self.texts[node_id], self.last_id = text, node_id
        return GrowResult.ALIVE if len(text) > len(self.committed) else GrowResult.FORWARDED


_grow = st.tuples(st.just("grow"), *(st.integers(0, most) for most in (2, 12, 2, 3)))
_commit = st.tuples(st.just("commit"), st.lists(st.integers(0, 2), max_size=3))
_follow = st.tuples(st.just("follow"), st.integers(0, 20))
_steps = st.one_of(_grow, _grow, _grow, _grow, _commit, _follow, st.tuples(st.just("clear")))
_short = st.lists(st.integers(0, 1), max_size=4)


@given(st.lists(_steps, max_size=60))
def test_like_a_set_of_texts(steps: list[tuple[object, ...]]) -> None:
    prefix, model = CommittedPrefix(PROMPT), TextModel()
    tree = SpeculationTree(prefix)
    for step in steps:
        match step:
            case ("grow", int(jump), int(back), int(token), int(behind)):
                node_id, length = model.last_id + jump, len(model.committed)
                parent = max(0, model.last_id + 1 - back)
                base = max(0, length - behind)
                expected = model.grow(node_id, parent, token, base)
                assert tree.grow(node_id, parent, token, base) is expected
            case ("commit", list(tokens)):
                tree.commit(tokens)
                model.committed += tuple(tokens)
            case ("follow", int(pick)):
                alive = list(model.alive.values())
                if alive:
                    text = alive[pick % len(alive)][len(model.committed) :]
                    tree.commit(text)
                    model.committed += text
            case ("clear",):
                model.texts, model.last_id = {}, 0
                tree.clear()
        check_same(tree, model)


def check_same(tree: SpeculationTree, model: TextModel) -> None:
    check_tree(tree, "tree")
    prefix = tuple(tree.prefix.tokens)
    assert prefix == model.committed
    assert tree.last_id == model.last_id
    assert {node_id: (*prefix, *tree.path(node_id)) for node_id in tree.nodes} == model.alive
    for node_id, text in model.texts.items():
        place = tree.child_position(node_id, 0)
        assert place == (len(text) if model.agrees_with_committed(text) else None)


def _make_tree(*tokens: int) -> SpeculationTree:
    return SpeculationTree(CommittedPrefix(PROMPT, tokens))


def test_a_node_that_found_no_parent_may_come_again_behind_it() -> None:
    """A verifier had no room for node 2, so node 3 had no parent, and the device sends both again
    later. If node 3 had used up its id, node 2 would be taken as a repeat for ever."""
    tree = _make_tree()
    assert tree.grow(1, 0, 4, 2) is GrowResult.ALIVE
    assert tree.grow(3, 2, 5, 0) is GrowResult.STALE
    assert tree.grow(2, 1, 6, 0) is GrowResult.ALIVE
    assert tree.grow(3, 2, 5, 0) is GrowResult.ALIVE
    assert tree.grow(3, 2, 5, 0) is GrowResult.STALE


def test_only_so_many_committed_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_COMMITTED_IDS", 2)
    tree = _make_tree()
    for node_id in (1, 2, 3):
        tree.grow(node_id, node_id - 1, 4, 2)
    tree.commit((4, 4, 4))
    assert [tree.child_position(node_id, 0) for node_id in (1, 2, 3)] == [None, 4, 5]


@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=12), st.data())
def test_another_token_is_another_hash_from_there(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    one, other = CommittedPrefix(tokens), CommittedPrefix(changed)
    for length in range(len(tokens) + 1):
        assert (one.hash_at(length) == other.hash_at(length)) is (length <= at)


@given(st.lists(st.tuples(_short, _short), max_size=20))
def test_it_holds_prefix_and_path_and_feeds_the_least(
    steps: list[tuple[list[int], list[int]]],
) -> None:
    prefix, cache = CommittedPrefix((9,)), DraftCache()
    held: list[int] = []
    for committed, path in steps:
        prefix.extend(committed)
        text = prefix.tokens + path
        keep, feed = cache.feed(prefix, path)
        shared = next(
            (i for i, (a, b) in enumerate(zip(held, text, strict=False)) if a != b),
            min(len(held), len(text)),
        )
        assert keep == min(shared, len(text) - 1)
        held[keep:] = feed
        assert held == text
        assert cache.length == len(held)


def test_a_slope_is_that_of_least_squares() -> None:
    xs, ys = (0.0, 4.0, 1.0, 6.0, 3.0, 2.0, 5.0, 3.0), (9.0, 1.0, 8.0, 0.0, 2.0, 5.0, 2.0, 4.0)
    slope, flat = SlopeEstimator(), SlopeEstimator()
    for x, y in zip(xs, ys, strict=True):
        assert slope.get() is None  # too few samples
        slope.add(x, y)
        flat.add(4.0, y)
    mean_x, mean_y = sum(xs) / 8, sum(ys) / 8
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    assert slope.get() == pytest.approx(covariance / sum((x - mean_x) ** 2 for x in xs))
    assert flat.get() is None  # constant values have no slope


def test_acceptance_is_a_weighted_count() -> None:
    usual = AcceptanceEstimator()
    assert [usual.rate(rank) for rank in range(4)] == pytest.approx([0.7, 0.1, 0.04, 0.02])
    estimator = AcceptanceEstimator(prior=(0.5,), prior_weight=4.0, memory=0.5)
    for rank in (0, None, 0):
        estimator.add(rank)
    hits, trials, weight = 0.25 + 1.0, 0.25 + 0.5 + 1.0, 4.0 / 8
    assert estimator.rate(0) == pytest.approx((hits + 0.5 * weight) / (trials + weight))


def test_a_source_that_is_never_right_is_taken_for_that() -> None:
    """A prior of 0.9 is forgotten, and no estimate becomes 0, because chances are divided by it."""
    ranks, one, text = AcceptanceEstimator(), DecayedRate(0.98, 12.0), TextChances()
    for _ in range(400):
        ranks.add(None, offered=1)
        one.add(False)
        for cell in range(len(text.by_cell)):
            text.note(cell, hit=False)
    for rate in (ranks.rate(0), one.rate(0.9), *text.by_cell):
        assert 0.0 < rate < 0.003
    assert ranks.rate(1) == pytest.approx(0.1), "a rank that was not offered was not tried"


def test_how_deep_the_first_draft_after_a_miss_is() -> None:
    arrivals = ArrivalEstimator()
    assert arrivals.response_depth == 1.0
    arrivals.on_useful_draft(1.0, 4)  # no miss came before
    assert (arrivals.response_depth, arrivals.response_s) == (1.0, 0.0)
    arrivals.on_miss(2.0)
    arrivals.on_useful_draft(2.5, 8)
    arrivals.on_miss(3.0)
    assert (arrivals.response_depth, arrivals.response_s) == (8.0, 0.5)


def test_two_rhythms() -> None:
    arrivals = ArrivalEstimator()
    arrivals.on_useful_draft(1.0)
    arrivals.on_useful_draft(1.5)
    assert arrivals.expected_at() == pytest.approx(2.0)
    arrivals.on_miss(3.0)
    assert arrivals.expected_at() is None
    arrivals.on_useful_draft(3.25)
    assert arrivals.expected_at() == pytest.approx(3.75)
    arrivals.on_miss(4.0)
    arrivals.on_miss(9.0)  # the first miss counts, for the device learns of that one
    assert arrivals.expected_at() == pytest.approx(4.25)


@pytest.mark.parametrize(
    "evil",
    ["\x1b[2J", "\x9b2J", "\x07", "\r", "\b", "\x7f", "\u202e", "\u2066", "\ufeff", "\ud800"],
)
def test_control_characters_are_replaced(evil: str) -> None:
    assert make_printable(f"a{evil}b") == f"a{REPLACEMENT}{evil[1:]}b"


def test_a_message_is_one_line_of_bounded_length() -> None:
    assert make_one_line("a\nb\r\n c") == "a b c"
    assert make_one_line("x" * 5000) == "x" * MAX_MESSAGE_LENGTH + "…"


def hot_messages(seed: int) -> list[m.Message]:
    dice = random.Random(seed)

    def number() -> int:
        return dice.choice((0, 1, 127, 128, 16_383, 16_384, dice.randrange(1 << 28)))

    count = dice.randrange(0, 9)
    first = dice.randrange(1, 40_000)
    parents = tuple(dice.choice((0, first + i - 1, first + i - 1)) for i in range(count))
    if count and dice.random() < 0.3:  # extend the chain of the previous node
        parents = tuple(first + i - 1 for i in range(count))
    tokens = tuple(dice.randrange(1 << dice.randrange(1, 17)) for _ in range(count))
    based = 0 in parents
    draft = m.Draft(
        first if count else 0,
        parents,
        tokens,
        dice.randrange(1, 5000) if based else 0,
        dice.randrange(1 << 32) if based else 0,
    )
    commit = m.Commit(
        position=dice.randrange(4000),
        tokens=tokens,
        accepted=dice.randrange(count + 1),
        stale=number(),
        queue_us=number(),
        verify_us=number(),
        rows=number(),
        echo=number(),
        held_us=number(),
        finish=dice.choice((None, m.FinishReason.STOP)),
        row_price=dice.choice((None, 0, 1, 127, 128, 1000)),
        credit=dice.choice((None, 0, 127, 128)),
    )
    return [draft, commit, m.Received(number(), number()), m.Cancel()]


@pytest.mark.parametrize("seed", range(200))
def test_what_travels_all_the_time_is_exact(seed: int) -> None:
    for message in hot_messages(seed):
        assert message_bytes(message) == payload_bytes(message), message


@pytest.mark.parametrize(
    "message",
    [
        m.Open("a" * 32, "model", "v" * 64, tuple(range(1, 3000)), (5, 6), SamplingParams(seed=9)),
        m.Open("s", "", "", (1,), sampling=SamplingParams(temperature=0.7, top_p=0.9)),
        m.Opened(m.Limits(), "toy", 12),
        m.Opened(m.Limits(), "toy", 12, prefix_block=64),
        m.Opened(m.Limits(), "toy", 12, picture_tokens=2_000),
        m.Open("s", "", "", (7, 8), (), prefix_key=b"x" * 16, prefix=m.Prefix(640, b"n" * 32, 642)),
        m.PrefixTokens(tuple(range(1, 3000))),
        m.PrefixMissing(),
        m.PicturePart(1, 1 << 16, bytes(9000)),
        m.PicturesMissing((0, 3)),
        m.Fault(m.FaultCode.OVERLOADED, "all 64 sessions are in use", 1.0),
    ],
)
def test_what_travels_once_is_close(message: m.Message) -> None:
    size = payload_bytes(message)
    assert abs(message_bytes(message) - size) <= max(32, 0.02 * size)


def test_a_session_secret_is_counted() -> None:
    plain = m.Open("session", "", "", (1, 2, 3))
    secret = replace(plain, session_secret=b"x" * 32)
    more = payload_bytes(secret) - payload_bytes(plain)
    assert message_bytes(secret) - message_bytes(plain) == more


SMALL = ModelInfo("big", "words-1", 100, 64)
ASKED = Open("s", "big", "words-1", (1, 2, 3), sampling=SamplingParams(max_tokens=4))


def why_not(**changes: Any) -> str:
    """Return the fault for a valid request with these changes."""
    if "sampling" in changes:
        changes["sampling"] = replace(ASKED.sampling, **changes["sampling"])
    fault = refuse_open(
        replace(ASKED, **changes), SMALL, Limits(context_length=8), frozenset({EXACT_RULE})
    )
    return "" if fault is None else f"{fault.code.name}: {fault.message}"


def open_request(**changes: Any) -> None:
    if why := why_not(**changes):
        raise ValueError(why)


def check_and_make_rule(text: str) -> None:
    assert explain_rule_refusal(text, ("exact",)) is not None
    make_rule(text)


KINDS: dict[str, Callable[..., object]] = {
    "sampling": SamplingParams,
    "constraint": partial(Constraint, ConstraintKind.REGEX),
    "rule": check_and_make_rule,
    "budget": parse_budget,
    "outages": link_model.OutageSchedule,
    "open": open_request,
}
REFUSALS = (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8")


def freeze(value: Any) -> Any:
    return tuple(map(freeze, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("refusal", re.findall(r"^\w.* => .*$", REFUSALS, re.MULTILINE))
def test_what_cannot_be_is_named(refusal: str) -> None:
    head, _, said = refusal.partition(" => ")
    kind, _, text = head.partition(" | ")
    text = re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    fields = {name: freeze(value) for name, value in yaml.safe_load(text).items()}
    with pytest.raises(ValueError, match=re.escape(said)):
        KINDS[kind](**fields)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": ""},
        {"vocabulary": ""},
        {"prompt": (99, 99, 99, 99, 99, 99, 99)},
        {"committed": (0, 99, 1, 2)},
        {"prompt": (1, 1, 1, 1, 1), "committed": (1, 2, 3)},
    ],
)
def test_a_request_that_can_be_served_is_taken(changes: dict[str, Any]) -> None:
    assert why_not(**changes) == ""
