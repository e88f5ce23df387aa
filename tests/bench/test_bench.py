"""Tests of the bench: prompts, arithmetic on requests written by hand, a whole run over the toy
models in memory and through the command line, the files that the simulator reads, and ``--theory``.

Oracles: sums in the comments; the toy target's output without a draft; for ``--theory``, sums over
every token and every pair of tokens of small distributions, and many draws with the scalar noise.
Tests never judge a time, only that one was recorded.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from edgespec.bench import draft_lengths, measurement, theory
from edgespec.bench.arms import Arm
from edgespec.bench.prompts import (
    DEFAULT_PROMPTS,
    PromptError,
    Workload,
    choose_workload,
    read_prompts,
)
from edgespec.bench.report import Subject, judge_mismatches, make_document, write_footer, write_json
from edgespec.bench.runner import BenchProgress, BenchRunner, BenchSettings, Station
from edgespec.config import AgentConfig, ConfigError, DraftSection, VerifierConfig
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import Candidate, Drafter, PassRequest, PassResult, SimpleTarget
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams, gumbel, noise_bits, warp
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import load_drafter
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.models.toy import TOY_CONTEXT_LENGTH, TOY_MODEL, ToyTokenizer
from edgespec.sampling.arrays import best_candidates, probabilities
from edgespec.testing import LoopbackTransport
from edgespec.verifier.build import load_target
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyServerDrafter, ToyTarget
from edgespec.wire.shaped import TrafficMeter
from edgespec_sim.commands.record_tape import TAPE_WIDTH, record_tape
from edgespec_sim.cost_profile import read_profile
from edgespec_sim.token_sources.match_tape import read_tape, walk_along
from tests.kit.live_verifier import run_command
from tests.present import require
from tests.sim.faults.checks import target_stream

# Five tokens came in three passes. The last token ended the text and is not counted, so four count.
ONE = measurement.Measurement(
    tokens=(5, 6, 7, 8, 0),
    times_s=(0.1, 0.1, 0.2, 0.4),
    counters=DraftCounters(
        sent=8, committed=5, accepted=2, passes=3, tried=4, hits=3, verify_s=0.075
    ),
)

TWO = measurement.Measurement(
    tokens=(5, 6),
    times_s=(0.3, 0.5),
    counters=DraftCounters(
        sent=2, committed=2, accepted=0, passes=2, tried=1, hits=0, verify_s=0.05
    ),
)

TRAFFIC = {
    **{"drafted_nodes": 10.0, "up_payload_bytes": 150.0, "open_payload_bytes": 80.0},
    **{"up_framed_bytes": 200.0, "down_payload_bytes": 70.0, "down_framed_bytes": 90.0},
}


def row_of(
    arm: Arm = Arm.EDGESPEC, repeat: int = 0, first: tuple[int, ...] = ONE.tokens
) -> measurement.Row:
    return measurement.row_of(arm, 20.0, repeat, (ONE, TWO), (first, TWO.tokens), TRAFFIC)


def test_a_row_counts_what_it_says() -> None:
    row = row_of()
    assert row["ttft_ms_p50"] == pytest.approx(200)  # 100 and 300
    assert row["tpot_ms_p50"] == pytest.approx(150)  # 300 / 3 and 200 / 1
    assert row["tpot_ms_p95"] == pytest.approx(195)
    assert row["itl_ms_p95"] == pytest.approx(200)  # 0, 100, 200, 200
    assert row["tokens"] == 6
    assert row["tokens_per_second"] == pytest.approx(6 / 0.9)
    assert row["passes_per_token"] == pytest.approx(5 / 7)
    assert row["tokens_per_pass"] == pytest.approx(7 / 5)
    assert row["acceptance"] == pytest.approx(3 / 5)
    assert row["wasted_nodes"] == 8
    assert row["pass_ms_mean"] == pytest.approx(25)
    assert row["up_bytes_per_token"] == pytest.approx(7)  # 150 - 80 over 10 drafted
    assert row["up_bytes_per_committed_token"] == pytest.approx(10)
    assert row["down_bytes_per_token"] == pytest.approx(10)
    assert row["open_bytes_per_request"] == pytest.approx(40)
    assert row["framing_bytes_per_committed_token"] == pytest.approx(10)  # 50 + 20 over 7
    assert row["mismatches"] == 0


def test_a_wrong_token_is_counted_and_said() -> None:
    wrong = row_of(first=(5, 6, 7, 9, 0))
    assert wrong["mismatches"] == 1
    assert judge_mismatches([row_of(), wrong]) == (
        1,
        "1 of 12 tokens differ from target-only: they must not",
    )
    assert judge_mismatches([row_of()]) == (0, "all 6 tokens are those of target-only")


def test_speeds_are_of_means_over_the_texts() -> None:
    """There are two texts; the second lacks one repeat. Plain streaming takes 20 and 40 ms per
    token, ours 10 (the mean of 8 and 12) and 30. All resamplings of two texts give a speedup
    between 20 / 10 and 40 / 30."""

    def row(arm: Arm, repeat: int, *tpots_ms: float | None) -> dict[str, object]:
        return {**row_of(arm, repeat), "tpots_ms": list(tpots_ms)}

    rows = [row(Arm.TARGET_ONLY, 0, 20.0, 40.0), row(Arm.EDGESPEC, 0, 8.0, 30.0)]
    rows += [row(Arm.TARGET_ONLY, 1, 20.0, None), row(Arm.EDGESPEC, 1, 12.0)]
    plain, ours = measurement.summarise(rows)
    assert (plain["tpot_ms_mean"], ours["tpot_ms_mean"]) == (30.0, 20.0)
    assert (plain["speedup"], ours["speedup"]) == (pytest.approx(1.0), pytest.approx(1.5))
    assert ours["interval"] == {"tpot_ms_mean": [10.0, 30.0], "speedup": [40 / 30, 2.0]}
    assert plain["interval"]["speedup"] == [1.0, 1.0]
    (alone,) = measurement.summarise([row(Arm.EDGESPEC, 0, 10.0)])
    assert (alone["speedup"], alone["interval"]) == (None, {"tpot_ms_mean": [10.0, 10.0]})
    (nothing,) = measurement.summarise([row(Arm.EDGESPEC, 0, None)])
    assert (nothing["tpot_ms_mean"], nothing["interval"]) == (None, {})


def test_both_ends_stand_beside_each_alone() -> None:
    """The same two texts are used; a text that only one of the arms finished is left out."""

    def row(arm: Arm, *tpots_ms: float | None) -> dict[str, object]:
        return {**row_of(arm), "tpots_ms": list(tpots_ms)}

    rows = [row(Arm.SERVER_DRAFT, 10.0, 20.0, 9.0), row(Arm.BOTH, 8.0, 22.0, None)]
    assert measurement.compare_both_ends(rows) == [
        {"rtt_ms": 20.0, "to": "server-draft", "ratio": 1.0, "interval": [0.8, 1.1]}
    ]
    assert [one["to"] for one in measurement.compare_both_ends([*rows, row(Arm.EDGESPEC, 8.0)])][
        1:
    ] == ["edgespec"]
    assert measurement.compare_both_ends([row(Arm.EDGESPEC, 8.0), row(Arm.SERVER_DRAFT, 8.0)]) == []


def test_the_document_is_complete_json(tmp_path: Path) -> None:
    subject = Subject("bundled", "bundled", "bundled", "t", "d", "built-in", False)
    workload = Workload(("a", "b"), ((1, 2), (3,)), frozenset({0}))
    runner = BenchRunner(BenchSettings(), workload, Table(), Quiet())
    runner.rows.append(row_of())
    runner.vanilla_gammas, runner.gamma_costs = {20.0: 4}, {4: draft_lengths.GammaCost(1.5, 20, 60)}
    argv = ("edgespec", "bench", "--json", "my file")
    content = make_document(argv, BenchSettings(), subject, runner, interrupted=True)
    path = tmp_path / "deep" / "result.json"
    write_json(path, content)
    read = json.loads(path.read_text(encoding="utf-8"))
    assert read["command"] == "edgespec bench --json 'my file'"
    assert {"machine", "versions", "settings", "results", "summary"} <= set(read)
    assert read["settings"]["timing"].startswith("emulated pass time")
    assert read["settings"]["vanilla_gamma"] == {"20": 4}
    assert read["settings"]["vanilla_sweep"]["4"]["rounds"] == 20
    assert read["settings"]["prompt_tokens"] == [2, 1]
    assert read["interrupted"] is True
    assert read["results"][0]["arm"] == "edgespec"
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    lines = "\n".join(write_footer(content))
    for said in ("emulated pass time", "4 at 20 ms", "machine:", "python", "command: edgespec"):
        assert said in lines


def write_lines(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question_id": 81, "category": "writing", "turns": ("hello", "and then?")}, "hello"),
        ({"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"}, "def f():\n"),
        ({"id": 2, "question": "How many?", "answer": "3"}, "How many?"),
        ({"task_id": 9, "text": "Write a function.", "test": "assert f()"}, "Write a function."),
        ({"id": 0, "prompt": "What is it?"}, "What is it?"),
        ({"text": "  kept as it is "}, "  kept as it is "),
    ],
)
def test_each_format_gives_its_prompt(row: object, text: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path, json.dumps(row))
    assert [prompt.text for prompt in read_prompts(path)] == [text]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"answer": "x"}', "it has: answer"),
        ('{"turns": []}', r"turns\[0\] must be a text"),
        ('{"question": "  "}', "question must be a text that is not empty"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path, '{"text": "fine"}', line)
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:2: .*{said}"):
        list(read_prompts(path))


def test_a_workload_is_the_first_prompts_that_fit() -> None:
    workload = choose_workload(
        DEFAULT_PROMPTS, lambda text: [ord(c) for c in text], limit=2, room=100, eos_token_ids=(0,)
    )
    fitting = [p for p in DEFAULT_PROMPTS if len(p.text) <= 100]
    assert workload.names == tuple(p.name for p in fitting[:2])
    assert workload.too_long == DEFAULT_PROMPTS.index(fitting[1]) - 1
    with pytest.raises(ValueError, match=r"none of the 9 prompts fits.*room for 5 prompt tokens"):
        choose_workload(
            DEFAULT_PROMPTS, lambda text: [1] * len(text), limit=2, room=5, eos_token_ids=()
        )


MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=3.0, eos_token=0, eos_probability=0.01)
WORKLOAD = Workload(("a", "b", "c"), ((1, 2, 3), (4, 5), (6,)), frozenset({0}))
SETTINGS = BenchSettings(
    rtts_ms=(0.0, 5.0), repeats=2, max_tokens=12, temperature=0.8, pass_ms=0.0, draft_ms=0.0
)


class Quiet(BenchProgress):
    """A progress display that cancels the bench after a given number of requests."""

    def __init__(self, stop_after: str = "", times: int = 0) -> None:
        super().__init__(Console(quiet=True))
        self._stop_after, self._times = stop_after, times

    def done(self, what: str, count: float = 1.0) -> None:
        if self._stop_after and what.startswith(self._stop_after):
            self._times -= 1
            if self._times == 0:
                task = require(asyncio.current_task())
                task.cancel()


class Table:
    """Implementation of ``runner.OpenStation`` in this process; each station has its own
    verifier."""

    def __init__(self, wrong_rtt_ms: float = -1.0) -> None:
        self.drafter = ToyDrafter(MODEL.perturbed(0.3), replace(toy_info(MODEL), vocabulary="toy"))
        self.opened: list[tuple[Arm, AgentOptions, float]] = []
        self.verifiers: list[Verifier] = []
        self._wrong_rtt_ms = wrong_rtt_ms

    def __call__(self, arm: Arm, options: AgentOptions, rtt_ms: float) -> Station:
        self.opened.append((arm, options, rtt_ms))
        model = replace(MODEL, seed=9) if rtt_ms == self._wrong_rtt_ms else MODEL
        own = ToyServerDrafter(MODEL.perturbed(0.3), toy_info(MODEL)) if arm.on_server else None
        limits = EngineLimits(server_drafts=False, drafter=arm.on_server)
        verifier = Verifier(ToyTarget(model), Limits(), limits, drafter=own)
        self.verifiers.append(verifier)
        meter = TrafficMeter()
        transport = LoopbackTransport(verifier.serve, lambda: verifier.info, meter=meter)
        drafter = measurement.LentDrafter(self.drafter) if arm.drafts else None
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


def place_of(row: measurement.Row) -> tuple[object, ...]:
    return row["repeat"], row["rtt_ms"], row["arm"]


async def test_stop_and_wait_runs_at_its_best_draft_length() -> None:
    table = Table()
    runner = await run(replace(SETTINGS, repeats=1, arms=(Arm.VANILLA,)), table)
    assert set(runner.gamma_costs) == set(draft_lengths.GAMMAS)
    assert set(runner.vanilla_gammas) == {0.0, 5.0}
    measured = [options for _, options, rtt_ms in table.opened if rtt_ms == 5.0]
    assert [getattr(options.policy, "gamma", None) for options in measured] == [
        runner.vanilla_gammas[5.0]
    ]
    assert all(options.run_ahead is RunAhead.NEVER for options in measured)


async def test_what_all_arms_have_finished_survives_an_interruption() -> None:
    # The second repeat at the first RTT is stopped while the second prompt runs.
    arms = (Arm.TARGET_ONLY, Arm.EDGESPEC)
    progress = Quiet("target-only, b", times=3)
    runner = await run(replace(SETTINGS, arms=arms), Table(), progress)
    counts = [(*place_of(row), row["requests"]) for row in runner.rows]
    finished = ((0, 0.0, 3), (0, 5.0, 3), (1, 0.0, 1))
    assert counts == [
        (repeat, rtt_ms, arm.value, requests)
        for repeat, rtt_ms, requests in finished
        for arm in arms
    ]


TOY = ("--model", "toy", "--draft", "toy")


def test_the_command_measures_prints_and_writes(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"question": "one and two"}\n{"turns": ["three"]}\n', encoding="utf-8")
    files = ("--prompts", prompts, "--json", out)
    size = ("--rtt-ms", "0,1", "--repeats", 1, "--max-tokens", 8, "--temperature", 0.7)
    done = run_command("bench", *TOY, *files, *size, "--pass-ms", 1, "--draft-ms", 0)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text(encoding="utf-8"))
    assert [row["mismatches"] for row in result["results"]] == [0] * 14
    assert len(result["summary"]) == 14
    assert [(row["rtt_ms"], row["to"]) for row in result["beside"]] == [
        (rtt_ms, end) for rtt_ms in (0, 1) for end in ("server-draft", "edgespec")
    ]
    assert result["settings"]["prompt_names"] == ["prompts.jsonl:1", "prompts.jsonl:2"]
    assert "interrupted" not in result
    for said in ("emulated pass time", "those of target-only", "command:", "vanilla"):
        assert said in done.stdout
    assert "repeat 1 of 1, RTT 1 ms" in done.stderr
    assert result["server_drafts"]["model_steps"] > 0
    assert "both over server-draft: " in done.stdout
    assert "the server's own drafts: " in done.stdout


def test_lookup_alone_has_the_targets_tokenizer(tmp_path: Path) -> None:
    """Oracle: the vocabulary, which the verifier compares. Nothing else names the toy's here."""
    size = ("--arms", "target-only,edgespec", "--limit", 1, "-n", 8, "--repeats", 1)
    timing = ("--pass-ms", 0, "--rtt-ms", 0)
    done = run_command("bench", "--model", "toy", "--draft", "lookup", *size, *timing)
    assert done.exit_code == 0, done.output
    config = AgentConfig(draft=DraftSection("lookup"))
    with pytest.raises(ConfigError, match=r"'lookup', which has no tokenizer of its own: set"):
        load_drafter(config)
    assert require(load_drafter(replace(config, tokenizer="toy"))).info.name == "lookup"


