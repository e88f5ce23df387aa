"""The page of a run: what came out, beside what it is compared with and how far from the limit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgespec.bench.arms import Arm
from edgespec_sim.report import plots, tables
from edgespec_sim.report.document import (
    Document,
    Figure,
    ReportError,
    arms_csv,
    requests_csv,
    write_page,
)
from edgespec_sim.report.summarise import summarise
from edgespec_sim.report.timeline import (
    Timeline,
    TraceLineError,
    build_timeline,
    perfetto_json,
    read_lines,
)
from edgespec_sim.run_summary import ArmSummary, RunSummary, SummaryError, read_summary

# Less than this is what an estimate finds between two clocks that are one.
_CLOCKS_APART_S: Final = 5e-3


def render(
    summary: RunSummary,
    timeline: Timeline | None = None,
    firsts: Mapping[str, Timeline] | None = None,
) -> str:
    """An HTML file without outside references; ``firsts``: a question's timeline by arm."""
    kind = "simulated" if summary.simulated else "real"
    page = Document(f"{summary.marked_name or 'run'}: {kind} run")
    page.paragraph(asked(summary), "asked")
    page.paragraph(headline(summary), "headline")
    for figure in (_lanes(timeline, firsts or {}), plots.pace_plot(summary)):
        if figure is not None:
            page.figure(figure)
    page.paragraph(_facts(summary), "facts")
    if timeline is not None:
        page.paragraph(_of_timeline(timeline), "facts")
    page.heading("Arms")
    page.add(tables.arms_table(summary))
    page.items(summary.notes)
    with page.fold("Requests, verifiers, links and groups"):
        for name, html in _more_tables(summary):
            page.heading(name, 3)
            page.add(html)
    _settings(page, summary)
    return page.html()


def _lanes(timeline: Timeline | None, firsts: Mapping[str, Timeline]) -> Figure | None:
    """Of the same question by each arm, or of the first sessions of a trace."""
    if firsts:
        first = {
            arm: next(iter(plots.sessions_of(one).values()), None) for arm, one in firsts.items()
        }
        known = {arm: lanes for arm, lanes in first.items() if lanes is not None}
        return plots.lanes_plot(known, "The first question of the first device, arm by arm")
    if timeline is None:
        return None
    return plots.lanes_plot(plots.sessions_of(timeline), "The first sessions of the trace")


def _more_tables(summary: RunSummary) -> list[tuple[str, str]]:
    found = (
        ("How requests ended", tables.requests_ended_table(summary)),
        ("Verifiers", tables.verifiers_table(summary)),
        ("Drafts", tables.drafts_table(summary)),
        ("Links", tables.links_table(summary)),
        ("Groups", tables.groups_table(summary)),
    )
    return [(name, html) for name, html in found if html]


def asked(summary: RunSummary) -> str:
    """What the run was to find out, in plain text."""
    arms = [arm.name for arm in summary.arms]
    about = f"{summary.about} " if summary.about else ""
    if len(arms) < 2:
        return f"{about}Asked: how fast is {arms[0]} here?" if arms else about
    others = f"{', '.join(arms[:-1])} or {arms[-1]}"
    same = ", all with the same questions and the same dice" if summary.simulated else ""
    return f"{about}Asked: which way of decoding is fastest here{same}: {others}?"


