"""Linear layers whose weights lie in memory as the CPU's matrix kernels read them.

Theory of operation. A product of a few rows reads every weight once and does little with it. A
library that finds the weights in rows, as checkpoints have them, first copies them into the order
of its kernel, in every pass. oneDNN can be given them in that order once and for all. The packed
form takes the place of the other, so a model is no larger; the other can be got back to the bit.

Only large matrices are packed: a call costs some microseconds more, which small ones do not win
back. Nothing is timed, so a verifier that starts again computes the same bits. Weights that
another layer reads as well, such as an embedding that is also the head, stay as they are, for they
would lie in memory twice.

The products are not part of torch's public interface, so the first layer of each shape is compared
with the plain product before any is trusted.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 17
"""Of a layer; smaller ones are not packed."""
_TRIED_ROWS = 5
# Of the largest result, what two orders of float32 sums may differ by.
_TOLERANCE = 1e-5


class PackedLinear(torch.nn.Module):
    """``torch.nn.Linear`` with packed float32 weights, on a CPU."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # No buffer: torch's own ways of moving and storing tensors do not know this layout.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self.bias = bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """[count, out_features] of ``rows`` [count, in_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product(rows)

    def unpacked(self) -> torch.Tensor:
        """The weights [out_features, in_features] that were packed, bit for bit."""
        weights: torch.Tensor = self._packed.to_dense()
        return weights


def pack_model(model: Any) -> int:
    """Replace large linear layers of ``model``, on a CPU and in float32, by packed ones; how many.

    0 where torch lacks oneDNN or its products are wrong on this machine, which is logged.
    """
    names = _packable(model)
    if not names:
        return 0
    why_not = "" if _available() else "torch computes without oneDNN here"
    shapes: set[torch.Size] = set()
    for name in names:
        if why_not:
            break
        layer = model.get_submodule(name)  # one by one: the plain weights go before the next
        try:
            with torch.inference_mode():
                packed = PackedLinear(layer.weight, layer.bias)
                if layer.weight.shape not in shapes:
                    why_not = _difference(name, layer, packed)
        except (AttributeError, RuntimeError) as error:  # an operator that is missing or refuses
            why_not = str(error).partition("\n")[0]
        else:
            shapes.add(layer.weight.shape)
            model.set_submodule(name, packed)
    if not why_not:
        return len(names)
    logger.info("weights are not packed: %s", why_not)
    unpack_model(model)
    return 0


def is_packed(model: Any) -> bool:
    """Whether any layer of ``model`` is packed."""
    return any(isinstance(part, PackedLinear) for part in model.modules())


def unpack_model(model: Any) -> int:
    """Undo ``pack_model``; how many layers were packed."""
    names = [name for name, part in model.named_modules() if isinstance(part, PackedLinear)]
    for name in names:
        packed = model.get_submodule(name)
        plain = torch.nn.Linear(
            packed.in_features, packed.out_features, packed.bias is not None, device="meta"
        )
        plain.weight = torch.nn.Parameter(packed.unpacked(), requires_grad=False)
        plain.bias = packed.bias
        model.set_submodule(name, plain.eval())
    return len(names)


def _available() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)


def _packable(model: Any) -> list[str]:
    """Plain layers with enough weights of their own, and nothing hooked on."""
    readers = Counter(
        id(parameter) for part in model.modules() for parameter in part.parameters(recurse=False)
    )
    return [
        name
        for name, part in model.named_modules()
        if type(part) is torch.nn.Linear
        and part.weight.dtype == torch.float32
        and part.weight.device.type == "cpu"
        and part.weight.numel() >= LEAST_WEIGHTS
        and readers[id(part.weight)] == 1
        and not (part._forward_hooks or part._forward_pre_hooks)
    ]


def _difference(name: str, layer: torch.nn.Linear, packed: PackedLinear) -> str:
    """What the products of some rows differ by, in words; empty where they agree."""
    generator = torch.Generator().manual_seed(layer.in_features)
    rows = torch.randn((_TRIED_ROWS, layer.in_features), generator=generator)
    expected = functional.linear(rows, layer.weight, layer.bias)
    error = float((packed.product(rows) - expected).abs().max())
    size = float(expected.abs().max())
    if error <= _TOLERANCE * size and torch.equal(packed.unpacked(), layer.weight):
        return ""
    return f"the packed product of {name} differs by {error:.2g} of {size:.2g}"
