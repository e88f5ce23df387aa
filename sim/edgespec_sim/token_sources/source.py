"""Where a simulated world's tokens come from: one seam, three sources.

Theory of operation. A world needs a target, a drafter for each device, and the requests users
make. ``TokenSource`` makes all three, so that they fit together, and says what it is: every report
names it, because an acceptance rate is only as good as its source.

    toy model     laws of a few lines: every rule of sampling holds, trees branch as they do
    match tape    recorded agreement of a real pair of models on real text
    process       made-up agreement with the statistics of a tape
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgespec.core.ports import Drafter, TargetModel
from edgespec.core.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What a user asks for."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    """Ends at ``sampling.max_tokens`` or at an end token of the target, whichever is first."""


class TokenSource(Protocol):
    @property
    def about(self) -> str:
        """One line for reports: which source, from what, its acceptance rate."""

    def target(self) -> TargetModel:
        """A new target; each verifier has its own. Any one of them continues any request alike."""

    def drafter(self) -> Drafter:
        """A new drafter; each device has its own."""

    def request(self, number: int, prompt_length: int, max_tokens: int) -> Request:
        """The world's request of that number (0, 1, ...): equal for equal numbers and lengths.
        A tape has texts of its own lengths: they are cut, never lengthened."""

    def expected(self, request: Request, count: int) -> Sequence[int]:
        """The first ``count`` tokens that the target gives for it, computed without any session:
        what was delivered is held against it."""


@runtime_checkable
class Ranked(Protocol):
    """A source that knows how good its drafts are, token by token."""

    def ranks(self, request: Request, count: int) -> Sequence[int]:
        """Of the first ``count`` tokens of a request: the rank each has among the drafter's guesses
        on the committed text before it, -1 for none."""
