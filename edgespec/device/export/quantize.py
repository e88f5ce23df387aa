"""Rounded graphs: rounding of foreign graphs, storage of graphs, and scales of an 8-bit cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.weight_blocks import BLOCK_SIZE, CONTRIB, matmul_attributes, quantize_matrix

if TYPE_CHECKING:
    from edgespec.device.drafters.onnx_drafter import OnnxDrafter

MAX_SINGLE_FILE_BYTES = 4_000_000


def gather_attributes(bits: int) -> dict[str, Any]:
    """Return the attributes of ``GatherBlockQuantized`` on a matrix whose rows are looked up."""
    return {"bits": bits, "block_size": BLOCK_SIZE, "gather_axis": 0, "quantize_axis": 1}


def round_graph(path: Path, bits: int) -> None:
    """Round the matrices of a foreign float32 graph to 4 or 8 bits, in place.

    Products with a constant matrix become ``MatMulNBits``, the embedding becomes
    ``GatherBlockQuantized``. A head that is tied to the embedding shares its bytes. Matrices with
    fewer rows or columns than a block stay as they are. The graph at ``path`` and its external data
    are replaced."""
    model = onnx.load(path)
    graph, nodes, added = model.graph, list[onnx.NodeProto](), dict[str, NDArray[Any]]()
    large = [one for one in graph.initializer if len(one.dims) == 2 and min(one.dims) >= BLOCK_SIZE]
    matrices = {one.name: one for one in large if one.data_type == TensorProto.FLOAT}

    def round_matrix(weight: NDArray[np.float32]) -> tuple[str, str]:
        """Return the names of (integers, scales). They are made of the content, so equal matrices
        are one."""
        digest = hashlib.blake2b(weight.data, digest_size=16).hexdigest()
        packed, scales = f"{digest}.packed", f"{digest}.scales"
        if packed not in added:
            added[packed], added[scales] = quantize_matrix(weight, bits)
        return packed, scales

    for node in graph.node:
        make, read = partial(helper.make_node, name=node.name, domain=CONTRIB), node.input
        if node.op_type == "MatMul" and read[1] in matrices:
            weight = np.ascontiguousarray(numpy_helper.to_array(matrices[read[1]]).T)
            (rows, columns), inputs = weight.shape, [read[0], *round_matrix(weight)]
            sizes = matmul_attributes(rows, columns, bits)
            nodes.append(make("MatMulNBits", inputs, node.output, **sizes))
        elif (
            node.op_type == "Gather"
            and read[0] in matrices
            and not matrices[read[0]].dims[1] % BLOCK_SIZE
            and not any(axis.i for axis in node.attribute)
        ):
            weight = numpy_helper.to_array(matrices[read[0]])
            packed, scales = round_matrix(weight)
            table, shape = f"{packed}.table", f"{packed}.shape"
            added[shape] = np.array([len(weight), weight.shape[1] * bits // 8], dtype=np.int64)
            nodes.append(helper.make_node("Reshape", [packed, shape], [table], name=table))
            inputs = [table, read[1], scales]
            nodes.append(
                make("GatherBlockQuantized", inputs, node.output, **gather_attributes(bits))
            )
        else:
            nodes.append(node)
    used_names = {name for node in nodes for name in node.input}
    constants = [one for one in graph.initializer if one.name in used_names]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(constants)
    graph.initializer.extend(numpy_helper.from_array(value, one) for one, value in added.items())
    model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    save_graph(model, path)


def save_graph(model: onnx.ModelProto, path: Path) -> None:
    """Save a graph, with large weights in a separate file.

    Weights inside the graph's file stay in memory beside the repacked copies of the kernels, even
    after the session is closed. Weights in a separate file are mapped instead. Small drafts are one
    file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f"{path.name}?data"):
        old.unlink()  # onnx would append to an existing file.
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    large = size > MAX_SINGLE_FILE_BYTES
    location = f"{path.name}.data" if large else None
    onnx.save_model(model, path, save_as_external_data=large, location=location)


Scales = Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""A layer's (scales of keys, scales of values), each [heads * head dim]."""
_ATTENTION = "GroupQueryAttention"
_SEQUENCES, _LENGTH = 4, 64
# Factor on the largest value of the calibration, since later texts may exceed it.
_HEADROOM_FACTOR = 1.15
# Position of the keys' scales among the attention's inputs. The values' scales follow.
_SCALES_INDEX = 12


