"""The device's side of a command: greet the verifier, then stream one generation into a view."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Final

from edgespec.cli.running import say, stoppable
from edgespec.cli.streaming import Progress, View
from edgespec.config import DEFAULT_PORT, AgentConfig
from edgespec.config.setup_error import SetupError
from edgespec.core.association.candidates import views_of
from edgespec.core.association.policies import Association, ranked
from edgespec.core.ports import LinkError, ModelInfo, UntrustedPeerError
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.borrowed_tokenizer import borrows_tokenizer, with_tokenizer
from edgespec.device.build import (
    ask_verifiers,
    tokenizer_reference,
    vocabulary_of,
    with_model_sampling,
    with_port,
)
from edgespec.device.prober import Answer
from edgespec.models.folders import BUNDLED

_UNRESOLVED: Final = re.compile("errors resolving|resolution failed|lookup (failed|error)", re.I)
"""What gRPC says of a host name for which there is no address."""


async def greet(config: AgentConfig) -> tuple[AgentConfig, ModelInfo]:
    """What the verifier serves, if it is there and fits ``config``, and ``config`` with those that
    do: of several, the one chosen is named and comes first. One without a tokenizer gets the
    verifier's. Raises ``SetupError`` saying what to run; without this a wrong address is only
    noticed after the attempts to reconnect."""
    config, info = await (_choose(config) if len(config.verifiers) > 1 else _ask(config))
    return await with_tokenizer(config, info, say), info


async def _ask(config: AgentConfig) -> tuple[AgentConfig, ModelInfo]:
    ((address, answer),) = (await ask_verifiers(config)).items()
    if answer.info is None:
        raise SetupError(no_verifier(address, answer.error or LinkError("")))
    if why := _misfit(config, answer.info, f"the verifier at {address}"):
        raise SetupError(why)
    return config, answer.info.of(config.model) or answer.info.model


async def _choose(config: AgentConfig) -> tuple[AgentConfig, ModelInfo]:
    """Those that fit come first, as the association ranks them, then those that did not answer and
    may come back."""
    answers = await ask_verifiers(config, timed=True)
    fits: dict[str, Answer] = {}
    left_out: dict[str, str] = {}
    for address, answer in answers.items():
        why = answer.why if answer.info is None else _misfit(config, answer.info, "it")
        if why is None:
            fits[address] = answer
        else:
            left_out[address] = why
    if not fits:
        lines = [f"none of {len(left_out)} verifiers can be used"]
        lines += [f"  {address}: {why}" for address, why in left_out.items()]
        raise SetupError("\n".join([*lines, "  start one:   edgespec verifier"]))
    if left_out:
        say("left out: " + "; ".join(f"{address} ({why})" for address, why in left_out.items()))
    policy = config.association
    known = [
        (address, one.info, None if one.info is None else one.info.sessions, one.rtt_s)
        for address, one in fits.items()
    ]
    order = ranked(policy, "", views_of(known))
    info, rtt_s = fits[order[0]].info, fits[order[0]].rtt_s or 0.0
    assert info is not None
    model = info.of(config.model) or info.model
    silent = [address for address in left_out if answers[address].info is None]
    config = replace(config, verifier=(*order, *silent))
    if policy is Association.RENDEZVOUS:
        count = len(config.verifiers)
        say(f"using {count} replicas ({policy.value}): each conversation has one of its own")
        return config, model
    passes = f", pass {info.pass_us / 1e3:.1f} ms" if info.pass_us else ""
    say(
        f"using {order[0]} ({policy.value}): round trip {rtt_s * 1e3:.1f} ms{passes},"
        f" {info.sessions} of {info.max_sessions} sessions"
    )
    return replace(config, association=Association.LISTED), model


def misfit(config: AgentConfig, verifier: VerifierInfo, who: str) -> str | None:
    """Why ``config`` cannot use what this verifier serves, or None."""
    if (info := verifier.of(config.model)) is None:
        known = ", ".join(repr(one.name) for one in verifier.served)
        return f"unknown model {config.model!r}: {who} serves {known}"
    if borrows_tokenizer(config):
        return None  # it will have the verifier's
    reference = tokenizer_reference(config)
    own = vocabulary_of(reference)
    if own != info.vocabulary:
        return (
            f"the tokenizer of {reference!r} (vocabulary {own}) is not that of the"
            f" verifier's {info.name!r} ({info.vocabulary}); give --draft one that"
            " shares it, or name its tokenizer: --set tokenizer=FOLDER"
        )
    return None


def _misfit(config: AgentConfig, verifier: VerifierInfo, who: str) -> str | None:
    with stoppable():  # a tokenizer on the Hub is fetched for it
        return misfit(config, verifier, who)


def for_trying(config: AgentConfig, info: ModelInfo) -> AgentConfig:
    """``config``; with the bundled pair its own sampling, where none was chosen, for greedy it says
    the same thing again and again. Who looks is told what the pair is."""
    if info.name != BUNDLED:
        return config
    if sys.stderr.isatty():
        say("bundled is a toy pair made for trying: see how it works, not what it says")
    return replace(config, sampling=with_model_sampling(config.sampling, BUNDLED))


def check_prompt(tokens: Sequence[int], info: ModelInfo) -> None:
    """Raises ``SetupError`` for a prompt that leaves no room for output."""
    if len(tokens) >= info.context_length:
        raise SetupError(
            f"the prompt has {len(tokens)} tokens, which leaves no room for output in the context"
            f" of {info.context_length} tokens of {info.name!r}"
        )


def no_verifier(address: str, error: LinkError) -> str:
    """The message for a verifier that is not there, or that does not let us in."""
    if isinstance(error, UntrustedPeerError) or not error.retryable:
        return str(error)
    host, _, port = with_port(address).rpartition(":")
    if _UNRESOLVED.search(str(error)):
        return (
            f"no machine is known by the name {host!r}\n"
            "  say where the verifier is: --verifier HOST:PORT, or EDGESPEC_VERIFIER\n"
            f"  ({error})"
        )
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
    *,
    logprobs: int = 0,
    conversation: str = "",
    model: str = "",
) -> Progress:
    """Run one generation into ``view``; ``view.end`` is called whatever happens. A ``progress``
    handed in also tells of one that was cut short."""
    progress = progress or Progress()
    try:
        generated = agent.generate(
            prompt, sampling, logprobs=logprobs, conversation=conversation, model=model
        )
        async with aclosing(generated) as chunks:
            async for chunk in chunks:
                progress.add(chunk)
                view.show(chunk)
    finally:
        view.end()
    return progress
