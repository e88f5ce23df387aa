"""Prefill progress, from the verifier's passes to the device's patience: a prompt that is being
computed counts as progress.

Oracle: virtual times and counts by hand. An old device, which does not support the field, is one
whose messages arrive without it.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.core.device import events as ev
from edgespec.core.device.comparison_policies import FixedPolicy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Commit, Downlink, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.cost_profile import constant_law
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.links.path import HopPath
from edgespec_sim.sessions import SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.world.site import Machine
from tests.core.draft_scripts import GREETING, REQUEST, new_streaming_session
from tests.core.scenes import PacedEngine

LONG = replace(REQUEST, prompt=(1,) * 7_000, drafting=False)
WIDE = Limits(context_length=8_192)
GREETED = replace(GREETING, position=7_000)


class OldStream(Stream):
    """A stream whose device does not support the field."""

    def send_down(self, message: Downlink) -> None:
        super().send_down(replace(message, read=0) if isinstance(message, Commit) else message)


def read_on(session: DraftSession, count: int, now: float) -> ev.DraftAction | None:
    """Tick at each deadline until ``now``, then handle a commit that reports ``count`` computed
    prompt rows. Return the failure if a deadline ended the session, else None."""
    while session.deadline is not None and session.deadline <= now:
        for action in session.handle(ev.Tick(), session.deadline):
            if isinstance(action, ev.Fail):
                return action
    session.handle(Commit(7_000, (), read=count), now)
    return None


def test_a_device_waits_as_long_as_its_prompt_is_read() -> None:
    session = new_streaming_session(request=LONG, limits=WIDE, greeting=GREETED)
    for step in range(1, 70):
        assert read_on(session, 100 * step, 20.0 * step) is None
        assert session.counters.prompt_read == 100 * step
    session.handle(Commit(7_000, (5,)), 1_400.0)
    assert session.prefix.length == 7_001


@pytest.mark.parametrize(
    "counts", [[0], [512], [512, 256, 512, 128], [1 << 31]], ids=["none", "same", "again", "beyond"]
)
def test_a_verifier_that_reads_nothing_more_makes_no_progress(counts: list[int]) -> None:
    """Computing lost rows again is no progress either, nor is an impossible count."""
    session, last = new_streaming_session(request=LONG, limits=WIDE, greeting=GREETED), None
    for step in range(1, 40):
        last = read_on(session, counts[step % len(counts)], 20.0 * step)
        if last is not None:
            break
    assert isinstance(last, ev.Fail)
    assert 5 <= step <= 7
    assert last.why.startswith("no new token from the verifier for 100 s")
    where = f"its prefill stopped at {min(max(counts), 7_000)} tokens of the prompt"
    assert (where in last.why) is (max(counts) > 0)


def test_a_verifier_says_how_much_it_has_read_and_not_too_often() -> None:
    said: list[Commit] = []

    class Listening(PacedEngine):
        def _do(self, actions: tuple[ee.EngineAction, ...]) -> None:
            for action in actions:
                match action:
                    case ee.SendTo(_, Commit(tokens=(), finish=None) as commit):
                        said.append(commit)
            super()._do(actions)

    slow = Listening(0.01)  # some five seconds for 512 rows
    slow.open("s", 7_000)
    while not slow.tokens["s"]:
        slow.run_pass()
    assert [commit.read for commit in said] == [*range(512, 7_000, 512)]
    assert {commit.position for commit in said} == {7_000}
    said.clear()
    fast = Listening(0.0001)
    fast.open("s", 7_000)
    while not fast.tokens["s"]:
        fast.run_pass()
    assert len(said) <= fast.now


@pytest.mark.parametrize("device_knows", [True, False])
def test_a_prompt_that_takes_longer_than_the_patience_of_a_device(device_knows: bool) -> None:
    """A device that does not support the field gives up as before."""
    queue, model = EventQueue(), ToyModel(vocabulary_size=16, order=2, seed=3)
    target, drafter = ToyTarget(model), ToyDrafter(model)
    request = Open("s", "", "", (1,) * 400, sampling=SamplingParams(max_tokens=3), drafting=False)
    bounds = ee.EngineLimits(max_rows_per_session=10)
    engine = VerifyEngine(target.info, Limits(context_length=4096), bounds)
    verifier = SimulatedVerifier(queue, engine, target, Machine(queue, constant_law(15.0), ""))
    session = DraftSession(request, FixedPolicy(), ReconnectPolicy(), 4096)

    def connect() -> tuple[Stream, float]:
        kind = Stream if device_knows else OldStream
        made = kind(queue, HopPath(queue, fixed_s=0.01), HopPath(queue, fixed_s=0.01))
        verifier.accept(made)
        return made, 0.02

    device = SimulatedDevice(queue, session, drafter, lambda kept, fed: 0.0, connect)
    device.start()
    queue.run(until_s=2_000.0)  # 40 passes of 15 s
    ended = device.delivery.ended
    assert isinstance(ended, ev.Finish if device_knows else ev.Fail), ended
    assert len(device.delivery.tokens) == (3 if device_knows else 0)
    assert verifier.stream_count == 0  # also the streams that the device has given up
