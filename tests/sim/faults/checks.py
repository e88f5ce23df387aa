"""Invariants of every step of a world, whatever drafts, links and machines do.

Oracle: the stream that a target generates by itself, computed without sessions (``target_stream``).
The checks read only public state of the product's machines and raise ``CheckFailure``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Draft, FinishReason, Limits
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import ROOT, SpeculationTree
from edgespec.core.protocol.work import PassRequest
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.block_ledger import BlockLedger
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.core.verifier.kept_drafts import MIN_RUN
from edgespec.core.verifier.session import VerifySession
from edgespec.core.verifier.session_events import VerifyState
from edgespec_sim.token_sources.source import target_tokens

# A device with a prediction sends at most this many nodes before the verifier has greeted it
# (``device/session.py``).
_NODES_BEFORE_OPENED = 64
WIDEST = 3
"""Most candidates of a draft step. A running step may find that text lookup has filled the tree;
then the surplus waits. (The bound on nodes in flight is checked at the verifier.)"""


class CheckFailure(AssertionError):
    """An invariant does not hold; the message states which one and where."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailure(what)


@dataclass(frozen=True, slots=True)
class Expected:
    """The output that one device has to deliver."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reason: FinishReason

    def begins_with(self, held: Sequence[int]) -> bool:
        """Return whether ``held`` is the prompt and some beginning of the output."""
        return tuple(held) == (*self.prompt, *self.tokens)[: len(held)]


def target_stream(
    model: ToyModel, prompt: Sequence[int], sampling: SamplingParams, context_length: int
) -> Expected:
    """Return the target's own output, token by token from the law itself."""
    tokens, reason = target_tokens(model, prompt, sampling, context_length)
    return Expected(tuple(prompt), tokens, reason)


def check_tree(tree: SpeculationTree, whose: str) -> None:
    """Check a tree: parents are alive and older, positions are one apart, siblings differ, no node
    is unreachable.

    The check runs after every event, so messages are made for failures only (a message about a node
    also counts for its subtree).
    """
    positions = {ROOT: tree.prefix.length - 1}
    siblings: set[tuple[int, int]] = set()
    for node in tree.nodes.values():
        parent, sibling = node.parent, (node.parent, node.token)
        if parent not in positions:
            raise CheckFailure(f"{whose}: node {node.id} hangs on a dead parent")
        if node.id <= parent or node.position != positions[parent] + 1:
            behind = f"behind {tree.prefix.length} tokens"
            raise CheckFailure(f"{whose}: node {node} is out of place {behind}")
        if sibling in siblings:
            raise CheckFailure(f"{whose}: {node} has a twin")
        siblings.add(sibling)
        positions[node.id] = node.position
    reachable = len(tree.roots) + sum(len(node.children) for node in tree.nodes.values())
    count = len(tree.nodes)
    require(reachable == count, f"{whose}: {count} nodes, {reachable} reachable")


class DeviceCheck:
    """Checks the tokens and the tree of one device whenever they have changed."""

    def __init__(self, expected: Expected, limits: Limits, *, text: bool = False) -> None:
        """Set up the check. With ``text`` the device also drafts by lookup in its text."""
        self._expected = expected
        self._most = max(_NODES_BEFORE_OPENED, limits.max_nodes_outstanding) + text * WIDEST
        self._seen: tuple[object, ...] = ()

    def look(self, session: DraftSession, delivered: Sequence[int], replaced: bool) -> None:
        """Check the session. If the device is ``replaced``, it took another device's place, so it
        may receive a commit with nodes of that one."""
        tree, held, counters = session.tree, session.prefix, session.counters
        nodes = len(tree.nodes)
        now = (session, len(delivered), held.length, tree.last_id, nodes, counters.accepted)
        if now == self._seen:
            return
        self._seen = now
        whose = session.request.session_id
        text = (*self._expected.prompt, *delivered)
        require(self._expected.begins_with(text), f"{whose}: another text was delivered")
        require(text == tuple(held.tokens), f"{whose}: holds another text than it delivered")
        check_tree(tree, whose)
        # A verifier that keeps a run accepts its tokens wherever the output repeats them.
        fine = counters.accepted <= counters.sent or replaced or counters.sent >= MIN_RUN
        require(fine, f"{whose}: {counters.accepted} of {counters.sent} nodes were accepted")
        accepted, right = counters.predicted_accepted, counters.predicted_right
        fine = accepted <= right <= counters.predicted_sent <= counters.sent
        require(fine, f"{whose}: of the prediction {accepted} accepted and {right} right nodes")
        require(nodes <= self._most, f"{whose}: {nodes} nodes in the tree")


@dataclass(slots=True)
class StreamRecord:
    """The drafts of one stream: the text that each draft node stands for."""

    expected: Expected
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    received: int = 0
    drafted: set[int] = field(default_factory=set)
    """Tokens of all drafts of the session, on earlier streams as well."""

    def note(self, draft: Draft) -> None:
        """Record a draft of the device itself; a repeat adds nothing."""
        held = (*self.expected.prompt, *self.expected.tokens)
        self.drafted.update(draft.tokens)
        for index, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            base = held[: draft.base_position] if parent == ROOT else self.texts.get(parent)
            node_id = draft.first_node_id + index
            if base is not None and node_id not in self.texts:
                self.texts[node_id] = (*base, token)


