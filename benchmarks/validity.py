"""Make ``docs/validity.md``: how near the simulator is to published systems and to real runs.

    PYTHONPATH=.:sim python benchmarks/validity.py                      # all but real runs
    ... --section policy --section lead                                 # some sections anew
    ... --section real --model SMOLLM2 --draft SMOLLM2-INT4             # needs EDGESPEC_DATA, quiet
    ... --section bundles --python python3.12 --python python3.13       # which can import edgespec
    python -m tools.write_validity                                      # only the tables, anew

Each section plays its part, and keeps the result in ``benchmarks/records/validity/SECTION.json``.
Then the tables of the page and the heat map are written from all records.

    published   published figures beside the same scenarios (``published.py``)
    policy      the default draft policy beside fixed ones (``policy_grid.py``)
    lead        the formula of the lead beside played sessions (``lead_grid.py``)
    bundles     ten bundles, played again by other processes and other versions of Python
    real        real runs over gRPC beside a tape and made-up texts (``fidelity.py``)

The first four take under half an hour on two cores in virtual time, so other load of the machine
changes no figure. Real runs take some ten minutes, and want a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from datetime import UTC, datetime
from functools import partial
from multiprocessing import Pool
from multiprocessing.pool import Pool as PoolType
from pathlib import Path
from typing import Any, Final

import fidelity
import lead_grid
import published

import edgespec_sim as sim
from edgespec.bench.report import list_versions
from tests.sim import policy_grid
from tools import write_validity

_ROOT: Final = Path(__file__).parents[1]
Rows = list[Any]

# --- sections ------------------------------------------------------------------------------------


def play_published(options: argparse.Namespace) -> Rows:
    """Play the scenarios of the published figures."""
    found = published.compare_all(options.jobs)
    return [_rounded(asdict(one)) for one in found]


def play_policy(options: argparse.Namespace) -> Rows:
    """Play the grid of the policy, greedy. ``policy_grid.py`` plays it at a temperature too."""
    cells = [cell for cell in policy_grid.whole_grid() if cell.temperature == 0.0]
    cells = cells[:: options.policy_every]
    with Pool(options.jobs) as pool:
        play_all = partial(_play_worlds, pool)
        verdicts = policy_grid.play_grid(cells, play_all, options.policy_seeds)
    rows = []
    for one in verdicts:
        found = (one.ratio, one.low, one.high)
        ratios = [round(value, 4) if math.isfinite(value) else 99.0 for value in found]
        rows.append([*astuple(one.cell), *ratios, one.rival.value, one.seeds])
    return rows


def _play_worlds(
    pool: PoolType, worlds: Sequence[policy_grid.World]
) -> Iterator[policy_grid.Played]:
    played = pool.imap(policy_grid.play_world, worlds, 4)
    yield from _shown(played, len(worlds), "worlds of the policy")


def play_lead(options: argparse.Namespace) -> Rows:
    """Play cells of the grid of the lead."""
    cells = lead_grid.make_cells(lead_grid.SERVERS, options.lead_every)
    rows = []
    with Pool(options.jobs) as pool:
        work = [(cell, options.lead_seeds) for cell in cells]
        played = pool.imap(lead_grid.play_cell, work)
        worlds = _shown(played, len(cells), "cells of the lead")
        for cell, several in zip(cells, worlds, strict=True):
            row = lead_grid.judge(cell, several)
            lead = None if math.isinf(row.lead) else row.lead
            names = ("token_ms", "played", "low", "high", "expected")
            found = {name: getattr(row, name) for name in names}
            rows.append(_rounded({**asdict(cell), "lead": lead, **found}))
    return rows


def _shown(found: Iterable[Any], count: int, what: str) -> Iterator[Any]:
    """Yield what was found, and print the progress."""
    for done, one in enumerate(found, 1):
        if done % 100 == 0 or done == count:
            print(f"{done} of {count} {what}", file=sys.stderr, flush=True)
        yield one


BUNDLED_RUNS: Final[Mapping[str, Mapping[str, Any]]] = {
    "single-device": {"duration_s": 15},
    "household": {"duration_s": 8},
    "laptop-floor": {"duration_s": 10, "warm_up_s": 4, "devices.laptop.count": 16},
    "full-verifier": {"duration_s": 6, "warm_up_s": 2, "devices.laptop.count": 8},
    "decentralized": {"duration_s": 35},
    "mec": {"duration_s": 5},
    "replay": {"duration_s": 10, "links.network.trace": "generate:starlink"},
    "train": {"duration_s": 10},
    "tired-phone": {"duration_s": 15},
    "agents": {"duration_s": 30, "warm_up_s": 10, "drain_s": 5},
}
"""The scenarios of the ten bundles, shortened."""
_RERUN: Final = """
import json, platform, sys
from edgespec_sim import rerun
for name in sys.argv[2:]:
    found = rerun(name, processes=int(sys.argv[1]))
    print(json.dumps({"bundle": name, "python": platform.python_version(),
        "compared": found.compared, "differing": found.differing, "rounded": found.rounded,
        "differences": found.differences[:3]}), flush=True)
