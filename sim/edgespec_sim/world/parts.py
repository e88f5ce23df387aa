"""Parts of a world that a caller replaces by own objects: policies, links, times and the like.

A scenario names what the simulator comes with. Research needs what it does not come with, so each
kind of part has an interface here, and ``Parts`` holds the replacements. Every part must be
deterministic: it takes its chance from the arguments and reads no clock. Worlds are played in
several processes, so parts must be picklable, which objects of a module's classes are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgespec.core.association.policies import VerifierView
from edgespec.core.device.policy import DraftPolicy
from edgespec_sim.links.path import Link
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.token_sources.source import TokenSource


class AssociationPolicy(Protocol):
    """Chooses a verifier for each request."""

    def rank(self, device: str, verifiers: Sequence[VerifierView]) -> Sequence[str]:
        """Return addresses of ``verifiers``, at least one, the one to use first.

        ``device`` is the name of the device that sends the request."""


class LinkPart(Protocol):
    """One link of a scenario. It stands in the paths that name it."""

    def make_links(self, device: int, seed: int) -> tuple[Link, Link]:
        """Return the ways up and down of one stream of a device (a number from 0).

        Streams that share a queue must get links with the same queue. ``seed`` differs from stream
        to stream and is the same for every arm. A message never arrives before one that was sent
        ahead of it."""


class PassTime(Protocol):
    """Duration of a verifier's passes."""

    def seconds(
        self, rows: int, context_length: int = 0, chance: float = 0.5, sessions: int = 1
    ) -> float:
        """Return the seconds of a pass of ``rows`` rows.

        ``context_length`` is the number of cached tokens of all its sessions together, ``sessions``
        their number. ``chance`` is uniform in [0, 1): a law that varies takes its quantile, and 0.5
        is its median."""


class GpuCapacity(Protocol):
    """The part of a verifier's machine that is free for its passes, over time."""

    def free_share(self, now_s: float) -> float:
        """Return the free share at a time, in (0, 1]."""

    def finish_s(self, start_s: float, work_s: float) -> float:
        """Return when work ends that starts at ``start_s`` and takes ``work_s`` seconds of the
        whole machine. It is never before ``start_s + work_s``."""


class TokenPart(Protocol):
    """A source of tokens."""

    def make_source(self, seed: int) -> TokenSource:
        """Return the source of the world of that seed. It must be the same for every arm."""


@dataclass(frozen=True, slots=True)
class NextRequest:
    """The next request of a user: a pause in seconds before it, and its lengths in tokens."""

    pause_s: float
    prompt_tokens: int
    output_tokens: int


class WorkloadPart(Protocol):
    """The behaviour of the users of one group of devices, in a closed loop."""

    def next_request(self, device: int, number: int, dice: random.Random) -> NextRequest | None:
        """Return the request of that number (0, 1, ...) of a device, or None if the user stops.

        ``dice`` is the device's own, and the same for every arm."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Replacements of parts of a scenario. What is left out comes from the scenario."""

    policy: DraftPolicy | None = None
    """Draft policy of the arms ``edgespec`` and ``both``."""
    association: AssociationPolicy | None = None
    token_source: TokenPart | None = None
    pass_times: Mapping[str, PassTime] = field(default_factory=dict)
    """Pass times by kind of verifier."""
    capacities: Mapping[str, GpuCapacity] = field(default_factory=dict)
    """Free parts of the machines over time, by kind of verifier."""
    links: Mapping[str, LinkPart] = field(default_factory=dict)
    """Links by name. The scenario's link of that name still states ``rtt_ms``, from which devices
    estimate what connecting takes and choose a verifier."""
    workloads: Mapping[str, WorkloadPart] = field(default_factory=dict)
    """Workloads by group of devices."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the replaced parts with their classes, for notes."""
        single = {
            "policy": self.policy,
            "association": self.association,
            "token_source": self.token_source,
        }
        found = [f"{name}={type(part).__name__}" for name, part in single.items() if part]
        for kind in ("pass_times", "capacities", "links", "workloads"):
            parts: Mapping[str, object] = {
                "pass_times": self.pass_times,
                "capacities": self.capacities,
                "links": self.links,
                "workloads": self.workloads,
            }[kind]
            found += [f"{kind}.{name}={type(part).__name__}" for name, part in parts.items()]
        return tuple(found)

    def check(self, scenario: Scenario) -> None:
        """Raise ``ValueError`` if a part has no place in the scenario."""
        _check_names("links", self.links, scenario.links)
        _check_names("pass_times", self.pass_times, scenario.verifiers)
        _check_names("capacities", self.capacities, scenario.verifiers)
        _check_names("workloads", self.workloads, scenario.devices)
        for kind in self.pass_times:
            if scenario.verifiers[kind].stages is not None:
                raise ValueError(
                    f"parts.pass_times has {kind}, but its layers lie on several machines"
                    f" (verifiers.{kind}.stages), which an own pass time does not support"
                )
        for kind in self.capacities:
            if scenario.verifiers[kind].ran is not None:
                raise ValueError(
                    f"parts.capacities has {kind}, but verifiers.{kind} has ran, which would have"
                    " no effect: leave it out"
                )
        if self.workloads and scenario.arrivals is not None:
            raise ValueError("parts.workloads is given, but with arrivals users do not think")
        for name in self.links:
            section = scenario.links[name]
            if section.loss or section.trace:
                raise ValueError(
                    f"parts.links has {name}, but links.{name} has a loss or a trace, which would"
                    " have no effect: leave them out"
                )
            if section.radio_5g is not None:
                raise ValueError(
                    f"parts.links has {name}, but links.{name} has radio_5g, which would have no"
                    " effect: leave it out"
                )


NO_PARTS = Parts()


def _check_names(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(
                f"parts.{kind} has {name!r}, but the scenario has {', '.join(known) or 'none'}"
            )
