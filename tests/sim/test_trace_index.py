"""Every trace of the shared data, as its index has it: the readers against real recordings."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from edgespec_sim.traces.formats import FORMATS, read_bytes, read_trace
from edgespec_sim.traces.rtt_matrix import slices


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
    assert sources == {*FORMATS} - {"plain", "mahimahi", "rtt-matrix"}


@pytest.mark.parametrize("name", ["seattle_001-100", "planetlab_01", "planetlab_09"])
def test_matrices_are_read_with_their_statistics(data_dir: Path, name: str) -> None:
    path = data_dir / f"traces/matrices_netlatency/{name}.tar.xz"
    assert read_trace(path).rtt_s
    with (data_dir / "traces/index.csv").open(encoding="utf-8") as file:
        (row,) = (row for row in csv.DictReader(file) if name in row["file"])
    # The index looked at every 20th slice (PlanetLab's archives have one).
    every = [one for _, one in slices(path, read_bytes(path))][::20]
    values = np.concatenate([one[one > 0] for one in every]) * 1000
    found = np.percentile(values, (50, 95, 99), method="higher")
    named = [float(row[f"rtt_{stat}_ms"]) for stat in ("median", "p95", "p99")]
    assert found == pytest.approx(named, rel=1e-3)
