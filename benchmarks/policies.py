"""The default draft policy beside fixed settings on recorded networks, in virtual time.

    EDGESPEC_DATA=... python benchmarks/policies.py [--networks n78,starlink] [--seeds 1]
        [--tapes bundled-greedy,bundled-sampled] [--sources tape,process] [--acceptance 0.55]

Worlds are those of `edgespec-sim run replay`: one device behind a recorded network, passes of 25 ms
and draft steps of 8 ms, as many texts as a bundled tape has, one after another: the tape's, or of a
process that is fitted to it (``--acceptance`` moves its mean). A few texts of the first source
choose the best fixed setting of a network; then the default and that one play all texts with every
seed. A line says what the default takes a token over it, with the 95 % interval over texts, and
where both sources play, the process's time and tokens a pass over the tape's. The last lines are
means over the networks, with intervals. Exits 1 if the default takes more than 1.03 of the best
fixed setting anywhere.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from edgespec.bench.arms import Arm
from edgespec.bench.measurement import mean_interval
from edgespec.core.device.goodput_policy import DEFAULT_POLICY, PolicyName
from edgespec_sim.replication import Total, speedup
from edgespec_sim.scenario.sections import Scenario, load_scenario
from edgespec_sim.token_sources.source import tape_named
from edgespec_sim.world.run import Job, play

ALLOWED: Final = 1.03
FEW: Final = 8
"""Texts that choose the best fixed setting."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a device decodes: keys of a scenario."""

    arm: Arm
    policy: PolicyName = DEFAULT_POLICY
    gamma: int | None = None


DEFAULT: Final = Setting(Arm.EDGESPEC)
FIXED: Final[Mapping[str, Setting]] = {
    "target-only": Setting(Arm.TARGET_ONLY),
    **{f"vanilla {gamma}": Setting(Arm.VANILLA, gamma=gamma) for gamma in (4, 8)},
    "pearl": Setting(Arm.PEARL),
    "windowed": Setting(Arm.WINDOWED),
    **{
        f"{policy.value}, run-ahead": Setting(Arm.EDGESPEC, policy)
        for policy in (PolicyName.WINDOWED, PolicyName.PEARL, PolicyName.FIXED)
    },
}


@dataclass(frozen=True, slots=True)
class Played:
    """What texts came to, in their order."""

    tpots_s: tuple[float, ...]
    tokens: int
    passes: int

    @property
    def tpot_ms(self) -> float:
        return 1e3 * fmean(self.tpots_s)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes


def networks(data: Path, wanted: Sequence[str]) -> list[str]:
    """Files of the index that hold round-trip times over time, by what their names hold."""
    with (data / "traces" / "index.csv").open(encoding="utf-8", newline="") as lines:
        files = [row["file"] for row in csv.DictReader(lines) if "matrix" not in row["kind"]]
    return [file for file in files if not wanted or any(one in file for one in wanted)]


def scenario_of(
    trace: Path, tape: str, source: str, acceptance: float | None, texts: int, setting: Setting
) -> Scenario:
    settings: dict[str, Any] = {
        "links.network.trace": str(trace.resolve()),
        "tokens.tape": tape,
        "tokens.source": source,
        "duration_s": 36_000,
        "devices.device.policy": setting.policy.value,
        "devices.device.workload.requests": texts,
        "arms": [setting.arm.value],
    }
    if setting.gamma is not None:
        settings["gamma"] = setting.gamma
    if source != "tape":
        settings["devices.device.workload.prompt_tokens"] = 48
        settings["devices.device.workload.output_tokens"] = 160
        if acceptance is not None:
            settings["tokens.acceptance"] = acceptance
    return load_scenario("replay", settings)


def played(job: Job) -> Played:
    records = play(job).meters.records
    if not all(one.complete for one in records):
        raise RuntimeError("a text did not end")
    tpots = [0.0 if one.tpot_s is None else one.tpot_s for one in records]
    counters = [one.counters for one in records]
    return Played(tuple(tpots), sum(c.committed for c in counters), sum(c.passes for c in counters))


