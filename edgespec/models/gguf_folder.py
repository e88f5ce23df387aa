"""Turns a GGUF model into the folder of a checkpoint, once, in the user's cache.

Everything that takes a folder then takes a GGUF file too: targets, exports, tokenizers. Values that
the file holds in 16 bits stay as they are. Quantised values are decoded to float32, so nothing is
lost: rounding the blocks of Q4_0 and Q8_0 again, as ``--quantize`` and the export of a draft do,
gives the integers of the file back. A model whose float32 folder would be larger than
``MAX_FLOAT32_BYTES`` is written in bfloat16, which rounds each value once.

The folder lies in one that is named after the header, the size and the time of change of the file,
and after the version of this conversion. So a file is converted anew when either changes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgespec.config.common import require_library
from edgespec.config.files import temporary_folder
from edgespec.models.gguf_file import GgufError, GgufFile, GgufTensor, type_name

MAX_FLOAT32_BYTES: Final = 12 << 30
_HEADER_BYTES: Final = 1 << 20
_NAME_DIGITS: Final = 16
_VERSION: Final = 2
"""Version of the conversion. A change of what a folder holds takes the next number."""
_MIB: Final = 1 << 20
_DTYPES: Final = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2)}
_LOG = logging.getLogger(__name__)


def folder_of_gguf(
    path: Path, cache: Path, say: Callable[[str], None] | None = None, *, name: str = ""
) -> Path:
    """Return the checkpoint's folder for the GGUF file ``path``, below ``cache``. It is written at
    the first call, which ``say`` is given a line about. ``name`` is the model's; empty: that of the
    file.

    Raises ``GgufError`` naming the file and what is wrong with it, ``SetupError`` without the
    ``gguf`` library, and ``OSError``, also where the disk has no room."""
    with require_library("gguf", "gguf"):
        import gguf  # noqa: F401
    file = GgufFile.read(path)
    folder = converted_folder(file, cache, name)
    if (folder / "config.json").is_file():
        return folder
    from edgespec.models.gguf_architecture import config_of, list_matrix_types

    started_s = time.monotonic()
    config = config_of(file)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(folder.parent, ".gguf-") as work:
        dtype, size = _plan_weights(file, config)
        _check_room(folder.parent, size, path)
        if say is not None:
            say(f"converting {path.name} ({list_matrix_types(file)}) once: {size / 1e6:,.0f} MB")
        _write_texts(file, config, work)
        _write_weights(file, config, dtype, work / "model.safetensors")
        # The configuration comes last: a folder that has one is complete.
        config["dtype"] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
        (work / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
    _LOG.info("%s was converted in %.1f s", path, time.monotonic() - started_s)
    return folder


def converted_folder(file: GgufFile, cache: Path, name: str = "") -> Path:
    """Return the place of the checkpoint's folder for ``file`` below ``cache``, which need not
    exist. ``name`` is the model's; empty: that of the file. Raises ``OSError``."""
    return cache / "gguf" / _compute_digest(file) / _make_folder_name(name or file.path.name)


def _make_folder_name(name: str) -> str:
    """Return the name of a model's folder, which is the model's name to users."""
    name = re.sub(r"-\d{5}-of-\d{5}$", "", name.removesuffix(".gguf"))
    return re.sub(r"[^\w.-]", "-", name)[:80].strip(".") or "model"


def _compute_digest(file: GgufFile) -> str:
    """Return a digest of the file's state, which changes when the file or the conversion does."""
    digest = hashlib.sha256(f"version {_VERSION} ".encode())
    for path in file.paths:
        stat = path.stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns} ".encode())
        with path.open("rb") as opened:
            digest.update(opened.read(_HEADER_BYTES))
    return digest.hexdigest()[:_NAME_DIGITS]


