"""Published figures of other systems beside the same scenarios in the simulator.

    PYTHONPATH=.:sim python benchmarks/published.py [--jobs 2] [--only pearl]

Each comparison takes the parameters that a paper or its repository states, plays them in virtual
time and puts a ratio beside a ratio. Nothing is tuned until it fits. Where a parameter is not
public, it is either varied over a plausible range, and the row holds that range, or determined by
one published figure, which then counts as given and not as a result. ``validity.py`` keeps the
rows for ``docs/validity.md``.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pool
from statistics import fmean
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.bench.intervals import mean_interval
from edgespec.config.loading import NULL
from edgespec_sim.replication import Interval, TpotTotal, measure_speedup
from edgespec_sim.scenario.sections import load_scenario, scenario_path
from edgespec_sim.world import run
from edgespec_uara import sweep as uara


@dataclass(frozen=True, slots=True)
class Comparison:
    """One published figure beside ours."""

    system: str
    figure: str
    """The compared quantity, in words."""
    source: str
    """Place of the published figure."""
    published: float
    ours: float
    low: float
    high: float
    unit: str = "×"
    is_range: bool = False
    """Whether ``low`` and ``high`` are the ends of a range of assumptions, and ``ours`` the middle
    of it. Otherwise they are a 95 % interval."""
    is_given: bool = False
    """Whether the published figure determined a parameter of this row, so that it shows nothing."""
    why: str = ""
    """The assumption that explains the difference."""


@dataclass(frozen=True, slots=True)
class Task:
    """One world to play: a bundled scenario with settings, one arm and one seed."""

    scenario: str
    settings: Mapping[str, Any]
    arm: Arm
    seed: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one world."""

    tpot: TpotTotal
    ttft_s: float
    """Mean time to the first token."""
    tokens_per_s: float
    """Delivered tokens per second, of all devices together."""
    tokens_per_pass: float


PlayAll = Callable[[Sequence[Task]], list[Outcome]]
"""Plays worlds, perhaps on several cores, and returns their outcomes in order."""


def play(task: Task) -> Outcome:
    """Play one world."""
    settings = {key: NULL if value is None else value for key, value in task.settings.items()}
    scenario = load_scenario(task.scenario, settings)
    folder = scenario_path(task.scenario).parent
    job = run.Job(scenario, task.arm, 0, task.seed, folder, checks=False)
    meters = run.play(job).meters
    whole = meters.whole()
    return Outcome(
        meters.tpot,
        whole.ttft_s.mean if whole.ttft_s else math.nan,
        whole.tokens_per_second,
        whole.tokens_per_pass,
    )


@dataclass(frozen=True, slots=True)
class Player:
    """Plays points of a comparison on the same seeds."""

    play_all: PlayAll
    seeds: int
    first_seed: int = 1

    def play(
        self,
        points: Sequence[Mapping[str, Any]],
        arms: Sequence[Arm],
        scenario: str = "single-device",
    ) -> list[dict[Arm, list[Outcome]]]:
        """Return the outcomes of each point, by arm and seed."""
        seeds = range(self.first_seed, self.first_seed + self.seeds)
        tasks = [
            Task(scenario, point, arm, seed) for point in points for arm in arms for seed in seeds
        ]
        found = iter(self.play_all(tasks))
        return [{arm: [next(found) for _ in seeds] for arm in arms} for _ in points]


def compare_speed(base: Sequence[Outcome], arm: Sequence[Outcome]) -> Interval:
    """Return how many times as fast ``arm`` is as ``base``, world by world."""
    value, interval = measure_speedup([one.tpot for one in base], [one.tpot for one in arm])
    assert value is not None
    return interval or Interval(value, value, value)


def mean_tpot_ms(outcomes: Sequence[Outcome]) -> float:
    """Return the mean time per token over all requests, in milliseconds."""
    seconds = sum(one.tpot.seconds for one in outcomes)
    return 1e3 * seconds / sum(one.tpot.requests for one in outcomes)


def mean_tokens_per_pass(outcomes: Sequence[Outcome]) -> float:
    """Return the mean number of tokens that a pass commits."""
    return fmean(one.tokens_per_pass for one in outcomes)


