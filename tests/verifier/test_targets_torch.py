"""The torch target's tokens against transformers' own ``generate``, and against itself; every
attention backend, and packed weights, against the definition of attention; canonical mode.

Oracles: greedy texts of every family equal ``generate`` of the same tiny random checkpoint (another
attention, another cache), with windows, soft caps and sinks that matter within the text; texts of
all kinds of sampling equal those of one token per pass alone.

Oracle of attention: a reference that goes row by row in float32, reads the pool through the same
tables and uses no library's attention. Every unwritten slot holds NaN, which exposes a backend that
reads one.

Oracle of canonical mode: one token per pass after a prefill in one piece. Everything else (cuts,
chunks, trees, other sessions in the pass) is random, and compared bit for bit, on right and wrong
branches alike. Products that depend on the row count, on a row's place, or on the order of their
sum must be detected.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from edgespec.core.ports import CapacityError, PassRequest, PassResult, SimpleTarget
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.folders import MODEL_TYPES
from edgespec.verifier.targets import canonical_mode, linear_layers, row_tiles, torch_target
from edgespec.verifier.targets.canonical_attention import CanonicalAttention
from edgespec.verifier.targets.canonical_mode import CanonicalModeError
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.loading import FAMILIES
from edgespec.verifier.targets.paged_attention import Attend, PagedAttention, PagedLayout
from edgespec.verifier.targets.pass_batch import Indices
from edgespec.verifier.targets.pass_plan import BatchRows, LayerAttention, LayerStates
from edgespec.verifier.targets.recorded_passes import RecordedPasses
from edgespec.verifier.targets.row_tiles import RowTiles
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.kit.live_verifier import run_python
from tests.kit.tiny_checkpoints import FAMILY_MODELS, family_model, tiny_config, write_checkpoint
from tests.verifier import torch_schedules as schedules
from tests.verifier.torch_schedules import Recorder, Serving

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
    texts = [schedules.generate_greedily(model, prompt, 40) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 15
    for canonical in (None, False):
        target = schedules.torch_target(tmp_path, canonical=canonical)
        assert schedules.decode_beside(target, PROMPTS, texts) == texts
        assert target._pool.free_tokens == 2048


@pytest.mark.parametrize("canonical", [True, False])
def test_a_least_length_is_that_of_generate(folder: Path, canonical: bool) -> None:
    """The end tokens are the likeliest tokens of the free text, so each would come early."""
    model = family_model("qwen3")
    free = schedules.generate_greedily(model, PROMPTS[1], 30)
    ends = list(dict.fromkeys(free[:12]))
    ids = torch.tensor([PROMPTS[1]])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=60,
        min_new_tokens=25,
        do_sample=False,
        eos_token_id=ends,
    )
    wanted = out[0, len(PROMPTS[1]) :].tolist()
    assert len(wanted) > 25
    assert not set(ends).intersection(wanted[:25])
    params = SamplingParams(min_tokens=25, max_tokens=60, stop_token_ids=tuple(ends))
    target = schedules.torch_target(folder, canonical=canonical)
    assert schedules.decode_alone(target, PROMPTS[1], len(wanted), params) == wanted
    assert schedules.decode_beside(target, [PROMPTS[1]], [wanted], [params]) == [wanted]


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
    """An ``AttentionBackend`` for comparison only; it is too slow to serve with."""

    def lay_out(self, rows: BatchRows) -> ReferenceLayout:
        seen = [line for session in range(len(rows.requests)) for line in _seen_keys(rows, session)]
        return ReferenceLayout(seen)


@dataclass(frozen=True, slots=True)
class ReferenceLayout:
    """The slots that each row attends to, and their distances from the row in the text."""

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
    """Return for each row of a session the slots, and its own position less theirs."""
    request, base, first = rows.requests[index], int(rows.bases[index]), rows.first_rows[index]
    slots = rows.key_slots(np.array([index]), int(rows.lengths[index]))[0]
    own = rows.positions[first : first + request.row_count]
    positions = np.concatenate([np.arange(request.cache_length), own])
    found = []
    for row in range(request.row_count):
        keys = list(range(min(base, request.cache_length + row + 1)))
        node = row - len(request.feed)
        while node >= 0:
            keys.append(base + node)
            node = request.parents[node]
        found.append((slots[keys], own[row] - positions[keys]))
    return found


def by_definition(layout: PagedLayout, layer: LayerAttention, states: LayerStates) -> torch.Tensor:
    """Compute the result of the kernel in ``paged_kernel.py`` from the same numbers."""
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


def repeated_by_hand(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Replace ``recorded_passes.Record`` without a GPU: the same work on the same memory again."""
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
"""Model shapes: an odd number of grouped heads; windows and soft caps; windows and sinks."""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SHAPED)
@pytest.mark.parametrize("backend", ["canonical", "paged", "recorded"])
def test_random_serving_has_the_logits_of_the_reference(
    family: str, backend: str, dtype: str, device: str, tmp_path: Path
) -> None:
    """Every slot of the pool that was not written holds NaN. A half-precision result carries its
    own rounding and that of the weights."""
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
    # The choice of an expert may depend on the last bits.
    half = 3e-2 if family != "gpt_oss" or device == "cpu" else 0.2
    most = 1e-5 if dtype == "float32" else half
    check = partial(_close, one, two, most)
    Serving(one.target, two.target, check, seed=5, same_tokens=dtype == "float32").run(80)
    if one.target._recorded is not None:
        # the host needs the assignment of rows to experts
        if family == "gpt_oss" and device == "cuda":
            assert "synchronizing" in one.target._recorded.off
        else:
            assert not one.target._recorded.off
            assert one.target._recorded.repeated > 0


