"""Tests of the ``Drafter`` contract on every kind of drafter, of drafts on graphs from other
exporters, and of execution providers.

Oracle: the contract in ``ports.py``. A step is a pure function of the tokens in the cache, however
they came there. Only on a graph does different chunking round differently, so a chunked feed is
compared by logits there. A foreign graph is compared with our own exporter's graph of the same
weights, whose greedy tokens must come out, and with a cache filled anew, from which no history of
rollbacks may differ. Error messages must name the file and the fault.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgespec.config import AgentConfig, DraftSection
from edgespec.config.common import SetupError
from edgespec.config.device import PROVIDERS
from edgespec.core.ports import Candidate, Drafter, ModelInfo, StepCancelledError, Twinned
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.device.build import load_drafter
from edgespec.device.drafters.decoder_graph import EXECUTION, CacheTensor
from edgespec.device.drafters.kv_buffers import Buffer, ReslicedCache
from edgespec.device.drafters.manifest import DraftModelError
from edgespec.device.drafters.onnx_drafter import (
    Behaviour,
    ForeignDrafter,
    GraphDrafter,
    OnnxDrafter,
    check_behaviour,
)
from edgespec.device.drafters.toy import PacedDrafter, RandomDrafter, SilentDrafter, ToyDrafter
from edgespec.device.export.export import export_draft
from edgespec.device.model_drafter import load_foreign_drafter
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.onnx_runtime import ort
from tests.adversarial import AdversarialDrafter
from tests.device.foreign_graphs import Style, attending_graph, concatenating_graph, write_folder
from tests.kit.tiny_checkpoints import CONTEXT_LENGTH, VOCABULARY_SIZE, write_checkpoint
from tests.present import require

SAMPLED = SamplingParams(temperature=0.8, top_k=50, repetition_penalty=1.2, seed=99)
MODEL = ToyModel(vocabulary_size=20)
TOKENS = [int(t) for t in np.random.default_rng(0).integers(0, VOCABULARY_SIZE, CONTEXT_LENGTH)]
STYLES = {
    "optimum": Style(),
    "float16": Style(half=True),
    "merged": Style(merged=True),
    "merged-early": Style(merged=True, causal_behind_cache=False),
    "last-row": Style(last_row=True),
    "tokens-first": Style(
        tokens_first=True, past="past_{part}_{layer}", present="present_{part}_{layer}"
    ),
    "no-positions": Style(positions=False),
}
ATTENDING = ("genai", "genai-open", "own")
FOREIGN = (*STYLES, *ATTENDING)
OURS = ("toy", "random", "adversarial", "paced", "silent", "onnx-4", "onnx-8", "onnx-32")
KINDS = (*OURS, "optimum", "genai")
ROUNDING = OnnxDrafter | ForeignDrafter
"""Drafters whose logits depend, by rounding, on the tokens that are fed together."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("drafts") / "source")


@pytest.fixture(scope="module")
def own_folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("own") / "draft"
    export_draft(checkpoint, folder, bits=32)
    return folder


