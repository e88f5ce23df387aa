"""How many threads a draft step takes is measured once for a machine and a model, and kept.

A second thread nearly halves the step of a large draft where a core is free, and lengthens it where
threads share one or wait for one another: it has to be tried. A small draft, whose step is shorter
than a thread's waking up, has one without being tried. Counts are tried one after another, never
two drafts at once, as a device may have memory for one. A later start reads what was found. While
other programs take the cores nothing is learned of the machine: that start goes by size, and the
next one measures.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from edgespec.config.machine_key import measured_key, usable_cores
from edgespec.config.whole_file import replace_file
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.export.export_cache import cache_folder

Say = Callable[[str], None]
MOST_TRIED: Final = 4
# A further thread is taken only if it is worth a core: it has to save so much of the step.
_LEAST_SAVED: Final = 0.1
_PROMPT, _WARM_UP, _LEAST_STEPS, _STEPS = 16, 1, 3, 12
_LONGEST_S: Final = 1.0
# A step that has the processor for less of its time than this is held up by other programs.
_LEAST_SHARE: Final = 0.8
_log = logging.getLogger(__name__)
_Drafter = TypeVar("_Drafter", bound=Drafter)


def load_with_best_threads(
    load: Callable[[int], _Drafter], graph: Path, say: Say, *, tried: bool
) -> _Drafter:
    """``load`` with as many threads as are best here for the model at ``graph``: as kept from a
    start before, else as measured now. ``tried`` False, or one core: what ``load`` takes for 0,
    its own choice by size. Raises what ``load`` raises."""
    counts = _counts(usable_cores())
    if not tried or len(counts) == 1:
        return load(0)
    if (known := kept_threads(graph)) is not None:
        _log.info("draft threads: %d, as measured at a start before (%s)", known, _path(graph))
        return load(known)
    say(f"timing a draft step with {_listed(counts)} threads, once for this machine and model")
    return _measured(load, counts, graph, say)


def kept_threads(graph: Path) -> int | None:
    """What was measured for the model at ``graph`` on this machine; None: nothing, or a file that
    cannot be used."""
    try:
        found = json.loads(_path(graph).read_text(encoding="utf-8"))["threads"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    known = isinstance(found, int) and found in _counts(usable_cores())
    return int(found) if known and not isinstance(found, bool) else None


def best_count(step_s: dict[int, float]) -> int:
    """The fewest threads of which no more would save a tenth of the step.

    8.0, 7.5 and 7.0 ms with 1, 2 and 4 threads: 4 would save an eighth of the first, so it is 2,
    which 4 betters by a fifteenth only."""
    quickest = min(step_s.values())
    return min(count for count, time_s in step_s.items() if time_s * (1 - _LEAST_SAVED) <= quickest)


def least_step_s(drafter: Drafter, *, waits: bool = False) -> float | None:
    """The shortest of some steps of one token behind a short prompt: what the machine can do, not
    what it does beside other programs at this moment; None: these held it up most of the time,
    which cannot be told of one that ``waits`` for an accelerator. Stops after about a second."""
    size, context = drafter.info.vocabulary_size, drafter.info.context_length
    length = max(1, min(_PROMPT, context - _WARM_UP - _STEPS))
    drafter.begin(length, SamplingParams())
    drafter.step(0, [position % size for position in range(length)], 1)
    times: list[float] = []
    begun_s, before_cpu_s = time.perf_counter(), time.process_time()
    for position in range(length, min(context, length + _WARM_UP + _STEPS)):
        if len(times) >= _LEAST_STEPS and time.perf_counter() - begun_s > _LONGEST_S:
            break
        before_s = time.perf_counter()
        drafter.step(position, [1 % size], 1)
        times.append(time.perf_counter() - before_s)
    cpu_s, took_s = time.process_time() - before_cpu_s, time.perf_counter() - begun_s
    if not waits and cpu_s < _LEAST_SHARE * took_s:
        return None
    return min(times[_WARM_UP:] or times, default=math.inf)


def _measured(
    load: Callable[[int], _Drafter], counts: tuple[int, ...], graph: Path, say: Say
) -> _Drafter:
    times: dict[int, float] = {}
    for count in counts:
        drafter = load(count)
        try:
            found = least_step_s(drafter)
        except Exception as error:  # whatever a runtime raises: the session will tell it in words
            _log.info("a draft step with %d threads failed: %s", count, error)
            return drafter
        drafter.close()
        if found is None:
            say("draft threads: by the draft's size this time, as other programs hold the cores")
            return load(0)
        times[count] = found
    best = best_count(times)
    told = ", ".join(f"{count}: {time_s * 1e3:.1f} ms" for count, time_s in times.items())
    say(f"draft threads: {best} ({told} a step)")
    content = {"threads": best, "step_s": {str(count): time_s for count, time_s in times.items()}}
    with suppress(OSError):  # it costs the next start some time, and nothing else
        path = _path(graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(content) + "\n")
    return load(best)


def _path(graph: Path) -> Path:
    key = measured_key(graph.parent.glob(f"{graph.name}*"), str(graph.resolve()))
    return cache_folder() / "threads" / f"{key}.json"


def _counts(cores: int) -> tuple[int, ...]:
    """1, 2 and 4, as far as there are cores."""
    return tuple(count for count in (1, 2, MOST_TRIED) if count <= cores)


def _listed(counts: tuple[int, ...]) -> str:
    *first, last = map(str, counts)
    return f"{', '.join(first)} and {last}"
