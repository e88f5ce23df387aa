"""Verifiers for tests, in this event loop or as the real daemon in a process of its own, and
helpers that run commands and programs of this checkout."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.models.toy import TOY_MODEL
from edgespec.verifier.build import build_verifier
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.paced import PacedTarget
from edgespec.wire.access import ServerAccess
from tests.present import require
from tests.sources import ROOT


@contextlib.asynccontextmanager
async def serve_toy(
    target: TargetModel | None = None,
    port: int = 0,
    config: VerifierConfig | None = None,
    access: ServerAccess | None = None,
) -> AsyncIterator[tuple[str, Verifier]]:
    """Serve a toy verifier on 127.0.0.1 over real gRPC; yield its address."""
    config = config or VerifierConfig(model="toy", port=port)
    verifier, server = build_verifier(config, target=target, access=access)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}", verifier
    finally:
        await verifier.stop()
        await server.stop(0.0)


def toy_text(
    prompt: Sequence[int], params: SamplingParams, model: ToyModel = TOY_MODEL
) -> list[int]:
    """Return the oracle's generation: one token after the other, by the scalar specification."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        output = tokens[len(prompt) :]
        row = model.logits(tokens)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else (model.eos_token,))}
        if len(output) < params.min_tokens:
            row = [-math.inf if token in ends else score for token, score in enumerate(row)]
        token = choose(row, params, len(tokens), prompt, output)
        tokens.append(token)
        if token in ends:
            break
    return tokens[len(prompt) :]


async def wait_until(holds: Callable[[], object]) -> None:
    """Run the event loop until the condition holds; for conditions that have no event."""
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


class GatedTarget(PacedTarget):
    """A target that lets ``free_passes`` sampling passes through and then waits for ``gate``."""

    def __init__(self, inner: TargetModel, free_passes: int) -> None:
        super().__init__(inner, 0.0, 0.0, time.sleep, time.monotonic)
        self._left = free_passes
        self.gate = threading.Event()
        self.reached = threading.Event()

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        if any(request.sample for request in batch):
            if self._left == 0:
                self.reached.set()
                self.gate.wait()
            else:
                self._left -= 1
        return super().forward(batch)


def child_environment() -> dict[str, str]:
    """Return the environment of a child process that runs this checkout."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "sim")))}


def run_command(*arguments: object, stdin: str | bytes | None = None) -> Result:
    """Run ``edgespec`` with these arguments in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)], input=stdin)


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this checkout's interpreter with these arguments until it has ended. ``env`` is added to
    the environment of this process."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=child_environment() | dict(env or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def start(
    *arguments: str, module: str = "edgespec", has_input: bool = False
) -> subprocess.Popen[str]:
    """Start ``edgespec`` (or another module) in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=child_environment(),
        stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def start_daemon(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run the real daemon with the toy model on a free port; yield its address and process."""
    with wait_until_ready(start("verifier", "--model", "toy", "--port", "0", *options)) as found:
        yield found


@contextlib.contextmanager
def occupy_address() -> Iterator[str]:
    """Yield an address of this machine where no server listens and no other process can begin to
    listen."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        yield f"127.0.0.1:{taken.getsockname()[1]}"


# The range is below the ports that the system assigns by itself, and each process has some of its
# own.
_ports = itertools.count(20_000 + 16 * (os.getpid() % 780))


def own_port() -> int:
    """Return a free port that stays free while no server listens on it, so that a new verifier can
    replace one that died. Tests that run at the same time are given other ports."""
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def wait_until_ready(
    process: subprocess.Popen[str], at: str = r"ready on (\S+:\d+): "
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Wait until a daemon that was just started prints its address; kill it in the end."""
    with process:
        try:
            line = require(process.stdout).readline()
            found = re.search(at, line)
            assert found is not None, line + (process.stderr.read() if process.stderr else "")
            yield found[1], process
        finally:
            process.kill()