def one_device(
    pass_ms: float, step_ms: float, rtt_ms: float, acceptance: float, tokens: int = 200
) -> dict[str, Any]:
    """Return settings of ``single-device`` for one device on a link without jitter, with passes and
    steps that take the same time for any number of rows."""
    return {
        "links.internet.rtt_ms": rtt_ms,
        "links.internet.jitter_ms": 0.0,
        "links.internet.up_mbps": math.inf,
        "links.internet.down_mbps": math.inf,
        "message_ms": 0.0,
        "connected": True,
        "duration_s": 36_000.0,
        "tokens.acceptance": acceptance,
        "devices.laptop.draft.ms": step_ms,
        "devices.laptop.draft.row_ms": 0.0,
        "devices.laptop.workload.output_tokens": tokens,
        "devices.laptop.workload.requests": 6,
        "devices.laptop.workload.think_s": 0.1,
        "verifiers.server.pass_time.ms": pass_ms,
        "verifiers.server.pass_time.row_ms": 0.0,
    }


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the middle, the least and the greatest of values."""
    return (min(values) + max(values)) / 2.0, min(values), max(values)


# --- PEARL ---------------------------------------------------------------------------------------
# nano-PEARL is the engine of PEARL's authors; docs/bench_summary.md of its repository lists, for
# one request at a time on H200s, the tokens per second without drafts, the mean accepted tokens
# (MAT) and the speed-up. A pass takes the time of a token without drafts. A run of MAT tokens ends
# with the target's own, so the acceptance rate is 1 - 1 / MAT. The duration of a draft step is not
# published: the row of AIME determines it, and the other three are predicted.

_NANO_PEARL: Final = "github.com/smart-lty/nano-PEARL, docs/bench_summary.md, batch size 1"


@dataclass(frozen=True, slots=True)
class _PearlRow:
    texts: str
    tokens_per_s: float
    """Tokens per second without drafts."""
    accepted: float
    """Mean accepted tokens."""
    speedup: float


_PEARL: Final[Mapping[str, tuple[_PearlRow, ...]]] = {
    "Qwen2.5 72B, draft 1.5B": (
        _PearlRow("AIME", 43.55, 15.085, 4.52),
        _PearlRow("HumanEval", 43.63, 9.646, 3.76),
        _PearlRow("GSM8K", 43.24, 7.337, 3.16),
        _PearlRow("CNN/DM", 43.16, 3.855, 2.08),
    ),
    "Qwen3 32B, draft 0.6B": (
        _PearlRow("AIME", 78.61, 6.397, 2.60),
        _PearlRow("HumanEval", 78.64, 4.417, 2.18),
        _PearlRow("GSM8K", 78.70, 6.944, 2.70),
        _PearlRow("CNN/DM", 77.77, 3.182, 1.73),
    ),
}
_STEP_SHARES: Final = (0.10, 0.13, 0.16, 0.20, 0.25, 0.30, 0.36)
"""Durations of a draft step that are tried, as shares of a pass."""
_PEARL_OVER_WAITING: Final = 1.50


def compare_pearl(player: Player) -> list[Comparison]:
    """Compare the arm ``pearl`` with the speed-ups that PEARL's authors report."""
    found, over_waiting = list[Comparison](), list[float]()
    for pair, rows in _PEARL.items():
        first = rows[0]
        pass_ms = 1e3 / first.tokens_per_s
        tried = [share * pass_ms for share in _STEP_SHARES]
        points = [_pearl_point(first, step_ms) for step_ms in tried]
        played = player.play(points, (Arm.TARGET_ONLY, Arm.PEARL))
        speeds = [compare_speed(*one.values()).value for one in played]
        step_ms = interpolate(speeds, tried, first.speedup)
        points = [_pearl_point(row, step_ms) for row in rows]
        played = player.play(points, (Arm.TARGET_ONLY, Arm.VANILLA, Arm.PEARL))
        for row, one in zip(rows, played, strict=True):
            speed = compare_speed(one[Arm.TARGET_ONLY], one[Arm.PEARL])
            over_waiting.append(compare_speed(one[Arm.VANILLA], one[Arm.PEARL]).value)
            found.append(
                Comparison(
                    "PEARL",
                    f"{pair}, {row.texts}",
                    _NANO_PEARL,
                    row.speedup,
                    speed.value,
                    speed.low,
                    speed.high,
                    is_given=row is first,
                    why=f"determines the draft step: {step_ms:.1f} ms"
                    if row is first
                    else "predicted; runs of right tokens cluster as on our tape",
                )
            )
    found.append(
        Comparison(
            "PEARL",
            "over speculation that waits, at most",
            "arXiv 2408.11850, abstract",
            _PEARL_OVER_WAITING,
            *spread(over_waiting),
            is_range=True,
            why="the eight rows above; ours waits with the best draft length for its estimates",
        )
    )
    return found


