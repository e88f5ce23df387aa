"""The torch target's tokens against transformers' own ``generate``, and against itself; and every
attention backend, and packed weights, against attention as the definition has it.

Oracles: greedy texts of every family equal ``generate`` of the same tiny random checkpoint (another
attention, another cache), with windows, soft caps and sinks that matter within the text; texts of
all kinds of sampling equal those of one token a pass alone. Of attention: a reference that goes row
by row in float32, reads the pool through the same tables and makes no use of any library's
attention. Every slot that was not written holds NaN, so a backend that reads one is found out.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")


from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.models.folders import MODEL_TYPES
from edgespec.verifier.targets.loading import FAMILIES
from tests.shell import torch_schedules as schedules
from tests.shell.family_models import FAMILY_MODELS, family_model

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.verifier.targets import linear_layers, torch_target
from edgespec.verifier.targets.canonical_attention import CanonicalAttention
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.paged_attention import Attend, PagedAttention, PagedLayout
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import (
    BatchRows,
    LayerAttention,
    LayerStates,
)
from edgespec.verifier.targets.recorded_passes import RecordedPasses
from edgespec.verifier.targets.row_tiles import RowTiles
from tests.shell.tiny_checkpoints import tiny_config, write_checkpoint
from tests.shell.torch_schedules import Recorder, Serving

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2, 6], list(range(20, 150))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    family_model("qwen3").save_pretrained(path)
    return path


@pytest.mark.parametrize("family", sorted(FAMILY_MODELS))
def test_greedy_texts_are_those_of_generate(family: str, tmp_path: Path) -> None:
    assert set(FAMILY_MODELS) == set(FAMILIES) == set(MODEL_TYPES)
    model = family_model(family)
    model.save_pretrained(tmp_path)
    texts = [schedules.generated(model, prompt, 40) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    for canonical in (None, False):
        target = schedules.torch_target(tmp_path, canonical=canonical)
        assert schedules.decode_beside(target, PROMPTS, texts) == texts
        assert target.free_tokens == 2048


@pytest.mark.parametrize("canonical", [True, False])
def test_texts_are_those_of_one_token_a_pass_however_drafted_beside_whomever(
    folder: Path, canonical: bool
) -> None:
    target = schedules.torch_target(folder, canonical=canonical)
    assert target.canonical is canonical
    prompts = [PROMPTS[index % 3] for index in range(len(schedules.SAMPLINGS))]
    alone = [
        schedules.decode_alone(target, prompt, 80, params)
        for prompt, params in zip(prompts, schedules.SAMPLINGS, strict=True)
    ]
    assert schedules.decode_beside(target, prompts, alone, schedules.SAMPLINGS) == alone


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_every_schedule_agrees_with_the_cpu(folder: Path, dtype: str) -> None:
    """In bfloat16 near-ties fall otherwise than on a CPU, so only the first tokens are compared."""
    target = schedules.torch_target(folder, device="cuda", dtype=dtype)
    assert target.canonical
    assert "CUDA graphs" in target.mode
    alone = schedules.decode_alone(target, PROMPTS[1], 60)
    length = 60 if dtype == "float32" else 4
    expected = schedules.decode_alone(schedules.torch_target(folder), PROMPTS[1], length)
    assert alone[:length] == expected
    for _ in range(5):
        assert schedules.decode_beside(target, PROMPTS[1:2], [alone]) == [alone]
    assert target._recorded is not None
    assert target._recorded.repeated > 60


def test_capacity_errors_leave_the_others_alone(folder: Path) -> None:
    target = schedules.torch_target(folder, max_cached_tokens=64, max_sessions=2, canonical=False)
    expected = schedules.decode_alone(target, [5], 30)
    target.open("a", 1, schedules.GREEDY)
    [first] = target.forward([PassRequest("a", 0, (5,))])
    assert first.targets == (expected[0],)
    target.open("b", 30, schedules.GREEDY)
    target.open("probe", 1, schedules.GREEDY)
    with pytest.raises(CapacityError, match="3 sessions are open, limit max_sessions 2"):
        target.open("c", 1, schedules.GREEDY)
    target.close("probe")
    batch = [PassRequest("a", 1, (expected[0],)), PassRequest("b", 0, (1,) * 60)]
    with pytest.raises(CapacityError, match=r"the 48 free of 64 \(max_cached_tokens\)"):
        target.forward(batch)
    assert target.forward(batch[:1])[0].targets == (expected[1],)
    target.close("b")
    with pytest.raises(CapacityError, match="prompt of 513 tokens, limit 1 to 512"):
        target.open("b", 513, schedules.GREEDY)


def test_a_bad_request_is_refused_before_the_pass(folder: Path) -> None:
    target = schedules.torch_target(folder, canonical=False)
    target.open("s", 2, schedules.GREEDY)
    before = target.forward([PassRequest("s", 0, (1, 2))])
    for request, message in (
        (PassRequest("s", 3, (1,)), "cache_length is 3, but 2 tokens are cached"),
        (PassRequest("s", 2, ()), "feed is empty"),
        (PassRequest("s", 2, (211,)), "token ids 211 to 211, limit 0 to 210"),
        (PassRequest("s", 2, (1,), (-1,), (-1,)), "token ids -1 to 1"),
        (PassRequest("s", 2, (1,), (2, 3), (1, -1)), "must come before"),
        (PassRequest("s", 2, (1,), (2,), (-1,), sample=False), "sample=True"),
        (PassRequest("s", 2, (1,), (2,), ()), "nodes need parents"),
        (PassRequest("t", 0, (1,)), "'t' is not open"),
        (PassRequest("s", 2, (1,) * 510, (1, 2), (-1, 0)), "514 tokens, limit context_length 512"),
    ):
        with pytest.raises((ValueError, CapacityError), match=message):
            target.forward([request])
    with pytest.raises(ValueError, match="same key"):
        target.forward([PassRequest("s", 2, (1,))] * 2)
    assert target.forward([PassRequest("s", 0, (1, 2))]) == before
    assert target.forward([]) == []


def test_bad_options_are_named(folder: Path) -> None:
    for options, message in (
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"max_sessions": 0}, "max_sessions is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            schedules.torch_target(folder, **options)


class ReferenceAttention:
    """``AttentionBackend`` that nobody would serve with."""

    def lay_out(self, rows: BatchRows) -> ReferenceLayout:
        seen = [line for session in range(len(rows.requests)) for line in _seen_keys(rows, session)]
        return ReferenceLayout(seen)


@dataclass(frozen=True, slots=True)
class ReferenceLayout:
    """Of each row the slots that it sees, and how far behind it they are in the text."""

    seen: list[tuple[Indices, Indices]]

    def attend(self, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
        heads, rows, head_dim = states.query.shape
        kv_heads = states.key.shape[0]
        out = states.query.new_zeros((rows, heads, head_dim))
        for row, (slots, distances) in enumerate(self.seen):
            if layer.window is not None:
                slots = slots[distances < layer.window]
            where = torch.from_numpy(slots).to(states.keys.device)
            keys = states.keys[where].float().view(-1, kv_heads, head_dim)
            values = states.values[where].float().view(-1, kv_heads, head_dim)
            query = states.query[:, row].float().view(kv_heads, -1, head_dim)
            scores = torch.einsum("hsd,khd->hsk", query, keys) * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            if layer.sinks is not None:
                sinks = layer.sinks.float().view(kv_heads, -1, 1)
                scores = torch.cat([scores, sinks], dim=-1)
            weights = scores.softmax(dim=-1)[..., : len(slots)]
            part = torch.einsum("hsk,khd->hsd", weights, values)
            out[row] = part.reshape(heads, head_dim).to(out.dtype)
        return out


def _seen_keys(rows: BatchRows, index: int) -> list[tuple[Indices, Indices]]:
    """For each row of a session: slots, and its own position less theirs."""
    session = rows.session(index)
    request, base = session.request, session.base
    positions = np.concatenate([np.arange(request.cache_length), session.positions])
    found = []
    for row in range(request.row_count):
        keys = list(range(min(base, request.cache_length + row + 1)))
        node = row - len(request.feed)
        while node >= 0:
            keys.append(base + node)
            node = request.parents[node]
        found.append((session.slots[keys], session.positions[row] - positions[keys]))
    return found


def by_definition(layout: PagedLayout, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
    """What the kernel of ``paged_kernel.py`` computes, from the same numbers."""
    nothing = np.zeros(0, dtype=np.int64)
    seen = [(nothing, nothing)] * states.query.shape[1]
    for line, count, *rows in layout.tiles.tolist():
        base, path = int(layout.bases[line]), layout.paths[line].tolist()
        blocks = layout.tables[line].tolist()
        for row in rows[:count]:
            position = int(layout.positions[row])
            slots = [
                blocks[key // BLOCK_SIZE] * BLOCK_SIZE + key % BLOCK_SIZE
                if key < base
                else path[key - base]
                for key in range(position)
            ]
            slots.append(int(layout.own_slots[row]))
            seen[row] = np.array(slots), position - np.arange(position + 1)
    return ReferenceLayout(seen).attend(layer, states)


def _kernel() -> Attend:
    from edgespec.verifier.targets.paged_kernel import attend

    return attend


def repeated_by_hand(
    work: Callable[[], torch.Tensor],
) -> tuple[Callable[[], None], torch.Tensor]:
    """``recorded_passes.Record`` where there is no GPU: the same work on the same memory again."""
    result = work()

    def repeat() -> None:
        result.copy_(work())

    return repeat, result


_TILES_OF_TWO = 16
SHAPED: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {},
    "gpt_oss": {},
}
"""Grouped heads of an odd number; windows and soft caps; windows and sinks."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPED)
@pytest.mark.parametrize("backend", ["canonical", "paged", "recorded"])
def test_random_serving_has_the_logits_of_the_reference(
    family: str, backend: str, dtype: str, device: str, tmp_path: Path
) -> None:
    """Every slot of the pool that was not written holds NaN. A half-precision result carries its
    own rounding and the weights'."""
    family_model(family, **SHAPED[family]).save_pretrained(tmp_path)
    one, two = (Recorder(tmp_path, dtype, canonical=False, device=device) for _ in range(2))
    for each in (one, two):
        each.target._recorded = None
        each.target._pool.data[:, :, BLOCK_SIZE:] = torch.nan
    two.target._attention = ReferenceAttention()
    paged = PagedAttention(_TILES_OF_TWO, by_definition if device == "cpu" else _kernel())
    one.target._attention = CanonicalAttention(RowTiles()) if backend == "canonical" else paged
    if backend == "recorded":
        one.target._recorded = RecordedPasses(
            lambda plan: torch_target._call_model(one.target._model, plan, one.vocabulary_size),
            one.target._pool,
            paged,
            repeated_by_hand if device == "cpu" else None,
        )
    # The choice of an expert may turn on the last bits.
    half = 3e-2 if family != "gpt_oss" or device == "cpu" else 0.2
    most = 1e-5 if dtype == "float32" else half
    check = partial(_close, one, two, most)
    Serving(one.target, two.target, check, seed=5, same_tokens=dtype == "float32").run(80)
    if one.target._recorded is not None:
        if family == "gpt_oss" and device == "cuda":  # the host has to know who goes to which
            assert "synchronizing" in one.target._recorded.off
        else:
            assert not one.target._recorded.off
            assert one.target._recorded.repeated > 0


def _close(one: Recorder, two: Recorder, most: float) -> None:
    """Of the row's largest logit, or of 1: sums are no more exact than that. NaN differs too."""
    difference = (one.logits - two.logits).abs().amax(dim=-1).float()
    share = difference / two.logits.abs().amax(dim=-1).clamp(min=1.0)
    assert float(share.max()) <= most


@pytest.mark.parametrize("packed", [False, True])
def test_random_serving_has_the_tokens_and_logits_of_the_reference(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged passes, trees, rollbacks, prefix hits, evictions; with plain weights in the second."""
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 1)
    folder = write_checkpoint(tmp_path, tiny_config(tie_word_embeddings=not packed))
    one, two = (Recorder(folder, canonical=False, packed=pack) for pack in (packed, False))
    packs = [
        sum(isinstance(part, PackedLinear) for part in each.target._model.modules())
        for each in (one, two)
    ]
    assert packs == [15 if packed else 0, 0]
    assert one.target.mode.endswith(", packed weights") == packed
    two.target._attention = ReferenceAttention()
    Serving(one.target, two.target, partial(_close, one, two, 1e-5), seed=3).run(300)
