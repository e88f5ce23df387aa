"""A model and its adapters behind one verifier: who gets which, and that nothing is mixed up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.protocol.messages import (
    Fault,
    Open,
    Opened,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine import VerifyEngine
from tests.core.scenes import LIMITS
from tests.core.scenes import MODEL as FIXED

MODEL = replace(FIXED, fingerprint="fixed")
SQL = replace(MODEL, name="sql", fingerprint="sql-on-fixed")
POETRY = replace(MODEL, name="poetry", fingerprint="poetry-on-fixed")
PROMPT = (1, 2, 3, 4, 6, 7, 8, 9, 10)
"""Two blocks of four, and a token."""
ALICE = Credential("alice", models=(MODEL.name, "sql"))


class Serving:
    def __init__(self, share: SharePrefixes = SharePrefixes.ALL) -> None:
        bounds = ee.EngineLimits(cache=CacheShape(40, 4), share_prefixes=share)
        limits = replace(LIMITS, context_length=160)
        self.engine = VerifyEngine(MODEL, limits, bounds, contain=False, adapters=(SQL, POETRY))
        self.actions: tuple[ee.EngineAction, ...] = ()

    def open(self, key: str, model: str, credential: Credential | None = None) -> None:
        request = Open(key, model, "", PROMPT, sampling=SamplingParams(max_tokens=30))
        event = ee.StreamOpened(ord(key), request)
        event = event if credential is None else replace(event, credential=credential)
        self.actions = self.engine.handle(event, 0.0)

    def batch(self) -> tuple[PassRequest, ...]:
        found = [one.requests for one in self.actions if isinstance(one, ee.RunBatch)]
        return found[0] if found else ()

    def done(self) -> None:
        results = tuple(PassResult(one.key, (5,) * (1 + len(one.tokens))) for one in self.batch())
        self.actions = self.engine.handle(ee.BatchDone(results), 0.0)

    @property
    def sent(self) -> list[object]:
        return [one.message for one in self.actions if isinstance(one, ee.SendTo)]

    @property
    def opened(self) -> list[Opened]:
        return [one for one in self.sent if isinstance(one, Opened)]

    @property
    def faults(self) -> list[Fault]:
        return [one for one in self.sent if isinstance(one, Fault)]


def test_a_key_is_for_the_names_it_lists() -> None:
    serving = Serving()
    serving.open("a", "sql", ALICE)
    assert [one.model for one in serving.opened] == ["sql"]
    serving.open("b", "poetry", ALICE)
    (fault,) = serving.faults
    assert "key 'alice' is for the models" in fault.message
    assert "this one is 'poetry'" in fault.message


@pytest.mark.parametrize("share", [SharePrefixes.ALL, SharePrefixes.CREDENTIAL])
def test_what_one_adapter_has_computed_is_nothing_to_another(share: SharePrefixes) -> None:
    serving = Serving(share)
    for key, name, cached in (
        ("a", "", 0),
        ("b", "sql", 0),
        ("c", "poetry", 0),
        ("d", "sql", 8),
        ("e", "", 8),
    ):
        serving.open(key, name)
        (request,) = [one for one in serving.batch() if one.key == key]
        assert request.cache_length == cached, key
        serving.done()
        serving.engine.handle(ee.StreamLost(ord(key)), 0.0)
        while serving.batch():
            serving.done()


def test_another_adapter_is_another_generation() -> None:
    """With the session's secret it is begun anew, and not continued by the other model."""
    engine = Serving().engine
    request = Open("a", "sql", "", PROMPT, session_secret=b"s" * 16)
    engine.handle(ee.StreamOpened(1, request), 0.0)
    engine.handle(ee.StreamLost(1), 0.0)
    actions = engine.handle(ee.StreamOpened(2, replace(request, model="poetry")), 0.0)
    opened = [one.message for one in actions if isinstance(one, ee.SendTo)]
    assert [one.model for one in opened if isinstance(one, Opened)] == ["poetry"]
    assert engine.sessions["a"].request.model == "poetry"