def _pearl_point(row: _PearlRow, step_ms: float) -> dict[str, Any]:
    return one_device(1e3 / row.tokens_per_s, step_ms, 0.0, 1.0 - 1.0 / row.accepted)


def interpolate(ys: Sequence[float], xs: Sequence[float], y: float) -> float:
    """Return the x at which a falling curve through (xs, ys) has the value ``y``. Beyond its ends
    it is the nearest end."""
    for index in range(len(xs) - 1):
        high, low = ys[index], ys[index + 1]
        if low <= y <= high and high > low:
            return xs[index] + (high - y) / (high - low) * (xs[index + 1] - xs[index])
    return xs[0] if y > ys[0] else xs[-1]


# --- PicoSpec ------------------------------------------------------------------------------------
# arXiv 2603.19133: Qwen 32B on an A100 with a 0.6B draft on a Jetson AGX, GSM8K. Four tokens take
# 97 ms to draft, verification takes 87 ms. Its ablation has the speed without parallel drafting,
# 11.92 tokens per second, beside 20.19. Round trip and acceptance are not stated together with
# them. The serial speed gives one of the two for each value of the other: a round of k tokens takes
# k / 11.92 s, of which 184 ms are drafting and verification, and the rest is the round trip.

_PICOSPEC: Final = "arXiv 2603.19133, ablation, Qwen 32B and 0.6B, GSM8K"
_PICO_STEP_MS, _PICO_PASS_MS, _PICO_GAMMA = 97.0 / 4.0, 87.0, 4
_PICO_SERIAL, _PICO_PARALLEL = 11.92, 20.19


def compare_picospec(player: Player) -> list[Comparison]:
    """Compare parallel with serial split decoding, as PicoSpec's ablation does."""
    points = []
    for acceptance in (0.6, 0.7, 0.8, 0.9):
        settings = one_device(_PICO_PASS_MS, _PICO_STEP_MS, 20.0, acceptance)
        points.append(settings | {"gamma": _PICO_GAMMA})
    usable = []
    for point, one in zip(points, player.play(points, (Arm.VANILLA,)), strict=True):
        round_ms = 1e3 * mean_tokens_per_pass(one[Arm.VANILLA]) / _PICO_SERIAL
        rtt_ms = round_ms - _PICO_GAMMA * _PICO_STEP_MS - _PICO_PASS_MS
        if rtt_ms >= 0.0:
            usable.append(dict(point) | {"links.internet.rtt_ms": rtt_ms})
    arms = (Arm.TARGET_ONLY, Arm.VANILLA, Arm.PEARL, Arm.EDGESPEC)
    played = player.play(usable, arms)
    rtts = ", ".join(f"{one['links.internet.rtt_ms']:.0f}" for one in usable)
    rates = ", ".join(f"{one['tokens.acceptance']:g}" for one in usable)
    serial = [1e3 / mean_tpot_ms(one[Arm.VANILLA]) for one in played]
    parallel = [compare_speed(one[Arm.VANILLA], one[Arm.PEARL]).value for one in played]
    default = [compare_speed(one[Arm.VANILLA], one[Arm.EDGESPEC]).value for one in played]
    published = _PICO_PARALLEL / _PICO_SERIAL
    return [
        Comparison(
            "PicoSpec",
            "serial split decoding, tokens/s",
            _PICOSPEC,
            _PICO_SERIAL,
            *spread(serial),
            unit="",
            is_range=True,
            is_given=True,
            why=f"determines the round trip: {rtts} ms at acceptance {rates}",
        ),
        Comparison(
            "PicoSpec",
            "parallel over serial split decoding",
            _PICOSPEC,
            published,
            *spread(parallel),
            is_range=True,
            why="ours is the arm `pearl`; the round trip and acceptance are not public, so the"
            " pairs above",
        ),
        Comparison(
            "PicoSpec",
            "the same, our default in place of `pearl`",
            _PICOSPEC,
            published,
            *spread(default),
            is_range=True,
            why="ours drafts two candidates a step, and the target decodes on without drafts",
        ),
    ]


