"""The lookup tree: places behind a text, likeliest first, with text lookup's candidates for each.

Theory of operation. A *place* is the position behind a path of nodes, and its chance is the product
of the chances along the path. The tree begins with the place behind the end of the text. The
likeliest place is visited next, and of equally likely places the one that was added first. At every
place the caller decides which candidates (``text_lookup.py``) become nodes, and adds the places
behind those nodes that are likely enough to be visited too.

Both ends grow lookup's nodes in this way. What differs stays with the callers: the least chance,
the most nodes, and the nodes of other sources that are in the tree already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Generic, TypeVar

from edgespec.core.protocol.text_lookup import LookupState, TextCandidate, TextReader

NodeT = TypeVar("NodeT")


class LookupTree(Generic[NodeT]):
    """The places behind ``tokens`` that are still to be visited.

    ``reader`` has learned all of ``tokens``, which are two or more. A place is named by the
    caller's description of the node before it; ``root`` describes the end of the text.
    """

    __slots__ = ("_added_count", "_depth", "_heap", "_reader", "_state", "_tokens")

    def __init__(self, reader: TextReader, tokens: Sequence[int], root: NodeT) -> None:
        self._reader, self._tokens = reader, tokens
        # The state of lookup at the place that is visited, and the number of nodes before it.
        self._state, self._depth = reader.state_at_end(tokens), 0
        self._added_count = 0
        # Places: negated chance, number of places added before, node, depth, state of lookup.
        self._heap: list[tuple[float, int, NodeT, int, LookupState]] = [
            (-1.0, 0, root, 0, self._state)
        ]

    def visit_places(self) -> Iterator[tuple[NodeT, float, int, list[TextCandidate]]]:
        """Yield the places, also the ones that ``add_place`` adds meanwhile.

        Each is the node before the place, the chance that all tokens on the path are right, the
        number of nodes on the path, and the candidates for the position, the surest source first.
        """
        look_up, tokens, heap = self._reader.candidates, self._tokens, self._heap
        while heap:
            negated_chance, _, node, depth, state = heappop(heap)
            candidates, self._state = look_up(tokens, state)
            self._depth = depth
            yield node, -negated_chance, depth, candidates

    def add_place(self, node: NodeT, token: int, chance: float) -> None:
        """Add the place behind ``node``, which has ``token`` and stands at the visited place.

        ``chance`` is the chance of the whole path.
        """
        self._added_count += 1
        state = self._reader.advance(self._tokens, self._state, token)
        heappush(self._heap, (-chance, self._added_count, node, self._depth + 1, state))
