"""The device model as a draft source: candidates that come from steps of the device's draft model.

At most one step runs at a time, beside the session. Its candidates become nodes when it is done. If
lookup has added the same token at the place, the candidate confirms that node; lookup's other
tokens there are contradicted, which lowers their chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.events import DraftCounters, StartStep, StepDone
from edgespec.core.device.policy import DraftPolicy, DraftView, JudgedPlace
from edgespec.core.protocol.draft_source import SourceKind
from edgespec.core.protocol.estimators import ASSUMED_STEP_SHARE
from edgespec.core.protocol.tree import (
    NO_CELL,
    ROOT,
    UNRANKED,
    CommittedPrefix,
    Node,
    SpeculationTree,
)
from edgespec.core.protocol.work import Candidate
from edgespec.core.statically_frozen import statically_frozen

# Interval, in steps, at which candidates that are hardly ever right are kept once.
_KEEP_ALL_EVERY: Final = 16


@statically_frozen
class _Step:
    """A step that runs, or one whose candidates are not in the tree yet."""

    parent: int
    width: int
    min_candidate_chance: float
    """Least chance of a kept candidate after the first one."""
    base_position: int
    started_at: float
    fed: int


class DeviceModel:
    """The draft model's part in one session, a ``SteppedSource``. ``tree``, ``estimates`` and
    ``counters`` are the session's."""

    __slots__ = (
        *("_cache", "_candidates", "_counters", "_done", "_empty_step", "_estimates", "_step"),
        *("_tree", "has_candidates", "is_running", "kind"),
    )

    def __init__(
        self, tree: SpeculationTree, estimates: DraftEstimates, counters: DraftCounters
    ) -> None:
        self.kind = SourceKind.DEVICE_MODEL
        self._tree, self._estimates, self._counters = tree, estimates, counters
        self._cache = DraftCache()
        self._step: _Step | None = None
        """The step that runs."""
        self.is_running = False
        """Whether a step runs."""
        self.has_candidates = False
        """Whether ``add_nodes`` would add nodes."""
        self._done: _Step | None = None
        """The step whose candidates are not in the tree yet."""
        self._candidates: Sequence[Candidate] = ()
        self._empty_step: tuple[int, int] | None = None
        """Committed length and parent of the last step if it returned no candidate."""

    @property
    def acceptance_rate(self) -> float:
        return self._estimates.acceptance.rate(0)

    def step_s(self, pass_s: float) -> float:
        return self._estimates.step_s.get(ASSUMED_STEP_SHARE * pass_s)

    def can_step(self, parent: int) -> bool:
        """Return whether a step behind ``parent`` may return candidates: the last one was not
        empty there."""
        return self._empty_step != (self._tree.prefix.length, parent)

    def begin_step(
        self, parent: int, view: DraftView, policy: DraftPolicy, now: float
    ) -> StartStep:
        """Begin a step behind ``parent`` with as many candidates as the policy wants and the price
        allows. The caller carries it out and hands the result to ``record_step``."""
        width = view.affordable_width(parent, policy.width)
        prefix = self._tree.prefix
        keep, feed = self._cache.feed(prefix, self._tree.path(parent))
        self._step = _Step(
            parent=parent,
            width=width,
            min_candidate_chance=policy.min_candidate_chance,
            base_position=prefix.length,
            started_at=now,
            fed=len(feed),
        )
        self.is_running = True
        return StartStep(keep, feed, width)

    def record_step(self, done: StepDone, now: float) -> list[Node]:
        """Record the candidates of the step that ran.

        If their place was decided while it ran, they are returned, as nodes to be judged, which
        still measures the draft. If their branch is dead, they are dropped. Otherwise they wait for
        ``add_nodes``."""
        assert self._step is not None
        step, self._step, self.is_running = self._step, None, False
        if not done.candidates:
            self._empty_step = step.base_position, step.parent
            return []
        self._empty_step = None
        self._counters.steps += 1
        self._estimates.note_step(step.fed, now - step.started_at)
        position = self._tree.child_position(step.parent, step.base_position)
        if position is None:
            return []  # the branch is dead
        candidates = done.candidates[: step.width]
        if position >= self._tree.prefix.length:
            self._done, self._candidates, self.has_candidates = step, candidates, True
            return []
        late, tree, grow, base = [], self._tree, self._tree.grow, step.base_position
        for rank, (token, logprob, chance) in enumerate(self._select(step, candidates, {})):
            # The tree remembers the id of a right one.
            grow(tree.last_id + 1, step.parent, token, base, rank, logprob, chance)
            late.append(
                Node(
                    id=ROOT,
                    parent=ROOT,
                    token=token,
                    position=position,
                    rank=rank,
                    children=[],
                    logprob=logprob,
                )
            )
        return late

    def drop_step(self) -> None:
        """Forget the step that ran, because it failed."""
        self._step, self.is_running = None, False

    def add_nodes(self, view: DraftView) -> None:
        """Add the candidates of the last step, or rank the lookup nodes that they confirm."""
        if self._done is None:
            return
        step, self._done, self.has_candidates = self._done, None, False
        tree, grow, base = self._tree, self._tree.grow, step.base_position
        lookup_nodes = {node.token: node for node in tree.children(step.parent)}
        found = self._select(step, self._candidates, lookup_nodes)
        for rank, (token, logprob, chance) in enumerate(found):
            if (node := lookup_nodes.pop(token, None)) is not None:
                if rank and node.prediction_cell != NO_CELL:
                    chance = max(chance, self._estimates.guesses.contradicted_node_chance(node))
                node.rank, node.logprob, node.chance = rank, logprob, chance
            else:
                # This takes 0.2 us less by position than with names, for every draft node.
                grow(tree.last_id + 1, step.parent, token, base, rank, logprob, chance)
        for node in lookup_nodes.values():
            node.chance = self._estimates.guesses.contradicted_node_chance(node)

    def learn(self, verdict: JudgedPlace) -> None:
        """Count a place at which the model had offered candidates, by rank and by confidence."""
        if not verdict.model_nodes:
            return
        right, estimates = verdict.right, self._estimates
        rank = None if right is None or right.rank == UNRANKED else right.rank
        estimates.evidence.add(hit=rank is not None)
        estimates.acceptance.add(rank, verdict.model_nodes)
        for node in verdict.offered:
            if node.rank != UNRANKED:
                estimates.guesses.add(node, hit=node is right)

    def _select(
        self, step: _Step, candidates: Sequence[Candidate], lookup_nodes: Mapping[int, Node]
    ) -> list[tuple[int, float, float]]:
        """Return the candidates to keep, as (token, log-probability, chance).

        They end before the first one that is hardly ever right; none behind it is kept, so that
        ranks have no gaps. Now and then all are kept, to measure their chances. ``lookup_nodes``
        are text lookup's nodes for the place, by token."""
        estimates = self._estimates
        draft_chance, rate = estimates.guesses.draft_chance, estimates.acceptance.rate
        least = step.min_candidate_chance if self._counters.steps % _KEEP_ALL_EVERY else 0.0
        kept = []
        for rank, one in enumerate(candidates):
            node = lookup_nodes.get(one.token)
            lookup_chance = None if node is None else node.chance
            chance = draft_chance(rank, one.logprob, rate(rank), lookup_chance)
            if rank and chance < least:
                break
            kept.append((one.token, one.logprob, chance))
        return kept


