"""The trace that a link of a scenario names: from a file, or generated."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path as FilePath

from edgespec_sim.scenario.network_sections import LinkSection
from edgespec_sim.traces.generators import generate
from edgespec_sim.traces.network_trace import NetworkTrace
from edgespec_sim.traces.readers import read_trace

_GENERATE = "generate:"


def trace_of(
    section: LinkSection, seed: str, duration_s: float, folder: FilePath
) -> NetworkTrace | None:
    """None without one. Raises ``TraceError`` or ``ValueError``."""
    if not section.trace:
        return None
    if section.trace.startswith(_GENERATE):
        kind = section.trace.removeprefix(_GENERATE)
        trace = generate(kind, number_of(seed), max(60.0, min(2 * duration_s, 3600.0)))
    else:
        beside = folder / section.trace
        trace = read_trace(beside if beside.is_file() else FilePath(section.trace))
    if section.rtt_ms:
        trace = replace(trace, rtt_s=tuple(s + section.rtt_ms / 1e3 for s in trace.rtt_s))
    return trace


def number_of(seed: str) -> int:
    """A seed for what wants a number."""
    return random.Random(seed).getrandbits(31)
