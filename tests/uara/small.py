"""Small worlds that the tests of this folder share."""

from __future__ import annotations

from edgespec_uara.cost import CorrectedCost, CostModel, PaperCost, Terms
from edgespec_uara.world import Snapshot, UaraSettings, UaraWorld

COSTS: tuple[CostModel, ...] = (PaperCost(), CorrectedCost())


def snapshot(seed: int = 0, devices: int = 24, servers: int = 4) -> Snapshot:
    return UaraWorld(UaraSettings(devices=devices, servers=servers), seed).snapshot


def terms(seed: int = 0, cost: CostModel = COSTS[0]) -> Terms:
    return cost.terms(snapshot(seed))
