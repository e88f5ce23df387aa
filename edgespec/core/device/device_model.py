"""The device model as a draft source: candidates that come from steps of the device's draft model.

At most one step runs at a time, beside the session. Its candidates become nodes when it is done. If
lookup has added the same token at the place, the candidate confirms that node; lookup's other
tokens there are contradicted, which lowers their chance.

A step of a parallel draft brings candidates for several consecutive positions, its places. They
become a chain of the first candidates, with the others as siblings. Each place has an acceptance
rate of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
# Steps after which the number of places is chosen again.
_CHOOSE_EVERY: Final = 8
# Interval, in steps, at which further places of a parallel draft are tried: until this many trials
# of the first one were decided, and from then on. A trial of more places would cost more than is
# learned, since the last ones are hardly ever reached.
_TRY_EVERY, _TRIALS_WANTED, _TRY_AGAIN_EVERY = 8, 12.0, 256
_TRIED_PLACES: Final = 4
# A place that is reached less often than this keeps its first candidate only.
_LEAST_REACHED: Final = 1e-3


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
    places: int = 1
    """Positions that the step drafts for."""
    first_place: int = 0
    """First place whose candidates are not in the tree yet."""


class DeviceModel:
    """The draft model's part in one session, a ``SteppedSource``. ``tree``, ``estimates`` and
    ``counters`` are the session's."""

    __slots__ = (
        *("_cache", "_candidates", "_counters", "_done", "_empty_step", "_estimates"),
        *("_max_places", "_step", "_tree", "has_candidates", "is_running", "kind"),
    )

    def __init__(
        self, tree: SpeculationTree, estimates: DraftEstimates, counters: DraftCounters
    ) -> None:
        self.kind = SourceKind.DEVICE_MODEL
        self._tree, self._estimates, self._counters = tree, estimates, counters
        self._max_places = estimates.max_places
        self._cache = DraftCache()
        self._step: _Step | None = None
        """The step that runs."""
        self.is_running = False
        """Whether a step runs."""
        self.has_candidates = False
        """Whether ``add_nodes`` would add nodes."""
        self._done: _Step | None = None
        """The step whose candidates are not in the tree yet."""
        self._candidates: Sequence[tuple[Candidate, ...]] = ()
        """Its candidates, place by place."""
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
        width, places = view.affordable_width(parent, policy.width), 1
        if self._max_places > 1:
            places = self._choose_places(parent, view, policy, width)
        prefix = self._tree.prefix
        keep, feed = self._cache.feed(prefix, self._tree.path(parent))
        self._step = _Step(
            parent=parent,
            width=width,
            min_candidate_chance=policy.min_candidate_chance,
            base_position=prefix.length,
            started_at=now,
            fed=len(feed),
            places=places,
        )
        self.is_running = True
        return StartStep(keep, feed, width, places)

    def _choose_places(self, parent: int, view: DraftView, policy: DraftPolicy, width: int) -> int:
        """Return for how many positions the next step drafts.

        These are as many as the policy chooses, or now and then more, to measure how often they are
        right. The verifier must accept their nodes, and the output must have positions for them."""
        estimates, steps = self._estimates, self._counters.steps
        if steps % _CHOOSE_EVERY == 0:
            estimates.places = policy.choose_places(view)
        places, tried = estimates.places, estimates.guesses.at(1).acceptance.trials[0]
        if steps % (_TRY_EVERY if tried < _TRIALS_WANTED else _TRY_AGAIN_EVERY) == 1:
            places = max(places, _TRIED_PLACES)
        position = self._tree.child_position(parent, self._tree.prefix.length)
        assert position is not None
        return max(1, min(places, self._max_places, view.room // width, view.end - position))

    def record_step(self, done: StepDone, now: float) -> list[list[Node]]:
        """Record the candidates of the step that ran.

        If places of it were decided while it ran, their candidates are returned, as nodes to be
        judged, which still measures the draft. If their branch is dead, they are dropped. The
        others wait for ``add_nodes``."""
        assert self._step is not None
        step, self._step, self.is_running = self._step, None, False
        if not done.candidates:
            self._empty_step = step.base_position, step.parent
            return []
        self._empty_step = None
        self._counters.steps += 1
        self._estimates.note_step(step.fed, now - step.started_at, step.places)
        position = self._tree.child_position(step.parent, step.base_position)
        if position is None:
            return []  # the branch is dead
        places = (done.candidates, *done.further[: step.places - 1])
        if position >= self._tree.prefix.length:
            self._done, self._candidates, self.has_candidates = step, places, True
            return []
        decided, committed, parent = [], self._tree.prefix.tokens, step.parent
        for place, candidates in enumerate(places):
            if not candidates:
                break
            if position >= self._tree.prefix.length:
                self._done = replace(step, parent=parent, first_place=place)
                self._candidates, self.has_candidates = places[place:], True
                break
            late = self._judge_late(step, parent, place, position, candidates)
            decided.append(late)
            if late[0].token != committed[position]:
                break  # the places behind it stand behind a wrong token
            parent, position = late[0].id, position + 1
        return decided

    def _judge_late(
        self,
        step: _Step,
        parent: int,
        place: int,
        position: int,
        candidates: Sequence[Candidate],
    ) -> list[Node]:
        """Return the nodes of a place that is decided already. The tree remembers the id of a right
        one."""
        late, tree, grow, base = [], self._tree, self._tree.grow, step.base_position
        chosen = self._select(step, candidates, {}, place)
        for rank, (token, logprob, chance) in enumerate(chosen):
            node_id = tree.last_id + 1
            grow(node_id, parent, token, base, rank, logprob, chance)
            late.append(
                Node(
                    id=node_id,
                    parent=ROOT,
                    token=token,
                    position=position,
                    rank=rank,
                    children=[],
                    logprob=logprob,
                    place=place,
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
        first = self._add_place(step, step.parent, step.first_place, self._candidates[0])
        if len(self._candidates) > 1:
            self._add_further_places(step, first, view)

    def _add_place(
        self,
        step: _Step,
        parent: int,
        place: int,
        candidates: Sequence[Candidate],
        reached: float = 1.0,
    ) -> int:
        """Add the candidates of one place behind ``parent``, which is right with the chance
        ``reached`` if what the step ran behind is. Return the id of the first one's node."""
        tree, grow, base = self._tree, self._tree.grow, step.base_position
        lookup_nodes = {node.token: node for node in tree.children(parent)}
        found, first = self._select(step, candidates, lookup_nodes, place, reached), ROOT
        for rank, (token, logprob, chance) in enumerate(found):
            if (node := lookup_nodes.pop(token, None)) is not None:
                if rank and node.prediction_cell != NO_CELL:
                    chance = max(chance, self._estimates.guesses.contradicted_node_chance(node))
                node.rank, node.logprob, node.chance = rank, logprob, chance
                node_id, node.place = node.id, place
            else:
                # This takes 0.2 us less by position than with names, for every draft node.
                node_id = tree.last_id + 1
                grow(node_id, parent, token, base, rank, logprob, chance)
                if place and (grown := tree.nodes.get(node_id)) is not None:
                    grown.place = place
            if not rank:
                first = node_id
        for node in lookup_nodes.values():
            node.chance = self._estimates.guesses.contradicted_node_chance(node)
        return first

    def _add_further_places(self, step: _Step, first: int, view: DraftView) -> None:
        """Add the candidates of the places behind the first one that is left: a chain of the best
        ones, each with its siblings. It ends before a row that is not worth its price in its
        pass."""
        nodes, least, reached = self._tree.nodes, view.row_chance, 1.0
        in_pass = view.chance_in_pass(step.parent)
        for place, candidates in enumerate(self._candidates[1:], step.first_place + 1):
            if not candidates or (parent := nodes.get(first)) is None:
                return
            reached *= parent.chance
            if parent.position >= view.settled_position:
                in_pass *= parent.chance
            if in_pass * self._estimates.guesses.at(place).acceptance.rate(0) < least:
                return
            first = self._add_place(step, first, place, candidates, reached)

    def learn(self, verdict: JudgedPlace) -> None:
        """Count a place at which the model had offered candidates, by rank and by confidence."""
        if not verdict.model_nodes:
            return
        right, estimates = verdict.right, self._estimates
        rank = None if right is None or right.rank == UNRANKED else right.rank
        acceptance, place = estimates.acceptance, 0
        if self._max_places > 1:
            place = next(node.place for node in verdict.offered if node.rank != UNRANKED)
            acceptance = estimates.guesses.at(place).acceptance
        if not place:
            estimates.evidence.add(hit=rank is not None)
        acceptance.add(rank, verdict.model_nodes)
        for node in verdict.offered:
            if node.rank != UNRANKED:
                estimates.guesses.add(node, hit=node is right)

    def _select(
        self,
        step: _Step,
        candidates: Sequence[Candidate],
        lookup_nodes: Mapping[int, Node],
        place: int = 0,
        reached: float = 1.0,
    ) -> list[tuple[int, float, float]]:
        """Return the candidates to keep, as (token, log-probability, chance).

        They end before the first one that is hardly ever right; none behind it is kept, so that
        ranks have no gaps. Now and then all are kept, to measure their chances. ``lookup_nodes``
        are text lookup's nodes for the place, by token. ``reached`` is the chance that the place is
        reached at all."""
        guesses = self._estimates.guesses.at(place)
        draft_chance, rate = guesses.draft_chance, guesses.acceptance.rate
        least = step.min_candidate_chance if self._counters.steps % _KEEP_ALL_EVERY else 0.0
        least /= max(reached, _LEAST_REACHED)
        kept = []
        for rank, one in enumerate(candidates[: step.width]):
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
