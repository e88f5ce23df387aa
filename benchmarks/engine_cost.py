"""What the verifier's engine costs a session and pass, without a wire and without a model.

    python benchmarks/engine_cost.py [--sessions 64,128,512] [--nodes 8] [--messages 1]

Each pass, every session sends a draft of ``--nodes`` nodes (width two) in ``--messages`` messages
and every eighth token an acknowledgement; then the pass ends and the next one is formed. Of the two
the second matters twice: it is the time in which the target stands still.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time

from table_target import TableTarget, next_token

from edgespec.benchmark.report import machine, versions
from edgespec.compose import TOY_CONTEXT_LENGTH, TOY_MODEL
from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Opened, Received, RunAhead
from edgespec.core.protocol.prefix import CommittedPrefix
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.targets.toy import ToyTarget

PROMPT = (5, 11, 7, 3, 29, 2, 17, 13)
PASS_S = 0.025
RUN_IN = 5


class Device:
    """Holds what was committed and drafts on it; wrong with one step in five."""

    def __init__(self, stream: int) -> None:
        self.stream, self.dice = stream, random.Random(stream)
        self.prefix, self.last_id, self.acknowledged = CommittedPrefix(PROMPT), 0, len(PROMPT)

    def messages(self, nodes: int, messages: int) -> list[Draft | Received]:
        tail = list(self.prefix.tokens[-TOY_MODEL.order :])
        parents: list[int] = []
        tokens: list[int] = []
        first, parent = self.last_id + 1, 0
        for _ in range(nodes // 2):
            right = next_token(tuple(tail[-TOY_MODEL.order :]))
            wrong = (right + 1) % TOY_MODEL.vocabulary_size
            tokens += [wrong, right] if self.dice.random() < 0.2 else [right, wrong]
            parents += [parent, parent]
            parent = first + len(tokens) - 2
            tail.append(tokens[-2])
        self.last_id += len(tokens)
        length = self.prefix.length
        base = length, self.prefix.hash_at(length)
        share = max(2, nodes // messages)
        sent: list[Draft | Received] = [
            Draft(
                first + at,
                tuple(parents[at : at + share]),
                tuple(tokens[at : at + share]),
                *(base if at == 0 else (0, 0)),
            )
            for at in range(0, len(tokens), share)
        ]
        if length - self.acknowledged >= 8:
            self.acknowledged = length
            sent.append(Received(length, length))
        return sent


class Bench:
    def __init__(self, sessions: int) -> None:
        toy = ToyTarget(TOY_MODEL, cache=CacheShape(sessions * TOY_CONTEXT_LENGTH // 16 + 1, 16))
        self.target, self.now = TableTarget(toy), 0.0
        limits = ee.EngineLimits(
            max_sessions=sessions,
            max_rows_per_pass=16 * sessions,
            max_sessions_per_peer=sessions,
            cache=toy.cache,
        )
        self.engine = VerifyEngine(toy.info, Limits(), limits, contain=False)
        self.devices = {number: Device(number) for number in range(1, sessions + 1)}
        self.requests = None
        self.work: list[ee.EngineAction] = []
        for number in self.devices:
            sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
            ask = Open(f"s{number}", "", "", PROMPT, sampling=sampling, run_ahead=RunAhead.ALWAYS)
            self.handle(ee.StreamOpened(number, ask, f"peer {number}"))

    def handle(self, event: ee.EngineEvent) -> float:
        """Feed the event and carry out what comes of it; the CPU time of the engine, in seconds."""
        began = time.thread_time()
        actions = self.engine.handle(event, self.now)
        took_s = time.thread_time() - began
        for action in actions:
            match action:
                case ee.RunBatch(requests):
                    self.requests = requests
                case ee.SendTo(stream, Commit(tokens=tokens)):
                    self.devices[stream].prefix.extend(tokens)
                case ee.SendTo(_, Opened()):
                    pass
                case ee.OpenSequence() | ee.CloseSequence() | ee.KeepNodes():
                    self.work.append(action)
                case _:
                    raise AssertionError(action)
        return took_s

    def run_pass(self, nodes: int, messages: int) -> tuple[float, float]:
        """CPU seconds for all messages, and for the end of the pass with the start of the next."""
        for item in self.work:
            match item:
                case ee.OpenSequence(key, length, sampling):
                    self.target.open(key, length, sampling)
                case ee.KeepNodes(key, kept):
                    self.target.keep(key, kept)
        self.work, requests, self.requests = [], self.requests, None
        results = tuple(self.target.forward(requests))
        heard_s = 0.0
        for device in self.devices.values():
            for message in device.messages(nodes, messages):
                self.now += PASS_S / (2 * len(self.devices))
                heard_s += self.handle(ee.StreamMessage(device.stream, message))
        self.now += PASS_S / 2
        return heard_s, self.handle(ee.BatchDone(results))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sessions", default="64,128,512")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--messages", type=int, default=1)
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print(f"{'sessions':>8} {'messages us':>12} {'pass us':>8} {'together us':>12} {'gap ms':>7}")
    for sessions in map(int, options.sessions.split(",")):
        bench = Bench(sessions)
        gc.collect()
        gc.disable()
        took = [bench.run_pass(options.nodes, options.messages) for _ in range(options.passes)]
        gc.enable()
        # The quickest passes: what the code costs when nothing else runs.
        best = max(1, (options.passes - RUN_IN) // 8)
        heard, passed = (
            sum(sorted(kind)[:best]) / best for kind in zip(*took[RUN_IN:], strict=True)
        )
        each = [1e6 * seconds / sessions for seconds in (heard, passed, heard + passed)]
        print(f"{sessions:8d} {each[0]:12.1f} {each[1]:8.1f} {each[2]:12.1f} {1e3 * passed:7.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
