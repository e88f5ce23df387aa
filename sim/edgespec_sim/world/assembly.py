"""Builds a scenario's world for one arm and plays it.

Theory of operation. A world has users with their devices (``user.py``), a network (``network.py``)
and verifiers (``site.py``), which all schedule their events on one queue. Everything random has its
own generator, seeded by (seed, purpose, number): users send the same prompts under every arm, and
one more device changes nothing for the others. Worlds with several shards are played separately and
added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgespec.bench.arms import Arm
from edgespec.core.association.policies import rank_verifiers
from edgespec.core.protocol.messages import Limits
from edgespec.telemetry.trace import Tracer
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.grants_5g import WayWaits
from edgespec_sim.run_summary import LinkLoad, VerifierSummary
from edgespec_sim.scenario.sections import Scenario
from edgespec_sim.scenario.verifiers import Operation, law_of
from edgespec_sim.sessions import Stream
from edgespec_sim.world.arrivals import ArrivalDispatcher, DeviceSlot, draw_arrivals
from edgespec_sim.world.conservation import StreamWatch, check_device
from edgespec_sim.world.device_memory import ConditionCourse
from edgespec_sim.world.device_power import apply_profiles
from edgespec_sim.world.meters import PACE_STEPS, Meters, RequestRecord, ratio
from edgespec_sim.world.network import Network
from edgespec_sim.world.radio_network import CellChange
from edgespec_sim.world.site import Site, SiteCounters, WorldSetup, charge_energy
from edgespec_sim.world.user import CONTEXT_LENGTH, User

_MAX_PROGRESS_STEPS = 200
_DRAIN_STEPS = 100
_TRACED_DEVICES = 2


@dataclass(slots=True)
class WorldOutcome:
    """The measurements of one arm's users, verifiers and links."""

    meters: Meters
    verifiers: list[VerifierSummary]
    links: tuple[LinkLoad, ...] = ()


