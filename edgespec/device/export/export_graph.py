"""A Llama-family decoder as an ONNX graph made for drafting on a small CPU.

The graph is built node by node instead of traced, because a traced graph copies the KV cache at
every step. Here ``GroupQueryAttention`` writes new keys and values in place into buffers of fixed
capacity, and the cached length is an input, so rolling back costs one integer. A layer has about
eleven nodes:

    norm -> qkv -> attention -> o -> norm -> gate, up -> SiLU * up -> down

Queries, keys and values are one product. Rows of a matrix are independent, so the parts of its
result have the same bits as three separate products.

A draft may have table rows for a part of the ids only (``folders.KeptIds``). Its graph maps ids to
rows, and its logits have -inf at every id without a row. So it is used like any
other.

Inputs: ``input_ids`` int64 [1, T]; ``seqlens_k`` int32 [1], cached + T - 1;
``total_sequence_length`` int32 scalar, cached + T; ``past.{i}.key|value`` float32 [1, kv heads,
capacity, head dim]. Outputs: ``logits`` float32 [1, V] of the last position only, and
``present.{i}.key|value``, to be bound to the same memory as the past.

A parallel draft has one more input, ``num_logits_to_keep`` int64 [1], which is the number R of last
positions that get logits: float32 [R, V].

In the last layer everything behind the attention runs for these positions only, since the other
rows are not used. Norms, SiLU and attention are onnxruntime's own fused operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.device.export import quantize as qz
from edgespec.device.export.checkpoint import Checkpoint, DecoderShape
from edgespec.models import weight_blocks as wb


def rope_tables(
    rope: Mapping[str, Any], head_dim: int, context_length: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return (cos, sin) of position times frequency, float32 [context_length, head_dim / 2] each.

    Frequencies follow Su et al. 2021 (RoFormer) with theta from the config. ``linear`` divides
    positions by a factor (Chen et al. 2023). ``llama3`` stretches only the long wavelengths, with a
    linear blend between two limits (Llama 3.1 model card). ``yarn`` blends by the number of turns
    that a dimension makes within the original context, and sharpens the attention by a factor on
    both tables (Peng et al. 2023, section 3).

    The product is computed in float32, as the reference implementation does: at long positions a
    float64 product would differ from the values of the training."""
    angles = np.outer(
        np.arange(context_length, dtype=np.float32), _compute_frequencies(rope, head_dim)
    )
    factor = np.float32(_yarn_sharpness(rope) if rope["rope_type"] == "yarn" else 1.0)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _compute_frequencies(rope: Mapping[str, Any], head_dim: int) -> NDArray[np.float32]:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies: NDArray[Any] = 1.0 / np.float32(rope["rope_theta"]) ** exponents
    match rope["rope_type"]:
        case "linear":
            frequencies = frequencies / float(rope["factor"])
        case "llama3":
            frequencies = _scale_llama3(rope, frequencies)
        case "yarn":
            frequencies = _scale_yarn(rope, frequencies, head_dim)
    return frequencies.astype(np.float32)


