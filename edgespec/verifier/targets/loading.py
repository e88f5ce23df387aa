"""Open a causal language model from a folder or a hub id, or refuse it by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from edgespec.verifier.targets.checkpoints import (
    UnsupportedModelError,
    check_family,
    check_loading,
    check_numbers,
    check_types,
    not_loaded,
    prepare_format,
)
from edgespec.verifier.targets.linear_layers import FORMATS as QUANTIZE_FORMATS
from edgespec.verifier.targets.linear_layers import quantize_model
from edgespec.verifier.targets.pass_plan import ATTENTION, register_attention
from edgespec.verifier.targets.pipeline_stage import (
    PipelineError,
    StageShare,
    check_stageable,
    join_stage,
    stage_class,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    """A transformers causal language model in evaluation mode."""
    layer_count: int
    """Of this stage, where layers lie on several."""
    key_width: int
    """Key-value heads times head dimension."""
    vocabulary_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def load_model(
    path: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    context_length: int | None = None,
    quantize: str = "",
    share: StageShare | None = None,
) -> LoadedModel:
    """Load ``path`` (folder or hub id; safetensors only, no code from the model's repository).

    ``dtype`` auto is float32 on a CPU, else what the checkpoint says; ``device`` is cpu, cuda,
    cuda:N or auto. ``quantize`` int8 or int4 rounds the weights of a dense model, on a CPU and in
    bfloat16. With ``share`` only that stage's layers are loaded.
    Raises ``UnsupportedModelError``, ``ValueError`` for a bad option, ``OSError`` when not found.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}, but must be auto, {', '.join(DTYPES)}")
    where = _device(device)
    if quantize:
        dtype = _check_quantize(quantize, dtype, where)
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    served_length = check_family(config, context_length)
    layer_count = config.num_hidden_layers
    if share is not None:
        check_stageable(config, share.world_size)
        layer_count = len(share.layers(layer_count))
    model = _read(path, config, _dtype(dtype, where), where, quantize, share)
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None)
    return LoadedModel(
        model=model,
        layer_count=layer_count,
        key_width=heads * (head_dim or config.hidden_size // config.num_attention_heads),
        vocabulary_size=config.vocab_size,
        context_length=served_length,
        eos_token_ids=_eos(model),
        dtype=model.dtype,
        device=where,
    )


def _read(
    path: str,
    config: Any,
    dtype: torch.dtype | str,
    device: torch.device,
    quantize: str,
    share: StageShare | None,
) -> Any:
    method = prepare_format(path, config, on_cpu=device.type == "cpu")
    if method and quantize:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised already ({method}); leave out --quantize"
        )
    if method and share is not None:
        raise PipelineError(
            f"{path}: the checkpoint is quantised ({method}), but pipeline.stages"
            f" {share.world_size} cuts plain weights alone"
        )
    if not method:
        check_types(path)
    register_attention()
    try:
        kind = AutoModelForCausalLM if share is None else stage_class(config, share)
        loaded: Any = kind.from_pretrained(
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
        raise not_loaded(path, method, error) from error
    model, info = loaded
    check_loading(path, info)
    if share is not None:
        join_stage(model, share)
    check_numbers(path, model)
    if quantize:
        quantize_model(path, model, quantize)
    return model.to(device).eval()


def _check_quantize(quantize: str, dtype: str, device: torch.device) -> str:
    """The number format of the activations. Raises ``ValueError``."""
    if quantize not in QUANTIZE_FORMATS:
        raise ValueError(f"quantize is {quantize!r}, but must be {' or '.join(QUANTIZE_FORMATS)}")
    if device.type != "cpu":
        raise ValueError(
            f"quantize is {quantize!r}, which computes on a CPU, but device is {str(device)!r}; "
            "on a GPU serve a checkpoint that comes quantised"
        )
    if dtype not in ("auto", "bfloat16"):
        raise ValueError(
            f"quantize is {quantize!r}, which computes in bfloat16, but dtype is {dtype!r}"
        )
    return "bfloat16"


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}, but must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but no CUDA device is available")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | str:
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else "auto"


def _eos(model: Any) -> tuple[int, ...]:
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)
