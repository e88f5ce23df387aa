"""The report page of a run: its results, beside what they are compared with."""

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

# A smaller estimate is what one and the same clock yields.
_CLOCKS_APART_S: Final = 5e-3


def render(
    summary: RunSummary,
    timeline: Timeline | None = None,
    first_timelines: Mapping[str, Timeline] | None = None,
) -> str:
    """Return an HTML file without outside references. ``first_timelines`` holds the timeline of the
    first generation by arm."""
    kind = "simulated" if summary.simulated else "real"
    page = Document(f"{summary.marked_name or 'run'}: {kind} run")
    page.paragraph(describe_question(summary), "asked")
    page.paragraph(headline(summary), "headline")
    for figure in (_make_lanes_figure(timeline, first_timelines or {}), plots.pace_plot(summary)):
        if figure is not None:
            page.figure(figure)
    page.paragraph(_describe_run(summary), "facts")
    if timeline is not None:
        page.paragraph(_describe_timeline(timeline), "facts")
    page.heading("Arms")
    page.add(tables.arms_table(summary))
    page.items(summary.notes)
    with page.fold("Requests, verifiers, links and groups"):
        for name, html in _detail_tables(summary):
            page.heading(name, 3)
            page.add(html)
    _add_settings(page, summary)
    return page.html()


def _make_lanes_figure(
    timeline: Timeline | None, first_timelines: Mapping[str, Timeline]
) -> Figure | None:
    """Plot the same generation by each arm, or the first sessions of a trace."""
    if first_timelines:
        first = {
            arm: next(iter(plots.first_sessions(one).values()), None)
            for arm, one in first_timelines.items()
        }
        known = {arm: lanes for arm, lanes in first.items() if lanes is not None}
        return plots.lanes_plot(known, "The first generation of the first device, arm by arm")
    if timeline is None:
        return None
    return plots.lanes_plot(plots.first_sessions(timeline), "The first sessions of the trace")


def _detail_tables(summary: RunSummary) -> list[tuple[str, str]]:
    found = (
        ("How requests ended", tables.requests_ended_table(summary)),
        ("Verifiers", tables.verifiers_table(summary)),
        ("Drafts", tables.drafts_table(summary)),
        ("Links", tables.links_table(summary)),
        ("Batteries and heat", tables.power_table(summary)),
        ("Groups", tables.groups_table(summary)),
    )
    return [(name, html) for name, html in found if html]


def describe_question(summary: RunSummary) -> str:
    """Return the question that the run answers, in plain text."""
    arms = [arm.name for arm in summary.arms]
    about = f"{summary.about} " if summary.about else ""
    if len(arms) < 2:
        return f"{about}Question: how fast is {arms[0]} here?" if arms else about
    others = f"{', '.join(arms[:-1])} or {arms[-1]}"
    same = ", all with the same prompts and random numbers" if summary.simulated else ""
    return f"{about}Question: which way of decoding is fastest here{same}: {others}?"


def headline(summary: RunSummary) -> str:
    """Name the fastest arm and its lead, in a sentence or two of plain text. Means are compared
    with those of the fastest arm that needs no device."""
    timed = [(arm, arm.all.tpot_s) for arm in summary.arms if arm.all.tpot_s is not None]
    if not timed:
        return "No request reached a second token, so there is no time per token to report."
    arm, spread = min(timed, key=lambda pair: pair[1].mean)
    alone = [pair for pair in timed if pair[0].arm in _WITHOUT_DEVICE]
    what = f"{tables.milliseconds(spread.mean)} ms per token on average"
    if not alone or len(timed) == 1:
        first = arm.all.ttft_s
        begins = f", the first after {tables.duration(first.median)}" if first else ""
        return f"{arm.name}: {what}{begins}, {_tokens_per_pass(arm)} tokens per pass."
    base, base_spread = min(alone, key=lambda pair: pair[1].mean)
    is_plain = base.arm == Arm.TARGET_ONLY.value
    named = "target-only streaming" if is_plain else f"{base.name}, the best without a device"
    if arm is base:
        nothing = "target-only streaming" if is_plain else f"{base.name}, which needs no device"
        return f"Nothing here is faster than {nothing}: {what}. {_describe_our_arms(summary)}"
    gain, ends = arm.gain, arm.gain_interval
    if gain is None:  # It is not computed for a real run.
        gain, ends = base_spread.mean / spread.mean, arm.speedup_interval if is_plain else None
    against = tables.milliseconds(base_spread.mean)
    ours = " (ours)" if tables.is_ours(arm.arm) else ""
    text = (
        f"{arm.name}{ours} is {tables.times(gain)} as fast as {named}"
        f"{_describe_certainty(summary, ends)}: {what} against {against} ms,"
        f" with {_tokens_per_pass(arm)} tokens per pass."
    )
    if not is_plain and arm.speedup is not None:
        text += f" Relative to target-only streaming it is {tables.speedup(arm)}."
    return text if ours else f"{text} {_describe_our_arms(summary)}"


