"""Queries, keys and values are one product in a draft graph. Oracle: the same weights in the graph
as it was exported before for models that normalise heads, a product for each; its rows are cut out
of the joint one here, and a step on either has the same bits. So folders of before are used, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint

TOKENS = [int(t) for t in np.random.default_rng(2).integers(0, VOCABULARY_SIZE, 60)]
FEEDS = (20, 21, 22, 26, 31, 60)
"""Up to which token: rows of 20, 1, 1, 4, 5 and 29."""
SHAPES = {
    "qwen3": tiny_config("qwen3", head_dim=32),
    "qwen3-heads-of-8": tiny_config("qwen3", head_dim=8),
    "qwen3-biased": tiny_config("qwen3", attention_bias=True),
    "qwen3-odd-widths": tiny_config("qwen3", hidden_size=172, intermediate_size=100),
}


def separated(folder: Path) -> Path:
    """The draft of ``folder`` in a folder beside it, every joint product in parts."""
    model = onnx.load(folder / "model.onnx")
    graph = model.graph
    nodes = [part for node in graph.node for part in _separated(node, graph)]
    read, kept = {one.name for one in graph.output}, list[onnx.NodeProto]()
    for node in reversed(nodes):
        if read.intersection(node.output):
            read.update(node.input)
            kept.insert(0, node)
    del graph.node[:]
    graph.node.extend(kept)
    target = folder.with_name(f"{folder.name}-separated")
    shutil.copytree(folder, target)
    onnx.save_model(model, target / "model.onnx")
    return target


def _separated(node: onnx.NodeProto, graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """A cut becomes one product, and one addition of a bias, for each part."""
    if node.op_type != "Split":
        yield node
        return
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    makers = {name: one for one in graph.node for name in one.output}
    product, bias = makers[node.input[0]], None
    if product.op_type == "Add":
        bias, product = constants[product.input[1]], makers[product.input[0]]
    ends = np.cumsum(constants[node.input[1]])
    for output, first, end in zip(node.output, (0, *ends), ends, strict=False):
        names = []
        for name in product.input[1:]:
            weight = constants[name]
            cut = weight[:, first:end] if product.op_type == "MatMul" else weight[first:end]
            names.append(_constant(graph, f"{output}.{name}", cut))
        whole = output if bias is None else f"{output}.unbiased"
        part = helper.make_node(
            product.op_type, [product.input[0], *names], [whole], whole, domain=product.domain
        )
        for one in product.attribute:
            size = helper.make_attribute("N", int(end - first))
            part.attribute.append(size if one.name == "N" else one)
        yield part
        if bias is not None:
            name = _constant(graph, f"{output}.bias", bias[first:end])
            yield helper.make_node("Add", [whole, name], [output], output)


def _constant(graph: onnx.GraphProto, name: str, value: NDArray[np.generic]) -> str:
    graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
    return name


def kinds(folder: Path) -> list[str]:
    return [node.op_type for node in onnx.load(folder / "model.onnx").graph.node]


def logits(folder: Path) -> NDArray[np.float32]:
    """Behind each of ``FEEDS``, [feeds, V]."""
    drafter = OnnxDrafter(folder, threads=1)
    drafter.begin(4, SamplingParams())
    rows, done = [], 0
    for end in FEEDS:
        drafter.step(done, TOKENS[done:end], 1)
        rows.append(drafter.logits.copy())
        done = end
    drafter.close()
    return np.stack(rows)


def exported(root: Path, shape: str, bits: int) -> Path:
    source = write_checkpoint(root / "source", SHAPES[shape])
    export_draft(source, root / "draft", model_info(source), bits=bits)
    return root / "draft"


@pytest.mark.parametrize("bits", [4, 8, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_joint_product_has_the_bits_of_its_parts(shape: str, bits: int, tmp_path: Path) -> None:
    joint = exported(tmp_path, shape, bits)
    apart = separated(joint)
    product = "MatMul" if bits == 32 else "MatMulNBits"
    more = kinds(apart).count(product) - kinds(joint).count(product)
    assert (kinds(joint).count("Split"), kinds(apart).count("Split"), more) == (2, 0, 4)
    np.testing.assert_array_equal(logits(joint), logits(apart))
