"""What draft steps behind several leaves bring, and what a further row of a step costs.

    EDGESPEC_DATA=... python benchmarks/leaves.py [--tapes DIR] [--limit 4] [--rtts 2,20,50,100,200]
    python benchmarks/leaves.py --rows bundled,135M,0.6B [--threads 2]

The first plays the bundled pair's texts (``model_free.py`` records them) in virtual time: a pass
takes 25 ms, a step 8 ms and a share of that for each further leaf, by ``--shares``. So its figures
are exact whatever this machine does. The second times one run of 1 to 8 rows behind 300 cached
ones, of the bundled draft or of random weights in a real model's shape, in turns. Exits 1 if a
text is not the target's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final

from model_free import KINDS, TapedDraft, tapes

from edgespec.benchmark.report import machine, versions
from edgespec.core.device.estimates import RowTimes
from edgespec.core.device.events import Finish
from edgespec.core.device.policy import GATHER_SHARE, WindowedPolicy
from edgespec.core.device.reconnect import ReconnectPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.drafters.tree_rows import PathDrafter
from edgespec.ports import Drafter, TreeRows
from edgespec.telemetry.match_tape import MatchTape
from edgespec_sim.actors.device import SimulatedDevice
from edgespec_sim.actors.server import PassTime, SimulatedVerifier
from edgespec_sim.actors.stream import FixedDelay, Stream
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.token_sources.source import Request
from edgespec_sim.token_sources.tape import TapeSource

PASS_S: Final = 0.025
STEP_S: Final = 0.008
ROWS: Final = (1, 2, 3, 4, 6, 8)
CACHED: Final = 300
_LONGEST_S: Final = 1e5


@dataclass(frozen=True, slots=True)
class Arm:
    name: str
    width: int
    leaves: int = 1
    share: float = 0.0
    """Of a step, that a further row takes."""


def arms(shares: Sequence[float], leaves: int) -> tuple[Arm, ...]:
    several = (Arm(f"{leaves} leaves, {share:g}", 2, leaves, share) for share in shares)
    return (Arm("chain", 1), Arm("width 2", 2), *several)


def play(arm: Arm, source: TapeSource, request: Request, rtt_s: float, rows: RowTimes) -> Any:
    """(seconds a token, accepted tokens a pass, nodes sent a token, is it the target's text)."""
    queue, target = EventQueue(), source.target()
    engine = VerifyEngine(
        target.info, Limits(context_length=1 << 20), EngineLimits(server_drafts=False)
    )
    verifier = SimulatedVerifier(queue, engine, target, PassTime(queue, lambda batch: PASS_S))
    drafter: Drafter = TapedDraft(source.drafter())
    if arm.leaves > 1:
        drafter = PathDrafter(drafter, arm.leaves)
    session = DraftSession(
        Open("one", "", "", request.prompt, sampling=request.sampling),
        WindowedPolicy(arm.width, gather=GATHER_SHARE),
        ReconnectPolicy(),
        drafter.info.context_length,
        leaves=arm.leaves,
        rows=rows,
    )

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, rtt_s / 2), FixedDelay(queue, rtt_s / 2))
        verifier.accept(stream)
        return stream, rtt_s

    def step_s(kept: int, fed: int) -> float:
        further = fed - 1 if fed <= 2 * arm.leaves else 0  # more is a prompt, alike for all
        return STEP_S * (1.0 + arm.share * further)

    device = SimulatedDevice(queue, session, drafter, step_s, connect)
    device.start()
    queue.run(until_s=_LONGEST_S)
    found, counters = device.delivery, session.counters
    if not isinstance(found.ended, Finish):
        raise RuntimeError(f"the session did not finish: {found.ended}")
    count = len(found.tokens)
    return (
        (found.times_s[-1] - found.times_s[0]) / (count - 1),
        counters.accepted / engine.passes,
        counters.sent / count,
        list(found.tokens) == list(source.expected(request, count)),
    )


def compare(options: Any, temperature: float, tape: MatchTape) -> Iterator[dict[str, Any]]:
    shares = [float(share) for share in options.shares.split(",")]
    for kind in KINDS:
        own = tuple(one for one in tape.generations if one.name.startswith(f"{kind}-"))
        source = TapeSource(MatchTape(tape.target, tape.draft, tape.width, own))
        requests = [source.request(number, 0, options.max_tokens) for number in range(len(own))]
        for rtt_ms in map(float, options.rtts.split(",")):
            for arm in arms(shares, options.leaves):
                rows = RowTimes()
                found = [play(arm, source, one, rtt_ms / 1e3, rows) for one in requests]
                tpot, accepted, sent, exact = zip(*found, strict=True)
                yield {
                    "temperature": temperature,
                    "kind": kind,
                    "rtt_ms": rtt_ms,
                    "arm": arm.name,
                    "tpot_ms": [one * 1e3 for one in tpot],
                    "accepted_per_pass": accepted,
                    "sent_per_token": sent,
                    "wrong_texts": sum(not one for one in exact),
                }


