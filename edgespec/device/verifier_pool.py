"""Several verifiers behind one agent: streams are dialed, watched and moved between them.

``core/association/failover.py`` makes all decisions; this file connects, probes and measures. A
generation has a ``VerifierRoute``, which connects to the best verifier. When one of its streams
ends, the error shows whether another verifier can be tried at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from ipaddress import ip_address
from typing import Any, Final, assert_never

from edgespec.core.association import failover_events as ev
from edgespec.core.association.failover import Failover
from edgespec.core.association.known_verifiers import Route
from edgespec.core.ports import DeviceStream, LinkError, Transport
from edgespec.core.protocol import messages as m
from edgespec.device.prober import probe
from edgespec.device.session_driver import link_down
from edgespec.telemetry.logs import log_failure

# Longest seconds between probes of a verifier that answers although its stream is quiet.
_MAX_QUIET_S: Final = 12.0
# Seconds in which a cancellation must reach a verifier that opened a session with a wrong model.
_CANCEL_TIMEOUT_S: Final = 0.5
# Most names whose last model is remembered; the name that was used longest ago is dropped.
_MAX_MODEL_NAMES: Final = 256
_log = logging.getLogger(__name__)


class VerifierPool:
    """Carries out the actions of ``failover`` for all generations of one agent."""

    def __init__(self, directory: VerifierDirectory, failover: Failover) -> None:
        self.failover = failover
        self._directory = directory
        self._transports: Mapping[str, Transport] = {}
        self._dials: dict[tuple[int, str], asyncio.Task[None]] = {}
        self._dialed: dict[tuple[int, str], DeviceStream] = {}
        self._waiters: dict[int, asyncio.Future[PooledStream]] = {}
        self._streams: dict[int, PooledStream] = {}
        """Streams in use, one for each generation, by the number of its route."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._none_usable = False
        self._latest_models: dict[str, m.ModelIdentity] = {}
        """Model of the latest generation, by the name that it requested."""

    async def find_transports(self) -> Mapping[str, Transport]:
        """Return the transports of all verifiers, for probes. Raises ``LinkError``."""
        self._transports = self._transports or await self._directory.find()
        return self._transports

    async def warm_up(self) -> None:
        """Connect to all verifiers and probe them, without waiting for the answers."""
        self._transports = await self._directory.find()
        self.handle(ev.Known(tuple(self._transports)))
        self.handle(ev.Expected())

    async def close(self) -> None:
        """Cancel all work and close the transports."""
        if self._timer is not None:
            self._timer.cancel()
        for number in list(self.failover.routes):
            self.release(number)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._directory.close()

    # --- for one generation ----------------------------------------------------------------

    async def open_stream(self, wanted: ev.Wanted) -> PooledStream:
        """Return an open stream to the best verifier.

        Raises ``LinkError`` naming every address and its failure."""
        number = wanted.route
        self._transports = await self._directory.find(fresh=self._none_usable)
        self.handle(ev.Known(tuple(self._transports)))
        future: asyncio.Future[PooledStream] = asyncio.get_running_loop().create_future()
        self._waiters[number] = future
        self.handle(wanted)
        try:
            return await future
        except asyncio.CancelledError:
            if self._waiters.get(number) is future:
                del self._waiters[number]
                self.handle(ev.Unwanted(number))
            elif not future.cancelled() and future.exception() is None:
                # The stream was opened in the moment of the cancellation.
                await future.result().close()
            raise

    def report(self, stream: PooledStream, event: ev.RouteEvent) -> None:
        """Pass on an event of ``stream``, unless another stream has replaced it."""
        if self._streams.get(stream.route) is stream:
            if isinstance(event, ev.Unwanted):
                del self._streams[stream.route]
            self.handle(event)

    def release(self, number: int) -> None:
        self.handle(ev.Ended(number))
        self._streams.pop(number, None)
        future = self._waiters.pop(number, None)
        if future is not None and not future.done():
            future.set_exception(LinkError("the generation has ended", retryable=False))

    def note_model(self, route: int, model: m.ModelIdentity, address: str) -> None:
        """Note the model that a verifier opened with.

        Log a warning if the requested name stood for another model in the previous generation."""
        route_state = self.failover.routes.get(route)
        if route_state is None or route_state.first_model is not None:
            return
        previous = self._latest_models.pop(route_state.request.model, None)
        self._latest_models[route_state.request.model] = model
        if len(self._latest_models) > _MAX_MODEL_NAMES:
            del self._latest_models[next(iter(self._latest_models))]
        if previous is not None and not model.is_model_of(previous):
            _log.warning(
                "%s serves the model %s; the generation before was of %s", address, model, previous
            )

    # --- the machine -----------------------------------------------------------------------

    def handle(self, event: ev.FailoverEvent) -> None:
        """Pass ``event`` to ``failover`` and carry out its actions.

        Never raises. Most events come from timers and tasks that nothing awaits, so a bug fails the
        generations that wait for a stream; streams in use go on."""
        try:
            for action in self.failover.handle(event, time.monotonic()):
                self._carry_out(action)
            self._set_timer()
        except Exception as error:
            what, name = "choosing a verifier failed at %s", type(event).__name__
            log_failure(_log, what, name, error=error, may_quote_client=False)
            broken = LinkError(f"choosing a verifier failed: {error}", retryable=False)
            for number in tuple(self._waiters):
                self._fail(number, broken)

    def _carry_out(self, action: ev.FailoverAction) -> None:
        match action:
            case ev.Dial(number, address):
                self._dials[number, address] = self._start_task(self._dial(number, address))
            case ev.Drop(number, address):
                self._drop_dial(number, address)
            case ev.Use(number, address):
                stream = self._dialed.pop((number, address))
                self._streams[number] = pooled = PooledStream(self, number, address, stream)
                future = self._waiters.pop(number, None)
                if future is None or future.done():
                    self._start_task(pooled.close())
                else:
                    future.set_result(pooled)
            case ev.Leave(number, why, again_s, retryable):
                self._none_usable = again_s is None
                self._fail(number, LinkError(why, retryable=retryable, again_s=again_s))
            case ev.Probe(address):
                self._start_task(self._probe(address))
            case _:
                assert_never(action)

    def _fail(self, number: int, error: LinkError) -> None:
        future = self._waiters.pop(number, None)
        if future is not None:
            if not future.done():
                future.set_exception(error)
        elif (stream := self._streams.pop(number, None)) is not None:
            stream.fail(error)
            self._start_task(stream.inner.close())

    def _drop_dial(self, number: int, address: str) -> None:
        stream = self._dialed.pop((number, address), None)
        if stream is not None:
            self._start_task(stream.close())
        elif (task := self._dials.pop((number, address), None)) is not None:
            task.cancel()

    async def _dial(self, number: int, address: str) -> None:
        key, me = (number, address), asyncio.current_task()
        route = self.failover.routes.get(number)
        try:
            transport = self._transports.get(address)
            if transport is None:
                raise LinkError(f"{address} is not known any more")
            stream = await _connect_for(
                transport, "" if route is None else route.request.conversation
            )
        except Exception as error:
            down = link_down(error)
            if self._dials.get(key) is me:
                del self._dials[key]
                self.handle(ev.DialFailed(number, address, down.why, down.retryable))
            return
        if self._dials.get(key) is not me:  # The dial was dropped at the moment when it succeeded.
            await stream.close()
            return
        del self._dials[key]
        self._dialed[key] = stream
        self.handle(ev.Dialed(number, address))

    async def _probe(self, address: str) -> None:
        transport = self._transports.get(address)
        candidate = self.failover.candidates.listed.get(address)
        if transport is None or candidate is None:
            self.handle(ev.ProbeFailed(address, f"{address} is not known any more"))
            return
        first, limit_s = candidate.rtt_s is None, self.failover.policy.probe_s
        answer = await probe(transport, limit_s, timed=first)
        if answer.info is not None:
            rtt_s = answer.rtt_s if candidate.rtt_s is None else candidate.rtt_s
            self.handle(ev.ProbeAnswered(address, answer.info, rtt_s or 0.0))
        elif (error := answer.error) is not None:
            self.handle(ev.ProbeFailed(address, str(error), error.alive))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _set_timer(self) -> None:
        """Set the timer for the earliest deadline. Deadlines come and go, so it is always set
        anew."""
        deadline = self.failover.deadline
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if deadline is not None:
            delay_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(delay_s, self.handle, ev.Tick())


