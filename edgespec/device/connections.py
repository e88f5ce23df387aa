"""The connections of one device to its verifiers.

Theory of operation. Everything that a device sends to an address goes over one connection: probes,
the request for a tokenizer, and generations. So the handshakes of a connection (TCP, TLS, HTTP/2)
are paid once. Each user holds a lease, which looks like a transport of its own.

A device *greets* a verifier as soon as it knows its address, before there is a prompt: it opens the
connection, and requests at once what the verifier serves and which texts it lends. Both requests
leave together. The answer is kept in the user's cache (``remembered_verifiers.py``), so that the
next process can send its first prompt together with its greeting, and compare afterwards.

A connection that nothing uses is kept open with a call of ``Info`` now and then, because proxies
and address translators close idle connections. The call is a whole request and no HTTP/2 ping:
load balancers do not count pings (Amazon's ALB documents so), and gRPC servers end connections that
ping too often. If the machine has slept in the meantime, the connection is probably dead, and is
replaced before its next use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from edgespec.config import AgentConfig
from edgespec.core.ports import Connection, DeviceStream, LinkError
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.device import build
from edgespec.device.prober import ProbeResult, probe_all
from edgespec.device.remembered_verifiers import Greeting, recall_greeting, store_greeting
from edgespec.device.sleeping import Clocks, SleepDetector
from edgespec.models.lent_texts import has_lent_texts
from edgespec.wire.access import load_device_access
from edgespec.wire.tokenizer_lending import Announcement, EarlyParts, TokenizerFetch
from edgespec.worker_pool import PoolBusyError, PoolLateError, WorkerPool

# One thread stores the answers of verifiers. An answer that does not get onto the disk in time is
# asked for again by the next process.
_MAX_WAITING_ANSWERS: Final = 16
_STORE_TIMEOUT_S: Final = 5.0
_log = logging.getLogger(__name__)


def borrows_tokenizer(config: AgentConfig) -> bool:
    """Return whether ``config`` names no tokenizer, so that the verifier's has to be used."""
    return not config.tokenizer and config.draft.model in (build.NONE, build.LOOKUP)


