"""Tests of the conversion of a GGUF file: its reports, its types, and its failures.

Oracle: the ``gguf`` library's own decoding of the blocks, and the folder that an undisturbed
conversion writes. A failed or interrupted one leaves nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.models import gguf_folder
from edgespec.models.conversion_reports import ConversionReport, watch_conversions
from edgespec.models.gguf_file import GgufError
from edgespec.models.gguf_folder import folder_of_gguf
from tests.models.test_gguf import read_tensor, write_small_model

gguf = pytest.importorskip("gguf")

UP = "model.layers.0.mlp.up_proj.weight"
NOT_DECODED = ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
DECODED = [one for one in gguf.GGMLQuantizationType if one.name not in NOT_DECODED]


@pytest.fixture
def reports() -> Iterator[list[ConversionReport]]:
    found = list[ConversionReport]()
    watch_conversions(found.append)
    yield found
    watch_conversions(None)


def write_blocks(path: Path, kind: Any) -> tuple[Path, NDArray[Any]]:
    """Write a model with a matrix of [64, 256] in random blocks of this type."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(2).integers(0, 64, (64, 256 // block * size)).astype(np.uint8)
    if kind.name in ("F32", "F16"):
        raw = raw.view({"F32": np.float32, "F16": np.float16}[kind.name])
    return write_small_model(path, blk_0_ffn_up_weight=(raw, kind)), raw


@pytest.mark.parametrize("kind", DECODED, ids=lambda one: one.name)
def test_every_type_that_the_library_decodes_is_read(tmp_path: Path, kind: Any) -> None:
    path, raw = write_blocks(tmp_path / "a.gguf", kind)
    found = read_tensor(folder_of_gguf(path, tmp_path / "cache"), UP)
    assert np.array_equal(found, gguf.quants.dequantize(raw, kind).astype(np.float32))
    assert found.shape == (64, 256)


