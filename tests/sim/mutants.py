"""Plausible mistakes in the product's machines, each as a patch of one or two methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from edgespec.core.device import events as draft_events
from edgespec.core.device.commit_reader import CommitReader, DraftOutbox
from edgespec.core.device.events import Deliver
from edgespec.core.device.session import DraftCache, DraftSession
from edgespec.core.protocol.messages import (
    Commit,
    Draft,
    Fault,
    FaultCode,
    FinishReason,
    Open,
    Opened,
)
from edgespec.core.protocol.tree import ROOT, Ending, Growth, Node, SpeculationTree
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.cache_keeper import CacheKeeper
from edgespec.core.verifier.drafts import DraftInbox, ExactRule, Walk
from edgespec.core.verifier.engine import Containment, SessionRegistry
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import (
    Evicted,
    Keep,
    Offer,
    PassDone,
    PassFailed,
    Send,
    VerifyAction,
    VerifyEvent,
)
from tests.sim.mutant import Mutant, patch

_place, _keep = SpeculationTree.place, VerifySession._on_pass_done
_grow = SpeculationTree.grow
_read, _receive, _cut = CommitReader.read, DraftInbox.receive, Ending.cut
_attach, _opened = VerifySession._on_attach, DraftSession._on_opened
_verifiable = DraftInbox.verifiable
_handle, _victims = VerifySession.handle, CacheKeeper._victims
_end, _probe_done = SessionRegistry.end, Containment.probe_done
_step_done, _offer = DraftSession._step_done, VerifySession._on_offer
_take = BlockLedger._take


def _siblings_survive(tree: SpeculationTree, node_id: int) -> None:
    return None


def _keeps_one_short(
    session: VerifySession, event: PassDone, now: float
) -> tuple[VerifyAction, ...]:
    actions = _keep(session, event, now)
    return tuple(Keep(a.nodes[:-1]) if isinstance(a, Keep) else a for a in actions)


def _dead_parents_count(tree: SpeculationTree, parent: int, base_position: int) -> int | None:
    place = _place(tree, parent, base_position)
    return tree.prefix.length if place is None else place


def _late_drafts_move_along(
    tree: SpeculationTree,
    node: int,
    parent: int,
    token: int,
    base: int,
    rank: int | None = None,
    logprob: float = 0.0,
) -> Growth:
    at = tree.prefix.length if parent == ROOT else base
    return _grow(tree, node, parent, token, at, rank, logprob)


def _old_tree_stays(inbox: DraftInbox, drafting: bool) -> None:
    inbox.no_draft_coming, inbox._waiting_since = not drafting, None


def _overlap_is_new(reader: CommitReader, commit: Commit, now: float) -> Deliver | None:
    return _read(reader, replace(commit, position=reader._prefix.length), now)


def _hash_is_ignored(inbox: DraftInbox, draft: Draft, now: float) -> Fault | None:
    base = min(draft.base_position, inbox._prefix.length)
    return _receive(inbox, replace(draft, base_hash=inbox._prefix.hash_at(base)), now)


def _base_ahead_is_taken(inbox: DraftInbox, draft: Draft, now: float) -> Fault | None:
    length = inbox._prefix.length
    if draft.base_position > length:
        draft = replace(draft, base_position=length, base_hash=inbox._prefix.hash_at(length))
    return _receive(inbox, draft, now)


def _stop_is_ignored(
    ending: Ending, position: int, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    return _cut(replace(ending, stops=frozenset()), position, tokens)


def _stop_only_at_the_end(
    ending: Ending, position: int, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    kept, finish = _cut(replace(ending, stops=frozenset()), position, tokens)
    return kept, FinishReason.STOP if kept and kept[-1] in ending.stops else finish


def _max_tokens_overshot(
    ending: Ending, position: int, tokens: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    kept, finish = _cut(ending, position, tokens)
    return (tokens if finish is FinishReason.LENGTH else kept), finish


def _cache_is_trusted(cache: DraftCache, prefix: Any) -> None:
    cache._agreed = min(len(cache._tokens), prefix.length)


def _resume_skips_one(
    session: VerifySession, request: Open, now: float
) -> tuple[VerifyAction, ...]:
    def short(action: VerifyAction) -> VerifyAction:
        match action:
            case Send(Commit(position, tokens) as commit) if tokens:
                return Send(replace(commit, position=position + 1, tokens=tokens[1:]))
        return action

    return tuple(short(action) for action in _attach(session, request, now))


def _resume_sends_nothing(
    session: VerifySession, request: Open, now: float
) -> tuple[VerifyAction, ...]:
    return _attach(session, request, now)[:1]


def _siblings_are_independent(
    rule: ExactRule, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]
) -> Walk:
    """Any node that some row of the pass predicts is accepted; the longest path wins."""
    path: list[int] = []
    for node in range(len(tokens)):
        parent = path[-1] if path else -1
        if parents[node] == parent and tokens[node] in targets:
            path.append(node)
    last = targets[1 + path[-1]] if path else targets[0]
    return Walk(tuple(path), (*(tokens[node] for node in path), last))


def _acknowledges_rarely(
    session: DraftSession, opened: Opened, now: float
) -> list[draft_events.DraftAction]:
    actions = _opened(session, opened, now)
    session._reader.max_unreceived = 1 << 20
    return actions


def _repeats_empty_steps(steps: DraftSession, done: draft_events.StepDone, now: float) -> None:
    _step_done(steps, done, now)
    steps._speechless = None


def _flow_control_off(session: VerifySession, offer: Offer, now: float) -> tuple[VerifyAction, ...]:
    session.device.received = session.prefix.length
    session.device.unread_since = None
    return _offer(session, offer, now)


def _failed_pass_hangs(
    session: VerifySession, event: VerifyEvent, now: float
) -> tuple[VerifyAction, ...]:
    if isinstance(event, PassFailed):
        session._pass = None
        return ()
    return _handle(session, event, now)


def _eviction_is_not_told(
    session: VerifySession, event: VerifyEvent, now: float
) -> tuple[VerifyAction, ...]:
    return () if isinstance(event, Evicted) else _handle(session, event, now)


def _blamed_session_stays(registry: SessionRegistry, key: str, fault: Fault | None) -> None:
    if fault is None or fault.code is not FaultCode.INTERNAL:
        _end(registry, key, fault)


def _probe_hangs(containment: Containment, broken: str | None) -> None:
    """The suspect is judged, but no pass is ever formed again."""
    suspect = containment._suspect
    _probe_done(containment, broken)
    containment._suspect = suspect


def _probe_keeps_its_block(containment: Containment, broken: str | None) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(containment._keeper, "release", lambda key: None)
        _probe_done(containment, broken)


def _newest_nodes_first(
    inbox: DraftInbox, room: int, end: int, least_chance: float = 0.0
) -> list[Node]:
    nodes = [node for node in inbox.tree.nodes.values() if node.position < end - 1]
    return nodes[-room:] if room > 0 else []


def _nodes_past_the_end(
    inbox: DraftInbox, room: int, end: int, least_chance: float = 0.0
) -> list[Node]:
    return _verifiable(inbox, room, end + 8, least_chance)


def _overshoots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mistakes: either alone is made good by the other place."""
    monkeypatch.setattr(Ending, "cut", _max_tokens_overshot)
    monkeypatch.setattr(DraftInbox, "verifiable", _nodes_past_the_end)