class World:
    """One shard of a scenario under one arm. ``tracer`` receives the verifiers' records and those
    of the first devices."""

    def __init__(
        self,
        scenario: Scenario,
        arm: Arm,
        seed: str,
        setup: WorldSetup,
        tracer: Tracer | None = None,
    ) -> None:
        if not arm.on_server:
            scenario = remove_server_drafts(scenario)
        scenario = apply_profiles(scenario, setup.folder)
        self.scenario, self.arm, self.setup = scenario, arm, setup
        self.queue = EventQueue()
        self.meters = Meters(scenario.duration_s, scenario.window_s)
        self._watches: list[StreamWatch] = []
        """Watches of all streams, if the laws of ``conservation.py`` are checked."""
        self.network = Network(self.queue, scenario, seed, setup.folder, setup.parts.links)
        self._has_air = any(link.radio_5g is not None for link in scenario.links.values())
        self._tracer = tracer
        limits = Limits(context_length=CONTEXT_LENGTH, lease_s=scenario.lease_s)
        self.sites = [
            Site(self.queue, scenario, kind, number, limits, setup, seed, tracer)
            for kind, section in scenario.verifiers.items()
            for number in range(section.count)
        ]
        self.eos_token_ids = setup.source.target().info.eos_token_ids
        self.users = self._make_users(seed)
        self.dispatcher = self._make_dispatcher(seed)
        self._before = [SiteCounters() for _ in self.sites]
        self._after = self._before
        """Counters of the verifiers at the begin and the end of the window in which requests
        count."""
        if self.network.cells is not None:
            self.network.cells.on_change = self._count_handover

    def _make_users(self, seed: str) -> list[User]:
        users: list[User] = []
        for group, section in self.scenario.devices.items():
            step = law_of(section.draft, Operation.DRAFT_STEP, self.setup.folder)
            conditions = section.conditions
            course = None if conditions is None else ConditionCourse(conditions.course)
            for index in range(section.count):
                name, number = self.scenario.device_name(group, index), len(users)
                users.append(User(self, group, name, number, step, course, f"{seed}/user/{number}"))
        return users

    def _make_dispatcher(self, seed: str) -> ArrivalDispatcher | None:
        """Return the dispatcher of an open loop, which hands arrivals to the users. None in a
        closed loop."""
        section = self.scenario.arrivals
        if section is None:
            return None
        arrivals = draw_arrivals(self.scenario, seed, self.setup.folder)
        servers = [DeviceSlot(user.serve, user.group) for user in self.users]
        dispatcher = ArrivalDispatcher(self.queue, arrivals, section.at, servers)
        for user in self.users:
            user.on_free = partial(dispatcher.release, user.number)
        return dispatcher

    def _count_handover(self, change: CellChange) -> None:
        self.users[change.device].handovers += 1

    # --- the world as users see it (``user.UserWorld``) -------------------------------------

    def choose_site(self, user: User) -> Site:
        sites = [site for site in self.sites if site.reachable] or self.sites
        if len(sites) == 1:
            return sites[0]
        offers = [
            site.describe_to(self.network.view(user.group, user.number, site.name))
            for site in sites
        ]
        if (part := self.setup.parts.association) is not None:
            return _find_site(sites, part.rank(user.name, offers))
        best = rank_verifiers(self.scenario.association, user.name, offers)[0]
        return next(site for site in sites if site.name == best)

    def connect(self, user: User, site: Site, key: str) -> tuple[Stream, float] | None:
        if not site.reachable:
            return None
        up, down, connect_s = self.network.route(user.group, user.number, site.name, site.starts)
        watch = None
        if self.setup.checks:
            least_s = self.network.least_way_s(user.group, site.name)
            watch = StreamWatch(site.find_session, key, least_s)
            self._watches.append(watch)
        stream = Stream(self.queue, up, down, watch, user.radio, site.name)
        site.accept(stream, key)
        self.network.register_stream(user.group, user.number, stream)
        return stream, connect_s

    def tracer(self, user: User) -> Tracer | None:
        return self._tracer if user.number < _TRACED_DEVICES else None

    def air_waits(self, user: User) -> tuple[WayWaits, WayWaits] | None:
        return self.network.air_waits(user.group, user.number) if self._has_air else None

    def is_counted(self, sent_s: float) -> bool:
        return self.scenario.warm_up_s <= sent_s <= self.scenario.duration_s

    # --- play ------------------------------------------------------------------------------

    def run(self, progress: Callable[[float], None] = lambda now_s: None) -> WorldOutcome:
        """Play the world. ``progress`` is called with the virtual time now and then. Raises
        ``ConservationError``."""
        self._start()
        duration_s = self.scenario.duration_s
        for step in range(1, _MAX_PROGRESS_STEPS + 1):
            now_s = duration_s * step / _MAX_PROGRESS_STEPS
            self.queue.run(now_s)
            progress(now_s)
        self._after, links = self._counters(), self.network.measure_loads()
        self._drain()
        for user in self.users:
            user.finish()
        if self.dispatcher is not None:
            self._count_waiting(self.dispatcher)
        if self.setup.checks:
            self._check_end()
        sites = zip(self.sites, self._before, self._after, strict=True)
        verifiers = [self._summarise_site(*one) for one in sites]
        charge_energy(self.meters.records, self.sites, verifiers)
        return WorldOutcome(self.meters, verifiers, links)

    def _start(self) -> None:
        powered = [user for user in self.users if user.power is not None]
        if powered:
            for step in range(PACE_STEPS):
                at_s = self.scenario.duration_s * step / PACE_STEPS
                self.queue.at(at_s, partial(self._measure_power, powered, step))
        if self.scenario.warm_up_s:
            self.queue.at(self.scenario.warm_up_s, self._begin_window)
        if self.dispatcher is not None:
            self.dispatcher.start()
        else:
            for user in self.users:
                user.start()

    def _measure_power(self, users: Sequence[User], step: int) -> None:
        """Record the batteries and temperatures at the begin of a time step."""
        for user in users:
            assert user.power is not None
            self.meters.record_power(
                step, user.battery_share(), user.temperature_c(), user.power.is_throttled
            )

    def _begin_window(self) -> None:
        self._before = self._counters()

    def _counters(self) -> list[SiteCounters]:
        return [site.counters for site in self.sites]

    def _drain(self) -> None:
        """Continue under the same load until the requests that count have ended, or the time
        limit."""
        drain_s = self.scenario.drain_limit_s
        for step in range(1, _DRAIN_STEPS + 1):
            waiting = self.dispatcher.waiting if self.dispatcher is not None else []
            begun_s = [user.sent_s for user in self.users if user.device is not None]
            sent_s = [*begun_s, *(arrival.at_s for arrival in waiting)]
            if not drain_s or not any(map(self.is_counted, sent_s)):
                return
            until_s = self.scenario.duration_s + drain_s * step / _DRAIN_STEPS
            self.queue.run(until_s)

    def _count_waiting(self, dispatcher: ArrivalDispatcher) -> None:
        """Record requests that no device has begun as unfinished, like the running ones."""
        for arrival in dispatcher.waiting:
            if self.is_counted(arrival.at_s):
                user = self.users[arrival.device]
                self.meters.records.append(RequestRecord(user.group, user.name, "", arrival.at_s))

    def _check_end(self) -> None:
        now_s = self.queue.now
        for watch in self._watches:
            watch.check(now_s)
        for user in self.users:
            longest_s = user.step.seconds(CONTEXT_LENGTH, CONTEXT_LENGTH, 1.0)
            longest_s *= user.max_slowdown
            check_device(user.name, now_s, user.drafting_s, longest_s)

    def _summarise_site(
        self, site: Site, before: SiteCounters, after: SiteCounters
    ) -> VerifierSummary:
        assert not any(one.failures for one in site.draft_counts), "a draft model failed"
        passes, busy_s = after.passes - before.passes, after.busy_s - before.busy_s
        ran_s = after.ran_s - before.ran_s
        window_s = len(site.nodes) * self.scenario.window_s
        idle_s = max(0.0, window_s - busy_s)
        busy_w, idle_w = site.section.power_busy_w, site.section.power_idle_w
        return VerifierSummary(
            name=site.name,
            utilisation=min(1.0, busy_s / window_s),
            passes=passes,
            rows_per_pass=ratio(after.rows - before.rows, passes),
            sessions_per_pass=ratio(after.sessions - before.sessions, passes),
            queue_s=self.meters.queue_s(site.name),
            energy_j=busy_w * (busy_s - ran_s) if busy_w else None,
            idle_j=None if idle_w is None else idle_w * idle_s,
            idle_s=None if idle_w is None else idle_s,
            busy_s=busy_s,
            draft_s=after.draft_s - before.draft_s,
            guessed=after.guessed - before.guessed,
            accepted=after.accepted - before.accepted,
            cached_share=site.cached_share,
            ran_s=None if site.capacity is None else ran_s,
        )


