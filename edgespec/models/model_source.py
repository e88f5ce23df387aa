"""The one resolver of model references, and what a reference leads to.

A reference is ``toy``; ``bundled`` (the small pair inside this package), ``bundled:target`` or
``bundled:draft``; a folder; a Hub id ``owner/name[@revision]``; a GGUF file, a folder with one,
``ollama:NAME[:TAG]`` or ``hf.co/USER/REPO:QUANT``; the name of a pair that ``edgespec pull`` has
fetched (``catalogue.py``); or, for a draft, an ``.onnx`` file.
``resolve_source`` turns it into a ``ModelSource``, which knows the kind of the model, its files,
its configuration, its vocabulary and its fingerprint. No other code decides what a reference means.
(The device's choice of a drafter also has the words ``none``, ``lookup`` and ``random``, which name
no model.)

Graphs of other tools are in the folder itself or in its ``onnx/``, one file for each *variant*:
``model_q4.onnx`` is ``q4``, ``model.onnx`` is ``fp32``, and the one that a ``genai_config.json``
names is ``genai``. If a folder has both safetensors and graphs, the checkpoint is exported, since
the graph made from it is faster (see docs/decisions/device.md), unless a variant is requested.

Only the needed files of a repository on the Hub are fetched. For a draft that is first the list of
files, then the tokenizer and configuration to compare vocabularies, then one variant with its
external data.

A GGUF model becomes the folder of a checkpoint in the cache (``gguf_folder.py``), and is a
checkpoint from then on.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from weakref import WeakValueDictionary

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models import folders
from edgespec.models.catalogue import (
    Side,
    find_pair,
    find_pulled,
    locate_pulled,
    read_catalogue,
)
from edgespec.models.gguf_file import GgufError
from edgespec.models.gguf_folder import folder_of_gguf, is_gguf, only_gguf_in
from edgespec.models.gguf_references import OLLAMA, hub_file, hub_name, ollama_file
from edgespec.models.lent_texts import is_lent
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.text_process import template_worker
from edgespec.models.tokenizer import TextTokenizer
from edgespec.models.toy import TOY, TOY_MODEL, ToyTokenizer, toy_info

AUTO = "auto"
VARIANTS = ("q4", "q4f16", "int8", "quantized", "uint8", "bnb4", "fp16", "fp32", "genai")
"""Variants in the order of preference: small ones first, bnb4 behind the types that are faster on
CPUs (docs/measurements/device.md)."""

GENAI_CONFIG = "genai_config.json"
TEXT_PATTERNS = ("*.json", "*.jinja")
_OWN_PATTERNS = (*TEXT_PATTERNS, "model.onnx", "model.onnx.data")
_GRAPH = re.compile(r"(?:onnx/)?(?:decoder_)?model(?:_merged)?(?:_(?P<variant>[a-z0-9]+))?\.onnx")
_SPLIT = re.compile(r"(?:onnx/)?decoder_(with_past_)?model(?!_merged)(_[a-z0-9]+)?\.onnx")


BUNDLED_PARTS = ("target", "draft")

PromptTokenizer = TextTokenizer | ToyTokenizer | RemoteTokenizer
_tokenizers: WeakValueDictionary[object, PromptTokenizer] = WeakValueDictionary()


class SourceKind(Enum):
    """The form in which a model is stored."""

    TOY = "toy"
    """The toy, which is code and has no files."""
    EXPORT = "draft folder"
    """A draft folder that ``edgespec export`` wrote."""
    GRAPHS = "ONNX graphs"
    """ONNX graphs that another tool exported."""
    CHECKPOINT = "checkpoint"
    """A Hugging Face folder with weights."""
    TEXTS = "texts"
    """A tokenizer, perhaps with a configuration, without weights."""
    LENT = "lent texts"
    """A tokenizer that a verifier lent. It is a stranger's, so a child process reads it."""


class Purpose(Enum):
    """The use of a model, which decides the files that are needed of it."""

    TARGET = "target"
    """The weights of a target."""
    DRAFT = "draft"
    """Anything that a device can draft with: an exported draft, graphs, or a checkpoint."""
    DRAFT_WEIGHTS = "draft weights"
    """The weights of a draft, for the verifier's draft model and for training."""
    TEXTS = "texts"
    """The tokenizer and the configuration."""


