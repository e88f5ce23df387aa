"""What a draft reference leads to, and the sentences a user types. Oracles: the message names what
is at fault and what there is instead; the text is the same with and without a draft.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import onnx
import pytest
from huggingface_hub.utils._paths import filter_repo_objects

from edgespec.config import AgentConfig, DraftSection
from edgespec.device.build import load_drafter
from edgespec.device.drafters.onnx_drafter import ForeignDrafter, OnnxDrafter
from edgespec.models.draft_sources import find_draft, read_foreign_info, resolve_texts
from edgespec.models.folders import BUNDLED_FOLDER, ModelFolderError, model_info
from tests.present import present
from tests.shell.foreign_graphs import Style, attending_graph, concatenating_graph, write_folder
from tests.shell.live_verifier import call
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint, write_tokenizer

PROMPT = "def fibonacci(n):"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    graphs = {
        "onnx/model_q4.onnx": concatenating_graph(),
        "onnx/model_fp16.onnx": concatenating_graph(style=Style(half=True)),
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
    # One that cannot be loaded is left out, with its reason.
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
    assert not find_draft(str(folder)).graphs
    assert list(find_draft(str(folder), "q4").graphs) == ["q4"]
    drafter = load_drafter(AgentConfig(draft=DraftSection(str(folder))))
    assert isinstance(drafter, OnnxDrafter)
    drafter.close()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "surprise"}))
    assert list(find_draft(str(folder)).graphs) == ["q4", "fp16"]  # it cannot be exported


def test_a_file_is_a_draft_with_what_lies_around_it(folder: Path, tmp_path: Path) -> None:
    path = folder / "onnx" / "model_q4.onnx"
    source = find_draft(str(path))
    assert (source.folder, list(source.graphs.values())) == (folder, [path])
    assert resolve_texts(str(path)) == folder
    with pytest.raises(ModelFolderError, match=r"model_q8\.onnx: no such file"):
        find_draft(str(folder / "onnx" / "model_q8.onnx"))
    lonely = shutil.copy(path, tmp_path / "lonely.onnx")
    with pytest.raises(
        ModelFolderError, match=r"there is neither tokenizer\.json nor config\.json"
    ):
        find_draft(str(lonely))


def test_our_own_graph_without_its_manifest_is_no_graph_of_others(tmp_path: Path) -> None:
    folder = shutil.copytree(BUNDLED_FOLDER / "draft", tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    graph = folder / "model.onnx"
    assert find_draft(str(graph)) == find_draft(str(folder))
    (folder / "edgespec.json").unlink()
    for reference in (folder, graph):
        with pytest.raises(ModelFolderError, match=r"edgespec\.json: no such file, but .*export"):
            find_draft(str(reference))


def test_halves_of_a_decoder_are_refused_by_name(tmp_path: Path) -> None:
    graph = concatenating_graph()
    names = ("decoder_model.onnx", "decoder_with_past_model.onnx")
    halves = write_folder(tmp_path / "halves", dict.fromkeys(names, graph))
    with pytest.raises(ModelFolderError, match=r"decoder_model\.onnx is one half of a decoder"):
        find_draft(str(halves))
    merged = write_folder(halves, {"decoder_model_merged.onnx": graph})
    assert list(find_draft(str(merged)).graphs) == ["fp32"]


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
    assert list(find_draft(str(folder)).graphs) == ["genai"]
    found = read_foreign_info(folder, "name")
    assert found.model.vocabulary == model_info(source).vocabulary
    assert (found.model.context_length, found.model.eos_token_ids) == (128, (3, 0))
    assert (found.kv_heads, found.head_size) == (2, 16)
    (folder / "genai_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"neither config\.json nor genai_config\.json"):
        read_foreign_info(folder, "name")


def test_older_names_and_nested_configs_are_read(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "texts")
    for config, expected in (
        ({"n_positions": 99, "n_head": 4, "n_embd": 64}, (99, 4, 16)),
        ({"text_config": tiny_config()}, (256, 2, 16)),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        found = read_foreign_info(folder, "name")
        assert (found.model.context_length, found.kv_heads, found.head_size) == expected
        assert found.model.vocabulary_size == 320 or found.token_count
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))
    with pytest.raises(ModelFolderError, match="context length as a positive integer"):
        read_foreign_info(folder, "name")


class Hub:
    """A repository of ``folder``'s files: it lists them, and copies what patterns ask for."""

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
    assert resolve_texts("owner/name") == hub.cache
    assert not any(file.endswith(("onnx", "onnx_data")) for file in hub.fetched)
    assert list(find_draft("owner/name").graphs) == ["q4"]
    assert {file for file in hub.fetched if "onnx" in file} == {"onnx/model_q4.onnx"}
    assert list(find_draft("owner/name@main", "fp32").graphs) == ["fp32"]
    assert (hub.cache / "onnx" / "model.onnx_data").is_file()
    with pytest.raises(ModelFolderError, match="no variant 'int8'"):
        find_draft("owner/name", "int8")
    drafter = present(load_drafter(AgentConfig(draft=DraftSection("owner/name"))))
    assert drafter.info.name == "name"
    hub.reachable = False
    assert sorted(find_draft("owner/name").graphs) == ["fp32", "q4"]


def test_a_checkpoint_on_the_hub_is_fetched_without_its_graphs(hub: Hub, folder: Path) -> None:
    write_checkpoint(folder)
    assert not find_draft("owner/name").graphs
    assert "model.safetensors" in hub.fetched
    assert not any(file.endswith(".onnx") for file in hub.fetched)


def test_an_unreachable_hub_is_told_with_what_it_said(hub: Hub) -> None:
    hub.reachable = False
    what = r"'owner/name'.*RuntimeError: Name or service not known.*give its folder"
    with pytest.raises(ModelFolderError, match=what):
        find_draft("owner/name")
    hub.reachable = True
    resolve_texts("owner/name")
    hub.reachable = False
    with pytest.raises(ModelFolderError, match=what):  # texts alone are no draft
        find_draft("owner/name")


@pytest.fixture(scope="module")
def bundled_graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft as onnx-community lays models out, with its own weights."""
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
    found = call("export", "--inspect", str(bundled_graphs)).output
    assert "copies nothing" in found
    assert "attention_mask int64" in found
    found = call("export", "--inspect", str(folder / "onnx" / "model_fp16.onnx")).output
    assert "copies what is kept, 256 bytes a token" in found
    assert "float16, of every token fed" in found
    assert "q4" not in found
    assert "made by `edgespec export`" in call("export", "--inspect", "bundled").output
    (folder / "onnx" / "model_int8.onnx").write_bytes(b"nonsense")
    result = call("export", "--inspect", str(folder))
    assert result.exit_code == 1
    assert "int8: cannot be used" in result.output
    assert "fp16:" in result.output
