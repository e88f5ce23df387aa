"""From a Hugging Face folder to a draft folder: ``model.onnx``, tokenizer and manifest.

Needs the ``export`` extra (onnx, safetensors, ml_dtypes), never torch.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.core.device.memory import KvType
from edgespec.core.ports import ModelInfo
from edgespec.device.drafters.manifest import MODEL_FILE, DraftManifest, write_manifest
from edgespec.device.export.checkpoint import (
    Checkpoint,
    CheckpointError,
    DecoderShape,
    read_shape,
)
from edgespec.device.export.head_padding import padded_head_dim
from edgespec.device.export.quantize import BLOCK_SIZE
from edgespec.sampling.array_sampler import MAX_WIDTH

if TYPE_CHECKING:
    import onnx

Progress = Callable[[int, int], None]
COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
# Weights inside the graph's file stay in memory beside those that the kernels have repacked, also
# after the session is closed; those of a file of their own are mapped. Small drafts are one file.
MAX_SINGLE_FILE_BYTES = 4_000_000
WEIGHTS_FILE = "model.onnx.data"
# The rotary tables are stored: 128k positions would add 64 MB to a small draft.
DEFAULT_CONTEXT_LIMIT = 16_384


def export_draft(
    source: Path,
    target: Path,
    info: ModelInfo,
    *,
    bits: int = 4,
    table_bits: int = 0,
    context_length: int = 0,
    token_count: int = 0,
    kv_type: KvType = KvType.FLOAT32,
    layers: int = 0,
    kept: Sequence[int] = (),
    trained_length: int = 0,
    progress: Progress | None = None,
) -> DraftManifest:
    """Write the draft of ``source`` into ``target`` (made when missing) and return its manifest.

    ``info`` describes the source (``models.folders.model_info``); its vocabulary fingerprint goes
    into the manifest. ``bits`` is 4, 8 or 32 (float32); ``table_bits`` the same for embedding and
    head, 0 for as ``bits``. Small models suffer from 4-bit tables more than large ones.
    ``context_length`` 0 means the model's own, at most 16384. ``token_count`` says how many ids of
    the vocabulary the tokenizer knows, where the model's is padded; 0: all. ``kv_type`` is that of
    the cached keys and values; int8 needs onnxruntime here, to try the draft. ``layers`` is how
    many are taken, from the first on, before norm and head (0: all); ``kept`` the ids that the
    draft may propose (none: all), beside which the model's end tokens are. ``trained_length``: how
    many tokens the texts had that it was trained on (``DraftManifest``). ``progress`` hears how
    many layers of how many are done. The same input gives the same bytes. Raises
    ``CheckpointError`` naming the file and the field, ``ValueError`` naming the value and the
    limit.
    """
    from edgespec.device.export.export_graph import build_graph

    shape = first_layers(read_shape(source), layers)
    if info.vocabulary_size != shape.vocabulary_size:
        raise CheckpointError(
            f"{source / 'config.json'}: vocab_size is {shape.vocabulary_size},"
            f" but the model info says {info.vocabulary_size}"
        )
    limit = info.context_length
    length = context_length or min(limit, DEFAULT_CONTEXT_LIMIT)
    if not 1 <= length <= limit:
        raise ValueError(f"context_length is {length}, but must be in [1, {limit}]")
    kept = kept_ids(kept, info)
    manifest = DraftManifest(
        model=replace(info, context_length=length),
        bits=bits,
        table_bits=table_bits or bits,
        block_size=BLOCK_SIZE,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=padded_head_dim(shape.head_dim),
        source=source.name,
        kv_type=kv_type.value,
        token_count=min(token_count, shape.vocabulary_size),
        kept_count=len(kept),
        trained_length=trained_length,
    )
    model = build_graph(shape, Checkpoint(source), length, bits, table_bits, progress, kept)
    if kv_type is not KvType.FLOAT32:
        model = _with_kv_type(model, kv_type, target, manifest)
    _save(model, target)
    for name in COPIED_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    write_manifest(target, manifest)
    return manifest


def first_layers(shape: DecoderShape, layers: int) -> DecoderShape:
    """``shape`` with its first ``layers`` layers; 0: with all. Raises ``ValueError``."""
    if not 0 <= layers <= shape.layers:
        raise ValueError(f"layers is {layers}, but must be in [1, {shape.layers}], or 0 for all")
    return replace(shape, layers=layers or shape.layers)


def kept_ids(kept: Sequence[int], info: ModelInfo) -> tuple[int, ...]:
    """``kept`` and the end tokens of ``info``, ascending; empty for empty. Raises ``ValueError``
    for an id outside the vocabulary, and for fewer ids than a step may propose."""
    if not kept:
        return ()
    found = sorted({*kept, *info.eos_token_ids})
    for token in (found[0], found[-1]):
        if not 0 <= token < info.vocabulary_size:
            raise ValueError(
                f"token id to keep is {token}, but must be in [0, {info.vocabulary_size - 1}]"
            )
    if len(found) < MAX_WIDTH:
        raise ValueError(f"{len(found)} token ids are kept, but must be at least {MAX_WIDTH}")
    return tuple(found)


def _with_kv_type(
    model: onnx.ModelProto, kv_type: KvType, target: Path, manifest: DraftManifest
) -> onnx.ModelProto:
    """For int8 the draft is tried as it is first, in a folder inside ``target``."""
    from edgespec.device.export.kv_graph import calibrated_scales, with_kv_type

    if kv_type is not KvType.INT8:
        return with_kv_type(model, kv_type)
    from edgespec.device.drafters.onnx_drafter import OnnxDrafter

    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".calibrate-", dir=target) as name:
        folder = Path(name)
        _save(model, folder)
        write_manifest(folder, replace(manifest, kv_type=KvType.FLOAT32.value))
        drafter = OnnxDrafter(folder)
        scales = calibrated_scales(drafter)
        drafter.close()
        if (folder / WEIGHTS_FILE).is_file():  # saving moved the weights there
            import onnx

            model = onnx.load_model(folder / MODEL_FILE)
    return with_kv_type(model, kv_type, scales)


def _save(model: onnx.ModelProto, target: Path) -> None:
    """Large weights go to a file of their own."""
    import onnx

    target.mkdir(parents=True, exist_ok=True)
    (target / WEIGHTS_FILE).unlink(missing_ok=True)  # onnx appends to what it finds
    weights_bytes = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    large = weights_bytes > MAX_SINGLE_FILE_BYTES
    onnx.save_model(
        model,
        target / MODEL_FILE,
        save_as_external_data=large,
        location=WEIGHTS_FILE if large else None,
    )
