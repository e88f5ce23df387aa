"""What goes into a draft graph of ours, and what comes out of it."""

from __future__ import annotations

from collections.abc import Iterator

import onnx
from onnx import TensorProto, helper

from edgespec.device.export.checkpoint import DecoderShape


def graph_signature(
    shape: DecoderShape,
) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
    """(inputs, outputs) of the graph for this shape."""

    def cache(kind: str) -> Iterator[onnx.ValueInfoProto]:
        dims: list[str | int | None] = [1, shape.kv_heads, "capacity", shape.head_dim]
        for layer in range(shape.layers):
            for part in ("key", "value"):
                name = f"{kind}.{layer}.{part}"
                yield helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)

    inputs = [
        helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, "length"]),
        helper.make_tensor_value_info("seqlens_k", TensorProto.INT32, [1]),
        helper.make_tensor_value_info("total_sequence_length", TensorProto.INT32, []),
        *cache("past"),
    ]
    logits = [1, shape.vocabulary_size]
    outputs = [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, logits),
        *cache("present"),
    ]
    return inputs, outputs
