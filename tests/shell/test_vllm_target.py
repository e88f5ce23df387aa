"""vLLM as a target, on a stand-in for vLLM's engine: nothing of vLLM is needed here.

Oracle: the toy model's text by the scalar specification. Whatever is drafted, and whatever the
engine leaves out, computes too far or throws away, the text is that one, and each pass is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from edgespec.core.ports import PassRequest, PassResult
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import score_token
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
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


# --- the pure part ----------------------------------------------------------------------------


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


# --- the service ------------------------------------------------------------------------------


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


# --- before anybody is served -----------------------------------------------------------------


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
