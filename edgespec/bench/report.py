"""Report of a benchmark: one JSON document, and a table for people.

Both name the command, the machine, the versions, and whether the durations are emulated.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.table import Table

from edgespec import __version__
from edgespec.bench.arms import Arm
from edgespec.bench.measurement import Row, compare_both_ends, numbers, summarise
from edgespec.bench.prompts import Workload
from edgespec.bench.runner import BenchRunner, BenchSettings
from edgespec.config.common import installed_version
from edgespec.config.files import write_output
from edgespec.core.protocol.sampling import SamplingParams

_PACKAGES = ("numpy", "onnxruntime", "torch", "transformers", "grpcio")

# Share of an emulated pass that a stream and its messages may add to it.
_LATE = 0.08


@dataclass(frozen=True, slots=True)
class Subject:
    """Models and prompts of a benchmark, as they were given and by their own names."""

    model: str
    draft: str
    server_draft: str
    """Draft model of the verifier, or empty if it has none."""
    target_name: str
    draft_name: str
    prompts: str
    """File of the prompts, or ``built-in``."""
    chat: bool
    """Prompts were wrapped in the chat template."""


def make_document(
    argv: Sequence[str],
    settings: BenchSettings,
    subject: Subject,
    runner: BenchRunner | None,
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Return the whole result, ready for JSON. The measurements in ``vanilla_sweep`` decided
    ``vanilla_gamma``. Without a ``runner`` nothing was measured."""
    workload = runner.workload if runner else Workload((), (), frozenset())
    rows, gammas = (runner.rows, runner.vanilla_gammas) if runner else ([], {})
    sweep = runner.gamma_costs if runner else {}
    result: dict[str, Any] = {
        "command": shlex.join(argv),
        "finished_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": describe_machine(),
        "versions": list_versions(),
        "settings": {
            **asdict(settings),
            "arms": [arm.value for arm in settings.arms],
            "timing": settings.timing,
            "emulated": settings.emulated,
            "vanilla_gamma": {f"{rtt_ms:g}": gamma for rtt_ms, gamma in gammas.items()},
            "vanilla_sweep": {str(gamma): asdict(cost) for gamma, cost in sweep.items()},
            **asdict(subject),
            "prompt_names": list(workload.names),
            "prompt_tokens": [len(prompt) for prompt in workload.prompts],
            "prompts_too_long": workload.too_long,
        },
        "results": rows,
        "summary": summarise(rows),
        "beside": compare_both_ends(rows),
    }
    if interrupted:
        result["interrupted"] = True
    return result


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write ``content`` to a file, which is either complete or unchanged. Raises ``OSError``."""
    write_output(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def summary_table(settings: BenchSettings, rows: Sequence[Row]) -> Table:
    """Return a table with one line per RTT and arm.

    TPOT and speed are means over the prompts with intervals of 95 %, the others medians over the
    repeats. ``server ms`` is the verifier's time per token, its own draft steps included.
    ``wasted`` is nodes per token. ``B up`` is bytes per drafted token, ``B down`` per committed
    token. ``differ`` counts the mismatches."""
    title = f"time per token by round-trip time ({settings.timing})"
    table = Table(title=title, title_style="", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("RTT ms", justify="right", no_wrap=True)
    table.add_column("arm", no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    last: object = None
    order = [arm.value for arm in Arm]
    for row in sorted(summarise(rows), key=lambda row: (row["rtt_ms"], order.index(row["arm"]))):
        rtt_ms = "" if row["rtt_ms"] == last else f"{row['rtt_ms']:g}"
        if rtt_ms and last is not None:
            table.add_section()
        table.add_row(rtt_ms, row["arm"], *(shown(row) for shown in _COLUMNS.values()))
        last = row["rtt_ms"]
    return table


def write_footer(content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines below the table: settings, machine, versions, command."""
    settings, machine, versions = content["settings"], content["machine"], content["versions"]
    if settings["vanilla_gamma"]:
        gammas = ", ".join(f"{g} at {rtt} ms" for rtt, g in settings["vanilla_gamma"].items())
        yield f"draft length of vanilla: {gammas}"
    yield from _write_comparison(content["beside"])
    if own := content.get("server_drafts"):
        step_ms = own["model_us"] / 1e3 / max(1, own["model_steps"])
        right = f"{own['model_accepted']} of {own['model_nodes']}"
        yield f"the server's own drafts: {right} right, {step_ms:.2f} ms a step"
    prompts = write_count(len(settings["prompt_names"]), "prompt")
    own = settings["server_draft"]
    on_server = f", on the server {own}" if own else ""
    yield (
        f"target {settings['target_name'] or settings['model']}, draft "
        f"{settings['draft_name'] or settings['draft']}{on_server}; {prompts},"
        f" {settings['max_tokens']} tokens, temperature {settings['temperature']:g},"
        f" seed {settings['seed']}, {write_count(settings['repeats'], 'repeat')};"
        f" {settings['timing']}"
    )
    if (late := _warn_of_slow_plain(settings["pass_ms"], content["summary"])) is not None:
        yield late
    yield (
        f"machine: {machine['processor']}, {machine['cpu_count']} CPUs,"
        f" {machine['memory_bytes'] / 2**30:.0f} GiB, load {machine['load_average']:.1f},"
        f" {machine['system']}"
    )
    yield "versions: " + ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"command: {content['command']}"


