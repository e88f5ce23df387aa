"""Linear layers whose weights are 8-bit or 4-bit integers; activations stay bfloat16.

Theory of operation. A decoding pass reads every weight once for a few rows, so a CPU's time is
that of the memory: half or a quarter of the bytes is that much less. torch has products of
bfloat16 rows with packed integer weights for CPUs; they multiply as they unpack. int8 has a scale
for each output; int4 a scale and a smallest value for each group of ``GROUP`` inputs of an output.
Embeddings and the head stay as they are, as other quantisers leave them.

The products are not part of torch's public interface, so ``quantize_model`` compares the first
layer's with the product of the unpacked weights before it trusts any of them.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn import functional

from edgespec.verifier.targets.families import UnsupportedModelError

FORMATS: Final = ("int8", "int4")
GROUP: Final = 32
_INT4_OUTPUTS: Final = 16
"""The 4-bit product takes outputs in multiples of this."""
_INT8_TOP, _INT4_TOP = 127, 15
# The middle of the 4-bit values, at which torch's product puts the second number of a group.
_INT4_MIDDLE = 8
_TRIED_ROWS = 5
# bfloat16 rounds inputs, scales and results to 8 bits each.
_TOLERANCE = 2**-5


class QuantizedLinear(torch.nn.Module):
    """``torch.nn.Linear`` with integer weights, for bfloat16 rows on a CPU."""

    def __init__(self, layer: torch.nn.Linear, number_format: str) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.number_format = number_format
        weight = layer.weight.detach().float()
        pack = _pack_int8 if number_format == "int8" else _pack_int4
        packed, scales = pack(weight)
        self.packed: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("packed", packed)
        self.register_buffer("scales", scales)
        self.bias: torch.Tensor | None = layer.bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[count, out_features] of ``rows`` [count, in_features]."""
        out: torch.Tensor
        if self.number_format == "int8":
            out = torch.ops.aten._weight_int8pack_mm(rows, self.packed, self.scales)
        else:
            out = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)
        return out if self.bias is None else out + self.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        flat = rows.reshape(-1, self.in_features)
        return self.product(flat).view(*rows.shape[:-1], self.out_features)


def quantize_model(path: str, model: Any, number_format: str) -> None:
    """Replace the linear layers of ``model`` but its head by integer ones, one after the other.

    Raises ``UnsupportedModelError`` naming a layer that the format cannot hold, for a model with
    experts, and where this machine's products are wrong.
    """
    head = model.get_output_embeddings()
    for name, part in model.named_modules():
        if any(tensor.ndim > 2 for tensor in part.parameters(recurse=False)):
            raise UnsupportedModelError(
                f"{path}: quantize {number_format} is for dense models; {name} holds the weights "
                "of experts"
            )
    linear = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and part is not head
    ]
    if number_format == "int4":
        _check_groups(path, linear)
    for index, (name, layer) in enumerate(linear):
        quantized = QuantizedLinear(layer, number_format)
        if index == 0:
            _check_product(path, name, layer, quantized)
        model.set_submodule(name, quantized)


def _check_groups(path: str, linear: list[tuple[str, torch.nn.Linear]]) -> None:
    for name, layer in linear:
        if layer.in_features % GROUP or layer.out_features % _INT4_OUTPUTS:
            raise UnsupportedModelError(
                f"{path}: quantize int4 needs inputs in multiples of {GROUP} and outputs in "
                f"multiples of {_INT4_OUTPUTS}, but {name} is {layer.in_features} x "
                f"{layer.out_features}; int8 has no such limit"
            )


def _check_product(
    path: str, name: str, layer: torch.nn.Linear, quantized: QuantizedLinear
) -> None:
    generator = torch.Generator().manual_seed(layer.in_features)
    rows = torch.randn((_TRIED_ROWS, layer.in_features), generator=generator).bfloat16()
    expected = functional.linear(rows.float(), unpacked(quantized))
    if layer.bias is not None:
        expected += layer.bias.detach().float()
    error = float((quantized(rows).float() - expected).abs().max())
    size = float(expected.abs().max())
    if not error <= _TOLERANCE * size:
        raise UnsupportedModelError(
            f"{path}: torch's {quantized.number_format} product is wrong on this machine: {name} "
            f"differs by {error:.2g} of {size:.2g}; serve the model without --quantize"
        )


def unpacked(layer: QuantizedLinear) -> torch.Tensor:
    """float32 [out_features, in_features]: the weights that the integers stand for."""
    if layer.number_format == "int8":
        return layer.packed.float() * layer.scales.float()[:, None]
    # The packed order is the machine's own, so it is asked: the product with unit rows.
    unit = torch.eye(layer.in_features, dtype=torch.bfloat16)
    product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        unit, layer.packed, GROUP, layer.scales
    )
    return product.float().t()


def _pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [outputs, inputs] and bfloat16 scales [outputs], symmetric around zero."""
    scales = (weight.abs().amax(dim=1) / _INT8_TOP).clamp_min(torch.finfo(torch.float32).tiny)
    scales = scales.bfloat16()
    steps = weight / scales.float()[:, None]
    return steps.round_().clamp_(-_INT8_TOP, _INT8_TOP).to(torch.int8), scales


def _pack_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's packed uint8 [outputs, inputs / 2], and bfloat16 [inputs / GROUP, outputs, 2]: the
    step of a group, and what its middle value stands for."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = torch.aminmax(groups, dim=2)
    step = ((high - low) / _INT4_TOP).clamp_min(torch.finfo(torch.float32).tiny).bfloat16()
    middle = (low + _INT4_MIDDLE * step.float()).bfloat16()
    zero = middle.float() - _INT4_MIDDLE * step.float()
    steps = (groups - zero.unsqueeze(2)) / step.float().unsqueeze(2)
    values = steps.round_().clamp_(0, _INT4_TOP).to(torch.int32).view(weight.shape)
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    return packed, torch.stack([step, middle], dim=2).transpose(0, 1).contiguous()