class Connections:
    """The connections to the verifiers of ``config``. Use it as an async context manager, or call
    ``close``.

    Nothing is sent before ``start`` or the first use of a lease.

    Args:
        config: The configuration of the device.
        with_texts: Whether the device needs the texts that its verifiers lend.
        clocks: Clocks of this device.

    Raises ``ConfigError`` for files of no use, and if others could read the API key.
    """

    def __init__(
        self, config: AgentConfig, *, with_texts: bool, clocks: Clocks | None = None
    ) -> None:
        self.addresses: Sequence[str] = tuple(map(build.with_port, config.verifiers))
        self._connect = partial(build.connect, link=config.link, access=load_device_access(config))
        self._with_texts, self._warm_s = with_texts, config.keep_warm_s
        self._needs_tokenizer = borrows_tokenizer(config)
        self._fetches: dict[str, TokenizerFetch] = {}
        """Fetches of the texts that the addresses lend, with the parts that came early."""
        self._clocks = clocks or Clocks()
        self._links: dict[tuple[str, str], _Link] = {}
        """Connections by address and name of the certificate."""
        self._greetings: dict[str, asyncio.Task[Greeting]] = {}
        """Greetings that are under way or were answered, by address."""
        self._storing: set[asyncio.Task[None]] = set()
        self._disk = WorkerPool(
            "storing the answer of a verifier",
            threads=1,
            max_waiting=_MAX_WAITING_ANSWERS,
            timeout_s=_STORE_TIMEOUT_S,
        )
        self._keeper: asyncio.Task[None] | None = None
        for address in self.addresses:  # An error is raised now and not at the first use.
            self._link(address, "")

    def start(self) -> None:
        """Greet every verifier, without waiting for the answers."""
        for address in self.addresses:
            self._greeting(address)

    def keep_warm(self) -> None:
        """Keep every connection open until ``close``, if the configuration wants that."""
        if self._keeper is None and self._warm_s > 0.0:
            self._keeper = asyncio.create_task(self._keep_warm())

    def lease(self, address: str, server_name: str = "") -> Connection:
        """Return a transport that shares the connection to ``address``."""
        address = build.with_port(address)
        link = self._link(address, server_name)
        link.leases += 1
        return _Lease(link, partial(self._give_back, (address, server_name)))

    async def greet(self, address: str) -> Greeting:
        """Return the answer to the greeting of ``address``; greet it again if that failed before.

        Raises ``LinkError``."""
        return await asyncio.shield(self._greeting(address))

    async def answers(self) -> dict[str, ProbeResult]:
        """Return the answers of all verifiers by address. A greeting that failed is made again."""
        tasks = [self._greeting(one) for one in self.addresses]
        await asyncio.wait(tasks)
        found = dict[str, ProbeResult]()
        for address, task in zip(self.addresses, tasks, strict=True):
            try:
                found[address] = ProbeResult(task.result().info)
            except LinkError as error:
                found[address] = ProbeResult(error=error)
        return found

    def answers_so_far(self) -> dict[str, ProbeResult]:
        """Return the answers of all verifiers by address, without waiting for the missing ones."""
        found = dict[str, ProbeResult]()
        for address in self.addresses:
            task = self._greetings.get(address)
            if task is None or not task.done() or task.cancelled():
                found[address] = ProbeResult(error=LinkError("no answer so far"))
            elif isinstance(error := task.exception(), LinkError):
                found[address] = ProbeResult(error=error)
            else:
                found[address] = ProbeResult(task.result().info)
        return found

    async def first_answer(self) -> tuple[str, Greeting] | None:
        """Return the first verifier that answers, with its greeting, or None if none does."""
        waiting = {self._greeting(one): one for one in self.addresses}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in [one for one in waiting if one in done]:
                address = waiting.pop(task)
                if task.exception() is None:
                    return address, task.result()
        return None

    @property
    def failures(self) -> str:
        """Why the latest greetings failed, in one line. Empty if none did."""
        done = [one for one in self._greetings.values() if one.done() and not one.cancelled()]
        return "; ".join(str(error) for one in done if (error := one.exception()) is not None)

    def tokenizer_fetch(self, address: str) -> TokenizerFetch:
        """Return the fetch of the texts of ``address``, over its connection."""
        if address not in self._fetches:
            call = partial(self._link(address, "").call_unary, "Tokenizer")
            self._fetches[address] = TokenizerFetch(call, address)
        return self._fetches[address]

    def recall(self, address: str) -> Greeting | None:
        """Return the greeting of an earlier process, or None."""
        return recall_greeting(address)

    async def close(self) -> None:
        """Close all connections. A second call does nothing."""
        tasks: list[asyncio.Task[Greeting] | asyncio.Task[None]] = [*self._greetings.values()]
        if self._keeper is not None:
            tasks.append(self._keeper)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._storing, return_exceptions=True)
        self._disk.close()
        links, self._links = self._links, {}
        await asyncio.gather(*(one.transport.close() for one in links.values()))

    async def __aenter__(self) -> Connections:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # --- connections ------------------------------------------------------------------------

    def _link(self, address: str, server_name: str) -> _Link:
        key = address, server_name
        if key not in self._links:
            transport = self._connect(address, server_name=server_name)
            self._links[key] = _Link(transport, self._clocks)
        return self._links[key]

    async def _give_back(self, key: tuple[str, str]) -> None:
        """Take a lease back. The connection of an address that a name no longer has is closed."""
        link = self._links.get(key)
        if link is None:
            return
        link.leases -= 1
        if not link.leases and key[0] not in self.addresses:
            del self._links[key]
            self._fetches.pop(key[0], None)
            await link.transport.close()

    async def _keep_warm(self) -> None:
        while True:
            now = self._clocks.monotonic()
            idle = {
                f"{address} {name}": link
                for (address, name), link in self._links.items()
                if now - link.used_at >= self._warm_s
            }
            await probe_all(idle)
            now = self._clocks.monotonic()
            due_s = [link.used_at + self._warm_s - now for link in self._links.values()]
            await self._clocks.sleep(max(1.0, min(due_s, default=self._warm_s)))

    # --- greetings --------------------------------------------------------------------------

    def _greeting(self, address: str) -> asyncio.Task[Greeting]:
        task = self._greetings.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._greet(address))
            # A failure that no caller waits for must not be reported as lost.
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            self._greetings[address] = task
        return task

    async def _greet(self, address: str) -> Greeting:
        """Request the verifier's description and its texts at the same time."""
        link = self._link(address, "")
        announcing = asyncio.create_task(self._request_texts(address))
        try:
            answer = (await probe_all({address: link}))[address]
            if answer.info is None:
                raise answer.error or LinkError(f"no answer from {address}")
            announced, refusal = await announcing
        finally:
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
        greeting = Greeting(answer.info, announced, refusal)
        known = recall_greeting(address)
        if known is None or not greeting.is_same_as(known):
            task = asyncio.create_task(self._store(address, greeting))
            self._storing.add(task)
            task.add_done_callback(self._storing.discard)
        return greeting

    async def _store(self, address: str, greeting: Greeting) -> None:
        """Store a greeting for later processes, if the disk is quick enough."""
        with suppress(PoolBusyError, PoolLateError):
            await self._disk.run(store_greeting, address, greeting)

    async def _request_texts(self, address: str) -> tuple[Announcement | None, str]:
        """Return what the verifier lends, or why it lends nothing. Raises ``LinkError`` if the link
        fails."""
        if not self._with_texts:
            return None, ""
        wanted = EarlyParts.NONE
        # Texts that are there already would come in vain, and so would a second verifier's.
        if not has_lent_texts():
            is_first = self._needs_tokenizer and address == self.addresses[0]
            wanted = EarlyParts.ALL if is_first else EarlyParts.FACTS
        try:
            return await self.tokenizer_fetch(address).fetch_announcement(wanted), ""
        except LinkError as error:
            if error.retryable:
                raise
            return None, str(error)


