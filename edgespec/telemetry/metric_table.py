"""Every metric of a verifier: its name, its kind, what it says and the labels it has.

The names after the prefix are vLLM's where vLLM has the same thing, so that dashboards and habits
carry over. Each metric has the label ``model_name``; all other labels have values from closed sets,
so nothing that a device sends can make a new time series.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Final

PREFIX: Final = "edgespec_"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """``name`` as it is exposed, less a histogram's ``_bucket``, ``_sum`` and ``_count``."""

    name: str
    kind: Kind
    help: str
    label: str = ""
    """Its one label beside ``model_name``, if it has one."""


def _metric(kind: Kind, name: str, text: str, label: str = "") -> Metric:
    return Metric(PREFIX + name, kind, text, label)


_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM
METRICS: Final = (
    # What users feel.
    _metric(_H, "time_to_first_token_seconds", "From Open to the first tokens of a new stream"),
    _metric(_H, "inter_token_latency_seconds", "Time a token took after the one before"),
    _metric(_H, "rtt_seconds", "From handing over a commit to its acknowledgement"),
    # Who is there.
    _metric(_G, "num_requests_running", "Sessions with a device, in the cache"),
    _metric(_G, "num_requests_waiting", "Sessions with a device that wait to enter the cache"),
    _metric(_G, "num_requests_detached", "Sessions without a device, kept for the lease"),
    _metric(_C, "requests_finished_total", "Streams that ended after they were opened", "reason"),
    _metric(_C, "requests_rejected_total", "Streams refused before they were opened", "reason"),
    # Tokens.
    _metric(_C, "prompt_tokens_total", "Prompt tokens of the sessions opened"),
    _metric(_C, "generation_tokens_total", "Tokens committed by passes and sent"),
    _metric(_C, "run_ahead_tokens_total", "Of these, by passes that had no draft"),
    _metric(_C, "server_drafted_tokens_total", "Of these, guessed by the verifier's own drafter"),
    # Drafts.
    _metric(_C, "spec_decode_num_drafts_total", "Sessions' parts of passes that had draft nodes"),
    _metric(_C, "spec_decode_num_draft_tokens_total", "Draft nodes that passes looked at"),
    _metric(_C, "spec_decode_num_accepted_tokens_total", "Draft nodes that became tokens"),
    _metric(
        _C,
        "spec_decode_num_accepted_tokens_per_pos_total",
        "Draft nodes that became tokens, by their place in the draft",
        "position",
    ),
    _metric(_C, "stale_nodes_total", "Draft nodes dropped when they came: too late or impossible"),
    _metric(_C, "wasted_nodes_total", "Draft nodes that a pass looked at in vain"),
    # Passes.
    _metric(_H, "pass_seconds", "Length of a pass"),
    _metric(_H, "pass_rows", "Rows of a pass: fed tokens and draft nodes"),
    _metric(_H, "pass_tokens", "Tokens that a pass committed, of all its sessions"),
    _metric(_C, "failed_passes_total", "Passes that failed and were tried again"),
    # The cache.
    _metric(_G, "kv_cache_usage_perc", "Share of the key-value blocks that is held, 0 to 1"),
    _metric(_C, "evictions_total", "How often a session gave up its blocks"),
    _metric(_C, "preemptions_total", "Of these, how often one that had work"),
    _metric(_C, "prefix_cache_queries_total", "Tokens that were looked up in the prefix cache"),
    _metric(_C, "prefix_cache_hits_total", "Of these, tokens found there"),
    # The wire and the process.
    _metric(_C, "received_bytes_total", "Payload bytes of messages from devices", "kind"),
    _metric(_C, "received_messages_total", "Messages from devices", "kind"),
    _metric(_C, "sent_bytes_total", "Payload bytes of messages to devices", "kind"),
    _metric(_C, "sent_messages_total", "Messages to devices", "kind"),
    _metric(_C, "read_wait_seconds_total", "Streams were left unread, in seconds", "reason"),
    _metric(_C, "late_streams_total", "Streams left out of a pass: what came before had not left"),
    _metric(_H, "event_loop_lag_seconds", "How late the event loop was, asked ten times a second"),
    _metric(_G, "build_info", "1; the label says which version runs", "version"),
)
METRIC_NAMES: Final = tuple(metric.name for metric in METRICS)
"""As a query names them, less a histogram's ``_bucket``, ``_sum`` and ``_count``."""


class Histogram:
    """``bounds`` ascend; a value counts for the first bound that it does not exceed, and for none
    of them when it exceeds all. One thread adds, any may read: what is read is at most one addition
    apart from itself."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        """Sum of the values."""

    def add(self, value: float, times: int = 1) -> None:
        """Count ``value`` so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def cumulative(self) -> list[int]:
        """For each bound how many values were at most that, and at the end how many in all."""
        return list(accumulate(tuple(self.counts)))


LATENCY_S = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15),
    *(0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0),
)
"""From a token every millisecond to a first token after a minute; finest where streams live."""
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
