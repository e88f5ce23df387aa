"""All sessions of a verifier, beside the scripts: bugs and random worlds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from edgespec.core.protocol.messages import FaultCode
from edgespec.core.verifier.drafts import ExactRule, Walk
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    CloseStream,
    EngineLimits,
    ReportFailure,
    StreamOpened,
)
from tests.core.engine_scenes import batch, done, faults, named
from tests.core.fixed_text import LIMITS, MODEL


class _Broken:
    """Raises for the second session of a pass."""

    def __init__(self) -> None:
        self.walks = 0

    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        self.walks += 1
        if self.walks == 3:
            raise ZeroDivisionError("a bug")
        return ExactRule().walk(tokens, parents, targets)


def _three_sessions(engine: VerifyEngine) -> BatchDone:
    """Sessions a, b and c on streams 1, 2 and 3, in one pass that is about to end."""
    first = batch(engine.handle(StreamOpened(1, named("a")), 0.0))
    engine.handle(StreamOpened(2, named("b")), 0.0)
    engine.handle(StreamOpened(3, named("c")), 0.0)
    return done(batch(engine.handle(done(first), 0.1)))


def test_a_bug_in_one_session_ends_that_session() -> None:
    engine = VerifyEngine(MODEL, LIMITS, EngineLimits(), {"exact": _Broken()})
    actions = engine.handle(_three_sessions(engine), 0.2)
    ((stream, code),) = faults(actions)
    assert code is FaultCode.INTERNAL
    assert code.retryable
    (report,) = [action for action in actions if isinstance(action, ReportFailure)]
    assert "ZeroDivisionError: a bug" in report.details
    assert CloseSequence(report.key) in actions
    assert CloseStream(stream) in actions
    assert set(engine.sessions) == {"a", "b", "c"} - {report.key}
    assert {request.key for request in batch(actions)} == set(engine.sessions)


def test_tests_see_the_bug_itself() -> None:
    engine = VerifyEngine(MODEL, LIMITS, EngineLimits(), {"exact": _Broken()}, contain=False)
    event = _three_sessions(engine)
    with pytest.raises(ZeroDivisionError):
        engine.handle(event, 0.2)
