"""What must hold at every step of a world, whatever drafts, links and machines do.

Oracle: the stream a target gives by itself, computed without sessions (``target_stream``). The
checks read only public state of the product's machines and raise ``CheckFailure``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from edgespec.core.ending import Ending
from edgespec.core.engine_events import EngineLimits
from edgespec.core.messages import Draft, FinishReason, Limits
from edgespec.core.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.core.tree import ROOT, SpeculationTree
from edgespec.core.verify_events import VerifyState
from edgespec.core.verify_session import VerifySession
from edgespec.core.work import Candidate, ModelInfo, PassRequest, PassResult
from edgespec.ports import CapacityError, Drafter
from edgespec.targets.toy import ToyTarget


class CheckFailure(AssertionError):
    """Something that must always hold did not; the message says what and where."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailure(what)


@dataclass(frozen=True, slots=True)
class Expected:
    """What one device has to deliver."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    reason: FinishReason

    def begins_with(self, held: Sequence[int]) -> bool:
        """Whether ``held`` is the prompt and some beginning of the output."""
        return tuple(held) == (*self.prompt, *self.tokens)[: len(held)]


def target_stream(
    model: ToyModel, prompt: Sequence[int], sampling: SamplingParams, context_length: int
) -> Expected:
    """The target's own output, token by token from the law itself."""
    eos = () if model.eos_token is None else (model.eos_token,)
    ending = Ending.of(sampling, len(prompt), context_length, eos)
    tokens: list[int] = []
    while True:
        text = (*prompt, *tokens)
        token = choose(model.logits(text), sampling, len(text), prompt, tokens)
        tokens.append(token)
        if token in ending.stops:
            return Expected(tuple(prompt), tuple(tokens), FinishReason.STOP)
        if len(text) + 1 >= ending.end:
            return Expected(tuple(prompt), tuple(tokens), FinishReason.LENGTH)


def check_tree(tree: SpeculationTree, whose: str) -> None:
    """Parents alive and older, positions one apart, siblings different, nothing unreachable."""
    positions = {ROOT: tree.prefix.length - 1}
    siblings: set[tuple[int, int]] = set()
    for node in tree.nodes.values():
        require(node.parent in positions, f"{whose}: node {node.id} hangs on a dead parent")
        right = node.id > node.parent and node.position == positions[node.parent] + 1
        require(right, f"{whose}: node {node} is out of place behind {tree.prefix.length} tokens")
        require((node.parent, node.token) not in siblings, f"{whose}: {node} has a twin")
        siblings.add((node.parent, node.token))
        positions[node.id] = node.position
    reachable = len(tree.roots) + sum(len(node.children) for node in tree.nodes.values())
    count = len(tree.nodes)
    require(reachable == count, f"{whose}: {count} nodes, {reachable} reachable")


@dataclass(slots=True)
class StreamRecord:
    """What one stream told the verifier: the text each draft node stands for."""

    expected: Expected
    texts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    received: int = 0

    def note(self, draft: Draft) -> None:
        """A draft of the device itself arrived; a repeat says nothing new."""
        held = (*self.expected.prompt, *self.expected.tokens)
        for index, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True)):
            base = held[: draft.base_position] if parent == ROOT else self.texts.get(parent)
            node_id = draft.first_node_id + index
            if base is not None and node_id not in self.texts:
                self.texts[node_id] = (*base, token)


class PassCheck:
    """Judges every packed pass as it starts."""

    def __init__(
        self,
        sessions: Mapping[str, VerifySession],
        records: Mapping[str, StreamRecord],
        limits: Limits,
        engine_limits: EngineLimits,
    ) -> None:
        self._sessions, self._records = sessions, records
        self._limits, self._engine_limits = limits, engine_limits

    def check(self, batch: Sequence[PassRequest]) -> None:
        rows = sum(request.row_count for request in batch)
        limit = self._engine_limits.max_rows_per_pass
        require(rows <= limit, f"a pass of {rows} rows, limit {limit}")
        for request in batch:
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
            require(texts[-1] in known, f"{key}: verifies a node that nobody drafted there")


def check_session(session: VerifySession, expected: Expected, limits: Limits) -> None:
    """Between passes: the prefix is the target's text, the cache lacks its last token."""
    key, prefix = session.request.session_id, session.prefix
    require(expected.begins_with(prefix.tokens), f"{key}: the verifier committed another text")
    check_tree(session.inbox.tree, f"verifier's {key}")
    nodes = len(session.inbox.tree.nodes)
    require(nodes <= limits.max_nodes_outstanding, f"{key}: {nodes} nodes outstanding")
    made = len(prefix.output) - len(session.request.committed)
    passes = session.counters.passes
    require(made >= passes, f"{key}: {passes} passes committed only {made} tokens")
    if session.state is VerifyState.READY and passes:
        cached, length = session.cache_length, prefix.length
        require(cached == length - 1, f"{key}: {cached} tokens cached of {length}")


class CheckedDrafter:
    """A drafter that knows what its cache must hold at every step: the device's committed prefix
    and one path of its tree."""

    def __init__(self, inner: Drafter, tree: SpeculationTree) -> None:
        self._inner, self._tree = inner, tree
        self._tokens: list[int] = []

    @property
    def info(self) -> ModelInfo:
        return self._inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._inner.begin(prompt_length, sampling)

    def step(self, keep_length: int, feed: Sequence[int], width: int) -> tuple[Candidate, ...]:
        require(keep_length <= len(self._tokens), f"keeps {keep_length} of {len(self._tokens)}")
        self._tokens[keep_length:] = feed
        prefix = self._tree.prefix.tokens
        require(self._tokens[: len(prefix)] == prefix, "the draft's cache lacks the prefix")
        path = self._tokens[len(prefix) :]
        paths = [self._tree.path(node.id) for node in self._tree.nodes.values()]
        require(not path or path in paths, f"the draft's cache holds {path}, which is no path")
        return self._inner.step(keep_length, feed, width)

    def close(self) -> None:
        self._inner.close()


class CheckedTarget:
    """A toy target whose every pass is judged, and which fails passes of several sessions."""

    def __init__(self, inner: ToyTarget, check: PassCheck, fails: Callable[[], bool]) -> None:
        self.inner, self._check, self._fails = inner, check, fails

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    def open(self, key: str, prompt_length: int, sampling: SamplingParams) -> None:
        self.inner.open(key, prompt_length, sampling)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._check.check(batch)
        if len(batch) > 1 and self._fails():
            raise CapacityError(f"a pass of {len(batch)} sessions was chosen to fail")
        return self.inner.forward(batch)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self.inner.keep(key, nodes)

    def close(self, key: str) -> None:
        self.inner.close(key)