@dataclass(frozen=True)
class ModelSource:
    """A resolved model reference."""

    kind: SourceKind
    reference: str = field(compare=False)
    """The reference as the user wrote it, for messages."""
    name: str
    """Name of the model, as shown to users."""
    location: Path | None
    """Folder with the configuration and the weights; None for the toy."""
    graphs: Mapping[str, Path] = field(default_factory=dict)
    """ONNX files of other tools by variant; empty for all kinds but ``GRAPHS``."""
    tokenizer_folder: Path | None = None
    """Folder with the tokenizer, if it is not ``location``. See ``with_tokenizer_of``."""
    export_bits: int = 4
    """Bits of a weight with which a draft of this checkpoint is exported unless the user names
    others."""

    @property
    def folder(self) -> Path:
        """Folder with the configuration and the weights. Raises ``ModelFolderError`` for the toy,
        which has none."""
        if self.location is None:
            raise folders.ModelFolderError(
                f"model {self.reference!r} is built in; name a folder or a Hub id 'owner/name'"
            )
        return self.location

    @property
    def tokenizer_file(self) -> Path:
        """Path of the ``tokenizer.json``, which need not exist."""
        return (self.tokenizer_folder or self.folder) / "tokenizer.json"

    @property
    def config(self) -> dict[str, Any]:
        """The parsed ``config.json``. Raises ``ModelFolderError``."""
        return folders.read_config(self.folder)

    @property
    def info(self) -> ModelInfo:
        """Description of the model. Raises ``ModelFolderError`` naming the file, also if the
        tokenizer of an exported draft has changed since the export."""
        if self.kind is SourceKind.TOY:
            return toy_info()
        if self.kind is SourceKind.GRAPHS:
            return self.graph_info.model
        return folders.model_info(self.folder)

    @property
    def graph_info(self) -> GraphInfo:
        """Names and sizes that a graph of another tool does not contain. Raises
        ``ModelFolderError``."""
        return read_graph_info(self.folder, self.name, self.tokenizer_folder)

    @property
    def vocabulary(self) -> str:
        """Fingerprint of the vocabulary. Raises ``ModelFolderError`` naming the file."""
        if self.kind is SourceKind.TOY:
            return toy_info().vocabulary
        if self.kind is SourceKind.LENT:
            return _read_lent_vocabulary(self.folder)
        if (self.folder / folders.DRAFT_MANIFEST).is_file():
            return folders.model_info(self.folder).vocabulary
        return folders.vocabulary_fingerprint(self.tokenizer_file)

    def vocabulary_info(self, context_length: int) -> ModelInfo:
        """Return the vocabulary as a description of a model with this context length. A source with
        a tokenizer alone has one too. Raises ``ModelFolderError`` naming the file."""
        if self.kind is SourceKind.TOY:
            return toy_info()
        if self.kind is SourceKind.LENT:
            return ModelInfo(
                name=self.name,
                vocabulary=self.vocabulary,
                vocabulary_size=self.load_tokenizer().id_count,
                context_length=context_length,
            )
        return folders.vocabulary_info(self.folder, context_length)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights with the vocabulary. Raises ``ValueError`` or ``OSError``
        naming a file that cannot be read."""
        if self.kind is SourceKind.TOY:
            return folders.text_fingerprint(repr(TOY_MODEL))
        return folders.weights_fingerprint(self.folder, self.vocabulary)

    @property
    def sampling(self) -> SamplingParams:
        """Sampling defaults of the model. Raises ``ModelFolderError``."""
        if self.kind is SourceKind.TOY:
            return SamplingParams()
        return folders.read_generation_sampling(self.folder)

    def load_tokenizer(self) -> PromptTokenizer:
        """Return the tokenizer.

        It is the same object while it is in use, since a large one takes tens of MiB. A separate
        process renders the chat templates of all tokenizers but the bundled one, and holds a
        tokenizer that a verifier lent. Raises ``ValueError`` naming the file."""
        if self.kind is SourceKind.TOY:
            return ToyTokenizer()
        folder = self.tokenizer_file.parent
        files = sorted(folder.glob("*token*.json"))
        worker = None if self.reference == folders.BUNDLED else template_worker()
        key = (worker, tuple((path, path.stat().st_mtime_ns) for path in files))
        if (tokenizer := _tokenizers.get(key)) is None:
            is_remote = self.kind is SourceKind.LENT
            tokenizer = RemoteTokenizer(folder) if is_remote else TextTokenizer(folder, worker)
            _tokenizers[key] = tokenizer
        return tokenizer

    def with_tokenizer_of(self, other: ModelSource) -> ModelSource:
        """Return this source with the tokenizer of ``other``, if it has none of its own."""
        if (self.folder / "tokenizer.json").is_file():
            return self
        return replace(self, tokenizer_folder=other.folder)


def resolve_source(reference: str, purpose: Purpose, variant: str = AUTO) -> ModelSource:
    """Return the source of ``reference``, and fetch the files that ``purpose`` needs if it is a Hub
    id.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and the Hub's token settings are respected, and no code in a
    repository is ever run. ``variant`` requests one graph of another tool, for a draft. Raises
    ``ModelFolderError`` naming the reference or file, and the existing variants."""
    if reference == TOY:
        return ModelSource(kind=SourceKind.TOY, reference=reference, name=TOY, location=None)
    path = Path(os.path.expanduser(reference))
    if find_pair(reference) is not None and not path.exists():
        return _resolve_pulled(reference, purpose, variant)
    if purpose in (Purpose.DRAFT, Purpose.TEXTS) and reference.endswith(".onnx"):
        return _resolve_graph(reference, path)
    if purpose is Purpose.DRAFT:
        if folders.HUB_ID.fullmatch(reference) and not path.is_dir():
            return _fetch_draft(reference, variant)
        folder = _find_folder(reference, purpose, folders.HUB_PATTERNS)
        return _choose_draft(reference, folder, _list_files(folder), variant, folder.resolve().name)
    patterns = TEXT_PATTERNS if purpose is Purpose.TEXTS else folders.HUB_PATTERNS
    folder = _find_folder(reference, purpose, patterns)
    return ModelSource(
        kind=_kind_of(folder), reference=reference, name=folder.resolve().name, location=folder
    )


def _resolve_pulled(reference: str, purpose: Purpose, variant: str) -> ModelSource:
    """Return the source of a pair's target or draft, which ``edgespec pull`` has fetched. Both have
    one vocabulary, so texts are read from the side that is there. Raises ``ModelFolderError``."""
    side = Side.TARGET if purpose is Purpose.TARGET else Side.DRAFT
    if purpose is Purpose.TEXTS and find_pulled(reference, side) is None:
        side = Side.TARGET
    path = locate_pulled(reference, side)
    folder = _convert_gguf(path, reference) if is_gguf(path) else path
    if purpose is Purpose.DRAFT:
        source = _choose_draft(reference, folder, _list_files(folder), variant, reference)
    else:
        source = ModelSource(_kind_of(folder), reference, name=reference, location=folder)
    pair = find_pair(reference)
    return source if pair is None else replace(source, export_bits=pair.draft_bits)


def _convert_gguf(path: Path, name: str) -> Path:
    """Return the checkpoint's folder of a GGUF file. Raises ``ModelFolderError``."""
    try:
        return folder_of_gguf(path, folders.cache_folder(), name=name)
    except (GgufError, OSError) as error:
        raise folders.ModelFolderError(str(error)) from error


