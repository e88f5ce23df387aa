"""The contract of draft sources (``core/protocol/draft_source.py``), for every source on both ends.

Oracle: a text that repeats eight tokens, of which the source is right about a known share. After
some hundred verdicts the chance of its candidates is near that share, a source without a right
candidate has none that is worth a row, and the bounds of the view hold at every step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol, cast

import pytest

from edgespec.core.device.device_lookup import DeviceLookup
from edgespec.core.device.device_model import DeviceModel
from edgespec.core.device.device_prediction import DevicePrediction
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.events import DraftCounters, StepDone
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DeviceSource, DraftView, JudgedPlace
from edgespec.core.ports import Candidate, PassRequest
from edgespec.core.protocol.draft_source import SourceKind, SteppedSource
from edgespec.core.protocol.messages import Draft, Limits
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.tree import ROOT, UNRANKED, CommittedPrefix, SpeculationTree
from edgespec.core.verifier.draft_inbox import DraftInbox
from edgespec.core.verifier.draft_round import Chain
from edgespec.core.verifier.pass_tree import PassSource, PassTree, PassVerdict, PassView
from edgespec.core.verifier.server_drafts import ServerLookup
from edgespec.core.verifier.server_model import (
    ChainChances,
    DraftTimes,
    EngineSpeculator,
    ServerModel,
)

LOOP = (11, 12, 13, 14, 15, 16, 17, 18)
WRONG = 99
PASS_S, STEP_S = 0.025, 0.004


def token_at(position: int) -> int:
    return LOOP[position % len(LOOP)]


class End(Protocol):
    """One source in a generation, on its own end."""

    @property
    def source(self) -> DeviceSource | PassSource: ...

    def propose(self, token: int, least_chance: float, room: int) -> list[tuple[int, float]]:
        """Let the source propose ``token`` for the next position, if it does not find tokens by
        itself. Return the tokens and chances of the nodes at that position."""

    def commit(self, token: int) -> None:
        """Commit ``token``, and let the source learn."""


class OnDevice:
    """A tree of a device with one source. The prediction is the text that repeats."""

    def __init__(self, kind: SourceKind) -> None:
        self.tree = SpeculationTree(CommittedPrefix(tuple(map(token_at, range(16)))))
        self.estimates = DraftEstimates()
        self.model = DeviceModel(self.tree, self.estimates, DraftCounters())
        lookup = DeviceLookup(self.tree, TextTables(ngrams=True), self.estimates)
        prediction = DevicePrediction(
            self.tree, tuple(map(token_at, range(16, 1016))), self.estimates
        )
        sources: tuple[DeviceSource, ...] = (self.model, lookup, prediction)
        self.source = next(one for one in sources if one.kind is kind)
        self.now = 0.0

    def propose(self, token: int, least_chance: float, room: int) -> list[tuple[int, float]]:
        self.estimates.price.least_chance = least_chance
        view = DraftView(self.tree, 0, 0, room, 1 << 20, self.estimates)
        before = len(self.tree.nodes)
        if self.source is self.model:
            self.model.begin_step(ROOT, view, GoodputPolicy(width=1), self.now)
            self.now += STEP_S
            done = StepDone((Candidate(token, -0.1),))
            assert self.model.record_step(done, self.now) == []
        self.source.add_nodes(view)
        # A policy begins no step without room, so that the candidate of one has its room.
        assert len(self.tree.nodes) - before <= max(self.source is self.model, room)
        return [(node.token, node.chance) for node in self.tree.roots]

    def commit(self, token: int) -> None:
        offered = self.tree.roots
        if offered:
            right = next((node for node in offered if node.token == token), None)
            drafted = sum(node.rank != UNRANKED for node in offered)
            self.source.learn(JudgedPlace(offered, right, drafted))
        self.tree.commit((token,))


class OnVerifier:
    """A session of a verifier with one source."""

    def __init__(self, make: Callable[[CommittedPrefix], PassSource]) -> None:
        self.prefix = CommittedPrefix(tuple(map(token_at, range(16))))
        self.source = make(self.prefix)
        self.tree = PassTree(0)
        self.times: DraftTimes | None = None
        self.node_count = 0
        self.now = 0.0

    def propose(self, token: int, least_chance: float, room: int) -> list[tuple[int, float]]:
        source, prefix, length = self.source, self.prefix, self.prefix.length
        self.now += PASS_S
        self.node_count += 1
        match source:
            case DraftInbox():
                base = prefix.hash_at(length)
                draft = Draft(self.node_count, (ROOT,), (token,), length, base)
                assert source.receive(draft, self.now) is None
            case EngineSpeculator():
                source.set_proposal((token,))
            case ServerModel():
                start = source.begin_chain("s", prefix.tokens, (), [], 4)
                assert start is not None
                step, candidates = start.step, ((Candidate(token, -0.1),),)
                source.record_round(Chain("s", step.keep_length, step.feed, candidates))
            case _:
                pass
        self.tree = PassTree(room)
        source.add_nodes(PassView(self.tree, prefix.tokens, 3, least_chance, least_chance))
        assert len(self.tree.tokens) <= room
        assert set(self.tree.sources) <= {source.kind}
        assert all(reach >= least_chance for reach in self.tree.reach)
        return [
            (node, reach)
            for node, reach, parent in zip(
                self.tree.tokens, self.tree.reach, self.tree.parents, strict=True
            )
            if parent < 0
        ]

    def commit(self, token: int) -> None:
        tree = self.tree
        server_nodes = 0 if self.source.kind is SourceKind.DEVICE else len(tree.tokens)
        request = PassRequest(
            key="s",
            cache_length=self.prefix.length - 1,
            feed=(self.prefix.tokens[-1],),
            tokens=tuple(tree.tokens),
            parents=tuple(tree.parents),
            server_nodes=server_nodes,
        )
        roots = [node for node, parent in enumerate(tree.parents) if parent < 0]
        accepted = [node for node in roots if tree.tokens[node] == token]
        targets = (token,) * (1 + len(tree.tokens))
        self.source.learn(PassVerdict(request, tree.sources, targets, accepted, (token,), self.now))
        if self.source.kind is not SourceKind.DEVICE:  # The inbox advances the session's tree.
            self.prefix.extend((token,))


def server_model(prefix: CommittedPrefix) -> PassSource:
    times = DraftTimes()
    for rows in (1, 2, 3, 4) * 4:
        times.note_step(rows, STEP_S)
    return ServerModel(ChainChances(), times)


def speculator(prefix: CommittedPrefix) -> PassSource:
    times = DraftTimes()
    for steps in (1, 3) * 8:
        times.note_pass(steps, PASS_S + steps * STEP_S)
    return EngineSpeculator(ChainChances(), times)


ENDS: dict[SourceKind, Callable[[], End]] = {
    SourceKind.DEVICE_MODEL: lambda: OnDevice(SourceKind.DEVICE_MODEL),
    SourceKind.DEVICE_LOOKUP: lambda: OnDevice(SourceKind.DEVICE_LOOKUP),
    SourceKind.PREDICTION: lambda: OnDevice(SourceKind.PREDICTION),
    SourceKind.DEVICE: lambda: OnVerifier(lambda prefix: DraftInbox(prefix, 1 << 17, Limits())),
    SourceKind.SERVER_MODEL: lambda: OnVerifier(server_model),
    SourceKind.ENGINE_SPECULATOR: lambda: OnVerifier(speculator),
    SourceKind.SERVER_LOOKUP: lambda: OnVerifier(
        lambda prefix: ServerLookup(TextTables(ngrams=True))
    ),
}
sources = pytest.mark.parametrize("kind", ENDS, ids=lambda kind: kind.value)


def test_every_kind_of_source_keeps_the_contract() -> None:
    assert set(ENDS) == set(SourceKind)
    assert all(make().source.kind is kind for kind, make in ENDS.items())


@sources
@pytest.mark.parametrize("share", [0.9, 0.4])
def test_the_chance_is_the_share_of_right_candidates(kind: SourceKind, share: float) -> None:
    """The target takes the proposed token in ``share`` of all places, and another one elsewhere."""
    end, dice, chances = ENDS[kind](), random.Random(5), list[float]()
    for position in range(16, 416):
        expected = token_at(position)
        found = dict(end.propose(expected, 0.0, 8))
        if position > 200 and expected in found:
            chances.append(found[expected])
        end.commit(expected if dice.random() < share else WRONG)
    assert len(chances) > 20
    if kind in (SourceKind.DEVICE_LOOKUP, SourceKind.PREDICTION, SourceKind.SERVER_LOOKUP):
        # A match that goes on is surer than one that begins anew, and 99 interrupts it.
        assert min(chances) - 0.15 < share < max(chances) + 0.15
    else:
        assert sum(chances) / len(chances) == pytest.approx(share, abs=0.12)


@sources
def test_a_source_that_is_never_right_gets_no_row(kind: SourceKind) -> None:
    """A place decides against each candidate. The price of 0.15 then keeps it out of the tree; on a
    device the policy keeps it out by the node's chance."""
    end, dice = ENDS[kind](), random.Random(7)
    found: dict[int, float] = {}
    for position in range(16, 316):
        found = dict(end.propose(token_at(position), 0.15, 8))
        end.commit(dice.randrange(1000, 1 << 16))
    assert all(chance < 0.15 for chance in found.values())


