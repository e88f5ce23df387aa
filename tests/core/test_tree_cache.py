"""Which rows a drafter of trees is left with, and fed. Oracle: a table of rows that does what it is
told, and whose every row then has to spell the committed text or a path of the tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.device.events import Connected, Start, StartStep, StepDone
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.device.tree_cache import MAX_TREE_NODES, TreeCache
from edgespec.core.protocol.messages import Limits, Open, Opened
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import ALIVE, ROOT, CommittedPrefix, SpeculationTree
from edgespec.core.protocol.work import Candidate, TreeRows
from edgespec.device.drafters.tree_rows import RowTable

_round = st.tuples(
    st.lists(st.integers(0, 2), max_size=3),  # committed
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=4),  # grown: behind, token
    st.lists(st.integers(0, 9), min_size=1, max_size=3),  # leaves
    st.sampled_from(["done", "done", "withdrawn", "forgotten"]),  # what became of the step
)


def _leaves_of(tree: SpeculationTree) -> list[int]:
    return [node.id for node in tree.nodes.values() if not node.children] or [ROOT]


@given(st.lists(_round, max_size=15))
def test_rows_are_the_text_and_paths_and_nothing_is_fed_twice(
    rounds: list[tuple[list[int], list[tuple[int, int]], list[int], str]],
) -> None:
    tree = SpeculationTree(CommittedPrefix((9, 9)))
    cache, table = TreeCache(), RowTable()
    for committed, grown, chosen, fate in rounds:
        tree.commit(committed)
        for behind, token in grown:
            parents = [ROOT, *tree.nodes]
            parent = parents[behind % len(parents)]
            tree.grow(tree.last_id + 1, parent, token, tree.prefix.length)
        ends = _leaves_of(tree)
        leaves = list(dict.fromkeys(ends[one % len(ends)] for one in chosen))
        known = {tuple(table.path(row)) for row in range(len(table.tokens))}
        keep, feed, rows = cache.feed(tree, leaves)
        if fate != "done":  # it never reached the drafter; "forgotten": which serves another text
            cache.take_back(forgotten=fate == "forgotten")
            if fate == "forgotten":
                table.clear()
            assert len(cache) == len(table.tokens)
            continue
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


def test_a_session_of_several_leaves_keeps_no_more_nodes_than_there_are_rows() -> None:
    """A verifier that takes any number of nodes, and a drafter that never runs out of guesses."""
    for leaves, most in ((1, 2000), (4, MAX_TREE_NODES)):
        request = Open("one", "", "", (1,), sampling=SamplingParams(max_tokens=4000))
        session = DraftSession(
            request,
            WindowedPolicy(2, window=256, least_chance=0.0, step_price=0.0),
            ReconnectPolicy(),
            1 << 20,
            leaves=leaves,
        )
        actions = (*session.handle(Start(), 0.0), *session.handle(Connected(), 0.0))
        limits = Limits(max_nodes_outstanding=2000)
        actions += session.handle(Opened(limits, "m", 1), 0.0)
        for _ in range(1200):
            steps = [one for one in actions if isinstance(one, StartStep)]
            if not steps:
                break
            rows = steps[0].rows
            guesses = (Candidate(5, -1.0), Candidate(6, -2.0))
            count = 1 if rows is None else len(rows.leaves)
            actions = session.handle(StepDone(guesses, (guesses,) * (count - 1)), 0.0)
        assert most - 10 <= len(session.tree.nodes) <= most or leaves == 1
        assert len(session.tree.nodes) <= most
