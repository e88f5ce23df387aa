"""The workloads whose traces a profile is fitted to: they visit what a deployment does.

Steps and passes of every size that comes up: plain streaming (one row a pass), drafts of several
widths and lengths (rows in between), sessions side by side, and prompts from a line to a page. One
session drafts at a time, as on a device; those beside it only stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Protocol

from edgespec.core.device.policy import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, AgentOptions


class OpenAgent(Protocol):
    """Makes an agent whose trace is kept; the profiling closes it."""

    def __call__(self, options: AgentOptions, *, drafts: bool) -> Agent: ...


class Progress(Protocol):
    """What is told while the workloads run."""

    def say(self, text: str) -> None: ...

    def done(self, what: str, worth_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Workload:
    """Generations of one kind; the first of ``beside`` + 1 at a time drafts."""

    name: str
    options: AgentOptions
    drafts: bool = True
    beside: int = 0
    prompt_length: int = 32
    tokens: int = 48
    repeats: int = 1


_PLAIN = AgentOptions(run_ahead=RunAhead.ALWAYS)
_PROMPT_LENGTHS = (8, 64, 128, 256, 384)


def workloads(quick: bool) -> tuple[Workload, ...]:
    """In order; the first one only warms up."""
    scale = 1 if quick else 3
    drafting = (
        ("width 1", WindowedPolicy(width=1), RunAhead.NEVER),
        ("width 2", WindowedPolicy(width=2), RunAhead.AUTO),
        ("width 4", WindowedPolicy(width=4), RunAhead.NEVER),
        ("draft, send, wait", FixedPolicy(4), RunAhead.NEVER),
        ("pre-verify", PearlPolicy(), RunAhead.NEVER),
    )
    return (
        Workload("warm-up", AgentOptions(), tokens=8),
        Workload("plain streaming", _PLAIN, drafts=False, repeats=2 * scale),
        *(
            Workload(f"drafting, {name}", AgentOptions(policy, run_ahead), repeats=scale)
            for name, policy, run_ahead in drafting
        ),
        *(
            Workload(f"{count} sessions at once", AgentOptions(), beside=count - 1, repeats=scale)
            for count in (2, 4, 8, 16)
        ),
        *(
            Workload(
                f"prompts of {length} tokens",
                AgentOptions(),
                prompt_length=length,
                tokens=12,
                repeats=2 + scale,
            )
            for length in _PROMPT_LENGTHS
        ),
    )


def worth(workload: Workload) -> float:
    """How long it takes, in tokens of one session."""
    return workload.repeats * (workload.tokens * (1 + workload.beside / 4) + 4)


async def run_workloads(
    plan: Sequence[Workload],
    text: Sequence[int],
    context_length: int,
    open_agent: OpenAgent,
    progress: Progress,
) -> None:
    """Play them in order; prompts are cut from ``text``, which is repeated as often as needed.
    Prompts that do not fit into the context are left out. Raises ``GenerationError``."""
    for workload in plan:
        if workload.prompt_length + workload.tokens <= context_length:
            progress.say(f"profile: {workload.name}")
            for repeat in range(workload.repeats):
                await _play(workload, repeat, text, open_agent)
        progress.done(workload.name, worth(workload))


async def _play(
    workload: Workload, repeat: int, text: Sequence[int], open_agent: OpenAgent
) -> None:
    agents = [open_agent(workload.options, drafts=workload.drafts)]
    agents += [open_agent(_PLAIN, drafts=False) for _ in range(workload.beside)]
    # The end token would make lengths a matter of the text.
    sampling = SamplingParams(max_tokens=workload.tokens, ignore_eos=True)
    try:
        await asyncio.gather(
            *(
                _generate(agent, _prompt(text, 7 * repeat + number, workload), sampling)
                for number, agent in enumerate(agents)
            )
        )
    finally:
        for agent in agents:
            await agent.close()


async def _generate(agent: Agent, prompt: tuple[int, ...], sampling: SamplingParams) -> None:
    async for _ in agent.generate(prompt, sampling):
        pass


def _prompt(text: Sequence[int], number: int, workload: Workload) -> tuple[int, ...]:
    """Another beginning for each number."""
    start = 11 * number % len(text)
    return tuple(islice(cycle(text), start, start + workload.prompt_length))
