"""Models by name at verifiers that come and go. Oracle: an adapter is another toy model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from edgespec.core.association.policies import Association
from edgespec.core.device.link_keeper import ReconnectPolicy
from tests.endpoint.live_endpoint import Live, ask, events_of, over_verifiers
from tests.endpoint.test_http import until
from tests.endpoint.test_models import (
    ASKED,
    IN_SQL,
    PATH,
    POETRY,
    SQL,
    text,
    text_of,
)
from tests.shell.failing_verifiers import STEADY
from tests.shell.fake_vllm import adapted_toy
from tests.shell.gate import Gate
from tests.shell.live_verifier import GatedTarget, serving

HASTY = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=0.5, give_up_s=0.5)
PATIENT = replace(HASTY, give_up_first_s=60.0, give_up_s=60.0)


class Held:
    """A verifier's target with the adapter, which dies in the middle of a text."""

    def __init__(self) -> None:
        self.target = GatedTarget(adapted_toy({"sql": SQL}), 10)

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


async def test_no_text_goes_on_with_other_weights_of_the_same_name() -> None:
    """The verifier came back with a newer adapter: what was begun is not mixed with it."""
    held = Held()
    both = held.target, adapted_toy({"sql": POETRY}, "newer")
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


# --- several verifiers ------------------------------------------------------------------------


async def test_a_text_goes_on_where_the_same_adapter_is() -> None:
    """The nearest verifier has none of that name, and another one of the same name is another."""
    async with contextlib.AsyncExitStack() as stack:
        held = GatedTarget(adapted_toy({"sql": SQL}), 10)
        stack.callback(held.gate.set)
        other = adapted_toy({"sql": POETRY}, "newer")
        targets = held, adapted_toy({}), other, adapted_toy({"sql": SQL})
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
