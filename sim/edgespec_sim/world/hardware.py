"""What the verifiers of a scenario run on: a machine, slices of one, or layers over several nodes.

Theory of operation. On one machine passes run one after another. When it is sliced, each device has
a machine of its own that is slower by its share. When the layers lie on N nodes (arXiv 2511.11733),
a pass goes through N machines with a link between neighbours, each node works on one pass at a
time, and as many passes as there are slots are under way at once.

A node that is lost takes its layers' part of every cache with it. The product's engine has no word
for half a cache, so it starts anew when the way around stands; devices resume with what they hold
and are fed again. Passes that were on their way end nowhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.protocol.messages import Limits
from edgespec.core.protocol.work import PassRequest
from edgespec.telemetry.cost_profile import TimeLaw
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.server import Compute
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.costs import Operation, law_of
from edgespec_sim.scenario.sections import Scenario, StagesSection
from edgespec_sim.scenario.stage_links import link_delays_s, straggling
from edgespec_sim.world.audit import AuditedQueue, Slots
from edgespec_sim.world.site import Machine, Site, SiteCounters
from edgespec_sim.world.surrounding import Surrounding

LawOfShare = Callable[[float], TimeLaw]
# What a session adds to a pass: its last token and a few nodes (docs/measurements.md).
_ROWS_PER_SESSION = 4


@dataclass(frozen=True, slots=True)
class Hardware:
    """The machines of one verifier: ``sliced`` among devices, or one behind another."""

    nodes: tuple[Machine, ...]
    sliced: bool = False

    @property
    def machines(self) -> int:
        return len(self.nodes)

    def prefill_s(self, rows: int) -> float:
        """What so many rows take in a pass of their own, above a pass of one."""
        return sum(node.law.seconds(max(1, rows)) - node.law.seconds(1) for node in self.nodes)

    def bring(self, key: str, positions: int) -> None:
        """Keys and values of a session come from elsewhere."""
        for node in self.nodes:
            node.brought[key] = positions

    @property
    def pass_s_of(self) -> dict[str, float]:
        """By session, its part of all nodes' passes; empty where nobody asked for it."""
        taken_s: dict[str, float] = {}
        for node in self.nodes:
            for session, seconds in (node.pass_s_of or {}).items():
                taken_s[session] = taken_s.get(session, 0.0) + seconds
        return taken_s

    @property
    def counters(self) -> SiteCounters:
        """Passes are counted once, however many nodes they go through; ``busy_s`` is of all."""
        counted = self.nodes if self.sliced else self.nodes[:1]
        counters = [node.counters for node in counted]
        return SiteCounters(
            passes=sum(one.passes for one in counters),
            rows=sum(one.rows for one in counters),
            sessions=sum(one.sessions for one in counters),
            busy_s=sum(node.counters.busy_s for node in self.nodes),
        )


class Stages:
    """Sends a pass through all nodes, one behind another. ``law_of_share`` is the law of a node
    that holds such a share of the layers; ``audited`` links are judged. ``delays_s``: of each link,
    one way; None: the section's ``link_ms``."""

    def __init__(
        self,
        queue: EventQueue,
        section: StagesSection,
        law_of_share: LawOfShare,
        nodes: tuple[Machine, ...],
        *,
        audited: bool = False,
        delays_s: tuple[float, ...] | None = None,
        seed: str = "",
    ) -> None:
        self._queue, self._section, self._law_of_share = queue, section, law_of_share
        self._nodes, self._spares = list(nodes), section.spares
        if delays_s is None:
            delays_s = (section.link_ms / 1e3,) * (len(nodes) - 1)
        self._delays_s = list(delays_s)
        bits_per_s = section.link_mbps * 1e6
        make = AuditedQueue if audited and bits_per_s < math.inf else SharedQueue
        dice = random.Random(f"{seed}/stages")
        self._links = [
            LinkModel(
                LinkSettings(
                    one_way_s=delay_s,
                    jitter_s=section.jitter_ms / 1e3,
                    seed=dice.getrandbits(31),
                ),
                make(bits_per_s),
            )
            for delay_s in delays_s
        ]
        self._losses = 0

    @property
    def pass_s(self) -> float:
        """Of one row, with the nodes to itself."""
        count = len(self._nodes)
        node_s = self._law_of_share(1.0 / count).seconds(1)
        mean_s = self._section.jitter_ms / 1e3
        links_s = [self._section.hop_s(1, delay_s) + mean_s for delay_s in self._delays_s]
        return count * node_s + sum(links_s)

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        self._on_node(0, self._losses, requests, done)

    def lose(self) -> None:
        """One node is gone (they are alike, so the last); a spare steps in, or the others do."""
        self._losses += 1
        if self._spares:
            self._spares -= 1
            return
        self._nodes.pop()
        if self._links:
            self._links.pop()
            self._delays_s.pop()
        law = self._law_of_share(1.0 / len(self._nodes))
        for node in self._nodes:
            node.law = law

    def _on_node(
        self,
        index: int,
        losses: int,
        requests: tuple[PassRequest, ...],
        done: Callable[[], None],
    ) -> None:
        if losses != self._losses:
            return
        if index + 1 == len(self._nodes):
            self._nodes[index].run(requests, partial(self._finish, losses, done))
            return

        def pass_on() -> None:
            if losses != self._losses:
                return
            rows = sum(request.row_count for request in requests)
            size_bytes = rows * self._section.hidden_bytes
            at_s = self._links[index].arrival(self._queue.now, size_bytes)
            self._queue.at(at_s, lambda: self._on_node(index + 1, losses, requests, done))

        self._nodes[index].run(requests, pass_on)

    def _finish(self, losses: int, done: Callable[[], None]) -> None:
        if losses == self._losses:
            done()


