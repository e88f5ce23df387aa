"""One verifier of a scenario: the product's engine on hardware of a given speed, with restarts.

Theory of operation. A site holds one engine. If the target's layers lie on several nodes, it holds
one engine for each pass that may be in progress at once, as pipeline-parallel servers do: sessions
are divided among the engines, whose passes follow one another through the same stages. A restart
loses every session; devices resume with their committed tokens, and the engine computes the cache
again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from edgespec.config.verifier import LimitsSection
from edgespec.core.association.policies import VerifierView
from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.protocol.messages import Limits
from edgespec.core.protocol.work import CacheShape, PassRequest
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.server_drafts import DraftCounts
from edgespec.core.verifier.session import VerifySession
from edgespec.telemetry.trace import Tracer
from edgespec_sim.cost_profile import TimeLaw
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.run_summary import VerifierSummary
from edgespec_sim.scenario.ran import RanCapacity
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.scenario.verifiers import Operation, StagesSection, law_of
from edgespec_sim.sessions import Compute, ServerDraftModel, SimulatedVerifier, Stream
from edgespec_sim.token_sources.source import ProcessSource, TokenSource
from edgespec_sim.world.meters import RequestRecord
from edgespec_sim.world.parts import NO_PARTS, GpuCapacity, Parts, PassTime

_BLOCK_TOKENS = 16
"""Tokens of a block of the KV cache, as in the daemon."""
# Size of a draft of a few nodes or a commit, with the framing of HTTP/2, TCP and IP around it.
_MESSAGE_BITS = 8 * 120.0


@dataclass(frozen=True, slots=True)
class LinkView:
    """Typical properties of the path between one device and one verifier."""

    rtt_s: float
    up_bits_per_s: float = math.inf
    down_bits_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class WorldSetup:
    """The token source and the checks that all arms of a comparison share."""

    source: TokenSource
    folder: Path
    """Base folder of the scenario's relative file names."""
    checks: bool = True
    """Whether the laws of ``conservation.py`` are checked while the world is played."""
    parts: Parts = NO_PARTS


# Time until a device notices that a process has died, which resets its connections at once. Without
# a reset it would take a few seconds (docs/measurements/faults.md: 3 to 4 s).
_NOTICE_S = 0.05


@dataclass(slots=True)
class SiteCounters:
    passes: int = 0
    rows: int = 0
    sessions: int = 0
    """Sum of the sessions in each pass."""
    busy_s: float = 0.0
    draft_s: float = 0.0
    """The part of ``busy_s`` in steps of the verifier's own draft model."""
    guessed: int = 0
    """Nodes of that model in passes, and how many of them were accepted."""
    accepted: int = 0
    ran_s: float = 0.0
    """The part of ``busy_s`` that others on the machine took: its length beyond the work itself."""


