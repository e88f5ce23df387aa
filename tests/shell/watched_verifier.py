"""A verifier with its metrics, and what a fetch of them says."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from prometheus_client.parser import text_string_to_metric_families

from edgespec.cli.verifier import Watching
from edgespec.config import VerifierConfig
from edgespec.core.ports import TargetModel
from edgespec.telemetry.verifier_counts import PREFIX
from edgespec.verifier.build import build_verifier
from edgespec.verifier.daemon import Verifier

QUIET = VerifierConfig(model="toy", server_drafts=False)


class Scrape:
    """The samples of one fetch, by name (less the prefix) and labels (less the model's name)."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[tuple[str, str], float] = {}
        self.models: set[str] = set()
        for family in self.families.values():
            if not family.name.startswith(PREFIX):
                continue
            for sample in family.samples:
                labels = dict(sample.labels)
                self.models.add(labels.pop("model_name"))
                (label,) = labels.values() or ("",)
                self.samples[sample.name.removeprefix(PREFIX), label] = sample.value

    def value(self, name: str, label: str = "") -> float:
        return self.samples[name, label]

    def labels(self, name: str) -> dict[str, float]:
        """The values of a metric by its label, zeros left out."""
        found = {label: value for (one, label), value in self.samples.items() if one == name}
        assert found, name
        return {label: value for label, value in found.items() if value}


@dataclass(frozen=True)
class Watched:
    address: str
    verifier: Verifier
    url: str

    async def scrape(self) -> Scrape:
        return Scrape(await asyncio.to_thread(fetch, f"{self.url}/metrics"))


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


@contextlib.asynccontextmanager
async def watched(
    config: VerifierConfig | None = None, target: TargetModel | None = None
) -> AsyncIterator[Watched]:
    """A toy verifier over real gRPC, with metrics on a free port; it guesses nothing by itself,
    unless ``config`` says so."""
    config = replace(config or QUIET, port=0, metrics_port=0)
    with contextlib.closing(Watching(config)) as found:
        verifier, server = build_verifier(config, target=target, watch=found.watch)
        await server.start()
        found.start(verifier)
        try:
            url = f"http://127.0.0.1:{found.metrics_port}"
            yield Watched(f"127.0.0.1:{server.port}", verifier, url)
        finally:
            await verifier.stop()
            await server.stop(0.0)
