"""Fingerprints of models. Oracle: equal for copies, others for whatever could change a text."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest

from edgespec.models.folders import PIECES, text_fingerprint, weights_fingerprint

SIZE = 3_000_000


def folder(path: Path, data: bytes = bytes(SIZE), **config: object) -> Path:
    """A model of one tensor."""
    path.mkdir()
    header = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + data
    (path / "model.safetensors").write_bytes(whole)
    (path / "config.json").write_text(json.dumps({"hidden_size": 4, **config}))
    return path


def test_copies_agree_whatever_they_are_called(tmp_path: Path) -> None:
    one = folder(tmp_path / "one", transformers_version="5.1", torch_dtype="float32")
    shutil.copytree(one, tmp_path / "two")
    other_origin = folder(tmp_path / "three", transformers_version="4.9", _name_or_path="x/y")
    found = {weights_fingerprint(path, "v") for path in (one, tmp_path / "two", other_origin)}
    assert len(found) == 1
    assert len(found.pop()) == 32


def test_what_changes_a_text_changes_the_fingerprint(tmp_path: Path) -> None:
    changed = bytearray(SIZE)
    changed[:: SIZE // PIECES // 2] = b"\1" * len(changed[:: SIZE // PIECES // 2])
    folders = [
        folder(tmp_path / "one"),
        folder(tmp_path / "shape", bytes(SIZE + 1)),
        folder(tmp_path / "tuned", bytes(changed)),
        folder(tmp_path / "config", rope_theta=1e6),
    ]
    found = {weights_fingerprint(path, "v") for path in folders}
    found.add(weights_fingerprint(folders[0], "other words"))
    assert len(found) == 5


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "one")
    (path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match=r"model.safetensors: a header of \d+ bytes, at most"):
        weights_fingerprint(path)


def test_a_model_of_one_line_has_one_too() -> None:
    assert text_fingerprint("a") != text_fingerprint("b")
