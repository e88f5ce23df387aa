"""Measure a pass of the native target, as a share of what this machine can do at all.

    python benchmarks/verifier.py                     # a small random model, a minute
    python benchmarks/verifier.py --shape 0.6b --dtype bfloat16 --sessions 1,4,8 --rows 1,8
    python benchmarks/verifier.py --model FOLDER --device cuda

For each count of sessions and rows (one fed token and a tree of the others):

* ``pass``: ``TorchTarget.forward`` and ``keep`` of every session; ``model``: the part of it that
  is the call of the model, or on a GPU its repetition from a recording; ``choose``: choosing the
  tokens; ``outside``: all the rest.
* ``roofline``: the greater of two times, for reading the weights and the cached keys and values
  at the bandwidth that this program measures first, and for the arithmetic at the measured rate.

The cache holds random rows, because the time of a pass does not depend on them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from edgespec.bench.report import describe_machine, list_versions
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.sampling import tensors
from edgespec.verifier.targets import torch_target
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.linear_layers import PackedLinear
from edgespec.verifier.targets.loading import DTYPES
from edgespec.verifier.targets.torch_target import TorchTarget

GREEDY = SamplingParams(max_tokens=1 << 20)
SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, slots=True)
class Roof:
    """The measured limits of this machine: the best of some trials."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(slots=True)
