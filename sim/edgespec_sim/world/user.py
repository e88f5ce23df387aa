"""One user with a device, who sends a request, reads the output, thinks, and sends the next one.

In an open loop the user does not think: the device serves the requests that arrive
(``arrivals.py``).

Theory of operation. Each request is one ``DraftSession`` on the device's drafter. Before it opens,
the association policy chooses the verifier from what is known at that moment. A user with ``turns``
sends several requests of one conversation in turn: each prompt has the one before it and its output
in front. At the end of a request its measurements become a ``RequestRecord``.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Protocol

from edgespec.bench.arms import Arm, arm_settings
from edgespec.core.device.estimates import KeptEstimates, VerifierEstimates
from edgespec.core.device.events import Fail
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.kept_prefixes import KeptPrefixes
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Drafter, count_places
from edgespec.core.protocol.messages import EXACT_RULE, MAX_SECRET_BYTES, Open
from edgespec.telemetry.trace import Tracer
from edgespec_sim.cost_profile import TimeLaw
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.grants_5g import WayWaits
from edgespec_sim.scenario.sections import AtDevice, Scenario
from edgespec_sim.scenario.verifiers import RADIOS, RadioMeter
from edgespec_sim.sessions import SimulatedDevice, Stream, mean_way_s
from edgespec_sim.token_sources.source import TokenRequest
from edgespec_sim.world.arrivals import Arrival, draw_length
from edgespec_sim.world.device_memory import ConditionCourse, GuardedDraft
from edgespec_sim.world.device_power import DevicePower
from edgespec_sim.world.meters import Meters, RequestRecord
from edgespec_sim.world.parts import NextRequest
from edgespec_sim.world.recorded_arrivals import MAX_TOKENS
from edgespec_sim.world.site import Site, WorldSetup

# Numbers of different users' requests must not collide: each user has a range of this size.
REQUESTS_PER_USER = 1 << 20
CONTEXT_LENGTH: Final = 1 << 17
"""Longest context of verifiers and drafts, in tokens."""
# Laptops keep trying: a user waits for a restart to end and does not give up.
_RECONNECT = ReconnectPolicy(give_up_first_s=60.0, give_up_s=120.0)


class UserWorld(Protocol):
    """The part of the world that a user needs."""

    scenario: Scenario
    arm: Arm
    setup: WorldSetup
    queue: EventQueue
    meters: Meters
    eos_token_ids: tuple[int, ...]

    def choose_site(self, user: User) -> Site:
        """Return the verifier for the user's next request, as the association policy decides."""

    def connect(self, user: User, site: Site, key: str) -> tuple[Stream, float] | None:
        """Return a stream and its set-up time in seconds. None while the site is down."""

    def tracer(self, user: User) -> Tracer | None:
        """Return the tracer of the user's device. None if the device is not traced."""

    def air_waits(self, user: User) -> tuple[WayWaits, WayWaits] | None:
        """Return how long the messages of the user's device waited on the 5G air so far, up and
        down. None without one."""

    def is_counted(self, sent_s: float) -> bool:
        """Whether a request that is sent at that time counts."""


