"""Whether drafting is worth its cost at this moment, and why, in words for a person.

The verdict is the draft policy's own: a verifier that is busy asks a price for each row of a pass,
or takes no nodes at all, and the policy rests while no draft can pay. What else keeps a device from
drafting (no model, no memory, a text longer than the draft's context) comes before that.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import DraftCounters
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import DraftPolicy, WindowedPolicy
from edgespec.core.protocol.checks import one_line
from edgespec.telemetry.agent_status import DraftingStatus

_MAX_WHY = 200


def draft_worth(
    policy: DraftPolicy,
    price: RowPrice,
    estimates: DraftEstimates | None,
    counters: DraftCounters | None,
) -> DraftingStatus:
    """What the policy makes of the price and of what the last generation measured; ``estimates``
    and ``counters`` are None before the first."""
    found = DraftingStatus(
        None,
        "nothing was drafted yet",
        acceptance=None if counters is None else counters.acceptance,
        least_chance=price.least_chance,
        credit=price.credit,
    )
    if estimates is None or counters is None:
        return found
    found = replace(
        found,
        step_s=estimates.step_s.get(0.0) or None,
        tokens_per_pass=counters.committed / counters.passes if counters.passes else None,
    )
    if counters.draft_failure:
        why = f"the draft model failed: {counters.draft_failure}"
        return replace(found, worth=False, why=one_line(why)[:_MAX_WHY])
    if (rests := why_resting(policy, price, estimates)) is not None:
        return replace(found, worth=False, why=rests)
    if not counters.tried:
        return found
    return replace(found, worth=True, why=_paying(found, price))


def why_resting(policy: DraftPolicy, price: RowPrice, estimates: DraftEstimates) -> str | None:
    """Why the policy would not begin to draft now; None: it would, or its rule is another."""
    if price.credit == 0:
        return _priced_out(price)
    chance = estimates.acceptance.rate(0)
    if isinstance(policy, WindowedPolicy | GoodputPolicy) and price.least_chance > chance:
        return (
            f"a row is dear: it pays from a chance of {price.least_chance:.2f} on, and the draft's"
            f" first choice is expected right with {chance:.2f}"
        )
    if isinstance(policy, GoodputPolicy):
        gain = policy.fresh_gain(estimates)
        if gain < policy.least_gain:
            return (
                f"a draft step would save {gain:.3f} tokens, and has to save {policy.least_gain:g}"
            )
    return None


def _priced_out(price: RowPrice) -> str:
    """Not that the verifier has no place for sessions: its passes are what is short."""
    why = "the verifier's passes are busy: it takes no drafts now"
    return (
        f"{why}, a row pays from a chance of {price.least_chance:.2f} on"
        if price.least_chance
        else why
    )


def _paying(found: DraftingStatus, price: RowPrice) -> str:
    why = f"{found.acceptance:.0%} of the draft's first choices were right"
    why += f", and a chance of {price.least_chance:.2f} would pay" if price.least_chance else ""
    if found.tokens_per_pass is not None:
        why += f"; a pass brings {found.tokens_per_pass:.1f} tokens"
    return why
