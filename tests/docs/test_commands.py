"""The shell commands of every page: their options exist, and what can run here runs.

Oracle: the program's own command line, and exit status 0. A command that cannot run in a test
matches a rule of ``NOT_RUN``, which says why; a rule that no page needs is removed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documented_commands import (
    Block,
    list_unknown_words,
    read_blocks,
    split_ours,
    strip_comment,
)
from tests.sources import project_files

# `make clients` runs what stands there, with the clients themselves.
ELSEWHERE = ("docs/clients.md",)
BLOCKS = [
    block
    for page in project_files()
    if page.endswith(".md") and not page.startswith(".github/") and page not in ELSEWHERE
    for block in read_blocks(page)
]
NOT_RUN = {
    "needs the package index": r"\bpip install\b",
    "needs a model from the Hub, from Ollama or from a file of the user": (
        r"Qwen3?/|Qwen3-|qwen3-|meta-llama/|onnx-community/|ollama:|hf\.co/|smollm2|some/target"
        r"|SMOLLM2|edgespec demo"
    ),
    "names a machine that is not here": r"gpu-box:|gemma-box:|edgespec-verifier\.edgespec\.svc:",
    "serves until it is stopped (tests/cli/test_service_processes.py)": (
        r"^edgespec (serve|verifier)\b"
    ),
    "talks to a person at a terminal (tests/cli/test_chat.py)": r"^edgespec chat\b",
    "needs vLLM (make unit-vllm)": r"vllm-env/|--model sql",
    "trains for minutes, on texts of the user (tests/training)": r"edgespec distill|\./mine\b",
    "measures for minutes": (
        r"edgespec bench|edgespec_uara\.(reproduce|sweep (?!.*--vary))|^python benchmarks/"
    ),
    "is what runs this test": r"^make\b",
    "needs another program and a target for it (make clients)": (r"^lm_eval\b|^claude$|ANTHROPIC_"),
    "needs a Jetson, or an environment for it": r"^sudo\b|^python3 -m venv edgespec\b",
    "changes the machine (tests/deploy judges the files)": (
        r"^(docker|kubectl|systemctl|loginctl|install|useradd)\b|/opt/edgespec|/etc/edgespec"
    ),
    "reads a recording of the user (tests/sim has recordings of each kind)": (
        r"^edgespec-sim trace \w|trace=trace_1\b|mobility=fcd\.xml"
    ),
    "needs a key that another command printed": r"EDGESPEC_API_KEY=\.\.\.",
    "runs in a checkout and is a test already (tests/deploy, tests/test_tidy.py)": (
        r"^promtool\b|^python -m tools\."
    ),
}


def find_reason(command: str) -> str | None:
    """Return why a command does not run here, or None if it does."""
    found = [reason for reason, rule in NOT_RUN.items() if re.search(rule, command)]
    return found[0] if found else None


RUNNABLE = [block for block in BLOCKS if not all(find_reason(one) for one in block.commands)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_the_command_line_knows_every_word(block: Block) -> None:
    for command in block.commands:
        for program, words in split_ours(command):
            assert not list_unknown_words(words, program), command


def test_every_rule_is_needed() -> None:
    commands = [one for block in BLOCKS for one in block.commands]
    unused = [why for why, rule in NOT_RUN.items() if not any(re.search(rule, c) for c in commands)]
    assert not unused
    assert len(RUNNABLE) > 5


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a user with the programs installed and a verifier of the bundled pair
    running."""
    home = tmp_path_factory.mktemp("home")
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith("EDGESPEC_")
    }
    programs = Path(sys.executable).parent
    variables |= {
        **{"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "HF_HUB_OFFLINE": "1"},
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
    }
    with subprocess.Popen(
        [programs / "edgespec", "verifier", "--model", "bundled", "--port", "0"],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as verifier:
        assert verifier.stdout is not None
        said = []
        for line in verifier.stdout:
            said.append(line)
            if found := re.search(r"127\.0\.0\.1:(\d+)", line):
                variables["EDGESPEC_VERIFIER"] = f"127.0.0.1:{found[1]}"
                break
        assert "EDGESPEC_VERIFIER" in variables, said
        try:
            yield variables
        finally:
            verifier.terminate()
            verifier.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("block", RUNNABLE, ids=str)
def test_what_can_run_runs(block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    for command in block.commands:
        if find_reason(command) is None:
            ended = subprocess.run(
                ["bash", "-euc", strip_comment(command)],
                cwd=tmp_path,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=1200,
                check=False,
            )
            assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
