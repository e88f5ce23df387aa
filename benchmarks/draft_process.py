"""A draft of ours for ``llama_cpp_peer.py``: feeds tokens, one JSON line each way.

    python benchmarks/draft_process.py FOLDER THREADS plain|tree

Answers requests ``{"keep", "tokens", "every", "save"}`` with the seconds of a whole draft step, and
those in it that went into choosing the guesses, which is no part of the model. ``every`` wants the
logits of all rows, which is for ``tree`` alone; ``save`` names a file for the last row.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.drafters import onnx_drafter, onnx_tree_drafter
from edgespec.drafters.masked_guesses import guesses
from edgespec.drafters.onnx_drafter import OnnxDrafter
from edgespec.drafters.onnx_tree_drafter import OnnxTreeDrafter
from edgespec.ports import Candidate, TreeRows

CONTEXT, MOST_ROWS, WIDTH = 512, 8, 3


class TimedChoice:
    """``guesses``, with the seconds that it has taken."""

    def __init__(self) -> None:
        self.clock_s = self.cpu_s = 0.0

    def __call__(self, *arguments: Any) -> tuple[Candidate, ...]:
        clock, cpu = time.perf_counter(), time.process_time()
        try:
            return guesses(*arguments)
        finally:
            self.clock_s += time.perf_counter() - clock
            self.cpu_s += time.process_time() - cpu


def answer(drafter: OnnxDrafter, request: dict[str, Any]) -> dict[str, float]:
    """Take one step and tell its times."""
    keep, tokens = request["keep"], request["tokens"]
    choice = TimedChoice()
    if not keep:
        drafter.begin(1, SamplingParams())
    with (
        mock.patch.object(onnx_drafter, "guesses", choice),
        mock.patch.object(onnx_tree_drafter, "guesses", choice),
    ):
        clock, cpu = time.perf_counter(), time.process_time()
        if request["every"]:
            assert isinstance(drafter, OnnxTreeDrafter)
            leaves = tuple(range(keep, keep + len(tokens)))
            drafter.step_tree(keep, tokens, TreeRows((), (), (), leaves), WIDTH)
        else:
            drafter.step(keep, tokens, WIDTH)
        times = {"clock_s": time.perf_counter() - clock, "cpu_s": time.process_time() - cpu}
    if request["save"]:
        np.save(request["save"], drafter.logits)
    return {**times, "choice_clock_s": choice.clock_s, "choice_cpu_s": choice.cpu_s}


def main() -> None:
    folder, threads, kind = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    drafter = (
        OnnxTreeDrafter(folder, MOST_ROWS, threads=threads, context_length=CONTEXT)
        if kind == "tree"
        else OnnxDrafter(folder, threads=threads, context_length=CONTEXT)
    )
    print(json.dumps({"draft": kind}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(drafter, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
