"""Verifiers of no use for a text, or none at all. Oracle: the toy's own text; who is named."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.protocol.messages import FaultCode
from edgespec.core.toy_model import ToyModel
from edgespec.device.agent import Agent, AgentOptions, GenerationError
from edgespec.device.build import connect
from edgespec.device.verifier_pool import VerifierPool
from edgespec.models.toy import TOY_MODEL
from edgespec.verifier.targets.toy import ToyTarget
from edgespec.wire.access import ServerAccess, device_access
from edgespec.wire.directory import VerifierDirectory
from tests.shell.failing_verifiers import (
    EXPECTED,
    HASTY,
    PACED,
    PARAMS,
    PATIENT,
    PROMPT,
    TEXT,
    WARY,
    agent,
    collect,
    gates,
)
from tests.shell.guarded import device_config, keys_in
from tests.shell.live_verifier import serving
from tests.shell.pki import Pki

# --- those who are of no use ------------------------------------------------------------------


@pytest.mark.parametrize("when", [0, 40], ids=["from the beginning", "in mid-text"])
async def test_one_that_says_nothing_any_more_is_left(when: int) -> None:
    async with gates(2) as ((hole, _), (other, _)):
        if when == 0:
            hole.swallow()
        async with agent(hole.address, other.address, failover=WARY) as one:
            assert await collect(one, {when: hole.swallow}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers[-1] == other.address


def stranger(**changes: object) -> ToyTarget:
    """Another model of the same name and vocabulary, unless told otherwise."""
    settings: dict[str, object] = {
        "name": "toy",
        "vocabulary": f"toy-{TOY_MODEL.vocabulary_size}",
        "fingerprint": "stranger",
    }
    model = ToyModel(TOY_MODEL.vocabulary_size, order=2, seed=9)
    return ToyTarget(model, **{**settings, **changes})  # type: ignore[arg-type]


async def test_a_text_is_not_continued_by_another_model() -> None:
    async with gates(2, [None, stranger()]) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address, reconnect=HASTY) as one:
            with pytest.raises(GenerationError) as caught:
                await collect(one, {30: gate.kill})
            why = str(caught.value)
            assert f"{other.address}: it serves the model 'toy' (stranger)" in why
            assert "but the text was begun by 'toy' (" in why
            assert gate.address in why


async def test_it_waits_for_the_one_that_began_rather_than_take_another_model() -> None:
    async with gates(2, [None, stranger()]) as ((gate, port), (other, _)):

        def die() -> None:
            gate.kill()
            loop = asyncio.get_running_loop()
            loop.call_later(0.5, lambda: setattr(gate, "port", port))

        async with agent(gate.address, other.address) as one:
            assert await collect(one, {30: die}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (gate.address,)


async def test_a_new_text_may_be_of_another_model_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with gates(2, [None, stranger()]) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address) as one:
            assert await collect(one) == EXPECTED
            assert not caplog.records
            gate.kill()
            assert len(await collect(one)) == len(EXPECTED)
            assert one.stats is not None
            assert one.stats.verifiers == (other.address,)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith(f"{other.address} serves the model 'toy' (stranger); the text before")


async def test_one_of_another_vocabulary_is_passed_over_and_named() -> None:
    async with gates(2, [stranger(vocabulary="other-words")]) as ((wrong, _), (gate, _)):
        async with agent(wrong.address, gate.address, reconnect=HASTY) as one:
            assert await collect(one) == EXPECTED
            gate.kill()
            with pytest.raises(GenerationError) as caught:
                await collect(one)
            assert f"{wrong.address}: the draft's vocabulary" in str(caught.value)
            assert "other-words" in str(caught.value)


async def test_one_that_refuses_the_key_is_passed_over_and_named(tmp_path: Path) -> None:
    keys_in(tmp_path / "keys.yaml", "somebody")
    guarded = ServerAccess(replace(PACED, keys=str(tmp_path / "keys.yaml")))
    async with gates(2, access=guarded) as ((gate, port), (refuses, _)):
        async with agent(refuses.address, gate.address, reconnect=HASTY) as one:
            assert await collect(one) == EXPECTED
            gate.kill()
            with pytest.raises(GenerationError, match="this verifier asks for a key") as caught:
                await collect(one)
            assert refuses.address in str(caught.value)
            assert gate.address in str(caught.value)
            gate.port = port
            assert await collect(one) == EXPECTED
        async with agent(refuses.address, refuses.address.replace("127.0.0.1", "localhost")) as one:
            with pytest.raises(GenerationError, match="asks for a key") as caught:
                await collect(one)
            assert caught.value.code is FaultCode.UNAUTHENTICATED


# --- all of them ------------------------------------------------------------------------------


async def test_when_all_are_down_each_is_named_and_one_that_returns_is_used() -> None:
    async with gates(3) as found:
        addresses = [gate.address for gate, _ in found]

        def die() -> None:
            for gate, _ in found:
                gate.kill()

        def one_returns() -> None:
            found[2][0].port = found[2][1]

        def all_die() -> None:
            die()
            asyncio.get_running_loop().call_later(0.7, one_returns)

        async with agent(*addresses) as one:
            assert await collect(one, {50: all_die}) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (addresses[0], addresses[2])
        async with agent(*addresses, reconnect=HASTY) as one:
            die()
            with pytest.raises(GenerationError, match="gave up on the verifier") as caught:
                await collect(one)
            assert caught.value.code is FaultCode.OVERLOADED
            for address in addresses:
                assert address in str(caught.value)


async def test_generations_beside_each_other_all_move() -> None:
    async with gates(2) as ((gate, _), (other, _)):
        async with agent(gate.address, other.address) as one:
            texts = [collect(one, {30: gate.kill}), *(collect(one) for _ in range(5))]
            assert await asyncio.gather(*texts) == [EXPECTED] * 6


async def test_leaving_a_text_early_leaves_nothing_behind() -> None:
    async with gates(2) as ((gate, _), (other, _)):
        gate.swallow()
        before = asyncio.all_tasks()
        one = agent(gate.address, other.address, failover=WARY)
        chunks = one.generate(PROMPT, PARAMS)
        await anext(chunks)
        await chunks.aclose()
        other.swallow()
        waiting = asyncio.ensure_future(anext(one.generate(PROMPT, PARAMS)))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await one.close()
        left = [repr(task.get_coro()) for task in asyncio.all_tasks() - before]
        ours = ("VerifierPool", "PooledStream", "Link.", "SessionDriver")
        assert not [one for one in left if any(name in one for name in ours)]


async def test_each_address_of_a_name_shows_the_certificate_of_the_name(tmp_path: Path) -> None:
    """Nobody listens at the first address of the name; the second shows the name's certificate,
    which says nothing of addresses."""
    pki = Pki(tmp_path)
    pki.renew_server("gpu-box")
    config = device_config("gpu-box:1", pki.device())
    async with serving(config=replace(PACED, tls=pki.server())) as (address, _):
        port = address.rpartition(":")[2]
        dial = partial(connect, access=device_access(config))

        async def look_up(host: str, port: int) -> Sequence[str]:
            return ["127.0.0.2", "127.0.0.1"]

        directory = VerifierDirectory((f"gpu-box:{port}",), dial, look_up=look_up)
        failover = Failover(FailoverPolicy(), Association.LISTED)
        options = AgentOptions(reconnect=PATIENT)
        pool = VerifierPool(directory, failover)
        async with Agent(pool, None, TEXT.encode, TEXT.stream, options) as one:
            assert await collect(one) == EXPECTED
            assert one.stats is not None
            assert one.stats.verifiers == (f"gpu-box:{port} (127.0.0.1)",)