# --- SpecEdge ------------------------------------------------------------------------------------
# arXiv 2505.17052: Qwen3 14B on an A100, drafts of 1.7B on RTX 4090s, 14.07 ms of mean round trip,
# two clients for each place of a batch. Verification 94.2 ms, a draft step 11 ms, seven deep at 15
# ms. The baseline drafts on the server, without a network. Acceptance is not stated.

_SPECEDGE: Final = "arXiv 2505.17052, abstract (means over models and texts)"
_EDGE_PASS_MS, _EDGE_STEP_MS, _EDGE_RTT_MS, _EDGE_DEPTH = 94.2, 11.0, 14.07, 7
_EDGE_BATCH: Final = 8


def compare_specedge(player: Player) -> list[Comparison]:
    """Compare drafts on devices with drafts on the server, at a full server."""
    rates = (0.5, 0.6, 0.7, 0.8)
    rows = _EDGE_BATCH * (_EDGE_DEPTH + 1)
    both = {
        "duration_s": 40.0,
        "devices.laptop.workload.requests": 0,
        "devices.laptop.workload.think_s": 0.0,
        "devices.laptop.workload.output_tokens": 256,
        "verifiers.server.max_rows_per_pass": rows,
        "gamma": _EDGE_DEPTH,
    }

    def point(acceptance: float, rtt_ms: float, more: Mapping[str, Any]) -> dict[str, Any]:
        made = one_device(_EDGE_PASS_MS, _EDGE_STEP_MS, rtt_ms, acceptance)
        return {**made, **both, **more}

    server = {
        "devices.laptop.count": _EDGE_BATCH,
        "verifiers.server.server_draft.ms": _EDGE_STEP_MS,
    }
    edge = {"devices.laptop.count": 2 * _EDGE_BATCH}
    alone = player.play([point(rate, 0.0, server) for rate in rates], (Arm.SERVER_DRAFT,))
    split = player.play(
        [point(rate, _EDGE_RTT_MS, edge) for rate in rates], (Arm.VANILLA, Arm.EDGESPEC)
    )
    found = []
    assumed = f"acceptance {rates[0]:g} to {rates[-1]:g} assumed"
    for arm, name, why in (
        (
            Arm.VANILLA,
            "drafts on devices that wait",
            f"{assumed}; chains of {_EDGE_DEPTH} in place of trees of 32 nodes; no drafting ahead",
        ),
        (
            Arm.EDGESPEC,
            "our default",
            f"{assumed}; a pass verifies {rows} rows at most, as many as 8 chains of 7",
        ),
    ):
        pairs = [
            (there[Arm.SERVER_DRAFT], here[arm]) for there, here in zip(alone, split, strict=True)
        ]
        throughput = [_tokens_per_s(here) / _tokens_per_s(there) for there, here in pairs]
        latency = [mean_tpot_ms(here) / mean_tpot_ms(there) for there, here in pairs]
        found += [
            Comparison(
                "SpecEdge",
                f"{name}: server throughput over drafts on the server",
                _SPECEDGE,
                2.22,
                *spread(throughput),
                is_range=True,
                why=why,
            ),
            Comparison(
                "SpecEdge",
                f"{name}: time per token over drafts on the server",
                _SPECEDGE,
                1.0 - 0.1124,
                *spread(latency),
                is_range=True,
                why=why,
            ),
        ]
    return found


