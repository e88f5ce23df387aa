"""On what of onnxruntime a draft runs is tried once for a machine and a model, and kept.

An accelerator that loads may still be of no use to a draft: it may know none of its nodes, give
other numbers than the CPU (a cache that is rolled back is not what it was made for), or take
longer, as keys and values lie in the CPU's memory and nodes it does not know are computed there. So
the draft decodes a short text on the CPU and on the accelerator, with steps of many tokens, of one,
and behind rollbacks; logits are compared, and steps timed. One draft is loaded at a time, as a
device may have memory for one. A later start reads what was found.

Who asks for an accelerator by name gets it, or hears why not. ``auto`` takes the quickest that
gives the CPU's numbers, and never one that is slower than the CPU.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar, runtime_checkable

from edgespec.config.machine_key import measured_key
from edgespec.config.setup_error import SetupError
from edgespec.config.whole_file import replace_file
from edgespec.core.ports import Drafter
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.export.export_cache import cache_folder
from edgespec.device.thread_choice import least_step_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

Say = Callable[[str], None]
CPU: Final = "cpu"
LARGEST_DIFFERENCE: Final = 0.35
"""As of a graph against itself (``foreign_check.py``): the CPU rounds activations to 8 bits where
weights have few, and others do not."""
_AT_ONCE, _SINGLE, _LENGTH = 24, 48, 96
_LONGEST_WHY: Final = 300
_log = logging.getLogger(__name__)


@runtime_checkable
class PlacedDrafter(Drafter, Protocol):
    """A drafter that shows its logits, and what of its graph an accelerator runs."""

    @property
    def logits(self) -> NDArray[Any]: ...

    @property
    def placement(self) -> object | None: ...


_Drafter = TypeVar("_Drafter", bound=PlacedDrafter)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of trying one provider."""

    why_not: str = ""
    """Empty: it gives the CPU's numbers."""
    step_s: float | None = None
    """None: not known, as other programs held the cores."""

    @property
    def untimed(self) -> bool:
        return self.step_s is None and not self.why_not


def load_where_asked(
    name: str, loads: Mapping[str, Callable[[], _Drafter]], graph: Path, say: Say
) -> _Drafter:
    """The draft on ``name``, which is a key of ``loads`` beside ``cpu``. ``say`` hears what runs
    where, and of a CPU that is quicker. Raises ``SetupError`` saying what keeps it from running
    there, and what the CPU's ``load`` raises."""
    found, last = _findings(loads, graph, say, timed=False)
    one, cpu = found[name], found[CPU]
    if one.why_not:
        raise SetupError(f"provider {name} cannot be used with this draft: {one.why_not}")
    drafter = last or loads[name]()
    runs = f": {drafter.placement}" if drafter.placement else ""
    say(f"the draft runs on {name}{runs}")
    if one.step_s and cpu.step_s and one.step_s > cpu.step_s:
        say(f"  {_times(found)}: --provider cpu would be quicker")
    return drafter


def load_where_quickest(
    loads: Mapping[str, Callable[[], _Drafter]], graph: Path, say: Say
) -> _Drafter:
    """The draft on the quickest of ``loads``, of which one is ``cpu``; there in doubt. ``say``
    hears which it is, and why not the others. Raises what the CPU's ``load`` raises."""
    if len(loads) == 1:
        say(f"the draft runs on {CPU}")
        return loads[CPU]()
    found, last = _findings(loads, graph, say, timed=True)
    best = quickest(found)
    if last is not None and best != [*loads][-1]:
        last.close()
        last = None
    drafter = last or loads[best]()
    runs = f": {drafter.placement}" if drafter.placement else ""
    say(f"the draft runs on {best} ({_times(found)}){runs}")
    for name, one in found.items():
        if one.why_not:
            say(f"  {name} is left out: {one.why_not}")
    return drafter


def quickest(found: Mapping[str, Finding]) -> str:
    """The provider with the shortest step; the CPU where that is not known, or no longer."""
    cpu_s = found[CPU].step_s
    times = {name: one.step_s for name, one in found.items() if not one.why_not}
    quicker = {name: time_s for name, time_s in times.items() if time_s and cpu_s}
    return min(quicker, key=lambda name: (quicker[name], name != CPU), default=CPU)


