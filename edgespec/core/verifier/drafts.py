"""The inbox receives the drafts of one session: it checks them, grows the tree and times them.

Drafts are hints, so nothing here can change a token. A node behind a dead or unknown parent, or one
that is no token of the target, is dropped and counted. A draft on tokens that the verifier does not
have is answered by a ``Fault``, after which the device reopens with the tokens that it holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Final, Protocol

from edgespec.core.protocol.estimators import AcceptanceEstimator, MovingAverage
from edgespec.core.protocol.messages import Draft, Fault, FaultCode, Limits, RunAhead
from edgespec.core.protocol.tree import ALIVE, ROOT, STALE, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import NodeScore
from edgespec.core.statically_frozen import statically_frozen


class ArrivalEstimator:
    """Estimates when the next useful draft of a session arrives.

    After a miss the device must first receive the commit and draft anew; the delay is the
    *response*. Otherwise drafts come at the device's own rhythm; the delay between two of them is
    the *gap*. The estimate is the time of the last event plus the moving average of the response or
    the gap.
    """

    def __init__(self) -> None:
        self._response_s = MovingAverage(0.25)
        self._gap_s = MovingAverage(0.25)
        self._depth = MovingAverage(0.25)
        self._missed_at: float | None = None
        self._arrived_at: float | None = None

    @property
    def response_s(self) -> float:
        """Usual delay of the first draft after a miss, in seconds; 0 if the next draft is not such
        a one."""
        return 0.0 if self._missed_at is None else self._response_s.get(0.0)

    @property
    def response_depth(self) -> float:
        """Usual depth of the first draft after a miss, in nodes; 1 before one has arrived."""
        return self._depth.get(1.0)

    def on_miss(self, now: float) -> None:
        """Note that a commit left the tree without a node, so the device must draft anew."""
        if self._missed_at is None:
            self._missed_at = now

    def on_useful_draft(self, now: float, depth: int = 1) -> None:
        """Note that a draft with a usable node arrived, after which the tree is ``depth`` nodes
        deep."""
        if self._missed_at is not None:
            self._response_s.add(now - self._missed_at)
            self._depth.add(depth)
        elif self._arrived_at is not None:
            self._gap_s.add(now - self._arrived_at)
        self._missed_at, self._arrived_at = None, now

    def expected_at(self) -> float | None:
        """Return when the next useful draft is expected, or None if nothing was measured yet."""
        if self._missed_at is not None:
            response_s = self._response_s.get(-1.0)
            return self._missed_at + response_s if response_s >= 0 else None
        if self._arrived_at is None or self._gap_s.count == 0:
            return None
        return self._arrived_at + self._gap_s.get(0.0)


# Run-ahead policies decide whether the verifier may start a pass of a session that has no draft
# waiting. Such a pass commits one token, as plain streaming does. Waiting for a draft pays only if
# the draft arrives soon.


OVERDUE_SHARE: Final = 0.1
"""How overdue an expected draft may be, in passes, before the session stops waiting for it.

