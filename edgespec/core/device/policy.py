"""Draft policies: they decide what to draft next, and when to send what was drafted.

Theory of operation. After every event the session calls ``should_send`` (send all unsent nodes
now?) and, when no draft step runs, ``choose_parent`` (behind which node should the next step run?).
Both are pure functions of a view. A policy is called before a token is drafted; of the drafted
candidates only those after the first are dropped, if they are hardly ever right. Nodes *in flight*
are sent and neither committed nor killed yet.

The default is ``goodput_policy.py``. The others exist for comparison (``comparison_policies.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.protocol.draft_source import DraftSource
from edgespec.core.protocol.estimators import ASSUMED_PASS_S, ASSUMED_RTT_S, ASSUMED_STEP_SHARE
from edgespec.core.protocol.tree import ROOT, UNRANKED, Node, SpeculationTree
from edgespec.core.statically_frozen import statically_frozen

# Passes follow one another without a pause if commits come no further apart than this many pass
# durations; the excess is for jitter.
_MAX_GAP_OF_CONTINUOUS_PASSES = 1.01
GATHER_SHARE = 0.1
"""Last part of a pass, as a share, in which an agent's drafts are sent at once: it allows for the
link's jitter."""
DEFAULT_WIDTH = 2
"""Candidates that a draft step adds by default."""

# Commits that come further apart than this many pass durations were waited for.
_MIN_GAP_OF_WAITING = 1.25
# No rate is assumed to be better than this: it was counted over some fifty positions.
_SURE_RATE = 0.99
# Lower bound of durations that others are divided by: a clock may measure 0.
_MIN_DURATION_S = 1e-6