@sources
@pytest.mark.parametrize("room", [0, 1, 3])
def test_the_room_of_the_view_is_kept(kind: SourceKind, room: int) -> None:
    """``End.propose`` checks the bound at every place."""
    end = ENDS[kind]()
    for position in range(16, 40):
        end.propose(token_at(position), 0.0, room)
        end.commit(token_at(position))


@pytest.mark.parametrize(
    "kind", [SourceKind.DEVICE_MODEL, SourceKind.SERVER_MODEL, SourceKind.ENGINE_SPECULATOR]
)
def test_a_source_with_steps_knows_their_time_and_its_rate(kind: SourceKind) -> None:
    end, dice = ENDS[kind](), random.Random(3)
    source = cast("SteppedSource[object, object]", end.source)
    assert 0.0 < source.acceptance_rate < 1.0, "a prior, so that it is tried"
    for position in range(16, 316):
        end.propose(token_at(position), 0.0, 4)
        end.commit(token_at(position) if dice.random() < 0.6 else WRONG)
    assert source.acceptance_rate == pytest.approx(0.6, abs=0.12)
    assert source.step_s(PASS_S) == pytest.approx(STEP_S, rel=1e-3)


def test_the_time_of_a_step_is_assumed_until_it_was_measured() -> None:
    unmeasured: list[SteppedSource[object, object]] = [
        cast("SteppedSource[object, object]", source)
        for source in (
            OnDevice(SourceKind.DEVICE_MODEL).source,
            ServerModel(ChainChances(), DraftTimes()),
            EngineSpeculator(ChainChances(), DraftTimes()),
        )
    ]
    assert [source.step_s(0.04) for source in unmeasured] == pytest.approx([0.004] * 3)