def test_a_bench_writes_a_tape_and_its_results(tmp_path: Path) -> None:
    tape_file, results = tmp_path / "t.jsonl", tmp_path / "r.json"
    size = ("--arms", "edgespec", "--limit", 2, "-n", 24, "--repeats", 1)
    timing = ("--pass-ms", 0, "--draft-ms", 0, "--rtt-ms", 0)
    done = run_command("bench", *TOY, *size, *timing, "--record-tape", tape_file, "--json", results)
    assert done.exit_code == 0, done.output
    tape = read_tape(tape_file)
    assert tape.about["sampling"] == "temperature 0, seed 0, at most 24 tokens"
    # The texts are the target's own, and the arm delivered the same texts.
    sampling, prompts = SamplingParams(max_tokens=24), [one.prompt for one in tape.generations]
    assert prompts == [tuple(ToyTokenizer().encode(p.text)) for p in DEFAULT_PROMPTS[:2]]
    texts = [target_stream(TOY_MODEL, prompt, sampling, TOY_CONTEXT_LENGTH) for prompt in prompts]
    assert [one.tokens for one in tape.generations] == [text.tokens for text in texts]
    (seen,) = json.loads(results.read_text())["summary"]
    assert (seen["arm"], seen["requests"], seen["tokens"]) == ("edgespec", 2, 2 * 24)
    assert seen["mismatches"] == 0
    # The ranks come from the requested drafter, whatever the arm had time to draft.
    drafter = require(load_drafter(AgentConfig(draft=DraftSection("toy"))))
    for one in tape.generations:
        drafter.begin(len(one.prompt), sampling)
        assert one.ranks == walk_along(drafter.step, one.prompt, one.tokens, TAPE_WIDTH).ranks
    assert 0 < tape.acceptance() < 1, "a drafter that says something"
    # The share of drafts that the arm had judged depends on time; the report states the measured
    # value.
    assert 0 <= seen["acceptance"] <= 1
    assert f"edgespec arm: {seen['acceptance']:.1%} accepted" in done.output


