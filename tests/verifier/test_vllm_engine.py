"""The real vLLM behind the real daemon. Skipped where vLLM is not installed: ``make unit-vllm``.

Oracle: this project's own engine on the same model, in float32. The suite's tests of the same code
on a stand-in are in ``test_vllm.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.device.build import build_agent
from edgespec.models.folders import model_info
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.verifier.build import load_target
from edgespec.verifier.vllm.core import VllmCore
from edgespec.verifier.vllm.loading import self_test
from edgespec.verifier.vllm.target import VllmTarget
from edgespec.verifier.vllm.versions import check_install
from tests.api.test_end_to_end import collect, tokens_of
from tests.kit.live_verifier import serve_toy, start, wait_until_ready
from tests.verifier.speculators import BLOCKS, SPECULATORS, write_speculator


def _find_missing() -> str:
    try:
        check_install()
    except SetupError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(_find_missing()), reason=_find_missing())]
PROMPT = "It was a cold morning in November, and the old man"
GREEDY = SamplingParams(max_tokens=100)
SAMPLED = replace(
    GREEDY,
    temperature=0.9,
    top_k=40,
    top_p=0.9,
    min_p=0.02,
    repetition_penalty=1.2,
    frequency_penalty=0.3,
    presence_penalty=0.1,
    seed=9,
)
WEIGHTS, RANK = "model.safetensors", 4
SMALL = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    options = ("--engine", "vllm", "--model", "bundled", "--port", "0", "--set", "log_level=error")
    with wait_until_ready(start("verifier", *options, "--", *SMALL)) as (found, _):
        yield found


def _agent(address: str, draft: str, width: int = 1) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="bundled",
        draft=DraftSection(model=draft),
        policy=PolicySection(width=width),
    )


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_texts_are_those_of_the_native_engine(address: str, params: SamplingParams) -> None:
    native = load_target(VerifierConfig(model="bundled", canonical=False))
    async with serve_toy(native) as (other, _), build_agent(_agent(other, "none")) as agent:
        expected = tokens_of(await collect(agent, params, PROMPT))
    for draft, width in (("none", 1), ("lookup", 1), ("random", 3)):
        async with build_agent(_agent(address, draft, width)) as agent:
            assert tokens_of(await collect(agent, params, PROMPT)) == expected, draft


def _adapter(folder: Path, merged: Path) -> None:
    """Write a random adapter in PEFT's format to ``folder``, and the merged model to ``merged``."""
    bundled = resolve_source("bundled", Purpose.TARGET).folder
    shutil.copytree(bundled, merged)
    weights = {name: one.float() for name, one in load_file(bundled / WEIGHTS).items()}
    draw = torch.Generator().manual_seed(3)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if not name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight")):
            continue
        height, width = weight.shape
        a = torch.randn((RANK, width), generator=draw) / width**0.5
        b = torch.randn((height, RANK), generator=draw) / RANK**0.5
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        weights[name] = weight + b @ a  # lora_alpha is r
    save_file(weights, merged / WEIGHTS, metadata={"format": "pt"})
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Serve a verifier with an adapter; yield its address and the folder of the merged model."""
    folder = tmp_path_factory.mktemp("adapter")
    _adapter(folder / "sql", folder / "merged")
    options = ("--engine", "vllm", "--model", "bundled", "--port", "0", "--set", "log_level=error")
    flags = ("--lora-modules", f"sql={folder / 'sql'}")
    with wait_until_ready(start("verifier", *options, "--", *SMALL, *flags)) as (found, _):
        yield found, folder / "merged"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_texts_of_an_adapter_are_those_of_the_merged_model(
    adapted: tuple[str, Path], params: SamplingParams
) -> None:
    """The model's own generations run beside them, so that steps hold both."""
    address, merged = adapted
    expected = {}
    for name, model in (("", "bundled"), ("sql", str(merged))):
        native = load_target(VerifierConfig(model=model, canonical=False))
        async with serve_toy(native) as (other, _), build_agent(_agent(other, "none")) as agent:
            expected[name] = tokens_of(await collect(agent, params, PROMPT))
    assert expected[""] != expected["sql"]
    for draft in ("none", "lookup"):
        async with (
            build_agent(_agent(address, draft)) as base,
            build_agent(replace(_agent(address, draft), model="sql")) as sql,
        ):
            texts = await asyncio.gather(
                collect(base, params, PROMPT), collect(sql, params, PROMPT)
            )
            assert [tokens_of(one) for one in texts] == [expected[""], expected["sql"]], draft


