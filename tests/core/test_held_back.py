"""Who cannot run keeps nobody else out, and changes no other's turn. Oracle: the others' passes."""

from __future__ import annotations

import random

import pytest

from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    EngineLimits,
)
from tests.core.scenes import PacedEngine

CACHED = EngineLimits(cache=CacheShape(1024, 16))


def test_a_session_over_its_keys_rate_keeps_no_newer_one_out_of_the_cache() -> None:
    paced = PacedEngine(0.0, CACHED)
    slow = Credential("slow", tokens_per_s=1.0)
    paced.open("first", credential=slow)
    while paced.engine.running:  # until the key has used up what it may
        paced.run_pass()
    paced.open("second", credential=slow)
    assert not paced.engine.running
    paced.open("other", credential=Credential("other"))
    for _ in range(5):
        paced.run_pass()
    assert (paced.tokens["second"], paced.tokens["other"]) == (0, 5)
    paced.run_until(paced.now + 6.0)
    assert paced.tokens["second"] > 0  # its turn comes all the same


def could_run(engine: VerifyEngine) -> bool:
    """Whether a session waits that has room in the cache, or an older one's leave to have it."""
    ledger, over_rate = engine.keeper.ledger, engine._scheduler.fairness.over_rate
    assert ledger is not None
    for key, session in engine.sessions.items():
        if session.missing_rows and not over_rate(key):
            wanted = session.cache_length + 1 if session.cache_length else session.prefix.length
            return ledger.missing(key, wanted) <= ledger.free_count
    return False


@pytest.mark.parametrize("seed", range(6))
def test_an_idle_verifier_leaves_nobody_waiting_who_could_run(seed: int) -> None:
    rng = random.Random(seed)
    blocks = 512 + rng.choice((0, 3, 40))
    paced = PacedEngine(0.0, EngineLimits(cache=CacheShape(blocks, 16), max_sessions=12))
    keys = [Credential(f"key {rate}", tokens_per_s=rate) for rate in (0.0, 1.0, 5.0)]
    for step in range(150):
        there = sorted(paced._stream_of)
        match rng.randrange(8):
            case 0 | 1:
                paced.open(f"s {step}", rng.choice((1, 40, 3_000)), rng.choice(keys))
            case 2 if there:
                rng.choice((paced.close, paced.lose))(rng.choice(there))
            case _ if paced.engine.deadline is not None:
                paced.run_pass()
        assert paced.engine.running or not could_run(paced.engine)
