"""Block-wise symmetric quantisation of weight matrices, in the layout of ``MatMulNBits``.

A matrix [N, K] (N outputs, K inputs) is cut along K into blocks of 32, the last of which is filled
up with zeros. A block has one float32 scale; an entry is an unsigned integer with the implied zero
point ``2**(bits - 1)``:

    weight = (integer - zero_point) * scale

4-bit integers are packed two a byte, low nibble first. With B = ceil(K / 32), ``packed`` is uint8
[N, B, 16 or 32], ``scales`` float32 [N, B], no zero-point tensor. ``GatherBlockQuantized`` reads
the same bytes as uint8 [N, 16 B or 32 B], so one initializer can serve a tied embedding and head.

The integer range is not symmetric (-8..7 for 4 bits), so the sign of the scale matters: the entry
of largest magnitude may be mapped to -8. Per block the least-squares scale is fitted for a small
grid of roundings and the best one is kept (the practice of llama.cpp's ``make_qx_quants``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

BLOCK_SIZE = 32

# Largest magnitude over integer range, as multiples of the full-range scale; both signs are tried.
_GRID_4 = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 1.07, 1.14)
_GRID_8 = (1.0,)
_ROWS_A_TIME = 2048


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """Integers and scales of a matrix [N, K], laid out as the head of this file says."""

    packed: NDArray[np.uint8]
    scales: NDArray[np.float32]
    bits: int
    columns: int
    """K, without what fills up the last block."""


def quantize_matrix(weight: NDArray[np.float32], bits: int) -> QuantizedMatrix:
    """Round ``weight`` [N, K] to nearest with fitted block scales; deterministic.

    Raises ``ValueError`` when ``bits`` is not 4 or 8.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is {bits}, but must be 4 or 8")
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_SIZE)
    if missing := blocks * BLOCK_SIZE - columns:
        weight = np.pad(weight, ((0, 0), (0, missing)))
    integers = np.empty((rows, blocks, BLOCK_SIZE), dtype=np.uint8)
    scales = np.empty((rows, blocks), dtype=np.float32)
    for start in range(0, rows, _ROWS_A_TIME):
        part = slice(start, start + _ROWS_A_TIME)
        values = weight[part].astype(np.float32).reshape(-1, blocks, BLOCK_SIZE)
        integers[part], scales[part] = _fit(values, bits)
    return QuantizedMatrix(_pack(integers, bits), scales, bits, columns)


def dequantize_matrix(matrix: QuantizedMatrix) -> NDArray[np.float32]:
    """The float32 [N, K] that a kernel with exact arithmetic would use."""
    packed = matrix.packed
    if matrix.bits == 4:
        nibbles = np.stack((packed & 0x0F, packed >> 4), axis=-1)
        packed = nibbles.reshape(*packed.shape[:2], BLOCK_SIZE)
    zero_point = np.float32(1 << (matrix.bits - 1))
    values = (packed.astype(np.float32) - zero_point) * matrix.scales[..., None]
    return values.reshape(len(values), -1)[:, : matrix.columns]


