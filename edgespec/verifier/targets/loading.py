"""Open a causal language model from a folder or a hub id, or refuse it by name.

Supported are decoders whose layers attend to all earlier tokens or within a window, dense or
with experts, with rotary embeddings that depend on a token's position alone. A test compares each
family with the library's own ``generate``. transformers fills what a checkpoint lacks with random
numbers, and accepts integers as weights, with a warning at most. Such checkpoints are refused, and
the error names the tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.core.ports import UnsupportedModelError
from edgespec.verifier.targets.graph_passes import GRAPH_FAMILIES, GraphModel
from edgespec.verifier.targets.memory_sizing import DraftMemory
from edgespec.verifier.targets.pass_plan import ATTENTION, register_attention
from edgespec.verifier.targets.quantized_linear import FORMATS as QUANTIZE_FORMATS
from edgespec.verifier.targets.quantized_linear import check_dense, missing_package, quantize_model

FAMILIES: Final = {
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
    "granite": "Granite",
    "llama": "Llama 2 and 3",
    "mistral": "Mistral",
    "phi3": "Phi-3 and Phi-4",
    "qwen2": "Qwen2 and Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
}

"""Model types of ``config.json``, and their common names."""

# "dynamic" changes earlier positions' angles when a text grows: cached keys go stale. So does
# "longrope" where a text grows beyond the original context, and only there.
SUPPORTED_ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn")
_LONGROPE: Final = "longrope"
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


def check_family(config: Any, context_length: int | None = None) -> int:
    """Return the context length that a model with this transformers ``config`` is served with.

    Raises ``UnsupportedModelError`` naming what is not supported, ``ValueError`` for a bad
    length."""
    if config.model_type not in FAMILIES:
        media = getattr(config, "text_config", None) is not None
        hint = " (a model of text and other media; serve a checkpoint of its text model alone)"
        supported = ", ".join(f"{kind} ({name})" for kind, name in FAMILIES.items())
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is not supported{hint if media else ''}; supported"
            f" are {supported}"
        )
    limit = int(config.max_position_embeddings)
    length = limit if context_length is None else context_length
    if not 0 < length <= limit:
        raise ValueError(f"context_length is {length}, but must be in [1, {limit}]")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModelError(
            "the model attends in both directions (use_bidirectional_attention); supported are "
            "causal models"
        )
    for rope in _find_ropes(config):
        _check_rope(rope, length)
    _check_layers(config)
    return length


def _find_ropes(config: Any) -> Iterator[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    if _LAYER_TYPES.isdisjoint(rope):
        yield rope
    else:
        yield from (part for kind, part in rope.items() if kind in _LAYER_TYPES)


def _check_rope(rope: dict[str, Any], length: int) -> None:
    kind = rope.get("rope_type", "default")
    if kind in SUPPORTED_ROPE_TYPES:
        return
    if kind != _LONGROPE:
        raise UnsupportedModelError(
            f"rope type {kind!r} depends on the length of the text and would spoil cached keys; "
            f"supported are {', '.join(SUPPORTED_ROPE_TYPES)}, {_LONGROPE} up to its original "
            "context"
        )
    original = rope.get("original_max_position_embeddings") or 0
    if length > original:
        raise UnsupportedModelError(
            f"rope type {kind!r} changes all angles in texts of more than {original} tokens and "
            f"would spoil cached keys, but the context is {length}; limit it with "
            f"--max-model-len {original}"
        )


def _check_layers(config: Any) -> None:
    """Refuse unknown layer types, and windows that are no positive number. A layer passes its
    window to attention itself."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ())
    other = sorted(kinds - _LAYER_TYPES)
    if other:
        raise UnsupportedModelError(
            f"layer types {', '.join(other)} are not supported; supported are "
            f"{', '.join(sorted(_LAYER_TYPES))}"
        )
    slides = "sliding_attention" in kinds if kinds else window is not None
    if slides and (window is None or window < 1):
        raise UnsupportedModelError(
            f"layers have sliding attention, but sliding_window is {window}; must be at least 1"
        )


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    packages: tuple[str, ...] = ()
    """Names of the packages that have to be installed."""
    unpacks: bool = False
    """Whether transformers can turn it into ordinary weights when it loads."""


FORMATS: Final = {
    "awq": CheckpointFormat(("gptqmodel", "accelerate")),
    "compressed-tensors": CheckpointFormat(("compressed-tensors",), unpacks=True),
    "fp8": CheckpointFormat(("accelerate",), unpacks=True),
    "gptq": CheckpointFormat(("gptqmodel", "optimum")),
    "mxfp4": CheckpointFormat(unpacks=True),
    "torchao": CheckpointFormat(("torchao",)),
}

