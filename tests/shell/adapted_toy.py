"""A native target with adapters, for tests: each adapter is another toy model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgespec.core.ports import CacheShape, ModelInfo, PassRequest, PassResult
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.models.toy import TOY_MODEL
from edgespec.verifier.targets.toy import ToyTarget


class AdaptedToy:
    """The toy, called ``name``, and the models of ``adapters`` beside it. ``mark`` is a part of
    their fingerprints."""

    def __init__(
        self, adapters: Mapping[str, ToyModel], *, name: str = "toy", mark: str = "toy"
    ) -> None:
        models = {"": TOY_MODEL, **adapters}
        vocabulary = f"toy-{TOY_MODEL.vocabulary_size}"
        self._targets = {
            one: ToyTarget(model, name=name, vocabulary=vocabulary, fingerprint=mark)
            for one, model in models.items()
        }
        self._opened: dict[str, tuple[str, int, SamplingParams, Sequence[int]]] = {}

    @property
    def info(self) -> ModelInfo:
        return self._targets[""].info

    @property
    def cache(self) -> CacheShape | None:
        return None

    @property
    def adapters(self) -> tuple[ModelInfo, ...]:
        mark = self.info.fingerprint
        return tuple(
            replace(self.info, name=one, fingerprint=f"{one}-on-{mark}")
            for one in self._targets
            if one
        )

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._targets[""].open(key, prompt_length, sampling, text)
        self._opened[key] = ("", prompt_length, sampling, text)

    def use_adapter(self, key: str, name: str) -> None:
        _, *opened = self._opened[key]
        self._targets[""].close(key)
        self._targets[name].open(key, *opened)  # type: ignore[arg-type] # as they came
        self._opened[key] = (name, *opened)  # type: ignore[assignment] # as they came

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        found = {}
        for name, target in self._targets.items():
            mine = [one for one in batch if self._opened[one.key][0] == name]
            found.update({one.key: one for one in (target.forward(mine) if mine else ())})
        return [found[one.key] for one in batch]

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._targets[self._opened[key][0]].keep(key, nodes)

    def close(self, key: str) -> None:
        if key in self._opened:
            self._targets[self._opened.pop(key)[0]].close(key)
