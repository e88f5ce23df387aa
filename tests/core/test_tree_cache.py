"""Which rows a drafter of trees is left with, and fed. Oracle: a table of rows that does what it is
told, and whose every row then has to spell the committed text or a path of the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.tree_cache import TreeCache
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.tree import ALIVE, ROOT, SpeculationTree
from edgespec.core.protocol.work import TreeRows
from edgespec.drafters.tree_rows import RowTable

_round = st.tuples(
    st.lists(st.integers(0, 2), max_size=3),  # committed
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=4),  # grown: behind, token
    st.lists(st.integers(0, 9), min_size=1, max_size=3),  # leaves
)


def _leaves_of(tree: SpeculationTree) -> list[int]:
    return [node.id for node in tree.nodes.values() if not node.children] or [ROOT]


@given(st.lists(_round, max_size=15))
def test_rows_are_the_text_and_paths_and_nothing_is_fed_twice(
    rounds: list[tuple[list[int], list[tuple[int, int]], list[int]]],
) -> None:
    tree = SpeculationTree(CommittedPrefix((9, 9)))
    cache, table = TreeCache(), RowTable()
    for committed, grown, chosen in rounds:
        tree.commit(committed)
        for behind, token in grown:
            parents = [ROOT, *tree.nodes]
            parent = parents[behind % len(parents)]
            tree.grow(tree.last_id + 1, parent, token, tree.prefix.length)
        ends = _leaves_of(tree)
        leaves = list(dict.fromkeys(ends[one % len(ends)] for one in chosen))
        known = {tuple(table.path(row)) for row in range(len(table.tokens))}
        keep, feed, rows = cache.feed(tree, leaves)
        fed = table.advance(keep, feed, rows)
        text = tree.prefix.tokens
        paths = [tuple(table.path(row)) for row in range(len(table.tokens))]
        assert paths[: len(text)] == [tuple(text[: n + 1]) for n in range(len(text))]
        alive = {(*text, *tree.path(node_id)) for node_id in tree.nodes}
        assert alive.issuperset(paths[len(text) :])
        assert len(set(paths)) == len(paths)
        wanted = [(*text, *tree.path(leaf)) for leaf in leaves]
        assert [paths[row] for row in rows.leaves] == wanted
        assert known.isdisjoint(set(paths[fed:]) - set(wanted))
        assert len(cache) == len(paths)


def _tree() -> SpeculationTree:
    """Text 7 8; behind it 1 and 2, behind those 3 and 4."""
    tree = SpeculationTree(CommittedPrefix((7, 8)))
    for node_id, parent, token in ((1, ROOT, 1), (2, ROOT, 2), (3, 1, 3), (4, 2, 4)):
        assert tree.grow(node_id, parent, token, 2) is ALIVE
    return tree


def test_a_switch_of_branch_feeds_nothing_again() -> None:
    tree, cache = _tree(), TreeCache()
    assert cache.feed(tree, [3, 4]) == (0, (7, 8), TreeRows((), (1, 2, 3, 4), (1, 1, 2, 3), (4, 5)))
    tree.grow(5, 3, 5, 2)
    tree.grow(6, 4, 6, 2)
    assert cache.feed(tree, [6]) == (6, (), TreeRows((), (6,), (5,), (6,)))
    assert cache.feed(tree, [5]) == (7, (), TreeRows((), (5,), (4,), (7,)))


def test_what_is_committed_becomes_text_where_it_stands() -> None:
    tree, cache = _tree(), TreeCache()
    cache.feed(tree, [3, 4])
    tree.grow(6, 4, 6, 2)
    tree.commit((2,))
    assert cache.feed(tree, [6]) == (2, (), TreeRows((3, 5), (6,), (3,), (4,)))
    tree.commit((5, 5))  # nothing of the tree
    assert cache.feed(tree, [ROOT]) == (3, (5, 5), TreeRows((), (), (), (4,)))


def test_the_roots_row_is_fed_again_for_its_guesses() -> None:
    tree, cache = SpeculationTree(CommittedPrefix((7, 8))), TreeCache()
    assert cache.feed(tree, [ROOT]) == (0, (7, 8), TreeRows((), (), (), (1,)))
    assert cache.feed(tree, [ROOT]) == (1, (8,), TreeRows((), (), (), (1,)))
