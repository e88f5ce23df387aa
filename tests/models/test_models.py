"""Tests of reading a model's folder, of resolving draft references, and of decoding tokens piece by
piece.

Oracles: the whole sequence decoded at once; errors that name the file or reference at fault and the
alternatives; fingerprints that are equal exactly when ids, or weights, are; and output that is the
same with and without a draft.
"""

from __future__ import annotations

import itertools
import json
import shutil
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import onnx
import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.checks import REPLACEMENT
from edgespec.device.build import build_agent, load_drafter
from edgespec.device.drafters.onnx_drafter import ForeignDrafter, OnnxDrafter
from edgespec.models import folders
from edgespec.models.folders import (
    BUNDLED_FOLDER,
    FINGERPRINT_PIECES,
    ModelFolderError,
    check_folder,
    eos_token_ids,
    model_info,
    read_config,
    vocabulary_fingerprint,
    weights_fingerprint,
)
from edgespec.models.model_source import Purpose, read_graph_info, resolve_source
from edgespec.models.tokenizer import TextTokenizer, TokenizerError, render_chat
from tests.device.foreign_graphs import Style, attending_graph, concatenating_graph, write_folder
from tests.kit.live_verifier import run_command
from tests.kit.tiny_checkpoints import SENTENCES, tiny_config, write_checkpoint, write_tokenizer
from tests.present import require


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


def set_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | changes))


def test_bundled_follows_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BUNDLED_FOLDER", tmp_path)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    assert resolve_source("bundled", Purpose.TARGET).folder == tmp_path / "target"
    assert resolve_source("bundled", Purpose.DRAFT).folder == tmp_path / "draft"
    assert resolve_source("bundled:target", Purpose.DRAFT).folder == tmp_path / "target"
    with pytest.raises(ModelFolderError, match="bundled:verifier"):
        resolve_source("bundled:verifier", Purpose.TARGET)
    (tmp_path / "draft").rmdir()
    with pytest.raises(ModelFolderError, match="not in this installation"):
        resolve_source("bundled", Purpose.DRAFT)


def test_a_hub_id_is_downloaded_without_code(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def find_no_version(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", find_no_version)
    assert resolve_source("owner/name", Purpose.TARGET).folder == source
    assert resolve_source("owner/name@v1", Purpose.TARGET).folder == source
    assert [(name, revision) for name, revision, _ in asked] == [
        ("owner/name", None),
        ("owner/name", "v1"),
    ]
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked[0][2])


def test_a_draft_folder_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(BUNDLED_FOLDER / "draft", folder)
    config = AgentConfig(draft=DraftSection(model=str(folder)))
    assert model_info(folder) == model_info(BUNDLED_FOLDER / "draft")
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].get)
    a, b = tokens[-1], tokens[-2]
    vocab = data["model"]["vocab"]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    message = r"tokenizer\.json: its vocabulary is \w+, but the draft was exported with \w+"
    with pytest.raises(ModelFolderError, match=message):
        model_info(folder)
    for elsewhere in ("", "bundled"):  # the draft's tokenizer need not be the one in use
        with pytest.raises(ModelFolderError, match=message):
            build_agent(replace(config, tokenizer=elsewhere))


def test_eos_ids_come_from_the_generation_config_first(source: Path) -> None:
    set_json(source / "generation_config.json", eos_token_id=[5, 7])
    assert eos_token_ids(source) == (5, 7)
    set_json(source / "generation_config.json", eos_token_id=None)
    assert eos_token_ids(source) == (0,)
    set_json(source / "config.json", eos_token_id=None)
    assert eos_token_ids(source) == ()
    for bad in ("x", -1, True, [1] * 17):
        set_json(source / "config.json", eos_token_id=bad)
        with pytest.raises(ModelFolderError, match=r"config\.json: eos_token_id"):
            eos_token_ids(source)


@pytest.mark.parametrize("name", ["vocab_size", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, "4096", True])
def test_a_size_that_is_none_is_refused(source: Path, name: str, value: object) -> None:
    set_json(source / "config.json", **{name: value})
    with pytest.raises(ModelFolderError, match=rf"config\.json: {name} is"):
        model_info(source)


