"""Model folders: the description that a folder contains, and fetching one from the Hub.

There are two kinds of folder: one of Hugging Face (``config.json``, ``*.safetensors``,
``tokenizer.json``), and a draft folder made from one (``edgespec.json``, ``model.onnx``).
``model_source`` finds the folder of a model reference.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from edgespec.config.files import user_folder
from edgespec.config.proxies import bypass_proxy_if_near, proxy_of_url
from edgespec.core.ports import MAX_PLACES, ModelInfo, ParallelDraft
from edgespec.core.protocol.messages import MAX_TOKEN_ID
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models import added_tokens

MAX_TOKENIZER_BYTES = 256 << 20
MAX_GENERATION_BYTES = 1 << 20
_FINGERPRINT_DIGITS = 32


def vocabulary_fingerprint(path: Path) -> str:
    """Return the fingerprint of a ``tokenizer.json``: 32 hex digits (128 bits of SHA-256). It is
    equal for two models exactly if ids mean the same text, whatever their merges, normalisation and
    chat templates. The hash covers every (id, token string) in order of id, with added tokens,
    including those in a file beside it (``added_tokens``). Raises ``ModelFolderError``.

    The result is cached: reading a file takes ten times its size in memory, and ``serve`` needs the
    fingerprint again and again."""
    versions = list[tuple[int, ...]]()
    for file in (path, *(path.parent / name for name in added_tokens.FILES)):
        try:
            status = file.stat()
            versions.append((status.st_mtime_ns, status.st_size, status.st_ino))
        except OSError:  # a missing file that is required is reported when it is read
            versions.append(())
    return _compute_fingerprint(path, tuple(versions))


@lru_cache(maxsize=16)
def _compute_fingerprint(path: Path, versions: tuple[tuple[int, ...], ...]) -> str:
    token_texts = read_vocabulary(path)
    digest = hashlib.sha256()
    for token_id in sorted(token_texts):
        text = token_texts[token_id].encode("utf-8", errors="surrogatepass")
        # The input contains lengths, so different vocabularies never give the same bytes.
        digest.update(b"%d %d " % (token_id, len(text)))
        digest.update(text)
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def read_vocabulary(path: Path) -> dict[int, str]:
    """Return the token strings of a ``tokenizer.json`` and of the files beside it by id, added
    tokens last. Raises ``ModelFolderError``."""
    if path.is_file() and (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        raise ModelFolderError(f"{path}: {size} bytes, but at most {MAX_TOKENIZER_BYTES} are read")
    data = read_json(path)
    model = data.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise ModelFolderError(f"{path}: model.vocab is missing")
    try:
        if isinstance(vocabulary, dict):  # BPE, WordPiece, WordLevel: token -> id
            tokens = {int(token_id): str(token) for token, token_id in vocabulary.items()}
        else:  # Unigram: [token, score] at the index of its id
            tokens = {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}
        added = {int(one["id"]): str(one["content"]) for one in data.get("added_tokens") or ()}
        tokens |= added
    except (KeyError, TypeError, IndexError, ValueError, OverflowError) as error:
        raise ModelFolderError(f"{path}: unreadable vocabulary entry: {error!r}") from error
    tokens |= added_tokens.assign_ids(
        tokens, added, len(vocabulary), [one.content for one in _tokens_beside(path, data).added]
    )
    low, high = min(tokens, default=0), max(tokens, default=0)
    if low < 0 or high > MAX_TOKEN_ID:  # callers count ids from 0 to the largest
        raise ModelFolderError(f"{path}: token ids {low} to {high}, limit 0 to {MAX_TOKEN_ID}")
    return tokens


def _tokens_beside(path: Path, data: Mapping[str, Any]) -> added_tokens.AddedTokens:
    """Return the tokens that the files beside a parsed ``tokenizer.json`` add. Raises
    ``ModelFolderError``."""
    files = read_token_files(path.parent)
    try:
        own = {
            int(one["id"]): added_tokens.parse_token(path, one)
            for one in (data.get("added_tokens") or () if files else ())
        }
        return added_tokens.read_added_tokens(files, own, path.parent)
    except added_tokens.AddedTokensError as error:
        raise ModelFolderError(str(error)) from error


def read_token_files(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the existing files that can add tokens to a ``tokenizer.json``, parsed, by name.
    Raises ``ModelFolderError`` naming the file."""
    paths = {name: folder / name for name in added_tokens.FILES}
    return {name: read_json(path) for name, path in paths.items() if path.is_file()}


