"""Foreign graphs that cannot draft. Oracle: the message names the file, what is wrong with it and
what was expected; onnx's own reader for the nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.device.drafters.foreign_drafter import Behaviour, check_behaviour
from edgespec.device.drafters.foreign_graph import read_nodes
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info
from tests.shell.foreign_graphs import (
    Style,
    attending_graph,
    concatenating_graph,
    write_folder,
)
from tests.shell.test_foreign_drafts import load
from tests.shell.tiny_checkpoints import write_checkpoint

MERGED = Style(merged=True)


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


def test_a_graph_without_a_cache_is_refused(tmp_path: Path) -> None:
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["b", "s"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", "s", 320])
    table = onnx.numpy_helper.from_array(np.zeros((320, 320), np.float32), "table")
    node = helper.make_node("Gather", ["table", "input_ids"], ["logits"])
    graph = helper.make_graph([node], "g", [ids], [logits], [table])
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    folder = write_folder(tmp_path / "bad", {"model.onnx": model})
    with pytest.raises(DraftModelError, match="keeps nothing between steps"):
        load(folder)


def attending(folder: Path) -> onnx.ModelProto:
    source = write_checkpoint(folder / "source")
    export_draft(source, folder / "own", model_info(source), bits=32)
    return attending_graph(onnx.load(folder / "own" / "model.onnx"))


def test_a_window_of_keys_is_refused(tmp_path: Path) -> None:
    graph = attending(tmp_path)
    for node in graph.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.attribute.append(helper.make_attribute("sliding_window_cache", 1))
    folder = write_folder(tmp_path / "window", {"model.onnx": graph})
    path = folder / "model.onnx"
    with pytest.raises(DraftModelError, match=r"sliding_window_cache|cannot load it"):
        load(folder)
    nodes = [node for node in read_nodes(path) if node.kind == "GroupQueryAttention"]
    assert [node.integers["sliding_window_cache"] for node in nodes] == [1, 1]


@pytest.mark.parametrize("content", [b"", b"\x00nonsense", b"version https://git-lfs.github.com"])
def test_a_file_that_is_no_graph_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bad", {})
    (folder / "model.onnx").write_bytes(content)
    with pytest.raises(DraftModelError, match=r"model\.onnx: "):
        load(folder)
    with pytest.raises(DraftModelError, match=r"model\.onnx: not a readable ONNX file"):
        read_nodes(folder / "model.onnx")


def test_missing_external_data_is_named(tmp_path: Path) -> None:
    name = "onnx/model.onnx"
    folder = write_folder(tmp_path / "halved", {name: concatenating_graph()}, external=[name])
    (folder / "onnx" / "model.onnx_data").unlink()
    with pytest.raises(DraftModelError, match=r"model\.onnx: onnxruntime cannot load it.*onnx_dat"):
        load(folder)


@pytest.mark.parametrize("kind", ["merged", "genai"])
def test_nodes_are_those_that_the_onnx_library_reads(kind: str, tmp_path: Path) -> None:
    graph = attending(tmp_path) if kind == "genai" else concatenating_graph(style=MERGED)
    path = write_folder(tmp_path / kind, {"model.onnx": graph}) / "model.onnx"
    expected = onnx.load(path, load_external_data=False).graph.node
    found = [node for node in read_nodes(path) if not node.nested]
    assert [node.kind for node in found] == [node.op_type for node in expected]
    assert [node.inputs for node in found] == [tuple(node.input) for node in expected]
    assert [node.outputs for node in found] == [tuple(node.output) for node in expected]
    integer = onnx.AttributeProto.INT
    assert [node.integers for node in found] == [
        {one.name: one.i for one in node.attribute if one.type == integer} for node in expected
    ]
    nested = [node.kind for node in read_nodes(path) if node.nested]
    assert nested.count("Slice") == (4 if kind == "merged" else 0)
    windows = [node.integers.get("local_window_size") for node in found]
    assert windows.count(-1) == (2 if kind == "genai" else 0)  # negative numbers, too


def test_what_is_not_finite_is_refused_and_what_is_noisy_is_used() -> None:
    dice = np.random.default_rng(0)
    rows = {t: dice.standard_normal(50).astype(np.float32) for t in range(60)}

    def decode(noise: float) -> Callable[[int, object], NDArray[np.float32]]:
        def rows_of(keep: int, tokens: object) -> NDArray[np.float32]:
            assert isinstance(tokens, tuple)
            exact = np.stack([rows[token] for token in tokens])
            return (exact + noise * dice.standard_normal(exact.shape)).astype(np.float32)

        return rows_of

    assert check_behaviour(decode(0.0), 50) == Behaviour(True, True)
    assert check_behaviour(decode(0.1), 50).chunks
    assert not check_behaviour(decode(1.0), 50).works
    assert check_behaviour(decode(float("nan")), 50).reason == "its logits are not all finite"
