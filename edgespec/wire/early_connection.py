"""A connection that carries requests before the verifier's HTTP/2 settings have arrived.

Theory of operation. gRPC's library sends no request on a new connection before it has received the
server's SETTINGS frame. That costs a round trip beyond the handshakes of TCP and TLS, although
HTTP/2 lets a client send at once (RFC 9113, section 3.4). So this class connects to the verifier
itself, and lets the library connect to a socket of this process, where it finds empty settings.
They are HTTP/2's defaults, which hold in any case until the server's own arrive. From then on bytes
pass unchanged in both directions, without the library's acknowledgement of the settings that the
verifier never sent.

The transport uses such a connection only until its usual one is ready, which is made at the same
time. So a failure here costs nothing, and the bytes of later generations take no detour. The
verifier meanwhile has two connections of the device.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import grpc
import grpc.aio

from edgespec.config.common import DEFAULT_PORT, host_of
from edgespec.config.files import temporary_folder
from edgespec.operating_system import HAS_UNIX_SOCKETS
from edgespec.wire.access import ALPN, DeviceAccess
from edgespec.wire.channel_options import Options

IS_SUPPORTED: Final = HAS_UNIX_SOCKETS
"""Whether this system has sockets that only this user's processes can reach."""
_READ_BYTES: Final = 1 << 16
_FIRST_BYTES_TIMEOUT_S: Final = 2.0
"""Seconds that the library has to send its first bytes after the verifier's handshakes. They take a
millisecond where they come at all. Meanwhile the usual connection is used if it is ready first."""
_PREFACE_BYTES: Final = 24
"""Size of the text with which a client opens an HTTP/2 connection."""
_FRAME_HEADER_BYTES: Final = 9
_SETTINGS, _ACK = 4, 1
_EMPTY_SETTINGS: Final = bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


