"""Where a generation ends: a stop id, max_tokens or the context, whichever comes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Ending:
    stops: frozenset[int]
    end: int
    """The committed length at which the generation is full."""

    @classmethod
    def of(
        cls,
        sampling: SamplingParams,
        prompt_length: int,
        context_length: int,
        eos_token_ids: Sequence[int],
    ) -> Ending:
        eos = () if sampling.ignore_eos else eos_token_ids
        end = min(prompt_length + sampling.max_tokens, context_length)
        return cls(frozenset((*sampling.stop_token_ids, *eos)), end)

    def reached(self, prefix: CommittedPrefix) -> FinishReason | None:
        """How a generation that holds these tokens has ended already, if it has."""
        if prefix.output and prefix.output[-1] in self.stops:
            return FinishReason.STOP
        return FinishReason.LENGTH if prefix.length >= self.end else None

    def cut(
        self, position: int, tokens: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """What of ``tokens``, which start at ``position``, belongs to the output, and whether the
        output ends with it. The stop id itself belongs to it."""
        room = max(0, self.end - position)
        if len(tokens) < room and self.stops.isdisjoint(tokens):  # as nearly always
            return tokens, None
        for index, token in enumerate(tokens[:room]):
            if token in self.stops:
                return tokens[: index + 1], FinishReason.STOP
        return tokens[:room], FinishReason.LENGTH if len(tokens) >= room else None
