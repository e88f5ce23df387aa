"""Options of gRPC channels at both ends: bounded messages and windows, and detection of dead peers.

Keepalive needs three options together (measured with grpcio 1.85). With the defaults, a black hole
is not noticed within 45 s. With only time and timeout, a stopped peer whose kernel still
acknowledges is noticed after 60 s, because of ``http2.ping_timeout_ms``. A server with the default
ping policy ends such a client with "too many pings" within seconds, so the policy is relaxed.
"""

from __future__ import annotations

from edgespec.wire.codec import WINDOW_BYTES, WireLimits

Options = list[tuple[str, int | str]]
PING_INTERVAL_S = PING_TIMEOUT_S = 1.5
"""Seconds between pings while a stream is open, and until a ping counts as lost. A dead peer is
noticed after about the sum of the two."""


def client_options(limits: WireLimits, connect_timeout_s: float) -> Options:
    return [
        *_common_options(limits),
        # A transport has one connection. The library would share it with every equal channel.
        ("grpc.use_local_subchannel_pool", 1),
        # An idle device does not ping, to save battery and mobile radio.
        ("grpc.keepalive_permit_without_calls", 0),
        # Milliseconds between connection attempts of a channel whose peer is gone. The library's
        # default grows to two minutes. It has to be less than the waits of a session, or the
        # library would refuse the session's attempts without trying.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 300),
        # In spite of its name this is no pause, but the limit of one attempt. It is longer than
        # ours, so that the caller's own limit is reached first.
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000) + 1000),
    ]


def server_options(limits: WireLimits) -> Options:
    return [
        *_common_options(limits),
        # Off, so that a second daemon on the port fails instead of stealing half of the devices.
        ("grpc.so_reuseport", 0),
        # Limit of a client's TLS handshake. The library waits two minutes.
        ("grpc.server_handshake_timeout_ms", 10_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common_options(limits: WireLimits) -> Options:
    timeout_ms = int(PING_TIMEOUT_S * 1000)
    return [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.keepalive_time_ms", int(PING_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A fixed window; probing would let it grow with the link's speed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]
