"""The memory plan and the memory guard of a draft.

Oracles of the planner: properties that any plan must have (within the budget, equal to the sum of
its terms), the worked numbers of the docstrings, and the refusal's own figure, which must be
enough. Oracle of the guard: a process model whose resident memory is the memory of others plus the
rows of the draft. It must stay below the budget whenever that is possible, and the draft must come
back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.device import memory as me

FOUND = yaml.safe_load(Path(__file__).with_name("draft_variants.yaml").read_text(encoding="utf-8"))
LARGE, SMALL = (me.DraftVariant(kv_type=me.KvType.FLOAT32, **one) for one in FOUND)
TYPES = tuple(replace(LARGE, kv_type=kv_type) for kv_type in me.KvType)
RUNTIME = 82 * me.MIB
VARIANTS = st.sampled_from([(LARGE,), (SMALL,), TYPES, (SMALL, *TYPES)])
QUESTIONS = st.builds(
    me.MemoryPlanInputs,
    budget_bytes=st.integers(1, 8192).map(lambda mib: mib * me.MIB),
    runtime_bytes=st.integers(40 * me.MIB, 200 * me.MIB),
    max_width=st.integers(1, 4),
    max_window=st.sampled_from([0, 128, 500, 2048]),
    threads=st.sampled_from([0, 1, 2]),
    cores=st.integers(1, 8),
)


def plan_inputs(budget_mib: float, **changes: int) -> me.MemoryPlanInputs:
    settings: dict[str, Any] = dict(changes)
    return replace(
        me.MemoryPlanInputs(int(budget_mib * me.MIB), RUNTIME, max_width=2, cores=2), **settings
    )


@settings(max_examples=25)
@given(VARIANTS, QUESTIONS)
def test_a_plan_lies_below_its_budget_or_is_refused_with_one_that_is_enough(
    variants: tuple[me.DraftVariant, ...], asked: me.MemoryPlanInputs
) -> None:
    needed = me.smallest_budget(variants, asked)
    if asked.budget_bytes < needed:
        with pytest.raises(me.MemoryPlanError) as refused:
            me.plan_memory(variants, asked)
        assert f"needs at least {me.in_mib(needed)} " in str(refused.value)
        enough = me.plan_memory(variants, replace(asked, budget_bytes=needed))
        assert enough.predicted_bytes + enough.margin_bytes <= needed
    else:
        plan = me.plan_memory(variants, asked)
        assert plan.fits
        again = me.memory_terms(plan.variant, plan.settings, asked.runtime_bytes, asked.additions)
        assert plan.predicted_bytes == sum(term.bytes for term in again)
        assert all(term.bytes >= 0 for term in plan.terms)
        assert plan.variant in variants
        assert plan.settings.width <= asked.max_width
        assert plan.settings.window <= (asked.max_window or 1024)
        assert plan.settings.threads == asked.threads or not asked.threads


def test_the_worked_numbers_of_the_terms() -> None:
    assert LARGE.kv_bytes_per_token == 229_376
    assert replace(LARGE, kv_type=me.KvType.INT8).kv_bytes(1024) == 56 * me.MIB
    one = replace(LARGE, stored_bytes=100 * me.MIB, table_bytes=93 * me.MIB)
    settings = me.DraftSettings(1024, 2, 64, 1)
    terms = {term.name: term.bytes for term in me.memory_terms(one, settings, RUNTIME)}
    assert terms["keys and values"] == 224 * me.MIB
    assert round(terms["weights"] / me.MIB) == 167
    assert terms["candidate nodes"] == me.MIB // 2
    assert round(terms["logits and sampling"] / me.MIB, 1) == 6.4
    assert round(terms["workspace"] / me.MIB, 1) == 5.5
    assert terms["loading"] == 0
    short = me.memory_terms(one, me.DraftSettings(1, 1, 1, 1), RUNTIME)
    grown = sum(term.bytes for term in short[3:-1])
    assert round((short[-1].bytes + grown) / me.MIB) == 74
    inline = me.memory_terms(replace(one, inline=True), settings, RUNTIME)
    assert inline[2].bytes > terms["weights"]
    plan = replace(me.plan_without_limit([LARGE], plan_inputs(1)), budget_bytes=600 * me.MIB)
    assert round(plan.margin_bytes / me.MIB) == 30
    assert me.window_sizes(700) == (700, 512, 384, 256, 192, 128)
    assert me.window_sizes(100) == (100,)


def test_the_peaks_of_commands_are_sums_of_the_terms_that_they_hold() -> None:
    """Caches count once for a command with one generation at a time, and what is only reserved
    counts in the sum alone."""
    additions = (
        me.MemoryTerm("endpoint", 8 * me.MIB, "", me.Held.SERVING),
        me.MemoryTerm("requests", 16 * me.MIB, "", me.Held.RESERVED),
    )
    asked = replace(plan_inputs(1, max_caches=3), additions=additions)
    plan = me.plan_without_limit([LARGE], asked)
    plain = me.plan_without_limit([LARGE], plan_inputs(1))
    assert plan.settings.caches == 3
    assert plan.predicted_bytes == plan.serving_bytes + 16 * me.MIB
    assert plan.generating_bytes == plain.predicted_bytes
    caches = 2 * LARGE.kv_bytes(plan.settings.window)
    assert plan.serving_bytes == plan.generating_bytes + caches + 8 * me.MIB


def test_a_tight_budget_trades_and_says_so() -> None:
    """Float32 has to give up most of its window; int8 fits with more of it into the same budget."""
    asked = plan_inputs(me.smallest_budget([LARGE], plan_inputs(1)) / me.MIB + 1)
    plan, best = me.plan_memory([LARGE], asked), me.plan_without_limit([LARGE], asked)
    assert best.settings == me.DraftSettings(1024, 2, 64, 2)
    assert f"window {plan.settings.window} instead of 1024" in plan.list_reductions(best)
    assert best.list_reductions(best) == ()
    either = me.plan_memory(TYPES, asked)
    assert either.variant.kv_type is not me.KvType.FLOAT32
    assert either.settings.window > plan.settings.window


def test_a_refusal_names_the_smallest_budget() -> None:
    needed = me.smallest_budget([LARGE], plan_inputs(1))
    with pytest.raises(me.MemoryPlanError, match="--draft none") as refused:
        me.plan_memory([LARGE], plan_inputs(500))
    assert f"needs at least {needed / me.MIB:.1f} MiB" in str(refused.value)
    assert "memory budget is 500.0 MiB" in str(refused.value)
    assert me.plan_memory([LARGE, SMALL], plan_inputs(500)).variant is SMALL


MACHINE = me.MachineMemory(total=8000 * me.MIB, available=1000 * me.MIB, resident=80 * me.MIB)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("600MiB", 629145600),
        ("600 MB", 600000000),
        ("0.5gib", 536870912),
        ("1GB", 1000000000),
        ("4096KiB", 4194304),
        # The machine has 8000 MiB with 1000 free, and the process has 80.
        ("25%", 2097152000),
        ("auto", 1027604480),
    ],
)
def test_budgets_that_can_be_read(text: str, expected: int) -> None:
    assert me.parse_budget(text).resolve(MACHINE) == expected


@pytest.mark.parametrize("extra_mib", [0, 60, 500, 4000])
def test_what_is_left_goes_into_further_caches(extra_mib: int) -> None:
    """Extra caches cost the first generation nothing and fit, and one more would not fit."""
    asked = me.MemoryPlanInputs(1 << 40, 60 * me.MIB, 2, max_window=512, threads=1)
    budget = me.smallest_budget([LARGE], asked) + extra_mib * me.MIB
    alone = me.plan_memory([LARGE], replace(asked, budget_bytes=budget))
    plan = me.plan_memory([LARGE], replace(asked, budget_bytes=budget, max_caches=6))
    assert replace(plan.settings, caches=1) == alone.settings
    most = budget - plan.margin_bytes
    assert plan.predicted_bytes <= most
    cache = LARGE.kv_bytes(plan.settings.window)
    grown = plan.predicted_bytes - alone.predicted_bytes
    assert grown <= (plan.settings.caches - 1) * cache
    if plan.settings.caches < 6:
        more = replace(plan.settings, caches=plan.settings.caches + 1)
        assert sum(term.bytes for term in me.memory_terms(LARGE, more, 60 * me.MIB)) > most
    assert (plan.settings.caches == 6) == (extra_mib == 4000)


ROW, BUDGET, MARGIN = 1000, 1_000_000, 50_000
FULL = me.DraftAllowance(500, 4)


class Process:
    """A process model whose rows come and go at once, like the pages of ``KvBuffers``."""

    def __init__(self) -> None:
        self.guard = me.MemoryGuard(BUDGET, MARGIN, FULL, ROW)
        self.held = 0
        self.now = 0.0

    def step(self, others: int, tokens: int) -> None:
        """Run a draft step that would hold ``tokens`` rows in all."""
        self.now += 1.0
        for _ in range(8):  # a driver asks before every step; the test asks until nothing changes
            wanted = min(tokens, self.guard.current.window)
            growth = max(0, wanted - self.held) * ROW
            resident = others + self.held * ROW
            found = self.guard.observe(resident, growth, self.held, self.now)
            if found is None:
                break
            self.held = min(self.held, found.window)
        self.held = max(self.held, min(tokens, self.guard.current.window))


@given(st.lists(st.tuples(st.integers(0, 1_200_000), st.integers(1, 500)), max_size=60))
def test_the_process_stays_below_the_margin_or_the_draft_rests(
    steps: list[tuple[int, int]],
) -> None:
    process = Process()
    for others, tokens in steps:
        process.step(others, tokens)
        current = process.guard.current
        below = others + process.held * ROW <= BUDGET - MARGIN
        assert below or current == me.DraftAllowance(0, 0)
        assert current.window <= FULL.window
        assert current.width <= FULL.width


def test_it_takes_no_more_than_needed_and_in_order() -> None:
    guard = me.MemoryGuard(BUDGET, MARGIN, FULL, ROW)
    assert guard.observe(900_000, 24_000, 400, 0.0) is None
    # The guard saw 424 rows, 10 too many.
    assert guard.observe(936_000, 24_000, 400, 1.0) == me.DraftAllowance(414, 4)
    assert guard.observe(2_000_000, 0, 400, 2.0) == me.DraftAllowance(me.SMALLEST_WINDOW, 4)
    assert guard.observe(2_000_000, 0, 64, 3.0) == me.DraftAllowance(me.SMALLEST_WINDOW, 1)
    assert guard.observe(2_000_000, 0, 64, 4.0) == me.DraftAllowance(0, 0)
    assert guard.observe(2_000_000, 0, 0, 5.0) is None


def test_the_draft_comes_back_rung_by_rung_after_a_while() -> None:
    process = Process()
    process.step(2_000_000, 400)
    seen = [process.guard.current]
    for _ in range(int(me.RECOVERY_S) * 8):
        process.step(100_000, 400)
        if process.guard.current != seen[-1]:
            seen.append(process.guard.current)
            process.step(100_000, 400)
    rungs = [(0, 0), (64, 1), (64, 4), (128, 4), (256, 4), (FULL.window, FULL.width)]
    assert [(one.window, one.width) for one in seen] == rungs
