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

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import canonical_mode
from edgespec.verifier.targets.canonical_mode import CanonicalModeError
from edgespec.verifier.targets.row_tiles import agreeing_linear_sizes
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.random_schedules import Recorder, check_random_schedule, random_tree

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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("length", [5, 251, 509])
def test_any_tree_packing_and_prefill_cut_gives_the_same_bits(
    folder: Path, dtype: str, length: int
) -> None:
    recorder = Recorder(folder, dtype)
    rng = random.Random(f"{length}{dtype}")
    for _ in range(3):
        check_random_schedule(rng, recorder, length)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kept_branches_leave_the_same_bits_behind(folder: Path, dtype: str) -> None:
    """Pass after pass on one session, keeping a random path of a random tree each time."""
    recorder = Recorder(folder, dtype)
    target = recorder.target
    rng = random.Random(3)
    text = [rng.randrange(VOCABULARY) for _ in range(240)]
    first = len(text)
    seen: dict[int, torch.Tensor] = {}
    target.open("tested", first, GREEDY)
    cached = 0
    for _ in range(12):
        tokens, parents = random_tree(rng, rng.randrange(1, 9), VOCABULARY)
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


def test_plain_mode_differs_only_in_the_last_bits(folder: Path) -> None:
    target = TorchTarget(
        str(folder), name="t", vocabulary="v", device="cpu", canonical=False, model_threads=1
    )
    assert not target.canonical
    assert target.self_test().max_difference < 1e-4


def _disagree(monkeypatch: pytest.MonkeyPatch, *, least_base: int) -> None:
    """Let no matrix product have a size that holds, from ``least_base`` rows on."""
    true = agreeing_linear_sizes
    monkeypatch.setattr(
        canonical_mode,
        "agreeing_linear_sizes",
        lambda weight, bias, base: () if base >= least_base else true(weight, bias, base),
    )


def test_where_nothing_holds_the_default_is_plain_mode_that_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    _disagree(monkeypatch, least_base=1)
    with caplog.at_level(logging.WARNING):
        target = TorchTarget(str(folder), name="t", vocabulary="v", device="cpu")
    assert not target.canonical
    assert not target.exact
    assert target.mode == "plain (texts may differ where two tokens nearly tie)"
    assert torch.get_num_threads() == threads
    assert "texts may differ where two tokens nearly tie: row tiles of 8: a 64 x " in caplog.text
    assert not any("forward" in vars(part) for part in target._model.modules())


def test_where_nothing_holds_asking_for_canonical_mode_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disagree(monkeypatch, least_base=1)
    with pytest.raises(CanonicalModeError, match=r"row tiles of 32: a 64 x .* row by row: a 64 x"):
        TorchTarget(str(folder), name="t", vocabulary="v", device="cpu", canonical=True)


def test_row_by_row_is_only_for_those_who_ask(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _disagree(monkeypatch, least_base=2)
    assert not TorchTarget(str(folder), name="t", vocabulary="v", device="cpu").canonical
    recorder = Recorder(folder, "float32")
    assert recorder.target.mode == "canonical (row by row)"
    check_random_schedule(random.Random(4), recorder, 60)
