"""Makes a match tape of a bench's outputs, for ``edgespec bench --record-tape`` and ``--theory``.

The outputs of the bench's target-only arm are the target's own, whatever the other arms did, so
they are recorded and not generated again. The draft model runs along each of them once and proposes
its candidates at every position.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import Row, numbers, summarise
from edgespec.bench.prompts import Workload
from edgespec.bench.theory import ComparedText, Place, TheoryRecorder
from edgespec.core.ports import Candidate, Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec_sim.token_sources.match_tape import Agreement, MatchTape, TapedGeneration, walk_along

# More candidates than any policy is likely to send; the walk costs the same for one.
TAPE_WIDTH = 8


async def record_tape(
    drafter: Drafter,
    target: str,
    workload: Workload,
    texts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    say: Callable[[str], None],
    *,
    width: int = TAPE_WIDTH,
    about: Mapping[str, str],
    recorder: TheoryRecorder | None = None,
) -> MatchTape:
    """Record the draft's agreement with the target along ``texts``; empty ones are left out.

    ``texts[i]`` is the target's output for prompt i of the workload. ``recorder`` compares both
    models' laws along them. The drafter must not be used meanwhile. Raises ``TapeError`` if no text
    is left."""

    def walk(name: str, prompt: Sequence[int], tokens: Sequence[int]) -> Agreement:
        drafter.begin(len(prompt), sampling)
        if recorder is None:
            return walk_along(drafter.step, prompt, tokens, width)
        laws, places = recorder.places(prompt, tokens), list[Place]()

        def step(keep: int, feed: Sequence[int], width: int) -> Sequence[Candidate]:
            found = drafter.step(keep, feed, width)
            places.append(next(laws))
            return found

        found = walk_along(step, prompt, tokens, width)
        ranked = [one._replace(rank=rank) for one, rank in zip(places, found.ranks, strict=True)]
        recorder.texts.append(ComparedText(name, tuple(ranked)))
        return found

    generations = []
    context_length = drafter.info.context_length
    for number, text in enumerate(texts):
        name, prompt = workload.names[number], workload.prompts[number]
        # The walk ends at the draft's context length, as the product's own drafting would.
        tokens = tuple(text)[: max(0, context_length - len(prompt))]
        if not tokens:
            continue
        what = "tape" if recorder is None else "laws along the text"
        say(f"{what}: {name}, {number + 1} of {len(texts)}")
        found = await asyncio.to_thread(walk, name, prompt, tokens)
        generations.append(TapedGeneration(name, prompt, tokens, *found))
    ends = tuple(sorted(workload.eos_token_ids))
    return MatchTape(target, drafter.info.name, width, tuple(generations), ends, dict(about))


def tape_report(tape: MatchTape, rows: Sequence[Row]) -> str:
    """Describe in one line what was recorded, beside what the bench's own drafting saw of these
    outputs."""
    positions = sum(len(generation.tokens) for generation in tape.generations)
    first, second = tape.acceptance(0), tape.acceptance(1) if tape.width > 1 else 0.0
    line = (
        f"tape: {len(tape.generations)} texts, {positions} tokens,"
        f" {first:.1%} accepted, {second:.1%} more by the second guess"
    )
    ours = [row for row in summarise(rows) if row["arm"] == Arm.EDGESPEC.value]
    seen = numbers(ours, "acceptance")
    return f"{line}; edgespec arm: {sum(seen) / len(seen):.1%} accepted" if seen else line
