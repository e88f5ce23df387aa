"""Ranks stay in step, whatever is called and whatever fails: no processes, no collectives.

Oracle: ranks 1 and 2 hold the real cache of a target whose model is replaced by one that writes
each token where its key belongs and raises where it is told to. After every call of a random
sequence their cache equals rank 0's to the element, or the group says that it is lost; and it says
so exactly when some rank would wait for an exchange that does not come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.ports import CapacityError, ModelInfo, PassRequest, PassResult, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.torch_token_counts import TokenCountsCache
from edgespec.verifier.targets.constrained_rows import ConstrainedRows
from edgespec.verifier.targets.grouped_attention import GroupedAttention
from edgespec.verifier.targets.kv_pool import KvPool
from edgespec.verifier.targets.tensor_parallel import TensorParallelTarget
from edgespec.verifier.targets.tensor_parallel_group import RankGroup
from edgespec.verifier.targets.tensor_parallel_messages import (
    LENGTH_BYTES,
    ToRank,
    decode,
    encode,
)
from edgespec.verifier.targets.tensor_parallel_model import Share
from edgespec.verifier.targets.tensor_parallel_replay import replay
from edgespec.verifier.targets.torch_target import TorchTarget

RANKS = 3
EXCHANGES = 4
VOCABULARY = 11
GREEDY = SamplingParams()


class PassBroke(RuntimeError):
    """What a planted failure raises."""


class FakeModel:
    """Called as the model is; ``fails`` says behind how many exchanges, None for a good pass."""

    def __init__(self, share: Share, hang: Callable[[], None]) -> None:
        self._share, self._hang = share, hang
        self.fails: int | None = None
        self.first_failure: int | None = None
        """Of all ranks: who gets further waits there for ever."""
        self.model = self

    def __call__(self, input_ids: torch.Tensor, edgespec_pass: Any, **_: Any) -> Any:
        plan = edgespec_pass
        for done in range(EXCHANGES + 1):
            if self.fails == done and self.first_failure == done:
                raise PassBroke(f"behind {done}")
            if done == EXCHANGES:
                break
            if self.first_failure == done:
                self._hang()
            self._share.collectives += 1
        tokens = input_ids[0, : plan.row_count]
        plan.pool.data[:, 0].index_copy_(
            1, plan.write_slots, tokens.float().view(1, -1, 1).expand(2, -1, 1)
        )
        wanted = input_ids[0, plan.sampled_rows]
        logits = torch.zeros((1, len(wanted), VOCABULARY))
        logits[0, torch.arange(len(wanted)), (wanted * 3 + 1) % VOCABULARY] = 1.0
        return type("Output", (), {"logits": logits})


class Waits(RuntimeError):
    """This rank waits in an exchange for ever."""


class InStep:
    """Rank 0's target over two replicas in this thread, with a clock that this class turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.told: list[ToRank] = []
        self.group = _DirectGroup(self)
        self.lead = _target(TensorParallelTarget, self._rank_0_waits)
        self.lead._group, self.lead._ranks = self.group, RANKS
        self.replicas = [_target(TorchTarget, _replica_waits) for _ in range(RANKS - 1)]

    @property
    def models(self) -> list[FakeModel]:
        return [target._model for target in (self.lead, *self.replicas)]

    def clock(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def plant(self, failures: Sequence[int | None]) -> None:
        first = min((one for one in failures if one is not None), default=None)
        for model, one in zip(self.models, failures, strict=True):
            model.fails, model.first_failure = one, first

    def caches(self) -> list[Any]:
        return [
            (
                {
                    key: (one.prompt_length, one.blocks, one.tokens, one.nodes, tuple(one.text))
                    for key, one in target._pool._sequences.items()
                },
                target._pool.free_tokens,
                target._pool.data.tolist(),
            )
            for target in (self.lead, *self.replicas)
        ]

    def _rank_0_waits(self) -> None:
        """As in an exchange: time passes, and the watching thread looks at the clock."""
        while self.group.lost is None:
            self.group.look()
        raise Waits("rank 0")


def _replica_waits() -> None:
    raise Waits("a replica")


class _DirectGroup(RankGroup):
    """Commands reach the replicas by a call; all else is the real thing."""

    def __init__(self, world: InStep) -> None:
        super().__init__(RANKS, 300.0, clock=world.clock, look_every_s=0.0)
        self._world = world

    def tell_all(self, message: ToRank) -> None:
        self._check()
        self._world.told.append(message)
        sent = cast("ToRank", decode(encode(message)[LENGTH_BYTES:]))
        for rank, replica in enumerate(self._world.replicas, start=1):
            answer = replay(replica, sent, replica.collectives)
            if answer is not None and "Waits" not in repr(answer):
                self._hear(rank, decode(encode(answer)[LENGTH_BYTES:]))

    def look(self) -> None:
        with self._changed:
            self._agreement.look(self._clock())


def _target(kind: type[Any], hang: Callable[[], None]) -> Any:
    """A target without a checkpoint: the real code around a cache of one layer, one column."""
    target: Any = object.__new__(kind)
    share = Share(0, RANKS, lambda: None)
    target._pool = KvPool(1, 1, 96, torch.float32, torch.device("cpu"))
    target._model, target._share = FakeModel(share, hang), share
    target.collectives = lambda: share.collectives
    target._info = ModelInfo("fake", "v", VOCABULARY, 48)
    target._constrained, target._attention = ConstrainedRows(target._info), GroupedAttention()
    target._counts, target._max_sessions, target._row_tiles = TokenCountsCache(4), 3, None
    target._graphs = None
    return target


def _request(rng: random.Random, world: InStep, key: str) -> PassRequest:
    """Mostly one that fits; sometimes one that rank 0 must refuse."""
    sequence = world.lead._pool._sequences.get(key)
    length = sequence.length if sequence else 0
    cached = rng.randint(0, length) if rng.random() < 0.95 else length + 1
    feed = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6)))
    sample = rng.random() < 0.8
    count = rng.randint(0, 4) if sample else 0
    parents = tuple(rng.randint(-1, node - 1) for node in range(count))
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(count))
    return PassRequest(key, cached, feed, tokens, parents, sample)