def together(parts: Sequence[Played]) -> Played:
    tpots = tuple(tpot for part in parts for tpot in part.tpots_s)
    return Played(tpots, sum(one.tokens for one in parts), sum(one.passes for one in parts))


def over(one: Played, other: Played) -> tuple[float, str]:
    """Time a token of ``one`` over that of ``other``, text by text, and the same in words."""
    texts = [[Total(tpot_s, 1) for tpot_s in side.tpots_s] for side in (one, other)]
    value, interval = speedup(*texts)
    assert value is not None
    assert interval is not None
    return value, f"{value:.3f} ({interval.low:.3f} to {interval.high:.3f})"


class Table:
    """Prints it line by line; ``worst`` is the largest ratio of the default to the best fixed
    setting so far."""

    def __init__(self, args: argparse.Namespace, data: Path, pool: Any) -> None:
        self._args, self._data, self._pool = args, data, pool
        self._means: defaultdict[str, list[float]] = defaultdict(list)
        self.worst = 0.0

    def row(self, network: str, tape: str, first_seed: int) -> None:
        """Of one network and tape, a line for each source."""
        trace, taped, best = self._data / "traces" / network, None, ""
        texts = len(tape_named(tape).generations)
        for source in self._args.sources.split(","):

            def play_all(
                settings: Sequence[Setting], count: int, seeds: int, source: str = source
            ) -> list[Played]:
                jobs = [
                    Job(
                        scenario_of(trace, tape, source, self._args.acceptance, count, one),
                        one.arm,
                        0,
                        first_seed + seed,
                        Path(),
                    )
                    for one in settings
                    for seed in range(seeds)
                ]
                found: list[Played] = self._pool.map(played, jobs, chunksize=1)
                return [together(found[at : at + seeds]) for at in range(0, len(found), seeds)]

            if not best:
                trials = dict(zip(FIXED, play_all([*FIXED.values()], FEW, 1), strict=True))
                best = min(trials, key=lambda name: trials[name].tpot_ms)
            ours, fixed = play_all([DEFAULT, FIXED[best]], texts, self._args.seeds)
            ratio, said = over(ours, fixed)
            self.worst = max(self.worst, ratio)
            self._means[f"{tape}, {source}: over the best fixed setting"].append(ratio)
            beside = ""
            if source == "tape":
                taped = ours
            elif taped is not None:
                time = ours.tpot_ms / taped.tpot_ms
                tokens = ours.tokens_per_pass / taped.tokens_per_pass
                self._means[f"{tape}: time a token of the process over the tape's"].append(time)
                self._means[f"{tape}: tokens a pass of the process over the tape's"].append(tokens)
                beside = f"{time:.3f}, {tokens:.3f}"
            print(
                f"| {network} | {tape} | {source} | {ours.tpot_ms:.2f} | {ours.tokens_per_pass:.3f}"
                f" | {best} {fixed.tpot_ms:.2f} | {said} | {beside} |",
                flush=True,
            )

    def means(self) -> None:
        for name, values in self._means.items():
            low, high = mean_interval(values)
            print(
                f"{name}: mean of {len(values)} {fmean(values):.3f} ({low:.3f} to {high:.3f}),"
                f" {min(values):.3f} to {max(values):.3f}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", default="", help="parts of their names, with commas")
    parser.add_argument("--tapes", default="bundled-greedy,bundled-sampled", help="with commas")
    parser.add_argument("--sources", default="tape,process", help="with commas")
    parser.add_argument("--acceptance", type=float, help="mean of the process; else the tape's")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    data = Path(os.environ.get("EDGESPEC_DATA", "../shared/data"))
    print(
        "| network | tape | source | ms a token | tokens/pass | best fixed | over it | over tape |"
    )
    print("| --- | --- | --- | ---: | ---: | --- | --- | --- |")
    wanted = networks(data, [one for one in args.networks.split(",") if one])
    with get_context("spawn").Pool(args.processes) as pool:
        table = Table(args, data, pool)
        for index, network in enumerate(wanted):
            for tape in args.tapes.split(","):
                # Other texts of a process, and another order of a tape's, on each network.
                table.row(network, tape, 1 + index * args.seeds)
        table.means()
    return int(table.worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
