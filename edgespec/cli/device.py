"""The device's side of a command: greet the verifier, then stream one generation into a view."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from edgespec.agent.agent import Agent
from edgespec.cli.streaming import Progress, View
from edgespec.compose import (
    SetupError,
    connect,
    tokenizer_reference,
    vocabulary_of,
    with_port,
)
from edgespec.config import DEFAULT_PORT, AgentConfig
from edgespec.core.sampling import SamplingParams
from edgespec.ports import LinkError, ModelInfo


async def greet(config: AgentConfig) -> ModelInfo:
    """What the verifier serves, if it is there and fits ``config``. Raises ``SetupError`` saying
    what to run; without this a wrong address is only noticed after the attempts to reconnect."""
    transport = connect(config.verifier)
    try:
        info = (await transport.info()).model
    except LinkError as error:
        raise SetupError(no_verifier(config.verifier, error)) from error
    finally:
        await transport.close()
    if config.model and config.model != info.name:
        raise SetupError(
            f"unknown model {config.model!r}: the verifier at {with_port(config.verifier)} serves"
            f" {info.name!r}"
        )
    reference = tokenizer_reference(config)
    own = vocabulary_of(reference)
    if own != info.vocabulary:
        raise SetupError(
            f"the tokenizer of {reference!r} (vocabulary {own}) is not that of the"
            f" verifier's {info.name!r} ({info.vocabulary}); give --draft or --tokenizer one that"
            " shares it"
        )
    return info


def check_prompt(tokens: Sequence[int], info: ModelInfo) -> None:
    """Raises ``SetupError`` for a prompt that leaves no room for output."""
    if len(tokens) >= info.context_length:
        raise SetupError(
            f"the prompt has {len(tokens)} tokens, which leaves no room for output in the context"
            f" of {info.context_length} tokens of {info.name!r}"
        )


def no_verifier(address: str, error: LinkError) -> str:
    """The message for a verifier that is not there."""
    port = with_port(address).rpartition(":")[2]
    option = "" if port == str(DEFAULT_PORT) else f" --port {port}"
    return (
        f"no verifier answers at {with_port(address)}\n"
        f"  start one:   edgespec verifier{option}\n"
        "  or say where it is: --verifier HOST:PORT, or EDGESPEC_VERIFIER\n"
        f"  ({error})"
    )


async def stream(
    agent: Agent,
    prompt: str | Sequence[int],
    sampling: SamplingParams,
    view: View,
    progress: Progress | None = None,
) -> Progress:
    """Run one generation into ``view``; ``view.end`` is called whatever happens. A ``progress``
    handed in also tells of one that was cut short."""
    progress = progress or Progress()
    try:
        async with aclosing(agent.generate(prompt, sampling)) as chunks:
            async for chunk in chunks:
                progress.add(chunk)
                view.show(chunk)
    finally:
        view.end()
    return progress
