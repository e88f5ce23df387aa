"""The memory of a device's process: predicted against measured, and held against budgets.

    python benchmarks/memory.py predict [--large]   model sizes, precisions, contexts and widths
    python benchmarks/memory.py cgroup [--large] [--from 7]   chats in a group with a hard limit

Every row is a fresh process (``memory_device.py``) that chats over gRPC with a verifier in this
one, whose text is made of random tokens. Drafts have random weights in real models' shapes
(``make_draft``); ``--large`` adds those of Qwen3-0.6B, which take a gigabyte and minutes.
Times of different rows are taken in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from memory_device import ROOT, ControlGroup, NoControlGroup
from numpy.typing import NDArray

from edgespec.bench.report import machine, versions
from edgespec.core.device.memory import MIB, KvType
from edgespec.core.protocol.messages import Limits
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, ModelInfo, PassRequest, PassResult
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.manifest import DraftManifest
from edgespec.device.export import export, export_graph
from edgespec.device.export.checkpoint import Checkpoint
from edgespec.device.export.quantize import BLOCK_SIZE, QuantizedMatrix
from edgespec.verifier.daemon import Verifier
from edgespec.wire.codec import WireLimits
from edgespec.wire.grpc_server import GrpcServer

HERE = Path(__file__).parent
CONTEXT = 8192
# A hard limit counts the stacks of a process's threads whether they are used or not.
SMALL_STACKS = ("sh", "-c", 'ulimit -S -s 1024; exec "$0" "$@"')


class RandomText:
    """A target whose token at each position is a hash of it, whatever came before."""

    def __init__(self, name: str) -> None:
        size = SHAPES[name][6]
        self._info = ModelInfo(name, f"random-{name}", size, CONTEXT)

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def cache(self) -> CacheShape | None:
        return None

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        pass

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        return [self._run(request) for request in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        pass

    def close(self, key: str) -> None:
        pass

    def _run(self, request: PassRequest) -> PassResult:
        if not request.sample:
            return PassResult(request.key, ())
        root = request.cache_length + len(request.feed)
        positions = [root]
        for parent in request.parents:
            positions.append(positions[1 + parent] + 1 if parent >= 0 else root + 1)
        tokens = [
            1 + (position * 2654435761 >> 7) % (self._info.vocabulary_size - 1)
            for position in positions
        ]
        return PassResult(request.key, tuple(tokens))


# --- drafts of real models' shapes: memory depends on sizes alone, so the weights are random ------

# hidden, layers, heads, key/value heads, head size, feed forward, vocabulary, kind
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, str]] = {
    "1M": (192, 3, 3, 1, 64, 512, 4096, "llama"),
    "5M": (256, 6, 4, 2, 64, 704, 8192, "llama"),
    "25M": (448, 8, 7, 1, 64, 1216, 16384, "llama"),
    "135M": (576, 30, 9, 3, 64, 1536, 49152, "llama"),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, "qwen3"),
}
"""As of the bundled draft, two between, SmolLM2-135M and Qwen3-0.6B."""


class _RandomCheckpoint(Checkpoint):
    """Every tensor that is asked for, of small random numbers; no biases."""

    def __init__(self, folder: Path) -> None:
        self._rng = np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        return bool(name) and not name.endswith(".bias")

    def read(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        if len(shape) == 1:
            return np.ones(shape, dtype=np.float32)
        row = self._rng.standard_normal(shape[1], dtype=np.float32) * np.float32(0.03)
        shifts = self._rng.standard_normal((shape[0], 1), dtype=np.float32)
        product: NDArray[np.float32] = row * shifts
        return product


def _random_matrix(weight: NDArray[np.float32], bits: int) -> QuantizedMatrix:
    """No two alike: the runtime keeps equal ones once."""
    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_SIZE)
    rng = np.random.default_rng(int(abs(weight[0, 0]) * 1e9))
    packed = rng.integers(0, 256, (rows, blocks, BLOCK_SIZE * bits // 8), dtype=np.uint8)
    sizes = rng.uniform(0.5, 1.5, (rows, blocks)) * rng.choice((-1.0, 1.0), (rows, blocks))
    scales = (sizes * 0.06 / (1 << bits)).astype(np.float16).astype(np.float32)
    return QuantizedMatrix(packed, scales, bits, columns)


def config_of(name: str, context_length: int) -> dict[str, Any]:
    """The ``config.json`` of a shape."""
    hidden, layers, heads, kv_heads, head_dim, wide, vocabulary, kind = SHAPES[name]
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
    }


def make_draft(
    folder: Path,
    name: str,
    *,
    bits: int = 4,
    context_length: int = 4096,
    kv_type: KvType = KvType.FLOAT32,
) -> DraftManifest:
    """Write the draft of shape ``name`` into ``folder``."""
    source = folder.parent / f"{folder.name}.source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(config_of(name, context_length)))
    info = ModelInfo(name, f"random-{name}", SHAPES[name][6], context_length)
    with (
        mock.patch.object(export, "Checkpoint", _RandomCheckpoint),
        mock.patch.object(export_graph, "quantize_matrix", _random_matrix),
    ):
        return export.export_draft(
            source, folder, info, bits=bits, context_length=context_length, kv_type=kv_type
        )


# --- what a device process takes -----------------------------------------------------------------


@dataclass
class Case:
    shape: str
    bits: int
    kv_type: str = "float32"
    context: int = 4096
    job: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return f"{self.shape}-{self.bits}-{self.kv_type}-{self.context}"


async def measured(case: Case, root: Path, joining: Sequence[str] = ()) -> dict[str, Any]:
    """What one fresh device process tells of itself; ``joining`` goes before its command."""
    folder = root / case.folder
    if not (folder / "edgespec.json").exists():
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path;"
            " from memory import make_draft; from edgespec.core.device.memory import KvType;"
            " make_draft(Path(sys.argv[2]), sys.argv[3], bits=int(sys.argv[4]),"
            " context_length=int(sys.argv[5]), kv_type=KvType(sys.argv[6]))"
        )
        arguments = (str(HERE), str(folder), case.shape, str(case.bits), str(case.context))
        maker = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, *arguments, case.kv_type
        )
        assert await maker.wait() == 0
    address = f"unix:{root}/verifier-{os.getpid()}"
    verifier = Verifier(RandomText(case.shape), Limits(context_length=CONTEXT), EngineLimits())
    server = GrpcServer(
        address, verifier.serve, lambda: verifier.info, limits=WireLimits.for_context(CONTEXT)
    )
    await server.start()
    job = {"folder": str(folder), "verifier": address, "threads": 1, "width": 2} | case.job
    job = {"turns": 4, "prompt": 200, "tokens": 40} | job
    try:
        child = await asyncio.create_subprocess_exec(
            *joining,
            *SMALL_STACKS,
            sys.executable,
            str(HERE / "memory_device.py"),
            json.dumps(job),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await child.communicate()
    finally:
        await server.stop(0.0)
        await verifier.stop()
    if child.returncode:
        raise SystemExit(f"{case}: the device ended with {child.returncode}")
    found: dict[str, Any] = json.loads(out)
    return found


def case(shape: str, bits: int, kv_type: str, window: int, width: int = 2, chunk: int = 64) -> Case:
    """The whole window is filled; then comes a short chat."""
    job = {
        "window": window,
        "width": width,
        "chunk": chunk,
        "threads": 1,
        "fill": window,
        "turns": 2,
        "prompt": 100,
        "tokens": 20,
    }
    return Case(shape, bits, kv_type, job=job)


PREDICTED = [
    case("1M", 4, "float32", 1024),
    case("1M", 8, "float16", 2048, width=4),
    case("5M", 4, "float32", 4096),
    case("5M", 32, "float32", 512, width=1),
    case("25M", 4, "float32", 1024),
    case("25M", 8, "float16", 2048),
    case("25M", 32, "float32", 512, width=1),
    case("135M", 4, "float32", 256, width=1),
    case("135M", 4, "float32", 1536),
    case("135M", 4, "float16", 1536),
    case("135M", 4, "int8", 1536, width=4),
    case("135M", 8, "float32", 768),
    case("135M", 8, "int8", 1024, chunk=16),
    case("135M", 32, "float32", 512),
]
LARGE = [
    case("0.6B", 4, "float32", 512),
    case("0.6B", 4, "int8", 1024),
    case("0.6B", 4, "float16", 512, width=1),
]


async def predict(large: bool, root: Path) -> None:
    print("| shape | bits | KV | window | width | chunk | predicted MiB | measured MiB | error |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    errors = []
    for one in LARGE if large else PREDICTED:
        found = await measured(one, root)
        expected, peak = sum(found["terms"].values()), found["peak"]
        errors.append(expected / peak - 1.0)
        job = one.job
        print(
            f"| {one.shape} | {one.bits} | {one.kv_type} | {job['window']} | {job['width']} |"
            f" {job['chunk']} | {expected / MIB:.1f} | {peak / MIB:.1f} | {errors[-1]:+.1%} |",
            flush=True,
        )
        if os.environ.get("EDGESPEC_TERMS"):
            told = {name: round(size / MIB, 1) for name, size in found["terms"].items()}
            print(told, round(found["loaded"] / MIB, 1), round(found["closed"] / MIB, 1))
    print(
        f"\nerror of the prediction: median {statistics.median(map(abs, errors)):.1%},"
        f" from {min(errors):+.1%} to {max(errors):+.1%}"
    )


def chat(shape: str, kv_type: str, budget: str) -> Case:
    """40 turns, each of which adds 72 tokens."""
    job = {"budget": budget, "turns": 40, "prompt": 60, "tokens": 12}
    return Case(shape, 4, kv_type, job=job)


# The budget is what so long a window takes, and this much more: a little above a plan's margin.
_TRIED_WINDOW, _SPARE, _SPARE_SHARE = 384, 12 * MIB, 0.07
LIMITED = [
    ("1M", 4, "float32"),
    ("5M", 32, "float32"),
    ("25M", 4, "float32"),
    ("25M", 8, "float16"),
    ("135M", 4, "float32"),
    ("1M", 8, "float16"),
    ("5M", 4, "float32"),
    ("5M", 8, "int8"),
    ("25M", 4, "int8"),
    ("25M", 32, "float32"),
    ("135M", 4, "int8"),
    ("135M", 4, "float16"),
]


@contextlib.contextmanager
def control_group(name: str) -> Iterator[ControlGroup]:
    """Raises ``NoControlGroup`` where none can be made."""
    first = (ROOT / "memory").is_dir()
    group = ControlGroup((ROOT / "memory" if first else ROOT) / f"{name}-{os.getpid()}", 2 - first)
    try:
        group.path.mkdir()
    except OSError as error:
        raise NoControlGroup(f"{group.path}: {error.strerror}") from error
    try:
        if not group.limit_file.exists():
            raise NoControlGroup(f"{group.path}: the memory controller is not enabled here")
        yield group
    finally:
        group.path.rmdir()  # its processes have ended


async def cgroup(large: bool, root: Path, first: int = 1) -> None:
    """Each draft (from the ``first`` on) once without a limit, to know what it takes, then 40 turns
    within one."""
    print(
        "| shape | bits | KV | budget | limit | predicted | peak of process | predicted over peak |"
        " of group | at the limit | killed | wrong | steps | ms a step, longest | major faults |"
    )
    print("| --- | ---: | --- |" + " ---: |" * 12)
    for shape, bits, kv_type in [("0.6B", 4, "int8")] if large else LIMITED[first - 1 :]:
        free = await measured(case(shape, bits, kv_type, _TRIED_WINDOW), root)
        taken = sum(free["terms"].values())
        most = -(-int(taken + max(_SPARE, _SPARE_SHARE * taken)) // MIB)
        one = chat(shape, kv_type, f"{most}MiB")
        one.bits = bits
        with control_group("edgespec-memory") as group:
            one.job["group"] = {"path": str(group.path), "version": group.version}
            found = await measured(one, root, group.joining())
            expected = _planned_mib(found["told"][-1])
            print(
                f"| {shape} | {bits} | {kv_type} | {most} | {found['limit'] / MIB:.0f} |"
                f" {expected:.1f} | {found['peak'] / MIB:.1f} |"
                f" {expected * MIB / found['peak']:.3f} | {group.peak / MIB:.1f} |"
                f" {group.at_the_limit} | {group.kills} | {found['wrong']} of {found['tokens']} |"
                f" {found['steps']} | {found['step_ms']:.0f}, {found['longest_step_ms']:.0f} |"
                f" {found['major_faults']} |",
                flush=True,
            )


def _planned_mib(line: str) -> float:
    """What the plan that says ``memory: 240.1 MiB of 274.0 MiB: ...`` predicts."""
    return float(line.partition(":")[2].split()[0].replace(",", ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("predict", "cgroup"))
    parser.add_argument("--large", action="store_true", help="0.6B shapes, minutes and gigabytes")
    parser.add_argument("--from", type=int, default=1, dest="first", help="of cgroup's rows")
    parser.add_argument("--drafts", type=Path, help="keep the drafts here (default: nowhere)")
    options = parser.parse_args()
    print(machine(), versions())
    with tempfile.TemporaryDirectory() as name:
        root = options.drafts or Path(name)
        root.mkdir(parents=True, exist_ok=True)
        work = {
            "predict": predict,
            "cgroup": partial(cgroup, first=options.first),
        }[options.what]
        try:
            asyncio.run(work(options.large, root))
        except NoControlGroup as why:
            print(f"skipped: {why}")


if __name__ == "__main__":
    main()