_route_numbers = itertools.count(1)
"""Numbers of routes."""


class VerifierRoute:
    """The way of one generation to its verifier, or to the best of several. Call ``close`` at the
    end.

    ``needed_length`` is the length of the prompt and the longest output together. ``model`` is the
    name of the requested model. ``has_pictures``: the prompt has pictures."""

    def __init__(
        self,
        target: Transport | VerifierPool,
        conversation: str,
        needed_length: int,
        model: str,
        *,
        has_pictures: bool = False,
    ) -> None:
        self._target = target
        self._wanted = ev.Wanted(
            next(_route_numbers), needed_length, conversation, model, has_pictures
        )
        self.current = Route()
        """The verifiers used so far. It stays empty with a single verifier."""

    async def connect(self) -> DeviceStream:
        """Open a stream. Call this in a task of its own, since it sets a context variable."""
        if not isinstance(self._target, VerifierPool):
            return await _connect_for(self._target, self._wanted.conversation)
        stream = await self._target.open_stream(self._wanted)
        self.current = self._target.failover.routes.get(self._wanted.route, self.current)
        return stream

    def close(self) -> None:
        if isinstance(self._target, VerifierPool):
            self._target.release(self._wanted.route)


class PooledStream:
    """A ``ports.DeviceStream`` of a pool, watched for silence, faults and wrong models.

    The model in ``Opened`` is compared with the model that began the generation; a verifier that
    must not continue it delivers nothing. When the stream ends, ``LinkError.again_s`` shows whether
    another verifier can be tried at once. A fault is passed on only when none can."""

    def __init__(self, pool: VerifierPool, route: int, address: str, inner: DeviceStream) -> None:
        self.route, self.address = route, address
        self._pool, self.inner = pool, inner
        self._error: LinkError | None = None
        self._is_closed = self._has_progressed = False
        self._quiet_s = pool.failover.policy.quiet_s
        self._received_at = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(self._quiet_s, self._check_silence)

    @property
    def verifier(self) -> str:
        return self.address

    async def send(self, message: m.Uplink) -> None:
        if self._error is not None:
            raise self._error
        await self.inner.send(message)

    async def receive(self) -> m.Downlink:
        if self._error is not None:
            raise self._error
        try:
            message = await self.inner.receive()
        except LinkError as error:
            if self._error is None:
                self._pool.report(self, ev.Broke(self.route, str(error), error.retryable))
            if self._error is None:
                raise
            raise self._error from error
        self._received_at, self._quiet_s = time.monotonic(), self._pool.failover.policy.quiet_s
        match message:
            case m.Commit():
                if message.tokens and not self._has_progressed:
                    self._has_progressed = True
                    self._pool.report(self, ev.Progressed(self.route))
            case m.Opened():
                await self._check_opened(message)
            case m.Fault():
                return self._report_fault(message)
        return message

    async def close(self) -> None:
        self._is_closed = True
        self._timer.cancel()
        self._pool.report(self, ev.Unwanted(self.route))
        await self.inner.close()

    def fail(self, error: LinkError) -> None:
        """Make every further call on the stream raise ``error``."""
        self._error = self._error or error
        self._timer.cancel()

    async def _check_opened(self, opened: m.Opened) -> None:
        model = m.ModelIdentity.of(opened)
        self._pool.note_model(self.route, model, self.address)
        self._pool.report(self, ev.Greeted(self.route, model))
        if self._error is None:
            return
        # Without the cancellation the verifier would keep the slot for the whole lease.
        with contextlib.suppress(LinkError, TimeoutError):
            async with asyncio.timeout(_CANCEL_TIMEOUT_S):
                await self.inner.send(m.Cancel())
        raise self._error

    def _report_fault(self, fault: m.Fault) -> m.Fault:
        event = ev.Refused(self.route, fault.code, fault.message, fault.retry_after_s)
        self._pool.report(self, event)
        error = self._error
        if error is None:
            return fault
        if error.again_s == 0.0 or error.retryable != fault.code.retryable:
            raise error
        return replace(fault, message=str(error), retry_after_s=error.again_s or 0.0)

    def _check_silence(self) -> None:
        """Report a quiet stream if nothing was received for long enough, and set the next timer."""
        if self._is_closed or self._error is not None:
            return
        silent_s = time.monotonic() - self._received_at
        wait_s = self._quiet_s - silent_s
        if wait_s <= 0.0:
            self._quiet_s = min(2 * self._quiet_s, _MAX_QUIET_S)
            wait_s = self._quiet_s
            self._pool.report(self, ev.Quiet(self.route))
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._check_silence)


