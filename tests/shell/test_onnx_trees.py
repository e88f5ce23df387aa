"""Draft steps behind several leaves, on onnxruntime. Oracle: ``OnnxDrafter`` fed each leaf's own
text, one after the other, with a rollback between; the plain graph knows nothing of trees."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from edgespec.core.device.memory import KvType
from edgespec.core.device.tree_cache import TreeCache
from edgespec.core.ports import Candidate, StepCancelledError, TreeRows
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, SpeculationTree
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.drafters.onnx_tree_drafter import OnnxTreeDrafter
from edgespec.device.drafters.tree_rows import common_length
from edgespec.device.export.export import export_draft
from edgespec.device.export.tree_graph import TreeGraphError, with_tree_inputs
from edgespec.models.folders import model_info
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint

GREEDY = SamplingParams()
PENALISED = SamplingParams(temperature=0.8, seed=3, repetition_penalty=1.3, frequency_penalty=0.4)
# In float32 rows differ by what adding up in another order does; with 4-bit weights activations
# are rounded to 8 bits, and a last bit may tip one over.
FLOAT_TOLERANCE, QUANTISED_TOLERANCE = 2e-5, 0.02


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trees")


def _draft(root: Path, kind: str, bits: int, kv_type: KvType = KvType.FLOAT32) -> Path:
    source, folder = root / kind, root / f"{kind}-{bits}-{kv_type.value}"
    if not source.exists():
        write_checkpoint(source, tiny_config(kind))
    if not folder.exists():
        export_draft(source, folder, model_info(source), bits=bits, kv_type=kv_type)
    return folder


class _Paths:
    """The plain drafter, brought to any text."""

    def __init__(self, folder: Path, sampling: SamplingParams) -> None:
        self.drafter, self._text = OnnxDrafter(folder), list[int]()
        self.drafter.begin(4, sampling)

    def after(self, text: list[int], width: int) -> tuple[Candidate, ...]:
        keep = common_length(self._text, text[:-1])
        self._text = list(text)
        return self.drafter.step(keep, text[keep:], width)


def _check_same(
    found: tuple[Candidate, ...], wanted: tuple[Candidate, ...], tolerance: float
) -> None:
    """All but one of the guesses are the same; two as likely as each other may change places."""
    assert found[0].token in [one.token for one in wanted[:2]]
    scores = {one.token: one.logprob for one in wanted}
    shared = [one for one in found if one.token in scores]
    assert len(shared) >= len(wanted) - 1
    assert all(abs(one.logprob - scores[one.token]) <= tolerance for one in shared)


def _grow(tree: SpeculationTree, dice: random.Random, count: int) -> None:
    for _ in range(count):
        parent = dice.choice([ROOT, *tree.nodes])
        token = dice.randrange(VOCABULARY_SIZE)
        tree.grow(tree.last_id + 1, parent, token, tree.prefix.length)


@pytest.mark.parametrize("sampling", [GREEDY, PENALISED], ids=["greedy", "penalised"])
@pytest.mark.parametrize(
    ("kind", "bits", "kv_type", "tolerance"),
    [
        ("llama", 32, KvType.FLOAT32, FLOAT_TOLERANCE),
        ("qwen3", 32, KvType.FLOAT32, FLOAT_TOLERANCE),
        ("llama", 4, KvType.FLOAT32, QUANTISED_TOLERANCE),
        ("llama", 32, KvType.FLOAT16, 0.02),
        ("llama", 32, KvType.INT8, 0.05),
    ],
)
def test_leaves_of_one_run_are_those_of_single_steps(
    root: Path,
    kind: str,
    bits: int,
    kv_type: KvType,
    tolerance: float,
    sampling: SamplingParams,
) -> None:
    """Commits along the tree and off it, switches of branch, several leaves at once."""
    folder, dice = _draft(root, kind, bits, kv_type), random.Random(5)
    drafter, paths = OnnxTreeDrafter(folder, 4), _Paths(folder, sampling)
    drafter.begin(4, sampling)
    tree, cache = SpeculationTree(CommittedPrefix((1, 2, 3, 4))), TreeCache()
    moved = 0
    for _ in range(40):
        if tree.roots and dice.random() < 0.5:
            tree.commit((dice.choice(tree.roots).token,))
        elif dice.random() < 0.15:
            tree.commit((dice.randrange(VOCABULARY_SIZE),))
        _grow(tree, dice, dice.randrange(4))
        ends = [node.id for node in tree.nodes.values() if not node.children] or [ROOT]
        leaves = dice.sample(ends, min(len(ends), dice.randint(1, 4)))
        keep, feed, rows = cache.feed(tree, leaves)
        moved += bool(rows.moved)
        found = drafter.step_tree(keep, feed, rows, 5)
        for leaf, answers in zip(leaves, found, strict=True):
            wanted = paths.after([*tree.prefix.tokens, *tree.path(leaf)], 5)
            _check_same(answers, wanted, tolerance)
    assert moved > 3
    drafter.close()
    paths.drafter.close()


def test_one_leaf_at_a_time_has_the_bits_of_plain_steps(root: Path) -> None:
    folder, dice = _draft(root, "llama", 4), random.Random(2)
    drafter, plain = OnnxTreeDrafter(folder, 4), OnnxDrafter(folder)
    for one in (drafter, plain):
        one.begin(4, GREEDY)
    length = 0
    for _ in range(40):
        keep = length if dice.random() < 0.6 else dice.randint(0, length)
        feed = [dice.randrange(VOCABULARY_SIZE) for _ in range(dice.choice((1, 1, 2, 5)))]
        assert drafter.step(keep, feed, 3) == plain.step(keep, feed, 3)
        np.testing.assert_array_equal(drafter.logits, plain.logits)
        length = keep + len(feed)


def test_a_long_prompt_is_fed_in_chunks_and_may_be_cancelled(root: Path) -> None:
    folder = _draft(root, "llama", 32)
    drafter, plain = OnnxTreeDrafter(folder, 2), OnnxDrafter(folder)
    text = [n % VOCABULARY_SIZE for n in range(150)]
    for one in (drafter, plain):
        one.begin(len(text), GREEDY)
    prompt = TreeRows((), (7, 8), (149, 149), (150, 151))
    asked = iter((False, True))
    with pytest.raises(StepCancelledError, match="64 rows"):
        drafter.step_tree(0, text, prompt, 2, lambda: next(asked))
    drafter.begin(len(text), GREEDY)
    found = drafter.step_tree(0, text, prompt, 2)
    for answers, token in zip(found, (7, 8), strict=True):
        plain.begin(len(text), GREEDY)
        assert [one.token for one in answers] == [
            one.token for one in plain.step(0, [*text, token], 2)
        ]


@pytest.mark.parametrize(
    ("keep", "feed", "rows", "message"),
    [
        (9, (), TreeRows((), (1,), (3,), (4,)), "keep_length is 9"),
        (4, (), TreeRows((), (1,), (4,), (4,)), "row 4 hangs on 4"),
        (4, (), TreeRows((), (1,), (3,), (2,)), "leaf 2 was not fed"),
        (4, (), TreeRows((), (), (), ()), "leaves is 0"),
        (4, (), TreeRows((), (VOCABULARY_SIZE,), (3,), (4,)), f"token id is {VOCABULARY_SIZE}"),
        (1, (), TreeRows((3,), (1,), (1,), (2,)), "row 3 stays, but not row 2"),
        (3, (), TreeRows((3, 3), (1,), (1,), (4,)), "moved row 3"),
    ],
)
def test_a_broken_contract_is_refused(
    root: Path, keep: int, feed: tuple[int, ...], rows: TreeRows, message: str
) -> None:
    drafter = OnnxTreeDrafter(_draft(root, "llama", 32), 2)
    drafter.begin(4, GREEDY)
    drafter.step(0, [1, 2, 3, 4], 1)
    with pytest.raises(ValueError, match=message):
        drafter.step_tree(keep, feed, rows, 1)
    drafter.close()
    with pytest.raises(ValueError, match="closed"):
        drafter.step_tree(4, (), TreeRows((), (1,), (3,), (4,)), 1)


def test_a_twin_has_rows_of_its_own_and_as_much_room(root: Path) -> None:
    drafter = OnnxTreeDrafter(_draft(root, "llama", 32), 2)
    alone, other = _Paths(_draft(root, "llama", 32), GREEDY), [4, 3, 2]
    twin = drafter.twin()
    assert twin.memory_bytes() == drafter.memory_bytes()
    drafter.begin(4, GREEDY)
    drafter.step_tree(0, (1, 2), TreeRows((), (5, 6), (1, 1), (2, 3)), 2)
    twin.begin(3, GREEDY)
    both = twin.step_tree(0, other, TreeRows((), (7, 8), (2, 2), (3, 4)), 5)
    for leaf, answers in zip((7, 8), both, strict=True):
        _check_same(answers, alone.after([*other, leaf], 5), FLOAT_TOLERANCE)
    (again,) = drafter.step_tree(2, (), TreeRows((2, 3), (9,), (3,), (4,)), 5)
    _check_same(again, alone.after([1, 2, 6, 9], 5), FLOAT_TOLERANCE)
    drafter.close()
    assert twin.step(3, [9], 1)  # the weights stay while somebody uses them


def test_a_graph_that_is_none_of_ours_is_refused(root: Path) -> None:
    import onnx

    model = onnx.load(_draft(root, "llama", 32) / "model.onnx")
    attention = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    (window,) = [one for one in attention.attribute if one.name == "local_window_size"]
    window.i = 16
    with pytest.raises(TreeGraphError, match="slides"):
        with_tree_inputs(model.SerializeToString(), VOCABULARY_SIZE, KvType.FLOAT32)
    del model.graph.node[:]
    with pytest.raises(TreeGraphError, match="no row of its own"):
        with_tree_inputs(model.SerializeToString(), VOCABULARY_SIZE, KvType.FLOAT32)
