"""Measure the cost of a draft to a device: memory, predicted against measured and compared with
budgets, and the time of a step.

    python benchmarks/memory.py predict [--large]   model sizes, precisions, contexts and widths
    python benchmarks/memory.py cgroup [--large]   chats in a group with a hard limit
    python benchmarks/memory.py step [--shape 0.6B]   of the bundled draft, or of random weights

Every row of the first two is a fresh process with the content of an agent of the command line. It
chats over gRPC with a verifier in this process, whose text is made of random tokens. Drafts have
random weights in real models' shapes (``make_draft``); ``--large`` adds those of Qwen3-0.6B, which
take a gigabyte and minutes. Steps of 4 and 8 bits and float32 are timed in turns.
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
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# These imports are what a device's process holds; a function here that needs more imports it
# itself.
import edgespec.cli.main  # noqa: F401 # counted with the runtime
from edgespec.config import DraftSection
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.memory import MIB, DraftSettings, KvType, memory_terms, parse_budget
from edgespec.core.ports import Drafter, ModelInfo, SimpleTarget, Transport
from edgespec.core.protocol.messages import Limits, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest, PassResult
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.device.drafters.manifest import DraftManifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.model_drafter import load_planned_drafter, read_exported_variant
from edgespec.models import folders
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.telemetry.process_memory import machine_memory, resident_bytes

CONTEXT = 8192
# A hard limit counts the stacks of a process's threads whether they are used or not.
SMALL_STACKS = ("sh", "-c", 'ulimit -S -s 1024; exec "$0" "$@"')


# --- the device's process ------------------------------------------------------------------------

ROOT = Path("/sys/fs/cgroup")


class NoControlGroup(RuntimeError):
    """No control group can be made here; the message states why."""


@dataclass(frozen=True)
class ControlGroup:
    """A group whose memory limit the kernel enforces (versions 1 and 2)."""

    path: Path
    version: int

    def file(self, first: str, second: str) -> Path:
        """Return the file by its name in version 1 or in version 2."""
        return self.path / f"memory.{(first, second)[self.version - 1]}"

    @property
    def limit_file(self) -> Path:
        return self.file("limit_in_bytes", "max")

    @property
    def usage(self) -> int:
        return int(self.file("usage_in_bytes", "current").read_text())

    @property
    def peak(self) -> int:
        """Return the most bytes that were charged at once."""
        return int(self.file("max_usage_in_bytes", "peak").read_text())

    @property
    def killed(self) -> int:
        """Count the processes that the kernel killed for want of memory."""
        lines = self.file("oom_control", "events").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def joining(self) -> tuple[str, ...]:
        """Return the prefix of a command that shall run in the group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"')


def make_drafter(job: dict[str, Any], told: list[str]) -> Drafter:
    folder = Path(job["folder"])
    if budget := job.get("budget"):
        draft = DraftSection(model=str(folder), memory_budget=budget)
        source = resolve_source(draft.model, Purpose.DRAFT)
        return load_planned_drafter(draft, source, job["width"], told.append)
    window = job.get("window", 0)
    drafter = OnnxDrafter(folder, threads=job["threads"], window=window, chunk=job.get("chunk", 64))
    if window:
        drafter.restrict(window, job["width"])
    return drafter


async def converse(job: dict[str, Any], drafter: Drafter, transport: Transport) -> tuple[int, int]:
    """Hold a conversation in which every prompt contains all text so far. Return the number of
    generated tokens, and of tokens that are not the verifier's."""
    rng = np.random.default_rng(1)
    options = AgentOptions(policy=make_policy(width=job["width"]), run_ahead=RunAhead.NEVER)
    agent = Agent(transport, drafter, lambda text: [], lambda prompt: _NoText(), options)
    history: list[int] = []
    made = wrong = 0
    try:
        for turn in range(job["turns"]):
            new = rng.integers(1, drafter.info.vocabulary_size, job["prompt"])
            history += [int(token) for token in new]
            sampling = SamplingParams(temperature=0.7, seed=turn, max_tokens=job["tokens"])
            async for chunk in agent.generate(history, sampling):
                size = drafter.info.vocabulary_size
                wanted = [random_token(len(history) + at, size) for at in range(len(chunk.tokens))]
                wrong += sum(a != b for a, b in zip(chunk.tokens, wanted, strict=True))
                history += chunk.tokens
                made += len(chunk.tokens)
    finally:
        await agent.close()
    return made, wrong


def random_token(position: int, vocabulary_size: int) -> int:
    """Return the verifier's token at a position, whatever came before."""
    return 1 + (position * 2654435761 >> 7) % (vocabulary_size - 1)