def _tokens_per_s(outcomes: Sequence[Outcome]) -> float:
    return fmean(one.tokens_per_s for one in outcomes)


# --- DSD (decentralized) -------------------------------------------------------------------------
# arXiv 2511.11733: a target's layers on N nodes with t1 between neighbours. Drafts with k tokens a
# round save (N - 1) t1 (k - 1) / k of the links' time per token. Played: time per token without and
# with drafts, less the times of computing, which are known. k is taken from other seeds.

_DSD: Final = "arXiv 2511.11733, abstract and section 3"
_DSD_LINK_MS, _DSD_PASS_MS, _DSD_STEP_MS, _DSD_GAMMA = 15.0, 5.0, 0.5, 4


def compare_dsd(player: Player) -> list[Comparison]:
    """Compare DSD's formula of the saved time with played stages, also where links jitter."""
    found = []
    cases = [(nodes, jitter_ms) for jitter_ms in (0.0, 3.0) for nodes in (2, 4, 8)]
    points = [
        one_device(_DSD_PASS_MS, _DSD_STEP_MS, 0.0, 0.8)
        | {
            "verifiers.server.stages.nodes": nodes,
            "verifiers.server.stages.link_ms": _DSD_LINK_MS,
            "verifiers.server.stages.jitter_ms": jitter_ms,
            "gamma": _DSD_GAMMA,
        }
        for nodes, jitter_ms in cases
    ]
    arms = (Arm.TARGET_ONLY, Arm.VANILLA)
    played = player.play(points, arms)
    others = Player(player.play_all, player.seeds, 101).play(points, (Arm.VANILLA,))
    for (nodes, jitter_ms), one, other in zip(cases, played, others, strict=True):
        k = mean_tokens_per_pass(other[Arm.VANILLA])
        formula_ms = (nodes - 1) * (_DSD_LINK_MS + jitter_ms) * (k - 1.0) / k
        computing = _DSD_PASS_MS - (_DSD_PASS_MS + _DSD_GAMMA * _DSD_STEP_MS) / k
        plain, drafts = (one[arm] for arm in arms)
        saved = [
            1e3 * (a.tpot.seconds / a.tpot.requests - b.tpot.seconds / b.tpot.requests) - computing
            for a, b in zip(plain, drafts, strict=True)
        ]
        low, high = mean_interval(saved)
        found.append(
            Comparison(
                "DSD",
                f"{nodes} nodes, {_DSD_LINK_MS:g} ms"
                + (f" and {jitter_ms:g} of jitter" if jitter_ms else "")
                + f": saved on links per token, k = {k:.2f}",
                _DSD,
                formula_ms,
                fmean(saved),
                low,
                high,
                unit=" ms",
                why="k is that of other texts",
            )
        )
    return found


# --- dsdSim --------------------------------------------------------------------------------------
# arXiv 2511.21669 (another DSD): a learned draft length against fixed ones. The scenario is that of
# its repository (simulator/experiments/configs/explorer/baseline_trace_gsm8k.yaml): Llama-2-70B
# targets, two devices with Llama-2-7B on an A40 for each, links of 5 to 11 ms one way, draft length
# 4, pauses of 1.7 s, answers of 420 tokens. Times come from data sheets by the law of
# ``scenario/verifiers.py``: bytes of the weights / bandwidth / 0.7, and 2 ms. Its acceptance model
# is a trained file whose rates are not stated.

_DSDSIM: Final = "arXiv 2511.21669, abstract (at most)"
_DSDSIM_PASS_MS: Final = 81.2
"""Mean of an A100 (2 + 140 GB / 2.04 TB/s / 0.7 = 100.0 ms) and an H100 (61.7 ms)."""
_DSDSIM_STEP_MS: Final = 29.7
"""An A40: 2 + 13.5 GB / 0.696 TB/s / 0.7."""
_DSDSIM_RTT_MS: Final = 16.0


