"""The worlds' checks find what they are there to find.

Oracle: every mutant (a plausible mistake in the product's machines, as a patch of one or two
methods) makes one of its first worlds fail; the product passes all of those (``test_worlds``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier.admission import SessionSlots
from edgespec.core.verifier.block_ledger import BlockLedger, BlockNames, _hash
from edgespec.core.verifier.cache_keeper import CacheKeeper, PrefixSharing
from edgespec.core.verifier.drafts import DraftInbox, ExactRule, PassTree, Walk
from edgespec.core.verifier.engine import Containment, SessionRegistry
from edgespec.core.verifier.engine_events import BatchFailed
from edgespec.core.verifier.served_drafts import Proposal, TextDrafts
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
from tests.sim.random_worlds import play
from tests.sim.test_worlds import WORLDS

Patches = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    apply: Patches
    seeds: int
    """Random worlds that are enough to notice it (measured, and then some)."""


def patch(owner: Any, name: str, mutant: Any) -> Patches:
    """Puts ``mutant`` in the place of an attribute."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, mutant)


_place, _keep = SpeculationTree.place, VerifySession._on_pass_done
_grow = SpeculationTree.grow
_read, _receive, _cut = CommitReader.read, DraftInbox.receive, Ending.cut
_attach, _opened = VerifySession._on_attach, DraftSession._on_opened
_verifiable = DraftInbox.verifiable
_handle = VerifySession.handle
_end, _probe_done = SessionRegistry.end, Containment.probe_done
_step_done, _offer = DraftSession._step_done, VerifySession._on_offer


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


_trim, _all_victims = BlockLedger.trim, CacheKeeper._victims


_reserve, _settle, _adopt = CacheKeeper.reserve, CacheKeeper.settle, BlockLedger.adopt

_take_block, _batch_failed = BlockLedger._take, Containment.batch_failed

_learn, _propose = VerifySession._learn, TextDrafts.propose
_tree_init = PassTree.__init__


def _trims_one_too_many(ledger: BlockLedger, key: str, length: int) -> None:
    _trim(ledger, key, length - ledger.block_tokens)


def _reserves_held_blocks(ledger: BlockLedger, key: str, length: int) -> bool:
    table = ledger._tables.setdefault(key, [])
    missing = ledger.missing(key, length)
    given = (ledger._blank + [1] * missing)[:missing]
    table += given
    for block in given:
        ledger._holders[block] += 1
    return True


def _releases_nothing(ledger: BlockLedger, key: str) -> int:
    return 0


def _prefix_is_not_in_the_name(names: BlockNames, place: int) -> bytes:
    size = names._block_tokens
    return _hash(names._pack(*names.prefix.tokens[place * size : (place + 1) * size]))


def _published_before_its_pass(keeper: CacheKeeper, key: str, length: int) -> tuple[int, ...]:
    """Also what a pass that fails was to fill."""
    table = _reserve(keeper, key, length)
    if keeper._sharing is not None and key in keeper.sessions:
        keeper._sharing.publish(key, min(length, keeper.sessions[key].prefix.length))
    return table


def _failed_pass_is_published(containment: Containment, failure: BatchFailed, now: float) -> None:
    batch = containment._scheduler.running
    assert batch is not None
    for _, request in batch.parts:
        if (sharing := containment._keeper._sharing) is not None:
            sharing.publish(request.key, request.cache_length + len(request.feed))
    _batch_failed(containment, failure, now)


def _nodes_are_published(keeper: CacheKeeper, request: PassRequest, length: int) -> None:
    """Nobody knows yet whether the target can move them to their places."""
    if keeper._sharing is not None:
        keeper._sharing.publish(request.key, length - 1)
    _settle(keeper, request, length)


def _holder_is_not_counted(
    ledger: BlockLedger, key: str, place: int, blocks: Sequence[int]
) -> None:
    _adopt(ledger, key, place, blocks)
    if blocks:
        ledger._holders[blocks[-1]] -= 1


def _holder_counts_twice(ledger: BlockLedger, key: str, place: int, blocks: Sequence[int]) -> None:
    _adopt(ledger, key, place, blocks)
    if blocks:
        ledger._holders[blocks[-1]] += 1