class _Link:
    """A connection and its last use. It is used like a ``Connection``."""

    def __init__(self, transport: Connection, clocks: Clocks) -> None:
        self.transport, self._clocks = transport, clocks
        self.leases = 0
        self.used_at = clocks.monotonic()
        self._sleep = SleepDetector(clocks)

    @property
    def is_idle(self) -> bool:
        return self.transport.is_idle

    async def connect(self) -> DeviceStream:
        self._note_use()
        return await self.transport.connect()

    async def info(self) -> VerifierInfo:
        self._note_use()
        return await self.transport.info()

    async def call_unary(self, name: str, request: bytes) -> bytes:
        self._note_use()
        return await self.transport.call_unary(name, request)

    def renew(self) -> None:
        self.transport.renew()

    async def close(self) -> None:
        await self.transport.close()

    def _note_use(self) -> None:
        """Note a use. Replace the connection first if the machine has slept since the last one."""
        self.used_at = self._clocks.monotonic()
        if slept_s := self._sleep.look():
            _log.info("this machine slept for %.0f s, so the connection is replaced", slept_s)
            self.transport.renew()


class _Lease:
    """One user's share in a connection. ``close`` gives it back, and ends no stream."""

    def __init__(self, link: _Link, give_back: Callable[[], Awaitable[None]]) -> None:
        self._link, self._give_back = link, give_back
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        return self._link.is_idle

    async def connect(self) -> DeviceStream:
        return await self._link.connect()

    async def info(self) -> VerifierInfo:
        return await self._link.info()

    async def call_unary(self, name: str, request: bytes) -> bytes:
        return await self._link.call_unary(name, request)

    def renew(self) -> None:
        self._link.renew()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._give_back()
