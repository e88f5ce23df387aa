"""Tests of clients that would stall or fill the endpoint: slow grammars, held bodies, lists of a
million ids, streams without a reader.

Oracles: other requests are answered while the slow work is still blocked; sums stay within their
limit in every schedule; the status and the text of a refusal. Slow work waits for an event of the
test, never for a clock.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.config import EndpointSection
from edgespec.core.protocol.constraint import Constraint, ConstraintError
from edgespec.core.protocol.messages import Limits
from edgespec.device.agent import Agent
from edgespec.device.drafters.toy import ToyDrafter, toy_info
from edgespec.device.prober import VerifierMonitor
from edgespec.endpoint.admission import Admission, client_address, current_client
from edgespec.endpoint.bodies import SMALL_BYTES, STALLED_S, Body, BodyRoom
from edgespec.endpoint.request_json import ApiError
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.toy import ToyTarget
from tests.endpoint.live_endpoint import (
    APIS,
    Api,
    Live,
    ScriptedAgent,
    ask,
    exchange,
    over_script,
    over_toy,
    parse_reply,
    request_bytes,
    start_endpoint,
)
from tests.endpoint.test_http import every_api, open_client
from tests.kit.letters import MODEL, LettersTokenizer, text_of
from tests.kit.live_verifier import wait_until

PATH = "/v1/completions"
HELLO = {"prompt": "abc", "max_tokens": 4}


# --- grammars -------------------------------------------------------------------------------------


@dataclass
class SlowReader:
    """A grammar reader that waits for ``go_on`` and then refuses the grammar."""

    go_on: threading.Event = field(default_factory=threading.Event)
    begun: int = 0
    error: BaseException | None = None
    """The error that the reader raises instead."""

    def __call__(self, constraint: Constraint) -> Constraint:
        self.begun += 1
        self.go_on.wait()
        if self.error is not None:
            raise self.error
        raise ConstraintError("the grammar cannot be used: the test refuses it")


@asynccontextmanager
async def over_slow_reader(settings: EndpointSection) -> AsyncIterator[tuple[Live, SlowReader]]:
    reader, target = SlowReader(), ToyTarget(MODEL, vocabulary=toy_info(MODEL).vocabulary)
    verifier = Verifier(target, Limits())
    agent = Agent(
        LoopbackTransport(verifier.serve, lambda: verifier.info),
        ToyDrafter(MODEL.perturbed(0.2)),
        LettersTokenizer().encode,
        LettersTokenizer().stream,
        read_constraint=reader,
    )
    async with agent:
        try:
            async with start_endpoint(
                agent, LettersTokenizer(), VerifierMonitor({}), settings
            ) as found:
                yield found, reader
        finally:
            reader.go_on.set()
            await verifier.stop()


async def test_slow_grammars_hold_no_turn_and_no_thread_of_others() -> None:
    """There are more slow grammars than threads and turns. Texts, tokens and health must be
    answered meanwhile."""
    async with over_slow_reader(EndpointSection(max_concurrent=2, max_queue=64)) as (found, reader):
        slow = [
            asyncio.create_task(ask(found, PATH, {**HELLO, "grammar": f'start: "{n}"'}))
            for n in range(16)
        ]
        await wait_until(lambda: reader.begun == 4)
        assert (await ask(found, "/tokenize", {"prompt": "abc"})).json["count"] == 3
        assert (await ask(found, "/detokenize", {"tokens": [40]})).json["prompt"] == text_of([40])
        assert (await ask(found, PATH, HELLO)).status == 200
        assert (await ask(found, "/health")).status == 200
        assert found.endpoint.admission.running == 0
        reader.go_on.set()
        for reply in await asyncio.gather(*slow):
            assert (reply.status, reply.error["param"]) == (400, "grammar")
            assert "the test refuses it" in reply.error["message"]


async def test_more_grammars_than_may_wait_are_asked_to_come_again() -> None:
    settings = EndpointSection(max_concurrent=2, max_queue=64)
    async with over_slow_reader(settings) as (found, reader):
        slow = [
            asyncio.create_task(ask(found, PATH, {**HELLO, "regex": f"a{n}"})) for n in range(53)
        ]
        reply = await next(asyncio.as_completed(slow))
        assert (reply.status, reply.error["code"]) == (503, "grammar_busy")
        assert "48 of this client's, limit 48" in reply.error["message"]
        assert reply.headers["retry-after"] == "1"
        reader.go_on.set()
        await asyncio.gather(*slow)


class PanicError(BaseException):
    """An error in the form in which a panic of a Rust library arrives."""


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (Exception("Rule 'my-secret-words' not found"), "Rule 'my-secret-words' not found"),
        (KeyError(), "KeyError"),
        (PanicError("my-secret-words"), "reading a grammar failed: PanicError"),
    ],
    ids=["bare", "empty", "panic"],
)
async def test_an_error_that_nobody_foresaw_is_told_and_not_logged(
    error: BaseException, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "edgespec")
    async with over_slow_reader(EndpointSection()) as (found, reader):
        reader.error = error
        reader.go_on.set()
        for stream in (False, True):
            data = {**HELLO, "stream": stream, "grammar": "root ::= my-secret-words"}
            reply = await ask(found, PATH, data)
            assert (reply.status, reply.error["param"]) == (400, "grammar")
            assert reply.error["message"] == f"the grammar cannot be read: {why}"
    assert "my-secret" not in caplog.text


# --- bodies ---------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


LARGE = 4 * SMALL_BYTES
Move = tuple[str, int, int]
MOVES = st.lists(
    st.tuples(
        st.sampled_from(["open", "add", "whole", "close", "wait"]),
        st.integers(0, 3),
        st.sampled_from([1, 1000, SMALL_BYTES, LARGE]),
    ),
    max_size=60,
)


@given(moves=MOVES, shared=st.booleans())
def test_bodies_never_hold_more_than_there_is_room_for(moves: list[Move], shared: bool) -> None:
    clock, bodies = Clock(), list[Body]()
    room = BodyRoom(3 * LARGE, shared_by_clients=shared, now=clock)
    dropped: list[int] = []
    for what, number, size in moves:
        body = bodies[number] if number < len(bodies) else None
        try:
            if what == "wait":
                clock.now_s += 1.0
            elif what == "open":
                bodies.append(room.open(f"client {number % 2}", size, lambda: dropped.append(1)))
            elif body is not None and not body.was_dropped:
                match what:
                    case "add":
                        body.add(b"x" * size)
                    case "whole":
                        body.take_content()
                    case "close":
                        body.close()
        except ApiError:
            pass  # the text of a refusal has its own test
        assert room.held_bytes == sum(one.held_bytes for one in bodies) <= room.max_bytes
        large = sum(one.held_bytes for one in bodies if one.is_large)
        assert large <= 0.75 * room.max_bytes
        if shared:
            for client in ("client 0", "client 1"):
                own = sum(one.held_bytes for one in bodies if one.client == client)
                assert own <= 0.75 * room.max_bytes
    assert len(dropped) == sum(one.was_dropped for one in bodies)
    for one in bodies:
        one.close()
    assert room.held_bytes == 0


def test_a_body_that_stands_still_makes_room_and_one_that_moves_does_not() -> None:
    clock, gone = Clock(), list[str]()
    room = BodyRoom(4 * LARGE, shared_by_clients=False, now=clock)
    first, second, third = (room.open("", LARGE, partial(gone.append, n)) for n in "abc")
    for one in (first, second, third):
        one.add(b"x" * LARGE)
    with pytest.raises(ApiError, match=f"hold {3 * LARGE} bytes of the {3 * LARGE} that large"):
        room.open("", LARGE, lambda: None)
    small = room.open("", 10, lambda: None)  # the last quarter is reserved for small bodies
    clock.now_s += STALLED_S
    first.received_at_s = clock.now_s
    second.take_content()  # the second body is complete and being read
    room.open("", LARGE, lambda: None)
    assert gone == ["c"]
    dropped = [one.was_dropped for one in (first, second, third, small)]
    assert dropped == [False, False, True, False]


async def test_held_bodies_are_refused_before_they_are_read_and_small_ones_are_served() -> None:
    settings = EndpointSection(max_body_bytes=LARGE)
    async with over_script(ScriptedAgent(["a"]), settings=settings) as found, AsyncExitStack() as x:
        room = found.endpoint.bodies
        held = request_bytes(PATH, b"x" * (LARGE - 1), headers={"Content-Length": str(LARGE)})
        assert room.max_bytes == 16 * LARGE
        for place in range(1, 13):
            _, writer = await x.enter_async_context(open_client(found))
            writer.write(held)
            await wait_until(lambda n=place: room.held_bytes == n * (LARGE - 1))  # type: ignore[misc]
        for path in (PATH, "/tokenize", "/detokenize"):
            head = request_bytes(path, b"{", headers={"Content-Length": str(LARGE)})
            reply = await exchange(found.port, head)
            assert (reply.status, reply.error["code"]) == (503, "bodies_full")
            assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        assert (await ask(found, PATH, HELLO)).status == 200
        room.now = lambda: float("inf")  # now all bodies have stood still for long
        assert (await ask(found, "/tokenize", {"prompt": " " * (LARGE // 2)})).status in (200, 400)
        assert room.held_bytes == 11 * (LARGE - 1)
    await wait_until(lambda: room.held_bytes == 0)


async def test_a_body_that_another_one_needs_the_room_of_is_told() -> None:
    settings = EndpointSection(max_body_bytes=LARGE, max_bodies_bytes=2 * LARGE)
    async with over_script(ScriptedAgent(["a"]), settings=settings) as found:
        room = found.endpoint.bodies
        async with open_client(found) as (reader, writer):
            writer.write(
                request_bytes(PATH, b"x" * (LARGE - 1), headers={"Content-Length": str(LARGE)})
            )
            await wait_until(lambda: room.held_bytes == LARGE - 1)
            room.now = lambda: float("inf")
            await ask(found, PATH, {"prompt": "a" * (LARGE - 100), "max_tokens": 1})
            reply = parse_reply(await reader.read())
    assert reply.status == 408
    assert "another one needed its room" in reply.error["message"]


def test_a_memory_budget_leaves_bodies_less_room() -> None:
    usual = EndpointSection()
    assert usual.most_bodies_bytes(has_budget=False) == 64 << 20
    assert usual.most_bodies_bytes(has_budget=True) == 16 << 20
    assert usual.most_body_bytes(has_budget=False) == 16 << 20
    assert usual.most_body_bytes(has_budget=True) == 4 << 20
    large = EndpointSection(max_body_bytes=1 << 30)
    assert large.most_bodies_bytes(has_budget=True) == 2 << 30
    assert EndpointSection(max_bodies_bytes=2048).most_bodies_bytes(has_budget=True) == 8 << 20
    assert EndpointSection(max_bodies_bytes=2048).most_bodies_bytes(has_budget=False) == 32 << 20


def test_three_bodies_of_the_largest_size_are_read_at_a_time() -> None:
    """Oracle: three quarters of 64 MiB are 48 MiB, which are three bodies of 16 MiB."""
    settings, bodies = EndpointSection(), list[Body]()
    largest = settings.most_body_bytes(has_budget=False)
    room = BodyRoom(settings.most_bodies_bytes(has_budget=False), shared_by_clients=False)
    for _ in range(3):
        bodies.append(room.open("", largest, lambda: None))
        bodies[-1].add(bytes(largest))
    with pytest.raises(
        ApiError, match=r"50331648 bytes of the 50331648 .*endpoint\.max_bodies_byt"
    ):
        room.open("", largest, lambda: None)
    bodies[0].close()
    room.open("", largest, lambda: None)


@pytest.mark.parametrize("coding", ["gzip", "br", "Deflate", "gzip, identity"])
async def test_a_compressed_body_is_said_to_be_one(coding: str) -> None:
    async with over_script(ScriptedAgent(["a"])) as found:
        body = gzip.compress(json.dumps(HELLO).encode())
        data = request_bytes(PATH, body, headers={"Content-Encoding": coding})
        reply = await exchange(found.port, data)
        assert (reply.status, reply.error["code"]) == (415, "unsupported_encoding")
        assert coding in reply.error["message"]
        assert (await ask(found, PATH, HELLO, Content_Encoding="identity")).status == 200


async def test_more_ids_than_the_context_has_stand_for_no_text() -> None:
    """The first item is no id, so an error about it would show that the items were read before they
    were counted."""
    async with over_slow_reader(EndpointSection()) as (found, _):
        longest = 1 << 20  # the bound while no verifier has announced its context length
        reply = await ask(found, "/detokenize", {"tokens": ["x"] + [5] * longest})
        assert reply.status == 400
        assert f"at most {longest} token ids" in reply.error["message"]


@pytest.mark.parametrize("path", ["/detokenize", *(one.path for one in APIS)])
async def test_a_million_numbers_are_counted_before_they_are_read(path: str) -> None:
    """Oracle: after the numbers the body is invalid JSON, which a refusal by count never
    reaches."""
    async with over_toy() as found:
        served = found.endpoint.models.listed
        most = (1 << 17) + 16 * served[0].context_length
        for more, words in ((0, "no JSON"), (1, f"has {most + 1} values, but at most {most}")):
            body = b'{"a": "' + b'\\",' * 9 + b'", "tokens": [' + b"5," * (most - 2 + more) + b"5 }"
            reply = await exchange(found.port, request_bytes(path, body))
            assert reply.status == 400
            assert words in reply.body.decode()


# --- turns ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("a socket", "a socket"),
    ],
)
def test_who_is_one_client(address: str, client: str) -> None:
    assert client_address({"client": (address, 50_000)}) == client
    assert client_address({"client": None}) == ""


def test_the_share_of_a_client() -> None:
    def shares(**given: Any) -> tuple[int, int]:
        found = EndpointSection(**given), EndpointSection(host="0.0.0.0", **given)
        return found[0].most_of_client, found[1].most_of_client

    assert shares() == (8, 6)
    assert shares(max_concurrent=1) == (1, 1)
    assert shares(max_concurrent=2) == (2, 1)
    assert shares(max_per_client=3) == (3, 3)
    assert shares(max_concurrent=2, max_per_client=3) == (2, 2)


class Texts:
    """Requests of several clients at one admission; each holds its turn until it is ended."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.order = admission, list[str]()
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, client: str, name: str) -> None:
        """Start a request, and return when it has its turn, waits or was refused."""
        self._ends[name] = asyncio.Event()

        async def hold() -> None:
            current_client.set(client)
            await self.admission.enter()
            try:
                self.order.append(name)
                await self._ends[name].wait()
            finally:
                self.admission.leave()

        self._tasks[name] = asyncio.create_task(hold())
        await settle()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await self._tasks[name]
        await settle()

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_one_client_leaves_turns_and_places_in_the_queue_to_others() -> None:
    texts = Texts(Admission(4, 4, most_of_client=3))
    for n in range(6):
        await texts.ask("greedy", f"g{n}")
    assert texts.order == ["g0", "g1", "g2"]  # the fourth turn is for another client
    await texts.ask("greedy", "g6")
    with pytest.raises(ApiError, match="3 of them this client's, of at most 3"):
        await texts._tasks["g6"]
    await texts.ask("other", "o0")
    assert texts.order[-1] == "o0"
    await texts.ask("other", "o1")
    assert texts.admission.waiting == 4
    await texts.end("g0")  # o1 came last, but its client has fewer generations running
    await texts.end("g1")
    await texts.end("o0")
    assert texts.order[4:] == ["o1", "g3", "g4"]
    await texts.close()
    assert (texts.admission.running, texts.admission.waiting) == (0, 0)


