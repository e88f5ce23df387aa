"""What a draft runs on. Oracle: onnxruntime itself, and the CPU's tokens by the usual way."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgespec.config import AgentConfig, ConfigError, DraftSection, load_config
from edgespec.config.setup_error import SetupError
from edgespec.core.device.memory import MachineMemory
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import model_drafter
from edgespec.device.build import load_drafter
from edgespec.device.drafters import providers
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.providers import (
    EXECUTION,
    candidates,
    execution_providers,
    why_not_loadable,
)

THERE = [name for name, one in EXECUTION.items() if one in ort.get_available_providers()]
ABSENT = [name for name in EXECUTION if name not in THERE]


def test_the_probe_is_a_graph_that_onnx_accepts() -> None:
    model = onnx.load_from_string(providers._one_node())
    onnx.checker.check_model(model, full_check=True)
    assert [node.op_type for node in model.graph.node] == ["Add"]


def test_the_cpu_runs_one_node() -> None:
    assert why_not_loadable("cpu") is None
    assert candidates("cpu") == ("cpu",)
    assert execution_providers("cpu") == ("CPUExecutionProvider",)
    assert execution_providers("dml") == ("DmlExecutionProvider", "CPUExecutionProvider")


@pytest.mark.parametrize("name", ABSENT)
def test_what_was_not_built_in_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(DraftModelError) as refused:
        candidates(name)
    said = str(refused.value)
    assert said.startswith(f"provider {name} cannot be used: this onnxruntime {ort.__version__}")
    assert f"without {EXECUTION[name]}" in said
    assert "here there are: " in said
    assert said.endswith("cpu")


def test_what_is_built_in_and_does_not_run_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """An onnxruntime that has CUDA on a machine that has not: it would fall back in silence."""
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(EXECUTION.values()))

    def fallen_back(provider: str) -> str | None:
        return None if provider == EXECUTION["cpu"] else f"{provider} fell back to the CPU"

    monkeypatch.setattr(providers, "_run_one_node", fallen_back)
    with pytest.raises(DraftModelError, match=r"cuda cannot be used: CUDA.* fell back .* are: cpu"):
        candidates("cuda")
    assert candidates("auto") == ("cpu",)


def test_auto_tries_all_that_run_but_what_compiles_for_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = {"cuda"}
    why = {name: "no driver" if name in broken else None for name in EXECUTION}
    monkeypatch.setattr(providers, "why_not_loadable", why.__getitem__)
    assert candidates("auto") == ("cpu", "dml", "coreml", "openvino")
    assert candidates("tensorrt") == ("cpu", "tensorrt")


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_provider_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(EXECUTION.values()))
    why = why_not_loadable("cuda")
    assert why is not None
    assert "CUDAExecutionProvider" in why


def _tokens(provider: str) -> list[int]:
    said: list[str] = []
    config = AgentConfig(draft=DraftSection(provider=provider))
    drafter = load_drafter(config, say=said.append)
    assert drafter is not None
    try:
        prompt = (5, 9, 200, 31)
        drafter.begin(len(prompt), SamplingParams())
        found: list[int] = []
        keep, feed = 0, list(prompt)
        for _ in range(12):
            (guess,) = drafter.step(keep, feed, 1)
            found.append(guess.token)
            keep, feed = keep + len(feed), [guess.token]
        assert said == (["the draft runs on cpu"] if provider == "auto" else [])
        return found
    finally:
        drafter.close()


@pytest.mark.skipif(len(THERE) > 1, reason="auto takes an accelerator here")
def test_auto_drafts_what_the_cpu_drafts() -> None:
    assert _tokens("auto") == _tokens("cpu")


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_draft_on_what_is_not_there_says_so() -> None:
    with pytest.raises(SetupError, match=r"provider cuda cannot be used: .* here there are: .*cpu"):
        _tokens("cuda")


def test_auto_tries_nothing_that_there_is_no_memory_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "candidates", lambda name: ("cpu", "openvino"))
    monkeypatch.setattr(model_drafter, "machine_memory", lambda: MachineMemory(1 << 30, 1 << 20, 0))
    said: list[str] = []
    config = AgentConfig(draft=DraftSection(provider="auto"))
    drafter = load_drafter(config, say=said.append)
    assert drafter is not None
    drafter.close()
    assert said[0].startswith("openvino is not tried: it may take ")
    assert said[0].endswith(" MiB to load this draft, and 1 MiB are free")
    assert said[1:] == ["the draft runs on cpu"]


class Failing:
    """A session of which the run after ``good`` ones fails, once, as on an accelerator without
    memory."""

    def __init__(self, session: ort.InferenceSession, good: int) -> None:
        self._session, self.left = session, good

    def run_with_iobinding(self, binding: object) -> None:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("out of memory on the device")
        self._session.run_with_iobinding(binding)


def fed(drafter: OnnxDrafter, *steps: tuple[int, int]) -> None:
    """Each of ``steps``: how many tokens are kept, and up to which the text is fed."""
    tokens = [(7 * position) % 400 for position in range(150)]
    for keep, stop in steps:
        drafter.step(keep, tokens[keep:stop], 2)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_a_run_that_fails_in_the_middle_leaves_a_draft_that_is_right(good: int) -> None:
    """Oracle: a draft of which nothing failed, and that was fed alike afterwards."""
    found = []
    for fails in (True, False):
        drafter = load_drafter(AgentConfig())
        assert isinstance(drafter, OnnxDrafter)
        assert drafter._session is not None
        drafter.begin(1, SamplingParams())
        if fails:
            drafter._session = Failing(drafter._session, good)
            with pytest.raises(RuntimeError, match="out of memory"):
                fed(drafter, (0, 100), (100, 101), (60, 130), (130, 131), (131, 132))
            drafter.begin(1, SamplingParams())
        fed(drafter, (0, 100), (70, 140), (140, 141))
        found.append(drafter.logits.copy())
        drafter.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_a_budget_is_planned_for_the_cpu() -> None:
    draft = DraftSection(provider="auto", memory_budget="900MiB")
    with pytest.raises(SetupError, match=r"draft\.provider is auto, but a memory budget"):
        load_drafter(AgentConfig(draft=draft))


def test_an_unknown_provider_is_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match="provider is 'npu', but must be one of auto, cpu, cuda"):
        load_config(AgentConfig, None, {"draft.provider": "npu"})
