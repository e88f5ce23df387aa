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
        self._unread = bytearray()
        self._partial = bytearray()
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
        data = self.socket.recv(1 << 16)
        if not data:
            self.over = True
            return []
        self.bytes_in += len(data)
        unread, partial = self._unread, self._partial
        unread += data
        at, end = 0, len(unread)
        while end - at >= 9:
            length = int.from_bytes(unread[at : at + 3], "big")
            if end - at < 9 + length:
                break
            kind, flags = unread[at + 3], unread[at + 4]
            if kind == _DATA:
                partial += unread[at + 9 : at + 9 + length]
            elif kind != _HEADERS or flags & END_STREAM:
                self._control(kind, flags, bytes(unread[at + 9 : at + 9 + length]))
            at += 9 + length
        del unread[:at]
        return _messages(partial)

    def close(self) -> None:
        self.socket.close()

    def _control(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            self._write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind in (_HEADERS, _RESET, _GOAWAY):
            self.over = True

    def _write(self, data: bytes) -> None:
        self.bytes_out += len(data)
        self.socket.sendall(data)


def _messages(partial: bytearray) -> list[bytes]:
    """Take the whole messages out of a call's data."""
    found: list[bytes] = []
    at, end = 0, len(partial)
    while end - at >= 5:
        length = int.from_bytes(partial[at + 1 : at + 5], "big")
        if end - at < 5 + length:
            break
        found.append(bytes(partial[at + 5 : at + 5 + length]))
        at += 5 + length
    del partial[:at]
    return found


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _header(name: str, value: str) -> bytes:
    """A literal that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
