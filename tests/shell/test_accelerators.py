"""Drafts on the accelerators that are installed here, where there are any. Oracle: the same draft
on the CPU, token for token with whole numbers as weights hold them, else within rounding.

OpenVINO's provider (``pip install onnxruntime-openvino`` in an environment of its own) runs on any
x86 processor, so it can be tried without an accelerator.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.config import AgentConfig, DraftSection
from edgespec.core.device.memory import KvType
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_drafter
from edgespec.device.drafters.foreign_drafter import (
    LARGEST_DIFFERENCE,
    ForeignDrafter,
    relative_difference,
)
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.runtime_session import EXECUTION, why_not_loadable
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info
from tests.shell.foreign_graphs import Style, concatenating_graph, write_folder
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, write_checkpoint

THERE = [
    name for name in EXECUTION if name not in ("cpu", "tensorrt") and why_not_loadable(name) is None
]
TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, VOCABULARY_SIZE, 64)]

pytestmark = pytest.mark.skipif(
    not THERE, reason=f"no accelerator, e.g. {why_not_loadable('openvino')}"
)
each = pytest.mark.parametrize("provider", THERE or ["none"])


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("source") / "tiny")


def load(folder: Path | str, provider: str, *, said: list[str] | None = None) -> Drafter:
    config = AgentConfig(draft=DraftSection(model=str(folder), provider=provider))
    lines: list[str] = [] if said is None else said
    drafter = load_drafter(config, say=lines.append)
    assert drafter is not None
    return drafter


def greedy(drafter: Drafter, count: int = 40) -> list[int]:
    """With a rollback of three tokens at every fifth step."""
    drafter.begin(5, SamplingParams())
    text, keep, drafted = TOKENS[:20], 0, list[int]()
    for at in range(count):
        token = drafter.step(keep, text[keep:], 2)[0].token
        drafted.append(token)
        keep = len(text)
        text.append(token)
        if at % 5 == 4:
            keep = len(text) - 4
            text[keep:] = TOKENS[at % 30 : at % 30 + 2]
    drafter.close()
    return drafted


@each
@pytest.mark.parametrize("kv_type", [KvType.FLOAT32, KvType.FLOAT16])
def test_an_export_drafts_what_it_drafts_on_the_cpu(
    provider: str, kv_type: KvType, source: Path, tmp_path: Path
) -> None:
    export_draft(source, tmp_path / "draft", model_info(source), bits=32, kv_type=kv_type)
    said: list[str] = []
    drafter = load(tmp_path / "draft", provider, said=said)
    assert isinstance(drafter, OnnxDrafter)
    assert drafter.placement is None or drafter.placement.taken
    assert said[0].startswith(f"the draft runs on {provider}")
    assert greedy(drafter) == greedy(load(tmp_path / "draft", "cpu"))


@each
def test_the_bundled_draft_is_within_rounding_there(provider: str) -> None:
    rows: list[list[NDArray[np.float32]]] = []
    for name in (provider, "cpu"):
        drafter = load("bundled", name)
        assert isinstance(drafter, OnnxDrafter)
        drafter.begin(1, SamplingParams())
        found = []
        for keep, stop in ((0, 30), (30, 31), (12, 40), (40, 41), (41, 64), (3, 4)):
            drafter.step(keep, TOKENS[keep:stop], 1)
            found.append(drafter.logits[: drafter.manifest.proposable].copy())
        twin = drafter.twin()  # another text beside it
        twin.begin(1, SamplingParams())
        twin.step(0, TOKENS[30:50], 1)
        found.append(twin.logits[: drafter.manifest.proposable].copy())
        drafter.close()
        rows.append(found)
    for there, here in zip(*rows, strict=True):
        assert relative_difference(there, here) < LARGEST_DIFFERENCE


@each
@pytest.mark.parametrize("half", [False, True])
def test_a_graph_of_others_drafts_what_it_drafts_on_the_cpu(
    provider: str, half: bool, tmp_path: Path
) -> None:
    graph = concatenating_graph(style=Style(half=half))
    write_folder(tmp_path / "foreign", {"onnx/model.onnx": graph})
    drafter = load(tmp_path / "foreign", provider)
    assert isinstance(drafter, ForeignDrafter)
    assert drafter.placement is None or drafter.placement.taken
    assert greedy(drafter) == greedy(load(tmp_path / "foreign", "cpu"))