class Machine:
    """Runs one pass at a time, in the order of arrival, and counts its work.

    ``law`` gives the duration of a pass. It may be replaced; later passes then use the new one.
    ``capacity`` is the part of the machine that is free over time; None means all of it, always."""

    def __init__(
        self,
        queue: EventQueue,
        law: PassTime,
        seed: str,
        charges: bool = False,
        capacity: GpuCapacity | None = None,
    ) -> None:
        """With ``charges``, record each session's part of the passes."""
        self._capacity = capacity
        self.counters = SiteCounters()
        self.pass_s_by_session: dict[str, float] | None = {} if charges else None
        """Each session's part of the passes in seconds, divided by rows."""
        self.law = law
        self._queue = queue
        is_constant = isinstance(law, TimeLaw) and len(law.spread) == 1
        self._dice = None if is_constant else random.Random(seed)
        self._reads_context = not isinstance(law, TimeLaw) or law.context_s > 0.0
        self._free_at_s = 0.0

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        """Run a pass, and call ``done`` at its end."""
        rows = sum([len(request.feed) + len(request.tokens) for request in requests])
        context = 0
        if self._reads_context:
            context = sum(request.cache_length for request in requests)
        chance = self._dice.random() if self._dice else 0.5
        pass_s = self.law.seconds(rows, context, chance, len(requests))
        counters = self.counters
        counters.passes += 1
        counters.rows += rows
        counters.sessions += len(requests)
        if self.pass_s_by_session is not None:
            rows_of = [max(1, len(one.feed) + len(one.tokens)) for one in requests]
            self._charge([request.key for request in requests], rows_of, pass_s)
        self._work(pass_s, done)

    def draft(self, keys: Sequence[str], seconds: float, done: Callable[[], None]) -> None:
        """Run a step of the verifier's own draft model, charged to these sessions in equal
        parts."""
        self.counters.draft_s += seconds
        self._charge(keys, [1] * len(keys), seconds)
        self._work(seconds, done)

    def _work(self, seconds: float, done: Callable[[], None]) -> None:
        if self._capacity is None:
            self._free_at_s = max(self._queue.now, self._free_at_s) + seconds
            self.counters.busy_s += seconds
        else:
            self._work_beside_others(self._capacity, seconds)
        self._queue.at(self._free_at_s, done)

    def _work_beside_others(self, capacity: GpuCapacity, seconds: float) -> None:
        start_s = max(self._queue.now, self._free_at_s)
        self._free_at_s = capacity.finish_s(start_s, seconds)
        took_s = self._free_at_s - start_s
        assert took_s >= seconds * (1.0 - 1e-9), f"{seconds} s of work ended after {took_s} s"
        self.counters.busy_s += took_s
        self.counters.ran_s += max(0.0, took_s - seconds)

    def _charge(self, keys: Sequence[str], rows: Sequence[int], seconds: float) -> None:
        if (taken_s := self.pass_s_by_session) is not None:
            for key, own in zip(keys, rows, strict=True):
                taken_s[key] = taken_s.get(key, 0.0) + seconds * own / sum(rows)


