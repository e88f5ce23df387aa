"""What the host does of a pass beside the model: laid out anew, and at the fixed places of a
recorded pass.

    python benchmarks/static_layout.py            # a minute, on any CPU
    python benchmarks/static_layout.py --sessions 1,8,64 --rows 1,4 --passes 200

``TorchTarget.forward`` and ``keep`` of every session, with the layouts of the paged kernel; the
model's call gives zeros, and a replay does nothing. So what is compared is what Python and numpy do
while a GPU waits: ``plain`` makes arrays and tensors for each pass, ``static`` fills those of the
bucket and sends them. Beside that stand the calls of torch and the copies to the device that each
makes a pass, which a GPU's driver takes some microseconds for, on top. In turns; CPU time.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from verifier import Bench, numbers, write_shape

from edgespec.benchmark.report import machine, versions
from edgespec.ports import PassRequest
from edgespec.targets import block_tables, device_copies, kv_pool, paged_attention, pass_plan
from edgespec.targets.graphed_passes import GraphedPasses
from edgespec.targets.paged_attention import PagedAttention
from edgespec.targets.pass_plan import PassPlan


class _Nothing:
    """A recorder, and a recording, of work that is not done."""

    used_bytes = 0
    wrecked = False

    def record(self, work: Callable[[], None]) -> _Nothing:
        work()
        return self

    def replay(self) -> None:
        return


class _Calls(TorchDispatchMode):
    """Counts torch's operations that a GPU would be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.count += not any(part in name for part in ("view", "split", "slice", "select.int"))
        return func(*args, **(kwargs or {}))


class _Copies:
    """Counts the copies to the device."""

    def __init__(self) -> None:
        self.count = 0
        to_device, send = device_copies.to_device, device_copies.StagedBytes.send

        def copied(array: Any, device: torch.device) -> torch.Tensor:
            self.count += 1
            return to_device(array, device)

        def sent(staged: Any, count: int) -> None:
            self.count += 1
            send(staged, count)

        device_copies.StagedBytes.send = sent  # type: ignore[method-assign]
        for module in (block_tables, kv_pool, paged_attention, pass_plan):
            module.to_device = copied  # type: ignore[attr-defined]


def replaced(bench: Bench) -> GraphedPasses:
    """From now on the model's call gives zeros and the layouts are the paged kernel's."""
    target, config = bench.target, bench.config
    size = target.info.vocabulary_size
    zeros = torch.zeros((256, size))

    def call(plan: PassPlan) -> torch.Tensor:
        assert plan.pool.data is not None  # as the first layer does
        return zeros[: plan.sampled_count]

    device = bench.clock.device
    attention = PagedAttention(
        config.num_attention_heads, config.num_key_value_heads, device, SimpleNamespace()
    )
    attention._multiprocessors = 132
    target._attention = attention
    passes = GraphedPasses(call, target._pool, attention, _Nothing())
    passes.eager_first = False
    module = sys.modules[type(target).__module__]
    module._call_model = lambda model, plan, size: call(plan)  # type: ignore[attr-defined]
    return passes


def one_pass(bench: Bench, requests: list[PassRequest]) -> float:
    """CPU milliseconds of the thread."""
    began = time.thread_time_ns()
    bench.target.forward(requests)
    kept = [1] if len(requests[0].tokens) > 1 else []
    for request in requests:
        bench.target.keep(request.key, kept)
    return (time.thread_time_ns() - began) / 1e6


def measure(bench: Bench, passes: GraphedPasses, rows: int, args: argparse.Namespace) -> list[str]:
    """A line for each way."""
    arms = {"plain": None, "static": passes}
    copies = _Copies()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    found: dict[str, tuple[float, float]] = {}
    cached, step = args.context, 2 if rows > 2 else 1
    gc.disable()
    for number in range(args.passes + 3):
        order = list(arms) if number % 2 else list(arms)[::-1]
        for name in order:
            bench.target._graphs = arms[name]
            took = one_pass(bench, bench.requests(cached, rows))
            if number >= 3:
                samples[name].append(took)
        cached += step
    for name, arm in arms.items():
        bench.target._graphs, copies.count = arm, 0
        calls = _Calls()
        with calls:
            for _ in range(16):
                one_pass(bench, bench.requests(cached, rows))
                cached += step
        found[name] = copies.count / 16, calls.count / 16
    gc.enable()
    lines = []
    for name, taken in samples.items():
        low, *_, high = statistics.quantiles(taken, n=10)
        lines.append(
            f"{name:>7} {statistics.median(taken):7.3f} ({low:.3f}-{high:.3f}) {min(taken):7.3f}"
            f" {found[name][0]:7.2f} {found[name][1]:7.2f}"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=numbers, default=[1, 8, 64])
    parser.add_argument("--rows", type=numbers, default=[1, 4], help="of each session")
    parser.add_argument("--context", type=int, default=256, help="cached rows of each session")
    parser.add_argument("--passes", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"dtype": "float32", "device": "cpu", "canonical": False, "threads": 1}
    room = args.context + 4 * (args.passes + 40) + 32
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape("small", Path(scratch))
        bench = Bench(
            folder,
            argparse.Namespace(**options, packed=False, no_graphs=True),
            max(args.sessions),
            room + 32,
        )
    passes = replaced(bench)
    print(f"command: {shlex.join(sys.argv)}")
    print(f"machine: {machine()}\nversions: {versions()}")
    print("sessions rows     way  ms, median (10 % to 90 %)   least  copies   calls")
    for sessions in args.sessions:
        for rows in args.rows:
            bench.open(sessions, args.context, room - args.context)
            for line in measure(bench, passes, rows, args):
                print(f"{sessions:8d} {rows:4d} {line}", flush=True)
            bench.close()
    print(f"{passes.replayed} passes repeated from {passes.recordings} recordings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