def _scale_llama3(rope: Mapping[str, Any], plain: NDArray[Any]) -> NDArray[Any]:
    length = float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = length * plain / (2.0 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray((1.0 - share) * (plain / float(rope["factor"])) + share * plain)


def _scale_yarn(rope: Mapping[str, Any], plain: NDArray[Any], head_dim: int) -> NDArray[Any]:
    length, theta = float(rope["original_max_position_embeddings"]), float(rope["rope_theta"])

    def dimension(turns: float) -> float:
        """Return the dimension that makes ``turns`` turns within the original context."""
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(rope.get("beta_fast") or 32.0))
    high = dimension(float(rope.get("beta_slow") or 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # The reference does the same against a division by zero.
    steps = np.arange(len(plain), dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0.0, 1.0)
    return np.asarray(plain / np.float32(rope["factor"]) * ramp + plain * (1.0 - ramp))


def _yarn_sharpness(rope: Mapping[str, Any]) -> float:
    """Return the factor on both tables: 0.1 ln(factor) + 1, unless the config sets another."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(max(1.0, float(rope["factor"]))) + 1.0

    weight, over_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if weight and over_all:
        return scale(float(weight)) / scale(float(over_all))
    return scale(1.0)


def padded_head_dim(head_dim: int) -> int:
    """Return the smallest size P that the kernel accepts and that holds ``head_dim`` entries (d,
    even).

    ``GroupQueryAttention`` with rotary positions accepts multiples of 16. A head is widened by
    entries that are zero in queries, keys and values, so no product changes. Rotation pairs entry i
    with entry i + P / 2, so each half is widened by itself: entry d / 2 + i moves to P / 2 + i.
    Three numbers would change with the size and are corrected. The attention's scale stays 1 /
    sqrt(d). A norm over the head (Qwen3) divides by the mean over P entries instead of d, so its
    weight is multiplied by sqrt(d / P) and its epsilon by d / P."""
    return -(-head_dim // 16) * 16


def pad_outputs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Widen the rows (or bias) of a projection to heads from [heads * d, ...] to [heads * P,
    ...]."""
    size = padded_head_dim(head_dim)
    if size == head_dim:
        return weight
    half, rest = head_dim // 2, weight.shape[1:]
    heads = len(weight) // head_dim
    padded = np.zeros((heads, 2, size // 2, *rest), dtype=np.float32)
    padded[:, :, :half] = weight.reshape(heads, 2, half, *rest)
    return padded.reshape(heads * size, *rest)


BITS = (4, 8, 32)
_ACTIVATIONS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "silu": ("QuickGelu", {"alpha": 1.0}),
    "gelu": ("Gelu", {}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
}
_TABLE = "model.embed_tokens"
_ROWS = "num_logits_to_keep"
_OPSET = 21
_IR_VERSION = 10
# SimplifiedLayerNormalization is onnxruntime's own too, yet registered in the standard domain.
_CONTRIB_KINDS = (
    "GatherBlockQuantized",
    "GroupQueryAttention",
    "MatMulNBits",
    "QuickGelu",
    "SkipSimplifiedLayerNormalization",
)


class GraphBuilder:
    """Builds the graph of a checkpoint.

    ``bits`` is the precision of the matrices: 4 and 8 are blocks of 32 (``quantize.py``), 32 is
    float32. Norms, biases and rotary tables stay float32. ``parallel`` is whether the number of
    rows of logits is an input. Raises ``ValueError`` for other bits."""

    def __init__(
        self,
        shape: DecoderShape,
        checkpoint: Checkpoint,
        context_length: int,
        bits: int,
        *,
        parallel: bool = False,
    ) -> None:
        if bits not in BITS:
            raise ValueError(f"bits is {bits}, but must be one of {BITS}")
        self._source = shape
        self._shape = replace(shape, head_dim=padded_head_dim(shape.head_dim))
        self._checkpoint, self._read = checkpoint, checkpoint.read
        self._context_length, self._parallel = context_length, parallel
        self._bits, self.loss = bits, wb.RoundingLoss()
        self._id_count = shape.kept.size if shape.kept else shape.vocabulary_size
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []

    def build(self, progress: Callable[[int, int], None] | None) -> onnx.ModelProto:
        """Return the model with its weights inside. The same input gives the same bytes.

        ``progress`` is called with the number of finished layers and of all layers. Raises
        ``ModelFolderError`` for a missing or misshapen tensor."""
        shape = self._shape
        self._add_rotations()
        if self._parallel:
            self._add_row_bounds()
        else:
            self._add_constant("last", np.array(-1, dtype=np.int64))
        residual, branch = self._add_embedding(), ""
        for layer in range(shape.layers):
            residual, branch = self._add_layer(layer, residual, branch)
            if progress is not None:
                progress(layer + 1, shape.layers)
        normed, _ = self._add_norm("model.norm", residual, branch)
        self._add_head(normed)
        value = helper.make_tensor_value_info
        dims: list[str | int | None] = [1, shape.kv_heads, "capacity", shape.head_dim]
        parts = [f"{layer}.{part}" for layer in range(shape.layers) for part in ("key", "value")]
        inputs = [
            value("input_ids", TensorProto.INT64, [1, "length"]),
            value("seqlens_k", TensorProto.INT32, [1]),
            value("total_sequence_length", TensorProto.INT32, []),
            *([value(_ROWS, TensorProto.INT64, [1])] if self._parallel else []),
            *[value(f"past.{part}", TensorProto.FLOAT, dims) for part in parts],
        ]
        outputs = [
            value("logits", TensorProto.FLOAT, ["rows" if self._parallel else 1, self._id_count]),
            *[value(f"present.{part}", TensorProto.FLOAT, dims) for part in parts],
        ]
        graph = helper.make_graph(
            self._nodes, "edgespec_draft", inputs, outputs, self._initializers
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(wb.CONTRIB, 1)]
        return helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="edgespec"
        )

    def _add_rotations(self) -> None:
        """Add the rotary tables [positions, d / 2], widened to [positions, P / 2] by angles of
        zero."""
        shape, dim = self._shape, self._source.head_dim
        added = ((0, 0), (0, (shape.head_dim - dim) // 2))
        for suffix, rope in (("", shape.rope), (".local", shape.local_rope)):
            if rope:
                cos, sin = rope_tables(rope, dim, self._context_length)
                self._add_constant(f"cos{suffix}", np.pad(cos, added, constant_values=1.0))
                self._add_constant(f"sin{suffix}", np.pad(sin, added))

    def _add_row_bounds(self) -> None:
        """Add the bounds of the slice that holds the last rows, for ``_add_last_rows``."""
        self._add_node("Neg", [_ROWS], "rows.start")
        self._add_constant("rows.end", np.array([np.iinfo(np.int64).max], dtype=np.int64))
        self._add_constant("rows.axis", np.array([1], dtype=np.int64))
        self._add_constant("rows.first_axis", np.array([0], dtype=np.int64))

    def _add_last_rows(self, value: str, name: str) -> str:
        """Return the rows of ``value`` [1, T, n] that get logits, as [R, n]: the last row, or as
        many as the input asks for."""
        if not self._parallel:
            return self._add_node("Gather", [value, "last"], name, axis=1)
        bounds = ["rows.start", "rows.end", "rows.axis"]
        last = self._add_node("Slice", [value, *bounds], f"{name}.slice")
        return self._add_node("Squeeze", [last, "rows.first_axis"], name)

    # --- parts of the decoder ---------------------------------------------------------------

    def _add_embedding(self) -> str:
        shape, name, ids = self._shape, _TABLE, "input_ids"
        if shape.kept is not None:
            rows_of_ids = np.zeros(shape.kept.size, dtype=np.int32)
            rows_of_ids[list(shape.kept.ids)] = np.arange(len(shape.kept.ids))
            self._add_constant(f"{name}.rows_of_ids", rows_of_ids)
            ids = self._add_node("Gather", [f"{name}.rows_of_ids", ids], f"{name}.own_ids")
        weight = self._read(f"{name}.weight", (shape.vocabulary_size, shape.hidden))
        if self._bits == 32:
            self._add_constant(f"{name}.weight", weight)
            return self._add_node("Gather", [f"{name}.weight", ids], name)
        filled = self._add_quantized(name, weight)
        width = filled * self._bits // 8
        self._add_constant(
            f"{name}.shape", np.array([shape.vocabulary_size, width], dtype=np.int64)
        )
        table = self._add_node("Reshape", [f"{name}.packed", f"{name}.shape"], f"{name}.table")
        rows = self._add_node(
            "GatherBlockQuantized",
            [table, ids, f"{name}.scales"],
            name if filled == shape.hidden else f"{name}.filled",
            **qz.gather_attributes(self._bits),
        )
        if filled == shape.hidden:
            return rows
        for part, value in (("start", 0), ("end", shape.hidden), ("axis", 2)):
            self._add_constant(f"{name}.{part}", np.array([value], dtype=np.int64))
        return self._add_node(
            "Slice", [rows, *(f"{name}.{x}" for x in ("start", "end", "axis"))], name
        )

    def _add_layer(self, layer: int, residual: str, branch: str) -> tuple[str, str]:
        """Add a layer. Return (residual stream, output of the MLP that is still to be added to
        it)."""
        shape, name = self._shape, f"model.layers.{layer}"
        normed, residual = self._add_norm(f"{name}.input_layernorm", residual, branch)
        attended = self._add_attention(layer, normed)
        if layer == shape.layers - 1:
            attended = self._add_last_rows(attended, f"{name}.attended_last")
            residual = self._add_last_rows(residual, f"{name}.residual_last")
        attended = self._add_output_projection(f"{name}.self_attn.o_proj", attended)
        before = "post_attention_layernorm"
        if shape.normalises_branches:
            attended = self._add_simple_norm(f"{name}.{before}", attended, shape.norm_epsilon)
            before = "pre_feedforward_layernorm"
        normed, residual = self._add_norm(f"{name}.{before}", residual, attended)
        gate = self._add_linear(f"{name}.mlp.gate_proj", normed, shape.feed_forward, shape.hidden)
        up = self._add_linear(f"{name}.mlp.up_proj", normed, shape.feed_forward, shape.hidden)
        kind, form = _ACTIVATIONS[shape.activation]
        active = self._add_node(kind, [gate], f"{name}.mlp.active", **form)
        product = self._add_node("Mul", [active, up], f"{name}.mlp.product")
        down = self._add_linear(f"{name}.mlp.down_proj", product, shape.hidden, shape.feed_forward)
        if shape.normalises_branches:
            down = self._add_simple_norm(
                f"{name}.post_feedforward_layernorm", down, shape.norm_epsilon
            )
        return residual, down

    def _add_attention(self, layer: int, normed: str) -> str:
        shape, name = self._shape, f"model.layers.{layer}.self_attn"
        heads = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        query, key, value = self._add_joint_projection(name, normed, heads), "", ""
        if shape.normalises_heads:  # Without norms, the attention accepts the three in one tensor.
            widths = np.array([*heads.values()], dtype=np.int64) * shape.head_dim
            self._add_constant(f"{name}.qkv.widths", widths)
            joint, parts = [query, f"{name}.qkv.widths"], [f"{name}.qkv.{x}" for x in range(3)]
            self._add_node("Split", joint, f"{name}.qkv", outputs=parts, axis=-1)
            query, key, value = parts
            query = self._add_head_norm(f"{name}.q_norm", query, shape.heads)
            key = self._add_head_norm(f"{name}.k_norm", key, shape.kv_heads)
        past = [f"past.{layer}.key", f"past.{layer}.value"]
        present = [f"present.{layer}.key", f"present.{layer}.value"]
        lengths = ["seqlens_k", "total_sequence_length"]
        windowed = shape.slides(layer) and shape.window < self._context_length
        rope = shape.rope_of(layer)
        suffix = ".local" if rope is shape.local_rope else ""
        tables = [f"cos{suffix}", f"sin{suffix}"] if rope else []
        extra = {"softcap": shape.attention_cap} if shape.attention_cap else {}
        return self._add_node(
            "GroupQueryAttention",
            [query, key, value, *past, *lengths, *tables],
            f"{name}.attention",
            outputs=[f"{name}.attention", *present],
            num_heads=shape.heads,
            kv_num_heads=shape.kv_heads,
            do_rotary=1 if rope else 0,
            local_window_size=shape.window if windowed else -1,
            scale=shape.attention_scale,
            **extra,
        )

    def _add_joint_projection(self, name: str, normed: str, heads: Mapping[str, int]) -> str:
        """Return the product with the projections of ``heads`` (name: number of heads), all in
        one."""
        hidden, dim = self._shape.hidden, self._source.head_dim
        weights = [
            pad_outputs(self._read(f"{name}.{x}_proj.weight", (count * dim, hidden)), dim)
            for x, count in heads.items()
        ]
        joint = f"{name}.qkv_proj"
        product = self._add_product(joint, normed, np.concatenate(weights))
        if "q_proj" not in self._shape.biased:
            return product
        biases = [
            pad_outputs(self._read(f"{name}.{x}_proj.bias", (count * dim,)), dim)
            for x, count in heads.items()
        ]
        self._add_constant(f"{joint}.bias", np.concatenate(biases))
        return self._add_node("Add", [product, f"{joint}.bias"], f"{joint}.biased")

    def _add_output_projection(self, name: str, attended: str) -> str:
        hidden, dim = self._shape.hidden, self._source.head_dim
        weight = self._read(f"{name}.weight", (hidden, self._shape.heads * dim))
        # Columns are widened in the same way as rows.
        weight = np.ascontiguousarray(pad_outputs(np.ascontiguousarray(weight.T), dim).T)
        return self._add_bias(name, self._add_product(name, attended, weight), hidden)

    def _add_head_norm(self, name: str, value: str, heads: int) -> str:
        """Add an RMS norm of every head's vector (Qwen3). All heads share the weight."""
        dim = self._shape.head_dim
        # 0 keeps the input's dimension: [1, T, heads * dim] -> [1, T, heads, dim] and back.
        self._add_constant(f"{name}.split", np.array([0, 0, heads, dim], dtype=np.int64))
        self._add_constant(f"{name}.join", np.array([0, 0, heads * dim], dtype=np.int64))
        split = self._add_node("Reshape", [value, f"{name}.split"], f"{name}.heads")
        source_dim = self._source.head_dim
        weight = pad_outputs(self._read(f"{name}.weight", (source_dim,)), source_dim)
        weight = weight * np.float32(math.sqrt(source_dim / dim))
        normed = self._add_simple_norm(
            name, split, self._shape.norm_epsilon * source_dim / dim, weight
        )
        return self._add_node("Reshape", [normed, f"{name}.join"], f"{name}.joined")

    def _add_norm(self, name: str, residual: str, branch: str) -> tuple[str, str]:
        """Return (norm of residual + branch, residual + branch). Only the first layer has no
        branch."""
        if not branch:
            return self._add_simple_norm(name, residual, self._shape.stream_epsilon), residual
        self._add_constant(f"{name}.weight", self._read(f"{name}.weight", (self._shape.hidden,)))
        normed = self._add_node(
            "SkipSimplifiedLayerNormalization",
            [branch, residual, f"{name}.weight"],
            name,
            outputs=[name, "", "", f"{name}.sum"],
            epsilon=self._shape.stream_epsilon,
        )
        return normed, f"{name}.sum"

    def _add_simple_norm(
        self, name: str, value: str, epsilon: float, weight: NDArray[np.float32] | None = None
    ) -> str:
        """Add an RMS norm. Without a ``weight``, it is the checkpoint's, for the whole stream."""
        weight = self._read(f"{name}.weight", (self._shape.hidden,)) if weight is None else weight
        self._add_constant(f"{name}.weight", weight)
        inputs = [value, f"{name}.weight"]
        return self._add_node(
            "SimplifiedLayerNormalization", inputs, name, axis=-1, epsilon=epsilon
        )

    def _add_head(self, normed: str) -> None:
        shape, table = self._shape, _TABLE
        size = (shape.vocabulary_size, shape.hidden)
        last = "logits.of_rows" if shape.kept else "logits"
        out = "logits.uncapped" if shape.logits_cap else last
        if not shape.tied or self._has_own_head(size):
            self._add_product("lm_head", normed, self._read("lm_head.weight", size), out)
        elif self._bits == 32:  # The embedding table itself, read transposed.
            self._add_node("Gemm", [normed, f"{table}.weight"], out, transB=1)
        else:
            self._add_block_product(table, normed, size, out)
        if shape.logits_cap:
            self._add_constant("logits.cap", np.array(shape.logits_cap, dtype=np.float32))
            share = self._add_node("Div", [out, "logits.cap"], "logits.share")
            bent = self._add_node("Tanh", [share], "logits.bent")
            self._add_node("Mul", [bent, "logits.cap"], last)
        if shape.kept is not None:
            ids, filled = "logits.ids", "logits.shape"
            self._add_constant(ids, np.array([shape.kept.ids], dtype=np.int64))
            sizes = [1, shape.kept.size]
            if self._parallel:  # The number of rows is added below.
                filled, sizes = "logits.width", sizes[1:]
            self._add_constant(filled, np.array(sizes, dtype=np.int64))
            if self._parallel:
                own = self._add_node("Shape", [last], "logits.own_shape")
                ids = self._add_node("Expand", [ids, own], "logits.ids_of_rows")
                rows = self._add_node("Shape", [last], "logits.row_count", start=0, end=1)
                filled = self._add_node("Concat", [rows, filled], "logits.shape", axis=0)
            none = onnx.numpy_helper.from_array(np.array([-np.inf], dtype=np.float32))
            node = helper.make_node(
                "ConstantOfShape", [filled], ["logits.none"], name="logits.none", value=none
            )
            self._nodes.append(node)
            self._add_node("ScatterElements", ["logits.none", ids, last], "logits", axis=1)

    def _has_own_head(self, size: tuple[int, int]) -> bool:
        """Return whether a checkpoint that ties its tables holds a head other than the embedding.

        transformers uses the head in that case."""
        if "lm_head.weight" not in self._checkpoint:
            return False
        head, table = self._read("lm_head.weight", size), self._read(f"{_TABLE}.weight", size)
        return not np.array_equal(head, table)

    # --- matrices ---------------------------------------------------------------------------

    def _add_linear(self, name: str, value: str, rows: int, columns: int) -> str:
        weight = self._read(f"{name}.weight", (rows, columns))
        return self._add_bias(name, self._add_product(name, value, weight), rows)

    def _add_bias(self, name: str, product: str, rows: int) -> str:
        if name.rpartition(".")[2] not in self._shape.biased:
            return product
        self._add_constant(f"{name}.bias", self._read(f"{name}.bias", (rows,)))
        return self._add_node("Add", [product, f"{name}.bias"], f"{name}.biased")

    def _add_product(
        self, name: str, value: str, weight: NDArray[np.float32], output: str = ""
    ) -> str:
        if self._bits == 32:
            self._add_constant(f"{name}.weight", np.ascontiguousarray(weight.T))
            return self._add_node("MatMul", [value, f"{name}.weight"], output or name)
        self._add_quantized(name, weight)
        rows, columns = weight.shape
        return self._add_block_product(name, value, (rows, columns), output or name)

    def _add_quantized(self, name: str, weight: NDArray[np.float32]) -> int:
        """Add a rounded matrix. Return its number of columns, filled up to whole blocks."""
        rounded = wb.round_matrix(weight, self._bits, shifts=False)
        self.loss.add(name, rounded.squares, rounded.lost_squares)
        self._add_constant(f"{name}.packed", rounded.integers)
        self._add_constant(f"{name}.scales", rounded.scales)
        return int(rounded.scales.shape[1]) * wb.BLOCK_SIZE

    def _add_block_product(self, name: str, value: str, size: tuple[int, int], output: str) -> str:
        return self._add_node(
            "MatMulNBits",
            [value, f"{name}.packed", f"{name}.scales"],
            output,
            **wb.matmul_attributes(*size, self._bits),
        )

    # --- plumbing ---------------------------------------------------------------------------

    def _add_constant(self, name: str, value: NDArray[np.generic]) -> None:
        self._initializers.append(onnx.numpy_helper.from_array(value, name))

    def _add_node(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str,
        *,
        outputs: Sequence[str] = (),
        **attributes: int | float | str,
    ) -> str:
        """Append a node and return its first output, which has the node's name unless ``outputs``
        name it."""
        outputs = list(outputs) or [name]
        domain = wb.CONTRIB if kind in _CONTRIB_KINDS else ""
        node = helper.make_node(kind, list(inputs), outputs, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, attributes[key]) for key in attributes)
        self._nodes.append(node)
        return outputs[0]
