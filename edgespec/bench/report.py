"""What a bench leaves behind: one JSON document, and a table to read.

Both say what was run, on which machine, with which versions, and whether the times are emulated.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from types import TracebackType

import psutil
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from edgespec import __version__
from edgespec.bench.arms import Arm
from edgespec.bench.measurement import (
    GammaCost,
    Measurement,
    mean_interval,
    mismatch_count,
    ratio_interval,
)
from edgespec.bench.prompts import Workload
from edgespec.bench.settings import BenchSettings
from edgespec.config.files import replace_file

# --- from requests to numbers ------------------------------------------------------------------
# one row an arm, RTT and repeat; then one an arm and RTT.
# Times are of tokens before the end token; TPOT is (last - first) / (tokens - 1) of a request,
# and its percentiles, mean and interval go over requests. Passes are those that committed a token
# of this session. Bytes are payload: up per *drafted* token (drafts, acknowledgements and
# cancels; the request with its prompt and gRPC's framing stand apart), down per committed token
# (everything).


Row = dict[str, object]
Traffic = Mapping[str, float]
"""A ``TrafficMeter``'s totals."""
KEYS = ("arm", "rtt_ms", "repeat")
TIMES = ("ttft_ms_p50", "tpot_ms_p50", "tpot_ms_p95", "itl_ms_p95")
SPREAD = (*TIMES, "tokens_per_second")
_SUMMED = frozenset({"mismatches"})


@dataclass(frozen=True, slots=True)
class Cell:
    """The requests of one arm at one RTT in one repeat."""

    arm: Arm
    rtt_ms: float
    repeat: int
    measurements: tuple[Measurement, ...]
    references: tuple[tuple[int, ...], ...]
    """What target-only delivered for the same prompts."""
    traffic: Traffic
    """Of these requests alone."""

    def row(self) -> Row:
        done = self.measurements
        committed = self._sum(lambda m: m.counters.committed)
        passes = self._sum(lambda m: m.counters.passes)
        pairs = zip(done, self.references, strict=True)
        return {
            "arm": self.arm.value,
            "rtt_ms": self.rtt_ms,
            "repeat": self.repeat,
            "requests": len(done),
            **self._times(),
            "tokens": self._sum(lambda m: len(m.times_s)),
            "passes_per_token": _ratio(passes, committed),
            "tokens_per_pass": _ratio(committed, passes),
            "acceptance": _ratio(
                self._sum(lambda m: m.counters.hits), self._sum(lambda m: m.counters.tried)
            ),
            "wasted_nodes": self._sum(lambda m: m.counters.wasted),
            "wasted_nodes_per_token": _ratio(self._sum(lambda m: m.counters.wasted), committed),
            "pass_ms_mean": _ratio(1e3 * sum(m.counters.verify_s for m in done), passes),
            **self._bytes(committed),
            "reconnects": self._sum(lambda m: m.counters.reconnects),
            "mismatches": sum(mismatch_count(m.tokens, reference) for m, reference in pairs),
        }

    def _sum(self, count: Callable[[Measurement], int]) -> int:
        return sum(count(m) for m in self.measurements)

    def _times(self) -> Row:
        firsts_ms = [1e3 * m.ttft_s for m in self.measurements if m.ttft_s is not None]
        tpots_ms = [1e3 * m.tpot_s for m in self.measurements if m.tpot_s is not None]
        gaps_ms = [1e3 * gap_s for m in self.measurements for gap_s in m.gaps_s]
        flow_s = sum(m.times_s[-1] for m in self.measurements if m.times_s)
        return {
            "ttft_ms_p50": percentile(firsts_ms, 50),
            "tpot_ms_p50": percentile(tpots_ms, 50),
            "tpot_ms_p95": percentile(tpots_ms, 95),
            "tpots_ms": [m.tpot_s and 1e3 * m.tpot_s for m in self.measurements],
            "itl_ms_p95": percentile(gaps_ms, 95),
            "tokens_per_second": _ratio(self._sum(lambda m: len(m.times_s)), flow_s),
        }

    def _bytes(self, committed: int) -> Row:
        traffic = self.traffic
        drafted = traffic.get("drafted_nodes", 0)
        up_bytes = traffic.get("up_payload_bytes", 0)
        down_bytes = traffic.get("down_payload_bytes", 0)
        open_bytes = traffic.get("open_payload_bytes", 0)
        return {
            "drafted_nodes": int(drafted),
            "up_bytes_per_token": _ratio(up_bytes - open_bytes, drafted),
            "up_bytes_per_committed_token": _ratio(up_bytes - open_bytes, committed),
            "down_bytes_per_token": _ratio(down_bytes, committed),
            "open_bytes_per_request": _ratio(open_bytes, len(self.measurements)),
            "framing_bytes_per_committed_token": _ratio(
                traffic.get("up_framed_bytes", 0)
                - up_bytes
                + traffic.get("down_framed_bytes", 0)
                - down_bytes,
                committed,
            ),
        }


