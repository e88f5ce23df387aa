"""What goes wrong in vLLM, on its stand-in: who hears of it, and what is left of the texts.

Oracle: the toy model's text, as in ``test_vllm_target.py``, of every session but those that failed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import VerifierConfig
from edgespec.config.setup_error import SetupError
from edgespec.core.ports import CapacityError, ModelOutputError, PassRequest, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.engines.vllm import core as core_module
from edgespec.verifier.engines.vllm import loading
from edgespec.verifier.engines.vllm.core import VllmCore, VllmOptions
from edgespec.verifier.engines.vllm.target import Stepped, Wanted
from tests.shell.fake_vllm import FakeVllm, fake_target
from tests.shell.test_vllm_target import GREEDY, GUESSES, LENGTH, PARAMS, Session

_right = GUESSES["right"]


def test_a_session_without_numbers_fails_alone() -> None:
    engine = FakeVllm()
    target = fake_target(engine)
    good, bad = (Session(target, key, GREEDY, _right) for key in ("good", "bad"))
    engine.failing.add("bad")
    batch = [bad.request(), good.request()]
    with pytest.raises(ModelOutputError, match=r"largest logit is nan") as caught:
        target.forward(batch)
    assert caught.value.key == "bad"
    target.close("bad")
    steps = len(engine.steps)
    good.take(batch[1], target.forward([batch[1]])[0])
    assert len(engine.steps) == steps, "what was computed for the others is not lost"
    while good.done < LENGTH:
        request = good.request()
        good.take(request, target.forward([request])[0])
    good.check()


class _Breaking(FakeVllm):
    """Some steps fail when vLLM has booked them already, in part or as a whole."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.2, seed)
        self.broken = 0
        self._chance = random.Random(seed)

    def step(self, wanted: Mapping[str, Wanted]) -> Mapping[str, Stepped]:
        if self._chance.random() < 0.7:
            return super().step(wanted)
        self.broken += 1
        part = self._chance.randrange(1 + len(wanted))
        super().step(dict(list(wanted.items())[:part]))
        raise RuntimeError("out of memory")


@PARAMS
@pytest.mark.parametrize("seed", range(4))
def test_texts_are_right_behind_steps_that_failed(seed: int, params: SamplingParams) -> None:
    chance = random.Random(seed)
    engine = _Breaking(seed)
    target = fake_target(engine)
    sessions = {key: Session(target, key, params, guess) for key, guess in GUESSES.items()}
    while unfinished := [one for one in sessions.values() if one.done < LENGTH]:
        part = chance.sample(unfinished, chance.randint(1, len(unfinished)))
        scored = {one.key: chance.choice([0, 0, 2]) for one in part}
        batch = [one.request(chance.randint(1, 20), scored[one.key]) for one in part]
        try:
            results = target.forward(batch)
        except RuntimeError:
            continue
        for session, request, result in zip(part, batch, results, strict=True):
            session.take(request, result)
    for session in sessions.values():
        session.check()
        target.close(session.key)
    assert engine.broken > 10
    assert engine.texts == {}


def test_an_engine_that_cannot_be_emptied_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeVllm()
    session = Session(fake_target(engine), "a", GREEDY, _right)

    def fail(*_: object) -> None:
        raise TargetLostError("gone")

    monkeypatch.setattr(engine, "reset", fail)
    monkeypatch.setattr(engine, "run", lambda *_: 1 // 0)
    with pytest.raises(TargetLostError, match="gone"):
        session.target.forward([session.request()])
    session.target.close("a")


def test_an_engine_without_room_is_not_asked_for_ever() -> None:
    session = Session(fake_target(FakeVllm(whims=1.0)), "a", GREEDY, _right)
    with pytest.raises(CapacityError, match=r"no room for 1 sessions: nothing came of \d+ steps"):
        session.target.forward([session.request()])


def test_openings_have_bounds() -> None:
    target = fake_target(max_sessions=1)
    target.open("a", 1, GREEDY, (1,))
    with pytest.raises(ValueError, match="'a' is already open"):
        target.open("a", 1, GREEDY, (1,))
    target.open("probe", 1, GREEDY)
    assert target.forward([PassRequest("probe", 0, (0,))])[0].targets
    with pytest.raises(CapacityError, match="2 sessions are open, limit max_sessions 1"):
        target.open("b", 1, GREEDY, (1,))
    target.close("a")
    target.close("unknown")
    with pytest.raises(CapacityError, match=r"prompt of 4097 tokens, limit 1 to 4096"):
        target.open("c", 4097, GREEDY)
    with pytest.raises(ValueError, match="'d' is not open"):
        target.forward([PassRequest("d", 0, (1,))])


# --- the seam to the real one -------------------------------------------------------------------


def _core(**calls: Any) -> VllmCore:
    """With sessions ``a`` and ``b``, on what stands in for vLLM's own core."""
    core = VllmCore.__new__(VllmCore)
    core._ids, core._core = {"a": "1", "b": "2"}, SimpleNamespace(**calls)
    return core


@pytest.mark.parametrize(
    ("emptied", "why"),
    [(lambda: False, "its cache cannot be emptied"), (lambda: 1 // 0, "ZeroDivisionError: ")],
)
def test_what_cannot_be_emptied_is_lost(emptied: Any, why: str) -> None:
    core = _core(abort_requests=lambda names: None, reset_prefix_cache=emptied)
    with pytest.raises(TargetLostError, match=f"cannot begin anew: {why}"):
        core.reset()


def test_nobody_else_finds_what_a_failed_session_has_computed() -> None:
    """Oracle: the blocks of its request, and of no other, leave vLLM's prefix cache."""
    evicted: set[int] = set()
    blocks = {"1": ([4, 5], [9]), "2": ([6], [7])}
    grown = [SimpleNamespace(request_id=name, new_token_ids=[0]) for name in blocks]
    core = _core(step=lambda: ({0: SimpleNamespace(outputs=grown)}, True))
    core._scheduler = SimpleNamespace(
        requests={name: SimpleNamespace(num_computed_tokens=8) for name in blocks},
        rows={"1": ((), (), "the largest logit is nan"), "2": ((0,), (), "")},
        kv_cache_manager=SimpleNamespace(
            get_block_ids=blocks.__getitem__, evict_blocks=evicted.update
        ),
    )
    found = core.step({"a": Wanted(1), "b": Wanted(1)})
    assert (found["a"].failure, found["b"].failure) == ("the largest logit is nan", "")
    assert evicted == {4, 5, 9}


class _StartedCore(FakeVllm):
    """As much of ``VllmCore`` as loading asks for; its first step fails."""

    context_length, number_format, max_drafts, max_rows = 128, "float32", 4, 64
    shut = 0

    def __init__(self, options: VllmOptions) -> None:
        super().__init__()

    def step(self, wanted: Mapping[str, Wanted]) -> Mapping[str, Stepped]:
        raise MemoryError("no room for the logits")

    def shut_down(self) -> None:
        type(self).shut += 1


def test_a_self_test_that_cannot_run_ends_vllm_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "check_install", lambda: "0")
    monkeypatch.setattr(core_module, "VllmCore", _StartedCore)
    for name in ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")  # they are set for the process, and go with the test
    with pytest.raises(SetupError, match=r"fails in the self-test on .*: MemoryError: no room"):
        loading.vllm_target(VerifierConfig(model="bundled", engine="vllm"), "tiny")
    assert _StartedCore.shut == 1
