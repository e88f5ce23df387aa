"""When a pass without a draft may start. Oracle: the three rules as the module states them."""

from __future__ import annotations

import pytest

from edgespec.core.verifier.drafts import (
    AutoRunAhead,
    NeverRunAhead,
    RunAheadView,
)
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits, RunBatch, StreamOpened
from tests.core.scenes import LIMITS, MODEL, REQUEST, batch, done, named


def _view(
    now: float = 10.0,
    idle_since: float = 9.0,
    pass_s: float = 0.1,
    expected_at: float | None = None,
    no_draft_coming: bool = False,
    hit_rate: float = 1.0,
    *,
    runs_anyway: bool = False,
) -> RunAheadView:
    return RunAheadView(
        now, idle_since, pass_s, expected_at, no_draft_coming, hit_rate, runs_anyway
    )


def test_never_waits_for_its_patience_only() -> None:
    assert NeverRunAhead(2.0).start_at(_view()) == 11.0
    assert NeverRunAhead(2.0).start_at(_view(no_draft_coming=True)) <= 10.0


def test_auto_waits_for_a_draft_that_comes_soon_and_will_do() -> None:
    auto = AutoRunAhead(unsure=0.5, sure=1.0, slack_share=0.1)
    soon = _view(idle_since=10.0, expected_at=10.04, hit_rate=0.75)
    assert auto.start_at(soon) == pytest.approx(10.05)


@pytest.mark.parametrize("expected_at", [8.0, 9.0, 10.0, 10.01, 10.03, 10.1, 11.0])
@pytest.mark.parametrize("hit_rate", [0.0, 0.8, 0.9, 1.0])
def test_auto_never_waits_longer_than_a_pass_and_its_slack(
    expected_at: float, hit_rate: float
) -> None:
    auto = AutoRunAhead(slack_share=0.1)
    view = _view(idle_since=10.0, expected_at=expected_at, hit_rate=hit_rate)
    assert auto.start_at(view) - view.idle_since <= 1.1 * view.pass_s + 1e-9


@pytest.mark.parametrize("hit_rate", [0.0, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("expected_at", [9.0, 9.99, 10.0])
def test_auto_never_waits_past_its_share_for_an_overdue_draft(
    expected_at: float, hit_rate: float
) -> None:
    auto = AutoRunAhead(unsure=0.5, sure=1.0, slack_share=0.1)
    view = _view(idle_since=10.0, expected_at=expected_at, hit_rate=hit_rate)
    share = max(0.0, (hit_rate - 0.5) / 0.5)
    assert auto.start_at(view) <= 10.0 + share * view.pass_s


class WaitsAlone:
    """A policy that shares the passes of others and waits for a draft otherwise."""

    def start_at(self, view: RunAheadView) -> float:
        return view.now if view.runs_anyway else view.now + 1.0


def test_who_waits_for_a_draft_is_taken_along_by_a_pass_of_others() -> None:
    engine = VerifyEngine(MODEL, LIMITS, EngineLimits(), run_ahead=lambda kind: WaitsAlone())
    first = batch(engine.handle(StreamOpened(1, named("a", REQUEST)), 0.0))
    waiting = engine.handle(done(first), 0.1)
    assert not any(isinstance(action, RunBatch) for action in waiting)
    shared = batch(engine.handle(StreamOpened(2, named("b", REQUEST)), 0.2))
    assert {request.key: len(request.feed) for request in shared} == {"b": 2, "a": 1}
    assert not any(isinstance(a, RunBatch) for a in engine.handle(done(shared), 0.3))
