"""The laws of a world find what they are there to find.

Oracle: every mutant, a plausible mistake of a simulator, breaks a law within one small world; the
world without it breaks none.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.arms import Arm
from edgespec.core.link_model import LinkModel
from edgespec.core.protocol.messages import Commit
from edgespec_sim.links.path import OneHop
from edgespec_sim.scenario.sections import DeviceSection, LinkSection, Scenario, WorkloadSection
from edgespec_sim.sessions import SimulatedDevice, Stream
from edgespec_sim.world.conservation import ConservationError, Way
from edgespec_sim.world.run import Job, play
from edgespec_sim.world.user import User
from tests.mutants import Mutants

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
NUMBERS = itertools.count()


def watched() -> None:
    play(Job(WORLD, Arm.EDGESPEC, 0, 1, Path()))


MUTANTS = Mutants()


@MUTANTS.of(LinkModel, "arrival")
def a_link_without_propagation(arrival: Any, link: LinkModel, now_s: float, size: int) -> float:
    return now_s


@MUTANTS.of(LinkModel, "arrival")
def messages_overtake(arrival: Any, *given: Any) -> Any:
    return arrival(*given) + (0.2 if next(NUMBERS) % 50 == 49 else 0.0)


@MUTANTS.of(OneHop, "send")
def messages_arrive_twice(send: Any, *given: Any) -> None:
    send(*given)
    send(*given)


@MUTANTS.of(OneHop, "send")
def messages_get_lost(send: Any, *given: Any) -> None:
    if next(NUMBERS) % 40 != 39:
        send(*given)


@MUTANTS.of(Stream, "send_down")
def commits_are_made_up_on_the_way(send_down: Any, stream: Stream, message: Any) -> None:
    """A token delivered before the verifier has committed it."""
    if isinstance(message, Commit):
        message = replace(message, tokens=(*message.tokens, 7))
    send_down(stream, message)


@MUTANTS.of(Stream, "_arrive_down")
def a_message_changes_on_the_way(arrive_down: Any, stream: Stream, message: Any) -> None:
    if isinstance(message, Commit):
        message = replace(message, tokens=message.tokens[::-1])
    arrive_down(stream, message)


@MUTANTS.of(User, "_energy_j")
def drafting_is_counted_twice(energy_j: Any, user: User, device: SimulatedDevice) -> Any:
    device.drafting_s *= 4.0
    return energy_j(user, device)


@pytest.mark.parametrize("name", [*MUTANTS])
def test_a_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS.make(name, monkeypatch)
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