_WITHOUT_DEVICE = frozenset(arm.value for arm in Arm if not arm.drafts)
"""The arms that need no device."""


def _describe_certainty(summary: RunSummary, ends: tuple[float, float] | None) -> str:
    """Return the certainty of a ratio: its interval, or a remark that one seed has none."""
    if ends is not None:
        inside = ends[0] <= 1.0 <= ends[1]
        return f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f}{': perhaps chance' * inside})"
    alone = summary.simulated and summary.seed is not None and summary.seeds == 1
    return " (one seed, so the certainty is unknown)" if alone else ""


def _tokens_per_pass(arm: ArmSummary) -> str:
    return tables.number(arm.all.tokens_per_pass)


def _describe_our_arms(summary: RunSummary) -> str:
    parts = [
        f"{arm.name} (ours) takes {tables.milliseconds(arm.all.tpot_s.mean)} ms"
        + (f", {tables.speedup(arm)}" if arm.speedup is not None else "")
        for arm in summary.arms
        if tables.is_ours(arm.arm) and arm.all.tpot_s is not None
    ]
    return "; ".join(parts) + "." if parts else ""


def _describe_run(summary: RunSummary) -> str:
    kind = "simulated in virtual time" if summary.simulated else "measured"
    facts = [
        f"{tables.duration(summary.duration_s)}, {kind}",
        f"tokens from {summary.tokens_from}" if summary.tokens_from else "",
        tables.seeds_played(summary),
    ]
    return " · ".join(fact for fact in facts if fact)


def _describe_timeline(timeline: Timeline) -> str:
    facts = ["The whole timeline is in timeline.json, for ui.perfetto.dev."]
    if len(timeline.sessions) > plots.SESSIONS_DRAWN:
        facts.append(f"The trace holds {len(timeline.sessions):,} sessions.")
    if timeline.truncated:
        facts.append("The trace continues after the end of the timeline.")
    offsets = [abs(offset_s) for offset_s in timeline.clock_offsets_s.values()]
    if offsets and max(offsets) > _CLOCKS_APART_S:
        facts.append(
            "The clocks of the two sides were aligned by assuming that their least delays are"
            " equal in both directions."
        )
    return " ".join(facts)


def _add_settings(page: Document, summary: RunSummary) -> None:
    if summary.settings:
        text = json.dumps(summary.settings, indent=2, ensure_ascii=False, default=str)
        page.folded("The scenario and its settings", text)
    if summary.environment:
        lines = (f"{key}: {value}" for key, value in summary.environment.items())
        page.folded("Environment and command", "\n".join(lines))


# --- the report files of a run's folder, or of traces -------------------------------------------
# The report of a trace never overwrites the report of a run: a folder with a summary gets only the
# report of that summary.
# A run's folder holds ``summary.json``, ``trace.jsonl`` or both; without a summary, one is computed
# from the trace. The report adds ``report.html``, ``arms.csv``, ``requests.csv`` and, if there is a
# trace, ``timeline.json`` for ui.perfetto.dev.

SUMMARY: Final = "summary.json"
TRACE: Final = "trace.jsonl"
FIRST_GENERATIONS: Final = "first-questions"
PAGE: Final = "report.html"
_BOTH_MAX: Final = 2


