"""What a front process is told before anything else, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from edgespec.core.verifier.call_budget import CallLimits
from edgespec.transport.front_frames import PING_EVERY_S
from edgespec.transport.grpc_options import Keepalive
from edgespec.transport.tls import ServerIdentity


@dataclass(frozen=True, slots=True)
class Orders:
    """Where and how to listen."""

    address: str
    max_message_bytes: int
    keepalive: Keepalive
    side_calls: CallLimits
    """Of health and reflection."""
    log_level: int
    identity: ServerIdentity | None
    """None: plaintext."""
    ping_every_s: float = PING_EVERY_S

    def encode(self) -> bytes:
        """Bytes for ``decode``."""
        plain = {name: getattr(self, name) for name in ("address", "max_message_bytes")}
        plain |= {"log_level": self.log_level, "ping_every_s": self.ping_every_s}
        plain["keepalive"], plain["side_calls"] = asdict(self.keepalive), asdict(self.side_calls)
        plain["identity"] = None if self.identity is None else _plain(self.identity)
        return json.dumps(plain).encode()

    @classmethod
    def decode(cls, body: bytes) -> Orders:
        """What ``encode`` was given."""
        plain = json.loads(body)
        plain["keepalive"] = Keepalive(**plain["keepalive"])
        plain["side_calls"] = CallLimits(**plain["side_calls"])
        if plain["identity"] is not None:
            plain["identity"] = _identity(plain["identity"])
        return cls(**plain)


def encode_identity(identity: ServerIdentity) -> bytes:
    """Bytes for ``decode_identity``; they hold the private key."""
    return json.dumps(_plain(identity)).encode()


def decode_identity(body: bytes) -> ServerIdentity:
    """What ``encode_identity`` was given."""
    return _identity(json.loads(body))


def _plain(identity: ServerIdentity) -> dict[str, str | float | None]:
    ca = identity.client_ca
    return {
        "certificate": identity.certificate.decode("latin-1"),
        "key": identity.key.decode("latin-1"),
        "client_ca": None if ca is None else ca.decode("latin-1"),
        "expires_s": identity.expires.timestamp(),
    }


def _identity(plain: dict[str, str | float | None]) -> ServerIdentity:
    ca = plain["client_ca"]
    return ServerIdentity(
        str(plain["certificate"]).encode("latin-1"),
        str(plain["key"]).encode("latin-1"),
        None if ca is None else str(ca).encode("latin-1"),
        datetime.fromtimestamp(float(plain["expires_s"] or 0.0), UTC),
    )
