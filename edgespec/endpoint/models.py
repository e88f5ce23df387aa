"""Which models the verifiers serve, by name.

A name is one model's: that of a verifier, or of an adapter beside it. Verifiers may serve different
ones; the agent takes a request to one that serves what it names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edgespec.core.ports import ModelInfo
from edgespec.device.agent import fits_on_wire
from edgespec.device.prober import VerifierWatch
from edgespec.endpoint.request_json import no_such_model

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
                longest = info.limits.context_length or model.context_length
                found.setdefault(model.name, ServedModel(model, longest, parent))
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
