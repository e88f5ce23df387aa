"""A pass by column: what is right is let through, what is wrong is named, and nothing waits.

Oracle: ``request_checks.py``, which looks at each request by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from torch.utils._python_dispatch import TorchDispatchMode

from edgespec.core.ports import ModelInfo, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import torch_target
from edgespec.verifier.targets.pass_batch import PassBatch
from edgespec.verifier.targets.pass_requests import check_batch
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.random_schedules import random_tree
from tests.shell.tiny_checkpoints import write_checkpoint

INFO = ModelInfo("tiny", "v", 50, 60)


def _request(rng: random.Random, key: str, vocabulary_size: int) -> PassRequest:
    """Mostly right."""
    tokens, parents = random_tree(rng, rng.choice([0, 0, 3]), vocabulary_size)
    if rng.random() < 0.05:
        parents = (*parents, rng.choice([-2, 0, 9]))
    feed = tuple(rng.choices(range(rng.choice([0, 0, 0, -1]), vocabulary_size), k=rng.randrange(4)))
    if rng.random() < 0.9:
        feed = feed or (1,)
    if rng.random() < 0.05:
        feed = (*feed, rng.choice([vocabulary_size, 1 << 63, 1 << 70]))
    cached = rng.choice([-1, 0, 0, 9, 20, 56])
    return PassRequest(
        key, max(cached, -(rng.random() < 0.1)), feed, tokens, parents, rng.random() < 0.9
    )


def _cached_lengths(cached: dict[str, int]) -> Callable[[PassRequest], int]:
    return lambda request: cached[request.key]


def test_what_columns_let_through_the_checks_let_through_and_the_other_way_round() -> None:
    rng, right = random.Random(2), 0
    for _ in range(600):
        keys = [rng.choice("abcdefgh") for _ in range(rng.randrange(1, 4))]
        batch = [_request(rng, key, INFO.vocabulary_size) for key in keys]
        cached = {key: rng.choice([0, 20, 56]) for key in keys}
        lengths = np.array([cached[request.key] for request in batch])
        try:
            check_batch(batch, _cached_lengths(cached), INFO)
        except (ValueError, RuntimeError):
            wanted = False
        else:
            wanted = True
        try:
            found = PassBatch.of(batch).surely_right(lengths, INFO)
        except (ValueError, OverflowError):
            found = False
        assert found == wanted, batch
        right += found
    assert 60 < right < 540


def test_a_batch_is_the_requests_it_is_made_of() -> None:
    requests = [
        PassRequest("a", 3, (1, 2)),
        PassRequest("b", 0, (5,), (6, 7), (-1, 0), blocks=(1,)),
    ]
    batch = PassBatch.of(requests)
    assert (list(batch), len(batch), batch[1]) == (requests, 2, requests[1])
    assert PassBatch.of(batch) is batch
    assert batch.tokens.tolist() == [1, 2, 5, 6, 7]
    assert batch.ends.tolist() == [5, 3]


class _Waits(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if any(part in name for part in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")):
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


def test_the_model_never_waits_for_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for packed sequences, or masks, by the values of tensors; not here."""
    target = TorchTarget(
        str(write_checkpoint(tmp_path / "tiny")),
        name="tiny",
        vocabulary="v",
        device="cpu",
        max_cached_tokens=256,
        canonical=False,
    )
    call, waits = torch_target._call_model, _Waits()

    def watched(*args: Any) -> Any:
        with waits:
            return call(*args)

    monkeypatch.setattr(torch_target, "_call_model", watched)
    for key in "ab":
        target.open(key, 3, SamplingParams(temperature=0.8))
    target.forward([PassRequest("a", 0, (1, 2, 3)), PassRequest("b", 0, (4,), sample=False)])
    target.forward([PassRequest("a", 3, (4,), (5, 6), (-1, -1)), PassRequest("b", 1, (5, 6))])
    assert waits.seen == []
