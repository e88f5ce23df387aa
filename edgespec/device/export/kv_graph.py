"""A draft graph with float32 keys and values becomes one that stores them in fewer bytes.

Only the type of the cache changes; weights and activations stay as they are.

* float16: the attention computes in that type, between two casts.
* int8: the attention takes a static scale for each channel of a layer's keys and one of its
  values. Rotary positions turn each pair of a key's channels by an angle, which leaves the pair's
  norm alone, so both channels get the scale of the largest norm seen: it bounds them at every
  position. The scales come from texts that the draft writes itself (``calibrated_scales``), as in
  data-free quantisation (LLM-QAT, arXiv 2305.17888): a draft folder holds no texts.

Needs onnx; int8 needs an onnxruntime whose CPU attention takes such a cache (tried: 1.31).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edgespec.core.device.memory import KvType
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.onnx_drafter import OnnxDrafter

Scales = Sequence[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""A layer's (scales of keys, scales of values), each [heads * head dim]."""
_ATTENTION = "GroupQueryAttention"
_SEQUENCES, _LENGTH = 4, 64
# Beyond the largest value seen: texts to come are not those seen.
_HEADROOM = 1.15
_ELEMENT = {KvType.FLOAT16: TensorProto.FLOAT16, KvType.INT8: TensorProto.INT8}
# Inputs of the attention: keys' and values' scales stand at places 12 and 13.
_SCALES_AT = 12


def with_kv_type(model: onnx.ModelProto, kv_type: KvType, scales: Scales = ()) -> onnx.ModelProto:
    """``model`` (float32 cache; changed in place) with a cache of ``kv_type``.

    ``scales`` are needed for int8, one pair a layer. Raises ``ValueError`` for another number.
    """
    if kv_type is KvType.FLOAT32:
        return model
    graph = model.graph
    attentions = [node for node in graph.node if node.op_type == _ATTENTION]
    if kv_type is KvType.INT8 and len(scales) != len(attentions):
        raise ValueError(f"{len(scales)} pairs of scales for {len(attentions)} layers")
    for value in (*graph.input, *graph.output):
        if value.name.startswith(("past.", "present.")):
            value.type.tensor_type.elem_type = _ELEMENT[kv_type]
    if kv_type is KvType.FLOAT16:
        _halve(graph, attentions)
    else:
        for node, (keys, values) in zip(attentions, scales, strict=True):
            _scale(graph, node, keys, values)
    return model


def calibrated_scales(drafter: OnnxDrafter) -> Scales:
    """Scales for int8 from texts that ``drafter`` (float32 cache) writes itself: 4 of 64 tokens,
    each sampled behind another token of the vocabulary."""
    largest: list[NDArray[np.float32]] = []
    size = drafter.manifest.proposable
    length = min(_LENGTH, drafter.info.context_length)
    for index in range(_SEQUENCES):
        drafter.begin(1, SamplingParams(temperature=1.0, seed=index))
        token, first = (index * size) // _SEQUENCES, drafter.info.eos_token_ids
        token = first[0] if index == 0 and first else token
        for position in range(length):
            token = drafter.step(position, [token], 1)[0].token
        found = [_largest(name, rows) for name, rows in drafter.cached_rows(length)]
        largest = [np.maximum(a, b) for a, b in zip(largest or found, found, strict=True)]
    scales = [
        np.where(one > 0, one * np.float32(_HEADROOM / 127), 1).astype(np.float32)
        for one in largest
    ]
    return list(zip(scales[::2], scales[1::2], strict=True))


def _largest(name: str, rows: NDArray[np.generic]) -> NDArray[np.float32]:
    """[heads * head dim]: what bounds each channel of ``rows`` [heads, tokens, head dim]."""
    found: NDArray[np.float32] = np.abs(rows.astype(np.float32))
    if name.endswith(".key"):
        half = found.shape[-1] // 2
        norm = np.hypot(found[..., :half], found[..., half:])
        found = np.concatenate((norm, norm), axis=-1)
    largest: NDArray[np.float32] = found.max(axis=1).reshape(-1)
    return largest


def _scale(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    keys: NDArray[np.float32],
    values: NDArray[np.float32],
) -> None:
    node.input.extend([""] * (_SCALES_AT - len(node.input)))
    for part, scale in (("key", keys), ("value", values)):
        name = f"{node.name}.{part}_scale"
        graph.initializer.append(numpy_helper.from_array(scale, name))
        node.input.append(name)
    node.attribute.extend(
        [
            helper.make_attribute("k_quant_type", "PER_CHANNEL"),
            helper.make_attribute("v_quant_type", "PER_CHANNEL"),
            helper.make_attribute("kv_cache_bit_width", 8),
        ]
    )


def _halve(graph: onnx.GraphProto, attentions: Sequence[onnx.NodeProto]) -> None:
    for tensor in graph.initializer:
        if tensor.name in ("cos", "sin"):
            half = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(half, tensor.name))
    names = {node.name for node in attentions}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.name not in names:
            nodes.append(node)
            continue
        for index, value in enumerate(node.input[:3]):  # query, key, value; packed: the first
            if value:
                node.input[index] = f"{node.name}.half.{index}"
                nodes.append(_cast(value, node.input[index], TensorProto.FLOAT16))
        output = node.output[0]
        node.output[0] = f"{node.name}.half"
        nodes += [node, _cast(node.output[0], output, TensorProto.FLOAT)]
    del graph.node[:]
    graph.node.extend(nodes)


def _cast(value: str, output: str, to: int) -> onnx.NodeProto:
    return helper.make_node("Cast", [value], [output], name=f"{output}.cast", to=to)
