"""Random schedules of one text on a torch target, compared bit for bit with one token a pass.

As a program, ``python -m tests.shell.random_schedules FOLDER DTYPE ...`` does so for a checkpoint,
in a process whose instruction sets the environment may have restricted, and prints the mode.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.pipeline import pipeline_target
from edgespec.verifier.targets.torch_target import TorchTarget

GREEDY = SamplingParams()


class Recorder:
    """A target whose every pass leaves its logits in ``logits``."""

    def __init__(self, folder: Path, dtype: str, stages: int = 1, **options: Any) -> None:
        load: Callable[..., TorchTarget] = TorchTarget
        if stages > 1:
            load = partial(pipeline_target, stages=stages)
        self.target = load(
            str(folder),
            name="tiny",
            vocabulary="v",
            dtype=dtype,
            device="cpu",
            max_cached_tokens=8192,
            canonical=True,
            **options,
        )
        self.vocabulary_size = self.target.info.vocabulary_size
        run = self.target._run

        def record(batch: Sequence[PassRequest]) -> torch.Tensor:
            logits = run(batch)
            self.logits = logits.clone()
            return logits

        self.target._run = record  # type: ignore[method-assign]

    def reference(self, text: list[int], first: int) -> torch.Tensor:
        """Logits behind text[first - 1], text[first], .., one token a pass."""
        target, rows = self.target, []
        target.open("reference", first, GREEDY)
        target.forward([PassRequest("reference", 0, tuple(text[:first]))])
        rows.append(self.logits[0])
        for position in range(first, len(text)):
            target.forward([PassRequest("reference", position, (text[position],))])
            rows.append(self.logits[0])
        target.close("reference")
        return torch.stack(rows)


def random_tree(
    rng: random.Random, count: int, vocabulary_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens = tuple(rng.randrange(vocabulary_size) for _ in range(count))
    reach = rng.choice([1, 3, count])
    return tokens, tuple(rng.randrange(max(-1, i - reach), i) for i in range(count))


def check_random_schedule(rng: random.Random, recorder: Recorder, length: int) -> None:
    """A random prompt cut at random, then a random tree among other sessions' work."""
    target, size = recorder.target, recorder.vocabulary_size
    prompt = [rng.randrange(size) for _ in range(length)]
    tokens, parents = random_tree(rng, rng.randrange(1, 14), size)
    feed_length = rng.randrange(1, min(length, 12))
    target.open("tested", length, GREEDY)
    cached = 0
    while cached < length - feed_length:
        stop = min(cached + rng.choice([1, 3, 17, 100, 400]), length - feed_length)
        target.forward([PassRequest("tested", cached, tuple(prompt[cached:stop]), sample=False)])
        cached = stop
    tested = PassRequest("tested", cached, tuple(prompt[cached:]), tokens, parents)
    batch = [tested, *_other_sessions(rng, recorder)]
    rng.shuffle(batch)
    target.forward(batch)
    before = sum(_sampled_rows(r) for r in batch[: batch.index(tested)])
    logits = recorder.logits[before : before + _sampled_rows(tested)]
    for request in batch:
        target.close(request.key)
    for node in [n for n in range(len(tokens)) if n not in parents]:
        path = _path(tokens, parents, node)
        expected = recorder.reference(prompt + path, length)
        assert torch.equal(logits[0], expected[0])
        while node >= 0:
            assert torch.equal(logits[1 + node], expected[len(path)]), (node, parents)
            path.pop()
            node = parents[node]


def _path(tokens: tuple[int, ...], parents: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _other_sessions(rng: random.Random, recorder: Recorder) -> list[PassRequest]:
    """Up to three other sessions with work of their own."""
    requests = []
    for index in range(rng.randrange(4)):
        key = f"other {index}"
        recorder.target.open(key, 1, GREEDY)
        size = recorder.vocabulary_size
        feed = tuple(rng.randrange(size) for _ in range(rng.choice([1, 2, 5, 40])))
        tokens, parents = random_tree(rng, rng.randrange(6), size)
        sample = bool(tokens) or rng.random() < 0.5
        requests.append(PassRequest(key, 0, feed, tokens, parents, sample))
    return requests


def _sampled_rows(request: PassRequest) -> int:
    return 1 + len(request.tokens) if request.sample else 0


def main(folder: str, dtypes: list[str]) -> None:
    for dtype in dtypes:
        recorder = Recorder(Path(folder), dtype)
        rng = random.Random(dtype)
        for length in (5, 130, 300):
            check_random_schedule(rng, recorder, length)
        sys.stdout.write(f"{dtype} {recorder.target.mode}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