def _close(one: Recorder, two: Recorder, most: float) -> None:
    """Check that logits agree within ``most`` of the row's largest logit, or of 1, because sums are
    no more exact than that. NaN counts as a difference."""
    difference = (one.logits - two.logits).abs().amax(dim=-1).float()
    share = difference / two.logits.abs().amax(dim=-1).clamp(min=1.0)
    assert float(share.max()) <= most


@pytest.mark.parametrize("packed", [False, True])
def test_random_serving_has_the_tokens_and_logits_of_the_reference(
    packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ragged passes, trees, rollbacks, prefix hits and evictions; the second target has plain
    weights."""
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


# --- canonical mode: the same bits under every schedule -------------------------------------------


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {},  # its window is shorter than the distance of two tiles of keys
}


@pytest.fixture(scope="module", params=SHAPES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    model = family_model(request.param, max_position_embeddings=1024, **SHAPES[request.param])
    model.save_pretrained(path)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, tiny_config("qwen2"))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tree_packing_and_prefill_cut_gives_the_same_bits(
    checkpoint: Path, dtype: str, device: str
) -> None:
    recorder, rng = schedules.Recorder(checkpoint, dtype, device=device), random.Random(dtype)
    for length in (5, 20, 251, 300, 509):
        schedules.check_random_schedule(rng, recorder, length)


def test_plain_mode_differs_only_in_the_last_bits(checkpoint: Path) -> None:
    target = schedules.torch_target(checkpoint, canonical=False, model_threads=1)
    assert not target.canonical
    differences = re.findall(r"differs by (\S+?)(?:;|$)", target.self_test())
    assert all(float(one) < 1e-4 for one in differences)


def _disagree(monkeypatch: pytest.MonkeyPatch, *, least_base: int) -> None:
    """Let no matrix product have a size that holds, from ``least_base`` rows on."""
    true = row_tiles.agreeing_linear_sizes
    monkeypatch.setattr(
        canonical_mode,
        "agreeing_linear_sizes",
        lambda weight, bias, base: () if base >= least_base else true(weight, bias, base),
    )


def test_where_nothing_holds_the_default_is_plain_mode_that_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = torch.get_num_threads()
    _disagree(monkeypatch, least_base=1)
    with caplog.at_level(logging.WARNING):
        target = schedules.torch_target(tiny)
    assert not target.canonical
    assert target.mode == "plain (texts may differ where two tokens nearly tie)"
    assert torch.get_num_threads() == threads
    assert "texts may differ where two tokens nearly tie: row tiles of 8: a 64 x " in caplog.text
    assert not any("forward" in vars(part) for part in target._model.modules())
    with pytest.raises(CanonicalModeError, match=r"row tiles of 32: a 64 x .* row by row: a 64 x"):
        schedules.torch_target(tiny, canonical=True)


def test_row_by_row_is_only_for_those_who_ask(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _disagree(monkeypatch, least_base=2)
    assert not schedules.torch_target(tiny).canonical
    recorder = schedules.Recorder(tiny)
    assert recorder.target.mode == "canonical (row by row)"
    schedules.check_random_schedule(random.Random(4), recorder, 60)


def test_a_product_that_depends_on_the_place_or_is_no_number_is_found_out() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.clone()
        if len(rows) in (8, 64):
            out[5] *= 1.0000001
        return out

    probes = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [-2.0, 7.0]])
    assert row_tiles.agreeing_sizes(product, probes, 8) == ()
    assert row_tiles.agreeing_sizes(product, probes, 16) == (16, 32, 48, 128)
    assert row_tiles.agreeing_sizes(lambda rows: rows * torch.nan, probes, 8) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [32, 512])
def test_another_order_of_the_sum_is_found_out_though_rounding_hides_it(
    dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def product(rows: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
        terms = rows.float()[:, None] * weight.float()
        order = reversed(range(width)) if len(rows) >= 64 else range(width)
        total = torch.zeros(terms.shape[:2])
        for k in order:
            total += terms[:, :, k]
        return total.to(dtype)

    torch.manual_seed(width)
    weight = torch.randn((16, width)).to(dtype)
    rows = torch.randn((64, width)).to(dtype)
    if dtype == torch.bfloat16:
        assert torch.equal(product(rows, weight, None)[:8], product(rows[:8], weight, None))
    monkeypatch.setattr(functional, "linear", product)
    assert row_tiles.agreeing_linear_sizes(weight, None, 8) == (8, 16, 32)


def test_a_packed_product_that_depends_on_the_row_count_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = PackedLinear.product
    layer = PackedLinear(torch.randn((48, 64)), None)
    assert row_tiles.agreeing_packed_sizes(layer, 8)

    def product(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return true(layer, rows) * (1.0 if len(rows) < 32 else 1.0000001)

    monkeypatch.setattr(PackedLinear, "product", product)
    assert set(row_tiles.agreeing_packed_sizes(layer, 8)) <= {8, 16}


def _packed(recorder: schedules.Recorder) -> int:
    return sum(isinstance(part, PackedLinear) for part in recorder.target._model.modules())


def test_packed_weights_have_the_same_bits_under_every_schedule(tiny: Path, small: None) -> None:
    recorder, rng = schedules.Recorder(tiny), random.Random(5)
    # The base that holds, and whether it holds with packed weights, depends on this processor.
    assert recorder.target.mode.startswith("canonical (row tiles of ")
    assert _packed(recorder) == (15 if recorder.target.mode.endswith(", packed weights") else 0)
    for length in (5, 130):
        schedules.check_random_schedule(rng, recorder, length)


def test_where_packed_products_do_not_hold_canonical_mode_keeps_the_bits_of_plain_ones(
    tiny: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: set[int] = set()

    def fails(_layer: PackedLinear, base: int) -> tuple[int, ...]:
        tried.add(base)
        return ()

    text = [(7 * index) % 320 for index in range(40)]
    plain = schedules.Recorder(tiny, packed=False)
    expected = plain.reference(text, 20)
    monkeypatch.setattr(canonical_mode, "agreeing_packed_sizes", fails)
    recorder = schedules.Recorder(tiny)
    # The larger tiles that are tried depend on the machine: none where attention does not hold.
    assert min(tried) == max(2, linear_layers.quick_rows())
    assert 8 in tried
    assert tried <= set(row_tiles.SIZES)
    assert _packed(recorder) == 0
    assert recorder.target.mode == plain.target.mode
    assert torch.equal(recorder.reference(text, 20), expected)


class Unshared(SimpleTarget):
    """A ``TargetModel`` that uses no blocks of other sessions. If a request counts a row as cached
    that this session has not computed, the target computes it first."""

    def __init__(self, target: TorchTarget) -> None:
        self._target, self.info, self.cache = target, target.info, target.cache
        self.mode = target.mode
        self._texts: dict[str, tuple[int, ...]] = {}
        self._nodes: dict[str, tuple[int, ...]] = {}
        self._computed: dict[str, int] = {}

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._texts[key], self._computed[key] = tuple(text), 0
        self._target.open(key, prompt_length, sampling)

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return self._target.forward([self._whole(request) for request in batch])

    def _whole(self, request: PassRequest) -> PassRequest:
        key, cached = request.key, min(self._computed[request.key], request.cache_length)
        self._texts[key] = (*self._texts[key][: request.cache_length], *request.feed)
        self._nodes[key], self._computed[key] = request.tokens, len(self._texts[key])
        feed = self._texts[key][cached:]
        return replace(request, cache_length=cached, feed=feed, blocks=())

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._texts[key] += tuple(self._nodes[key][node] for node in nodes)
        self._computed[key] += len(nodes)
        self._target.keep(key, nodes)

    def close(self, key: str) -> None:
        self._target.close(key)


def test_shared_and_private_prefixes_give_the_same_bits(tmp_path: Path) -> None:
    """Random passes have prefix hits, evictions and kept nodes, with all kinds of sampling."""
    checkpoint = write_checkpoint(tmp_path)
    shared, private = schedules.Recorder(checkpoint), schedules.Recorder(checkpoint)

    def same_bits() -> None:
        assert torch.equal(shared.logits, private.logits)

    targets = shared.target, Unshared(private.target)
    serving = schedules.Serving(*targets, same_bits, seed=3, samplings=schedules.SAMPLINGS)
    serving.run(500)
    assert serving.hits > 3


FORCED = [
    {},
    {"MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    {"MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    {"MKL_CBWR": "AUTO,STRICT"},
    {"ATEN_CPU_CAPABILITY": "default"},
    {"ATEN_CPU_CAPABILITY": "avx2"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model with sums of 24 to 4096 terms, and a vocabulary of an odd size."""
    config = tiny_config(
        "qwen2",
        hidden_size=512,
        intermediate_size=4096,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
        num_hidden_layers=1,
        vocab_size=331,
        max_position_embeddings=512,
    )
    return write_checkpoint(tmp_path_factory.mktemp("wide"), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "forced", FORCED, ids=lambda f: ",".join(f"{k}={f[k]}" for k in f) or "as is"
)
def test_canonical_mode_holds_under_every_forced_instruction_set(
    wide: Path, forced: dict[str, str]
) -> None:
    models = f"{wide}:float32", f"{wide}:bfloat16"
    done = run_python("-m", "tests.verifier.torch_schedules", *models, env=forced)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("canonical (row tiles of ") == 2, done.stdout
    if (
        "MKL_CBWR" in forced and torch.backends.mkl.is_available()
    ):  # the library's promise: every row count agrees; packed weights never reach it
        sizes = r"(8 to 128\)|\d+( to \d+)?\), packed)"
        assert re.search(rf"float32 canonical \(row tiles of {sizes}", done.stdout)