class User:
    """One user.

    In a closed loop, call ``start`` once. In an open loop, call ``serve`` for each arrival;
    ``on_free`` is called when the next one may come. ``finish`` at the world's end records the
    running request."""

    def __init__(
        self,
        world: UserWorld,
        group: str,
        name: str,
        number: int,
        step: TimeLaw,
        course: ConditionCourse | None,
        seed: str,
    ) -> None:
        """``step`` is the time of draft steps, and ``course`` the conditions of the device, of
        which None means that nothing changes. All devices of ``group`` share both. ``number``
        counts the users of the world."""
        self.group, self.name, self.number = group, name, number
        self.step, self.course = step, course
        self._section, self._source = world.scenario.devices[group], world.setup.source
        self._workload = world.setup.parts.workloads.get(group)
        """The user's behaviour, if it is not the section's."""
        self.site: Site | None = None
        self.device: SimulatedDevice | None = None
        self.drafting_s = 0.0
        """Seconds of drafting in all requests."""
        section = self._section
        self.power: DevicePower | None = None
        """The device's battery and temperature, if the scenario has either."""
        if section.battery is not None or section.thermal is not None:
            assert section.idle_w is not None, "as apply_profile checks"
            self.power = DevicePower(
                section.idle_w, section.draft_w, section.battery, section.thermal
            )
        self._throttled_s = 0.0
        """Throttled seconds before the running request."""
        self._air: tuple[WayWaits, WayWaits] | None = None
        """Waits on the 5G air before the running request."""
        power = RADIOS.get(self._section.radio_power)
        self.radio = None if power is None else RadioMeter(power)
        self.on_free: Callable[[], None] | None = None
        self._last: RequestRecord | None = None
        """The last request, to which the radio's tail and idle time until the next one are
        charged."""
        self._queue, self._world, self._meters = world.queue, world, world.meters
        self._dice = random.Random(seed)
        # Costs have their own random numbers, so the requests are the same under every arm.
        self._cost_dice = random.Random(f"{seed}/cost") if len(step.spread) > 1 else None
        self._drafter: Drafter = self._source.drafter(self._section.further_places)
        self._guarded_draft: GuardedDraft | None = None
        conditions = self._section.conditions
        if course is not None and world.arm.is_ours and conditions and conditions.budget_mib:
            self._guarded_draft = GuardedDraft(self._queue, conditions, course, self._drafter)
            self._drafter = self._guarded_draft.drafter
        self._verifiers: dict[str, VerifierEstimates] = {}
        """Estimates of each verifier, such as its latest price of a row."""
        self._learned = KeptEstimates()
        self._kept = KeptPrefixes(seed.encode()[:MAX_SECRET_BYTES])
        self.sent_s = 0.0
        """Time at which the running request was sent; it may have waited here."""
        self._request_count = 0
        self.handovers = 0
        """Changes of cell since the last request was sent."""
        self.key = ""
        """Session id of the running request."""
        self._request: TokenRequest | None = None
        self._turn = self._conversation = 0
        """The turn of the next request (0: it begins a conversation), and the conversation's
        number."""
        self._history_tokens = 0
        """Tokens of the conversation so far: prompt and output of its last turn."""
        self._draft_rows = self._reused_rows = 0
        """Rows of the conversation that the draft holds, and how many this request uses."""
        self._streams: list[Stream] = []

    def start(self) -> None:
        """Begin to send requests, after the pause that the workload states."""
        if self._workload is not None:
            self._plan_request()
            return
        workload = self._section.workload
        first_s = self._dice.uniform(0.0, workload.start_within_s)
        self._queue.after(
            self._pause_s() if workload.start_thinking else first_s, self._send_request
        )

    @property
    def max_slowdown(self) -> float:
        """The highest factor on the duration of a draft step."""
        slowdown = 1.0 if self.course is None else self.course.max_slowdown
        thermal = self._section.thermal
        return slowdown if thermal is None else slowdown * thermal.slowdown

    def battery_share(self) -> float | None:
        """Return the share of the battery's charge that is left now. None without a battery."""
        power = self.power
        if power is None or power.battery is None:
            return None
        return power.battery.share(self._taken_j(power))

    def temperature_c(self) -> float | None:
        """Return the device's temperature now. None without ``thermal``."""
        if self.power is None:
            return None
        self.power.advance(self._queue.now)
        return self.power.temperature_c

    def serve(self, arrival: Arrival) -> None:
        """Begin a request that arrived at ``arrival.at_s``, now or earlier."""
        self._settle_radio()
        self._begin_request(
            arrival.number, arrival.prompt_tokens, arrival.output_tokens, arrival.at_s
        )

    def finish(self) -> None:
        """Record the running request, if any, as incomplete."""
        if self.device is not None:
            self._record(self.device, complete=False)
            self.device = None
        self._settle_radio()

    # --- sending a request -----------------------------------------------------------------

    def _plan_request(self) -> None:
        """Let the user's own workload choose the next request, if there is one."""
        assert self._workload is not None
        wanted = self._workload.next_request(self.number, self._request_count, self._dice)
        if wanted is not None:
            self._queue.after(wanted.pause_s, lambda: self._send_wanted(wanted))

    def _send_wanted(self, wanted: NextRequest) -> None:
        self._settle_radio()
        number = self.number * REQUESTS_PER_USER + self._request_count
        self._begin_request(number, wanted.prompt_tokens, wanted.output_tokens, self._queue.now)

    def _send_request(self) -> None:
        self._settle_radio()
        load = self._section.workload
        typical = load.turn_tokens if self._turn else load.prompt_tokens
        new_tokens = draw_length(typical, load.length_spread, self._dice)
        max_tokens = draw_length(load.output_tokens, load.length_spread, self._dice)
        if self._turn and self._history_tokens + new_tokens + max_tokens >= CONTEXT_LENGTH:
            self._turn, new_tokens = 0, min(load.prompt_tokens, MAX_TOKENS)
        if not self._turn:
            self._conversation = self.number * REQUESTS_PER_USER + self._request_count
            self._history_tokens = self._draft_rows = 0
        prompt_length, turn = self._history_tokens + new_tokens, self._turn
        self._turn = (turn + 1) % load.turns
        self._reused_rows = self._draft_rows
        self._history_tokens = self._draft_rows = prompt_length
        self._begin_request(self._conversation, prompt_length, max_tokens, self._queue.now, turn)

    def _begin_request(
        self, number: int, prompt_length: int, max_tokens: int, sent_s: float, turn: int = 0
    ) -> None:
        if self.power is not None:
            if self._is_switched_off(self.power):
                self._refuse_request(sent_s)
                return
            self._throttled_s = self.power.throttled_s
        self._air = self._world.air_waits(self)
        source, arm = self._source, self._world.arm
        self._request = source.request(number, prompt_length, max_tokens, turn)
        self._request_count += 1
        self.sent_s = sent_s
        self._streams = []
        self.handovers = 0
        self.site = site = self._world.choose_site(self)
        own = self._world.setup.parts.policy
        ours = (own or make_policy(self._section.policy)) if arm.is_ours else None
        policy, run_ahead = arm_settings(arm, self._world.scenario.gamma, ours)
        key = f"{self.name}#{self._request_count}"
        self.key = key
        request = Open(
            session_id=key,
            model="",
            vocabulary="",
            prompt=self._request.prompt,
            sampling=self._request.sampling,
            run_ahead=run_ahead,
            rule=source.rule,
            drafting=arm.drafts,
        )
        session = DraftSession(
            request,
            policy,
            _RECONNECT,
            CONTEXT_LENGTH,
            jitter_seed=self.number,
            verifier=self._verifiers.setdefault(site.name, VerifierEstimates()),
            learned=self._learned,
            kept=self._kept,
            draft_places=count_places(self._drafter),
        )
        tracer = self._world.tracer(self)
        self.device = SimulatedDevice(
            self._queue,
            session,
            self._drafter,
            self._step_s,
            lambda: self._connect(self.site or site, key),
            tracer,
            self._finish_request,
        )
        if self._guarded_draft is not None:
            self._guarded_draft.begin(key, tracer)
        self.device.start()

    def _step_s(self, kept: int, fed: int) -> float:
        chance = self._cost_dice.random() if self._cost_dice else 0.5
        slowdown = 1.0 if self.course is None else self.course.slowdown(self._queue.now)
        if self._guarded_draft is not None:
            kept, fed = self._guarded_draft.windowed.kept, self._guarded_draft.windowed.fed
            if not fed:
                return 0.0  # A paused draft computes nothing.
        elif not kept and self._reused_rows:
            # The first step of a further turn feeds what is new in it.
            kept = min(self._reused_rows, fed - 1)
            fed -= kept
        step_s = slowdown * self.step.seconds(fed, kept, chance)
        if self.power is not None:
            step_s = self.power.begin_step(self._queue.now, step_s)
        return step_s

    # --- the battery -----------------------------------------------------------------------

    def _taken_j(self, power: DevicePower) -> float:
        """Return the energy that the device took from its battery so far."""
        now_s = self._queue.now
        power.advance(now_s)
        return power.drawn_j + (0.0 if self.radio is None else self.radio.spent_j(now_s))

    def _is_switched_off(self, power: DevicePower) -> bool:
        return power.battery is not None and power.battery.is_empty(self._taken_j(power))

    def _refuse_request(self, sent_s: float) -> None:
        """Record a request that fails because the device is switched off. In a closed loop the user
        stops; in an open one, further arrivals at this device fail as well."""
        self.sent_s = sent_s
        if self._world.is_counted(sent_s):
            self._meters.records.append(
                RequestRecord(
                    self.group,
                    self.name,
                    "",
                    sent_s,
                    complete=True,
                    failed="the battery is empty",
                    energy_known=True,
                )
            )
        arrivals = self._world.scenario.arrivals
        # With requests that any device may take, this one stays busy for good.
        if self.on_free is not None and arrivals is not None and arrivals.at is AtDevice.OWN:
            self._queue.after(0.0, self.on_free)

    def _connect(self, site: Site, key: str) -> tuple[Stream, float] | None:
        if (opened := self._world.connect(self, site, key)) is not None:
            self._streams.append(opened[0])
        return opened

    # --- the end of a request --------------------------------------------------------------

    def _finish_request(self) -> None:
        device, self.device = self.device, None
        assert device is not None
        self._record(device, complete=True)
        self._history_tokens += len(device.delivery.tokens)
        if self.on_free is not None:
            self.on_free()
            return
        if self._workload is not None:
            self._plan_request()
            return
        workload = self._section.workload
        if workload.requests and self._request_count >= workload.requests:
            return
        self._queue.after(self._pause_s(), self._send_request)

    def _pause_s(self) -> float:
        load = self._section.workload
        pause_s = load.tool_s if self._turn else load.think_s
        return self._dice.expovariate(1.0 / pause_s) if pause_s else 0.0

    def _record(self, device: SimulatedDevice, *, complete: bool) -> None:
        delivery, ended, site = device.delivery, device.delivery.ended, self.site
        assert site is not None
        tokens = delivery.tokens
        count = len(tokens)
        if count and tokens[-1] in self._world.eos_token_ids:
            count -= 1
        times_s = delivery.times_s[:count]
        pace_s = (times_s[-1] - times_s[0]) / (count - 1) if count > 1 else None
        energy_j = self._energy_j(device)
        self._last = RequestRecord(
            group=self.group,
            device=self.name,
            verifier=site.name,
            started_s=self.sent_s,
            ttft_s=times_s[0] - self.sent_s if times_s else None,
            tpot_s=pace_s if complete else None,
            pace_s=pace_s,
            tokens=count,
            counters=replace(device.session.counters),
            up_bytes=sum(stream.up_bytes for stream in self._streams),
            down_bytes=sum(stream.down_bytes for stream in self._streams),
            request_bytes=sum(stream.request_bytes for stream in self._streams),
            up_way_s=mean_way_s(stream.up_ways for stream in self._streams),
            down_way_s=mean_way_s(stream.down_ways for stream in self._streams),
            energy_j=energy_j,
            session=self.key,
            energy_known=self.radio is not None and self._section.draft_w > 0.0,
            mismatches=self._mismatches(device),
            lossy=self._source.rule != EXACT_RULE,
            complete=complete,
            handovers=self.handovers,
            memory_tightened=self._guarded_draft.tightened if self._guarded_draft else 0,
            memory_loosened=self._guarded_draft.loosened if self._guarded_draft else 0,
            failed=ended.why if isinstance(ended, Fail) else "",
            drafting_s=device.drafting_s,
        )
        if self.power is not None:
            self._last.battery = self.battery_share()
            self._last.temperature_c = self.temperature_c()
            self._last.throttled_s = self.power.throttled_s - self._throttled_s
        if self._air is not None:
            self._last.air_up_s, self._last.air_down_s = self._mean_air_waits(self._air)
        if self._world.is_counted(self.sent_s):
            self._meters.record_delivery(times_s)
            self._meters.records.append(self._last)

    def _mean_air_waits(
        self, before: tuple[WayWaits, WayWaits]
    ) -> tuple[float | None, float | None]:
        """Return the mean time that a message of the request took on the 5G air, up and down."""
        after = self._world.air_waits(self)
        assert after is not None
        up_s, down_s = (
            (new.seconds - old.seconds) / (new.messages - old.messages)
            if new.messages > old.messages
            else None
            for old, new in zip(before, after, strict=True)
        )
        return up_s, down_s

    def _energy_j(self, device: SimulatedDevice) -> float:
        section = self._section
        self.drafting_s += device.drafting_s
        drafting_j = section.draft_w * device.drafting_s
        return drafting_j + (0.0 if self.radio is None else self.radio.collect_j(self._queue.now))

    def _settle_radio(self) -> None:
        """Charge the radio's energy since the last output to its request: its tail, and idling."""
        if self.radio is None or self._last is None:
            return
        self._last.energy_j += self.radio.collect_j(self._queue.now)

    def _mismatches(self, device: SimulatedDevice) -> int:
        """Count the tokens that are not the target's own. Under a relaxed rule these are the
        replaced tokens, since one replacement changes everything that follows it."""
        assert self._request is not None
        source, tokens = self._source, device.delivery.tokens
        if source.rule != EXACT_RULE:
            return device.session.counters.replaced
        if not tokens:
            return 0
        expected = source.expected(self._request, len(tokens))
        return sum(a != b for a, b in zip(tokens, expected, strict=True))
