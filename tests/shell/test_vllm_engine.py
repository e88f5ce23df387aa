"""The real vLLM behind the real daemon. Skipped where vLLM is not installed: ``make unit-vllm``.

Oracle: this project's own engine on the same model, in float32. The suite's tests of the same code
on a stand-in are in ``test_vllm.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent
from edgespec.models.folders import Role, model_info, resolve_model
from edgespec.verifier.build import load_target
from edgespec.verifier.engines.vllm.core import VllmCore, VllmOptions
from edgespec.verifier.engines.vllm.loading import check_install
from edgespec.verifier.engines.vllm.target import VllmTarget
from tests.shell.live_verifier import ready, serving, start
from tests.shell.test_end_to_end import collect, tokens


def _missing() -> str:
    try:
        check_install()
    except SetupError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(_missing()), reason=_missing())]
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
    with ready(start("verifier", *options, "--", *SMALL)) as (found, _):
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
    async with (
        serving(native) as (other, _),
        build_agent(_agent(other, "none")) as agent,
    ):
        expected = tokens(await collect(agent, params, PROMPT))
    for draft, width in (("none", 1), ("lookup", 1), ("random", 3)):
        async with build_agent(_agent(address, draft, width)) as agent:
            assert tokens(await collect(agent, params, PROMPT)) == expected, draft


def _adapter(folder: Path, merged: Path) -> None:
    """A random one as PEFT writes it in ``folder``, and the model that it makes in ``merged``."""
    bundled = resolve_model("bundled", Role.TARGET)
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
    """A verifier with an adapter, and its model in one piece."""
    folder = tmp_path_factory.mktemp("adapter")
    _adapter(folder / "sql", folder / "merged")
    options = ("--engine", "vllm", "--model", "bundled", "--port", "0", "--set", "log_level=error")
    flags = ("--lora-modules", f"sql={folder / 'sql'}")
    with ready(start("verifier", *options, "--", *SMALL, *flags)) as (found, _):
        yield found, folder / "merged"


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
async def test_texts_of_an_adapter_are_those_of_the_merged_model(
    adapted: tuple[str, Path], params: SamplingParams
) -> None:
    """With the model's own beside them, so that steps hold both."""
    address, merged = adapted
    expected = {}
    for name, model in (("", "bundled"), ("sql", str(merged))):
        native = load_target(VerifierConfig(model=model, canonical=False))
        async with (
            serving(native) as (other, _),
            build_agent(_agent(other, "none")) as agent,
        ):
            expected[name] = tokens(await collect(agent, params, PROMPT))
    assert expected[""] != expected["sql"]
    for draft in ("none", "lookup"):
        async with (
            build_agent(_agent(address, draft)) as base,
            build_agent(replace(_agent(address, draft), model="sql")) as sql,
        ):
            texts = await asyncio.gather(
                collect(base, params, PROMPT), collect(sql, params, PROMPT)
            )
            assert [tokens(one) for one in texts] == [expected[""], expected["sql"]], draft


def test_an_adapter_that_vllm_cannot_load_is_an_error(tmp_path: Path) -> None:
    _adapter(tmp_path / "sql", tmp_path / "merged")
    flags = ("--lora-modules", f"sql={tmp_path / 'sql'}", "--max-lora-rank", "1")
    options = ("--engine", "vllm", "--port", "0")
    with start("verifier", *options, "--", *SMALL, *flags) as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "vLLM cannot load the adapter" in said


def test_a_flag_that_vllm_does_not_know_is_an_error() -> None:
    with start("verifier", "--engine", "vllm", "--port", "0", "--", "--no-such-flag") as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "vLLM does not take the flags --no-such-flag" in said


def test_too_little_memory_is_said_with_vllms_reason() -> None:
    """Its worker is another process, whose log has it."""
    flags = ("--enforce-eager", "--gpu-memory-utilization", "0.9999")
    with start("verifier", "--engine", "vllm", "--port", "0", "--", *flags) as process:
        _, said = process.communicate()
    assert process.returncode == 1
    assert "error: vLLM cannot load" in (last := said.splitlines()[-1])
    assert "is less than desired" in last


@pytest.mark.filterwarnings("ignore")  # vLLM's own, which is loaded in this process
@pytest.mark.parametrize("kind", ["Mamba2", "GraniteMoeHybrid", "Qwen3Next"])
def test_models_with_recurrent_layers_are_refused(kind: str, tmp_path: Path) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")()
    config.architectures = [f"{kind}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=f"{kind}ForCausalLM has recurrent layers"):
        VllmCore(VllmOptions(str(tmp_path), max_model_len=128, flags=SMALL))


@pytest.mark.filterwarnings("ignore")  # vLLM's own, which is loaded in this process
def test_a_step_that_fails_leaves_nothing_wrong_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has booked the rows of such a step, and would let others share them by prefix."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    flags = (*SMALL, "--block-size", "32", "--distributed-executor-backend", "uni")
    core = VllmCore(VllmOptions(str(resolve_model("bundled", Role.TARGET)), flags=flags))
    info = model_info(resolve_model("bundled", Role.TARGET))
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
