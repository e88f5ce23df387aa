"""What a world of a scenario is built from besides the scenario itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgespec_sim.association import AssociationPolicy, DeviceView, Links, VerifierView
from edgespec_sim.token_sources.source import TokenSource

# --- joint decisions, played -------------------------------------------------------------------
# which verifier each device uses, and its shares of band and compute.
# Without an allocation an association policy decides at every request, cells are shared by
# airtime and verifiers batch. An allocation fixes what it names, by device: the verifier, a slice
# of its cell's band (each way, whether it is used or not), a slice of its compute (a pass of one
# row that takes p seconds on the whole takes p / share, and nobody else's rows are in it).


_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Allocation:
    """All by name of device. ``bandwidth`` and ``compute`` are empty, or have every device in it;
    shares at a verifier sum to at most 1. Raises ``ValueError``."""

    verifiers: Mapping[str, str]
    bandwidth: Mapping[str, float] = field(default_factory=dict)
    compute: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, shares in (("bandwidth", self.bandwidth), ("compute", self.compute)):
            if shares and shares.keys() != self.verifiers.keys():
                odd = sorted(shares.keys() ^ self.verifiers.keys())
                raise ValueError(f"{what}: {odd[0]!r} has a share or a verifier, but not both")
            given: dict[str, float] = {}
            for device, share in shares.items():
                if not 0.0 < share <= 1.0:
                    raise ValueError(f"{what} of {device} is {share}, but must be in (0, 1]")
                verifier = self.verifiers[device]
                given[verifier] = given.get(verifier, 0.0) + share
            for verifier, total in given.items():
                if total > 1.0 + _ROUNDING:
                    raise ValueError(f"{verifier} gives {total:g} of its {what}, but has 1")

    def slices_of(self, verifier: str) -> dict[str, float]:
        """Compute shares of the devices at one verifier; empty: it batches."""
        return {
            device: share
            for device, share in self.compute.items()
            if self.verifiers[device] == verifier
        }


class FixedAssociation:
    """An ``AssociationPolicy`` that answers what was decided before. A device whose verifier is
    not among those offered (it is down) is sent to the nearest that is."""

    name = "fixed"

    def __init__(self, verifiers: Mapping[str, str]) -> None:
        self._verifiers = verifiers

    def assign(
        self, devices: Sequence[DeviceView], verifiers: Sequence[VerifierView], links: Links
    ) -> tuple[int, ...]:
        place = {view.name: index for index, view in enumerate(verifiers)}
        chosen = []
        for device, row in zip(devices, links, strict=True):
            rtts_s = [link.rtt_s for link in row]
            nearest = rtts_s.index(min(rtts_s))
            chosen.append(place.get(self._verifiers.get(device.name, ""), nearest))
        return tuple(chosen)


@dataclass(frozen=True, slots=True)
class Surrounding:
    """The token source, the association and the checks that all arms of a comparison share."""

    source: TokenSource
    association: AssociationPolicy
    folder: Path
    """Where relative file names of the scenario start."""
    checks: bool = True
    """Whether the laws of ``conservation.py`` are judged while the world is played."""
    allocation: Allocation | None = None
    """Decisions made before; its verifiers go before ``association``."""
