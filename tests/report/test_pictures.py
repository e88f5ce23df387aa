"""The README's pictures: what a record says is in them, what it must not do is not, and what cannot
be drawn is refused. Oracle: the standard library's XML reader, and records written here by hand or
by the bench's own code."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from edgespec.bench.arms import Arm
from edgespec.bench.report import Subject, document
from edgespec.bench.settings import BenchSettings
from edgespec.bench.workload import Workload
from tests.sources import ROOT
from tools import draw_bench, draw_demo
from tools.svg import PictureError, command, text

SVG = "{http://www.w3.org/2000/svg}"
PICTURES = ROOT / "docs" / "pictures"
EVIL = "</text><script>&\"'"
HEAD = 'Script started on 2026-11-22 15:00:35+00:00 [COMMAND="{}" <not executed on terminal>]\r\n'
FOOT = '\r\nScript done on 2026-11-22 15:01:01+00:00 [COMMAND_EXIT_CODE="{}"]\r\n'


def terminal(body: str, run: str = "edgespec demo", status: int = 0) -> str:
    """What ``script`` would write of ``run``, which wrote ``body``."""
    return HEAD.format(run) + body.replace("\n", "\r\n") + FOOT.format(status)


def bench(milliseconds: dict[Arm, list[float]], rtts_ms: tuple[float, ...]) -> dict[str, Any]:
    """What a bench of two repeats of two texts leaves, the second text 2 ms slower."""
    rows: list[dict[str, object]] = [
        {
            **{"arm": arm.value, "rtt_ms": rtt_ms, "repeat": repeat, "requests": 1},
            **{"tpots_ms": [value + 2.0 * text for text in (0, 1)], "tokens": 48, "mismatches": 0},
        }
        for arm, values in milliseconds.items()
        for rtt_ms, value in zip(rtts_ms, values, strict=True)
        for repeat in range(2)
    ]
    settings = replace(BenchSettings(), rtts_ms=rtts_ms, repeats=2)
    subject = Subject("bundled", "bundled", f"big {EVIL}", "small", "auto", "built-in", False)
    workload = Workload(("story",), ((1, 2),), frozenset())
    argv = ("edgespec", "bench", "--json", f"{EVIL}.json")
    return document(argv, settings, subject, workload, rows, {20.0: 4}, {}, interrupted=False)


def two_arms() -> dict[str, Any]:
    return bench({Arm.TARGET_ONLY: [25.0, 27.0], Arm.EDGESPEC: [11.0, 13.0]}, (20.0, 100.0))


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def drawn(svg: str) -> list[str]:
    """The texts of a picture that is XML and would fetch nothing."""
    root = ElementTree.fromstring(svg)
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"url\(|@import|href", svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "style", "rect", "path", "circle", "text"),
    }
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")
    return [element.text or "" for element in root.iter(f"{SVG}text")]


# --- a terminal -----------------------------------------------------------------------------


def test_a_terminal_is_drawn_as_it_was(tmp_path: Path) -> None:
    body = "\x1b[32mgood\x1b[0m \x1b[1;31mbad\x1b[0m  \x1b[2mold\x1b[0m\n" + "─" * 12
    path = write(tmp_path / "demo.record", terminal(body))
    svg = draw_demo.draw(path)
    assert drawn(svg) == ["recorded 2026-11-22", "$ edgespec demo", "good", "bad", "old"]
    assert svg == draw_demo.draw(path), "the same record, the same bytes"
    assert '<text class="green" x="16.0"' in svg
    assert re.search(r'<text class="red bold" x="58\.0" y="\d+" textLength="25\.2">bad', svg)
    assert '<text class="dim" x="100.0"' in svg
    assert "good bad  old" in (ElementTree.fromstring(svg).findtext(f"{SVG}desc") or "")


def test_a_long_line_goes_on_in_the_next_row(tmp_path: Path) -> None:
    line = "".join(chr(ord("a") + index % 26) for index in range(2 * draw_demo.COLUMNS + 3))
    texts = drawn(draw_demo.draw(write(tmp_path / "record", terminal(line))))[2:]
    assert [len(part) for part in texts] == [draw_demo.COLUMNS, draw_demo.COLUMNS, 3]
    assert "".join(texts) == line


def test_a_wide_character_is_not_cut_in_two(tmp_path: Path) -> None:
    line = "a" * (draw_demo.COLUMNS - 1) + "字b"
    texts = drawn(draw_demo.draw(write(tmp_path / "record", terminal(line))))[2:]
    assert texts == ["a" * (draw_demo.COLUMNS - 1), "字b"]


def test_whatever_a_terminal_was_sent_is_only_text(tmp_path: Path) -> None:
    body = f"{EVIL}\x07\x1b[2J\n10 %\r100 %"
    texts = drawn(draw_demo.draw(write(tmp_path / "record", terminal(body, run=EVIL))))
    assert texts[1:] == [f"$ {EVIL}", EVIL, "100 %"]
    assert text("\x00\x1b\x07") == "\N{REPLACEMENT CHARACTER}" * 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("hello\n", "by its first line"),
        (terminal("hello").split("\r\nScript done")[0], "cut short"),
        (terminal("hello", status=3), "exit code 3"),
        (terminal(" \n"), "wrote nothing"),
    ],
)
def test_a_broken_recording_is_refused(tmp_path: Path, content: str, reason: str) -> None:
    path = write(tmp_path / "demo.record", content)
    with pytest.raises(PictureError, match=rf"{re.escape(str(path))}: .*{reason}"):
        draw_demo.draw(path)


# --- a bench --------------------------------------------------------------------------------


def test_a_bench_is_drawn_from_its_file_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "bench.json", two_arms())
    svg = draw_bench.draw(path)
    assert svg == draw_bench.draw(path)
    texts = drawn(svg)
    for expected in ("ms a token", "round-trip time, ms", "20", "100", "target-only streaming"):
        assert expected in texts
    # 26 / 12 and 28 / 14: the means of two texts.
    assert [one for one in texts if one.endswith("×")] == ["2.17×", "2.00×"]
    about = ElementTree.fromstring(svg).findtext(f"{SVG}desc") or ""
    assert "edgespec: 12.0 at 20, 14.0 at 100" in about
    caption = " ".join(texts)
    assert "1 prompt of 96 tokens and 2 repeats" in caption
    assert "differ from the target's own: 0 of 384" in caption
    assert "Draft length of stop-and-wait: 4 at 20 ms" in caption
    assert "edgespec bench --json" in caption


def test_points_lie_where_the_axes_say() -> None:
    scale = draw_bench._Scale(rtt_ms=200.0, token_ms=40.0)
    assert scale.x(100.0) == pytest.approx((scale.x(0.0) + scale.x(200.0)) / 2)
    assert scale.y(10.0) == pytest.approx(scale.y(0.0) + (scale.y(40.0) - scale.y(0.0)) / 4)
    assert [draw_bench._step(highest) for highest in (0.0, 6.9, 60.0, 71.0)] == [1, 1, 10, 20]


def test_no_two_labels_lie_on_each_other(tmp_path: Path) -> None:
    """Five arms that end within a millisecond, and round-trip times right beside each other."""
    close = {arm: [25.0 + index / 10] * 3 for index, arm in enumerate(Arm)}
    svg = draw_bench.draw(write(tmp_path / "b.json", bench(close, (1.0, 2.0, 100.0))))
    places = [
        (float(element.attrib["x"]), float(element.attrib["y"]))
        for element in ElementTree.fromstring(svg).iter(f"{SVG}text")
    ]
    for index, (x, y) in enumerate(places):
        for other_x, other_y in places[index + 1 :]:
            assert abs(x - other_x) > 12 or abs(y - other_y) > 12, "on each other"


def test_a_bench_without_a_baseline_or_of_one_point_has_a_picture(tmp_path: Path) -> None:
    alone = draw_bench.draw(write(tmp_path / "a.json", bench({Arm.EDGESPEC: [12.0]}, (0.0,))))
    assert not [one for one in drawn(alone) if one.endswith("×")]
    half = two_arms()
    half["summary"][0]["tpot_ms_mean"] = None
    half |= {"interrupted": True, "failure": "the verifier has gone"}
    caption = " ".join(drawn(draw_bench.draw(write(tmp_path / "h.json", half))))
    assert "was interrupted" in caption
    assert "ended in an error: the verifier has gone" in caption


def spoilt(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    content = two_arms()
    change(content)
    return content


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[]", "not what `edgespec bench --json` writes"),
        ("{}", "not what .* writes: KeyError: 'summary'"),
        (spoilt(lambda c: c.update(summary=[])), "no measured time"),
        (spoilt(lambda c: c["summary"][0].update(tpot_ms_mean=math.nan)), "nan is not a time"),
        (spoilt(lambda c: c["summary"][0].update(tpot_ms_mean="12")), "'12' is not a number"),
        (spoilt(lambda c: c["summary"][0].update(rtt_ms=-1.0)), "-1.0 is not a time"),
        (spoilt(lambda c: c["summary"][0].update(arm="magic")), "'magic' is not a valid Arm"),
        (spoilt(lambda c: c["summary"][0].update(interval={})), "KeyError: 'tpot_ms_mean'"),
        (spoilt(lambda c: c.pop("machine")), "KeyError: 'machine'"),
    ],
)
def test_a_broken_result_is_refused(tmp_path: Path, content: object, reason: str) -> None:
    path = write(tmp_path / "bench.json", content)
    with pytest.raises(PictureError, match=rf"{re.escape(str(path))}: .*{reason}"):
        draw_bench.draw(path)


# --- the command, and what is committed -----------------------------------------------------


def test_the_command_writes_a_picture_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = write(tmp_path / "demo.record", terminal("hello"))
    out = tmp_path / "new" / "demo.svg"
    about = {"description": "draws", "record": "a record"}
    monkeypatch.setattr(sys, "argv", ["draw", str(record), "--out", str(out)])
    command(draw_demo.draw, about)
    assert out.read_text(encoding="utf-8") == draw_demo.draw(record)
    assert "demo.svg: " in capsys.readouterr().out
    for wrong in (tmp_path / "missing", tmp_path):
        monkeypatch.setattr(sys, "argv", ["draw", str(wrong)])
        with pytest.raises(SystemExit, match=rf"error: {re.escape(str(wrong))}: cannot be read"):
            command(draw_demo.draw, about)
    write(record, b"\xff".decode("latin-1")).write_bytes(b"\xff")
    with pytest.raises(PictureError, match="cannot be read"):
        draw_demo.draw(record)


@pytest.mark.parametrize(
    ("draw", "record", "limit"),
    [
        (draw_demo.draw, PICTURES / "demo.record", 100_000),
        (draw_bench.draw, PICTURES / "bench.json", 60_000),
    ],
)
def test_the_readme_shows_what_the_records_say(
    draw: Callable[[Path], str], record: Path, limit: int
) -> None:
    picture = record.with_suffix(".svg")
    svg = draw(record)
    assert picture.read_text(encoding="utf-8") == svg, f"run: the maker on {record.name}"
    assert len(svg.encode()) < limit
    assert drawn(svg)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"docs/pictures/{picture.name}" in readme
