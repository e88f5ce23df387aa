"""Resolution of a draft reference: to a draft folder of edgespec, a checkpoint to export, or ONNX
graphs that another tool exported.

A reference is as in ``folders``, or an ``.onnx`` file. Graphs of other tools are in the folder
itself or in its ``onnx/``, one file for each *variant*: ``model_q4.onnx`` is ``q4``, ``model.onnx``
is ``fp32``, and the one that a ``genai_config.json`` names is ``genai``. If a folder has both
safetensors and graphs, the checkpoint is exported, since the graph made from it is faster (see
docs/decisions.md), unless a variant is requested.

Only the needed files of a repository on the Hub are fetched: first the list of files, then the
tokenizer and configuration to compare vocabularies, then one variant with its external data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edgespec.core.ports import ModelInfo
from edgespec.models import folders

AUTO = "auto"
VARIANTS = ("q4", "q4f16", "int8", "quantized", "uint8", "bnb4", "fp16", "fp32", "genai")
"""Variants in the order of preference: small ones first, bnb4 behind those that are faster on CPUs
(docs/measurements.md)."""

GENAI_CONFIG = "genai_config.json"
TEXT_PATTERNS = ("*.json", "*.jinja")
_OWN_PATTERNS = (*TEXT_PATTERNS, "model.onnx", "model.onnx.data")
_GRAPH = re.compile(r"(?:onnx/)?(?:decoder_)?model(?:_merged)?(?:_(?P<variant>[a-z0-9]+))?\.onnx")
_SPLIT = re.compile(r"(?:onnx/)?decoder_(with_past_)?model(?!_merged)(_[a-z0-9]+)?\.onnx")


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The result of a resolved draft reference."""

    folder: Path
    """Folder with the tokenizer and the configuration."""
    graphs: Mapping[str, Path] = field(default_factory=dict)
    """ONNX files of other tools by variant; empty for a draft folder of edgespec and for a
    checkpoint."""
    name: str = ""


def find_draft(reference: str, variant: str = AUTO) -> DraftSource:
    """Return the source of a draft, and download what is missing. A ``variant`` other than ``auto``
    requests a graph of another tool. Raises ``ModelFolderError`` naming the reference or file, and
    the existing variants."""
    path = Path(os.path.expanduser(reference))
    if reference.endswith(".onnx"):
        return _one_file(path)
    if folders.HUB_ID.fullmatch(reference) and not path.is_dir():
        return _on_the_hub(reference, variant)
    folder = folders.resolve_model(reference, folders.Role.DRAFT)
    return _chosen(reference, folder, _files(folder), variant, folder.resolve().name)


def resolve_texts(reference: str) -> Path:
    """Return the folder with a reference's tokenizer and configuration. Nothing else of a Hub id is
    fetched. Raises ``ModelFolderError``."""
    if reference.endswith(".onnx"):
        return _one_file(Path(os.path.expanduser(reference))).folder
    return folders.resolve_model(reference, folders.Role.DRAFT, TEXT_PATTERNS)


def variants_of(files: Iterable[str], genai_file: str = "") -> dict[str, str]:
    """Return the decoder graphs among the paths of a repository or folder, by variant, in the order
    of ``VARIANTS``. Merged decoders take precedence over plain ones, and ``onnx/`` over the top
    folder."""
    found: dict[str, str] = {}
    listed = sorted(files, key=lambda name: (name.startswith("onnx/"), "merged" in name))
    for name in listed:
        match = _GRAPH.fullmatch(name)
        if name == genai_file:
            found["genai"] = name
        elif match and not _SPLIT.fullmatch(name):
            found[match["variant"] or "fp32"] = name
    ranks = {variant: rank for rank, variant in enumerate(VARIANTS)}
    return dict(sorted(found.items(), key=lambda item: (ranks.get(item[0], 99), item[0])))


def _one_file(path: Path) -> DraftSource:
    if not path.is_file():
        raise folders.ModelFolderError(f"{path}: no such file")
    if _is_ours(path.parent, path):
        return DraftSource(path.parent, name=path.parent.resolve().name)
    around = (path.parent, path.parent.parent)
    for name in ("tokenizer.json", "config.json", GENAI_CONFIG):
        for folder in around:
            if (folder / name).is_file():
                return DraftSource(folder, {path.stem: path}, folder.resolve().name)
    raise folders.ModelFolderError(
        f"{path}: there is neither tokenizer.json nor config.json nor {GENAI_CONFIG} beside it or"
        " in the folder above"
    )


def _files(folder: Path) -> list[str]:
    names = [*folder.glob("*"), *folder.glob("onnx/*.onnx")]
    return sorted(path.relative_to(folder).as_posix() for path in names if path.is_file())


def _chosen(reference: str, folder: Path, files: list[str], variant: str, name: str) -> DraftSource:
    if folders.DRAFT_MANIFEST in files and variant == AUTO:
        return DraftSource(folder, name=name)
    graphs = variants_of(files, read_genai_sections(folder)[1].get("filename", ""))
    path = folder / "config.json"
    weights = any(file.endswith(".safetensors") for file in files)
    config = folders.read_json(path) if weights and path.is_file() else {}
    exportable = config.get("model_type") in folders.DRAFT_MODEL_TYPES
    if variant == AUTO and (exportable or not graphs):
        split = [file for file in files if _SPLIT.fullmatch(file)]
        if split and not exportable:
            raise folders.ModelFolderError(
                f"draft {reference!r}: {split[0]} is one half of a decoder in two files; one graph"
                " is needed that takes an empty cache too, such as decoder_model_merged.onnx or"
                " Optimum's model.onnx (--task text-generation-with-past)"
            )
        return DraftSource(folder, name=name)
    if variant != AUTO:
        if variant not in graphs:
            there = ", ".join(f"{key} ({file})" for key, file in graphs.items()) or "none"
            raise folders.ModelFolderError(
                f"draft {reference!r} has no variant {variant!r}; there are: {there}"
            )
        graphs = {variant: graphs[variant]}
    paths = {key: folder / file for key, file in graphs.items()}
    ours = any(_is_ours(folder, path) for path in paths.values())
    return DraftSource(folder, {} if ours else paths, name)


