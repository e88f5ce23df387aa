"""What a bench is asked to do, checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from edgespec.bench.arms import Arm, arm_settings
from edgespec.bench.measurement import GAMMAS, PROMPT_COUNT
from edgespec.core.device.policy import best_gamma
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.estimators import GUESSED_PASS_S
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import AgentOptions

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

    def __post_init__(self) -> None:
        for rtt_ms in self.rtts_ms:
            bounded("rtt-ms", rtt_ms, 0.0, MAX_RTT_MS)
        bounded("repeats", self.repeats, 1, MAX_REPEATS)
        bounded("limit", self.prompt_limit, 1, 100_000)
        bounded("max-tokens", self.max_tokens, 2, 1 << 20)
        bounded("pass-ms", self.pass_ms, 0.0, MAX_PACE_MS)
        bounded("draft-ms", self.draft_ms, 0.0, MAX_PACE_MS)

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
        return f"{'emulated' if self.emulated else 'real'} pass time: {passes}, {steps}"


# --- how long a bench will take, roughly, before anything is known of the models ---------------
# Independent acceptances at a usual rate; a miss costs a round. Only good for choosing when to
# come back: nothing measured depends on it.


ASSUMED_ACCEPTANCE = 0.8
WARM_UP_TOKENS = 8

# Where the draft is not paced: a small model on a laptop.
_ASSUMED_STEP_S = 0.005
_LOADING_S = 10.0
_OVERHEAD = 1.15


def bench_s(settings: BenchSettings) -> float:
    """The whole run; the prompts are taken to be as many as allowed and to end at max_tokens."""
    prompts, tokens = settings.prompt_limit, settings.max_tokens
    plain_s = request_s(settings, Arm.TARGET_ONLY, 0.0, tokens)
    total_s = _LOADING_S + prompts * plain_s
    if Arm.VANILLA in settings.arms:
        sweep = len(GAMMAS) * min(PROMPT_COUNT, prompts)
        total_s += sweep * 1.3 * plain_s  # short drafts gain, long ones lose
    for arm in settings.arms:
        for rtt_ms in settings.rtts_ms:
            total_s += request_s(settings, arm, rtt_ms, min(tokens, WARM_UP_TOKENS))
            total_s += settings.repeats * prompts * request_s(settings, arm, rtt_ms, tokens)
    return _OVERHEAD * total_s


def request_s(settings: BenchSettings, arm: Arm, rtt_ms: float, tokens: int) -> float:
    """Connect, prefill, and ``tokens`` tokens."""
    pass_s = settings.pass_ms / 1e3 or GUESSED_PASS_S
    return 2 * rtt_ms / 1e3 + pass_s + tokens * tpot_s(settings, arm, rtt_ms)


def tpot_s(settings: BenchSettings, arm: Arm, rtt_ms: float) -> float:
    """Expected time per token of an arm."""
    pass_s = settings.pass_ms / 1e3 or GUESSED_PASS_S
    step_s = settings.draft_ms / 1e3 or _ASSUMED_STEP_S
    rate, round_s = ASSUMED_ACCEPTANCE, pass_s + rtt_ms / 1e3
    streamed_s = (1 - rate) * (round_s + step_s) + rate * step_s
    match arm:
        case Arm.TARGET_ONLY:
            return pass_s
        case Arm.VANILLA:
            gamma = best_gamma(rate, step_s, round_s)
            return (gamma * step_s + round_s) * (1 - rate) / (1 - rate ** (gamma + 1))
        case Arm.PEARL:
            return 1.2 * streamed_s  # its drafts wait for the round before
        case Arm.WINDOWED:
            return streamed_s
        case Arm.EDGESPEC:
            return min(pass_s, streamed_s)
        case _:
            assert_never(arm)


# -----------------------------------------------------------------------------------------------
# The arms of a bench as options of an agent, and the lists of arms and round trips of its user.


def arm_options(arm: Arm, gamma: int | None = None) -> AgentOptions:
    """``gamma`` is the draft length of ``vanilla``; the other arms do not look at it."""
    settings = arm_settings(arm, gamma)
    return AgentOptions(settings.policy, settings.run_ahead)


def parse_arms(text: str) -> tuple[Arm, ...]:
    """A comma-separated list of names. Raises ``ValueError`` for an unknown or repeated one."""
    arms = tuple(_arm(name.strip()) for name in text.split(",") if name.strip())
    _distinct("arms", [arm.value for arm in arms])
    return arms


def parse_rtts_ms(text: str) -> tuple[float, ...]:
    """A comma-separated list of round-trip times. Raises ``ValueError``."""
    try:
        rtts_ms = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"rtt-ms is {text!r}, but must be numbers with commas between") from None
    _distinct("rtt-ms", [f"{rtt_ms:g}" for rtt_ms in rtts_ms])
    return rtts_ms


def rotated(arms: Sequence[Arm], by: int) -> tuple[Arm, ...]:
    """The same arms from another start: none is always the one that runs first."""
    by %= len(arms)
    return (*arms[by:], *arms[:by])


def _arm(name: str) -> Arm:
    try:
        return Arm(name)
    except ValueError:
        known = ", ".join(arm.value for arm in Arm)
        raise ValueError(f"arm {name!r} is unknown; there are {known}") from None


def _distinct(what: str, names: Sequence[str]) -> None:
    if not names:
        raise ValueError(f"{what} is empty, but must name at least one")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{what} names {', '.join(twice)} more than once")
