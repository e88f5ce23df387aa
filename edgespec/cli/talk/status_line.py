"""One line that says how an agent is doing, as much of it as a terminal is wide."""

from __future__ import annotations

from edgespec.core.device.memory_size import in_mib
from edgespec.telemetry.agent_status import AgentStatus, VerifierState, VerifierStatus

_BETWEEN = " · "


def status_line(status: AgentStatus, width: int, last_per_s: float | None = None) -> str:
    """At most ``width`` columns; what matters least is left out first, and no number is cut.
    ``last_per_s`` is shown while nothing runs."""
    per_s = status.tokens_per_s if status.running else last_per_s
    parts = [part for part in _parts(status, per_s) if part]
    line = ""
    for part in parts:
        longer = f"{line}{_BETWEEN}{part}" if line else part
        if len(longer) <= width:
            line = longer
    return line


def _parts(status: AgentStatus, per_s: float | None) -> list[str]:
    """By how much they matter."""
    verifier = status.verifier
    away = verifier is not None and verifier.state is VerifierState.AWAY
    acceptance = status.drafting.acceptance
    return [
        _away(verifier) if away and verifier is not None else "",
        f"{per_s:.1f} tok/s" if per_s is not None else "",
        f"accepted {acceptance:.0%}" if acceptance is not None else "",
        _round_trip(verifier),
        _memory(status),
        _battery(status),
        verifier.address if verifier is not None and not away else "",
        "drafting rests" if status.drafting.worth is False and status.draft else "",
    ]


def _away(verifier: VerifierStatus) -> str:
    for_s = "" if verifier.since_s is None else f" for {verifier.since_s:.0f} s"
    return f"{verifier.address} away{for_s}"


def _round_trip(verifier: VerifierStatus | None) -> str:
    if verifier is None or verifier.rtt_s is None:
        return ""
    return f"RTT {verifier.rtt_s * 1e3:.0f} ms"


def _memory(status: AgentStatus) -> str:
    memory = status.memory
    if memory.budget_bytes is None:
        return ""
    return f"memory {memory.resident_bytes >> 20}/{in_mib(memory.budget_bytes)}"


def _battery(status: AgentStatus) -> str:
    battery = status.battery
    if battery is None or battery.plugged:
        return ""
    return f"battery {battery.percent:.0f} %"
