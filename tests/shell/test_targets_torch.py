"""The torch target against transformers' own ``generate``, and against itself.

Oracles: greedy text equals ``generate`` of the same checkpoint (another attention, another cache);
sampled text of any schedule equals that of one token a pass; packed equals alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

from edgespec.core.ports import CapacityError, PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.ragged_decoding import generated

VOCABULARY = 211
CONTEXT = 512
GREEDY = SamplingParams()
Tree = tuple[list[int], list[int]]
Guess = Callable[[list[int]], Tree]
"""Committed tokens -> tokens and parents of a tree behind them."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3", "Mistral"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    torch.manual_seed(3)
    extra = {"sliding_window": None} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=7,
        pad_token_id=None,
        **extra,
    )
    path = tmp_path_factory.mktemp(family)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(path)
    return path


def _target(folder: Path, **options: Any) -> TorchTarget:
    settings: dict[str, Any] = {"device": "cpu", "max_cached_tokens": 4096, **options}
    return TorchTarget(str(folder), name="tiny", vocabulary="print", **settings)


def _generate(folder: Path, prompt: list[int], count: int) -> list[int]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    return generated(model, prompt, count)


def _decode(
    target: TargetModel,
    prompt: list[int],
    count: int,
    guess: Guess,
    params: SamplingParams = GREEDY,
    prefill: int = 0,
) -> tuple[list[int], int]:
    """``count`` tokens and the passes they took; ``prefill`` tokens go in a pass of their own."""
    target.open("s", len(prompt), params)
    if prefill:
        target.forward([PassRequest("s", 0, tuple(prompt[:prefill]), sample=False)])
    text, cached, passes = list(prompt), prefill, 0
    while len(text) < len(prompt) + count:
        tokens, parents = guess(text)
        request = PassRequest("s", cached, tuple(text[cached:]), tuple(tokens), tuple(parents))
        [result] = target.forward([request])
        kept, new = _walk(request, result)
        target.keep("s", kept)
        cached = len(text) + len(kept)
        text += new
        passes += 1
    target.close("s")
    return text[len(prompt) :][:count], passes


def _walk(request: PassRequest, result: PassResult) -> tuple[list[int], list[int]]:
    kept: list[int] = []
    new = [result.targets[0]]
    for node, (token, parent) in enumerate(zip(request.tokens, request.parents, strict=True)):
        if parent == (kept[-1] if kept else -1) and token == new[-1]:
            kept.append(node)
            new.append(result.targets[1 + node])
    return kept, new


def _nothing(_text: list[int]) -> Tree:
    return [], []


def _chain(full: list[int], rng: random.Random) -> Guess:
    """Some right tokens, then some wrong ones."""

    def guess(text: list[int]) -> Tree:
        right = full[len(text) : len(text) + rng.randrange(7)]
        tokens = right + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(3))]
        return tokens, list(range(-1, len(tokens) - 1))

    return guess


def _tree(full: list[int], rng: random.Random) -> Guess:
    """The right chain hidden among wrong nodes, some of which hang on it and on each other."""

    def guess(text: list[int]) -> Tree:
        right = full[len(text) : len(text) + 1 + rng.randrange(4)]
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in right:
            for _ in range(rng.randrange(3)):
                tokens.append((token + rng.randrange(1, VOCABULARY)) % VOCABULARY)
                parents.append(rng.choice([last, len(tokens) - 2]))
            tokens.append(token)
            parents.append(last)
            last = len(tokens) - 1
        return tokens, parents

    return guess


PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 150))]


@pytest.mark.parametrize("canonical", [True, False])
def test_greedy_text_is_that_of_generate(folder: Path, canonical: bool) -> None:
    target = _target(folder, canonical=canonical)
    assert target.canonical is canonical
    rng = random.Random(1)
    for prompt in PROMPTS:
        expected = _generate(folder, prompt, 110)
        full = prompt + expected
        assert _decode(target, prompt, 110, _nothing) == (expected, 110)
        text, passes = _decode(target, prompt, 110, _chain(full, rng), prefill=len(prompt) // 2)
        assert text == expected
        assert passes < 60
        text, passes = _decode(target, prompt, 110, _tree(full, rng))
        assert text == expected
        assert passes < 60
    assert target.free_tokens == 4096


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2),
        SamplingParams(
            temperature=1.0,
            top_k=40,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.2,
            seed=(1 << 64) - 1,
        ),
        SamplingParams(repetition_penalty=1.3, logit_bias={11: 2.0}),
    ],
)
def test_sampled_text_is_the_same_under_every_schedule(
    folder: Path, params: SamplingParams
) -> None:
    target = _target(folder)
    rng = random.Random(2)
    prompt = PROMPTS[1]
    expected, _ = _decode(target, prompt, 80, _nothing, params)
    full = prompt + expected
    for guess in (_chain(full, rng), _tree(full, rng)):
        text, passes = _decode(target, prompt, 80, guess, params, prefill=3)
        assert text == expected
        assert passes < 45