"""


def play_bundles(options: argparse.Namespace) -> Rows:
    """Write ten bundles, and have each interpreter play them again in a process of its own."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        names = {}
        for scenario, settings in BUNDLED_RUNS.items():
            file = str(Path(temporary) / f"{scenario}.zip")
            result = sim.run(scenario, seeds=2, processes=options.jobs, **settings)
            sim.write_bundle(file, result)
            names[file] = scenario
            print(f"bundle of {scenario}", file=sys.stderr, flush=True)
        for python in [sys.executable, *(options.python or ())]:
            command = [python, "-c", _RERUN, str(options.jobs), *names]
            path = os.pathsep.join((str(_ROOT), str(_ROOT / "sim")))
            done = subprocess.run(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for line in done.stdout.splitlines():
                row = json.loads(line)
                rows.append({"scenario": names[row.pop("bundle")], **row})
                print(f"{line}", file=sys.stderr, flush=True)
    return rows


_REAL_OPTIONS: Final = (
    "--kinds chat,code,maths --pass-ms 100 --draft-ms 32 --repeats 1 --tokens 96 --only /"
)
"""Slow passes and steps, emulated, hide the machine's noise. Only set-ups of recorded networks have
a slash in their name."""


def run_real(options: argparse.Namespace) -> Rows:
    """Run a real pair over gRPC on recorded networks, and play the same in virtual time."""
    if not options.model or not options.draft:
        raise SystemExit("validity: error: --section real needs --model and --draft")
    given = ["--model", options.model, "--draft", options.draft, *_REAL_OPTIONS.split()]
    given += ["--prompts", f"{options.real_prompts}"]
    parsed = fidelity.make_parser().parse_args(given)
    parsed.only = options.only or parsed.only
    return [
        _rounded(
            {
                "network": Path(row["trace"]).stem or f"RTT {row['rtt_ms']:g} ms",
                "real_ms": row["real_token_ms"],
                "tape_ms": row["simulated_token_ms"],
                "made_up_ms": row["made_up_token_ms"],
                "real_tokens": row["real_tokens_per_pass"],
                "tape_tokens": row["simulated_tokens_per_pass"],
                "made_up_tokens": row["made_up_tokens_per_pass"],
            }
        )
        for row in fidelity.run_cases(parsed)
    ]


SECTIONS: Final[Mapping[str, Callable[[argparse.Namespace], Rows]]] = {
    "published": play_published,
    "policy": play_policy,
    "lead": play_lead,
    "bundles": play_bundles,
    "real": run_real,
}


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: float(f"{value:.5g}") if isinstance(value, float) else value
        for name, value in row.items()
    }


def write_record(
    folder: Path, section: str, rows: Rows, took_s: float, given: Sequence[str]
) -> None:
    """Write the record of a section, a row a line."""
    versions = list_versions()
    head = {
        "command": shlex.join(("python", "benchmarks/validity.py", *given)),
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "took_s": round(took_s),
        "versions": {name: versions[name] for name in ("edgespec", "python")},
    }
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = ",\n ".join(json.dumps(row, separators=(",", ":")) for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    text = "{" + ",\n".join([*parts, f'"rows": [\n {lines}\n]']) + "}\n"
    (folder / f"{section}.json").write_text(text, encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    some_help = "a section to play anew; without it all but real"
    parser.add_argument("--section", choices=SECTIONS, action="append", help=some_help)
    parser.add_argument("--out", type=Path, default=write_validity.PAGE, help="the page")
    parser.add_argument("--records", type=Path, default=write_validity.RECORDS, help="folder")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--policy-seeds", type=int, default=4, help="most seeds of a cell")
    parser.add_argument("--policy-every", type=int, default=1, help="play every Nth cell only")
    parser.add_argument("--lead-seeds", type=int, default=3, help="seeds of a cell")
    parser.add_argument("--lead-every", type=int, default=13, help="play every Nth cell only")
    parser.add_argument("--python", action="append", help="a further interpreter for bundles")
    parser.add_argument("--model", default="", help="target of the real runs")
    parser.add_argument("--draft", default="", help="draft of the real runs")
    parser.add_argument("--real-prompts", type=int, default=8, help="texts on each network")
    parser.add_argument("--only", default="", help="real runs on networks with this in the name")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Play sections, keep their results and write the page."""
    given = sys.argv[1:] if argv is None else argv
    options = make_parser().parse_args(given)
    sections = options.section or [name for name in SECTIONS if name != "real"]
    for section in sections:
        begun = time.monotonic()
        rows = SECTIONS[section](options)
        took_s = time.monotonic() - begun
        write_record(options.records, section, rows, took_s, _without_paths(given))
        print(f"{section}: {len(rows)} rows in {took_s:.0f} s", file=sys.stderr, flush=True)
    write_validity.write_page(options.out, options.records)
    print(f"{options.out} is written")
    return 0


def _without_paths(given: Sequence[str]) -> list[str]:
    """Return the arguments with file names in place of paths, which differ from machine to
    machine."""
    return [Path(one).name if os.sep in one else one for one in given]


if __name__ == "__main__":
    sys.exit(main())
