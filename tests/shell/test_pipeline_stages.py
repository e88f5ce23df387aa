"""Layers on several stages, run in turn in this process: the tokens and the logits of one process.

Oracles: a target that holds all layers; its checkpoint's list of tensors. What goes between real
processes is in test_pipeline_processes.py.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("ml_dtypes")

import torch
from safetensors import safe_open

from edgespec.config import VerifierConfig
from edgespec.config.verifier import PipelineSection
from edgespec.core.device.memory import MachineMemory
from edgespec.core.ports import PassRequest, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import pipeline, pipeline_stage
from edgespec.verifier.targets.pipeline import StageOptions, StageProcesses, pipeline_target
from edgespec.verifier.targets.pipeline_stage import PipelineError, StageShare
from edgespec.verifier.targets.pool_size import PoolBudget
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.family_models import FAMILY_MODELS, family_model
from tests.shell.staged_in_turn import StagedInTurn
from tests.shell.target_schedules import compare
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint

QUICK = ("gemma2", "granite", "gpt_oss")
"""Windows and soft caps; a scale of its own on the embedding; experts, windows and sinks."""


def _whole(folder: Path, **options: Any) -> TorchTarget:
    return TorchTarget(
        str(folder),
        name="tiny",
        vocabulary="v",
        device="cpu",
        max_cached_tokens=2048,
        **options,
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Canonical mode sets it for the process."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILY_MODELS
    ],
)
def test_stages_give_the_tokens_of_one_process(family: str, tmp_path: Path) -> None:
    """Several sessions of all kinds of sampling, with ragged trees, rollbacks and kept paths."""
    family_model(family, **_three_layers(family)).save_pretrained(tmp_path)
    one = _whole(tmp_path, canonical=False)
    staged = StagedInTurn(tmp_path, 3, canonical=False)
    assert staged.info == one.info
    compare(one, staged, random.Random(family), rounds=6)


def _three_layers(family: str) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"layer_types": kinds} if family in ("gemma3_text", "gpt_oss", "qwen2") else {}
    return {"num_hidden_layers": 3, **more}


def test_canonical_stages_give_the_bits_of_one_process(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_hidden_layers=3)
    folder = write_checkpoint(tmp_path / "model", config)
    one = _whole(folder, canonical=True)
    staged = StagedInTurn(folder, 2, canonical=True)
    assert all(stage.canonical for stage in staged.stages)
    for target in (one, staged):
        target.open("a", 40, SamplingParams())
        target.open("b", 3, SamplingParams())
    text = tuple(range(40))
    for batch in (
        [PassRequest("a", 0, text, (7, 8, 9), (-1, 0, 0)), PassRequest("b", 0, (1, 2, 3))],
        [PassRequest("a", 17, text[17:20], (7, 8, 9, 10, 11), (-1, 0, 1, 2, 0))],
    ):
        assert torch.equal(one.run_pass(batch), staged.run_pass(batch))


# --- who holds what -------------------------------------------------------------------------


def test_a_stage_holds_its_own_tensors_and_cache_alone(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_hidden_layers=5, tie_word_embeddings=False)
    folder = write_checkpoint(tmp_path / "model", config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        wanted = set(file.keys())
    staged = StagedInTurn(folder, 3, canonical=False)
    held = [{name for name, _ in stage._model.named_parameters()} for stage in staged.stages]
    assert set.union(*held) == wanted
    assert sum(map(len, held)) == len(wanted)
    assert "model.embed_tokens.weight" in held[0]
    assert {"model.norm.weight", "lm_head.weight"} <= held[2]
    assert [stage._pool.data.shape[1] for stage in staged.stages] == [2, 2, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": 4}, "pipeline.stages is 4, but the model has 2 layers"),
        ({"device": "cuda"}, "device is 'cuda', but with pipeline.stages 2 must be auto or cpu"),
        ({"quantize": "int8"}, "quantize is 'int8', but pipeline.stages 2 cuts plain weights"),
        (
            {"pool_budget": PoolBudget(None, 0.9, 64, lambda: MachineMemory(1, 1, 1))},
            "pipeline.stages is 2; give limits.max_cached_tokens instead",
        ),
    ],
)
def test_what_does_not_go_with_stages_is_refused(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(PipelineError, match=message):
        pipeline_target(str(folder), **{"stages": 2, **options}, name="tiny", vocabulary="v")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "vllm"}, "pipeline.stages is 2, but only the native engine has stages"),
        ({"model": "toy"}, "pipeline.stages is 2, but the toy model has no layers"),
    ],
)
def test_settings_that_exclude_stages_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VerifierConfig(pipeline=PipelineSection(2), **settings)


# --- the links ------------------------------------------------------------------------------


@pytest.mark.parametrize(("idle_s", "slept"), [(0.01, [0.04]), (0.05, [0.0]), (0.2, [0.0])])
def test_hidden_states_are_usable_when_the_delay_has_passed_since_they_left(
    idle_s: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the receiver did meanwhile; the last stage of two takes from rank 1."""
    line: list[tuple[int, torch.Tensor]] = []
    now_s: list[float] = [100.0]
    naps_s: list[float] = []

    def recv(tensor: torch.Tensor, source: int) -> None:
        assert source == 1
        tensor.copy_(line.pop(0)[1])

    links = SimpleNamespace(send=lambda tensor, goal: line.append((goal, tensor)), recv=recv)
    clock = SimpleNamespace(monotonic=lambda: now_s[0], sleep=naps_s.append)
    monkeypatch.setattr(pipeline_stage, "distributed", links)
    monkeypatch.setattr(pipeline_stage, "time", clock)
    first, last = (StageShare(rank, 2, lambda: None, delay_s=0.05) for rank in (1, 0))
    hidden = torch.arange(24.0).view(1, 3, 8)
    first.send(hidden)
    assert [goal for goal, _ in line] == [0, 0]
    now_s[0] += idle_s
    assert torch.equal(last.receive(3, 8, torch.float32), hidden)
    assert naps_s == pytest.approx(slept)


