"""Exports and caches of 0.1.0: a draft folder of a user is read as what it is, and one in the cache
is made again.

Oracle: manifests that both states of 0.1.0 wrote for the bundled target, and the defaults of the
fields that they lack.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.ports import ModelInfo
from edgespec.device.drafters.manifest import (
    MANIFEST_FILE,
    DraftManifest,
    DraftModelError,
    read_manifest,
)
from edgespec.device.export import export
from tests.kit.tiny_checkpoints import write_checkpoint

VOCABULARY = "a974ce0d94bb240f0e183cf5efc1d835"
OF_NOVEMBER_20: dict[str, Any] = json.loads(
    '{"bits":4,"block_size":32,"format":1,"head_dim":64,"kv_heads":2,"layers":6,"model":'
    '{"context_length":1024,"eos_token_ids":[0],"name":"target","vocabulary":'
    f'"{VOCABULARY}","vocabulary_size":4096}},"source":"target","table_bits":4}}'
)
OF_NOVEMBER_28: dict[str, Any] = {
    **OF_NOVEMBER_20,
    "model": {**OF_NOVEMBER_20["model"], "fingerprint": ""},
    "kv_type": "float32",
    "token_count": 4096,
    "trained_length": 0,
    "file_bytes": {"model.onnx": 26854, "model.onnx.data": 7163392, "tokenizer.json": 260273},
}


def write_manifest(folder: Path, data: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST_FILE).write_text(json.dumps(data), encoding="utf-8")
    return folder


def make_expected(**more: Any) -> DraftManifest:
    model = ModelInfo("target", VOCABULARY, 4096, 1024, (0,))
    return DraftManifest(
        model=model,
        bits=4,
        table_bits=4,
        block_size=32,
        layers=6,
        kv_heads=2,
        head_dim=64,
        source="target",
        **more,
    )


@pytest.mark.parametrize(
    ("data", "more"),
    [
        pytest.param(OF_NOVEMBER_20, {}, id="2026-11-20"),
        pytest.param(
            OF_NOVEMBER_28,
            {"token_count": 4096, "file_bytes": OF_NOVEMBER_28["file_bytes"]},
            id="2026-11-28",
        ),
    ],
)
def test_a_manifest_of_an_earlier_version_is_read(
    data: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    manifest = read_manifest(write_manifest(tmp_path, data))
    assert manifest == make_expected(**more)
    assert manifest.parallel is None
    assert manifest.kv_type == "float32"
    assert (manifest.window, manifest.proposable_count) == (0, 4096)


@pytest.mark.parametrize(
    "change", [{"format": 2}, {"format": None}, {"sharded": True}], ids=lambda change: str(change)
)
def test_a_manifest_of_another_format_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    folder = write_manifest(tmp_path, {**OF_NOVEMBER_28, **change})
    with pytest.raises(DraftModelError, match="export"):
        read_manifest(folder)


def test_a_cached_draft_of_an_earlier_version_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.1.0 kept a draft under a digest that has the version of its exporter, which was 5. What
    stands there is left alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_checkpoint(tmp_path / "source")
    with monkeypatch.context() as earlier:
        earlier.setattr(export, "_EXPORT_VERSION", 5)
        before = export.export_to_cache(source, 4, lambda _: None)
    write_manifest(before, OF_NOVEMBER_28)
    (before / "model.onnx").write_bytes(b"earlier")
    said: list[str] = []
    now = export.export_to_cache(source, 4, said.append)
    assert now != before
    assert any("exporting" in line for line in said)
    assert (before / "model.onnx").read_bytes() == b"earlier"
    assert read_manifest(now).source != "target"
    assert export.export_to_cache(source, 4, said.append) == now