"""Checkpoint formats by the ``quant_method`` of ``config.json``."""


def prepare_format(path: str, config: Any, *, on_cpu: bool) -> str:
    """Return the ``quant_method`` of the checkpoint, or "" for one with ordinary weights.

    On a CPU ``config`` is changed so that weights are unpacked where they can be. The products are
    then dense ones, for which canonical mode holds. Raises ``UnsupportedModelError`` naming the
    unknown format or the missing packages."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = str(settings.get("quant_method", "unknown"))
    known = FORMATS.get(method)
    if known is None:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised as {method!r}, which is not supported; supported "
            f"are {', '.join(FORMATS)}, and ordinary weights with --quantize"
        )
    missing = [name for name in known.packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised as {method!r}, and to load it transformers needs "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    if on_cpu and known.unpacks:
        config.quantization_config = {**settings, "dequantize": True}
    return method


# This tensor is computed from the configuration. Older exports stored it beside the weights.
_DERIVED = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
_NAMED_TENSORS = 5
_WEIGHTS: Final = "model.safetensors"
_REAL_NUMBERS: Final = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
"""Types of real numbers, as the headers of safetensors files name them."""


def check_types(path: str) -> None:
    """Refuse a folder whose weights are not stored as real numbers although it names no
    quantisation.

    Raises ``UnsupportedModelError`` naming the tensors; ``OSError``, or what safetensors raises,
    for a file that cannot be read."""
    others = []
    for file in _list_weight_files(Path(path)):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # it is no mapping
                kind = tensors.get_slice(name).get_dtype()
                if kind not in _REAL_NUMBERS and not _DERIVED.search(name):
                    others.append(f"{name} ({kind})")
    if others:
        raise UnsupportedModelError(
            f"{path}: {_count(others)} not stored as real numbers, though config.json names no"
            f" quantization_config: {_show_some(sorted(others))}"
        )


def _list_weight_files(folder: Path) -> list[Path]:
    if (folder / _WEIGHTS).is_file() or not (index := folder / f"{_WEIGHTS}.index.json").is_file():
        return [one for one in (folder / _WEIGHTS,) if one.is_file()]
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / name for name in sorted(set(shards))]


def check_loading(path: str, info: dict[str, Any]) -> None:
    """Refuse a checkpoint that does not fill the model. ``info`` is the second result of
    ``from_pretrained(output_loading_info=True)``.

    Raises ``UnsupportedModelError`` naming tensors that are missing, unexpected or of another
    shape."""
    missing = _list_names(info["missing_keys"])
    hint = ""
    if "lm_head.weight" in missing:
        hint = " (config.json says tie_word_embeddings: false, so the head is a tensor of its own)"
    shapes = sorted(
        f"{name} is {_show_shape(found)} in the checkpoint, {_show_shape(wanted)} in the model"
        for name, found, wanted in info["mismatched_keys"]
    )
    homeless = "in the checkpoint for which the model has no place"
    kinds = (
        ("missing", missing, hint),
        (homeless, _list_names(info["unexpected_keys"]), ""),
        ("of another shape", shapes, ""),
    )
    faults = [f"{_count(one)} {what}: {_show_some(one)}{more}" for what, one, more in kinds if one]
    faults.extend(str(message) for message in info.get("error_msgs") or ())
    if faults:
        raise UnsupportedModelError(
            f"{path}: the checkpoint does not fill the model: {'; '.join(faults)}"
        )


def check_numbers(path: str, model: Any) -> None:
    """Refuse NaN and infinity. Raises ``UnsupportedModelError`` naming the first such tensor."""
    for name, tensor in model.named_parameters():
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            continue  # torch cannot compare 8-bit floats; integers are always finite
        low, high = torch.aminmax(tensor.detach())  # both are NaN where any element is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise UnsupportedModelError(
                f"{path}: the checkpoint is damaged: tensor {name} holds NaN or infinite values"
            )


def _list_names(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if not _DERIVED.search(key))


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s are' if len(names) > 1 else ' is'}"


def _show_some(names: list[str]) -> str:
    more = len(names) - _NAMED_TENSORS
    return ", ".join(names[:_NAMED_TENSORS]) + (f" and {more} more" if more > 0 else "")


def _show_shape(size: Iterable[int]) -> str:
    return " x ".join(map(str, size)) or "a scalar"


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    """A transformers causal language model in evaluation mode."""
    layer_count: int
    key_width: int
    """Key-value heads times head dimension."""
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    weight_count: int
    """Numbers in the model, before any layer was packed or rounded."""
    graph: GraphModel | None = None
    """The layers with rounded weights as one graph; then ``model`` has no layers."""
    rounding_loss: str = ""
    """A clause about what rounding changed. Empty if no weights were rounded."""


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context_length: int | None = None,
    quantize: str = "",
    as_graph: bool = True,
) -> LoadedModel:
    """Load ``path`` (folder or hub id; safetensors only, no code from the model's repository).

    ``dtype`` auto is float32 on a CPU, else what the checkpoint says; ``device`` is cpu, cuda,
    cuda:N or auto. ``quantize`` int8 or int4 rounds the weights of a dense model, on a CPU and in
    float32; its layers are then one graph where the graph knows the family and ``as_graph`` is
    true, else their products are rounded one by one.
    Raises ``UnsupportedModelError``, ``ValueError`` for a bad option, ``OSError`` when not found.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be auto, {', '.join(DTYPES)}")
    where = device_of(device)
    if quantize:
        dtype = _check_quantize(quantize, dtype, where)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    served_length = check_family(config, context_length)
    model, weight_count = _read(path, config, _choose_dtype(dtype, where), where, quantize)
    graph, loss = None, ""
    if quantize:
        graph, loss = _quantize(path, model, quantize, served_length if as_graph else 0)
    return LoadedModel(
        model=model,
        layer_count=config.num_hidden_layers,
        key_width=_key_width(config),
        vocabulary_size=config.vocab_size,
        context_length=served_length,
        eos_token_ids=_read_eos(model),
        dtype=model.dtype,
        device=where,
        weight_count=weight_count,
        graph=graph,
        rounding_loss=loss,
    )


def _quantize(
    path: str, model: Any, quantize: str, context_length: int
) -> tuple[GraphModel | None, str]:
    """Round the weights of ``model``. Return its layers as one graph, and a description of the
    loss. There is no graph where their products were rounded one by one: for a family that the
    graph does not know, or a context of 0."""
    check_dense(path, model, quantize)
    if not context_length or model.config.model_type not in GRAPH_FAMILIES:
        return None, str(quantize_model(path, model, quantize))
    try:
        from edgespec.verifier.targets.decoder_graph import load_graph  # needs onnx
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    graph, loss = load_graph(path, model, quantize, context_length)
    return graph, str(loss)


def draft_memory(path: str, dtype: str, device: str) -> DraftMemory:
    """Return how much memory the draft model in the folder ``path`` will take, according to its
    files and configuration. Raises as ``load_model`` does."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    check_family(config)
    stored = getattr(config, "dtype", None) or torch.float32
    loaded = _choose_dtype(dtype, device_of(device))
    element = stored if isinstance(loaded, str) else loaded
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return DraftMemory(
        size * element.itemsize // stored.itemsize,
        2 * config.num_hidden_layers * _key_width(config) * element.itemsize,
    )


def _key_width(config: Any) -> int:
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(heads * head_dim)


def _read(
    path: str, config: Any, dtype: torch.dtype | str, device: torch.device, quantize: str
) -> tuple[Any, int]:
    """Return the model, and how many numbers its weights are."""
    method = prepare_format(path, config, on_cpu=device.type == "cpu")
    if method and quantize:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised already ({method}); leave out --quantize"
        )
    if not method:
        check_types(path)
    register_attention()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=dtype,
            attn_implementation=ATTENTION,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are named with all other faults instead
        )
    except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
        if not method:
            raise
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised as {method!r}, and transformers cannot load it on"
            f" this machine: {error}"
        ) from error
    model, info = loaded
    check_loading(path, info)
    check_numbers(path, model)
    count = sum(tensor.numel() for tensor in model.parameters())
    return model.to(device).eval(), count


def _check_quantize(quantize: str, dtype: str, device: torch.device) -> str:
    if quantize not in QUANTIZE_FORMATS:
        raise ValueError(f"quantize is {quantize!r}, but must be {' or '.join(QUANTIZE_FORMATS)}")
    if device.type != "cpu":
        raise ValueError(
            f"quantize is {quantize!r}, which computes on a CPU, but device is {str(device)!r}; "
            "on a GPU serve a checkpoint that comes quantised"
        )
    if dtype not in ("auto", "float32"):
        raise ValueError(
            f"quantize is {quantize!r}, which computes in float32, but dtype is {dtype!r}"
        )
    return "float32"


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, but must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but no CUDA device is available")
    return device


def _choose_dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else "auto"


def _read_eos(model: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