After a miss a draft may instead be overdue by the usual response time, since chains differ in
length.
"""


@statically_frozen
class RunAheadView:
    """The state that a run-ahead policy sees when a pass could start and no draft is waiting.

    Times are on the same clock as ``now``, in seconds.
    """

    now: float
    idle_since: float
    """Time when the session last committed, or was opened."""
    pass_s: float
    expected_at: float | None
    no_draft_coming: bool
    hit_rate: float = 0.0
    """Share of the passes with device nodes in which one of these nodes was accepted."""
    runs_anyway: bool = False
    """True if a pass of other sessions starts now; a session that declines waits until it ends."""
    response_depth: float = 1.0
    """Usual depth of the first draft after a miss, in nodes."""
    response_s: float = 0.0
    """Usual delay of the first draft after a miss; 0 if the next draft is not such a one."""


RunAheadPolicy = Callable[[RunAheadView], float]
"""Returns the time from which a pass without a draft may start; ``view.now`` or less means now."""


def never_run_ahead(view: RunAheadView, patience_s: float = 2.0) -> float:
    """Wait for a draft until the device announces that none is coming, or for ``patience_s``.

    This is split decoding as in the literature. The limit exists so that a silent device cannot
    stop its own stream. Two seconds are longer than a draft takes over a satellite link, and
    shorter than the time after which a device gives up on its verifier.
    """
    return view.now if view.no_draft_coming else view.idle_since + patience_s


def always_run_ahead(view: RunAheadView) -> float:
    """Start at once: plain streaming, which drafts that are there in time speed up."""
    return view.now


def auto_run_ahead(view: RunAheadView, unsure: float = 0.84, sure: float = 0.94) -> float:
    """Wait for an expected draft, but no longer than the draft is likely to be worth.

    Let a node be accepted with probability a, the hit rate. A verifier that runs ahead finds the
    next miss in 1 + a passes: the first pass commits one token, and with probability a the device's
    chain still stands behind it. A verifier that waits for a chain of k nodes finds the next miss
    in 1 + a**k passes. So waiting for a - a**k passes breaks even: 0 for a single node, 0.69 of a
    pass for ten nodes at a = 0.8.

    Where nearly all nodes are accepted a longer wait does no harm. The limit is then the share (a -
    ``unsure``) / (``sure`` - ``unsure``) of a pass, clipped to [0, 1]. Waiting a whole pass for one
    node costs nothing at a rate above 0.92, and 5 % of the speed at 0.8 (virtual time,
    docs/measurements.md).

    If others have a pass now, the session takes part at once: waiting would cost that whole pass,
    and what the device drafts meanwhile can still be used in the next pass.
    """
    if view.no_draft_coming or view.expected_at is None or view.runs_anyway:
        return view.now
    rate, pass_s = view.hit_rate, view.pass_s
    saved = rate - math.pow(rate, view.response_depth)
    share = max(saved, min(1.0, (rate - unsure) / (sure - unsure)))
    latest = view.idle_since + share * pass_s
    if view.expected_at > latest:
        return view.now
    return min(latest, view.expected_at + max(OVERDUE_SHARE * pass_s, view.response_s))


RUN_AHEAD: Final[Mapping[RunAhead, RunAheadPolicy]] = {
    RunAhead.NEVER: never_run_ahead,
    RunAhead.ALWAYS: always_run_ahead,
    RunAhead.AUTO: auto_run_ahead,
}


class Source(Enum):
    DEVICE = "device"
    MODEL = "model"
    """Server model or engine speculator."""
    TEXT = "text"
    """Server lookup, and tokens that a grammar forces."""


class PassTree:
    """The draft nodes of one pass, at most ``most``; the device's nodes come first.

    Equal tokens behind one node are one node, which belongs to the source that added it first.
    Nodes are numbered as in ``PassRequest``. ``reach`` holds the estimated probability of each node
    that the output goes through it.
    """

    def __init__(self, most: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.reach: list[float] = []
        self.sources: list[Source] = []
        self.drafted = 0
        """Number of nodes that came from the device."""
        self._most = most
        self._places: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        return self._most - len(self.tokens)

    def add(self, parent: int, token: int, reach: float, source: Source) -> int | None:
        """Return the node with ``token`` behind ``parent``, adding it if needed; None if there is
        no room."""
        node = self._places.get((parent, token))
        if node is not None:
            self.reach[node] = max(self.reach[node], reach)
            return node
        node = len(self.tokens)
        if node >= self._most:
            return None
        self._places[parent, token] = node
        self.tokens.append(token)
        self.parents.append(parent)
        self.reach.append(reach)
        self.sources.append(source)
        self.drafted += source is Source.DEVICE
        return node

    def add_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        reaches: Sequence[float],
        source: Source,
    ) -> None:
        """Add nodes, given as in ``PassRequest``; nodes that do not fit are left out."""
        places: list[int | None] = []
        for token, parent, reach in zip(tokens, parents, reaches, strict=True):
            before = -1 if parent < 0 else places[parent]
            places.append(None if before is None else self.add(before, token, reach, source))

    def likeliest(self) -> list[int]:
        """Return the nodes of the path that the output most likely takes, in order."""
        best: dict[int, int] = {}
        for node, parent in enumerate(self.parents):
            rival = best.setdefault(parent, node)
            if self.reach[node] > self.reach[rival]:
                best[parent] = node
        path: list[int] = []
        at = -1
        while (child := best.get(at)) is not None:
            path.append(child)
            at = child
        return path

    def cut_to_chain(self) -> None:
        """Keep the likeliest path only, for a target that verifies no trees."""
        path = self.likeliest()
        self.tokens = [self.tokens[node] for node in path]
        self.reach = [self.reach[node] for node in path]
        self.sources = [self.sources[node] for node in path]
        self.parents = list(range(-1, len(path) - 1))
        self.drafted = self.sources.count(Source.DEVICE)


class DraftInbox:
    def __init__(self, prefix: CommittedPrefix, vocabulary_size: int, limits: Limits) -> None:
        self.tree = SpeculationTree(prefix)
        self.arrivals = ArrivalEstimator()
        self.no_draft_coming = False
        """True if the device announced that no draft is coming, so there is nothing to wait for."""
        self._prefix, self._vocabulary_size, self._limits = prefix, vocabulary_size, limits
        self._hit_rate = MovingAverage(0.05)
        self._acceptance = AcceptanceEstimator()
        self._stale = 0
        self._waiting_since: float | None = None

    def reset(self, drafting: bool) -> None:
        self.tree.clear()
        self.no_draft_coming, self._waiting_since = not drafting, None

    def receive(self, draft: Draft, now: float) -> Fault | None:
        """Grow the tree by ``draft``; return a fault if it was not made for this prefix."""
        if not draft.tokens:
            self.no_draft_coming = True
            return None
        if ROOT in draft.parents:
            base, length = draft.base_position, self._prefix.length
            if base > length:
                why = f"draft on position {base}, but only {length} are committed"
                return Fault(FaultCode.RESYNC, why)
            if self._prefix.hash_at(base) != draft.base_hash:
                why = f"the first {base} tokens differ here from those the draft stands on"
                return Fault(FaultCode.RESYNC, why)
        self.no_draft_coming = False
        if self._grow(draft):
            deepest = max(node.position for node in self.tree.nodes.values())
            self.arrivals.on_useful_draft(now, deepest - self._prefix.length + 1)
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
        return None

    def _grow(self, draft: Draft) -> bool:
        useful, tree, most = False, self.tree, self._limits.max_nodes_outstanding
        nodes, grow, size = tree.nodes, tree.grow, self._vocabulary_size
        first, base = draft.first_node_id, draft.base_position
        for index, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            if len(nodes) >= most:
                break
            growth = STALE
            if 0 <= token < size:  # A padded draft may contain ids that are no tokens.
                growth = grow(first + index, parent, token, base)
            if growth is ALIVE:
                useful = True
            elif growth is STALE:
                self._stale += 1
        return useful

    def pass_tree(self, room: int, end: int, least_chance: float = 0.0) -> PassTree:
        """Return the device's nodes that the next pass should verify, oldest first, with room for
        ``room`` nodes in all.

        A node can matter only if the target's token behind it lies before position ``end``. It is
        worth its row only if the product of the acceptance rates of the ranks on its path is at
        least ``least_chance``. A parent is older and likelier than its children, so a chosen node's
        parent is always chosen too.
        """
        tree, rates, places = PassTree(room), self._acceptance.rates, {ROOT: -1}
        last = len(rates) - 1
        for node in self.tree.nodes.values():
            if len(places) > room:
                break
            parent, rank = places.get(node.parent), node.rank
            if parent is None:  # the parent was not chosen
                continue
            before = 1.0 if parent < 0 else tree.reach[parent]
            reach = before * rates[rank if rank < last else last]
            if reach >= least_chance and node.position < end - 1:
                place = tree.add(parent, node.token, reach, Source.DEVICE)
                assert place is not None
                places[node.id] = place
        return tree

    @property
    def top_acceptance_rate(self) -> float:
        """Acceptance rate of the device's first candidate; no draft of this device is likelier to
        pay."""
        return self._acceptance.rate(0)

    def pop_queue_s(self, now: float) -> float:
        """Return how long the oldest node has waited for the pass that starts now, in seconds, and
        reset it; 0 if no node waits."""
        since, self._waiting_since = self._waiting_since, None
        return 0.0 if since is None else now - since

    def pop_stale_count(self) -> int:
        """Return the number of nodes dropped as stale on arrival since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def run_ahead_view(
        self, now: float, idle_since: float, pass_s: float, *, runs_anyway: bool = False
    ) -> RunAheadView:
        """Return what a run-ahead policy may use when no node is waiting."""
        return RunAheadView(
            now,
            idle_since,
            pass_s,
            self.arrivals.expected_at(),
            self.no_draft_coming,
            self._hit_rate.get(0.0),
            runs_anyway,
            self.arrivals.response_depth,
            self.arrivals.response_s,
        )

    def commit(self, tokens: tuple[int, ...], now: float, hit: bool | None) -> None:
        """Advance by the tokens that a pass committed.

        ``hit``: whether a device node was accepted; None if the pass had no device nodes.
        """
        if hit is not None:
            self._hit_rate.add(hit)
        siblings = self.tree.roots
        for token in tokens:
            if not siblings:
                break
            for node in siblings:
                if node.token == token:
                    self._acceptance.add(node.rank, len(siblings))
                    siblings = node.children
                    break
            else:
                self._acceptance.add(None, len(siblings))
                break
        self.tree.commit(tokens)
        if not self.tree.nodes:
            self._waiting_since = None
            self.arrivals.on_miss(now)


