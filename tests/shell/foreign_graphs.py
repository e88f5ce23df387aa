"""Decoder graphs as others export them, made from a tiny checkpoint with ``onnx.helper``.

``concatenating_graph`` has the signature of Optimum's ``text-generation-with-past`` (which onnx
files in Transformers.js folders share): mask, positions, and a cache that the graph concatenates
itself. ``attending_graph`` turns a graph of our own exporter into that of onnxruntime-genai's
builder: the two lengths are computed from a mask, keys and values go through
GroupQueryAttention. Both compute the same model, so they must draft the same tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.shell.tiny_checkpoints import tiny_config, tiny_tensors, write_tokenizer

_OPSETS = (("", 18), ("com.microsoft", 1))


@dataclass(frozen=True)
class Style:
    """What exporters differ in."""

    past: str = "past_key_values.{layer}.{part}"
    present: str = "present.{layer}.{part}"
    half: bool = False
    """Are weights, cache and logits float16?"""
    merged: bool = False
    """Is there a ``use_cache_branch``?"""
    causal_behind_cache: bool = True
    """Early merged decoders were traced with one token behind a cache, so nothing hides a later
    token of the same feed from an earlier one."""
    last_row: bool = False
    """Is there a ``num_logits_to_keep``?"""
    tokens_first: bool = False
    positions: bool = True


class _Graph:
    def __init__(self, config: dict[str, Any], style: Style, seed: int) -> None:
        self.config, self.style = config, style
        self.dtype = np.float16 if style.half else np.float32
        self.element = TensorProto.FLOAT16 if style.half else TensorProto.FLOAT
        self.weights = tiny_tensors(config, seed)
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def constant(self, value: NDArray[Any]) -> str:
        name = f"constant{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, dtype=self.dtype))

    def shape(self, *sizes: int) -> str:
        return self.constant(np.array(sizes, dtype=np.int64))

    def node(self, kind: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output], **attributes))
        return output

    def weight(self, name: str) -> str:
        return self.constant(np.ascontiguousarray(self.weights[name].astype(self.dtype)))

    def linear(self, name: str, value: str) -> str:
        matrix = np.ascontiguousarray(self.weights[f"{name}.weight"].T.astype(self.dtype))
        return self.node("MatMul", value, self.constant(matrix))

    def norm(self, name: str, value: str) -> str:
        square = self.node("Mul", value, value)
        mean = self.node("ReduceMean", square, self.shape(-1), keepdims=1)
        root = self.node("Sqrt", self.node("Add", mean, self.number(self.config["rms_norm_eps"])))
        return self.node("Mul", self.node("Div", value, root), self.weight(f"{name}.weight"))

    # --- attention --------------------------------------------------------------------------

    def rotation(self) -> tuple[str, str]:
        """cos and sin [1, 1, T, head dim] of the positions."""
        dim, theta = self.config["head_dim"], self.config["rope_parameters"]["rope_theta"]
        steps = np.arange(0, dim, 2, dtype=np.float32) / dim
        frequencies = (1.0 / theta**steps).astype(np.float32)
        angles = np.outer(np.arange(self.config["max_position_embeddings"]), frequencies)
        angles = np.concatenate([angles, angles], axis=1)
        positions = "position_ids" if self.style.positions else self.counted()
        found = []
        for function in (np.cos, np.sin):
            table = self.constant(function(angles).astype(self.dtype))
            rows = self.node("Gather", table, positions)
            found.append(self.node("Unsqueeze", rows, self.shape(1)))
        return found[0], found[1]

    def counted(self) -> str:
        """Positions from the shapes of past and ids, where there is no input for them."""
        past = self.dimension(self.style.past.format(layer=0, part="key"), 2)
        total = self.node("Add", past, self.dimension("input_ids", 1))
        one = self.constant(np.array(1, dtype=np.int64))
        return self.node("Unsqueeze", self.node("Range", past, total, one), self.shape(0))

    def dimension(self, name: str, axis: int) -> str:
        return self.node(
            "Gather", self.node("Shape", name), self.constant(np.array(axis, dtype=np.int64))
        )

    def rotated(self, value: str, cos: str, sin: str) -> str:
        half = self.config["head_dim"] // 2
        first = self.node("Slice", value, self.shape(0), self.shape(half), self.shape(3))
        second = self.node("Slice", value, self.shape(half), self.shape(2 * half), self.shape(3))
        turned = self.node("Concat", self.node("Neg", second), first, axis=3)
        return self.node("Add", self.node("Mul", value, cos), self.node("Mul", turned, sin))

    def heads(self, name: str, value: str, count: int) -> str:
        split = self.node("Reshape", self.linear(name, value), self.shape(0, 0, count, -1))
        return self.node("Transpose", split, perm=[0, 2, 1, 3])

    def bias(self) -> str:
        """[1, 1, T, total]: 0 where a token may look, else far below."""
        total, fed = self.dimension("attention_mask", 1), self.dimension("input_ids", 1)
        one = self.constant(np.array(1, dtype=np.int64))
        zero = self.constant(np.array(0, dtype=np.int64))
        keys = self.node("Range", zero, total, one)
        queries = self.node("Range", self.node("Sub", total, fed), total, one)
        column = self.node("Unsqueeze", queries, self.shape(1))
        later = self.node("Greater", keys, column)
        if not self.style.causal_behind_cache:
            cached = self.node("Greater", total, fed)
            later = self.node("And", later, self.node("Not", cached))
        hidden = self.node("Not", self.node("Cast", "attention_mask", to=TensorProto.BOOL))
        masked = self.node("Or", later, hidden)
        return self.node("Where", masked, self.number(-1e4), self.number(0.0))

    def joined(self, layer: int, part: str, new: str) -> str:
        """Past and ``new`` [1, heads, T, dim] along the tokens; also the output ``present``."""
        past = self.style.past.format(layer=layer, part=part)
        axis = 1 if self.style.tokens_first else 2
        if self.style.tokens_first:
            new = self.node("Transpose", new, perm=[0, 2, 1, 3])
        if self.style.merged:
            past = self.branched(past, axis)
        present = self.style.present.format(layer=layer, part=part)
        self.node("Concat", past, new, axis=axis, output=present)
        if not self.style.tokens_first:
            return present
        return self.node("Transpose", present, perm=[0, 2, 1, 3])

    def branched(self, past: str, axis: int) -> str:
        """``past`` if the cache is to be used, else nothing of it."""
        name = past.replace(".", "_")
        whole, none = f"{name}_whole", f"{name}_none"
        out = helper.make_tensor_value_info(whole, self.element, None)
        then = helper.make_graph(
            [helper.make_node("Identity", [past], [whole])], f"{name}_then", [], [out]
        )
        start, end, along = self.shape(0), self.shape(0), self.shape(axis)
        out = helper.make_tensor_value_info(none, self.element, None)
        other = helper.make_graph(
            [helper.make_node("Slice", [past, start, end, along], [none])],
            f"{name}_else",
            [],
            [out],
        )
        return self.node("If", "use_cache_branch", then_branch=then, else_branch=other)

    def attention(self, layer: int, value: str, cos: str, sin: str, bias: str) -> str:
        name = f"model.layers.{layer}.self_attn"
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim, group = self.config["head_dim"], heads // kv_heads
        query = self.rotated(self.heads(f"{name}.q_proj", value, heads), cos, sin)
        key = self.rotated(self.heads(f"{name}.k_proj", value, kv_heads), cos, sin)
        key = self.joined(layer, "key", key)
        val = self.joined(layer, "value", self.heads(f"{name}.v_proj", value, kv_heads))
        grouped = self.node("Reshape", query, self.shape(0, kv_heads, -1, dim))
        scores = self.node("MatMul", grouped, self.node("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.node("Mul", scores, self.number(dim**-0.5))
        total = self.dimension("attention_mask", 1)
        sizes = self.node(
            "Concat",
            self.shape(1, kv_heads, group, -1),
            self.node("Unsqueeze", total, self.shape(0)),
            axis=0,
        )
        scores = self.node("Add", self.node("Reshape", scores, sizes), bias)
        weights = self.node("Softmax", scores, axis=-1)
        weights = self.node(
            "Reshape",
            weights,
            self.node(
                "Concat",
                self.shape(1, kv_heads, -1),
                self.node("Unsqueeze", total, self.shape(0)),
                axis=0,
            ),
        )
        mixed = self.node("MatMul", weights, val)
        mixed = self.node("Reshape", mixed, self.shape(1, heads, -1, dim))
        mixed = self.node("Transpose", mixed, perm=[0, 2, 1, 3])
        joined = self.node("Reshape", mixed, self.shape(0, 0, heads * dim))
        return self.linear(f"{name}.o_proj", joined)

    # --- the whole --------------------------------------------------------------------------

    def build(self) -> onnx.ModelProto:
        style, table = self.style, "model.embed_tokens.weight"
        stream = self.node("Gather", self.weight(table), "input_ids")
        cos, sin = self.rotation()
        bias = self.bias()
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self.norm(f"{name}.input_layernorm", stream)
            stream = self.node("Add", stream, self.attention(layer, normed, cos, sin, bias))
            normed = self.norm(f"{name}.post_attention_layernorm", stream)
            gate = self.linear(f"{name}.mlp.gate_proj", normed)
            gate = self.node("Mul", gate, self.node("Sigmoid", gate))
            wide = self.node("Mul", gate, self.linear(f"{name}.mlp.up_proj", normed))
            stream = self.node("Add", stream, self.linear(f"{name}.mlp.down_proj", wide))
        normed = self.norm("model.norm", stream)
        if style.last_row:
            first = self.node("Neg", self.node("Reshape", "num_logits_to_keep", self.shape(1)))
            end = self.shape(np.iinfo(np.int64).max)
            normed = self.node("Slice", normed, first, end, self.shape(1))
        head = np.ascontiguousarray(self.weights[table].T.astype(self.dtype))
        self.node("MatMul", normed, self.constant(head), output="logits")
        inputs, outputs = self.signature()
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.initializers)
        return _model(graph)

    def signature(self) -> tuple[list[onnx.ValueInfoProto], list[onnx.ValueInfoProto]]:
        style, config = self.style, self.config

        def info(name: str, kind: int, *sizes: str | int) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(name, kind, list(sizes))

        def cache(name: str, length: str) -> onnx.ValueInfoProto:
            heads, dim = config["num_key_value_heads"], config["head_dim"]
            sizes = (length, heads) if style.tokens_first else (heads, length)
            return info(name, self.element, "batch_size", *sizes, dim)

        integer = TensorProto.INT64
        inputs = [
            info("input_ids", integer, "batch_size", "sequence_length"),
            info("attention_mask", integer, "batch_size", "total_sequence_length"),
        ]
        if style.positions:
            inputs.append(info("position_ids", integer, "batch_size", "sequence_length"))
        if style.merged:
            inputs.append(info("use_cache_branch", TensorProto.BOOL, 1))
        if style.last_row:
            inputs.append(info("num_logits_to_keep", integer))
        logits = ("batch_size", "num_logits", config["vocab_size"])
        outputs = [info("logits", self.element, *logits)]
        for layer in range(config["num_hidden_layers"]):
            for part in ("key", "value"):
                names = {"layer": layer, "part": part}
                inputs.append(cache(style.past.format(**names), "past_sequence_length"))
                outputs.append(cache(style.present.format(**names), "total_sequence_length"))
        return inputs, outputs


def _model(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def concatenating_graph(
    config: dict[str, Any] | None = None, style: Style | None = None, seed: int = 0
) -> onnx.ModelProto:
    """A decoder of plain operators; a tied Llama checkpoint is all it can be made from."""
    return _Graph(config or tiny_config(), style or Style(), seed).build()


def attending_graph(own: onnx.ModelProto, *, open_head_size: bool = False) -> onnx.ModelProto:
    """A graph of our own exporter behind the inputs of onnxruntime-genai's builder. With
    ``open_head_size`` the last dimension of the cache has a name, as newer builders give it."""
    model = onnx.ModelProto()
    model.CopyFrom(own)
    graph = model.graph
    renamed = {value.name: _genai_name(value.name) for value in (*graph.input, *graph.output)}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
    for value in (*graph.input, *graph.output):
        value.name = renamed[value.name]
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith("past") and open_head_size:
            dims[3].dim_param = "kv_cache_dim"
    lengths = [value for value in graph.input if value.name in ("seqlens_k", _LENGTH)]
    for value in lengths:
        graph.input.remove(value)
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
    graph.input.append(mask)
    constants = {"one": np.array(1, np.int64), "axis": np.array([1], np.int64)}
    for name, array in constants.items():
        graph.initializer.append(numpy_helper.from_array(array, f"mask.{name}"))
    before = [
        helper.make_node("ReduceSum", ["attention_mask", "mask.axis"], ["mask.sum"], keepdims=0),
        helper.make_node("Sub", ["mask.sum", "mask.one"], ["mask.last"]),
        helper.make_node("Cast", ["mask.last"], ["seqlens_k"], to=TensorProto.INT32),
        helper.make_node("Shape", ["attention_mask"], ["mask.shape"]),
        helper.make_node("Gather", ["mask.shape", "mask.one"], ["mask.total"], axis=0),
        helper.make_node("Cast", ["mask.total"], [_LENGTH], to=TensorProto.INT32),
    ]
    nodes = [*before, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


_LENGTH = "total_sequence_length"


def _genai_name(name: str) -> str:
    return name.replace("past.", "past_key_values.")


def write_folder(
    folder: Path,
    graphs: dict[str, onnx.ModelProto],
    config: dict[str, Any] | None = None,
    *,
    external: Sequence[str] = (),
) -> Path:
    """A folder with ``graphs`` by their paths in it, config and tokenizer; the weights of those in
    ``external`` lie in a file of their own beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in graphs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving empties the model that it moves the weights out of
        copy.producer_name = "another exporter"  # also where the graph began as one of ours
        onnx.save_model(
            copy,
            path,
            save_as_external_data=name in external,
            location=f"{path.name}_data" if name in external else None,
            size_threshold=512,
        )
    (folder / "config.json").write_text(json.dumps(config or tiny_config()))
    write_tokenizer(folder)
    return folder
