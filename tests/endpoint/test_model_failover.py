"""Models by name at verifiers that come and go. Oracle: an adapter is another toy model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from openai import APIError, APIStatusError, NotFoundError

from edgespec.core.association.candidates import CLOSED
from edgespec.core.association.policies import Association
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.device.verifier_pool import VerifierPool
from tests.endpoint.live_endpoint import Live, ask, events_of, over_verifiers
from tests.endpoint.test_http import until
from tests.endpoint.test_models import (
    ASKED,
    IN_SQL,
    OWN,
    PATH,
    POETRY,
    SQL,
    completed,
    over_adapters,
    text,
    text_of,
)
from tests.shell.adapted_toy import AdaptedToy
from tests.shell.failing_verifiers import STEADY
from tests.shell.gate import Gate
from tests.shell.live_verifier import GatedTarget, serving

HASTY = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=0.5, give_up_s=0.5)
PATIENT = replace(HASTY, give_up_first_s=60.0, give_up_s=60.0)


class Held:
    """A verifier's target with the adapter, which dies in the middle of a text."""

    def __init__(self) -> None:
        self.target = GatedTarget(AdaptedToy({"sql": SQL}), 10)

    async def fail_over(self, live: Live, gate: Gate, port: int | None) -> None:
        """Let another one take its place once it holds the text up."""
        await held_up(live, self.target)
        gate.kill()
        gate.port = port
        self.target.gate.set()


async def held_up(live: Live, target: GatedTarget) -> None:
    """``target`` holds a text up whose first token the device has: without one, the text would
    rightly begin anew elsewhere."""
    assert await asyncio.to_thread(target.reached.wait, 60.0)
    activity = live.endpoint.agent.activity
    await until(lambda: any(one.first_token_at is not None for one in activity.running.values()))


# --- a verifier that changes ------------------------------------------------------------------


@contextlib.asynccontextmanager
async def behind_a_gate(*targets: Any, **more: Any) -> AsyncIterator[tuple[Live, Gate, list[int]]]:
    """An endpoint whose verifier is the first of these at first; the ports of all."""
    async with contextlib.AsyncExitStack() as stack:
        ports = []
        for target in targets:
            address, _ = await stack.enter_async_context(serving(target))
            ports.append(int(address.rpartition(":")[2]))
        gate = await stack.enter_async_context(Gate(ports[0]))
        live = await stack.enter_async_context(
            over_verifiers(gate.address, **{"reconnect": PATIENT, **more})
        )
        yield live, gate, ports


async def test_a_verifier_that_comes_back_with_other_adapters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = AdaptedToy({"sql": SQL}), AdaptedToy({"poetry": POETRY})
    async with behind_a_gate(*both) as (live, gate, ports):
        assert await text(live, "sql") == IN_SQL
        gate.kill()
        gate.port = ports[1]
        # Known to the endpoint, and gone: the verifier says so.
        gone = await ask(live, PATH, {**ASKED, "model": "sql"})
        assert (gone.status, gone.error["code"], gone.error["param"]) == (
            404,
            "model_not_found",
            "model",
        )
        assert "this verifier serves 'toy', 'poetry'" in gone.error["message"]
        # Not known to the endpoint, and there: it asks before it says no.
        monkeypatch.setattr("edgespec.endpoint.models._NEW_S", 0.0)  # as after a second
        assert await text(live, "poetry") == text_of(POETRY)
        listed = (await ask(live, "/v1/models")).json["data"]
        assert [one["id"] for one in listed] == ["toy", "poetry"]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_adapter_that_vanishes_in_mid_text_ends_it_with_its_reason(stream: bool) -> None:
    held = Held()
    both = held.target, AdaptedToy({"poetry": POETRY})
    async with behind_a_gate(*both) as (live, gate, ports):
        asked = {**ASKED, "model": "sql", "stream": stream}
        task = asyncio.create_task(ask(live, PATH, asked))
        await held.fail_over(live, gate, ports[1])
        reply = await task
    if stream:
        assert reply.status == 200
        *events, last = [event for event in events_of(reply.body) if isinstance(event, dict)]
        said = "".join(event["choices"][0]["text"] for event in events)
        assert IN_SQL.startswith(said)
        assert last["error"]["code"] == "model_not_found"
    else:
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")


async def test_no_text_goes_on_with_other_weights_of_the_same_name() -> None:
    """The verifier came back with a newer adapter: what was begun is not mixed with it."""
    held = Held()
    both = held.target, AdaptedToy({"sql": POETRY}, mark="newer")
    few = replace(PATIENT, max_streams_without_token=3)
    async with behind_a_gate(*both, reconnect=few) as (live, gate, ports):
        asked = {**ASKED, "model": "sql", "stream": True}
        task = asyncio.create_task(ask(live, PATH, asked))
        await held.fail_over(live, gate, ports[1])
        *events, last = events_of((await task).body)
        assert await text(live, "sql") == text_of(POETRY)
    said = "".join(event["choices"][0]["text"] for event in events)
    assert said
    assert IN_SQL.startswith(said)
    why = (
        "the verifier serves 'sql' (sql-on-newer) now, but the text was begun by 'sql' (sql-on-toy)"
    )
    assert why in last["error"]["message"]


