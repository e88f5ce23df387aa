"""Which verifier a device uses. Oracle: the product's own ranking, and choices made by hand."""

from __future__ import annotations

import pytest

from edgespec_sim.world.site import LinkView, VerifierView, association_policy, round_s

NEAR, FAR = LinkView(0.010, snr_db=3.0), LinkView(0.050, snr_db=20.0)
SLOW = VerifierView("slow", 0.040, 0, 4, session_s=0.010)
FAST = VerifierView("fast", 0.020, 3, 4, session_s=0.010)
FULL = VerifierView("full", 0.001, 4, 4)


@pytest.mark.parametrize(
    ("name", "chosen"), [("listed", 0), ("lowest-delay", 0), ("strongest-signal", 1)]
)
def test_a_policy_chooses_by_what_it_is_called(name: str, chosen: int) -> None:
    choose = association_policy(name)
    assert choose("phone", [SLOW, FAST], [NEAR, FAR]) == chosen
    assert choose("phone", [FULL, SLOW, FAST], [NEAR, NEAR, FAR]) == chosen + 1, "full ones last"
    assert choose("phone", [FULL, FULL], [NEAR, NEAR]) == 0
    same = [VerifierView("a", 0.02, 2, 9), VerifierView("b", 0.02, 1, 9)]
    if name != "listed":
        assert choose("phone", same, [NEAR, NEAR]) == 1, "fewest sessions"


def test_a_round_is_link_pass_and_messages() -> None:
    link = LinkView(0.010, up_bits_per_s=96_000.0, down_bits_per_s=96_000.0)
    assert round_s(FAST, link) == pytest.approx(0.010 + 0.020 + 3 * 0.010 + 2 * 0.010)


def test_chance_and_hash_spread_devices_and_stay() -> None:
    verifiers = [VerifierView(f"v{index}", 0.02, 0, 99) for index in range(4)]
    for name in ("random", "rendezvous"):
        choose = association_policy(name, 3)
        chosen = [choose(f"phone-{n}", verifiers, [NEAR] * 4) for n in range(200)]
        assert min(chosen.count(index) for index in range(4)) > 25
        assert chosen == [choose(f"phone-{n}", verifiers, [NEAR] * 4) for n in range(200)]
    others = [
        association_policy("random", 4)(f"phone-{n}", verifiers, [NEAR] * 4) for n in range(9)
    ]
    assert others != [
        association_policy("random", 3)(f"phone-{n}", verifiers, [NEAR] * 4) for n in range(9)
    ]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'nearest', but must be one of listed, lowest-delay"):
        association_policy("nearest")