def _plan_weights(file: GgufFile, config: dict[str, Any]) -> tuple[str, int]:
    """Return the type in which matrices are written, and the bytes of all weights."""
    values = sum(math.prod(tensor.shape) for tensor in file.tensors.values())
    kinds = {type_name(one) for one in file.tensors.values() if len(one.shape) > 1}
    if kinds == {"F16"} or kinds == {"BF16"}:
        return kinds.pop(), 2 * values
    if 4 * values > MAX_FLOAT32_BYTES:
        return "BF16", 2 * values
    return "F32", 4 * values


def _check_room(folder: Path, size: int, path: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < size + 64 * _MIB:
        raise OSError(
            f"{path}: its folder takes {size / _MIB:,.0f} MiB, but {folder} has"
            f" {free / _MIB:,.0f} MiB free; point XDG_CACHE_HOME to a larger disk"
        )


def _write_texts(file: GgufFile, config: dict[str, Any], folder: Path) -> None:
    """Write the tokenizer's files, and put the end tokens into ``config``."""
    from edgespec.models.gguf_tokenizer import end_tokens_of, tokenizer_config_of, tokenizer_of

    tokenizer_of(file).save(str(folder / "tokenizer.json"), pretty=False)
    texts = tokenizer_config_of(file)
    if (template := texts.pop("chat_template", None)) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    ends = end_tokens_of(file)
    for name, key in (("bos", "bos_token_id"), ("padding", "pad_token_id")):
        config[key] = file.value(f"tokenizer.ggml.{name}_token_id", int)
    config["eos_token_id"] = ends
    for name, content in (
        ("tokenizer_config.json", texts),
        ("generation_config.json", {"eos_token_id": ends}),
    ):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _write_weights(file: GgufFile, config: dict[str, Any], dtype: str, path: Path) -> None:
    """Write all tensors into one safetensors file, one after the other: no more than one is in
    memory at a time."""
    from edgespec.models.gguf_architecture import weights_of
    from edgespec.models.gguf_file import values_of

    described: dict[str, Any] = {}
    order: list[tuple[GgufTensor, Any]] = []
    position = 0
    for name, tensor, change in weights_of(file, config):
        shape = tensor.shape[1:] if ".experts." in name else tensor.shape
        size = math.prod(shape) * _DTYPES[dtype][1]
        described[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
        order.append((tensor, change))
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    before: GgufTensor | None = None
    values: Any = None
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for tensor, change in order:
            if tensor is not before:  # the experts of a layer come from one tensor
                values, before = values_of(tensor), tensor
            for part in _encode_parts(change(_to_float(values, tensor)), dtype):
                out.write(part)
        out.flush()
        os.fsync(out.fileno())


def _to_float(values: Any, tensor: GgufTensor) -> Any:
    """Return the values of a tensor as numbers. Values of bfloat16 are returned as bits."""
    if type_name(tensor) != "BF16":
        return values
    return (values.astype("<u4") << 16).view("<f4")


def _encode_parts(values: Any, dtype: str) -> Iterator[bytes]:
    """Yield the bytes of ``values``, in parts, in the type that is written."""
    flat = np.ascontiguousarray(values).reshape(-1)
    for start in range(0, flat.size, 1 << 22):
        part = flat[start : start + (1 << 22)]
        if dtype == "BF16":
            bits = part.astype("<f4").view("<u4")
            # Round to the nearest, and halves to even.
            yield ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
        else:
            yield part.astype(_DTYPES[dtype][0]).tobytes()


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a file that is called ``*.gguf``."""
    return path.suffix.lower() == ".gguf" and path.is_file()


def only_gguf_in(folder: Path) -> Path | None:
    """Return the GGUF model in a folder that is no checkpoint; None where there is none. Raises
    ``GgufError`` where there are several."""
    if (folder / "config.json").exists():
        return None
    found = sorted(
        path
        for path in folder.glob("*.gguf")
        if not re.search(r"-\d{5}-of-\d{5}\.gguf$", path.name) or path.name.find("-00001-of-") >= 0
    )
    found = [path for path in found if not path.name.startswith("mmproj")]
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:8])
        raise GgufError(f"{folder}: holds {len(found)} GGUF models ({names}); name one of them")
    return found[0] if found else None