CORE_MUTANTS = (
    Mutant("killed siblings survive", patch(SpeculationTree, "_kill", _siblings_survive), 20),
    Mutant("keep is one short", patch(VerifySession, "_on_pass_done", _keeps_one_short), 20),
    Mutant("dead parents count", patch(SpeculationTree, "place", _dead_parents_count), 60),
    Mutant("late drafts move along", patch(SpeculationTree, "grow", _late_drafts_move_along), 20),
    Mutant("attach keeps the old tree", patch(DraftInbox, "reset", _old_tree_stays), 800),
    Mutant("overlap delivered twice", patch(CommitReader, "read", _overlap_is_new), 30),
    Mutant("hash not matched", patch(DraftInbox, "receive", _hash_is_ignored), 400),
    Mutant("base ahead is taken", patch(DraftInbox, "receive", _base_ahead_is_taken), 400),
    Mutant("stop ids ignored", patch(Ending, "cut", _stop_is_ignored), 40),
    Mutant("stop only as last token", patch(Ending, "cut", _stop_only_at_the_end), 60),
    Mutant("max_tokens overshot", _overshoots, 60),
    Mutant("draft cache trusted", patch(DraftCache, "_catch_up", _cache_is_trusted), 100),
    Mutant("resume skips a token", patch(VerifySession, "_on_attach", _resume_skips_one), 200),
    Mutant("resume sends nothing", patch(VerifySession, "_on_attach", _resume_sends_nothing), 200),
    Mutant("independent siblings", patch(ExactRule, "walk", _siblings_are_independent), 60),
    Mutant("acknowledges rarely", patch(DraftSession, "_on_opened", _acknowledges_rarely), 20),
    Mutant("empty steps repeated", patch(DraftSession, "_step_done", _repeats_empty_steps), 300),
    Mutant("new stream, old marks", patch(DraftOutbox, "new_stream", lambda outbox: None), 500),
    Mutant("flow control off", patch(VerifySession, "_on_offer", _flow_control_off), 20),
    Mutant("failed pass hangs", patch(VerifySession, "handle", _failed_pass_hangs), 50),
    Mutant("eviction is not told", patch(VerifySession, "handle", _eviction_is_not_told), 50),
    Mutant("blamed session stays", patch(SessionRegistry, "end", _blamed_session_stays), 100),
    Mutant("probe never ends", patch(Containment, "probe_done", _probe_hangs), 200),
    Mutant("probe keeps blocks", patch(Containment, "probe_done", _probe_keeps_its_block), 200),
    Mutant("newest nodes first", patch(DraftInbox, "verifiable", _newest_nodes_first), 80),
    Mutant(
        "silence when resting", patch(DraftSession, "_leave_nothing_open", lambda session: []), 60
    ),
)
