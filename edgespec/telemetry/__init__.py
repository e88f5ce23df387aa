"""What a run leaves behind: traces, tapes, metrics and logs."""

from edgespec.telemetry.metric_table import METRIC_NAMES

__all__ = ["METRIC_NAMES"]
