"""Are the ranks of a tensor parallel target still in step? A pure machine that rank 0 asks.

Theory of operation. All ranks carry out the same calls in the same order, and the passes among them
exchange partial sums a fixed number of times. What rank 0 refuses before a pass begins is never
told to the others. A pass that rank 0 completes was completed by all, since its last exchange needs
every rank. So only a pass that raises needs an agreement: if it raised on *every* rank behind the
*same* exchange (memory that is gone everywhere alike, say), nobody waits for anybody, the pass
failed as a whole and the sessions' own containment takes over. In every other case some rank waits
in an exchange that will not come, or holds keys that others lack: the ranks are lost, and the
verifier ends.

A rank that is gone, a pass beyond its time, and a failure that others do not share within
``agree_within_s`` are such cases. ``lost`` says why, once and for all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from edgespec.verifier.targets.tensor_parallel_messages import PassFailed

AGREE_WITHIN_S = 10.0
"""Ranks that fail alike fail within a pass's own skew; a traceback takes time to be made."""


class Verdict(Enum):
    """What became of a pass that raised on rank 0."""

    WAIT = "wait"
    """Not all other ranks have said yet that it raised there as well."""
    ALIKE = "alike"
    """It raised on all ranks behind the same exchange: they are in step."""
    LOST = "lost"


@dataclass(slots=True)
class PassAgreement:
    """One for all passes; times are in seconds of any one clock."""

    other_ranks: frozenset[int]
    pass_within_s: float
    agree_within_s: float = AGREE_WITHIN_S
    setting: str = "tensor_parallel.pass_within_s"
    """The name of ``pass_within_s`` in the configuration."""
    lost: str | None = None
    _number: int = 0
    _running: bool = False
    _began_s: float = 0.0
    _failed: tuple[int, str] | None = None
    """Exchanges of rank 0 before the pass raised there, and why."""
    _reports: dict[int, PassFailed] = field(default_factory=dict)
    _first_failure_s: float | None = None

    @property
    def deadline(self) -> float | None:
        """When ``look`` has to be called at the latest, if nothing else happens."""
        if self.lost is not None or not self._running:
            return None
        limits = [self._began_s + self.pass_within_s]
        if self._first_failure_s is not None:
            limits.append(self._first_failure_s + self.agree_within_s)
        return min(limits)

    def began(self, now: float) -> int:
        """A pass begins; its number."""
        assert not self._running, self
        self._number += 1
        self._running, self._began_s = True, now
        return self._number

    def ended(self) -> None:
        """The pass is done on rank 0, and so on all."""
        self._running = False
        if self._reports:
            self._lose(f"{self._whose()}, but rank 0 completed that pass")

    def failed(self, collectives: int, reason: str, now: float) -> None:
        """The pass raised on rank 0 behind so many of its exchanges."""
        assert self._running, self
        self._failed = collectives, reason
        self._note_failure(now)
        self._compare()

    def reported(self, rank: int, report: PassFailed, now: float) -> None:
        """A pass raised on another rank."""
        if not self._running or report.number != self._number or rank in self._reports:
            self._lose(f"rank {rank} failed in pass {report.number}: {report.reason}")
            return
        self._reports[rank] = report
        self._note_failure(now)
        if self._failed is not None:
            self._compare()

    def gone(self, rank: int, why: str) -> None:
        """A rank has ended, or cannot go on."""
        self._lose(f"rank {rank} {why}")

    def look(self, now: float) -> None:
        """Time passes."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return
        if self._first_failure_s is None:
            self._lose(
                f"pass {self._number} was not done after {self.pass_within_s:g} s"
                f" ({self.setting}): a rank hangs"
            )
        elif self._failed is None:
            self._lose(f"{self._whose()}, and rank 0 waits for it")
        else:
            silent = sorted(self.other_ranks - self._reports.keys())
            names = ", ".join(map(str, silent))
            self._lose(f"rank 0 failed in pass {self._number}: {self._failed[1]}; not rank {names}")

    @property
    def verdict(self) -> Verdict:
        """Of the pass that raised on rank 0."""
        if self.lost is not None:
            return Verdict.LOST
        return Verdict.ALIKE if self._failed is None else Verdict.WAIT

    def _note_failure(self, now: float) -> None:
        if self._first_failure_s is None:
            self._first_failure_s = now

    def _compare(self) -> None:
        assert self._failed is not None
        collectives, reason = self._failed
        for rank, report in self._reports.items():
            if report.collectives != collectives:
                self._lose(
                    f"rank 0 failed in pass {self._number} behind {collectives} exchanges"
                    f" ({reason}), rank {rank} behind {report.collectives} ({report.reason})"
                )
                return
        if self._reports.keys() == self.other_ranks:
            self._running = False
            self._failed = self._first_failure_s = None
            self._reports.clear()

    def _whose(self) -> str:
        rank, report = next(iter(self._reports.items()))
        return f"rank {rank} failed in pass {report.number}: {report.reason}"

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