@pytest.mark.parametrize("canonical", [True, False])
def test_a_ragged_batch_equals_its_sessions_alone(folder: Path, canonical: bool) -> None:
    target = _target(folder, canonical=canonical)
    rng = random.Random(5)
    params = [GREEDY, SamplingParams(temperature=0.9, seed=4), SamplingParams(presence_penalty=1.0)]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    alone = [
        _decode(target, prompt, 40, _nothing, param)[0]
        for prompt, param in zip(prompts, params, strict=True)
    ]
    guesses = [
        kind(prompt + text, rng)
        for kind, prompt, text in zip((_tree, _chain, _tree), prompts, alone, strict=True)
    ]
    texts = [list(prompt) for prompt in prompts]
    cached = [0, 0, 0]
    for index, param in enumerate(params):
        target.open(f"s{index}", len(prompts[index]), param)
    for _ in range(12):
        batch = []
        for index in rng.sample(range(3), rng.randrange(1, 4)):
            tokens, parents = guesses[index](texts[index])
            feed = tuple(texts[index][cached[index] :])
            batch.append(
                PassRequest(f"s{index}", cached[index], feed, tuple(tokens), tuple(parents))
            )
        for request, result in zip(batch, target.forward(batch), strict=True):
            assert request.key == result.key
            index = int(request.key[1:])
            kept, new = _walk(request, result)
            target.keep(request.key, kept)
            cached[index] = len(texts[index]) + len(kept)
            texts[index] += new
    for prompt, text, expected in zip(prompts, texts, alone, strict=True):
        length = min(len(text) - len(prompt), 40)
        assert length > 8
        assert text[len(prompt) :][:length] == expected[:length]


def test_capacity_errors_leave_the_others_alone(folder: Path) -> None:
    target = _target(folder, max_cached_tokens=64, max_sessions=2, canonical=False)
    expected, _ = _decode(target, [5], 30, _nothing)
    target.open("a", 1, GREEDY)
    [first] = target.forward([PassRequest("a", 0, (5,))])
    assert first.targets == (expected[0],)
    target.open("b", 30, GREEDY)
    target.open("probe", 1, GREEDY)
    with pytest.raises(CapacityError, match="3 sessions are open, limit max_sessions 2"):
        target.open("c", 1, GREEDY)
    target.close("probe")
    batch = [PassRequest("a", 1, (expected[0],)), PassRequest("b", 0, (1,) * 60)]
    with pytest.raises(CapacityError, match=r"the 48 free of 64 \(max_cached_tokens\)"):
        target.forward(batch)
    assert target.forward(batch[:1])[0].targets == (expected[1],)
    target.close("b")
    with pytest.raises(CapacityError, match="prompt of 513 tokens, limit 1 to 512"):
        target.open("b", 513, GREEDY)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (PassRequest("s", 3, (1,)), "cache_length is 3, but 2 tokens are cached"),
        (PassRequest("s", 2, ()), "feed is empty"),
        (PassRequest("s", 2, (VOCABULARY,)), "token ids 211 to 211, limit 0 to 210"),
        (PassRequest("s", 2, (1,), (-1,), (-1,)), "token ids -1 to 1"),
        (PassRequest("s", 2, (1,), (2, 3), (1, -1)), "must come before"),
        (PassRequest("s", 2, (1,), (2,), (-1,), sample=False), "sample=True"),
        (PassRequest("t", 0, (1,)), "'t' is not open"),
    ],
)
def test_a_bad_request_is_refused_before_the_pass(
    folder: Path, request_: PassRequest, message: str
) -> None:
    target = _target(folder, canonical=False)
    target.open("s", 2, GREEDY)
    before = target.forward([PassRequest("s", 0, (1, 2))])
    with pytest.raises(ValueError, match=message):
        target.forward([request_])
    with pytest.raises(ValueError, match="same key"):
        target.forward([PassRequest("s", 2, (1,))] * 2)
    with pytest.raises(CapacityError, match="514 tokens, limit context_length 512"):
        target.forward([PassRequest("s", 2, (1,) * 510, (1, 2), (-1, 0))])
    assert target.forward([PassRequest("s", 0, (1, 2))]) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_every_schedule_agrees_with_the_cpu(folder: Path, dtype: str) -> None:
    """Near-ties may flip on a GPU, so only the first tokens are compared in bfloat16."""
    expected, _ = _decode(_target(folder), PROMPTS[1], 60, _nothing)
    target = _target(folder, device="cuda", dtype=dtype)
    assert not target.canonical
    length = 60 if dtype == "float32" else 4
    full = PROMPTS[1] + expected
    for guess in (_nothing, _tree(full, random.Random(1))):
        assert _decode(target, PROMPTS[1], length, guess)[0] == expected[:length]


def test_bad_options_are_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        _target(folder, dtype="int8")
    with pytest.raises(ValueError, match="device is 'meta'"):
        _target(folder, device="meta")
    with pytest.raises(ValueError, match="max_sessions is 0"):
        _target(folder, max_sessions=0)
