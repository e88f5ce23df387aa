"""Builds ONNX graphs node by node.

``GraphNodes`` collects nodes and constants and knows the operators that all of our decoder graphs
share: products with rounded weights and norms, which are onnxruntime's own fused operators. Large
constants stay outside of the protocol buffer, which cannot hold more than 2 GiB: the session reads
them in the arrays that were given, which have to live as long as it does.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from edgespec.models.onnx_runtime import ort
from edgespec.models.weight_blocks import CONTRIB, RoundedMatrix, matmul_attributes
from edgespec.operating_system import drop_memory

OPSET: Final = 21
IR_VERSION: Final = 10
_CONTRIB_KINDS: Final = (
    "FusedMatMul",
    "MatMulNBits",
    "QuickGelu",
    "RotaryEmbedding",
    "SkipSimplifiedLayerNormalization",
)
"""Operators of onnxruntime's own domain. ``SimplifiedLayerNormalization`` is its own too, but it is
registered in the standard domain."""
_LEAST_EXTERNAL_BYTES: Final = 1024
"""Smaller constants lie in the graph itself, where the optimizer can read them."""
Array = NDArray[Any]


class GraphNodes:
    """Collects the nodes and constants of one graph."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self._small: list[TensorProto] = []
        self._large: dict[str, Array] = {}
        self._packed: list[mmap.mmap] = []

    def constant(self, name: str, value: Array) -> str:
        """Add a constant and return its name."""
        if value.nbytes < _LEAST_EXTERNAL_BYTES:
            self._small.append(numpy_helper.from_array(value, name))
        else:
            self._large[name] = np.ascontiguousarray(value)
        return name

    def _packed_constant(self, name: str, value: Array) -> str:
        """Add a constant of which a session makes a copy in the order of its kernels."""
        memory = mmap.mmap(-1, value.nbytes)
        array = np.frombuffer(memory, value.dtype).reshape(value.shape)
        array[...] = value
        self._packed.append(memory)
        return self.constant(name, array)

    def drop_packed(self) -> None:
        """Give back the memory of the rounded matrices, which then read as zeros. A session goes on
        computing where it has made its own copies; the caller has tried that it does."""
        for memory in self._packed:
            drop_memory(memory)

    def node(
        self,
        kind: str,
        inputs: Sequence[str],
        name: str,
        *,
        outputs: Sequence[str] = (),
        **attributes: float | str,
    ) -> str:
        """Append a node and return its first output, which is called ``name`` unless ``outputs``
        are given."""
        outputs = list(outputs) or [name]
        domain = CONTRIB if kind in _CONTRIB_KINDS else ""
        node = helper.make_node(kind, list(inputs), outputs, name=name, domain=domain)
        node.attribute.extend(helper.make_attribute(key, attributes[key]) for key in attributes)
        self.nodes.append(node)
        return outputs[0]

    def block_product(
        self,
        name: str,
        rows: str,
        matrix: RoundedMatrix,
        bias: Array | None = None,
    ) -> str:
        """Append the product of ``rows`` with a rounded matrix, plus ``bias``, and return its
        name."""
        inputs = [
            rows,
            self._packed_constant(f"{name}.integers", matrix.integers),
            self.constant(f"{name}.scales", matrix.scales.reshape(-1)),
        ]
        if matrix.zero_points is not None:
            points = matrix.zero_points.reshape(-1)
            inputs.append(self.constant(f"{name}.zero_points", points))
        if bias is not None:
            inputs += [""] * (5 - len(inputs))
            inputs.append(self.constant(f"{name}.bias", bias))
        form = matmul_attributes(len(matrix.integers), matrix.columns, matrix.bits)
        return self.node("MatMulNBits", inputs, name, **form)

    def norm(self, name: str, rows: str, weight: Array, epsilon: float) -> str:
        """Append an RMS norm over the last axis and return its name."""
        inputs = [rows, self.constant(f"{name}.weight", weight)]
        return self.node("SimplifiedLayerNormalization", inputs, name, axis=-1, epsilon=epsilon)

    def sum_norm(
        self, name: str, rows: str, branch: str, weight: Array, epsilon: float
    ) -> tuple[str, str]:
        """Append the sum of ``rows`` and ``branch`` and its RMS norm; return the names of the norm
        and of the sum."""
        inputs = [branch, rows, self.constant(f"{name}.weight", weight)]
        outputs = [name, "", "", f"{name}.sum"]
        self.node(
            "SkipSimplifiedLayerNormalization", inputs, name, outputs=outputs, epsilon=epsilon
        )
        return name, f"{name}.sum"

    def session(
        self, inputs: Sequence[ValueInfoProto], outputs: Sequence[ValueInfoProto], threads: int
    ) -> Any:
        """Return an onnxruntime session of the graph, which computes with ``threads`` threads."""
        external = [_describe_external(name, value) for name, value in self._large.items()]
        graph: GraphProto = helper.make_graph(
            self.nodes, "edgespec", list(inputs), list(outputs), [*self._small, *external]
        )
        opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
        model: ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Patterns are kept for every combination of sizes, and passes have many.
        options.enable_mem_pattern = False
        # Threads wait busily within a run, where the next operator comes at once, but not after it.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        values = [ort.OrtValue.ortvalue_from_numpy(value) for value in self._large.values()]
        options.add_external_initializers(list(self._large), values)
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _describe_external(name: str, value: Array) -> TensorProto:
    """Return the description of a constant whose numbers the session gets by its name."""
    tensor = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(value.dtype),
        dims=value.shape,
        data_location=TensorProto.EXTERNAL,
    )
    tensor.external_data.add(key="location", value="given")
    return tensor
