"""Canonical mode: the logits of a position have the same bits under every schedule.

The reference of a text is one token a pass after a prefill in one piece. Everything else (cuts,
chunks, trees, other sessions in the pass, before and behind) is random, and compared bit for bit,
right and wrong branches alike. Products that are made to depend on the row count, on a row's place,
or on the order of their sum must be found out.
"""

from __future__ import annotations

import logging
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch.nn import functional

from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape, PassRequest
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    EngineAction,
    EngineEvent,
    EngineLimits,
    KeepNodes,
    OpenSequence,
    RunBatch,
    SendTo,
    StreamMessage,
    StreamOpened,
)
from edgespec.verifier.targets import canonical_mode, linear_layers
from edgespec.verifier.targets.canonical_mode import CanonicalModeError
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.row_tiles import (
    SIZES,
    agreeing_linear_sizes,
    agreeing_packed_sizes,
    agreeing_sizes,
    cut,
)
from tests.shell.family_models import family_model
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint
from tests.shell.torch_schedules import Recorder, check_random_schedule, torch_target
from tests.sources import ROOT

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"num_attention_heads": 3, "num_key_value_heads": 1},
    "gemma2": {},  # its window is shorter than the distance of two tiles of keys
}


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=SHAPES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    model = family_model(request.param, max_position_embeddings=1024, **SHAPES[request.param])
    model.save_pretrained(path)
    return path


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, tiny_config("qwen2"))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of any size are packed."""
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_tree_packing_and_prefill_cut_gives_the_same_bits(folder: Path, dtype: str) -> None:
    recorder, rng = Recorder(folder, dtype), random.Random(dtype)
    for length in (5, 20, 251, 300, 509):
        check_random_schedule(rng, recorder, length)


def test_plain_mode_differs_only_in_the_last_bits(folder: Path) -> None:
    target = torch_target(folder, canonical=False, model_threads=1)
    assert not target.canonical
    differences = re.findall(r"differs by (\S+?)(?:;|$)", target.self_test())
    assert all(float(one) < 1e-4 for one in differences)


def _disagree(monkeypatch: pytest.MonkeyPatch, *, least_base: int) -> None:
    """Let no matrix product have a size that holds, from ``least_base`` rows on."""
    true = agreeing_linear_sizes
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
        target = torch_target(tiny)
    assert not target.canonical
    assert not target.exact
    assert target.mode == "plain (texts may differ where two tokens nearly tie)"
    assert torch.get_num_threads() == threads
    assert "texts may differ where two tokens nearly tie: row tiles of 8: a 64 x " in caplog.text
    assert not any("forward" in vars(part) for part in target._model.modules())
    with pytest.raises(CanonicalModeError, match=r"row tiles of 32: a 64 x .* row by row: a 64 x"):
        torch_target(tiny, canonical=True)


def test_row_by_row_is_only_for_those_who_ask(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _disagree(monkeypatch, least_base=2)
    assert not torch_target(tiny).canonical
    recorder = Recorder(tiny)
    assert recorder.target.mode == "canonical (row by row)"
    check_random_schedule(random.Random(4), recorder, 60)


# --- row tiles ------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [1, 2, 4, 8, 16, 32])
def test_pieces_cover_the_rows_and_are_all_on_the_list(base: int) -> None:
    sizes = SIZES[base]
    for count in range(1, 400):
        pieces = cut(count, sizes)
        assert set(pieces) <= set(sizes)
        assert sum(pieces[:-1]) < count <= sum(pieces)
        assert list(pieces) == sorted(pieces, reverse=True)


def test_a_product_that_depends_on_the_place_or_is_no_number_is_found_out() -> None:
    def product(rows: torch.Tensor) -> torch.Tensor:
        out = rows.clone()
        if len(rows) in (8, 64):
            out[5] *= 1.0000001
        return out

    probes = torch.tensor([[1.0, 2.0], [3.0, -1.0], [0.5, 0.25], [-2.0, 7.0]])
    assert agreeing_sizes(product, probes, 8) == ()
    assert agreeing_sizes(product, probes, 16) == (16, 32, 48, 128)
    assert agreeing_sizes(lambda rows: rows * torch.nan, probes, 8) == ()


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
    assert agreeing_linear_sizes(weight, None, 8) == (8, 16, 32)


def test_a_packed_product_that_depends_on_the_row_count_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    true = PackedLinear.product
    layer = PackedLinear(torch.randn((48, 64)), None)
    assert agreeing_packed_sizes(layer, 8)

    def product(layer: PackedLinear, rows: torch.Tensor) -> torch.Tensor:
        return true(layer, rows) * (1.0 if len(rows) < 32 else 1.0000001)

    monkeypatch.setattr(PackedLinear, "product", product)
    assert set(agreeing_packed_sizes(layer, 8)) <= {8, 16}


# --- packed weights -------------------------------------------------------------------------


def _packed(recorder: Recorder) -> int:
    return sum(isinstance(part, PackedLinear) for part in recorder.target._model.modules())


def test_packed_weights_have_the_same_bits_under_every_schedule(tiny: Path, small: None) -> None:
    recorder, rng = Recorder(tiny), random.Random(5)
    # Which base holds, and whether with packed weights, is for this processor to say.
    assert recorder.target.mode.startswith("canonical (row tiles of ")
    assert _packed(recorder) == (15 if recorder.target.mode.endswith(", packed weights") else 0)
    for length in (5, 130):
        check_random_schedule(rng, recorder, length)


def test_where_packed_products_do_not_hold_canonical_mode_keeps_the_bits_of_plain_ones(
    tiny: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: set[int] = set()

    def fails(_layer: PackedLinear, base: int) -> tuple[int, ...]:
        tried.add(base)
        return ()

    text = [(7 * index) % 320 for index in range(40)]
    plain = Recorder(tiny, packed=False)
    expected = plain.reference(text, 20)
    monkeypatch.setattr(canonical_mode, "agreeing_packed_sizes", fails)
    recorder = Recorder(tiny)
    assert sorted(tried) == [max(2, linear_layers.quick_rows()), 8, 16, 32]
    assert _packed(recorder) == 0
    assert recorder.target.mode == plain.target.mode
    assert torch.equal(recorder.reference(text, 20), expected)


# --- prefixes that sessions share -----------------------------------------------------------

CONTEXT = 240
SAMPLINGS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        seed=5,
        max_tokens=24,
        ignore_eos=True,
    ),
)
Texts = dict[str, tuple[int, ...]]
Logits = dict[tuple[str, int], torch.Tensor]
"""By session and the position that is sampled from them."""


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + 31 * i * i + 17 * i) % VOCABULARY_SIZE for i in range(count))


@dataclass
class Serving:
    """An engine and the target, each pass at once; a device that knows its text drafts it, each
    right token behind a wrong sibling, so that kept rows have to move."""

    recorder: Recorder
    share: SharePrefixes
    blocks: int = 200
    known: Texts = field(default_factory=dict)
    texts: Texts = field(default_factory=dict)
    logits: list[tuple[tuple[str, int], torch.Tensor]] = field(default_factory=list)
    rows: int = 0

    def __post_init__(self) -> None:
        limits = EngineLimits(
            cache=CacheShape(self.blocks, 16), max_rows_per_session=48, share_prefixes=self.share
        )
        info = self.recorder.target.info
        self.engine = VerifyEngine(info, Limits(context_length=CONTEXT), limits, contain=False)
        self.names: dict[int, str] = {}
        self.now = 0.0

    def play(self, *opens: Open) -> None:
        """Open them at once, and go on until all have their text."""
        events: list[EngineEvent] = []
        for request in opens:
            stream = len(self.names) + 1
            self.names[stream] = request.session_id
            self.texts[request.session_id] = (*request.prompt, *request.committed)
            events.append(StreamOpened(stream, request))
        while events:
            self.now += 0.01
            for action in self.engine.handle(events.pop(0), self.now):
                events += self._do(action)

    def _do(self, action: EngineAction) -> Sequence[EngineEvent]:
        target = self.recorder.target
        match action:
            case OpenSequence(key, prompt_length, sampling, text):
                target.open(key, prompt_length, sampling, text)
            case KeepNodes(key, nodes):
                target.keep(key, nodes)
            case CloseSequence(key):
                target.close(key)
            case RunBatch(requests):
                results = target.forward(requests)
                self._note(requests)
                return [BatchDone(tuple(results))]
            case SendTo(stream, Commit() as commit):
                name = self.names[stream]
                assert commit.position == len(self.texts[name])
                self.texts[name] += commit.tokens
                held = StreamMessage(stream, Received(len(self.texts[name]), 0))
                drafts = () if commit.finish else self._drafts(stream, name)
                return [held, *drafts]
        return []

    def _note(self, requests: Sequence[PassRequest]) -> None:
        row = 0
        for request in requests:
            self.rows += request.row_count
            if request.sample:
                length = request.cache_length + len(request.feed)
                self.logits.append(((request.key, length), self.recorder.logits[row]))
                row += 1 + len(request.tokens)

    def _drafts(self, stream: int, name: str) -> list[StreamMessage]:
        held = self.texts[name]
        right = self.known.get(name, ())[len(held) :][:4]
        if not right:
            return []
        first = 10 * len(held)
        nodes = [t for token in right for t in ((token + 1) % VOCABULARY_SIZE, token)]
        parents = [0, 0, *(first + 1 + 2 * (i // 2) for i in range(len(nodes) - 2))]
        base_hash = CommittedPrefix(held).hash_at(len(held))
        draft = Draft(first, tuple(parents), tuple(nodes), len(held), base_hash)
        return [StreamMessage(stream, draft)]


def generations(sampling: SamplingParams, first: Texts) -> list[Open]:
    """One system prompt, the same request again, a chat's next turn and a device that comes back;
    the later ones go on with texts in ``first``."""
    system = tokens(1, 100)

    def request(name: str, prompt: tuple[int, ...], committed: tuple[int, ...] = ()) -> Open:
        return Open(name, "", "", prompt, committed, sampling=sampling, run_ahead=RunAhead.ALWAYS)

    opens = [request("a", system + tokens(2, 7)), request("b", system + tokens(3, 28))]
    opens.append(replace(opens[1], session_id="same"))
    if first:
        opens.append(request("next turn", first["a"] + tokens(4, 9)))
        text = first["b"]
        opens.append(request("back", text[:128], text[128:141]))
    return opens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_shared_and_private_prefixes_give_the_same_bits(
    sampling: SamplingParams, tmp_path: Path
) -> None:
    """Oracle: the same sessions one after the other, on an engine that shares nothing and is sent
    no drafts; every row that is sampled must have the same logits, and every text be the same."""
    recorder = Recorder(write_checkpoint(tmp_path))
    first = Serving(recorder, SharePrefixes.NONE)
    first.play(generations(sampling, {})[0])
    first.play(generations(sampling, {})[1])
    opens = generations(sampling, first.texts)
    private = Serving(recorder, SharePrefixes.NONE)
    for request in opens:
        private.play(request)
    expected: Logits = dict(private.logits)
    assert private.engine.keeper.prefix_hit_tokens == 0

    shared = Serving(recorder, SharePrefixes.ALL, known=private.texts)
    for request in opens:
        shared.play(request)
    _check(shared, private.texts, expected)
    # Whole blocks of 16: of b the system prompt, of the same one all, of the others all but
    # what the last pass left.
    assert shared.engine.keeper.prefix_hit_tokens >= 96 + 112 + 112 + 128
    assert shared.rows < private.rows

    crowded = Serving(recorder, SharePrefixes.ALL, blocks=15, known=private.texts)
    crowded.play(*opens)
    _check(crowded, private.texts, expected)
    assert crowded.engine.keeper.evictions > 0
    assert crowded.engine.keeper.prefix_hit_tokens > 0


def _check(serving: Serving, texts: Texts, expected: Logits) -> None:
    assert serving.texts == texts
    assert len(serving.logits) > 30
    for place, logits in serving.logits:
        assert torch.equal(logits, expected[place]), place
    ledger = serving.engine.keeper.ledger
    assert ledger is not None
    assert ledger.free_count == ledger.block_count


# --- other processors -----------------------------------------------------------------------


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
    """Sums of 24 to 4096 terms, and a vocabulary of an odd size."""
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
    ours = ("MKL_", "ATEN_CPU_", "ONEDNN_")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "tests.shell.torch_schedules"]
    done = subprocess.run(
        [*command, f"{wide}:float32", f"{wide}:bfloat16"],
        cwd=ROOT,
        env=plain | forced,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("canonical (row tiles of ") == 2, done.stdout
    if (
        "MKL_CBWR" in forced and torch.backends.mkl.is_available()
    ):  # the library's promise: every row count agrees; packed weights it never sees
        sizes = r"(8 to 128\)|\d+( to \d+)?\), packed)"
        assert re.search(rf"float32 canonical \(row tiles of {sizes}", done.stdout)
