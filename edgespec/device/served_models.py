"""Which models the verifiers of an agent serve, asked of them now."""

from __future__ import annotations

import asyncio

from edgespec.core.ports import LinkError, ModelInfo, Transport
from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.device.verifier_pool import VerifierPool

_WITHIN_S = 3.0


async def served_models(transport: Transport | VerifierPool) -> tuple[ModelInfo, ...]:
    """Each by its name, adapters too, as the verifiers tell them that answer. Raises ``LinkError``
    where none does."""
    if isinstance(transport, VerifierPool):
        links = list((await transport.known()).values())
    else:
        links = [transport]
    answers = await asyncio.gather(*map(_ask, links))
    told = [one for one in answers if isinstance(one, VerifierInfo)]
    if not told:
        raise LinkError("; ".join(str(one) for one in answers) or "no verifier is known")
    found: dict[str, ModelInfo] = {}
    for info in told:
        for model in info.served:
            found.setdefault(model.name, model)
    return tuple(found.values())


async def _ask(link: Transport) -> VerifierInfo | str:
    """What it serves, or why it is not known."""
    try:
        async with asyncio.timeout(_WITHIN_S):
            return await link.info()
    except TimeoutError:
        return f"no answer within {_WITHIN_S:g} s"
    except LinkError as error:
        return one_line(str(error))
