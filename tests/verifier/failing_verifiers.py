"""Two verifiers that can fail, and a device that has both in its list: shared by the tests of
failover."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace

from edgespec.config import AgentConfig, DraftSection, PacingSection, VerifierConfig
from edgespec.core.association.failover import FailoverPolicy
from edgespec.core.association.policies import Association
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.models.toy import ToyTokenizer
from edgespec.wire.access import ServerAccess
from tests.kit.gate import Gate
from tests.kit.live_verifier import serve_toy, toy_text

TEXT = ToyTokenizer()
PROMPT = "once upon a time"
PARAMS = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.8, seed=3)
EXPECTED = toy_text(TEXT.encode(PROMPT), PARAMS)
PATIENT = ReconnectPolicy(first_s=0.02, longest_s=0.1, give_up_first_s=60.0, give_up_s=60.0)
HASTY = replace(PATIENT, give_up_first_s=1.0, give_up_s=1.0)
WITHIN_S = 60.0
PACED = VerifierConfig(model="toy", port=0, pacing=PacingSection(2.0))
# This policy never suspects a slow verifier, since all are slow on a busy machine.
STEADY = FailoverPolicy(hedge_s=60.0, quiet_s=60.0, probe_s=60.0)
# This policy suspects quickly, for tests of silent verifiers.
WARY = FailoverPolicy(hedge_s=0.05, quiet_s=0.2, probe_s=0.3)


@contextlib.asynccontextmanager
async def run_behind_gates(
    count: int, targets: Sequence[TargetModel | None] = (), access: ServerAccess | None = None
) -> AsyncIterator[list[tuple[Gate, int]]]:
    """Run verifiers in this process, each behind a gate; yield the gates with their ports."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for number in range(count):
            target = targets[number] if number < len(targets) else None
            last = access if number == count - 1 else None
            serve = serve_toy(target, config=PACED, access=last)
            address, _ = await stack.enter_async_context(serve)
            port = int(address.rpartition(":")[2])
            found.append((await stack.enter_async_context(Gate(port)), port))
        yield found


def make_agent(
    *addresses: str,
    draft: str = "toy",
    reconnect: ReconnectPolicy = PATIENT,
    failover: FailoverPolicy = STEADY,
    association: Association = Association.LISTED,
) -> Agent:
    return build_agent(
        AgentConfig(
            verifier=addresses,
            tokenizer="toy",
            draft=DraftSection(model=draft),
            reconnect=reconnect,
            failover=failover,
            association=association,
        )
    )


async def collect(one: Agent, at: Mapping[int, Callable[[], object]] | None = None) -> list[int]:
    """Return the tokens of one generation. ``at`` maps a count of received tokens to a function
    that is called then."""
    tokens: list[int] = []
    todo = dict(at or {})
    async with asyncio.timeout(WITHIN_S):
        async for chunk in one.generate(PROMPT, PARAMS):
            tokens += chunk.tokens
            for count in [count for count in todo if count <= len(tokens)]:
                todo.pop(count)()
    return tokens
