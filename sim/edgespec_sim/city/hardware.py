"""What the verifiers of a scenario run on: a machine each, or layers spread over nodes.

Theory of operation. On one machine passes run one after another. When the layers lie on N nodes
(arXiv 2511.11733, section 3), a pass goes through N machines with a link between neighbours, each
node works on one pass at a time, and as many passes as there are slots are under way at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.core.messages import Limits
from edgespec.core.work import PassRequest
from edgespec.telemetry.trace import Tracer
from edgespec_sim.city.site import Machine, Site, SiteCounters
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.costs import Operation, law_of
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.server import Compute

if TYPE_CHECKING:
    from edgespec_sim.city.world import Surrounding


@dataclass(frozen=True, slots=True)
class Hardware:
    """``counters`` are those of the first machine, except that ``busy_s`` is of all of them."""

    nodes: tuple[Machine, ...]

    @property
    def machines(self) -> int:
        return len(self.nodes)

    @property
    def counters(self) -> SiteCounters:
        first = self.nodes[0].counters
        busy_s = sum(node.counters.busy_s for node in self.nodes)
        return SiteCounters(first.passes, first.rows, first.sessions, busy_s)


class Stages:
    """Sends a pass through all nodes, one behind another."""

    def __init__(self, queue: EventQueue, nodes: tuple[Machine, ...], link_s: float) -> None:
        self._queue, self._nodes, self._link_s = queue, nodes, link_s

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        self._on_node(0, requests, done)

    def _on_node(
        self, index: int, requests: tuple[PassRequest, ...], done: Callable[[], None]
    ) -> None:
        if index + 1 == len(self._nodes):
            self._nodes[index].run(requests, done)
            return

        def pass_on() -> None:
            self._queue.after(self._link_s, lambda: self._on_node(index + 1, requests, done))

        self._nodes[index].run(requests, pass_on)


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
    name = kind if section.count == 1 else f"{kind}-{number + 1}"
    stages = section.stages
    count = stages.nodes if stages else 1
    law = law_of(section.pass_time, Operation.TARGET_PASS, surrounding.folder, 1.0 / count)
    nodes = tuple(Machine(queue, law, f"{seed}/machine/{name}/{index}") for index in range(count))
    link_s = stages.link_ms / 1e3 if stages else 0.0
    compute: Compute = Stages(queue, nodes, link_s) if stages else nodes[0]
    computes = (compute,) * (stages.slots if stages else 1)
    pass_s = count * law.seconds(1) + (count - 1) * link_s
    site = Site(queue, name, section, limits, surrounding.source.target, computes, pass_s, tracer)
    return site, Hardware(nodes)
