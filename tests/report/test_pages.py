"""Pages and tables as text: what must stand in them, what must be escaped, and that they need
nothing else. Oracle: the standard library's own HTML and CSV readers. What a browser makes of the
pages is in ``test_report_pages.py``."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgespec_sim.report import figures
from edgespec_sim.report.document import LIBRARY, arms_csv, requests_csv
from edgespec_sim.report.page import RunNotFound, headline, render, report_on, write_report
from edgespec_sim.report.plots import answer_plot
from edgespec_sim.report.sweep_page import render_sweep, sweep_csv
from edgespec_sim.report.tables import arms_table
from edgespec_sim.report.timeline import Lane, Span, Timeline
from edgespec_sim.report.timeline_plot import timeline_plots
from edgespec_sim.report.trace_page import render_trace
from edgespec_sim.run_summary import RunSummary
from tests.report.samples import ARMS, five_arms, made_up_sweep, made_up_trace

EVIL = "<script>alert('x')</script>&\"</script>"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page, its text by element, and everything it would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: dict[str, list[str]] = {}
        self.references: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == [], f"left open: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action") and value:
                self.references.append(value)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.text.setdefault(self._open[-1], []).append(data)


PAGES: dict[str, Callable[[], str]] = {
    "run": lambda: render(five_arms()),
    "sweep": lambda: render_sweep(made_up_sweep(), "household"),
    "trace": lambda: render_trace(made_up_trace()),
}


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> Page:
    return Page(PAGES[request.param]())


def test_a_page_asks_nothing_of_any_network(page: Page) -> None:
    assert page.references == ["data:,", LIBRARY], "an icon in the page, a file beside it"
    assert all("@import" not in css and "url(" not in css for css in page.text["style"])


def test_the_arms_stand_beside_each_other_with_ours_marked() -> None:
    html = arms_table(five_arms())
    rows = html.split("<tr")[2:]
    assert len(rows) == len(ARMS)
    for arm, row in zip(ARMS, rows, strict=True):
        assert f">{arm}" in row
        assert ('class="ours"' in row) == (arm == "edgespec")
    assert "2.31×" in rows[-1]
    assert figures.MISSING in rows[0], "target-only has no acceptance"


def test_the_headline_names_the_best_arm_and_whose_it_is() -> None:
    run = five_arms()
    assert headline(run).startswith("edgespec (ours) is 2.31× as fast as target-only streaming")
    # Without ours the best is another's; with ours slower, both are named.
    others = replace(run, arms=run.arms[:4])
    assert headline(others).startswith("windowed is 1.61× as fast")
    slow = replace(run.arms[4], all=run.arms[1].all, speedup=0.59)
    told = headline(replace(run, arms=(*run.arms[:4], slow)))
    assert told.startswith("windowed is 1.61×")
    assert "edgespec (ours) takes 71.3 ms, 0.59×" in told
    beaten = headline(replace(run, arms=run.arms[:2]))
    assert beaten.startswith("Nothing here is faster than target-only streaming: 42.1 ms")
    assert headline(replace(run, arms=run.arms[4:])).startswith("edgespec: 18.2 ms a token")
    silent = replace(run.arms[0], all=replace(run.arms[0].all, tpot_s=None))
    assert "no time per token" in headline(replace(run, arms=(silent,)))


def test_whatever_a_name_holds_is_only_text() -> None:
    run = five_arms(notes=(EVIL,))
    arm = replace(run.arms[4], arm=EVIL * 20, label=EVIL, groups={EVIL: run.arms[4].all})
    evil = replace(
        run,
        name=EVIL,
        about=EVIL,
        tokens_from=EVIL,
        settings={EVIL: EVIL},
        environment={EVIL: EVIL},
        arms=(run.arms[0], arm),
    )
    timeline = Timeline((), (), (), {})
    page = Page(render(evil, timeline))
    assert page.tags.count("script") == 2, "plotly's and the page's own"
    scripts = "".join(page.text["script"])
    assert "&lt;script&gt;alert(" in scripts, "the name is in the plots, where plotly reads tags"
    assert "<script>alert" not in scripts
    figures_line = next(text for text in page.text["script"] if text.startswith("const FIGURES"))
    assert "<" not in figures_line.splitlines()[0], "nothing there can end the script"
    swept = Page(render_sweep([({EVIL: EVIL, "b": EVIL}, evil)], EVIL))
    assert swept.tags.count("script") == 2


def test_a_run_in_which_nothing_worked_has_a_page() -> None:
    run = five_arms()
    nothing = replace(run.arms[0].all, requests=0, ttft_s=None, tpot_s=None, itl_s=None, tokens=0)
    arm = replace(run.arms[0], all=nothing, groups={}, verifiers=(), bounds={}, series=(), rows=())
    empty = RunSummary("nothing", "", "", None, False, 0.0, (arm,))
    page = Page(render(empty))
    assert "figure" not in page.tags
    assert "script" not in page.tags, "no plot, no plotly"


def test_a_run_of_one_request_shows_its_gaps_in_place_of_distributions() -> None:
    run = five_arms()
    one = replace(run.arms[4], all=replace(run.arms[4].all, requests=1), verifiers=(), series=())
    html = render(replace(run, arms=(one,)))
    assert html.count('id="plot-') == 3, "wasted work, energy, and the gaps"
    assert "Time per output token (TPOT)" not in html
    assert "Gaps between deliveries by arm" in html


def test_sessions_whose_device_was_traced_are_drawn_first() -> None:
    spans = [Span(f"served {i}", Lane.PASS, 0.1 * i, 0.1 * i + 0.05, "pass") for i in range(5)]
    alone = Timeline(tuple(span.session for span in spans), tuple(spans), (), {})
    assert ["served 2" in plot.label for plot in timeline_plots(alone)] == [False, False, True]
    drafting = Span("traced", Lane.DRAFT, 1.0, 1.1, "draft step")
    both = replace(alone, sessions=(*alone.sessions, "traced"), spans=(*spans, drafting))
    [plot] = timeline_plots(both)
    assert "traced" in plot.label


def test_csv_is_what_a_csv_reader_reads() -> None:
    run = five_arms()
    arm = replace(run.arms[4], arm='comma, "quote"\nline', rows=run.arms[4].rows)
    arms = list(csv.DictReader(io.StringIO(arms_csv(replace(run, arms=(run.arms[0], arm))))))
    assert [(row["arm"], row["group"]) for row in arms] == [
        (name, group)
        for name in ("target-only", 'comma, "quote"\nline')
        for group in ("", "laptops", "phones")
    ]
    assert run.arms[0].all.tpot_s is not None
    assert float(arms[0]["tpot_s_p50"]) == run.arms[0].all.tpot_s.median
    assert arms[0]["acceptance"] == ""
    requests = list(csv.DictReader(io.StringIO(requests_csv(run))))
    assert len(requests) == 4 * len(ARMS)
    assert requests[0]["device"] == "laptop 0"
    points = made_up_sweep()
    swept = list(csv.DictReader(io.StringIO(sweep_csv(points))))
    assert len(swept) == len(points) * len(ARMS)
    assert {row["rtt_ms"] for row in swept} == {"10", "40", "160"}


def sure(run: RunSummary) -> RunSummary:
    """The same with an interval around every speed-up, of 12 seeds."""
    arms = tuple(
        replace(arm, speedup_interval=(0.9 * arm.speedup, 1.1 * arm.speedup))
        for arm in run.arms
        if arm.speedup is not None
    )
    return replace(run, arms=arms, seed=1, seeds=12)


def test_the_first_picture_shows_intervals_and_limits() -> None:
    run = sure(five_arms())
    figure = answer_plot(run)
    assert figure is not None
    *points, limits = figure.data
    assert [point["name"] for point in points] == [arm.arm for arm in run.arms[1:]]
    ours, arm = points[-1], run.arms[-1]
    assert arm.speedup is not None
    assert ours["x"] == [arm.speedup]
    assert ours["error_x"]["array"] == [pytest.approx(0.1 * arm.speedup)]
    base = run.arms[0].all.tpot_s
    assert base is not None
    assert limits["x"][-1] == pytest.approx(base.mean / max(arm.bounds.values()))
    assert "over 12 seeds" in figure.caption
    assert figure.layout["shapes"][0]["x0"] == 1
    assert answer_plot(replace(run, arms=run.arms[:1])) is None
    assert answer_plot(replace(run, arms=run.arms[1:])) is None, "nothing to compare with"


def test_how_sure_a_speed_up_is_stands_beside_it() -> None:
    run = sure(five_arms())
    assert "2.31× (2.08–2.54)" in arms_table(run)
    assert "(95 % interval 2.08 to 2.54)" in headline(run)
    assert figures.seeds(run) == "seeds 1 to 12"
    alone = replace(five_arms(), seed=3, simulated=True)
    assert "one seed: nobody knows how sure that is" in headline(alone)
    assert figures.seeds(alone) == "seed 3"


def test_a_sweep_draws_intervals_as_bands() -> None:
    points = [(varied, sure(run)) for varied, run in made_up_sweep()]
    html = render_sweep(points)
    assert html.count('"fill":"toself"') >= len(ARMS)
    assert "Bands: 95 % intervals." in html
    assert '"fill":"toself"' not in render_sweep(made_up_sweep())
    rows = list(csv.DictReader(io.StringIO(sweep_csv(points))))
    assert {row["seeds"] for row in rows} == {"12"}
    assert float(rows[-1]["speedup_low"]) < float(rows[-1]["speedup"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (figures.number(None), "–"),
        (figures.number(float("nan")), "–"),
        (figures.number(0), "0"),
        (figures.number(0.012345), "0.0123"),
        (figures.number(18.249), "18.2"),
        (figures.number(-4.5), "-4.50"),
        (figures.number(1234567.8), "1,234,568"),
        (figures.milliseconds(0.0182), "18.2"),
        (figures.percent(0.71), "71 %"),
        (figures.percent(0.0123), "1.2 %"),
        (figures.times(2.313), "2.31×"),
        (figures.times(1234.5), "1,234×"),
        (figures.duration(0.25), "250 ms"),
        (figures.duration(60.0), "60.0 s"),
        (figures.duration(600.0), "10.0 min"),
        (figures.duration(86400.0), "24.0 h"),
        (figures.shortened("a" * 40), "a" * 27 + "…"),
    ],
)
def test_numbers_have_few_digits(text: str, expected: str) -> None:
    assert text == expected


# --- files ----------------------------------------------------------------------------------


def test_a_folder_gets_its_files(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(five_arms().to_json(), encoding="utf-8")
    written = write_report(tmp_path)
    assert [path.name for path in written] == ["report.html", "arms.csv", "requests.csv"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(five_arms())
    elsewhere = report_on([tmp_path / "summary.json"], tmp_path / "out")
    assert elsewhere[0] == tmp_path / "out" / "report.html"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunNotFound, match=r"neither summary\.json nor trace\.jsonl"):
        write_report(tmp_path)
    with pytest.raises(RunNotFound, match="no such file"):
        report_on([tmp_path / "trace.jsonl"])
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(RunNotFound, match="3 traces, but a report is on 2"):
        report_on([tmp_path / name for name in "abc"])
    with pytest.raises(ValueError, match="without points"):
        render_sweep([])
