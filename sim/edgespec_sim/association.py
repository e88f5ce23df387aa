"""Which verifier does a device use? Asked anew before each session opens.

listed, lowest-delay, rendezvous   the product's own (``edgespec.core.association.policies``)
random                             any verifier, by a seed
strongest-signal                   the best radio link, whatever the load
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.core.association import policies
from edgespec.core.association.policies import Association, ranked
from edgespec.core.protocol.sampling import noise_bits

# A draft of a few nodes or a commit, with the framing of HTTP/2, TCP and IP around it.
_MESSAGE_BITS = 8 * 120.0


@dataclass(frozen=True, slots=True)
class VerifierView:
    name: str
    pass_s: float
    """One pass of a lone session."""
    sessions: int
    max_sessions: int
    session_s: float = 0.0
    """How much longer a pass takes with every further session in it."""


@dataclass(frozen=True, slots=True)
class LinkView:
    """Between one device and one verifier."""

    rtt_s: float
    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf
    snr_db: float | None = None
    """Signal to interference and noise; None on links that are not radio."""


Choice = Callable[[str, Sequence[VerifierView], Sequence[LinkView]], int]
"""Of (name of the device, verifiers, its links to them): the index of a verifier. A full one may be
chosen only when all are full."""


def association_policy(name: str, seed: int = 0) -> Choice:
    """Raises ``ValueError`` naming the known ones; only ``random`` looks at the seed."""
    if name == "random":
        return lambda device, verifiers, links: _least(
            verifiers,
            [noise_bits(seed ^ zlib.crc32(device.encode()), v, 0) for v in range(len(verifiers))],
        )
    if name == "strongest-signal":
        # A cable counts as stronger than any radio link; equal ones differ by their round trip.
        return lambda device, verifiers, links: _least(
            verifiers,
            [(-math.inf if one.snr_db is None else -one.snr_db, one.rtt_s) for one in links],
        )
    known = {one.value: one for one in Association}
    if name not in known:
        names = ", ".join((*known, "random", "strongest-signal"))
        raise ValueError(f"association is {name!r}, but must be one of {names}")
    return lambda device, verifiers, links: _as_product(known[name], device, verifiers, links)


def _least(verifiers: Sequence[VerifierView], costs: Sequence[float | tuple[float, ...]]) -> int:
    """Full ones last; of equal ones that with fewest sessions, and then the first."""
    views = [(one.sessions >= one.max_sessions, one.sessions) for one in verifiers]
    return min(range(len(views)), key=lambda v: (views[v][0], costs[v], views[v][1]))


def _as_product(
    association: Association,
    device: str,
    verifiers: Sequence[VerifierView],
    links: Sequence[LinkView],
) -> int:
    views = [
        policies.VerifierView(
            view.name, round_s(view, link), view.sessions, view.sessions >= view.max_sessions
        )
        for view, link in zip(verifiers, links, strict=True)
    ]
    best = ranked(association, device, views)[0]
    return next(index for index, view in enumerate(verifiers) if view.name == best)


def round_s(verifier: VerifierView, link: LinkView) -> float:
    """Expected seconds from sending a draft to holding its commit, for one more session: round
    trip, pass, and both messages on the link."""
    serialisation_s = _MESSAGE_BITS / link.up_bits_per_s + _MESSAGE_BITS / link.down_bits_per_s
    pass_s = verifier.pass_s + verifier.session_s * verifier.sessions
    return link.rtt_s + serialisation_s + pass_s
