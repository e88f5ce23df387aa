"""What a draft policy may know when it is asked: the tree, what is outstanding, and estimates.

Everything here is read from the session at the moment of asking; nothing of it is kept.
"""

from __future__ import annotations

import math

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.protocol.estimators import GUESSED_PASS_S
from edgespec.core.protocol.tree import ROOT, SpeculationTree
from edgespec.core.statically_frozen import statically_frozen

# What a draft step on a laptop and a regional link are taken for until they were measured.
_GUESSED_STEP_S, _GUESSED_RTT_S = 0.01, 0.03
# Commits that come further apart than so many passes take were waited for.
_WAITS = 1.25


@statically_frozen
class DraftView:
    """What a policy may know when it is asked."""

    tree: SpeculationTree
    unsent: int
    """Alive nodes not sent yet."""
    in_flight: int
    """Alive nodes sent."""
    room: int
    """How many more nodes the verifier takes."""
    end: int
    """Nodes at this position or later cannot matter any more."""
    estimates: DraftEstimates
    since_commit_s: float | None = None
    """How long ago the last commit of a pass came; None when it left nothing in flight, so that the
    next pass may have waited for a draft."""
    resting: bool = False
    """No step runs and none is about to."""

    @property
    def round_s(self) -> float:
        """The time from sending a node to hearing of its pass: rtt_s + pass_s. A round trip of
        30 ms and a pass of 20 ms make a round of 50 ms."""
        return self.estimates.rtt_s.get(_GUESSED_RTT_S) + self.pass_s

    @property
    def pass_s(self) -> float:
        return self.estimates.pass_s.get(GUESSED_PASS_S)

    @property
    def step_s(self) -> float:
        return max(self.estimates.step_s.get(_GUESSED_STEP_S), 1e-6)

    @property
    def token_s(self) -> float:
        """The time a token takes of late: commit_s / commit_tokens. Commits of two tokens that come
        every 30 ms make 15 ms a token."""
        estimates = self.estimates
        return max(estimates.commit_s.get(GUESSED_PASS_S) / estimates.commit_tokens.get(1.0), 1e-6)

    @property
    def settled_position(self) -> int:
        """Where the committed text ends at least when what is drafted now comes into a pass.

        Formula: the root's position + (since_commit_s + step_s + rtt_s) / commit_s, rounded up. The
        first pass after the last commit began when that left the verifier, and each one that begins
        before the draft arrives commits a token. With a round trip of 14 ms, steps of 8 ms and
        commits every 33 ms it is one token at first, and two from 11 ms after the commit on. Where
        the verifier waits for drafts nothing is settled before they come.
        """
        commit_s, length = self.decoding_s, self.tree.prefix.length
        return length if commit_s is None else length + math.ceil(self.arrival_s / commit_s)

    @property
    def decoding_s(self) -> float | None:
        """A token's time of a verifier that decodes on without drafts; None where it waits for
        them, or nothing is known."""
        commit_s = self.estimates.commit_s.get(0.0)
        return None if commit_s <= 0.0 or commit_s > _WAITS * self.pass_s else commit_s

    @property
    def arrival_s(self) -> float:
        """From the last commit's leaving the verifier to the arrival there of what a step brings
        that begins now: since_commit_s + step_s + rtt_s."""
        since_s = self.since_commit_s or 0.0
        return since_s + self.step_s + self.estimates.rtt_s.get(_GUESSED_RTT_S)

    def paying(self, parent: int, width: int) -> int:
        """Of ``width`` choices behind ``parent``, as many as pay for their rows at the verifier's
        price when they come into a pass; at least one."""
        price, rate = self.estimates.price.least_chance, self.estimates.acceptance.rate
        if price <= 0.0 or width == 1:
            return width
        chance, nodes, settled = 1.0, self.tree.nodes, self.settled_position
        while (node := nodes.get(parent)) is not None and node.position >= settled:
            chance *= rate(node.rank)
            parent = node.parent
        return max(1, sum(chance * rate(rank) >= price for rank in range(width)))

    def tip(self) -> int | None:
        """The end of the chain of first choices; None when the text ends there."""
        at, position, children = ROOT, self.tree.prefix.length, self.tree.roots
        while children:
            first = children[0]
            at, position, children = first.id, first.position + 1, first.children
        return at if position < self.end else None
