"""Which verifier does each device use, where all of them are decided at once?

A policy is a pure function of what is known before a session opens: each device, each verifier, and
the link between each pair. It may trade one device's place for another's. An agent, which decides
for itself alone, has ``edgespec_sim.association``.

    random             any verifier, by a seed
    strongest-signal   the best radio link (max-SINR in the literature)
    most-compute       the shortest pass, counting who is there already (max-compute)
    lowest-delay       the shortest expected time per round: link, queue and pass
    listed             the first one of the list
    rendezvous         the one that a hash of the device's name ranks first
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgespec_sim.association import weight
from edgespec.core.protocol.sampling import noise_bits

# A draft of a few nodes or a commit, with the framing of HTTP/2, TCP and IP around it.
_MESSAGE_BITS = 8 * 120.0
# Rounding must not make two devices change places for ever.
_LEAST_GAIN_S = 1e-9
Score = Callable[[int, int, int], float | tuple[float, ...]]
"""Of (device, verifier, devices placed there so far); the lowest wins."""


@dataclass(frozen=True, slots=True)
class DeviceView:
    name: str
    step_s: float
    """One draft step."""
    acceptance: float = 0.7
    """Share of positions at which its first guess is the target's token."""
    battery_share: float = 1.0
    """Charge left, 0 to 1; 1 on mains."""


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


Links = Sequence[Sequence[LinkView]]
"""``links[device][verifier]``."""


def one_by_one(
    devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], score: Score
) -> tuple[int, ...]:
    """Each device in turn to the lowest score among the verifiers with room, all if none has any.
    Ties go to the one with fewest sessions, those placed here included, and then to the first, so
    that equal verifiers share the devices."""
    placed = [0] * len(verifiers)
    chosen: list[int] = []
    for device in range(len(devices)):
        free = [v for v, view in enumerate(verifiers) if has_room(view, placed[v])]
        candidates = free or range(len(verifiers))
        best = min(
            candidates,
            key=lambda v: (score(device, v, placed[v]), verifiers[v].sessions + placed[v]),
        )
        placed[best] += 1
        chosen.append(best)
    return tuple(chosen)


def has_room(verifier: VerifierView, placed: int) -> bool:
    return verifier.sessions + placed < verifier.max_sessions


class AssociationPolicy(Protocol):
    @property
    def name(self) -> str: ...

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        """The index of a verifier for each device, in order. All sequences are non-empty. A full
        verifier may be named only when all are full."""


class RandomAssociation:
    """Any verifier with room, by a hash of (``seed``, the device's name and its place)."""

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        def score(device: int, verifier: int, placed: int) -> float:
            key = zlib.crc32(devices[device].name.encode()) + (device << 32)
            return noise_bits(self._seed ^ key, verifier, 0)

        return one_by_one(devices, verifiers, score)


class StrongestSignal:
    """The best signal-to-noise ratio, whatever the load. A cable counts as stronger than any radio
    link; equal ones are told apart by their round trip."""

    name = "strongest-signal"

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        def score(device: int, verifier: int, placed: int) -> tuple[float, float]:
            link = links[device][verifier]
            return (-math.inf if link.snr_db is None else -link.snr_db, link.rtt_s)

        return one_by_one(devices, verifiers, score)


class MostCompute:
    """The shortest pass with everyone counted who is there, whatever the link. Of equal passes the
    one with fewest sessions: where a further session costs nothing, nearness alone would fill the
    nearest."""

    name = "most-compute"

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        def score(device: int, verifier: int, placed: int) -> tuple[float, float, float]:
            view = verifiers[verifier]
            rtt_s = links[device][verifier].rtt_s
            return (_pass_s(view, placed), view.sessions + placed, rtt_s)

        return one_by_one(devices, verifiers, score)


class LowestDelay:
    """The shortest round (``round_s``). Among many devices each takes its best place in turn;
    then single devices move for as long as that shortens the sum of all rounds."""

    name = "lowest-delay"

    def __init__(self, sweeps: int = 4) -> None:
        self._sweeps = sweeps

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        def score(device: int, verifier: int, placed: int) -> float:
            return round_s(verifiers[verifier], links[device][verifier], placed)

        chosen = list(one_by_one(devices, verifiers, score))
        if len(devices) > 1:
            placed = [chosen.count(verifier) for verifier in range(len(verifiers))]
            for _ in range(self._sweeps):
                if not _move_each_once(chosen, placed, verifiers, links):
                    break
        return tuple(chosen)


class ListedOrder:
    """The first one of the list with room: the others are for when it is gone."""

    name = "listed"

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        return one_by_one(devices, verifiers, lambda device, verifier, placed: verifier)


class RendezvousHash:
    """The verifier with room that the hash of (device, verifier) ranks first."""

    name = "rendezvous"

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        def score(device: int, verifier: int, placed: int) -> float:
            return -weight(devices[device].name, verifiers[verifier].name)

        return one_by_one(devices, verifiers, score)


POLICIES: Mapping[str, Callable[[int], AssociationPolicy]] = {
    RandomAssociation.name: RandomAssociation,
    StrongestSignal.name: lambda seed: StrongestSignal(),
    MostCompute.name: lambda seed: MostCompute(),
    LowestDelay.name: lambda seed: LowestDelay(),
    ListedOrder.name: lambda seed: ListedOrder(),
    RendezvousHash.name: lambda seed: RendezvousHash(),
}
"""By name; each takes a seed, which only ``random`` looks at."""


def association_policy(name: str, seed: int = 0) -> AssociationPolicy:
    """The policy of that name. Raises ``ValueError`` naming the known ones."""
    if name not in POLICIES:
        raise ValueError(f"association is {name!r}, but must be one of {', '.join(POLICIES)}")
    return POLICIES[name](seed)


def round_s(verifier: VerifierView, link: LinkView, placed: int = 0) -> float:
    """Expected seconds from sending a draft to holding its commit, for one more session beside
    those there and ``placed`` others: round trip, pass, and both messages on the link."""
    serialisation_s = _MESSAGE_BITS / link.up_bits_per_s + _MESSAGE_BITS / link.down_bits_per_s
    return link.rtt_s + serialisation_s + _pass_s(verifier, placed)


def _pass_s(verifier: VerifierView, placed: int) -> float:
    return verifier.pass_s + verifier.session_s * (verifier.sessions + placed)


def _move_each_once(
    chosen: list[int], placed: list[int], verifiers: Sequence[VerifierView], links: Links
) -> bool:
    """Move each device whose move shortens the sum of all rounds; whether any moved."""
    moved = False
    for device, old in enumerate(chosen):
        own_s = round_s(verifiers[old], links[device][old], placed[old] - 1)
        # Those who stay behind have one session less in their passes, those met one more.
        relief_s = verifiers[old].session_s * (placed[old] - 1)
        best, least_s = old, own_s + relief_s - _LEAST_GAIN_S
        for new, view in enumerate(verifiers):
            if new == old or not has_room(view, placed[new]):
                continue
            cost_s = round_s(view, links[device][new], placed[new]) + view.session_s * placed[new]
            if cost_s < least_s:
                best, least_s = new, cost_s
        if best != old:
            chosen[device] = best
            placed[old] -= 1
            placed[best] += 1
            moved = True
    return moved
