"""The speculation tree against a naive model: a set of whole texts.

Oracle: every guess is the full text it stands for. It is alive when it is longer than the committed
text and begins with it; a repeat, an unknown parent or another text is stale.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol import tree as tree_module
from edgespec.core.protocol.tree import ROOT, CommittedPrefix, Growth, SpeculationTree
from tests.sim.faults.checks import check_tree

PROMPT = (7, 7)

Text = tuple[int, ...]


class TextModel:
    def __init__(self) -> None:
        self.committed: Text = PROMPT
        self.texts: dict[int, Text] = {}
        self.last_id = 0

    def agrees(self, text: Text) -> bool:
        shared = min(len(text), len(self.committed))
        return text[:shared] == self.committed[:shared]

    @property
    def alive(self) -> dict[int, Text]:
        length = len(self.committed)
        return {i: t for i, t in self.texts.items() if len(t) > length and self.agrees(t)}

    def grow(self, node_id: int, parent: int, token: int, base: int) -> Growth:
        if node_id <= self.last_id:
            return Growth.STALE
        before = self.committed[:base] if parent == ROOT else self.texts.get(parent)
        if before is None or not self.agrees((*before, token)):
            return Growth.STALE
        text = (*before, token)
        if text in self.alive.values():
            return Growth.STALE
        self.texts[node_id], self.last_id = text, node_id
        return Growth.ALIVE if len(text) > len(self.committed) else Growth.FORWARDED

    def commit(self, tokens: Text) -> int:
        before = len(self.alive)
        old = self.committed
        self.committed += tokens
        walked = {t for t in self.texts.values() if self.agrees(t) and len(t) > len(old)}
        walked = {t for t in walked if len(t) <= len(self.committed)}
        return before - len(self.alive) - len(walked)


_grow = st.tuples(
    st.just("grow"), st.integers(0, 2), st.integers(0, 12), st.integers(0, 2), st.integers(0, 3)
)

_commit = st.tuples(st.just("commit"), st.lists(st.integers(0, 2), max_size=3))

_follow = st.tuples(st.just("follow"), st.integers(0, 20))

_clear = st.tuples(st.just("clear"))


@given(st.lists(st.one_of(_grow, _grow, _grow, _grow, _commit, _follow, _clear), max_size=60))
def test_like_a_set_of_texts(steps: list[tuple[object, ...]]) -> None:
    prefix, model = CommittedPrefix(PROMPT), TextModel()
    tree = SpeculationTree(prefix)
    for step in steps:
        match step:
            case ("grow", int(jump), int(back), int(token), int(behind)):
                node_id, length = model.last_id + jump, len(model.committed)
                parent = max(0, model.last_id + 1 - back)
                base = max(0, length - behind)
                expected = model.grow(node_id, parent, token, base)
                assert tree.grow(node_id, parent, token, base) is expected
            case ("commit", list(tokens)):
                assert tree.commit(tuple(tokens)) == model.commit(tuple(tokens))
            case ("follow", int(pick)):
                alive = list(model.alive.values())
                if alive:
                    text = alive[pick % len(alive)][len(model.committed) :]
                    assert tree.commit(text) == model.commit(text)
            case ("clear",):
                killed = len(model.alive)
                model.texts, model.last_id = {}, 0
                assert tree.clear() == killed
        _same(tree, model)


def _same(tree: SpeculationTree, model: TextModel) -> None:
    check_tree(tree, "tree")
    prefix = tuple(tree.prefix.tokens)
    assert prefix == model.committed
    assert tree.last_id == model.last_id
    assert {node_id: (*prefix, *tree.path(node_id)) for node_id in tree.nodes} == model.alive
    for node_id, text in model.texts.items():
        place = tree.place(node_id, 0)
        assert place == (len(text) if model.agrees(text) else None)


def _tree(*tokens: int) -> SpeculationTree:
    return SpeculationTree(CommittedPrefix(PROMPT, tokens))


def test_siblings_and_their_descendants_die_together() -> None:
    tree = _tree()
    for node_id, parent, token in ((1, 0, 4), (2, 0, 5), (3, 1, 4), (4, 2, 4), (5, 4, 4)):
        assert tree.grow(node_id, parent, token, 2) is Growth.ALIVE
    assert tree.commit((4,)) == 3
    assert list(tree.nodes) == [3]
    assert tree.nodes[3].parent == ROOT
    assert tree.grow(6, 5, 1, 0) is Growth.STALE


def test_a_node_that_found_no_parent_may_come_again_behind_it() -> None:
    """A verifier had no room for node 2, so node 3 found no parent; the device sends both again
    when there is room. Once node 3 had used its id up, node 2 was a repeat, for ever."""
    tree = _tree()
    assert tree.grow(1, 0, 4, 2) is Growth.ALIVE
    assert tree.grow(3, 2, 5, 0) is Growth.STALE
    assert tree.grow(2, 1, 6, 0) is Growth.ALIVE
    assert tree.grow(3, 2, 5, 0) is Growth.ALIVE
    assert tree.grow(3, 2, 5, 0) is Growth.STALE


def test_a_late_child_of_a_committed_node_is_placed_behind_it() -> None:
    tree = _tree()
    tree.grow(1, ROOT, 4, 2)
    tree.commit((4, 5))
    assert tree.grow(2, 1, 5, 0) is Growth.FORWARDED
    assert tree.grow(3, 1, 6, 0) is Growth.STALE
    assert tree.grow(4, 2, 6, 0) is Growth.ALIVE
    assert tree.nodes[4].position == 4


def test_only_so_many_committed_ids_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_module, "MAX_COMMITTED_IDS", 2)
    tree = _tree()
    for node_id in (1, 2, 3):
        tree.grow(node_id, node_id - 1, 4, 2)
    tree.commit((4, 4, 4))
    assert [tree.place(node_id, 0) for node_id in (1, 2, 3)] == [None, 4, 5]


_tokens = st.lists(st.integers(0, 1 << 20), max_size=12)


@given(_tokens, st.data())
def test_another_token_is_another_hash_from_there(tokens: list[int], data: st.DataObject) -> None:
    if not tokens:
        return
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens[:at], tokens[at] + 1, *tokens[at + 1 :]]
    one, other = CommittedPrefix(tokens), CommittedPrefix(changed)
    for length in range(len(tokens) + 1):
        assert (one.hash_at(length) == other.hash_at(length)) is (length <= at)
