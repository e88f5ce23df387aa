"""Whether passes are recorded at all: a self-test decides, and nobody is refused a start.

Oracle: the plain path's logits. On a CPU tapes stand for CUDA graphs (``taped_passes.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.batch_rows import lay_out
from edgespec.verifier.targets.graph_choice import GraphChoice
from edgespec.verifier.targets.graph_self_test import graphs_disagree
from edgespec.verifier.targets.loading import load_model
from edgespec.verifier.targets.static_pass import bucket_of
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.backend_schedules import Serving
from tests.shell.taped_passes import Tape, TapeRecorder, plain_target, taped
from tests.shell.tiny_checkpoints import write_checkpoint

GREEDY = SamplingParams()


def _choice(target: TorchTarget, recorder: TapeRecorder, **options: Any) -> GraphChoice:
    graphs = taped(target, recorder)
    target._graphs = None
    loaded = load_model(str(_folder(target)), device="cpu")
    return GraphChoice(
        loaded,
        options.pop("attention", target._attention),
        graphs._call,
        target._run,
        4,
        wanted=True,
        recorder=lambda device, limit_bytes: recorder,
        **options,
    )


def _folder(target: TorchTarget) -> Path:
    return Path(target._model.config._name_or_path)


def test_what_passes_its_self_test_is_chosen_and_measured(tmp_path: Path) -> None:
    target, recorder = plain_target(write_checkpoint(tmp_path / "tiny")), TapeRecorder()
    choice = _choice(target, recorder)
    free = target.free_tokens
    limit = choice.measure(target._pool, 64)
    assert limit > recorder.used_bytes > 0
    assert (choice.limit_bytes, choice.why_not) == (limit, "")
    passes = choice.choose(target._pool)
    assert passes is not None
    assert passes.replayed > 10
    assert passes.eager_first
    assert target.free_tokens == free
    assert target._pool.session_count == 0


def test_a_largest_pass_that_cannot_be_recorded_leaves_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, counted = write_checkpoint(tmp_path / "tiny"), TapeRecorder()
    target = plain_target(folder)
    assert _choice(target, counted).choose(target._pool) is not None
    choice = _choice(target, TapeRecorder(fail=counted.made + 1, wrecked=True))
    assert choice.measure(target._pool, 64) == 0
    assert choice.choose(target._pool) is None
    assert target._pool.session_count == 0
    assert caplog.text.count("without CUDA graphs, so slower: RuntimeError: operation not") == 1


class _Stale(TapeRecorder):
    """What is repeated does nothing."""

    def record(self, work: Any) -> Tape:
        super().record(work)
        return Tape()


def test_passes_that_repeat_wrongly_are_found_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = plain_target(write_checkpoint(tmp_path / "tiny"))
    assert _choice(target, _Stale()).choose(target._pool) is None
    assert "logits differ from the plain path's" in caplog.text
    assert "passes run without CUDA graphs, so slower" in caplog.text


def test_what_cannot_be_recorded_is_told_and_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = plain_target(write_checkpoint(tmp_path / "tiny"))
    recorder = TapeRecorder(fail=1)
    choice = _choice(target, recorder)
    assert choice.measure(target._pool, 64) == 0
    assert choice.choose(target._pool) is None
    assert recorder.made == 1
    assert caplog.text.count("operation not permitted") == 2  # as it fails, and as it is dropped
    grouped = _choice(target, TapeRecorder(), attention=plain_target(_folder(target))._attention)
    assert grouped.choose(target._pool) is None
    assert grouped.why_not == "attention is grouped, but only the paged kernel is recorded"


def test_without_room_for_the_self_test_nothing_is_recorded(tmp_path: Path) -> None:
    target = plain_target(write_checkpoint(tmp_path / "tiny"), max_cached_tokens=64)
    passes = taped(target)
    why = graphs_disagree(passes, target._pool, target._run, 90, torch.float32)
    assert why == "64 free tokens, 160 needed for the self-test"


def test_on_a_cpu_nothing_is_recorded_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = plain_target(write_checkpoint(tmp_path / "tiny"))
    assert target._graphs is None
    assert "graphs" not in target.mode + caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_captured_passes_agree_with_the_plain_path(dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny")
    target = plain_target(folder, device="cuda", dtype=dtype)
    assert target._graphs is not None
    assert "CUDA graphs" in target.mode
    batch = [PassRequest(key, 0, (1, 2, 3)) for key in "ab"]
    for key in "ab":
        target.open(key, 1, GREEDY)
    rows = lay_out(target._pool, batch)
    assert bucket_of(rows, target._attention) is not None  # type: ignore[arg-type]
    before = target._graphs.replayed
    for _ in range(3):
        target.forward(batch)
    assert target._graphs.replayed > before


@pytest.mark.gpu
def test_on_a_gpu_random_serving_gives_the_logits_of_the_reference(tmp_path: Path) -> None:
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=1, device="cuda")
    serving.targets[1]._graphs = None
    graphs = serving.targets[0]._graphs
    assert graphs is not None
    graphs.eager_first = False
    while serving.rows < 700:
        serving.step()
    assert graphs.why_not == ""
    assert graphs.replayed > 15
