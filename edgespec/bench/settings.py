"""What a bench is asked to do, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from edgespec.bench.arms import Arm
from edgespec.core.device.policy import MAX_GAMMA
from edgespec.core.device.policy_names import DEFAULT_POLICY, PolicyName
from edgespec.core.device.preference import Prefer
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.sampling import SamplingParams

MAX_RTT_MS = 10_000.0
MAX_REPEATS = 1000
MAX_PACE_MS = 60_000.0


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Raises ``ValueError`` naming the setting, the value and the limit."""

    arms: tuple[Arm, ...] = tuple(Arm)
    rtts_ms: tuple[float, ...] = (2.0, 20.0, 50.0, 100.0, 200.0)
    repeats: int = 1
    prompt_limit: int = 9
    """Use the first so many prompts that fit into the models' context."""
    max_tokens: int = 96
    temperature: float = 0.0
    seed: int = 0
    pass_ms: float = 25.0
    """Emulated time of a target pass; 0 is as fast as the machine goes."""
    draft_ms: float = 8.0
    """The same for a draft step."""
    policy: PolicyName = DEFAULT_POLICY
    """By which the arm ``edgespec`` drafts."""
    prefer: Prefer = Prefer.SPEED
    """What its drafts have to be worth."""
    gamma: int | None = None
    """Draft length of stop-and-wait; None looks for the best one."""

    def __post_init__(self) -> None:
        for rtt_ms in self.rtts_ms:
            bounded("rtt-ms", rtt_ms, 0.0, MAX_RTT_MS)
        bounded("repeats", self.repeats, 1, MAX_REPEATS)
        bounded("limit", self.prompt_limit, 1, 100_000)
        bounded("max-tokens", self.max_tokens, 2, 1 << 20)
        bounded("pass-ms", self.pass_ms, 0.0, MAX_PACE_MS)
        bounded("draft-ms", self.draft_ms, 0.0, MAX_PACE_MS)
        if self.gamma is not None:
            bounded("gamma", self.gamma, 1, MAX_GAMMA)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens
        )

    @property
    def emulated(self) -> bool:
        return self.pass_ms > 0 or self.draft_ms > 0

    @property
    def timing(self) -> str:
        """What the times of a result are times of; belongs beside every one of them."""
        passes = f"target {self.pass_ms:g} ms a pass" if self.pass_ms else "target as fast as it is"
        steps = f"draft {self.draft_ms:g} ms a step" if self.draft_ms else "draft as fast as it is"
        if self.policy is not DEFAULT_POLICY or self.prefer is not Prefer.SPEED:
            steps += f"; edgespec drafts by {self.policy.value} and prefers {self.prefer.value}"
        return f"{'emulated' if self.emulated else 'real'} pass time: {passes}, {steps}"