# --- the processes --------------------------------------------------------------------------

SAYS_READY = """
import sys, time
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[1]))
assert link.recv()[0] == 1
link.send("")
"""


def _processes(
    program: str, within_s: float = 300.0
) -> contextlib.AbstractContextManager[StageProcesses]:
    """One stage that is this program."""
    options = StageOptions(1, 2, 0, 0.0, {})
    command = (sys.executable, "-c", program)
    return contextlib.closing(
        StageProcesses([options], within_s, program=command, look_every_s=0.01)
    )


@pytest.mark.parametrize(
    ("program", "within_s", "why"),
    [
        ("raise SystemExit(3)", 300.0, r"stage 1 \(process \d+\) ended: code 3"),
        (
            SAYS_READY + "link.recv(); link.send('MemoryError: no room'); link.recv()",
            300.0,
            "stage 1 failed: MemoryError: no room",
        ),
        (SAYS_READY + "time.sleep(600)", 0.2, "a pass was not done after 0.2 s"),
        (SAYS_READY + "link.recv(); link.recv()", 300.0, "in a pass: RuntimeError: broken link"),
    ],
)
def test_a_stage_that_fails_ends_hangs_or_is_left_behind_is_lost_with_the_reason(
    program: str, within_s: float, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_WHY_WITHIN_S", 0.0 if "broken link" in why else 60.0)
    told: list[str] = []

    def serve(processes: StageProcesses) -> None:
        processes.start()
        processes.loss.add_done_callback(lambda loss: told.append(loss.result()))
        processes.wait_until_ready()
        with processes.pass_over([PassRequest("a", 0, (1,))], lambda: False):
            if "broken link" not in why:
                processes.loss.result()
            raise RuntimeError("broken link")  # as the process group does

    with _processes(program, within_s) as processes:
        with pytest.raises(TargetLostError, match=why):
            serve(processes)
        with pytest.raises(TargetLostError, match=why):
            processes.tell("close", "a")
        processes._thread.join()
        assert len(told) == 1


def test_a_stage_that_takes_no_calls_is_lost() -> None:
    with _processes(SAYS_READY + "time.sleep(600)", 0.2) as processes:
        processes.start()
        processes.wait_until_ready()
        with pytest.raises(TargetLostError, match=r"not done after 0\.2 s"):
            processes.tell("open", "a", 1, tuple(range(1 << 20)))
        assert not processes._children or processes.loss.done()


def test_stages_are_called_in_order_and_end_with_the_link() -> None:
    program = SAYS_READY + (
        "for name in ('open', 'run_pass', 'run_pass', 'keep', 'close'):\n"
        "    assert link.recv()[0] == name\n"
        "link.send(''); link.recv()"
    )
    with _processes(program) as processes:
        processes.start()
        processes.wait_until_ready()
        processes._silent, processes._ready = {1}, Future()
        processes.tell("open", "a", 1, ())
        with processes.pass_over([PassRequest("a", 0, (1,))], lambda: False):
            pass
        with (
            pytest.raises(RuntimeError, match="here alone"),
            processes.pass_over([PassRequest("a", 1, (1,))], lambda: True),
        ):
            raise RuntimeError("here alone")  # what the others sent has come: it may be tried again
        processes.tell("keep", "a", ())
        processes.tell("close", "a")
        processes.wait_until_ready()  # it has heard all five
        [child] = processes._children.values()
    assert not processes.loss.done()
    assert child.process.poll() is not None
