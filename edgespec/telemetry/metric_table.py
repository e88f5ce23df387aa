"""Metrics as rows of tables: a name, a help text, and the attribute from which the value is read at
each fetch by Prometheus.

Names behind the prefix are vLLM's where vLLM has the same metric, so that dashboards carry over.
Labels have values from closed sets, so input of devices or clients never creates a new series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric as Family


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    ``kind`` is ``counter``, ``gauge`` or ``histogram``. ``name`` lacks the table's prefix and a
    histogram's ``_bucket``, ``_sum`` and ``_count``. ``path`` names the attributes that lead from
    the table's source to the value; a metric with the value None is left out. With ``label`` the
    value is a mapping by label value; with two labels (``a,b``) by pairs."""

    kind: str
    name: str
    label: str
    path: str
    help: str


def parse_metrics(lines: str) -> tuple[Metric, ...]:
    """Return the metrics of a table with ``kind name{label} path help`` in each line."""
    rows = [line.split(None, 3) for line in lines.strip().splitlines()]
    return tuple(
        Metric(kind, *name.rstrip("}").partition("{")[::2], path, text)
        for kind, name, path, text in rows
    )


class Histogram:
    """Histogram with ascending ``bounds``. A value counts for the first bound that it does not
    exceed, or for none if it exceeds all.

    One thread adds, and any thread may read; a reader may see the sum and the counts one addition
    apart."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def cumulative(self) -> list[int]:
        """Number of values up to each bound, and last the number of all values."""
        return list(accumulate(tuple(self.counts)))


LATENCY_S: Final = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)
"""Bounds from a token every millisecond to a first token after a minute, finest where most streams
are."""


class Table:
    """A Prometheus collector of ``metrics``. Their values are read at each fetch from the object
    that ``source`` returns. Each value carries ``labels``."""

    def __init__(
        self, prefix: str, metrics: Sequence[Metric], source: Callable[[], Any], **labels: str
    ) -> None:
        self._prefix, self._metrics, self._source = prefix, metrics, source
        self._labels = labels

    def collect(self) -> Iterator[Family]:
        sample = self._source()
        for metric in self._metrics:
            if (value := attrgetter(metric.path)(sample)) is not None:
                yield self._make_family(metric, value)

    def _make_family(self, metric: Metric, value: Any) -> Family:
        from prometheus_client import core

        name, fixed_values = self._prefix + metric.name, list(self._labels.values())
        labels = [*self._labels, *(metric.label.split(",") if metric.label else ())]
        if isinstance(value, Histogram):
            histogram = core.HistogramMetricFamily(name, metric.help, labels=labels)
            bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
            histogram.add_metric(
                fixed_values, list(zip(bounds, value.cumulative, strict=True)), value.total
            )
            return histogram
        counter = metric.kind == "counter"
        kind = core.CounterMetricFamily if counter else core.GaugeMetricFamily
        family = kind(name, metric.help, labels=labels)
        by_label: Mapping[Any, Any] = value if isinstance(value, Mapping) else {(): value}
        for label_values, number in by_label.items():
            family.add_metric(
                [
                    *fixed_values,
                    *((label_values,) if isinstance(label_values, str) else label_values),
                ],
                float(number),
            )
        return family


def make_registry(*tables: Table) -> CollectorRegistry:
    """Return a new registry with these tables and the process's metrics (``process_...``)."""
    from prometheus_client import CollectorRegistry, ProcessCollector

    registry = CollectorRegistry()
    for one in tables:
        registry.register(one)  # duck-typed as a collector
    ProcessCollector(registry=registry)
    return registry
