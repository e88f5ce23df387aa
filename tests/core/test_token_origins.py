"""Origins of committed tokens. Oracle: trees made by hand."""

from __future__ import annotations

import pytest

from edgespec.core.device.token_origins import TokenOrigin, find_origins
from edgespec.core.protocol.messages import Commit
from edgespec.core.protocol.tree import ROOT, UNRANKED, CommittedPrefix, SpeculationTree

MODEL, LOOKUP = TokenOrigin.DEVICE_MODEL, TokenOrigin.DEVICE_LOOKUP
PREDICTION = TokenOrigin.PREDICTION
SERVER, TARGET, UNKNOWN = TokenOrigin.SERVER, TokenOrigin.TARGET, TokenOrigin.UNKNOWN


def drafted() -> SpeculationTree:
    """Return a tree behind four tokens: 10 by the model, behind it 11 by lookup, beside it 20; and
    40 by the prediction, behind it 41 by model and prediction."""
    tree = SpeculationTree(CommittedPrefix((1, 2, 3, 4)))
    tree.grow(1, ROOT, 10, 4, rank=0)
    tree.grow(2, 1, 11, 4, rank=UNRANKED)
    tree.grow(3, ROOT, 20, 4, rank=1)
    tree.grow(4, ROOT, 40, 4, rank=UNRANKED, prediction_cell=0)
    tree.grow(5, 4, 41, 4, rank=0, prediction_cell=0)
    return tree


CASES = {
    "run-ahead": (Commit(4, (9,), verify_us=5), (TARGET,)),
    "accepted": (Commit(4, (10, 11, 12), accepted=2, verify_us=5), (MODEL, LOOKUP, TARGET)),
    "predicted": (
        Commit(4, (40, 41, 9), accepted=2, verify_us=5),
        (PREDICTION, PREDICTION, TARGET),
    ),
    "second choice": (Commit(4, (20, 5), accepted=1, verify_us=5), (MODEL, TARGET)),
    "server behind": (
        Commit(4, (10, 30, 31, 32), accepted=1, verify_us=5),
        (MODEL, SERVER, SERVER, TARGET),
    ),
    "server alone": (Commit(4, (30, 31), verify_us=5), (SERVER, TARGET)),
    "drafted but not judged": (Commit(4, (10,), verify_us=5), (TARGET,)),
    "end inside a run": (Commit(4, (10, 11), accepted=2, verify_us=5), (MODEL, LOOKUP)),
    "replaced": (Commit(4, (10, 9), replaced=(0,), verify_us=5), (MODEL, TARGET)),
    "sent again": (Commit(4, (10, 11)), (UNKNOWN, UNKNOWN)),
    "overlap": (Commit(2, (3, 4, 9), verify_us=5), (TARGET,)),
    "known already": (Commit(2, (3, 4)), ()),
    "ahead": (Commit(6, (9,), verify_us=5), ()),
    "no token": (Commit(4, ()), ()),
}


@pytest.mark.parametrize(("commit", "origins"), CASES.values(), ids=CASES)
def test_each_token_has_its_origin(commit: Commit, origins: tuple[TokenOrigin, ...]) -> None:
    assert find_origins(drafted(), commit, has_prediction=True) == origins


def test_a_text_that_lookup_found_is_lookup() -> None:
    commit = Commit(4, (40, 41, 9), accepted=2, verify_us=5)
    found = find_origins(drafted(), commit, has_prediction=False)
    assert found == (LOOKUP, LOOKUP, TARGET)


@pytest.mark.parametrize("has_prediction", [False, True])
def test_a_token_that_the_verifier_found_in_sent_text_is_the_devices(has_prediction: bool) -> None:
    """The tree has the text at another place: the verifier went on in it by itself."""
    commit = Commit(4, (70, 71, 9), accepted=2, verify_us=5)
    text = PREDICTION if has_prediction else LOOKUP
    assert find_origins(drafted(), commit, has_prediction=has_prediction) == (text, text, TARGET)
