"""Smaller drafts of one download: fewer layers, fewer ids to propose. Oracles: transformers with
the layers cut off; the whole draft's own logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.device.drafters.manifest import DraftModelError, read_manifest
from edgespec.device.export.export import export_draft
from edgespec.device.export.parity import check_parity
from edgespec.models.folders import ModelFolderError, model_info
from edgespec.models.kept_vocabulary import read_kept_ids
from edgespec.models.tokenizer import TextTokenizer
from tests.shell.test_drafters_export import TOKENS, draft_logits
from tests.shell.test_export_families import FAMILIES, family_checkpoint
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint

KEPT = tuple(range(1, VOCABULARY_SIZE, 3))
"""Without id 0, which ends texts."""


def export(source: Path, name: str, **options: Any) -> Path:
    """A checked draft beside ``source``."""
    target = source.parent / name
    manifest = export_draft(source, target, model_info(source), **options)
    check_parity(source, target, manifest, options.get("kept", ()))
    return target


@pytest.mark.parametrize("kind", ["smollm3", "gemma2", "phi3-window"])
def test_an_early_exit_is_the_model_with_its_first_layers(kind: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = family_checkpoint(tmp_path / "source", FAMILIES[kind])
    folder = export(tmp_path / "source", "draft", bits=32, layers=2)
    assert read_manifest(folder).layers == 2
    whole = draft_logits(export(tmp_path / "source", "whole", bits=32))
    model.model.layers = model.model.layers[:2]
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS]), use_cache=False).logits
    got = draft_logits(folder)
    np.testing.assert_allclose(got, logits[0, [29, 30, 31, 79]].numpy(), atol=2e-4)
    assert np.abs(got - whole).max() > 0.1  # the others do something


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [32, 4])
def test_kept_ids_have_their_logits_and_others_none(tied: bool, bits: int, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    source = write_checkpoint(tmp_path / "source", config)
    whole = draft_logits(export(source, "whole", bits=bits))
    folder = export(source, "kept", bits=bits, kept=KEPT)
    assert read_manifest(folder).kept_count == len(KEPT) + 1  # and the end token
    got = draft_logits(folder)
    ids = [0, *KEPT]
    np.testing.assert_allclose(got[:, ids], whole[:, ids], atol=1e-5)
    assert np.isneginf(np.delete(got, ids, axis=1)).all()


def test_a_wrong_row_of_the_head_and_a_wrong_map_are_found(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    for name in ("lm_head.weight", "logits.column"):
        folder = export(source, f"draft-{name}", bits=32, kept=KEPT)
        model = onnx.load(folder / "model.onnx")
        tensor = next(one for one in model.graph.initializer if one.name == name)
        values = np.flip(onnx.numpy_helper.to_array(tensor), axis=-1)
        tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(values), name))
        onnx.save_model(model, folder / "model.onnx")
        with pytest.raises(DraftModelError, match=r"differ from|has logits for ids"):
            check_parity(source, folder, read_manifest(folder), KEPT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 3}, r"layers is 3, but must be in \[1, 2\], or 0 for all"),
        ({"layers": -1}, "layers is -1"),
        ({"kept": (*KEPT, VOCABULARY_SIZE)}, r"keep is 320, but must be in \[0, 319\]"),
        ({"kept": (1, 2, 3)}, "4 token ids are kept, but must be at least 64"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "source")
    with pytest.raises(ValueError, match=message):
        export_draft(source, tmp_path / "draft", model_info(source), **options)


# --- which ids ------------------------------------------------------------------------------


def test_a_file_of_numbers_and_a_text(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source")
    path = tmp_path / "kept"
    for written in ("1\n2\n3\n", "1, 2, 3", json.dumps([3, 1, 2])):
        path.write_text(written)
        assert read_kept_ids(path, folder) == (1, 2, 3)
    text = "the quick brown fox\n" * 5000 + "jumps"
    path.write_text(text)
    assert read_kept_ids(path, folder) == tuple(sorted(set(TextTokenizer(folder).encode(text))))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelFolderError, match="kept: not readable as text"):
        read_kept_ids(path, folder)
    path.write_text(" \n")
    with pytest.raises(ModelFolderError, match="names no token to keep"):
        read_kept_ids(path, folder)
    with pytest.raises(ModelFolderError, match=r"not readable as text: .*No such file"):
        read_kept_ids(tmp_path / "nowhere", folder)


def test_the_command_says_what_a_draft_proposes(tmp_path: Path) -> None:
    source, path = write_checkpoint(tmp_path / "source"), tmp_path / "ids.txt"
    path.write_text(" ".join(map(str, KEPT)))
    options = ("--layers", "1", "--keep-vocabulary", str(path))
    result = CliRunner().invoke(app, ["export", str(source), str(tmp_path / "out"), *options])
    assert result.exit_code == 0, result.output
    assert "1 layers, 4 bits" in result.stdout
    assert f"proposes {len(KEPT) + 1} of 320 ids" in result.stdout
    result = CliRunner().invoke(
        app, ["export", str(source), str(tmp_path / "more"), "--layers", "5"]
    )
    assert (result.exit_code, (tmp_path / "more").exists()) == (1, False)
    assert "layers is 5, but must be in [1, 2]" in result.stderr
