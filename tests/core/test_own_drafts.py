"""The verifier's own draft model.

Oracles: a text whose next token is known, a cache that is a plain list, and brute force for the
best number of steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest

from edgespec.core.protocol.credential import ANYBODY
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.estimators import CalibratedChances
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import Candidate, DraftStep, ModelInfo, PassRequest, PassResult
from edgespec.core.verifier import draft_round as rounds
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import server_model as od
from edgespec.core.verifier.draft_inbox import DraftInbox
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.pass_tree import PassTree, PassVerdict, PassView
from edgespec.core.verifier.run_ahead import MAX_HISTORIES, DraftHistories, DraftHistory
from edgespec.core.verifier.server_drafts import ServerDraftsFactory
from tests.core.scenes import chain_draft
from tests.core.test_constraints import EOS, Automaton
from tests.present import require

TOKENS = 120
DRAFTS = ee.EngineLimits(drafter=True)
Action = TypeVar("Action")


def token_at(position: int) -> int:
    return (position * 7 + 3) % 50


class ListDrafter:
    """A draft model whose caches are lists. It is right at positions where ``right`` holds;
    elsewhere its last choice is right, if it has several."""

    def __init__(self, right: Callable[[int], bool], choices: int = 1) -> None:
        self.right, self.choices = right, choices
        self.caches, self.steps = dict[str, list[int]](), 0
        self.full: set[str] = set()

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        self.steps += 1
        return [self._step_one(step) for step in batch]

    def _step_one(self, step: DraftStep) -> tuple[Candidate, ...]:
        cache = self.caches.setdefault(step.key, [])
        if step.key in self.full:
            cache.clear()
            return ()
        assert 0 <= step.keep_length <= len(cache)
        assert step.feed
        cache[step.keep_length :] = step.feed
        if not step.guess:
            return ()
        right, token = self.right(len(cache)), token_at(len(cache))
        first = Candidate(token if right else 49, -0.1 if right else -2.0)
        others = [Candidate(50 + rank, -3.0) for rank in range(1, self.choices)]
        if others and not right:
            others[-1] = Candidate(token, -3.0)
        return (first, *others)


class SilentDrafter(ListDrafter):
    """A draft model that consumes tokens and offers no candidates until it is ``mended``, like a
    model with broken rows. ``fed`` counts the tokens that it computed."""

    fed = 0
    mended = False

    def _step_one(self, step: DraftStep) -> tuple[Candidate, ...]:
        self.fed += len(step.feed)
        found = super()._step_one(step)
        if step.guess and not self.mended:
            self.caches[step.key].clear()
            return ()
        return found


class World:
    """An engine, a target that generates ``token_at``, and the draft model; devices acknowledge."""

    def __init__(self, drafter: ListDrafter, limits: ee.EngineLimits = DRAFTS) -> None:
        self.drafter, self.now = drafter, 0.0
        self.engine = VerifyEngine(ModelInfo("big", "", 50, 4096), Limits(), limits, contain=False)
        self.texts: dict[int, list[int]] = {}
        self.passes: list[tuple[PassRequest, ...]] = []
        self.fails, self.step_s = False, 0.0025
        self.off: list[str] = []
        self.reports: list[str] = []
        self.guesses: tuple[int, ...] = ()
        self.guesses_at: Callable[[int], tuple[int, ...]] | None = None
        """Proposals of an engine speculator by the end of the text; None for ``guesses``."""
        self.speculator_run_s = 0.0
        self.asked: list[int] = []
        self.max_steps = set[int]()
        self.pending: list[ee.EngineEvent] = []

    def open(self, stream: int, prompt_length: int = 2, **changes: object) -> None:
        prompt = tuple(token_at(position) for position in range(prompt_length))
        sampling = SamplingParams(max_tokens=TOKENS)
        request = Open(f"s{stream}", "", "", prompt, sampling=sampling, drafting=False)
        self.texts[stream] = []
        request = replace(request, **changes)  # type: ignore[arg-type]
        self.pending.append(ee.StreamOpened(stream, request))

    def run(self) -> None:
        """Run until all generations have ended."""
        pending = self.pending
        while pending:
            for action in self.engine.handle(pending.pop(0), self.now):
                match action:
                    case ee.RunDrafts():
                        pending.append(self._draft(action))
                    case ee.RunBatch(requests, steps):
                        self.asked.append(steps)
                        pending.append(self._pass(requests))
                    case ee.SendTo(stream, message):
                        if isinstance(message, Commit) and message.tokens:
                            self.texts[stream] += message.tokens
                            end = message.position + len(message.tokens)
                            pending.append(ee.StreamMessage(stream, Received(end, 0)))
                    case ee.ReportDraftsOff(why):
                        self.off.append(why)
                    case ee.ReportDraftsRest(why):
                        self.reports.append(why)
                    case _:
                        pass

    def _draft(self, action: rounds.RunDrafts) -> ee.EngineEvent:
        if self.fails:
            return ee.DraftsFailed("out of memory")
        drafting = rounds.DraftRound(action)
        self.max_steps.add(action.times.max_steps)
        while batch := drafting.next_step():
            drafting.record_step(self.drafter.step(batch), self.step_s)
            self.now += self.step_s
        return drafting.result()

    def _pass(self, requests: tuple[PassRequest, ...]) -> ee.BatchDone:
        self.passes.append(requests)
        self.now += 0.025 + self.speculator_run_s * bool(self.asked[-1])
        return ee.BatchDone(tuple(self._result(request) for request in requests))

    def _result(self, request: PassRequest) -> PassResult:
        if not request.sample:
            return PassResult(request.key, ())
        first, depths = request.cache_length + len(request.feed), list[int]()
        for parent in request.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        targets = tuple(token_at(first + depth) for depth in (0, *depths))
        guesses = self.guesses
        if self.guesses_at is not None:
            accepted = 0
            while accepted < len(depths) and request.tokens[accepted] == targets[accepted]:
                accepted += 1
            guesses = self.guesses_at(first + accepted + 1)
        return PassResult(request.key, targets, guesses=guesses if self.asked[-1] else ())

    def check(self) -> None:
        self.run()
        for stream, text in self.texts.items():
            start = 2 if stream < 100 else stream
            assert text == [token_at(start + at) for at in range(TOKENS)]


@pytest.mark.parametrize(
    ("right", "most_passes"),
    [(lambda at: True, 40), (lambda at: at % 4 != 0, 70), (lambda at: False, 121)],
    ids=["right", "mostly", "wrong"],
)
def test_the_text_is_the_targets_whatever_is_guessed(
    right: Callable[[int], bool], most_passes: int
) -> None:
    world = World(ListDrafter(right))
    world.open(1)
    world.check()
    assert len(world.passes) <= most_passes


def test_a_draft_that_is_always_wrong_is_given_up_and_tried_again() -> None:
    world = World(ListDrafter(lambda at: False))
    world.open(1)
    world.check()
    first = world.drafter.steps
    assert first < 40
    world.open(2)
    world.check()
    assert world.drafter.steps - first <= 3 * (1 + TOKENS // od.PROBE_EVERY)
    world.drafter.right = lambda at: True
    before = len(world.passes)
    for stream in range(3, 8):
        world.open(stream)
        world.check()
    assert len(world.passes) - before < 5 * TOKENS * 0.6


def test_other_choices_stand_beside_the_chain_while_they_are_worth_their_rows() -> None:
    chains, trees = (
        World(ListDrafter(lambda at: at * 40_503 % 65_536 % 10 < 6, choices)) for choices in (1, 3)
    )
    for world in (chains, trees):
        world.open(1)
        world.check()
    assert trees.now < 0.96 * chains.now
    # The second of three choices is never right, and is omitted in time.
    late = trees.passes[len(trees.passes) // 2 :]
    assert 51 not in {token for batch in late for request in batch for token in request.tokens}


def test_a_record_offers_what_is_likely_enough() -> None:
    """The chain comes first, then the others by place; each with its chance after the chain before
    it."""
    chances = od.ChainChances()
    for _ in range(500):
        chances.by_confidence.add(0, -0.1, hit=True)
        chances.by_confidence.add(1, -3.0, hit=False)
        chances.by_confidence.add(1, -1.0, hit=True)
    record = od.ServerModel(chances, od.DraftTimes())
    assert record.begin_chain("s", (1, 2), (), [], 8) is not None
    guesses = (
        (Candidate(5, -0.1), Candidate(6, -1.0)),
        (Candidate(7, -0.1), Candidate(8, -3.0), Candidate(9, -1.0)),
    )
    record.record_round(rounds.Chain("s", 0, (1, 2), guesses))
    tokens, parents, reaches = record.select_nodes(0.0, 8)
    assert (tokens[:2], parents[:2]) == ([5, 7], [-1, 0])
    assert dict(zip(tokens[2:], parents[2:], strict=True)) == {6: -1, 9: 0}
    assert reaches[0] > 0.9
    assert record.select_nodes(0.0, 1)[0] == [5, 6]
    record.judge((6, 1))
    assert record.select_nodes(0.0, 8) == ([], [], [])


def test_a_step_that_is_longer_than_a_pass_is_tried_as_much_more_seldom() -> None:
    """Passes take 25 ms and steps 100: a step is tried every 4 * ``PROBE_EVERY`` passes, not after
    each pass."""
    world = World(ListDrafter(lambda at: True))
    world.step_s = 0.1
    world.open(1)
    world.check()
    # the first round did not have any step's length
    first, before = world.drafter.steps, len(world.passes)
    for stream in range(2, 10):
        world.open(stream)
        world.check()
    tries, passes = world.drafter.steps - first, len(world.passes) - before
    assert 1 <= tries <= 2 * (1 + passes // (4 * od.PROBE_EVERY))  # a prompt is a step of its own


def test_long_prompts_are_not_read_for_texts_that_end_before() -> None:
    """Eight sessions, whose prompts of 3,900 tokens take eight rounds of 10 ms each; the texts end
    after 120 passes of 25 ms. All steps have 512 rows, so that the time of a row stays unknown.
    Probes take one part in ``PROBE_EVERY`` of the time, and a little is read while few decode; to
    read all prompts would take a quarter of it."""
    world = World(ListDrafter(lambda at: True))
    world.step_s = 0.01
    for turn in range(4):
        for stream in range(8):
            length = 3_900 + 8 * turn + stream
            world.open(length, length)
        world.check()
    assert 0 < world.drafter.steps * world.step_s < 0.05 * world.now


def test_many_sessions_share_the_steps_and_a_long_prompt_is_fed_apart() -> None:
    world = World(ListDrafter(lambda at: at % 9 != 0), replace(DRAFTS, max_rows_per_session=64))
    world.open(700, 700)
    for stream in range(1, 20):
        world.open(stream)
    world.check()
    fed = [len(step) for step in world.drafter.caches.values()]
    assert max(fed) >= 700
    assert world.max_steps == {
        rounds.LONGEST_CHAIN,
        rounds.MAX_STEPS_BEFORE_PROMPTS,
    }  # prompts wait for some rounds


def test_a_sequence_without_room_is_fed_anew_once_there_is_some() -> None:
    world = World(ListDrafter(lambda at: True))
    world.drafter.full.add("s1")
    world.open(1)
    world.check()
    assert sum(len(requests[0].tokens) for requests in world.passes) == 0
    world.drafter.full.clear()
    world.open(2)
    world.check()
    assert world.engine.draft_counts.model.accepted > 0


def test_a_draft_model_that_gives_no_guess_costs_little_and_is_told_of_once() -> None:
    """Oracle: over the generations of one session after another, the tokens fed are at most a few
    times those of one text. Without a rest, each pass would feed the whole text."""
    drafter = SilentDrafter(lambda at: True)
    world = World(drafter)
    for stream in range(1, 9):
        world.open(stream)
        world.check()
    assert world.reports[0].startswith("the draft model proposed no token in 8 rounds in a row")
    assert len(world.reports) == 1
    assert drafter.fed <= 10 * TOKENS
    fed = drafter.fed
    for stream in range(9, 30):
        world.open(stream)
        world.check()
    assert drafter.fed - fed <= 12 * TOKENS  # of 2,520 passes
    drafter.mended = True
    for stream in range(30, 50):
        world.open(stream)
        world.check()
    assert world.reports[1:] == ["the draft model proposes tokens again"]
    assert world.engine.draft_counts.model.accepted > 10 * TOKENS


def test_one_session_without_guesses_rests_alone() -> None:
    drafter = ListDrafter(lambda at: True)
    world = World(drafter)
    drafter.full.add("s1")
    world.open(1)
    world.open(2)
    world.check()
    assert world.engine.draft_counts.model.accepted > TOKENS / 2
    assert not world.reports


def test_a_draft_model_that_is_always_wrong_is_told_of_once() -> None:
    world = World(ListDrafter(lambda at: False))
    for stream in range(1, 6):
        world.open(stream)
        world.check()
    (why,) = world.reports
    assert why.startswith("the draft model does not pay now: its tokens are estimated")


def test_a_draft_model_that_fails_ends_drafting_and_no_text() -> None:
    world = World(ListDrafter(lambda at: True))
    world.fails = True
    world.open(1)
    world.check()
    assert world.off == ["out of memory"]
    assert world.engine.draft_counts.failures == 1
    assert len(world.passes) == TOKENS


def test_a_session_that_fails_before_a_round_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(ListDrafter(lambda at: True))
    world.engine = VerifyEngine(ModelInfo("big", "", 50, 4096), Limits(), DRAFTS)

    def fails(*arguments: object) -> None:
        raise RuntimeError("chosen to fail")

    with monkeypatch.context() as patched:
        patched.setattr(od.ServerModel, "begin_chain", fails)
        world.open(1)
        world.run()
        assert not world.engine.sessions
    world.open(2)
    world.run()
    assert len(world.texts[2]) == TOKENS


def test_a_chain_begins_behind_what_a_grammar_forces_and_not_behind_what_it_forbids() -> None:
    grammar = Automaton(({5: 1}, {7: 2, 9: 2}, {3: 0}), frozenset())
    sampling = SamplingParams(constraint=grammar.constraint())
    request = Open("s", "", "", (1, 2), sampling=sampling)
    for path, lawful in (((7, 3), (7, 3, 5)), ((7, 8, 3), (7, 3, 5)), ((3, 3), ())):
        served = require(ServerDraftsFactory(text=False, model=True)(request, ANYBODY, (EOS,)))
        tree = PassTree(9)
        tree.add_tree(path, (-1, 0, 1)[: len(path)], [0.99] * len(path), SourceKind.DEVICE)
        start = require(served.begin_chain(PassView(tree, (1, 2, 5), 9, 0.0, 0.0)))
        assert start.step.feed == (1, 2, 5, *lawful)


@pytest.mark.parametrize(
    ("text", "path", "depth", "least", "found"),
    [
        ((), (), 9, 0.4, (5,)),
        ((5,), (), 9, 0.4, ()),
        ((5, 7), (), 9, 0.4, (3, 4)),
        ((5, 7), (), 1, 0.4, (3,)),
        ((5,), (9,), 9, 0.4, (9, 3, 4)),
        ((5,), (9,), 9, 0.6, (9,)),
        ((), (9,), 9, 0.6, (9, 5)),
        ((5, 7, 3, 4), (), 9, 0.4, ()),
    ],
)
def test_what_a_grammar_forces_is_in_the_pass_without_any_drafter(
    text: Sequence[int], path: Sequence[int], depth: int, least: float, found: Sequence[int]
) -> None:
    """Forced tokens are omitted after a path that is too unlikely, and deeper than the text
    can go."""
    grammar = Automaton(({5: 1}, {7: 2, 9: 2}, {3: 3}, {4: 4}, {}), frozenset())
    sampling = SamplingParams(constraint=grammar.constraint())
    request = Open("s", "", "", (1, 2), sampling=sampling)
    served = require(ServerDraftsFactory()(request, ANYBODY, (EOS,)))
    tree, own = PassTree(9), len(path)
    tree.add_tree(path, range(-1, own - 1), [0.5] * own, SourceKind.DEVICE)
    served.add_nodes(PassView(tree, (1, 2, *text), depth, 0.0, least))
    assert tuple(tree.tokens) == found
    assert tree.sources[own:] == [SourceKind.SERVER_LOOKUP] * (len(found) - own)


def test_a_round_that_does_not_end_is_a_stuck_pass() -> None:
    """The round has the limit of a pass, and a late result changes nothing any more."""
    limits = ee.EngineLimits(drafter=True, stuck_pass_s=30.0)
    engine = VerifyEngine(ModelInfo("big", "", 50, 4096), Limits(), limits, contain=False)
    request = Open("s", "", "", (3, 10), sampling=SamplingParams(max_tokens=TOKENS))
    engine.handle(ee.StreamOpened(1, request), 0.0)
    actions = engine.handle(ee.BatchDone((PassResult("s", (token_at(2),)),)), 0.025)
    (drafts,) = find_actions(actions, ee.RunDrafts)
    now = 0.025
    while not engine.broken:
        assert now < 40.0
        now = require(engine.deadline)
        actions = engine.handle(ee.Poll(), now)
    assert now >= 30.0
    assert find_actions(actions, ee.GiveUp)
    assert find_actions(actions, ee.SendTo)  # the device receives the fault
    assert engine.handle(rounds.DraftRound(drafts).result(), now) == ()


def test_where_the_device_decides_nothing_is_drafted() -> None:
    world = World(ListDrafter(lambda at: True))
    world.open(1, run_ahead=RunAhead.NEVER)
    world.check()
    assert world.drafter.steps == 0


def test_the_chain_stands_behind_the_devices_nodes_which_are_its_own() -> None:
    engine = VerifyEngine(ModelInfo("big", "", 50, 4096), Limits(), DRAFTS, contain=False)
    prompt = (token_at(0), token_at(1))
    sampling = SamplingParams(max_tokens=TOKENS)
    opened = Open("s", "", "", prompt, sampling=sampling, run_ahead=RunAhead.ALWAYS)
    engine.handle(ee.StreamOpened(1, opened), 0.0)
    session = engine.sessions["s"]
    (drafts,) = find_actions(
        engine.handle(ee.BatchDone((PassResult("s", (token_at(2),)),)), 0.025), ee.RunDrafts
    )
    assert drafts.starts[0].step.feed == (*prompt, token_at(2))
    draft = chain_draft(session, token_at(3), token_at(4))
    engine.handle(ee.StreamMessage(1, draft), 0.026)
    guesses = (Candidate(token_at(3), -0.1),), (Candidate(40, -0.1),)
    guess = rounds.Chain("s", 0, drafts.starts[0].step.feed, guesses)
    (run,) = find_actions(engine.handle(ee.DraftsDone((guess,), ((3, 0.002),)), 0.03), ee.RunBatch)
    (request,) = run.requests
    assert request.tokens == (token_at(3), token_at(4), 40)
    assert request.parents == (-1, 0, 0)
    assert (request.device_nodes, request.server_nodes) == (2, 1)


def find_actions(actions: tuple[ee.EngineAction, ...], kind: type[Action]) -> list[Action]:
    return [action for action in actions if isinstance(action, kind)]


def test_a_target_that_speculates_by_itself_is_asked_for_what_pays() -> None:
    world = World(ListDrafter(lambda at: True), ee.EngineLimits(speculator_tokens=8))
    world.guesses = (49, 49)  # never right
    world.open(1)
    world.check()
    assert world.drafter.steps == 0
    assert set(world.asked[:3]) == {8, 4}
    assert world.engine.draft_counts.model.nodes > 0
    assert any(request.server_nodes for requests in world.passes for request in requests)


@pytest.mark.parametrize("right", [True, False])
def test_a_target_that_speculates_in_blocks_is_asked_for_whole_ones(right: bool) -> None:
    """A run takes 0.8 of a pass."""
    limits = ee.EngineLimits(speculator_tokens=4, speculator_blocks=True)
    world = World(ListDrafter(lambda at: True), limits)
    world.speculator_run_s = 0.02
    world.guesses = (49,) * 4
    world.guesses_at = (lambda end: tuple(token_at(end + n) for n in range(4))) if right else None
    world.open(1)
    world.check()
    assert set(world.asked) == {0, 4}
    later = world.asked[16:]
    assert (later.count(4) > 0.9 * len(later)) is right
    assert (later.count(0) > 0.9 * len(later)) is not right


def _reaches(rates: Sequence[float], most: int) -> list[list[float]]:
    return [[rate ** (place + 1) for place in range(most)] for rate in rates]


def test_the_length_of_a_chain_is_the_best_one() -> None:
    assert rounds.chain_length(_reaches([0.7] * 4, 16), 0.025, 0.0025, 0.0) == 4
    assert rounds.chain_length([], 0.025, 0.0025, 0.0) == 0
    dice = random.Random(5)
    for _ in range(300):
        rates = [dice.random() for _ in range(dice.randrange(1, 6))]
        step_s, row_s = dice.uniform(1e-4, 0.01), dice.uniform(0.0, 1e-3)

        goodput = [
            sum(rate**k for rate in rates for k in range(length + 1))
            / (0.025 + length * (step_s + row_s * len(rates)))
            for length in range(17)
        ]
        found = rounds.chain_length(_reaches(rates, 16), 0.025, step_s, row_s)
        assert goodput[found] == pytest.approx(max(goodput))


def test_a_block_pays_if_its_best_part_repays_the_run() -> None:
    """Oracle: the goodput of every part of the block."""
    assert rounds.block_pays(_reaches([0.7], 8), 0.025, 0.054, 0.0)
    assert not rounds.block_pays(_reaches([0.7], 8), 0.025, 0.055, 0.0)
    assert not rounds.block_pays([], 0.025, 0.0, 0.0)
    dice = random.Random(6)
    answers = set()
    for _ in range(300):
        rates = [dice.random() for _ in range(dice.randrange(1, 6))]
        run_s, row_s = dice.uniform(0.0, 0.05), dice.uniform(0.0, 2e-3)
        goodput = [
            sum(rate**k for rate in rates for k in range(length + 1))
            / (0.025 + run_s + length * row_s * len(rates))
            for length in range(9)
        ]
        found = rounds.block_pays(_reaches(rates, 8), 0.025, run_s, row_s)
        assert found is (max(goodput) > len(rates) / 0.025)
        answers.add(found)
    assert answers == {True, False}


def test_each_place_of_a_block_has_its_own_rate_and_the_price_cuts_it() -> None:
    """The places are right with 0.9, 0.6 and 0.2; a node has to be right with 0.3."""
    dice, chances, times = random.Random(4), od.ChainChances(), od.DraftTimes()
    block = od.EngineSpeculator(chances, times)
    rates = (0.9, 0.6, 0.2)
    for position in range(600):
        tokens = tuple(token_at(position + place) for place in range(3))
        block.set_proposal(tokens)
        committed = []
        for token, rate in zip(tokens, rates, strict=True):
            committed.append(token if dice.random() < rate else 49)
            if committed[-1] == 49:
                break
        block.judge(committed)
    assert [block.chance_at(place) for place in range(3)] == pytest.approx(rates, abs=0.12)
    assert block.chance_at(9) == block.chance_at(2), "nothing is known of it"
    block.set_proposal((1, 2, 3))
    assert block.select_nodes(0.3, 15)[0] == [1, 2]
    assert block.select_nodes(0.7, 15)[0] == [1]
    other = od.EngineSpeculator(chances, times)
    for _ in range(20):
        other.set_proposal((1,))
        other.judge((2,))
    assert other.chance_at(0) < 0.6 * block.chance_at(0), "a session of its own kind"


@pytest.mark.parametrize("rate", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("sessions", [1, 16])
@pytest.mark.parametrize("step_s", [0.0025, 0.012])
@pytest.mark.parametrize(("row_s", "least"), [(0.0, 0.97), (1e-4, 0.94)])
def test_a_round_stops_near_the_best_length(
    rate: float, sessions: int, step_s: float, row_s: float, least: float
) -> None:
    """The candidates' confidence is uninformative. The round stops a little early, to allow for
    misses."""
    chances = CalibratedChances()
    starts = tuple(
        rounds.ChainStart(DraftStep(str(n), 0, (1,)), 1.0, rate, 16, 1, chances, 1.0)
        for n in range(sessions)
    )
    times = rounds.RoundTimes(0.025, step_s, 0.0, row_s, 512)
    drafting, steps = rounds.DraftRound(rounds.RunDrafts(starts, times)), 0
    while batch := drafting.next_step():
        steps += 1
        drafting.record_step([(Candidate(1, -0.1),)] * len(batch), step_s)

    def goodput(length: int) -> float:
        brought = sum(rate**k for k in range(length + 1))
        return brought / (0.025 + length * (step_s + row_s * sessions))

    best = max(range(17), key=goodput)
    assert steps <= best
    assert goodput(steps) >= least * goodput(best)


@pytest.mark.parametrize(
    ("waiting_per_decoding", "pass_s", "steps"),
    [(1.0, 0.025, 4), (1.6, 0.025, 1), (2.5, 0.025, 0), (1.0, 0.017, 2), (1.0, 0.01, 0)],
)
def test_prompts_make_a_step_dear_by_whom_they_hold_up_and_by_the_time_they_take(
    waiting_per_decoding: float, pass_s: float, steps: int
) -> None:
    """A step of 8 ms costs 0.32 of a token. The first step has to bring 0.35 and brings 0.9. The
    fifth has to bring 0.66 and would bring 0.59."""
    start = rounds.ChainStart(DraftStep("s", 0, (1,)), 1.0, 0.9, 16, 1, CalibratedChances(), 1.0)
    times = rounds.RoundTimes(pass_s, 0.008, 0.0, 0.0, 512, waiting_per_decoding)
    drafting, ran = rounds.DraftRound(rounds.RunDrafts((start,), times)), 0
    while batch := drafting.next_step():
        ran += 1
        drafting.record_step([(Candidate(1, -0.1),)] * len(batch), 0.008)
    assert ran == steps


@pytest.mark.parametrize(("device_tokens", "steps"), [(0.0, 13), (6.0, 7), (9.4, 0)])
def test_a_quick_device_makes_a_step_dear(device_tokens: float, steps: int) -> None:
    """A step of 4 ms beside passes of 40 ms costs 0.10 of a token. Beside a device that adds 6
    tokens to a pass it costs 0.60 (0.69 with the margin, and 0.95**7 is 0.70), beside one that adds
    9.4 it costs 0.94."""
    start = rounds.ChainStart(
        *(DraftStep("s", 0, (1,)), 1.0, 0.95, 16, 1, CalibratedChances(), 1.0),
        device_tokens=device_tokens,
    )
    drafting, ran = (
        rounds.DraftRound(rounds.RunDrafts((start,), rounds.RoundTimes(0.04, 0.004, 0, 0, 512))),
        0,
    )
    while batch := drafting.next_step():
        ran += 1
        drafting.record_step([(Candidate(1, -0.01),)] * len(batch), 0.004)
    assert ran == steps


def test_one_sessions_quick_device_leaves_the_others_their_steps() -> None:
    def start(key: str, device_tokens: float) -> rounds.ChainStart:
        step, chances = DraftStep(key, 0, (1,)), CalibratedChances()
        return rounds.ChainStart(step, 1.0, 0.9, 16, 1, chances, 1.0, device_tokens)

    starts = (start("quick", 40.0), *[start(str(number), 0.0) for number in range(7)])
    drafting = rounds.DraftRound(
        rounds.RunDrafts(starts, rounds.RoundTimes(0.025, 0.0025, 1e-3, 0.0, 512))
    )
    assert [step.key for step in drafting.next_step()] == [str(number) for number in range(7)]


def make_inbox(prefix: CommittedPrefix, history: DraftHistory) -> DraftInbox:
    return DraftInbox(prefix, 100, Limits(max_nodes_outstanding=64), history)


def test_a_session_begins_with_what_the_session_before_has_measured() -> None:
    """A device answers each miss after 30 ms with ten places, and the first ones are right."""
    history, now = DraftHistory(), 0.0
    for _ in range(3):
        prefix = CommittedPrefix((1, 2))
        drafts, first_node_id = make_inbox(prefix, history), 1
        for _ in range(8):
            drafts.arrivals.on_miss(now)
            now += 0.03
            base = prefix.length
            parents = (0, *range(first_node_id, first_node_id + 9))
            tokens = tuple(range(10, 20))
            draft = Draft(first_node_id, parents, tokens, base, prefix.hash_at(base))
            assert drafts.receive(draft, now) is None
            first_node_id += 10
            request = PassRequest("s", 0, (1,), tokens, tuple(range(-1, 9)))
            committed = *tokens[:9], 99
            drafts.learn(PassVerdict(request, (), (), range(9), committed, now))
    later = make_inbox(CommittedPrefix((1, 2)), history)
    later.arrivals.on_miss(now)
    assert later.arrivals.expected_at() == pytest.approx(now + 0.03)
    assert later.arrivals.response_depth == pytest.approx(10.0)
    assert later.arrivals.place_s == pytest.approx(0.003)
    assert later.top_acceptance_rate == pytest.approx(0.9, abs=0.05)
    rate, places = later.top_acceptance_rate, 10 + 10 / 3  # ten after 30 ms, then 10 ms more
    wanted = rate * (1 - rate**places) / (1 - rate)
    assert later.tokens_per_pass(0.04, now) == pytest.approx(wanted)
    assert later.tokens_per_pass(0.02, now) == 0.0, "the first draft comes after the pass"
    later.receive(Draft(first_node_id=1, parents=(), tokens=()), now)
    assert later.tokens_per_pass(0.04, now) == 0.0
    assert make_inbox(CommittedPrefix((1, 2)), DraftHistory()).tokens_per_pass(0.04, now) == 0.0


@pytest.mark.parametrize(("rate", "steps"), [(0.9, 1), (0.7, 1), (0.35, 3), (0.01, 16)])
def test_a_better_server_model_matches_a_draft_in_fewer_steps(rate: float, steps: int) -> None:
    """Nothing is known of the device: one place, assumed to be right with 0.5."""
    drafts = make_inbox(CommittedPrefix((1, 2)), DraftHistory())
    drafts._acceptance.rates[0] = 0.5
    assert drafts.count_matching_steps(rate, 16) == steps


def test_histories_are_kept_by_kind_of_session_and_bounded() -> None:
    histories = DraftHistories()
    greedy = histories.get("", samples=False, run_ahead=RunAhead.AUTO)
    assert histories.get("", samples=False, run_ahead=RunAhead.AUTO) is greedy
    for name, samples, run_ahead in (
        ("alice", False, RunAhead.AUTO),
        ("", True, RunAhead.AUTO),
        ("", False, RunAhead.NEVER),
    ):
        assert histories.get(name, samples=samples, run_ahead=run_ahead) is not greedy
    for number in range(2 * MAX_HISTORIES):
        histories.get(f"device {number}", samples=False, run_ahead=RunAhead.AUTO)
    assert histories.get("", samples=False, run_ahead=RunAhead.AUTO) is not greedy


def test_a_round_that_prompts_wait_for_is_short() -> None:
    start = rounds.ChainStart(DraftStep("s", 0, (1,)), 1.0, 0.9, 16, 1, CalibratedChances(), 1.0)
    times = rounds.RoundTimes(0.025, 1e-4, 0.0, 0.0, 512, max_steps=2)
    drafting = rounds.DraftRound(rounds.RunDrafts((start,), times))
    for _ in range(2):
        drafting.record_step([(Candidate(1, -0.1),)] * len(drafting.next_step()), 1e-4)
    assert not drafting.next_step()


@pytest.mark.parametrize(("others", "fed"), [(0, 0), (30, 2)])
def test_prompts_are_fed_for_the_steps_that_all_will_share(others: int, fed: int) -> None:
    """A step of 2.5 ms beside passes of 25 ms costs a tenth of what the pass brings: 0.2 for each
    of two sessions alone, and 0.1 with 30 more that bring one token each."""
    step = DraftStep("s", 0, tuple(range(40)), guess=False)
    start = rounds.ChainStart(step, 0.25, 0.7, 16, 40, CalibratedChances(), 2.0)
    times = rounds.RoundTimes(0.025, 0.0025, 0.0, 0.0, 512)
    drafting = rounds.DraftRound(rounds.RunDrafts((start, start), times, others))
    assert len(drafting.next_step()) == fed


def test_a_record_knows_what_the_models_cache_holds() -> None:
    """Whatever was committed, drafted and rejected, the cache equals the text when it is
    queried."""
    dice = random.Random(3)
    for _ in range(200):
        record = od.ServerModel(od.ChainChances(), od.DraftTimes())
        text, cache = [1, 2], list[int]()
        for _ in range(30):
            path = tuple(dice.randrange(3) for _ in range(dice.randrange(3)))
            start = record.begin_chain("s", text, path, [0.9] * len(path), 8)
            if start is not None and not record.tokens:
                step, fed, drafted = start.step, list[int](), list[int]()
                for _ in range(dice.randrange(1, 5)):
                    cache[step.keep_length :] = step.feed
                    fed += step.feed
                    assert cache[: len(text)] == text[: len(cache)]
                    if not step.guess:
                        break
                    drafted.append(dice.randrange(3))
                    step = DraftStep("s", len(cache), (drafted[-1],))
                if dice.random() < 0.1:
                    cache.clear()
                    record.record_round(rounds.Chain("s", start.step.keep_length, None, ()))
                else:
                    keep = start.step.keep_length
                    guesses = tuple([(Candidate(token, -0.1),) for token in drafted])
                    record.record_round(rounds.Chain("s", keep, tuple(fed), guesses))
            new = [*record.tokens[: dice.randrange(4)], dice.randrange(3)]
            record.judge(new)
            text += new


def test_a_pass_is_one_tree_of_all_sources() -> None:
    tree = PassTree(5)
    tree.add_tree((7, 8), (-1, 0), (0.8, 0.6), SourceKind.DEVICE)
    tree.add_tree((7, 9, 9), (-1, 0, 1), (0.8, 0.7, 0.5), SourceKind.SERVER_MODEL)
    tree.add_tree((7, 6, 5), (-1, 0, -1), (0.3, 0.2, 0.1), SourceKind.SERVER_LOOKUP)
    assert tree.tokens == [7, 8, 9, 9, 6]
    assert tree.parents == [-1, 0, 0, 2, 0]
    assert (tree.device_node_count, tree.room) == (2, 0)
    assert [tree.tokens[node] for node in tree.likeliest_path()] == [7, 9, 9]
    tree.cut_to_chain()
    assert tree.parents == [-1, 0, 1]
    assert tree.sources == [SourceKind.DEVICE, SourceKind.SERVER_MODEL, SourceKind.SERVER_MODEL]
    assert tree.device_node_count == 1