class Site:
    """One verifier. ``accept`` takes a stream; ``reachable`` is False while the process is down."""

    def __init__(
        self,
        queue: EventQueue,
        scenario: Scenario,
        kind: str,
        number: int,
        limits: Limits,
        setup: WorldSetup,
        seed: str,
        tracer: Tracer | None = None,
    ) -> None:
        self.section = section = scenario.verifiers[kind]
        self.name = name = scenario.verifier_name(kind, number)
        self._session_limit = scenario.session_limit(kind)
        self.starts = 0
        """Number of starts of its process. Connections do not outlive a process."""
        self._cache: CacheShape | None = None
        if (tokens := section.cached_tokens) is not None:
            self._cache = CacheShape(tokens // _BLOCK_TOKENS, _BLOCK_TOKENS)
            most = min(limits.context_length, self._cache.tokens)
            limits = replace(limits, context_length=most)
        self._queue, self._limits, self._tracer = queue, limits, tracer
        self._source = setup.source
        make_law_of_share = partial(law_of, section.pass_time, Operation.TARGET_PASS, setup.folder)
        own, split = setup.parts.pass_times.get(kind), section.stages
        law: PassTime = make_law_of_share(1.0) if own is None else own
        count = 1 if split is None else split.nodes
        charges = section.power_busy_w > 0.0
        self.capacity = setup.parts.capacities.get(kind)
        """The part of each machine that is free over time; None: all of it."""
        if section.ran is not None:
            until_s = scenario.duration_s + scenario.drain_limit_s
            ran_seed = f"{seed}/ran/{name}"
            self.capacity = RanCapacity.draw(section.ran, until_s, ran_seed, setup.folder)
        self.nodes = tuple(
            Machine(
                queue,
                make_law_of_share(1.0 / count) if own is None else own,
                f"{seed}/machine/{name}/{index}",
                charges,
                self.capacity,
            )
            for index in range(count)
        )
        """The machines, in the order in which a pass visits them."""
        self.pass_s = law.seconds(1)
        rows, sessions = 1 + _ROWS_PER_SESSION, 2
        self._session_s = max(0.0, law.seconds(rows, sessions=sessions) - law.seconds(1))
        self._down_until_s = 0.0
        self._next_engine = 0
        self._ended: list[SimulatedVerifier] = []
        """Engines from before the restarts."""
        self._computes: tuple[Compute, ...] = self.nodes
        """The machine or stages that run each engine's passes, one entry per engine."""
        if split is not None:
            stages = Stages(queue, split, make_law_of_share, self.nodes, f"{seed}/{name}")
            self._computes, self.pass_s = (stages,) * split.slots, stages.pass_s
            for at_s in split.lost_at_s:
                queue.at(at_s, partial(self._lose_node, stages, split.reroute_s))
        self._servers = self._start()

    @property
    def counters(self) -> SiteCounters:
        """Counters of the site. A pass counts once, however many nodes it visits; ``busy_s`` is the
        sum over all nodes."""
        drafts = [one.model for one in self.draft_counts]
        return replace(
            self.nodes[0].counters,
            busy_s=math.fsum(node.counters.busy_s for node in self.nodes),
            ran_s=math.fsum(node.counters.ran_s for node in self.nodes),
            guessed=sum(one.nodes for one in drafts),
            accepted=sum(one.accepted for one in drafts),
        )

    @property
    def pass_s_by_session(self) -> dict[str, float]:
        """Each session's part of all nodes' passes. Empty if it is not recorded."""
        taken_s: dict[str, float] = {}
        for node in self.nodes:
            for session, seconds in (node.pass_s_by_session or {}).items():
                taken_s[session] = taken_s.get(session, 0.0) + seconds
        return taken_s

    @property
    def reachable(self) -> bool:
        return self._queue.now >= self._down_until_s

    @property
    def sessions(self) -> int:
        return sum(len(server.engine.sessions) for server in self._servers)

    @property
    def draft_counts(self) -> list[DraftCounts]:
        """Counters of the verifier's own draft model, by engine."""
        return [server.engine.draft_counts for server in (*self._ended, *self._servers)]

    def describe_to(self, link: LinkView) -> VerifierView:
        """Describe the verifier to a new session behind ``link``. A round is the time from sending
        a draft to holding its commit: round trip, pass, and both messages on the link."""
        messages_s = _MESSAGE_BITS / link.up_bits_per_s + _MESSAGE_BITS / link.down_bits_per_s
        sessions = self.sessions
        pass_s = self.pass_s + self._session_s * sessions
        if self.capacity is not None:
            pass_s /= self.capacity.free_share(self._queue.now)
        round_s = link.rtt_s + messages_s + pass_s
        return VerifierView(self.name, round_s, sessions, sessions >= self._session_limit)

    @property
    def cached_share(self) -> float | None:
        """Share of the tokens of prompts that were cached when a session entered the KV cache. None
        without a shared cache."""
        caches = [server.engine.cache_scheduler for server in (*self._ended, *self._servers)]
        asked = sum(one.prefix_query_tokens for one in caches)
        return sum(one.prefix_hit_tokens for one in caches) / asked if asked else None

    def find_session(self, key: str) -> VerifySession | None:
        for server in self._servers:
            if (session := server.engine.sessions.get(key)) is not None:
                return session
        return None

    def accept(self, stream: Stream, key: str) -> None:
        """Accept a stream of session ``key``. A known session goes to its engine, a new one to the
        next."""
        for server in self._servers:
            if key in server.engine.sessions:
                server.accept(stream)
                return
        self._next_engine = (self._next_engine + 1) % len(self._servers)
        self._servers[self._next_engine].accept(stream)

    def _lose_node(self, stages: Stages, reroute_s: float) -> None:
        stages.lose_node()
        self.pass_s = stages.pass_s
        self.restart(reroute_s)

    def restart(self, down_s: float) -> None:
        self._down_until_s = max(self._down_until_s, self._queue.now + down_s)
        for server in self._servers:
            server.stop(_NOTICE_S)
        self._ended += self._servers
        self._servers = self._start()

    def _start(self) -> tuple[SimulatedVerifier, ...]:
        self.starts += 1
        slots = len(self._computes)
        engine_limits = EngineLimits(
            max_sessions=max(1, self._session_limit // slots),
            max_rows_per_pass=self.section.max_rows_per_pass,
            cache=self._cache,
            drafter=self.section.server_draft is not None,
            rules=(self._source.rule,),
            prefix_bytes=LimitsSection().prefix_mib << 20,
        )
        servers = []
        for number, compute in enumerate(self._computes):
            target = self._source.target()
            engine = VerifyEngine(target.info, self._limits, engine_limits)
            name = self.name if slots == 1 else f"{self.name}/{number}"
            servers.append(
                SimulatedVerifier(
                    self._queue, engine, target, compute, self._tracer, name, self._draft_model()
                )
            )
        return tuple(servers)

    def _draft_model(self) -> ServerDraftModel | None:
        section, source = self.section.server_draft, self._source
        if section is None:
            return None
        if section.acceptance is not None:
            assert isinstance(source, ProcessSource), "as a scenario checks"
            source = source.with_draft_acceptance(section.acceptance)
        return ServerDraftModel(source.drafter, section.step_s)


MakeLaw = Callable[[float], TimeLaw]

# Rows that a session adds to a pass: its last token and a few nodes (docs/measurements/server.md).
_ROWS_PER_SESSION = 4


class Stages:
    """Sends a pass through all nodes, one after another. ``make_law_of_share`` gives the time law
    of a node that holds a share of the layers."""

    def __init__(
        self,
        queue: EventQueue,
        section: StagesSection,
        make_law_of_share: MakeLaw,
        nodes: tuple[Machine, ...],
        seed: str,
    ) -> None:
        self._queue, self._section, self._law_of_share = queue, section, make_law_of_share
        self._nodes, self._spares = list(nodes), section.spares
        bits_per_s = section.link_mbps * 1e6
        dice = random.Random(f"{seed}/stages")
        self._links = [
            LinkModel(
                LinkSettings(
                    one_way_s=section.link_ms / 1e3,
                    jitter_s=section.jitter_ms / 1e3,
                    seed=dice.getrandbits(31),
                ),
                SharedQueue(bits_per_s),
            )
            for _ in nodes[1:]
        ]
        self._losses = 0

    @property
    def pass_s(self) -> float:
        """Seconds of a pass of one row that has the nodes to itself."""
        count = len(self._nodes)
        node_s = self._law_of_share(1.0 / count).seconds(1)
        link_s = self._section.hop_s(1) + self._section.jitter_ms / 1e3
        return count * node_s + len(self._links) * link_s

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        self._on_node(0, self._losses, requests, done)

    def draft(self, keys: Sequence[str], seconds: float, done: Callable[[], None]) -> None:
        """Run a draft step. The draft model is on the first node."""
        self._nodes[0].draft(keys, seconds, done)

    def lose_node(self) -> None:
        """Lose one node (the last, since all are alike). A spare replaces it, or the others take
        its layers."""
        self._losses += 1
        if self._spares:
            self._spares -= 1
            return
        self._nodes.pop()
        if self._links:
            self._links.pop()
        law = self._law_of_share(1.0 / len(self._nodes))
        for node in self._nodes:
            node.law = law

    def _on_node(
        self, index: int, losses: int, requests: tuple[PassRequest, ...], done: Callable[[], None]
    ) -> None:
        """Run the pass on a node, and then on the next one. A pass that began before a node was
        lost is dropped."""

        def finish_node() -> None:
            if losses != self._losses:
                return
            if index + 1 == len(self._nodes):
                done()
                return
            rows = sum(request.row_count for request in requests)
            size_bytes = rows * self._section.hidden_bytes
            at_s = self._links[index].arrival(self._queue.now, size_bytes)
            self._queue.at(at_s, lambda: self._on_node(index + 1, losses, requests, done))

        if losses == self._losses:
            self._nodes[index].run(requests, finish_node)


def charge_energy(
    records: Sequence[RequestRecord], sites: Sequence[Site], summaries: Sequence[VerifierSummary]
) -> None:
    """Write each record's part of the energy of passes and idle time, if all verifiers have a
    power."""
    if any(one.energy_j is None for one in summaries):
        return
    idle_known = all(one.idle_j is not None for one in summaries)
    for record in records:
        record.verifier_j = 0.0
        record.verifier_idle_j = 0.0 if idle_known else None
    for site, summary in zip(sites, summaries, strict=True):
        taken_s = site.pass_s_by_session
        shares = [taken_s.get(record.session, 0.0) for record in records]
        total_s = math.fsum(shares)
        if not total_s:
            continue
        for record, share_s in zip(records, shares, strict=True):
            assert record.verifier_j is not None
            record.verifier_j += site.section.power_busy_w * share_s
            if record.verifier_idle_j is not None and summary.idle_j is not None:
                record.verifier_idle_j += summary.idle_j * share_s / total_s