@pytest.mark.slow
def test_a_profile_of_the_toy_pair_is_emulated_as_told(tmp_path: Path) -> None:
    """A measured time is never shorter than the emulated one. The amount by which the fitted laws
    exceed it is noise, so it is not judged."""
    out = tmp_path / "p.json"
    done = run_command("profile", "--quick", "--pass-ms", 4, "--draft-ms", 2, *TOY, "--out", out)
    assert done.exit_code == 0, done.output
    found = read_profile(out)
    assert found.target_pass.seconds(1) > 0
    assert found.message.seconds(1) > 0
    assert len(found.draft_step.table) > 3
    assert "target pass" in done.output


# --- ``--theory`` ---------------------------------------------------------------------------------


def random_laws(dice: random.Random, size: int) -> tuple[list[float], list[float]]:
    """Return two distributions over one vocabulary; some tokens have probability 0 in one or
    both."""
    found = []
    for _ in range(2):
        weights = [dice.expovariate(1.0) ** 3 * (dice.random() < 0.8) for _ in range(size)]
        weights[dice.randrange(size)] += 0.1
        found.append([weight / sum(weights) for weight in weights])
    return found[0], found[1]


def same_draw_chance(p: list[float], q: list[float]) -> float:
    """Compute the probability of equal draws by the formula of arXiv 2408.07978, unchanged."""
    both = [x for x in range(len(p)) if p[x] and q[x]]
    return sum(1.0 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in both)


