"""The inbox takes in the drafts of one session: it checks them, grows the tree and times them.

Drafts are hints, so nothing here can change a token: a node behind a dead or unknown parent, or one
that is no token of the target, is dropped and counted; a draft on tokens the verifier does not have
is a ``Fault`` that makes the device come back with what it holds.
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
    """When the next useful draft of a session arrives. After a miss the device must first hear of
    it and draft anew: the *response*. Otherwise drafts come at the device's own pace: the *gap*.
    The estimate is the last event plus the moving average of its rhythm."""

    def __init__(self) -> None:
        self._response_s = MovingAverage(0.25)
        self._gap_s = MovingAverage(0.25)
        self._depth = MovingAverage(0.25)
        self._missed_at: float | None = None
        self._arrived_at: float | None = None

    @property
    def response_s(self) -> float:
        """How long the draft takes that is expected, if one is to come after a miss; else 0."""
        return 0.0 if self._missed_at is None else self._response_s.get(0.0)

    @property
    def response_depth(self) -> float:
        """How many nodes follow one another in the first draft after a miss; 1 before one came."""
        return self._depth.get(1.0)

    def on_miss(self, now: float) -> None:
        """A commit killed the tree, or left it without a node: the device must hear of it."""
        if self._missed_at is None:
            self._missed_at = now

    def on_useful_draft(self, now: float, depth: int = 1) -> None:
        """A draft came that is of use. It makes the tree so deep."""
        if self._missed_at is not None:
            self._response_s.add(now - self._missed_at)
            self._depth.add(depth)
        elif self._arrived_at is not None:
            self._gap_s.add(now - self._arrived_at)
        self._missed_at, self._arrived_at = None, now

    def expected_at(self) -> float | None:
        """None when nothing is known yet."""
        if self._missed_at is not None:
            response_s = self._response_s.get(-1.0)
            return self._missed_at + response_s if response_s >= 0 else None
        if self._arrived_at is None or self._gap_s.count == 0:
            return None
        return self._arrived_at + self._gap_s.get(0.0)


# Run-ahead: may the verifier start a pass of a session that has no draft waiting? Such a pass
# commits one token, as plain streaming does; waiting for a draft pays only when it comes soon.


OVERDUE_SHARE: Final = 0.1
"""How overdue (in passes) an expected draft may be before it is given up. After a miss it may be as
overdue as the usual draft takes: chains differ in length."""


@statically_frozen
class RunAheadView:
    """What is known when a pass could start and no draft is waiting; times as ``now``."""

    now: float
    idle_since: float
    """When the session last committed, or was opened."""
    pass_s: float
    expected_at: float | None
    no_draft_coming: bool
    hit_rate: float = 0.0
    """How often a pass with drafts found the target's token among their first nodes."""
    runs_anyway: bool = False
    """A pass of other sessions starts now; who does not take part waits for its end."""
    response_depth: float = 1.0
    """How many nodes follow one another in the first draft after a miss."""
    response_s: float = 0.0
    """How long the first draft after a miss takes; 0 where no miss came before."""


RunAheadPolicy = Callable[[RunAheadView], float]
"""The time from which a pass without a draft may start; ``view.now`` or less means now."""


def never_run_ahead(view: RunAheadView, patience_s: float = 2.0) -> float:
    """Split decoding as the literature has it: the verifier waits for a draft until the device says
    that none is coming, or for ``patience_s``, so that a silent device cannot stop its stream. Two
    seconds are longer than a draft takes over a satellite, and shorter than a device's patience."""
    return view.now if view.no_draft_coming else view.idle_since + patience_s


def always_run_ahead(view: RunAheadView) -> float:
    """Plain streaming, which drafts may speed up."""
    return view.now


def auto_run_ahead(view: RunAheadView, unsure: float = 0.84, sure: float = 0.94) -> float:
    """The verifier waits for an expected draft, but no longer than it is likely to be worth.

    Let nodes be right at the hit rate a. A verifier that decodes on finds the next miss in 1 + a
    passes: the first commits one token, and behind it, with probability a, the device's chain
    still stands. One that waits for a chain of k nodes finds it in 1 + a**k passes. So a wait of
    a - a**k passes pays: none for a single node, 0.69 of a pass for ten nodes at a = 0.8.

    Where nearly all nodes are right a longer wait does no harm: the share (a - ``unsure``) /
    (``sure`` - ``unsure``) of a pass, in [0, 1]. Waiting a whole pass for one node costs nothing at
    a rate above 0.92 and 5 % of the speed at 0.8 (virtual time, docs/measurements.md). Where others
    have a pass now, waiting costs that whole pass, and what the device drafts meanwhile is there
    for the next one all the same."""
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
    """The verifier's own draft model, or its target's own speculator."""
    TEXT = "text"
    """The text itself, and what was said before."""


