"""One device process for ``memory.py``: load a draft, chat with a verifier, tell what it took.

    python benchmarks/memory_device.py '{"folder": ..., "verifier": "unix:...", ...}'

Prints one JSON object. The process holds what an agent of the command line holds: the same
imports, gRPC, an event loop, the drafter behind an ``Agent``.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # noqa: F401 # counted with the runtime

import edgespec.cli.main  # noqa: F401 # counted with the runtime
from edgespec.config import DraftSection
from edgespec.core.device.goodput_policy import named_policy
from edgespec.core.device.memory import DraftSettings, memory_terms, parse_budget
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    Transport,
    never_cancelled,
)
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions
from edgespec.device.build import connect
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.model_drafter import exported_variant, planned_drafter
from edgespec.models.folders import read_config
from edgespec.telemetry.process_memory import machine_memory, peak_bytes, resident_bytes

ROOT = Path("/sys/fs/cgroup")


class NoControlGroup(RuntimeError):
    """None can be made here; the message says why."""


@dataclass(frozen=True)
class ControlGroup:
    """A group whose memory limit the kernel enforces (versions 1 and 2)."""

    path: Path
    version: int

    @property
    def limit_file(self) -> Path:
        return self.path / ("memory.limit_in_bytes" if self.version == 1 else "memory.max")

    @property
    def usage(self) -> int:
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        return int((self.path / name).read_text())

    @property
    def peak(self) -> int:
        """The most that was charged at once."""
        name = "memory.max_usage_in_bytes" if self.version == 1 else "memory.peak"
        return int((self.path / name).read_text())

    @property
    def at_the_limit(self) -> int:
        """How often the kernel had to reclaim memory of the group, as it was at its limit."""
        if self.version == 1:
            return int((self.path / "memory.failcnt").read_text())
        return self._event("max")

    @property
    def kills(self) -> int:
        """Processes that the kernel killed for want of memory."""
        return self._event("oom_kill")

    def _event(self, kind: str) -> int:
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        for line in (self.path / name).read_text().splitlines():
            if line.startswith(f"{kind} "):
                return int(line.split()[1])
        return 0

    def joining(self) -> tuple[str, ...]:
        """What goes before a command that shall run in the group."""
        return ("sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$0" "$@"')

    def set_limit(self, limit: int) -> None:
        self.limit_file.write_text(str(limit))


class Timed:
    """``inner``, with the times of its usual steps."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.step_s: list[float] = []
        self.busiest = 0

    @property
    def info(self) -> ModelInfo:
        return self.inner.info

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self.inner.begin(prompt_length, sampling)

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        started_at = time.perf_counter()
        found = self.inner.step(keep_length, feed, width, cancelled)
        if len(feed) <= 2:
            self.step_s.append(time.perf_counter() - started_at)
        self.busiest = max(self.busiest, resident_bytes())
        return found

    def close(self) -> None:
        self.inner.close()


def make_drafter(job: dict[str, Any], told: list[str]) -> Drafter:
    folder = Path(job["folder"])
    if budget := job.get("budget"):
        draft = DraftSection(model=str(folder), memory_budget=budget)
        return planned_drafter(draft, job["width"], told.append)
    window = job.get("window", 0)
    drafter = OnnxDrafter(folder, threads=job["threads"], window=window, chunk=job.get("chunk", 64))
    if window:
        drafter.restrict(window, job["width"])
    return drafter


async def chat(job: dict[str, Any], drafter: Drafter, transport: Transport) -> tuple[int, int]:
    """A conversation whose every prompt is all that was said before; the tokens generated, and how
    many of them are not the verifier's."""
    rng = np.random.default_rng(1)
    agent = Agent(
        transport,
        drafter,
        lambda text: [],
        None,  # type: ignore[arg-type] # replaced below: no text is wanted
        AgentOptions(policy=named_policy(width=job["width"]), run_ahead=RunAhead.NEVER),
    )
    agent._decoder = lambda prompt: _NoText()
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
    """The verifier's token there (``memory.py``), whatever came before."""
    return 1 + (position * 2654435761 >> 7) % (vocabulary_size - 1)


def held_hard(group: ControlGroup, budget: int, runtime: int) -> int:
    """Limit the group this process is in to ``budget``, less what the process has resident and is
    charged to others, such as libraries that were in the system's cache; the limit."""
    limit = budget - max(0, runtime - group.usage)
    group.set_limit(limit)
    return limit


class _NoText:
    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def flush(self) -> str:
        return ""


def predicted(job: dict[str, Any], runtime: int) -> dict[str, int]:
    folder = Path(job["folder"])
    variant = exported_variant(folder, read_config(folder))
    settings = DraftSettings(
        job.get("window") or variant.context_length,
        job["width"],
        job.get("chunk", 64),
        job["threads"],
    )
    return {term.name: term.bytes for term in memory_terms(variant, settings, runtime)}


def main() -> None:
    job = json.loads(sys.argv[1])
    transport = connect(job["verifier"])  # before the draft, as in an agent
    runtime = resident_bytes()
    told: list[str] = []
    limit = 0
    if group := job.get("group"):
        found = ControlGroup(Path(group["path"]), group["version"])
        most = parse_budget(job["budget"]).resolve(machine_memory())
        limit = held_hard(found, most, runtime)
    timed = Timed(make_drafter(job, told))
    loaded = resident_bytes()
    if fill := job.get("fill"):  # the whole window, whatever the chat comes to
        timed.begin(1, SamplingParams(temperature=0.7))
        timed.step(0, [1 + token % 1000 for token in range(fill)], job["width"])
    started_at = time.perf_counter()
    made, wrong = asyncio.run(chat(job, timed, transport))
    steps = timed.step_s[5:] or [0.0]
    result = {
        "runtime": runtime,
        "loaded": loaded,
        "peak": peak_bytes(),
        "busiest": timed.busiest,
        "closed": resident_bytes(),
        "tokens": made,
        "wrong": wrong,
        "limit": limit,
        "seconds": time.perf_counter() - started_at,
        "steps": len(timed.step_s),
        "step_ms": statistics.median(steps) * 1e3,
        "longest_step_ms": max(steps) * 1e3,
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        "told": told,
    }
    if not job.get("budget"):
        result["terms"] = predicted(job, runtime)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
