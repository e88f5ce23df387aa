"""The fingerprint of a model's weights: equal for two folders that hold the same model.

A device continues a text at another verifier only if that one serves the model that began it, and
names can be given to anything. Reading all of a large model would take minutes, so the hash covers
its configuration, the names, types and shapes of all tensors (the headers of the safetensors
files), and from the data of each file 1,024 pieces of 1 KiB, evenly spread: a fine-tuned, merged or
quantised copy differs there. It is no defence against somebody who makes two models agree on
purpose; whoever serves the target is trusted anyway.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Final

PIECES: Final = 1024
PIECE_BYTES: Final = 1024
MAX_HEADER_BYTES: Final = 100 << 20
_DIGITS: Final = 32
# What does not change a token: who made the file, with what, and how it is to be loaded.
_BESIDE_THE_POINT: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
)


def weights_fingerprint(folder: Path, vocabulary: str = "") -> str:
    """32 hex digits (128 bits of SHA-256) of the model in ``folder``, with its ``vocabulary``.

    Raises ``ValueError`` or ``OSError`` naming a file that cannot be read.
    """
    digest = hashlib.sha256()
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _BESIDE_THE_POINT}
    digest.update(json.dumps([vocabulary, kept], sort_keys=True).encode())
    _add_tensors(digest, folder)
    return digest.hexdigest()[:_DIGITS]


def adapter_fingerprint(folder: Path) -> str:
    """The same for an adapter (LoRA) as PEFT writes it; that of its model is not part of it."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config.pop("base_model_name_or_path", None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    _add_tensors(digest, folder)
    return digest.hexdigest()[:_DIGITS]


def _add_tensors(digest: hashlib._Hash, folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"{path}: a header of {size} bytes, at most {MAX_HEADER_BYTES}")
            digest.update(file.read(size))
            begin, end = 8 + size, path.stat().st_size
            step = max(PIECE_BYTES, (end - begin) // PIECES)
            for at in range(begin, end, step):
                file.seek(at)
                digest.update(file.read(PIECE_BYTES))


def text_fingerprint(text: str) -> str:
    """32 hex digits for a model that a line of text describes, such as the toy."""
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