def headline(summary: RunSummary) -> str:
    """Say in a sentence or two, in plain text, which arm won and by how much. Means are compared,
    with those of the fastest arm that needs no device."""
    timed = [(arm, arm.all.tpot_s) for arm in summary.arms if arm.all.tpot_s is not None]
    if not timed:
        return "No request came to a second token, so there is no time per token to report."
    arm, spread = min(timed, key=lambda pair: pair[1].mean)
    alone = [pair for pair in timed if pair[0].arm in _ALONE]
    what = f"{tables.milliseconds(spread.mean)} ms a token in the mean"
    if not alone or len(timed) == 1:
        first = arm.all.ttft_s
        begins = f", the first after {tables.duration(first.median)}" if first else ""
        return f"{arm.name}: {what}{begins}, {_per_pass(arm)} tokens a pass."
    base, base_spread = min(alone, key=lambda pair: pair[1].mean)
    is_plain = base.arm == Arm.TARGET_ONLY.value
    named = "target-only streaming" if is_plain else f"{base.name}, the best without a device"
    if arm is base:
        nothing = "target-only streaming" if is_plain else f"{base.name}, which needs no device"
        return f"Nothing here is faster than {nothing}: {what}. {_of_ours(summary)}"
    gain, ends = arm.gain, arm.gain_interval
    if gain is None:  # Nobody has computed it, as for a real run.
        gain, ends = base_spread.mean / spread.mean, arm.speedup_interval if is_plain else None
    against = tables.milliseconds(base_spread.mean)
    ours = " (ours)" if tables.is_ours(arm.arm) else ""
    told = (
        f"{arm.name}{ours} is {tables.times(gain)} as fast as {named}{_sure(summary, ends)}: {what}"
        f" against {against} ms, with {_per_pass(arm)} tokens a pass."
    )
    if not is_plain and arm.speedup is not None:
        told += f" Over target-only streaming it is {tables.speedup(arm)}."
    return told if ours else f"{told} {_of_ours(summary)}"


_ALONE = frozenset(arm.value for arm in Arm if not arm.drafts)
"""Arms that need no device."""


def _sure(summary: RunSummary, ends: tuple[float, float] | None) -> str:
    """Say how sure a ratio is: its interval, or that one seed says nothing about that."""
    if ends is not None:
        inside = ends[0] <= 1.0 <= ends[1]
        return f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f}{': perhaps chance' * inside})"
    alone = summary.simulated and summary.seed is not None and summary.seeds == 1
    return " (one seed: nobody knows how sure that is)" if alone else ""


def _per_pass(arm: ArmSummary) -> str:
    return tables.number(arm.all.tokens_per_pass)


def _of_ours(summary: RunSummary) -> str:
    parts = [
        f"{arm.name} (ours) takes {tables.milliseconds(arm.all.tpot_s.mean)} ms"
        + (f", {tables.speedup(arm)}" if arm.speedup is not None else "")
        for arm in summary.arms
        if tables.is_ours(arm.arm) and arm.all.tpot_s is not None
    ]
    return "; ".join(parts) + "." if parts else ""


def _facts(summary: RunSummary) -> str:
    kind = "simulated in virtual time" if summary.simulated else "measured"
    facts = [
        f"{tables.duration(summary.duration_s)}, {kind}",
        f"tokens from {summary.tokens_from}" if summary.tokens_from else "",
        tables.seeds_played(summary),
    ]
    return " · ".join(fact for fact in facts if fact)


def _of_timeline(timeline: Timeline) -> str:
    facts = ["The whole timeline is in timeline.json, which ui.perfetto.dev opens."]
    if len(timeline.sessions) > plots.SESSIONS_DRAWN:
        facts.append(f"The trace holds {len(timeline.sessions):,} sessions.")
    if timeline.truncated:
        facts.append("The trace goes on after the last span of the timeline.")
    offsets = [abs(offset_s) for offset_s in timeline.clock_offsets_s.values()]
    if offsets and max(offsets) > _CLOCKS_APART_S:
        facts.append(
            "The two sides' clocks were brought together by assuming that their least delays are "
            "equal both ways."
        )
    return " ".join(facts)


def _settings(page: Document, summary: RunSummary) -> None:
    if summary.settings:
        text = json.dumps(summary.settings, indent=2, ensure_ascii=False, default=str)
        page.folded("The scenario as it was run", text)
    if summary.environment:
        lines = (f"{key}: {value}" for key, value in summary.environment.items())
        page.folded("Environment and command", "\n".join(lines))


# --- a run's folder, or its traces, as files to look at ----------------------------------------
# What a run left is never overwritten by less: a folder with a summary gets the report of that
# summary and no other, unless somebody insists.
# A folder holds ``summary.json``, ``trace.jsonl`` or both; without a summary the trace is summed
# up. A folder that is written to is left with ``report.html``, ``arms.csv``, ``requests.csv``
# and, if there is a trace, ``timeline.json`` for ui.perfetto.dev.

SUMMARY: Final = "summary.json"
TRACE: Final = "trace.jsonl"
FIRST_QUESTIONS: Final = "first-questions"
PAGE: Final = "report.html"
_BOTH_MAX: Final = 2


