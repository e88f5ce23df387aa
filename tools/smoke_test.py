"""Smoke tests of an installed edgespec, one for each extra.

This file is run by the Python of the environment that is tested, from an empty folder, and imports
nothing of the project: only the commands and modules that the wheel installed are used.

    ENVIRONMENT/bin/python -I tools/smoke_test.py cpu serve
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

TIMEOUT_S = 300
BIN = Path(sysconfig.get_path("scripts"))
BUNDLED = (
    "import edgespec, pathlib; print(pathlib.Path(edgespec.__file__).parent / 'models/bundled')"
)
GRAMMAR = 'start: "a" "b" "c"\n'


class SmokeError(Exception):
    """A smoke test failed. The message holds the command and its output."""


def run(*words: str, code: int = 0, stdin: str = "") -> str:
    """Run a command of the environment, require its exit code, and return its output."""
    command = [str(BIN / words[0]), *words[1:]]
    done = subprocess.run(
        command, input=stdin, capture_output=True, encoding="utf-8", timeout=TIMEOUT_S, check=False
    )
    if done.returncode != code or "Traceback" in done.stderr:
        raise SmokeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout


def require(holds: bool, what: str) -> None:
    """Raise ``SmokeError`` with ``what`` was expected unless it ``holds``."""
    if not holds:
        raise SmokeError(what)


@contextlib.contextmanager
def started(pattern: str, *words: str) -> Iterator[str]:
    """Start a command that stays, wait for the line that has ``pattern``, and yield its group."""
    process = subprocess.Popen(
        [str(BIN / words[0]), *words[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            line = process.stdout.readline()
            found = re.search(pattern, line)
            if found is None:
                process.kill()
                raise SmokeError(f"{' '.join(words)}: {line}{process.stderr.read()}")
            yield found[1]
        finally:
            process.kill()


def verifier(model: str = "toy") -> contextlib.AbstractContextManager[str]:
    return started(r"ready on (\S+:\d+):", "edgespec", "verifier", "--model", model, "--port", "0")


def check_base() -> None:
    """The base install streams from a verifier, plans, and names the library that a draft needs."""
    require("edgespec " in run("edgespec", "--version"), "--version prints the version")
    run("edgespec", "plan", "link", "--rtt-ms", "50", "--acceptance", "0.7")
    run("edgespec", "models")
    with verifier() as address:
        where = ("--verifier", address, "-n", "16")
        plain = run("edgespec", "generate", "Hello", *where, "--draft", "none")
        drafted = run("edgespec", "generate", "Hello", *where, "--draft", "toy")
        require(plain == drafted != "", "drafts change no output")


def check_cpu() -> None:
    """The bundled draft makes a step."""
    shown = run("edgespec", "doctor")
    require("draft step: works" in shown, shown)


def check_server() -> None:
    """The bundled target serves, and lookup on the device changes no output."""
    with verifier("bundled") as address:
        where = ("--verifier", address, "-n", "16", "-t", "0")
        plain = run("edgespec", "generate", "def f", *where, "--draft", "none")
        drafted = run("edgespec", "generate", "def f", *where, "--draft", "lookup")
        require(plain == drafted != "", "drafts change no output")


def check_serve() -> None:
    """The endpoint answers a completion."""
    with (
        verifier() as address,
        started(
            r"ready on (\S+)/v1",
            *("edgespec", "serve", "--verifier", address, "--draft", "toy", "--port", "0"),
        ) as url,
    ):
        body = json.dumps({"model": "edgespec", "prompt": "Hello", "max_tokens": 8}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            require(json.load(answer)["usage"]["completion_tokens"] == 8, "8 tokens are answered")


def check_export() -> None:
    """The bundled draft's checkpoint becomes a graph."""
    (bundled,) = run("python", "-c", BUNDLED).splitlines()
    run("edgespec", "export", str(Path(bundled) / "draft"), "exported")
    require(Path("exported/model.onnx").is_file(), "exported/model.onnx is written")


def check_sim() -> None:
    """A scenario is played, and its page is written."""
    run("edgespec-sim", "run", "single-device", "--seeds", "1", "--out", "played")
    require(any(Path("played").rglob("*.html")), "a page is written")


def check_uara() -> None:
    """A sweep over one world is played."""
    run("python", "-m", "edgespec_uara.sweep", "--help")
    run("python", "-c", "import scipy.optimize, plotly, edgespec_uara.sweep")


def check_grammar() -> None:
    """An output is held to a grammar."""
    Path("grammar.lark").write_text(GRAMMAR, encoding="utf-8")
    with verifier() as address:
        given = ("--verifier", address, "--draft", "toy", "--grammar", "grammar.lark")
        text = run("edgespec", "generate", "x", *given, "-n", "16")
        require(text == "abc\n", text)


def check_certs() -> None:
    """A CA, a certificate and a key are made, and a device connects with them."""
    run("edgespec", "certs", "ca")
    run("edgespec", "certs", "server", "localhost")
    key = run("edgespec", "keys", "add", "laptop", "--file", "keys.yaml").strip()
    Path("key").write_text(key, encoding="utf-8")
    Path("key").chmod(0o600)
    options = ("--tls-cert", "server.pem", "--tls-key", "server.key", "--keys", "keys.yaml")
    command = ("edgespec", "verifier", "--model", "toy", "--port", "0", *options)
    with started(r"ready on \S+:(\d+):", *command) as port:
        where = ("--verifier", f"localhost:{port}", "--ca", "ca.pem", "--api-key-file", "key")
        require(run("edgespec", "generate", "x", *where, "--draft", "toy", "-n", "4") != "", "text")


CHECKS: dict[str, Callable[[], None]] = {
    "base": check_base,
    "cpu": check_cpu,
    "server": check_server,
    "serve": check_serve,
    "export": check_export,
    "sim": check_sim,
    "uara": check_uara,
    "grammar": check_grammar,
    "certs": check_certs,
}
"""Smoke test of each extra. ``base`` is the install without extras."""


def main(names: list[str]) -> None:
    """Run the smoke tests of the extras ``names``. Exit with 1 at the first that fails."""
    for name in names:
        try:
            CHECKS[name]()
        except (SmokeError, OSError, subprocess.TimeoutExpired) as error:
            sys.exit(f"smoke test {name}: {error}")
        print(f"smoke test {name}: passed")


if __name__ == "__main__":
    main(sys.argv[1:])
