"""The planner of a draft's memory.

Oracles: properties that any plan must have (within the budget, monotone in it, the sum of its
terms), the worked numbers of the docstrings, and the refusal's own figure, which must be enough.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.device.memory import (
    MIB,
    DraftSettings,
    DraftVariant,
    KvType,
    MachineMemory,
    MemoryPlanError,
    MemoryQuestion,
    candidate_bytes,
    kv_bytes,
    load_surplus_bytes,
    margin_bytes,
    memory_terms,
    parse_budget,
    plan_memory,
    sampling_bytes,
    smallest_budget,
    traded,
    unbounded,
    weights_bytes,
    windows,
    workspace_bytes,
)

LARGE = DraftVariant(
    name="large",
    bits=4,
    kv_type=KvType.FLOAT32,
    stored_bytes=375_000_000,
    table_bytes=97_000_000,
    inline=False,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    hidden=1024,
    feed_forward=3072,
    vocabulary_size=151_936,
    context_length=4096,
)
SMALL = replace(
    LARGE,
    name="small",
    stored_bytes=85_000_000,
    table_bytes=17_700_000,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    feed_forward=1536,
    vocabulary_size=49_152,
)
TYPES = tuple(replace(LARGE, kv_type=kv_type) for kv_type in KvType)
RUNTIME = 82 * MIB
VARIANTS = st.sampled_from([(LARGE,), (SMALL,), TYPES, (SMALL, *TYPES)])
QUESTIONS = st.builds(
    MemoryQuestion,
    budget_bytes=st.integers(1, 8192).map(lambda mib: mib * MIB),
    runtime_bytes=st.integers(40 * MIB, 200 * MIB),
    most_width=st.integers(1, 4),
    most_window=st.sampled_from([0, 128, 500, 2048]),
    threads=st.sampled_from([0, 1, 2]),
    cores=st.integers(1, 8),
)


def question(budget_mib: float, **changes: int) -> MemoryQuestion:
    return replace(MemoryQuestion(int(budget_mib * MIB), RUNTIME, most_width=2, cores=2), **changes)


@settings(max_examples=25)
@given(VARIANTS, QUESTIONS)
def test_a_plan_lies_below_its_budget_or_is_refused_with_one_that_is_enough(
    variants: tuple[DraftVariant, ...], asked: MemoryQuestion
) -> None:
    needed = smallest_budget(variants, asked)
    if asked.budget_bytes < needed:
        with pytest.raises(MemoryPlanError) as refused:
            plan_memory(variants, asked)
        assert refused.value.smallest_bytes == needed
        enough = plan_memory(variants, replace(asked, budget_bytes=needed))
        assert enough.predicted_bytes + enough.margin_bytes <= needed
    else:
        plan = plan_memory(variants, asked)
        assert plan.predicted_bytes + margin_bytes(asked.budget_bytes) <= asked.budget_bytes
        again = memory_terms(plan.variant, plan.settings, asked.runtime_bytes)
        assert plan.predicted_bytes == sum(term.bytes for term in again)
        assert all(term.bytes >= 0 for term in plan.terms)
        assert plan.variant in variants
        assert plan.settings.width <= asked.most_width
        assert plan.settings.window <= (asked.most_window or 1024)
        assert plan.settings.threads == asked.threads or not asked.threads


@settings(max_examples=25)
@given(VARIANTS, QUESTIONS, st.integers(0, 4096))
def test_more_memory_never_makes_a_window_or_a_step_smaller(
    variants: tuple[DraftVariant, ...], asked: MemoryQuestion, more_mib: int
) -> None:
    try:
        before = plan_memory(variants, asked)
    except MemoryPlanError:
        return
    richer = replace(asked, budget_bytes=asked.budget_bytes + more_mib * MIB)
    for plan in (plan_memory(variants, richer), unbounded(variants, asked)):
        if plan.variant.name == before.variant.name:
            now, then = plan.settings, before.settings
            assert (now.width, now.window) >= (then.width, then.window)
        else:  # of several, the first that fits
            assert plan.variant.name == variants[0].name


@given(
    st.sampled_from([LARGE, SMALL, *TYPES]),
    st.integers(1, 4096),
    st.integers(1, 8),
    st.sampled_from([16, 32, 64]),
)
def test_every_setting_costs_memory(
    variant: DraftVariant, window: int, width: int, chunk: int
) -> None:
    def steady(one: DraftSettings) -> int:
        return sum(t.bytes for t in memory_terms(variant, one, RUNTIME) if t.name != "loading")

    base = DraftSettings(window, width, chunk, 1)
    for more in (
        replace(base, window=window + 64),
        replace(base, width=width + 1),
        replace(base, chunk=chunk + 1),
        replace(base, threads=2),
    ):
        assert steady(more) > steady(base)


def test_the_worked_numbers_of_the_terms() -> None:
    assert LARGE.kv_bytes_per_token == 229_376
    assert kv_bytes(LARGE, 1024) == 224 * MIB
    assert kv_bytes(replace(LARGE, kv_type=KvType.INT8), 1024) == 56 * MIB
    hundred = replace(LARGE, stored_bytes=100 * MIB)
    assert round(weights_bytes(hundred) / MIB) == 167
    assert weights_bytes(replace(hundred, inline=True)) > weights_bytes(hundred)
    assert round(load_surplus_bytes(replace(LARGE, table_bytes=93 * MIB)) / MIB) == 74
    assert candidate_bytes(DraftSettings(128, 2, 64, 1)) == MIB // 2
    assert round(sampling_bytes(LARGE) / MIB, 1) == 6.4
    assert round(workspace_bytes(LARGE, DraftSettings(128, 2, 64, 1)) / MIB, 1) == 5.5
    assert round(margin_bytes(600 * MIB) / MIB) == 30
    assert windows(700) == (700, 512, 384, 256, 192, 128)
    assert windows(100) == (100,)


def test_a_tight_budget_trades_and_says_so() -> None:
    """Float32 has to give up most of its window; int8 fits with more of it into as much."""
    asked = question(smallest_budget([LARGE], question(1)) / MIB + 1)
    plan, best = plan_memory([LARGE], asked), unbounded([LARGE], asked)
    assert best.settings == DraftSettings(1024, 2, 64, 2)
    assert f"window {plan.settings.window} instead of 1024" in traded(plan, best)
    assert traded(best, best) == ()
    either = plan_memory(TYPES, asked)
    assert either.variant.kv_type is not KvType.FLOAT32
    assert either.settings.window > plan.settings.window


def test_a_refusal_names_the_smallest_budget() -> None:
    needed = smallest_budget([LARGE], question(1))
    with pytest.raises(MemoryPlanError, match="--draft none") as refused:
        plan_memory([LARGE], question(500))
    assert f"needs at least {needed / MIB:.1f} MiB" in str(refused.value)
    assert "memory budget is 500.0 MiB" in str(refused.value)
    assert plan_memory([LARGE, SMALL], question(500)).variant is SMALL


# --- sizes ----------------------------------------------------------------------------------

MACHINE = MachineMemory(total=8000 * MIB, available=1000 * MIB, resident=80 * MIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600MiB", 600 * MIB),
        ("600 MB", 600_000_000),
        ("0.5gib", 512 * MIB),
        ("1GB", 1_000_000_000),
        ("4096KiB", 4 * MIB),
        ("25%", 2000 * MIB),
        ("auto", 980 * MIB),
    ],
)
def test_budgets_that_can_be_read(text: str, expected: int) -> None:
    assert parse_budget(text).resolve(MACHINE) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("12x", "unknown unit 'x'"),
        ("0", "it lacks a unit"),
        ("0MiB", "must be in"),
        ("600", "it lacks a unit"),
        ("200%", r"must be in \(0%, 100%\]"),
        ("0%", "must be in"),
        ("-5MiB", "must be a size"),
        ("all", "must be a size"),
        ("", "must be a size"),
        ("1e9GiB", "must be a size"),
        ("99999999GiB", "must be in"),
        ("6 0MiB", "must be a size"),
        ("600  MB", "must be a size"),
        ("nan%", "must be a size"),
    ],
)
def test_budgets_that_cannot_are_refused_with_the_text_and_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_budget(text)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("extra_mib", [0, 60, 500, 4000])
def test_what_is_left_goes_into_further_caches(extra_mib: int) -> None:
    """They cost the first text nothing, fit, and one more would not."""
    asked = MemoryQuestion(1 << 40, 60 * MIB, 2, most_window=512, threads=1)
    budget = smallest_budget([LARGE], asked) + extra_mib * MIB
    alone = plan_memory([LARGE], replace(asked, budget_bytes=budget))
    plan = plan_memory([LARGE], replace(asked, budget_bytes=budget, most_caches=6))
    assert replace(plan.settings, caches=1) == alone.settings
    most = budget - margin_bytes(budget)
    assert plan.predicted_bytes <= most
    cache = kv_bytes(LARGE, plan.settings.window)
    grown = plan.predicted_bytes - alone.predicted_bytes
    assert grown <= (plan.settings.caches - 1) * cache
    if plan.settings.caches < 6:
        more = replace(plan.settings, caches=plan.settings.caches + 1)
        assert sum(term.bytes for term in memory_terms(LARGE, more, 60 * MIB)) > most
    assert (plan.settings.caches == 6) == (extra_mib == 4000)
