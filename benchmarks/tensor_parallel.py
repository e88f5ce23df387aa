"""What a second rank does to a pass, and what telling it costs.

``python benchmarks/tensor_parallel.py`` writes a random Llama to a temporary folder and serves it
by one process and by two, one thread each, in plain mode. Passes of 1 and 8 sessions with 1 and 4
rows each alternate between the two, so that what else the machine does falls on both. Printed are
medians with quartiles, and the ratio pass by pass; then the broadcast by itself (encoding a pass,
writing to the other rank's pipe), and the exchanges within a pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.ports import PassRequest
from edgespec.targets.tensor_parallel import TensorParallelTarget, torch_target
from edgespec.targets.tensor_parallel_messages import RunPass, encode
from edgespec.targets.torch_target import TorchTarget

PROMPT = 64
SHAPES = ((1, 1), (1, 4), (8, 1), (8, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, options.hidden, options.layers, options.vocabulary)
        settings = {"name": "m", "vocabulary": "v", "canonical": False, "model_threads": 1}
        one = torch_target(folder, device="cpu", **settings)
        two = torch_target(folder, device="cpu", ranks=2, **settings)
        assert isinstance(two, TensorParallelTarget)
        for sessions, rows in SHAPES:
            compare(one, two, sessions, rows, options.passes)
        tell(two)
        exchange(two, options.hidden)
        two.close_ranks()


def write_model(folder: str, hidden: int, layers: int, vocabulary: int) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def compare(one: TorchTarget, two: TorchTarget, sessions: int, rows: int, passes: int) -> None:
    keys = [f"s{index}" for index in range(sessions)]
    for target in (one, two):
        for key in keys:
            target.open(key, PROMPT, SamplingParams())
            target.forward([PassRequest(key, 0, tuple(range(PROMPT)), sample=False)])
    drafts = tuple(range(1, rows))
    chain = tuple(range(-1, rows - 2))
    batch = [PassRequest(key, PROMPT, (7,), drafts, chain) for key in keys]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(passes):
        for target, found in zip((one, two), times, strict=True):
            began = time.perf_counter()
            target.forward(batch)
            found.append(1e3 * (time.perf_counter() - began))
    for target in (one, two):
        for key in keys:
            target.close(key)
    ratios = [second / first for first, second in zip(*times, strict=True)]
    say(
        f"{sessions} sessions x {rows} rows: one rank {spread(times[0])} ms, two ranks"
        f" {spread(times[1])} ms, ratio {spread(ratios)}"
    )


def tell(two: TensorParallelTarget) -> None:
    """Commands that a rank carries out at once, so that its pipe never fills."""
    group = two._others
    for sessions in (1, 8, 64):
        batch = tuple(
            PassRequest(
                f"session-{index}",
                1000,
                (7,),
                (1, 2, 3, 4),
                (-1, 0, 1, 1),
                blocks=tuple(range(1 + 64 * index, 65 + 64 * index)),
            )
            for index in range(sessions)
        )
        size = len(encode(RunPass(1, batch)))
        encoding = timed(lambda batch=batch: encode(RunPass(1, batch)), 300)
        say(
            f"a pass of {sessions} sessions, 64 blocks each: {size} bytes, encoded in {encoding} us"
        )
    say(f"a short command, encoded and written: {timed(lambda: two.close('nobody'), 300)} us")
    assert group.lost is None


def exchange(two: TensorParallelTarget, hidden: int) -> None:
    """Rank 1 has to take part: so a pass is run, and what the exchanges take of it is summed."""
    kind, spent = type(two._share), [0.0, 0]

    def clocked(work: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def inner(*arguments: object) -> torch.Tensor:
            began = time.perf_counter()
            result = work(*arguments)
            spent[0] += time.perf_counter() - began
            spent[1] += 1
            return result

        return inner

    kind.add, kind.join = clocked(kind.add), clocked(kind.join)  # type: ignore[method-assign]
    two.open("e", 1, SamplingParams())
    passes = 50
    began = time.perf_counter()
    for _ in range(passes):
        two.forward([PassRequest("e", 0, (7, 8, 9, 10))])
    total = time.perf_counter() - began
    two.close("e")
    say(
        f"exchanges of a pass of 4 rows of {hidden}: {spent[1] / passes:.0f}, each"
        f" {1e6 * spent[0] / spent[1]:.0f} us with the wait for the other rank, together"
        f" {100 * spent[0] / total:.0f} % of the pass"
    )


def timed(work: Callable[[], object], count: int) -> str:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        work()
        found.append(1e6 * (time.perf_counter() - began))
    return spread(found)


def spread(values: list[float]) -> str:
    """Median (lower to upper quartile)."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