def show(rows: Sequence[dict[str, Any]]) -> None:
    names = list(dict.fromkeys(row["arm"] for row in rows))
    print("ms a token / accepted tokens a pass: geometric means, and medians, over the texts")
    print("| T | prompts | RTT |", " | ".join(names), "|")
    print("| ---: | --- | ---: |", " | ".join("---" for _ in names), "|")
    for first in range(0, len(rows), len(names)):
        row = rows[first]
        cells = [
            f"{geometric_mean(one['tpot_ms']):.1f} / {median(one['accepted_per_pass']):.2f}"
            for one in rows[first:][: len(names)]
        ]
        head = f"| {row['temperature']:g} | {row['kind']} | {row['rtt_ms']:g} |"
        print(head, " | ".join(cells), "|")
    print()
    print("ms a token of width 2 over that of each arm: geometric means over all texts")
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for rtt_ms in dict.fromkeys(row["rtt_ms"] for row in rows):
            here = [r for r in rows if (r["temperature"], r["rtt_ms"]) == (temperature, rtt_ms)]
            means = {
                name: geometric_mean([t for r in here if r["arm"] == name for t in r["tpot_ms"]])
                for name in names
            }
            ratios = [f"{name}: {means['width 2'] / means[name]:.3f}" for name in names]
            print(f"T {temperature:g}, RTT {rtt_ms:g}:", ", ".join(ratios))


# --- what a row costs ------------------------------------------------------------------------


def row_times(name: str, folder: Path, threads: int, repeats: int) -> list[str]:
    """Times of one run by its rows, each in turn, and of 5 text tokens with one row of logits."""
    from random_draft import make_draft

    from edgespec.drafters.onnx_tree_drafter import OnnxTreeDrafter
    from edgespec.models.folders import BUNDLED, Role, resolve_model

    if name == BUNDLED:
        folder = resolve_model(BUNDLED, Role.DRAFT)
    else:
        make_draft(folder, name, context_length=1024)
    drafter = OnnxTreeDrafter(folder, max(ROWS), threads=threads)
    drafter.begin(CACHED, SamplingParams())
    drafter.step(0, list(range(CACHED)), 1)
    found: dict[str, list[float]] = {}
    for turn in range(repeats):
        for count in ROWS:
            places = tuple(range(CACHED, CACHED + count))
            tokens = tuple(n + turn for n in range(count))
            rows = TreeRows((), tokens, (CACHED - 1,) * count, places)
            started_s = time.perf_counter()
            drafter.step_tree(CACHED, (), rows, 2)
            found.setdefault(f"{count}", []).append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        drafter.step(CACHED, [1, 2, 3, 4, turn], 2)
        found.setdefault("text of 5", []).append(time.perf_counter() - started_s)
    drafter.close()
    one, least = median(found["1"]), min(found["1"])
    return [
        f"| {name} | {label} | {median(times) * 1e3:.2f} | {median(times) / one:.2f}"
        f" | {min(times) / least:.2f} |"
        for label, times in found.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", help="drafts whose rows to time: bundled, 25M, 135M, 0.6B")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30, help="of --rows")
    parser.add_argument("--rtts", default="2,20,50,100,200", help="milliseconds, with commas")
    parser.add_argument("--shares", default="0,0.05,0.1,0.25", help="of a step, by further row")
    parser.add_argument("--leaves", type=int, default=4)
    parser.add_argument("--limit", type=int, default=4, help="prompts of each kind")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--tapes", type=Path, help="keep what was recorded in this folder")
    options = parser.parse_args()
    print(json.dumps({"machine": machine(), "versions": versions()}))
    if options.rows:
        print("| draft | rows | ms | of one row, medians | least |")
        for name in options.rows.split(","):
            with tempfile.TemporaryDirectory() as folder:
                times = row_times(name, Path(folder) / "draft", options.threads, options.repeats)
                print("\n".join(times), flush=True)
        return 0
    data = Path(os.environ.get("EDGESPEC_DATA", "")) / "prompts"
    if not (data / "humaneval.jsonl").is_file():
        print(f"skipped: {data}/humaneval.jsonl is not to be found, EDGESPEC_DATA names the data")
        return 0
    rows: list[dict[str, Any]] = []
    for temperature, tape in tapes(options, data):
        found = list(compare(options, temperature, tape))
        show(found)
        rows += found
    wrong = sum(row["wrong_texts"] for row in rows)
    if wrong:
        print(f"{wrong} texts are not the target's")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