def _findings(
    loads: Mapping[str, Callable[[], _Drafter]], graph: Path, say: Say, *, timed: bool
) -> tuple[dict[str, Finding], _Drafter | None]:
    """As kept, where that is enough (``timed``: with all times), or as tried now; and then the last
    drafter, if it is of use."""
    path = _path(graph, loads)
    known = _kept(path, loads)
    if known and not (timed and any(one.untimed for one in known.values())):
        _log.info("providers of the draft, as tried at a start before: %s (%s)", known, path)
        return known, None
    say(f"trying the draft on {' and '.join(loads)}, once for this machine and model")
    found: dict[str, Finding] = {}
    reference: list[NDArray[Any]] = []
    last: _Drafter | None = None
    lasting = True  # a driver may be mended, and memory be free, by the next start
    for name in (CPU, *(one for one in loads if one != CPU)):
        try:
            last = loads[name]()
            rows = decoded(last)
            found[name] = Finding(_why_not(last, rows, reference), _step_s(last, name))
        except Exception as error:  # whatever a provider raises is why it is not used
            if name == CPU and last is None:
                raise
            found[name] = Finding(" ".join(f"it does not run: {error}".split())[:_LONGEST_WHY])
            rows, lasting = [], False
        reference = reference or rows
        if last is not None and (found[name].why_not or name != [*loads][-1]):
            last.close()
            last = None
    if lasting:
        _keep(path, found)
    return found, last


def decoded(drafter: PlacedDrafter) -> list[NDArray[Any]]:
    """Logits behind each step of a short text, in pieces, one by one, and behind rollbacks."""
    size, end = drafter.info.vocabulary_size, min(_LENGTH, drafter.info.context_length)
    tokens = [(7919 * position + 1) % size for position in range(end)]
    steps = [(0, _AT_ONCE), *((at, at + 1) for at in range(_AT_ONCE, _SINGLE))]
    steps += [(_SINGLE - 5, _SINGLE - 4), (_SINGLE - 4, _LENGTH), (_AT_ONCE // 2, _LENGTH)]
    drafter.begin(1, SamplingParams())
    rows = []
    for keep, stop in steps:
        if stop <= end:
            drafter.step(keep, tokens[keep:stop], 1)
            rows.append(drafter.logits.copy())
    return rows


def _why_not(
    drafter: PlacedDrafter, rows: Sequence[NDArray[Any]], reference: Sequence[NDArray[Any]]
) -> str:
    """What speaks against a drafter that gives ``rows`` where the CPU gives ``reference``; empty:
    nothing, or there is nothing to compare with."""
    import numpy as np

    from edgespec.device.drafters.foreign_check import relative_difference

    placement = drafter.placement
    if placement is not None and not getattr(placement, "taken", 1):
        return "it runs no node of the graph"
    for row, wanted in zip(rows, reference, strict=False):
        known = np.isfinite(wanted)
        same = np.array_equal(known, np.isfinite(row))
        difference = relative_difference(row[known], wanted[known]) if same else float("inf")
        if not difference <= LARGEST_DIFFERENCE:
            return f"its logits differ from the CPU's by {difference:.2f} standard deviations"
    return ""


def _step_s(drafter: PlacedDrafter, name: str) -> float | None:
    return least_step_s(drafter, waits=name != CPU)


def _times(found: Mapping[str, Finding]) -> str:
    known = [f"{name} {one.step_s * 1e3:.2f} ms" for name, one in found.items() if one.step_s]
    return f"a step: {', '.join(known)}" if known else "steps could not be timed"


# --- what is kept ---------------------------------------------------------------------------


def _path(graph: Path, names: Mapping[str, object]) -> Path:
    files = graph.parent.glob(f"{graph.name}*")
    key = measured_key(files, str(graph.resolve()), *names)
    return cache_folder() / "providers" / f"{key}.json"


def _kept(path: Path, names: Mapping[str, object]) -> dict[str, Finding]:
    """Empty: nothing was found yet, or the file cannot be used."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return {name: _finding(known[name]) for name in names}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def _finding(value: Mapping[str, Any]) -> Finding:
    """Raises ``ValueError``, ``KeyError`` or ``TypeError`` for what is none."""
    why, step_s = value["why_not"], value["step_s"]
    timed = isinstance(step_s, float) and 0.0 < step_s < 3600.0
    if not isinstance(why, str) or not (timed or step_s is None):
        raise ValueError(f"not a finding: {value!r}")
    return Finding(why, step_s)


def _keep(path: Path, found: Mapping[str, Finding]) -> None:
    """What cannot be written costs the next start some time, and nothing else."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps({name: asdict(one) for name, one in found.items()}) + "\n")