def two_draws_miss_chance(q: list[float], wanted: set[int], *, replaced: bool) -> float:
    """Return the probability that two draws from q contain no token of ``wanted``."""
    others = [x for x in range(len(q)) if x not in wanted]
    if replaced:
        return sum(q[x] for x in others) ** 2
    left = {x: 1.0 - q[x] for x in others}
    return sum(q[x] * q[y] / left[x] for x, y in permutations(others, 2) if left[x] > 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_a_place_is_what_sums_over_all_sets_say(seed: int) -> None:
    dice = random.Random(seed)
    p, q = random_laws(dice, dice.randrange(2, 7))
    found, size = theory.compare_laws(np.array(p), np.array(q)), len(p)
    variation = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
    assert found.variation == pytest.approx(variation)
    assert found.expected == pytest.approx(same_draw_chance(p, q))
    assert found.bound - 1e-12 <= found.expected <= found.ideal + 1e-12
    for ideal, replaced in ((found.pair_ideal, False), (found.independent_ideal, True)):
        least = min(
            1.0
            - sum(p[x] for x in wanted)
            + 1.0
            - two_draws_miss_chance(q, set(wanted), replaced=replaced)
            for count in range(size + 1)
            for wanted in combinations(range(size), count)
        )
        # The least value is the minimum over all sets, and no tried set is missing from it.
        assert ideal >= min(1.0, least) - 1e-9
        ranked = sorted(range(size), key=lambda x: -(p[x] / q[x] if q[x] else p[x] and np.inf))
        tried = min(
            1.0
            - sum(p[x] for x in ranked[:count])
            + 1.0
            - two_draws_miss_chance(q, set(ranked[:count]), replaced=replaced)
            for count in range(size + 1)
        )
        assert ideal == pytest.approx(min(1.0, tried), abs=1e-7)
    assert found.ideal - 1e-9 <= found.independent_ideal <= found.pair_ideal + 1e-9


def test_noise_that_is_shared_agrees_as_often_as_is_expected() -> None:
    """Two siblings cover one draw as often as expected, and never more than the ideal pair."""
    p, q = random_laws(random.Random(5), 6)
    found, count, same, covered = theory.compare_laws(np.array(p), np.array(q)), 4000, 0, 0
    with np.errstate(divide="ignore"):
        scores = np.log(p), np.log(q)
    for position in range(count):
        noise = np.array([gumbel(noise_bits(7, position, token)) for token in range(6)])
        target = int((scores[0] + noise).argmax())
        siblings = np.argsort(-(scores[1] + noise))[:2]
        same += target == siblings[0]
        covered += target in siblings
    assert same / count == pytest.approx(found.expected, abs=0.025)  # three deviations
    assert found.expected < covered / count < found.pair_ideal + 0.025


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5, "logit_bias": {3: 2.0}},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 0.8, "min_p": 0.2},
    ],
)
def test_a_law_is_the_scalar_one(sampling: dict[str, Any]) -> None:
    params = SamplingParams(**sampling)
    logits = [random.Random(seed).gauss(0.0, 2.0) for seed in range(30)]
    found = probabilities(np.array(logits, np.float32), params)
    scores = warp(logits, params, (), ())
    if params.is_greedy:
        expected = [float(token == int(np.argmax(scores))) for token in range(30)]
    else:
        weights = np.exp(np.array(scores) - max(scores))
        expected = list(weights / weights.sum())
    assert list(found) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("miss", "hit"), [(0.5, 0.8), (0.9, 0.9), (0.7, 0.2), (0.0, 0.5)])