@dataclass(slots=True)
class DraftView:
    """The facts that a policy may use for a decision. No policy changes it."""

    tree: SpeculationTree
    unsent: int
    """Alive nodes that were not sent yet."""
    in_flight: int
    """Alive nodes that were sent."""
    room: int
    """Number of further nodes that the verifier accepts."""
    end: int
    """Position from which on nodes cannot matter any more."""
    estimates: DraftEstimates
    since_commit_s: float | None = None
    """Seconds since the last commit of a pass arrived. None if that commit left nothing in flight,
    so that the next pass may have waited for a draft."""
    resting: bool = False
    """True if no step runs and none is about to start."""
    since_open_s: float | None = None
    """Seconds since the stream was opened, 0 while it is not open; None once a pass has
    committed."""
    idle_s: float | None = None
    """Seconds since the last commit of a pass arrived, whatever it left in flight. None before the
    first commit of a stream."""
    pass_s: float = field(init=False)
    step_s: float = field(init=False)
    rtt_s: float = field(init=False)
    """``pass_s``, ``step_s`` and ``rtt_s`` are used several times for each view, so they are looked
    up once."""

    def __post_init__(self) -> None:
        self.pass_s = pass_s = self.estimates.pass_s.get(ASSUMED_PASS_S)
        if self.estimates.places == 1:
            step_s = self.estimates.step_s.get(ASSUMED_STEP_SHARE * pass_s)
        else:
            step_s = self.estimates.position_s(pass_s, self.estimates.places)
        self.step_s = step_s if step_s > _MIN_DURATION_S else _MIN_DURATION_S
        open_s = self.estimates.open_s
        guess_s = open_s if open_s < ASSUMED_RTT_S else ASSUMED_RTT_S
        self.rtt_s = self.estimates.rtt_s.get(guess_s)

    @property
    def round_s(self) -> float:
        """The time from sending a node to receiving the commit of its pass: rtt_s + pass_s. A round
        trip of 30 ms and a pass of 20 ms make a round of 50 ms."""
        return self.rtt_s + self.pass_s

    @property
    def token_s(self) -> float:
        """The recent time per token: commit_s / commit_tokens. Commits of two tokens that come
        every 30 ms make 15 ms a token."""
        estimates = self.estimates
        token_s = estimates.commit_s.get(ASSUMED_PASS_S) / estimates.commit_tokens.get(1.0)
        return token_s if token_s > _MIN_DURATION_S else _MIN_DURATION_S

    @property
    def settled_position(self) -> int:
        """Position that will at least be committed when what is drafted now gets into a pass.

        Formula: the root's position + arrival_s / decoding_s, rounded up. The first pass after the
        last commit began when that left the verifier, and each pass that begins before the draft
        arrives commits a token, or more by the verifier's own drafts. With a round trip of 14 ms,
        steps of 8 ms and commits every 33 ms it is one token at first, and two from 11 ms after the
        commit on. Where the verifier waits for drafts nothing is settled before they arrive."""
        commit_s, length = self.decoding_s, self.tree.prefix.length
        return length if commit_s is None else length + math.ceil(self.arrival_s / commit_s)

    @property
    def decoding_s(self) -> float | None:
        """Time per token of a verifier that decodes on without this device's drafts: commit_s /
        server_tokens.

        The verifier may have drafts of its own. None if it waits for drafts, or if nothing is
        known."""
        commit_s = self.estimates.commit_s.get(0.0)
        if commit_s <= 0.0 or commit_s > _MIN_GAP_OF_WAITING * self.pass_s:
            return None
        tokens = self.estimates.server_tokens.get(1.0)
        return commit_s / tokens if tokens > 1.0 else commit_s

    @property
    def arrival_s(self) -> float:
        """Time from the sending of the last commit by the verifier to the arrival there of what a
        step brings that begins now: since_commit_s + step_s + rtt_s. Before the first commit it is
        counted from the arrival of ``Open``, which takes as long as a draft: since_open_s +
        step_s."""
        if self.since_open_s is not None:
            return self.since_open_s + self.step_s
        since_s = self.since_commit_s or 0.0
        return since_s + self.step_s + self.rtt_s

    @property
    def longest_step_s(self) -> float:
        """Time of the next draft step. ``step_s`` is the time per position."""
        return self.step_s * self.estimates.places

    def chance_in_pass(self, node_id: int) -> float:
        """Return the chance that the output goes through a node, once the pass that could take a
        draft begins: the product of the chances along its path from ``settled_position`` on."""
        chance, nodes, settled = 1.0, self.tree.nodes, self.settled_position
        while (node := nodes.get(node_id)) is not None and node.position >= settled:
            chance *= node.chance
            node_id = node.parent
        return chance

    def affordable_width(self, parent: int, width: int) -> int:
        """Return how many of ``width`` candidates behind ``parent`` are worth their rows at the
        verifier's price when they get into a pass; at least one."""
        price = self.estimates.price.least_chance
        if price <= 0.0 or width == 1:
            return width
        chance = self.chance_in_pass(parent)
        rates = self.estimates.acceptance.first_rates(width)
        return sum([chance * rate >= price for rate in rates]) or 1

    @property
    def row_chance(self) -> float:
        """Least chance of being right in its pass at which a node is worth its row: what a row
        costs, in tokens. A row of 0.5 ms where a token takes 10 ms costs 0.05."""
        row_s, least = self.estimates.row_s.get() or 0.0, self.estimates.price.least_chance
        own = row_s / self.token_s if row_s > 0.0 else 0.0
        return own if own > least else least

    def chain_end(self) -> int | None:
        """Return the end of the chain of first candidates; None if the output ends there."""
        at, position, children = ROOT, self.tree.prefix.length, self.tree.roots
        while children:
            first = children[0]
            at, position, children = first.id, first.position + 1, first.children
        return at if position < self.end else None


@statically_frozen
class JudgedPlace:
    """A decided position at which candidates stood, for the sources to learn from."""

    offered: Sequence[Node]
    """The nodes at the position."""
    right: Node | None
    """The node with the target's token; None if no node had it."""
    model_nodes: int
    """Number of the nodes that the device model had offered."""


DeviceSource = DraftSource[DraftView, JudgedPlace]
"""A draft source on a device."""


