"""A device whose draft model cannot get ahead of its verifier does not run it, and comes back.

Oracle: the target's own text; draft steps counted by a drafter of the test; a verifier that is
slow, fast, or becomes slow in the middle of an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from edgespec.core.device.estimates import (
    TRIAL_EVERY,
    KeptEstimates,
    ModelRest,
    VerifierEstimates,
)
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.ports import Cancelled, never_cancelled
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.protocol.work import Candidate
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.cost_profile import constant_law
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import SimulatedDevice
from edgespec_sim.world.site import Machine
from tests.sim.one_session import play_alone

MODEL = ToyModel(vocabulary_size=64, order=3, sharpness=2.0)
DRAFT = MODEL.perturbed(0.25)
PROMPT = tuple(range(40))
TOKENS, STEP_S = 120, 0.008
SLOW_S, FAST_S = 0.040, 0.004
NEAR_S, FAR_S = 0.004, 0.100


class CountingDrafter(ToyDrafter):
    """A toy draft that counts its steps and the tokens that they are fed."""

    def __init__(self) -> None:
        super().__init__(DRAFT)
        self.steps = self.fed = 0

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        self.steps += 1
        self.fed += len(feed)
        return super().step(keep_length, feed, width, cancelled)


class Device:
    """A device that generates one output after another and keeps its estimates."""

    def __init__(self, text: TextTables | None = None) -> None:
        self.learned, self.verifier, self._text = KeptEstimates(), VerifierEstimates(), text
        self._count = 0

    def generate(
        self,
        pass_s: float,
        rtt_s: float,
        arrange: Callable[[EventQueue, Machine], None] = lambda queue, machine: None,
        *,
        loops: bool = False,
    ) -> tuple[CountingDrafter, SimulatedDevice]:
        """Generate one output; return its drafter and the device at its end."""
        drafter = CountingDrafter()
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        if not loops:
            self._count += 1
            sampling = SamplingParams(
                temperature=1.0, seed=self._count, max_tokens=TOKENS, ignore_eos=True
            )
        played = play_alone(
            ToyTarget(MODEL),
            drafter,
            Open("s", "", "", PROMPT, sampling=sampling),
            GoodputPolicy(),
            rtt_s,
            STEP_S,
            pass_s,
            self.learned,
            self.verifier,
            self._text,
            arrange,
        )
        assert len(played.delivery.tokens) == TOKENS
        return drafter, played


@pytest.mark.parametrize("rtt_s", [NEAR_S, FAR_S])
def test_a_model_that_can_get_ahead_is_used_in_every_generation(rtt_s: float) -> None:
    device = Device()
    for _ in range(3):
        drafter, played = device.generate(SLOW_S, rtt_s)
        assert drafter.steps > TOKENS // 2
        assert played.session.counters.accepted > TOKENS // 10


@pytest.mark.parametrize("rtt_s", [NEAR_S, FAR_S])
def test_a_model_that_cannot_get_ahead_does_not_run(rtt_s: float) -> None:
    """A token of the verifier takes half of a draft step. The first generation measures that. Then
    the model is tried after 1, 2, 4, 8 and 16 generations; in the others it computes nothing, not
    even the prompt."""
    device = Device()
    drafters = [device.generate(FAST_S, rtt_s)[0] for _ in range(18)]
    tried = [number for number, one in enumerate(drafters) if one.steps or one.fed]
    assert tried == [0, 1, 2, 4, 8, 16]
    assert all(drafters[number].steps <= 9 for number in tried[1:]), "one in 8 of 64 positions"


def test_trials_go_on_for_ever() -> None:
    rest, trials = ModelRest(), list[int]()
    for number in range(1, 6 * TRIAL_EVERY):
        rest.begin_generation(is_hopeless=True)
        if rest.is_trial:
            trials.append(number)
    assert trials == [1, 2, 4, 8, 16, 32, 64, 96, 128, 160]
    rest.begin_generation(is_hopeless=False)
    assert rest.is_trial


def test_a_device_whose_model_rests_sends_what_it_knows() -> None:
    """The greedy text of a small toy repeats itself, so lookup has it."""
    device = Device(TextTables(ngrams=True))
    for _ in range(5):
        device.generate(FAST_S, NEAR_S, loops=True)
    drafter, played = device.generate(FAST_S, NEAR_S, loops=True)  # the sixth one is no trial
    assert drafter.steps == drafter.fed == 0
    counters = played.session.counters
    assert counters.accepted > TOKENS // 2
    assert counters.passes < TOKENS // 2


def test_a_device_comes_back_when_the_verifier_becomes_slow() -> None:
    """The verifier is loaded from the middle of an output on, and later idle again."""
    device = Device()
    while (drafter := device.generate(FAST_S, NEAR_S)[0]).steps:
        pass
    loaded_at_s = FAST_S * TOKENS / 2

    def load(queue: EventQueue, machine: Machine) -> None:
        def slow_down() -> None:
            machine.law = constant_law(SLOW_S)

        queue.at(loaded_at_s, slow_down)

    drafter, played = device.generate(FAST_S, NEAR_S, load)
    accepted_at_s = [
        at_s
        for at_s, kind in zip(played.delivery.times_s, played.delivery.kinds, strict=True)
        if kind.value == "accepted"
    ]
    assert drafter.steps > TOKENS // 8
    assert min(accepted_at_s) > loaded_at_s
    assert len(accepted_at_s) > TOKENS // 8
    steps = [device.generate(FAST_S, NEAR_S)[0].steps for _ in range(6)]
    assert 0 in steps, steps
