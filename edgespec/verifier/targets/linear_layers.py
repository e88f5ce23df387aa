"""Linear layers whose weights lie in memory as the CPU's matrix kernels read them.

Theory of operation. Checkpoints store weights in rows, and a library copies them into the order of
its kernel in every pass. oneDNN accepts weights that are in that order already. The packed form
replaces the rows, which can be restored to the bit. Small matrices stay as they are, because a
packed call costs some microseconds more than they gain.

A head that shares the embedding's weights is packed too, although they are then in memory twice: it
is the largest product and gains most. Where all of the embedding's float32 numbers are bfloat16
numbers, as in most checkpoints, the embedding table is stored in bfloat16.

These products are not part of torch's public interface, so the first layer of each shape is
compared with the plain product before any is trusted.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional

logger = logging.getLogger(__name__)

LEAST_WEIGHTS = 1 << 17
"""Layers with fewer weights are not packed."""
_TRIED_ROWS = 5
"""Rows by which the first packed layer of each shape is compared with the plain one."""
_COMPARED_ROWS = 4096
"""Rows of an embedding that are compared at a time."""

# Two orders of float32 sums, or two rounded results, may differ by this share of the largest
# result.
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


class PackedLinear(torch.nn.Module):
    """A ``torch.nn.Linear`` with packed weights, on a CPU.

    ``tied_to`` is the name of the embedding that has the same weights, or empty."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, tied_to: str = ""
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.tied_to = weight.dtype, tied_to
        # This is no buffer, because torch cannot move or store tensors in this layout.
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
        self._quick_rows = quick_rows()
        self.bias = bias

    def product(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the product [count, out_features] with ``rows`` [count, in_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``product`` of ``rows`` [.., count, in_features]. Few rows are padded to the count
        that takes the least time."""
        count = rows.shape[-2]
        if count >= self._quick_rows:
            return self.product(rows)
        padded = functional.pad(rows, (0, 0, 0, self._quick_rows - count))
        return self.product(padded)[..., :count, :]

    @property
    def packed_bytes(self) -> int:
        """Bytes of the packed weights."""
        return self.out_features * self.in_features * self.dtype.itemsize

    def unpacked(self) -> torch.Tensor:
        """Return the weights [out_features, in_features] that were packed, bit for bit."""
        weights: torch.Tensor = self._packed.to_dense()
        return weights


class NarrowEmbedding(torch.nn.Module):
    """A ``torch.nn.Embedding`` whose float32 numbers are stored as bfloat16 without loss."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table: torch.Tensor
        # This is no parameter, because a model reports the number format of its first parameter.
        self.register_buffer("table", table)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return functional.embedding(tokens, self.table).float()


def quick_rows() -> int:
    """Return the row count below which a packed product takes no less time. With AVX512 oneDNN
    computes 4 rows in less time than 1 or 2 (docs/measurements/passes.md)."""
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def pack_model(model: Any) -> int:
    """Replace the large linear layers of ``model`` that are on a CPU, in float32 or bfloat16, by
    packed ones. Return how many were replaced. If torch lacks oneDNN, or its products are wrong on
    this machine, none is replaced, and the reason is logged."""
    found = _find_packable(model)
    if not found:
        return 0
    has_onednn = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    why_not = "" if has_onednn else "torch computes without oneDNN here"
    shapes: set[torch.Size] = set()
    for name, tied_to in found.items():
        if why_not:
            break
        layer = model.get_submodule(name)  # its plain weights are freed before the next is packed
        try:
            with torch.inference_mode():
                packed = PackedLinear(layer.weight, layer.bias, tied_to=tied_to)
                if layer.weight.shape not in shapes:
                    why_not = _describe_difference(name, layer, packed)
        except (AttributeError, RuntimeError) as error:  # an operator that is missing or refuses
            why_not = str(error).partition("\n")[0]
        else:
            shapes.add(layer.weight.shape)
            model.set_submodule(name, packed)
    if not why_not:
        for embedding in filter(None, found.values()):
            _narrow(model, embedding)
        parts = [part for part in model.modules() if isinstance(part, PackedLinear)]
        packed_bytes = sum(part.packed_bytes for part in parts)
        if sum(one.nbytes for one in _list_tensors(model)) < packed_bytes:
            copy_from_file(model)
        return len(found)
    logger.info("weights are not packed: %s", why_not)
    unpack_model(model)
    return 0


def copy_from_file(model: Any) -> None:
    """Copy the parameters and buffers of ``model``. The file of the checkpoint stays mapped as long
    as one tensor lies in it, and all of it counts as this process's memory."""
    with torch.no_grad():
        for tensor in _list_tensors(model):
            tensor.data = tensor.data.clone()


def _list_tensors(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def is_packed(model: Any) -> bool:
    return any(isinstance(part, PackedLinear) for part in model.modules())


def unpack_model(model: Any) -> int:
    """Replace the packed layers of ``model`` by plain ones with the same bits. Return how many were
    replaced."""
    parts = list(model.named_modules())
    for name, part in parts:
        if isinstance(part, NarrowEmbedding):
            table = part.table.float()
            model.set_submodule(name, torch.nn.Embedding.from_pretrained(table).eval())
    names = [name for name, part in parts if isinstance(part, PackedLinear)]
    for name in names:
        packed = model.get_submodule(name)
        plain = torch.nn.Linear(
            packed.in_features, packed.out_features, packed.bias is not None, device="meta"
        )
        if packed.tied_to:
            plain.weight = model.get_submodule(packed.tied_to).weight
        else:
            plain.weight = torch.nn.Parameter(packed.unpacked(), requires_grad=False)
        plain.bias = packed.bias
        model.set_submodule(name, plain.eval())
    return len(names)


def _find_packable(model: Any) -> dict[str, str]:
    """Return the names of plain layers with enough weights and no hooks, each with the name of the
    embedding that has the same weights, or an empty one."""
    readers: dict[int, list[tuple[str, torch.nn.Module]]] = defaultdict(list)
    for name, part in model.named_modules():
        for parameter in part.parameters(recurse=False):
            readers[id(parameter)].append((name, part))
    # Without bfloat16 instructions a CPU spends its time on arithmetic, not on reading weights.
    computes = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    formats = (torch.float32, torch.bfloat16) if computes else (torch.float32,)
    found = {}
    for name, part in model.named_modules():
        if (
            type(part) is torch.nn.Linear
            and part.weight.device.type == "cpu"
            and part.weight.dtype in formats
            and part.weight.numel() >= LEAST_WEIGHTS
            and not _has_hooks(part)
        ):
            others = [reader for reader in readers[id(part.weight)] if reader[1] is not part]
            if not others:
                found[name] = ""
            elif len(others) == 1 and isinstance(others[0][1], torch.nn.Embedding):
                found[name] = others[0][0]
    return found


def _has_hooks(part: torch.nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)


def _narrow(model: Any, name: str) -> None:
    """Store the embedding ``name`` in bfloat16 where that changes no number of it."""
    part = model.get_submodule(name)
    # Subclasses, such as Gemma's, compute something beside the look-up.
    if type(part) is not torch.nn.Embedding or part.max_norm is not None or _has_hooks(part):
        return
    weight = part.weight.detach()
    if weight.dtype != torch.float32:
        return
    table = weight.bfloat16()
    # The comparison goes in parts, so that no float32 copy of a large table is made.
    parts = zip(table.split(_COMPARED_ROWS), weight.split(_COMPARED_ROWS), strict=True)
    if all(torch.equal(few.float(), whole) for few, whole in parts):
        model.set_submodule(name, NarrowEmbedding(table))


def _describe_difference(name: str, layer: torch.nn.Linear, packed: PackedLinear) -> str:
    """Return a description of how the products of some rows differ, which is empty where they
    agree."""
    rows = _tried_rows(layer).to(packed.dtype)
    expected = functional.linear(rows, layer.weight, layer.bias).float()
    error, size = _measure_error(packed.product(rows), expected)
    if error <= _TOLERANCES[packed.dtype] * size and torch.equal(packed.unpacked(), layer.weight):
        return ""
    return f"the packed product of {name} differs by {error:.2g} of {size:.2g}"


def _tried_rows(layer: torch.nn.Linear) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layer.in_features)
    return torch.randn((_TRIED_ROWS, layer.in_features), generator=generator)


def _measure_error(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference from ``expected``, and the largest magnitude in it."""
    return float((found.float() - expected).abs().max()), float(expected.abs().max())
