"""A device that gathers its drafts, in virtual time beside one that sends every step at once.

Oracle: the second one. The first must not be slower where the verifier starts its passes one after
another, and must send fewer messages; the text is the target's own in any case.
"""

from __future__ import annotations

import importlib

import pytest

from tests.sources import ROOT


@pytest.mark.parametrize("rtt_ms", [2, 20, 100])
def test_gathering_costs_no_time_and_saves_messages(
    rtt_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    bench = importlib.import_module("policies")
    at_once, gathers = (
        bench.play(policy, bench.AlwaysRunAhead(), rtt_ms, 3, 0.15, 1, 120)
        for policy in (bench.WindowedPolicy(2), bench.GATHER)
    )
    assert gathers.tpot_ms <= at_once.tpot_ms
    assert gathers.passes <= at_once.passes
    assert gathers.drafts < 0.6 * at_once.drafts
