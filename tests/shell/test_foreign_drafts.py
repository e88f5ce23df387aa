"""Drafts on graphs that others exported, and what drafts run on. Oracles: our own exporter's graph
of the same weights, whose greedy tokens must come out; a cache filled anew, from which no history
of rollbacks may differ; messages that name the file, what is wrong with it and what was expected.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.config import AgentConfig, ConfigError, DraftSection, load_config
from edgespec.config.common import SetupError
from edgespec.config.device import PROVIDERS
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import load_drafter
from edgespec.device.drafters.decoder_graph import EXECUTION, CacheTensor
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.onnx_drafter import (
    Behaviour,
    Buffer,
    ForeignDrafter,
    GraphDrafter,
    OnnxDrafter,
    ReslicedCache,
    check_behaviour,
)
from edgespec.device.export.export import export_draft
from edgespec.device.model_drafter import foreign_drafter
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import model_info
from tests.shell.foreign_graphs import (
    Style,
    attending_graph,
    concatenating_graph,
    write_folder,
)
from tests.shell.tiny_checkpoints import CONTEXT_LENGTH, VOCABULARY_SIZE, write_checkpoint

TOKENS = [int(t) for t in np.random.default_rng(5).integers(0, VOCABULARY_SIZE, CONTEXT_LENGTH)]
STYLES = {
    "optimum": Style(),
    "float16": Style(half=True),
    "merged": Style(merged=True),
    "merged-early": Style(merged=True, causal_behind_cache=False),
    "last-row": Style(last_row=True),
    "tokens-first": Style(
        tokens_first=True, past="past_{part}_{layer}", present="present_{part}_{layer}"
    ),
    "no-positions": Style(positions=False),
}
ATTENDING = ("genai", "genai-open", "own")
KINDS = (*STYLES, *ATTENDING)


@pytest.fixture(scope="module")
def own_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("own")
    source = write_checkpoint(root / "source")
    export_draft(source, root / "draft", model_info(source), bits=32)
    return root / "draft"


@pytest.fixture(scope="module")
def folder_of(own_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("foreign")

    def make(kind: str) -> Path:
        folder: Path = root / kind
        if folder.exists():
            return folder
        if kind in STYLES:
            graph = concatenating_graph(style=STYLES[kind])
        else:
            graph = onnx.load(own_folder / "model.onnx")
            if kind != "own":
                graph = attending_graph(graph, open_head_size=kind == "genai-open")
        path = "onnx/model.onnx" if kind in STYLES else "model.onnx"
        external = [path] if kind in ("optimum", "genai") else []
        return write_folder(folder, {path: graph}, external=external)

    return make


def load(folder: Path, context_length: int = 0) -> ForeignDrafter:
    source = find_draft(str(folder))
    return foreign_drafter(source, print, DraftSection(context_length=context_length))


def greedy(drafter: Drafter, count: int = 80) -> list[int]:
    drafter.begin(5, SamplingParams())
    feed, keep, drafted = TOKENS[:5], 0, []
    for _ in range(count):
        token = drafter.step(keep, feed, 3)[0].token
        keep, feed = keep + len(feed), [token]
        drafted.append(token)
    return drafted


def row(drafter: ForeignDrafter) -> NDArray[np.float32]:
    return drafter.logits.copy()


# --- it drafts ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_weights_draft_the_same_tokens(
    kind: str, folder_of: Callable[[str], Path], own_folder: Path
) -> None:
    drafter = load(folder_of(kind))
    assert greedy(drafter) == greedy(OnnxDrafter(own_folder))
    assert drafter.behaviour.in_place == (kind in ATTENDING)
    assert drafter.behaviour.chunks == (kind != "merged-early")
    assert drafter.behaviour.all_rows == (kind not in ("last-row", *ATTENDING))
    halved = "float16" in kind
    assert [one.row_bytes for one in drafter.graph.caches] == [2 * 16 * (2 if halved else 4)] * 4
    drafter.close()
    drafter.close()
    with pytest.raises(ValueError, match="closed"):
        drafter.step(0, [1], 1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_history_of_rollbacks_shows(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Random commits and rollbacks against a second drafter that only ever holds the right tokens,
    fed in the same pieces: equal to the bit."""
    dice = np.random.default_rng(11)
    drafter, fresh = load(folder_of(kind)), load(folder_of(kind))
    drafter.begin(10, SamplingParams())
    cached: list[int] = []
    pieces: list[int] = []  # the lengths at which the tokens held now were fed
    for _ in range(40):
        keep = int(dice.integers(max(0, len(cached) - 9), len(cached) + 1))
        keep = max((end for end in [0, *pieces] if end <= keep), default=0)
        feed = [int(t) for t in dice.integers(0, VOCABULARY_SIZE, int(dice.integers(1, 6)))]
        drafter.step(keep, feed, 1)
        cached = [*cached[:keep], *feed]
        pieces = [*(end for end in pieces if end <= keep), len(cached)]
    fresh.begin(10, SamplingParams())
    for start, end in itertools.pairwise([0, *pieces]):
        fresh.step(start, cached[start:end], 1)
    np.testing.assert_array_equal(row(drafter), row(fresh))


