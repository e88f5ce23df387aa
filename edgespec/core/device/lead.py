"""The lead: whether a device can be ahead of its verifier, and what that brings.

Theory of operation. A verifier decodes on while a device drafts. So a draft node is of use only if
it arrives before the verifier has decoded its position. After a token that was drafted wrongly both
begin again at the same place, but the device receives it half a round trip later, and its nodes
travel for another half. If the next n drafted tokens are right, the last one is committed

    n * token_s             after that, if the verifier decodes it by itself
    n * draft_s + rtt_s     after that, if it comes from the device (both plus one pass)

so drafts bring something only in runs of more right tokens than the *lead*

    m = rtt_s / (token_s - draft_s),        never if draft_s >= token_s.

With a token in 25 ms, drafted tokens of 8 ms and a round trip of 50 ms, m is 2.9.

**Runs.** With acceptance rate a, a run has n right tokens or more with chance a**n, as if places
were independent of one another. Real texts are easy or hard for a while, and a second candidate
may continue a run, which makes long runs more frequent (docs/measurements/lead.md).

**Speed.** Let the verifier's passes begin at i * pass_s after the wrong token, and let arrived(t)
be the number of drafted tokens that are there at t. Where they are all right, pass i ends with

    p_0 = 0,    p_(i+1) = max(p_i, arrived(i * pass_s)) + s,    s = pass_s / token_s

committed tokens. A run of n tokens, and the wrong one behind it, takes as many passes as it takes
p_i to exceed n. So the mean number of passes is the sum over i of the chance of a run of p_i tokens
or more. The device is as many times as fast as this sum is smaller than the one without drafts, in
which p_i is i * s.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from edgespec.core.device.estimates import DraftEstimates

_NEGLIGIBLE: Final = 1e-4
"""Chance of a run below which longer runs are not followed."""
_MAX_PASSES: Final = 4096
_MIN_DURATION_S: Final = 1e-6
_MAX_RATE: Final = 0.995


@dataclass(frozen=True, slots=True)
class DraftingCase:
    """A device, its verifier and the link between them. Times are in seconds."""

    token_s: float
    """Time in which the verifier makes a token without this device: a pass divided by the tokens
    that its own drafts bring."""
    step_s: float
    """Duration of a draft step; 0 for text lookup and predictions."""
    rtt_s: float
    acceptance: float
    """Share of the first candidates that are the target's token, from 0 to 1."""
    tokens_per_step: int = 1
    """Tokens that a draft step drafts in a row."""
    pass_s: float = 0.0
    """Duration of a pass; 0: ``token_s``, so that the verifier has no drafts of its own."""

    @property
    def draft_s(self) -> float:
        """Seconds that a drafted token costs the device."""
        return self.step_s / self.tokens_per_step

    @property
    def lead_tokens(self) -> float:
        """Right tokens in a row that it takes to be ahead; infinite if the device never is."""
        gained_s = self.token_s - self.draft_s
        return self.rtt_s / gained_s if gained_s > 0.0 else math.inf

    @property
    def lead_chance(self) -> float:
        """Chance that a run is that long."""
        return self.run_chance(self.lead_tokens)

    def run_chance(self, tokens: float) -> float:
        """Return the chance that a run has this many right tokens or more."""
        return math.pow(min(self.acceptance, _MAX_RATE), tokens)


@dataclass(frozen=True, slots=True)
class Lead:
    """The lead that a device needs, and what its drafts bring."""

    tokens: float
    """Right tokens in a row that it takes to be ahead; infinite if the device never is."""
    chance: float
    """Chance that a run is that long."""
    speedup: float
    """Estimated speed with the device's drafts, in times of the verifier's own."""


def find_case(estimates: DraftEstimates) -> DraftingCase | None:
    """Return the case that a device has measured; None until it has timed passes, commits, draft
    steps and the round trip.

    A verifier whose passes all had nodes of the device has shown no speed of its own. Then its
    commits count without the device's tokens."""
    timed = estimates.pass_s, estimates.step_s, estimates.rtt_s
    token_s = estimates.own_speed.token_s
    if token_s is None and estimates.commit_s.count:
        token_s = estimates.commit_s.get(0.0) / max(1.0, estimates.server_tokens.get(1.0))
    if token_s is None or not all(one.count for one in timed):
        return None
    pass_s, step_s, rtt_s = (one.get(0.0) for one in timed)
    if (places := estimates.max_places) > 1:
        step_s = places * estimates.position_s(pass_s, places)
    return DraftingCase(
        token_s=max(_MIN_DURATION_S, token_s),
        step_s=step_s,
        rtt_s=rtt_s,
        acceptance=estimates.acceptance.rate(0),
        tokens_per_step=places,
        pass_s=pass_s,
    )


def find_lead(case: DraftingCase) -> Lead:
    """Return the lead that a device needs, its chance, and the speed with drafts.

    Source: the formulas above. ``docs/measurements/lead.md`` compares them with played sessions."""
    if math.isinf(tokens := case.lead_tokens):
        return Lead(tokens, 0.0, 1.0)
    return Lead(tokens, case.lead_chance, _estimate_speedup(case))


