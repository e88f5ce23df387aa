"""What the target asks of vLLM and what it hears, as plain data; and the seam between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore


@dataclass(frozen=True, slots=True)
class Wanted:
    """One session's part of a step."""

    rows: int
    """How many rows of its text it may compute, if it has so many to compute: a wish."""
    drafts: tuple[int, ...] = ()
    """A chain behind the text that vLLM has; looked at once all of the text is computed."""
    logprobs: int = 0
    """As in ``PassRequest``."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What came of it."""

    computed: int
    """Tokens whose keys and values vLLM holds, of the text as it was before the step."""
    tokens: tuple[int, ...] = ()
    """What the text has grown by: nothing, where it was not computed to its end."""
    targets: tuple[int, ...] = ()
    """Where it has grown: the target's token behind the text, and behind each draft."""
    scores: tuple[TokenScore, ...] = ()
    """Of ``targets``, if they were asked for."""
    failure: str = ""
    """Why the session cannot go on; empty: it can."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter (LoRA) of the model."""

    name: str
    folder: Path
    """As PEFT writes it: ``adapter_config.json`` and ``adapter_model.safetensors``."""
    fingerprint: str


class StepEngine(Protocol):
    """vLLM, or what stands in for it. Calls come one at a time."""

    def add(
        self,
        key: str,
        text: Sequence[int],
        prompt_length: int,
        sampling: SamplingParams,
        adapter: str = "",
    ) -> None:
        """Begin a text, of the model with ``adapter`` if one is named. Nothing is computed of it
        until a step wants it."""

    def step(self, wanted: Mapping[str, Wanted]) -> Mapping[str, Stepped]:
        """One step of these sessions and no others. A session may be left out of the result, or
        computed in part, for want of room: ask again."""

    def drop(self, key: str) -> None:
        """Forget a text."""

    def reset(self) -> None:
        """Forget all texts and whatever was computed of them, since a step has failed and nobody
        knows how far it came. Raises ``TargetLostError`` where that cannot be done."""
