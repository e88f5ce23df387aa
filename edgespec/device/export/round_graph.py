"""The matrices of a float32 graph that others exported, rounded to 4 or 8 bits.

Products with a constant matrix become ``MatMulNBits``, the embedding ``GatherBlockQuantized``, as
in our own graphs (``quantize.py``). A head that reads the embedding transposed shares its bytes
with it. Matrices of fewer rows or columns than a block stay as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgespec.device.export.quantize import BLOCK_SIZE, quantize_matrix

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