@pytest.fixture(scope="module")
def folder_of(own_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("foreign")

    def make(kind: str) -> Path:
        folder: Path = root / kind
        if folder.exists():
            return folder
        if kind in STYLES:
            graph = concatenating_graph(STYLES[kind])
        else:
            graph = onnx.load(own_folder / "model.onnx")
            if kind != "own":
                graph = attending_graph(graph, open_head_size=kind == "genai-open")
        path = "onnx/model.onnx" if kind in STYLES else "model.onnx"
        external = [path] if kind in ("optimum", "genai") else []
        return write_folder(folder, {path: graph}, external=external)

    return make


@pytest.fixture(scope="module")
def drafter_of(
    checkpoint: Path, own_folder: Path, folder_of: Callable[[str], Path]
) -> Callable[[str], Drafter]:
    toy = ToyModel(vocabulary_size=VOCABULARY_SIZE)
    toy_short = ModelInfo("toy", "toy", VOCABULARY_SIZE, CONTEXT_LENGTH)

    def make(kind: str) -> Drafter:
        match kind.partition("-")[::2]:
            case ("toy", _):
                return ToyDrafter(toy, toy_short)
            case ("random", _):
                return RandomDrafter(toy_short, seed=4)
            case ("adversarial", _):
                return AdversarialDrafter(ToyDrafter(toy, toy_short))
            case ("silent", _):
                return SilentDrafter(toy_short)
            case ("paced", _):
                return PacedDrafter(ToyDrafter(toy, toy_short), 1.0, lambda _: None, time.monotonic)
            case ("onnx", "32"):
                return OnnxDrafter(own_folder)
            case ("onnx", bits):
                folder: Path = checkpoint.parent / kind
                if not folder.exists():
                    export_draft(checkpoint, folder, bits=int(bits))
                return OnnxDrafter(folder)
            case _:
                return load(folder_of(kind))

    return make


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def drafter(kind: str, drafter_of: Callable[[str], Drafter]) -> Drafter:
    return drafter_of(kind)


@pytest.mark.parametrize("sampling", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("width", [1, 2, 8])
def test_rollback_and_the_same_feed_give_the_same_guesses(
    kind: str, drafter: Drafter, sampling: SamplingParams, width: int
) -> None:
    drafter.begin(10, sampling)
    drafter.step(0, TOKENS[:10], width)
    first = [drafter.step(10 + i, [TOKENS[10 + i]], width) for i in range(6)]
    drafter.step(12, TOKENS[40:45], width)  # another branch overwrites rows 12 to 16
    again = [drafter.step(12 + i, [TOKENS[12 + i]], width) for i in range(4)]
    assert again == first[2:]
    for guesses in (*first, *again):
        assert len(guesses) == (0 if kind == "silent" else width)
        assert len({guess.token for guess in guesses}) == len(guesses)
        assert all(0 <= guess.token < VOCABULARY_SIZE for guess in guesses)
        assert all(guess.logprob <= 1e-6 for guess in guesses)


def test_begin_forgets_the_last_sequence(drafter: Drafter) -> None:
    def sequence() -> list[object]:
        drafter.begin(5, SAMPLED)
        return [drafter.step(0, TOKENS[:5], 2), drafter.step(5, TOKENS[5:8], 2)]

    fresh = sequence()
    drafter.begin(30, SamplingParams())
    drafter.step(0, TOKENS[100:130], 1)
    assert sequence() == fresh
    drafter.begin(5, SAMPLED)
    with pytest.raises(ValueError, match="0 tokens are cached"):
        drafter.step(1, [1], 1)


def test_one_by_one_and_in_chunks_is_the_same_sequence(kind: str, drafter: Drafter) -> None:
    length = 150  # longer than two of the ONNX drafter's chunks
    drafter.begin(length, SAMPLED)
    at_once = drafter.step(0, TOKENS[:length], 3)
    at_once_logits = drafter.logits.copy() if isinstance(drafter, ROUNDING) else None
    drafter.begin(length, SAMPLED)
    one_by_one, shifted = at_once, None
    for position in range(length):
        if isinstance(drafter, ROUNDING) and position == length - 1:
            shifted = drafter.logits.copy()
        one_by_one = drafter.step(position, [TOKENS[position]], 3)
    if not isinstance(drafter, ROUNDING):
        assert one_by_one == at_once
        return
    assert at_once_logits is not None
    assert shifted is not None
    # Quantised weights use 8-bit activations, which some CPUs round differently for single rows.
    tolerance = (0.05 if kind in ("onnx-4", "onnx-8") else 2e-3) * float(at_once_logits.std())
    np.testing.assert_allclose(drafter.logits, at_once_logits, rtol=0.0, atol=tolerance)
    assert np.abs(shifted - at_once_logits).max() > 10.0 * tolerance


@pytest.mark.parametrize(
    ("keep_length", "feed", "message"),
    [
        (11, [1], "keep_length is 11, but 10 tokens are cached"),
        (-1, [1], "keep_length is -1"),
        (10, [], "at least one token"),
        (10, [VOCABULARY_SIZE], f"token id is {VOCABULARY_SIZE}"),
        (10, [-1], "token id is -1"),
        (10, [1] * (CONTEXT_LENGTH - 9), f"{CONTEXT_LENGTH + 1} tokens do not fit"),
    ],
)
def test_a_broken_contract_is_refused_and_changes_nothing(
    drafter: Drafter, keep_length: int, feed: list[int], message: str
) -> None:
    drafter.begin(10, SAMPLED)
    drafter.step(0, TOKENS[:10], 2)
    before = drafter.step(9, [TOKENS[9]], 2)
    with pytest.raises(ValueError, match=message):
        drafter.step(keep_length, feed, 2)
    assert drafter.step(9, [TOKENS[9]], 2) == before


def test_the_whole_context_can_be_used(kind: str, drafter: Drafter) -> None:
    drafter.begin(CONTEXT_LENGTH, SamplingParams())
    first = drafter.step(0, TOKENS[:CONTEXT_LENGTH], 1)
    again = drafter.step(CONTEXT_LENGTH - 1, TOKENS[-1:], 1)
    assert kind == "silent" or (first and again)
    with pytest.raises(ValueError, match="do not fit"):
        drafter.step(CONTEXT_LENGTH, [1], 1)
    with pytest.raises(ValueError, match="prompt length"):
        drafter.begin(CONTEXT_LENGTH + 1, SamplingParams())


def test_a_cancelled_prefill_ends_at_the_next_chunk(drafter: Drafter) -> None:
    """A drafter may keep rows of the step before, which rounds otherwise."""
    drafter.begin(200, SAMPLED)
    expected = drafter.step(0, TOKENS[:200], 4)

    def check(found: tuple[Candidate, ...]) -> None:
        assert [one.token for one in found] == [one.token for one in expected]
        logprobs = [one.logprob for one in expected]
        assert [one.logprob for one in found] == pytest.approx(logprobs, abs=1e-4)

    for allowed in range(3):
        asked = itertools.count(1)
        drafter.begin(200, SAMPLED)
        try:
            check(drafter.step(0, TOKENS[:200], 4, lambda: next(asked) > allowed))  # noqa: B023
        except StepCancelledError:
            continue
        assert allowed > 0, "nobody asked whether the step was cancelled"
    drafter.begin(200, SAMPLED)
    check(drafter.step(0, TOKENS[:200], 4))


@pytest.mark.parametrize("kind", ["toy", "paced", "onnx-4", "optimum"])
def test_twins_keep_their_texts_apart(kind: str, drafter_of: Callable[[str], Drafter]) -> None:
    """Two sequences on one drafter, stepped in turn, must get the guesses of two separate
    drafters."""
    ours, theirs = TOKENS[:12], TOKENS[12:24]
    alone: list[list[object]] = []
    for text in (ours, theirs):
        drafter = drafter_of(kind)
        drafter.begin(4, SAMPLED)
        alone.append([drafter.step(at, text[at : at + 1], 2) for at in range(12)])
        drafter.close()
    first = drafter_of(kind)
    assert isinstance(first, Twinned)
    second = first.twin()
    found: list[list[object]] = [[], []]
    for drafter in (first, second):
        drafter.begin(4, SAMPLED)
    for at in range(12):
        for index, (drafter, text) in enumerate(((first, ours), (second, theirs))):
            found[index].append(drafter.step(at, text[at : at + 1], 2))
    assert found == alone
    second.close()
    assert len(first.step(12, theirs[:1], 2)) <= 2
    first.close()


# --- drafters that are no help --------------------------------------------------------------------


def test_a_paced_step_takes_its_time_in_total() -> None:
    """The total must not depend on the duration of the inner step. A cancelled step does not sleep
    to its end."""
    now, own_s = [5.0], 0.004

    class Slow(ToyDrafter):
        def step(self, *args: Any) -> tuple[Candidate, ...]:
            now[0] += own_s
            return ()

    def pause(duration_s: float) -> None:
        assert duration_s > 0
        now[0] += duration_s

    def paced(step_ms: float) -> PacedDrafter:
        return PacedDrafter(Slow(MODEL), step_ms, pause, lambda: now[0])

    assert paced(10.0).step(0, [1], 1) == ()
    assert now[0] == pytest.approx(5.010)
    own_s = 0.050
    assert paced(10.0).step(0, [1], 1) == ()
    assert now[0] == pytest.approx(5.060)
    with pytest.raises(StepCancelledError):
        paced(60_000.0).step(0, [1], 1, lambda: now[0] > 6.0)
    assert now[0] < 6.2


# --- graphs from other exporters ------------------------------------------------------------------


def load(folder: Path, context_length: int = 0, window: int = 0) -> ForeignDrafter:
    draft = DraftSection(context_length=context_length, window=window)
    return load_foreign_drafter(resolve_source(str(folder), Purpose.DRAFT), print, draft)


def draft_greedily(drafter: Drafter, count: int = 80) -> list[int]:
    drafter.begin(5, SamplingParams())
    feed, keep, drafted = TOKENS[:5], 0, []
    for _ in range(count):
        token = drafter.step(keep, feed, 3)[0].token
        keep, feed = keep + len(feed), [token]
        drafted.append(token)
    return drafted


def last_row(drafter: ForeignDrafter) -> NDArray[np.float32]:
    return drafter.logits.copy()


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_same_weights_draft_the_same_tokens(
    kind: str, folder_of: Callable[[str], Path], own_folder: Path
) -> None:
    drafter = load(folder_of(kind))
    assert draft_greedily(drafter) == draft_greedily(OnnxDrafter(own_folder))
    assert drafter.behaviour.in_place == (kind in ATTENDING)
    assert drafter.behaviour.chunks == (kind != "merged-early")
    assert drafter.behaviour.all_rows == (kind not in ("last-row", *ATTENDING))
    halved = "float16" in kind
    assert [one.row_bytes for one in drafter.graph.caches] == [2 * 16 * (2 if halved else 4)] * 4
    drafter.close()
    drafter.close()
    with pytest.raises(ValueError, match="closed"):
        drafter.step(0, [1], 1)


@pytest.mark.parametrize("kind", FOREIGN)
def test_behind_a_window_the_same_weights_draft_the_same_tokens(
    kind: str, folder_of: Callable[[str], Path], own_folder: Path
) -> None:
    """Rows leave a window of 40 44 times."""
    drafter, own = load(folder_of(kind), window=40), OnnxDrafter(own_folder, window=40)
    for one in (drafter, own):
        one.begin(5, SamplingParams())
        for position, token in enumerate(TOKENS):
            one.step(position, [token], 1)
    np.testing.assert_allclose(
        last_row(drafter), own.logits, atol=0.1 if "float16" in kind else 1e-3
    )
    with pytest.raises(ValueError, match=r"window is 257.*\b256\b"):
        load(folder_of(kind), window=257)


@pytest.mark.parametrize("kind", FOREIGN)
def test_no_history_of_rollbacks_shows(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Random commits and rollbacks must give bitwise the same logits as a second drafter that only
    ever holds the right tokens and is fed in the same pieces."""
    dice = np.random.default_rng(11)
    drafter, fresh = load(folder_of(kind)), load(folder_of(kind))
    drafter.begin(10, SamplingParams())
    cached: list[int] = []
    pieces: list[int] = []  # the lengths at which the current tokens were fed
    for _ in range(40):
        keep = int(dice.integers(max(0, len(cached) - 9), len(cached) + 1))
        keep = max((end for end in [0, *pieces] if end <= keep), default=0)
        feed = [int(t) for t in dice.integers(0, VOCABULARY_SIZE, int(dice.integers(1, 6)))]
        drafter.step(keep, feed, 1)
        cached = [*cached[:keep], *feed]
        pieces = [*(end for end in pieces if end <= keep), len(cached)]
    fresh.begin(10, SamplingParams())
    for start, end in itertools.pairwise([0, *pieces]):
        fresh.step(start, cached[start:end], 1)
    np.testing.assert_array_equal(last_row(drafter), last_row(fresh))


@pytest.mark.parametrize("kind", ["optimum", "genai", "no-positions"])
def test_the_context_ends_where_the_config_says(
    kind: str, folder_of: Callable[[str], Path]
) -> None:
    assert load(folder_of(kind)).info.context_length == CONTEXT_LENGTH
    for length in (1, 3, 20, CONTEXT_LENGTH):
        short = load(folder_of(kind), context_length=length)
        short.begin(1, SamplingParams())
        short.step(0, TOKENS[:length], 1)
        with pytest.raises(ValueError, match=f"context length of {length}"):
            short.step(length, [1], 1)
    with pytest.raises(ValueError, match=f"context_length is 257.*{CONTEXT_LENGTH}"):
        load(folder_of(kind), context_length=257)


class NoMoreMemory(ReslicedCache):
    """A cache that fails to grow past 40 tokens."""

    def _ensure_room(self, tensor: CacheTensor, buffer: Buffer, needed: int) -> Buffer:
        if needed > 40:
            raise MemoryError("no more")
        return super()._ensure_room(tensor, buffer, needed)


def test_without_memory_a_step_fails_and_what_is_kept_stays(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.device.drafters.kv_buffers.ReslicedCache", NoMoreMemory)
    drafter = load(folder_of("optimum"))
    drafter.begin(30, SamplingParams())
    drafter.step(0, TOKENS[:30], 1)
    before = last_row(drafter)
    with pytest.raises(MemoryError):
        drafter.step(30, TOKENS[30:60], 1)
    drafter.step(25, TOKENS[25:30], 1)
    np.testing.assert_allclose(last_row(drafter), before, atol=1e-4)


# --- graphs that are refused ----------------------------------------------------------------------


def damage_graph(what: str, *given: Any) -> onnx.ModelProto:
    model = concatenating_graph()
    CHANGES[what](model.graph, *given)
    return model


def rename_input(graph: onnx.GraphProto, old: str, new: str) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    next(value for value in graph.input if value.name == old).name = new


def add_input(graph: onnx.GraphProto, name: str, *sizes: int) -> None:
    graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(sizes)))


def drop_output(graph: onnx.GraphProto, name: str) -> None:
    graph.output.remove(next(value for value in graph.output if value.name == name))


def fix_length(graph: onnx.GraphProto) -> None:
    for value in graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = 128


def distort_the_past(graph: onnx.GraphProto) -> None:
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(-5.0, np.float32), "factor"))
    past, present = "past_key_values.0.key", "present.0.key"
    for node in graph.node:
        if present in node.output:
            node.input[:] = ["distorted" if name == past else name for name in node.input]
    graph.node.insert(0, helper.make_node("Mul", [past, "factor"], ["distorted"]))


CHANGES: dict[str, Callable[..., None]] = {
    one.__name__: one
    for one in (rename_input, add_input, drop_output, fix_length, distort_the_past)
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rename_input", "input_ids", "tokens"), "input 'tokens' \\(int64 .* is not known"),
        (
            ("rename_input", "position_ids", "input_embeds"),
            "Expected are input_ids, attention_mask",
        ),
        (("add_input", "past_conv.0", 1, 64, 3), "'past_conv.0'.*cannot be rolled back"),
        (("add_input", "inputs_embeds", 1, 4, 64), "'inputs_embeds'.*several files"),
        (("add_input", "encoder_hidden_states", 1, 4, 64), "'encoder_hidden_states'"),
        (
            ("add_input", "past_key_values.7.key", 1, 2, 3, 16),
            "inputs are missing: past value of lay",
        ),
        (("drop_output", "present.1.value"), "outputs are missing: present value of layer 1"),
        (("drop_output", "logits"), "output 'logits' is missing"),
        (("fix_length",), "a cache of a fixed length of 128"),
        (("distort_the_past",), "differs from decoding at once by"),
    ],
)
def test_a_graph_that_cannot_draft_is_refused_by_name(
    change: tuple[Any, ...], message: str, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "bad", {"model.onnx": damage_graph(*change)})
    with pytest.raises(DraftModelError, match=message) as caught:
        load(folder)
    assert str(folder / "model.onnx") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x00nonsense", b"version https://git-lfs.github.com"])
def test_a_file_that_is_no_graph_is_named(content: bytes, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "bad", {})
    (folder / "model.onnx").write_bytes(content)
    with pytest.raises(DraftModelError, match=r"model\.onnx: "):
        load(folder)


def test_what_is_not_finite_is_refused_and_what_is_noisy_is_used() -> None:
    dice = np.random.default_rng(0)
    rows = {t: dice.standard_normal(50).astype(np.float32) for t in range(60)}

    def decode(noise: float) -> Callable[[int, object], NDArray[np.float32]]:
        def rows_of(keep: int, tokens: object) -> NDArray[np.float32]:
            assert isinstance(tokens, tuple)
            exact = np.stack([rows[token] for token in tokens])
            return (exact + noise * dice.standard_normal(exact.shape)).astype(np.float32)

        return rows_of

    assert check_behaviour(decode(0.0), 50) == Behaviour(True, all_rows=True)
    assert check_behaviour(decode(0.1), 50).chunks
    assert check_behaviour(decode(1.0), 50).reason
    assert check_behaviour(decode(float("nan")), 50).reason == "its logits are not all finite"


# --- execution providers --------------------------------------------------------------------------

AVAILABLE = ort.get_available_providers()
THERE = [name for name, (first, *_) in EXECUTION.items() if first in AVAILABLE]


def on_provider(provider: str, model: str = "bundled") -> tuple[Drafter, list[str]]:
    said: list[str] = []
    draft = DraftSection(model=model, provider=provider)
    drafter = require(load_drafter(AgentConfig(draft=draft), say=said.append))
    return drafter, said


@pytest.mark.skipif("cuda" in THERE, reason="there may be a GPU")
def test_a_provider_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(DraftModelError, match=r"CUDAExecutionProvider.* not in .*CPUExecutionProv"):
        on_provider("cuda")


@pytest.mark.parametrize("provider", [name for name in THERE if name not in ("cpu", "tensorrt")])
def test_an_accelerator_drafts_what_the_cpu_drafts(
    provider: str, own_folder: Path, folder_of: Callable[[str], Path]
) -> None:
    """OpenVINO's provider (``pip install onnxruntime-openvino`` in a separate environment) runs on
    any x86 processor."""
    for folder in (own_folder, folder_of("optimum"), folder_of("float16")):
        drafter, said = on_provider(provider, str(folder))
        assert isinstance(drafter, GraphDrafter)
        assert drafter.placement is None or drafter.placement.accelerated
        assert said[0].startswith(f"the draft runs on {provider}")
        assert draft_greedily(drafter) == draft_greedily(on_provider("cpu", str(folder))[0])
        drafter.close()


class Failing:
    """A session whose run after ``good`` successful ones fails once, as on an accelerator without
    memory."""

    def __init__(self, session: ort.InferenceSession, good: int) -> None:
        self._session, self.left = session, good

    def run_with_iobinding(self, binding: object, options: object = None) -> None:
        self.left -= 1
        if self.left == -1:
            raise RuntimeError("out of memory on the device")
        self._session.run_with_iobinding(binding, options)


def feed_steps(drafter: Drafter, *steps: tuple[int, int]) -> None:
    """Run steps, each given by the tokens to keep and the length up to which the text is fed."""
    for keep, stop in steps:
        drafter.step(keep, TOKENS[keep:stop], 2)


@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", ["optimum", "own"])
def test_a_run_that_fails_in_the_middle_leaves_a_draft_that_is_right(
    kind: str, good: int, folder_of: Callable[[str], Path]
) -> None:
    """Oracle: a draft without a failure that is fed in the same way afterwards."""
    found = []
    for fails in (True, False):
        drafter = load(folder_of(kind))
        assert drafter._session is not None
        drafter.begin(1, SamplingParams())
        if fails:
            drafter._session = Failing(drafter._session, good)
            with pytest.raises(RuntimeError, match="out of memory"):
                feed_steps(drafter, (0, 100), (100, 101), (60, 130), (130, 131), (131, 132))
            drafter.begin(1, SamplingParams())
        feed_steps(drafter, (0, 100), (70, 140), (140, 141))
        found.append(last_row(drafter))
        drafter.close()
    np.testing.assert_array_equal(found[0], found[1])


def test_providers_are_refused_by_the_configuration() -> None:
    draft = DraftSection(provider="cuda", memory_budget="900MiB")
    with pytest.raises(SetupError, match=r"draft\.provider is cuda, but a memory budget"):
        load_drafter(AgentConfig(draft=draft))
    assert sorted(EXECUTION) == sorted(PROVIDERS)


def test_a_draft_holds_ends_off_as_long_as_its_target_does(own_folder: Path) -> None:
    prompt, text = [5, 6, 7], [9, 11]
    drafter = OnnxDrafter(own_folder)

    def guesses(params: SamplingParams) -> list[list[int]]:
        """Return the candidates behind the prompt and behind each token of the text."""
        drafter.begin(len(prompt), params)
        feeds = [prompt, *([one] for one in text)]
        lengths = (0, len(prompt), len(prompt) + 1)
        steps = [drafter.step(*given, 8) for given in zip(lengths, feeds, strict=True)]
        return [[one.token for one in step] for step in steps]

    free = guesses(SamplingParams())
    ends = tuple(dict.fromkeys(one for step in free for one in step[:3]))
    held = guesses(SamplingParams(min_tokens=2, stop_token_ids=ends))
    for place in range(2):
        assert not set(ends).intersection(held[place])
        others = [one for one in free[place] if one not in ends]
        assert held[place][: len(others)] == others
    assert held[2] == free[2]
    drafter.close()
