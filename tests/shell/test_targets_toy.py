"""The toy target's account of its cache, and the paced target's clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from edgespec.core.ports import CapacityError, PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.toy_model import ToyModel
from edgespec.verifier.targets.paced import PacedTarget
from edgespec.verifier.targets.toy import ToyTarget
from tests.shell.live_verifier import toy_text
from tests.shell.torch_schedules import decode_beside

SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=5, presence_penalty=0.4)
TEXT = (1, 2, 3, 4, 5, 6, 7, 8, 9)


def test_any_schedule_gives_the_specified_text() -> None:
    model, prompts = ToyModel(seed=2), [[3, 1, 4, 1, 5], list(range(12))]
    every = [SamplingParams(max_tokens=60), SAMPLED]
    texts = [toy_text(prompt, one, model) for prompt, one in zip(prompts, every, strict=True)]
    assert decode_beside(ToyTarget(model), prompts, texts, every) == texts


def _opened(**options: int) -> ToyTarget:
    target = ToyTarget(**options)  # type: ignore[arg-type]
    target.open("s", 3, SamplingParams())
    target.forward([PassRequest("s", 0, (1, 2, 3), (4, 5, 6), (-1, 0, 0))])
    return target


def test_what_the_cache_does_not_hold_is_an_error() -> None:
    target = _opened()
    with pytest.raises(ValueError, match="cache_length is 4, but 3 tokens are cached"):
        target.forward([PassRequest("s", 4, (7,))])
    for nodes in ([1], [0, 0], [1, 0], [3]):
        with pytest.raises(ValueError, match="not a path"):
            _opened().keep("s", nodes)
    target.keep("s", [0, 2])
    assert target.cached("s") == (1, 2, 3, 4, 6)
    target.forward([PassRequest("s", 3, (4, 6, 7))])
    with pytest.raises(ValueError, match="differ from the committed"):
        target.forward([PassRequest("s", 3, (4, 5))])


def test_capacity_names_the_limit() -> None:
    target = _opened(max_sessions=1, max_cached_tokens=8, context_length=10)
    target.open("probe", 1, SamplingParams())
    with pytest.raises(CapacityError, match="2 sessions are open, limit max_sessions 1"):
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


class SlowTarget(ToyTarget):
    """Takes 20 ms a pass, on a clock that only moves when somebody sleeps, and oversleeps."""

    now_s, naps = 100.0, 0

    def nap(self, seconds: float) -> None:
        self.naps += 1
        self.now_s += seconds + 2e-5

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.now_s += 0.02
        return super().forward(batch)


@pytest.mark.parametrize(
    ("sample", "rows", "expected_s"), [(True, 5, 0.060), (False, 5, 0.020), (True, 1, 0.044)]
)
def test_a_paced_pass_takes_its_time_in_all(sample: bool, rows: int, expected_s: float) -> None:
    inner = SlowTarget()
    port: TargetModel = PacedTarget(inner, 40.0, 4.0, sleep=inner.nap, clock=lambda: inner.now_s)
    port.open("s", 1, SamplingParams())
    [result] = port.forward([PassRequest("s", 0, (1,) * rows, sample=sample)])
    assert inner.now_s - 100.0 == pytest.approx(expected_s, abs=2e-4)
    assert inner.naps < 40
    assert len(result.targets) == sample
    port.keep("s", [])
    port.close("s")
    assert port.info == inner.info
