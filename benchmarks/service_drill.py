"""Do to a verifier in use what an operator does, and measure the effect on its devices.

    python benchmarks/service_drill.py [--devices 60] [--seconds 8] [--seed 1] [--json FILE]

The service is a real verifier process (toy model, emulated pass time) with TLS and keys, and a
crowd of devices that stream one text after the other, every eighth with drafts; every second one
makes a new connection for each text. While they stream, one drill follows the other:

    calm          nothing happens: the reference for the others
    rotation      new certificates, three times, and once a broken file
    revocation    a key is revoked: only its own devices end, within a second
    wrong-keys    forty clients try keys in a loop
    flood         one key floods the verifier with streams, drafts, prompts and info calls
    restart       SIGTERM; texts that have not ended in two seconds resume when the verifier is
                  back: it starts on the same port when it has ended
    two           a second verifier has started and is in the devices' list, and nothing happens
    drain         SIGTERM for the first one; texts that have not ended in two seconds resume at
                  the second

Every text of an honest device is compared with the target's own. Printed per drill: texts, tokens,
texts lost and wrong, and the waits of devices for a token: their median, their p99 and the longest.
Each finding makes the exit status 1: a text lost or wrong, a wrong key that was admitted, a
certificate or a revocation that did not take effect, a traceback in the verifier's log.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import signal
import ssl
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from honest_devices import PATIENT, Request, make_requests, toy_answers
from hostile_clients import WRONG_KEYS, Hostile
from watched_verifier import START_WITHIN_S, Verifier, kill, make_keys

from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import (
    AgentConfig,
    DeviceTlsSection,
    DraftSection,
    LimitsSection,
    PacingSection,
    ServerTlsSection,
    VerifierConfig,
    load_config,
)
from edgespec.core.association.policies import Association
from edgespec.core.protocol.messages import FaultCode
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.build import build_agent
from edgespec.wire.access import KeyFile, save_keys
from edgespec.wire.certificates import make_ca, make_server

FLEETS = ("fleet-a", "fleet-b", "fleet-c", "fleet-d")
LEAVER, FLOODER, KEYS = "leaver", "flooder", "keys.yaml"
DRAIN_S = 2.0
LEAVERS = 6
REVOKED_WITHIN_S = 1.0


# --- the verifiers: processes with TLS and keys, and their files ---------------------------------


async def until(true: Callable[[], bool], within_s: float) -> None:
    """Poll until the condition holds, for at most ``within_s``."""
    ends_s = time.perf_counter() + within_s
    for _ in itertools.takewhile(lambda _: time.perf_counter() < ends_s, itertools.count()):
        if true():
            return
        await asyncio.sleep(0.02)


def make_files(folder: Path) -> None:
    """Make a CA, a certificate, the keys, and each device's own key file."""
    make_ca(folder)
    make_certificate(folder)
    make_keys(folder, {**dict.fromkeys((*FLEETS, LEAVER), 0), FLOODER: 4})


def make_certificate(folder: Path) -> None:
    for name in ("server.pem", "server.key"):
        (folder / name).unlink(missing_ok=True)
    make_server(folder, ["127.0.0.1"])


class Service(Verifier):
    """One verifier of the service; several share a folder of files."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str) -> None:
        certificate, key = str(folder / "server.pem"), str(folder / "server.key")
        config = VerifierConfig(
            model="toy",
            pacing=PacingSection(options.pass_ms),
            limits=LimitsSection(max_sessions=2 * options.devices + 32),
            tls=ServerTlsSection(certificate, key),
            keys=str(folder / KEYS),
            drain_s=DRAIN_S,
        )
        super().__init__(config, folder, name=name)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def shows(self, certificate: str) -> bool:
        """Return whether the verifier shows a new connection this certificate."""
        address = ("127.0.0.1", self.port)
        shown = await asyncio.to_thread(ssl.get_server_certificate, address)
        return shown.strip() == certificate.strip()

    async def reloaded(self, count: int) -> None:
        """Wait until the log reports ``count`` reloads."""
        await until(lambda: self.log.count("reload: ") >= count, START_WITHIN_S)


FLOOD = ("stale-drafts", "wide-roots", "open-cancel", "info", "long-prompts", "no-open")


# --- the devices -------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The observations of the devices during one drill."""

    name: str
    texts: int = 0
    tokens: int = 0
    reconnects: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    p50_s: float = 0.0
    p99_s: float = 0.0
    stall_s: float = 0.0
    """The longest wait for a token; the figures above are of all waits."""
    notes: dict[str, Any] = field(default_factory=dict)


