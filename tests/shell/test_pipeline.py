"""Layers on several stages, in turn in this process or as real ones: tokens and bits of a target of
one process, and what happens when a stage ends or hangs.

As a program, ``python -m tests.shell.test_pipeline FOLDER:STAGES ...``, it compares tokens and bits
on real stages, which share torch's process group, of which a process has one; it prints a line for
each check that held.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors import safe_open

from edgespec.core.device.memory import MachineMemory
from edgespec.core.ports import PassRequest, PassResult, TargetLostError
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import pipeline, pipeline_stage
from edgespec.verifier.targets.kv_pool import PoolBudget
from edgespec.verifier.targets.pipeline import (
    PipelineTarget,
    StageOptions,
    StageProcesses,
    pipeline_target,
)
from edgespec.verifier.targets.pipeline_stage import PipelineError, StageShare
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell import torch_schedules as schedules
from tests.shell.family_models import FAMILY_MODELS, family_model
from tests.shell.live_verifier import python, ready, start
from tests.shell.test_cli_processes import first_line, rest, rest_of
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint

QUICK = ("gemma2", "granite", "gpt_oss")
"""Windows and soft caps; a scale of its own on the embedding; experts, windows and sinks."""
WITHIN_S = 500
COUNT = 120


class InTurn(StageShare):
    """Hands hidden states over through lists, by the rank that they are for."""

    def __init__(self, rank: int, world_size: int, sent: dict[int, list[torch.Tensor]]) -> None:
        super().__init__(rank, world_size, lambda: None)
        self._sent = sent

    def agreed(self, yes: bool) -> bool:
        return yes

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        hidden = self._sent[self.rank].pop(0)
        assert hidden.shape == (1, rows, width)
        assert hidden.dtype == dtype
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        self._sent[(self.rank + 1) % self.world_size].append(hidden.clone())


class StagedInTurn:
    """``ports.TargetModel`` over ``stages`` parts of the model in ``folder``. Whoever runs a pass
    runs it on the first one first and on the last, which chooses the tokens, last."""

    def __init__(self, folder: Path, stages: int, **options: Any) -> None:
        self._sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(stages)}
        self.stages = [
            schedules.torch_target(folder, share=InTurn(rank, stages, self._sent), **options)
            for rank in [*range(1, stages), 0]
        ]
        self.last = self.stages[-1]
        self.info, self.cache = self.last.info, self.last.cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._each(lambda stage: stage.open(key, prompt_length, sampling, text))

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        for stage in self.stages[:-1]:
            stage.run_pass(batch)
        return self.last.forward(batch)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._each(lambda stage: stage.keep(key, nodes))

    def close(self, key: str) -> None:
        self._each(lambda stage: stage.close(key))

    def _each(self, call: Callable[[TorchTarget], None]) -> None:
        for stage in self.stages:
            call(stage)


@pytest.mark.parametrize(
    "family",
    [
        family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILY_MODELS
    ],
)
def test_stages_give_the_tokens_of_one_process(family: str, tmp_path: Path) -> None:
    """Sessions of all kinds of sampling, with ragged trees, rollbacks and shared beginnings."""
    family_model(family, **_three_layers(family)).save_pretrained(tmp_path)
    one = schedules.torch_target(tmp_path, canonical=False)
    staged = StagedInTurn(tmp_path, 3, canonical=False)
    assert staged.info == one.info
    schedules.Serving(one, staged, seed=family, samplings=schedules.SAMPLINGS).run(100)


def _three_layers(family: str) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    more = {"layer_types": kinds} if family in ("gemma3_text", "gpt_oss", "qwen2") else {}
    return {"num_hidden_layers": 3, **more}


def test_canonical_stages_give_the_bits_of_one_process(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_hidden_layers=3)
    folder = write_checkpoint(tmp_path / "model", config)
    one = schedules.torch_target(folder, canonical=True)
    staged = StagedInTurn(folder, 2, canonical=True)
    assert all(stage.canonical for stage in staged.stages)
    logits = [schedules.recorded(target) for target in (one, staged.last)]

    def same_bits() -> None:
        assert torch.equal(*(each[-1] for each in logits))

    schedules.Serving(one, staged, same_bits, seed=2).run(60)


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
        processes.loss.add_done_callback(lambda loss: told.append(loss.result()))
        processes.start()
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


class InjectedError(RuntimeError):
    """Of the last stage alone, behind what it has received."""


def fail(*_: object) -> None:
    raise InjectedError


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, count = argument.rsplit(":", 1)
        folder = Path(name)
        staged, one = schedules.Recorder(folder, stages=int(count)), schedules.Recorder(folder)
        target = staged.target
        assert isinstance(target, PipelineTarget)
        assert target.canonical
        assert target.info == one.target.info
        assert target._pool.data.shape[1] < one.target._pool.data.shape[1]

        def same_bits(one: schedules.Recorder = one, staged: schedules.Recorder = staged) -> None:
            assert torch.equal(one.logits, staged.logits)

        rng = random.Random(folder.name)
        schedules.Serving(
            one.target, target, same_bits, seed=folder.name, samplings=schedules.SAMPLINGS
        ).run(150)
        sys.stdout.write(f"{folder.name} equal\n")
        for length in (5, 40):
            schedules.check_random_schedule(rng, staged, length)
        sys.stdout.write(f"{folder.name} bits\n")
        again = PassRequest("again", 0, (1, 2, 3))
        for each in (target, one.target):
            each.open("again", 3, schedules.GREEDY)
        hook = target._model.model.norm.register_forward_pre_hook(fail)
        with contextlib.suppress(InjectedError):
            target.forward([again])
        hook.remove()
        assert target.forward([again]) == one.target.forward([again])
        same_bits()
        sys.stdout.write(f"{folder.name} again\n")
        target.close_stages()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3", num_hidden_layers=3)
    return write_checkpoint(tmp_path_factory.mktemp("models") / "qwen3", config)


@pytest.mark.slow
def test_stages_give_the_texts_and_the_bits_of_one_process(folder: Path) -> None:
    family_model("gemma2").save_pretrained(folder.parent / "gemma2")
    models = f"{folder}:3", f"{folder.parent / 'gemma2'}:2"
    done = python("-m", "tests.shell.test_pipeline", *models)
    assert done.returncode == 0, done.stderr
    names = [
        f"{name} {check}" for name in ("qwen3", "gemma2") for check in ("equal", "bits", "again")
    ]
    assert done.stdout.split("\n")[:-1] == names


@contextlib.contextmanager
def stage_verifier(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Killed in the end, if it has not ended before."""
    where = ("--port", "0", "--device", "cpu", "--pass-ms", "25", "--set", "drain_s=3600")
    process = start("verifier", "--model", str(folder), *where, *options)
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def all_ready(
    *processes: subprocess.Popen[str],
) -> Iterator[list[tuple[str, subprocess.Popen[str]]]]:
    """Started side by side, waited for together."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ready(process)) for process in processes]


def other_stages(verifier: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(verifier.pid).children(recursive=True)


def generating(folder: Path, *addresses: str) -> subprocess.Popen[str]:
    where = [word for address in addresses for word in ("--verifier", address)]
    draft = ("--draft", "lookup", "--set", f"tokenizer={folder}")
    much = ("-n", str(COUNT), "--set", "sampling.ignore_eos=true", "--json")
    return start("generate", "the quick brown fox jumps over", *where, *draft, *much)


def tokens_of(lines: list[str]) -> list[int]:
    return [token for line in lines for token in json.loads(line)["tokens"]]


@pytest.mark.slow
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


@pytest.mark.slow
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
