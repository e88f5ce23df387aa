"""Two real ranks: the same texts as one, and every way in which one of the processes can end.

Oracles: a target of one rank; the text of a verifier that nothing happens to. Each test loads torch
in several processes, so all are slow.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.shell.live_ranks import (
    COUNT,
    all_ready,
    generating,
    other_ranks,
    rank_verifier,
    tokens_of,
)
from tests.shell.live_verifier import environment
from tests.shell.test_cli_processes import first_line, rest, rest_of
from tests.sources import ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("ml_dtypes")

from tests.shell.family_models import family_model
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint

pytestmark = pytest.mark.slow
WITHIN_S = 500


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The vocabulary of the second is not divided by two; its projection is not tied. The third
    has windows and soft caps."""
    base = tmp_path_factory.mktemp("models")
    family_model("gemma2").save_pretrained(base / "gemma2")
    odd = tiny_config("llama", vocab_size=327, tie_word_embeddings=False, attention_bias=True)
    return [
        write_checkpoint(base / "qwen3", tiny_config("qwen3")),
        write_checkpoint(base / "llama", odd),
        base / "gemma2",
    ]


def test_two_ranks_give_the_texts_and_the_bits_of_one(folders: list[Path]) -> None:
    program = [sys.executable, "-m", "tests.shell.tensor_parallel_texts", *map(str, folders)]
    done = subprocess.run(
        program, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=WITHIN_S
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [
        f"{folder.name} {check}"
        for folder in folders
        for check in ("equal", "constrained", "bits", "refused")
    ]


def test_a_rank_that_is_killed_costs_no_text(folders: list[Path]) -> None:
    with (
        _two_ranks(folders[0]) as one,
        _one_rank(folders[0]) as other,
        all_ready(one, other) as both,
    ):
        (shared, verifier), (alone, _) = both
        with generating(folders[0], alone) as device:
            expected = tokens_of(rest_of(device)[0].splitlines())
        [rank] = other_ranks(verifier)
        with generating(folders[0], shared, alone) as device:
            lines = [first_line(device)]
            rank.kill()
            out, err = rest_of(device)
        assert device.returncode == 0, err
        assert tokens_of([*lines, *out.splitlines()]) == expected
        assert len(expected) == COUNT
        assert verifier.wait(WITHIN_S) == 1
        assert f"rank 1 (process {rank.pid}) was killed by signal 9" in rest(verifier.stderr)


def test_however_rank_0_ends_no_rank_is_left(folders: list[Path]) -> None:
    with _two_ranks(folders[0]) as one, _two_ranks(folders[0]) as two, all_ready(one, two) as both:
        (_, killed), (address, drained) = both
        ranks = [rank for _, process in both for rank in other_ranks(process)]
        assert len(ranks) == 2
        killed.kill()
        with generating(folders[0], address) as device:
            lines = [first_line(device)]
            # As a service manager and a terminal do it: all processes are asked to stop.
            ranks[1].terminate()
            ranks[1].send_signal(signal.SIGINT)
            drained.send_signal(signal.SIGTERM)
            out, err = rest_of(device)
        assert device.returncode == 0, err
        assert len(tokens_of([*lines, *out.splitlines()])) == COUNT
        assert drained.wait(WITHIN_S) == 0
        assert not psutil.wait_procs(ranks, timeout=WITHIN_S)[1]


def test_a_rank_that_hangs_ends_the_verifier(folders: list[Path], tmp_path: Path) -> None:
    config = tmp_path / "hangs.yaml"
    config.write_text("tensor_parallel: {size: 2, pass_within_s: 2}")
    with (
        rank_verifier(folders[0], "--config", str(config)) as process,
        all_ready(process) as [(at, _)],
    ):
        [rank] = other_ranks(process)
        rank.suspend()
        with generating(folders[0], at) as device:
            assert process.wait(WITHIN_S) == 1
            device.kill()
        assert "pass 1 was not done after 2 s" in rest(process.stderr)
        assert not psutil.wait_procs([rank], timeout=WITHIN_S)[1]


def _two_ranks(folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return rank_verifier(folder, "--tensor-parallel-size", "2")


def _one_rank(folder: Path) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    return rank_verifier(folder)