class Streamer:
    """One device; ``refused_at`` is the time when it received the revocation of its key."""

    def __init__(self, drills: Drills, number: int, key: str, requests: list[Request]) -> None:
        self.drills, self.key, self.requests = drills, key, requests
        self.dice = random.Random(f"{drills.options.seed} device {number}")
        self.drafting, self.reuses = number % 8 == 0, number % 2 == 0
        self.since_s = time.perf_counter()
        self.refused_at: float | None = None
        self.knows: tuple[str, ...] = ()
        self.failovers = 0
        self.broken: list[tuple[float, float, int]] = []
        """For each text that lost a verifier: the time of its first token, the time of its end, and
        the number of its resumptions at another verifier."""

    def _was_refused(self) -> bool:
        return self.refused_at is not None

    async def live(self) -> None:
        await asyncio.sleep(self.dice.random())
        while not self._was_refused():
            async with self._agent() as agent:
                await self._generate_text(agent)
                while self.reuses and not self._has_news and not self._was_refused():
                    await self._generate_text(agent)

    @property
    def _has_news(self) -> bool:
        return self.knows != self.drills.addresses

    def _agent(self) -> Agent:
        folder, self.knows = self.drills.folder, self.drills.addresses
        return build_agent(
            AgentConfig(
                verifier=self.knows,
                association=Association.LISTED,
                tokenizer="toy",
                draft=DraftSection(model="toy" if self.drafting else "none"),
                tls=DeviceTlsSection(ca=str(folder / "ca.pem")),
                api_key_file=str(folder / self.key),
                reconnect=PATIENT,
            )
        )

    async def _generate_text(self, agent: Agent) -> None:
        request, tokens = self.dice.choice(self.requests), list[int]()
        self.since_s, first_s = time.perf_counter(), math.inf
        try:
            async for chunk in agent.generate(request.prompt, request.sampling):
                self.note()
                first_s = min(first_s, self.since_s)
                tokens += chunk.tokens
                self.drills.now.tokens += len(chunk.tokens)
        except GenerationError as error:
            if self.key == LEAVER and error.code is FaultCode.UNAUTHENTICATED:
                self.refused_at = time.perf_counter()
            else:
                self.drills.now.lost.append(f"{self.key} after {len(tokens)} tokens: {error}")
            return
        self.drills.now.texts += 1
        if agent.stats is not None:
            self.drills.now.reconnects += agent.stats.counters.reconnects
            self.failovers += agent.stats.failovers
            if agent.stats.counters.reconnects:
                self.broken.append((first_s, time.perf_counter(), agent.stats.failovers))
        if tuple(tokens) != request.expected:
            self.drills.now.wrong.append(f"{tokens} is not {list(request.expected)}")

    def note(self) -> None:
        """Record a wait: a token arrived, or the drill ends."""
        now_s = time.perf_counter()
        waited_s, self.since_s = now_s - self.since_s, now_s
        if self.refused_at is None:
            self.drills.waits_s.append(waited_s)


# --- the drills --------------------------------------------------------------------------------


