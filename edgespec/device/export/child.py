"""A program in a process of its own: its words line by line, and an end that is certain.

Its process is the head of a group, so what it starts ends with it. Whoever is cancelled while it
runs (Ctrl-C, SIGTERM) ends it first: asked to at once, killed after a while.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from edgespec.config.setup_error import SetupError

_KEPT_LINES: Final = 12
_MAX_LINE_BYTES: Final = 1 << 16
_PATIENCE_S: Final = 3.0
# What a child must not take over from this process: it has packages of its own.
_NOT_PASSED_ON: Final = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")

Hear = Callable[[str], None]


class ChildError(SetupError):
    """A program failed; the message has its last words."""


async def run_child(
    what: str, command: Sequence[str], hear: Hear, more: Mapping[str, str] | None = None
) -> None:
    """Run ``command`` to its end; ``hear`` gets each line it writes, ``more`` are further
    variables of its environment. Raises ``ChildError`` that calls it ``what``."""
    environment = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**environment, "PYTHONUNBUFFERED": "1", **(more or {})},
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
    )
    try:
        process = await asyncio.shield(starting)
    except asyncio.CancelledError:
        # asyncio itself would end the child alone, and not what the child has started.
        with suppress(OSError):
            await _end(await starting)
        raise
    except OSError as error:
        raise ChildError(f"{what} cannot be started: {command[0]}: {error.strerror}") from error
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    try:
        assert process.stdout is not None
        await _listen(process.stdout, last, hear)
        code = await process.wait()
    finally:
        await _end(process)
    if code:
        how = f"ended by signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = "".join(f"\n  {line}" for line in last) or " without a word"
        raise ChildError(f"{what} failed ({how}):{words}")


async def _listen(stream: asyncio.StreamReader, last: deque[str], hear: Hear) -> None:
    """Until the child and all it has started have closed their output. Progress bars, which go
    back to the start of their line, are lines here too."""
    rest = b""
    while chunk := await stream.read(_MAX_LINE_BYTES):
        *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        rest = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            _tell(line, last, hear)
    _tell(rest, last, hear)


def _tell(line: bytes, last: deque[str], hear: Hear) -> None:
    text = line.decode("utf-8", errors="replace").strip()
    text = "".join(character for character in text if character.isprintable())
    if text:
        last.append(text)
        hear(text)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Leave nothing of the child's group behind."""
    if process.returncode is None:
        _signal(process.pid, signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                await process.wait()
    _signal(process.pid, signal.SIGKILL)
    await process.wait()


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