def _gives_away_a_held_block(ledger: BlockLedger) -> int:
    """The one published longest ago, whoever holds it."""
    if not ledger._blank:
        block = next(iter(ledger._name_of))
        ledger._holders[block] = 0
        ledger._idle[block] = None
        ledger._idle.move_to_end(block, last=False)
    return _take_block(ledger)


def _whole_prefix_is_shared(sharing: PrefixSharing, names: BlockNames) -> int:
    return names.prefix.length // sharing._ledger.block_tokens


def _older_ones_give_way(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    """Any holder is a victim: two sessions take blocks from each other in turns."""
    return [other for other in keeper.sessions if other != key and other not in spared]


def _nobody_gives_way(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    return []


def _evicts_from_the_pass(
    keeper: CacheKeeper, key: str, spared: Collection[str], now: float
) -> list[str]:
    return _all_victims(keeper, key, (), now)


def _places_stay_taken(slots: SessionSlots, key: str) -> None:
    slots._peer_of.pop(key, None)


def _guesses_are_the_devices(
    session: VerifySession,
    request: PassRequest,
    targets: tuple[int, ...],
    accepted: tuple[int, ...],
    committed: tuple[int, ...],
) -> int:
    _learn(session, request, targets, accepted, committed)
    return len(accepted)


def _guesses_past_the_end(
    served: TextDrafts, text: Sequence[int], room: int, depth: int, least_chance: float
) -> Proposal:
    return _propose(served, text, room, depth + 1, least_chance)


def _nodes_beyond_the_room(tree: PassTree, most: int) -> None:
    _tree_init(tree, most + 1)


SHARING_MUTANTS = (
    Mutant("trims one block too many", patch(BlockLedger, "trim", _trims_one_too_many), 50),
    Mutant("blocks are given twice", patch(BlockLedger, "reserve", _reserves_held_blocks), 50),
    Mutant("blocks are never freed", patch(BlockLedger, "release", _releases_nothing), 50),
    Mutant("prefix not in the name", patch(BlockNames, "name", _prefix_is_not_in_the_name), 600),
    Mutant(
        "published before its pass", patch(CacheKeeper, "reserve", _published_before_its_pass), 600
    ),
    Mutant(
        "failed pass is published",
        patch(Containment, "batch_failed", _failed_pass_is_published),
        600,
    ),
    Mutant("nodes are published", patch(CacheKeeper, "settle", _nodes_are_published), 2400),
    Mutant("holder is not counted", patch(BlockLedger, "adopt", _holder_is_not_counted), 600),
    Mutant("holder counts twice", patch(BlockLedger, "adopt", _holder_counts_twice), 600),
    Mutant("held block given away", patch(BlockLedger, "_take", _gives_away_a_held_block), 600),
    Mutant(
        "whole prefix is shared", patch(PrefixSharing, "_shareable", _whole_prefix_is_shared), 600
    ),
    Mutant("pass is waited for again", patch(PrefixSharing, "new_pass", lambda sharing: None), 600),
    Mutant("older ones give way", patch(CacheKeeper, "_victims", _older_ones_give_way), 200),
    Mutant("nobody gives way", patch(CacheKeeper, "_victims", _nobody_gives_way), 300),
    Mutant("evicts from the pass", patch(CacheKeeper, "_victims", _evicts_from_the_pass), 300),
    Mutant(
        "guesses are the device's", patch(VerifySession, "_learn", _guesses_are_the_devices), 60
    ),
    Mutant("guesses past the end", patch(TextDrafts, "propose", _guesses_past_the_end), 60),
    Mutant("nodes beyond the room", patch(PassTree, "__init__", _nodes_beyond_the_room), 60),
    Mutant("places of a key stay taken", patch(SessionSlots, "free", _places_stay_taken), 40),
)


MUTANTS = (*CORE_MUTANTS, *SHARING_MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    for seed in range(mutant.seeds):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.name}: survived {mutant.seeds} worlds")


def test_the_product_is_judged_by_the_same_worlds() -> None:
    assert max(mutant.seeds for mutant in MUTANTS) <= WORLDS