class Drills:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        make_files(folder)
        self.options, self.folder = options, folder
        self.service = Service(options, folder, "first")
        self.second = Service(options, folder, "second")
        self.hostile = Hostile()
        self.addresses: tuple[str, ...] = ()
        """Addresses of the verifiers that devices may use."""
        self.now, self.waits_s = Outcome("warm-up"), list[float]()
        self.outcomes: list[Outcome] = []
        self.findings: list[str] = []
        self.reloads = 0
        self.devices: list[Streamer] = []

    async def run(self) -> None:
        requests = toy_answers(make_requests(12, self.options.seed, 160))
        await self.service.start()
        self.addresses = (self.service.address,)
        keys = [FLEETS[number % len(FLEETS)] for number in range(self.options.devices)]
        keys += [LEAVER] * LEAVERS
        self.devices = [Streamer(self, n, key, requests) for n, key in enumerate(keys)]
        living = [asyncio.create_task(one.live()) for one in self.devices]
        try:
            await asyncio.sleep(max(2.0, self.options.seconds / 2))
            calm = asyncio.sleep(self.options.seconds)
            for name, work in (
                ("calm", calm),
                ("rotation", self._rotation()),
                ("revocation", self._revocation()),
                (WRONG_KEYS, self._hostile(WRONG_KEYS)),
                ("flood", self._hostile(*FLOOD)),
                ("restart", self._restart()),
            ):
                await self._drill(name, work)
            await self._second_verifier()
            for name, work in (
                ("two", asyncio.sleep(self.options.seconds)),
                ("drain", self._drain()),
            ):
                await self._drill(name, work)
        finally:
            for task in living:
                task.cancel()
            ended = await asyncio.gather(*living, return_exceptions=True)
        self.findings += [f"a device failed: {e!r}" for e in ended if isinstance(e, Exception)]
        self.findings += await self.second.stop()

    async def _drill(self, name: str, work: Any) -> None:
        for device in self.devices:
            device.note()
        self.now, self.waits_s = outcome, waits_s = Outcome(name), list[float]()
        await work
        for device in self.devices:
            device.note()
        outcome.stall_s, outcome.p50_s = max(waits_s), median(waits_s)
        outcome.p99_s = quantiles(waits_s, n=100, method="inclusive")[98]
        self.outcomes.append(outcome)
        for kind in ("lost", "wrong"):
            if found := getattr(outcome, kind):
                self.findings.append(
                    f"{name}: {len(found)} texts are {kind}; the first: {found[0]}"
                )
        if not outcome.texts:
            self.findings.append(f"{name}: no text ended; give more --seconds")
        print(line(outcome), flush=True)

    async def _reload(self) -> None:
        self.reloads += 1
        self.service.signal(signal.SIGHUP)
        await self.service.reloaded(self.reloads)

    async def _rotation(self) -> None:
        certificate = self.folder / "server.pem"
        for _ in range(3):
            make_certificate(self.folder)
            await self._reload()
            if not await self.service.shows(certificate.read_text()):
                self.findings.append("rotation: the new certificate is not shown")
            await asyncio.sleep(self.options.seconds / 4)
        good = certificate.read_text()
        certificate.write_text("not a certificate")
        await self._reload()
        if not await self.service.shows(good):
            self.findings.append("rotation: a broken file replaced a good one")
        certificate.write_text(good)
        await asyncio.sleep(self.options.seconds / 4)

    async def _revocation(self) -> None:
        await asyncio.sleep(self.options.seconds / 4)
        path = self.folder / KEYS
        known = load_config(KeyFile, path).keys
        left = {name: one for name, one in known.items() if name != LEAVER}
        save_keys(path, KeyFile(left))
        asked_s = time.perf_counter()
        await self._reload()
        leavers = [one for one in self.devices if one.key == LEAVER]
        await until(lambda: all(one.refused_at is not None for one in leavers), START_WITHIN_S)
        took = [one.refused_at - asked_s for one in leavers if one.refused_at is not None]
        if len(took) < len(leavers) or max(took) > REVOKED_WITHIN_S:
            self.findings.append(f"revocation: {len(took)} of {len(leavers)} ended, {took}")
        self.now.notes |= {"ended": len(took), "longest_s": round(max(took, default=0.0), 3)}
        await asyncio.sleep(self.options.seconds * 3 / 4)

    async def _hostile(self, *kinds: str) -> None:
        """Run ``hostile_clients.py``, all with one key."""
        seconds, key, ca = self.options.seconds, self.folder / FLOODER, self.folder / "ca.pem"
        await self.hostile.start(self.service, kinds, seconds, key=key, ca=ca)
        tally = Counter[str]()
        for found in (await self.hostile.play()).values():
            tally.update(found)
        self.now.notes |= tally
        if WRONG_KEYS in kinds and (tally["let in"] or not tally["UNAUTHENTICATED"]):
            self.findings.append(f"wrong-keys: {tally}")

    async def _restart(self) -> None:
        asked_s = time.perf_counter()
        self.findings += await self.service.stop()
        ended_s = time.perf_counter()
        await self.service.start()
        ready_s = time.perf_counter()
        self.now.notes |= {
            "ended_after_s": round(ended_s - asked_s, 2),
            "next_ready_after_s": round(ready_s - asked_s, 2),
        }
        await asyncio.sleep(max(3.0, self.options.seconds))

    async def _second_verifier(self) -> None:
        """Start the second verifier, and add it to every device's list before its next text."""
        await self.second.start()
        self.addresses = (self.service.address, self.second.address)
        honest = [one for one in self.devices if one.refused_at is None]
        await until(lambda: all(one.knows == self.addresses for one in honest), START_WITHIN_S)

    async def _drain(self) -> None:
        """Stop the first verifier for good."""
        asked_s, moved = time.perf_counter(), sum(one.failovers for one in self.devices)
        self.findings += await self.service.stop()
        ended_s = time.perf_counter()
        self.now.notes["ended_after_s"] = round(ended_s - asked_s, 2)
        await asyncio.sleep(max(3.0, self.options.seconds))
        moved = sum(one.failovers for one in self.devices) - moved
        self.now.notes["texts_that_moved"] = moved
        # The others end within the time of the drain, or are refused before they begin.
        stayed = sum(
            not failovers
            for one in self.devices
            for first, last, failovers in one.broken
            if first < asked_s and last > ended_s
        )
        if stayed:
            self.findings.append(f"drain: {stayed} texts outlived their verifier and did not move")


