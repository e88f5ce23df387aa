"""Where a model is, and what its folder says of it.

A reference is ``bundled`` (the small pair inside this package), ``bundled:target``,
``bundled:draft``, a folder, or a Hub id ``owner/name[@revision]``. Two kinds of folder: a Hugging
Face one (``config.json``, ``*.safetensors``, ``tokenizer.json``) and a draft folder made from one
(``edgespec.json``, ``model.onnx``).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from edgespec.core.ports import ModelInfo
from edgespec.models.vocabulary import read_vocabulary, vocabulary_fingerprint

BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_SHARED_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("gemma2", "gemma3_text", "granite", "phi3"),
)
MODEL_TYPES = (*_SHARED_MODEL_TYPES, "gemma", "gpt_oss", "qwen3_moe")
"""Of targets."""
DRAFT_MODEL_TYPES = (*_SHARED_MODEL_TYPES, "smollm3")
"""Of checkpoints that can be exported to draft."""
DRAFT_MANIFEST = "edgespec.json"
DRAFT_MODEL = "model.onnx"
HUB_PATTERNS = ("*.json", "*.jinja", "*.safetensors")
MAX_EOS_IDS = 16
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")

GIVE_A_FOLDER = "; or download it elsewhere and give its folder"


class ModelFolderError(ValueError):
    """A model cannot be found or used; the message names the file or reference and why."""


class Role(Enum):
    TARGET = "target"
    DRAFT = "draft"


def resolve_model(reference: str, role: Role) -> Path:
    """The local folder of ``reference``, downloaded when it is a Hub id.

    ``HF_HOME``, ``HF_HUB_OFFLINE`` and the Hub's token settings are respected; nothing but
    weights and tokenizer files is fetched and no code in a repository is ever run. Raises
    ``ModelFolderError``.
    """
    if reference == BUNDLED:
        return _bundled(role)
    if reference.startswith(f"{BUNDLED}:"):
        name = reference.partition(":")[2]
        if name not in {r.value for r in Role}:
            raise ModelFolderError(
                f"model {reference!r}: the bundled models are 'bundled:target' and 'bundled:draft'"
            )
        return _bundled(Role(name))
    path = Path(os.path.expanduser(reference))
    if reference and path.is_dir():
        return path
    if path.is_file():
        raise ModelFolderError(f"model {reference!r} is a file; give the folder it is in")
    if HUB_ID.fullmatch(reference):
        return fetch(reference)
    raise ModelFolderError(
        f"model {reference!r} is neither 'bundled', nor a folder, nor a Hub id 'owner/name'"
    )


def check_folder(folder: Path, role: Role) -> None:
    """Raises ``ModelFolderError`` naming the first file that is missing or wrong.

    A target needs safetensors; a draft needs the exported graph and its manifest.
    """
    _check_texts(folder, MODEL_TYPES if role is Role.TARGET else DRAFT_MODEL_TYPES)
    if role is Role.DRAFT:
        for name in (DRAFT_MANIFEST, DRAFT_MODEL):
            if not (folder / name).is_file():
                raise ModelFolderError(
                    f"{folder / name}: no such file; make a draft folder with `edgespec export`"
                )
        return
    _check_weights(folder)


def check_checkpoint(folder: Path) -> None:
    """Can ``folder`` be exported to draft? Raises ``ModelFolderError`` as ``check_folder`` does."""
    _check_texts(folder, DRAFT_MODEL_TYPES)
    _check_weights(folder)


def _check_texts(folder: Path, model_types: Sequence[str]) -> None:
    kind = read_config(folder).get("model_type")
    if kind not in model_types:
        raise ModelFolderError(
            f"{folder / 'config.json'}: model_type {kind!r} is not one of {tuple(model_types)}"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: no such file")


def model_info(folder: Path) -> ModelInfo:
    """What the folder says: of a draft folder its manifest, else config and tokenizer.

    The tokenizer of a draft folder must still be the one that the draft was exported with.
    Raises ``ModelFolderError`` or ``VocabularyError``, naming the file.
    """
    if (folder / DRAFT_MANIFEST).is_file():
        return _info_of_draft(folder / DRAFT_MANIFEST)
    config = read_config(folder)
    path = folder / "config.json"
    return ModelInfo(
        name=folder.resolve().name,
        vocabulary=vocabulary_fingerprint(folder / "tokenizer.json"),
        vocabulary_size=_positive(path, config, "vocab_size"),
        context_length=_positive(path, config, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(folder),
    )


def token_count(folder: Path) -> int:
    """How many ids, from 0 on, have a text: a model's vocabulary may be padded beyond them. Raises
    ``VocabularyError``."""
    return 1 + max(read_vocabulary(folder / "tokenizer.json"), default=0)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-text ids, from ``generation_config.json`` if it names any, else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if name != "config.json" and not path.is_file():
            continue
        value = read_json(path).get("eos_token_id")
        if value is None:
            continue
        return eos_ids(path, value)
    return ()


def eos_ids(path: Path, value: object) -> tuple[int, ...]:
    """``eos_token_id`` of a file, one id or several. Raises ``ModelFolderError``."""
    ids = value if isinstance(value, list) else [value]
    if len(ids) > MAX_EOS_IDS or not all(_is_id(token) for token in ids):
        raise ModelFolderError(
            f"{path}: eos_token_id is {value!r}, but must be up to {MAX_EOS_IDS} ids"
        )
    return tuple(ids)


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json``. Raises ``ModelFolderError``."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder")
    return read_json(folder / "config.json")


def trained_length(folder: Path) -> int:
    """Tokens of the texts that a checkpoint was trained on, by ``trained_length`` of its
    ``config.json``, which our own training writes; 0: it does not say. Raises
    ``ModelFolderError``."""
    found = read_config(folder).get("trained_length", 0)
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise ModelFolderError(
            f"{folder / 'config.json'}: trained_length is {found!r}, but must be a number of tokens"
        )
    return found


def _bundled(role: Role) -> Path:
    folder = BUNDLED_FOLDER / role.value
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: the bundled {role.value} is not in this installation")
    return folder


def fetch(reference: str, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The local copy of a Hub id's files that match ``patterns``, with a progress bar for what has
    to be downloaded. Raises ``ModelFolderError``."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, _, revision = reference.partition("@")
    try:
        return Path(
            snapshot_download(name, revision=revision or None, allow_patterns=list(patterns))
        )
    except GatedRepoError as error:
        reason = f"access must be granted on the Hub first ({one_line(error)})"
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        reason = f"the Hub has no such repository or revision ({one_line(error)})"
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = f"it is not in the local cache and the Hub cannot be asked ({one_line(error)})"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = one_line(error)
    raise ModelFolderError(f"model {reference!r} is no local folder, and {reason}{GIVE_A_FOLDER}")


def one_line(error: Exception) -> str:
    """What the Hub's library says, whose messages go over several lines."""
    return " ".join(str(error).split())


