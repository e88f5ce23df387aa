"""Optimum in a process of its own. Oracles: our own exporter's draft of the same checkpoint; the
process table.

The exporter is a stand-in (``fake_exporter.py``) that writes a graph with Optimum's signature. The
real one is tried where ``OPTIMUM_PYTHON`` names an interpreter that has it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.foreign_drafter import ForeignDrafter
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import WORK_PREFIX, export_draft
from edgespec.device.export.optimum import _readable_by_transformers_4
from edgespec.device.model_drafter import foreign_drafter
from edgespec.models.draft_sources import find_draft
from edgespec.models.folders import model_info
from tests.shell.foreign_graphs import concatenating_graph
from tests.shell.live_verifier import start
from tests.shell.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from tests.sources import ROOT

WITHIN_S = 150.0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exporters") / "source"
    config = tiny_config(rope_theta=1000.0)  # as transformers 4 has it
    write_checkpoint(folder, config, tiny_tensors(config, 0))
    # transformers 5 wants special tokens as texts here.
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|end|>"}))
    return folder


def interpreter(mode: str, folder: Path) -> Path:
    """An executable that passes for a Python with Optimum."""
    graph = folder / "graph.onnx"
    onnx.save_model(concatenating_graph(), graph)
    path = folder / "python"
    program = ROOT / "tests" / "shell" / "fake_exporter.py"
    words = " ".join(f"'{one}'" for one in (sys.executable, program, mode, graph))
    path.write_text(f'#!/bin/sh\nexec {words} -- "$@"\n')
    path.chmod(0o755)
    return path


def export(source: Path, out: Path, python: Path, *options: str, by: str = "optimum") -> Result:
    given = ("--exporter", by, "--exporter-python", str(python), *options)
    return CliRunner().invoke(app, ["export", str(source), str(out), *given])


def continued(drafter: OnnxDrafter | ForeignDrafter, count: int = 24) -> list[int]:
    """The draft's own greedy text, with a rollback at each step."""
    text = [5, 6, 7]
    drafter.begin(3, SamplingParams())
    done = 0
    while len(text) < count:
        step = drafter.step(done, text[done:], 1)
        drafter.step(len(text), [9], 1)  # a guess that was wrong
        done = len(text)
        text.append(step[0].token)
    drafter.close()
    return text


def check_same_text(source: Path, out: Path, bits: int) -> None:
    own = out.parent / f"own-{bits}"
    export_draft(source, own, model_info(source), bits=bits)
    foreign = foreign_drafter(find_draft(str(out)), lambda text: None)
    assert continued(foreign) == continued(OnnxDrafter(own))


def test_the_graph_of_another_exporter_drafts_the_same(source: Path, tmp_path: Path) -> None:
    python, out = interpreter("good", tmp_path), tmp_path / "out"
    result = export(source, out, python, "--bits", "32")
    assert result.exit_code == 0, result.output
    assert "2 layers by Optimum, 32 bits" in result.stdout
    check_same_text(source, out, 32)


@pytest.mark.parametrize("bits", [4, 8])
def test_its_matrices_are_rounded_as_ours(bits: int, source: Path, tmp_path: Path) -> None:
    python, out = interpreter("good", tmp_path), tmp_path / "out"
    result = export(source, out, python, "--bits", str(bits))
    assert result.exit_code == 0, result.output
    model = onnx.load(out / "model.onnx")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MatMulNBits") == 2 * 7 + 1
    assert kinds.count("GatherBlockQuantized") == 1
    sizes = [max(tensor.dims, default=0) for tensor in model.graph.initializer if tensor.dims]
    assert max(sizes) <= 320
    assert not [
        one
        for one in model.graph.initializer
        if one.data_type == 1 and 320 in one.dims and 64 in one.dims
    ]  # no table of floats is left


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (
            "fails",
            "the exporter failed (exit code 3):\n  loading the model\n  tracing[31m it\n"
            "  ValueError: this family is unknown here",
        ),
        (
            "bare",
            "\n  run: python -m venv optimum-env && optimum-env/bin/pip install optimum==2.1.0",
        ),
        ("empty", "Optimum wrote no single decoder graph, but: config.json"),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_nothing(
    mode: str, message: str, source: Path, tmp_path: Path
) -> None:
    python, out = interpreter(mode, tmp_path), tmp_path / "out"
    result = export(source, out, python, "--bits", "32")
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))


@pytest.mark.parametrize(
    ("options", "by", "message"),
    [
        ((), "nobody", "--exporter is 'nobody', but must be edgespec or optimum"),
        (("--kv-type", "int8"), "optimum", "--trained-length are of our own exporter only"),
        (("--bits", "5"), "optimum", "bits is 5, but must be one of (4, 8, 32)"),
        ((), "optimum", "nowhere/python: No such file"),
    ],
)
def test_wrong_usage_is_told(
    options: tuple[str, ...], by: str, message: str, source: Path, tmp_path: Path
) -> None:
    result = export(source, tmp_path / "out", Path("nowhere/python"), *options, by=by)
    assert result.exit_code in (1, 2)
    assert message in result.stderr


def test_a_newer_config_is_handed_on_in_older_words(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    with _readable_by_transformers_4(source) as folder:
        assert folder != source
        older = json.loads((folder / "config.json").read_text())
        assert older == config | {"rope_theta": 1000.0, "rope_scaling": None}
        assert (folder / "model.safetensors").samefile(source / "model.safetensors")
    assert not folder.exists()
    assert (source / "model.safetensors").is_file()
    scaled = {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0}
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": scaled}))
    with _readable_by_transformers_4(source) as folder:
        older = json.loads((folder / "config.json").read_text())
        assert (older["rope_theta"], older["rope_scaling"]) == (
            5e5,
            {"rope_type": "yarn", "factor": 4.0},
        )
    told = config | {"rope_theta": 1000.0}
    (source / "config.json").write_text(json.dumps(told))
    with _readable_by_transformers_4(source) as folder:
        assert folder == source


def test_rotations_that_have_no_older_words_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    by_layer = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    (source / "config.json").write_text(json.dumps(config | {"rope_parameters": by_layer}))
    result = export(source, tmp_path / "out", interpreter("good", tmp_path))
    assert result.exit_code == 1
    assert "has rope_parameters without one rope_theta for all layers" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_exporter_and_all_it_started(
    number: signal.Signals, source: Path, tmp_path: Path
) -> None:
    python, pids = interpreter("hangs", tmp_path), tmp_path / "pids"
    given = ("--exporter", "optimum", "--exporter-python", str(python))
    with start("export", str(source), str(tmp_path / "out"), *given) as process:
        try:
            _wait_for(pids.exists)
            process.send_signal(number)
            assert process.wait(WITHIN_S) == 128 + number
        finally:
            process.kill()
    _wait_for(lambda: not any(_lives(int(pid)) for pid in pids.read_text().split()))
    assert not list(tmp_path.glob(f"{WORK_PREFIX}*"))


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _wait_for(done: Callable[[], bool]) -> None:
    until, pause = time.monotonic() + WITHIN_S, threading.Event()
    while not done():
        assert time.monotonic() < until
        pause.wait(0.02)


@pytest.mark.slow
def test_the_real_optimum_drafts_the_same(source: Path, tmp_path: Path) -> None:
    python = os.environ.get("OPTIMUM_PYTHON")
    if python is None:
        pytest.skip("OPTIMUM_PYTHON names no interpreter that has Optimum")
    result = export(source, tmp_path / "out", Path(python), "--bits", "32")
    assert result.exit_code == 0, result.output
    check_same_text(source, tmp_path / "out", 32)