@statically_frozen
class Walk:
    nodes: tuple[int, ...]
    """Indices of the accepted nodes of the pass, from root to leaf."""
    tokens: tuple[int, ...]
    """Tokens to commit: one for each accepted node, and one more. Never empty."""
    replaced: tuple[int, ...] = ()
    """Indices in ``tokens`` of tokens that are not the target's own."""


class AcceptanceRule(Protocol):
    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        """Return which nodes are accepted and which tokens are committed.

        ``tokens[i]`` and ``parents[i]`` describe node i of the pass; parent -1 is the root.
        ``targets[0]`` is the target's token at the root, ``targets[1 + i]`` its token after node i.
        ``scores`` belong to the first nodes, which are the ones that a relaxed rule may accept.
        ``ends`` are the tokens that end the output. The exact rule uses neither ``scores`` nor
        ``ends``.
        """


@statically_frozen
class ExactRule:
    """Accepts a node if it equals the target's token, so the output is exactly the target's.

    The walk starts at the root and goes to the child that equals the target's token, as long as
    there is one. The target's token at the last node is the correction or the bonus. The committed
    tokens are always the target's own, so no draft can bias them.
    """

    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        nodes: list[int] = []
        committed = [targets[0]]
        at, wanted = -1, targets[0]
        for node, parent in enumerate(parents):  # a child comes after its parent
            if parent == at and tokens[node] == wanted:
                nodes.append(node)
                at, wanted = node, targets[1 + node]
                committed.append(wanted)
        return Walk(tuple(nodes), tuple(committed))
