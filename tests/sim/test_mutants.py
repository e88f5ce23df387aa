"""The worlds' checks find what they are there to find.

Oracle: every mutant (a plausible mistake in the stale, rollback, resume, overlap or ending logic)
makes one of its first worlds fail; the product itself passes all of those (``test_worlds``).
"""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.random_worlds import play
from tests.sim.test_worlds import WORLDS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    for seed in range(mutant.seeds):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.name}: survived {mutant.seeds} worlds")


def test_the_product_is_judged_by_the_same_worlds() -> None:
    assert max(mutant.seeds for mutant in MUTANTS) <= WORLDS
