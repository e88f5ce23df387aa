"""Every trace of the shared data, as its index has it: the readers against real recordings."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from edgespec_sim.links.formats import FORMATS, read_trace


def test_every_indexed_file_is_read_with_its_statistics(data_dir: Path) -> None:
    """Percentiles within 0.2 % (the index takes the sample above, as here), durations within 5 %
    (it counts steps), lost probes within 0.3 points (it counts each; here an outage is time)."""
    sources = set()
    with (data_dir / "traces/index.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if "matrix" not in row["kind"]]
    for row in rows:
        trace = read_trace(data_dir / "traces" / row["file"])
        sources.add(trace.source)
        found = np.percentile(np.array(trace.rtt_s) * 1000, (50, 95, 99), method="higher")
        named = [float(row[f"rtt_{name}_ms"]) for name in ("median", "p95", "p99")]
        where = (row["file"], found, named)
        assert found == pytest.approx(named, rel=2e-3), where
        assert trace.duration_s == pytest.approx(float(row["duration_s"]), rel=0.05)
        if row["loss_pct"]:
            out = sum(end_s - start_s for start_s, end_s in trace.outages_s) / trace.duration_s
            assert trace.loss is not None
            lost = out + (1 - out) * float(np.mean(trace.loss))
            assert lost * 100 == pytest.approx(float(row["loss_pct"]), abs=0.3), where
    assert sources == {*FORMATS} - {"plain", "mahimahi"}
