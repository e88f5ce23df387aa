"""Export of a Hugging Face folder to a draft folder: ``model.onnx``, tokenizer and manifest.

It needs the ``export`` extra (onnx, safetensors, ml_dtypes), but never torch.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.config.files import temporary_folder
from edgespec.core.device.memory import KvType
from edgespec.core.protocol.checks import check_range
from edgespec.device.drafters.manifest import (
    MANIFEST_FILE,
    MODEL_FILE,
    DraftManifest,
    DraftModelError,
    find_damage,
    read_manifest,
    write_manifest,
)
from edgespec.device.export.checkpoint import Checkpoint, read_shape
from edgespec.models import folders
from edgespec.models.file_digests import compute_file_digest
from edgespec.operating_system import move_path

if TYPE_CHECKING:
    import onnx

    from edgespec.models.weight_blocks import RoundingLoss

COPIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)

# Rotary tables are stored in the graph: 128k positions would add 64 MB to a small draft.
DEFAULT_CONTEXT_LIMIT = 16_384


def export_draft(
    source: Path,
    target: Path,
    *,
    bits: int = 4,
    context_length: int = 0,
    kv_type: KvType = KvType.FLOAT32,
    progress: Callable[[int, int], None] | None = None,
    report_loss: Callable[[RoundingLoss], None] | None = None,
) -> DraftManifest:
    """Write the draft of ``source`` into ``target``, which is made if it is missing.

    The same input gives the same bytes.

    Args:
        source: Folder of a Hugging Face checkpoint.
        target: The draft folder.
        bits: Bits of a weight: 4, 8 or 32 (float32).
        context_length: Longest sequence. 0 is the model's own, at most 16384.
        kv_type: Type of cached keys and values. int8 needs onnxruntime, to try the draft.
        progress: Called with the number of finished layers and of all layers.
        report_loss: Called with what rounding to 4 or 8 bits changed.

    Returns:
        The manifest of the draft folder.

    Raises:
        ValueError: The error names the file and the field, or the value and the limit.
    """
    from edgespec.device.export.export_graph import GraphBuilder, padded_head_dim
    from edgespec.device.export.quantize import halve_cache, save_graph
    from edgespec.models.weight_blocks import BLOCK_SIZE

    shape, info = read_shape(source), folders.model_info(source)
    parallel = folders.read_parallel_draft(source)
    length = context_length or min(info.context_length, DEFAULT_CONTEXT_LIMIT)
    check_range("context_length", length, 1, info.context_length)
    manifest = DraftManifest(
        model=replace(info, context_length=length),
        bits=bits,
        table_bits=bits,
        block_size=BLOCK_SIZE,
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=padded_head_dim(shape.head_dim),
        source=source.name,
        kv_type=kv_type.value,
        token_count=min(folders.token_count(source), shape.vocabulary_size),
        trained_length=folders.trained_length(source),
        parallel_tokens=parallel.tokens if parallel else 1,
        mask_token=parallel.mask_token if parallel else 0,
    )
    builder = GraphBuilder(
        shape, Checkpoint(source, shape), length, bits, parallel=parallel is not None
    )
    model = builder.build(progress)
    if report_loss is not None and bits != 32:
        report_loss(builder.loss)
    if kv_type is KvType.FLOAT16:
        halve_cache(model)
    elif kv_type is KvType.INT8:
        model = _with_int8_cache(model, target, manifest)
    save_graph(model, target / MODEL_FILE)
    for name in COPIED_FILES:
        if (source / name).is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source / name, target / name)
    files = [path for path in target.iterdir() if path.is_file() and path.name != MANIFEST_FILE]
    sizes = {path.name: path.stat().st_size for path in sorted(files)}
    write_manifest(target, manifest := replace(manifest, file_bytes=sizes))
    return manifest


def _with_int8_cache(
    model: onnx.ModelProto, target: Path, manifest: DraftManifest
) -> onnx.ModelProto:
    """Return the model with a cache of int8.

    The scales come from trying the draft with a float32 cache, in a folder inside ``target``."""
    import onnx

    from edgespec.device.drafters.onnx_drafter import OnnxDrafter
    from edgespec.device.export.quantize import calibrated_scales, save_graph, scale_cache

    target.mkdir(parents=True, exist_ok=True)
    with temporary_folder(target, ".calibrate-") as folder:
        save_graph(model, folder / MODEL_FILE)
        write_manifest(folder, replace(manifest, kv_type=KvType.FLOAT32.value))
        drafter = OnnxDrafter(folder)
        scales = calibrated_scales(drafter)
        drafter.close()
        # Saving may have moved the weights out of the model.
        model = onnx.load_model(folder / MODEL_FILE)
    scale_cache(model, scales)
    return model


WORK_PREFIX = ".edgespec-export-"
_ABANDONED_AFTER_S = 86_400.0


@contextmanager
def work_folder(beside: Path) -> Iterator[Path]:
    """Make an empty folder in ``beside``, whose result is moved out of it.

    The folder is deleted at the end, also after a signal that ends this process. Folders of
    processes that were killed are deleted after a day. Raises ``OSError``."""
    beside.mkdir(parents=True, exist_ok=True)
    for folder in beside.glob(f"{WORK_PREFIX}????????"):
        with suppress(OSError):
            if time.time() - folder.lstat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(folder)
    with temporary_folder(beside, WORK_PREFIX) as folder:
        yield folder


# Number that is increased when an export of the same input would give other bytes.
_EXPORT_VERSION = 6
_HASHED_FILES = ("config.json", "generation_config.json", "*token*.json", "*.safetensors")


def export_to_cache(
    source: Path, bits: int, say: Callable[[str], None], kv_type: KvType = KvType.FLOAT32
) -> Path:
    """Return the draft folder made from the Hugging Face folder ``source``.

    It lies in the user's cache, under a digest of its weights, its tokenizer and these settings. It
    is made now if it is not there, or if one of its files is truncated (by a full disk, for
    example). ``say`` is called with lines about slow work. Raises ``ValueError`` naming the file
    for a folder that cannot be exported."""
    folders.check_checkpoint(source)
    folder = (
        folders.cache_folder() / "drafts" / f"{source.name}-{_source_digest(source, bits, kv_type)}"
    )
    if folder.exists():
        if not (why := _find_fault(folder)):
            return folder
        say(f"the cached draft is damaged and made again ({why})")
    say(f"exporting {source} to {bits}-bit ONNX, once, into {folder}")
    # The draft is built aside and moved, so no process ever finds a half-written folder.
    with work_folder(folder.parent) as work:
        export_draft(
            source, work, bits=bits, kv_type=kv_type, report_loss=lambda loss: say(str(loss))
        )
        if folder.exists() and _find_fault(folder):
            with work_folder(folder.parent) as aside:
                move_path(folder, aside / "damaged")
        try:
            move_path(work, folder)
        except OSError:
            if not folder.exists() or _find_fault(folder):
                raise
    return folder


def _find_fault(folder: Path) -> str:
    """Return why a draft folder of the cache cannot be used, or "" if it can."""
    try:
        return find_damage(folder, read_manifest(folder))
    except DraftModelError as error:
        return str(error)


def _source_digest(source: Path, bits: int, kv_type: KvType) -> str:
    digest = hashlib.blake2b(f"{_EXPORT_VERSION} {bits} {kv_type.value}".encode(), digest_size=8)
    for path in sorted(
        file_path for pattern in _HASHED_FILES for file_path in source.glob(pattern)
    ):
        digest.update(f"{path.name} ".encode())
        digest.update(compute_file_digest(path, folders.cache_folder()))
    return digest.hexdigest()
