"""Builds one onnxruntime graph of the layers of a dense decoder with rounded weights, for a CPU.

Theory of operation. In a small model the operations between the products take as long as the
products, so one call of a graph, with fused operators, takes the place of some thousand calls of
torch. The graph holds everything from the embeddings to the logits; ``graph_passes.py`` lays the
rows of a pass out for it. torch keeps the embedding table and computes the tables of rotary
positions once.

Attention reads keys and values where the pool has them. A *group* is some rows of one session whose
ancestors all lie on one line of keys, which follow each other by position. For each group
``places`` names the line's rows in the pool; rows of the run itself are not in the pool yet, so
``fresh_rows`` are put at ``fresh_goals`` among what was gathered. All of this is given once for
each attention window among the layers, because lines are short where windows are. With G groups of
R rows and lines of L keys, A key-value heads, S query heads for each key-value head, and head
dimension d:

    scores [G, A, S R, L] = scale * queries [G, A, S R, d] keys [G, A, L, d]' + hidden
    out = softmax(scores) * seen @ values

``hidden`` is -inf where a row does not see a key, else 0, and ``seen`` is 0 or 1: onnxruntime's
softmax gives a hidden key some 1e-39 instead of 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper

from edgespec.models.graph_nodes import GraphNodes
from edgespec.models.weight_blocks import RoundedMatrix, RoundingLoss, round_matrix
from edgespec.verifier.targets import cpu_threads
from edgespec.verifier.targets.graph_passes import GraphModel, GraphShape, probe_logits
from edgespec.verifier.targets.linear_layers import copy_from_file
from edgespec.verifier.targets.quantized_linear import FORMATS, HEAD_BITS, check_product

Array = NDArray[Any]
_GEMMA: Final = ("gemma", "gemma2", "gemma3_text")
_ACTIVATIONS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),
    "gelu": ("Gelu", {}),
    "gelu_new": ("Gelu", {"approximate": "tanh"}),
    "gelu_pytorch_tanh": ("Gelu", {"approximate": "tanh"}),
}


def _graph_shape(model: Any) -> GraphShape:
    config = model.config
    layers = model.model.layers
    return GraphShape(
        layers=len(layers),
        heads=int(config.num_attention_heads),
        kv_heads=int(config.num_key_value_heads or config.num_attention_heads),
        head_dim=int(layers[0].self_attn.head_dim),
        windows=tuple(sorted({_find_window(config, index) for index in range(len(layers))})),
    )


def _find_activation(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _find_window(config: Any, layer: int) -> int:
    """Return the attention window of a layer in tokens, or 0 for the whole text."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not window or (kinds and kinds[layer] != "sliding_attention"):
        return 0
    if config.model_type == "qwen2" and not config.use_sliding_window:
        return 0
    return int(window)


def load_graph(
    path: str, model: Any, number_format: str, context_length: int
) -> tuple[GraphModel, RoundingLoss]:
    """Return ``model``, whose weights are float32, as a graph with rounded weights, and the loss.

    The layers and the head of ``model`` are taken apart on the way; its embedding table stays.
    Raises ``UnsupportedModelError`` where this machine's products are wrong."""
    bits = FORMATS[number_format]
    for tried in sorted({bits, HEAD_BITS}):
        check_product(path, "o_proj", [model.model.layers[0].self_attn.o_proj], tried)
    builder = _GraphBuilder(model, context_length, bits)
    threads = cpu_threads.count()
    embed = model.get_input_embeddings()
    factor = getattr(model.config, "embedding_multiplier", None)
    first = builder.session(1, threads, is_probe=True)
    whole = builder.session(builder.shape.layers, threads)
    model.model.layers = torch.nn.ModuleList()
    model.set_output_embeddings(torch.nn.Identity())
    graph = GraphModel(
        shape=builder.shape,
        embed=embed if factor is None else lambda tokens: embed(tokens) * factor,
        session=whole.session,
        probe=first.session,
        context_length=context_length,
        constants=[first.nodes, whole.nodes],
    )
    before = probe_logits(graph)
    first.nodes.drop_packed()
    if np.array_equal(probe_logits(graph), before):
        whole.nodes.drop_packed()
    copy_from_file(model)  # the embedding table is left
    return graph, builder.loss


@dataclass(frozen=True, slots=True)
class BuiltGraph:
    session: Any
    nodes: GraphNodes
    """The constants that the session reads where they lie."""