def _find_site(sites: Sequence[Site], ranked: Sequence[str]) -> Site:
    """Return the site that an own association policy ranked first. Raises ``ValueError``."""
    for site in sites:
        if ranked and site.name == ranked[0]:
            return site
    names = ", ".join(site.name for site in sites)
    raise ValueError(f"the association policy ranked {list(ranked)!r}, but offered were {names}")


def remove_server_drafts(scenario: Scenario) -> Scenario:
    """Return the scenario as arms without a server's draft play it."""
    verifiers = {
        name: replace(section, server_draft=None) for name, section in scenario.verifiers.items()
    }
    arms = tuple(arm for arm in scenario.arms if not arm.on_server) or (Arm.TARGET_ONLY,)
    return replace(scenario, verifiers=verifiers, arms=arms)


def make_shard(scenario: Scenario) -> Scenario:
    """Return one of the equal worlds that a scenario with several shards consists of."""
    if scenario.shards == 1:
        return scenario
    shards, arrivals = scenario.shards, scenario.arrivals
    return replace(
        scenario,
        shards=1,
        arrivals=None if arrivals is None else arrivals.divide(shards),
        devices={
            name: replace(section, count=section.count // shards)
            for name, section in scenario.devices.items()
        },
        verifiers={
            name: replace(section, count=section.count // shards)
            for name, section in scenario.verifiers.items()
        },
    )
