"""What a draft runs on. Oracle: onnxruntime itself, and the CPU's tokens by the usual way."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edgespec.config import AgentConfig, ConfigError, DraftSection, load_config
from edgespec.config.setup_error import SetupError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_drafter
from edgespec.device.drafters import runtime_session as providers
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.runtime_session import (
    EXECUTION,
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
    assert execution_providers("cpu") == ("CPUExecutionProvider",)


@pytest.mark.parametrize("name", ABSENT)
def test_what_was_not_built_in_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(DraftModelError) as refused:
        execution_providers(name)
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
        execution_providers("cuda")


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_provider_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "get_available_providers", lambda: list(EXECUTION.values()))
    why = why_not_loadable("cuda")
    assert why is not None
    assert "CUDAExecutionProvider" in why


def _tokens(provider: str) -> list[int]:
    drafter = load_drafter(AgentConfig(draft=DraftSection(provider=provider)))
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
        return found
    finally:
        drafter.close()


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_draft_on_what_is_not_there_says_so() -> None:
    with pytest.raises(SetupError, match=r"provider cuda cannot be used: .* here there are: .*cpu"):
        _tokens("cuda")


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
    draft = DraftSection(provider="cuda", memory_budget="900MiB")
    with pytest.raises(SetupError, match=r"draft\.provider is cuda, but a memory budget"):
        load_drafter(AgentConfig(draft=draft))


def test_an_unknown_provider_is_refused_by_the_configuration() -> None:
    with pytest.raises(ConfigError, match="provider is 'npu', but must be one of cpu, cuda"):
        load_config(AgentConfig, None, {"draft.provider": "npu"})
