"""The default draft policy: it weighs what a step is expected to save against what it costs
(goodput).

Theory of operation. While a device drafts, a verifier that runs ahead decodes on. So a node only
counts if it arrives before its position is decoded, and a chain that is behind the verifier has to
catch up first: its next nodes save nothing themselves. Each leaf of the tree is valued by the best
run of steps behind it, in tokens saved per step. (A place where only text lookup has added nodes is
a leaf too; it is worth less the likelier those nodes are right, see ``_open_value``.)

    gain = c * (a**n + a**(n + 1) + .. + a**k) / k,  for the k = n, n + 1, .. with the largest

Here c is the chance that the output goes through the leaf: the product along its path of the nodes'
chances, which depend on their draft source and its confidence (``estimates.DraftChances``). a is
the acceptance rate of the draft model, and n the first step whose node arrives in time. At c = 0.5
and a = 0.8 a leaf whose next node is in time brings 0.4 a step. If only the fourth node is in time,
it brings 0.5 * 0.8**4 / 4 = 0.05 with k = 4 and 0.09 with k = 7. The next step runs behind the leaf
that brings most, unless that is less than a step has to bring. A row in a pass is paid for at the
verifier's price, by the chance that remains in its pass (``comparison_policies.WindowedPolicy`` has
an example). ``parallel_steps`` chooses the number of positions that a parallel draft fills in one
step; what counts as a step here is then one position. (SmartSpec, arXiv 2406.14066, defines goodput
as tokens committed per second under load, and chooses draft lengths by it.)

Where nothing pays, the policy rests: now and then it drafts one node that is not sent, so that a
change of the acceptance rate is noticed. Where the model could not get ahead of the verifier even
if it were right more often, it does not run at all, not even over the prompt (``ModelRest``): the
round trip and the verifier's speed are measured without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar, Final, assert_never

from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.estimates import DraftEstimates, DraftEvidence, RowPrice
from edgespec.core.device.lead import DraftingCase, describe_lateness, find_case
from edgespec.core.device.parallel_steps import choose_places
from edgespec.core.device.policy import (
    DEFAULT_WIDTH,
    GATHER_SHARE,
    DraftPolicy,
    DraftView,
    is_full,
    sends_now,
)
from edgespec.core.protocol.tree import ROOT, UNRANKED, CommittedPrefix, Node, SpeculationTree

MIN_GAIN: Final = 0.002
"""Tokens that a step must save to be run at all, whatever it costs."""
MIN_CANDIDATE_CHANCE: Final = 0.02
"""Least chance of a kept candidate after the first one. Such a candidate costs its row and its
bytes, and is right once in fifty times."""
_FURTHEST: Final = 24
"""Maximum number of steps to look ahead."""
_ROUNDING: Final = 1e-9
# While resting, every position is probed until this many recent positions were decided, then one in
# eight.
_TRIALS_WANTED, _PROBE_EVERY = 24.0, 8
_MIN_LEAD_CHANCE: Final = 0.02
"""Share of the runs of right tokens that have to be long enough for a model that runs at all."""
_TRIAL_TOKENS: Final = 32
"""Tokens of an output during which a model that cannot get ahead is tried."""


@dataclass(frozen=True, slots=True)
class GoodputPolicy:
    """Sends the nodes that are expected to save more tokens than they cost."""

    width: int = 2
    min_gain: float = MIN_GAIN
    """Tokens that a step has to save."""
    gather_share: float | None = None
    """None: every step's nodes are sent at once. A number: nodes are sent together, just in time
    for the next pass, within this share of a pass before it, or when none is in flight."""
    window: int | None = None
    """Steps whose nodes may be outstanding; None: what two rounds can hold."""
    min_candidate_chance: float = MIN_CANDIDATE_CHANCE
    """Least chance of a candidate after the first one; less likely ones are dropped."""
    drops_useless_draft: ClassVar[bool] = True

    def is_hopeless(self, estimates: DraftEstimates) -> bool:
        case = find_case(estimates)
        trials = estimates.acceptance.trials
        if case is None or not trials or trials[0] < _TRIALS_WANTED:
            return False
        return not _may_get_ahead(case)

    def choose_parent(self, view: DraftView) -> int | None:
        if is_full(view, self.width, self.window) or self._rests(view):
            return None
        leaf, gain = self.best_leaf(view)
        return leaf if gain >= self.min_gain else self._probe(view)

    def choose_places(self, view: DraftView) -> int:
        return choose_places(view)

    def should_send(self, view: DraftView) -> bool:
        if not view.unsent:
            return False
        alone = not view.in_flight and view.unsent <= self.width
        if alone and self.best_leaf(view)[1] < self.min_gain:
            return False  # a probe: drafted to measure the acceptance rate, not to be sent
        return sends_now(view, self.gather_share, by_rank=False)

    def best_leaf(self, view: DraftView) -> tuple[int, float]:
        """Return the leaf behind which a step would bring most, and how many tokens that is."""
        tree, gain_at = view.tree, dict[int, float]()
        rates = view.estimates.acceptance.first_rates(self.width)
        min_in_pass = view.row_chance / rates[0]
        if min_in_pass > 1.0:
            return ROOT, 0.0
        first_rate, hit_rate = rates[0], math.fsum(rates)
        if first_rate > 0.99:  # ``min`` takes three times as long
            first_rate = 0.99
        if hit_rate > 0.99:
            hit_rate = 0.99
        decoding_s, length, decoded, lead_per_step = view.decoding_s, tree.prefix.length, 0.0, 1.0
        if decoding_s is not None:
            decoded, lead_per_step = view.arrival_s / decoding_s, 1.0 - view.step_s / decoding_s
        end, settled = view.end, length + math.ceil(decoded)
        best, best_gain = ROOT, 0.0
        # Entries: the chance now, the chance in its pass, and the node to draft behind with the
        # position and the children behind it.
        pending = [(1.0, 1.0, ROOT, length, tree.roots)]
        while pending:
            chance, in_pass, parent, position, children = pending.pop()
            if chance * hit_rate < best_gain:
                continue  # nothing here brings more, even at once, when a step brings ``hit_rate``
            open_value = 1.0
            if children:
                open_value = _open_value(children) if children[0].rank == UNRANKED else 0.0
            if open_value > 0.0 and position < end:
                if position not in gain_at:
                    step = _first_step_in_time(decoded - (position - length), lead_per_step)
                    gain_at[position] = hit_rate
                    if step > 1:
                        gain_at[position] = _gain_behind(first_rate, hit_rate, step)
                gain = chance * open_value * gain_at[position]
                # The oldest of equals.
                if gain > best_gain or (gain == best_gain and parent < best):
                    best, best_gain = parent, gain
            for node in reversed(children):  # the likeliest is popped first
                behind = chance * node.chance
                behind_in_pass = in_pass if position < settled else in_pass * node.chance
                if behind * hit_rate >= best_gain and behind_in_pass >= min_in_pass:
                    pending.append((behind, behind_in_pass, node.id, position + 1, node.children))
        return best, best_gain

    def _rests(self, view: DraftView) -> bool:
        """Return whether the model does not run at all: it could not get ahead when the generation
        began, and could not now.

        Before the first pass both ends begin at the same time, so the device is only late by its
        prefill. It drafts on as long as it is ahead by nodes of such a beginning."""
        estimates, prefix = view.estimates, view.tree.prefix
        if not estimates.rest.generations:
            return False
        if estimates.rest.is_trial and prefix.length - prefix.prompt_length < _TRIAL_TOKENS:
            return False
        if not self.is_hopeless(estimates):
            return False
        case = find_case(estimates)
        if case is None or case.step_s >= case.token_s:
            return True
        if any(node.rank != UNRANKED for node in view.tree.nodes.values()):
            return False
        if view.since_open_s is None:
            return True
        prefill_s = prefix.length * estimates.feed_s.get(0.0)
        return not _may_get_ahead(replace(case, rtt_s=view.since_open_s + prefill_s))

    def _probe(self, view: DraftView) -> int | None:
        tree, trials = view.tree, view.estimates.acceptance.trials
        length = tree.prefix.length
        every = 1 if not trials or trials[0] < _TRIALS_WANTED else _PROBE_EVERY
        due = length < view.end and length % every == 0
        if due and length - tree.prefix.prompt_length >= _TRIAL_TOKENS:
            due = not self.is_hopeless(view.estimates)
        return ROOT if due and _open_value(tree.roots) > 0.0 else None


def _may_get_ahead(case: DraftingCase) -> bool:
    """Return whether a model may be ahead of the verifier now and then, if it is right more often
    than it was: at half of the places where it was wrong as well."""
    better = 1.0 - (1.0 - case.acceptance) / 2.0
    return replace(case, acceptance=better).lead_chance >= _MIN_LEAD_CHANCE


def _gain_behind(right: float, hit: float, first: int) -> float:
    """Return the tokens that a step brings behind a leaf that is certain, by the formula above."""
    if first == 1:
        return hit  # each further step brings less
    best, total, reached = 0.0, 0.0, right ** (first - 1)
    for step in range(first, _FURTHEST + 1):
        total += reached * hit
        reached *= right
        if total / step <= best:
            break
        best = total / step
    return best


def _first_step_in_time(behind: float, closer: float) -> int:
    """Return the first step from now on whose node arrives before the verifier decodes its
    position.

    Each step drafts one position further. The result exceeds ``_FURTHEST`` if no node is in time.

    Formula: the node of step 1 + j, at p + j tokens behind the root, arrives when the verifier has
    decoded (arrival_s + j * step_s) / decoding_s tokens. So j is the least with j * (1 - step_s /
    decoding_s) >= arrival_s / decoding_s - p, which is j * ``closer`` >= ``behind``. With an
    arrival after 30 ms, 25 ms a token, steps of 10 ms and p = 0: j >= 1.2 / 0.6, so the third
    step."""
    behind -= _ROUNDING
    if behind <= 0.0:
        return 1
    return 1 + math.ceil(behind / closer) if behind < closer * _FURTHEST else _FURTHEST + 1


def _open_value(children: Sequence[Node]) -> float:
    """Return what a draft step is worth where text lookup alone has added ``children``, relative to
    an empty place; 0 if the draft model was run there already.

    Formula: 1 - s**3, with s the chance that one of the children is right. The step brings a token
    where they are wrong, with 1 - s. The next steps, say two, would otherwise run behind what is
    wrong: (1 - s) * (1 + s + s**2). Beside a child that is right with 0.9 the step is worth 0.27,
    beside one of 0.5 0.88."""
    named = 0.0
    for child in children:
        if child.rank != UNRANKED:
            return 0.0
        named += child.chance
    return max(0.0, 1.0 - named**3)


def _view_nothing(estimates: DraftEstimates, width: int) -> DraftView:
    """Return the view of a session that has drafted nothing yet."""
    tree = SpeculationTree(CommittedPrefix((0,)))
    return DraftView(tree=tree, unsent=0, in_flight=0, room=width, end=1 << 30, estimates=estimates)


LEAST_JUDGED: Final = 24
"""Places that have to be judged before the draft is: fewer say little about it."""
_LOW_ACCEPTANCE: Final = 0.4


def judge_draft(tried: int, hits: int, is_translated: bool = False) -> str:
    """Return a clause about a draft that was right at ``hits`` of ``tried`` places, and about what
    would help if that is rarely. Empty where too few places were judged, and for a draft that is
    often right, unless it has another tokenizer than the target (``is_translated``)."""
    is_rare = hits < _LOW_ACCEPTANCE * tried
    if tried < LEAST_JUDGED or not (is_rare or is_translated):
        return ""
    name = "translated draft" if is_translated else "draft"
    found = f"the {name} was right at {hits} of {tried} places ({hits / tried:.0%})"
    if not is_rare:
        return found
    if is_translated:
        return (
            f"{found}: `edgespec distill` on this target's texts, or a draft of its own family"
            " would help"
        )
    return (
        f"{found}: a draft of the target's own family, more bits or `edgespec distill` would help"
    )


def describe_useless_draft(evidence: DraftEvidence) -> str:
    """Return one line about a draft model that was given up: how often it was right, and what would
    help."""
    hits, tried = evidence.hits, evidence.tried
    return (
        f"the draft model was right at {hits:,} of {tried:,} places ({hits / tried:.1%}), so it is"
        " given up until a restart: take a draft of the target's own family, or train one with"
        " `edgespec distill`"
    )


def explain_resting(policy: DraftPolicy, price: RowPrice, estimates: DraftEstimates) -> str | None:
    """Return why the policy would not begin to draft now. None if it would, or if its rule is
    another."""
    if policy.drops_useless_draft and estimates.evidence.is_useless:
        return describe_useless_draft(estimates.evidence)
    if price.credit == 0:
        # The verifier may have room for sessions; what is short are its passes.
        why, least = "the verifier's passes are busy: it takes no drafts now", price.least_chance
        if least:
            why += f", a row is worth its price from a chance of {least:.2f} on"
        return why
    chance = estimates.acceptance.rate(0)
    if isinstance(policy, WindowedPolicy | GoodputPolicy) and price.least_chance > chance:
        return (
            f"a row is worth its price from a chance of {price.least_chance:.2f} on, and the"
            f" draft's first candidate is expected to be right with {chance:.2f}"
        )
    if isinstance(policy, GoodputPolicy):
        _, gain = policy.best_leaf(_view_nothing(estimates, policy.width))
        if policy.is_hopeless(estimates) and (case := find_case(estimates)) is not None:
            return describe_lateness(case)
        if gain < policy.min_gain:
            return f"a draft step would save {gain:.3f} tokens, and has to save {policy.min_gain:g}"
    return None


# --- policies by name, for command lines, configuration files and scenarios --------------------


class PolicyName(Enum):
    WINDOWED = "windowed"
    PEARL = "pearl"
    FIXED = "fixed"
    GOODPUT = "goodput"


DEFAULT_POLICY: Final = PolicyName.GOODPUT
POLICIES_WITH_GAMMA: Final = (PolicyName.FIXED, PolicyName.PEARL)
"""Policies with a draft length."""
POLICIES_WITH_WINDOW: Final = (PolicyName.GOODPUT, PolicyName.WINDOWED)
"""Policies with a bound on outstanding steps."""


def make_policy(
    name: PolicyName = DEFAULT_POLICY,
    gamma: int | None = None,
    width: int = DEFAULT_WIDTH,
    window: int | None = None,
) -> DraftPolicy:
    """Return the policy called ``name``. ``gamma`` and ``window`` None adapt to the estimates."""
    match name:
        case PolicyName.WINDOWED:
            return WindowedPolicy(width=width, window=window, gather_share=GATHER_SHARE)
        case PolicyName.PEARL:
            return PearlPolicy(gamma=gamma, width=width)
        case PolicyName.FIXED:
            return FixedPolicy(gamma=gamma, width=width)
        case PolicyName.GOODPUT:
            return GoodputPolicy(width, gather_share=GATHER_SHARE, window=window)
        case _:
            assert_never(name)