def _estimate_speedup(case: DraftingCase) -> float:
    pass_s = max(case.pass_s or case.token_s, _MIN_DURATION_S)
    per_pass = max(1.0, pass_s / max(case.token_s, _MIN_DURATION_S))
    streaming = _count_passes(case, lambda index: 0.0, per_pass)

    def arrived(at_s: float) -> float:
        if at_s < case.rtt_s:
            return 0.0
        steps = (at_s - case.rtt_s) / max(case.step_s, _MIN_DURATION_S)
        return case.tokens_per_step * math.floor(steps + 1e-9)

    drafting = _count_passes(case, lambda index: arrived(index * pass_s), per_pass)
    return streaming / drafting


def _count_passes(case: DraftingCase, arrived_by: Callable[[int], float], per_pass: float) -> float:
    """Return the mean number of passes for a run and the wrong token behind it."""
    total, committed = 0.0, 0.0
    for index in range(_MAX_PASSES):
        chance = case.run_chance(committed)
        total += chance
        if chance < _NEGLIGIBLE:
            break
        committed = max(committed, arrived_by(index)) + per_pass
    return total


# --- in words -----------------------------------------------------------------------------------

MIN_GAIN: Final = 0.03
"""Gain of speed below which a draft model hardly helps."""
_CLEAR_GAIN: Final = 0.10


@dataclass(frozen=True, slots=True)
class Change:
    """A change that would let more of the device's drafts arrive in time, and the lead with it."""

    name: str
    """The change in words, as in "a round trip of 10 ms instead of 50 ms"."""
    lead: Lead


NEARER: Final = 5.0
"""Times that a nearer server's round trip is shorter: in the own city instead of far away."""
QUICKER: Final = 2.0
"""Times that a quicker draft's step is shorter: half of the weights, or of their bits."""
PARALLEL_TOKENS, PARALLEL_COST = 4, 2.0
"""Tokens that a parallel draft makes in a step, and the duration of such a step in plain steps
(docs/measurements/drafts.md: 1.5 to 2.5)."""


def list_changes(case: DraftingCase) -> tuple[Change, ...]:
    """Return what would help a draft model on the device, the change that brings most first."""
    better = 1.0 - (1.0 - case.acceptance) / 2.0
    nearer_s, quicker_s = case.rtt_s / NEARER, case.step_s / QUICKER
    changed = [
        (
            f"a round trip of {_in_ms(nearer_s)} instead of {_in_ms(case.rtt_s)}",
            replace(case, rtt_s=nearer_s),
        ),
        (
            f"draft steps of {_in_ms(quicker_s)} instead of {_in_ms(case.step_s)}",
            replace(case, step_s=quicker_s),
        ),
        (
            f"a draft that is right at {better:.0%} of the places instead of {case.acceptance:.0%}",
            replace(case, acceptance=better),
        ),
    ]
    if case.tokens_per_step == 1:
        parallel = replace(
            case, step_s=PARALLEL_COST * case.step_s, tokens_per_step=PARALLEL_TOKENS
        )
        changed.append((f"a draft of {PARALLEL_TOKENS} tokens a step", parallel))
    changes = [Change(name, find_lead(other)) for name, other in changed]
    return tuple(sorted(changes, key=lambda one: -one.lead.speedup))


def describe_lead(case: DraftingCase) -> str:
    """Return in words whether a draft model on the device helps, by how much, and what would change
    it."""
    lead, best = find_lead(case), list_changes(case)[0]
    change = "Neither a nearer server nor a quicker or better draft would change that."
    if best.lead.speedup >= max(1.0 + MIN_GAIN, lead.speedup):
        change = (
            f"With {best.name} the chance would be {best.lead.chance:.2f} and the speed about"
            f" {best.lead.speedup:.2f} times."
        )
    text_lead = case.rtt_s / max(case.token_s, _MIN_DURATION_S)
    text = (
        "Text that the device has already (a prediction, a corpus) takes no draft steps:"
        f" {text_lead:.1f} right tokens in a row are enough for it."
    )
    return f"{_describe_verdict(case, lead)} {change} {text}"


def describe_lateness(case: DraftingCase) -> str:
    """Return one clause about a draft model that is hardly ever ahead of the verifier."""
    if math.isinf(case.lead_tokens):
        return (
            f"a drafted token takes {_in_ms(case.draft_s)} here, and the verifier makes one in"
            f" {_in_ms(case.token_s)} by itself, so the draft model cannot get ahead of it"
        )
    return (
        f"the draft model would have to be {case.lead_tokens:.1f} tokens ahead of the verifier, and"
        f" the chance of that is {case.lead_chance:.2f}"
    )


def _describe_verdict(case: DraftingCase, lead: Lead) -> str:
    if math.isinf(lead.tokens):
        return (
            f"No: the device drafts a token in {_in_ms(case.draft_s)} and the verifier makes one in"
            f" {_in_ms(case.token_s)} by itself, so the draft model is never ahead."
        )
    verdict = "Yes" if lead.speedup >= 1.0 + _CLEAR_GAIN else "A little"
    if lead.speedup < 1.0 + MIN_GAIN:
        verdict = "Hardly"
    return (
        f"{verdict}: the draft model has to be {lead.tokens:.1f} tokens ahead (a round trip of"
        f" {_in_ms(case.rtt_s)} / ({_in_ms(case.token_s)} a token of the verifier -"
        f" {_in_ms(case.draft_s)} a drafted token)). The chance of that is {lead.chance:.2f}, and"
        f" the speed about {lead.speedup:.2f} times that without it."
    )


def _in_ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