BUNDLED = "bundled"
BUNDLED_FOLDER = Path(__file__).parent / "bundled"
_SHARED_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("gemma2", "gemma3_text", "granite", "phi3"),
)
MODEL_TYPES = (*_SHARED_MODEL_TYPES, "gemma", "gpt_oss", "qwen3_moe")
"""Values of ``model_type`` that a target can have."""
DRAFT_MODEL_TYPES = (*_SHARED_MODEL_TYPES, "smollm3")
"""Values of ``model_type`` of checkpoints that can be exported as a draft."""
DRAFT_MANIFEST = "edgespec.json"
HUB_PATTERNS = ("*.json", "*.jinja", "*.safetensors")
MAX_EOS_IDS = 16
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


class ModelFolderError(ValueError):
    """A model cannot be found or used. The message names the file or reference and the reason."""


def check_folder(folder: Path, model_types: Sequence[str] = MODEL_TYPES) -> None:
    """Check that a checkpoint can be loaded. Raises ``ModelFolderError`` naming the first file that
    is missing or wrong."""
    path, config = folder / "config.json", read_config(folder)
    if (kind := config.get("model_type")) not in model_types:
        raise ModelFolderError(f"{path}: model_type {kind!r} is not one of {tuple(model_types)}")
    check_sizes(path, config)
    if model_types is MODEL_TYPES and config.get(KEPT_IDS) is not None:
        raise ModelFolderError(
            f"{path}: {KEPT_IDS} marks a draft with a part of its target's ids, which an exported"
            " draft alone can use; give a whole model"
        )
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: no such file")
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


def check_checkpoint(folder: Path) -> None:
    """Check that ``folder`` can be exported as a draft. Raises ``ModelFolderError`` as
    ``check_folder`` does."""
    check_folder(folder, DRAFT_MODEL_TYPES)


def model_info(folder: Path) -> ModelInfo:
    """Return the model that a folder describes: in the manifest of a draft folder, else in its
    configuration and tokenizer. The tokenizer of a draft folder must still be the one with which
    the draft was exported. Raises ``ModelFolderError`` naming the file."""
    if (folder / DRAFT_MANIFEST).is_file():
        return _read_draft_manifest(folder / DRAFT_MANIFEST)
    config = read_config(folder)
    if isinstance(inner := config.get("text_config"), dict):  # a model that reads pictures too
        config = inner | {name: value for name, value in config.items() if value is not None}
    path = folder / "config.json"
    kept = read_kept_ids(path, config)
    size = read_whole_number(path, config, "vocab_size", maximum=MAX_TOKEN_ID + 1)
    return ModelInfo(
        name=folder.resolve().name,
        vocabulary=vocabulary_fingerprint(folder / "tokenizer.json"),
        vocabulary_size=kept.size if kept else size,
        context_length=read_whole_number(path, config, "max_position_embeddings"),
        eos_token_ids=eos_token_ids(folder),
    )


KEPT_IDS: Final = "kept_ids"
"""Key of ``config.json`` under which a draft with a part of its target's ids lists them."""


@dataclass(frozen=True, slots=True)
class KeptIds:
    """The ids of the target that a draft's tables have rows for, since rare ones cost more than
    they are worth (FR-Spec, arXiv 2502.14856)."""

    size: int
    """Number of the target's ids."""
    ids: tuple[int, ...]
    """The ids of the rows, ascending. Any other id is fed as the first one, and never proposed."""


