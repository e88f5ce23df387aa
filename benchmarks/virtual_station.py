"""A verifier and its devices in virtual time, with real models: what they say is computed, what it
takes is looked up. A busy machine makes such a run slower and changes none of its figures."""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.benchmark.measurement import Measurement
from edgespec.core.device.events import Fail
from edgespec.core.device.policy_names import default_policy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.ports import Drafter, TargetModel
from edgespec.telemetry.trace import Tracer
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import OneHop

_SLICE_S = 1.0


class VirtualVerifier:
    """One engine. A pass takes ``pass_ms`` and ``row_ms`` for each of its rows; one that only reads
    prompts takes its rows' time, as in ``edgespec.targets.paced``."""

    def __init__(
        self,
        target: TargetModel,
        pass_ms: float,
        row_ms: float,
        tracer: Tracer,
        *,
        served: bool,
    ) -> None:
        self.queue = EventQueue()

        def pass_s(batch: tuple[PassRequest, ...]) -> float:
            rows = sum(request.row_count for request in batch)
            sampled = any(request.sample for request in batch)
            return ((pass_ms if sampled else 0.0) + row_ms * rows) / 1e3

        limits = Limits(context_length=target.info.context_length)
        engine_limits = EngineLimits(cache=target.cache, server_drafts=served)
        engine = VerifyEngine(target.info, limits, engine_limits)
        self.verifier = SimulatedVerifier(
            self.queue, engine, target, PassTime(self.queue, pass_s), tracer
        )


class VirtualDevice:
    """A device ``rtt_ms`` away whose steps take ``draft_ms``; it only streams without ``drafts``,
    and ``drafter`` then has no more to do than to be there."""

    def __init__(
        self,
        verifier: VirtualVerifier,
        drafter: Drafter,
        rtt_ms: float,
        draft_ms: float,
        *,
        drafts: bool,
    ) -> None:
        self._verifier, self._drafter, self._drafts = verifier, drafter, drafts
        self._rtt_s, self._step_s = rtt_ms / 1e3, draft_ms / 1e3
        self._asked = 0

    def run(self, prompt: Sequence[int], sampling: SamplingParams) -> Measurement:
        """One generation. Raises ``RuntimeError`` when it fails."""
        queue, started_s = self._verifier.queue, self._verifier.queue.now
        self._asked += 1
        key = f"{'drafts' if self._drafts else 'streams'} {self._asked}"
        request = Open(key, "", "", tuple(prompt), sampling=sampling, drafting=self._drafts)
        session = DraftSession(
            request, default_policy(), ReconnectPolicy(), self._drafter.info.context_length
        )
        one_way = LinkSettings(one_way_s=self._rtt_s / 2)
        up, down = OneHop(queue, LinkModel(one_way)), OneHop(queue, LinkModel(one_way))

        def connect() -> tuple[Stream, float]:
            stream = Stream(queue, up, down)
            self._verifier.verifier.accept(stream)
            return stream, self._rtt_s

        device = SimulatedDevice(
            queue, session, self._drafter, lambda kept, fed: self._step_s, connect
        )
        device.start()
        until_s = started_s
        while device.delivery.ended is None:
            until_s += _SLICE_S
            queue.run(until_s)
        queue.run(until_s + _SLICE_S)  # what is acknowledged arrives
        delivery = device.delivery
        if isinstance(delivery.ended, Fail):
            raise RuntimeError(f"{key}: {delivery.ended.why}")
        times_s = tuple(at_s - started_s for at_s in delivery.times_s)
        return Measurement(tuple(delivery.tokens), times_s, session.counters)
