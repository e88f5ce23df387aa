"""The toy target as a table: the same law, at the cost of looking a token up.

For a bench of what surrounds the target: a model on an accelerator takes no time from the event
loop, and the toy's own arithmetic would. Greedy only, and without the toy's checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.compose import TOY_MODEL
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.ports import ModelInfo

GREEDY = SamplingParams(ignore_eos=True)


class TableTarget:
    """A ``TargetModel`` with the interface of ``inner``, a toy target, and its greedy choices."""

    def __init__(self, inner: object) -> None:
        self._info: ModelInfo = inner.info  # type: ignore[attr-defined]
        self._cache: CacheShape | None = inner.cache  # type: ignore[attr-defined]
        self._tails: dict[str, tuple[int, ...]] = {}
        self._texts: dict[str, tuple[int, ...]] = {}
        self._fed: dict[str, tuple[tuple[int, ...], PassRequest]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def cache(self) -> CacheShape | None:
        return self._cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._tails[key], self._texts[key] = (), tuple(text)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        tokens = self._fed[key][1].tokens
        tail = (*self._tails[key], *[tokens[node] for node in nodes])
        self._tails[key] = tail[-TOY_MODEL.order :]

    def close(self, key: str) -> None:
        self._tails.pop(key, None)
        self._texts.pop(key, None)
        self._fed.pop(key, None)

    def _run(self, request: PassRequest) -> PassResult:
        key = request.key
        text, cached = self._texts[key], request.cache_length
        # Of its prompt, a sequence may find a beginning that another one has fed.
        tail = text[:cached] if cached <= len(text) else self._tails[key]
        root = (*tail[-TOY_MODEL.order :], *request.feed)[-TOY_MODEL.order :]
        self._tails[key], self._fed[key] = root, (root, request)
        if not request.sample:
            return PassResult(key, ())
        tails = []
        for token, parent in zip(request.tokens, request.parents, strict=True):
            tails.append((*(tails[parent] if parent >= 0 else root)[1:], token))
        return PassResult(key, tuple([next_token(root), *map(next_token, tails)]))


_TABLE: dict[tuple[int, ...], int] = {}


def next_token(tail: tuple[int, ...]) -> int:
    token = _TABLE.get(tail)
    if token is None:
        token = _TABLE[tail] = choose(TOY_MODEL.logits(tail), GREEDY, 0, (), ())
    return token


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """The target's own text behind ``prompt``, of ``length`` tokens."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tuple(tokens[-TOY_MODEL.order :])))
    return tokens[len(prompt) :]