def test_chains_bring_what_a_long_replay_brings(miss: float, hit: float) -> None:
    dice, hits = random.Random(1), [False]
    for _ in range(200_000):
        hits.append(dice.random() < (hit if hits[-1] else miss))
    for gamma in (1, 2, 4, 8):
        assert theory.replayed_tokens(hits, gamma) == pytest.approx(
            theory.chain_tokens(miss, hit, gamma), rel=0.01
        )
        alone = sum(miss**k for k in range(gamma + 1))
        assert theory.chain_tokens(miss, miss, gamma) == pytest.approx(alone)
    assert theory.chain_tokens(1.0, 1.0, 4) == pytest.approx(5.0)


def texts(rank: int, variation: float, count: int = 8) -> list[theory.ComparedText]:
    place = theory.Place(variation, 1.0 - 1.3 * variation, 1.0 - variation / 2, 1.0, rank)
    return [theory.ComparedText(str(number), (place,) * 20) for number in range(count)]


def test_what_cannot_be_is_said() -> None:
    for found, said in (
        (texts(0, 0.4), ["the first guess is right 0.400", "a guess of two is right 0.200"]),
        (texts(1, 0.4), ["a guess of two is right 0.200", "(1 - TV) / (1 + TV) lies 0.429"]),
        (texts(0, 0.0), []),
        (texts(0, 0.4, 4), []),  # four texts are too few for a result
    ):
        lines = [
            line
            for line in theory.theory_lines(theory.beside_theory(found))
            if "impossible" in line
        ]
        assert [
            line[: len(f"impossible: {one}")] for line, one in zip(lines, said, strict=True)
        ] == [f"impossible: {one}" for one in said]