def first_generation_path(folder: Path, arm: str) -> Path:
    """Return the path at which a simulated run writes the trace of an arm's first generation."""
    return folder / FIRST_GENERATIONS / f"{arm}.jsonl"


def first_generation_paths(folder: Path) -> dict[str, Path]:
    """Return the existing traces of first generations, by arm."""
    return {path.stem: path for path in sorted((folder / FIRST_GENERATIONS).glob("*.jsonl"))}


def report_on(paths: Sequence[Path], out: Path | None = None) -> list[Path]:
    """Write the report files of a run, and return their paths.

    ``paths`` is the run's folder, its summary, or one or two traces of a real run (the device's,
    the verifier's). The files go to ``out``, by default beside the run. The report of a trace in a
    run's folder gets its own folder there.

    Raises ``ReportError``, ``SummaryError``, ``TraceLineError`` and ``OSError``."""
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
        run = read_summary(summary) if summary.is_file() else _summarise_traces(traces, folder.name)
        out = out or folder
        if (out / SUMMARY).resolve() != summary.resolve():
            refuse_to_replace(out)
        return _write_report(run, traces, out)
    if len(paths) > _BOTH_MAX:
        raise ReportError(f"{len(paths)} traces given, but a report takes at most {_BOTH_MAX}")
    if out is None:
        out = first.parent
        if (out / SUMMARY).is_file():
            out = out / f"{first.stem}-report"
    refuse_to_replace(out)
    return _write_report(_summarise_traces(paths, first.stem if alone else "run"), paths, out)


def refuse_to_replace(out: Path) -> None:
    """Raise ``ReportError`` if ``out`` holds the summary of a run."""
    if not (out / SUMMARY).is_file():
        return
    try:
        run = read_summary(out / SUMMARY)
        what = f"{run.name}, seed {run.seed} and on: {run.seeds} played"
    except SummaryError:
        what = f"an unreadable {SUMMARY}"
    raise ReportError(f"{out}: holds another run ({what}); name another folder, or remove it")


def _summarise_traces(traces: Sequence[Path], name: str) -> RunSummary:
    with _report_damaged_lines(traces):
        return summarise(read_lines(traces), name or "run")


def _build_timeline(traces: Sequence[Path], *, one_clock: bool) -> Timeline:
    with _report_damaged_lines(traces):
        return build_timeline(read_lines(traces), one_clock=one_clock)


@contextmanager
def _report_damaged_lines(traces: Sequence[Path]) -> Iterator[None]:
    """Turn every error that a damaged line causes in its readers into a ``TraceLineError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        where = ", ".join(map(str, traces))
        raise TraceLineError(f"{where}: a line lacks a field of its kind: {error}") from error


def _write_report(run: RunSummary, traces: Sequence[Path], out: Path) -> list[Path]:
    timeline = _build_timeline(traces, one_clock=run.simulated) if traces else None
    out.mkdir(parents=True, exist_ok=True)
    first_timelines = _first_timelines(run, timeline, traces[0].parent) if traces else {}
    texts = {PAGE: render(run, timeline, first_timelines)}
    texts |= {"arms.csv": arms_csv(run), "requests.csv": requests_csv(run)}
    if timeline is not None:
        texts["timeline.json"] = perfetto_json(timeline)
    written = []
    for name, text in texts.items():
        path = out / name
        if name == PAGE:
            write_page(path, text)
        else:
            # newline="": CSV has its own line ends.
            path.write_text(text, encoding="utf-8", newline="")
        written.append(path)
    return written


def _first_timelines(
    run: RunSummary, timeline: Timeline | None, folder: Path
) -> dict[str, Timeline]:
    """Return the timeline of each arm's first generation. The arm without a file of its own has the
    whole trace."""
    if not run.simulated:
        return {}
    found = first_generation_paths(folder)
    first_timelines = {}
    for arm in run.arms:
        if arm.arm in found:
            first_timelines[arm.name] = _build_timeline([found[arm.arm]], one_clock=True)
        elif timeline is not None:
            first_timelines[arm.name] = timeline
    return first_timelines if len(found) + 1 == len(run.arms) else {}
