"""A run's arms and requests as CSV (RFC 4180), one line each, in base units.

Column names are those of ``telemetry/run_summary.py``; what was not measured is empty.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from edgespec.telemetry.run_summary import (
    QUANTILES,
    ArmSummary,
    GroupSummary,
    RequestRow,
    RunSummary,
    Spread,
)

Cell = str | int | float | bool | None


def arms_csv(run: RunSummary) -> str:
    """Arms, and below each its groups; ``group`` is empty for the whole arm."""
    rows = []
    for arm in run.arms:
        rows.append({**_arm_cells(arm), "group": "", **_group_cells(arm.all)})
        for name, group in arm.groups.items():
            rows.append({"arm": arm.arm, "group": name, **_group_cells(group)})
    return csv_text(rows)


def requests_csv(run: RunSummary) -> str:
    """The requests that were kept, of all arms."""
    rows = [{"arm": arm.arm, **asdict(row)} for arm in run.arms for row in arm.rows]
    return csv_text(rows, ("arm", *(field.name for field in fields(RequestRow))))


def csv_text(rows: Sequence[Mapping[str, Cell]], header: Sequence[str] = ()) -> str:
    """A header of all keys in order of appearance, after those of ``header``."""
    names = list(dict.fromkeys([*header, *(key for row in rows for key in row)]))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _arm_cells(arm: ArmSummary) -> dict[str, Cell]:
    busy = [one.utilisation for one in arm.verifiers]
    return {
        "arm": arm.arm,
        "label": arm.label,
        "speedup": arm.speedup,
        "speedup_low": None if arm.speedup_interval is None else arm.speedup_interval[0],
        "speedup_high": None if arm.speedup_interval is None else arm.speedup_interval[1],
        "mean_utilisation": sum(busy) / len(busy) if busy else None,
        **{f"bound_{name}_s": bound for name, bound in arm.bounds.items()},
    }


def _group_cells(group: GroupSummary) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for field in fields(group):
        value = getattr(group, field.name)
        if field.name in ("ttft_s", "tpot_s", "itl_s"):
            cells |= _spread_cells(field.name, value)
        else:
            cells[field.name] = value
    return cells


def _spread_cells(name: str, spread: Spread | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {f"{name}_mean": None if spread is None else spread.mean}
    for index, share in enumerate(QUANTILES):
        value = None if spread is None else spread.quantiles[index]
        cells[f"{name}_p{round(100 * share)}"] = value
    return cells
