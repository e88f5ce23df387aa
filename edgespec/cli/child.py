"""A verifier in a process of its own, for as long as a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence

from edgespec.cli.verifier import WITH_PARENT
from edgespec.config.setup_error import SetupError

# Loading torch and a model on a slow machine.
READY_WITHIN_S = 60.0
PLAIN_STREAMING = "--set=server_drafts=false"
"""For what compares with plain streaming, or measures it: a pass without a draft commits one
token."""
_STOPS_WITHIN_S = 5.0
_LAST_WORDS_BYTES = 4000
_READY = re.compile(r"ready on (\S+):(\d+): (.*)")


@contextlib.asynccontextmanager
async def verifier_process(options: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """Start ``edgespec verifier`` on a free port; yields its address and what it says it serves.

    The process is ended with the block, whatever ends that, and with this process, even if that is
    killed: it reads a pipe that only this process holds open. Raises ``SetupError`` with the
    child's own words when it does not come up.
    """
    command = [sys.executable, "-m", "edgespec", "verifier", WITH_PARENT, "--port", "0", *options]
    with tempfile.TemporaryFile() as words:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
            # A Ctrl-C in the terminal is ours to pass on.
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            try:
                async with asyncio.timeout(READY_WITHIN_S):
                    line = await process.stdout.readline()
            except TimeoutError:
                line = b""
            found = _READY.search(line.decode(errors="replace"))
            if found is None:
                words.seek(0)
                said = words.read(_LAST_WORDS_BYTES).decode(errors="replace").strip()
                raise SetupError(f"the verifier did not start\n{said or 'it said nothing'}")
            yield f"{found[1]}:{found[2]}", found[3]
        finally:
            await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STOPS_WITHIN_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