def _pass(rng: random.Random, world: InStep) -> None:
    keys = rng.sample("abcd", rng.randint(1, 3))
    batch = [_request(rng, world, key) for key in keys]
    failures: list[int | None] = [None] * RANKS
    if rng.random() < 0.4:
        kind, where = rng.random(), rng.randint(0, EXCHANGES)
        if kind < 0.6:
            failures = [where] * RANKS
        else:
            failures = [rng.choice([None, rng.randint(0, EXCHANGES)]) for _ in range(RANKS)]
    world.plant(failures)
    ran, lost = len(world.told), world.group.lost
    try:
        results = world.lead.forward(batch)
    except (ValueError, CapacityError):
        assert len(world.told) == ran, "a refused pass was told"
        return
    except PassBroke:
        assert len(set(failures)) == 1
        assert failures[0] is not None
        return
    except TargetLostError:
        assert lost is not None or len(set(failures)) > 1
        assert world.group.lost is not None
        return
    assert failures == [None] * RANKS
    assert [result.key for result in results] == keys
    for request, result in zip(batch, results, strict=True):
        assert result == _expected(request)


def _expected(request: PassRequest) -> PassResult:
    before = (request.feed[-1], *request.tokens) if request.sample else ()
    return PassResult(request.key, tuple((token * 3 + 1) % VOCABULARY for token in before))


def _keep(rng: random.Random, world: InStep, key: str) -> None:
    sequence = world.lead._pool._sequences.get(key)
    path: list[int] = []
    if sequence is not None:
        for node, parent in enumerate(sequence.parents):
            if parent == (path[-1] if path else -1) and rng.random() < 0.7:
                path.append(node)
    if rng.random() < 0.1:
        path.append(9)
    world.lead.keep(key, path)


def _call(rng: random.Random, world: InStep) -> None:
    key = rng.choice("abcd")
    kind = rng.random()
    if kind < 0.45:
        _pass(rng, world)
    elif kind < 0.65:
        text = tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5)))
        world.lead.open(key, rng.choice([1, 2, 5, 200]), SamplingParams(seed=3), text)
    elif kind < 0.85:
        _keep(rng, world, key)
    else:
        world.lead.close(key)


@given(st.integers(0, 1 << 30))
def test_any_calls_and_failures_leave_the_ranks_in_step_or_lost(seed: int) -> None:
    rng, world = random.Random(seed), InStep()
    for _ in range(rng.randint(1, 25)):
        lost, raised = world.group.lost, None
        try:
            _call(rng, world)
        except (ValueError, CapacityError, TargetLostError) as error:
            raised = error
        if isinstance(raised, TargetLostError):
            assert str(raised) == world.group.lost == lost, "lost by something else than a pass"
        if world.group.lost is None:
            lead, *others = world.caches()
            assert all(other == lead for other in others)


def test_lost_is_for_ever_and_says_why() -> None:
    world = InStep()
    world.lead.open("a", 1, GREEDY)
    world.plant([None, 2, None])
    with pytest.raises(TargetLostError, match="rank 1 failed in pass 1: PassBroke: behind 2, and"):
        world.lead.forward([PassRequest("a", 0, (1, 2))])
    world.plant([None] * RANKS)
    calls: list[Callable[[], object]] = [
        lambda: world.lead.forward([PassRequest("a", 0, (1, 2))]),
        lambda: world.lead.keep("a", []),
        lambda: world.lead.open("b", 1, GREEDY),
    ]
    for call in calls:
        with pytest.raises(TargetLostError, match="rank 1 failed in pass 1"):
            call()


def test_a_pass_that_breaks_alike_everywhere_is_contained() -> None:
    world = InStep()
    world.lead.open("a", 1, GREEDY)
    world.plant([3] * RANKS)
    with pytest.raises(PassBroke):
        world.lead.forward([PassRequest("a", 0, (1, 2))])
    world.plant([None] * RANKS)
    [result] = world.lead.forward([PassRequest("a", 0, (1, 2), (3,), (-1,))])
    assert result.targets == (7, 10)


def test_what_a_replica_cannot_do_is_the_end() -> None:
    world = InStep()
    world.replicas[1].open("a", 1, GREEDY)  # out of step by force
    world.lead.open("a", 1, GREEDY)
    with pytest.raises(TargetLostError, match=r"rank 2 failed: OpenReplica: ValueError: .*already"):
        world.lead.close("a")
