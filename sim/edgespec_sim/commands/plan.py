"""``edgespec plan``: plans a deployment before anything is installed. Its subcommands choose a way
of decoding for a link, count the verifiers that users need, and compute the memory of a draft.

``plan memory`` measures this very process, so this module imports nothing of the simulator.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edgespec.cli.main import lazy_app
from edgespec.cli.running import reporting_errors
from edgespec.config import ConfigError, DraftSection
from edgespec.core.device.memory import AUTO, MIB, Held, MemoryTerm
from edgespec.core.device.policy import DEFAULT_WIDTH
from edgespec.device.build import BUNDLED, load_tokenizer

if TYPE_CHECKING:
    from edgespec.core.device.memory import DraftVariant, MemoryPlan, MemoryPlanInputs

plan = lazy_app(
    "plan",
    {
        "link": "edgespec_sim.commands.plan_link:link",
        "capacity": "edgespec_sim.commands.plan_capacity:capacity",
        "memory": "edgespec_sim.commands.plan:memory",
    },
)


@plan.callback()
def main() -> None:
    """Plan a deployment: a link or its verifiers in virtual time, or a device's memory."""


Drafts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="DRAFT...",
        help="Drafts to choose from: bundled, folders or Hub ids; the first that fits is used",
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        "--memory-budget",
        envvar="EDGESPEC_MEMORY_BUDGET",
        metavar="SIZE",
        help="Limit for the whole process: 600MiB, 25% of the machine, or auto for what is free",
    ),
]
Corpus = Annotated[
    list[str] | None,
    typer.Option(
        "--draft-corpus",
        metavar="PATH",
        help="File or folder that is drafted from; may be given several times",
    ),
]
_SPREAD_BYTES = 6 << 20
"""Most that an agent at its start may hold above what this command measures. It is planned for, so
a budget that fits here also fits there."""


def memory(
    drafts: Drafts = None,
    memory_budget: Budget = AUTO,
    draft_corpus: Corpus = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout")] = False,
) -> None:
    """Show how much memory a draft takes, term by term, and what fits a budget.

    Nothing is connected, and only the libraries are loaded, whose memory is measured. The output of
    a generation does not depend on the budget, only its speed does.

    [dim]edgespec plan memory --memory-budget 600MiB[/]

    [dim]edgespec plan memory ./draft-small ./draft-large --memory-budget 25%[/]

    [dim]edgespec plan memory --draft-corpus ~/project --memory-budget 600MiB[/]"""
    with reporting_errors():
        references = drafts or [BUNDLED]
        try:
            section = DraftSection(
                model=references[0],
                memory_budget=memory_budget,
                corpus=tuple(draft_corpus or ()),
            )
        except ValueError as error:
            text = str(error).replace("memory_budget is", "--memory-budget is", 1)
            raise ConfigError(text) from None
        variants, question = _measure_memory(section, references)
        _show_answer(variants, question, as_json)


def _measure_memory(
    section: DraftSection, references: list[str]
) -> tuple[tuple[DraftVariant, ...], MemoryPlanInputs]:
    """Return the draft variants to choose from, and the question for the memory plan. All drafts of
    a target share its tokenizer, so the first draft's tokenizer is loaded. The libraries of
    ``chat`` are measured apart, since no other command loads them."""
    from edgespec.device.model_drafter import list_variants, measure_memory_question
    from edgespec.models.model_source import Purpose, resolve_source
    from edgespec.telemetry.process_memory import resident_bytes

    tokenizer = load_tokenizer(references[0])
    variants = tuple(
        variant
        for reference in references
        for variant in list_variants(section, resolve_source(reference, Purpose.DRAFT_WEIGHTS))
    )
    question = measure_memory_question(section, DEFAULT_WIDTH)
    del tokenizer
    before = resident_bytes()
    import edgespec.cli.chat  # noqa: F401

    terms = (
        ("chat", max(0, resident_bytes() - before), "libraries of chat"),
        ("spread", _SPREAD_BYTES, "most that another process holds beyond this one"),
    )
    others = [MemoryTerm(*term, Held.RESERVED) for term in terms]
    return variants, replace(question, additions=(*question.additions, *others))


def _show_answer(
    variants: tuple[DraftVariant, ...], question: MemoryPlanInputs, as_json: bool
) -> None:
    from edgespec.core.device.memory import plan_memory, plan_without_limit

    plan = plan_memory(variants, question)
    changes = plan.list_reductions(plan_without_limit(variants, question))
    if as_json:
        typer.echo(json.dumps(_memory_as_json(plan, changes), indent=2))
    else:
        _show_memory(plan, changes)


def _show_memory(plan: MemoryPlan, changes: tuple[str, ...]) -> None:
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("what", no_wrap=True)
    table.add_column("MiB", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for term in plan.terms:
        table.add_row(term.name, f"{term.bytes / MIB:.1f}", term.why)
    table.add_row("sum: the most", f"{plan.predicted_bytes / MIB:.1f}", "", style="bold")
    one, all_caches = plan.generating_bytes, plan.serving_bytes
    table.add_row("peak of generate", f"{one / MIB:.1f}", "one generation, a full window")
    caches = plan.settings.caches
    served = f"{caches} generations at a time" if caches > 1 else "one generation at a time"
    table.add_row("peak of serve", f"{all_caches / MIB:.1f}", f"{served}, full windows")
    table.add_row("kept free", f"{plan.margin_bytes / MIB:.1f}", "at least")
    table.add_row("budget", f"{plan.budget_bytes / MIB:.1f}", "")
    console.print(table)
    settings, variant = plan.settings, plan.variant
    console.print(
        f"\n[bold]take:[/] {variant.name}, {variant.bits} bits, {variant.kv_type.value} keys and"
        f" values, window {settings.window}, width {settings.width}, prefill chunk"
        f" {settings.chunk}, {settings.threads} thread{'s' if settings.threads > 1 else ''}"
    )
    console.print("traded: " + ("; ".join(changes) if changes else "nothing"))


def _memory_as_json(plan: MemoryPlan, changes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "draft": plan.variant.name,
        "bits": plan.variant.bits,
        "kv_type": plan.variant.kv_type.value,
        **asdict(plan.settings),
        "terms": {term.name: term.bytes for term in plan.terms},
        "predicted_bytes": plan.predicted_bytes,
        "peak_bytes": {"generate": plan.generating_bytes, "serve": plan.serving_bytes},
        "margin_bytes": plan.margin_bytes,
        "budget_bytes": plan.budget_bytes,
        "traded": list(changes),
    }
