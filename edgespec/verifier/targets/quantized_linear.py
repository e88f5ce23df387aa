"""Linear layers whose weights are rounded to 4 or 8 bits, on a CPU.

Theory of operation. On a CPU a pass of few rows takes as long as reading the weights takes, so
fewer bits are fewer milliseconds. Weights are rounded in blocks of 32
(``models/weight_blocks.py``). The blocks have the format of GGUF's Q4_0 and Q8_0; a block of 4 bits
has a zero point where that leaves less error. onnxruntime's ``MatMulNBits`` multiplies them: it
rounds each row's inputs to 8 bits by the same blocks, and adds up whole numbers within a block.
Layers that read the same rows (query, key and value; gate and up) are one product, because each
product costs some microseconds beside its arithmetic. Most families do not come here: all their
layers are one graph (``decoder_graph.py``).

A row's bits may not depend on the rows beside it. Neither torch nor onnxruntime promises that, so
canonical mode tries the row counts it uses, as it does for other products (``row_tiles.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from edgespec.core.ports import UnsupportedModelError
from edgespec.models.weight_blocks import (
    CONTRIB,
    RoundedMatrix,
    RoundingLoss,
    matmul_attributes,
    round_matrix,
)
from edgespec.verifier.targets import cpu_threads

FORMATS: Final = {"int8": 8, "int4": 4}
"""Bits of a weight by the name of the format."""
HEAD_BITS: Final = 8
"""Bits of a weight of the output head in either format. It is the layer whose rounding changes most
texts."""
_SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of layers of one parent that read the same rows."""
_LEAST_SHARE = 32
"""Rows below which a product ends sooner than another thread wakes up, some 0.1 ms."""
_TRIED_ROWS = 5
_TOLERANCE = 2**-5
"""The error allowed of a product, as a share of its largest value: inputs are rounded to 8 bits."""


class QuantizedLinear(torch.nn.Module):
    """One or more ``torch.nn.Linear`` layers that read the same rows, with rounded weights.

    ``layers`` have equally many inputs; their outputs stand side by side in the result."""

    def __init__(self, layers: Sequence[torch.nn.Linear], bits: int) -> None:
        super().__init__()
        self.in_features = layers[0].in_features
        self.out_features = sum(layer.out_features for layer in layers)
        self.bits = bits
        weight = torch.cat([layer.weight.detach().float() for layer in layers])
        rounded = round_matrix(weight.numpy(), bits)
        self.squares, self.lost_squares = rounded.squares, rounded.lost_squares
        self._session = _make_session(rounded)
        biases: list[torch.Tensor | None] = [layer.bias for layer in layers]
        self.bias: torch.Tensor | None = None
        if any(bias is not None for bias in biases):
            widths = [layer.out_features for layer in layers]
            parts = zip(biases, widths, strict=True)
            filled = [torch.zeros(size) if one is None else one.detach() for one, size in parts]
            self.bias = torch.cat(filled).float()
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return float32 [count, out_features] of float32 ``rows`` [count, in_features]; many rows
        are shared out among the threads of a pass."""
        share = max(_LEAST_SHARE, -(-len(rows) // cpu_threads.count()))
        parts = cpu_threads.map_all(self._multiply, rows.split(share))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.bias is None else out.add_(self.bias)

    def _multiply(self, rows: torch.Tensor) -> torch.Tensor:
        (found,) = self._session.run(None, {"rows": rows.detach().numpy()})
        return torch.from_numpy(found)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features)
        return self.product(flat).view(*rows.shape[:-1], self.out_features)

    def part(self, rows: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return outputs ``first`` to ``last`` of ``rows``. They are computed once for all parts,
        which are called one after the other, and kept until the last part was called."""
        if self._last is None or self._last[0] is not rows:
            self._last = rows, self(rows)
        out = self._last[1][..., first:last]
        if last == self.out_features:
            self._last = None
        return out


class QuantizedPart(torch.nn.Module):
    """The layer that has outputs ``first`` to ``last`` of ``whole``."""

    def __init__(self, whole: QuantizedLinear, first: int, last: int) -> None:
        super().__init__()
        self.whole, self.first, self.last = whole, first, last

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.whole.part(rows, self.first, self.last)


