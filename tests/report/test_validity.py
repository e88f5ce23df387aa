"""The page of validity: its tables and its heat map, from records. Oracles: sums by hand, and the
records that are kept beside the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import draw_policy, write_validity

PAGE = "Text.\n\n<!-- table: {name} -->\nold\n<!-- end -->\n\nMore text.\n"


def published_row(**changes: Any) -> dict[str, Any]:
    row = {
        "system": "PEARL",
        "figure": "speed",
        "source": "a paper",
        "published": 2.0,
        "ours": 2.2,
        "low": 2.1,
        "high": 2.3,
        "unit": "×",
        "is_range": False,
        "is_given": False,
        "why": "acceptance",
    }
    return row | changes


def policy_row(ratio: float, low: float, high: float, **changes: Any) -> list[Any]:
    cell = {"temperature": 0.0, "both": False, "rtt": 5.0, "step": 1.0, "pass": 8.0, "rate": 0.8}
    return [*(cell | changes).values(), ratio, low, high, "windowed", 4]


def real_row(**changes: float) -> dict[str, Any]:
    row: dict[str, Any] = {"network": "a road", "real_ms": 50.0, "tape_ms": 51.0}
    row |= {"made_up_ms": 49.0, "real_tokens": 1.5, "tape_tokens": 1.5, "made_up_tokens": 1.6}
    return row | changes


def lead_row(played: float, expected: float, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"server": "none", "pass_ms": 25.0, "step_ms": 8.0, "rtt_ms": 20.0}
    row |= {"acceptance": 0.8, "token_ms": 25.0, "lead": 1.2, "played": played}
    row |= {"low": played - 0.05, "high": played + 0.05, "expected": expected}
    return row | changes


def filled(tmp_path: Path, name: str, rows: list[Any]) -> str:
    """Return a page with one table, filled from a record with ``rows``."""
    section, _ = write_validity.TABLES[name]
    head = {
        "command": "python x",
        "finished_at": "2026-11-29T10:00:00",
        "versions": {"python": "3"},
    }
    (tmp_path / f"{section}.json").write_text(json.dumps({**head, "rows": rows}), encoding="utf-8")
    return write_validity.fill(PAGE.format(name=name), tmp_path)


def test_only_what_stands_between_the_marks_is_written(tmp_path: Path) -> None:
    page = filled(tmp_path, "pearl", [published_row()])
    assert page.startswith("Text.\n\n<!-- table: pearl -->\n")
    assert page.endswith("\n<!-- end -->\n\nMore text.\n")
    assert "old" not in page
    assert write_validity.fill(page, tmp_path) == page, "a second time changes nothing"


def test_an_unknown_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"table 'speed' is unknown; there are sources, pearl"):
        write_validity.fill(PAGE.format(name="speed"), tmp_path)


def test_a_missing_record_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"policy.json: no record .* --section policy"):
        write_validity.fill(PAGE.format(name="policy"), tmp_path)


def test_real_runs_may_be_missing(tmp_path: Path) -> None:
    assert "Not taken yet" in write_validity.fill(PAGE.format(name="real"), tmp_path)
    assert "Not taken yet" not in filled(tmp_path, "real", [real_row()])


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ({}, "| 2.00× | 2.20× (2.10–2.30) | 1.10 |"),
        ({"is_range": True}, "| 2.00× | 2.10 to 2.30× | 1.05 to 1.15 |"),
        ({"is_given": True}, "| 2.00× | 2.20× (2.10–2.30) | given |"),
        ({"low": 2.2, "high": 2.2, "unit": " ms"}, "| 2.0 ms | 2.2 ms | 1.10 |"),
        ({"is_range": True, "low": 2.2, "high": 2.2}, "| 2.00× | 2.20 to 2.20× | 1.10 |"),
    ],
    ids=["interval", "range", "given", "one value", "narrow range"],
)
def test_a_published_figure_stands_beside_ours(
    tmp_path: Path, changes: dict[str, Any], cells: str
) -> None:
    assert cells in filled(tmp_path, "pearl", [published_row(**changes)])


def test_a_table_shows_the_rows_of_its_system(tmp_path: Path) -> None:
    rows = [published_row(), published_row(system="Vidur", figure="TPOT", source="a file")]
    assert "TPOT" not in filled(tmp_path, "pearl", rows)
    assert "| Vidur | a file |" in filled(tmp_path, "sources", rows)


POLICY = [
    policy_row(0.8, 0.7, 0.9),
    policy_row(1.02, 0.99, 1.05, rate=0.95),
    policy_row(1.2, 1.1, 1.3, both=True),
]


def test_the_worst_cells_of_the_policy_are_shown(tmp_path: Path) -> None:
    page = filled(tmp_path, "policy", POLICY)
    assert "| device alone | 8 | 1.020 (0.990–1.050) |" in page
    assert "| both ends | 8 | 1.200 (1.100–1.300) |" in page
    counts = "Of 3 cells 1 are above 1.03 beyond their interval, and 1 are undecided, 0 of them"
    assert counts in page
    mean = (0.8 * 1.02 * 1.2) ** (1 / 3)
    assert f"geometric mean of all is {mean:.3f}" in page


def test_the_heat_map_marks_what_is_above_and_what_is_open(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"rows": POLICY}), encoding="utf-8")
    svg = draw_policy.draw(path)
    assert svg.count('stroke="var(--ink)" stroke-width="1.5"') == 1
    assert svg.count('stroke="var(--ink)" stroke-width="2"') == 1
    assert "3 cells; 1 above 1.03 beyond their interval, 1 undecided" in svg
    assert "RTT 5, pass 8, step 1, acceptance 0.8: 0.800 (0.700 to 0.900) of windowed" in svg


@pytest.mark.parametrize(
    ("ratio", "name", "strength"),
    [(0.5, "faster", 1.0), (0.85, "faster", 0.5), (1.0, "faster", 0.0), (1.03, "slower", 0.5)],
)
def test_a_colour_is_as_strong_as_the_difference(ratio: float, name: str, strength: float) -> None:
    found, shade = draw_policy.shade(ratio)
    assert found == name
    assert shade == pytest.approx(strength)


def test_a_formula_is_judged_as_it_stands() -> None:
    played = [1.0, 1.5, 2.0]
    assert write_validity.explained_share([lead_row(one, one) for one in played]) == 1.0
    mean = (1.0 * 1.5 * 2.0) ** (1 / 3)
    constant = [lead_row(one, mean) for one in played]
    assert write_validity.explained_share(constant) == pytest.approx(0.0)
    assert write_validity.explained_share([lead_row(one, 9.0) for one in played]) < -1.0


def test_the_cells_where_the_formula_fails_come_first(tmp_path: Path) -> None:
    rows = [lead_row(1.0, 1.0, rtt_ms=2.0, lead=None), lead_row(1.5, 1.2), lead_row(2.0, 2.02)]
    page = filled(tmp_path, "lead-failures", rows)
    assert page.index("-20 %") < page.index("+1 %") < page.index("| never |")
    assert "| does not draft | 3 |" in filled(tmp_path, "lead", rows)


@pytest.mark.parametrize(
    ("tape_ms", "verdict"),
    [(52.0, "+4.0 %; 5 % kept"), (53.0, "+6.0 %; 5 % not kept"), (47.0, "-6.0 %; 5 % not kept")],
)
def test_the_mean_of_the_networks_is_judged(tmp_path: Path, tape_ms: float, verdict: str) -> None:
    page = filled(tmp_path, "real", [real_row(tape_ms=tape_ms)])
    assert f"| a road | 50.0 | {tape_ms:.1f} (" in page
    assert f"| **mean of all** |  | {verdict} |" in page


def test_values_that_differ_are_counted_for_each_python(tmp_path: Path) -> None:
    rows = [
        {"scenario": "home", "python": "3.11", "compared": 1000, "differing": 0, "rounded": 0},
        {"scenario": "home", "python": "3.13", "compared": 1000, "differing": 7, "rounded": 7},
        {"scenario": "city", "python": "3.11", "compared": 500, "differing": 0, "rounded": 0},
        {"scenario": "city", "python": "3.13", "compared": 500, "differing": 2, "rounded": 1},
    ]
    page = filled(tmp_path, "bundles", rows)
    assert "| home | 1,000 | 0 | 7, by rounding |" in page
    assert "| city | 500 | 0 | 2 |" in page
    assert "| **all** | 1,500 | 0 | 9 |" in page
