"""Pages and tables: required content, escaping, and that they fetch nothing.

Oracle: the standard library's own HTML and CSV readers; and a real browser, headless Chromium,
which draws pages and returns the resulting document. The browser checks are: an empty console,
every plot drawn with marks in it, every table; in the light and in the dark scheme.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from edgespec_sim.report import document
from edgespec_sim.report.document import write_page
from edgespec_sim.report.page import (
    first_generation_path,
    first_generation_paths,
    headline,
    render,
    report_on,
)
from edgespec_sim.report.plots import first_sessions, lanes_plot, pace_plot
from edgespec_sim.report.sweep_page import find_winner, render_sweep, summarise_wins, sweep_csv
from edgespec_sim.report.timeline import Timeline, build_timeline, read_lines
from edgespec_sim.run_summary import ArmSummary, RunSummary, read_summary
from tests.present import require
from tests.report.samples import (
    ARMS,
    SAMPLED,
    asked_alike,
    five_arms,
    made_up_sweep,
    make_pictured,
    traced_run,
)

EVIL = "<script>alert('x')</script>&\"</script>"
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """The elements of a page, its text by element, and every URL that it would fetch."""

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
    "run": lambda: render(make_pictured()),
    "sweep": lambda: render_sweep(made_up_sweep(), "household"),
}


@pytest.fixture(scope="module", params=PAGES)
def page(request: pytest.FixtureRequest) -> Page:
    return Page(PAGES[request.param]())


def test_a_page_asks_nothing_of_any_network(page: Page) -> None:
    assert page.references == ["data:,", document.LIBRARY], "an icon in the page, a file beside it"
    assert all("@import" not in css and "url(" not in css for css in page.text["style"])


def test_the_headline_names_the_best_arm_and_whose_it_is() -> None:
    run = five_arms()
    assert headline(run).startswith("edgespec (ours) is 2.31× as fast as target-only streaming")
    # Without our arm the best arm is another; with a slower one of ours, both are named.
    others = replace(run, arms=run.arms[:4])
    assert headline(others).startswith("windowed is 1.61× as fast")
    slow = replace(run.arms[4], all=run.arms[1].all, speedup=0.59)
    told = headline(replace(run, arms=(*run.arms[:4], slow)))
    assert told.startswith("windowed is 1.61×")
    assert "edgespec (ours) takes 71.3 ms, 0.59×" in told
    beaten = headline(replace(run, arms=run.arms[:2]))
    assert beaten.startswith("Nothing here is faster than target-only streaming: 42.1 ms")
    assert headline(replace(run, arms=run.arms[4:])).startswith("edgespec: 18.2 ms per token")
    silent = replace(run.arms[0], all=replace(run.arms[0].all, tpot_s=None))
    assert "no time per token" in headline(replace(run, arms=(silent,)))


def both_ends(gain: float, ends: tuple[float, float] | None) -> RunSummary:
    """Return a run of plain streaming at 25 ms per token, a server that drafts at 10.16, and a
    device beside it."""
    run = five_arms()
    base = run.arms[0]

    def arm(name: str, ms: float, gain: float) -> ArmSummary:
        spread = replace(require(base.all.tpot_s), mean=ms / 1e3)
        whole = replace(base.all, tpot_s=spread)
        return replace(base, arm=name, all=whole, speedup=25.0 / ms, gain=gain)

    arms = (
        arm("target-only", 25.0, 10.16 / 25.0),
        arm("server-draft", 10.16, 1.0),
        replace(arm("both", 10.16 / gain, gain), gain_interval=ends),
    )
    return replace(run, arms=arms, alone="server-draft")


def test_what_the_server_does_alone_is_not_a_devices_gain() -> None:
    """Gains of 2.49 and 2.46 over plain streaming are 1.012 over the server alone."""
    told = headline(both_ends(1.012, (0.99, 1.03)))
    assert told.startswith(
        "both (ours) is 1.01× as fast as server-draft, the best without a device"
        " (95 % interval 0.99 to 1.03: perhaps chance): 10.0 ms"
    )
    assert told.endswith("Relative to target-only streaming it is 2.49×.")
    assert "perhaps chance" not in headline(both_ends(1.1, (1.05, 1.15)))
    assert "certainty is unknown" in headline(both_ends(1.1, None))
    slower = headline(both_ends(0.9, (0.88, 0.92)))
    assert slower.startswith("Nothing here is faster than server-draft, which needs no device")
    swept = summarise_wins([({"rtt_ms": rtt}, both_ends(1.012, (0.99, 1.03))) for rtt in (2, 50)])
    assert (
        "Relative to the fastest arm that needs no device, ours ranges from 1.01× (0.99–1.03)"
        in swept
    )


def test_whatever_a_name_holds_is_only_text() -> None:
    run = replace(make_pictured(), notes=(EVIL,))
    arm = replace(run.arms[1], arm=EVIL * 20, label=EVIL, groups={EVIL: run.arms[1].all})
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
    arm = replace(run.arms[0], all=nothing, groups={}, verifiers=(), rows=())
    empty = RunSummary("nothing", "", "", None, False, 0.0, (arm,))
    page = Page(render(empty))
    assert "figure" not in page.tags
    assert "script" not in page.tags, "no plot, no plotly"


def test_csv_is_what_a_csv_reader_reads() -> None:
    run = five_arms()
    arm = replace(run.arms[4], arm='comma, "quote"\nline', rows=run.arms[4].rows)
    arms = list(
        csv.DictReader(io.StringIO(document.arms_csv(replace(run, arms=(run.arms[0], arm)))))
    )
    assert [(row["arm"], row["group"]) for row in arms] == [
        (name, group)
        for name in ("target-only", 'comma, "quote"\nline')
        for group in ("", "laptops", "phones")
    ]
    assert float(arms[0]["tpot_s_p50"]) == require(run.arms[0].all.tpot_s).median
    assert arms[0]["acceptance"] == ""
    requests = list(csv.DictReader(io.StringIO(document.requests_csv(run))))
    assert len(requests) == 4 * len(ARMS)
    assert requests[0]["device"] == "laptop 0"
    points = made_up_sweep()
    swept = list(csv.DictReader(io.StringIO(sweep_csv(points))))
    assert len(swept) == len(points) * len(ARMS)
    assert {row["rtt_ms"] for row in swept} == {"10", "40", "160"}


def test_one_question_is_drawn_for_each_arm_from_its_asking() -> None:
    sessions = {arm: next(iter(first_sessions(one).values())) for arm, one in asked_alike().items()}
    figure = require(lanes_plot(sessions, "The same question"))
    names = [trace["name"] for trace in figure.data]
    assert names == ["target-only: pass", "target-only: stall", "edgespec: draft", "edgespec: pass"]
    assert all(min(trace["base"]) == 0.0 for trace in figure.data)
    assert "target-only 1.20 s, edgespec 600 ms" in figure.caption
    assert lanes_plot({}, "Nothing") is None
    html = render(make_pictured(), None, asked_alike())
    assert html.split("<h2>")[0].count('id="plot-') == 2, "lanes, and time per token"


def with_interval(run: RunSummary, low: float, high: float) -> RunSummary:
    """Return the run with this interval for the last arm, and lower ones for all arms between it
    and the first."""
    base, *between, last = run.arms
    under = [replace(arm, speedup_interval=(0.5 * low, 0.9 * low)) for arm in between]
    return replace(run, arms=(base, *under, replace(last, speedup_interval=(low, high))))


def test_who_wins_and_how_sure_that_is() -> None:
    run = five_arms()
    unsure, certain = require(find_winner(run)), require(find_winner(with_interval(run, 1.2, 3.0)))
    assert (unsure.arm.arm, unsure.is_certain, certain.is_certain) == ("edgespec", False, True)
    slow = replace(run, arms=run.arms[:2])
    base, surely = require(find_winner(slow)), require(find_winner(with_interval(slow, 0.5, 0.7)))
    assert (base.arm.arm, base.is_certain, surely.is_certain) == ("target-only", False, True)
    assert find_winner(replace(run, arms=run.arms[:1])) is None
    above_one = [replace(arm, speedup_interval=(1.2, 3.0)) for arm in run.arms[1:]]
    close = require(find_winner(replace(run, arms=(run.arms[0], *above_one))))
    assert not close.is_certain, "faster than target-only for sure, but perhaps not than the others"


def test_a_sweep_says_which_arm_wins_where() -> None:
    points = [(varied, with_interval(run, 1.2, 3.0)) for varied, run in made_up_sweep()]
    points[0] = (points[0][0], replace(points[0][1], arms=points[0][1].arms[:2]))
    told = summarise_wins(points)
    assert told.startswith("edgespec (ours) is fastest at 5 of 6 points (5 with certainty)")
    assert "target-only is fastest at 1 of 6" in told
    html = render_sweep(points, "household")
    assert "Question: which way of decoding is fastest where, over rtt_ms and devices?" in html
    assert html.count(">yes<") == 5
    assert html.count(">?<") == 1


def test_a_folder_gets_its_files(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(five_arms().to_json(), encoding="utf-8")
    written = report_on([tmp_path])
    assert [path.name for path in written] == ["report.html", "arms.csv", "requests.csv"]
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == render(five_arms())
    elsewhere = report_on([tmp_path / "summary.json"], tmp_path / "out")
    assert elsewhere[0] == tmp_path / "out" / "report.html"


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(document.ReportError, match=r"neither summary\.json nor trace\.jsonl"):
        report_on([tmp_path])
    with pytest.raises(document.ReportError, match="no such file"):
        report_on([tmp_path / "trace.jsonl"])
    for name in "abc":
        (tmp_path / name).touch()
    with pytest.raises(document.ReportError, match="3 traces given, but a report takes at most 2"):
        report_on([tmp_path / name for name in "abc"])


def test_pages_of_a_folder_share_one_library(tmp_path: Path) -> None:
    page = document.Document("one")
    document.write_page(tmp_path / "plain.html", page.html())
    assert [path.name for path in tmp_path.iterdir()] == ["plain.html"]
    figure = require(pace_plot(make_pictured()))
    page.figure(figure)
    document.write_page(tmp_path / "one.html", page.html())
    library = tmp_path / document.LIBRARY
    before = library.read_text(encoding="utf-8")
    library.touch()
    first = library.stat()
    document.write_page(tmp_path / "two.html", page.html())
    assert library.stat().st_mtime_ns == first.st_mtime_ns, "it was there"
    library.write_text("of another version", encoding="utf-8")
    document.write_page(tmp_path / "two.html", page.html())
    assert library.read_text(encoding="utf-8") == before
    assert (tmp_path / "two.html").stat().st_size < 0.1e6


def test_without_plotly_a_page_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    figure = require(pace_plot(make_pictured()))
    page = document.Document("one")
    page.figure(figure)
    with pytest.raises(document.ReportError, match=r"need plotly: pip install 'edgespec\[sim\]'"):
        document.write_page(tmp_path / "one.html", page.html())
    assert list(tmp_path.iterdir()) == []


def test_a_summary_keeps_what_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(make_pictured().to_json(), encoding="utf-8")
    assert read_summary(tmp_path / "summary.json") == make_pictured()
    report_on([tmp_path])
    assert (tmp_path / "report.html").stat().st_size < 1.5e6
    assert first_generation_paths(tmp_path) == {}
    place = first_generation_path(tmp_path, "vanilla")
    place.parent.mkdir()
    place.touch()
    assert first_generation_paths(tmp_path) == {"vanilla": place}


# --- in a real browser ----------------------------------------------------------------------------


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DARK = "--blink-settings=preferredColorScheme=0"
PLOT = re.compile(r'<div class="plot[^"]*" id="plot-(\d+)"')
# A box, a bar or a point of a scatter plot, or a line: each has a shape that is drawn. A heatmap is
# an image.
MARK = re.compile(r'<path class="(?:box|point|js-line|js-fill)|<g class="point"><path|<image')


def draw_in_browser(html: str, folder: Path, *options: str) -> str:
    """Return the page after its scripts have run; fail on any message on the console."""
    if BROWSER is None:
        pytest.skip("no Chromium on the path to look at pages with")
    page = folder / "page.html"
    write_page(page, html)
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"),
        *("--virtual-time-budget=60000", f"--user-data-dir={folder / 'profile'}", "--dump-dom"),
        *("--window-size=1280,2000", *options, page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    return done.stdout


def check_plots(dom: str, expected: int) -> None:
    body = dom[: dom.index('<script id="plotly"')]
    assert f'data-drawn="{expected}"' in dom[:200], "the script did not come to its end"
    starts = [match.start() for match in PLOT.finditer(body)]
    assert len(starts) == expected
    for start, end in zip(starts, [*starts[1:], len(body)], strict=True):
        drawn = body[start : body.find("<figcaption", start, end)]
        assert 'class="main-svg"' in drawn
        assert MARK.search(drawn), drawn[:200]


@pytest.mark.slow
async def test_a_run_with_its_timeline(tmp_path: Path) -> None:
    async with traced_run(tmp_path) as agent:
        async for _ in agent.generate("the quick brown fox", SAMPLED):
            pass
    timeline = build_timeline(read_lines([tmp_path / "device.jsonl", tmp_path / "verifier.jsonl"]))
    html = render(five_arms(), timeline)
    dom = draw_in_browser(html, tmp_path)
    check_plots(dom, 1)
    assert dom.count("<table") == html.count("<table") == 4
    # Whether a draft ever waits for a pass depends on the machine.
    for lane in {"draft", "pass", *(span.lane.value for span in timeline.spans)}:
        assert f">{lane}</text>" in dom, lane


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_a_run_follows_the_readers_scheme(tmp_path: Path, options: tuple[str, ...]) -> None:
    dom = draw_in_browser(render(make_pictured()), tmp_path, *options)
    check_plots(dom, 1)
    ink = "rgb(232, 234, 237)" if options else "rgb(27, 31, 36)"
    assert f"fill: {ink}" in dom, "the plots' letters"


@pytest.mark.slow
def test_a_run_with_every_picture(tmp_path: Path) -> None:
    html = render(make_pictured(), None, asked_alike())
    assert len(html) < 1.5e6
    # One request: time per token.
    check_plots(draw_in_browser(html, tmp_path), 2)


@pytest.mark.slow
def test_a_browser_draws_a_sweep(tmp_path: Path) -> None:
    dom = draw_in_browser(render_sweep(made_up_sweep(), "household"), tmp_path)
    # Two metrics at two numbers of devices.
    check_plots(dom, 4)
    assert dom.count("<table") == 1
