"""The verifiers that ``service_drill.py`` drills: processes with TLS and keys, and their files."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import signal
import ssl
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from pathlib import Path

from load_processes import START_WITHIN_S, ready_verifier

from edgespec.config.key_file import KeyEntry, KeyFile, new_key, save_keys
from edgespec.transport.certificates import make_ca, make_server

FLEETS = ("fleet-a", "fleet-b", "fleet-c", "fleet-d")
LEAVER, FLOODER = "leaver", "flooder"
DRAIN_S = 2.0


async def until(true: Callable[[], bool], within_s: float) -> None:
    """Look again and again, for no longer than that."""
    ends_s = time.perf_counter() + within_s
    for _ in itertools.takewhile(lambda _: time.perf_counter() < ends_s, itertools.count()):
        if true():
            return
        await asyncio.sleep(0.02)


def make_files(folder: Path) -> None:
    """A CA, a certificate, the keys, and each device's own one."""
    make_ca(folder, "drill", 30)
    make_certificate(folder)
    made = {name: new_key() for name in (*FLEETS, LEAVER, FLOODER)}
    limits = {FLOODER: 4}
    entries = {
        name: KeyEntry(sha256, max_sessions=limits.get(name, 0))
        for name, (_, sha256) in made.items()
    }
    save_keys(folder / "keys.yaml", KeyFile(entries))
    for name, (key, _) in made.items():
        (folder / f"{name}.key").write_text(key)


def make_certificate(folder: Path) -> None:
    make_server(folder, ["127.0.0.1"], 7, force=True)


class Service:
    """One verifier process; several share a folder of files."""

    def __init__(self, options: argparse.Namespace, folder: Path, name: str = "verifier") -> None:
        self.options, self.folder, self.port = options, folder, 0
        self.log, self.keys_path = folder / f"{name}.log", folder / "keys.yaml"
        self.process: Process | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        certificate, key = str(self.folder / "server.pem"), str(self.folder / "server.key")
        sessions = str(2 * self.options.devices + 32)
        with self.log.open("a") as log:
            self.process, self.port = await ready_verifier(
                *("--model", "toy", "--port", str(self.port)),
                *("--pass-ms", str(self.options.pass_ms), "--max-sessions", sessions),
                *("--tls-cert", certificate, "--tls-key", key, "--keys", str(self.keys_path)),
                *("--drain-s", str(DRAIN_S)),
                stderr=log,
            )

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def end(self) -> int:
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), START_WITHIN_S)

    async def kill(self) -> None:
        """For the end of a run that went wrong."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def shows(self, certificate: str) -> bool:
        """Whether a new connection is shown it."""
        address = ("127.0.0.1", self.port)
        shown = await asyncio.to_thread(ssl.get_server_certificate, address)
        return shown.strip() == certificate.strip()

    async def reloaded(self, count: int) -> None:
        """Wait until the log tells of so many reloads."""
        await until(lambda: self.log.read_text().count("reload: ") >= count, START_WITHIN_S)
