"""Short ways to drive a ``VerifyEngine`` in tests, over the fixed text."""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.protocol.messages import Fault, FaultCode, Open, RunAhead
from edgespec.core.protocol.work import PassRequest, PassResult
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    EngineAction,
    EngineLimits,
    RunBatch,
    SendTo,
)
from tests.core.fixed_text import LIMITS, MODEL, REQUEST, targets_of

RUNNING = replace(REQUEST, run_ahead=RunAhead.ALWAYS)


def new_engine(limits: EngineLimits | None = None, *, contain: bool = True) -> VerifyEngine:
    return VerifyEngine(MODEL, LIMITS, limits or EngineLimits(), contain=contain)


def named(key: str, request: Open = RUNNING) -> Open:
    return replace(request, session_id=key)


def batch(actions: tuple[EngineAction, ...]) -> tuple[PassRequest, ...]:
    """The requests of the one pass among the actions."""
    (run,) = [action for action in actions if isinstance(action, RunBatch)]
    return run.requests


def done(requests: tuple[PassRequest, ...]) -> BatchDone:
    """What the target says of the fixed text."""
    return BatchDone(tuple(PassResult(r.key, targets_of(r) if r.sample else ()) for r in requests))


def faults(actions: tuple[EngineAction, ...]) -> list[tuple[int, FaultCode]]:
    """Which streams hear which faults."""
    return [
        (action.stream, action.message.code)
        for action in actions
        if isinstance(action, SendTo) and isinstance(action.message, Fault)
    ]
