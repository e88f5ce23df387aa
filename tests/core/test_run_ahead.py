"""When a pass without a draft may start. Oracle: the three rules as the module states them."""

from __future__ import annotations

import pytest

from edgespec.core.protocol.messages import RunAhead
from edgespec.core.verifier.run_ahead import (
    AlwaysRunAhead,
    AutoRunAhead,
    NeverRunAhead,
    RunAheadView,
    run_ahead_policy,
)


def _view(
    now: float = 10.0,
    idle_since: float = 9.0,
    pass_s: float = 0.1,
    expected_at: float | None = None,
    no_draft_coming: bool = False,
    hit_rate: float = 1.0,
) -> RunAheadView:
    return RunAheadView(now, idle_since, pass_s, expected_at, no_draft_coming, hit_rate)


def test_each_kind_has_its_policy() -> None:
    kinds = {kind: type(run_ahead_policy(kind)) for kind in RunAhead}
    assert kinds == {
        RunAhead.NEVER: NeverRunAhead,
        RunAhead.ALWAYS: AlwaysRunAhead,
        RunAhead.AUTO: AutoRunAhead,
    }


def test_always_is_now() -> None:
    assert AlwaysRunAhead().start_at(_view(expected_at=10.001)) <= 10.0


def test_never_waits_for_its_patience_only() -> None:
    assert NeverRunAhead(2.0).start_at(_view()) == 11.0
    assert NeverRunAhead(2.0).start_at(_view(no_draft_coming=True)) <= 10.0


@pytest.mark.parametrize("kind", list(RunAhead))
def test_nobody_waits_when_no_draft_coming(kind: RunAhead) -> None:
    view = _view(idle_since=10.0, expected_at=10.01, no_draft_coming=True)
    assert run_ahead_policy(kind).start_at(view) <= view.now


def test_auto_waits_for_a_draft_that_comes_soon_and_will_do() -> None:
    auto = AutoRunAhead(unsure=0.5, sure=1.0, slack_share=0.1)
    soon = _view(idle_since=10.0, expected_at=10.04, hit_rate=0.75)
    assert auto.start_at(soon) == pytest.approx(10.05)


@pytest.mark.parametrize(
    ("expected_at", "hit_rate"), [(None, 1.0), (10.051, 0.75), (99.0, 1.0), (10.01, 0.5)]
)
def test_auto_goes_on_otherwise(expected_at: float | None, hit_rate: float) -> None:
    auto = AutoRunAhead(unsure=0.5, sure=1.0)
    view = _view(idle_since=10.0, expected_at=expected_at, hit_rate=hit_rate)
    assert auto.start_at(view) <= view.now


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
