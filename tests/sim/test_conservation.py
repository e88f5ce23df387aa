"""The laws of a world find what they are there to find.

Oracle: every mutant, a plausible mistake of a simulator, breaks a law within one small world; the
world without it breaks none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.link_model import LinkModel, SharedQueue
from edgespec.core.protocol.messages import Commit, Downlink
from edgespec_sim.links.path import OneHop
from edgespec_sim.scenario.sections import DeviceSection, LinkSection, Scenario, WorkloadSection
from edgespec_sim.sessions import SimulatedDevice
from edgespec_sim.world.conservation import ConservationError, Way
from edgespec_sim.world.meters import MeteredStream
from edgespec_sim.world.run import Job, play
from edgespec_sim.world.user import User

WORLD = Scenario(
    name="watched",
    duration_s=4.0,
    arms=(Arm.EDGESPEC,),
    links={"wan": LinkSection(rtt_ms=30.0, jitter_ms=1.0, up_mbps=0.3, down_mbps=0.3, shared=True)},
    devices={
        "laptop": DeviceSection(
            count=3,
            path=("wan",),
            draft_w=10.0,
            workload=WorkloadSection(
                prompt_tokens=16, output_tokens=64, think_s=0.1, start_within_s=0.1
            ),
        )
    },
)
Patch = Callable[[pytest.MonkeyPatch], None]


def watched() -> None:
    play(Job(WORLD, Arm.EDGESPEC, 0, 1, Path()))


def a_link_without_propagation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkModel, "arrival", lambda self, now_s, size_bytes: now_s)


def everyone_gets_the_full_rate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SharedQueue, "first_free_s", lambda self, now_s, ready_s, size_bytes: ready_s)


def a_queue_faster_than_its_rate(patch: pytest.MonkeyPatch) -> None:
    original = SharedQueue.serialisation_s
    patch.setattr(
        SharedQueue,
        "serialisation_s",
        lambda self, start_s, size: 0.5 * original(self, start_s, size),
    )


def messages_overtake(patch: pytest.MonkeyPatch) -> None:
    original = LinkModel.arrival
    count = iter(range(1_000_000))

    def arrival(self: LinkModel, now_s: float, size_bytes: int) -> float:
        return original(self, now_s, size_bytes) + (0.2 if next(count) % 50 == 49 else 0.0)

    patch.setattr(LinkModel, "arrival", arrival)


def messages_arrive_twice(patch: pytest.MonkeyPatch) -> None:
    original = OneHop.send

    def send(self: OneHop, size_bytes: int, deliver: Callable[[], None]) -> None:
        original(self, size_bytes, deliver)
        original(self, size_bytes, deliver)

    patch.setattr(OneHop, "send", send)


def messages_get_lost(patch: pytest.MonkeyPatch) -> None:
    original = OneHop.send
    count = iter(range(1_000_000))

    def send(self: OneHop, size_bytes: int, deliver: Callable[[], None]) -> None:
        if next(count) % 40 != 39:
            original(self, size_bytes, deliver)

    patch.setattr(OneHop, "send", send)


def commits_are_made_up_on_the_way(patch: pytest.MonkeyPatch) -> None:
    """A token delivered before the verifier has committed it."""
    original = MeteredStream.send_down

    def send_down(self: MeteredStream, message: Downlink) -> None:
        if isinstance(message, Commit):
            message = replace(message, tokens=(*message.tokens, 7))
        original(self, message)

    patch.setattr(MeteredStream, "send_down", send_down)


def a_message_changes_on_the_way(patch: pytest.MonkeyPatch) -> None:
    original = MeteredStream._arrive_down

    def arrive(self: MeteredStream, message: Downlink) -> None:
        if isinstance(message, Commit):
            message = replace(message, tokens=message.tokens[::-1])
        original(self, message)

    patch.setattr(MeteredStream, "_arrive_down", arrive)


def drafting_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    original = User._energy_j

    def energy_j(self: User, device: SimulatedDevice) -> float:
        device.drafting_s *= 4.0
        return original(self, device)

    patch.setattr(User, "_energy_j", energy_j)


MUTANTS: Sequence[Patch] = (
    a_link_without_propagation,
    everyone_gets_the_full_rate,
    a_queue_faster_than_its_rate,
    messages_overtake,
    messages_arrive_twice,
    messages_get_lost,
    commits_are_made_up_on_the_way,
    a_message_changes_on_the_way,
    drafting_is_counted_twice,
)


@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_a_mutant_is_caught(mutate: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch)
    with pytest.raises(ConservationError):
        watched()


def test_the_watch_is_on_in_small_worlds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    original = Way.arrived

    def arrived(self: Way, message: object, now_s: float) -> None:
        seen.append(message)
        original(self, message, now_s)

    monkeypatch.setattr(Way, "arrived", arrived)
    watched()
    assert len(seen) > 100