def test_an_adapter_that_vllm_cannot_load_is_an_error(tmp_path: Path) -> None:
    _adapter(tmp_path / "sql", tmp_path / "merged")
    flags = ("--lora-modules", f"sql={tmp_path / 'sql'}", "--max-lora-rank", "1")
    options = ("--engine", "vllm", "--port", "0")
    with start("verifier", *options, "--", *SMALL, *flags) as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "vLLM cannot load the adapter" in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--no-such-flag",), "vLLM rejects the flags --no-such-flag"),
        (
            ("--spec-method", "dspark", "--spec-model", "x", "--spec-tokens", "4"),
            "the method 'dspark' is not supported: vLLM's model runner",
        ),
        (
            ("--speculative-config", '{"method": "oracle", "num_speculative_tokens": 3}'),
            "the method 'oracle' is not supported: vLLM does not have it; supported are ngram,",
        ),
        (("--enforce-eager", "--gpu-memory-utilization", "0.9999"), "is less than desired"),
        (
            (
                *("--enforce-eager", "--gpu-memory-utilization", "0.02"),
                *("--spec-method", "draft_model", "--spec-tokens", "3", "--spec-model"),
                str(resolve_source("bundled", Purpose.DRAFT).folder),
            ),
            "both models and the KV cache have to fit into what --gpu-memory-utilization",
        ),
    ],
)
def test_what_vllm_cannot_do_is_an_error_with_the_reason(flags: tuple[str, ...], why: str) -> None:
    with start("verifier", "--engine", "vllm", "--port", "0", "--", *flags) as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "error: " in said
    assert why in said


