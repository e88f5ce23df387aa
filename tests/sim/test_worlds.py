"""Random worlds: whatever goes wrong, every device gets its target's own text.

Oracle: ``checks`` on every event of every world (see there), against the stream computed directly
from the target's law. Golden counts notice what no check can: drafts that stopped being useful.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.device.policy import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.protocol.messages import FinishReason, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.session import VerifySession
from tests.sim.faults.checks import CheckFailure, target_stream
from tests.sim.faults.worlds import WorldOptions, WorldResult, run_world
from tests.sim.random_worlds import REPLAY, adversarial_drafter, draw_options, exact_drafter, play

WORLDS = 2400
SLOW_WORLDS = 5600
BATCH = 200


@pytest.mark.parametrize(
    "first",
    [
        *range(0, WORLDS, BATCH),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(WORLDS, SLOW_WORLDS, BATCH)),
    ],
)
def test_every_device_gets_the_targets_text(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"world {seed}: {error}; {REPLAY.format(seed=seed)}") from error


def test_the_worlds_are_eventful() -> None:
    """What is drawn covers what there is, so that passing means something."""
    seeds = range(300)
    options = [draw_options(seed) for seed in seeds]
    results = [play(seed) for seed in seeds]
    devices = [device for result in results for device in result.devices]
    assert sum(result.faults for result in results) > 400
    assert sum(result.hit_tokens for result in results) > 10_000
    assert {device.expected.reason for device in devices} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
        FinishReason.CONTEXT,
    }
    assert {type(policy) for o in options for policy in o.policies} == {
        FixedPolicy,
        PearlPolicy,
        WindowedPolicy,
    }
    assert {o.run_ahead for o in options} == set(RunAhead)
    assert sum(device.counters.accepted for device in devices) > 500
    assert sum(device.counters.corrected for device in devices) > 300
    assert sum(device.counters.stale for device in devices) > 200
    assert sum(device.counters.reconnects for device in devices) > 150


def test_a_world_is_a_function_of_its_seed() -> None:
    assert [play(seed) for seed in range(20)] == [play(seed) for seed in range(20)]


# --- golden counts ----------------------------------------------------------------------------

LAW = ToyModel(vocabulary_size=16, order=2, seed=3)
PLAIN = WorldOptions(model=LAW, sampling=SamplingParams(max_tokens=60))
SAMPLED = replace(PLAIN, sampling=SamplingParams(temperature=1.0, seed=11, max_tokens=60))
FAULTY = replace(PLAIN, cuts=3, restarts=1, replacements=1, duplicate_chance=0.3)
GOLDEN: tuple[tuple[str, WorldOptions, tuple[int, int, int, int]], ...] = (
    ("windowed", PLAIN, (4, 169, 76, 56)),
    ("windowed sampled", SAMPLED, (8, 154, 80, 52)),
    ("tree", replace(SAMPLED, policies=(WindowedPolicy(3),)), (8, 534, 371, 52)),
    (
        "pearl, no run-ahead",
        replace(PLAIN, policies=(PearlPolicy(),), run_ahead=RunAhead.NEVER),
        (29, 129, 0, 31),
    ),
    (
        "fixed, no run-ahead",
        replace(SAMPLED, policies=(FixedPolicy(4),), run_ahead=RunAhead.NEVER),
        (35, 88, 0, 25),
    ),
    (
        "three devices",
        replace(PLAIN, policies=(WindowedPolicy(), PearlPolicy(), FixedPolicy())),
        (16, 346, 153, 59),
    ),
    ("faults", FAULTY, (2, 148, 72, 58)),
    ("faults, no run-ahead", replace(FAULTY, run_ahead=RunAhead.NEVER), (28, 190, 54, 31)),
)


@pytest.mark.parametrize(("options", "golden"), [g[1:] for g in GOLDEN], ids=[g[0] for g in GOLDEN])
def test_drafts_count_for_as_much_as_ever(
    options: WorldOptions, golden: tuple[int, int, int, int]
) -> None:
    """(accepted, sent, stale, passes): a change that is meant to change them changes them here."""
    assert _counts(run_world(options, 1)) == golden


def _counts(result: WorldResult) -> tuple[int, int, int, int]:
    counters = [device.counters for device in result.devices]
    return (
        sum(c.accepted for c in counters),
        sum(c.sent for c in counters),
        sum(c.stale for c in counters),
        result.passes,
    )


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    """Without run-ahead nothing overtakes the drafts: every one that is looked at is accepted."""
    never = replace(PLAIN, drafter=exact_drafter, run_ahead=RunAhead.NEVER)
    for policy in (FixedPolicy(4), PearlPolicy(), WindowedPolicy()):
        counters = run_world(replace(never, policies=(policy,)), 1).devices[0].counters
        assert counters.acceptance == 1.0
        assert counters.accepted == counters.rows
        assert counters.corrected == 0


def test_a_drafter_that_is_never_right_does_no_harm() -> None:
    for run_ahead in RunAhead:
        hopeless = replace(PLAIN, drafter=adversarial_drafter, run_ahead=run_ahead)
        counters = run_world(hopeless, 1).devices[0].counters
        assert (counters.accepted, counters.hits, counters.committed) == (0, 0, 60)


# --- the kit itself ---------------------------------------------------------------------------


def test_the_expected_stream_ends_where_it_should() -> None:
    law = ToyModel(vocabulary_size=8, order=1, eos_token=7, eos_probability=0.2)
    long = SamplingParams(max_tokens=50)
    free = target_stream(law, (1,), replace(long, ignore_eos=True), 4096)
    assert (len(free.tokens), free.reason) == (50, FinishReason.LENGTH)
    cut = target_stream(law, (1,), replace(long, ignore_eos=True), 9)
    assert cut.tokens == free.tokens[:8]
    ended = target_stream(law, (1,), long, 4096)
    assert ended.reason is (FinishReason.STOP if 7 in free.tokens else FinishReason.LENGTH)
    stop = free.tokens[3]
    stopped = target_stream(law, (1,), replace(long, ignore_eos=True, stop_token_ids=(stop,)), 99)
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


def test_a_stalled_world_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerifySession, "_on_offer", lambda *arguments: ())
    with pytest.raises(CheckFailure, match="has 0 of 60 tokens"):
        run_world(PLAIN, 1)