def line(outcome: Outcome) -> str:
    notes = ", ".join(f"{name} {value}" for name, value in outcome.notes.items())
    waits = (outcome.p50_s, outcome.p99_s, outcome.stall_s)
    return (
        f"{outcome.name}: {outcome.texts} texts, {outcome.tokens} tokens, {len(outcome.lost)} lost,"
        f" {len(outcome.wrong)} wrong, {outcome.reconnects} reconnects; waits of"
        f" {' '.join(f'{1e3 * wait:.0f}' for wait in waits)} ms (p50, p99, longest)   {notes}"
    )


# --- the command -------------------------------------------------------------------------------


async def measure(options: argparse.Namespace, folder: Path) -> Drills:
    drills = Drills(options, folder)
    try:
        await drills.run()
    finally:
        for part in (drills.service, drills.second, drills.hostile):
            await kill(part)
    return drills


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=60, help="beside six that lose their key")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each drill, about")
    parser.add_argument("--pass-ms", type=float, default=40.0, help="emulated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        drills = asyncio.run(measure(options, Path(folder)))
    for finding in drills.findings:
        print(f"finding: {finding}")
    print(
        f"machine: {describe_machine()}\nversions: {list_versions()}\ncommand: {' '.join(sys.argv)}"
    )
    print(f"{len(drills.findings)} findings; {options.devices} devices, emulated pass time")
    if options.json is not None:
        rows = [vars(one) for one in drills.outcomes]
        report = {"drills": rows, "findings": drills.findings, "machine": describe_machine()}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if drills.findings else 0


if __name__ == "__main__":
    sys.exit(main())
