"""The worlds' checks find what they are there to find.

Oracle: every mutant (a plausible mistake in the stale, rollback, resume, overlap or ending logic)
makes one of its first worlds fail; the product itself passes all of those (``test_worlds``). What
changes no text but costs time fails a scene of its own instead, which the product passes.
"""

from __future__ import annotations

import pytest

from tests.sim.mutant import Mutant
from tests.sim.mutants import CORE_MUTANTS
from tests.sim.random_worlds import play
from tests.sim.sharing_mutants import SHARING_MUTANTS
from tests.sim.test_worlds import WORLDS

MUTANTS = (*CORE_MUTANTS, *SHARING_MUTANTS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant.scene is not None:
        mutant.scene()
    mutant.apply(monkeypatch)
    if mutant.scene is not None:
        with pytest.raises(AssertionError):
            mutant.scene()
        return
    for seed in range(mutant.seeds):
        try:
            play(seed)
        except Exception:
            return
    pytest.fail(f"{mutant.name}: survived {mutant.seeds} worlds")


def test_the_product_is_judged_by_the_same_worlds() -> None:
    assert max(mutant.seeds for mutant in MUTANTS) <= WORLDS