def held_hard(group: ControlGroup, budget: int, runtime: int) -> int:
    """Limit the group of this process to ``budget``, less the resident memory that is charged to
    others, such as libraries in the system's cache; return the limit."""
    limit = budget - max(0, runtime - group.usage)
    group.limit_file.write_text(str(limit))
    return limit


class _NoText:
    """A vocabulary without text, for tokens alone."""

    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def predicted(job: dict[str, Any], runtime: int) -> dict[str, int]:
    folder = Path(job["folder"])
    variant = read_exported_variant(folder)
    settings = DraftSettings(
        job.get("window") or variant.context_length,
        job["width"],
        job.get("chunk", 64),
        job["threads"],
    )
    return {term.name: term.bytes for term in memory_terms(variant, settings, runtime)}


def be_device(job: dict[str, Any]) -> None:
    """Load a draft, chat with a verifier, and print a JSON object with the memory it took."""
    transport = connect(job["verifier"])  # before the draft, as in an agent
    runtime = resident_bytes()
    told: list[str] = []
    limit = 0
    if group := job.get("group"):
        found = ControlGroup(Path(group["path"]), group["version"])
        most = parse_budget(job["budget"]).resolve(machine_memory())
        limit = held_hard(found, most, runtime)
    drafter = make_drafter(job, told)
    if fill := job.get("fill"):  # the whole window, whatever the chat needs
        drafter.begin(1, SamplingParams(temperature=0.7))
        drafter.step(0, [1 + token % 1000 for token in range(fill)], job["width"])
    made, wrong = asyncio.run(converse(job, drafter, transport))
    result = {
        # The kernel reports in kilobytes the most that this process ever had resident.
        "peak": 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]),
        "tokens": made,
        "wrong": wrong,
        "limit": limit,
        "told": told,
    }
    if not job.get("budget"):
        result["terms"] = predicted(job, runtime)
    print(json.dumps(result))


# --- the verifier of it ---------------------------------------------------------------------------


class RandomText(SimpleTarget):
    """A target whose token at each position is a hash of it, whatever came before."""

    mode = "random"

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
        size = self._info.vocabulary_size
        return PassResult(request.key, tuple(random_token(at, size) for at in positions))


# --- drafts of real models' shapes: memory depends on sizes alone, so the weights are random ------

# hidden, layers, heads, key/value heads, head size, feed forward, vocabulary, kind
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, str]] = {
    "1M": (192, 3, 3, 1, 64, 512, 4096, "llama"),
    "5M": (256, 6, 4, 2, 64, 704, 8192, "llama"),
    "25M": (448, 8, 7, 1, 64, 1216, 16384, "llama"),
    "135M": (576, 30, 9, 3, 64, 1536, 49152, "llama"),
    "0.6B": (1024, 28, 16, 8, 128, 3072, 151936, "qwen3"),
}
"""The shapes are the bundled draft's, two between, SmolLM2-135M's and Qwen3-0.6B's."""


class _RandomCheckpoint:
    """A checkpoint that returns every requested tensor, filled with small random numbers; no
    biases."""

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


