"""What a row takes is known to the next process. Oracle: what was put in; a fresh ``RowTimes``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicySection
from edgespec.core.device.learned import Learned
from edgespec.core.device.row_times import RowTimes
from edgespec.device.build import build_agent
from edgespec.device.row_cost_file import RowCostFile

DRAFT = DraftSection("bundled")


def taught() -> RowTimes:
    times = RowTimes()
    for _ in range(20):
        times.add(1, 0.008)
        times.add(4, 0.011)
    return times


def test_the_next_process_begins_with_what_one_has_learned(tmp_path: Path) -> None:
    kept = RowCostFile(tmp_path, DRAFT)
    fresh = kept.read()
    assert (fresh.row_s, fresh.learned) == (None, None)
    kept.keep(Learned(rows=fresh))  # nothing to keep
    assert not list(tmp_path.iterdir())
    kept.keep(Learned(rows=taught()))
    found = RowCostFile(tmp_path, DRAFT).read()
    assert found.learned == pytest.approx((0.008, 0.001))
    assert not found.looking
    for _ in range(200):  # it goes on learning
        found.add(1, 0.008)
        found.add(4, 0.014)
    assert found.row_s == pytest.approx(0.002)


def test_another_draft_is_another_file(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"one")
    mine = DraftSection(str(folder))
    RowCostFile(tmp_path, mine).keep(Learned(rows=taught()))
    assert RowCostFile(tmp_path, mine).read().learned is not None
    assert RowCostFile(tmp_path, DRAFT).read().learned is None
    assert RowCostFile(tmp_path, replace(mine, threads=2)).read().learned is None
    (folder / "model.onnx").write_bytes(b"another")
    assert RowCostFile(tmp_path, mine).read().learned is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"one_s": NaN, "row_s": 0.1}',
        '{"one_s": 0.1, "row_s": -1}',
        '{"one_s": "x"}',
    ],
)
def test_a_damaged_file_is_no_file(text: str, tmp_path: Path) -> None:
    kept = RowCostFile(tmp_path, DRAFT)
    kept.keep(Learned(rows=taught()))
    (path,) = (tmp_path / "rows").iterdir()
    path.write_text(text)
    assert kept.read().learned is None


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("in the way")
    RowCostFile(tmp_path, DRAFT).keep(Learned(rows=taught()))
    assert (tmp_path / "rows").read_text() == "in the way"


async def test_an_agent_hands_on_what_it_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = AgentConfig(draft=DraftSection("toy"), policy=PolicySection(leaves=4))
    async with build_agent(config) as agent:
        rows = agent.options.learned.rows
        assert rows.learned is None
        for count in (1, 4) * 20:
            rows.add(count, 0.007 + 0.001 * count)
    async with build_agent(config) as agent:
        assert agent.options.learned.rows.learned == pytest.approx((0.008, 0.001))
    one_leaf = replace(config, policy=PolicySection())
    async with build_agent(one_leaf) as agent:  # which has no use for it
        assert agent.options.learned.rows.learned is None
