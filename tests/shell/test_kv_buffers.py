"""The cache that grows, slides and is given back.

Oracles: a drafter whose cache is plain zeroed arrays for the whole context, as it was before; a
fresh drafter that is fed the window's tokens alone; the system's own count of resident pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgespec.core.device.memory import KvType
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters import kv_buffers, onnx_drafter
from edgespec.device.drafters.decoder_graph import CacheTensor
from edgespec.device.drafters.kv_buffers import KvBuffers
from edgespec.device.drafters.manifest import read_manifest, write_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.token_cache import SINKS, DraftWindow
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint

MIB = 1 << 20
GREEDY = SamplingParams()
gives_back = pytest.mark.skipif(
    not hasattr(mmap, "MADV_DONTNEED"), reason="this system takes no pages back from a mapping"
)


class PlainBuffers(KvBuffers):
    """As the cache was before."""

    def arrays(self) -> Iterator[tuple[CacheTensor, NDArray[np.generic]]]:
        for index, (tensor, array) in enumerate(super().arrays()):
            yield tensor, self.plain.setdefault(index, np.zeros_like(array))

    def __init__(self, tensors: Sequence[CacheTensor], capacity: int) -> None:
        self.plain: dict[int, NDArray[np.generic]] = {}
        super().__init__(tensors, capacity)

    def shrink(self, length: int) -> None:
        pass


def buffers_of(count: int, heads: int, capacity: int, head_size: int) -> KvBuffers:
    tensor = CacheTensor("past", "present", "key", "float32", heads, head_size, False)
    return KvBuffers([tensor] * count, capacity)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[KvType, Path]:
    """A context that is no multiple of a block, with two heads of 16."""
    root = tmp_path_factory.mktemp("drafts")
    source = write_checkpoint(root / "source", tiny_config(max_position_embeddings=250))
    found = {}
    for kv_type in KvType:
        found[kv_type] = root / kv_type.value
        export_draft(source, found[kv_type], model_info(source), bits=8, kv_type=kv_type)
    return found


def random_steps(seed: int, count: int, context: int) -> Iterator[tuple[int, list[int]]]:
    """(tokens kept, tokens fed): commits, rollbacks to anywhere, long feeds."""
    dice = random.Random(seed)
    length = 0
    for _ in range(count):
        keep = length if dice.random() < 0.6 else dice.randint(0, length)
        most = min(context - keep, 90 if dice.random() < 0.2 else 3)
        if most < 1:
            keep, most = dice.randint(0, context // 2), 3
        feed = [dice.randrange(VOCABULARY_SIZE) for _ in range(dice.randint(1, most))]
        yield keep, feed
        length = keep + len(feed)


@pytest.mark.parametrize("kv_type", list(KvType))
def test_tokens_are_those_of_a_plain_cache(
    kv_type: KvType, drafts: dict[KvType, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    grown = OnnxDrafter(drafts[kv_type])
    monkeypatch.setattr(onnx_drafter, "KvBuffers", PlainBuffers)
    plain = OnnxDrafter(drafts[kv_type])
    for drafter in (grown, plain):
        drafter.begin(10, GREEDY)
    for keep, feed in random_steps(3, 60, 250):
        assert grown.step(keep, feed, 3) == plain.step(keep, feed, 3)
        np.testing.assert_array_equal(grown.logits, plain.logits)
    grown.close()
    plain.close()


@pytest.mark.parametrize("kv_type", [KvType.INT8, KvType.FLOAT32])
def test_a_window_whose_rows_do_not_move_is_a_fresh_draft_of_its_last_tokens(
    kv_type: KvType,
    drafts: dict[KvType, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those of int8, and of a graph whose keys are turned in no way that is known."""
    monkeypatch.setattr(kv_buffers, "LARGEST_RESIDUE", -1.0)
    folder = drafts[kv_type]
    sliding, text = OnnxDrafter(folder, window=64), list[int]()
    assert sliding.info.context_length > 250
    sliding.begin(10, GREEDY)
    window, fresh = DraftWindow(64), OnnxDrafter(folder)
    for keep, feed in random_steps(5, 50, 1000):
        sliding.step(keep, feed, 2)
        text[keep:] = feed
        window.place(keep, len(text))
        window.held = len(text) - window.skipped
        assert window.held <= 64
        fresh.begin(1, GREEDY)
        fresh.step(0, text[window.skipped :], 2)
        np.testing.assert_allclose(sliding.logits, fresh.logits, atol=2e-2)
    assert sliding.held_tokens <= 64
    unknown = "past.0.key: cached keys are not turned by their position"
    assert caplog.text.count(unknown) == (kv_type is KvType.FLOAT32)
    sliding.close()
    fresh.close()


def test_a_draft_looks_as_far_as_it_was_trained(drafts: dict[KvType, Path], tmp_path: Path) -> None:
    """By its manifest, unless a window is asked for; a context that is asked for stays the end."""
    folder = shutil.copytree(drafts[KvType.FLOAT32], tmp_path / "draft")
    write_manifest(folder, replace(read_manifest(folder), trained_length=64))
    text = [token % VOCABULARY_SIZE for token in range(200)]

    def logits(drafter: OnnxDrafter, length: int = 200) -> NDArray[np.generic]:
        drafter.begin(1, GREEDY)
        drafter.step(0, text[:length], 1)
        found = drafter.logits.copy()
        drafter.close()
        return found

    np.testing.assert_array_equal(
        logits(OnnxDrafter(folder)), logits(OnnxDrafter(drafts[KvType.FLOAT32], window=64))
    )
    np.testing.assert_array_equal(
        logits(OnnxDrafter(folder, window=250)), logits(OnnxDrafter(drafts[KvType.FLOAT32]))
    )
    with pytest.raises(ValueError, match="100"):
        logits(OnnxDrafter(folder, context_length=100))
    write_manifest(folder, replace(read_manifest(folder), trained_length=250))
    assert read_manifest(folder).window == 0


