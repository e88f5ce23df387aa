"""The learned association: its arithmetic by hand, its loader, its limits, its speed of mind."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from edgespec_sim.association import AssociationPolicy, DeviceView, LinkView, VerifierView
from edgespec_uara.network import FEATURES, Layer, LearnedAssociation, pair_features

DEVICE = DeviceView("phone", step_s=0.01)


def _verifier(name: str, sessions: int = 0, places: int = 8) -> VerifierView:
    return VerifierView(name, pass_s=0.02, sessions=sessions, max_sessions=places, session_s=0.01)


def _picks(name: str, sign: float) -> LearnedAssociation:
    """A network of one layer that looks at one feature."""
    row = tuple(sign if feature == name else 0.0 for feature in FEATURES)
    return LearnedAssociation([Layer((row,), (0.0,))])


def test_it_is_an_association_policy() -> None:
    policy: AssociationPolicy = _picks("rtt", -1.0)
    assert policy.name == "learned"


def test_the_score_is_a_dense_network_with_relu_between() -> None:
    first = Layer(((1.0,) * len(FEATURES), (-1.0,) * len(FEATURES)), (0.5, 0.25))
    network = LearnedAssociation([first, Layer(((2.0, 3.0),), (-1.0,))])
    features = [0.1] * len(FEATURES)
    total = 0.1 * len(FEATURES)
    # The second unit is below zero, so it is silent.
    assert network.score(features) == pytest.approx(2.0 * (total + 0.5) - 1.0)


def test_the_best_score_wins() -> None:
    links = [[LinkView(0.05), LinkView(0.01), LinkView(0.03)]]
    verifiers = [_verifier(name) for name in "abc"]
    assert _picks("rtt", -1.0).assign([DEVICE], verifiers, links) == (1,)
    assert _picks("rtt", 1.0).assign([DEVICE], verifiers, links) == (0,)


def test_many_devices_see_each_other() -> None:
    """Each assignment is load for the next device."""
    verifiers = [_verifier("a", sessions=2), _verifier("b")]
    links = [[LinkView(0.01)] * 2] * 4
    assert _picks("load", -1.0).assign([DEVICE] * 4, verifiers, links) == (1, 1, 0, 1)


def test_a_full_verifier_is_named_only_when_all_are_full() -> None:
    verifiers = [_verifier("near", places=1), _verifier("far", places=1)]
    links = [[LinkView(0.001), LinkView(0.2)]] * 3
    assert _picks("rtt", -1.0).assign([DEVICE] * 3, verifiers, links) == (0, 1, 0)


def test_links_without_limits_have_finite_features() -> None:
    found = pair_features(DEVICE, _verifier("a", places=0), LinkView(0.0), 0)
    assert len(found) == len(FEATURES)
    assert all(map(math.isfinite, found))


def test_it_equals_itself_after_reload() -> None:
    first = Layer(tuple((0.1 * n,) * len(FEATURES) for n in range(3)), (0.1, 0.2, 0.3))
    network = LearnedAssociation([first, Layer(((1.0, -2.0, 0.5),), (0.7,))])
    again = LearnedAssociation.from_json(network.to_json())
    features = pair_features(DEVICE, _verifier("a"), LinkView(0.03, 1e6, 1e7, 12.0), 3)
    assert again.score(features) == network.score(features)
    assert again.to_json() == network.to_json()


def _change(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.__setitem__(key, value)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_change("version", 2), "version 2; this reads 1"),
        (_change("features", ["rtt"]), r"features \['rtt'\]"),
        (_change("layers", []), "0 layers, 1 to 8"),
        (_change("layers", [{"weights": [[1.0]]}]), "not as it should be"),
        (_change("layers", [{"weights": [[1.0]], "bias": [0.0]}]), "takes 1 inputs, not 11"),
        (_change("layers", [{"weights": [], "bias": [0.0]}]), "0 rows and 1 biases"),
        (
            _change("layers", [{"weights": [[math.nan] * 11], "bias": [0.0]}]),
            "a number that is not one",
        ),
        (
            _change("layers", [{"weights": [[0.0] * 11] * 2, "bias": [0.0, 0.0]}]),
            "2 scores a pair, wanted 1",
        ),
    ],
)
def test_weights_that_cannot_be_are_refused(
    spoil: Callable[[dict[str, Any]], object], said: str
) -> None:
    data = json.loads(_picks("rtt", 1.0).to_json())
    spoil(data)
    with pytest.raises(ValueError, match=said):
        LearnedAssociation.from_json(json.dumps(data))


def test_weights_of_any_size_are_not_read() -> None:
    with pytest.raises(ValueError, match="at most 1048576"):
        LearnedAssociation.from_json(" " * (1 << 20) + "{}")