class DraftPolicy(Protocol):
    @property
    def width(self) -> int:
        """Number of the draft model's candidates that each step adds."""

    @property
    def min_candidate_chance(self) -> float:
        """Least chance of a kept candidate after the first one; 0: all are kept."""

    @property
    def drops_useless_draft(self) -> bool:
        """Whether a useless draft model (``DraftEvidence``) makes no steps any more. The published
        schemes draft on, as they have no rule for that."""

    def is_hopeless(self, estimates: DraftEstimates) -> bool:
        """Return whether the draft model cannot be of use in a generation that begins with these
        estimates, even if it is right more often than expected. The published schemes have no rule
        for that."""

    def choose_parent(self, view: DraftView) -> int | None:
        """Return the node (or ``ROOT``) to draft behind, or None to rest until something
        happens."""

    def choose_places(self, view: DraftView) -> int:
        """Return for how many positions each step is to draft from now on. Called for a parallel
        draft only, now and then."""

    def should_send(self, view: DraftView) -> bool:
        """Return whether to send the unsent nodes now."""


def is_full(view: DraftView, width: int, window: int | None) -> bool:
    """Return whether the nodes of ``window`` steps, ``width`` each, are outstanding, or the
    verifier accepts no more. A window of None is the steps of two rounds."""
    steps = window or math.ceil(2 * view.round_s / view.step_s) + 4
    nodes, most = view.tree.nodes, steps * width
    if len(nodes) < most:
        return view.room < width
    drafted = sum([node.rank != UNRANKED for node in nodes.values()])
    return drafted >= most or view.room < width


def sends_now(view: DraftView, gather_share: float | None, *, by_rank: bool) -> bool:
    """Return whether to send the unsent nodes now, with ``gather_share`` as in ``GoodputPolicy``.

    ``by_rank`` means that a node's chance is the rate of its rank, and not what the draft model
    reports."""
    if gather_share is None or view.resting:
        return True
    if not view.in_flight:
        return not _is_worth_a_longer_chain(view, gather_share, by_rank)
    return _time_left_s(view) < view.longest_step_s + gather_share * view.pass_s


def _is_worth_a_longer_chain(view: DraftView, gather_share: float, by_rank: bool) -> bool:
    """Return whether one more node in the next pass is worth the time of its step, if none is in
    flight.

    After a rejection the verifier may wait for the next draft (``core/verifier/run_ahead.py``).
    Behind k nodes that are right at a rate a, and n = pass_s / step_s nodes that are drafted in
    each pass, the next rejection is found in 1 + a**k / (1 - a**n) passes, so another node saves

        pass_s * a**k * (1 - a) / (1 - a**n)

    and costs step_s. Passes of 40 ms, steps of 1 ms and a = 0.8 make ten nodes; passes of 8 ms and
    steps of 2 ms make two. a**k is the product of the chances of the chain's nodes. The verifier
    may also have decoded on: a node that is held back must still be in time for the pass after this
    one.
    """
    pass_s, step_s = view.pass_s, view.step_s
    if view.idle_s is None or view.idle_s + view.rtt_s + step_s > (1.0 - gather_share) * pass_s:
        return False
    rate = min(view.estimates.acceptance.rate(0), _SURE_RATE)
    chance, children = 1.0, view.tree.roots
    while children:
        chance *= rate if by_rank else children[0].chance
        children = children[0].children
    drafted_in_a_pass = max(1.0, pass_s / step_s)
    return pass_s * chance * (1.0 - rate) > step_s * (1.0 - math.pow(rate, drafted_in_a_pass))


def _time_left_s(view: DraftView) -> float:
    """Return for how many seconds a message that is sent still reaches the verifier before the next
    pass begins.

    Formula: a pass begins when the one before it is committed, so the k-th after the last commit
    begins k * period - rtt_s / 2 behind the moment when that commit arrived, and its drafts must be
    sent rtt_s / 2 earlier: (-rtt_s - since_commit_s) modulo the period. With a round trip of 10 ms
    and a period of 25 ms, 15 ms are left when a commit arrives, and 10 ms another 5 ms later. It is
    0 where passes do not follow one another at once, because the begin of the next one is not
    known."""
    estimates = view.estimates
    if view.since_commit_s is None or not estimates.rtt_s.count:
        return 0.0
    if estimates.commit_s.get(math.inf) > _MAX_GAP_OF_CONTINUOUS_PASSES * view.pass_s:
        return 0.0
    return (-estimates.rtt_s.get(0.0) - view.since_commit_s) % max(view.pass_s, _MIN_DURATION_S)
