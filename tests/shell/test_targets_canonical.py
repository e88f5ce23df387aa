"""Canonical mode: the logits of a position have the same bits under every schedule.

The reference of a text is one token a pass after a prefill in one piece. Everything else (cuts,
chunks, trees, other sessions in the pass, before and behind) is random, and compared bit for bit,
right and wrong branches alike.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from edgespec.core.sampling import SamplingParams
from edgespec.ports import PassRequest
from edgespec.targets import torch_target
from edgespec.targets.sampler import SampleRow, choose_tokens
from edgespec.targets.self_test import SelfTest
from edgespec.targets.torch_target import TorchTarget

VOCABULARY = 131
GREEDY = SamplingParams()
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 24}),
    "mistral": (
        "Mistral",
        {"num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": None},
    ),
}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=sorted(SHAPES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, extra = SHAPES[request.param]
    return _save_model(family, tmp_path_factory.mktemp(request.param), **extra)


def _save_model(family: str, folder: Path, **extra: Any) -> Path:
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=88,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        **extra,
    )
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return folder


class Recorder:
    """A target whose every pass leaves its logits in ``logits``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, dtype: str) -> None:
        self.target = TorchTarget(
            str(folder),
            name="tiny",
            vocabulary="v",
            dtype=dtype,
            device="cpu",
            max_cached_tokens=8192,
        )
        assert self.target.canonical, self.target.self_test()

        def record(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
            self.logits = logits.clone()
            return choose_tokens(logits, rows)

        monkeypatch.setattr(torch_target, "choose_tokens", record)

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


def _random_tree(rng: random.Random, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tokens = tuple(rng.randrange(VOCABULARY) for _ in range(count))
    reach = rng.choice([1, 3, count])
    return tokens, tuple(rng.randrange(max(-1, i - reach), i) for i in range(count))


def _path(tokens: tuple[int, ...], parents: tuple[int, ...], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def _noise_sessions(rng: random.Random, recorder: Recorder) -> list[PassRequest]:
    """Up to three other sessions with work of their own."""
    requests = []
    for index in range(rng.randrange(4)):
        key = f"other {index}"
        recorder.target.open(key, 1, GREEDY)
        feed = tuple(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, 5, 40])))
        tokens, parents = _random_tree(rng, rng.randrange(6))
        sample = bool(tokens) or rng.random() < 0.5
        requests.append(PassRequest(key, 0, feed, tokens, parents, sample))
    return requests


def _sampled_rows(request: PassRequest) -> int:
    return 1 + len(request.tokens) if request.sample else 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 251, 509])
def test_any_tree_packing_and_prefill_cut_gives_the_same_bits(
    folder: Path, dtype: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch, folder, dtype)
    target = recorder.target
    rng = random.Random(f"{length}{dtype}")
    prompt = [rng.randrange(VOCABULARY) for _ in range(length)]
    for _ in range(3):
        tokens, parents = _random_tree(rng, rng.randrange(1, 14))
        feed_length = rng.randrange(1, min(length, 12))
        target.open("tested", length, GREEDY)
        cached = 0
        while cached < length - feed_length:
            stop = min(cached + rng.choice([1, 3, 17, 100, 400]), length - feed_length)
            request = PassRequest("tested", cached, tuple(prompt[cached:stop]), sample=False)
            target.forward([request])
            cached = stop
        tested = PassRequest("tested", cached, tuple(prompt[cached:]), tokens, parents)
        batch = [tested, *_noise_sessions(rng, recorder)]
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_branches_leave_the_same_bits_behind(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pass after pass on one session, keeping a random path of a random tree each time."""
    recorder = Recorder(monkeypatch, folder, dtype)
    target = recorder.target
    rng = random.Random(3)
    text = [rng.randrange(VOCABULARY) for _ in range(240)]
    first = len(text)
    seen: dict[int, torch.Tensor] = {}
    target.open("tested", first, GREEDY)
    cached = 0
    for _ in range(12):
        tokens, parents = _random_tree(rng, rng.randrange(1, 9))
        target.forward([PassRequest("tested", cached, tuple(text[cached:]), tokens, parents)])
        seen[len(text)] = recorder.logits[0]
        path: list[int] = []
        node = rng.randrange(-1, len(tokens))
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        target.keep("tested", path)
        for node in path:
            text.append(tokens[node])
            seen[len(text)] = recorder.logits[1 + node]
        cached = len(text)
        text.append(rng.randrange(VOCABULARY))
    assert len(text) > 256  # over a tile's edge
    expected = recorder.reference(text[:-1], first)
    for length, logits in seen.items():
        assert torch.equal(logits, expected[length - first]), length


def test_self_test_reports_and_leaves_the_pool_empty(folder: Path) -> None:
    target = TorchTarget(str(folder), name="t", vocabulary="v", device="cpu")
    free = target.free_tokens
    result = target.self_test()
    assert result.ok
    assert result.max_difference == 0.0
    assert target.free_tokens == free == 65_536
    assert torch.get_num_threads() == 1


def test_plain_mode_differs_only_in_the_last_bits(folder: Path) -> None:
    target = TorchTarget(
        str(folder), name="t", vocabulary="v", device="cpu", canonical=False, model_threads=1
    )
    assert not target.canonical
    assert target.self_test().max_difference < 1e-4


def test_a_failed_self_test_falls_back_to_plain_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    failed = SelfTest(False, 0.5, "tree differs by 5.0e-01")
    monkeypatch.setattr(torch_target, "run_self_test", lambda *_: failed)
    with caplog.at_level(logging.WARNING):
        target = TorchTarget(str(folder), name="t", vocabulary="v", device="cpu")
    assert not target.canonical
    assert torch.get_num_threads() == threads
    assert "tree differs by 5.0e-01" in caplog.text


def test_too_small_a_pool_is_said_in_the_self_test(folder: Path) -> None:
    target = TorchTarget(str(folder), name="t", vocabulary="v", device="cpu", max_cached_tokens=64)
    assert not target.canonical
    assert "64 free tokens" in target.self_test().message