async def test_a_verifier_whose_vllm_has_a_draft_model(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's worker is a process of its own; the generations equal those without the draft
    model."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    draft = {"method": "draft_model", "model": str(resolve_source("bundled", Purpose.DRAFT).folder)}
    settings = json.dumps(draft | {"num_speculative_tokens": 3})
    options = ("--engine", "vllm", "--model", "bundled", "--port", "0", "--set", "log_level=error")
    flags = (*SMALL, "--speculative-config", settings)
    texts: list[list[list[int]]] = []
    with wait_until_ready(start("verifier", *options, "--", *flags)) as (own, _):
        for one, kind in ((address, "none"), (own, "none"), (own, "lookup")):
            async with build_agent(_agent(one, kind)) as agent:
                found = [await collect(agent, params, PROMPT) for params in (GREEDY, SAMPLED)]
            texts.append([tokens_of(text) for text in found])
    assert texts[1] == texts[0]
    assert texts[2] == texts[0]


@pytest.mark.filterwarnings("ignore")  # vLLM's own warnings: it is loaded in this process
@pytest.mark.parametrize("kind", ["Mamba2", "GraniteMoeHybrid", "Qwen3Next"])
def test_models_with_recurrent_layers_are_refused(kind: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=f"{kind}ForCausalLM has recurrent layers"):
        VllmCore(str(tmp_path), VerifierConfig(max_model_len=128), SMALL)


@pytest.mark.filterwarnings("ignore")  # vLLM's own warnings: it is loaded in this process
def test_a_step_that_fails_leaves_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has booked the rows of such a step, and would share them by prefix."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    flags = (*SMALL, "--block-size", "32", "--distributed-executor-backend", "uni")
    core = VllmCore(str(resolve_source("bundled", Purpose.TARGET).folder), VerifierConfig(), flags)
    info = model_info(resolve_source("bundled", Purpose.TARGET).folder)
    target = VllmTarget(core, info, 8, max_nodes=core.max_drafts, max_rows=core.max_rows)
    runner = core._core.model_executor.driver_worker.worker.model_runner
    prompt = [17 * place % info.vocabulary_size for place in range(200)]

    def first_tokens(key: str) -> list[int]:
        text, cached = list(prompt), 0
        target.open(key, len(prompt), GREEDY, prompt)
        while len(text) < len(prompt) + 4:
            feed = tuple(text[cached : cached + 40])
            whole = cached + len(feed) == len(text)
            while True:
                with contextlib.suppress(RuntimeError):
                    (result,) = target.forward([PassRequest(key, cached, feed, sample=whole)])
                    break
            cached += len(feed)
            text += result.targets
        target.close(key)
        return text[len(prompt) :]

    try:
        expected = first_tokens("undisturbed")
        assert core._core.reset_prefix_cache()
        for name in ("execute_model", "_sample"):
            for failing in (2, 5):
                inner, calls = getattr(runner, name), itertools.count(1)

                def fail(
                    *given: Any,
                    inner: Any = inner,
                    calls: Iterator[int] = calls,
                    failing: int = failing,
                    **named: Any,
                ) -> Any:
                    if next(calls) == failing:
                        raise RuntimeError("out of memory")
                    return inner(*given, **named)

                setattr(runner, name, fail)
                assert first_tokens("disturbed") == expected, (name, failing)
                setattr(runner, name, inner)
                assert first_tokens("later") == expected, (name, failing)
                assert core._core.reset_prefix_cache()
    finally:
        core.shut_down()


OWN, LENGTH, SESSIONS = 4, 64, 8


@dataclass
class _Played:
    """The outcome of a run of all sessions."""

    texts: list[list[int]] = field(default_factory=list)
    passes: int = 0
    own: list[int] = field(default_factory=lambda: [0, 0])
    device: list[int] = field(default_factory=lambda: [0, 0])
    """Tokens accepted and proposed."""


class _Playing:
    """One session. Its drafts are ``"own"``, a ``"device"``'s (70 % right), or none."""

    def __init__(self, target: VllmTarget, number: int, params: SamplingParams, by: str) -> None:
        size = target.info.vocabulary_size
        self.key, self.by = f"session {number}", by
        self.prompt = [noise_bits(number, place, 0) % size for place in range(12)]
        self.text, self.cached, self._size = list(self.prompt), 0, size
        self.guesses: tuple[int, ...] = ()
        self._chance = random.Random(number)
        target.open(self.key, 12, replace(params, seed=number), self.prompt)

    @property
    def answer(self) -> list[int]:
        return self.text[12 : 12 + LENGTH]

    def request(self, known: Sequence[int]) -> PassRequest:
        chain = self.guesses if self.by == "own" else ()
        if self.by == "device" and self.cached:
            done = len(self.text) - 12
            chain = tuple(
                token if self._chance.random() < 0.7 else (token + 1) % self._size
                for token in known[done : done + OWN]
            )
        parents = tuple(range(-1, len(chain) - 1))
        return PassRequest(self.key, self.cached, tuple(self.text[self.cached :]), chain, parents)

    def record(self, request: PassRequest, targets: Sequence[int], guesses: tuple[int, ...]) -> int:
        right = 0
        while right < len(request.tokens) and request.tokens[right] == targets[right]:
            right += 1
        self.cached, self.guesses = len(self.text) + right, guesses
        self.text += targets[: right + 1]
        return right


def _play(
    target: VllmTarget,
    params: SamplingParams,
    by: Sequence[str],
    known: Sequence[Sequence[int]] = (),
    seed: int | None = None,
) -> _Played:
    """Run all sessions to their end. With ``seed`` some sessions pause in each pass, and some
    passes request no proposals."""
    chance, played = random.Random(seed), _Played()
    sessions = [_Playing(target, n, params, by[n % len(by)]) for n in range(SESSIONS)]
    while unfinished := [one for one in sessions if len(one.answer) < LENGTH]:
        part, steps = unfinished, OWN if "own" in by else 0
        if seed is not None:
            part = [one for one in unfinished if chance.random() < 0.7] or unfinished[:1]
            steps *= chance.random() < 0.8
        target.set_draft_steps(steps)
        requests = [one.request(known[sessions.index(one)] if known else ()) for one in part]
        for one, request, result in zip(part, requests, target.forward(requests), strict=True):
            assert len(result.guesses) <= steps
            count = played.own if one.by == "own" else played.device
            count[0] += one.record(request, result.targets, result.guesses)
            count[1] += len(request.tokens)
        played.passes += 1
    for one in sessions:
        target.close(one.key)
    played.texts = [one.answer for one in sessions]
    return played


# N-grams come last: they import llvmlite, and after that vLLM cannot be started again in one
# process.
@pytest.fixture(scope="module", params=[*SPECULATORS[1:], SPECULATORS[0]])
def speculating(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, VllmTarget]]:
    """Return a target with a speculator of vLLM's. It has 20 blocks of 32 tokens, and 8 sessions
    need 24."""
    settings = write_speculator(request.param, tmp_path_factory.mktemp("heads") / "head", OWN)
    flags = (
        *SMALL,
        *("--block-size", "32", "--num-gpu-blocks-override", "20"),
        *("--distributed-executor-backend", "uni"),
        *("--speculative-config", json.dumps(settings)),
    )
    folder = resolve_source("bundled", Purpose.TARGET).folder
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patched.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        patched.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        core = VllmCore(str(folder), VerifierConfig(max_model_len=256), flags)
        yield (
            request.param,
            VllmTarget(
                core,
                model_info(folder),
                SESSIONS,
                max_nodes=core.max_drafts,
                max_rows=core.max_rows,
                speculator_tokens=core.speculator.tokens,
                speculator_blocks=core.speculator.blocks,
            ),
        )
        core.shut_down()


