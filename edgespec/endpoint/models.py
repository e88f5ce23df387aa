"""Whether the verifiers are there, asked now and then, and which models they serve, by name.

Generations do not wait for this: the agent dials by itself. A name is one model's: that of a
verifier, or of an adapter beside it. Verifiers may serve different ones; the agent takes a request
to one that serves what it names.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from edgespec.core.ports import ModelInfo, Transport
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.device.agent import fits_on_wire
from edgespec.device.prober import ask
from edgespec.endpoint.request_json import no_such_model

_NEW_S: Final = 1.0
"""What was told is new for so long."""
_status_log = logging.getLogger(__name__)


class Presence(Enum):
    UNKNOWN = "unknown"
    READY = "ready"
    AWAY = "away"
    REFUSES = "refuses"
    """It is there and lets us not in, or it is not who it should be."""
    MISFIT = "misfit"
    """It serves a model that this device cannot use."""


@dataclass(frozen=True, slots=True)
class VerifierPresence:
    """What is known of one verifier. ``info`` is what it said last."""

    address: str
    presence: Presence = Presence.UNKNOWN
    info: VerifierInfo | None = None
    why: str = ""
    """Why it cannot be used; empty: it can."""
    rtt_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"address": self.address, "state": self.presence.value}
        if self.info is not None:
            found["model"] = self.info.model.name
            if self.info.adapters:
                found["adapters"] = [one.name for one in self.info.adapters]
            found["context_length"] = context_of(self.info)
            found["sessions"] = self.info.sessions
            found["max_sessions"] = self.info.max_sessions
        if self.why:
            found["why"] = self.why
        return found


class VerifierWatch:
    """Asks all verifiers every ``every_s``, or every ``away_every_s`` while none is ready.
    ``misfit`` says why what one serves is of no use here. Close it in the end."""

    def __init__(
        self,
        transports: Mapping[str, Transport],
        misfit: Callable[[VerifierInfo], str | None] = lambda info: None,
        *,
        every_s: float = 15.0,
        away_every_s: float = 2.0,
    ) -> None:
        self._transports, self._misfit = dict(transports), misfit
        self._every_s, self._away_every_s = every_s, away_every_s
        self.statuses = tuple(VerifierPresence(address) for address in transports)
        """One each, in the order given."""
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._looked_at = -math.inf
        self._one_at_a_time = asyncio.Lock()

    @property
    def ready(self) -> bool:
        return any(one.presence is Presence.READY for one in self.statuses)

    @property
    def known(self) -> VerifierInfo | None:
        """What a verifier that fits said: one that is there, else the last that was."""
        return next(iter(self.told), None)

    @property
    def told(self) -> tuple[VerifierInfo, ...]:
        """What the verifiers that fit said: those that are there, then those that were."""
        order = sorted(self.statuses, key=lambda one: one.presence is not Presence.READY)
        fits = [one for one in order if one.presence is not Presence.MISFIT]
        return tuple(one.info for one in fits if one.info is not None)

    async def look(self) -> None:
        asked = [self._ask(status) for status in self.statuses]
        self.statuses = tuple(await asyncio.gather(*asked))
        self._looked_at = time.monotonic()

    async def look_anew(self) -> None:
        """What is known may be old, and somebody waits: ask, unless that was done just now."""
        async with self._one_at_a_time:
            if time.monotonic() - self._looked_at >= _NEW_S:
                await self.look()

    def start(self) -> None:
        self._task = asyncio.create_task(self._forever())

    def hurry(self) -> None:
        """What is known may be old: look soon."""
        self._hurry.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        links = [one.close() for one in self._transports.values()]
        await asyncio.gather(*links, return_exceptions=True)

    async def _forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self.ready else self._away_every_s):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self.look()
            except Exception:  # a look that fails must not be the last one
                _status_log.exception("asking the verifiers failed")

    async def _ask(self, status: VerifierPresence) -> VerifierPresence:
        answer = await ask(self._transports[status.address])
        if (error := answer.error) is not None or answer.info is None:
            presence = Presence.AWAY if error is None or error.retryable else Presence.REFUSES
            why = answer.why.removeprefix(f"verifier at {status.address}: ")
            return replace(status, presence=presence, why=why)
        why = self._misfit(answer.info) or ""
        presence = Presence.MISFIT if why else Presence.READY
        return VerifierPresence(status.address, presence, answer.info, why, answer.rtt_s)


def context_of(info: VerifierInfo, model: ModelInfo | None = None) -> int:
    """Prompt plus output of ``model`` (None: its own), in tokens, as far as the verifier tells."""
    return info.limits.context_length or (model or info.model).context_length


ALIAS: Final = "edgespec"
"""A model name that always means whatever the verifier serves."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    context_length: int
    """Prompt plus output, in tokens."""
    parent: str | None
    """The model that it is an adapter of, by name."""

    @property
    def name(self) -> str:
        return self.info.name


@dataclass(frozen=True, slots=True)
class Chosen:
    asked: str
    """The name to ask a verifier for; empty: for none."""
    served: ServedModel | None
    """None: no verifier has told yet what it serves."""

    @property
    def context_length(self) -> int | None:
        return None if self.served is None else self.served.context_length


class ServedModels:
    """Of the verifiers behind ``watch``. ``only``: no other name is answered; empty: all are."""

    def __init__(self, watch: VerifierWatch, only: str = "") -> None:
        self._watch, self._only = watch, only

    @property
    def name(self) -> str:
        """Of the model of requests that name none."""
        usual = self.usual
        return usual.name if usual is not None else self._only or ALIAS

    @property
    def usual(self) -> ServedModel | None:
        """The model of requests that name none, once a verifier has told of it."""
        return next(iter(self.listed), None)

    @property
    def listed(self) -> tuple[ServedModel, ...]:
        """All of them, each name once: the usual one first, then as the verifiers tell them. Those
        whose vocabulary is another cannot be asked for: there is one tokenizer here."""
        found: dict[str, ServedModel] = {}
        vocabulary = ""
        for info in self._watch.told:
            for model in info.served:
                if self._only not in ("", model.name):
                    continue
                vocabulary = vocabulary or model.vocabulary
                if model.vocabulary != vocabulary:
                    continue
                parent = None if model is info.model else info.model.name
                found.setdefault(model.name, ServedModel(model, context_of(info, model), parent))
        return tuple(found.values())

    def choose(self, name: str) -> Chosen:
        """What a request takes that names ``name``, or nothing. A name is checked once it is known
        what is served. Raises ``ApiError``."""
        listed = {one.name: one for one in self.listed}
        if (served := listed.get(name)) is not None:
            return Chosen(self._asked(served), served)
        if name in ("", ALIAS, self._only):
            return Chosen(self._only, self.usual)
        if listed or self._only or not fits_on_wire(name):
            raise no_such_model(name, tuple(listed) or (self.name,))
        return Chosen(name, None)

    def _asked(self, served: ServedModel) -> str:
        """Verifiers may serve one and the same model by several names; then none is asked for, so
        that each of them can answer."""
        models = [info.model for info in self._watch.told]
        marks = {one.fingerprint for one in models}
        if len({one.name for one in models}) > 1 and marks == {served.info.fingerprint} != {""}:
            return self._only
        return served.name
