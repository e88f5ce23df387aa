"""Finding and checking model folders. Oracle: the message names the file or reference at fault."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from edgespec.config import AgentConfig, DraftSection
from edgespec.device.build import build_agent
from edgespec.models import folders
from edgespec.models.folders import (
    BUNDLED_FOLDER,
    ModelFolderError,
    Role,
    check_folder,
    eos_token_ids,
    model_info,
    resolve_model,
)
from tests.shell.tiny_checkpoints import (
    CONTEXT_LENGTH,
    VOCABULARY_SIZE,
    tiny_config,
    write_checkpoint,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "source")


def set_json(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | changes))


def test_a_folder_is_its_own_answer(source: Path) -> None:
    assert resolve_model(str(source), Role.TARGET) == source
    check_folder(source, Role.TARGET)


def test_bundled_follows_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BUNDLED_FOLDER", tmp_path)
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
    assert resolve_model("bundled", Role.TARGET) == tmp_path / "target"
    assert resolve_model("bundled", Role.DRAFT) == tmp_path / "draft"
    assert resolve_model("bundled:target", Role.DRAFT) == tmp_path / "target"
    with pytest.raises(ModelFolderError, match="bundled:verifier"):
        resolve_model("bundled:verifier", Role.TARGET)
    (tmp_path / "draft").rmdir()
    with pytest.raises(ModelFolderError, match="not in this installation"):
        resolve_model("bundled", Role.DRAFT)


@pytest.mark.parametrize("reference", ["", "nowhere", "./no/such/folder", "a/b/c", "../x"])
def test_a_reference_that_means_nothing_is_refused(reference: str) -> None:
    with pytest.raises(ModelFolderError, match="neither 'bundled'"):
        resolve_model(reference, Role.TARGET)


def test_a_file_is_not_a_model(source: Path) -> None:
    with pytest.raises(ModelFolderError, match="is a file"):
        resolve_model(str(source / "config.json"), Role.TARGET)


def test_a_hub_id_is_downloaded_without_code(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []

    def fake(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve_model("owner/name", Role.TARGET) == source
    assert resolve_model("owner/name@v1", Role.TARGET) == source
    assert [(name, revision) for name, revision, _ in asked] == [
        ("owner/name", None),
        ("owner/name", "v1"),
    ]
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked[0][2])


def test_offline_says_so(tmp_path: Path) -> None:
    """For real: the tests run with HF_HUB_OFFLINE set and an empty cache."""
    with pytest.raises(ModelFolderError, match=r"'owner/no-such-model'.*not in the local cache"):
        resolve_model("owner/no-such-model", Role.TARGET)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), OSError("disk"), ValueError("v")])
def test_hub_errors_are_ours(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    expected = ValueError if type(error) is ValueError else ModelFolderError
    with pytest.raises(expected):
        resolve_model("owner/name", Role.TARGET)


def test_the_info_of_a_checkpoint(source: Path) -> None:
    info = model_info(source)
    assert info.name == "source"
    assert info.vocabulary_size == VOCABULARY_SIZE
    assert info.context_length == CONTEXT_LENGTH
    assert info.eos_token_ids == (0,)
    assert len(info.vocabulary) == 32


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
    for elsewhere in ("", "bundled"):  # the draft's tokenizer need not be the one that is used
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
    with pytest.raises(ModelFolderError, match=r"edgespec\.json: no such file"):
        check_folder(source, Role.DRAFT)
    set_json(source / "config.json", model_type="gpt2")
    with pytest.raises(ModelFolderError, match="model_type 'gpt2'"):
        check_folder(source, Role.TARGET)
    write_checkpoint(source, tiny_config())
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelFolderError, match=r"no \*\.safetensors"):
        check_folder(source, Role.TARGET)
    (source / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json: no such file"):
        check_folder(source, Role.TARGET)
    (source / "config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"config\.json: not readable as JSON"):
        check_folder(source, Role.TARGET)
    (source / "config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"config\.json: no such file"):
        check_folder(source, Role.TARGET)
    with pytest.raises(ModelFolderError, match="no such folder"):
        check_folder(tmp_path / "nowhere", Role.TARGET)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "sharded", shards=2)
    check_folder(folder, Role.TARGET)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFolderError, match="model-00002-of-00002"):
        check_folder(folder, Role.TARGET)
