"""vLLM as a target, on a stand-in for vLLM's engine: nothing of vLLM is needed here.

Oracle: the toy model's text by the scalar specification. Whatever is drafted, and whatever the
engine leaves out, computes too far or throws away, the text is that one, and each pass is answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import (
    CapacityError,
    ModelOutputError,
    PassRequest,
    PassResult,
    TargetLostError,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import score_token
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.engines.vllm import core as core_module
from edgespec.verifier.engines.vllm import loading
from edgespec.verifier.engines.vllm.core import VllmCore, VllmOptions
from edgespec.verifier.engines.vllm.loading import self_test
from edgespec.verifier.engines.vllm.target import KnownText, Stepped, VllmTarget, Wanted
from tests.shell.fake_vllm import FakeText, FakeVllm, fake_target
from tests.shell.live_verifier import serving, toy_text
from tests.shell.test_end_to_end import collect, config, tokens

PROMPT = ToyTokenizer().encode("the quick brown fox jumps")

LENGTH = 48

GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)

SAMPLED = SamplingParams(
    max_tokens=LENGTH,
    temperature=0.9,
    top_k=20,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=0.5,
    presence_penalty=0.1,
    logit_bias={3: 1.5},
    seed=11,
    ignore_eos=True,
)

PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])

Guess = Callable[[list[int], int], Sequence[int]]

"""Drafts behind so many tokens of the answer, which is given."""


class Session:
    """Plays the part of a ``VerifySession``: commits, and asks for the next pass."""

    def __init__(self, target: VllmTarget, key: str, params: SamplingParams, guess: Guess) -> None:
        self.target, self.key, self.params, self._guess = target, key, params, guess
        self.answer = toy_text(PROMPT, params)
        self.text, self.cached, self.passes = list(PROMPT), 0, 0
        target.open(key, len(PROMPT), params, tuple(PROMPT))

    @property
    def done(self) -> int:
        return len(self.text) - len(PROMPT)

    def request(self, chunk: int = 1 << 20, logprobs: int = 0) -> PassRequest:
        feed = tuple(self.text[self.cached : self.cached + chunk])
        if self.cached + len(feed) < len(self.text):
            return PassRequest(self.key, self.cached, feed, sample=False)
        chain = tuple(self._guess(self.answer, self.done)) if self.done else ()
        parents = tuple(range(-1, len(chain) - 1))
        return PassRequest(self.key, self.cached, feed, chain, parents, logprobs=logprobs)

    def take(self, request: PassRequest, result: PassResult) -> None:
        assert result.key == self.key
        if not request.sample:
            assert result.targets == ()
            self.cached += len(request.feed)
            return
        self.passes += 1
        assert len(result.targets) == 1 + len(request.tokens)
        right = 0
        while right < len(request.tokens) and request.tokens[right] == result.targets[right]:
            right += 1
        self.target.keep(self.key, range(right))
        self.cached = len(self.text) + right
        self.text += result.targets[: right + 1]

    def check(self) -> None:
        assert self.text[len(PROMPT) :][:LENGTH] == self.answer


def _right(answer: list[int], done: int) -> Sequence[int]:
    return answer[done : done + 5]


def _wrong(answer: list[int], done: int) -> Sequence[int]:
    return [(token + 1) % TOY_MODEL.vocabulary_size for token in answer[done : done + 3]]


def _late(answer: list[int], done: int) -> Sequence[int]:
    return answer[max(0, done - 2) : done + 2]


def _mixed(answer: list[int], done: int) -> Sequence[int]:
    return [*answer[done : done + done % 4], done % TOY_MODEL.vocabulary_size]


GUESSES: dict[str, Guess] = {
    "none": lambda answer, done: (),
    "right": _right,
    "wrong": _wrong,
    "late": _late,
    "mixed": _mixed,
}


@PARAMS
@pytest.mark.parametrize("whims", [0.0, 0.3])
@pytest.mark.parametrize("kind", GUESSES)
def test_the_text_is_the_targets_own_whatever_is_drafted(
    kind: str, whims: float, params: SamplingParams
) -> None:
    engine = FakeVllm(whims, seed=len(kind))
    session = Session(fake_target(engine), "a", params, GUESSES[kind])
    while session.done < LENGTH:
        request = session.request(chunk=7)
        session.take(request, session.target.forward([request])[0])
    session.check()
    if kind == "right":
        assert session.passes <= 2 + LENGTH // 6
    if kind in ("none", "wrong"):
        assert session.passes == LENGTH


def test_scores_are_those_of_the_tokens() -> None:
    session = Session(fake_target(FakeVllm(0.3, seed=2)), "a", GREEDY, _right)
    while session.done < LENGTH:
        request = session.request(chunk=4, logprobs=3)
        (result,) = session.target.forward([request])
        if request.sample:
            for row, (score, token) in enumerate(zip(result.scores, result.targets, strict=True)):
                before = [*session.text, *request.tokens[:row]]
                assert score == score_token(TOY_MODEL.logits(before), token, 3)
        session.take(request, result)
    session.check()


def test_tokens_that_came_without_scores_are_asked_for_again() -> None:
    """vLLM computes a prompt further than the pass wished, and has a token before it is asked."""
    engine = FakeVllm()
    session = Session(fake_target(engine), "a", GREEDY, GUESSES["none"])
    request = session.request(chunk=5)
    engine.texts.clear()
    session.take(request, session.target.forward([request])[0])
    text = engine.texts["a"]
    sequence = session.target._sequences["a"].known
    assert sequence is not None
    text.computed = len(text.tokens)
    grown = engine.choose(text, ())
    text.tokens.append(grown)
    sequence.take(Stepped(text.computed, (grown,), (grown,)))
    request = session.request(logprobs=2)
    (result,) = session.target.forward([request])
    assert result.targets == (grown,)
    assert result.scores[0].top[0][0] == grown
    assert engine.texts["a"].tokens == [*PROMPT, grown]


def test_what_is_known_answers_without_a_step() -> None:
    """The worked example of ``known_text.py``."""
    a, b, c, d, e, f = range(6)
    known = KnownText([a])
    known.take(Stepped(1, (b, c), (b, c)))
    request = PassRequest("s", 0, (a,), (b, c, d, e), (-1, 0, 1, 2))
    assert known.answer(request) == Wanted(3, (d, e))
    known.take(Stepped(4, (d, f), (d, f, a)))
    assert known.answer(request) == PassResult("s", (b, c, d, f, a))
    late = PassRequest("s", 1, (b, c), (e,), (-1,))
    assert known.answer(late) == PassResult("s", (d, e))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (PassRequest("s", 0, (1, 2, 3), (4, 5), (-1, -1)), r"'s': parents are \(-1, -1\)"),
        (PassRequest("s", 0, (1, 2, 3, 4)), "'s': a prefix of 4 tokens, but 3 are known"),
        (PassRequest("s", 1, (2, 9)), "'s': fed tokens differ"),
        (PassRequest("s", 0, (1, 2)), "'s': 2 tokens are before the 3 of the opening"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(request_: PassRequest, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        KnownText([1, 2, 3]).answer(request_)


@PARAMS
async def test_devices_are_served_as_by_any_target(params: SamplingParams) -> None:
    """Over gRPC, with device drafts in trees: the passes hold chains, no longer than allowed."""
    engine = FakeVllm(0.1)
    target = fake_target(engine)
    ids = ToyTokenizer().encode("the quick brown fox")
    async with serving(target) as (address, verifier):
        limits = verifier.engine.limits
        assert limits.max_nodes_per_pass == target.pass_shape.max_nodes
        async with build_agent(config(address, "toy", width=2)) as agent:
            assert tokens(await collect(agent, params)) == toy_text(ids, params)
    assert engine.texts == {}
    assert max(len(one.drafts) for step in engine.steps for one in step.values()) > 0


def test_the_self_test_lets_a_right_engine_in() -> None:
    engine = FakeVllm(0.2, seed=3)
    assert self_test(fake_target(engine)) == []
    assert engine.texts == {}


class _ShiftedNoise(FakeVllm):
    """Chooses behind a draft as if the draft were not there: one position too early."""

    def choose(self, text: FakeText, path: Sequence[int]) -> int:
        return super().choose(text, path[:-1])


class _Believing(FakeVllm):
    """Takes every draft for right."""

    def targets(self, text: FakeText, drafts: Sequence[int]) -> tuple[int, ...]:
        return (*drafts, self.choose(text, drafts))


class _Deaf(FakeVllm):
    """Never looks at a draft."""

    def run(self, key: str, text: FakeText, wanted: Wanted) -> Stepped:
        return super().run(key, text, Wanted(wanted.rows, (), wanted.logprobs))


class _OwnSampler(FakeVllm):
    """Does not know this project's parameters."""

    def choose(self, text: FakeText, path: Sequence[int]) -> int:
        return super().choose(
            FakeText(text.tokens, text.prompt_length, SamplingParams(seed=1)), path
        )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (_ShiftedNoise, "texts differ with right drafts"),
        (_Believing, "texts differ with wrong drafts"),
        (_Deaf, "right drafts of greedy texts save no steps"),
        (_OwnSampler, "a bias of 10000 on token"),
    ],
)
def test_the_self_test_finds_what_is_wrong(kind: type[FakeVllm], why: str) -> None:
    # Other tokens than in the middle, so that no bias is needed to see one.
    failures = self_test(fake_target(kind(model=ToyModel(64, order=3, sharpness=3.0))))
    assert why in "; ".join(failures)


_right_chain = GUESSES["right"]


def test_a_session_without_numbers_fails_alone() -> None:
    engine = FakeVllm()
    target = fake_target(engine)
    good, bad = (Session(target, key, GREEDY, _right_chain) for key in ("good", "bad"))
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
    session = Session(fake_target(engine), "a", GREEDY, _right_chain)

    def fail(*_: object) -> None:
        raise TargetLostError("gone")

    monkeypatch.setattr(engine, "reset", fail)
    monkeypatch.setattr(engine, "run", lambda *_: 1 // 0)
    with pytest.raises(TargetLostError, match="gone"):
        session.target.forward([session.request()])
    session.target.close("a")


def test_an_engine_without_room_is_not_asked_for_ever() -> None:
    session = Session(fake_target(FakeVllm(whims=1.0)), "a", GREEDY, _right_chain)
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
