"""A target whose stages are objects of one process, run one behind another: no ranks, no sockets.

What a stage sends lies in a list until the next one takes it. Whoever runs a pass runs it on the
first stage first and on the last, which chooses the tokens, last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from edgespec.core.ports import PassRequest, PassResult
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.pipeline_stage import StageShare
from edgespec.verifier.targets.torch_target import TorchTarget


class InTurn(StageShare):
    """Hands hidden states over through lists, by the rank that they are for."""

    def __init__(self, rank: int, world_size: int, sent: dict[int, list[torch.Tensor]]) -> None:
        super().__init__(rank, world_size, lambda: None)
        self._sent = sent

    def agreed(self, yes: bool) -> bool:
        return yes

    def receive(self, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        hidden = self._sent[self.rank].pop(0)
        assert hidden.shape == (1, rows, width)
        assert hidden.dtype == dtype
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        self._sent[(self.rank + 1) % self.world_size].append(hidden.clone())


class StagedInTurn:
    """``ports.TargetModel`` over ``stages`` parts of the model in ``folder``."""

    def __init__(self, folder: Path, stages: int, **options: Any) -> None:
        self._sent: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(stages)}
        self.stages = [
            TorchTarget(
                str(folder),
                name="tiny",
                vocabulary="v",
                device="cpu",
                max_cached_tokens=2048,
                share=InTurn(rank, stages, self._sent),
                **options,
            )
            for rank in [*range(1, stages), 0]
        ]
        self.last = self.stages[-1]
        self.info, self.cache = self.last.info, self.last.cache

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._each(lambda stage: stage.open(key, prompt_length, sampling, text))

    def run_pass(self, batch: Sequence[PassRequest]) -> torch.Tensor:
        return [stage.run_pass(batch) for stage in self.stages][-1]

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        for stage in self.stages[:-1]:
            stage.run_pass(batch)
        return self.last.forward(batch)

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._each(lambda stage: stage.keep(key, nodes))

    def close(self, key: str) -> None:
        self._each(lambda stage: stage.close(key))

    def _each(self, call: Callable[[TorchTarget], None]) -> None:
        for stage in self.stages:
            call(stage)
