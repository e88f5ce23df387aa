"""A generation that goes on with the draft alone while no verifier can be reached.

Theory of operation. ``OfflineSession`` stands around a ``DraftSession``: it passes events in and
actions out, and watches whether a verifier has greeted on the stream there is. When none has for
``grace_s``, it *writes*: the session then drafts by ``WritingPolicy``, a chain of first choices
without a window, and the tokens of that chain are given to the reader as ``Provisional``. They are
nothing but the nodes of the session's tree. So when a verifier is back they are what the session
offers it: as drafts behind the last committed token, as many at a time as its limits allow. Commits
then either agree with what was written, which makes it the target's own, or say otherwise:
``Correction`` names the position from which on the reader is to discard what it was given.

The writing pauses at an end token, at ``max_tokens``, and when the reader finds a stop string
(``PauseWriting``); it goes on if a correction takes that back. The generation ends only as it does
without all this: by a verifier's word, by ``Stop``, or when patience is at its end.

Invariants: ``Deliver`` holds committed tokens only. ``written`` is a path of the tree from its root
on. Each token given as ``Provisional`` is later either in a ``Deliver`` at its position or taken
back by a ``Correction``, before the ``Finish`` or ``Fail``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from edgespec.core.device import events as ev
from edgespec.core.device.draft_view import DraftView
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.checks import bounded
from edgespec.core.protocol.messages import Commit, Open, Opened
from edgespec.core.protocol.tree import ROOT, Node, SpeculationTree
from edgespec.core.statically_frozen import statically_frozen


class Offline(Enum):
    """What a device does when no verifier can be reached."""

    WAIT = "wait"
    """Nothing but try again."""
    DRAFT = "draft"
    """Write on with the draft alone, marked as unverified, and have it checked later."""


@dataclass(frozen=True, slots=True)
class OfflinePolicy:
    mode: Offline = Offline.WAIT
    grace_s: float = 1.0
    """How long no verifier may have answered before the draft writes on."""

    def __post_init__(self) -> None:
        bounded("grace_s", self.grace_s, 0.0, 3600.0)


@statically_frozen
class Provisional:
    """Tokens that the draft alone wrote, behind all that was given before."""

    position: int
    tokens: tuple[int, ...]


@statically_frozen
class Correction:
    """Whatever was given from this position on as ``Provisional`` does not hold."""

    position: int


@statically_frozen
class PauseWriting:
    """The reader found a stop string in what was written."""


OfflineEvent = ev.DraftEvent | PauseWriting
OfflineAction = ev.DraftAction | Provisional | Correction


class WritingPolicy:
    """``inner``, and while ``writing`` the chain that is written. ``end``: no token is written at
    this position or later. ``stops``: the ids that end a text."""

    def __init__(self, inner: DraftPolicy, end: int, stops: frozenset[int] = frozenset()) -> None:
        self.writing = self.paused = False
        self.written: list[int] = []
        """Tokens given to the reader behind the committed ones."""
        self._inner, self._end, self._stops = inner, end, stops

    @property
    def width(self) -> int:
        return 1 if self.writing else self._inner.width

    @property
    def least_choice(self) -> float:
        return self._inner.least_choice

    def extend(self, view: DraftView) -> int | None:
        if not self.writing:
            return self._inner.extend(view)
        chain = self.chain(view.tree)
        ended = self.paused or (chain and chain[-1].token in self._stops)
        if ended or view.tree.prefix.length + len(chain) >= self._end:
            return None
        return chain[-1].id if chain else ROOT

    def flush(self, view: DraftView) -> bool:
        return self._inner.flush(view)

    def chain(self, tree: SpeculationTree) -> list[Node]:
        """The nodes of what was written, and of first choices behind it up to an end token."""
        nodes: list[Node] = []
        siblings = tree.roots
        while siblings and not (nodes and nodes[-1].token in self._stops):
            node = siblings[0]
            if len(nodes) < len(self.written):
                token = self.written[len(nodes)]
                node = next(one for one in siblings if one.token == token)
            nodes.append(node)
            siblings = node.children
        return nodes


class OfflineSession:
    """``session`` was made with ``writer`` as its policy."""

    def __init__(
        self, session: DraftSession, writer: WritingPolicy, policy: OfflinePolicy | None = None
    ) -> None:
        policy = policy or OfflinePolicy()
        self.session, self._writer = session, writer
        self._grace_s = policy.grace_s if policy.mode is Offline.DRAFT else math.inf
        self._offline_since: float | None = None
        """None: it has not begun, or a verifier has greeted on the stream there is."""

    @property
    def request(self) -> Open:
        return self.session.request

    @property
    def counters(self) -> ev.DraftCounters:
        return self.session.counters

    @property
    def estimates(self) -> DraftEstimates:
        return self.session.estimates

    @property
    def written(self) -> tuple[int, ...]:
        """Tokens given to the reader that are not verified."""
        return tuple(self._writer.written)

    @property
    def writing(self) -> bool:
        return self._writer.writing

    @property
    def deadline(self) -> float | None:
        """When to send ``Tick``."""
        deadline, since = self.session.deadline, self._offline_since
        if since is None or self._writer.writing or deadline is None:
            return deadline
        return min(deadline, since + self._grace_s)

    def handle(self, event: OfflineEvent, now: float) -> tuple[OfflineAction, ...]:
        writer, session = self._writer, self.session
        if isinstance(event, PauseWriting):
            writer.paused = bool(writer.written)
            return ()
        if isinstance(event, Opened | Commit) and session.state is ev.STREAMING:
            self._offline_since, writer.writing = None, False
        elif isinstance(event, ev.Start):
            self._offline_since = now
        since = self._offline_since
        if since is not None and now >= since + self._grace_s:
            writer.writing = True
        actions = session.handle(event, now)
        if since is None and session.state in (ev.CONNECTING, ev.BACKING_OFF):
            self._offline_since = now
        if not (writer.writing or writer.written):
            return actions
        found: list[OfflineAction] = []
        for action in actions:
            found += self._checked(action)
        if writer.writing and not writer.paused and session.state is not ev.DONE:
            found += self._write()
        return tuple(found)

    def _write(self) -> list[OfflineAction]:
        """What the draft has added to its chain since the last time."""
        tree, written = self.session.tree, self._writer.written
        new = tuple([node.token for node in self._writer.chain(tree)[len(written) :]])
        if not new:
            return []
        position = tree.prefix.length + len(written)
        written += new
        return [Provisional(position, new)]

    def _checked(self, action: ev.DraftAction) -> list[OfflineAction]:
        """``action``, and before it what it says against that which was written."""
        written = self._writer.written
        match action:
            case ev.Deliver(position, tokens):
                for index, (told, token) in enumerate(zip(written, tokens, strict=False)):
                    if told != token:
                        return [*self._take_back(position + index), action]
                del written[: len(tokens)]
            case ev.Finish() | ev.Fail():
                if written:
                    return [*self._take_back(self.session.prefix.length), action]
        return [action]

    def _take_back(self, position: int) -> list[OfflineAction]:
        self._writer.written.clear()
        self._writer.paused = False
        return [Correction(position)]