class Clock:
    """Sums the seconds spent in wrapped functions of one pass."""

    device: torch.device
    seconds: dict[str, float]

    def now(self) -> float:
        # A pass that is being recorded must not be waited for.
        if self.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def wrap(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = self.now()
            result = work(*args, **options)
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - began
            return result

        return timed


def write_shape(name: str, folder: Path) -> Path:
    """Write a random checkpoint of the shape, in bfloat16."""
    config = transformers.Qwen3Config(
        **{"max_position_embeddings": 40_960, "tie_word_embeddings": True, **SHAPES[name]},
        bos_token_id=None,
        eos_token_id=None,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    with torch.device("meta"):
        model = transformers.Qwen3ForCausalLM(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(1)

    def random(shape: torch.Size) -> torch.Tensor:
        """Draw a random tensor on the quickest device: for an 8B shape a CPU would need minutes."""
        made = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return made.normal_(0, 0.02, generator=generator).cpu()

    tensors = {
        key: torch.ones(shape.shape, dtype=torch.bfloat16)
        if shape.ndim == 1
        else random(shape.shape)
        for key, shape in model.state_dict().items()
        if key != "lm_head.weight" or not config.tie_word_embeddings
    }
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def measure_roof(dtype: torch.dtype, clock: Clock) -> Roof:
    """Measure the bandwidth (a product of one row with a matrix far larger than the caches, or a
    sum over it, whichever is quicker) and the rate (a square product)."""
    device = clock.device
    wide = 2048 if device.type == "cpu" else 8192
    matrix = torch.randn((wide * 16, wide), device=device).to(dtype)
    vector = torch.randn((1, wide), device=device).to(dtype)
    square = matrix[:wide]

    def best(work: Callable[[], object]) -> float:
        times = []
        for _ in range(7):
            began = clock.now()
            work()
            times.append(clock.now() - began)
        return min(times)

    with torch.inference_mode():
        read_s = min(
            best(lambda: torch.nn.functional.linear(vector, matrix)),
            best(lambda: matrix.view(torch.int16).amax()),
        )
        multiply_s = best(lambda: square @ square)
    return Roof(matrix.numel() * matrix.element_size() / read_s, 2 * wide**3 / multiply_s)


class Bench:
    """One loaded model, and passes of it."""

    def __init__(self, folder: Path, args: argparse.Namespace, sessions: int, context: int) -> None:
        self.target = TorchTarget(
            str(folder),
            name="bench",
            vocabulary="v",
            dtype=args.dtype,
            device=args.device,
            max_cached_tokens=(sessions + 1) * context,
            max_sessions=sessions,
            canonical=args.canonical,
            model_threads=args.threads,
            packed=args.packed,
        )
        self.model = self.target._model
        self.config = self.model.config
        self.pool = self.target._pool
        self.pool.data.normal_(0, 0.5)
        self.pool.data[:, :, :BLOCK_SIZE] = 0
        self.clock = Clock(self.pool.data.device, {})
        self.head_dim = getattr(self.config, "head_dim", None) or (
            self.config.hidden_size // self.config.num_attention_heads
        )

    def roofline_s(self, roof: Roof, sessions: int, rows: int, context: int) -> float:
        """Return the roofline time: every weight but the embedding is read once per pass, and each
        session's rows once."""
        config, size = self.config, self.pool.data.element_size()
        inner = sum(p.numel() for n, p in self.model.named_parameters() if "embed_tokens" not in n)
        packed = [part for part in self.model.modules() if isinstance(part, PackedLinear)]
        inner += sum(part.in_features * part.out_features for part in packed)
        shared = config.tie_word_embeddings and not any(part.tied_to for part in packed)
        weights = inner + (config.vocab_size * config.hidden_size if shared else 0)
        keys = 2 * config.num_hidden_layers * self.pool.data.shape[-1] * sessions * context
        scores = sessions * rows * context * config.num_attention_heads * self.head_dim
        flops = 2 * weights * sessions * rows + 4 * config.num_hidden_layers * scores
        return float(max((weights + keys) * size / roof.bytes_per_s, flops / roof.flops_per_s))

    @contextlib.contextmanager
    def taken_apart(self) -> Iterator[None]:
        # The functions are named as attributes, so the type check sees it when one is renamed.
        parts = (
            (torch_target, torch_target._call_model, "model"),
            (tensors, tensors.choose_tokens, "choose"),
            (tensors, tensors.best_tokens, "choose"),
        )
        for module, work, part in parts:
            setattr(module, work.__name__, self.clock.wrap(part, work))
        recorded = self.target._recorded
        if recorded is not None:
            recorded.run = self.clock.wrap("model", recorded.run)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for module, work, _ in parts:
                setattr(module, work.__name__, work)

    def open(self, sessions: int, context: int, room: int) -> None:
        """Open sessions with ``context`` rows: the prompt's blocks lie together, the others
        mixed."""
        tables: list[list[int]] = []
        free = iter(range(1, self.pool.block_count + 1))
        for _ in range(sessions):
            tables.append([next(free) for _ in range(-(-context // BLOCK_SIZE))])
        for _ in range(room // BLOCK_SIZE + 1):
            for table in tables:
                table.append(next(free))
        self.tables = {f"s{index}": tuple(table) for index, table in enumerate(tables)}
        for key, blocks in self.tables.items():
            self.target.open(key, context, GREEDY)
            request = PassRequest(key, 0, tuple([5] * context), blocks=blocks, sample=False)
            self.pool.reserve([request])
            self.pool.commit(request)

    def close(self) -> None:
        for key in self.tables:
            self.target.close(key)

    def requests(self, cached: int, rows: int) -> list[PassRequest]:
        tokens = tuple(range(7, 6 + rows))
        parents = (-1, -1, *range(1, rows - 2))[: rows - 1]
        return [
            PassRequest(key, cached, (6,), tokens, parents, blocks=table)
            for key, table in self.tables.items()
        ]

    def run(self, requests: Sequence[PassRequest]) -> dict[str, float]:
        """Return the seconds of one pass and its parts; the second node of a tree is kept."""
        self.clock.seconds.clear()
        began = self.clock.now()
        self.target.forward(requests)
        kept = [1] if len(requests[0].tokens) > 1 else []
        for request in requests:
            self.target.keep(request.key, kept)
        whole = self.clock.now() - began
        parts = dict(self.clock.seconds)
        return {"pass": whole, **parts, "outside": whole - sum(parts.values())}


def measure(
    bench: Bench, sessions: int, rows: int, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the seconds of every pass, by part."""
    samples: dict[str, list[float]] = {}
    room = 2 * (args.passes + 3) + rows
    bench.open(sessions, args.context, room)
    cached, step = args.context, 2 if rows > 2 else 1
    gc.collect()
    gc.disable()
    for number in range(args.passes + 2):
        requests = bench.requests(cached, rows)
        found = bench.run(requests)
        cached += step
        if number >= 2:  # the first ones warm up
            for name, seconds in found.items():
                samples.setdefault(name, []).append(seconds)
    gc.enable()
    bench.close()
    return samples


def spread(samples_s: list[float]) -> str:
    low, *_, high = statistics.quantiles(samples_s, n=10)
    return f"{1e3 * statistics.median(samples_s):8.2f} ({1e3 * low:.2f}-{1e3 * high:.2f})"


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder instead of a shape")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sessions", type=numbers, default=[1, 8, 64])
    parser.add_argument("--rows", type=numbers, default=[1, 8], help="of each session")
    parser.add_argument("--context", type=int, default=256, help="cached rows of each session")
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--canonical", action="store_true", help="canonical mode, else plain")
    parser.add_argument(
        "--packed", action=argparse.BooleanOptionalAction, default=True, help="packed weights"
    )
    parser.add_argument("--json", type=Path, help="leave all samples there")
    return parser.parse_args()


def main() -> int:
    args = parse()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    about = {
        "command": shlex.join(sys.argv),
        "machine": describe_machine(),
        "versions": list_versions(),
        "threads": args.threads,
    }
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or write_shape(args.shape, Path(scratch))
        room = args.context + 2 * (args.passes + 3) + max(args.rows) + 2 * BLOCK_SIZE
        bench = Bench(folder, args, max(args.sessions), room)
    roof = measure_roof(bench.pool.data.dtype, bench.clock)
    print("\n".join([f"{name}: {value}" for name, value in about.items()]))
    print(
        f"{args.model or args.shape}, {args.dtype}, {bench.target.mode}, {args.context} cached rows"
        f" a session; {roof.bytes_per_s / 1e9:.1f} GB/s, {roof.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    parts = ["pass", "model", "choose", "outside"]
    print(f"{'sessions':>8} {'rows':>4} {'roofline':>9} {'share':>6}", end=" ")
    print(" ".join(f"{name:>22}" for name in parts), "  ms, median (10 % to 90 %)")
    results = []
    with bench.taken_apart():
        for sessions in args.sessions:
            for rows in args.rows:
                samples = measure(bench, sessions, rows, args)
                least_s = bench.roofline_s(roof, sessions, rows, args.context)
                share = least_s / statistics.median(samples["pass"])
                print(f"{sessions:8d} {rows:4d} {1e3 * least_s:9.2f} {share:6.0%}", end=" ")
                print(" ".join(f"{spread(samples[name]):>22}" for name in parts), flush=True)
                cell = {"sessions": sessions, "rows": rows}
                results.append({**cell, "roofline_s": least_s, "samples_s": samples})
    if args.json is not None:
        args.json.write_text(json.dumps({**about, "results": results}, default=str, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