def missing_package(error: ImportError) -> UnsupportedModelError:
    """Return the error that names the package that was not found and how to install it."""
    return UnsupportedModelError(
        f"--quantize needs {error.name}: pip install 'edgespec[server,cpu,export]'"
    )


def check_dense(path: str, model: Any, number_format: str) -> None:
    """Raise ``UnsupportedModelError`` for a model with experts."""
    for name, part in model.named_modules():
        if any(tensor.ndim > 2 for tensor in part.parameters(recurse=False)):
            raise UnsupportedModelError(
                f"{path}: quantize {number_format} is for dense models; {name} holds the weights "
                "of experts"
            )


def quantize_model(path: str, model: Any, number_format: str) -> RoundingLoss:
    """Replace the linear layers of ``model``, whose weights are float32, by rounded ones, and
    return the loss.

    Raises ``UnsupportedModelError`` where onnxruntime or onnx is missing, and where this machine's
    products are wrong."""
    head, tried, loss = model.get_output_embeddings(), set[int](), RoundingLoss()
    for names in list(_list_products(model)):
        layers = [model.get_submodule(name) for name in names]
        bits = HEAD_BITS if layers[0] is head else FORMATS[number_format]
        whole = QuantizedLinear(layers, bits)
        loss.add(names[0], whole.squares, whole.lost_squares)
        if bits not in tried:
            _check_product(path, names[0], layers, whole)
            tried.add(bits)
        first = 0
        for name, layer in zip(names, layers, strict=True):
            last = first + layer.out_features
            alone = len(layers) == 1
            model.set_submodule(name, whole if alone else QuantizedPart(whole, first, last))
            first = last
    return loss


def _list_products(model: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names of all linear layers. Layers that read the same rows come together."""
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
    for name in sorted(linear):
        parent, _, own = name.rpartition(".")
        for siblings in _SIBLINGS:
            names = tuple(f"{parent}.{one}" for one in siblings)
            if own in siblings and linear.issuperset(names):
                if own == siblings[0]:
                    yield names
                break
        else:
            yield (name,)


def check_product(path: str, name: str, layers: Sequence[torch.nn.Linear], bits: int) -> None:
    """Raise ``UnsupportedModelError`` where the joint product of ``layers`` is wrong."""
    _check_product(path, name, layers, QuantizedLinear(layers, bits))


def _check_product(
    path: str, name: str, layers: Sequence[torch.nn.Linear], whole: QuantizedLinear
) -> None:
    generator = torch.Generator().manual_seed(whole.in_features)
    rows = torch.randn((_TRIED_ROWS, whole.in_features), generator=generator)
    expected = torch.cat(
        [functional.linear(rows, round_weight(one.weight, whole.bits), one.bias) for one in layers],
        -1,
    )
    error, size = (whole(rows) - expected).abs().max(), expected.abs().max()
    if not error <= _TOLERANCE * size:
        raise UnsupportedModelError(
            f"{path}: onnxruntime's {whole.bits}-bit product is wrong on this machine: {name} "
            f"differs by {float(error):.2g} of {float(size):.2g}; serve the model without "
            "--quantize"
        )


def round_weight(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float32 [outputs, inputs]: the weights that the rounded integers represent."""
    return torch.from_numpy(round_matrix(weight.detach().float().numpy(), bits).values())


def _make_session(matrix: RoundedMatrix) -> Any:
    """Return an onnxruntime session that multiplies ``rows`` by one rounded matrix."""
    try:
        from onnx import TensorProto, helper, numpy_helper

        from edgespec.models.onnx_runtime import ort
    except ImportError as error:
        raise missing_package(error) from error
    outputs, inputs = len(matrix.integers), matrix.columns
    constants: dict[str, Any] = {"integers": matrix.integers, "scales": matrix.scales.reshape(-1)}
    if matrix.zero_points is not None:
        constants["zero_points"] = matrix.zero_points.reshape(-1)
    node = helper.make_node(
        "MatMulNBits",
        ["rows", *constants],
        ["out"],
        domain=CONTRIB,
        **matmul_attributes(outputs, inputs, matrix.bits),
    )
    graph = helper.make_graph(
        [node],
        "product",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["count", inputs])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, ["count", outputs])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # each session would have threads of its own
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False  # the arena of each layer would keep its largest result
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