def first_question(folder: Path, arm: str) -> Path:
    """Where a simulated run leaves the trace of an arm's first question."""
    return folder / FIRST_QUESTIONS / f"{arm}.jsonl"


def first_questions(folder: Path) -> dict[str, Path]:
    """Those that are there, by arm."""
    return {path.stem: path for path in sorted((folder / FIRST_QUESTIONS).glob("*.jsonl"))}


def report_on(paths: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Writes the files of a run to ``out``, or beside what it left; their paths. ``paths``: its
    folder, its summary, or one or two traces of a real run (the device's, the verifier's). Of the
    trace in a run's folder the report goes into a folder of its own there.

    Raises ``ReportError``, ``SummaryError``, ``TraceLineError``, ``OSError``."""
    first, alone = paths[0], len(paths) == 1
    for path in paths:
        if not path.is_file() and not (alone and path.is_dir()):
            raise ReportError(f"{path}: no such file")
    if alone and (first.is_dir() or first.suffix == ".json"):
        folder = first if first.is_dir() else first.parent
        summary = folder / SUMMARY if first.is_dir() else first
        traces = [folder / TRACE] if (folder / TRACE).is_file() else []
        if not summary.is_file() and not traces:
            raise ReportError(f"{folder}: holds neither {SUMMARY} nor {TRACE}")
        run = read_summary(summary) if summary.is_file() else _summed_up(traces, folder.name)
        out = out or folder
        if (out / SUMMARY).resolve() != summary.resolve():
            refuse_to_replace(out)
        return _write(run, traces, out)
    if len(paths) > _BOTH_MAX:
        raise ReportError(f"{len(paths)} traces, but a report is on {_BOTH_MAX} at most")
    if out is None:
        out = first.parent
        if (out / SUMMARY).is_file():
            out = out / f"{first.stem}-report"
    refuse_to_replace(out)
    return _write(_summed_up(paths, first.stem if alone else "run"), paths, out)


def refuse_to_replace(out: Path) -> None:
    """Raises ``ReportError`` where a run has left its summary."""
    if not (out / SUMMARY).is_file():
        return
    try:
        run = read_summary(out / SUMMARY)
        what = f"{run.name}, seed {run.seed} and on: {run.seeds} played"
    except SummaryError:
        what = f"an unreadable {SUMMARY}"
    raise ReportError(f"{out}: holds another run ({what}); name another folder, or remove it")


def _summed_up(traces: Sequence[Path], name: str) -> RunSummary:
    with _promised(traces):
        return summarise(read_lines(traces), name or "run")


def _laid_out(traces: Sequence[Path], *, one_clock: bool) -> Timeline:
    with _promised(traces):
        return build_timeline(read_lines(traces), one_clock=one_clock)


@contextmanager
def _promised(traces: Sequence[Path]) -> Iterator[None]:
    """Whatever a damaged line makes its readers raise is a ``TraceLineError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        where = ", ".join(map(str, traces))
        raise TraceLineError(f"{where}: a line lacks what its name promises: {error}") from error


def _write(run: RunSummary, traces: Sequence[Path], out: Path) -> list[Path]:
    timeline = _laid_out(traces, one_clock=run.simulated) if traces else None
    out.mkdir(parents=True, exist_ok=True)
    firsts = _firsts(run, timeline, traces[0].parent) if traces else {}
    texts = {PAGE: render(run, timeline, firsts)}
    texts |= {"arms.csv": arms_csv(run), "requests.csv": requests_csv(run)}
    if timeline is not None:
        texts["timeline.json"] = perfetto_json(timeline)
    written = []
    for name, text in texts.items():
        path = out / name
        if name == PAGE:
            write_page(path, text)
        else:
            # newline: CSV brings its own line ends.
            path.write_text(text, encoding="utf-8", newline="")
        written.append(path)
    return written


def _firsts(run: RunSummary, timeline: Timeline | None, folder: Path) -> dict[str, Timeline]:
    """The first question of each arm; the whole trace is that of the arm without a file."""
    if not run.simulated:
        return {}
    found = first_questions(folder)
    firsts = {}
    for arm in run.arms:
        if arm.arm in found:
            firsts[arm.name] = _laid_out([found[arm.arm]], one_clock=True)
        elif timeline is not None:
            firsts[arm.name] = timeline
    return firsts if len(found) + 1 == len(run.arms) else {}
