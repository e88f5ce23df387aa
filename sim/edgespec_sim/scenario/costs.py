"""From a scenario's cost section to the law that the simulator asks for seconds."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from enum import Enum
from importlib.resources import files
from pathlib import Path

from edgespec.telemetry.cost_profile import CostProfile, TimeLaw, read_profile
from edgespec_sim.scenario.rooflines import roofline_law
from edgespec_sim.scenario.sections import CostSection

_SPREAD_POINTS = 21


class Operation(Enum):
    DRAFT_STEP = "draft_step"
    TARGET_PASS = "target_pass"


def law_of(section: CostSection, operation: Operation, folder: Path, share: float = 1.0) -> TimeLaw:
    """``folder`` is where relative file names start, ``share`` that of the layers a node holds.
    Raises ``ProfileError`` or ``ValueError``."""
    if section.profile:
        profile = profile_named(section.profile, folder)
        law = profile.draft_step if operation is Operation.DRAFT_STEP else profile.target_pass
        law = _scaled(law, share)
    elif section.roofline:
        law = roofline_law(section.roofline, share)
    else:
        assert section.ms is not None
        first_s, row_s = share * section.ms / 1e3, share * section.row_ms / 1e3
        table = ((1.0, first_s), (2.0, first_s + row_s)) if row_s else ((1.0, first_s),)
        law = TimeLaw(table, share * section.context_us / 1e6)
    return replace(law, spread=_log_normal(section.jitter)) if section.jitter else law


def profile_named(name: str, folder: Path) -> CostProfile:
    """A bundled profile by its name, or a file. Raises ``ProfileError``."""
    bundled = files("edgespec_sim") / "data" / "profiles" / f"{name}.json"
    return read_profile(Path(str(bundled)) if bundled.is_file() else folder / name)


def measured(section: CostSection) -> str:
    """What a report has to say of where these times come from."""
    if section.profile:
        return f"measured (profile {section.profile})"
    if section.roofline:
        return f"computed from data sheets, not measured ({section.roofline})"
    return f"assumed ({section.ms:g} ms)"


def _scaled(law: TimeLaw, share: float) -> TimeLaw:
    if share == 1.0:
        return law
    table = tuple((rows, share * seconds) for rows, seconds in law.table)
    return TimeLaw(table, share * law.context_s, law.spread, share * law.session_s)


def _log_normal(deviation: float) -> tuple[float, ...]:
    """Quantiles of a log-normal ratio of mean 1 with this relative standard deviation."""
    sigma = math.sqrt(math.log1p(deviation * deviation))
    normal = statistics.NormalDist(-sigma * sigma / 2.0, sigma)
    shares = ((index + 0.5) / _SPREAD_POINTS for index in range(_SPREAD_POINTS))
    return tuple(math.exp(normal.inv_cdf(share)) for share in shares)
