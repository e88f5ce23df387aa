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

import errno
import hashlib
import json
import math
import os
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from edgespec.config.common import require_library
from edgespec.config.files import temporary_folder
from edgespec.models.conversion_reports import ConversionReport, report_conversion
from edgespec.models.gguf_architecture import config_of, packs_experts, weights_of
from edgespec.models.gguf_file import (
    GgufError,
    GgufFile,
    byte_count,
    tensor_types,
    type_name,
)
from edgespec.operating_system import move_path

MAX_FLOAT32_BYTES: Final = 12 << 30
_HEADER_BYTES: Final = 1 << 20
_NAME_DIGITS: Final = 16
_VERSION: Final = 4
"""Version of the conversion. A change of what a folder holds takes the next number."""
_MIB: Final = 1 << 20
_DTYPES: Final = {"F32": ("<f4", 4), "F16": ("<f2", 2), "BF16": ("<u2", 2)}
_TYPE_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_VALUES_AT_ONCE: Final = 1 << 22
_WORK_PREFIX: Final = ".gguf-"
_ABANDONED_S: Final = 3600.0


def folder_of_gguf(path: Path, cache: Path, *, name: str = "") -> Path:
    """Return the checkpoint's folder for the GGUF file ``path``, below ``cache``.

    It is written at the first call, which is reported (``conversion_reports``). If several
    processes convert the same file at once, the first one that ends makes the folder. ``name`` is
    the model's; empty: that of the file.

    Raises ``GgufError`` naming the file and what is wrong with it, ``SetupError`` without the
    ``gguf`` library, and ``OSError``, also where the disk has no room. An error or a signal leaves
    no folder behind."""
    with require_library("gguf", "gguf"):
        import gguf  # noqa: F401
    file = GgufFile.read(path)
    folders = cache / "gguf"
    folder = converted_folder(file, cache, name)
    if (folder / "config.json").is_file():
        return folder
    folders.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folders)
    last: ConversionReport | None = None
    try:
        with temporary_folder(folders, _WORK_PREFIX) as work:
            if not _link_other_name(folder.parent, work):
                last = _convert(file, name, folders, work)
            folder.parent.mkdir(exist_ok=True)
            try:
                move_path(work, folder)
            except OSError:
                if not (folder / "config.json").is_file():  # else another process was faster
                    raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                f"{path}: the disk of {folders} became full while the file was converted;"
                " make room there, or point XDG_CACHE_HOME to a larger disk"
            ) from error
        raise
    if last is not None:
        report_conversion(replace(last, folder=folder))
    return folder


def _link_other_name(folders: Path, work: Path) -> bool:
    """Link the files of the same model under another name, if ``folders`` has one, into ``work``.
    Return whether that was done: a file of Ollama's store may be named in several ways."""
    for other in sorted(folders.glob("*/config.json")):
        try:
            for source in other.parent.iterdir():
                os.link(source, work / source.name)
        except OSError:  # no links on this disk, or the folder is being removed
            for made in work.iterdir():
                made.unlink()
        else:
            return True
    return False


def converted_folder(file: GgufFile, cache: Path, name: str = "") -> Path:
    """Return the place of the checkpoint's folder for ``file`` below ``cache``, which need not
    exist. ``name`` is the model's; empty: that of the file. Raises ``OSError``."""
    return cache / "gguf" / _compute_digest(file) / _make_folder_name(name or file.path.name)


