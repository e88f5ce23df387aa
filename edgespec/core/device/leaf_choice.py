"""Which leaves share a draft step with the likeliest one: those that pay for the time they add.

Theory of operation. A step reads the draft's weights once, whatever the number of rows; a row more
costs what it adds to the step, which delays everything that is drafted afterwards. So leaves are
added, likeliest first, while each brings several times what the step brings on average (the
chances of its leaves to be reached, over its time). Once would do if all that counted were nodes a
second. But a leaf that is left out may still be drafted in time in the next step, and a delay
lasts: in virtual time twice was about best where a row costs 0.05 to 0.25 of a step.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

from edgespec.core.device.draft_view import DraftView
from edgespec.core.protocol.tree import Node

_TIMES_THE_AVERAGE = 2.0


def likely_leaves(
    view: DraftView, chance_of: Callable[[Node], float], least: float, priced: float
) -> Iterator[tuple[float, int]]:
    """(chance, node) of leaves, likeliest first, down to a chance of ``least``.

    The chance is the product of ``chance_of`` the nodes on the path; ``priced`` is the least
    product over what is not settled when the nodes behind the leaf come into a pass.
    """
    settled = view.settled_position if priced else 0
    last_position = view.end - 2
    pending = [(-1.0, 0, 1.0, view.tree.roots)]
    while pending:
        chance, node_id, in_pass, siblings = heapq.heappop(pending)
        if node_id and not siblings:
            yield -chance, node_id
            continue
        for node in siblings:
            rate = chance_of(node)
            behind = chance * rate
            pays = in_pass if node.position < settled else in_pass * rate
            if -behind < least or pays < priced:
                continue
            if node.children or node.position <= last_position:
                heapq.heappush(pending, (behind, node.id, pays, node.children))


def chance_by_rank(rates: Sequence[float]) -> Callable[[Node], float]:
    """What counts is how often choices of a node's rank are right, whatever the draft thought."""
    last_rank = len(rates) - 1
    return lambda node: rates[min(node.rank, last_rank)]


def further_leaves(
    view: DraftView, first: int, likely: Iterator[tuple[float, int]], most: int
) -> tuple[int, ...]:
    """Of ``likely``, those that join ``first`` in its step; at most ``most``.

    Formula: with a chance of ``first`` of c1, a step of s and d a row, the next leaf joins while
    its chance c >= 2 * d * (c1 + c2 + ..) / (s + d * (number joined)). In a step of 8 ms for a leaf
    with 0.4, a row of 1 ms pays from 0.1 on; with another leaf of 0.2 in it from 0.13 on. Now and
    then all join, to learn what a row takes.
    """
    row_s, time_s = view.leaf_row_s, view.one_leaf_s
    if view.estimates.rows.looking:
        row_s = 0.0
    joined: list[int] = []
    total = 0.0
    for chance, node_id in likely:
        if node_id == first:
            total += chance
            continue
        if len(joined) == most or chance * time_s < _TIMES_THE_AVERAGE * row_s * total:
            break
        joined.append(node_id)
        total += chance
        time_s += row_s
    return tuple(joined)
