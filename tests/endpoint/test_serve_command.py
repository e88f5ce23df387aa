"""``edgespec serve`` as a process: what it says at first, what it refuses, how it stops."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import ToyTokenizer
from tests.present import present
from tests.shell.live_verifier import call, daemon, ready, start, toy_text

WITHIN_S = 60
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
TOY = ("--draft", "toy", "--port", "0")


@contextlib.contextmanager
def endpoint(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The real process; yields its URL."""
    with ready(start("serve", *TOY, *options), r"ready on (http://\S+)/v1") as found:
        yield found


def curl(*arguments: str) -> Any:
    done = subprocess.run(
        ["curl", "-sN", "--max-time", "30", *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@needs_curl
def test_the_first_run_tells_what_it_chose_and_its_curl_line_works() -> None:
    with daemon() as (address, _), endpoint("--verifier", address) as (url, process):
        lines = [present(process.stderr).readline() for _ in range(6)]
        words = [line.split()[0] for line in lines]
        assert words == ["draft", "verifier", "memory", "clients", "see:", "try:"]
        assert f"{address}: serves toy, context 4096" in lines[1]
        done = subprocess.run(
            ["bash", "-c", lines[5].partition("try: ")[2].replace("curl ", "curl -s ")],
            capture_output=True,
            text=True,
            check=True,
        )
        answer = json.loads(done.stdout)
        tokens = ToyTokenizer().encode("Hello! ")
        expected = ToyTokenizer().decode(toy_text(tokens, SamplingParams(max_tokens=64)))
        assert answer["choices"][0]["message"]["content"] == expected
        assert curl(f"{url}/health")["status"] == "ok"
        process.send_signal(signal.SIGINT)
        assert process.wait(WITHIN_S) == 0


@needs_curl
@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_then_tells_it() -> None:
    with daemon("--pass-ms", "50") as (address, _):
        with endpoint("--verifier", address, "--set", "endpoint.drain_s=0.2") as (url, process):
            body = {"prompt": "abc", "max_tokens": 4000, "stream": True, "ignore_eos": True}
            asking = subprocess.Popen(
                ["curl", "-sN", f"{url}/v1/completions", "-d", json.dumps(body)],
                stdout=subprocess.PIPE,
                text=True,
            )
            with asking:
                assert asking.stdout is not None
                assert asking.stdout.readline().startswith("data: {")
                process.send_signal(signal.SIGTERM)
                rest = asking.stdout.read()
            assert '"code":"shutting_down"' in rest.splitlines()[-2]
            assert process.wait(WITHIN_S) == 0
            said = present(process.stderr).read()
            assert "stopping: 1 requests may go on for 0.2 s" in said
            assert "Traceback" not in said


def test_flags_are_settings_of_the_endpoint() -> None:
    given = ("--port", 9, "--allow-origin", "https://a.example", "--set", "endpoint.insecure=true")
    most = ("--set", "endpoint.default_max_tokens=7")
    first = call("serve", *given, *most, "--help-all").stdout
    shown = yaml.safe_load(first)
    assert shown["endpoint"]["port"] == 9
    assert shown["endpoint"]["allow_origins"] == ["https://a.example"]
    assert (shown["endpoint"]["insecure"], shown["insecure"]) == (True, False)
    assert shown["endpoint"]["default_max_tokens"] == 7
    assert call("serve", "--set", "insecure=true", "--help-all").stdout.count("insecure: true") == 1
