"""Texts of a target on several real stages beside those of one process, by the same schedules.

A program, ``python -m tests.shell.pipeline_texts FOLDER:STAGES ...``: stages share torch's process
group, of which a process has one. In canonical mode it compares every token and all bits, then it
checks random schedules on the stages alone. It prints a line for each check that held.
"""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.pipeline import PipelineTarget
from tests.shell.random_schedules import Recorder, check_random_schedule
from tests.shell.target_schedules import compare

ROUNDS = 12


class InjectedError(RuntimeError):
    """Of the last stage alone, behind what it has received."""


def fail(*_: object) -> None:
    raise InjectedError


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
        again = PassRequest("again", 0, (1, 2, 3))
        for each in (target, one.target):
            each.open("again", 3, SamplingParams())
        hook = target._model.model.norm.register_forward_pre_hook(fail)
        with contextlib.suppress(InjectedError):
            target.forward([again])
        hook.remove()
        assert target.forward([again]) == one.target.forward([again])
        same_bits()
        sys.stdout.write(f"{folder.name} again\n")
        target.close_stages()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
