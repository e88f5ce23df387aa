"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

GGUF is the format of llama.cpp (github.com/ggml-org/ggml, docs/gguf.md): a magic number, a version,
counts, key-value pairs, a description of each tensor, and then the tensors, aligned. A file comes
from anywhere, so no number in it is believed: every count and length is compared with a limit and
with the bytes that are left before anything is allocated, and tensors may neither overlap nor end
behind the file.

A model that is split into several files (``-00001-of-00003.gguf``) is read as one.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_MAX_KEYS: Final = 4096
_MAX_TENSORS: Final = 1 << 16
_MAX_DIMENSIONS: Final = 4
_MAX_KEY_BYTES: Final = 1 << 10
_MAX_TEXT_BYTES: Final = 1 << 22
_MAX_ARRAY: Final = 1 << 22
"""Most elements of an array. The largest vocabularies have 2^18 tokens and twice as many merges."""
_MAX_PARTS: Final = 999
_DEFAULT_ALIGNMENT: Final = 32
_PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS_64: Final = {12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH: Final = struct.Struct("<Q")
_BLOCKS_AT_ONCE: Final = 8192
"""Blocks that are decoded together: their values are in the processor's cache then."""


class GgufError(ValueError):
    """The file is not a GGUF file that can be read. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The place of one tensor in the file, with its shape and type."""

    name: str
    shape: tuple[int, ...]
    """The sizes of its dimensions as numpy counts them: the rows first."""
    type: int
    """The number of its type (``gguf.GGMLQuantizationType``)."""
    path: Path
    offset: int
    """Bytes from the beginning of ``path``."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a GGUF model."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, GgufTensor] = field(repr=False)
    paths: Sequence[Path] = ()
    """The files that the model consists of."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the header of ``path``, and of the other files if the model is split.

        Raises ``GgufError``, and ``OSError``."""
        paths = _list_parts(path)
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for number, part in enumerate(paths):
            found, described = _read_header(part)
            if number == 0:
                metadata = found
            for tensor in described:
                if tensor.name in tensors:
                    raise GgufError(f"{part}: tensor {tensor.name[:80]!r} is described twice")
                tensors[tensor.name] = tensor
        wanted = metadata.get("split.tensors.count", len(tensors))
        if wanted != len(tensors):
            raise GgufError(f"{path}: has {len(tensors)} tensors, but says that it has {wanted}")
        return cls(path, metadata, tensors, paths)

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """Return the metadata of ``key``, which has to be of this ``kind``; ``default`` if it is
        absent. A whole number counts as a ``float`` too. Raises ``GgufError``."""
        found = self.metadata.get(key, default)
        if kind is float and isinstance(found, int) and not isinstance(found, bool):
            found = float(found)
        if found is not None and (not isinstance(found, kind) or (kind is int and found is True)):
            raise GgufError(
                f"{self.path}: {key} is {_show_value(found)}, but must be {kind.__name__}"
            )
        return found

    def needed(self, key: str, kind: type) -> Any:
        """Return the metadata of ``key``. Raises ``GgufError`` where it is absent."""
        if (found := self.value(key, kind)) is None:
            raise GgufError(f"{self.path}: the metadata lacks {key}")
        return found


def _list_parts(path: Path) -> list[Path]:
    """Return the files of the model that ``path`` is, or is the first part of."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise GgufError(f"{path}: has {count} parts, but at most {_MAX_PARTS} are read")
    parts = [
        path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf")
        for number in range(1, count + 1)
    ]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise GgufError(f"{path}: the part {missing[0]} is missing")
    return parts


def _read_header(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    size = path.stat().st_size
    if size < len(MAGIC) + 20:
        raise GgufError(f"{path}: has {size} bytes, which is no GGUF file; fetch it again")
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        if data[: len(MAGIC)] != MAGIC:
            raise GgufError(f"{path}: does not begin as a GGUF file does; fetch it again")
        reader.position = len(MAGIC)
        version = reader.scalar("I")
        if version not in _VERSIONS:
            known = " and ".join(map(str, _VERSIONS))
            raise GgufError(f"{path}: is GGUF of version {version}, but {known} are read")
        tensor_count = reader.count("tensors", _MAX_TENSORS)
        key_count = reader.count("metadata keys", _MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = reader.text(_MAX_KEY_BYTES)
            if key in metadata:
                raise GgufError(f"{path}: the metadata has {key!r} twice")
            metadata[key] = reader.value(reader.scalar("I"), key)
        described = [reader.tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
            raise GgufError(f"{path}: general.alignment is {_show_value(alignment)}")
        start = -(-reader.position // alignment) * alignment
        tensors = [
            GgufTensor(name, shape, kind, path, start + offset)
            for name, shape, kind, offset in described
        ]
    _check_places(path, tensors, size)
    return metadata, tensors


class _Reader:
    """Reads values one after the other. Each call raises ``GgufError`` at the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self.position = path, data, 0

    def bytes(self, count: int) -> bytes:
        if count > len(self._data) - self.position:
            raise GgufError(f"{self._path}: ends in the middle of its header; fetch it again")
        found = self._data[self.position : self.position + count]
        self.position += count
        return found

    def scalar(self, form: str) -> Any:
        (found,) = struct.unpack(f"<{form}", self.bytes(struct.calcsize(f"<{form}")))
        return found

    def count(self, what: str, most: int) -> int:
        found: int = self.scalar("Q")
        if found > most:
            raise GgufError(f"{self._path}: has {found} {what}, but at most {most} are read")
        return found

    def text(self, most: int = _MAX_TEXT_BYTES) -> str:
        length: int = self.scalar("Q")
        if length > most:
            raise GgufError(f"{self._path}: a text has {length} bytes, but at most {most} are read")
        return self.bytes(length).decode("utf-8", errors="replace")

    def value(self, kind: int, key: str) -> Any:
        if (form := _SCALARS.get(kind) or _SCALARS_64.get(kind)) is not None:
            return self.scalar(form)
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise GgufError(f"{self._path}: {key[:80]} has a value of the unknown type {kind}")
        element = self.scalar("I")
        length = self.count(f"elements in {key[:80]}", _MAX_ARRAY)
        if element == _TEXT:
            return self._texts(length)
        if (form := _SCALARS.get(element) or _SCALARS_64.get(element)) is None:
            raise GgufError(f"{self._path}: {key[:80]} is an array of the unknown type {element}")
        return list(struct.unpack(f"<{length}{form}", self.bytes(length * struct.calcsize(form))))

    def _texts(self, count: int) -> list[str]:
        """Return that many texts: what ``text`` does, in a third of the time. A vocabulary and its
        merges are some hundred thousand texts."""
        data, position, size = self._data, self.position, len(self._data)
        found = list[str]()
        for _ in range(count):
            start = position + 8
            if start > size:
                raise GgufError(f"{self._path}: ends in the middle of its header; fetch it again")
            (length,) = _LENGTH.unpack_from(data, position)
            if length > min(_MAX_TEXT_BYTES, size - start):  # ``text`` raises the error
                break
            position = start + length
            found.append(data[start:position].decode("utf-8", errors="replace"))
        self.position = position
        return found if len(found) == count else [*found, self.text()]

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return the name, shape, type and offset of a tensor."""
        name = self.text(_MAX_KEY_BYTES)
        dimensions = self.scalar("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise GgufError(f"{self._path}: tensor {name[:80]!r} has {dimensions} dimensions")
        sizes = struct.unpack(f"<{dimensions}Q", self.bytes(8 * dimensions))
        if not all(sizes):
            raise GgufError(f"{self._path}: tensor {name[:80]!r} has the shape {sizes}")
        return name, tuple(reversed(sizes)), self.scalar("I"), self.scalar("Q")


def _check_places(path: Path, tensors: Sequence[GgufTensor], size: int) -> None:
    """Check that the tensors lie in the file, one behind the other."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda one: one.offset):
        if tensor.offset < end:
            raise GgufError(f"{path}: tensors {before[:80]!r} and {tensor.name[:80]!r} overlap")
        end, before = tensor.offset + byte_count(path, tensor), tensor.name
        if end > size:
            raise GgufError(
                f"{path}: tensor {tensor.name[:80]!r} ends at byte {end}, but the file has {size};"
                " it was cut, so fetch it again"
            )


def byte_count(path: Path, tensor: GgufTensor) -> int:
    """Return the bytes of ``tensor`` in the file. Raises ``GgufError`` for a type that is not
    known, and for rows that are no whole number of blocks."""
    block, block_bytes = _find_block(path, tensor)
    row = tensor.shape[-1]
    if row % block:
        raise GgufError(
            f"{path}: a row of tensor {tensor.name[:80]!r} has {row} values, which is no multiple"
            f" of {block}"
        )
    return math.prod(tensor.shape) // block * block_bytes


def _find_block(path: Path, tensor: GgufTensor) -> tuple[int, int]:
    """Return how many values a block of this tensor's type has, and in how many bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type)]
    except (ValueError, KeyError):
        raise GgufError(
            f"{path}: tensor {tensor.name[:80]!r} has the unknown type {tensor.type}"
        ) from None
    return block, block_bytes


def type_name(tensor: GgufTensor) -> str:
    """Return the type as llama.cpp calls it, such as ``Q4_K``."""
    from gguf import GGMLQuantizationType

    return str(GGMLQuantizationType(tensor.type).name)


def values_of(tensor: GgufTensor, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return the values of ``tensor`` from ``start`` to ``stop`` of its first dimension, by default
    all.

    float16 stays, and everything else becomes float32. Raises ``GgufError`` for a type that the
    ``gguf`` library cannot decode."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    stop = tensor.shape[0] if stop is None else stop
    shape = (stop - start, *tensor.shape[1:])
    if len(shape) == 1:  # blocks may be cut
        return values_of(replace(tensor, shape=(1, *tensor.shape)))[0, start:stop]
    raw = _map_bytes(tensor, start, stop)
    kind = GGMLQuantizationType(tensor.type)
    if kind is GGMLQuantizationType.F32:
        return raw.view("<f4").reshape(shape)
    if kind is GGMLQuantizationType.F16:
        return raw.view("<f2").reshape(shape)
    if kind is GGMLQuantizationType.BF16:
        return (raw.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    block, block_bytes = _find_block(tensor.path, tensor)
    blocks = raw.reshape(-1, block_bytes)
    found = np.empty((len(blocks), block), np.float32)
    try:
        with np.errstate(all="ignore"):  # a scale in the file may be infinite
            for first in range(0, len(blocks), _BLOCKS_AT_ONCE):
                part = slice(first, min(len(blocks), first + _BLOCKS_AT_ONCE))
                # The library is slow where a matrix has many rows, so this is one row.
                found[part] = dequantize(blocks[part].reshape(1, -1), kind).reshape(-1, block)
            return found.reshape(shape)
    except NotImplementedError:
        raise GgufError(
            f"{tensor.path}: tensor {tensor.name[:80]!r} is {kind.name}, which cannot be decoded"
        ) from None


def blocks_of(tensor: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
    """Return the blocks of ``tensor`` from ``start`` to ``stop`` of its first dimension as they are
    in the file: uint8 [stop - start, ..., blocks of a row, bytes of a block]. It must have two
    dimensions or more."""
    _, block_bytes = _find_block(tensor.path, tensor)
    return _map_bytes(tensor, start, stop).reshape(
        stop - start, *tensor.shape[1:-1], -1, block_bytes
    )


def _map_bytes(tensor: GgufTensor, start: int, stop: int) -> NDArray[np.uint8]:
    each = byte_count(tensor.path, tensor) // tensor.shape[0]
    mapped = np.memmap(
        tensor.path,
        np.uint8,
        "r",
        offset=tensor.offset + start * each,
        shape=((stop - start) * each,),
    )
    return mapped.view(np.ndarray)  # slices of a memmap take ten times as long


def tensor_types(file: GgufFile) -> Iterator[tuple[str, int]]:
    """Yield each type of the file's tensors, with the number of tensors, most frequent first."""
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[type_name(tensor)] = counts.get(type_name(tensor), 0) + 1
    yield from sorted(counts.items(), key=lambda item: -item[1])


def _show_value(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