def compare_dsdsim(player: Player) -> list[Comparison]:
    """Compare an adaptive draft length with a fixed one in dsdSim's scenario."""
    rates = (0.6, 0.7, 0.8, 0.9)
    points = []
    for gamma in (4, None):
        points += [
            one_device(_DSDSIM_PASS_MS, _DSDSIM_STEP_MS, _DSDSIM_RTT_MS, rate, 420)
            | {
                "duration_s": 120.0,
                "devices.laptop.count": 4,
                "devices.laptop.workload.requests": 0,
                "devices.laptop.workload.think_s": 1.7,
                "devices.laptop.workload.prompt_tokens": 128,
                "verifiers.server.count": 2,
                "gamma": gamma,
            }
            for rate in rates
        ]
    played = player.play(points, (Arm.VANILLA, Arm.EDGESPEC))
    fixed = [one[Arm.VANILLA] for one in played[: len(rates)]]
    adaptive = [one[Arm.VANILLA] for one in played[len(rates) :]]
    default = [one[Arm.EDGESPEC] for one in played[: len(rates)]]
    found = []
    for name, others, why in (
        (
            "adaptive draft length, waiting",
            adaptive,
            "acceptance 0.6 to 0.9 assumed; ours takes the best length for what it has measured,"
            " theirs a trained network that may also draft on the server",
        ),
        (
            "our default",
            default,
            "the same; ours also drafts while a pass runs",
        ),
    ):
        speeds = [compare_speed(a, b).value for a, b in zip(fixed, others, strict=True)]
        rates_of = [_tokens_per_s(b) / _tokens_per_s(a) for a, b in zip(fixed, others, strict=True)]
        found += [
            Comparison(
                "dsdSim",
                f"{name}: speed over a draft length of 4",
                _DSDSIM,
                1.1,
                *spread(speeds),
                is_range=True,
                why=why,
            ),
            Comparison(
                "dsdSim",
                f"{name}: throughput over a draft length of 4",
                _DSDSIM,
                1.097,
                *spread(rates_of),
                is_range=True,
                why=why,
            ),
        ]
    return found


# --- Vidur ---------------------------------------------------------------------------------------
# Vidur (arXiv 2405.05465) adds up measured kernels. Its repository has them for Llama-3 8B on an
# A100 (data/profiling/compute/a100/meta-llama/Meta-Llama-3-8B/mlp.csv), and the time of the host
# for Llama-2 7B (data/profiling/a100/cpu_overheads.csv). So its times of a pass are these sums.
# Attention and the output projection are not in these files.

_VIDUR: Final = "github.com/microsoft/vidur, data/profiling: medians of Meta-Llama-3-8B, A100"
_VIDUR_LAYERS: Final = 32
_VIDUR_LAYER_MS: Final = {1: 0.303, 8: 0.312, 64: 0.351, 512: 1.0825, 4096: 8.529}
"""Sum of the medians of a layer's kernels without attention, by the number of rows."""
_VIDUR_HOST_MS: Final = {8: 2.13, 64: 8.05}
"""Scheduling, sampling, inputs, outputs and messages of a pass, by the number of sessions: sum of
the medians for one GPU."""
_ROOFLINE: Final = "llama-3.1-8b-bf16@a100-80g"