@dataclass(frozen=True, slots=True)
class _Ground:
    """What all builders below need."""

    queue: EventQueue
    name: str
    law_of_share: LawOfShare
    seed: str
    audited: bool
    charges: bool

    def machine(self, label: str | int, law: TimeLaw) -> Machine:
        audit = Slots(f"passes run on {self.name}") if self.audited else None
        seed = f"{self.seed}/machine/{self.name}/{label}"
        return Machine(self.queue, law, seed, audit, charges=self.charges)


def build_site(
    queue: EventQueue,
    scenario: Scenario,
    kind: str,
    number: int,
    limits: Limits,
    surrounding: Surrounding,
    seed: str,
    tracer: Tracer | None,
) -> tuple[Site, Hardware]:
    section = scenario.verifiers[kind]
    name = scenario.verifier_name(kind, number)
    law_of_share = partial(law_of, section.pass_time, Operation.TARGET_PASS, surrounding.folder)
    charges = section.power_busy_w > 0.0
    ground = _Ground(queue, name, law_of_share, seed, surrounding.checks, charges)
    allocation = surrounding.allocation
    slices = allocation.slices_of(name) if allocation is not None else {}
    law = law_of_share(1.0)
    computes: tuple[Compute, ...]
    pass_s, stages = law.seconds(1), None
    if slices:
        nodes = tuple(
            ground.machine(device, law_of_share(1.0 / share)) for device, share in slices.items()
        )
        computes = nodes
    elif section.stages is not None:
        stages, nodes = _stages(ground, section.stages, surrounding.folder)
        computes, pass_s = (stages,) * section.stages.slots, stages.pass_s
    else:
        nodes = (ground.machine(0, law),)
        computes = nodes
    site = Site(
        queue,
        name,
        section,
        limits,
        surrounding.source,
        computes,
        pass_s,
        max(0.0, law.seconds(1 + _ROWS_PER_SESSION, sessions=2) - law.seconds(1)),
        {device: index for index, device in enumerate(slices)},
        tracer,
    )
    if stages is not None and section.stages is not None:
        for at_s in section.stages.lost_at_s:
            queue.at(at_s, partial(_lose, site, stages, section.stages.reroute_s))
    return site, Hardware(nodes, sliced=bool(slices))


def _stages(
    ground: _Ground, section: StagesSection, folder: Path
) -> tuple[Stages, tuple[Machine, ...]]:
    def law_of_share(share: float) -> TimeLaw:
        return straggling(ground.law_of_share(share), section)

    law = law_of_share(1.0 / section.nodes)
    nodes = tuple(ground.machine(index, law) for index in range(section.nodes))
    stages = Stages(
        ground.queue,
        section,
        law_of_share,
        nodes,
        audited=ground.audited,
        delays_s=link_delays_s(section, folder),
        seed=f"{ground.seed}/{ground.name}",
    )
    return stages, nodes


def _lose(site: Site, stages: Stages, reroute_s: float) -> None:
    stages.lose()
    site.pass_s = stages.pass_s
    site.restart(reroute_s)
