"""Decoder graphs as other exporters write them, made from a tiny checkpoint.

``concatenating_graph`` has the signature of Optimum's ``text-generation-with-past``, which onnx
files in Transformers.js folders share: mask, positions, and a cache that the graph concatenates
itself. Its nodes are listed in ``decoder.txt``. ``attending_graph`` turns a graph of our own
exporter into one of onnxruntime-genai's builder: the two lengths are computed from a mask, and keys
and values go through GroupQueryAttention. Both compute the same model, so they must draft the same
tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from tests.kit.tiny_checkpoints import tiny_config, tiny_tensors, write_tokenizer

_TEXT = Path(__file__).with_name("decoder.txt").read_text(encoding="utf-8")
_PARTS = {
    name: Template(text)
    for name, text in re.findall(r"== (\w+)\n(.*?\n)(?:\n|\Z)", _TEXT, re.DOTALL)
}
_HEAD = '<ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>'


@dataclass(frozen=True)
class Style:
    """The properties in which exporters differ."""

    past: str = "past_key_values.{layer}.{part}"
    present: str = "present.{layer}.{part}"
    half: bool = False
    """True if weights, cache and logits are float16."""
    merged: bool = False
    """True if the graph has a ``use_cache_branch`` input."""
    causal_behind_cache: bool = True
    """False for early merged decoders. Those were traced with one token behind a cache, so nothing
    hides a later token of the same feed from an earlier one."""
    last_row: bool = False
    """True if the graph has a ``num_logits_to_keep`` input."""
    tokens_first: bool = False
    positions: bool = True


def concatenating_graph(style: Style | None = None) -> onnx.ModelProto:
    """Build a decoder of plain operators."""
    style, config = style or Style(), tiny_config()
    layers = range(config["num_hidden_layers"])
    nodes = "".join(_list_nodes(style, layers))
    model = onnx.parser.parse_model(
        f"{_HEAD}\ndecoder {_write_signature(style, config)} {{\n{nodes}}}"
    )
    dtype = np.float16 if style.half else np.float32
    for name, value in _make_constants(config).items():
        floating = value.dtype.kind == "f"
        array = np.ascontiguousarray(value.astype(dtype) if floating else value)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    caches = [(layer, part) for layer in layers for part in ("key", "value")]
    renamed = {f"past_{p}_{i}": style.past.format(layer=i, part=p) for i, p in caches}
    renamed |= {f"present_{p}_{i}": style.present.format(layer=i, part=p) for i, p in caches}
    _rename(model.graph, renamed)
    return model


def _list_nodes(style: Style, layers: range) -> list[str]:
    def part(which: str, **names: object) -> str:
        return _PARTS[which].substitute(names)

    joined = "joined_tokens_first" if style.tokens_first else "joined"
    joined = "joined_merged" if style.merged else joined
    kind = "float16" if style.half else "float"
    found = [part("stream"), "" if style.positions else part("positions_counted"), part("rotation")]
    found += [part("mask"), part("causal" if style.causal_behind_cache else "causal_without_cache")]
    stream = "embedded"
    for layer in layers:
        found.append(part("norm", name=f"attention_norm_{layer}", value=stream))
        for name, count in (("q", "queries"), ("k", "keys"), ("v", "keys")):
            found.append(part("heads", name=f"{name}_{layer}", layer=layer, count=count))
        found += [part("rotated", name=f"{name}_{layer}") for name in "qk"]
        for name, new in (("key", f"rotated_k_{layer}"), ("value", f"v_{layer}")):
            found.append(part(joined, part=name, layer=layer, new=new, float=kind))
        found.append(part("attention", layer=layer, stream=stream))
        found.append(part("norm", name=f"mlp_norm_{layer}", value=f"between_{layer}"))
        found.append(part("mlp", layer=layer))
        stream = f"stream_{layer}"
    found.append(part("norm", name="final_norm", value=stream))
    return [*found, part("last_rows" if style.last_row else "all_rows"), part("head")]


def _write_signature(style: Style, config: Mapping[str, Any]) -> str:
    kind = "float16" if style.half else "float"
    heads, dim = config["num_key_value_heads"], config["head_dim"]

    def caches(name: str, length: str) -> list[str]:
        sizes = f"{length}, {heads}" if style.tokens_first else f"{heads}, {length}"
        return [
            f"{kind}[batch_size, {sizes}, {dim}] {name}_{part}_{layer}"
            for layer in range(config["num_hidden_layers"])
            for part in ("key", "value")
        ]

    rows = "int64[batch_size, sequence_length]"
    inputs = [f"{rows} input_ids", "int64[batch_size, total_sequence_length] attention_mask"]
    inputs += [f"{rows} position_ids"] * style.positions + [
        "bool[1] use_cache_branch"
    ] * style.merged
    inputs += ["int64 num_logits_to_keep"] * style.last_row
    inputs += caches("past", "past_sequence_length")
    logits = f"{kind}[batch_size, num_logits, {config['vocab_size']}] logits"
    outputs = [logits, *caches("present", "total_sequence_length")]
    return f"({', '.join(inputs)}) => ({', '.join(outputs)})"


def _make_constants(config: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return weights, tables and numbers by their names in ``decoder.txt``."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, weights = config["head_dim"], tiny_tensors(dict(config))
    steps = np.arange(0, dim, 2, dtype=np.float32) / dim
    frequencies = 1.0 / config["rope_parameters"]["rope_theta"] ** steps
    angles = np.outer(np.arange(config["max_position_embeddings"]), frequencies.astype(np.float32))
    angles = np.concatenate([angles, angles], axis=1)
    numbers = {"eps": config["rms_norm_eps"], "scale": dim**-0.5, "far": -1e4, "nothing": 0.0}
    found: dict[str, NDArray[Any]] = {name: np.array(x) for name, x in numbers.items()}
    found |= {"cos_table": np.cos(angles), "sin_table": np.sin(angles)}
    shapes = {f"axis_{axis}": [axis] for axis in range(4)}
    shapes |= {"last_axis": [-1], "half_dim": [dim // 2], "whole_dim": [dim], "one_axis": [-1]}
    shapes |= {"split_queries": [0, 0, heads, -1], "split_keys": [0, 0, kv_heads, -1]}
    shapes |= {"group_queries": [0, kv_heads, -1, dim], "mixed_shape": [1, heads, -1, dim]}
    shapes |= {"by_head": [1, kv_heads, heads // kv_heads, -1], "by_group": [1, kv_heads, -1]}
    shapes |= {"flat_shape": [0, 0, heads * dim], "no_end": [np.iinfo(np.int64).max]}
    found |= {name: np.array(sizes, np.int64) for name, sizes in shapes.items()}
    found |= {"zero": np.array(0, np.int64), "one": np.array(1, np.int64)}
    table = weights["model.embed_tokens.weight"]
    found |= {"embed": table, "head": table.T, "final_norm_weight": weights["model.norm.weight"]}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        for norm, place in (("attention", "input"), ("mlp", "post_attention")):
            found[f"{norm}_norm_{layer}_weight"] = weights[f"{name}.{place}_layernorm.weight"]
        for part in "qkvo":
            found[f"{part}_{layer}_weight"] = weights[f"{name}.self_attn.{part}_proj.weight"].T
        for part in ("gate", "up", "down"):
            found[f"{part}_{layer}_weight"] = weights[f"{name}.mlp.{part}_proj.weight"].T
    return found


def _rename(graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
    """Rename values, also in the branches of an ``If``."""
    for value in (*graph.input, *graph.output):
        value.name = renamed.get(value.name, value.name)
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [renamed.get(name, name) for name in names]
        for attribute in node.attribute:
            _rename(attribute.g, renamed)


def attending_graph(own: onnx.ModelProto, *, open_head_size: bool = False) -> onnx.ModelProto:
    """Put the inputs of onnxruntime-genai's builder in front of a graph of our own exporter. With
    ``open_head_size`` the last dimension of the cache is symbolic, as newer builders write it."""
    model = onnx.ModelProto()
    model.CopyFrom(own)
    graph = model.graph
    values = (*graph.input, *graph.output)
    _rename(graph, {one.name: one.name.replace("past.", "past_key_values.") for one in values})
    for value in graph.input:
        if value.name.startswith("past") and open_head_size:
            value.type.tensor_type.shape.dim[3].dim_param = "kv_cache_dim"
    lengths = [value for value in graph.input if value.name in ("seqlens_k", _LENGTH)]
    for value in lengths:
        graph.input.remove(value)
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"])
    graph.input.append(mask)
    for name, array in (("one", np.array(1)), ("axis", np.array([1]))):
        graph.initializer.append(numpy_helper.from_array(array, f"mask_{name}"))
    before = onnx.parser.parse_graph(_LENGTHS_OF_MASK).node
    nodes = [*before, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


_LENGTH = "total_sequence_length"
_LENGTHS_OF_MASK = """lengths (int64[batch, total] attention_mask) => (int32[batch] seqlens_k) {
    mask_sum = ReduceSum <keepdims = 0> (attention_mask, mask_axis)
    mask_last = Sub (mask_sum, mask_one)
    seqlens_k = Cast <to = 6> (mask_last)
    mask_shape = Shape (attention_mask)
    mask_total = Gather <axis = 0> (mask_shape, mask_one)
    total_sequence_length = Cast <to = 6> (mask_total)
}"""


def write_folder(
    folder: Path, graphs: dict[str, onnx.ModelProto], *, external: Sequence[str] = ()
) -> Path:
    """Write a folder with ``graphs`` by their paths in it, config and tokenizer. The weights of
    graphs named in ``external`` go into a separate file beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in graphs.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = onnx.ModelProto()
        copy.CopyFrom(model)  # saving moves the weights out of the model, so save a copy
        copy.producer_name = "another exporter"  # also for graphs that came from our own exporter
        onnx.save_model(
            copy,
            path,
            save_as_external_data=name in external,
            location=f"{path.name}_data" if name in external else None,
            size_threshold=512,
        )
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    write_tokenizer(folder)
    return folder