class EarlyConnection:
    """A connection to the verifier at ``address``, with a channel of the library on top.

    Args:
        address: "host:port".
        access: TLS settings of the device.
        options: Options of the channel.
        timeout_s: Seconds for the handshakes.
    """

    def __init__(
        self, address: str, access: DeviceAccess, options: Options, timeout_s: float
    ) -> None:
        self._address, self._access, self._timeout_s = address, access, timeout_s
        self._options: Options = [*options, *_describe_origin(address, access)]
        self._channel: grpc.aio.Channel | None = None
        self.uses = 0
        """Number of calls that are on the connection, or may get on it."""
        self._connected: asyncio.Future[_Ends] = asyncio.get_running_loop().create_future()
        """The library's end of the connection."""
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._has_received = False
        """Whether a byte came from the verifier after the handshakes."""
        self.opened = asyncio.create_task(self._open())
        """Ends when requests can be sent. Raises ``OSError``."""
        self.opened.add_done_callback(lambda done: done.cancelled() or done.exception())

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel for requests. Only valid once ``opened`` has ended."""
        assert self._channel is not None
        return self._channel

    @property
    def is_usable(self) -> bool:
        """Whether requests can be sent now."""
        return bool(self._pumps) and not any(one.done() for one in self._pumps)

    @property
    def was_refused(self) -> bool:
        """Whether the verifier ended the connection without an answer, as one does that misses a
        client certificate. The usual connection then shows the reason."""
        return any(one.done() for one in self._pumps) and not self._has_received

    async def close(self) -> None:
        """Close both ends. What runs on the connection breaks."""
        self.opened.cancel()
        for task in self._pumps:
            task.cancel()
        await asyncio.gather(self.opened, *self._pumps, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close(None)
        for writer in self._writers:
            writer.close()

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                # Only this user's processes can enter the folder.
                with temporary_folder() as folder:
                    near, far = await self._connect_both(folder / "socket")
                first = await self._read_first(near[0])
        except TimeoutError:
            why = f"no connection to {self._address} within {self._timeout_s:g} s"
            raise OSError(why) from None
        acks = SettingsAckFilter()
        far[1].write(acks.remove(first))
        self._pumps = [
            asyncio.create_task(_pump(near[0], far[1], acks.remove)),
            asyncio.create_task(_pump(far[0], near[1], self._note_received)),
        ]

    async def _connect_both(self, path: Path) -> tuple[_Ends, _Ends]:
        """Return the library's end, at a socket at ``path``, and the verifier's."""
        server = await asyncio.start_unix_server(self._accept, path)
        try:
            self._channel = grpc.aio.insecure_channel(f"unix:{path}", self._options)
            self._channel.get_state(try_to_connect=True)
            far = await self._connect()
            return await self._connected, far
        finally:
            server.close()

    async def _read_first(self, near: asyncio.StreamReader) -> bytes:
        """Return the first bytes that the library sends. Raises ``OSError`` if there are none.

        The library opens its connection with a text that waits for nothing. Once in a dozen times
        it did not, for reasons of its own, and the calls on that channel hung until their time was
        up. The usual connection then serves."""
        try:
            async with asyncio.timeout(_FIRST_BYTES_TIMEOUT_S):
                first = await near.read(_READ_BYTES)
        except TimeoutError:
            raise OSError("the library does not use its connection") from None
        if not first:
            raise OSError("the library closed its connection")
        return first

    def _note_received(self, data: bytes) -> bytes:
        self._has_received = True
        return data

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self._connected.done():  # The library connects a second time only after a failure.
            writer.close()
            return
        writer.write(_EMPTY_SETTINGS)
        self._connected.set_result((reader, writer))

    async def _connect(self) -> _Ends:
        """Connect to the verifier. Raises ``OSError``, and TLS errors, which are its subclass."""
        host, context = host_of(self._address), self._access.tls_context
        opened = await self._open_socket(host)
        try:
            reader, writer = await asyncio.open_connection(
                sock=opened,
                ssl=context,
                server_hostname=(self._access.server_name or host) if context else None,
            )
        except BaseException:
            opened.close()
            raise
        self._writers.append(writer)
        tls = writer.get_extra_info("ssl_object")
        if tls is not None and tls.selected_alpn_protocol() != ALPN:
            raise OSError(f"{self._address} speaks no HTTP/2")
        return reader, writer

    async def _open_socket(self, host: str) -> socket.socket:
        """Connect to the first address of the verifier's name that answers.

        An address that swallows packets ends the attempt with its time. The library, which tries
        several addresses at once, is ready before."""
        loop, port = asyncio.get_running_loop(), self._address.rpartition(":")[2]
        number = int(port) if port.isdigit() else DEFAULT_PORT
        last: OSError | None = None
        for family, kind, protocol, _, where in await loop.getaddrinfo(
            host, number, type=socket.SOCK_STREAM
        ):
            found = socket.socket(family, kind, protocol)
            try:
                found.setblocking(False)
                await loop.sock_connect(found, where)
                return found
            except OSError as error:
                last = error
                found.close()
            except BaseException:
                found.close()
                raise
        raise last or OSError(f"{host} has no address")


_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _describe_origin(address: str, access: DeviceAccess) -> Options:
    """Return the options that make requests look as they would without the detour."""
    scheme = "http" if access.tls_context is None else "https"
    return [
        ("grpc.default_authority", access.server_name or address),
        ("grpc.http2_scheme", scheme),
        ("grpc.enable_http_proxy", 0),
    ]


async def _pump(
    source: asyncio.StreamReader,
    sink: asyncio.StreamWriter,
    change: Callable[[bytes], bytes],
) -> None:
    """Carry what ``change`` makes of the bytes until either end closes, and close the other one
    then."""
    try:
        while data := await source.read(_READ_BYTES):
            sink.write(change(data))
            await sink.drain()
    except OSError:  # The pump of the other direction closes the other end.
        return
    finally:
        with suppress(OSError, RuntimeError):
            sink.close()


class SettingsAckFilter:
    """Removes the first acknowledgement of settings from what a client sends on a connection."""

    def __init__(self) -> None:
        self._to_pass = _PREFACE_BYTES
        """Bytes to pass on before the next frame begins."""
        self._header = b""
        """The part of a frame's header that has arrived."""
        self._is_removed = False

    def remove(self, data: bytes) -> bytes:
        """Return ``data``, the next bytes of the connection, without the acknowledgement. A header
        that is not complete is held back."""
        if self._is_removed:
            return data
        passed = bytearray()
        while data and not self._is_removed:
            if self._to_pass:
                passed += data[: self._to_pass]
                taken = min(self._to_pass, len(data))
                self._to_pass, data = self._to_pass - taken, data[taken:]
                continue
            missing = _FRAME_HEADER_BYTES - len(self._header)
            self._header, data = self._header + data[:missing], data[missing:]
            if len(self._header) < _FRAME_HEADER_BYTES:
                break
            header, self._header = self._header, b""
            if header[3] == _SETTINGS and header[4] & _ACK:
                self._is_removed = True
            else:
                passed += header
                self._to_pass = int.from_bytes(header[:3], "big")
        return bytes(passed) + data