class PassTree:
    """The nodes of one pass, at most ``most``; those of the device come first. Equal tokens behind
    one node are one node, of the source that was first. ``reach`` of a node is the chance that the
    text goes through it; nodes are as in ``PassRequest``."""

    def __init__(self, most: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.reach: list[float] = []
        self.sources: list[Source] = []
        self.drafted = 0
        """How many of the nodes are the device's."""
        self._most = most
        self._places: dict[tuple[int, int], int] = {}

    @property
    def room(self) -> int:
        return self._most - len(self.tokens)

    def add(self, parent: int, token: int, reach: float, source: Source) -> int | None:
        """The node that has ``token`` behind ``parent``, a new one if need be; None: no room."""
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
        """Nodes as in ``PassRequest``; those for which there is no room are left out."""
        places: list[int | None] = []
        for token, parent, reach in zip(tokens, parents, reaches, strict=True):
            before = -1 if parent < 0 else places[parent]
            places.append(None if before is None else self.add(before, token, reach, source))

    def likeliest(self) -> list[int]:
        """The nodes of the path that the text most likely takes."""
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
        """Leave the likeliest path: for a target that verifies no trees."""
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
        """The device said that no draft is coming, so there is nothing to wait for."""
        self._prefix, self._vocabulary_size, self._limits = prefix, vocabulary_size, limits
        self._hit_rate = MovingAverage(0.05)
        self._acceptance = AcceptanceEstimator()
        self._stale = 0
        self._waiting_since: float | None = None

    def reset(self, drafting: bool) -> None:
        self.tree.clear()
        self.no_draft_coming, self._waiting_since = not drafting, None

    def receive(self, draft: Draft, now: float) -> Fault | None:
        """Grow the tree by ``draft``; a fault when it cannot have been meant for this prefix."""
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
            if 0 <= token < size:  # a padded draft may propose what is no token
                growth = grow(first + index, parent, token, base)
            if growth is ALIVE:
                useful = True
            elif growth is STALE:
                self._stale += 1
        return useful

    def pass_tree(self, room: int, end: int, least_chance: float = 0.0) -> PassTree:
        """The nodes that the next pass should look at, oldest first, with room for ``room`` in all.

        A node can matter only if the target's token after it lies before ``end``, and is worth its
        row only if the product of the acceptance rates of the ranks on its path is at least
        ``least_chance``. A parent is older and likelier than its children, so it is chosen too."""
        tree, rates, places = PassTree(room), self._acceptance.rates, {ROOT: -1}
        last = len(rates) - 1
        for node in self.tree.nodes.values():
            if len(places) > room:
                break
            parent, rank = places.get(node.parent), node.rank
            if parent is None:  # it was not chosen
                continue
            before = 1.0 if parent < 0 else tree.reach[parent]
            reach = before * rates[rank if rank < last else last]
            if reach >= least_chance and node.position < end - 1:
                place = tree.add(parent, node.token, reach, Source.DEVICE)
                assert place is not None
                places[node.id] = place
        return tree

    @property
    def best_chance(self) -> float:
        """How likely the device's first choice is right: no draft of it is likelier to pay."""
        return self._acceptance.rate(0)

    def take_queue_s(self, now: float) -> float:
        """How long the oldest node has waited for the pass that starts now; 0 without nodes."""
        since, self._waiting_since = self._waiting_since, None
        return 0.0 if since is None else now - since

    def take_stale(self) -> int:
        """Nodes dropped as stale on arrival since the last call."""
        stale, self._stale = self._stale, 0
        return stale

    def view(
        self, now: float, idle_since: float, pass_s: float, *, runs_anyway: bool = False
    ) -> RunAheadView:
        """What a run-ahead policy may know when no node is waiting."""
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
        """A pass committed ``tokens``; ``hit``: was the first a node (None: it had none)?"""
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
    """Indices of the accepted nodes of the pass, root to leaf."""
    tokens: tuple[int, ...]
    """What to commit: one token an accepted node, and one more. Never empty."""
    replaced: tuple[int, ...] = ()
    """Places in ``tokens`` of those that are not the target's own."""


class AcceptanceRule(Protocol):
    def walk(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        targets: Sequence[int],
        scores: Sequence[NodeScore] = (),
        ends: frozenset[int] = frozenset(),
    ) -> Walk:
        """``tokens[i]``/``parents[i]`` describe node i of the pass (-1 is the root);
        ``targets[0]`` is the target's token at the root, ``targets[1 + i]`` after node i.
        ``scores`` are of the first nodes, those that a relaxed rule may take; ``ends`` end the
        text. The exact rule looks at neither."""


@statically_frozen
class ExactRule:
    """From the root, go to the child that *is* the target's token, as long as there is one; what
    the target said at the last node is the correction or the bonus. Nothing to bias."""

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
        for node, parent in enumerate(parents):  # a child comes behind its parent
            if parent == at and tokens[node] == wanted:
                nodes.append(node)
                at, wanted = node, targets[1 + node]
                committed.append(wanted)
        return Walk(tuple(nodes), tuple(committed))