# --- where verifiers are --------------------------------------------------------------------------
#
# A name may stand for several addresses, and for other ones tomorrow. Each address counts as a
# verifier of its own, so that a device can leave a failed one for another. gRPC by itself would
# stay with the connection it has. Certificates are still checked against the name. IP addresses,
# sockets and names of this machine are used as they are.

LOOKUP_TIMEOUT_S: Final = 2.0
LOOKUP_LIFETIME_S: Final = 30.0
"""Seconds after which a name is looked up again, ``RETRY_LOOKUP_S`` if no address answered."""
RETRY_LOOKUP_S: Final = 1.0
MAX_ADDRESSES: Final = 16
"""Most addresses of one name."""


MakeTransport = Callable[..., Transport]
"""Makes a transport to an address. The certificate must name ``server_name``, or the address if
that is empty."""
LookUp = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host; raises ``OSError``."""


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses that the system's resolver finds, in its order of preference."""
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


class VerifierDirectory:
    """Transports for the addresses of ``verifiers`` ("host:port", "unix:path"), in their order."""

    def __init__(
        self,
        verifiers: Sequence[str],
        make: MakeTransport,
        *,
        look_up: LookUp = look_up,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._verifiers, self._make = tuple(verifiers), make
        self._look_up, self._clock = look_up, clock
        self._transports: dict[str, Transport] = {}
        """Transports of the latest addresses, and of earlier ones that are still in use."""
        self._closing: set[asyncio.Task[None]] = set()
        self._addresses: dict[str, tuple[str, ...]] = {}
        """Addresses of each name at its latest lookup."""
        self._looked_up_at: float | None = None
        self._looking_up: asyncio.Future[list[None]] | None = None
        """Lookups that no generation waits for."""

    async def find(self, *, fresh: bool = False) -> Mapping[str, Transport]:
        """Return a transport for each address.

        If a name cannot be looked up, its earlier addresses are used, or the name itself; then gRPC
        reports the error. Transports of addresses that are gone are closed once they are idle.
        Addresses that are old are used once more while the names are looked up again, so that no
        generation waits for the resolver. ``fresh`` waits for a new lookup because no address
        answered."""
        now, names = self._clock(), [one for one in self._verifiers if is_name(one)]
        age_s = None if self._looked_up_at is None else now - self._looked_up_at
        if names and (age_s is None or age_s > (RETRY_LOOKUP_S if fresh else LOOKUP_LIFETIME_S)):
            self._looked_up_at = now
            looking_up = asyncio.gather(*(self._find_name(name) for name in names))
            if age_s is None or fresh:
                await looking_up
            else:
                self._looking_up = looking_up
        transports: dict[str, Transport] = {}
        for verifier in self._verifiers:
            addresses = self._addresses.get(verifier, ())
            if len(addresses) < 2:
                transports[verifier] = self._get_transport(verifier, verifier, "")
            else:
                host = verifier.rpartition(":")[0]
                for address in addresses:
                    label = f"{verifier} ({address.rpartition(':')[0]})"
                    transports[label] = self._get_transport(label, address, host)
        self._close_unused(transports)
        return transports

    async def close(self) -> None:
        if self._looking_up is not None:
            self._looking_up.cancel()
            await asyncio.gather(self._looking_up, return_exceptions=True)
        transports, self._transports = self._transports, {}
        await asyncio.gather(*(one.close() for one in transports.values()), *self._closing)

    def _close_unused(self, used: Collection[str]) -> None:
        for name in [name for name in self._transports if name not in used]:
            if self._transports[name].is_idle:
                task = asyncio.create_task(self._transports.pop(name).close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _get_transport(self, label: str, address: str, name: str) -> Transport:
        if label not in self._transports:
            self._transports[label] = self._make(address, server_name=name)
        return self._transports[label]

    async def _find_name(self, verifier: str) -> None:
        host, _, port = verifier.rpartition(":")
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                addresses = await self._look_up(host, int(port))
        except (OSError, TimeoutError, ValueError):
            return
        unique = list(dict.fromkeys(addresses))[:MAX_ADDRESSES]
        self._addresses[verifier] = tuple(
            f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in unique
        )


def is_name(verifier: str) -> bool:
    """Return whether ``verifier`` is a name that a resolver has to look up."""
    host, _, port = verifier.rpartition(":")
    if "/" in verifier or verifier.startswith("unix:") or not port.isdigit():
        return False
    bare = host.strip("[]")
    if not bare or bare == "localhost" or bare.endswith(".localhost"):
        return False
    try:
        ip_address(bare.partition("%")[0])
    except ValueError:
        return True
    return False


# --- the conversation that a stream is dialed for -------------------------------------------------
#
# A proxy in front of several verifiers may choose one by the conversation. The client sends the
# hash of the conversation along for that (``wire/grpc_client.py``).

_dialing_for: ContextVar[str] = ContextVar("edgespec_conversation", default="")


def current_conversation() -> str:
    """Return the conversation that the running task dials for. It is empty for probes."""
    return _dialing_for.get()


async def _connect_for(transport: Transport, conversation: str) -> DeviceStream:
    """Connect for a conversation. Call this in a task of its own, since it sets a context
    variable."""
    _dialing_for.set(conversation)
    return await transport.connect()
