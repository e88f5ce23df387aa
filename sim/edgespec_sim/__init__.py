"""Replay of the product's own sessions in virtual time.

This is the second interpreter of ``edgespec.core``: the same ``DraftSession`` and ``VerifyEngine``
that run over gRPC run here on an event queue, so the simulator exercises the product itself.

The public names are loaded on first use, so that a part of the package can be imported alone::

    import edgespec_sim as sim

    result = sim.run("household", seeds=8)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec_sim.bundle import BundleError as BundleError
    from edgespec_sim.bundle import read_bundle as read_bundle
    from edgespec_sim.bundle import rerun as rerun
    from edgespec_sim.bundle import write_bundle as write_bundle
    from edgespec_sim.library import PlayedRequest as PlayedRequest
    from edgespec_sim.library import RunResult as RunResult
    from edgespec_sim.library import SweepPoint as SweepPoint
    from edgespec_sim.library import SweepResult as SweepResult
    from edgespec_sim.library import run as run
    from edgespec_sim.library import sweep as sweep
    from edgespec_sim.library import write_run as write_run
    from edgespec_sim.planning import plan_capacity as plan_capacity
    from edgespec_sim.planning import plan_link as plan_link
    from edgespec_sim.playing import PlayProgress as PlayProgress
    from edgespec_sim.scenario.sections import Scenario as Scenario
    from edgespec_sim.scenario.sections import load_scenario as load_scenario
    from edgespec_sim.world.parts import NextRequest as NextRequest
    from edgespec_sim.world.parts import Parts as Parts

_MODULES = {
    "PlayProgress": "playing",
    "PlayedRequest": "library",
    "RunResult": "library",
    "SweepPoint": "library",
    "SweepResult": "library",
    "run": "library",
    "sweep": "library",
    "write_run": "library",
    "plan_capacity": "planning",
    "plan_link": "planning",
    "BundleError": "bundle",
    "read_bundle": "bundle",
    "rerun": "bundle",
    "write_bundle": "bundle",
    "Scenario": "scenario.sections",
    "load_scenario": "scenario.sections",
    "NextRequest": "world.parts",
    "Parts": "world.parts",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'edgespec_sim' has no attribute {name!r}")
    return getattr(importlib.import_module(f"edgespec_sim.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_MODULES)