def _find_folder(reference: str, purpose: Purpose, patterns: Sequence[str]) -> Path:
    """Return the local folder of ``reference``, and fetch its files that match ``patterns`` if it
    is a Hub id. Raises ``ModelFolderError``."""
    name, colon, part = reference.partition(":")
    if name == folders.BUNDLED:
        if colon and part not in BUNDLED_PARTS:
            raise folders.ModelFolderError(
                f"model {reference!r}: the bundled models are 'bundled:target' and 'bundled:draft'"
            )
        # A device may have the bundled draft alone, so the texts are read from its folder.
        usual = "target" if purpose is Purpose.TARGET else "draft"
        folder = folders.BUNDLED_FOLDER / (part or usual)
        if not folder.is_dir():
            raise folders.ModelFolderError(
                f"{folder}: the bundled {folder.name} is not in this installation"
            )
        return folder
    if (gguf := _find_gguf(reference)) is not None:
        name = reference.removeprefix(OLLAMA) if reference.startswith(OLLAMA) else ""
        return _convert_gguf(gguf, name)
    path = Path(os.path.expanduser(reference))
    if reference and path.is_dir():
        return path
    if path.is_file():
        raise folders.ModelFolderError(
            f"model {reference!r} is a file; give a *.gguf file, or the folder it is in"
        )
    if folders.HUB_ID.fullmatch(reference):
        return folders.fetch(reference, patterns)
    raise folders.ModelFolderError(_describe_unknown(reference))