def _fit(values: NDArray[np.float32], bits: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Integers (with zero point) and scales of blocks [R, B, 32] that lose least in squares.

    For fixed integers q the best scale is <w, q> / <q, q>, and the loss it leaves is
    <w, w> - <w, q>**2 / <q, q>; so the largest second term wins.
    """
    half = 1 << (bits - 1)
    peak = np.abs(values).max(axis=-1, keepdims=True)
    inverse_peak = np.divide(half, peak, out=np.zeros_like(peak), where=peak > 0)
    best = np.zeros_like(values)
    best_gain = np.full(values.shape[:2], -1.0, dtype=np.float32)
    scales = np.zeros(values.shape[:2], dtype=np.float32)
    for factor in _GRID_4 if bits == 4 else _GRID_8:
        for sign in (-1.0, 1.0):
            rounded = np.rint(values * (inverse_peak * np.float32(sign / factor)))
            np.clip(rounded, -half, half - 1, out=rounded)
            product = np.einsum("rbk,rbk->rb", values, rounded)
            square = np.einsum("rbk,rbk->rb", rounded, rounded)
            safe = np.maximum(square, 1.0)
            gain = product * product / safe
            better = gain > best_gain
            best_gain = np.where(better, gain, best_gain)
            scales = np.where(better, product / safe, scales)
            best = np.where(better[..., None], rounded, best)
    return (best + half).astype(np.uint8), scales


def _pack(integers: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 8:
        return integers
    return integers[..., 0::2] | (integers[..., 1::2] << np.uint8(4))


# --------------------------------------------------------------------------------------------
# The matrices of a float32 graph that others exported, rounded to 4 or 8 bits.
#
# Products with a constant matrix become ``MatMulNBits``, the embedding ``GatherBlockQuantized``, as
# in our own graphs (``quantize.py``). A head that reads the embedding transposed shares its bytes
# with it. Matrices of fewer rows or columns than a block stay as they are.


_CONTRIB = "com.microsoft"
_INT8_ACCUMULATION = 4  # MatMulNBits accuracy_level: activations may be rounded to 8 bits
MAX_SINGLE_FILE_BYTES = 4_000_000


def round_graph(path: Path, bits: int) -> int:
    """Rewrite the model at ``path`` and its external data; returns how many matrices were rounded.
    Raises ``ValueError`` when ``bits`` is not 4 or 8, ``OSError``."""
    model = onnx.load(path)
    rounding = _Rounding(model.graph, bits)
    nodes = [one for node in model.graph.node for one in rounding.node(node)]
    del model.graph.node[:]
    model.graph.node.extend(_used(nodes, model.graph))
    model.graph.initializer.extend(rounding.added)
    _drop_unused(model.graph)
    if not any(opset.domain == _CONTRIB for opset in model.opset_import):
        model.opset_import.append(helper.make_opsetid(_CONTRIB, 1))
    for old in path.parent.glob(f"{path.name}?data"):
        old.unlink()
    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    large = size > MAX_SINGLE_FILE_BYTES
    location = f"{path.name}.data" if large else None
    onnx.save_model(model, path, save_as_external_data=large, location=location)
    return rounding.count


@dataclass
class _Rounding:
    graph: onnx.GraphProto
    bits: int
    added: list[onnx.TensorProto] = field(default_factory=list)
    count: int = 0

    def __post_init__(self) -> None:
        self._constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self._turned = {
            node.output[0]: node.input[0]
            for node in self.graph.node
            if node.op_type == "Transpose" and node.input[0] in self._constants
        }
        self._known: dict[str, tuple[str, str]] = {}

    def node(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """What stands in the place of ``node``."""
        if node.op_type == "MatMul":
            name = node.input[1]
            if name in self._turned:
                return self._product(node, self._turned[name], turned=True)
            return self._product(node, name, turned=False)
        if node.op_type == "Gather":
            return self._rows(node)
        return [node]

    def _product(self, node: onnx.NodeProto, name: str, *, turned: bool) -> list[onnx.NodeProto]:
        found = self._matrix(name, turned=turned)
        if found is None:
            return [node]
        packed, scales, (rows, columns) = found
        return [
            helper.make_node(
                "MatMulNBits",
                [node.input[0], packed, scales],
                list(node.output),
                name=node.name,
                domain=_CONTRIB,
                N=rows,
                K=columns,
                bits=self.bits,
                block_size=BLOCK_SIZE,
                accuracy_level=_INT8_ACCUMULATION,
            )
        ]

    def _rows(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        axis = next((one.i for one in node.attribute if one.name == "axis"), 0)
        tensor = self._constants.get(node.input[0])
        if axis or tensor is None or len(tensor.dims) != 2 or tensor.dims[1] % BLOCK_SIZE:
            return [node]
        found = self._matrix(node.input[0], turned=True)
        if found is None:
            return [node]
        packed, scales, (rows, columns) = found
        shape, table = f"{packed}.shape", f"{packed}.table"
        width = columns * self.bits // 8
        self.added.append(numpy_helper.from_array(np.array([rows, width], dtype=np.int64), shape))
        return [
            helper.make_node("Reshape", [packed, shape], [table], name=table),
            helper.make_node(
                "GatherBlockQuantized",
                [table, node.input[1], scales],
                list(node.output),
                name=node.name,
                domain=_CONTRIB,
                bits=self.bits,
                block_size=BLOCK_SIZE,
                gather_axis=0,
                quantize_axis=1,
            ),
        ]

    def _matrix(self, name: str, *, turned: bool) -> tuple[str, str, tuple[int, int]] | None:
        """(integers, scales, (outputs, inputs)) of a constant; ``turned``: it lies [outputs,
        inputs]. None for what is no float32 matrix, or a small one."""
        tensor = self._constants.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.FLOAT or len(tensor.dims) != 2:
            return None
        if min(tensor.dims) < BLOCK_SIZE:
            return None
        first, second = tensor.dims
        key = f"{name}{'' if turned else '.turned'}"
        if key not in self._known:
            weight = numpy_helper.to_array(tensor)
            weight = weight if turned else np.ascontiguousarray(weight.T)
            matrix = quantize_matrix(weight, self.bits)
            packed, scales = self._known[key] = f"{key}.packed", f"{key}.scales"
            self.added.append(numpy_helper.from_array(matrix.packed, packed))
            self.added.append(numpy_helper.from_array(matrix.scales, scales))
            self.count += 1
        return (*self._known[key], (first, second) if turned else (second, first))


def _used(nodes: list[onnx.NodeProto], graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Without transposes that nobody reads any more."""
    read = {name for node in nodes for name in node.input} | {one.name for one in graph.output}
    return [n for n in nodes if n.op_type != "Transpose" or read.intersection(n.output)]


def _drop_unused(graph: onnx.GraphProto) -> None:
    read = {name for node in graph.node for name in node.input}
    kept = [tensor for tensor in graph.initializer if tensor.name in read]
    del graph.initializer[:]
    graph.initializer.extend(kept)