class PassCheck:
    """Checks every packed pass when it starts."""

    def __init__(
        self,
        sessions: Mapping[str, VerifySession],
        records: Mapping[str, StreamRecord],
        limits: Limits,
        engine_limits: EngineLimits,
        guessed: Collection[tuple[int, ...]] = (),
    ) -> None:
        """Set up the check; ``guessed`` are texts that the verifier's own draft model drafted and
        consumed for that."""
        self._sessions, self._records, self._guessed = sessions, records, guessed
        self._limits, self._engine_limits = limits, engine_limits

    def check(self, batch: Sequence[PassRequest]) -> None:
        rows = sum(request.row_count for request in batch)
        limit = self._engine_limits.max_rows_per_pass
        require(rows <= limit, f"a pass of {rows} rows, limit {limit}")
        for request in batch:
            if request.key in self._sessions:  # otherwise the engine's own probe
                self._check_request(request)

    def _check_request(self, request: PassRequest) -> None:
        key, limits = request.key, self._limits
        limit = self._engine_limits.max_rows_per_session
        require(request.row_count <= limit, f"{key}: {request.row_count} rows, limit {limit}")
        nodes = len(request.tokens)
        require(nodes <= limits.max_nodes_per_pass, f"{key}: {nodes} nodes in a pass")
        session, record = self._sessions[key], self._records[key]
        if not request.sample:
            return
        length = session.prefix.length
        held = request.cache_length + len(request.feed)
        require(held == length, f"{key}: a pass samples behind {held} of {length} tokens")
        ahead = length - record.received
        require(ahead <= limits.max_unreceived, f"{key}: {ahead} tokens not acknowledged")
        known = set(record.texts.values())
        texts: list[tuple[int, ...]] = []
        prefix = tuple(session.prefix.tokens)
        for token, parent in zip(request.tokens, request.parents, strict=True):
            texts.append(((*texts[parent], token)) if parent >= 0 else (*prefix, token))
        for text in texts[: request.device_nodes]:
            # A device's text is followed elsewhere too, with what the output had in its place.
            drafted = text in known or (
                session.inbox.kept.has_text
                and (text[-1] in record.drafted or text[-1] in session.prefix.output)
            )
            require(drafted, f"{key}: verifies a node that nobody drafted")
        self._check_served(request, texts, known)

    def _check_served(
        self,
        request: PassRequest,
        texts: Sequence[tuple[int, ...]],
        drafted: Collection[tuple[int, ...]],
    ) -> None:
        """Check the verifier's own draft nodes: they stand only in allowed places, where they can
        still matter."""
        key, session = request.key, self._sessions[request.key]
        if not request.server_nodes:
            return
        limits = self._engine_limits
        if not limits.drafter:
            require(limits.server_drafts, f"{key}: guesses where none are allowed")
        elif not limits.server_drafts:
            made = all(text in self._guessed for text in texts[request.device_nodes :])
            require(made, f"{key}: a guess that the draft model has not made there")
        require(len(set(texts)) == len(texts), f"{key}: a guess is made twice")
        limit = self._limits.context_length
        end = min(session.prefix.prompt_length + session.request.sampling.max_tokens, limit)
        longest = max(len(text) for text in texts)
        require(longest < end, f"{key}: a guess for position {longest - 1}, the text ends at {end}")


def check_session(
    session: VerifySession, expected: Expected, limits: Limits, *, evictable: bool = False
) -> None:
    """Check a session between passes.

    Its prefix is the target's text. Its cache lacks the last token, or more if sessions may lose
    their caches (``evictable``).
    """
    key, prefix = session.request.session_id, session.prefix
    require(expected.begins_with(prefix.tokens), f"{key}: the verifier committed another text")
    check_tree(session.inbox.tree, f"verifier's {key}")
    nodes = len(session.inbox.tree.nodes)
    require(nodes <= limits.max_nodes_outstanding, f"{key}: {nodes} nodes outstanding")
    made = len(prefix.output) - len(session.request.committed)
    passes = session.passes
    require(made >= passes, f"{key}: {passes} passes committed only {made} tokens")
    if session.state is VerifyState.READY and passes:
        cached, length = session.cache_length, prefix.length
        fine = cached < length if evictable else cached == length - 1
        require(fine, f"{key}: {cached} tokens cached of {length}")


