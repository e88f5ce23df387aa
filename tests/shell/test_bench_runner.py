"""A whole bench over the toy models, in memory and through the command line.

Oracle: the same toy target asked without any draft. No time is looked at, only that it is there.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import GAMMAS, LentDrafter, Row
from edgespec.bench.prompts import Workload
from edgespec.bench.runner import BenchRunner, BenchSettings, Station
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, AgentOptions, GenerationError
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.models.toy import ToyTokenizer
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire.shaped import TrafficMeter
from tests.shell.loopback import LoopbackTransport
from tests.sources import ROOT

MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=3.0, eos_token=0, eos_probability=0.01)
WORKLOAD = Workload(("a", "b", "c"), ((1, 2, 3), (4, 5), (6,)), frozenset({0}))
SETTINGS = BenchSettings(
    rtts_ms=(0.0, 5.0), repeats=2, max_tokens=12, temperature=0.8, pass_ms=0.0, draft_ms=0.0
)


class Quiet:
    """``runner.Progress`` that can stop the bench after so many requests."""

    def __init__(self, stop_after: str = "", times: int = 0) -> None:
        self.said: list[str] = []
        self._stop_after, self._times = stop_after, times

    def say(self, text: str) -> None:
        self.said.append(text)

    def expect(self, total: float) -> None:
        self.left = total

    def done(self, what: str, count: float = 1.0) -> None:
        self.left -= count
        if self._stop_after and what.startswith(self._stop_after):
            self._times -= 1
            if self._times == 0:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()


class Table:
    """``runner.OpenStation`` in this process; each station has a verifier of its own."""

    def __init__(self, wrong_rtt_ms: float = -1.0) -> None:
        self.drafter = ToyDrafter(MODEL.perturbed(0.3), replace(toy_info(MODEL), vocabulary="toy"))
        self.opened: list[tuple[AgentOptions, bool, float]] = []
        self.verifiers: list[Verifier] = []
        self._wrong_rtt_ms = wrong_rtt_ms

    def __call__(self, options: AgentOptions, *, drafts: bool, rtt_ms: float) -> Station:
        self.opened.append((options, drafts, rtt_ms))
        model = replace(MODEL, seed=9) if rtt_ms == self._wrong_rtt_ms else MODEL
        verifier = Verifier(ToyTarget(model), Limits())
        self.verifiers.append(verifier)
        meter = TrafficMeter()
        transport = LoopbackTransport(verifier.serve, lambda: verifier.info, meter=meter)
        drafter = LentDrafter(self.drafter) if drafts else None
        tokenizer = ToyTokenizer()
        return Station(
            Agent(transport, drafter, tokenizer.encode, tokenizer.stream, options), meter
        )

    async def stop(self) -> None:
        for verifier in self.verifiers:
            await verifier.stop()


async def run(settings: BenchSettings, table: Table, progress: Quiet | None = None) -> BenchRunner:
    runner = BenchRunner(settings, WORKLOAD, table, progress or Quiet())
    try:
        await asyncio.create_task(runner.run())
    except asyncio.CancelledError:
        pass
    finally:
        await table.stop()
    return runner


def where(row: Row) -> tuple[object, ...]:
    return row["repeat"], row["rtt_ms"], row["arm"]


async def test_every_arm_gives_the_targets_own_tokens() -> None:
    progress = Quiet()
    runner = await run(SETTINGS, Table(), progress)
    assert progress.left == 0
    expected = [
        (repeat, rtt_ms, arm.value) for repeat in (0, 1) for rtt_ms in (0.0, 5.0) for arm in Arm
    ]
    assert [where(row) for row in runner.rows] == expected
    assert [row["mismatches"] for row in runner.rows] == [0] * len(expected)
    assert len({row["tokens"] for row in runner.rows}) == 1
    for row in runner.rows:
        assert row["requests"] == 3
        assert isinstance(row["tpot_ms_p50"], float)
        if row["arm"] == "target-only":
            assert row["drafted_nodes"] == 0, row
            assert row["tokens_per_pass"] == 1.0
        elif row["arm"] != "edgespec" and row["rtt_ms"]:
            # Passes of no time make rows dear: only who would wait for a link is sure to draft.
            assert row["drafted_nodes"] != 0, row


async def test_a_wrong_stream_is_noticed() -> None:
    settings = replace(SETTINGS, repeats=1)
    rows = (await run(settings, Table(wrong_rtt_ms=5.0))).rows
    assert all(row["mismatches"] == 0 for row in rows if row["rtt_ms"] == 0.0)
    assert all(row["mismatches"] != 0 for row in rows if row["rtt_ms"] == 5.0)


async def test_stop_and_wait_runs_at_its_best_draft_length() -> None:
    table = Table()
    runner = await run(replace(SETTINGS, repeats=1, arms=(Arm.VANILLA,)), table)
    assert set(runner.gamma_costs) == set(GAMMAS)
    assert set(runner.vanilla_gammas) == {0.0, 5.0}
    measured = [options for options, _, rtt_ms in table.opened if rtt_ms == 5.0]
    assert [getattr(options.policy, "gamma", None) for options in measured] == [
        runner.vanilla_gammas[5.0]
    ]
    assert all(options.run_ahead is RunAhead.NEVER for options in measured)


async def test_what_all_arms_have_finished_survives_an_interruption() -> None:
    # The second repeat at the first RTT is stopped while the second prompt runs.
    arms = (Arm.TARGET_ONLY, Arm.EDGESPEC)
    progress = Quiet("target-only, b", times=3)
    runner = await run(replace(SETTINGS, arms=arms), Table(), progress)
    counts = [(*where(row), row["requests"]) for row in runner.rows]
    assert counts == [
        (0, 0.0, "target-only", 3),
        (0, 0.0, "edgespec", 3),
        (0, 5.0, "target-only", 3),
        (0, 5.0, "edgespec", 3),
        (1, 0.0, "target-only", 1),
        (1, 0.0, "edgespec", 1),
    ]


async def test_arms_take_turns_in_going_first() -> None:
    order: list[str] = []

    class Listening(Quiet):
        def done(self, what: str, count: float = 1.0) -> None:
            if ", " in what and not what.startswith("warm-up"):
                order.append(what)

    arms = (Arm.TARGET_ONLY, Arm.EDGESPEC)
    settings = replace(SETTINGS, arms=arms, rtts_ms=(0.0,), repeats=1)
    await run(settings, Table(), Listening())
    assert order == [
        "target-only, a",
        "edgespec, a",
        "edgespec, b",
        "target-only, b",
        "target-only, c",
        "edgespec, c",
    ]


async def test_a_lost_verifier_ends_the_bench() -> None:
    table = Table()
    runner = BenchRunner(SETTINGS, replace(WORKLOAD, prompts=((1,) * 5000,)), table, Quiet())
    with pytest.raises(GenerationError):
        await runner.run()
    await table.stop()
    assert runner.rows == []


def edgespec_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "edgespec", "bench", "--model", "toy", "--draft", "toy", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_measures_prints_and_writes(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question": "one and two"}\n{"turns": ["three"]}\n', encoding="utf-8")
    out = tmp_path / "out.json"
    done = edgespec_bench(
        *("--prompts", str(prompts), "--json", str(out), "--rtt-ms", "0,1", "--repeats", "1"),
        *("--max-tokens", "8", "--pass-ms", "1", "--draft-ms", "0", "--temperature", "0.7"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["mismatches"] for row in result["results"]] == [0] * 10
    assert len(result["summary"]) == 10
    assert result["settings"]["prompt_names"] == ["prompts.jsonl:1", "prompts.jsonl:2"]
    assert "interrupted" not in result
    for said in ("emulated pass time", "those of target-only", "command:", "vanilla"):
        assert said in done.stdout
    assert "repeat 1 of 1, RTT 1 ms" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--arms", "eagle"), 2, "arm 'eagle' is unknown"),
        (("--rtt-ms", "-3"), 2, "rtt-ms is -3.0, but must be in [0.0, 10000.0]"),
        (("--prompts", "absent.jsonl"), 2, "absent.jsonl: no such file"),
        (("--json", "tests"), 2, "which is a folder"),
        (("--draft", "none"), 1, "target-only is the only arm there is"),
    ],
)
def test_a_mistake_is_one_line(arguments: tuple[str, ...], code: int, said: str) -> None:
    done = edgespec_bench(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr
