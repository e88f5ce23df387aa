"""One session on one link, in virtual time: a request played by the product's own sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgespec.core.device.events import Fail
from edgespec.core.device.goodput_policy import named_policy
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.link_model import LinkModel, LinkSettings, SharedQueue
from edgespec.core.ports import Drafter, TargetModel
from edgespec.core.protocol.messages import Limits, Open, RunAhead
from edgespec.core.verifier.drafts import RunAheadPolicy, run_ahead_policy
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import OneHop, Path
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.token_sources.source import Request, TokenSource

# A session that has not ended by then is stuck: no set-up takes seconds a token.
_LONGEST_S = 1e6
_CONTEXT_LENGTH = 1 << 24


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a session runs: both directions of its link and the two machines."""

    up: LinkSettings
    down: LinkSettings
    up_bits_per_s: float
    step_s: float
    pass_s: float

    @property
    def rtt_s(self) -> float:
        return self.up.one_way_s + self.down.one_way_s


@dataclass(frozen=True, slots=True)
class Played:
    """What came of one request."""

    times_s: tuple[float, ...]
    """Delivery of each token, from the start on."""
    passes: int
    wasted: int
    """Nodes sent that did not become tokens by being verified."""
    up_bytes: int
    """On the link, framing and the request itself included."""
    tried: int
    """Positions that were decided while the draft had guesses there."""
    hits: int
    """Those at which its first one was right."""


class _Counting(OneHop):
    sent = sent_bytes = 0

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        self.sent += 1
        self.sent_bytes += size_bytes
        super().send(size_bytes, deliver)


def alone(
    target: TargetModel,
    drafter: Drafter,
    opened: Open,
    policy: DraftPolicy,
    rtt_s: float,
    step_s: float,
    pass_s: float,
    *,
    paths: Callable[[EventQueue], tuple[Path, Path]] | None = None,
    stream: Callable[[EventQueue, Path, Path], Stream] = Stream,
    run_ahead: Callable[[RunAhead], RunAheadPolicy] = run_ahead_policy,
) -> SimulatedDevice:
    """The device of the only session of a verifier, when all is over. ``paths``: up and down, in
    place of fixed delays."""
    queue = EventQueue()
    limits = Limits(context_length=_CONTEXT_LENGTH)
    engine = VerifyEngine(target.info, limits, EngineLimits(), run_ahead=run_ahead)
    verifier = SimulatedVerifier(queue, engine, target, PassTime(queue, lambda batch: pass_s))
    session = DraftSession(opened, policy, ReconnectPolicy(), drafter.info.context_length)
    ways = (
        (FixedDelay(queue, rtt_s / 2), FixedDelay(queue, rtt_s / 2))
        if paths is None
        else paths(queue)
    )

    def connect() -> tuple[Stream, float]:
        made = stream(queue, *ways)
        verifier.accept(made)
        return made, rtt_s

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: step_s, connect)
    device.start()
    queue.run(until_s=_LONGEST_S)
    ended = device.delivery.ended
    if ended is None or isinstance(ended, Fail):
        raise RuntimeError(f"the session did not finish: {ended}")
    return device


def play(
    source: TokenSource,
    request: Request,
    policy: DraftPolicy | None,
    run_ahead: RunAhead,
    setting: Setting,
) -> Played:
    """Generate ``request``; ``policy`` None only streams. Raises ``RuntimeError`` when the session
    fails, which no link of ``setting`` can make it do."""
    target = source.target()
    opened = Open(
        "one",
        "",
        "",
        request.prompt,
        sampling=request.sampling,
        run_ahead=run_ahead,
        drafting=policy is not None,
    )
    up: list[_Counting] = []

    def paths(queue: EventQueue) -> tuple[Path, Path]:
        up.append(_Counting(queue, LinkModel(setting.up, SharedQueue(setting.up_bits_per_s))))
        return up[0], OneHop(queue, LinkModel(setting.down))

    device = alone(
        target,
        source.drafter(),
        opened,
        policy or named_policy(),
        setting.rtt_s,
        setting.step_s,
        setting.pass_s,
        paths=paths,
    )
    counters = device.session.counters
    return Played(
        tuple(device.delivery.times_s),
        counters.passes,
        counters.wasted,
        up[0].sent_bytes + up[0].sent * setting.up.overhead_bytes,
        counters.tried,
        counters.hits,
    )