def _write_comparison(ratios: Sequence[Row]) -> Iterator[str]:
    """Yield one line per end: the time per token of ``both`` over that of this end alone, at each
    RTT."""
    for end in dict.fromkeys(row["to"] for row in ratios):
        values = [
            f"{_show_interval(row, 'ratio', 2)} at {row['rtt_ms']:g} ms"
            for row in sorted(ratios, key=lambda row: float(row["rtt_ms"]))
            if row["to"] == end
        ]
        yield f"time per token, both over {end}: {', '.join(values)}"


def _warn_of_slow_plain(pass_ms: float, summary: Sequence[Row]) -> str | None:
    """Return a warning if plain streaming was slower than the emulated passes, else None. Then the
    machine's own time is in all rows, and hides a part of the time that drafts save."""
    plain = [row for row in summary if row["arm"] == Arm.TARGET_ONLY.value]
    slowest = max(numbers(plain, "tpot_ms_mean"), default=0.0)
    if not pass_ms or slowest <= pass_ms * (1.0 + _LATE):
        return None
    return (
        f"late: with passes of {pass_ms:g} ms target-only took up to {slowest:.1f} ms a token; this"
        f" machine is too slow or too busy for them. Twice all times shows more: --pass-ms"
        f" {2 * pass_ms:g}, and the other times likewise"
    )


def judge_mismatches(rows: Sequence[Row]) -> tuple[int, str]:
    """Return the number of mismatches, and a sentence about them."""
    count = int(sum(numbers(rows, "mismatches")))
    tokens = int(sum(numbers(rows, "tokens")))
    if count:
        return count, f"{count} of {tokens} tokens differ from target-only: they must not"
    return 0, f"all {tokens} tokens are those of target-only"


def describe_machine() -> dict[str, object]:
    """Return a description of this machine. The load is that of the last minute, and includes other
    programs."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _find_processor(),
        "cpu_count": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": psutil.getloadavg()[0],  # on every system, unlike that of os
    }


def list_versions() -> dict[str, str]:
    found = {name: installed_version(name) or "not installed" for name in _PACKAGES}
    return {"edgespec": __version__, "python": platform.python_version(), **found}


def write_count(number: int, name: str) -> str:
    return f"{number} {name}{'' if number == 1 else 's'}"


def _show_interval(row: Row, name: str, digits: int) -> str:
    interval = row["interval"]
    if isinstance(interval, dict):
        if name not in interval:
            return "-"
        interval = interval[name]
    low, high = interval
    return f"{_show_number(row[name], digits)} ({low:.{digits}f}-{high:.{digits}f})"


def _show_number(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"


def _show_if_drafted(row: Row, name: str, digits: int) -> str:
    return _show_number(row[name], digits) if row["drafted_nodes"] else "-"


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "TPOT ms": lambda row: _show_interval(row, "tpot_ms_mean", 1),
    "p95": lambda row: _show_number(row["tpot_ms_p95"], 1),
    "TTFT ms": lambda row: _show_number(row["ttft_ms_p50"], 0),
    "speed": lambda row: _show_interval(row, "speedup", 2),
    "tok/pass": lambda row: _show_number(row["tokens_per_pass"], 2),
    "server ms": lambda row: _show_number(row["server_ms_per_token"], 1),
    "accept": lambda row: _show_if_drafted(row, "acceptance", 2),
    "wasted": lambda row: _show_number(row["wasted_nodes_per_token"], 2),
    "B up": lambda row: _show_if_drafted(row, "up_bytes_per_token", 1),
    "B down": lambda row: _show_number(row["down_bytes_per_token"], 1),
    "differ": lambda row: str(row["mismatches"]),
}


def _find_processor() -> str:
    """Return the name of the processor. On Linux it is read from /proc, because
    ``platform.processor`` is empty or names only the architecture there."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def describe_origin() -> dict[str, str]:
    """Return the machine, versions, command and date, with which a file for the simulator shows
    where its numbers come from."""
    found = describe_machine()
    return {
        "machine": f"{found['processor']}, {found['cpu_count']} cores",
        "versions": ", ".join(f"{name} {version}" for name, version in list_versions().items()),
        "command": shlex.join(("edgespec", *sys.argv[1:])),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def tape_about(sampling: SamplingParams, prompts: str) -> dict[str, str]:
    return {
        "sampling": (
            f"temperature {sampling.temperature:g}, seed {sampling.seed},"
            f" at most {sampling.max_tokens} tokens"
        ),
        "prompts": prompts,
        **describe_origin(),
    }