def _random_matrix(weight: NDArray[np.float32], bits: int) -> object:
    """Return a random matrix. No two are alike, because the runtime keeps equal ones once."""
    from edgespec.models.weight_blocks import BLOCK_SIZE

    rows, columns = weight.shape
    blocks = -(-columns // BLOCK_SIZE)
    rng = np.random.default_rng(int(abs(weight[0, 0]) * 1e9))
    packed = rng.integers(0, 256, (rows, blocks, BLOCK_SIZE * bits // 8), dtype=np.uint8)
    sizes = rng.uniform(0.5, 1.5, (rows, blocks)) * rng.choice((-1.0, 1.0), (rows, blocks))
    scales = (sizes * 0.06 / (1 << bits)).astype(np.float16).astype(np.float32)
    return packed, scales


def config_of(name: str, context_length: int) -> dict[str, Any]:
    """Return the ``config.json`` of a shape."""
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
    from unittest import mock

    from edgespec.device.export import export
    from edgespec.models import weight_blocks

    source = folder.parent / f"{folder.name}.source"
    source.mkdir(parents=True, exist_ok=True)
    (source / "config.json").write_text(json.dumps(config_of(name, context_length)))
    info = ModelInfo(name, f"random-{name}", SHAPES[name][6], context_length)
    with (
        mock.patch.object(export, "Checkpoint", _RandomCheckpoint),
        mock.patch.object(folders, "model_info", return_value=info),
        mock.patch.object(folders, "token_count", return_value=0),
        mock.patch.object(weight_blocks, "quantize_matrix", _random_matrix),
    ):
        return export.export_draft(
            source, folder, bits=bits, context_length=context_length, kv_type=kv_type
        )


# --- the memory of a device process ---------------------------------------------------------------


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
    """Return the measurements of one fresh device process; ``joining`` goes before its command."""
    from edgespec.core.verifier.engine_events import EngineLimits
    from edgespec.verifier.daemon import Verifier
    from edgespec.wire.codec import WireLimits
    from edgespec.wire.grpc_server import GrpcServer

    folder = root / case.folder
    if not (folder / "edgespec.json").exists():
        make_draft(
            folder,
            case.shape,
            bits=case.bits,
            context_length=case.context,
            kv_type=KvType(case.kv_type),
        )
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
            *(*joining, *SMALL_STACKS, *PYTHON, DEVICE, json.dumps(job)),
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
    """Return a case in which the whole window is filled before a short chat."""
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
    print(
        f"\nerror of the prediction: median {statistics.median(map(abs, errors)):.1%},"
        f" from {min(errors):+.1%} to {max(errors):+.1%}"
    )


def chat(shape: str, kv_type: str, budget: str) -> Case:
    """Return a case of 40 turns, each of which adds 72 tokens."""
    job = {"budget": budget, "turns": 40, "prompt": 60, "tokens": 12}
    return Case(shape, 4, kv_type, job=job)


# The budget is the memory of this window, and this much more: a little above a plan's margin.
_TRIED_WINDOW, _SPARE, _SPARE_SHARE = 384, 16 * MIB, 0.07
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
    """Make a control group. Raises ``NoControlGroup`` if none can be made."""
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


async def cgroup(large: bool, root: Path) -> None:
    """Run each draft once without a limit, to measure its memory, then 40 turns within one."""
    print(
        "| shape | bits | KV | budget | limit | predicted | peak of process | predicted over peak |"
        " of group | killed | wrong |"
    )
    print("| --- | ---: | --- |" + " ---: |" * 8)
    for shape, bits, kv_type in [("0.6B", 4, "int8")] if large else LIMITED:
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
                f" {group.killed} | {found['wrong']} of {found['tokens']} |",
                flush=True,
            )


def _planned_mib(line: str) -> float:
    """Return the prediction in a plan's line ``memory: 240.1 MiB of 274.0 MiB: ...``."""
    return float(line.partition(":")[2].split()[0].replace(",", ""))


# --- the time of a step --------------------------------------------------------------------------


def step(shape: str, rounds: int, cached: int = 300) -> None:
    """Print the medians of step times, with the tenth and the ninetieth percentile."""
    from edgespec.device.export.export import export_draft

    sampling, samples = SamplingParams(max_tokens=64), dict[str, list[float]]()
    with tempfile.TemporaryDirectory() as scratch:
        drafters: dict[str, OnnxDrafter] = {}
        for bits in (4, 8, 32):
            out = Path(scratch) / str(bits)
            if shape:
                make_draft(out, shape, bits=bits)
            else:
                source = resolve_source("bundled", Purpose.DRAFT).folder
                export_draft(source, out, bits=bits)
            size_mb = (out / "model.onnx").stat().st_size / 1e6
            name = f"{bits:2d} bits ({size_mb:.1f} MB)"
            drafters[name] = OnnxDrafter(out)
            drafters[name].begin(cached, sampling)
            drafters[name].step(0, list(range(3, 3 + cached)), 2)
        for number in range(rounds + 2):
            for name, drafter in drafters.items():
                began_s = time.perf_counter()
                drafter.step(cached - 1, [7], 2)
                if number >= 2:  # the first rounds warm up
                    samples.setdefault(name, []).append(1e3 * (time.perf_counter() - began_s))
    for name, found in samples.items():
        low, *_, high = statistics.quantiles(found, n=10)
        print(f"{name:20s} {statistics.median(found):7.2f} ms a step ({low:.2f} to {high:.2f})")


# --- the command ---------------------------------------------------------------------------------

DEVICE = "device"
"""First argument of the process that this program starts for each row."""
PYTHON = (sys.executable, str(Path(__file__).resolve()))


def main() -> None:
    if sys.argv[1:2] == [DEVICE]:
        return be_device(json.loads(sys.argv[2]))
    from edgespec.bench.report import describe_machine, list_versions

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("predict", "cgroup", "step"))
    parser.add_argument("--large", action="store_true", help="0.6B shapes, minutes and gigabytes")
    parser.add_argument("--shape", default="", choices=("", *SHAPES), help="of step's draft")
    parser.add_argument("--rounds", type=int, default=400, help="of steps")
    options = parser.parse_args()
    print(describe_machine(), list_versions(), sep="\n")
    if options.what == "step":
        return step(options.shape, options.rounds)
    with tempfile.TemporaryDirectory() as name:
        work = predict if options.what == "predict" else cgroup
        try:
            asyncio.run(work(options.large, Path(name)))
        except NoControlGroup as why:
            print(f"skipped: {why}")


if __name__ == "__main__":
    main()
