"""At most one draft step runs; its guesses grow the tree when it ends, wherever the root is then.

A step starts behind one node or several on some committed prefix. While it runs, a commit may move
the root: the step's guesses are then matched against the new root, where they become nodes, turn
out to be what was committed meanwhile (which still says how good the draft is), or are dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgespec.core.device import events as ev
from edgespec.core.device.cache import DraftCache
from edgespec.core.device.commit_reader import CommitReader
from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.tree_cache import MAX_TREE_NODES, TreeCache
from edgespec.core.protocol.tree import FORWARDED, SpeculationTree
from edgespec.core.protocol.work import Candidate
from edgespec.core.statically_frozen import statically_frozen

# Feeding more than this is prefill or catching up, and says little about a usual step.
_USUAL_FEED = 2
# After so many steps the choices that are hardly ever right are kept once.
_KEEP_ALL_EVERY = 16


@statically_frozen
class Leaf:
    """A node to draft behind (or ``ROOT``), and how many choices to take there: of those after the
    first only such as are right with a chance of ``least_choice``."""

    parent: int
    width: int
    least_choice: float = 0.0


def leaf_behind(parent: int, view: DraftView, policy: DraftPolicy) -> Leaf:
    """What ``policy`` wants behind ``parent``."""
    return Leaf(parent, view.paying(parent, policy.width), policy.least_choice)


@statically_frozen
class _Step:
    leaves: tuple[Leaf, ...]
    base_position: int
    started_at: float
    fed: int
    rows: int


class DraftSteps:
    """The steps of one session, one after the other. ``most_leaves`` 1 asks for plain steps; with
    more, every step is one of a ``ports.TreeDrafter``."""

    def __init__(self, tree: SpeculationTree, reader: CommitReader, most_leaves: int = 1) -> None:
        self._tree, self._reader, self.most_leaves = tree, reader, most_leaves
        self._cache = DraftCache()
        self._tree_cache = TreeCache() if most_leaves > 1 else None
        self.most_nodes = MAX_TREE_NODES if most_leaves > 1 else sys.maxsize
        """A drafter that takes trees has rows for so many."""
        self._running: _Step | None = None
        self._speechless: tuple[int, frozenset[int]] = (0, frozenset())
        """Where the last step had no guess: the committed length, and the nodes."""
        self.waiting = False
        """Whether the step that runs has to wait for other sessions to begin."""

    @property
    def running(self) -> bool:
        return self._running is not None

    def is_worth_asking(self, parent: int) -> bool:
        """False where the drafter was asked last and had no guess: it would have none again."""
        length, parents = self._speechless
        return length != self._tree.prefix.length or parent not in parents

    def start(self, leaves: Sequence[Leaf], now: float) -> ev.StartStep:
        """Draft behind ``leaves``, one or several, likeliest first."""
        tree = self._tree
        prefix, rows = tree.prefix, None
        parents = [leaf.parent for leaf in leaves]
        if self._tree_cache is None:
            (parent,) = parents
            keep, feed = self._cache.feed(prefix, tree.path(parent))
        else:
            keep, feed, rows = self._tree_cache.feed(tree, parents)
        fed = len(feed) + (len(rows.tokens) - len(leaves) if rows is not None else 0)
        count = len(feed) + len(rows.tokens) if rows is not None else len(feed)
        self._running = _Step(tuple(leaves), prefix.length, now, fed, count)
        return ev.StartStep(keep, feed, max([leaf.width for leaf in leaves]), rows)

    def put_off(self, event: ev.StepWaits | ev.StepWithdrawn) -> None:
        """The step asked for waits for other sessions, or is to be asked for anew."""
        if self._running is None:
            return
        self.waiting = isinstance(event, ev.StepWaits)
        if isinstance(event, ev.StepWithdrawn):
            self._running = None
            cache = self._cache if self._tree_cache is None else self._tree_cache
            cache.take_back(forgotten=event.forgotten)

    def failed(self) -> None:
        self._running, self.waiting = None, False

    def done(self, event: ev.StepDone, now: float) -> None:
        """Grow the tree by the guesses of the step that ran."""
        assert self._running is not None
        step, self._running, self.waiting = self._running, None, False
        answers = (event.candidates, *event.others)
        assert len(answers) == len(step.leaves)
        estimates = self._reader.estimates
        self._reader.counters.steps += 1
        speechless = [
            leaf.parent for leaf, found in zip(step.leaves, answers, strict=True) if not found
        ]
        self._speechless = (step.base_position, frozenset(speechless))
        if step.fed <= _USUAL_FEED:
            estimates.step_s.add(now - step.started_at)
            estimates.rows.add(step.rows, now - step.started_at)
        for leaf, found in zip(step.leaves, answers, strict=True):
            kept = self._worth_keeping(found[: leaf.width], leaf.least_choice)
            self._grow(leaf.parent, step.base_position, kept)

    def _worth_keeping(self, found: Sequence[Candidate], least: float) -> Sequence[Candidate]:
        """The choices up to the first that is hardly ever right: then none behind it is kept, so
        that ranks have no gaps. Now and then all are kept, to learn what they are worth."""
        if not least or self._reader.counters.steps % _KEEP_ALL_EVERY == 0:
            return found
        chance = self._reader.estimates.chance
        for rank, one in enumerate(found):
            if rank and chance(rank, one.logprob) < least:
                return found[:rank]
        return found

    def _grow(self, parent: int, base_position: int, candidates: Sequence[Candidate]) -> None:
        tree = self._tree
        winner, late = None, False
        if base_position < tree.prefix.length:  # the root moved meanwhile
            position = tree.place(parent, base_position)
            late = position is not None and position < tree.prefix.length
        for rank, candidate in enumerate(candidates):
            node_id = tree.last_id + 1
            token, logprob = candidate.token, candidate.logprob
            growth = tree.grow(node_id, parent, token, base_position, rank, logprob)
            winner = rank if growth is FORWARDED else winner
        if late:
            offered = [(rank, one.logprob) for rank, one in enumerate(candidates)]
            self._reader.score(winner, offered)
