"""A verifier process whose target breaks for good after some passes, as a GPU with a sticky error
does: ``python -m tests.shell.breaking_verifier PORT PASSES TRACE``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from edgespec.cli import verifier as serving
from edgespec.cli.main import app
from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest, PassResult, TargetModel
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.paced import PacedTarget


class StickyError(PacedTarget):
    """Passes go well ``passes`` times and never again."""

    def __init__(self, inner: TargetModel, passes: int) -> None:
        super().__init__(inner, 0.0, 0.0)
        self._passes = passes

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self._passes -= 1
        if self._passes < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().forward(batch)


def main(port: str, passes: str, trace: str) -> None:
    def load(config: VerifierConfig) -> TargetModel:
        return StickyError(load_target(config), int(passes))

    serving.load_target = load  # type: ignore[attr-defined] # the name that the command looks up
    app(["verifier", "--model", "toy", "--port", port, f"--set=trace={trace}"])


if __name__ == "__main__":
    main(*sys.argv[1:])
