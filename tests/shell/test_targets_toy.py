"""The toy law, the toy target's account of its cache, and the paced target's clock."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from edgespec.core.ports import CapacityError, PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import CacheShape
from edgespec.core.toy_model import ToyModel
from edgespec.verifier.targets.paced import PacedTarget
from edgespec.verifier.targets.toy import ToyTarget

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, presence_penalty=0.4)
PROMPT = [3, 1, 4, 1, 5]


def _text(model: ToyModel, params: SamplingParams, count: int) -> list[int]:
    """The specification: one token after the other, no cache."""
    text: list[int] = []
    for position in range(len(PROMPT), len(PROMPT) + count):
        row = model.logits([*PROMPT, *text])
        text.append(choose(row, params, position, PROMPT, text))
    return text


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_any_schedule_gives_the_specified_text(params: SamplingParams) -> None:
    model = ToyModel(seed=2)
    expected = _text(model, params, 60)
    rng = random.Random(4)
    target = ToyTarget(model)
    target.open("s", len(PROMPT), params)
    target.forward([PassRequest("s", 0, tuple(PROMPT[:2]), sample=False)])
    text, cached = list(PROMPT), 2
    while len(text) < len(PROMPT) + 60:
        right = expected[len(text) - len(PROMPT) :][: rng.randrange(4)]
        wrong = (expected[len(text) - len(PROMPT)] + rng.randrange(1, 32)) % 32
        tokens = [wrong, *right, rng.randrange(32)]
        parents = [-1, *([-1] if right else []), *range(1, len(right)), 0]
        request = PassRequest("s", cached, tuple(text[cached:]), tuple(tokens), tuple(parents))
        [result] = target.forward([request])
        kept, new = _walk(request, result)
        assert len(kept) >= len(right)
        target.keep("s", kept)
        cached = len(text) + len(kept)
        text += new
        assert list(target.cached("s")) == text[:cached]
    assert text[len(PROMPT) :][:60] == expected


def _walk(request: PassRequest, result: PassResult) -> tuple[list[int], list[int]]:
    kept: list[int] = []
    new = [result.targets[0]]
    node = -1
    while True:
        children = [
            child
            for child, parent in enumerate(request.parents)
            if parent == node and request.tokens[child] == new[-1]
        ]
        if not children:
            return kept, new
        node = children[0]
        kept.append(node)
        new.append(result.targets[1 + node])


def _opened(**options: int) -> ToyTarget:
    target = ToyTarget(**options)  # type: ignore[arg-type]
    target.open("s", 3, SamplingParams())
    target.forward([PassRequest("s", 0, (1, 2, 3), (4, 5, 6), (-1, 0, 0))])
    return target


def test_a_forgotten_keep_is_an_error() -> None:
    with pytest.raises(ValueError, match="cache_length is 4, but 3 tokens are cached"):
        _opened().forward([PassRequest("s", 4, (7,))])


def test_a_changed_prefix_is_an_error() -> None:
    target = _opened()
    target.keep("s", [0, 2])
    assert target.cached("s") == (1, 2, 3, 4, 6)
    target.forward([PassRequest("s", 3, (4, 6, 7))])
    with pytest.raises(ValueError, match="differ from the committed"):
        target.forward([PassRequest("s", 3, (4, 5))])


@pytest.mark.parametrize("nodes", [[1], [0, 0], [1, 0], [3]])
def test_kept_nodes_are_a_path(nodes: list[int]) -> None:
    with pytest.raises(ValueError, match="not a path"):
        _opened().keep("s", nodes)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PassRequest("s", 3, ()), "feed is empty"),
        (PassRequest("s", 3, (99,)), "token ids 99 to 99, limit 0 to 31"),
        (PassRequest("s", 3, (1,), (2,), (0,)), "must come before"),
        (PassRequest("s", 3, (1,), (2,), ()), "nodes need parents"),
        (PassRequest("s", 3, (1,), (2,), (-1,), sample=False), "sample=True"),
        (PassRequest("t", 0, (1,)), "'t' is not open"),
    ],
)
def test_a_bad_request_is_refused(request_: PassRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _opened().forward([request_])


def test_capacity_names_the_limit() -> None:
    target = _opened(max_sessions=1, max_cached_tokens=8, context_length=10)
    target.open("probe", 1, SamplingParams())
    with pytest.raises(CapacityError, match="2 sessions open, limit 1"):
        target.open("t", 1, SamplingParams())
    target.close("probe")
    with pytest.raises(CapacityError, match="9 cached tokens wanted, limit 8"):
        target.forward([PassRequest("s", 3, (1,) * 6)])
    with pytest.raises(CapacityError, match="limit context_length 10"):
        target.forward([PassRequest("s", 3, (1,) * 8)])
    assert target.forward([PassRequest("s", 3, (1,) * 5)])[0].key == "s"
    target.close("s")
    target.close("s")
    with pytest.raises(CapacityError, match="prompt of 11 tokens"):
        target.open("t", 11, SamplingParams())


TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def _sharing() -> ToyTarget:
    """Two sequences of one text; the first has filled blocks 1 to 3 of four rows each."""
    target = ToyTarget(ToyModel(vocabulary_size=32, order=2), cache=CacheShape(8, 4))
    penalised = SamplingParams(repetition_penalty=1.5, frequency_penalty=0.4)
    for key in ("first", "second"):
        target.open(key, len(TEXT), penalised, TEXT)
    target.forward([PassRequest("first", 0, TEXT, blocks=(1, 2, 3))])
    return target


def test_a_block_of_another_text_is_refused_though_its_tokens_are_the_same() -> None:
    target = _sharing()
    other = (9, *TEXT[1:])
    target.open("other", len(other), SamplingParams(), other)
    target.forward([PassRequest("other", 0, other[:4], sample=False, blocks=(5,))])
    with pytest.raises(ValueError, match="position 4 holds another token"):
        target.forward([PassRequest("other", 8, other[8:], blocks=(5, 2, 6))])


def test_a_block_that_another_request_reads_is_not_written() -> None:
    target = _sharing()
    reads = PassRequest("first", 8, TEXT[8:], blocks=(1, 2, 3))
    writes = PassRequest("second", 4, TEXT[4:], blocks=(1, 2, 4))
    for batch in ([reads, writes], [writes, reads]):
        with pytest.raises(ValueError, match="a block that is written is another's too"):
            target.forward(batch)


class FakeTime:
    """A clock that only moves when somebody sleeps, and oversleeps a little."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.naps = 0

    def clock(self) -> float:
        return self.now_s

    def nap(self, seconds: float) -> None:
        self.naps += 1
        self.now_s += seconds + 2e-5


class SlowTarget(ToyTarget):
    """Takes 20 ms a pass, on the fake clock."""

    fake: FakeTime

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.fake.now_s += 0.02
        return super().forward(batch)


@pytest.mark.parametrize(
    ("sample", "rows", "expected_s"), [(True, 5, 0.060), (False, 5, 0.020), (True, 1, 0.044)]
)
def test_a_paced_pass_takes_its_time_in_all(sample: bool, rows: int, expected_s: float) -> None:
    fake = FakeTime()
    inner = SlowTarget()
    inner.fake = fake
    paced = PacedTarget(inner, 40.0, 4.0, sleep=fake.nap, clock=fake.clock)
    port: TargetModel = paced
    port.open("s", 1, SamplingParams())
    start_s = fake.now_s
    [result] = port.forward([PassRequest("s", 0, (1,) * rows, sample=sample)])
    assert fake.now_s - start_s == pytest.approx(expected_s, abs=2e-4)
    assert fake.naps < 40
    assert len(result.targets) == sample
    port.keep("s", [])
    port.close("s")
    assert paced.emulated
    assert paced.description == "emulated pass time"
    assert port.info == inner.info
