"""Layers on real stages: the texts of one process, and what happens when a stage ends or hangs.

Oracles: a target of one process; the text of a verifier that nothing happens to. Each test loads
torch in several processes, so all are slow. What needs no processes is in test_pipeline_stages.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.shell.live_stages import (
    COUNT,
    all_ready,
    generating,
    other_stages,
    stage_verifier,
    tokens_of,
)
from tests.shell.live_verifier import environment
from tests.shell.test_cli_processes import first_line, rest, rest_of
from tests.sources import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ml_dtypes")

from tests.shell.family_models import family_model
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint

pytestmark = pytest.mark.slow
WITHIN_S = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3", num_hidden_layers=3)
    return write_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", config)


def test_stages_give_the_texts_and_the_bits_of_one_process(folder: Path) -> None:
    family_model("gemma2").save_pretrained(folder.parent / "gemma2")
    program = [sys.executable, "-m", "tests.shell.pipeline_texts"]
    done = subprocess.run(
        [*program, f"{folder}:3", f"{folder.parent / 'gemma2'}:2"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    names = [
        f"{name} {check}" for name in ("qwen3", "gemma2") for check in ("equal", "bits", "again")
    ]
    assert done.stdout.split("\n")[:-1] == names


def test_a_stage_that_is_killed_costs_no_text(folder: Path) -> None:
    delayed = ("--set", "pipeline.stages=2", "--set", "pipeline.delay_ms=3")
    with (
        stage_verifier(folder, *delayed) as one,
        stage_verifier(folder) as other,
        all_ready(one, other) as [(staged, verifier), (alone, _)],
    ):
        with generating(folder, alone) as device:
            expected = tokens_of(rest_of(device)[0].splitlines())
        [stage] = other_stages(verifier)
        with generating(folder, staged, alone) as device:
            lines = [first_line(device)]
            stage.kill()
            out, err = rest_of(device)
        assert device.returncode == 0, err
        assert tokens_of([*lines, *out.splitlines()]) == expected
        assert len(expected) == COUNT
        assert verifier.wait(WITHIN_S) == 1
        assert f"stage 1 (process {stage.pid}) was killed by signal 9" in rest(verifier.stderr)


def test_however_the_verifier_ends_no_stage_is_left(folder: Path) -> None:
    two = ("--set", "pipeline.stages=2")
    with (
        stage_verifier(folder, *two) as one,
        stage_verifier(folder, *two) as other,
        all_ready(one, other) as [(_, killed), (address, drained)],
    ):
        stages = [*other_stages(killed), *other_stages(drained)]
        assert len(stages) == 2
        killed.kill()
        with generating(folder, address) as device:
            lines = [first_line(device)]
            # As a service manager and a terminal do it: all processes are asked to stop.
            stages[1].terminate()
            stages[1].send_signal(signal.SIGINT)
            drained.send_signal(signal.SIGTERM)
            out, err = rest_of(device)
        assert device.returncode == 0, err
        assert len(tokens_of([*lines, *out.splitlines()])) == COUNT
        assert drained.wait(WITHIN_S) == 0
        assert not psutil.wait_procs(stages, timeout=WITHIN_S)[1]


def test_a_stage_that_is_silent_ends_the_verifier(folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "silent.yaml"
    config.write_text("pipeline: {stages: 3, pass_within_s: 2}")
    with (
        stage_verifier(folder, "--config", str(config)) as process,
        all_ready(process) as [(address, _)],
    ):
        stages = other_stages(process)
        assert len(stages) == 2
        stages[1].suspend()
        with generating(folder, address) as device:
            assert process.wait(WITHIN_S) == 1
            device.kill()
        assert "was not done after 2 s (pipeline.pass_within_s)" in rest(process.stderr)
        assert not psutil.wait_procs(stages, timeout=WITHIN_S)[1]
