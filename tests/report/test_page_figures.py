"""The pictures of a page as data: what is drawn, and that it is bounded and named.

Oracle: the made-up runs of ``samples.py``, whose numbers are known, and scenarios that leave what
is drawn. What a browser makes of them is in ``test_report_pages.py``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec_sim.report.arms_over_time import arms_over_time, cell_maps
from edgespec_sim.report.document import LIBRARY, Document, ReportError, write_page
from edgespec_sim.report.page import asked, first_question, first_questions, render, write_report
from edgespec_sim.report.plots import (
    OURS_COLOR,
    answer_plot,
    pace_plot,
)
from edgespec_sim.report.sweep_page import answer, render_sweep, winner, winner_maps, with_unit
from edgespec_sim.report.timeline_plot import question_plot
from edgespec_sim.run_summary import RunSummary, read_summary
from tests.report.samples import asked_alike, five_arms, made_up_sweep, pictured


def test_the_first_screen_says_what_was_asked_and_draws_the_answer() -> None:
    run = pictured()
    html = render(run)
    first = html.split("<h2>")[0]
    assert asked(run).endswith(
        "with the same questions and the same dice: target-only or edgespec?"
    )
    assert "Asked: which way of decoding is fastest here" in first
    assert "2.31× as fast" in first
    assert first.count('id="plot-') == 1
    assert html.index("<h2>Arms</h2>") < html.index("<h2>All arms side by side"), "folded"
    assert "<details" not in html[: html.index("<h2>Arms</h2>")]


def test_the_time_per_token_has_bands_a_base_and_a_bound() -> None:
    figure = pace_plot(pictured())
    assert figure is not None
    bands = [trace for trace in figure.data if trace.get("fill") == "toself"]
    lines = {trace["name"]: trace for trace in figure.data if "name" in trace}
    assert len(bands) == 2
    assert lines["target-only"]["y"][3] is None, "nothing came in that step"
    assert lines["target-only"]["x"][0] == 5.0, "the middle of a step"
    bound = max(pictured().arms[1].bounds.values())
    assert lines["bound of edgespec"]["y"] == [1e3 * bound] * 2
    assert lines["bound of edgespec"]["line"]["dash"] == "dot"
    assert "95 % intervals over 4 seeds" in figure.caption
    assert pace_plot(five_arms()) is None, "a real run, or an old one"


def test_arms_stand_over_the_network_on_one_axis() -> None:
    figure = arms_over_time(pictured())
    assert figure is not None
    assert figure.layout["yaxis"]["ticktext"] == ["target-only", "edgespec"]
    assert figure.layout["xaxis"]["range"] == [0, 60.0]
    bars = [trace for trace in figure.data if trace["type"] == "bar"]
    assert [len(trace["x"]) for trace in bars] == [5, 5, 5, 5], (
        "until the first token, and its tokens"
    )
    assert bars[0]["base"][:2] == [0.0, 10.0]
    rtts = [trace for trace in figure.data if trace.get("yaxis") == "y2"]
    assert [trace["name"] for trace in rtts] == ["all arms"], "one line where arms are alike"
    waits = [trace for trace in figure.data if trace.get("yaxis") == "y3"]
    assert [trace["name"] for trace in waits] == ["target-only", "edgespec"]
    events = {t["name"]: t["x"] for t in figure.data if t.get("yaxis") == "y4"}
    assert events == {"outage": [12.0], "handover": [30.0]}
    assert [shade["x0"] for shade in figure.layout["shapes"]] == [12.0, 30.0]
    assert "1 outage, 1 handover" in figure.label
    assert arms_over_time(five_arms()) is None


def test_one_question_is_drawn_for_each_arm_from_its_asking() -> None:
    figure = question_plot(asked_alike())
    assert figure is not None
    names = [trace["name"] for trace in figure.data]
    assert names == ["target-only: pass", "target-only: stall", "edgespec: draft", "edgespec: pass"]
    assert all(min(trace["base"]) == 0.0 for trace in figure.data)
    assert "target-only 1.20 s, edgespec 600 ms" in figure.caption
    (one, *_) = asked_alike().items()
    assert question_plot(dict([one])) is None, "nothing to compare"


def test_the_map_colours_requests_by_their_time_per_token() -> None:
    maps = cell_maps(pictured())
    assert len(maps) == 2
    dots = [next(t for t in one.data if t["name"] == "requests") for one in maps]
    assert [dot["marker"]["color"][0] for dot in dots] == [42.1, 18.2]
    assert dots[0]["marker"]["cmin"] == dots[1]["marker"]["cmin"], "one scale"
    border = next(t for t in maps[0].data if t["name"] == "border of a cell")
    across_m = [x for x in border["x"] if x is not None]
    assert across_m == pytest.approx([200.0] * len(across_m), abs=4.0), "halfway between them"
    ways = next(t for t in maps[0].data if t["name"] == "to its verifier")
    assert ways["x"][1] == 300.0, "edge-2"
    assert cell_maps(five_arms()) == []


def sure(run: RunSummary, low: float, high: float) -> RunSummary:
    """The last arm with that interval, those between it and the first with one below."""
    base, *between, last = run.arms
    under = [replace(arm, speedup_interval=(0.5 * low, 0.9 * low)) for arm in between]
    return replace(run, arms=(base, *under, replace(last, speedup_interval=(low, high))))


def test_who_wins_and_how_sure_that_is() -> None:
    run = five_arms()
    unsure, certain = winner(run), winner(sure(run, 1.2, 3.0))
    assert unsure is not None
    assert certain is not None
    assert (unsure.arm.arm, unsure.sure, certain.sure) == ("edgespec", False, True)
    slow = replace(run, arms=run.arms[:2])
    base, surely = winner(slow), winner(sure(slow, 0.5, 0.7))
    assert base is not None
    assert surely is not None
    assert (base.arm.arm, base.sure, surely.sure) == ("target-only", False, True)
    assert winner(replace(run, arms=run.arms[:1])) is None
    above_one = [replace(arm, speedup_interval=(1.2, 3.0)) for arm in run.arms[1:]]
    close = winner(replace(run, arms=(run.arms[0], *above_one)))
    assert close is not None
    assert not close.sure, "faster than target-only for sure, but perhaps not than the others"


def test_a_sweep_says_and_maps_which_arm_wins_where() -> None:
    points = [(varied, sure(run, 1.2, 3.0)) for varied, run in made_up_sweep()]
    points[0] = (points[0][0], replace(points[0][1], arms=points[0][1].arms[:2]))
    told = answer(points)
    assert told.startswith("edgespec (ours) is fastest at 5 of 6 points (5 of them surely)")
    assert "target-only is fastest at 1 of 6" in told
    (figure,) = winner_maps(points, ["rtt_ms", "devices"])
    heat = figure.data[0]
    assert (heat["x"], heat["y"]) == (["10", "40", "160"], ["1", "10"])
    assert heat["text"][0][0] == "target-only<br>1.00× ?", "the other may well be faster"
    assert heat["text"][1][2] == "edgespec<br>2.31×"
    assert OURS_COLOR in {color for _, color in heat["colorscale"]}
    assert figure.layout["xaxis"]["title"]["text"] == "rtt_ms, ms"
    html = render_sweep(points, "household")
    assert "Asked: which way of decoding is fastest where, over rtt_ms and devices?" in html
    assert "<h2>Which arm wins where</h2>" in html
    assert (with_unit("a.up_mbps"), with_unit("seed")) == ("a.up_mbps, Mbit/s", "seed")


def test_pages_of_a_folder_share_one_library(tmp_path: Path) -> None:
    page = Document("one")
    write_page(tmp_path / "plain.html", page.html())
    assert [path.name for path in tmp_path.iterdir()] == ["plain.html"]
    figure = answer_plot(five_arms())
    assert figure is not None
    page.figure(figure)
    write_page(tmp_path / "one.html", page.html())
    library = tmp_path / LIBRARY
    before = library.read_text(encoding="utf-8")
    library.touch()
    first = library.stat()
    write_page(tmp_path / "two.html", page.html())
    assert library.stat().st_mtime_ns == first.st_mtime_ns, "it was there"
    library.write_text("of another version", encoding="utf-8")
    write_page(tmp_path / "two.html", page.html())
    assert library.read_text(encoding="utf-8") == before
    assert (tmp_path / "two.html").stat().st_size < 0.1e6


def test_without_plotly_a_page_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    figure = answer_plot(five_arms())
    assert figure is not None
    page = Document("one")
    page.figure(figure)
    with pytest.raises(ReportError, match=r"need plotly: pip install 'edgespec\[sim\]'"):
        write_page(tmp_path / "one.html", page.html())
    assert list(tmp_path.iterdir()) == []


def test_a_summary_keeps_what_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(pictured().to_json(), encoding="utf-8")
    assert read_summary(tmp_path / "summary.json") == pictured()
    write_report(tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 1.5e6
    assert first_questions(tmp_path) == {}
    place = first_question(tmp_path, "vanilla")
    place.parent.mkdir()
    place.touch()
    assert first_questions(tmp_path) == {"vanilla": place}