async def test_a_write_that_nobody_reads_ends_early_only_while_somebody_waits() -> None:
    admission = Admission(1, 4, unread_within_s=0.01)
    texts = Texts(admission)
    await texts.ask("", "first")
    limit, cut = asyncio.timeout(1000.0), asyncio.Event()

    async def write() -> None:
        try:
            async with limit:
                with admission.watch_write(limit):
                    await asyncio.Event().wait()
        except TimeoutError:
            cut.set()

    writing = asyncio.create_task(write())
    await settle()
    assert admission._timer is None  # no request waits, so nothing will cut the write short
    await texts.ask("", "second")
    await cut.wait()
    await writing
    await texts.close()


@every_api
async def test_streams_that_nobody_reads_make_way_for_others(api: Api) -> None:
    """The streams hold every turn, and would keep it for an hour."""
    agent = ScriptedAgent(["x" * 10_000] * 4000)
    settings = EndpointSection(max_concurrent=2, write_within_s=3600.0, unread_within_s=0.05)
    async with over_script(agent, settings=settings) as found, AsyncExitStack() as x:
        data = request_bytes(api.path, json.dumps(api.request(stream=True)).encode())
        for _ in range(2):
            _, writer = await x.enter_async_context(open_client(found, 4096))
            writer.write(data)
        await wait_until(lambda: len(found.endpoint.admission._writes) == 2)
        agent.pieces = ["a"]
        assert (await ask(found, PATH, HELLO)).status == 200
        counts = found.endpoint.counts.requests
        await wait_until(lambda: counts[api.path, "gone"] >= 1)


@every_api
async def test_a_stream_that_nobody_reads_is_noticed_before_its_text_is_over(api: Api) -> None:
    """The output is a third of a megabyte or more. The system's buffers would take all of it from a
    client that never reads."""
    agent = ScriptedAgent(["x" * 50] * 2000)
    settings = EndpointSection(max_concurrent=1, write_within_s=3600.0, unread_within_s=0.05)
    async with (
        over_script(agent, settings=settings) as found,
        open_client(found, 4096) as (_, writer),
    ):
        data = json.dumps(api.request(stream=True)).encode()
        writer.write(request_bytes(api.path, data))
        await wait_until(lambda: agent.prompts)
        agent.pieces = ["a"]
        assert (await ask(found, PATH, HELLO)).status == 200
        assert agent.closed == 2
        await wait_until(lambda: found.endpoint.counts.requests[api.path, "gone"] == 1)


@pytest.fixture(autouse=True)
def no_current_client() -> Iterator[None]:
    token = current_client.set("")
    yield
    current_client.reset(token)