def _check_weights(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise ModelFolderError(f"{index}: weight_map is missing")
        for shard in sorted({str(name) for name in shards.values()}):
            if not (folder / shard).is_file():
                raise ModelFolderError(f"{folder / shard}: no such file, though {index} names it")
    elif not any(folder.glob("*.safetensors")):
        raise ModelFolderError(
            f"{folder}: no *.safetensors file (other weight formats are not loaded)"
        )


def _info_of_draft(path: Path) -> ModelInfo:
    data = read_json(path).get("model")
    try:
        model = ModelInfo(**(data or {}))
    except TypeError as error:
        raise ModelFolderError(f"{path}: model: {error}") from error
    tokenizer = path.parent / "tokenizer.json"
    found = vocabulary_fingerprint(tokenizer)
    if found != model.vocabulary:
        raise ModelFolderError(
            f"{tokenizer}: its vocabulary is {found}, but the draft was exported with"
            f" {model.vocabulary}; export it again"
        )
    return ModelInfo(
        name=model.name,
        vocabulary=model.vocabulary,
        vocabulary_size=model.vocabulary_size,
        context_length=model.context_length,
        eos_token_ids=tuple(model.eos_token_ids),
    )


def _positive(path: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelFolderError(f"{path}: {name} is {value!r}, but must be a positive integer")
    return value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ``ModelFolderError`` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value