def halve_cache(model: onnx.ModelProto) -> None:
    """Give ``model``, which has a float32 cache, a float16 cache.

    The attention then computes in float16, between two casts. Weights and activations stay as they
    are."""
    graph, nodes = model.graph, list[onnx.NodeProto]()
    _set_cache_type(graph, TensorProto.FLOAT16)
    for tensor in graph.initializer:
        if tensor.name.partition(".")[0] in ("cos", "sin"):
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    for node in graph.node:
        if node.op_type != _ATTENTION:
            nodes.append(node)
            continue
        # The inputs are query, key and value, or the first alone if they are packed.
        for index, value in enumerate(node.input[:3]):
            if value:
                node.input[index] = f"{node.name}.half.{index}"
                nodes.append(_make_cast(value, node.input[index], TensorProto.FLOAT16))
        output = node.output[0]
        node.output[0] = f"{node.name}.half"
        nodes += [node, _make_cast(node.output[0], output, TensorProto.FLOAT)]
    del graph.node[:]
    graph.node.extend(nodes)


def scale_cache(model: onnx.ModelProto, scales: Scales) -> None:
    """Give ``model``, which has a float32 cache, an int8 cache with a static scale for each
    channel. ``scales`` holds the scales of keys and of values for each layer.

    This needs an onnxruntime whose CPU attention accepts such a cache (tried: 1.31)."""
    graph = model.graph
    _set_cache_type(graph, TensorProto.INT8)
    attributes = {
        "k_quant_type": "PER_CHANNEL",
        "v_quant_type": "PER_CHANNEL",
        "kv_cache_bit_width": 8,
    }
    attentions = [node for node in graph.node if node.op_type == _ATTENTION]
    for node, pair in zip(attentions, scales, strict=True):
        node.input.extend([""] * (_SCALES_INDEX - len(node.input)))
        for part, scale in zip(("key", "value"), pair, strict=True):
            node.input.append(f"{node.name}.{part}_scale")
            graph.initializer.append(numpy_helper.from_array(scale, node.input[-1]))
        node.attribute.extend(
            helper.make_attribute(name, value) for name, value in attributes.items()
        )


def _set_cache_type(graph: onnx.GraphProto, element: int) -> None:
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past.", "present.")):
            value.type.tensor_type.elem_type = element


def _make_cast(value: str, output: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [value], [output], name=f"{output}.cast", to=to)


def calibrated_scales(drafter: OnnxDrafter) -> Scales:
    """Return scales for int8 from texts that ``drafter``, with a float32 cache, writes itself.

    This is data-free quantisation as in LLM-QAT (arXiv 2305.17888): 4 texts of 64 tokens, each
    sampled after another token of the vocabulary. Rotary positions turn each pair of a key's
    channels and keep its norm, so both channels get the scale of the largest norm, which bounds
    them at every position."""
    largest: list[NDArray[np.float32]] = []
    size = drafter.manifest.proposable_count
    length = min(_LENGTH, drafter.info.context_length)
    for index in range(_SEQUENCES):
        drafter.begin(1, SamplingParams(temperature=1.0, seed=index))
        token, first = (index * size) // _SEQUENCES, drafter.info.eos_token_ids
        token = first[0] if index == 0 and first else token
        for position in range(length):
            token = drafter.step(position, [token], 1)[0].token
        bounds = [_channel_bounds(one.part, rows) for one, rows in drafter.cached_rows(length)]
        largest = [np.maximum(a, b) for a, b in zip(largest or bounds, bounds, strict=True)]
    scales = [
        np.where(one > 0, one * np.float32(_HEADROOM_FACTOR / 127), 1).astype(np.float32)
        for one in largest
    ]
    return list(zip(scales[::2], scales[1::2], strict=True))


def _channel_bounds(part: str, rows: NDArray[np.generic]) -> NDArray[np.float32]:
    """Return a bound of each channel of ``rows`` [heads, tokens, head dim], as [heads * head
    dim]."""
    magnitudes: NDArray[np.float32] = np.abs(rows.astype(np.float32))
    if part == "key":
        half = magnitudes.shape[-1] // 2
        norm = np.hypot(magnitudes[..., :half], magnitudes[..., half:])
        magnitudes = np.concatenate((norm, norm), axis=-1)
    largest: NDArray[np.float32] = magnitudes.max(axis=1).reshape(-1)
    return largest
