"""A plan fits a draft into a memory budget with the best expected speed.

Theory of operation. Every combination of variant, window, width, chunk and threads is predicted
(``memory_model.py``), those that do not leave the margin free are dropped, and of the others the
one with the best expected speed is taken (``draft_speed.py``); of equally fast ones the smallest. A
larger budget only adds combinations, so it never makes a plan slower. What is left then goes into
further caches, for generations beside the first: they never make that one slower. No text depends
on a plan: drafts are hints.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from edgespec.core.device.draft_speed import draft_speed
from edgespec.core.device.memory_model import (
    DraftSettings,
    DraftVariant,
    MemoryTerm,
    memory_terms,
)
from edgespec.core.device.memory_size import MIB, in_mib

SMALLEST_WINDOW = 128
CHUNKS = (64, 32, 16)
USUAL_TEXT = 1024
MARGIN_SHARE, LEAST_MARGIN_BYTES = 0.05, 8 * MIB
NEXT_STEP_BYTES = 100 * MIB
# Less than this is not a trade worth naming.
_NOTICEABLE = 0.005


class MemoryPlanError(ValueError):
    """No combination fits; ``smallest_bytes`` is the budget that the leanest one needs."""

    def __init__(self, message: str, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@dataclass(frozen=True, slots=True)
class MemoryQuestion:
    """What a plan has to go by."""

    budget_bytes: int
    """Of the whole process, at its peak."""
    runtime_bytes: int
    """What the process holds before it loads a draft."""
    most_width: int
    """Guesses a step that the user would have at most."""
    most_window: int = 0
    """Tokens whose keys and values the user would have at most; 0: the draft's context."""
    threads: int = 0
    """Of the draft; 0: the planner chooses, at most ``cores``."""
    cores: int = 1
    most_caches: int = 1
    """Generations whose keys and values the user would have held at once at most."""
    text_length: int = 0
    """How long texts are expected to be, prompt and output; 0: 1024 tokens, or the draft's context
    if that is less."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    variant: DraftVariant
    settings: DraftSettings
    terms: tuple[MemoryTerm, ...]
    budget_bytes: int
    tokens_per_s: float
    """Expected, by the model of ``draft_speed.py``; worth comparing, not quoting."""

    @property
    def predicted_bytes(self) -> int:
        """The sum of the terms: the peak of the process."""
        return sum(term.bytes for term in self.terms)

    @property
    def margin_bytes(self) -> int:
        return margin_bytes(self.budget_bytes)


def margin_bytes(budget_bytes: int) -> int:
    """What a plan leaves free: for the errors of its arithmetic, and for the guard to act in.

    Formula: max(8 MiB, 0.05 * budget). A budget of 600 MiB keeps 30 MiB free."""
    return max(LEAST_MARGIN_BYTES, int(MARGIN_SHARE * budget_bytes))


def plan_memory(
    variants: Sequence[DraftVariant], question: MemoryQuestion, known: Sequence[DraftVariant] = ()
) -> MemoryPlan:
    """The plan with the best expected speed within the budget.

    Raises ``MemoryPlanError`` naming the smallest budget that would do, and of ``known`` drafts
    with the same vocabulary one that would fit into this one.
    """
    assert variants
    most = question.budget_bytes - margin_bytes(question.budget_bytes)
    plans = [plan for plan in _plans(variants, question) if plan.predicted_bytes <= most]
    if not plans:
        raise _refusal(variants, question, known)
    return _with_caches(max(plans, key=_worth), question, most)


def _with_caches(plan: MemoryPlan, question: MemoryQuestion, most: int) -> MemoryPlan:
    """``plan`` with as many caches as the question would have and ``most`` bytes hold."""
    for caches in range(question.most_caches, 1, -1):
        settings = replace(plan.settings, caches=caches)
        terms = memory_terms(plan.variant, settings, question.runtime_bytes)
        richer = replace(plan, settings=settings, terms=terms)
        if richer.predicted_bytes <= most:
            return richer
    return plan


def unbounded(variants: Sequence[DraftVariant], question: MemoryQuestion) -> MemoryPlan:
    """The plan that would be taken if memory did not matter."""
    return _with_caches(max(_plans(variants, question), key=_worth), question, sys.maxsize)


def smallest_budget(variants: Sequence[DraftVariant], question: MemoryQuestion) -> int:
    """The least budget that any of ``variants`` fits into.

    Formula: max(p + 8 MiB, p / 0.95) for a leanest prediction of p. 152 MiB need 160 MiB."""
    return budget_for(min(plan.predicted_bytes for plan in _plans(variants, question)))


def budget_for(predicted_bytes: int) -> int:
    """The least budget that leaves its margin free beside ``predicted_bytes``."""
    return max(
        predicted_bytes + LEAST_MARGIN_BYTES, int(predicted_bytes / (1.0 - MARGIN_SHARE)) + 1
    )


def traded(plan: MemoryPlan, best: MemoryPlan) -> tuple[str, ...]:
    """What ``plan`` does with less of than ``best``, in words, and what that costs in speed."""
    ours, theirs = plan.settings, best.settings
    pairs = [
        ("draft", plan.variant.name, best.variant.name),
        ("weights", f"{plan.variant.bits} bits", f"{best.variant.bits} bits"),
        ("keys and values", plan.variant.kv_type.value, best.variant.kv_type.value),
        ("window", f"{ours.window} tokens", f"{theirs.window}"),
        ("width", str(ours.width), str(theirs.width)),
        ("prefill chunk", str(ours.chunk), str(theirs.chunk)),
        ("threads", str(ours.threads), str(theirs.threads)),
        ("caches", str(ours.caches), str(theirs.caches)),
    ]
    found = [
        f"{name} {one} instead of {other}" for name, one, other in pairs if _differ(one, other)
    ]
    loss = 1.0 - plan.tokens_per_s / best.tokens_per_s
    if found and loss > _NOTICEABLE:
        found.append(f"expected speed {loss:.0%} below that without a budget")
    return tuple(found)


def next_step(variants: Sequence[DraftVariant], question: MemoryQuestion, plan: MemoryPlan) -> str:
    """What 100 MiB more would buy, in words."""
    more = replace(question, budget_bytes=question.budget_bytes + NEXT_STEP_BYTES)
    richer = plan_memory(variants, more)
    gain = richer.tokens_per_s / plan.tokens_per_s - 1.0
    found = traded(richer, plan)
    if not found or gain <= 0.0:
        better = [p for p in _plans(variants, question) if p.tokens_per_s > plan.tokens_per_s]
        if not better:
            return "nothing: the draft has all that it can use"
        needed = budget_for(min(one.predicted_bytes for one in better))
        return f"nothing yet: the next gain comes at a budget of {in_mib(needed)}"
    changes = [one for one in found if not one.startswith("expected")]
    return f"{gain:.1%} more expected speed: {', '.join(changes)}"


def _differ(one: str, other: str) -> bool:
    return one.removesuffix(" tokens") != other.removesuffix(" tokens")


def _worth(plan: MemoryPlan) -> tuple[float, int]:
    return plan.tokens_per_s, -plan.predicted_bytes


def _plans(variants: Sequence[DraftVariant], question: MemoryQuestion) -> Iterator[MemoryPlan]:
    for variant in variants:
        text_length = question.text_length or min(USUAL_TEXT, variant.context_length)
        for settings in _settings(variant, question):
            yield MemoryPlan(
                variant,
                settings,
                memory_terms(variant, settings, question.runtime_bytes),
                question.budget_bytes,
                draft_speed(variant, settings, text_length),
            )


def _settings(variant: DraftVariant, question: MemoryQuestion) -> Iterator[DraftSettings]:
    threads = (question.threads,) if question.threads else (1, 2)[: question.cores]
    for window in windows(question.most_window or variant.context_length):
        for width in range(1, question.most_width + 1):
            for chunk in CHUNKS:
                for count in threads:
                    yield DraftSettings(window, width, chunk, count)


def windows(most: int) -> tuple[int, ...]:
    """The windows that are tried: 128, 192, 256, 384 and so on below ``most``, and ``most``."""
    found = []
    size = SMALLEST_WINDOW
    while size < most:
        found += [size, size * 3 // 2]
        size *= 2
    return (*(one for one in found if one < most), most)


def _refusal(
    variants: Sequence[DraftVariant], question: MemoryQuestion, known: Sequence[DraftVariant]
) -> MemoryPlanError:
    smallest = smallest_budget(variants, question)
    least = min(_plans(variants, question), key=lambda plan: plan.predicted_bytes)
    largest = sorted(least.terms, key=lambda term: -term.bytes)[:2]
    parts = ", ".join(f"{term.name} {in_mib(term.bytes)}" for term in largest)
    message = (
        f"memory budget is {in_mib(question.budget_bytes)}, but the draft"
        f" {least.variant.name!r} needs at least {in_mib(smallest)} ({parts})"
    )
    vocabularies = {variant.vocabulary_size for variant in variants}
    fitting = [
        one
        for one in known
        if one.vocabulary_size in vocabularies
        and smallest_budget([one], question) <= question.budget_bytes
    ]
    if fitting:
        message += f"; {fitting[0].name} in {fitting[0].bits} bits would fit"
    else:
        message += "; without a draft (--draft none) the text comes all the same"
    return MemoryPlanError(message, smallest)