def _is_ours(folder: Path, graph: Path) -> bool:
    """Return whether ``edgespec export`` wrote this graph, whose beginning then has the producer's
    name. Raises ``ModelFolderError`` if ``folder`` lacks the manifest of such a graph."""
    if not graph.is_file():  # on the Hub, not fetched yet
        return False
    with graph.open("rb") as file:
        if b"\x12\x08edgespec" not in file.read(64):
            return False
    if not (folder / folders.DRAFT_MANIFEST).is_file():
        raise folders.ModelFolderError(
            f"{folder / folders.DRAFT_MANIFEST}: no such file, but `edgespec export` wrote"
            f" {graph.name} with one beside it: copy the whole folder, or export the draft again"
        )
    return True


def read_genai_sections(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the sections ``model`` and ``model.decoder`` of ``genai_config.json``, the second of
    which names the graph's file. Both are empty without the file."""
    path = folder / GENAI_CONFIG
    found = folders.read_json(path).get("model") if path.is_file() else None
    model = found if isinstance(found, dict) else {}
    decoder = model.get("decoder")
    return model, decoder if isinstance(decoder, dict) else {}


def _on_the_hub(reference: str, variant: str) -> DraftSource:
    name = reference.partition("@")[0].rpartition("/")[2]
    try:
        files = folders.list_hub_files(reference)
    except folders.ModelFolderError as error:
        folder = folders.find_cached_snapshot(reference, error)
        source = _chosen(reference, folder, _files(folder), variant, name)
        whole = source.graphs or any(folder.glob("*.safetensors"))
        if not (whole or (folder / "model.onnx").is_file()):
            raise  # only the texts were fetched, to compare vocabularies
        return source
    folder = folders.fetch(reference, TEXT_PATTERNS)
    source = _chosen(reference, folder, files, variant, name)
    if not source.graphs:
        patterns = _OWN_PATTERNS if folders.DRAFT_MANIFEST in files else folders.HUB_PATTERNS
        return DraftSource(folders.fetch(reference, patterns), {}, name)
    key, path = next(iter(source.graphs.items()))
    file = PurePosixPath(path.relative_to(folder).as_posix())
    folder = folders.fetch(reference, (*TEXT_PATTERNS, f"{file}", f"{file}_data*", f"{file}.data*"))
    return DraftSource(folder, {key: folder / file}, name)


_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class ForeignInfo:
    """Description of a model whose graph another tool exported."""

    model: ModelInfo
    token_count: int
    kv_heads: int = 0
    """Number of key-value heads; 0 if no file has it."""
    head_size: int = 0
    """Size of a head; 0 if no file has it."""


def read_foreign_info(folder: Path, name: str, tokenizer: Path | None = None) -> ForeignInfo:
    """Return the names and sizes that such a graph does not contain.

    They are read from ``config.json`` (also from a ``text_config`` inside, and under older names of
    sizes) and ``genai_config.json``, whichever exists. ``tokenizer`` is the folder of a tokenizer
    to use if ``folder`` has none. Raises ``ModelFolderError`` naming the file, the key and the
    value."""
    path = folder / "config.json"
    config = folders.read_json(path) if path.is_file() else {}
    if isinstance(inner := config.get("text_config"), dict):
        config |= inner
    genai, decoder = read_genai_sections(folder)
    if not config and not genai:
        raise folders.ModelFolderError(f"{folder}: there is neither config.json nor {GENAI_CONFIG}")
    texts = folder if tokenizer is None or (folder / "tokenizer.json").is_file() else tokenizer

    def size(*names: str) -> int:
        """Return the first of these sizes that is given, else 0."""
        genai_path = folder / GENAI_CONFIG
        places = ((path, config), (genai_path, decoder), (genai_path, genai))
        for where, place in places:
            for name in names:
                if place.get(name) is not None:
                    return folders.read_whole_number(where, place, name)
        return 0

    if not (context := size(*_CONTEXT, "context_length")):
        raise folders.ModelFolderError(
            f"{folder}: neither config.json ({', '.join(_CONTEXT)}) nor {GENAI_CONFIG}"
            " (context_length) says what the context length is"
        )
    ends, said = folders.eos_token_ids(folder), genai.get("eos_token_id")
    if not ends and said is not None:
        ends = folders.parse_eos_ids(folder / GENAI_CONFIG, said)
    known, heads, hidden = folders.token_count(texts), size(*_HEADS), size(*_HIDDEN)
    vocabulary = folders.vocabulary_fingerprint(texts / "tokenizer.json")
    model = ModelInfo(name, vocabulary, size("vocab_size") or known, context, ends)
    head_size = size("head_dim", "head_size") or (hidden // heads if heads else 0)
    return ForeignInfo(model, known, size("num_key_value_heads") or heads, head_size)