async def test_a_verifier_that_names_no_adapters_has_its_model() -> None:
    """As those of earlier versions: they leave the field out."""
    async with over_adapters(AdaptedToy({})) as live, live.client() as client:
        assert [one.id async for one in client.models.list()] == ["toy"]
        assert (await completed(client, "toy")).choices[0].text == OWN
        with pytest.raises(NotFoundError, match="'sql' does not exist here; this is 'toy'"):
            await completed(client, "sql")
        assert "adapters" not in (await ask(live, "/health")).json["verifiers"][0]


# --- several verifiers ------------------------------------------------------------------------


@pytest.mark.parametrize("association", Association)
async def test_a_request_goes_to_a_verifier_that_has_its_adapter(association: Association) -> None:
    async with contextlib.AsyncExitStack() as stack:
        targets = AdaptedToy({}), AdaptedToy({"sql": SQL}), AdaptedToy({"poetry": POETRY})
        found = [await stack.enter_async_context(serving(one)) for one in targets]
        addresses = [address for address, _ in found]
        live = await stack.enter_async_context(
            over_verifiers(*addresses, association=association, failover=STEADY)
        )
        async with live.client() as client:
            listed = [one.id async for one in client.models.list()]
            assert listed == ["toy", "sql", "poetry"]
            for name, wanted in {"sql": IN_SQL, "poetry": text_of(POETRY), "toy": OWN}.items():
                for _ in range(3):
                    answer = await completed(client, name)
                    assert answer.choices[0].text == wanted
                    if association is Association.LOWEST_DELAY:  # which has asked them all before
                        assert answer.usage.model_extra["edgespec"]["reconnects"] == 0
            with pytest.raises(NotFoundError):
                await completed(client, "sequel")
        pool = live.endpoint.agent.transport
        assert isinstance(pool, VerifierPool)
        # Nobody is kept out for having other adapters.
        assert all(one.breaker.state is CLOSED for one in pool.failover.candidates.listed.values())


async def test_a_text_goes_on_where_the_same_adapter_is() -> None:
    """The nearest verifier has none of that name, and another one of the same name is another."""
    async with contextlib.AsyncExitStack() as stack:
        held = GatedTarget(AdaptedToy({"sql": SQL}), 10)
        stack.callback(held.gate.set)
        other = AdaptedToy({"sql": POETRY}, mark="newer")
        targets = held, AdaptedToy({}), other, AdaptedToy({"sql": SQL})
        gates = []
        for target in targets:
            address, _ = await stack.enter_async_context(serving(target))
            gate = Gate(int(address.rpartition(":")[2]))
            gates.append(await stack.enter_async_context(gate))
        addresses = [gate.address for gate in gates]
        live = await stack.enter_async_context(
            over_verifiers(
                *addresses, association=Association.LISTED, failover=STEADY, reconnect=PATIENT
            )
        )
        task = asyncio.create_task(ask(live, PATH, {**ASKED, "model": "sql"}))
        await held_up(live, held)
        gates[0].kill()
        held.gate.set()
        answer = (await task).json
        assert answer["choices"][0]["text"] == IN_SQL
        assert answer["usage"]["edgespec"]["failovers"] == 1
        stats = live.endpoint.agent.stats
        assert stats is not None
        assert stats.verifiers == (addresses[0], addresses[3])


async def test_where_the_only_one_with_the_adapter_is_away_the_others_serve_on() -> None:
    async with contextlib.AsyncExitStack() as stack:
        plain, _ = await stack.enter_async_context(serving(AdaptedToy({})))
        address, _ = await stack.enter_async_context(serving(AdaptedToy({"sql": SQL})))
        port = int(address.rpartition(":")[2])
        gate = await stack.enter_async_context(Gate(port))
        live = await stack.enter_async_context(
            over_verifiers(
                plain,
                gate.address,
                association=Association.LISTED,
                failover=STEADY,
                reconnect=HASTY,
            )
        )
        gate.kill()
        away = await ask(live, PATH, {**ASKED, "model": "sql"})
        assert (away.status, away.error["code"]) == (503, "verifier_unavailable")
        assert gate.address in away.error["message"]
        assert await text(live, "toy") == OWN
        gate.port = port
        assert await text(live, "sql") == IN_SQL


async def test_a_client_reads_the_error_of_a_stream_as_such() -> None:
    """What the fake says once its adapter has gone, told by OpenAI's own client."""
    held = Held()
    both = held.target, AdaptedToy({})
    async with behind_a_gate(*both) as (live, gate, ports), live.client() as client:
        stream = await completed(client, "sql", stream=True)
        await anext(aiter(stream))
        await held.fail_over(live, gate, ports[1])
        with pytest.raises(APIError) as caught:
            async for _ in stream:
                pass
        assert not isinstance(caught.value, APIStatusError)
        assert caught.value.code == "model_not_found"