class DraftCache:
    """The tokens of a drafter's cached rows, and the cheapest way from there to the next step.

    A drafter only truncates and appends: rolling back after a rejection costs one integer."""

    __slots__ = ("_agreed", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._agreed = 0
        """Number of leading cached tokens that are known to equal the committed prefix."""

    @property
    def length(self) -> int:
        return len(self._tokens)

    def feed(self, prefix: CommittedPrefix, path: list[int]) -> tuple[int, tuple[int, ...]]:
        """Make the cache hold ``prefix`` and then ``path``. Returns (tokens to keep, tokens to
        append).

        At least one token is appended, because its row of logits is what the step is for."""
        if self._agreed < prefix.length:
            self._catch_up(prefix)
        keep, length, cached = self._agreed, prefix.length, self._tokens
        last = length + len(path) - 1
        if keep == length:
            drafted = cached[length : length + len(path)]
            if drafted == path[: len(drafted)]:  # the usual case
                keep += len(drafted)
            else:
                while cached[keep] == path[keep - length]:
                    keep += 1
        if keep > last:
            keep = last
        drafted = path[keep - length :] if keep > length else path
        appended = (*prefix.tokens[keep:], *drafted)
        cached[keep:] = appended
        if keep < self._agreed:
            self._agreed = keep
        return keep, appended

    def _catch_up(self, prefix: CommittedPrefix) -> None:
        cached, tokens, start = self._tokens, prefix.tokens, self._agreed
        for held, token in zip(cached[start:], tokens[start:], strict=False):
            if held != token:
                del cached[self._agreed :]
                return
            self._agreed += 1
