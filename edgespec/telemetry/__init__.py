"""What a run leaves behind: traces, summaries, metrics, logs and spans."""

from edgespec.telemetry.metric_table import METRIC_NAMES

__all__ = ["METRIC_NAMES"]
