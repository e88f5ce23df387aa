"""A verifier that runs in this process, for notebooks and tests.

    async with edgespec.run_verifier(model="Qwen/Qwen3-0.6B") as server:
        async with edgespec.connect(server.address) as agent:
            print((await agent.complete("Once upon a time", max_tokens=64)).text)

A verifier that serves other people is the command ``edgespec verifier``: it drains, reads keys
again, and reports its metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from edgespec.config import VerifierConfig
from edgespec.core.ports import ModelInfo
from edgespec.models.toy import TOY
from edgespec.verifier.build import build_verifier, load_server_drafter, load_target


@dataclass(frozen=True, slots=True)
class LocalVerifier:
    """A verifier that listens."""

    address: str
    """``host:port``, for ``connect``."""
    model: ModelInfo
    """The target that it serves."""


@asynccontextmanager
async def run_verifier(
    model: str = "", *, port: int = 0, config: VerifierConfig | None = None
) -> AsyncIterator[LocalVerifier]:
    """Serve a target model from this process until the block is left.

    The model is loaded in a thread, so the event loop goes on.

    Args:
        model: A folder, a Hub id, ``bundled`` or ``toy``; empty: that of ``config``.
        port: The port to listen at on this machine; 0 is any free one.
        config: Every other setting. Its host and port are used if ``port`` is 0 and it names a
            port.

    Raises:
        SetupError: Something is not installed, or cannot be loaded.
        ValueError: A setting or a file cannot be used; the message names it.
        OSError: The port cannot be had.
    """
    settings = config or VerifierConfig(port=0)
    if port or config is None:
        settings = replace(settings, port=port)
    if model:
        settings = replace(settings, model=model)
    target = await asyncio.to_thread(load_target, settings)
    drafter = await asyncio.to_thread(load_server_drafter, settings, target)
    daemon, server = build_verifier(settings, target=target, drafter=drafter)
    if settings.model != TOY:  # which has nothing to warm up
        await asyncio.to_thread(daemon.warm_up)
    try:
        await server.start()
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        yield LocalVerifier(f"{host}:{server.port}", daemon.info.model)
    finally:
        await daemon.stop()
        await server.stop(0.0)
