"""Texts of a target over two ranks beside those of one rank, by the same random schedules.

A program, ``python -m tests.shell.tensor_parallel_texts FOLDER ...``: the ranks share torch's
process group, of which a process has one. For each checkpoint it decodes several sessions at once,
with ragged trees that are partly kept, rollbacks, penalties and sampling, on one rank and on two in
canonical mode, and compares every token and all logits, then a text under a constraint; then it
checks random schedules bit for bit on the two ranks. It prints a line for each check that held.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import torch

from edgespec.core.ports import CapacityError, PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.tensor_parallel import TensorParallelTarget
from tests.core.token_grammars import Automaton, drafted_text
from tests.shell.random_schedules import Recorder, check_random_schedule
from tests.shell.target_schedules import compare

ROUNDS = 25
LOGITS_WITHIN = 2e-4


def compare_ranks(one: Recorder, two: Recorder, rng: random.Random) -> None:
    """The same passes on both; tokens must be equal and logits close."""

    def check() -> None:
        difference = float((one.logits - two.logits).abs().max())
        assert difference <= LOGITS_WITHIN, difference

    compare(one.target, two.target, rng, ROUNDS, check)


def compare_constrained(one: Recorder, two: Recorder) -> None:
    """A text of three kinds of tokens in turn, with drafts that are often wrong."""
    kinds = tuple({token: (kind + 1) % 3 for token in range(1 + kind, 90, 3)} for kind in range(3))
    automaton = Automaton(kinds, frozenset())
    params = SamplingParams(
        max_tokens=15, temperature=0.8, seed=9, constraint=automaton.constraint()
    )
    texts = [
        drafted_text(recorder.target, [5, 6, 7], params, lambda _, dice: dice.randrange(1, 90), 1)
        for recorder in (one, two)
    ]
    assert texts[0] == texts[1], texts
    assert len(texts[1]) == params.max_tokens
    for length, token in enumerate(texts[1]):
        assert token in automaton.allowed(texts[1][:length]), texts[1]


def refuse_alike(target: TensorParallelTarget) -> None:
    """What one rank refuses is refused, and the ranks go on."""
    target.open("refused", 1, SamplingParams())
    for call, error in (
        (lambda: target.open("refused", 1, SamplingParams()), ValueError),
        (lambda: target.forward([PassRequest("refused", 3, (1,))]), ValueError),
        (lambda: target.forward([PassRequest("refused", 0, (1,) * 999)]), CapacityError),
        (lambda: target.keep("refused", [4]), ValueError),
    ):
        try:
            call()
        except error:
            continue
        raise AssertionError("it was not refused")
    target.forward([PassRequest("refused", 0, (1, 2, 3))])
    target.close("refused")


def main(folders: list[str]) -> None:
    for folder in map(Path, folders):
        two, one = Recorder(folder, "float32", ranks=2), Recorder(folder, "float32")
        target = two.target
        assert isinstance(target, TensorParallelTarget)
        assert target.canonical
        assert target.info == one.target.info
        assert target._pool.data.shape[-1] * 2 == one.target._pool.data.shape[-1]
        compare_ranks(one, two, random.Random(folder.name))
        sys.stdout.write(f"{folder.name} equal\n")
        compare_constrained(one, two)
        sys.stdout.write(f"{folder.name} constrained\n")
        rng = random.Random(7)
        for length in (5, 60):
            check_random_schedule(rng, two, length)
        sys.stdout.write(f"{folder.name} bits\n")
        refuse_alike(target)
        sys.stdout.write(f"{folder.name} refused\n")
        target.close_ranks()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