def read_kept_ids(path: Path, config: Mapping[str, Any]) -> KeptIds | None:
    """Return the kept ids of the draft whose ``config.json`` at ``path`` holds ``config``, or None
    if it has rows for all ids. Raises ``ModelFolderError`` naming the file and the value."""
    section = config.get(KEPT_IDS)
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ModelFolderError(f"{path}: {KEPT_IDS} is {section!r}, but must be an object")
    size = read_whole_number(path, section, "size", maximum=MAX_TOKEN_ID + 1)
    rows = read_whole_number(path, dict(config), "vocab_size", maximum=MAX_TOKEN_ID + 1)
    ids = section.get("ids")
    if (
        not isinstance(ids, list)
        or not all(type(one) is int and 0 <= one < size for one in ids)
        or sorted(set(ids)) != ids
        or len(ids) != rows
    ):
        raise ModelFolderError(
            f"{path}: {KEPT_IDS}.ids must hold {rows} ascending ids (vocab_size) in [0, {size})"
        )
    return KeptIds(size, tuple(ids))


def token_count(folder: Path) -> int:
    """Return the number of ids, from 0 on, up to the last one that has a text. A model's vocabulary
    may be padded beyond it. Raises ``ModelFolderError``."""
    return 1 + max(read_vocabulary(folder / "tokenizer.json"), default=0)


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the end-of-text ids, from ``generation_config.json`` if it has any, else
    ``config.json``."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        if path.is_file() and (value := read_json(path).get("eos_token_id")) is not None:
            return parse_eos_ids(path, value)
    return ()


def parse_eos_ids(path: Path, value: object, name: str = "eos_token_id") -> tuple[int, ...]:
    """Return the end-of-text ids that a file has under the key ``name``, one id or several. Raises
    ``ModelFolderError``."""
    ids = value if isinstance(value, list) else [value]
    fine = all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in ids)
    if len(ids) > MAX_EOS_IDS or not fine:
        raise ModelFolderError(
            f"{path}: {name} is {value!r}, but must be up to {MAX_EOS_IDS} ids in"
            f" [0, {MAX_TOKEN_ID}]"
        )
    return tuple(ids)


def read_generation_sampling(folder: Path) -> SamplingParams:
    """Return the sampling parameters in the ``generation_config.json`` of a folder. The default is
    greedy without penalties.

    With ``do_sample`` a temperature that is missing or null is 1, as in transformers. Without it
    only the repetition penalty counts. A ``top_k`` of -1 or 0 keeps all tokens. Raises
    ``ModelFolderError`` naming the file, the key, the value and the limit."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    if (size := path.stat().st_size) > MAX_GENERATION_BYTES:  # another party may have written it
        raise ModelFolderError(f"{path}: {size} bytes, but at most {MAX_GENERATION_BYTES} are read")
    data = read_json(path)
    numbers = {
        "temperature": read_number(path, data, "temperature", 1.0),
        "top_k": max(0, read_whole_number(path, data, "top_k", minimum=-1, absent=0)),
        "top_p": read_number(path, data, "top_p", 1.0),
        "min_p": read_number(path, data, "min_p", 0.0),
        "repetition_penalty": read_number(path, data, "repetition_penalty", 1.0),
    }
    values: dict[str, Any] = {}
    for name, number in numbers.items():
        try:
            SamplingParams(**{name: number})  # type: ignore[arg-type]
        except ValueError as error:
            raise ModelFolderError(f"{path}: {error}") from error
        if name == "repetition_penalty" or read_flag(path, data, "do_sample"):
            values[name] = number
    return SamplingParams(**values)


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed ``config.json``. Raises ``ModelFolderError``."""
    if not folder.is_dir():
        raise ModelFolderError(f"{folder}: no such folder")
    return read_json(folder / "config.json")


def trained_length(folder: Path) -> int:
    """Return the length in tokens of the texts on which a checkpoint was trained, from
    ``trained_length`` of its ``config.json``, which ``edgespec train`` writes; 0 if it is missing.
    Raises ``ModelFolderError``."""
    config = {"trained_length": 0, **read_config(folder)}
    return read_whole_number(folder / "config.json", config, "trained_length", minimum=0)


