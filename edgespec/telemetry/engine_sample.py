"""How an engine stands at this moment: what is counted there anyway, read when somebody asks.

Read from another thread than the engine's, without a lock: tables are copied in one step, numbers
are read one by one, so two of them may be an event apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.session_events import FINISHED, PASSING


@dataclass(frozen=True, slots=True)
class EngineSample:
    """Sessions that are not finished are running, waiting or detached."""

    running: int
    """Their device is there, and they have entered the cache."""
    waiting: int
    """Their device is there, and their prompt waits for a pass or for room."""
    detached: int
    """Their link is lost: they are kept for the lease."""
    cache_share: float
    """Of the key-value blocks, the share that is held; 0 for a target that keeps no account."""
    evictions: int
    preemptions: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    server_drafted_tokens: int


def sample_engine(engine: VerifyEngine) -> EngineSample:
    """The engine's standing, in time proportional to its sessions."""
    running = waiting = detached = 0
    for session in tuple(engine.sessions.values()):
        if session.state is FINISHED:
            continue
        if not session.attached:
            detached += 1
        elif session.state is PASSING or session.cache_length:
            running += 1
        else:
            waiting += 1
    keeper = engine.keeper
    ledger = keeper.ledger
    held = 0.0 if ledger is None else 1.0 - ledger.free_count / ledger.block_count
    return EngineSample(
        running,
        waiting,
        detached,
        held,
        keeper.evictions,
        keeper.preemptions,
        _counter(keeper, "prefix_hit_tokens"),
        _counter(keeper, "prefix_query_tokens"),
        _counter(engine, "server_drafted_tokens"),
    )


def _counter(owner: object, name: str) -> int:
    """A count that only an engine with that ability keeps; 0 for one without."""
    return int(getattr(owner, name, 0))
