"""What verifiers draw, and which requests bear it.

Theory of operation. A pass draws ``busy_w`` for as long as it runs, and its requests bear that by
their rows in it. A machine that is powered and runs no pass draws ``idle_w``; over the part of the
run in which requests count, the requests that a verifier served bear this by what its passes took
for them. A verifier that served nobody is powered all the same: nobody bears that, and its own
summary tells it. Machines are on from the start to the end, restarts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgespec.telemetry.run_summary import VerifierSummary
from edgespec_sim.scenario.sections import VerifierSection
from edgespec_sim.world.hardware import Hardware
from edgespec_sim.world.meters import RequestRecord


@dataclass(frozen=True, slots=True)
class Powered:
    """One verifier with its machines. ``summary`` is of the window in which requests count."""

    section: VerifierSection
    hardware: Hardware
    busy_s: float
    """Of all machines, within the window."""
    window_s: float

    @property
    def idle_s(self) -> float:
        """Of all machines: powered, and no pass runs."""
        return max(0.0, self.hardware.machines * self.window_s - self.busy_s)

    @property
    def busy_j(self) -> float | None:
        watts = self.section.power_busy_w
        return watts * self.busy_s if watts else None

    @property
    def idle_j(self) -> float | None:
        watts = self.section.power_idle_w
        return None if watts is None else watts * self.idle_s

    def told(self, summary: VerifierSummary) -> VerifierSummary:
        """With what it drew."""
        idle_s = self.idle_s if self.idle_j is not None else None
        return replace(summary, energy_j=self.busy_j, idle_j=self.idle_j, idle_s=idle_s)


def charge(records: Sequence[RequestRecord], verifiers: Sequence[Powered]) -> None:
    """Write into each record what it bears, of passes and of idle time, where that is known of all
    verifiers."""
    if any(one.busy_j is None for one in verifiers):
        return
    idle_known = all(one.idle_j is not None for one in verifiers)
    for record in records:
        record.verifier_j = 0.0
        record.verifier_idle_j = 0.0 if idle_known else None
    for one in verifiers:
        _charge(records, one)


def _charge(records: Sequence[RequestRecord], verifier: Powered) -> None:
    taken_s = verifier.hardware.pass_s_of
    shares = [taken_s.get(record.session, 0.0) for record in records]
    total_s = sum(shares)
    if not total_s:
        return
    for record, share_s in zip(records, shares, strict=True):
        assert record.verifier_j is not None
        record.verifier_j += verifier.section.power_busy_w * share_s
        if record.verifier_idle_j is not None and verifier.idle_j is not None:
            record.verifier_idle_j += verifier.idle_j * share_s / total_s