def _convert(file: GgufFile, name: str, folders: Path, work: Path) -> ConversionReport:
    """Write the whole checkpoint into the folder ``work``, and return the last report, which has
    the model's ``name``. Raises ``GgufError`` and ``OSError``."""
    config = config_of(file)
    dtype, size_bytes = _plan_weights(file)
    _check_room(folders, size_bytes, file.path)
    report = ConversionReport(
        file=name or file.path.name,
        types=", ".join(f"{count} {kind}" for kind, count in tensor_types(file)),
        written_type=_TYPE_NAMES[dtype],
        done_tensors=0,
        tensors=len(file.tensors),
        done_bytes=0,
        total_bytes=size_bytes,
        elapsed_s=0.0,
        relative_error=0.0,
    )
    report_conversion(report)
    started_s = time.monotonic()
    _write_texts(file, config, work)
    for weights in _write_weights(file, config, dtype, work / "model.safetensors"):
        report = replace(
            report,
            done_tensors=weights.done_tensors,
            done_bytes=weights.done_bytes,
            elapsed_s=time.monotonic() - started_s,
            relative_error=weights.relative_error,
        )
        report_conversion(report)
    # The configuration comes last: a folder that has one is complete.
    config["dtype"] = _TYPE_NAMES[dtype]
    (work / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return report


def _remove_abandoned(folders: Path) -> None:
    """Delete work folders of processes that were killed: those in which no file has changed for
    ``_ABANDONED_S``."""
    oldest_s = time.time() - _ABANDONED_S
    for work in folders.glob(f"{_WORK_PREFIX}*"):
        with suppress(OSError):  # another process deletes it, too
            if max(one.stat().st_mtime for one in (work, *work.iterdir())) < oldest_s:
                shutil.rmtree(work)


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


def _plan_weights(file: GgufFile) -> tuple[str, int]:
    """Return the type in which matrices are written, and the bytes of all weights."""
    tensors, packed_bytes = list(file.tensors.values()), 0
    if packs_experts(file):
        packed = [one for one in tensors if type_name(one) == "MXFP4" and len(one.shape) == 3]
        packed_bytes = sum(byte_count(file.path, one) for one in packed)
        tensors = [one for one in tensors if one not in packed]
    values = sum(math.prod(tensor.shape) for tensor in tensors)
    kinds = {type_name(one) for one in tensors if len(one.shape) > 1}
    if kinds == {"F16"} or kinds == {"BF16"}:
        return kinds.pop(), 2 * values + packed_bytes
    if 4 * values > MAX_FLOAT32_BYTES:
        return "BF16", 2 * values + packed_bytes
    return "F32", 4 * values + packed_bytes


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

    text = tokenizer_of(file).to_str(pretty=False)  # its own ``save`` raises no ``OSError``
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
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


class _WrittenWeights:
    """The sums over all weights that have been written so far."""

    def __init__(self, dtype: str) -> None:
        self.done_tensors = self.done_bytes = 0
        self._dtype = dtype
        self._squares = self._lost_squares = 0.0

    @property
    def relative_error(self) -> float:
        """The error of rounding, as in ``ConversionReport``."""
        return math.sqrt(self._lost_squares / self._squares) if self._squares else 0.0

    def encode(self, values: Any) -> Any:
        """Return ``values``, float32 or float16, as an array of the type that is written."""
        if self._dtype != "BF16":
            content = values.astype(_DTYPES[self._dtype][0], copy=False)
        else:
            values = values.astype("<f4", copy=False)
            bits = values.view("<u4")
            # Round to the nearest, and halves to even.
            rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
            lost = (rounded.astype("<u4") << 16).view("<f4") - values
            self._lost_squares += float(np.vdot(lost, lost))
            self._squares += float(np.vdot(values, values))
            content = rounded
        return self.count(content)

    def count(self, content: Any) -> Any:
        """Count the bytes of an array that is written, and return the array."""
        self.done_bytes += content.nbytes
        return content


def _write_weights(
    file: GgufFile, config: dict[str, Any], dtype: str, path: Path
) -> Iterator[_WrittenWeights]:
    """Write all tensors into one safetensors file, one after the other, and yield the state after
    each. No more than ``_VALUES_AT_ONCE`` values are in memory at a time, or one matrix of the
    file if its rows change their order."""
    described: dict[str, Any] = {}
    weights = list(weights_of(file, config))
    position = 0
    for weight in weights:
        kind, each = ("U8", 1) if weight.is_packed else (dtype, _DTYPES[dtype][1])
        size = math.prod(weight.shape) * each
        described[weight.name] = {
            "dtype": kind,
            "shape": list(weight.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    header = json.dumps(described).encode()
    header += b" " * (-len(header) % 8)
    state = _WrittenWeights(dtype)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(header)) + header)
        for place, weight in enumerate(weights, 1):
            for values in weight.read(_VALUES_AT_ONCE):
                flat = np.ascontiguousarray(values).reshape(-1)
                out.write(state.count(flat) if weight.is_packed else state.encode(flat))
            # The experts of a layer are one tensor of the file, or two.
            if place == len(weights) or weights[place].tensors != weight.tensors:
                state.done_tensors += len(weight.tensors)
                yield state
        out.flush()
        os.fsync(out.fileno())


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
