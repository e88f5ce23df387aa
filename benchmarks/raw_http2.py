"""A gRPC stream as cheap bytes: the little of HTTP/2 that a load generator needs.

One connection with one call. ``send`` frames a message, ``receive`` returns those that have come;
settings and pings are acknowledged, the window is opened once for good. No TLS, no compression, no
other calls, and no flow control upwards: it is for small messages to a server that reads them.
"""

from __future__ import annotations

import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_ACK = END_STREAM = 1
_END_HEADERS = 4
_WINDOW = (1 << 31) - 1
_FRAME = struct.Struct(">IBI")
"""Its head: length (24 bits) and kind, flags, stream."""
_READ_BYTES = 1 << 14


class RawCall:
    """One bidirectional call of ``path`` (such as "/package.Service/Method") at ``port`` of this
    machine; ``source`` is the address it comes from. Raises ``OSError``."""

    def __init__(self, port: int, path: str, source: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 30.0, (source, 0))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.over = False
        """Whether the server has ended the call."""
        self.bytes_in = self.bytes_out = 0
        """As they were on the wire, HTTP/2 frames included."""
        self._unread = self._partial = b""
        headers = b"".join(
            _header(name, value)
            for name, value in (
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", "load"),
                ("content-type", "application/grpc"),
                ("te", "trailers"),
            )
        )
        self._write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _WINDOW))  # initial window size
            + _frame(8, 0, 0, struct.pack(">I", _WINDOW - 65_535))  # window update
            + _frame(_HEADERS, _END_HEADERS, 1, headers)
        )

    def send(self, message: bytes) -> None:
        """Queue nothing: the kernel takes the message whole, or it is an error."""
        length = len(message)
        self._write(
            (length + 5).to_bytes(3, "big")
            + b"\0\0\0\0\0\1\0"
            + length.to_bytes(4, "big")
            + message
        )

    def receive(self) -> list[bytes]:
        """The messages that have come whole; blocks only when nothing at all has come."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            self.over = True
            return []
        self.bytes_in += len(data)
        if self._unread:
            data = self._unread + data
        found: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= _FRAME.size:
            word, flags, _ = _FRAME.unpack_from(data, at)
            begin, kind = at + _FRAME.size, word & 0xFF
            stop = begin + (word >> 8)
            if stop > end:
                break
            if kind == _DATA:
                found += self._messages(data[begin:stop])
            elif kind != _HEADERS or flags & END_STREAM:
                self._control(kind, flags, data[begin:stop])
            at = stop
        self._unread = data[at:]
        return found

    def close(self) -> None:
        self.socket.close()

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind in (_HEADERS, _RESET, _GOAWAY):
            self.over = True

    def _messages(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these further bytes of the call."""
        if self._partial:
            data = self._partial + data
        found: list[bytes] = []
        at, end = 0, len(data)
        while end - at >= 5:
            begin = at + 5
            stop = begin + int.from_bytes(data[at + 1 : begin], "big")
            if stop > end:
                break
            found.append(data[begin:stop])
            at = stop
        self._partial = data[at:]
        return found

    def _write(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self.socket.sendall(data)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
