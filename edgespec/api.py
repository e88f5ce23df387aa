"""The Python API: ``connect`` for asyncio, ``SyncAgent`` for everyone else.

async with edgespec.connect("localhost:7420") as agent:
    async for chunk in agent.generate("def fibonacci(n):"):
        print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from typing import Any, Self, TypeVar

from edgespec.config import DEFAULT_ADDRESS, AgentConfig, DraftSection, PolicySection, load_config
from edgespec.config.common import SetupError
from edgespec.core.device.events import TokenKind
from edgespec.core.device.goodput_policy import DEFAULT_POLICY
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.constraint import Constraint, ConstraintError, ConstraintKind
from edgespec.core.protocol.messages import EXACT_RULE, FinishReason, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import TokenScore
from edgespec.device.agent import Agent, Chunk, GenerationError, GenerationStats
from edgespec.device.build import build_agent

__all__ = [
    "Agent",
    "AgentConfig",
    "Chunk",
    "Constraint",
    "ConstraintError",
    "ConstraintKind",
    "FinishReason",
    "GenerationError",
    "SamplingParams",
    "SetupError",
    "SyncAgent",
    "TokenKind",
    "TokenScore",
    "connect",
]

_T = TypeVar("_T")


def connect(
    address: str | Sequence[str] = DEFAULT_ADDRESS,
    *,
    draft: str = DraftSection().model,
    tokenizer: str = "",
    model: str = "",
    rule: str = EXACT_RULE,
    policy: str = DEFAULT_POLICY.value,
    gamma: int | None = None,
    width: int = PolicySection().width,
    window: int | None = None,
    run_ahead: str = RunAhead.AUTO.value,
    rtt_ms: float = 0.0,
    draft_ms: float = 0.0,
    tls: bool = False,
    ca: str = "",
    client_cert: str = "",
    client_key: str = "",
    server_name: str = "",
    api_key_file: str = "",
    insecure: bool = False,
) -> Agent:
    """An agent for the verifier at ``address`` ("host:port" or "unix:path"), or for several: the
    best one is used, and when it fails in the middle of a text, the text goes on at another.

    Loads the draft model now; the first generation connects. ``draft`` is ``bundled``, a folder, a
    Hub id, ``lookup`` to guess from the text without a model, or ``none`` to only stream. The first
    generation takes the target's tokenizer from the verifier, unless ``tokenizer`` names one;
    ``model``
    asks for a target or an adapter by name, unless a text asks for another one
    (``Agent.generate``), and so does ``rule`` for a LOSSY acceptance rule; ``rtt_ms`` and
    ``draft_ms`` emulate a longer link and a slower device.
    ``tls`` encrypts and trusts the system's CAs, ``ca`` names a file of others; ``client_cert`` and
    ``client_key`` are for a verifier that asks for them. The key for a verifier that wants one
    comes from ``EDGESPEC_API_KEY`` or ``api_key_file``, and goes over TLS or loopback only, unless
    ``insecure``. Use as ``async with``.

    Raises ``SetupError`` when something is not installed, ``ValueError`` naming the setting or the
    file. ``AgentConfig`` and ``edgespec.device.build.build_agent`` reach every other setting.
    """
    settings = {
        "verifier": address if isinstance(address, str) else list(address),
        "model": model,
        "rule": rule,
        "tokenizer": tokenizer,
        "draft.model": draft,
        "draft.draft_ms": draft_ms,
        "link.rtt_ms": rtt_ms,
        "policy.name": policy,
        "policy.gamma": gamma,
        "policy.width": width,
        "policy.window": window,
        "policy.run_ahead": run_ahead,
        "tls.enabled": tls,
        "tls.ca": ca,
        "tls.client_cert": client_cert,
        "tls.client_key": client_key,
        "tls.server_name": server_name,
        "api_key_file": api_key_file,
        "insecure": insecure,
    }
    config = load_config(AgentConfig, None, settings, overrides_from="connect")
    from edgespec.device.borrowed_tokenizer import BorrowingAgent, takes_target_texts

    return BorrowingAgent(config) if takes_target_texts(config) else build_agent(config)


class SyncAgent:
    """``connect`` without asyncio: the same arguments, and plain ``for`` loops.

    An event loop runs in a thread of its own. Use as a context manager, or call ``close``. One
    object may be used from several threads.
    """

    def __init__(self, address: str | Sequence[str] = DEFAULT_ADDRESS, **settings: Any) -> None:
        self._agent = connect(address, **settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="edgespec-agent", daemon=True
        )
        self._thread.start()

    @property
    def stats(self) -> GenerationStats | None:
        """Of the generation started last."""
        return self._agent.stats

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        logprobs: int = 0,
        conversation: str = "",
        model: str = "",
        rule: str = "",
    ) -> Generator[Chunk, None, None]:
        """Stream the target's text. Leaving the loop early cancels the generation.

        Raises ``GenerationError`` as ``Agent.generate`` does.
        """
        text = self._agent.generate(
            prompt, sampling, logprobs=logprobs, conversation=conversation, model=model, rule=rule
        )
        reader = _Reader(text)
        try:
            while (chunk := self._call(reader.next())) is not None:
                yield chunk
        finally:
            self._call(reader.close())

    def models(self) -> tuple[ModelInfo, ...]:
        """What ``generate`` can be asked for now; as ``Agent.models``."""
        return self._call(self._agent.models())

    def close(self) -> None:
        """End what runs and stop the thread; a second call does nothing."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._agent.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, _T]) -> _T:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the agent is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # a Ctrl-C here must not leave the work running there
            future.cancel()
            raise


class _Reader:
    """Reads the events of one generation in the loop's thread, for a caller in another one."""

    def __init__(self, events: AsyncGenerator[Chunk, None]) -> None:
        self._events = events
        self._reading: asyncio.Task[Any] | None = None

    async def next(self) -> Chunk | None:
        """None: there is no further one."""
        self._reading = asyncio.current_task()
        try:
            return await anext(self._events, None)
        finally:
            self._reading = None

    async def close(self) -> None:
        """End the generation, and first a read that its caller has left with a Ctrl-C: a generator
        that still tidies up cannot be closed."""
        if (reading := self._reading) is not None:
            reading.cancel()
            await asyncio.wait([reading])
        await self._events.aclose()
