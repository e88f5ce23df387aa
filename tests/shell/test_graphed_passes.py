"""Recorded passes: the same logits as the plain path's, whatever comes, and a way out where not.

Oracle: the plain path with the reference attention. Recordings are tapes of torch's operations
(``taped_passes.py``), so what a replay does not bring up to date is stale and shows.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling.torch_device_copies import StagedBytes
from edgespec.verifier.targets import graphed_passes
from tests.shell.backend_schedules import Serving
from tests.shell.family_models import FAMILY_MODELS, family_model
from tests.shell.ragged_decoding import decode_beside, generated
from tests.shell.taped_passes import Tape, TapeRecorder, plain_target, taped
from tests.shell.tiny_checkpoints import write_checkpoint

GREEDY = SamplingParams()


def test_random_serving_gives_the_logits_of_the_reference(tmp_path: Path) -> None:
    """Ragged trees, rollbacks, prefix hits, evictions, growing tables, sessions that come and go;
    ``python -m tests.shell.backend_schedules --graphs`` does it for 10,000 rows."""
    folder = write_checkpoint(tmp_path / "tiny")
    for seed in (1, 2):
        serving = Serving(folder, seed)
        graphs = taped(serving.targets[0])
        graphs.eager_first = seed == 1
        while serving.rows < 700:
            serving.step()
        assert graphs.why_not == ""
        assert graphs.replayed > 10
        assert graphs.recordings > 5


def test_a_bucket_is_recorded_when_it_comes_for_the_second_time(tmp_path: Path) -> None:
    target, plain = (plain_target(write_checkpoint(tmp_path / "tiny")) for _ in range(2))
    graphs = taped(target)
    for one in (target, plain):
        one.open("a", 3, GREEDY)
        one.forward([PassRequest("a", 0, (1, 2, 3), sample=False)])  # nothing sampled: not recorded
    seen = []
    for position in range(3, 60):
        batch = [PassRequest("a", position, (position,))]
        assert target.forward(batch) == plain.forward(batch)
        seen.append((graphs.recordings, graphs.replayed))
    assert seen[:4] == [(0, 0), (1, 0), (1, 1), (1, 2)]
    assert seen[-1] == (1, 55)


def test_tables_that_outgrow_their_room_make_recordings_anew(tmp_path: Path) -> None:
    target, plain = (plain_target(write_checkpoint(tmp_path / "tiny")) for _ in range(2))
    graphs = taped(target)
    graphs.eager_first = False
    for index in range(20):  # room for 8, then for 16
        for one in (target, plain):
            one.open(f"s{index}", 1, GREEDY)
        for position in range(3):
            batch = [PassRequest(f"s{index}", position, (index + 7 * position,))]
            assert target.forward(batch) == plain.forward(batch)
    assert graphs.replayed == 3 * 20 - 3  # recorded three times, once for each room
    assert (graphs.recordings, graphs.why_not) == (1, "")


def test_a_repeated_pass_makes_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and kept nodes travel with it; only a long text that has come in goes by itself."""
    target = plain_target(write_checkpoint(tmp_path / "tiny"))
    graphs = taped(target)
    graphs.eager_first = False
    copies: list[str] = []
    send = StagedBytes.send

    def sent(self: StagedBytes, count: int) -> None:
        copies.append("staged")
        send(self, count)

    def copied(array: Any, device: torch.device) -> torch.Tensor:
        copies.append("by itself")
        return torch.from_numpy(array)

    monkeypatch.setattr(StagedBytes, "send", sent)
    for module in ("block_tables", "kv_pool", "pass_plan", "paged_attention"):
        monkeypatch.setattr(f"edgespec.verifier.targets.{module}.to_device", copied)
    keys = [f"s{index}" for index in range(6)]
    for key in keys:
        target.open(key, 1, GREEDY)
    cached = 0
    for number in range(14):
        batch = [PassRequest(key, cached, (5,), (6, 7, 8), (-1, -1, 1)) for key in keys]
        copies.clear()
        target.forward(batch)
        if number:  # the first one has made the copy of the tables
            assert copies == ["staged"], number
        for key in keys:
            target.keep(key, [1, 2])
        assert target._pool.has_moves
        cached += 3
    assert graphs.replayed == 13


def test_recording_that_fails_leaves_the_plain_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=5)
    graphs = taped(serving.targets[0], TapeRecorder(fail=3))
    while serving.rows < 500:
        serving.step()
    assert graphs.why_not == "RuntimeError: operation not permitted when stream is capturing"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "without CUDA graphs from now on, so slower: RuntimeError" in caplog.text


class _Lost(Tape):
    def replay(self) -> None:
        raise RuntimeError("out of memory at launch")


def test_a_replay_that_fails_leaves_the_plain_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=6)
    graphs = taped(serving.targets[0])
    while not graphs.replayed:
        serving.step()
    for known in graphs._recorded.values():
        known.recording = _Lost()
    rows = serving.rows
    while serving.rows < rows + 300:
        serving.step()
    assert graphs.why_not == "RuntimeError: out of memory at launch"


def test_a_full_recorder_goes_on_with_what_it_has(tmp_path: Path) -> None:
    serving = Serving(write_checkpoint(tmp_path / "tiny"), seed=7)
    graphs = taped(serving.targets[0], TapeRecorder(limit=3))
    while serving.rows < 700:
        serving.step()
    assert (graphs.why_not, graphs.recordings) == ("", 3)
    assert graphs.replayed > 0


def test_only_an_idle_recording_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed_passes, "MOST_RECORDINGS", 2)
    monkeypatch.setattr(graphed_passes, "_IDLE_PASSES", 4)
    target = plain_target(write_checkpoint(tmp_path / "tiny"))
    graphs = taped(target)
    graphs.eager_first = False
    target.open("a", 1, GREEDY)

    def run(rows: int) -> set[int]:
        target.forward([PassRequest("a", 0, tuple(range(rows)))])
        return {bucket.rows for bucket in graphs._recorded}

    assert [run(1), run(2), run(4), run(2)] == [{1}, {1, 2}, {1, 2}, {1, 2}]
    assert [run(2), run(4), run(1)] == [{1, 2}, {2, 4}, {2, 4}]


@pytest.mark.parametrize("model_type", sorted(FAMILY_MODELS))
def test_every_family_gives_the_library_s_text(model_type: str, tmp_path: Path) -> None:
    """Also where a family's work cannot be recorded, such as experts that are looked up."""
    model = family_model(model_type)
    model.save_pretrained(tmp_path)
    prompts = [list(range(3, 3 + count)) for count in (2, 9, 30)]
    texts = [generated(model, prompt, 14) for prompt in prompts]
    target = plain_target(tmp_path)
    graphs = taped(target)
    graphs.eager_first = False
    for _ in range(2):
        assert decode_beside(target, prompts, texts) == texts
    assert graphs.replayed > 4 or "waits for a value" in graphs.why_not