MASK_TOKEN: Final = "pard_token"
"""Key of ``config.json`` with the mask token of a parallel draft, as PARD's own folders and vLLM
have it (arXiv 2504.18583)."""
PARALLEL_TOKENS: Final = "parallel_tokens"
"""Key of ``config.json`` with the number of positions that a parallel draft was taught to fill."""
DEFAULT_PARALLEL_TOKENS: Final = 8
"""Positions of a parallel draft whose folder gives no number: PARD trains for this many."""


def read_parallel_draft(folder: Path) -> ParallelDraft | None:
    """Return how the checkpoint in ``folder`` fills several positions in one run, from its
    ``config.json``; None for an ordinary model. Raises ``ModelFolderError`` naming the file, the
    key, the value and the limits."""
    config, path = read_config(folder), folder / "config.json"
    if config.get(MASK_TOKEN) is None:
        return None
    kept = read_kept_ids(path, config)
    size = kept.size if kept else read_whole_number(path, config, "vocab_size")
    token = read_whole_number(path, config, MASK_TOKEN, minimum=0, maximum=size - 1)
    if kept and token not in kept.ids:
        raise ModelFolderError(f"{path}: {MASK_TOKEN} is {token}, which is not among {KEPT_IDS}")
    count = read_whole_number(
        path,
        config,
        PARALLEL_TOKENS,
        minimum=2,
        maximum=MAX_PLACES,
        absent=DEFAULT_PARALLEL_TOKENS,
    )
    return ParallelDraft(token, count)


