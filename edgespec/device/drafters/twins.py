"""A drafter that wraps another one has twins where that has them."""

from __future__ import annotations

from edgespec.core.ports import Drafter, Twinned


def twin_of(drafter: Drafter) -> Drafter:
    """Another sequence on the weights of ``drafter`` (``ports.Twinned``). Raises ``TypeError``
    naming its class where it can have one only, and what the drafter raises without room."""
    if not isinstance(drafter, Twinned):
        raise TypeError(f"{type(drafter).__name__} holds one sequence only")
    return drafter.twin()