def _describe_unknown(reference: str) -> str:
    """Return the error message for a reference that stands for no model."""
    if reference.startswith(("/", "./", "../", "~")):
        return f"model {reference!r}: there is no such file or folder"
    close = difflib.get_close_matches(reference, [folders.BUNDLED, *read_catalogue()], 1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return (
        f"model {reference!r} is neither 'bundled', nor a folder, nor a .gguf file, nor a Hub id"
        f" 'owner/name', nor a name of `edgespec models`{hint}"
    )


def _find_gguf(reference: str) -> Path | None:
    """Return the GGUF file that ``reference`` stands for, after fetching it if it is on the Hub;
    None if it stands for something else. Raises ``ModelFolderError``."""
    try:
        if reference.startswith(OLLAMA):
            return ollama_file(reference)
        if hub_name(reference) is not None:
            return hub_file(reference, folders.list_hub_files, folders.fetch)
        path = Path(os.path.expanduser(reference))
        if reference and path.is_dir():
            return only_gguf_in(path)
        return path if is_gguf(path) else None
    except GgufError as error:
        raise folders.ModelFolderError(str(error)) from error


@lru_cache(maxsize=16)
def _read_lent_vocabulary(folder: Path) -> str:
    """Return the fingerprint of a lent tokenizer. Its folder is named after its content, so the
    result never changes."""
    source = ModelSource(
        kind=SourceKind.LENT, reference=str(folder), name=folder.name, location=folder
    )
    tokenizer = source.load_tokenizer()
    assert isinstance(tokenizer, RemoteTokenizer)
    return tokenizer.vocabulary


def _kind_of(folder: Path) -> SourceKind:
    if is_lent(folder):
        return SourceKind.LENT
    if (folder / folders.DRAFT_MANIFEST).is_file():
        return SourceKind.EXPORT
    if any(folder.glob("*.safetensors")):
        return SourceKind.CHECKPOINT
    return SourceKind.TEXTS


def find_graphs(files: Iterable[str], genai_file: str = "") -> dict[str, str]:
    """Return the decoder graphs among the paths of a repository or folder, by variant, in the order
    of ``VARIANTS``. Merged decoders take precedence over plain ones, and ``onnx/`` over the top
    folder."""
    graphs: dict[str, str] = {}
    ordered = sorted(files, key=lambda name: (name.startswith("onnx/"), "merged" in name))
    for name in ordered:
        match = _GRAPH.fullmatch(name)
        if name == genai_file:
            graphs["genai"] = name
        elif match and not _SPLIT.fullmatch(name):
            graphs[match["variant"] or "fp32"] = name
    ranks = {variant: rank for rank, variant in enumerate(VARIANTS)}
    return dict(sorted(graphs.items(), key=lambda item: (ranks.get(item[0], 99), item[0])))


def _resolve_graph(reference: str, path: Path) -> ModelSource:
    """Return the source of one ``.onnx`` file, which its folder or the one above describes."""
    if not path.is_file():
        raise folders.ModelFolderError(f"{path}: no such file")
    if _is_exported(path.parent, path):
        return ModelSource(
            kind=SourceKind.EXPORT,
            reference=reference,
            name=path.parent.resolve().name,
            location=path.parent,
        )
    around = (path.parent, path.parent.parent)
    for name in ("tokenizer.json", "config.json", GENAI_CONFIG):
        for folder in around:
            if (folder / name).is_file():
                return ModelSource(
                    kind=SourceKind.GRAPHS,
                    reference=reference,
                    name=folder.resolve().name,
                    location=folder,
                    graphs={path.stem: path},
                )
    raise folders.ModelFolderError(
        f"{path}: there is neither tokenizer.json nor config.json nor {GENAI_CONFIG} beside it or"
        " in the folder above"
    )


def _list_files(folder: Path) -> list[str]:
    names = [*folder.glob("*"), *folder.glob("onnx/*.onnx")]
    return sorted(path.relative_to(folder).as_posix() for path in names if path.is_file())


def _choose_draft(
    reference: str, folder: Path, files: list[str], variant: str, name: str
) -> ModelSource:
    """Return the source of a draft in ``folder``, whose files are ``files``. On the Hub some of
    them may not be fetched yet. Raises ``ModelFolderError``."""
    source = ModelSource(
        kind=SourceKind.EXPORT if folders.DRAFT_MANIFEST in files else SourceKind.CHECKPOINT,
        reference=reference,
        name=name,
        location=folder,
    )
    if folders.DRAFT_MANIFEST in files and variant == AUTO:
        return source
    graphs = find_graphs(files, read_genai_sections(folder)[1].get("filename", ""))
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
        return source
    if variant != AUTO:
        if variant not in graphs:
            known = ", ".join(f"{key} ({file})" for key, file in graphs.items()) or "none"
            raise folders.ModelFolderError(
                f"draft {reference!r} has no variant {variant!r}; there are: {known}"
            )
        graphs = {variant: graphs[variant]}
    paths = {key: folder / file for key, file in graphs.items()}
    if any(_is_exported(folder, path) for path in paths.values()):
        return source
    return replace(source, kind=SourceKind.GRAPHS, graphs=paths)


def _is_exported(folder: Path, graph: Path) -> bool:
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
    section = folders.read_json(path).get("model") if path.is_file() else None
    model = section if isinstance(section, dict) else {}
    decoder = model.get("decoder")
    return model, decoder if isinstance(decoder, dict) else {}


def _fetch_draft(reference: str, variant: str) -> ModelSource:
    """Return the source of a draft on the Hub, after fetching the files that are used. Raises
    ``ModelFolderError``."""
    name = reference.partition("@")[0].rpartition("/")[2]
    try:
        files = folders.list_hub_files(reference)
    except folders.ModelFolderError as error:
        folder = folders.find_cached_snapshot(reference, error)
        source = _choose_draft(reference, folder, _list_files(folder), variant, name)
        whole = source.graphs or any(folder.glob("*.safetensors"))
        if not (whole or (folder / "model.onnx").is_file()):
            raise  # only the texts were fetched, to compare vocabularies
        return source
    folder = folders.fetch(reference, TEXT_PATTERNS)
    source = _choose_draft(reference, folder, files, variant, name)
    if not source.graphs:
        patterns = _OWN_PATTERNS if folders.DRAFT_MANIFEST in files else folders.HUB_PATTERNS
        return replace(source, location=folders.fetch(reference, patterns))
    key, path = next(iter(source.graphs.items()))
    file = PurePosixPath(path.relative_to(folder).as_posix())
    folder = folders.fetch(reference, (*TEXT_PATTERNS, f"{file}", f"{file}_data*", f"{file}.data*"))
    return replace(source, location=folder, graphs={key: folder / file})


_CONTEXT = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_HEADS = ("num_attention_heads", "n_head", "num_heads")
_HIDDEN = ("hidden_size", "n_embd", "d_model")


@dataclass(frozen=True, slots=True)
class GraphInfo:
    """Description of a model whose graph another tool exported."""

    model: ModelInfo
    token_count: int
    kv_heads: int = 0
    """Number of key-value heads; 0 if no file has it."""
    head_size: int = 0
    """Size of a head; 0 if no file has it."""


def read_graph_info(folder: Path, name: str, tokenizer: Path | None = None) -> GraphInfo:
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
    tokenizer_folder = (
        folder if tokenizer is None or (folder / "tokenizer.json").is_file() else tokenizer
    )

    def size(*names: str) -> int:
        """Return the first size given under ``names``, else 0."""
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
    eos_ids, genai_eos = folders.eos_token_ids(folder), genai.get("eos_token_id")
    if not eos_ids and genai_eos is not None:
        eos_ids = folders.parse_eos_ids(folder / GENAI_CONFIG, genai_eos)
    token_count, heads, hidden = (
        folders.token_count(tokenizer_folder),
        size(*_HEADS),
        size(*_HIDDEN),
    )
    vocabulary = folders.vocabulary_fingerprint(tokenizer_folder / "tokenizer.json")
    model = ModelInfo(name, vocabulary, size("vocab_size") or token_count, context, eos_ids)
    head_size = size("head_dim", "head_size") or (hidden // heads if heads else 0)
    return GraphInfo(model, token_count, size("num_key_value_heads") or heads, head_size)