def summarise(rows: Sequence[Row]) -> list[Row]:
    """One row an arm and RTT, in order of first appearance: medians over the repeats, the sum of
    the mismatches, ``spread`` (lowest and highest repeat), and over the texts ``tpot_ms_mean`` and
    ``speedup`` (target-only's mean over the arm's own) with an ``interval`` of 95 % each."""
    groups: dict[tuple[object, object], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["arm"], row["rtt_ms"]), []).append(row)
    texts = {key: _by_text(group) for key, group in groups.items()}
    summary = []
    for (arm, rtt_ms), group in groups.items():
        own, plain = texts[arm, rtt_ms], texts.get((Arm.TARGET_ONLY.value, rtt_ms), {})
        summary.append({**_summary(group), **_over_texts(own, plain)})
    return summary


def _by_text(group: Sequence[Row]) -> dict[int, float]:
    """The mean TPOT in ms over the repeats, by the number of the prompt, of those that have one."""
    found: dict[int, list[float]] = {}
    for row in group:
        tpots_ms = row["tpots_ms"]
        assert isinstance(tpots_ms, list)
        for number, tpot_ms in enumerate(tpots_ms):
            if tpot_ms is not None:
                found.setdefault(number, []).append(tpot_ms)
    return {number: fmean(values) for number, values in found.items()}


def _over_texts(own: Mapping[int, float], plain: Mapping[int, float]) -> Row:
    if not own:
        return {"tpot_ms_mean": None, "speedup": None, "interval": {}}
    mine = list(own.values())
    interval = {"tpot_ms_mean": list(mean_interval(mine))}
    speedup = None
    both = [number for number in own if number in plain]
    if both and min(mine) > 0.0:
        base, mine_of_both = [plain[one] for one in both], [own[one] for one in both]
        speedup = fmean(base) / fmean(mine_of_both)
        interval["speedup"] = list(ratio_interval(base, mine_of_both))
    return {"tpot_ms_mean": fmean(mine), "speedup": speedup, "interval": interval}


def _summary(group: Sequence[Row]) -> Row:
    summary: Row = {"arm": group[0]["arm"], "rtt_ms": group[0]["rtt_ms"], "repeats": len(group)}
    for name in group[0]:
        if name in KEYS or name == "tpots_ms":
            continue
        values = numbers(group, name)
        if name in _SUMMED:
            summary[name] = int(sum(values))
        else:
            summary[name] = float(median(values)) if values else None
    spread: dict[str, list[float]] = {}
    for name in SPREAD:
        if values := numbers(group, name):
            spread[name] = [min(values), max(values)]
    summary["spread"] = spread
    return summary


