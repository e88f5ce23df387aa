"""Parts of a client's driver: each runs one use of the client and shows what came back.

A driver runs in the client's own environment, so this file uses the standard library alone. The
variables come from ``tests/clients/run.py``. Each part writes one line of JSON to the standard
output, with ``shows`` or ``error``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

URL = os.environ.get("EDGESPEC_CLIENT_URL", "")
"""Address of the endpoint, without a path."""
MODEL = os.environ.get("EDGESPEC_CLIENT_MODEL", "")
ASK: Mapping[str, str] = json.loads(os.environ.get("EDGESPEC_CLIENT_ASK", "{}"))
"""The message of the user, by part."""
CITY_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
OPENAI_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": WEATHER_SCHEMA,
    },
}


def read_weather(arguments: str | Mapping[str, object]) -> str:
    """Return the weather that a call with these arguments finds."""
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return f"21 degrees in {given['city']}"


def join_pieces(pieces: Iterable[str | None]) -> str:
    """Return the text of a stream. Raises ``ValueError`` if it came in one piece."""
    filled = [piece for piece in pieces if piece]
    if len(filled) < 2:
        raise ValueError(f"the stream has {len(filled)} pieces, but should have several")
    return "".join(filled)


def run_program(*command: str, stdin: str = "", **variables: str) -> str:
    """Run a program of the client, and return its output. Raises ``RuntimeError`` with the end of
    all that it wrote if it fails."""
    done = subprocess.run(
        command,
        input=stdin,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        written = (done.stdout + done.stderr).strip()[-800:]
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {written}")
    return done.stdout


def describe_task(answer: str) -> str:
    """Return what a task of three calls of the shell left behind, and the answer to it."""
    notes = Path("notes.txt")
    return f"{notes.read_text() if notes.is_file() else 'no notes.txt'}|{answer}"


def free_port() -> int:
    """Return a port that no server uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_until(process: subprocess.Popen[str], *texts: str) -> None:
    """Read the output of a server up to a line with one of ``texts``, and the rest in the
    background. Raises ``RuntimeError`` with what it wrote if it ends before."""
    assert process.stdout is not None
    written = []
    for line in process.stdout:
        written.append(line)
        if any(text in line for text in texts):
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return
    raise RuntimeError(f"the server ended: {''.join(written)[-800:]}")


def run_parts(**parts: Callable[[], object]) -> None:
    """Run the parts that are asked for, and write a line for each."""
    for name in os.environ.get("EDGESPEC_CLIENT_PARTS", "").split() or parts:
        try:
            line = {"part": name, "shows": str(parts[name]())}
        except Exception as error:
            line = {"part": name, "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(f"\n{json.dumps(line)}\n")
        sys.stdout.flush()
