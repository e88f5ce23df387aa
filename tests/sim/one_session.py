"""One session on one link, in virtual time: a request played by the product's own sessions."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.core.device.estimates import KeptEstimates, VerifierEstimates
from edgespec.core.device.events import Fail
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import Drafter, TargetModel, count_places
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec_sim.cost_profile import constant_law
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import HopPath
from edgespec_sim.sessions import SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.world.site import Machine

# A session that has not ended by then is stuck: no setting takes seconds per token.
_LONGEST_S = 1e6
_CONTEXT_LENGTH = 1 << 24


def play_alone(
    target: TargetModel,
    drafter: Drafter,
    opened: Open,
    policy: DraftPolicy,
    rtt_s: float,
    step_s: float,
    pass_s: float,
    learned: KeptEstimates | None = None,
    verifier: VerifierEstimates | None = None,
    text: TextTables | None = None,
    arrange: Callable[[EventQueue, Machine], None] = lambda queue, machine: None,
    row_s: float = 0.0,
) -> SimulatedDevice:
    """Play the only session of a verifier to its end; return its device.

    ``learned`` and ``verifier`` hold the estimates from earlier sessions of the device, ``text``
    the tables of its lookup. ``arrange`` is called at the beginning and may plan changes of the
    verifier's machine. ``row_s`` is what each further row adds to a draft step, up to 16."""
    queue = EventQueue()
    limits = Limits(context_length=_CONTEXT_LENGTH)
    engine = VerifyEngine(target.info, limits, EngineLimits())
    machine = Machine(queue, constant_law(pass_s), "")
    arrange(queue, machine)
    site = SimulatedVerifier(queue, engine, target, machine)
    session = DraftSession(
        opened,
        policy,
        ReconnectPolicy(),
        drafter.info.context_length,
        verifier=verifier,
        learned=learned,
        text=text,
        draft_places=count_places(drafter),
    )

    def connect() -> tuple[Stream, float]:
        made = Stream(queue, HopPath(queue, fixed_s=rtt_s / 2), HopPath(queue, fixed_s=rtt_s / 2))
        site.accept(made)
        return made, rtt_s

    def step_of(kept: int, rows: int) -> float:
        return step_s + row_s * (min(rows, 16) - 1)

    device = SimulatedDevice(queue, session, drafter, step_of, connect)
    device.start()
    queue.run(until_s=_LONGEST_S)
    ended = device.delivery.ended
    if ended is None or isinstance(ended, Fail):
        raise RuntimeError(f"the session did not finish: {ended}")
    return device