class _GraphBuilder:
    """Builds graphs of the first layers of ``model``. Each matrix is rounded once, to ``bits`` or
    in the head to ``HEAD_BITS``, and its float32 numbers are dropped. ``context_length`` is how
    many positions the rotary tables hold."""

    def __init__(self, model: Any, context_length: int, bits: int) -> None:
        self._model, self._config = model, model.config
        self._context_length, self._bits = context_length, bits
        self._rounded: dict[str, RoundedMatrix] = {}
        self.loss = RoundingLoss()
        self.shape = _graph_shape(model)
        self._graph = GraphNodes()

    def session(self, layers: int, threads: int, *, is_probe: bool = False) -> BuiltGraph:
        """Return a session of the first ``layers`` layers, the last norm and the head. A probe also
        has the rows behind that norm as an output, ``normed_rows``."""
        graph = self._graph = GraphNodes()
        shape, config = self.shape, self._config
        hidden = int(config.hidden_size)
        self._rotary_tables(layers)
        flat = np.array([-1, shape.head_dim], dtype=np.int64)
        graph.constant("by_head", flat)
        joined = np.array([1, -1, shape.heads * shape.head_dim], dtype=np.int64)
        graph.constant("joined", joined)
        shifts = [f"shift.{layer}" for layer in range(layers)]
        graph.node("Split", ["shifts"], "shift", outputs=shifts, axis=0, num_outputs=layers)
        residual, branch = "rows", ""
        written: list[tuple[str, str]] = []
        for layer in range(layers):
            residual, branch, kept = self._layer(layer, residual, branch)
            written.append(kept)
        graph.node("Concat", [key for key, _ in written], "new_keys", axis=1)
        graph.node("Concat", [value for _, value in written], "new_values", axis=1)
        normed, _ = self._norm("norm", self._model.model.norm, residual, branch)
        picked = graph.node("Gather", [normed, "sampled"], "picked", axis=1)
        self._head(picked)
        if is_probe:
            graph.node("Identity", [normed], "normed_rows")
        outputs = self._outputs(hidden, is_probe=is_probe)
        return BuiltGraph(graph.session(self._inputs(hidden), outputs, threads), graph)

    # --- the parts of a decoder -----------------------------------------------------------

    def _layer(self, index: int, residual: str, branch: str) -> tuple[str, str, tuple[str, str]]:
        """Append a layer. Return the residual stream, the branch that is still to be added to it,
        and the layer's new keys and values."""
        graph, layer, name = self._graph, self._model.model.layers[index], f"{index}"
        sandwiched = hasattr(layer, "pre_feedforward_layernorm")
        normed, residual = self._norm(f"{name}.input", layer.input_layernorm, residual, branch)
        attended, kept = self._attention(index, normed)
        if sandwiched:
            attended = self._plain_norm(
                f"{name}.attended", layer.post_attention_layernorm, attended
            )
        attended = self._scaled_branch(f"{name}.attended.scaled", attended)
        before = layer.pre_feedforward_layernorm if sandwiched else layer.post_attention_layernorm
        normed, residual = self._norm(f"{name}.middle", before, residual, attended)
        gate_up = self._product(f"{name}.gate_up", layer.mlp, ("gate_proj", "up_proj"), normed)
        gate, up = f"{name}.gate", f"{name}.up"
        graph.node("Split", [gate_up], gate, outputs=[gate, up], axis=-1, num_outputs=2)
        kind, form = _ACTIVATIONS[_find_activation(self._config)]
        active = graph.node(kind, [gate], f"{name}.active", **form)
        inner = graph.node("Mul", [active, up], f"{name}.inner")
        down = self._product(f"{name}.down", layer.mlp, ("down_proj",), inner)
        if sandwiched:
            down = self._plain_norm(f"{name}.fed", layer.post_feedforward_layernorm, down)
        return residual, self._scaled_branch(f"{name}.fed.scaled", down), kept

    def _attention(self, index: int, normed: str) -> tuple[str, tuple[str, str]]:
        graph, shape, name = self._graph, self.shape, f"{index}.attention"
        module = self._model.model.layers[index].self_attn
        names = ("q_proj", "k_proj", "v_proj")
        joint = self._product(f"{name}.qkv", module, names, normed)
        widths = [shape.heads, shape.kv_heads, shape.kv_heads]
        graph.constant(f"{name}.widths", np.array(widths, dtype=np.int64) * shape.head_dim)
        query, key, value = (f"{name}.{part}" for part in ("query", "key", "value"))
        graph.node("Split", [joint, f"{name}.widths"], query, outputs=[query, key, value], axis=-1)
        query = self._positioned(index, query, getattr(module, "q_norm", None), shape.heads)
        key = self._positioned(index, key, getattr(module, "k_norm", None), shape.kv_heads)
        window = _find_window(self._config, index)
        places = graph.node("Add", [f"places.{window}", f"shift.{index}"], f"{name}.places")
        by_head = graph.node("Reshape", [query, "by_head"], f"{name}.by_head")
        grouped = graph.node("Gather", [by_head, "queries"], f"{name}.queries", axis=0)
        keys = self._line(f"{name}.keys", "keys", places, key, window)
        values = self._line(f"{name}.values", "values", places, value, window)
        scores = graph.node(
            "FusedMatMul",
            [grouped, keys],
            f"{name}.scores",
            transB=1,
            alpha=float(module.scaling),
        )
        if cap := getattr(module, "attn_logit_softcapping", None):
            scores = self._capped(f"{name}.capped", scores, float(cap))
        scores = graph.node("Add", [scores, f"hidden.{window}"], f"{name}.masked")
        weights = graph.node("Softmax", [scores], f"{name}.softmax", axis=-1)
        weights = graph.node("Mul", [weights, f"seen.{window}"], f"{name}.weights")
        out = graph.node("MatMul", [weights, values], f"{name}.sums")
        out = graph.node("Reshape", [out, "by_head"], f"{name}.sums.by_head")
        out = graph.node("Gather", [out, "back"], f"{name}.by_row", axis=0)
        out = graph.node("Reshape", [out, "joined"], f"{name}.joined")
        attended = self._product(f"{name}.out", module, ("o_proj",), out)
        return attended, (key, value)

    def _line(self, name: str, pool: str, places: str, new: str, window: int) -> str:
        """Append the nodes that gather the keys (or values) of all lines of layers with ``window``.
        ``new`` names the keys of the run's own rows."""
        graph = self._graph
        cached = graph.node("Gather", [pool, places], f"{name}.cached", axis=0)
        own = graph.node("Reshape", [new, "by_head"], f"{name}.own")
        fresh = graph.node("Gather", [own, f"fresh_rows.{window}"], f"{name}.fresh", axis=0)
        return graph.node("ScatterND", [cached, f"fresh_goals.{window}", fresh], name)

    def _positioned(self, index: int, value: str, norm: Any, heads: int) -> str:
        """Append the norm over heads, where the family has one, and the rotation by position."""
        graph, shape = self._graph, self.shape
        if norm is not None:
            split, join = f"{value}.split", f"{value}.join"
            graph.constant(split, np.array([0, 0, heads, shape.head_dim], dtype=np.int64))
            graph.constant(join, np.array([0, 0, heads * shape.head_dim], dtype=np.int64))
            apart = graph.node("Reshape", [value, split], f"{value}.apart")
            normed = self._plain_norm(f"{value}.normed", norm, apart)
            value = graph.node("Reshape", [normed, join], f"{value}.again")
        table = self._table_of(index)
        inputs = [value, "positions", f"cos.{table}", f"sin.{table}"]
        width = self._rotated[table]
        partial: dict[str, Any] = {}
        if width != shape.head_dim:
            partial["rotary_embedding_dim"] = width
        return graph.node("RotaryEmbedding", inputs, f"{value}.rotated", num_heads=heads, **partial)

    def _head(self, picked: str) -> None:
        graph, config = self._graph, self._config
        head = self._model.get_output_embeddings()
        rounded = self._rounded_matrix("head", [head], is_head=True)
        logits = self._block_product("head", picked, rounded, [head])
        if divisor := getattr(config, "logits_scaling", None):
            graph.constant("logits.divisor", np.array(divisor, dtype=np.float32))
            logits = graph.node("Div", [logits, "logits.divisor"], "logits.divided")
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = self._capped("logits.capped", logits, float(cap))
        graph.node("Identity", [logits], "logits")

    # --- small parts ----------------------------------------------------------------------

    def _norm(self, name: str, module: Any, residual: str, branch: str) -> tuple[str, str]:
        """Append the norm of residual + branch. Return the names of the norm and of the sum."""
        if not branch:
            return self._plain_norm(name, module, residual), residual
        weight, epsilon = self._norm_weight(module)
        return self._graph.sum_norm(name, residual, branch, weight, epsilon)

    def _plain_norm(self, name: str, module: Any, rows: str) -> str:
        return self._graph.norm(name, rows, *self._norm_weight(module))

    def _norm_weight(self, module: Any) -> tuple[Array, float]:
        weight = module.weight.detach().float()
        if self._config.model_type in _GEMMA:
            weight = 1.0 + weight
        epsilon = getattr(module, "variance_epsilon", None)
        return weight.numpy().copy(), float(module.eps if epsilon is None else epsilon)

    def _scaled_branch(self, name: str, branch: str) -> str:
        """Append Granite's factor on what is added to the stream."""
        factor = getattr(self._config, "residual_multiplier", None)
        if factor is None:
            return branch
        self._graph.constant(f"{name}.factor", np.array(factor, dtype=np.float32))
        return self._graph.node("Mul", [branch, f"{name}.factor"], name)

    def _capped(self, name: str, value: str, cap: float) -> str:
        """Append cap * tanh(value / cap)."""
        graph = self._graph
        graph.constant(f"{name}.cap", np.array(cap, dtype=np.float32))
        share = graph.node("Div", [value, f"{name}.cap"], f"{name}.share")
        bent = graph.node("Tanh", [share], f"{name}.bent")
        return graph.node("Mul", [bent, f"{name}.cap"], name)

    def _product(self, name: str, parent: Any, names: tuple[str, ...], rows: str) -> str:
        """Append the joint product with the matrices ``names`` of ``parent``, or with the one
        matrix that Phi-3 has in their place."""
        if names[0] == "q_proj" and hasattr(parent, "qkv_proj"):
            names = ("qkv_proj",)
        if names[0] == "gate_proj" and hasattr(parent, "gate_up_proj"):
            names = ("gate_up_proj",)
        layers = [getattr(parent, part) for part in names]
        rounded = self._rounded_matrix(name, layers, is_head=False)
        return self._block_product(name, rows, rounded, layers)

    def _block_product(
        self, name: str, rows: str, rounded: RoundedMatrix, layers: list[Any]
    ) -> str:
        """Add the product of ``rows`` with the weights of ``layers``, which were rounded as one
        matrix.

        Their biases become one too; a layer without one adds zeros. Return the name of the
        result."""
        bias = None
        if any(layer.bias is not None for layer in layers):
            parts = [
                torch.zeros(layer.out_features) if layer.bias is None else layer.bias.detach()
                for layer in layers
            ]
            bias = torch.cat(parts).float().numpy()
        return self._graph.block_product(name, rows, rounded, bias)

    def _rounded_matrix(self, name: str, layers: list[Any], *, is_head: bool) -> RoundedMatrix:
        if name not in self._rounded:
            weight = torch.cat([layer.weight.detach() for layer in layers]).numpy()
            bits = HEAD_BITS if is_head else self._bits
            self._rounded[name] = rounded = round_matrix(weight, bits)
            self.loss.add(name, rounded.squares, rounded.lost_squares)
            for layer in layers:
                layer.weight = None
        return self._rounded[name]

    # --- rotary positions -----------------------------------------------------------------

    def _table_of(self, index: int) -> str:
        """Return the name of the rotary table of a layer: Gemma 3 has one for each layer type."""
        if self._config.model_type != "gemma3_text":
            return "all"
        return str(self._config.layer_types[index])

    def _rotary_tables(self, layers: int) -> None:
        """Add the cosines and sines of all positions, as the model's own module computes them, for
        the first ``layers`` layers."""
        module = self._model.model.rotary_emb
        rows = torch.zeros((1, 1, 1))
        positions = torch.arange(self._context_length)[None]
        self._rotated: dict[str, int] = {}
        for table in sorted({self._table_of(index) for index in range(layers)}):
            given = () if table == "all" else (table,)
            with torch.inference_mode():
                cos, sin = module(rows, positions, *given)
            self._rotated[table] = width = cos.shape[-1]
            # Both halves are equal; the operator wants one.
            for part, values in (("cos", cos), ("sin", sin)):
                half = values[0, :, : width // 2].float().numpy()
                self._graph.constant(f"{part}.{table}", half)

    # --- inputs and outputs ---------------------------------------------------------------

    def _inputs(self, hidden: int) -> list[ValueInfoProto]:
        shape = self.shape
        whole, real = TensorProto.INT64, TensorProto.FLOAT
        row_heads = "rows_and_heads"
        found: dict[str, tuple[int, list[int | str]]] = {
            "rows": (real, [1, "rows", hidden]),
            "positions": (whole, [1, "rows"]),
            "queries": (whole, ["groups", shape.kv_heads, row_heads]),
            "shifts": (whole, ["layers"]),
            "keys": (real, ["slots", shape.head_dim]),
            "values": (real, ["slots", shape.head_dim]),
            "back": (whole, ["rows", shape.heads]),
            "sampled": (whole, ["sampled"]),
        }
        for window in shape.windows:
            line, fresh = f"line.{window}", f"fresh.{window}"
            found[f"places.{window}"] = whole, ["groups", shape.kv_heads, line]
            found[f"fresh_rows.{window}"] = whole, [fresh]
            found[f"fresh_goals.{window}"] = whole, [fresh, 3]
            for name in ("hidden", "seen"):
                found[f"{name}.{window}"] = real, ["groups", 1, row_heads, line]
        return [helper.make_tensor_value_info(name, *form) for name, form in found.items()]

    def _outputs(self, hidden: int, *, is_probe: bool) -> list[ValueInfoProto]:
        real, width = TensorProto.FLOAT, self.shape.kv_heads * self.shape.head_dim
        found: dict[str, list[int | str]] = {
            "logits": [1, "sampled", int(self._config.vocab_size)],
            "new_keys": [1, "new", width],
            "new_values": [1, "new", width],
        }
        if is_probe:
            found["normed_rows"] = [1, "rows", hidden]
        return [helper.make_tensor_value_info(name, real, dims) for name, dims in found.items()]
