"""How late does the emulated link deliver? Real time, in memory, no gRPC: the link alone.

A device sends a message every few milliseconds, the other side answers each one, and every arrival
is compared with the time at which it was due. Exits with 1 when the median at any RTT is 1 ms off
or more.

    python benchmarks/link_accuracy.py [--messages 200] [--rtt-ms 2,20,50,100,200]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time

from edgespec.benchmark.arm_options import parse_rtts_ms
from edgespec.benchmark.report import machine, versions
from edgespec.benchmark.rows import percentile
from edgespec.core.network.link_model import LinkModel, LinkSettings
from edgespec.core.protocol.messages import Commit, Downlink, Draft, Limits, Uplink, VerifierInfo
from edgespec.core.protocol.work import ModelInfo
from edgespec.ports import DeviceStream
from edgespec.transport.pipe import Pipe
from edgespec.transport.shaped import ShapedTransport

MEDIAN_LIMIT_MS = 1.0
GAP_S = 0.005


class Echo:
    """``DeviceStream`` that notes when a message came and answers at once."""

    def __init__(self) -> None:
        self.arrivals_s: list[float] = []
        self.answers_s: list[float] = []
        self._answers: Pipe[Downlink] = Pipe(1024)

    async def send(self, message: Uplink) -> None:
        self.arrivals_s.append(time.monotonic())
        self.answers_s.append(time.monotonic())
        await self._answers.put(Commit(len(self.answers_s), (1,)))

    async def receive(self) -> Downlink:
        return await self._answers.get()

    async def close(self) -> None:
        self._answers.end("closed", retryable=False)


class EchoTransport:
    """``Transport`` to one ``Echo``."""

    def __init__(self) -> None:
        self.echo = Echo()

    async def connect(self) -> DeviceStream:
        return self.echo

    async def info(self) -> VerifierInfo:
        return VerifierInfo(ModelInfo("echo", "echo", 2, 2), Limits(), 0, 1)

    async def close(self) -> None:
        await self.echo.close()


async def lateness_ms(rtt_ms: float, messages: int) -> list[float]:
    """How much later than due each message arrived, both directions."""
    inner = EchoTransport()
    one_way_s = rtt_ms / 2e3
    link = ShapedTransport(
        inner, LinkModel(LinkSettings(one_way_s)), LinkModel(LinkSettings(one_way_s))
    )
    stream = await link.connect()
    sent_s: list[float] = []
    received_s: list[float] = []

    async def receive() -> None:
        while len(received_s) < messages:
            await stream.receive()
            received_s.append(time.monotonic())

    receiving = asyncio.create_task(receive())
    for number in range(messages):
        sent_s.append(time.monotonic())
        await stream.send(Draft(number + 1, (0,), (1,), number + 1, 1))
        await asyncio.sleep(GAP_S)
    await receiving
    await stream.close()
    await link.close()
    up = zip(sent_s, inner.echo.arrivals_s, strict=True)
    down = zip(inner.echo.answers_s, received_s, strict=True)
    return [1e3 * (arrived - left - one_way_s) for left, arrived in (*up, *down)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200)
    parser.add_argument("--rtt-ms", type=parse_rtts_ms, default=parse_rtts_ms("2,20,50,100,200"))
    arguments = parser.parse_args()
    print(f"machine: {machine()}\nversions: {versions()}\ncommand: {' '.join(sys.argv)}")
    print(f"{'RTT ms':>8} {'median ms':>10} {'p95 ms':>8} {'worst ms':>9}")
    worst_median_ms = 0.0
    for rtt_ms in arguments.rtt_ms:
        late_ms = asyncio.run(lateness_ms(rtt_ms, arguments.messages))
        median_ms = statistics.median(late_ms)
        worst_median_ms = max(worst_median_ms, abs(median_ms))
        p95_ms = percentile(late_ms, 95) or 0.0
        print(f"{rtt_ms:8g} {median_ms:10.3f} {p95_ms:8.3f} {max(late_ms):9.3f}")
    within = worst_median_ms < MEDIAN_LIMIT_MS
    print(f"{'ok' if within else 'TOO LATE'}: medians below {MEDIAN_LIMIT_MS:g} ms are asked for")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
