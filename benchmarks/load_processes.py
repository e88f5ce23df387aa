"""The processes that ``hostile_load.py`` starts: the verifier, honest devices, hostile clients."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from pathlib import Path
from typing import Any

import psutil

from edgespec.config import LimitsSection, PacingSection, VerifierConfig, dump_config
from edgespec.config.key_file import KeyEntry, KeyFile, new_key, save_keys

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
# Also for a loaded machine.
START_WITHIN_S = 120.0


async def start(script: str, *arguments: str, stderr: Any = None) -> Process:
    """A script of this folder in a process of its own, with pipes to and from it."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = (sys.executable, str(HERE / script), *arguments)
    return await asyncio.create_subprocess_exec(
        *command, stdin=PIPE, stdout=PIPE, stderr=stderr, env=environment, limit=1 << 26
    )


async def line_of(process: Process) -> str:
    """The next line that the process prints. Raises ``RuntimeError`` when there is none."""
    assert process.stdout is not None
    async with asyncio.timeout(START_WITHIN_S):
        line = (await process.stdout.readline()).decode()
    if not line:
        raise RuntimeError(f"process {process.pid} ended with {await process.wait()}")
    return line


async def ready_verifier(*options: str, stderr: Any = DEVNULL) -> tuple[Process, int]:
    """A verifier process with these options, once it serves, and its port."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "sim")))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "edgespec", "verifier", *options),
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": paths},
    )
    line = await line_of(process)
    if "ready on" not in line:
        raise RuntimeError(f"the verifier did not start: {line}")
    return process, int(line.split(": ")[0].rpartition(":")[2])


async def tell(process: Process, word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n".encode())
    await process.stdin.drain()


FLOODER = "flooder"


def make_keys(folder: Path, options: Any) -> Path:
    """A key for each honest device (``device-N``) and one for all hostile clients, each in a file
    of its name; the verifier's file of them."""
    limits = {FLOODER: options.flood_sessions}
    names = [f"device-{number}" for number in range(options.devices + options.victims)]
    entries: dict[str, KeyEntry] = {}
    for name in (*names, FLOODER):
        key, digest = new_key()
        (folder / name).write_text(key)
        entries[name] = KeyEntry(digest, max_sessions=limits.get(name, 0))
    path = folder / "keys.yaml"
    save_keys(path, KeyFile(entries))
    return path


class Verifier:
    """The daemon, its log in a file; ``look`` says what it holds."""

    def __init__(self, options: Any, folder: Path) -> None:
        self.port = self.context_length = 0
        self._folder, self._log = folder, folder / "verifier.log"
        self._report = folder / "report.json"
        self._looks = 0
        rows = getattr(options, "rows_per_pass", LimitsSection().max_rows_per_pass)
        limits = LimitsSection(
            max_sessions=options.max_sessions,
            max_cached_tokens=options.cached_tokens,
            max_rows_per_pass=rows,
            lease_s=options.lease_s,
        )
        config = VerifierConfig(
            model=options.model,
            port=0,
            pacing=PacingSection(options.pass_ms),
            limits=limits,
            keys=str(make_keys(folder, options)) if getattr(options, "keys", False) else "",
            server_drafts=getattr(options, "server_drafts", True),
            drain_s=0.0,
        )
        (folder / "verifier.yaml").write_text(dump_config(config))
        self._flags = ("--profile", str(options.profile)) if options.profile else ()
        self._flags += tuple(getattr(options, "verifier_flags", ()))

    async def start(self) -> None:
        settings = ("--config", str(self._folder / "verifier.yaml"))
        with self._log.open("w") as log:
            self.process = await start(
                "watched_verifier.py", str(self._report), *self._flags, *settings, stderr=log
            )
        line = await line_of(self.process)
        if "ready on" not in line:
            raise RuntimeError(f"the verifier did not start: {line}{self.log}")
        self.port = int(line.split(": ")[0].rpartition(":")[2])
        self.context_length = int(line.rpartition("context ")[2])

    @property
    def log(self) -> str:
        return self._log.read_text()

    async def look(self) -> dict[str, Any]:
        """Its own counts, and its memory, file descriptors and CPU time from outside."""
        self._looks += 1
        self.process.send_signal(signal.SIGUSR1)
        for _ in range(1_000):
            await asyncio.sleep(0.01)
            if self._report.exists():
                found: dict[str, Any] = json.loads(self._report.read_text())
                if found["asked"] == self._looks:
                    break
        else:
            raise RuntimeError("the verifier does not answer")
        outside = psutil.Process(self.process.pid)
        times = outside.cpu_times()
        found["resident_bytes"] = outside.memory_info().rss
        found["descriptors"] = outside.num_fds()
        found["cpu_s"] = times.user + times.system
        found["read"] = sum(found["messages"].get(name, 0) for name in UPLINK)
        return found

    async def stop(self) -> int:
        """End it as a supervisor does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self.process.wait(), 20.0)
        except TimeoutError:
            self.process.kill()
            return await self.process.wait()


UPLINK = ("Open", "Draft", "Received", "Cancel")


class Crowd:
    """Honest devices beside the measured ones."""

    async def start(self, port: int, requests: Path, options: Any) -> None:
        arguments = (str(port), str(requests), "--devices", str(options.devices))
        if getattr(options, "keys", False):
            arguments += ("--keys", str(requests.parent))
        more = ("--model", options.model, "--seed", str(options.seed))
        self.process = await start("honest_devices.py", *arguments, *more)
        await line_of(self.process)

    async def cut_links(self, yes: bool) -> None:
        await tell(self.process, "cut" if yes else "mend")

    async def stop(self) -> dict[str, Any]:
        """What became of their texts."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        found: dict[str, Any] = json.loads(await line_of(self.process))
        await self.process.wait()
        return found


class Hostile:
    """Hostile clients; they stand ready until ``play``."""

    async def start(
        self, verifier: Verifier, kinds: list[str], seconds: float, seed: int, key: Path | None
    ) -> None:
        port, context = str(verifier.port), ("--context-length", str(verifier.context_length))
        what = ("--kinds", ",".join(kinds), "--seconds", str(seconds), "--seed", str(seed))
        shown = () if key is None else ("--key-file", str(key))
        self.process = await start(
            "hostile_clients.py", port, *what, *context, *shown, stderr=DEVNULL
        )
        await line_of(self.process)

    async def play(self) -> dict[str, dict[str, int]]:
        """What they sent in their time, by kind; then they are killed, all streams open."""
        await tell(self.process, "go")
        found: dict[str, dict[str, int]] = json.loads(await line_of(self.process))
        self.process.kill()
        await self.process.wait()
        return found


def kill(process: Process | None) -> None:
    """For the end of a run that went wrong."""
    if process is not None and process.returncode is None:
        process.kill()