def test_what_a_checked_folder_must_hold(source: Path, tmp_path: Path) -> None:
    set_json(source / "config.json", model_type="gpt2")
    with pytest.raises(ModelFolderError, match="model_type 'gpt2'"):
        check_folder(source)
    write_checkpoint(source, tiny_config())
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
        check_folder(source)
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: no such file"):
        check_folder(source)
    (source / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"config\.json: not readable as JSON"):
        check_folder(source)
    (source / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json: no such file"):
        check_folder(source)
    with pytest.raises(ModelFolderError, match="no such folder"):
        check_folder(tmp_path / "nowhere")


VOCABULARY = {"a": 0, "b": 1, "ü": 2}
ADDED = [{"id": 3, "content": "<|end|>", "special": True}]


def fingerprint(folder: Path, vocabulary: object, added: object = ADDED, **more: Any) -> str:
    path = folder / "tokenizer.json"
    data = {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": added}
    path.write_text(json.dumps(data | more), encoding="utf-8")
    return vocabulary_fingerprint(path)


def test_layout_does_not_count(tmp_path: Path) -> None:
    expected = fingerprint(tmp_path, VOCABULARY)
    assert len(expected) == 32
    shuffled = dict(reversed(VOCABULARY.items()))
    assert fingerprint(tmp_path, shuffled, version="2.0", normalizer=None) == expected
    assert fingerprint(tmp_path, VOCABULARY | {"<|end|>": 3}, []) == expected
    unigram = [["a", -1.0], ["b", -2.0], ["ü", -3.0]]
    assert fingerprint(tmp_path, unigram) == expected


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        ({"a": 1, "b": 0, "ü": 2}, ({"id": 3, "content": "<|end|>", "special": True},)),
        ({"a": 0, "b": 1, "u": 2}, ({"id": 3, "content": "<|end|>", "special": True},)),
        ({"a": 0, "b": 1}, ({"id": 3, "content": "<|end|>", "special": True},)),
        ({"a": 0, "b": 1, "ü": 2}, ()),
        ({"a": 0, "b": 1, "ü": 2}, ({"id": 4, "content": "<|end|>"},)),
        ({"a": 0, "b": 1, "ü": 2}, ({"id": 2, "content": "<|end|>"},)),
        ({"a": 0, "b1 1 ü": 1}, ({"id": 3, "content": "<|end|>", "special": True},)),
    ],
)
def test_every_difference_counts(
    tmp_path: Path, vocabulary: dict[str, int], added: list[dict[str, Any]]
) -> None:
    assert fingerprint(tmp_path, vocabulary, added) != fingerprint(tmp_path, VOCABULARY)


@pytest.mark.parametrize(
    ("vocabulary", "added", "message"),
    [
        ({"a": 0}, ({"id": 1000000000, "content": "b"},), "token ids 0 to 1000000000, limit 0 to"),
        ({"a": -1}, (), "token ids -1 to -1, limit 0 to"),
        ({"a": "b"}, (), "unreadable vocabulary entry"),
        ({"a": float("inf")}, (), "unreadable vocabulary entry"),
        ({"a": float("nan")}, (), "unreadable vocabulary entry"),
    ],
)
def test_ids_that_are_none_are_named_with_their_file(
    tmp_path: Path, vocabulary: dict[str, Any], added: list[dict[str, Any]], message: str
) -> None:
    """A device receives such files from its verifier, and counts ids from 0 on."""
    with pytest.raises(ModelFolderError, match=rf"tokenizer\.json: {message}"):
        fingerprint(tmp_path, vocabulary, added)


def test_files_that_nest_too_deep_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: not readable as JSON"):
        vocabulary_fingerprint(tmp_path / "tokenizer.json")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ModelFolderError, match=r"config\.json: not readable as JSON"):
        read_config(tmp_path)


SIZE = 3_000_000


def weights_folder(path: Path, data: bytes = bytes(SIZE), **config: object) -> Path:
    """Write a model of one tensor."""
    path.mkdir()
    header = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    (path / "model.safetensors").write_bytes(whole)
    (path / "config.json").write_text(json.dumps({"hidden_size": 4, **config}))
    return path