class Rows(SimpleTarget):
    """Stand-in for both models, whose logits depend on the last token only."""

    info = replace(toy_info(TOY_MODEL), name="rows", context_length=6)
    mode = "rows"
    cache = inner = None

    def __init__(self, rows: dict[int, list[float]]) -> None:
        self._rows, self.last, self.opened = rows, 1, 0
        self._sampling = SamplingParams()

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._sampling = sampling

    def step(self, keep: int, feed: Sequence[int], width: int) -> tuple[Candidate, ...]:
        self.last = feed[-1]
        return best_candidates(self.logits, self._sampling, keep + len(feed), width)

    def open(self, *_: object) -> None:
        self.opened += 1

    def close(self, *_: object) -> None:
        self.opened -= 1

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        raise NotImplementedError

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        raise NotImplementedError

    def pass_logits(self, batch: Sequence[PassRequest]) -> Any:
        (request,) = batch
        assert request.parents == tuple(range(-1, len(request.tokens) - 1))
        fed = (request.feed[-1], *request.tokens)
        return np.array([self._rows[token] for token in fed], np.float32)

    @property
    def logits(self) -> Any:
        return np.array(self._rows[self.last], np.float32)


async def test_laws_are_compared_along_the_text() -> None:
    """The draft has one token that the target's vocabulary lacks, and a context with room for only
    four tokens of the first text."""
    target = Rows({1: [0.0, 0.0, 1.0], 2: [3.0, 0.0, 0.0]})
    draft = Rows({1: [0.0, 0.0, 1.0, -np.inf], 2: [0.0, 3.0, 0.0, 2.0]})
    params = SamplingParams(1.0)
    recorder = theory.TheoryRecorder(cast("Any", target), cast("Any", draft), params)
    prompts = Workload(("one", "none", "two"), ((2, 1), (1,), (2,)), frozenset())
    texts = (2, 1, 2, 1, 2), (), (1,)
    tape = await record_tape(
        *(cast("Drafter", draft), "rows", prompts, texts, params, lambda text: None),
        about={},
        recorder=recorder,
    )
    assert target.opened == 0
    found = [[place.variation for place in text.places] for text in recorder.texts]
    p, q = np.exp([3.0, 0.0, 0.0, -np.inf]), np.exp([0.0, 3.0, 0.0, 2.0])
    apart = np.abs(p / p.sum() - q / q.sum()).sum() / 2
    assert found == [pytest.approx([0.0, apart] * 2, abs=1e-6), pytest.approx([apart])]
    for text, generation in zip(recorder.texts, tape.generations, strict=True):
        assert text.name == generation.name
        assert [place.rank for place in text.places] == list(generation.ranks)