@pytest.mark.filterwarnings("ignore")  # vLLM's own warnings: it is loaded in this process
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_whichever_end_drafts(
    speculating: tuple[str, VllmTarget], temperature: float
) -> None:
    name, target = speculating
    assert target.pass_shape.speculator_tokens == OWN
    assert target.pass_shape.speculator_blocks is (name in BLOCKS)
    params = replace(GREEDY, temperature=temperature, frequency_penalty=0.1 * (temperature > 0))
    before = target.steps
    plain = _play(target, params, ["none"])
    own = _play(target, params, ["own"])
    both = _play(target, params, ["own", "device"], plain.texts)
    ragged = _play(target, params, ["own", "device"], plain.texts, seed=7)
    for played in (own, both, ragged):
        assert played.texts == plain.texts
        assert played.own[1] > 0
    # Random heads are right about these texts by luck alone.
    if name == "draft_model":
        assert own.passes < 0.7 * plain.passes
        assert own.own[0] > 0.2 * own.own[1]
    if name == "pard":  # the first of each block is that of the draft model
        assert own.passes < 0.9 * plain.passes
        assert own.own[0] > 0.1 * own.own[1]
    passes = sum(one.passes for one in (plain, own, both, ragged))
    assert target.steps - before > passes + 20, (
        "sessions lose their cache to others again and again"
    )


@pytest.mark.filterwarnings("ignore")  # vLLM's own warnings: it is loaded in this process
def test_the_self_test_looks_at_vllms_own_proposals(speculating: tuple[str, VllmTarget]) -> None:
    _, target = speculating
    assert self_test(target) == []
