"""Whether drafting is worth its cost at this moment, and why, in words for a person.

The verdict is the draft policy's own: a verifier that is busy asks a price for each row of a pass,
or takes no nodes at all, and the policy rests while no draft can pay. What else keeps a device from
drafting (no model, no memory, a text longer than the draft's context) comes before that.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.device.estimates import DraftEstimates, RowPrice
from edgespec.core.device.events import DraftCounters
from edgespec.core.device.policy import DraftPolicy, WindowedPolicy
from edgespec.core.protocol.printable import one_line
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
    chance = None if estimates is None else estimates.acceptance.rate(0)
    found = DraftingStatus(
        None,
        "nothing was drafted yet",
        acceptance=chance,
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
    if price.credit == 0:
        return replace(found, worth=False, why="the verifier is full: it takes no drafts now")
    assert chance is not None
    if isinstance(policy, WindowedPolicy) and price.least_chance > chance:
        why = (
            f"a row is dear: it pays from a chance of {price.least_chance:.2f} on, and the draft's"
            f" first choice is right with {chance:.2f}"
        )
        return replace(found, worth=False, why=why)
    if not counters.tried:
        return found
    return replace(found, worth=True, why=_paying(found, chance, price))


def _paying(found: DraftingStatus, chance: float, price: RowPrice) -> str:
    why = f"the draft's first choice is right with {chance:.2f}"
    why += f", and {price.least_chance:.2f} would pay" if price.least_chance else ""
    if found.tokens_per_pass is not None:
        why += f"; a pass brings {found.tokens_per_pass:.1f} tokens"
    return why