def fetch(reference: str, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(_call_hub(reference, partial(snapshot_download, allow_patterns=list(patterns))))


def _call_hub(reference: str, call: Callable[..., Any]) -> Any:
    """Return the result of ``ask`` for a repository and its revision. Raises ``ModelFolderError``
    with the reference, the message of the Hub's library on one line, and the proxy in use."""
    from huggingface_hub.constants import ENDPOINT

    name, _, revision = reference.partition("@")
    bypass_proxy_if_near(ENDPOINT)
    try:
        return call(name, revision=revision or None)
    except Exception as error:  # of the library, its HTTP client and the system
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if (proxy := proxy_of_url(ENDPOINT)) is not None:
            why += f", {proxy.explain(urlsplit(ENDPOINT).hostname or '')}"
        raise ModelFolderError(
            f"model {reference!r} is no local folder, and it was not found on {ENDPOINT} ({why})"
            "; or download it elsewhere and give its folder"
        ) from error


def _read_draft_manifest(path: Path) -> ModelInfo:
    model = manifest_info(path, read_json(path))
    tokenizer = path.parent / "tokenizer.json"
    vocabulary = vocabulary_fingerprint(tokenizer)
    if vocabulary != model.vocabulary:
        raise ModelFolderError(
            f"{tokenizer}: its vocabulary is {vocabulary}, but the draft was exported with"
            f" {model.vocabulary}; export it again"
        )
    return model


def manifest_info(path: Path, manifest: Mapping[str, Any]) -> ModelInfo:
    """Return the model that the parsed manifest of a draft folder describes. Raises
    ``ModelFolderError`` naming the file, the key and the value."""
    data = read_section(path, manifest, "model")
    texts = {name: data.get(name, "") for name in ("name", "vocabulary", "fingerprint")}
    for name, text in texts.items():
        if not isinstance(text, str):
            raise ModelFolderError(f"{path}: model.{name} is {text!r}, but must be text")
    return ModelInfo(
        name=texts["name"],
        vocabulary=texts["vocabulary"],
        vocabulary_size=read_whole_number(path, data, "vocabulary_size", maximum=MAX_TOKEN_ID + 1),
        context_length=read_whole_number(path, data, "context_length"),
        eos_token_ids=parse_eos_ids(path, data.get("eos_token_ids") or [], "eos_token_ids"),
        fingerprint=texts["fingerprint"],
    )


_MAX_INT32: Final = (1 << 31) - 1


def read_whole_number(
    path: Path,
    data: Mapping[str, Any],
    name: str,
    *,
    minimum: int = 1,
    maximum: int = _MAX_INT32,
    absent: int | None = None,
) -> int:
    """Return the whole number ``data[name]`` of a parsed file.

    ``absent`` is returned for a key that is missing or null; with None such a key is an error.
    Raises ``ModelFolderError`` naming the file, the key, the value and the limits."""
    value = data.get(name)
    if value is None and absent is not None:
        return absent
    if type(value) is not int or not minimum <= value <= maximum:
        limit = (
            f"at least {minimum}"
            if type(value) is not int or value < minimum
            else f"at most {maximum}"
        )
        raise ModelFolderError(
            f"{path}: {name} is {value!r}, but must be a whole number of {limit}"
        )
    return value


def read_number(
    path: Path,
    data: Mapping[str, Any],
    name: str,
    absent: float,
    *,
    minimum: float = -math.inf,
    above: float = -math.inf,
) -> float:
    """Return the finite number ``data[name]`` of a parsed file, at least ``minimum`` and larger
    than ``above``. ``absent`` is returned for a key that is missing or null. Raises
    ``ModelFolderError`` naming the file, the key, the value and the limit."""
    value = data.get(name)
    if value is None:
        return absent
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < minimum or value <= above:
        limit = f" above {above:g}" if above > -math.inf else ""
        limit = f" of at least {minimum:g}" if minimum > -math.inf else limit
        raise ModelFolderError(f"{path}: {name} is {value!r}, but must be a finite number{limit}")
    return float(value)


def read_flag(path: Path, data: Mapping[str, Any], name: str, absent: bool = False) -> bool:
    """Return the boolean ``data[name]`` of a parsed file, or ``absent`` for a key that is missing
    or null. Raises ``ModelFolderError`` naming the file, the key and the value."""
    value = data.get(name)
    if value is not None and not isinstance(value, bool):
        raise ModelFolderError(f"{path}: {name} is {value!r}, but must be true or false")
    return absent if value is None else value


def read_section(path: Path, data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the object ``data[name]`` of a parsed file, or an empty one for a key that is missing
    or null. Raises ``ModelFolderError`` naming the file, the key and the value."""
    value = data.get(name)
    if value is not None and not isinstance(value, dict):
        raise ModelFolderError(f"{path}: {name} is {value!r}, but must be an object")
    return value or {}


_SIZES: Final = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)


def check_sizes(path: Path, config: Mapping[str, Any]) -> None:
    """Check the sizes in a ``config.json`` before a library computes with them. Raises
    ``ModelFolderError`` naming the file, the key and the value."""
    for name in _SIZES:
        read_whole_number(path, config, name, absent=1)
    kv_heads = read_whole_number(path, config, "num_key_value_heads", absent=1)
    heads = read_whole_number(path, config, "num_attention_heads", absent=kv_heads)
    if heads % kv_heads:
        raise ModelFolderError(
            f"{path}: num_key_value_heads is {kv_heads}, but must divide"
            f" num_attention_heads, {heads}"
        )
    hidden = read_whole_number(path, config, "hidden_size", absent=heads)
    if config.get("head_dim") is None and hidden < heads:
        raise ModelFolderError(
            f"{path}: hidden_size is {hidden}, which is less than num_attention_heads, {heads}"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ``ModelFolderError`` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelFolderError(f"{path}: no such file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFolderError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path}: holds a JSON {type(value).__name__}, not an object")
    return value


def vocabulary_info(folder: Path, context_length: int) -> ModelInfo:
    """Return the vocabulary of a model's folder, or of a folder with a ``tokenizer.json`` alone,
    with this context length. Raises ``ModelFolderError`` naming the file."""
    if any((folder / name).is_file() for name in (DRAFT_MANIFEST, "config.json")):
        return replace(model_info(folder), context_length=context_length)
    vocabulary = vocabulary_fingerprint(folder / "tokenizer.json")
    return ModelInfo(folder.name, vocabulary, token_count(folder), context_length)


def list_hub_files(reference: str) -> list[str]:
    """Return the paths in a repository ``owner/name[@revision]``. Raises ``ModelFolderError``."""
    from huggingface_hub import HfApi

    return list(_call_hub(reference, HfApi().list_repo_files))


def describe_hub(
    reference: str, patterns: Sequence[str], timeout_s: float
) -> tuple[str, dict[str, int], dict[str, str]]:
    """Return the commit of a repository ``owner/name[@revision]``, and of its files that match
    ``patterns`` the sizes in bytes, and the SHA-256 where the Hub has one, by path. Raises
    ``ModelFolderError``, also if the Hub does not answer in ``timeout_s``."""
    from huggingface_hub import HfApi

    ask = partial(HfApi().model_info, files_metadata=True, timeout=timeout_s)
    answer = _call_hub(reference, ask)
    sizes, sums = dict[str, int](), dict[str, str]()
    for one in answer.siblings or ():
        if any(fnmatch(one.rfilename, pattern) for pattern in patterns):
            sizes[one.rfilename] = int(one.size or 0)
            if one.lfs is not None:
                sums[one.rfilename] = str(one.lfs.sha256)
    return str(answer.sha), sizes, sums


def hub_cache_folder() -> Path:
    """Return the folder in which the Hub's library keeps what it fetched."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def find_cached_snapshot(reference: str, error: ModelFolderError) -> Path:
    """Return the folder of a repository in the local cache. Raises ``error`` if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(_call_hub(reference, partial(snapshot_download, local_files_only=True)))
    except ModelFolderError:
        raise error from error.__cause__


FINGERPRINT_PIECES: Final = 1024
FINGERPRINT_PIECE_BYTES: Final = 1024
MAX_HEADER_BYTES: Final = 100 << 20

# Keys that do not change a token: the origin of a file, the tool that wrote it, and how to load it.
_IRRELEVANT_KEYS: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "architectures"}
)


def weights_fingerprint(folder: Path, vocabulary: str = "") -> str:
    """Return 32 hex digits (128 bits of SHA-256) for the model in ``folder`` with its
    ``vocabulary``. A device resumes a generation only at a verifier of the model with which it
    began.

    The hash covers the configuration, the names, types and shapes of all tensors, and 1,024 evenly
    spread pieces of 1 KiB of each file's data, in which a fine-tuned, merged or quantised copy
    differs. It is no defence against somebody who makes two models collide on purpose; the server
    of the target is trusted anyway.

    Raises ``ValueError`` or ``OSError`` naming a file that cannot be read.
    """
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {name: value for name, value in config.items() if name not in _IRRELEVANT_KEYS}
    return _tensors_fingerprint(folder, [vocabulary, kept])


def adapter_fingerprint(folder: Path) -> str:
    """Return the fingerprint of an adapter (LoRA) as PEFT writes it. Its base model is not part of
    it."""
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    config.pop("base_model_name_or_path", None)
    return _tensors_fingerprint(folder, config)


def _tensors_fingerprint(folder: Path, described: object) -> str:
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > MAX_HEADER_BYTES:
                raise ValueError(f"{path}: a header of {size} bytes, at most {MAX_HEADER_BYTES}")
            digest.update(file.read(size))
            begin, end = 8 + size, path.stat().st_size
            step = max(FINGERPRINT_PIECE_BYTES, (end - begin) // FINGERPRINT_PIECES)
            for offset in range(begin, end, step):
                file.seek(offset)
                digest.update(file.read(FINGERPRINT_PIECE_BYTES))
    return digest.hexdigest()[:_FINGERPRINT_DIGITS]


def text_fingerprint(text: str) -> str:
    """Return 32 hex digits for a model that a line of text describes, such as the toy."""
    return hashlib.sha256(text.encode()).hexdigest()[:_FINGERPRINT_DIGITS]


def cache_folder() -> Path:
    """Return ``$XDG_CACHE_HOME/edgespec``, by default ``~/.cache/edgespec``. Raises ``OSError`` if
    this user has no home."""
    return user_folder("XDG_CACHE_HOME", ".cache", "")