def check_ledger(engine: VerifyEngine) -> None:
    """Check the blocks: each is free, or held by existing sessions while they need it, and no two
    sessions hold a block that one of them may write."""
    ledger = engine.cache_scheduler.ledger
    if ledger is None:
        return
    tables = {key: ledger.table(key) for key in ledger.holders}
    held = Counter(block for table in tables.values() for block in table)
    for key, table in tables.items():
        require(len(set(table)) == len(table), f"{key}: holds a block twice")
    for block, count in held.items():
        counted = ledger.holder_count(block)
        require(counted == count, f"{count} sessions hold block {block}, {counted} are counted")
    total = len(held) + ledger.free_count
    require(total == ledger.block_count, f"{total} blocks of {ledger.block_count} are left")
    for key, table in tables.items():
        session = engine.sessions.get(key)
        if session is None:
            require(not key.isprintable(), f"{key}: gone, but it holds {len(table)} blocks")
            continue
        least = -(-session.cache_length // ledger.block_tokens)
        require(len(table) >= least, f"{key}: {len(table)} blocks, {least} are cached")
        if session.cache_length:  # otherwise the blocks may be from an earlier session of this id
            written = table[session.cache_length // ledger.block_tokens :]
            require(all(map(ledger.is_writable, written)), f"{key}: would write a shared block")


class EntryCheck:
    """Checks every refusal of the cache scheduler at the moment in which it happens.

    It states the law of ``cache_scheduler.py`` a second time, by other means: it computes shares by
    progressive filling, and counts the blocks that a session could have.
    """

    def __init__(self, engine: VerifyEngine) -> None:
        self._engine = engine
        self._true = engine.cache_scheduler.rows_for
        engine.cache_scheduler.rows_for = self.rows_for  # type: ignore[method-assign]

    def rows_for(
        self, key: str, most: int, spared: Collection[str], waiting: int, now: float
    ) -> int:
        rows = self._true(key, most, spared, waiting, now)
        ledger = self._engine.cache_scheduler.ledger
        if rows == 0 and ledger is not None and not ledger.held_count(key):
            self._check_refused(key, spared, ledger)
        return rows

    def _check_refused(self, key: str, spared: Collection[str], ledger: BlockLedger) -> None:
        """Check that the session has no block and received none."""
        sessions, is_over_rate = self._engine.sessions, self._engine.cache_scheduler.is_over_rate
        outside, owned = [], dict[str, list[tuple[str, int]]]()
        for other, session in sessions.items():
            held, device = ledger.held_count(other), session.device
            asks = not held and session.rows_to_feed > 0 and not is_over_rate(other)
            reads = device.detached_at is None and device.unacknowledged_since is None
            need = max(held, -(-session.prefix.length // ledger.block_tokens))
            if asks:
                outside.append((other, need))
            if asks or (held and reads):
                name = self._engine.registry.credential_of[other].name
                owned.setdefault(name, []).append((other, need))
        everybody = sum(need for _, need in outside)
        require(everybody > ledger.free_count, f"{key}: refused, with room for all outside")
        left, share = float(ledger.block_count), 0.0
        wants = sorted(sum(need for _, need in mine) for mine in owned.values())
        for place, want in enumerate(wants):
            share = left / (len(wants) - place)
            if want > share:
                break
            left -= want
        else:
            share = left + wants[-1]  # the greediest may have what the others do not use
        surplus: set[str] = set()
        ends: dict[str, int] = {}
        for mine in owned.values():
            end = 0
            for place, (other, need) in enumerate(mine):
                end += need
                ends[other] = end
                if place and end > share:
                    surplus.add(other)
        own = self._engine.registry.credential_of[key].name
        elders = [other for other, _ in owned[own]]
        elders = elders[: elders.index(key)]
        if ends[key] > share or any(not ledger.held_count(other) for other in elders):
            return
        room = ledger.free_count
        for other in ledger.holders:
            if other in spared or other not in sessions:
                continue
            device = sessions[other].device
            gone = device.detached_at is not None or device.unacknowledged_since is not None
            if gone or other in surplus:
                room += sum(ledger.holder_count(block) == 1 for block in ledger.table(other))
        need = -(-sessions[key].prefix.length // ledger.block_tokens)
        require(need > room, f"{key}: refused {need} blocks within its share, {room} are to be had")


def check_credentials(engine: VerifyEngine) -> None:
    """Check that every session has a credential, and that no credential exceeds its limits."""
    whose = engine.registry.credential_of
    require(whose.keys() == engine.sessions.keys(), "a session is nobody's, or is gone")
    names = [credential.name for credential in whose.values()]
    for credential in whose.values():
        count, most = names.count(credential.name), credential.max_sessions
        require(not most or count <= most, f"{count} sessions of {credential.name}, limit {most}")


def check_at_rest(engine: VerifyEngine) -> None:
    """Check that no session exists any more, and that no state remains of any."""
    require(not engine.sessions, f"sessions {sorted(engine.sessions)} outlive their lease")
    require(not engine.registry.stream_of, "a stream outlives its session")
    require(not engine.running, "a pass is running for nobody")
    require(engine.deadline is None, f"the engine waits for {engine.deadline}")
    check_ledger(engine)
    check_credentials(engine)
    if (ledger := engine.cache_scheduler.ledger) is not None:
        held = ledger.block_count - ledger.free_count
        require(not held, f"{held} blocks are held by nobody")