def numbers(rows: Sequence[Row], name: str) -> list[float]:
    """The values of one column, without those that could not be measured."""
    values = [row.get(name) for row in rows]
    return [float(value) for value in values if isinstance(value, int | float)]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Between the two nearest ranks, linearly; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    rank = percent / 100 * (len(ordered) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


_PACKAGES = ("numpy", "onnxruntime", "torch", "transformers", "grpcio")
_COLUMNS = (
    *("TPOT ms", "p95", "TTFT ms", "speed"),
    *("tok/pass", "accept", "wasted", "B up", "B down", "differ"),
)

# What a stream and its messages may add to an emulated pass.
_LATE = 0.08


@dataclass(frozen=True, slots=True)
class Subject:
    """What was measured: models as they were asked for and as they call themselves."""

    model: str
    draft: str
    target_name: str
    draft_name: str
    prompts: str
    """The file, or ``built-in``."""
    chat: bool
    """Prompts were wrapped by the chat template."""


def document(
    argv: Sequence[str],
    settings: BenchSettings,
    subject: Subject,
    workload: Workload | None,
    rows: Sequence[Row],
    vanilla_gammas: Mapping[float, int],
    gamma_costs: Mapping[int, GammaCost],
    *,
    interrupted: bool,
) -> dict[str, object]:
    """The whole result, ready for JSON; ``vanilla_sweep`` is what chose ``vanilla_gamma``."""
    result: dict[str, object] = {
        "command": shlex.join(argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "versions": versions(),
        "settings": {
            **_plain(settings),
            "timing": settings.timing,
            "emulated": settings.emulated,
            "vanilla_gamma": {f"{rtt_ms:g}": gamma for rtt_ms, gamma in vanilla_gammas.items()},
            "vanilla_sweep": {str(gamma): asdict(cost) for gamma, cost in gamma_costs.items()},
            **asdict(subject),
            "prompt_names": list(workload.names) if workload else [],
            "prompt_tokens": [len(prompt) for prompt in workload.prompts] if workload else [],
            "prompts_too_long": workload.too_long if workload else 0,
        },
        "results": list(rows),
        "summary": summarise(rows),
    }
    if interrupted:
        result["interrupted"] = True
    return result


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """All or nothing: the file is complete or not there. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(content, indent=1, allow_nan=False) + "\n", 0o644)


def summary_table(settings: BenchSettings, rows: Sequence[Row]) -> Table:
    """One line an RTT and arm: TPOT and speed as means over the texts with intervals of 95 %, the
    others as medians over the repeats.

    ``wasted`` is nodes a token, ``B up`` bytes a drafted token, ``B down`` bytes a committed one,
    ``differ`` the mismatches.
    """
    title = f"time per token by round-trip time ({settings.timing})"
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("RTT ms", justify="right", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    last: object = None
    for row in sorted(summarise(rows), key=_by_rtt):
        if last is not None and row["rtt_ms"] != last:
            table.add_section()
        table.add_row(*_cells(row, first=row["rtt_ms"] != last))
        last = row["rtt_ms"]
    return table


def footer(content: Mapping[str, object]) -> Iterator[str]:
    """Lines below the table: set-up, machine, versions, command."""
    settings, machine, versions = content["settings"], content["machine"], content["versions"]
    assert isinstance(settings, dict)
    assert isinstance(machine, dict)
    assert isinstance(versions, dict)
    if settings["vanilla_gamma"]:
        gammas = ", ".join(f"{g} at {rtt} ms" for rtt, g in settings["vanilla_gamma"].items())
        yield f"draft length of vanilla: {gammas}"
    prompts = _counted(len(settings["prompt_names"]), "prompt")
    yield (
        f"target {settings['target_name'] or settings['model']}, draft "
        f"{settings['draft_name'] or settings['draft']}; {prompts},"
        f" {settings['max_tokens']} tokens, temperature {settings['temperature']:g},"
        f" seed {settings['seed']}, {_counted(settings['repeats'], 'repeat')}; {settings['timing']}"
    )
    if (late := _late(settings["pass_ms"], content["summary"])) is not None:
        yield late
    yield (
        f"machine: {machine['processor']}, {machine['cpu_count']} CPUs,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB, load {machine['load_average']:.1f},"
        f" {machine['system']}"
    )
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"command: {content['command']}"


def _late(pass_ms: float, summary: object) -> str | None:
    """A line where plain streaming was slower than the emulated passes: the machine's own time is
    in all rows then, and hides a part of what drafts save."""
    assert isinstance(summary, list)
    plain = [row for row in summary if row["arm"] == Arm.TARGET_ONLY.value]
    slowest = max(numbers(plain, "tpot_ms_mean"), default=0.0)
    if not pass_ms or slowest <= pass_ms * (1.0 + _LATE):
        return None
    return (
        f"late: with passes of {pass_ms:g} ms target-only took up to {slowest:.1f} ms a token; this"
        f" machine is too slow or too busy for them. Twice all times shows more: --pass-ms"
        f" {2 * pass_ms:g}, --draft-ms and --rtt-ms likewise"
    )


def verdict(rows: Sequence[Row]) -> tuple[int, str]:
    """Mismatches in all, and a sentence on them."""
    count = int(sum(numbers(rows, "mismatches")))
    tokens = int(sum(numbers(rows, "tokens")))
    if count:
        return count, f"{count} of {tokens} tokens differ from target-only: they must not"
    return 0, f"all {tokens} tokens are those of target-only"


def machine() -> dict[str, object]:
    """Where it ran; the load is of the last minute, other programs' included."""
    load = psutil.getloadavg()[0]  # on every system, unlike that of os
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": load,
    }


def versions() -> dict[str, str]:
    found = {"edgespec": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _counted(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _plain(settings: BenchSettings) -> dict[str, object]:
    return {**asdict(settings), "arms": [arm.value for arm in settings.arms]}


def _by_rtt(row: Row) -> tuple[float, int]:
    names = [arm.value for arm in Arm]
    return float(str(row["rtt_ms"])), names.index(str(row["arm"]))


def _cells(row: Row, *, first: bool) -> list[str]:
    return [
        f"{row['rtt_ms']:g}" if first else "",
        str(row["arm"]),
        _between(row, "tpot_ms_mean", 1),
        _number(row["tpot_ms_p95"], 1),
        _number(row["ttft_ms_p50"], 0),
        _between(row, "speedup", 2),
        _number(row["tokens_per_pass"], 2),
        _number(row["acceptance"], 2) if row["drafted_nodes"] else "-",
        _number(row["wasted_nodes_per_token"], 2),
        _number(row["up_bytes_per_token"], 1) if row["drafted_nodes"] else "-",
        _number(row["down_bytes_per_token"], 1),
        str(row["mismatches"]),
    ]


def _between(row: Row, name: str, digits: int) -> str:
    interval = row["interval"]
    assert isinstance(interval, dict)
    if name not in interval:
        return "-"
    low, high = interval[name]
    return f"{_number(row[name], digits)} ({low:.{digits}f}-{high:.{digits}f})"


def _number(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _processor() -> str:
    """The model's name; ``platform.processor`` is empty or only the architecture on Linux."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


# --- progress of a long run on stderr ----------------------------------------------------------
# a bar on a terminal, a line a step in a log.


class BenchProgress:
    """``runner.Progress`` as a context manager; ``expected_s`` is the length of the bar."""

    def __init__(self, console: Console, expected_s: float) -> None:
        self._console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("loading", total=expected_s)
        self._stack = ExitStack()

    def __enter__(self) -> BenchProgress:
        self._stack.enter_context(self._bar)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def say(self, text: str) -> None:
        """A step begins; in a log this is a line, on a terminal the bar's label."""
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
        else:
            self._console.print(text, markup=False, highlight=False)

    def done(self, what: str, worth_s: float) -> None:
        self._bar.update(self._task, advance=worth_s, description=what)
