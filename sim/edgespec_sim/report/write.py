"""A run's folder, or its traces, as files to look at.

What a run left is never overwritten by less: a folder with a summary gets the report of that
summary and no other, unless somebody insists.

A folder holds ``summary.json``, ``trace.jsonl`` or both; without a summary the trace is summed up.
A folder that is written to is left with ``report.html``, ``arms.csv``, ``requests.csv`` and, if
there is a trace, ``timeline.json`` for ui.perfetto.dev.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from edgespec.telemetry.run_summary import RunSummary, SummaryError, read_summary
from edgespec_sim.report.csv_table import arms_csv, requests_csv
from edgespec_sim.report.document import write_page
from edgespec_sim.report.page import render
from edgespec_sim.report.perfetto import perfetto_json
from edgespec_sim.report.summarise import summarise
from edgespec_sim.report.timeline import Clocks, Timeline, build_timeline
from edgespec_sim.report.trace_lines import TraceLineError, read_lines

SUMMARY: Final = "summary.json"
TRACE: Final = "trace.jsonl"
FIRST_QUESTIONS: Final = "first-questions"
PAGE: Final = "report.html"
_BOTH_MAX: Final = 2


class ResultInTheWay(ValueError):
    """What would be written would replace the report of another run; the message says which."""


class RunNotFound(ValueError):
    """There is no run at the path given; the message says what was looked for."""


def first_question(folder: Path, arm: str) -> Path:
    """Where a simulated run leaves the trace of an arm's first question."""
    return folder / FIRST_QUESTIONS / f"{arm}.jsonl"


def first_questions(folder: Path) -> dict[str, Path]:
    """Those that are there, by arm."""
    return {path.stem: path for path in sorted((folder / FIRST_QUESTIONS).glob("*.jsonl"))}


def write_report(folder: Path, out: Path | None = None, *, force: bool = False) -> list[Path]:
    """The files of the run in ``folder``, written to ``out`` or beside it; their paths.

    Raises ``RunNotFound``, ``SummaryError``, ``TraceLineError``, ``ReportError``, ``OSError``, and
    ``ResultInTheWay`` unless ``force`` is given.
    """
    summary, trace = folder / SUMMARY, folder / TRACE
    if not summary.is_file() and not trace.is_file():
        raise RunNotFound(f"{folder}: holds neither {SUMMARY} nor {TRACE}")
    traces = [trace] if trace.is_file() else []
    run = read_summary(summary) if summary.is_file() else _summed_up(traces, folder.name)
    if out is not None and out.resolve() != folder.resolve() and not force:
        refuse_to_replace(out)
    return _write(run, traces, out or folder)


def report_on(paths: Sequence[Path], out: Path | None = None, *, force: bool = False) -> list[Path]:
    """Like ``write_report``, of a folder, of a summary, or of one or two traces of a real run
    (the device's, the verifier's), next to the first of them unless ``out`` says otherwise. Of the
    trace in a run's folder the report goes into a folder of its own there."""
    first = paths[0]
    if len(paths) == 1 and first.is_dir():
        return write_report(first, out, force=force)
    for path in paths:
        if not path.is_file():
            raise RunNotFound(f"{path}: no such file")
    if len(paths) == 1 and first.suffix == ".json":
        return _report_on_summary(first, out, force)
    if len(paths) > _BOTH_MAX:
        raise RunNotFound(f"{len(paths)} traces, but a report is on {_BOTH_MAX} at most")
    if out is None:
        out = first.parent
        if (out / SUMMARY).is_file() and not force:
            out = out / f"{first.stem}-report"
    if not force:
        refuse_to_replace(out)
    name = first.stem if len(paths) == 1 else "run"
    return _write(_summed_up(paths, name), paths, out)


def _report_on_summary(file: Path, out: Path | None, force: bool) -> list[Path]:
    run, folder = read_summary(file), out or file.parent
    own = (folder / SUMMARY).resolve() == file.resolve()
    if not own and not force:
        refuse_to_replace(folder)
    beside = file.parent / TRACE
    return _write(run, [beside] if beside.is_file() else [], folder)


def refuse_to_replace(out: Path) -> None:
    """Raises ``ResultInTheWay`` where a run has left its summary."""
    if not (out / SUMMARY).is_file():
        return
    try:
        run = read_summary(out / SUMMARY)
        what = f"{run.name}, seed {run.seed} and on: {run.seeds} played"
    except SummaryError:
        what = f"an unreadable {SUMMARY}"
    raise ResultInTheWay(
        f"{out}: holds another run ({what}); name another folder, or --force to replace it"
    )


def _summed_up(traces: Sequence[Path], name: str) -> RunSummary:
    with _promised(traces):
        return summarise(read_lines(traces), name or "run")


def _laid_out(traces: Sequence[Path], clocks: Clocks) -> Timeline:
    with _promised(traces):
        return build_timeline(read_lines(traces), clocks)


@contextmanager
def _promised(traces: Sequence[Path]) -> Iterator[None]:
    """Whatever a line that is not as it was written makes of those who read it is a
    ``TraceLineError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        where = ", ".join(map(str, traces))
        raise TraceLineError(f"{where}: a line lacks what its name promises: {error}") from error


def _write(run: RunSummary, traces: Sequence[Path], out: Path) -> list[Path]:
    clocks = Clocks.SHARED if run.simulated else Clocks.ESTIMATED
    timeline = _laid_out(traces, clocks) if traces else None
    out.mkdir(parents=True, exist_ok=True)
    firsts = _firsts(run, timeline, traces[0].parent) if traces else {}
    texts = {PAGE: render(run, timeline, _note(run, timeline), firsts)}
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
            firsts[arm.arm] = _laid_out([found[arm.arm]], Clocks.SHARED)
        elif timeline is not None:
            firsts[arm.arm] = timeline
    return firsts if len(found) + 1 == len(run.arms) else {}


def _note(run: RunSummary, timeline: Timeline | None) -> str:
    if timeline is None or len(run.arms) < 2:
        return ""
    return "The trace of the run, as its sessions are named in it."