def test_copies_agree_whatever_they_are_called(tmp_path: Path) -> None:
    one = weights_folder(tmp_path / "one", transformers_version="5.1", torch_dtype="float32")
    shutil.copytree(one, tmp_path / "two")
    other_origin = weights_folder(
        tmp_path / "three", transformers_version="4.9", _name_or_path="x/y"
    )
    found = {weights_fingerprint(path, "v") for path in (one, tmp_path / "two", other_origin)}
    assert len(found) == 1
    assert len(found.pop()) == 32


def test_what_changes_a_text_changes_the_fingerprint(tmp_path: Path) -> None:
    changed = bytearray(SIZE)
    changed[:: SIZE // FINGERPRINT_PIECES // 2] = b"\1" * len(
        changed[:: SIZE // FINGERPRINT_PIECES // 2]
    )
    folders = [
        weights_folder(tmp_path / "one"),
        weights_folder(tmp_path / "shape", bytes(SIZE + 1)),
        weights_folder(tmp_path / "tuned", bytes(changed)),
        weights_folder(tmp_path / "config", rope_theta=1e6),
    ]
    found = {weights_fingerprint(path, "v") for path in folders}
    found.add(weights_fingerprint(folders[0], "other words"))
    assert len(found) == 5


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    path = weights_folder(tmp_path / "one")
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model.safetensors: a header of \d+ bytes, at most"):
        weights_fingerprint(path)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


@given(data=st.data())
def test_no_character_is_lost_however_much_is_broken(
    tokenizer: TextTokenizer, data: st.DataObject
) -> None:
    """Every character except the replacement character must arrive, whole and in order, however
    tokens are grouped, even in long broken texts."""
    size = tiny_config()["vocab_size"]
    tokens = data.draw(st.lists(st.integers(0, size - 1), max_size=80))
    tokens += [tokenizer.encode("漢")[1]] * data.draw(st.integers(0, 40))
    tokens += tokenizer.encode(data.draw(st.text(max_size=3)))
    stream, got, rest = tokenizer.stream(), "", tokens
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        got, rest = got + stream.push(rest[:count]), rest[count:]
    got += stream.flush()
    assert got.replace(REPLACEMENT, "") == tokenizer.decode(tokens).replace(REPLACEMENT, "")


@given(data=st.data())
def test_a_continuation_is_what_the_whole_has_behind_the_prompt(
    tokenizer: TextTokenizer, fallback: TextTokenizer, data: st.DataObject
) -> None:
    """Oracle: the library's decoding of both together."""
    for one, words in ((tokenizer, SENTENCES), (fallback, [" a", " aé a", "€ a"])):
        prompt, text = data.draw(st.sampled_from(words)), data.draw(st.sampled_from(words))
        if one is fallback:
            tokens = [256 if byte == ord("a") else byte for byte in (prompt + text).encode()]
        else:
            tokens = one.encode(prompt + text)
        cut = data.draw(st.integers(0, len(tokens)))
        before = one.decode(tokens[:cut])
        stream = one.stream(tokens[:cut])
        got = stream.push(tokens[cut:]) + stream.flush()
        # A character that the prompt leaves unfinished belongs to the continuation.
        assert before.rstrip(REPLACEMENT) + got == one.decode(tokens)


def byte_fallback(folder: Path, *more: decoders.Decoder) -> TextTokenizer:
    """Make a vocabulary in which token i is byte i, and 256 is a word."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁a": 256, "?": 257}
    inner = Tokenizer(models.BPE(vocabulary, [], unk_token="?", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    )
    inner.save(str(folder / "tokenizer.json"))
    return TextTokenizer(folder)


def decode_runs(tokens: list[int], strips: bool) -> str:
    """Decode each run of bytes with Python's own decoder, as the oracle. Like Llama's decoder, one
    variant strips the first space of a text."""
    text = "".join(
        " a" * len(list(run)) if word else bytes(run).decode("utf-8", errors="replace")
        for word, run in itertools.groupby(tokens, lambda token: token == 256)
    )
    return text.removeprefix(" ") if strips else text


_CHARACTERS = st.sampled_from([*map(tuple, ("€".encode(), "é".encode(), b"A")), (256,)])
_BROKEN = st.sampled_from([(0xFF,), (0xE2, 0x82), (0xC3,)])


@pytest.mark.parametrize("strips", [False, True])
@given(parts=st.lists(_CHARACTERS | _BROKEN, max_size=20))
def test_bytes_and_words_in_any_order_are_what_they_say(
    fallback: TextTokenizer, stripping: TextTokenizer, strips: bool, parts: list[tuple[int, ...]]
) -> None:
    stream = (stripping if strips else fallback).stream()
    tokens = [token for part in parts for token in part]
    got = "".join(stream.push([token]) for token in tokens) + stream.flush()
    assert got == decode_runs(tokens, strips)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_fallback(tmp_path_factory.mktemp("fallback"))


@pytest.fixture(scope="module")
def stripping(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return byte_fallback(tmp_path_factory.mktemp("stripping"), decoders.Strip(" ", 1, 0))


MESSAGES = [{"role": "user", "content": "é"}]


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: no such file"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a readable tokenizer"):
        TextTokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: holds a JSON list"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match="there is no chat_template"):
        render_chat(TextTokenizer(tmp_path), [{"role": "user", "content": "?"}])


def test_spaces_of_a_metaspace_vocabulary_stay(tmp_path: Path) -> None:
    """The tokenizer's decoder drops the first token's leading space, which only the first token of
    a text may lose."""
    inner = Tokenizer(models.WordLevel({"▁the": 0, "▁fox": 1, "es": 2, "?": 3}, unk_token="?"))
    inner.decoder = decoders.Metaspace()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    stream = tokenizer.stream()
    assert [stream.push([t]) for t in (0, 1, 2, 0)] == ["the", " fox", "es", " the"]
    stream = tokenizer.stream([0])
    assert [stream.push([t]) for t in (1, 2, 0)] == [" fox", "es", " the"]


# --- draft references and the sentences a user types ----------------------------------------------


PROMPT = "def fibonacci(n):"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graphs = {
        "onnx/model_q4.onnx": concatenating_graph(),
        "onnx/model_fp16.onnx": concatenating_graph(Style(half=True)),
    }
    return write_folder(tmp_path / "foreign", graphs)


def test_a_variant_is_chosen_by_name_or_the_first_that_works(folder: Path) -> None:
    def drafter_of(variant: str) -> tuple[Any, list[str]]:
        said: list[str] = []
        config = AgentConfig(draft=DraftSection(str(folder), variant=variant))
        drafter = load_drafter(config, say=said.append)
        assert isinstance(drafter, ForeignDrafter)
        drafter.close()
        return drafter.graph.logits.dtype, said

    assert drafter_of("q4") == ("float32", [])
    assert drafter_of("fp16") == ("float16", [])
    with pytest.raises(ModelFolderError, match=r"no variant 'int8'; there are: q4 \(onnx/model_q4"):
        drafter_of("int8")
    assert drafter_of("auto") == ("float32", [])
    # A variant that cannot be loaded is left out, with its reason.
    (folder / "onnx" / "model_q4.onnx").write_bytes(b"nonsense")
    dtype, (said,) = drafter_of("auto")
    assert dtype == "float16"
    assert said.startswith("q4 is left out:")
    assert "model_q4.onnx" in said
    (folder / "onnx" / "model_fp16.onnx").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match=r"model_q4\.onnx: onnxruntime cannot load it"):
        drafter_of("auto")


def test_a_checkpoint_beside_a_graph_is_exported_unless_a_variant_is_asked_for(
    folder: Path,
) -> None:
    write_checkpoint(folder)
    assert not resolve_source(str(folder), Purpose.DRAFT).graphs
    assert list(resolve_source(str(folder), Purpose.DRAFT, "q4").graphs) == ["q4"]
    drafter = load_drafter(AgentConfig(draft=DraftSection(str(folder))))
    assert isinstance(drafter, OnnxDrafter)
    drafter.close()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "surprise"}))
    assert list(resolve_source(str(folder), Purpose.DRAFT).graphs) == [
        "q4",
        "fp16",
    ]  # it cannot be exported


def test_a_file_is_a_draft_with_what_lies_around_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "onnx" / "model_q4.onnx"
    source = resolve_source(str(path), Purpose.DRAFT)
    assert (source.folder, list(source.graphs.values())) == (folder, [path])
    assert resolve_source(str(path), Purpose.TEXTS).folder == folder
    with pytest.raises(ModelFolderError, match=r"model_q8\.onnx: no such file"):
        resolve_source(str(folder / "onnx" / "model_q8.onnx"), Purpose.DRAFT)
    lonely = shutil.copy(path, tmp_path / "lonely.onnx")
    with pytest.raises(
        ModelFolderError, match=r"there is neither tokenizer\.json nor config\.json"
    ):
        resolve_source(str(lonely), Purpose.DRAFT)


def test_our_own_graph_without_its_manifest_is_no_graph_of_others(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED_FOLDER / "draft", tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    graph = folder / "model.onnx"
    assert resolve_source(str(graph), Purpose.DRAFT) == resolve_source(str(folder), Purpose.DRAFT)
    (folder / "edgespec.json").unlink()
    for reference in (folder, graph):
        with pytest.raises(ModelFolderError, match=r"edgespec\.json: no such file, but .*export"):
            resolve_source(str(reference), Purpose.DRAFT)


def test_halves_of_a_decoder_are_refused_by_name(tmp_path: Path) -> None:
    graph = concatenating_graph()
    names = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    halves = write_folder(tmp_path / "halves", dict.fromkeys(names, graph))
    with pytest.raises(ModelFolderError, match=r"decoder_model\.onnx is one half of a decoder"):
        resolve_source(str(halves), Purpose.DRAFT)
    merged = write_folder(halves, {"decoder_model_merged.onnx": graph})
    assert list(resolve_source(str(merged), Purpose.DRAFT).graphs) == ["fp32"]


def test_genai_folders_need_no_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    heads = {"head_size": 16, "num_key_value_heads": 2, "num_attention_heads": 4}
    decoder = {"filename": "decoder.onnx", **heads}
    sizes = {"context_length": 128, "eos_token_id": [3, 0], "vocab_size": 320}
    genai = {"model": {"decoder": decoder, **sizes}}
    folder = tmp_path / "genai"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "genai_config.json").write_text(json.dumps(genai))
    (folder / "decoder.onnx").write_bytes(b"")
    assert list(resolve_source(str(folder), Purpose.DRAFT).graphs) == ["genai"]
    found = read_graph_info(folder, "name")
    assert found.model.vocabulary == model_info(source).vocabulary
    assert (found.model.context_length, found.model.eos_token_ids) == (128, (3, 0))
    assert (found.kv_heads, found.head_size) == (2, 16)
    (folder / "genai_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"neither config\.json nor genai_config\.json"):
        read_graph_info(folder, "name")


def test_older_names_and_nested_configs_are_read(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "texts")
    for config, expected in (
        ({"n_positions": 99, "n_head": 4, "n_embd": 64}, (99, 4, 16)),
        ({"text_config": tiny_config()}, (256, 2, 16)),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        found = read_graph_info(folder, "name")
        assert (found.model.context_length, found.kv_heads, found.head_size) == expected
        assert found.model.vocabulary_size == 320 or found.token_count
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ModelFolderError, match="says what the context length is"):
        read_graph_info(folder, "name")
    for name in ("n_positions", "n_head", "n_embd", "vocab_size", "head_dim"):
        (folder / "config.json").write_text(json.dumps({"n_positions": 99, name: "x"}))
        with pytest.raises(ModelFolderError, match=rf"config\.json: {name} is 'x'"):
            read_graph_info(folder, "name")


class Hub:
    """A fake Hub repository of ``folder``'s files: it lists them, and copies files that match
    patterns."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.fetched: list[str] = []
        self.reachable = True

    def list_repo_files(self, name: str, *, revision: str | None = None) -> list[str]:
        if not self.reachable:
            raise RuntimeError("Name or service not known")
        paths = [path for path in self.folder.rglob("*") if path.is_file()]
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)

    def snapshot_download(
        self,
        name: str,
        *,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        if local_files_only or not self.reachable:
            if not self.cache.is_dir():
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            return str(self.cache)
        files = filter_repo_objects(self.list_repo_files(name), allow_patterns=allow_patterns)
        for file in files:
            (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / file, self.cache / file)
            self.fetched.append(file)
        return str(self.cache)


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    fake = Hub(folder, tmp_path / "snapshots")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_one_variant_is_fetched_and_found_again_without_the_hub(hub: Hub, folder: Path) -> None:
    write_folder(folder, {"onnx/model.onnx": concatenating_graph()}, external=["onnx/model.onnx"])
    assert resolve_source("owner/name", Purpose.TEXTS).folder == hub.cache
    assert not any(file.endswith(("onnx", "onnx_data")) for file in hub.fetched)
    assert list(resolve_source("owner/name", Purpose.DRAFT).graphs) == ["q4"]
    assert {file for file in hub.fetched if "onnx" in file} == {"onnx/model_q4.onnx"}
    assert list(resolve_source("owner/name@main", Purpose.DRAFT, "fp32").graphs) == ["fp32"]
    assert (hub.cache / "onnx" / "model.onnx_data").is_file()
    with pytest.raises(ModelFolderError, match="no variant 'int8'"):
        resolve_source("owner/name", Purpose.DRAFT, "int8")
    drafter = require(load_drafter(AgentConfig(draft=DraftSection("owner/name"))))
    assert drafter.info.name == "name"
    hub.reachable = False
    assert sorted(resolve_source("owner/name", Purpose.DRAFT).graphs) == ["fp32", "q4"]


def test_a_checkpoint_on_the_hub_is_fetched_without_its_graphs(hub: Hub, folder: Path) -> None:
    write_checkpoint(folder)
    assert not resolve_source("owner/name", Purpose.DRAFT).graphs
    assert "model.safetensors" in hub.fetched
    assert not any(file.endswith(".onnx") for file in hub.fetched)


def test_an_unreachable_hub_is_told_with_what_it_said(hub: Hub) -> None:
    hub.reachable = False
    what = r"'owner/name'.*RuntimeError: Name or service not known.*give its folder"
    with pytest.raises(ModelFolderError, match=what):
        resolve_source("owner/name", Purpose.DRAFT)
    hub.reachable = True
    resolve_source("owner/name", Purpose.TEXTS)
    hub.reachable = False
    with pytest.raises(ModelFolderError, match=what):  # tokenizer files alone are no draft
        resolve_source("owner/name", Purpose.DRAFT)


@pytest.fixture(scope="module")
def bundled_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the bundled draft, with its own weights, in the layout of onnx-community models."""
    folder: Path = tmp_path_factory.mktemp("bundled") / "Some-Model-ONNX"
    own = BUNDLED_FOLDER / "draft"
    shutil.copytree(own, folder, ignore=shutil.ignore_patterns("model.*", "edgespec.json"))
    graph = attending_graph(onnx.load(own / "model.onnx"))
    graph.producer_name = "somebody else"
    (folder / "onnx").mkdir()
    path, data = folder / "onnx/model_q4.onnx", "model_q4.onnx_data"
    onnx.save_model(graph, path, save_as_external_data=True, location=data)
    return folder


def test_inspect_tells_what_was_found(bundled_graphs: Path, folder: Path) -> None:
    found = run_command("export", "--inspect", str(bundled_graphs)).output
    assert "copies nothing" in found
    assert "attention_mask int64" in found
    found = run_command("export", "--inspect", str(folder / "onnx" / "model_fp16.onnx")).output
    assert "copies what is kept, 256 bytes a token" in found
    assert "float16, of every token fed" in found
    assert "q4" not in found
    assert "made by `edgespec export`" in run_command("export", "--inspect", "bundled").output
    (folder / "onnx" / "model_int8.onnx").write_bytes(b"nonsense")
    result = run_command("export", "--inspect", str(folder))
    assert result.exit_code == 1
    assert "int8: cannot be used" in result.output
    assert "fp16:" in result.output
