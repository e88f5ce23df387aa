"""What watching a verifier costs its event loop: CPU time of ``StreamMeter`` for each pass.

    python benchmarks/telemetry_cost.py --sessions 64 --nodes 8

A pass as the daemon sees it: every session sent a draft of ``--nodes`` nodes (as many messages of
one node), an acknowledgement every eighth token, and gets a commit. Prints CPU microseconds a pass
and a session, for the meter alone and for the byte meter.
"""

from __future__ import annotations

import argparse
import time

from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Opened, Received
from edgespec.core.protocol.work import PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.telemetry.stream_meter import StreamMeter
from edgespec.telemetry.traffic_counts import TrafficCounts

PASS_S = 0.025
PROMPT = tuple(range(100))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--passes", type=int, default=400)
    options = parser.parse_args()
    meter, traffic = StreamMeter(), TrafficCounts()
    for stream in range(options.sessions):
        opened = ee.StreamOpened(stream, Open(f"s{stream}", "", "", PROMPT))
        greeting = ee.SendTo(stream, Opened(Limits(), "toy", len(PROMPT)))
        meter.observe(opened, (greeting,), 0.0)
    streams = range(options.sessions)
    request = PassRequest("s", 100, (1,), (2, 3, 4), (-1, 0, 1))
    batch = ee.RunBatch((request,) * options.sessions)
    draft = Draft(1, (0,), (4,), 100, 1)
    drafts = [ee.StreamMessage(stream, draft) for stream in streams] * options.nodes
    commits = [
        (*(ee.SendTo(s, Commit(100 + n, (5, 6), accepted=1, rows=3)) for s in streams), batch)
        for n in range(0, 2 * options.passes, 2)
    ]
    acknowledged = [
        [ee.StreamMessage(s, Received(102 + n, 1)) for s in streams]
        for n in range(0, 2 * options.passes, 2)
    ]
    done, now = ee.BatchDone(()), 0.0
    began = time.process_time()
    for number in range(options.passes):
        now += PASS_S
        for event in drafts:
            meter.observe(event, (), now)
        meter.observe(done, commits[number], now)
        if number % 4 == 3:
            for event in acknowledged[number]:
                meter.observe(event, (), now)
    _report("streams and passes", time.process_time() - began, options)
    began = time.process_time()
    for number in range(options.passes):
        for event in drafts:
            traffic.count(event.message, 12)
        for action in commits[number][:-1]:
            traffic.count(action.message, 20)
    _report("bytes and messages", time.process_time() - began, options)


def _report(what: str, cpu_s: float, options: argparse.Namespace) -> None:
    pass_us = cpu_s / options.passes * 1e6
    print(
        f"{what}: {pass_us:.0f} us a pass, {pass_us / options.sessions:.2f} us a session and pass,"
        f" {pass_us / PASS_S / 1e4:.2f} % of the time of passes of {PASS_S * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    main()
