"""Finds the GGUF file that a name of Ollama or of a Hub repository stands for.

``ollama:NAME[:TAG]`` is a model in Ollama's store on this machine, which is only read: a manifest
names the blob. ``hf.co/USER/REPO:QUANT`` is written as llama.cpp and Ollama write it: the file of a
Hub repository whose name has the type ``QUANT``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edgespec.models.gguf_file import GgufError

OLLAMA: Final = "ollama:"
HUB: Final = ("hf.co/", "huggingface.co/")
_DEFAULT_TYPES: Final = ("Q4_K_M", "Q4_0", "Q8_0")
"""The types that are taken where none is named, in this order: as llama.cpp does."""
_STORES: Final = ("~/.ollama/models", "/usr/share/ollama/.ollama/models", "/var/lib/ollama")
_MODEL_LAYER: Final = "application/vnd.ollama.image.model"
_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+){0,2}")
_TAG: Final = re.compile(r"[\w.-]+")
_DIGEST: Final = re.compile(r"sha256[:-][0-9a-f]{64}")
_MAX_MANIFEST_BYTES: Final = 1 << 20


def ollama_file(reference: str) -> Path:
    """Return the GGUF file of ``ollama:NAME[:TAG]``. Raises ``GgufError`` naming what is missing,
    and what there is."""
    name, _, tag = reference.removeprefix(OLLAMA).partition(":")
    tag = tag or "latest"
    if not _NAME.fullmatch(name) or not _TAG.fullmatch(tag) or ".." in name.split("/"):
        raise GgufError(f"model {reference!r} must be like ollama:llama3.2:3b")
    stores = _find_stores()
    for store in stores:
        manifests = store / "manifests"
        candidates = [
            manifests / "registry.ollama.ai" / "library" / name / tag,
            manifests / "registry.ollama.ai" / name / tag,
            manifests / name / tag,
        ]
        for manifest in candidates:
            if manifest.is_file():
                return _find_blob(store, manifest)
    there = sorted(_list_models(stores))
    known = f"; there are {', '.join(there[:16])}" if there else "; there is none"
    raise GgufError(f"model {reference!r} is not in Ollama's store{known}. Run: ollama pull {name}")


def _find_stores() -> list[Path]:
    named = os.environ.get("OLLAMA_MODELS")
    places = [named] if named else list(_STORES)
    return [path for place in places if (path := Path(os.path.expanduser(place))).is_dir()]


def _list_models(stores: Sequence[Path]) -> set[str]:
    found: set[str] = set()
    for store in stores:
        library = store / "manifests" / "registry.ollama.ai" / "library"
        found |= {f"{path.parent.name}:{path.name}" for path in library.glob("*/*")}
    return found


def _find_blob(store: Path, manifest: Path) -> Path:
    """Return the file of a manifest's model layer. Raises ``GgufError``."""
    if manifest.stat().st_size > _MAX_MANIFEST_BYTES:
        raise GgufError(f"{manifest}: is larger than {_MAX_MANIFEST_BYTES} bytes")
    try:
        layers = json.loads(manifest.read_text(encoding="utf-8"))["layers"]
        digests = [one["digest"] for one in layers if one["mediaType"] == _MODEL_LAYER]
    except (ValueError, KeyError, TypeError) as error:
        raise GgufError(f"{manifest}: is no manifest of Ollama ({type(error).__name__})") from None
    if len(digests) != 1 or not isinstance(digests[0], str) or not _DIGEST.fullmatch(digests[0]):
        raise GgufError(f"{manifest}: names {len(digests)} models, but must name one")
    blob = store / "blobs" / digests[0].replace(":", "-")
    if not blob.is_file():
        raise GgufError(f"{blob}: no such file, though {manifest} names it")
    return blob


def choose_file(reference: str, files: Sequence[str], wanted: str) -> list[str]:
    """Return the names of the files of a repository that make the model of the type ``wanted``;
    empty: the usual type. Raises ``GgufError`` naming the types that there are."""
    models = [name for name in files if name.endswith(".gguf") and "mmproj" not in name]
    by_type: dict[str, list[str]] = {}
    for name in models:
        match = re.search(r"[-_.]((?:IQ|Q|TQ|BF|F)\d[\w]*?)(?:-\d{5}-of-\d{5})?\.gguf$", name, re.I)
        by_type.setdefault(match[1].upper() if match else "", []).append(name)
    if not by_type:
        raise GgufError(f"model {reference!r}: the repository has no GGUF file")
    kinds = [wanted.upper()] if wanted else [*_DEFAULT_TYPES, *sorted(by_type)]
    for kind in kinds:
        if kind in by_type:
            return sorted(by_type[kind])
    there = ", ".join(sorted(kind for kind in by_type if kind))
    raise GgufError(f"model {reference!r}: the repository has no {wanted}; it has {there}")


def hub_name(reference: str) -> tuple[str, str] | None:
    """Return the repository and the type of a name like ``hf.co/USER/REPO:QUANT``; None for any
    other name."""
    prefix = next((one for one in HUB if reference.startswith(one)), None)
    if prefix is None:
        return None
    repository, _, kind = reference.removeprefix(prefix).partition(":")
    return repository, kind


def hub_file(
    reference: str,
    list_files: Callable[[str], Sequence[str]],
    fetch: Callable[[str, Sequence[str]], Path],
) -> Path:
    """Return the GGUF file of ``hf.co/USER/REPO:QUANT``, which ``fetch`` downloads: it is given the
    repository and the files' names, and returns their folder. Raises ``GgufError``."""
    named = hub_name(reference)
    assert named is not None
    repository, kind = named
    names = choose_file(reference, list_files(repository), kind)
    return fetch(repository, names) / names[0]