@pytest.mark.parametrize("name", [one for one in NOT_DECODED if one != "Q1_0"])
def test_other_types_are_refused_by_name(tmp_path: Path, name: str) -> None:
    path, _ = write_blocks(tmp_path / "a.gguf", gguf.GGMLQuantizationType[name])
    with pytest.raises(
        GgufError, match=f"'blk.0.ffn_up.weight' is {name}, which cannot be decoded"
    ):
        folder_of_gguf(path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_model_is_converted_once_and_again_after_a_change(
    tmp_path: Path, reports: list[ConversionReport]
) -> None:
    path = write_small_model(tmp_path / "a.gguf")
    first = folder_of_gguf(path, tmp_path / "cache")
    last = reports[-1]
    assert (last.folder, last.file, last.types) == (first, "a.gguf", "11 F32")
    assert (last.written_type, last.relative_error) == ("float32", 0.0)
    assert (last.done_tensors, last.done_bytes) == (last.tensors, last.total_bytes)
    steps = [report.done_tensors for report in reports]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert first.name == "a"
    count = len(reports)
    assert folder_of_gguf(path, tmp_path / "cache") == first
    assert len(reports) == count
    path.write_bytes(write_small_model(tmp_path / "b.gguf").read_bytes() + bytes(32))
    assert folder_of_gguf(path, tmp_path / "cache") != first
    assert not list((tmp_path / "cache" / "gguf").glob(".*"))


def test_one_file_under_several_names_is_converted_once(
    tmp_path: Path, reports: list[ConversionReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small_model(tmp_path / "sha256-abc")
    first = folder_of_gguf(path, tmp_path / "cache", name="first")
    assert reports[-1].file == "first"
    count = len(reports)
    second = folder_of_gguf(path, tmp_path / "cache", name="second")
    assert (len(reports), second.name) == (count, "second")
    for file in first.iterdir():
        assert (second / file.name).samefile(file)

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    third = folder_of_gguf(path, tmp_path / "cache", name="third")
    assert len(reports) > count
    for file in first.iterdir():
        assert (third / file.name).read_bytes() == file.read_bytes()
    assert not list((tmp_path / "cache" / "gguf").glob(".*"))


def test_the_loss_of_bfloat16_is_measured(
    tmp_path: Path, reports: list[ConversionReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small_model(tmp_path / "a.gguf")
    exact = folder_of_gguf(path, tmp_path / "exact")
    monkeypatch.setattr(gguf_folder, "MAX_FLOAT32_BYTES", 0)
    folder_of_gguf(path, tmp_path / "rounded")
    assert reports[-1].written_type == "bfloat16"
    from safetensors.numpy import load_file

    values = np.concatenate(
        [one.ravel() for one in load_file(exact / "model.safetensors").values()]
    ).astype(np.float64)
    bits = values.astype(np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    loss = np.linalg.norm(rounded - values) / np.linalg.norm(values)
    assert reports[-1].relative_error == pytest.approx(loss, rel=1e-4)


def test_parts_of_any_size_give_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_blocks(tmp_path / "a.gguf", gguf.GGMLQuantizationType.Q4_K)
    whole = folder_of_gguf(path, tmp_path / "whole")
    monkeypatch.setattr(gguf_folder, "_VALUES_AT_ONCE", 700)
    parts = folder_of_gguf(path, tmp_path / "parts")
    for file in whole.iterdir():
        assert (parts / file.name).read_bytes() == file.read_bytes()


def test_a_full_disk_is_said_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_small_model(tmp_path / "a.gguf")
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(OSError, match=r"takes 0 MiB, but .* has 1 MiB free"):
        folder_of_gguf(path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_disk_that_fills_up_is_named_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_to_sync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = write_small_model(tmp_path / "a.gguf")
    monkeypatch.setattr(os, "fsync", fail_to_sync)
    with pytest.raises(OSError, match=r"a\.gguf: the disk of .* became full .* XDG_CACHE_HOME"):
        folder_of_gguf(path, tmp_path / "cache")
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def interrupt_after(tensors: int) -> Callable[[ConversionReport], None]:
    def observe(report: ConversionReport) -> None:
        if report.done_tensors == tensors:
            raise KeyboardInterrupt

    return observe


@pytest.mark.parametrize("tensors", [0, 1, 11])
def test_an_interrupted_conversion_leaves_nothing(tmp_path: Path, tensors: int) -> None:
    path = write_small_model(tmp_path / "a.gguf")
    watch_conversions(interrupt_after(tensors))
    try:
        with pytest.raises(KeyboardInterrupt):
            folder_of_gguf(path, tmp_path / "cache")
    finally:
        watch_conversions(None)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


@pytest.mark.parametrize("tensors", [0, 5, 11])
def test_two_conversions_at_once_make_one_good_folder(tmp_path: Path, tensors: int) -> None:
    """The second one runs whole while the first one is at some tensor."""
    path, cache = write_small_model(tmp_path / "a.gguf"), tmp_path / "cache"
    inner = list[Path]()

    def observe(report: ConversionReport) -> None:
        if report.done_tensors == tensors and report.folder is None:
            watch_conversions(None)
            inner.append(folder_of_gguf(path, cache))

    watch_conversions(observe)
    outer = folder_of_gguf(path, cache)
    alone = folder_of_gguf(path, tmp_path / "alone")
    assert inner == [outer]
    assert {one.name: one.read_bytes() for one in outer.iterdir()} == {
        one.name: one.read_bytes() for one in alone.iterdir()
    }
    assert [one.name for one in (cache / "gguf").iterdir()] == [outer.parent.name]


def test_work_folders_of_killed_processes_are_deleted(tmp_path: Path) -> None:
    path, folders = write_small_model(tmp_path / "a.gguf"), tmp_path / "cache" / "gguf"
    for name, age_s in ((".gguf-old", 8000.0), (".gguf-new", 0.0)):
        (folders / name).mkdir(parents=True)
        (folders / name / "model.safetensors").write_bytes(b"half")
        at_s = path.stat().st_mtime - age_s
        for one in (folders / name / "model.safetensors", folders / name):
            os.utime(one, (at_s, at_s))
    folder_of_gguf(path, tmp_path / "cache")
    assert [one.name for one in folders.glob(".*")] == [".gguf-new"]
