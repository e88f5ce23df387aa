"""From ONNX files that others exported to a drafter: which variant, and how fast each is here.

Of several variants in a folder the fastest is taken: which one that is depends on the processor
(8-bit products, float16), so each is loaded once and timed. What was measured is kept in the user's
cache, under a key of the machine and of the files' sizes and times.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.config.machine_key import measured_key
from edgespec.config.whole_file import replace_file
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.export.export_cache import cache_folder
from edgespec.device.thread_choice import load_with_best_threads
from edgespec.models.draft_sources import DraftSource
from edgespec.models.foreign_info import read_foreign_info

if TYPE_CHECKING:
    from edgespec.device.drafters.foreign_check import Behaviour
    from edgespec.device.drafters.foreign_drafter import ForeignDrafter
    from edgespec.device.drafters.foreign_graph import ForeignGraph

CPU = "cpu"
_WARM_UP, _STEPS = 2, 9
_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Inspection:
    """One variant, loaded and tried."""

    variant: str
    path: Path
    info: ModelInfo
    graph: ForeignGraph
    behaviour: Behaviour
    all_rows: bool
    weights_bytes: int
    step_s: float


@dataclass(frozen=True, slots=True)
class ForeignOptions:
    """``tokenizer`` is a folder whose tokenizer goes with a graph that has none; ``threads`` 0
    chooses by size, ``context_length`` 0 is the model's own."""

    tokenizer: Path | None = None
    threads: int = 0
    context_length: int = 0


_DEFAULT = ForeignOptions()


def quickest_variant(
    source: DraftSource,
    say: Callable[[str], None],
    options: ForeignOptions = _DEFAULT,
    provider: str = CPU,
) -> DraftSource:
    """``source`` with one graph, the quickest on ``provider`` of those it has. Raises
    ``ValueError`` naming the file."""
    if len(source.graphs) == 1:
        return source
    best = _fastest(source.graphs, _loader(source, options, provider), say, provider)
    return replace(source, graphs={best: source.graphs[best]})


def foreign_drafter(
    source: DraftSource,
    say: Callable[[str], None],
    options: ForeignOptions = _DEFAULT,
    provider: str = CPU,
    *,
    try_threads: bool = False,
) -> ForeignDrafter:
    """A drafter on the one graph of ``source``, or on the fastest of several. ``try_threads``:
    where ``options.threads`` is 0 they are measured and kept, else chosen by size. Raises
    ``ValueError`` naming the file."""
    from edgespec.device.drafters.runtime_session import is_small

    source = quickest_variant(source, say, options, provider)
    (path,) = source.graphs.values()
    if options.threads or not try_threads or provider != CPU:
        return _loader(source, options, provider)(path)

    def load_with(count: int) -> ForeignDrafter:
        return _loader(source, replace(options, threads=count), provider)(path)

    return load_with_best_threads(load_with, path, say, tried=not is_small(path))


def inspect_graph(source: DraftSource, variant: str) -> Inspection:
    """Load, try and time one graph of ``source``. Raises ``ValueError`` naming the file."""
    path = source.graphs[variant]
    drafter = _loader(source, _DEFAULT, CPU)(path)
    try:
        return Inspection(
            variant,
            path,
            drafter.info,
            drafter.graph,
            drafter.behaviour,
            drafter.gives_all_rows,
            drafter.weights_bytes,
            step_s(drafter),
        )
    finally:
        drafter.close()


def _loader(
    source: DraftSource, options: ForeignOptions, provider: str
) -> Callable[[Path], ForeignDrafter]:
    from edgespec.device.drafters.foreign_drafter import ForeignDrafter
    from edgespec.device.drafters.foreign_graph import HeadHint
    from edgespec.device.drafters.providers import execution_providers

    found = read_foreign_info(source.folder, source.name, options.tokenizer)

    def load(path: Path) -> ForeignDrafter:
        return ForeignDrafter(
            path,
            found.model,
            hint=HeadHint(found.kv_heads, found.head_size),
            threads=options.threads,
            context_length=options.context_length,
            token_count=found.token_count,
            providers=execution_providers(provider),
        )

    return load


def _fastest(
    graphs: Mapping[str, Path],
    load: Callable[[Path], ForeignDrafter],
    say: Callable[[str], None],
    provider: str,
) -> str:
    """The variant with the shortest step. One that cannot be loaded is left out, and its reason is
    said; if none can, the first one's error is raised."""
    path = cache_folder() / "variants" / f"{_key(graphs, provider)}.json"
    if (known := _read(path, graphs)) is not None:
        return known
    say(f"timing {len(graphs)} variants, once: {', '.join(graphs)}")
    times: dict[str, float] = {}
    first_error: ValueError | None = None
    for variant, graph in graphs.items():
        try:
            drafter = load(graph)
        except ValueError as error:
            say(f"  {variant}: left out: {error}")
            first_error = first_error or error
            continue
        times[variant] = step_s(drafter)
        drafter.close()
        say(f"  {variant}: {times[variant] * 1e3:.1f} ms a step")
    if not times:
        raise first_error or ValueError(f"no variant among {list(graphs)}")
    best = min(times, key=times.__getitem__)
    _write(path, {"variant": best, "step_s": times})
    return best


def step_s(drafter: ForeignDrafter) -> float:
    """The median time of a step of one token, behind a short prompt."""
    size, context = drafter.info.vocabulary_size, drafter.info.context_length
    length = max(1, min(_PROMPT, context - _WARM_UP - _STEPS))
    drafter.begin(length, SamplingParams())
    drafter.step(0, [position % size for position in range(length)], 1)
    times = []
    for position in range(length, min(context, length + _WARM_UP + _STEPS)):
        begun = time.perf_counter()
        drafter.step(position, [1 % size], 1)
        times.append(time.perf_counter() - begun)
    return statistics.median(times[_WARM_UP:] or times or [0.0])


def _key(graphs: Mapping[str, Path], provider: str) -> str:
    places = (f"{variant} {path.resolve()}" for variant, path in graphs.items())
    return measured_key(graphs.values(), *places, *([provider] if provider != CPU else []))


def _read(path: Path, graphs: Mapping[str, Path]) -> str | None:
    try:
        known = json.loads(path.read_text(encoding="utf-8")).get("variant")
    except (OSError, ValueError, AttributeError):
        return None  # not measured yet, or the cache is damaged: measure
    return known if known in graphs else None


def _write(path: Path, value: Mapping[str, object]) -> None:
    """A cache that cannot be written costs the next start some time, and nothing else."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(value, indent=2) + "\n")
