"""The comparison: paired worlds, gains with the right sign, and the page it ends in."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from edgespec_uara import sweep
from edgespec_uara.association import shipped_association
from edgespec_uara.comparison import (
    Cell,
    Effort,
    compare,
)
from edgespec_uara.cost import CorrectedCost, PaperCost, objective, optimal
from edgespec_uara.methods import (
    NO_SPECULATION,
    TMA_MASAC,
    TMA_MASAC_MOVES,
    Actor,
    Situation,
    best_gain,
    follow,
    max_compute,
    methods,
    plan,
    views,
)
from edgespec_uara.world import UaraSettings, UaraWorld
from tests.uara.small import snapshot


def test_a_method_is_compared_on_the_same_worlds_each_time() -> None:
    every = methods(Actor.shipped())
    one, two = (
        list(compare(Cell(20, 3), PaperCost(), every, Effort(1, 2), seed=3)) for _ in range(2)
    )
    assert one == two
    assert [result.method for result in one] == [*every, NO_SPECULATION]
    by_name = {result.method: result.cost_ms for result in one}
    for baseline in ("random", "max-SINR", "max-compute"):
        assert by_name[TMA_MASAC_MOVES] < by_name[baseline]


@pytest.mark.parametrize(("name", "kept"), [(TMA_MASAC, True), (TMA_MASAC_MOVES, False)])
def test_the_papers_method_swaps_devices_and_moves_none(name: str, kept: bool) -> None:
    """A swap leaves every server with as many devices as the first phase gave it."""
    now = snapshot(0)
    method = methods(Actor.shipped())[name]
    decision = method(Situation(now, PaperCost().terms(now), np.random.default_rng(0)))
    counts, first = (
        np.bincount(association, minlength=now.settings.servers).tolist()
        for association in (decision.association, best_gain(now.gains))
    )
    assert (counts == first) is kept


def test_the_learned_association_beats_the_simple_rules() -> None:
    """With optimal shares for all, so that only the association differs."""
    cost, policy = CorrectedCost(), follow(shipped_association())
    learned, signal, compute = [], [], []
    for seed in range(6):
        now = UaraWorld(UaraSettings(devices=60, servers=8), 500 + seed).snapshot
        terms = cost.terms(now)
        decision = policy(Situation(now, terms, np.random.default_rng(0)))
        decision.check(8)
        learned.append(objective(terms, decision))
        signal.append(objective(terms, optimal(terms, best_gain(now.gains))))
        compute.append(objective(terms, optimal(terms, max_compute(now))))
    assert np.mean(learned) < min(np.mean(signal), np.mean(compute))


def test_a_plan_says_what_the_simulator_needs() -> None:
    now = snapshot(0)
    found = plan(now, CorrectedCost(), methods(Actor.shipped())["TMA + optimal shares"], 0)
    link = found.link(3)
    server = int(found.decision.association[3])
    assert link.up_bits_per_s == pytest.approx(
        found.up_bits_per_s[3, server] * found.decision.bandwidth[3]
    )
    assert link.rtt_s == pytest.approx(0.008 + now.backhaul_rtt_s[server])
    seen = views(now)
    assert (len(seen.devices), len(seen.verifiers), len(seen.links[0])) == (24, 4, 4)
    assert all(0 < device.acceptance <= 1 for device in seen.devices)
    # The faster the card, the shorter its pass.
    passes = [verifier.pass_s for verifier in seen.verifiers]
    assert np.argmin(passes) == np.argmax(now.server_flops)


def test_the_sweep_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "cells", lambda quick: (Cell(12, 3), Cell(16, 12)))
    import typer

    app = typer.Typer()
    app.command()(sweep.main)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), "--quick"])
    assert done.exit_code == 0, done.output
    assert "23.7%" in done.output
    for name in ("paper", "corrected"):
        data = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        for ours in (TMA_MASAC, TMA_MASAC_MOVES):
            assert {gain["baseline"] for gain in data["gains"][ours]} >= {"random", "max-SINR"}
            assert ours in done.output
        page = (tmp_path / f"{name}.html").read_text(encoding="utf-8")
        assert "Plotly.newPlot" in page
        assert '<script src="http' not in page
