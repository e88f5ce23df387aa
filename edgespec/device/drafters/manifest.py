"""The manifest of a draft folder, ``edgespec.json``, with all facts that a device needs.

{"format": 1, "model": {ModelInfo}, "bits": 4, "table_bits": 4, "block_size": 32, "layers": 3,
 "kv_heads": 1, "head_dim": 64, "kv_type": "float32", "trained_length": 256,
 "source": "name of the checkpoint", "file_bytes": {"model.onnx": 1234}}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from edgespec.core.device.memory import KvType
from edgespec.core.ports import MAX_PLACES, ModelInfo, ParallelDraft
from edgespec.core.protocol.messages import MAX_TOKEN_ID

FORMAT = 1
BITS = (4, 8, 32)
MANIFEST_FILE = "edgespec.json"
MODEL_FILE = "model.onnx"
MAX_CONTEXT_LENGTH = 1 << 20
MAX_VOCABULARY_SIZE = 1 << 20
MAX_FILE_BYTES = 1 << 40
_REQUIRED = ("bits", "table_bits", "block_size", "layers", "kv_heads", "head_dim")
_NUMBERS = {
    **dict.fromkeys(_REQUIRED, (1, 1 << 12)),
    "token_count": (0, MAX_VOCABULARY_SIZE),
    "trained_length": (0, MAX_CONTEXT_LENGTH),
    "parallel_tokens": (1, MAX_PLACES),
    "mask_token": (0, MAX_VOCABULARY_SIZE),
}
"""Number keys of a manifest, each with its least and its largest value."""


class DraftModelError(ValueError):
    """A draft folder cannot be used; the message names the file and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class DraftManifest:
    model: ModelInfo
    bits: int
    table_bits: int
    """Bits of a weight in the embedding and the head."""
    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    source: str = ""
    token_count: int = 0
    """Number of ids that have a text; higher ids are padding and are never proposed. 0 if all ids
    may be proposed."""
    kv_type: str = KvType.FLOAT32.value
    """Type of a cached key or value."""
    trained_length: int = 0
    """Longest training text in tokens. 0 if it is not known; then the whole context counts as
    trained."""
    parallel_tokens: int = 1
    """Most positions that one run of the draft fills. 1 for an ordinary draft."""
    mask_token: int = 0
    """Id that stands for a token that is not known yet, in a run that fills several positions."""
    file_bytes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the folder's other files by name, which reveal a truncated file. Empty in older
    exports."""

    @property
    def proposable_count(self) -> int:
        """Number of ids, from 0 on, that a draft step may propose."""
        return self.token_count or self.model.vocabulary_size

    @property
    def parallel(self) -> ParallelDraft | None:
        """The way in which the draft fills several positions in one run; None for an ordinary
        draft."""
        if self.parallel_tokens == 1:
            return None
        return ParallelDraft(self.mask_token, self.parallel_tokens)

    @property
    def window(self) -> int:
        """Number of last tokens that the draft should look at. 0 for all tokens.

        A small draft guesses badly after more tokens than it was trained on."""
        return self.trained_length if self.trained_length < self.model.context_length else 0


def write_manifest(folder: Path, manifest: DraftManifest) -> None:
    """Write the manifest into a draft folder. Raises ``OSError``."""
    text = json.dumps({"format": FORMAT, **asdict(manifest)}, indent=2, sort_keys=True)
    (folder / MANIFEST_FILE).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> DraftManifest:
    """Return the manifest of a draft folder.

    Raises ``DraftModelError`` naming the file, the key, the value and the limits."""
    path = folder / MANIFEST_FILE
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DraftModelError(
            f"{path}: no such file; a draft folder is made by `edgespec export`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DraftModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
        raise DraftModelError(f"{path}: format must be {FORMAT}; export the draft again")
    data.pop("kept_count", None)  # Older exports have this key.
    keys = {one.name for one in fields(DraftManifest)}
    if surplus := sorted(data.keys() - keys):
        raise DraftModelError(f"{path}: {surplus[0]} is no key of a manifest; export it again")
    model = _read_model(path, data.pop("model", None))
    for name, (low, high) in _NUMBERS.items():
        if name in data or name in _REQUIRED:
            _check(path, name, data.get(name), high, low)
    for name in ("bits", "table_bits"):
        if data[name] not in BITS:
            raise DraftModelError(f"{path}: {name} is {data[name]!r}, but must be one of {BITS}")
    for name in ("source", "kv_type"):
        if not isinstance(text := data.get(name, ""), str):
            raise DraftModelError(f"{path}: {name} is {text!r}, but must be text")
    sizes = data.get("file_bytes", {})
    if not isinstance(sizes, dict):
        raise DraftModelError(f"{path}: file_bytes is {sizes!r}, but must be an object")
    for name, size in sizes.items():
        _check(path, f"file_bytes[{name}]", size, MAX_FILE_BYTES, 0)
    manifest = DraftManifest(model=model, **data)
    _check(path, "token_count", manifest.token_count, model.vocabulary_size, 0)
    _check(path, "mask_token", manifest.mask_token, model.vocabulary_size - 1, 0)
    types = [kv_type.value for kv_type in KvType]
    if manifest.kv_type not in types:
        raise DraftModelError(f"{path}: kv_type is {manifest.kv_type!r}, not one of {types}")
    return manifest


def _read_model(path: Path, data: Any) -> ModelInfo:
    """Return the model that a manifest describes. Raises ``DraftModelError``."""
    if not isinstance(data, dict):
        raise DraftModelError(f"{path}: model is {data!r}, but must be an object")
    for name in ("name", "vocabulary", "fingerprint"):
        if not isinstance(text := data.get(name, ""), str):
            raise DraftModelError(f"{path}: model.{name} is {text!r}, but must be text")
    _check(path, "vocabulary_size", data.get("vocabulary_size"), MAX_VOCABULARY_SIZE)
    _check(path, "context_length", data.get("context_length"), MAX_CONTEXT_LENGTH)
    ends = data.get("eos_token_ids", [])
    if not isinstance(ends, list):
        raise DraftModelError(f"{path}: eos_token_ids is {ends!r}, but must be a list")
    for token in ends:
        _check(path, "eos_token_ids", token, MAX_TOKEN_ID, 0)
    try:
        return ModelInfo(**{**data, "eos_token_ids": tuple(ends)})
    except TypeError as error:
        raise DraftModelError(f"{path}: model: {error}") from error


def find_damage(folder: Path, manifest: DraftManifest, names: Iterable[str] = ()) -> str:
    """Return a line about the first file whose size is not the one in the manifest, or "" if none.

    ``names`` are the files to check, by default all that the manifest lists."""
    for name in names or manifest.file_bytes:
        path, size = folder / name, manifest.file_bytes.get(name)
        if (
            size is not None
            and (actual_size := path.stat().st_size if path.is_file() else -1) != size
        ):
            has = "no such file" if actual_size < 0 else f"has {actual_size} bytes"
            return f"{path}: {has}, but was written with {size}"
    return ""


def _check(path: Path, name: str, value: object, high: int, low: int = 1) -> None:
    if type(value) is not int or not low <= value <= high:
        raise DraftModelError(
            f"{path}: {name} is {value!r}, but must be an integer in [{low}, {high}]"
        )
