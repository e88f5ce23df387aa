"""The pages in a real browser: headless Chromium draws them and hands back what it made of them.

Checked: nothing on the console, every plot drawn with marks in it, every table there; in the light
and in the dark scheme.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from edgespec_sim.report.document import write_page
from edgespec_sim.report.page import render
from edgespec_sim.report.sweep_page import render_sweep
from edgespec_sim.report.timeline import build_timeline, read_lines
from tests.report import samples

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
DARK = "--blink-settings=preferredColorScheme=0"
PLOT = re.compile(r'<div class="plot[^"]*" id="plot-(\d+)"')
# A box, a bar or a point of a scatter, a line of one: each has a shape that is drawn; a heatmap is
# an image.
MARK = re.compile(r'<path class="(?:box|point|js-line|js-fill)|<g class="point"><path|<image')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on the path to look at pages with"),
]


def looked_at(html: str, folder: Path, *options: str) -> str:
    """The page after its scripts have run; fails on anything said on the console."""
    assert BROWSER is not None
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


async def test_a_run_with_its_timeline(tmp_path: Path) -> None:
    async with samples.traced_run(tmp_path) as agent:
        async for _ in agent.generate("the quick brown fox", samples.SAMPLED):
            pass
    lines = read_lines([tmp_path / "device.jsonl", tmp_path / "verifier.jsonl"])
    html = render(samples.five_arms(), build_timeline(lines))
    dom = looked_at(html, tmp_path)
    check_plots(dom, 1)
    assert dom.count("<table") == html.count("<table") == 4
    for lane in ("draft", "uplink", "queue", "pass", "downlink", "stall"):
        assert f">{lane}</text>" in dom, lane


@pytest.mark.parametrize("options", [(), (DARK,)], ids=["light", "dark"])
def test_a_run_follows_the_readers_scheme(tmp_path: Path, options: tuple[str, ...]) -> None:
    dom = looked_at(render(samples.pictured()), tmp_path, *options)
    check_plots(dom, 1)
    ink = "rgb(232, 234, 237)" if options else "rgb(27, 31, 36)"
    assert f"fill: {ink}" in dom, "the plots' letters"


def test_a_run_with_every_picture(tmp_path: Path) -> None:
    html = render(samples.pictured(), None, samples.asked_alike())
    assert len(html) < 1.5e6
    # One question, time per token.
    check_plots(looked_at(html, tmp_path), 2)


def test_a_sweep(tmp_path: Path) -> None:
    dom = looked_at(render_sweep(samples.made_up_sweep(), "household"), tmp_path)
    # Two metrics at two numbers of devices.
    check_plots(dom, 4)
    assert dom.count("<table") == 1