def compare_vidur(player: Player) -> list[Comparison]:
    """Compare computed times per token and to the first token with sums of Vidur's kernels."""

    def point(sessions: int, prompt: int, tokens: int) -> dict[str, Any]:
        return one_device(0.0, 8.0, 0.0, 0.8, tokens) | {
            "duration_s": 120.0,
            "devices.laptop.count": sessions,
            "devices.laptop.workload.prompt_tokens": prompt,
            "devices.laptop.workload.requests": 1,
            "devices.laptop.workload.start_within_s": 0.0,
            "verifiers.server.pass_time.ms": None,
            "verifiers.server.pass_time.roofline": _ROOFLINE,
            "verifiers.server.max_rows_per_pass": 8192,
        }

    by_sessions = {sessions: point(sessions, 16, 128) for sessions in (1, 8, 64)}
    by_prompt = {prompt: point(1, prompt, 2) for prompt in (512, 4096)}
    one_seed = Player(player.play_all, 1)
    played = one_seed.play([*by_sessions.values(), *by_prompt.values()], (Arm.TARGET_ONLY,))
    found = []
    for sessions, one in zip(by_sessions, played, strict=False):
        host_ms = _VIDUR_HOST_MS.get(sessions, _VIDUR_HOST_MS[8])
        theirs = _VIDUR_LAYERS * _VIDUR_LAYER_MS[sessions] + host_ms
        ours = mean_tpot_ms(one[Arm.TARGET_ONLY])
        why = "theirs lacks attention and the output projection (some 1.2 ms)"
        if sessions == 64:
            why = (
                "theirs takes 8 ms of the host a pass at 64 sessions, as vLLM of early 2024 did;"
                " ours 4.4, as our verifier does"
            )
        figure = f"TPOT, {sessions} session{'s' * (sessions > 1)}"
        found.append(
            Comparison("Vidur", figure, _VIDUR, theirs, ours, ours, ours, unit=" ms", why=why)
        )
    for prompt, one in zip(by_prompt, played[len(by_sessions) :], strict=True):
        theirs = _VIDUR_LAYERS * _VIDUR_LAYER_MS[prompt] + _VIDUR_HOST_MS[8]
        ours = 1e3 * fmean(each.ttft_s for each in one[Arm.TARGET_ONLY])
        why = "theirs lacks attention; ours counts all parameters, also those of the embedding"
        figure = f"TTFT, a prompt of {prompt:,} tokens"
        found.append(
            Comparison("Vidur", figure, _VIDUR, theirs, ours, ours, ours, unit=" ms", why=why)
        )
    return found


# --- Koh and Yang --------------------------------------------------------------------------------


def compare_uara(player: Player) -> list[Comparison]:
    """Compare the saving of the paper's association with ours, at two sides of the area."""
    found = []
    for side_m in (200.0, 400.0):
        choices = uara.Choices(side_m=side_m)
        point = uara.play_point("side_m", choices, 30, 0, {})
        saved = point.saved[uara.CLAIM]
        found.append(
            Comparison(
                "Koh and Yang",
                f"latency saved over three baselines, a side of {side_m:g} m",
                "arXiv 2511.01695, abstract",
                100.0 * uara.PAPER_GAIN,
                100.0 * saved.value,
                100.0 * saved.low,
                100.0 * saved.high,
                unit=" %",
                why="the side is not stated, and decides: [user association](uara.md)",
            )
        )
    return found


COMPARISONS: Final[Mapping[str, tuple[Callable[[Player], list[Comparison]], int]]] = {
    "pearl": (compare_pearl, 6),
    "picospec": (compare_picospec, 6),
    "specedge": (compare_specedge, 2),
    "dsd": (compare_dsd, 8),
    "dsdsim": (compare_dsdsim, 2),
    "vidur": (compare_vidur, 1),
    "uara": (compare_uara, 1),
}
"""Comparisons by name, with the seeds of each point: few where a world has many requests."""


@dataclass(slots=True)
class PooledPlayer:
    """Plays worlds in processes. It is a context manager."""

    jobs: int
    pool: Any = field(default=None, init=False)

    def __enter__(self) -> PooledPlayer:
        self.pool = Pool(self.jobs)
        return self

    def __exit__(self, *args: object) -> None:
        self.pool.terminate()
        self.pool.join()

    def play_all(self, tasks: Sequence[Task]) -> list[Outcome]:
        """Play worlds, and return their outcomes in order."""
        return list(self.pool.imap(play, tasks))


def compare_all(jobs: int, only: Sequence[str] = ()) -> list[Comparison]:
    """Play all comparisons, or the named ones."""
    found = []
    with PooledPlayer(jobs) as pooled:
        for name, (compare, seeds) in COMPARISONS.items():
            if not only or name in only:
                found += compare(Player(pooled.play_all, seeds))
                print(f"{name} is done", file=sys.stderr, flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Play the comparisons and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--only", choices=COMPARISONS, action="append", help="one system")
    args = parser.parse_args(argv)
    for one in compare_all(args.jobs, args.only or ()):
        print(
            f"{one.system:12s} {one.published:8.3f} {one.ours:8.3f} ({one.low:.3f}-{one.high:.3f})"
            f"{one.unit} {one.figure}; {one.why}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
