"""One set-up after another on real kernels: namespaces, a verifier, a device, a relay between."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kernel_device import Load, as_json
from namespaces import VERIFIER_ADDRESS, Namespace, linked_namespaces
from packet_relay import LineSettings, PacketRelay, be_prompt

from edgespec.benchmark.arms import Arm

ROOT = Path(__file__).resolve().parent.parent
_READY = re.compile(rb"ready on \S+:(\d+):")
_STOP_WITHIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One set-up. ``loss`` is of each direction's packets."""

    arm: Arm
    sessions: int
    rtt_ms: float
    loss: float

    @property
    def name(self) -> str:
        return (
            f"{self.arm.value:11s} {self.sessions:2d} sessions  RTT {self.rtt_ms:3g} ms"
            f"  loss {100 * self.loss:g} %"
        )


Rows = list[tuple[float, float]]
"""TTFT and TPOT of requests, in seconds."""


class Bench:
    """Namespaces, a verifier and a device, for cells one after another; a context manager.
    ``pass_ms`` is the verifier's."""

    def __init__(self, pass_ms: float) -> None:
        self._pass_ms = pass_ms
        self._stack = ExitStack()

    def __enter__(self) -> Bench:
        with self._stack:
            nothing = LineSettings()
            ends = self._stack.enter_context(linked_namespaces(nothing, nothing))
            self._client, self._server, self._relay = ends
            port = self._stack.enter_context(_verifier(self._server, self._pass_ms))
            script = str(ROOT / "benchmarks" / "kernel_device.py")
            command = (sys.executable, script, f"{VERIFIER_ADDRESS}:{port}")
            self._device = self._stack.enter_context(_process(self._client, command))
            self._read_line()
            _promptly(self._device)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def play(self, cell: Cell, load: Load) -> tuple[Rows, str]:
        """And what the relay and the kernel counted. Over a connection of its own."""
        one_way_s = cell.rtt_ms / 2e3
        self._relay.become(
            *(LineSettings(one_way_s, cell.loss, seed=2 * load.seed + way) for way in (0, 1))
        )
        before = self._server.counters()
        assert self._device.stdin is not None
        self._device.stdin.write(as_json(load).encode() + b"\n")
        self._device.stdin.flush()
        rows = [(ttft, tpot) for _, ttft, tpot in json.loads(self._read_line())]
        return rows, _counted(self._relay, before, self._server.counters())

    def _read_line(self) -> bytes:
        assert self._device.stdout is not None
        line = self._device.stdout.readline()
        if not line:
            raise RuntimeError(f"the device ended with {self._device.wait()}")
        return line


@contextmanager
def _verifier(namespace: Namespace, pass_ms: float) -> Iterator[int]:
    """A verifier process; its port."""
    options = "--model toy --port 0 --insecure --no-server-drafts --drain-s 0".split()
    command = (sys.executable, "-m", "edgespec", "verifier", *options)
    command += ("--host", VERIFIER_ADDRESS, "--pass-ms", f"{pass_ms:g}")
    with _process(namespace, command) as process:
        assert process.stdout is not None
        found = _READY.search(process.stdout.readline())
        if found is None:
            raise RuntimeError("the verifier did not start")
        _promptly(process)
        yield int(found[1])


def _promptly(process: subprocess.Popen[bytes]) -> None:
    """All its threads, now that it has started; those that it starts later inherit it."""
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        be_prompt(int(task.name))


@contextmanager
def _process(namespace: Namespace, command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Ended with the block, whatever ends that."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "sim"), str(ROOT / "benchmarks")))
    process = namespace.start(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_WITHIN_S)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def _counted(relay: PacketRelay, before: dict[str, int], after: dict[str, int]) -> str:
    up, down = relay.there.counts, relay.back.counts
    late = sorted(up.late_s + down.late_s)
    wanted = ("TCPTimeouts", "TCPLossProbes", "TCPSackRecovery", "TCPSpuriousRTOs")
    return (
        f"up {up.data} data of {up.packets} packets, {up.dropped_data} lost;"
        f" down {down.data} of {down.packets}, {down.dropped_data} lost;"
        f" relay late by {1e3 * late[len(late) // 2]:.2f} ms (p99"
        f" {1e3 * late[int(0.99 * len(late))]:.1f}); verifier's kernel "
        + ", ".join(
            f"{name.removeprefix('TCP')} {after.get(name, 0) - before.get(name, 0)}"
            for name in wanted
        )
    )
