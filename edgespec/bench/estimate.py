"""How long a bench will take, roughly, before anything is known of the models.

Independent acceptances at a usual rate; a miss costs a round. Only good for choosing when to
come back: nothing measured depends on it.
"""

from __future__ import annotations

from typing import assert_never

from edgespec.bench.arms import Arm
from edgespec.bench.calibration import GAMMAS, PROMPT_COUNT
from edgespec.bench.settings import BenchSettings
from edgespec.core.device.policy import best_gamma
from edgespec.core.protocol.estimators import GUESSED_PASS_S

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
    if Arm.VANILLA in settings.arms and settings.gamma is None:
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
            gamma = settings.gamma or best_gamma(rate, step_s, round_s)
            return (gamma * step_s + round_s) * (1 - rate) / (1 - rate ** (gamma + 1))
        case Arm.PEARL:
            return 1.2 * streamed_s  # its drafts wait for the round before
        case Arm.WINDOWED:
            return streamed_s
        case Arm.EDGESPEC:
            return min(pass_s, streamed_s)
        case _:
            assert_never(arm)
