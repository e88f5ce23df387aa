"""A checkpoint fills its model to the last tensor, or it is refused by the tensor's name.

transformers fills what a checkpoint lacks with random numbers, leaves out what the model has no
place for, and only warns; and it takes stored whole numbers for weights without a word. A verifier
would serve garbage and call itself ready.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open

from edgespec.verifier.targets.families import UnsupportedModelError

# Computed from the configuration; older exports stored it beside the weights.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_NAMED_TENSORS = 5
_WEIGHTS: Final = "model.safetensors"
_REAL_NUMBERS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""As the headers of safetensors files name them."""


def check_types(path: str) -> None:
    """Raises ``UnsupportedModelError`` naming tensors of a folder that are not stored as real
    numbers, which a checkpoint without a quantisation of its own cannot mean; ``OSError``, or what
    safetensors raises for a file that it cannot read."""
    others = sorted(
        f"{name} ({kind})"
        for file in _files(Path(path))
        for name, kind in _types(file)
        if kind not in _REAL_NUMBERS and not _DERIVED.search(name)
    )
    if others:
        raise UnsupportedModelError(
            f"{path}: {_count(others)} not stored as real numbers, though config.json names no"
            f" quantization_config: {_some(others)}"
        )


def _files(folder: Path) -> list[Path]:
    """Those that transformers reads; none for a hub id."""
    if (folder / _WEIGHTS).is_file() or not (index := folder / f"{_WEIGHTS}.index.json").is_file():
        return [one for one in (folder / _WEIGHTS,) if one.is_file()]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def _types(file: Path) -> Iterator[tuple[str, str]]:
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # it is no mapping
            yield name, tensors.get_slice(name).get_dtype()


def check_loading(path: str, info: dict[str, Any]) -> None:
    """Raises ``UnsupportedModelError`` naming tensors that are missing, unexpected or of another
    shape; ``info`` is what ``from_pretrained(output_loading_info=True)`` tells."""
    missing = _names(info["missing_keys"])
    unexpected = _names(info["unexpected_keys"])
    shapes = sorted(
        f"{name} is {_shape(found)} in the checkpoint, {_shape(wanted)} in the model"
        for name, found, wanted in info["mismatched_keys"]
    )
    faults = []
    if missing:
        faults.append(f"{_count(missing)} missing: {_some(missing)}{_head_hint(missing)}")
    if unexpected:
        faults.append(
            f"{_count(unexpected)} in the checkpoint for which the model has no place: "
            f"{_some(unexpected)}"
        )
    if shapes:
        faults.append(f"{_count(shapes)} of another shape: {_some(shapes)}")
    faults.extend(str(message) for message in info.get("error_msgs") or ())
    if faults:
        raise UnsupportedModelError(
            f"{path}: the checkpoint does not fill the model: {'; '.join(faults)}"
        )


def check_numbers(path: str, model: Any) -> None:
    """Raises ``UnsupportedModelError`` naming the first tensor that holds NaN or infinity."""
    for name, tensor in model.named_parameters():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            continue  # whole numbers, and 8-bit floats, which torch cannot compare
        low, high = torch.aminmax(tensor.detach())  # both are NaN where any element is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise UnsupportedModelError(
                f"{path}: the checkpoint is damaged: tensor {name} holds NaN or infinite values"
            )


def _names(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if not _DERIVED.search(key))


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_TENSORS
    return ", ".join(names[:_NAMED_TENSORS]) + (f" and {more} more" if more > 0 else "")


def _head_hint(missing: list[str]) -> str:
    if "lm_head.weight" not in missing:
        return ""
    return " (config.json says tie_word_embeddings: false, so the head is a tensor of its own)"


def _shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size)) or "a scalar"