def test_a_target_that_shows_no_logits_is_refused() -> None:
    result = run_command("bench", "--theory", "--model", "toy", "--draft", "toy", "-t", "0.7")
    assert result.exit_code == 1
    assert "--theory: the target shows no logits (ToyTarget)" in result.stderr


def test_the_bundled_pair_shows_its_logits() -> None:
    """The likeliest token of each row is the one that ``forward`` commits, and the draft is
    compared at each place."""
    target = load_target(VerifierConfig(model="bundled", device="cpu"))
    drafter = require(load_drafter(AgentConfig(draft=DraftSection("bundled"))))
    greedy, prompt, tokens = SamplingParams(), (5, 9, 14), list[int]()
    target.open("s", len(prompt), greedy)
    for _ in range(6):
        cached = len(prompt) + len(tokens) - 1 if tokens else 0
        feed = (*prompt, *tokens)[cached:]
        tokens += target.forward([PassRequest("s", cached, feed)])[0].targets
        target.keep("s", ())
    target.close("s")
    recorder = theory.TheoryRecorder(target, drafter, SamplingParams(1.0))
    drafter.begin(len(prompt), greedy)
    places, text = recorder.places(prompt, tokens), [*prompt, *tokens]
    for place in range(len(prompt), len(text)):
        keep = place - 1 if place > len(prompt) else 0
        drafter.step(keep, text[keep:place], 1)
        assert 0.0 <= next(places).variation <= 1.0
    request = PassRequest("t", 0, prompt, tuple(tokens[:-1]), tuple(range(-1, len(tokens) - 2)))
    target.open("t", len(prompt), greedy)
    assert isinstance(target, theory.OpenTarget)
    assert target.pass_logits([request]).argmax(axis=1).tolist() == tokens