def test_restricting_is_a_shorter_window_fewer_guesses_or_rest(drafts: dict[KvType, Path]) -> None:
    folder = drafts[KvType.FLOAT32]
    drafter, fresh = OnnxDrafter(folder, window=128), OnnxDrafter(folder)
    text = [int(token) for token in np.random.default_rng(1).integers(1, VOCABULARY_SIZE, 140)]
    drafter.begin(10, GREEDY)
    assert len(drafter.step(0, text[:120], 4)) == 4
    drafter.restrict(64, 2)
    assert drafter.held_tokens == 64
    assert len(drafter.step(120, text[120:121], 4)) == 2
    assert drafter.held_tokens <= 64
    fresh.begin(1, GREEDY)
    fresh.step(0, text[:SINKS] + text[121 - 56 + SINKS : 121], 1)
    np.testing.assert_allclose(drafter.logits, fresh.logits, atol=2e-2)
    drafter.restrict(0, 0)
    assert drafter.step(121, text[121:130], 4) == ()
    assert drafter.held_tokens == 0
    assert drafter.growth_bytes(500) == 0
    drafter.restrict(128, 4)
    assert drafter.growth_bytes(500) == 128 * drafter.manifest.kv_bytes_per_token
    assert len(drafter.step(130, text[130:], 4)) == 4
    fresh.begin(1, GREEDY)
    fresh.step(0, text[:SINKS] + text[140 - 112 + SINKS :], 1)
    np.testing.assert_allclose(drafter.logits, fresh.logits, atol=2e-2)
    with pytest.raises(ValueError, match="window is 129"):
        drafter.restrict(129, 1)
    drafter.close()
    fresh.close()


@pytest.mark.parametrize("kv_type", [KvType.FLOAT16, KvType.INT8])
def test_coarser_numbers_change_logits_little(kv_type: KvType, drafts: dict[KvType, Path]) -> None:
    rows = {}
    for kind in (KvType.FLOAT32, kv_type):
        drafter = OnnxDrafter(drafts[kind])
        drafter.begin(10, GREEDY)
        found = []
        for keep, feed in random_steps(9, 30, 250):
            drafter.step(keep, feed, 1)
            found.append(drafter.logits[:VOCABULARY_SIZE].copy())
        rows[kind] = np.stack(found)
        drafter.close()
    expected, got = rows[KvType.FLOAT32], rows[kv_type]
    error = float(np.sqrt(np.mean((got - expected) ** 2)) / expected.std())
    assert 0.0 < error < (0.05 if kv_type is KvType.FLOAT16 else 0.15)
    manifest = read_manifest(drafts[kv_type])
    assert manifest.kv_bytes_per_token == 2 * 2 * 2 * 16 * kv_type.bytes


def resident(arrays: Iterable[NDArray[np.generic]]) -> int:
    """Bytes of these arrays that are in memory, asked of the system page by page: of the process as
    a whole it says what anything else in it has come to hold or has given back meanwhile, too."""
    library, page, found = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, 0
    for array in arrays:
        pages = (ctypes.c_ubyte * -(-array.nbytes // page))()
        place, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        assert library.mincore(place, size, pages) == 0, os.strerror(ctypes.get_errno())
        found += sum(one & 1 for one in pages)
    return found * page


@gives_back
def test_only_written_rows_are_resident_and_the_rest_is_given_back() -> None:
    """1 GiB of address space; of each head 8 MiB, which large pages would fill at the first row."""
    buffers = buffers_of(16, 8, 16_384, 128)
    arrays = [array for _, array in buffers.arrays()]
    assert resident(arrays) == 0

    def write(length: int) -> None:
        buffers.touched_length = length
        for array in arrays:
            array[:, :, :length] = 1

    write(8)
    assert resident(arrays) < 4 * MIB
    write(1024)
    assert resident(arrays) == 64 * MIB
    buffers.shrink(128)
    assert resident(arrays) == 8 * MIB
    assert buffers.touched_length == 128
    assert all((array[:, :, :128] == 1).all() for array in arrays)
    assert all((array[:, :, 128:1024] == 0).all() for array in arrays)
    buffers.shrink(128)
    places = [array.ctypes.data for array in arrays]
    arrays.clear()
    buffers.close()
    assert not any(map(_mapped, places))


def _mapped(place: int) -> bool:
    """Whether anything lies at this address."""
    vector = ctypes.c_ubyte()
    library, size = ctypes.CDLL(None), ctypes.c_size_t(mmap.PAGESIZE)
    return bool(library.mincore(ctypes.c_void_p(place), size, ctypes.byref(vector)) == 0)


def test_no_address_space_is_a_memory_error_with_the_size() -> None:
    with pytest.raises((MemoryError, OverflowError), match=r"2 key and value buffers|too large"):
        buffers_of(2, 1 << 20, 1 << 26, 1 << 12)
