"""Channel arguments of both ends: bounded messages and windows, dead peers noticed.

Keepalive needs three arguments together (measured with grpcio 1.85): with the defaults a black hole
is not noticed within 45 s; with only time and timeout a stopped peer, whose kernel still
acknowledges, is noticed after 60 s, because of ``http2.ping_timeout_ms``. A server with the default
ping policy ends such a client with "too many pings" within seconds, so the policy is relaxed.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.wire.wire_limits import WINDOW_BYTES, WireLimits

Options = list[tuple[str, int]]

# Between attempts of a channel whose peer is gone; the library's default grows to two minutes. Less
# than the waits of a session, or its attempts would be refused without a look at the peer.
_FIRST_RECONNECT_S = 0.1
_LAST_RECONNECT_S = 0.3
_HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Pings while a stream is open: a dead peer is noticed after about the sum of the two."""

    interval_s: float = 1.5
    timeout_s: float = 1.5

    def __post_init__(self) -> None:
        for name in ("interval_s", "timeout_s"):
            value = getattr(self, name)
            if not 0.01 <= value <= 3600.0:
                raise ValueError(f"{name} is {value}, but must be in [0.01, 3600]")


def client_options(limits: WireLimits, keepalive: Keepalive, connect_timeout_s: float) -> Options:
    return [
        *_common(limits, keepalive),
        # One connection a transport: the library would share it with every equal channel.
        ("grpc.use_local_subchannel_pool", 1),
        # An idle device does not ping (battery, mobile radio).
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", int(_FIRST_RECONNECT_S * 1000)),
        # Not a pause, in spite of its name: what one attempt may take. Longer than ours, so that
        # the caller's own time-out is the one that strikes.
        ("grpc.min_reconnect_backoff_ms", int(connect_timeout_s * 1000) + 1000),
        ("grpc.max_reconnect_backoff_ms", int(_LAST_RECONNECT_S * 1000)),
    ]


def server_options(limits: WireLimits, keepalive: Keepalive) -> Options:
    return [
        *_common(limits, keepalive),
        # Off, so that a second daemon on the port fails instead of stealing half of the devices.
        ("grpc.so_reuseport", 0),
        # Who connects and does not finish the TLS handshake; the library waits two minutes.
        ("grpc.server_handshake_timeout_ms", int(_HANDSHAKE_S * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common(limits: WireLimits, keepalive: Keepalive) -> Options:
    timeout_ms = int(keepalive.timeout_s * 1000)
    return [
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.keepalive_time_ms", int(keepalive.interval_s * 1000)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
        # A fixed window; probing would let it grow with the link's speed.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ]
