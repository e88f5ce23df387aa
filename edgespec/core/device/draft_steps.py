"""At most one draft step runs; its guesses grow the tree when it ends, wherever the root is then.

A step starts behind a node on some committed prefix. While it runs, a commit may move the root: the
step's guesses are then matched against the new root, where they become nodes, turn out to be what
was committed meanwhile (which still says how good the draft is), or are dropped.
"""

from __future__ import annotations

from edgespec.core.device import events as ev
from edgespec.core.device.cache import DraftCache
from edgespec.core.device.commit_reader import CommitReader
from edgespec.core.protocol.tree import FORWARDED, SpeculationTree
from edgespec.core.statically_frozen import statically_frozen

# Feeding more than this is prefill or catching up, and says little about a usual step.
_USUAL_FEED = 2


@statically_frozen
class _Step:
    parent: int
    base_position: int
    started_at: float
    fed: int


class DraftSteps:
    """The steps of one session, one after the other."""

    def __init__(self, tree: SpeculationTree, reader: CommitReader) -> None:
        self._tree, self._reader = tree, reader
        self._cache = DraftCache()
        self._running: _Step | None = None
        self._speechless_at: tuple[int, int] | None = None
        self.waiting = False
        """Whether the step that runs has to wait for other sessions to begin."""

    @property
    def running(self) -> bool:
        return self._running is not None

    def is_worth_asking(self, parent: int) -> bool:
        """False where the drafter was asked last and had no guess: it would have none again."""
        return (parent, self._tree.prefix.length) != self._speechless_at

    def start(self, parent: int, width: int, now: float) -> ev.StartStep:
        """Draft behind ``parent``."""
        prefix = self._tree.prefix
        keep, feed = self._cache.feed(prefix, self._tree.path(parent))
        self._running = _Step(parent, prefix.length, now, len(feed))
        return ev.StartStep(keep, feed, width)

    def put_off(self, event: ev.StepWaits | ev.StepWithdrawn) -> None:
        """The step asked for waits for other sessions, or is to be asked for anew."""
        if self._running is None:
            return
        self.waiting = isinstance(event, ev.StepWaits)
        if isinstance(event, ev.StepWithdrawn):
            self._running = None
            self._cache.take_back(forgotten=event.forgotten)

    def failed(self) -> None:
        self._running, self.waiting = None, False

    def done(self, event: ev.StepDone, now: float) -> None:
        """Grow the tree by the guesses of the step that ran."""
        assert self._running is not None
        step, self._running, self.waiting = self._running, None, False
        tree = self._tree
        self._reader.counters.steps += 1
        self._speechless_at = None if event.candidates else (step.parent, step.base_position)
        if step.fed <= _USUAL_FEED:
            self._reader.estimates.step_s.add(now - step.started_at)
        winner, late = None, False
        if step.base_position < tree.prefix.length:  # the root moved meanwhile
            position = tree.place(step.parent, step.base_position)
            late = position is not None and position < tree.prefix.length
        for rank, candidate in enumerate(event.candidates):
            node_id = tree.last_id + 1
            growth = tree.grow(node_id, step.parent, candidate.token, step.base_position, rank)
            winner = rank if growth is FORWARDED else winner
        if late:
            self._reader.score(winner, len(event.candidates))
