"""What a random world is made of, and what is known when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from edgespec.core.device.events import DraftCounters
from edgespec.core.device.policy import DraftPolicy, WindowedPolicy
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import ToyDrafter
from tests.sim.faults.checks import Expected

DrafterFactory = Callable[[ToyModel], Drafter]


def good_drafter(model: ToyModel) -> Drafter:
    """Right about eight times of ten."""
    return ToyDrafter(model.perturbed(0.3))


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """Everything but the dice. Times in seconds; chances per message or pass."""

    model: ToyModel = field(default_factory=lambda: ToyModel(vocabulary_size=8, order=2))
    drafter: DrafterFactory = good_drafter
    policies: tuple[DraftPolicy, ...] = (WindowedPolicy(),)
    """One a device."""
    credentials: tuple[Credential, ...] = (ANYBODY,)
    """What the devices show, in turn."""
    prompt_length: int = 3
    shared_length: int = 0
    """Of the prompt, as many tokens are the same for all devices."""
    chat: bool = False
    """Each device but the first goes on with the text of the one before it, once that is whole:
    its prompt is that text and ``prompt_length`` tokens, if the context has room for it."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=24))
    """Device i adds i to its seed."""
    run_ahead: RunAhead = RunAhead.AUTO
    drafting: bool = True
    draft_context_length: int = 1 << 16
    limits: Limits = field(default_factory=lambda: Limits(lease_s=5.0))
    engine_limits: EngineLimits = field(default_factory=EngineLimits)
    delay_s: float = 0.02
    """One way; a connection takes two."""
    jitter_s: float = 0.0
    """Added to a message's delay, uniformly from 0; order is kept."""
    step_s: float = 0.005
    pass_s: float = 0.02
    row_s: float = 0.0
    """Added to a pass for each row."""
    faults_until_s: float = 1.0
    cuts: int = 0
    """Broken links of each device, and processes of it that are replaced."""
    replacements: int = 0
    restarts: int = 0
    """Of the verifier, which then cannot be reached for up to ``downtime_s``."""
    downtime_s: float = 0.3
    duplicate_chance: float = 0.0
    forge_chance: float = 0.0
    """A draft is followed by one that nobody sent."""
    batch_failure_chance: float = 0.0
    """Of passes with more than one session."""
    target_failure_chance: float = 0.0
    """Of each operation of the target, before it and after it."""
    session_failure_chance: float = 0.0
    """Of each time that a session's machine asks its acceptance rule or its run-ahead policy."""

    resident_bytes: Callable[[float], int] | None = None
    """What every device's process holds beside its draft, by the time, of ``governors.BUDGET``;
    with one leaf a step only."""

    @property
    def quiet(self) -> bool:
        """Nothing goes wrong in this world."""
        chances = (
            self.duplicate_chance,
            self.forge_chance,
            self.batch_failure_chance,
            self.target_failure_chance,
            self.session_failure_chance,
        )
        return not (self.cuts or self.replacements or self.restarts or any(chances))


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """One device's generation: what it had to deliver (and did), and its counters (those of its
    last process)."""

    expected: Expected
    counters: DraftCounters
    ended_s: float


@dataclass(frozen=True, slots=True)
class WorldResult:
    devices: tuple[DeviceResult, ...]
    passes: int
    """Of all verifiers, and the rows they had."""
    rows: int
    faults: int
    """Faults that took place."""
    evictions: int
    """Sessions that lost their cache to others, at the last verifier."""
    hit_tokens: int
    """Committed tokens that the last verifier found cached and did not compute."""
