"""``bench --record-tape`` and ``profile``: files that the simulator reads. Oracle: the toy pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.bench.prompts import DEFAULT_PROMPTS, Workload
from edgespec.bench.runner import TAPE_WIDTH, record_tape
from edgespec.cli.main import app
from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import load_drafter
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.models.toy import TOY_CONTEXT_LENGTH, TOY_MODEL, ToyTokenizer
from edgespec.telemetry.cost_profile import read_profile
from edgespec.telemetry.match_tape import MISS, ranks_along, read_tape
from tests.sim.faults.checks import target_stream

MODEL = ToyModel(16, order=2, sharpness=3.0, seed=2)
TOY = ("--model", "toy", "--draft", "toy")


async def test_ranks_are_those_of_a_walk_along_the_target(tmp_path: Path) -> None:
    sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=40)
    workload = Workload(("one", "two", "none"), ((1, 2, 3), (4, 5), (6,)), frozenset({7}))
    texts = [target_stream(MODEL, p, sampling, 1000).tokens for p in workload.prompts[:2]]
    drafter, said = ToyDrafter(MODEL.perturbed(0.3)), list[str]()
    tape = await record_tape(
        drafter, "toy", workload, [*texts, ()], sampling, said.append, width=3, about={"a": "b"}
    )
    assert said == ["tape: one, 1 of 3", "tape: two, 2 of 3"]
    assert [g.tokens for g in tape.generations] == texts
    assert (tape.width, tape.eos_token_ids, tape.about) == (3, (7,), {"a": "b"})
    for generation in tape.generations:
        for at, (token, rank) in enumerate(zip(generation.tokens, generation.ranks, strict=True)):
            context = (*generation.prompt, *generation.tokens[:at])
            # Drafted afresh on this very context, as if nothing had been cached.
            drafter.begin(len(generation.prompt), sampling)
            candidates = drafter.step(0, context, 3)
            guesses = [candidate.token for candidate in candidates]
            assert rank == (guesses.index(token) if token in guesses else MISS)
            taped = (generation.logprobs[at], generation.second_logprobs[at])
            assert taped == pytest.approx([one.logprob for one in candidates[:2]], abs=6e-4)


def test_a_bench_writes_a_tape_and_its_results(tmp_path: Path) -> None:
    tape_file, results = tmp_path / "t.jsonl", tmp_path / "r.json"
    timing = ("--pass-ms", "0", "--draft-ms", "0", "--rtt-ms", "0", "--repeats", "1")
    arguments = ["bench", "--arms", "edgespec", "--limit", "2", "-n", "24", *timing, *TOY]
    arguments += ["--record-tape", str(tape_file), "--json", str(results)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    tape = read_tape(tape_file)
    assert tape.about["sampling"] == "temperature 0, seed 0, at most 24 tokens"
    # The texts are the target's own, and the arm delivered the same ones.
    sampling, prompts = SamplingParams(max_tokens=24), [one.prompt for one in tape.generations]
    assert prompts == [tuple(ToyTokenizer().encode(p.text)) for p in DEFAULT_PROMPTS[:2]]
    texts = [target_stream(TOY_MODEL, prompt, sampling, TOY_CONTEXT_LENGTH) for prompt in prompts]
    assert [one.tokens for one in tape.generations] == [text.tokens for text in texts]
    (seen,) = json.loads(results.read_text())["summary"]
    assert (seen["arm"], seen["requests"], seen["tokens"]) == ("edgespec", 2, 2 * 24)
    assert seen["mismatches"] == 0
    # The ranks are those of the drafter that was asked for, whatever the arm had time to draft.
    drafter = load_drafter(AgentConfig(draft=DraftSection("toy")))
    assert drafter is not None
    for one in tape.generations:
        drafter.begin(len(one.prompt), sampling)
        assert one.ranks == ranks_along(drafter.step, one.prompt, one.tokens, TAPE_WIDTH)
    assert 0 < tape.acceptance() < 1, "a drafter that says something"
    # How much of its drafting the arm saw is a matter of time; the report says what was measured.
    assert 0 <= seen["acceptance"] <= 1
    assert f"edgespec arm: {seen['acceptance']:.1%} accepted" in done.output


def test_a_tape_needs_a_drafter(tmp_path: Path) -> None:
    arguments = ["bench", "--arms", "target-only", "--model", "toy", "--draft", "none"]
    done = CliRunner().invoke(app, [*arguments, "--record-tape", str(tmp_path / "t.jsonl")])
    assert done.exit_code == 1
    assert "nothing to tape" in done.output


@pytest.mark.slow
def test_a_profile_of_the_toy_pair_is_emulated_as_told(tmp_path: Path) -> None:
    """What was measured is no shorter than what was emulated; by how much the laws differ from it
    is a matter of the noise."""
    out = tmp_path / "p.json"
    arguments = ["profile", "--quick", "--pass-ms", "4", "--draft-ms", "2", *TOY]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = read_profile(out)
    assert found.target_pass.seconds(1) > 0
    assert found.message.seconds(1) > 0
    assert len(found.draft_step.table) > 3
    assert "target pass" in done.output