@pytest.mark.parametrize("kind", ["optimum", "genai", "no-positions"])
def test_the_context_ends_where_the_config_says(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    drafter = load(folder_of(kind))
    assert drafter.info.context_length == CONTEXT_LENGTH
    drafter.begin(CONTEXT_LENGTH, SamplingParams())
    assert drafter.step(0, TOKENS, 4)
    with pytest.raises(ValueError, match=f"context length of {CONTEXT_LENGTH}"):
        drafter.step(CONTEXT_LENGTH, [1], 1)
    assert drafter.step(CONTEXT_LENGTH - 1, [1], 1)
    for length in (1, 3, 20):
        short = load(folder_of(kind), context_length=length)
        short.begin(1, SamplingParams())
        short.step(0, TOKENS[:length], 1)
        with pytest.raises(ValueError, match=f"context length of {length}"):
            short.step(length, [1], 1)
    with pytest.raises(ValueError, match=f"context_length is 257.*{CONTEXT_LENGTH}"):
        load(folder_of(kind), context_length=257)


class NoMoreMemory(ReslicedCache):
    """Fails to grow past 40 tokens."""

    def _with_room(self, tensor: CacheTensor, buffer: Buffer, needed: int) -> Buffer:
        if needed > 40:
            raise MemoryError("no more")
        return super()._with_room(tensor, buffer, needed)


def test_without_memory_a_step_fails_and_what_is_kept_stays(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.device.drafters.onnx_drafter.ReslicedCache", NoMoreMemory)
    drafter = load(folder_of("optimum"))
    drafter.begin(30, SamplingParams())
    drafter.step(0, TOKENS[:30], 1)
    before = row(drafter)
    with pytest.raises(MemoryError):
        drafter.step(30, TOKENS[30:60], 1)
    drafter.step(25, TOKENS[25:30], 1)
    np.testing.assert_allclose(row(drafter), before, atol=1e-4)


# --- what is refused ------------------------------------------------------------------------


def damaged(change: Callable[[onnx.GraphProto], None]) -> onnx.ModelProto:
    model = concatenating_graph()
    change(model.graph)
    return model


def rename_input(old: str, new: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
        next(value for value in graph.input if value.name == old).name = new

    return change


def add_input(name: str, *sizes: int) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(sizes)))

    return change


def drop_output(name: str) -> Callable[[onnx.GraphProto], None]:
    def change(graph: onnx.GraphProto) -> None:
        graph.output.remove(next(value for value in graph.output if value.name == name))

    return change


def fix_length(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = 128


def distort_the_past(graph: onnx.GraphProto) -> None:
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(-5.0, np.float32), "factor"))
    past, present = "past_key_values.0.key", "present.0.key"
    for node in graph.node:
        if present in node.output:
            node.input[:] = ["distorted" if name == past else name for name in node.input]
    graph.node.insert(0, helper.make_node("Mul", [past, "factor"], ["distorted"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rename_input("input_ids", "tokens"), r"input 'tokens' \(int64 .* is not known"),
        (rename_input("position_ids", "input_embeds"), "Expected are input_ids, attention_mask"),
        (add_input("past_conv.0", 1, 64, 3), "'past_conv.0'.*cannot be rolled back"),
        (add_input("inputs_embeds", 1, 4, 64), "'inputs_embeds'.*several files"),
        (add_input("encoder_hidden_states", 1, 4, 64), "'encoder_hidden_states'"),
        (add_input("past_key_values.7.key", 1, 2, 3, 16), "inputs are missing: past value of lay"),
        (drop_output("present.1.value"), "outputs are missing: present value of layer 1"),
        (drop_output("logits"), "output 'logits' is missing"),
        (fix_length, "a cache of a fixed length of 128"),
        (distort_the_past, "differs from decoding at once by"),
    ],
)
def test_a_graph_that_cannot_draft_is_refused_by_name(
    change: Callable[[onnx.GraphProto], None], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "bad", {"model.onnx": damaged(change)})
    with pytest.raises(DraftModelError, match=message) as caught:
        load(folder)
    assert str(folder / "model.onnx") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00nonsense", b"version https://git-lfs.github.com"])
def test_a_file_that_is_no_graph_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bad", {})
    (folder / "model.onnx").write_bytes(content)
    with pytest.raises(DraftModelError, match=r"model\.onnx: "):
        load(folder)


def test_what_is_not_finite_is_refused_and_what_is_noisy_is_used() -> None:
    dice = np.random.default_rng(0)
    rows = {t: dice.standard_normal(50).astype(np.float32) for t in range(60)}

    def decode(noise: float) -> Callable[[int, object], NDArray[np.float32]]:
        def rows_of(keep: int, tokens: object) -> NDArray[np.float32]:
            assert isinstance(tokens, tuple)
            exact = np.stack([rows[token] for token in tokens])
            return (exact + noise * dice.standard_normal(exact.shape)).astype(np.float32)

        return rows_of

    assert check_behaviour(decode(0.0), 50) == Behaviour(True, True, all_rows=True)
    assert check_behaviour(decode(0.1), 50).chunks
    assert not check_behaviour(decode(1.0), 50).works
    assert check_behaviour(decode(float("nan")), 50).reason == "its logits are not all finite"


# --- what a draft runs on ---------------------------------------------------------------------

AVAILABLE = ort.get_available_providers()
THERE = [name for name, (first, *_) in EXECUTION.items() if first in AVAILABLE]


def on_provider(provider: str, model: str = "bundled") -> tuple[Drafter, list[str]]:
    said: list[str] = []
    draft = DraftSection(model=model, provider=provider)
    drafter = load_drafter(AgentConfig(draft=draft), say=said.append)
    assert drafter is not None
    return drafter, said


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_provider_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(DraftModelError, match=r"CUDAExecutionProvider.* not in .*CPUExecutionProv"):
        on_provider("cuda")


@pytest.mark.parametrize("provider", [name for name in THERE if name not in ("cpu", "tensorrt")])
def test_an_accelerator_drafts_what_the_cpu_drafts(
    provider: str, own_folder: Path, folder_of: Callable[[str], Path]
) -> None:
    """OpenVINO's (``pip install onnxruntime-openvino`` in an environment of its own) runs on any
    x86 processor."""
    for folder in (own_folder, folder_of("optimum"), folder_of("float16")):
        drafter, said = on_provider(provider, str(folder))
        assert isinstance(drafter, GraphDrafter)
        assert drafter.placement is None or drafter.placement.taken
        assert said[0].startswith(f"the draft runs on {provider}")
        assert greedy(drafter) == greedy(on_provider("cpu", str(folder))[0])
        drafter.close()


class Failing:
    """A session of which the run after ``good`` ones fails, once, as on an accelerator without
    memory."""

    def __init__(self, session: ort.InferenceSession, good: int) -> None:
        self._session, self.left = session, good

    def run_with_iobinding(self, binding: object, options: object = None) -> None:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("out of memory on the device")
        self._session.run_with_iobinding(binding, options)


def fed(drafter: Drafter, *steps: tuple[int, int]) -> None:
    """Each of ``steps``: how many tokens are kept, and up to which the text is fed."""
    for keep, stop in steps:
        drafter.step(keep, TOKENS[keep:stop], 2)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["optimum", "own"])
def test_a_run_that_fails_in_the_middle_leaves_a_draft_that_is_right(
    kind: str, good: int, folder_of: Callable[[str], Path]
) -> None:
    """Oracle: a draft of which nothing failed, and that was fed alike afterwards."""
    found = []
    for fails in (True, False):
        drafter = load(folder_of(kind))
        assert drafter._session is not None
        drafter.begin(1, SamplingParams())
        if fails:
            drafter._session = Failing(drafter._session, good)
            with pytest.raises(RuntimeError, match="out of memory"):
                fed(drafter, (0, 100), (100, 101), (60, 130), (130, 131), (131, 132))
            drafter.begin(1, SamplingParams())
        fed(drafter, (0, 100), (70, 140), (140, 141))
        found.append(row(drafter))
        drafter.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_providers_are_refused_by_the_configuration() -> None:
    draft = DraftSection(provider="cuda", memory_budget="900MiB")
    with pytest.raises(SetupError, match=r"draft\.provider is cuda, but a memory budget"):
        load_drafter(AgentConfig(draft=draft))
    with pytest.raises(ConfigError, match="provider is 'npu', but must be one of cpu, cuda"):
        load_config(AgentConfig, None, {"draft.provider": "npu"})
    assert sorted(EXECUTION) == sorted(PROVIDERS)
