"""A small run of ``benchmarks/daemon_load.py``: the script compares every token with the target's
own text; here, that it counts what was played. Its times are for a quiet machine."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell.live_verifier import environment
from tests.shell.raw_http2 import RawCall
from tests.sources import ROOT

SCRIPT = "benchmarks/daemon_load.py"


@pytest.mark.slow
def test_the_load_is_what_it_says(tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    options = ("--sessions", "4", "--messages", "1,2", "--repeats", "1", "--seconds", "2")
    done = subprocess.run(
        [sys.executable, SCRIPT, *options, "--json", str(report)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    points = json.loads(report.read_text())["points"]
    assert [point["messages"] for point in points] == [1, 2]
    for point in points:
        assert point["passes"] > 0
        assert point["wrong"] == point["ended"] == 0
        # A commit a pass, give or take the passes between the looks at one side and the other.
        assert point["messages_down"] == pytest.approx(1.0, abs=0.5)
        assert point["tokens"] > point["messages_down"]  # drafts count
        assert 0.0 < point["loop_us"] < point["process_us"]


def test_a_raw_call_speaks_as_much_http2_as_it_needs() -> None:
    """Oracle: frames written out by hand (RFC 9113), cut where they hurt."""
    settings = b"\0\0\0\4\0\0\0\0\0"
    ping = b"\0\0\x08\6\0\0\0\0\0" + b"12345678"
    headers = b"\0\0\1\1\4\0\0\0\1" + b"\x88"
    data = b"\0\0\x0f\0\0\0\0\0\1" + b"\0\0\0\0\3abc" + b"\0\0\0\0\5de"
    more = b"\0\0\3\0\0\0\0\0\1" + b"fgh"
    trailers = b"\0\0\1\1\5\0\0\0\1" + b"\x88"
    said = settings + ping + headers + data + more + trailers
    with socket.create_server(("127.0.0.1", 0)) as server:
        call = RawCall(server.getsockname()[1], "/s/m")
        peer, _ = server.accept()
        with peer:
            call.send(b"xyz")
            heard: list[bytes] = []
            for at in range(len(said)):  # a byte at a time
                peer.sendall(said[at : at + 1])
                heard += call.receive()
            assert heard == [b"abc", b"defgh"]
            assert call.over
            call.close()
            sent = b""
            while chunk := peer.recv(1 << 16):
                sent += chunk
    assert sent.startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    assert b"\0\0\x08\0\0\0\0\0\1" + b"\0\0\0\0\3xyz" in sent
    assert b"\0\0\0\4\1\0\0\0\0" in sent  # settings acknowledged
    assert b"\0\0\x08\6\1\0\0\0\0" + b"12345678" in sent  # and the ping
