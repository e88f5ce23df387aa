"""``edgespec.json``: what a draft folder says of itself, so that a device need not guess.

{"format": 1, "model": {ModelInfo}, "bits": 4, "table_bits": 4, "block_size": 32, "layers": 3,
 "kv_heads": 1, "head_dim": 64, "kv_type": "float32", "trained_length": 256,
 "source": "name of the checkpoint"}
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.core.device.memory import KvType
from edgespec.core.ports import ModelInfo

FORMAT = 1
MANIFEST_FILE = "edgespec.json"
MODEL_FILE = "model.onnx"
MAX_CONTEXT_LENGTH = 1 << 20
MAX_VOCABULARY_SIZE = 1 << 20


class DraftModelError(ValueError):
    """A draft folder cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class DraftManifest:
    model: ModelInfo
    bits: int
    table_bits: int
    """Of the embedding and the head."""
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    source: str = ""
    token_count: int = 0
    """Ids below it have a text; others are padding, never proposed. 0: all may be proposed."""
    kv_type: str = KvType.FLOAT32.value
    """Of a cached key or value."""
    trained_length: int = 0
    """Tokens of the texts that it was trained on; 0: not known, taken for the whole context."""

    @property
    def proposable(self) -> int:
        """How many ids, from 0 on, a draft step may propose."""
        return self.token_count or self.model.vocabulary_size

    @property
    def window(self) -> int:
        """The last tokens of a text that the draft should look at: behind longer texts than those
        it was trained on, a small draft guesses badly. 0: at all of them."""
        return self.trained_length if self.trained_length < self.model.context_length else 0


def write_manifest(folder: Path, manifest: DraftManifest) -> None:
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, sort_keys=True)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> DraftManifest:
    """Raises ``DraftModelError`` naming the file and the field."""
    path = folder / MANIFEST_FILE
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftModelError(
            f"{path}: no such file; a draft folder is made by `edgespec export`"
        ) from error
    except (OSError, ValueError) as error:
        raise DraftModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise DraftModelError(f"{path}: format must be {FORMAT}; export the draft again")
    data.pop("kept_count", None)  # of older exports
    try:
        model = ModelInfo(**data.pop("model"))
        model = replace(model, eos_token_ids=tuple(int(token) for token in model.eos_token_ids))
        manifest = DraftManifest(model=model, **data)
    except (TypeError, ValueError, KeyError) as error:
        raise DraftModelError(f"{path}: {error}") from error
    _check(path, "vocabulary_size", model.vocabulary_size, MAX_VOCABULARY_SIZE)
    _check(path, "context_length", model.context_length, MAX_CONTEXT_LENGTH)
    if manifest.token_count:
        _check(path, "token_count", manifest.token_count, model.vocabulary_size)
    if manifest.trained_length:
        _check(path, "trained_length", manifest.trained_length, MAX_CONTEXT_LENGTH)
    known = [kv_type.value for kv_type in KvType]
    if manifest.kv_type not in known:
        raise DraftModelError(f"{path}: kv_type is {manifest.kv_type!r}, not one of {known}")
    for name in ("layers", "kv_heads", "head_dim"):
        _check(path, name, getattr(manifest, name), 1 << 12)
    return manifest


def _check(path: Path, name: str, value: object, high: int) -> None:
    if not isinstance(value, int) or not 1 <= value <= high:
        raise DraftModelError(f"{path}: {name} is {value!r}, but must be an integer in [1, {high}]")
