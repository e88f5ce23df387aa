"""The same passes on two targets: several sessions, ragged trees partly kept, and rollbacks.

Oracle: the tokens of one target are those of the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from edgespec.core.ports import PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from tests.shell.random_schedules import random_tree

SESSIONS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=5),
    "cut": SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    "penalised": SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, seed=7
    ),
    "all": SamplingParams(
        temperature=0.7, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, seed=8
    ),
}


def compare(
    one: TargetModel,
    two: TargetModel,
    rng: random.Random,
    rounds: int,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Tokens must be equal; ``check`` is called after each pass of both."""
    size, texts, cached = one.info.vocabulary_size, {}, dict.fromkeys(SESSIONS, 0)
    for key, params in SESSIONS.items():
        texts[key] = [rng.randrange(size) for _ in range(rng.randint(1, 40))]
        for target in (one, two):
            target.open(key, len(texts[key]), params, texts[key])
    for _ in range(rounds):
        batch = [
            _request(rng, size, key, texts[key], cached[key])
            for key in rng.sample(list(SESSIONS), rng.randint(1, len(SESSIONS)))
        ]
        results = [target.forward(batch) for target in (one, two)]
        assert results[0] == results[1], (batch, results)
        check()
        for request, result in zip(batch, results[0], strict=True):
            _go_on(rng, request, result, texts, cached, (one, two))
    for key in SESSIONS:
        for target in (one, two):
            target.close(key)


def _request(rng: random.Random, size: int, key: str, text: list[int], cached: int) -> PassRequest:
    """The rest of the text, now and then from further back, and a tree behind it."""
    start = rng.randrange(min(cached, len(text) - 1) + 1) if rng.random() < 0.2 else cached
    start = min(start, len(text) - 1)
    tokens, parents = random_tree(rng, rng.randrange(7), size) if rng.random() < 0.8 else ((), ())
    return PassRequest(key, start, tuple(text[start:]), tokens, parents)


def _go_on(
    rng: random.Random,
    request: PassRequest,
    result: PassResult,
    texts: dict[str, list[int]],
    cached: dict[str, int],
    targets: Sequence[TargetModel],
) -> None:
    """Keep a random path as if it had been right, or only the target's own token."""
    path: list[int] = []
    if rng.random() < 0.6:
        for node, parent in enumerate(request.parents):
            if parent == (path[-1] if path else -1):
                path.append(node)
    for target in targets:
        target.keep(request.key, path)
    text = texts[request.key]
    text += [request.tokens[node] for node in path]
    cached[request.key] = len(text)
    text.append(result.targets[1 + path[-1] if path else 0])
