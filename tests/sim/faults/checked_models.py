"""Models that judge how they are used, and parts that fail when they are told to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgespec.core.ports import (
    Cancelled,
    CapacityError,
    Drafter,
    never_cancelled,
)
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import SpeculationTree
from edgespec.core.protocol.work import CacheShape, Candidate, ModelInfo, PassRequest, PassResult
from edgespec.core.verifier.drafts import ExactRule, RunAheadPolicy, RunAheadView, Walk
from edgespec.verifier.targets.toy import ToyTarget
from tests.sim.faults.checks import CheckFailure, PassCheck, require


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

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        require(keep_length <= len(self._tokens), f"keeps {keep_length} of {len(self._tokens)}")
        self._tokens[keep_length:] = feed
        prefix = self._tree.prefix.tokens
        require(self._tokens[: len(prefix)] == prefix, "the draft's cache lacks the prefix")
        path = self._tokens[len(prefix) :]
        paths = [self._tree.path(node.id) for node in self._tree.nodes.values()]
        require(not path or path in paths, f"the draft's cache holds {path}, which is no path")
        return self._inner.step(keep_length, feed, width, cancelled)

    def close(self) -> None:
        self._inner.close()


class InjectedFailure(Exception):
    """What a world makes a target or a session's machine raise."""


class CheckedTarget:
    """A toy target whose every pass is judged, and which fails passes of several sessions. That
    each block holds what a session believes to be in it, the toy's own memory sees to.

    ``break_down`` is called before and after each operation and may raise ``InjectedFailure``.
    """

    def __init__(
        self,
        inner: ToyTarget,
        check: PassCheck,
        fails: Callable[[], bool],
        break_down: Callable[[], None] = lambda: None,
    ) -> None:
        self.inner, self._check, self._fails = inner, check, fails
        self._break_down = break_down

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    @property
    def cache(self) -> CacheShape | None:
        return self.inner.cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._break_down()
        self.inner.open(key, prompt_length, sampling, text)
        self._break_down()

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._check.check(batch)
        if len(batch) > 1 and self._fails():
            raise CapacityError(f"a pass of {len(batch)} sessions was chosen to fail")
        self._break_down()
        try:
            results = self.inner.forward(batch)
        except ValueError as error:  # a wrong length, a wrong block, another text in a block
            raise CheckFailure(f"the target refused a pass: {error}") from error
        self._break_down()
        return results

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._break_down()
        self.inner.keep(key, nodes)
        self._break_down()

    def close(self, key: str) -> None:
        self.inner.close(key)
        self._break_down()


@dataclass(frozen=True, slots=True)
class FragileRule:
    """The exact rule, which may raise in the middle of a session's event."""

    break_down: Callable[[], None]

    def walk(self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int]) -> Walk:
        self.break_down()
        return ExactRule().walk(tokens, parents, targets)


@dataclass(frozen=True, slots=True)
class FragileRunAhead:
    """A run-ahead policy that may raise when a session is offered a pass."""

    inner: RunAheadPolicy
    break_down: Callable[[], None]

    def start_at(self, view: RunAheadView) -> float:
        self.break_down()
        return self.inner.start_at(view)
