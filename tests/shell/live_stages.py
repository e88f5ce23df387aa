"""Verifiers of several processes, and devices that generate on them, as programs of their own."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.shell.live_verifier import ready, start

PROMPT = "the quick brown fox jumps over"
COUNT = 120
Daemon = tuple[str, "subprocess.Popen[str]"]


@contextlib.contextmanager
def stage_verifier(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Killed in the end, if it has not ended before."""
    where = ("--port", "0", "--device", "cpu", "--pass-ms", "25", "--set", "drain_s=3600")
    process = start("verifier", "--model", str(folder), *where, *options)
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def all_ready(*processes: subprocess.Popen[str]) -> Iterator[list[Daemon]]:
    """Started side by side, waited for together."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(ready(process)) for process in processes]


def other_stages(verifier: subprocess.Popen[str]) -> list[psutil.Process]:
    """All children but the one that waits for grammars."""
    every = psutil.Process(verifier.pid).children(recursive=True)
    return [child for child in every if not _tries_grammars(child)]


def _tries_grammars(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word.endswith("grammar_trial.py") for word in process.cmdline())
    return False


def generating(folder: Path, *addresses: str) -> subprocess.Popen[str]:
    where = [word for address in addresses for word in ("--verifier", address)]
    draft = ("--draft", "lookup", "--set", f"tokenizer={folder}")
    much = ("-n", str(COUNT), "--set", "sampling.ignore_eos=true", "--json")
    return start("generate", PROMPT, *where, *draft, *much)


def tokens_of(lines: list[str]) -> list[int]:
    return [token for line in lines for token in json.loads(line)["tokens"]]
