"""Drafts exported on the fly, kept in the user's cache under a key of their content.

The key covers the weights, the tokenizer and the settings of the export, so a changed checkpoint
is exported anew and an equal one is found again wherever it lies.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from edgespec.core.device.memory import KvType
from edgespec.device.export.work_folder import work_folder
from edgespec.models.folders import (
    DRAFT_MANIFEST,
    check_checkpoint,
    model_info,
    token_count,
    trained_length,
)

# Raised when an export of the same input would give other bytes.
_EXPORT_VERSION = 4
WORK_PREFIX = ".edgespec-export-"
"""Of folders in which exports are built."""
_CHUNK_BYTES = 1 << 20
_HASHED = ("config.json", "generation_config.json", "tokenizer.json", "*.safetensors")


def exported(
    source: Path, bits: int, say: Callable[[str], None], kv_type: KvType = KvType.FLOAT32
) -> Path:
    """The draft folder made from the Hugging Face folder ``source``; made now if need be.

    Raises ``ValueError`` naming the file for a folder that cannot be exported.
    """
    from edgespec.device.export.export import export_draft
    from edgespec.device.export.parity import check_parity

    check_checkpoint(source)
    folder = cache_folder() / "drafts" / f"{source.name}-{_key(source, bits, kv_type)}"
    if (folder / DRAFT_MANIFEST).is_file():
        return folder
    say(f"exporting {source} to {bits}-bit ONNX, once, into {folder}")
    # Built aside and moved: a half-written folder is never found, nor by a second process.
    with work_folder(folder.parent, WORK_PREFIX) as work:
        info, tokens = model_info(source), token_count(source)
        manifest = export_draft(
            source,
            work,
            info,
            bits=bits,
            token_count=tokens,
            kv_type=kv_type,
            trained_length=trained_length(source),
        )
        check_parity(source, work, manifest)
        try:
            work.rename(folder)
        except OSError:
            if not (folder / DRAFT_MANIFEST).is_file():
                raise
    return folder


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/edgespec``, by default ``~/.cache/edgespec``. Raises ``OSError`` where this
    user has no home."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "edgespec"
    try:
        return Path.home() / ".cache" / "edgespec"
    except RuntimeError as error:
        why = "this user has no home folder for a cache: set HOME or XDG_CACHE_HOME"
        raise OSError(why) from error


def _key(source: Path, bits: int, kv_type: KvType) -> str:
    digest = hashlib.blake2b(f"{_EXPORT_VERSION} {bits} {kv_type.value}".encode(), digest_size=8)
    for path in sorted(found for pattern in _HASHED for found in source.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()
