"""Trees are cut to chains for a target that takes no other.

Oracle: the chain is walked again in the tree, where each of its nodes must be the first child.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgespec.core.protocol.messages import Draft, Limits, Open
from edgespec.core.protocol.work import ModelInfo, PassRequest
from edgespec.core.verifier import session_events as ev
from edgespec.core.verifier.drafts import AlwaysRunAhead, ExactRule
from edgespec.core.verifier.session import VerifySession, likeliest_chain

A, B, C, D = range(1, 5)


def test_the_worked_example() -> None:
    assert likeliest_chain((A, B, C, D), (-1, 0, 0, -1)) == ((A, B), (-1, 0))
    assert likeliest_chain((), ()) == ((), ())


@given(st.lists(st.integers(min_value=0, max_value=1 << 30), max_size=24))
def test_each_node_of_the_chain_is_a_first_child(draws: list[int]) -> None:
    parents = [draw % (node + 1) - 1 for node, draw in enumerate(draws)]
    tokens = [100 + node for node in range(len(parents))]
    chain, hangs_on = likeliest_chain(tokens, parents)
    assert hangs_on == tuple(range(-1, len(chain) - 1))
    at = -1
    for token in chain:
        children = [node for node, parent in enumerate(parents) if parent == at]
        assert tokens[children[0]] == token
        at = children[0]
    assert at not in parents


def test_a_session_asks_such_a_target_for_a_chain() -> None:
    model = ModelInfo("m", "v", 100, 64)
    request = Open("s", "", "", prompt=(A,))
    tree = Draft(1, (0, 0, 1, 1, 2), (A, B, C, D, C), base_position=1, base_hash=0)
    asked: dict[bool, PassRequest] = {}
    for trees in (True, False):
        session = VerifySession(
            request, model, Limits(64), ExactRule(), AlwaysRunAhead(), 0.0, trees=trees
        )
        session.handle(ev.Attach(request), 0.0)
        base_hash = session.prefix.hash_at(1)
        session.handle(Draft(1, tree.parents, tree.tokens, 1, base_hash), 0.0)
        (action,) = session.handle(ev.Offer(64, 0.01), 0.0)
        assert isinstance(action, ev.RunPass)
        asked[trees] = action.request
    assert asked[True].tokens == (A, B, C, D, C)
    assert (asked[False].tokens, asked[False].parents) == ((A, C), (-1, 0))
