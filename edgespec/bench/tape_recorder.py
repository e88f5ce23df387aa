"""From the texts of a bench to a match tape: the draft walks along each of them once.

The bench's target-only texts are the target's own, whatever the arms did, so they are recorded
and not generated again. The walk asks the drafter for its guesses at every position of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from edgespec.bench.arms import Arm
from edgespec.bench.report import machine, versions
from edgespec.bench.rows import Row, numbers, summarise
from edgespec.bench.workload import Workload
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.match_tape import MatchTape, TapedGeneration, Walk, walk_along

# As many guesses as any policy is likely to send; a walk costs the same for one.
TAPE_WIDTH = 8


class Progress(Protocol):
    """What is told while the tape is recorded."""

    def say(self, text: str) -> None: ...


async def record_tape(
    drafter: Drafter,
    target: str,
    workload: Workload,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    progress: Progress,
    *,
    width: int = TAPE_WIDTH,
    about: Mapping[str, str],
) -> MatchTape:
    """``texts[i]`` is what the target says to prompt i of the workload; empty ones are left out.
    The drafter must not be used meanwhile. Raises ``TapeError`` when no text is left."""
    generations = []
    context_length = drafter.info.context_length
    for number, text in enumerate(texts):
        name, prompt = workload.names[number], workload.prompts[number]
        # The walk ends where the draft's memory does, as the product's own drafting would.
        tokens = tuple(text)[: max(0, context_length - len(prompt))]
        if not tokens:
            continue
        progress.say(f"tape: {name}, {number + 1} of {len(texts)}")
        walk = await asyncio.to_thread(_walk, drafter, prompt, tokens, sampling, width)
        generations.append(TapedGeneration(name, prompt, tokens, *walk))
    return MatchTape(
        target,
        drafter.info.name,
        width,
        tuple(generations),
        tuple(sorted(workload.eos_token_ids)),
        dict(about),
    )


def tape_about(command: str, sampling: SamplingParams, prompts: str) -> dict[str, str]:
    """Whatever a reader needs to trust a tape."""
    found = machine()
    return {
        "sampling": (
            f"temperature {sampling.temperature:g}, seed {sampling.seed},"
            f" at most {sampling.max_tokens} tokens"
        ),
        "prompts": prompts,
        "machine": f"{found['processor']}, {found['cpu_count']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
        "command": command,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def tape_report(tape: MatchTape, rows: Sequence[Row]) -> str:
    """One line: what was recorded, beside what the bench's own drafting saw of the same texts."""
    positions = sum(len(generation.tokens) for generation in tape.generations)
    first, second = tape.acceptance(0), tape.acceptance(1) if tape.width > 1 else 0.0
    line = (
        f"tape: {len(tape.generations)} texts, {positions} tokens,"
        f" {first:.1%} accepted, {second:.1%} more by the second guess"
    )
    ours = [row for row in summarise(rows) if row["arm"] == Arm.EDGESPEC.value]
    seen = numbers(ours, "acceptance")
    return f"{line}; edgespec arm: {sum(seen) / len(seen):.1%} accepted" if seen else line


def _walk(
    drafter: Drafter,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: SamplingParams,
    width: int,
) -> Walk:
    drafter.begin(len(prompt), sampling)
    return walk_along(drafter.step, prompt, tokens, width)
