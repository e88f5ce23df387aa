"""Texts of a target on several real stages beside those of one process, by the same schedules.

A program, ``python -m tests.shell.pipeline_texts FOLDER:STAGES ...``: stages share torch's process
group, of which a process has one. In canonical mode it compares every token and all bits, then it
checks random schedules on the stages alone. It prints a line for each check that held.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from edgespec.verifier.targets.pipeline import PipelineTarget
from tests.shell.random_schedules import Recorder, check_random_schedule
from tests.shell.target_schedules import compare

ROUNDS = 12


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, count = argument.rsplit(":", 1)
        folder = Path(name)
        staged, one = Recorder(folder, "float32", stages=int(count)), Recorder(folder, "float32")
        target = staged.target
        assert isinstance(target, PipelineTarget)
        assert target.canonical
        assert target.info == one.target.info
        assert target._pool.data.shape[1] < one.target._pool.data.shape[1]

        def same_bits(one: Recorder = one, staged: Recorder = staged) -> None:
            assert torch.equal(one.logits, staged.logits)

        rng = random.Random(folder.name)
        compare(one.target, target, rng, ROUNDS, same_bits)
        sys.stdout.write(f"{folder.name} equal\n")
        for length in (5, 40):
            check_random_schedule(rng, staged, length)
        sys.stdout.write(f"{folder.name} bits\n")
        target.close_stages()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
