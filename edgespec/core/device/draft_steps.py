"""At most one draft step runs; its guesses grow the tree when it ends, wherever the root is then.

A step starts behind one node (or ``ROOT``) on some committed prefix. While it runs, a commit may
move the root: the step's guesses are then matched against the new root, where they become nodes,
turn out to be what was committed meanwhile (which still says how good the draft is), or are
dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.device import events as ev
from edgespec.core.device.cache import DraftCache
from edgespec.core.device.commit_reader import CommitReader
from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.protocol.tree import FORWARDED, SpeculationTree
from edgespec.core.protocol.work import Candidate
from edgespec.core.statically_frozen import statically_frozen

# Feeding more than this is prefill or catching up, and says little about a usual step.
_USUAL_FEED = 2
# After so many steps the choices that are hardly ever right are kept once.
_KEEP_ALL_EVERY = 16


@statically_frozen
class _Step:
    parent: int
    width: int
    least_choice: float
    """Of the choices after the first only such as are right with this chance are kept."""
    base_position: int
    started_at: float
    fed: int


class DraftSteps:
    """The steps of one session, one after the other."""

    def __init__(self, tree: SpeculationTree, reader: CommitReader) -> None:
        self._tree, self._reader = tree, reader
        self._cache = DraftCache()
        self._running: _Step | None = None
        self._speechless: tuple[int, int] | None = None
        """Where the last step had no guess: the committed length, and the node."""

    @property
    def running(self) -> bool:
        return self._running is not None

    def is_worth_asking(self, parent: int) -> bool:
        """False where the drafter was asked last and had no guess: it would have none again."""
        return self._speechless != (self._tree.prefix.length, parent)

    def start(self, parent: int, view: DraftView, policy: DraftPolicy, now: float) -> ev.StartStep:
        """Draft behind ``parent`` as many choices as ``policy`` wants and the price allows."""
        prefix = self._tree.prefix
        width = view.paying(parent, policy.width)
        keep, feed = self._cache.feed(prefix, self._tree.path(parent))
        self._running = _Step(parent, width, policy.least_choice, prefix.length, now, len(feed))
        return ev.StartStep(keep, feed, width)

    def failed(self) -> None:
        self._running = None

    def done(self, event: ev.StepDone, now: float) -> None:
        """Grow the tree by the guesses of the step that ran."""
        assert self._running is not None
        step, self._running = self._running, None
        if not event.candidates:
            self._speechless = step.base_position, step.parent
            return
        self._speechless = None
        self._reader.counters.steps += 1
        if step.fed <= _USUAL_FEED:
            self._reader.estimates.step_s.add(now - step.started_at)
        kept = self._worth_keeping(event.candidates[: step.width], step.least_choice)
        self._grow(step.parent, step.base_position, kept)

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
