"""Several verifiers behind one agent, put together from the configuration."""

from __future__ import annotations

import platform
import secrets
from pathlib import Path

from edgespec.config import DEFAULT_PORT, LEARNED, AgentConfig
from edgespec.core.association.failover import Failover
from edgespec.core.association.network import LearnedAssociation
from edgespec.core.association.policies import (
    AssociationPolicy,
    DeviceView,
    ListedOrder,
    association_policy,
)
from edgespec.core.association.rendezvous import RendezvousHash
from edgespec.core.ports import Transport
from edgespec.device.verifier_pool import VerifierPool
from edgespec.wire.access import DeviceAccess
from edgespec.wire.directory import MakeTransport, VerifierDirectory, is_name

# Of a device that was not told how fast it drafts; no simple policy looks at it.
_USUAL_STEP_S = 0.01


def verifiers_of(
    config: AgentConfig, access: DeviceAccess, dial: MakeTransport
) -> Transport | VerifierPool:
    """The transport to the only verifier of ``config``, or a pool of several. A name counts as
    several: it may stand for them. Raises ``ConfigError`` where others could read the key."""
    addresses = tuple(dict.fromkeys(with_port(one) for one in config.verifiers))
    for address in addresses:
        access.key_for(address)
    if len(addresses) == 1 and not is_name(addresses[0]):
        return dial(addresses[0])
    policy = association(config.association)
    failover = Failover(
        config.failover,
        policy,
        device_view(config),
        secrets.randbits(32),
        ask_first=policy.name not in (ListedOrder.name, RendezvousHash.name),
    )
    return VerifierPool(VerifierDirectory(addresses, dial), failover)


def with_port(address: str) -> str:
    """``address`` with the default port where it names none."""
    address = address.strip()
    last = address.rpartition("]")[2]
    return address if ":" in last or "/" in address else f"{address}:{DEFAULT_PORT}"


def device_view(config: AgentConfig) -> DeviceView:
    """What association policies are told of this device."""
    return DeviceView(platform.node(), config.draft.draft_ms / 1e3 or _USUAL_STEP_S)


def association(name: str) -> AssociationPolicy:
    """The policy of that name, or of the file in ``learned:FILE``. Raises ``ValueError``,
    ``OSError``."""
    if not name.startswith(LEARNED):
        return association_policy(name, secrets.randbits(32))
    path = Path(name.removeprefix(LEARNED))
    try:
        return LearnedAssociation.from_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
