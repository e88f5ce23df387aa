"""What a ``value`` promises. mypy is half of the oracle: it complains of an ignore that is not
needed, so the second test fails in ``make types`` when values are no longer frozen for it."""

from __future__ import annotations

from edgespec.core.protocol.messages import Received
from edgespec.core.protocol.work import Candidate


def test_values_are_equal_by_their_fields_and_have_nothing_else() -> None:
    assert Received(3, 4) == Received(3, 4) != Received(4, 3)
    assert len({Received(3, 4), Received(3, 4), Candidate(3, 4.0)}) == 2
    assert not hasattr(Received(3, 4), "__dict__")


def test_the_type_checker_refuses_a_change() -> None:
    received = Received(3, 4)
    received.position = 5  # type: ignore[misc] # frozen for the type checker alone
    assert received == Received(5, 4)
