"""Tests of the daemons as an operator meets them: reload by SIGHUP, drain by SIGTERM, refusals at
their start, failing reloads and drains, and small runs of the benchmarks that attack a verifier.

Oracle: the toy's text on devices that the operation does not concern; the output of the processes;
a failed reload is followed by a working one, and a drain goes on. A benchmark is judged by the
findings of its own script.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from edgespec.cli.verifier import ServiceManager, _drain, _reload_whenever
from edgespec.config import ConfigError, load_config
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.ports import DeviceStream
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.messages import Commit, Fault, FaultCode, Open, Opened, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, Chunk, GenerationError
from edgespec.device.build import build_agent, connect
from edgespec.models.toy import ToyTokenizer
from edgespec.wire.access import KeyFile, ServerAccess, save_keys
from tests.kit.guarded import PROMPT, Pki, device_config, keys_in, verifier_config
from tests.kit.live_verifier import (
    run_command,
    run_python,
    start,
    start_daemon,
    toy_text,
    wait_until_ready,
)
from tests.present import require

WITHIN_S = 120
IDS = ToyTokenizer().encode(PROMPT)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
EXPECTED = toy_text(IDS, LONG)
SHORT = SamplingParams(max_tokens=60, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=3500, ignore_eos=True)
"""A generation that lasts longer than any test."""
SLOW = ("--pass-ms", "10")
PATIENT = ReconnectPolicy(
    first_s=0.01, longest_s=0.05, give_up_first_s=WITHIN_S, give_up_s=WITHIN_S
)


async def read_until(process: subprocess.Popen[str], what: str) -> str:
    """Return the daemon's output on stderr up to and including the line that holds ``what``."""

    def read() -> str:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if what in line:
                return "".join(lines)
        raise AssertionError(f"{what!r} is not in {''.join(lines)}")

    return await asyncio.wait_for(asyncio.to_thread(read), WITHIN_S)


async def tokens_of(chunks: AsyncIterator[Chunk]) -> list[int]:
    return [token async for chunk in chunks for token in chunk.tokens]


def make_agent(
    address: str, key: str, monkeypatch: pytest.MonkeyPatch, pki: Pki | None = None
) -> Agent:
    monkeypatch.setenv("EDGESPEC_API_KEY", key)
    config = device_config(address, None if pki is None else pki.device())
    return build_agent(replace(config, reconnect=PATIENT))


async def read_and_acknowledge(stream: DeviceStream, tokens: list[int]) -> list[int]:
    """Read the output to its end, continuing ``tokens``, and acknowledge each commit."""
    while True:
        await stream.send(Received(len(IDS) + len(tokens), 0))
        message = await asyncio.wait_for(stream.receive(), WITHIN_S)
        assert isinstance(message, Commit), message
        tokens += message.tokens
        if message.finish is not None:
            return tokens


async def test_sighup_reads_keys_and_certificates_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki, newer, path = Pki(tmp_path / "pki"), Pki(tmp_path / "newer"), tmp_path / "keys.yaml"
    keys = keys_in(path, "good", "bad")
    tls = ("--tls-cert", pki.path("server.pem"), "--tls-key", pki.path("server.key"))
    with start_daemon(*SLOW, *tls, "--keys", str(path)) as (address, process):
        good, bad = (make_agent(address, keys[name], monkeypatch, pki) for name in ("good", "bad"))
        async with good, bad:
            ours, theirs = good.generate(PROMPT, LONG), bad.generate(PROMPT, ENDLESS)
            first = await anext(ours)
            await anext(theirs)
            saved = path.read_text()
            path.write_text("keys: {bad: {sha256: 5}}")
            process.send_signal(signal.SIGHUP)
            words = await read_until(process, "reload")
            assert "ERROR" in words
            assert "reload failed, and nothing has changed:" in words
            assert "keys.bad.sha256 is 5, but must be text" in words
            await anext(theirs)
            path.write_text(saved)
            known = load_config(KeyFile, path).keys
            save_keys(path, KeyFile({"good": known["good"]}))
            for name in ("server.pem", "server.key"):
                (tmp_path / "pki" / name).write_bytes((tmp_path / "newer" / name).read_bytes())
            process.send_signal(signal.SIGHUP)
            words = await read_until(process, "reload")
            assert "keys revoked: bad; a new certificate or client CA; 1 streams were" in words
            with pytest.raises(GenerationError, match="was revoked"):
                await tokens_of(theirs)
            async with make_agent(address, keys["good"], monkeypatch, newer) as late:
                assert await tokens_of(late.generate(PROMPT, SHORT)) == toy_text(IDS, SHORT)
            assert [*first.tokens, *await tokens_of(ours)] == EXPECTED
            assert require(good.stats).counters.reconnects == 0


async def test_sigterm_lets_running_streams_end_and_sends_new_ones_away() -> None:
    """The running stream acknowledges nothing until the new one was refused, so the verifier holds
    back more than half of its text."""
    with start_daemon("--set", "drain_s=200") as (address, process):
        transport, late = connect(address), connect(address)
        stream = await transport.connect()
        await stream.send(Open("running", "", "", tuple(IDS), sampling=LONG, drafting=False))
        assert isinstance(await stream.receive(), Opened)
        first = await stream.receive()
        assert isinstance(first, Commit)
        process.send_signal(signal.SIGTERM)
        words = await read_until(process, "stopping")
        assert "waiting up to 200 s for 1 running stream; a second Ctrl-C stops" in words
        fault = await (await late.connect()).receive()
        assert isinstance(fault, Fault)
        assert fault.code is FaultCode.SHUTTING_DOWN
        assert fault.retry_after_s == 1.0
        await late.close()
        assert await read_and_acknowledge(stream, list(first.tokens)) == EXPECTED
        await transport.close()
        assert await asyncio.to_thread(process.wait, WITHIN_S) == 0


@contextmanager
def listen_silently(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(address.replace("@", "\0", 1) if address.startswith("@") else address)
        end.settimeout(WITHIN_S)
        yield end


def read_notification(end: socket.socket) -> dict[str, str]:
    lines = end.recv(4096).decode().splitlines()
    return dict(line.split("=", 1) for line in lines)


@pytest.fixture(params=["path", "abstract"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "path":
        return str(tmp_path / "notify")
    return f"@edgespec-test-{secrets.token_hex(8)}"


async def test_a_watched_service_shows_that_it_lives(tmp_path: Path) -> None:
    address = str(tmp_path / "notify")
    watched = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}
    manager = ServiceManager(watched)
    assert manager.watchdog_s == 0.002
    with listen_silently(address) as end:
        beat = asyncio.ensure_future(manager.keep_alive())
        for _ in range(3):
            assert await asyncio.to_thread(read_notification, end) == {"WATCHDOG": "1"}
        beat.cancel()


def test_a_manager_that_is_gone_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "none")})
    manager.ready("ready")
    manager.stopping("stopping")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(tmp_path / "none") in caplog.text


def test_the_daemon_says_when_it_serves_reloads_and_ends(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with listen_silently(address) as end:
        with start_daemon() as (where, process):
            ready = read_notification(end)
            assert ready["READY"] == "1"
            assert where in ready["STATUS"]
            process.send_signal(signal.SIGHUP)
            assert read_notification(end)["RELOADING"] == "1"
            assert read_notification(end) == ready
            process.send_signal(signal.SIGTERM)
            assert read_notification(end)["STOPPING"] == "1"
            assert process.wait(WITHIN_S) == 0


@pytest.mark.parametrize("broken", ["files", "streams"])
async def test_a_reload_that_raises_is_not_the_last(
    broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked, done = asyncio.Event(), asyncio.Queue[str]()

    def reload() -> Any:
        if broken == "files":
            raise RuntimeError("a bug")
        return SimpleNamespace(keys=SimpleNamespace(revoked=("one",)), warnings=())

    def revoke(names: object) -> int:
        raise RuntimeError("a bug")

    class Manager(ServiceManager):
        def ready(self, status: str) -> None:
            done.put_nowait(status)

    access: Any = SimpleNamespace(reload=reload)
    serving: Any = SimpleNamespace(revoke=revoke)
    task = asyncio.create_task(_reload_whenever(asked, access, serving, Manager(), "up"))
    for _ in range(2):
        asked.set()
        assert await asyncio.wait_for(done.get(), WITHIN_S) == "up"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    failures = [str(getattr(record, "failure", "")) for record in caplog.records]
    assert ["RuntimeError" in failure for failure in failures] == [True, True]
    assert "RuntimeError: a bug" not in caplog.text + "".join(failures)


def test_a_file_of_keys_that_was_cut_off_revokes_nobody(tmp_path: Path) -> None:
    """An editor leaves such a file for a moment, and a full disk leaves it for good."""
    path = tmp_path / "keys.yaml"
    key = keys_in(path, "one")["one"]
    access, whole = ServerAccess(verifier_config(keys=path)), path.read_text()
    for cut in (0, whole.index("keys:"), whole.index("one:")):
        path.write_text(whole[:cut])
        with pytest.raises(ConfigError, match="keys"):
            access.reload()
        assert access.authenticate(key) == Credential("one")
    path.write_text("keys: {}")
    assert access.reload().keys.revoked == ("one",)
    assert access.authenticate(key) is None


class FullDisk(io.StringIO):
    """A log on a disk that is full."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("drain_s", [0.0, 30.0])
async def test_a_drain_goes_on_where_nobody_can_be_told(
    drain_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    async def drain() -> None:
        done.append("drain")

    async def drained() -> None:
        done.append("drained")

    server: Any = SimpleNamespace(stream_count=1, drain=drain, drained=drained)
    serving: Any = SimpleNamespace(broken=asyncio.Event())
    monkeypatch.setattr(sys, "stderr", FullDisk())
    await _drain(serving, server, drain_s)
    assert done == (["drain", "drained"] if drain_s else ["drain"])


DRILLS = ["calm", "rotation", "revocation", "wrong-keys", "flood", "restart", "two", "drain"]


@pytest.mark.slow
def test_no_drill_costs_a_device_its_text(tmp_path: Path) -> None:
    report = tmp_path / "drill.json"
    options = ("--devices", "10", "--seconds", "4", "--seed", "2", "--json", str(report))
    done = run_python("benchmarks/service_drill.py", *options)
    assert report.exists(), done.stdout + done.stderr
    found = json.loads(report.read_text())
    # The duration of a revocation is judged by the bench, not on a machine that runs other tests.
    findings = [one for one in found["findings"] if not one.startswith("revocation: 6 of 6 ended")]
    assert findings == [], done.stdout + done.stderr
    rows = {row["name"]: row for row in found["drills"]}
    assert list(rows) == DRILLS
    assert all(row["tokens"] > 0 for row in rows.values())
    assert rows["revocation"]["notes"]["ended"] == 6
    assert rows["wrong-keys"]["notes"]["UNAUTHENTICATED"] > 0
    assert rows["flood"]["notes"]["streams"] > 0


def test_hostile_streams_end_cleanly_beside_an_honest_device() -> None:
    done = run_python("benchmarks/fuzz.py", "--messages", "2000", "--streams", "120", "--seed", "7")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    assert "stream: INVALID_ARGUMENT" in done.stdout


@pytest.mark.slow
def test_hostile_clients_change_no_text_and_leave_nothing_behind(tmp_path: Path) -> None:
    report = tmp_path / "load.json"
    options = ["--any-latency", "--devices", "12", "--seconds", "3", "--phase", "1.5"]
    options += ["--lease-s", "0.5", "--seed", "3", "--json", str(report)]
    done = run_python("benchmarks/hostile_load.py", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    found = json.loads(report.read_text())
    assert found["texts"] > 0
    sent = found["pairs"][0]["sent"]
    assert all(sent[kind] for kind in sent), sent  # every kind of client has taken part
    assert found["rest"]["full"]["sessions"] > 0 == found["rest"]["after"]["sessions"]


@pytest.mark.slow
def test_whatever_both_ends_draft_no_text_differs() -> None:
    done = run_python("benchmarks/both_ends.py", "--texts", "16")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "160 texts, none differs" in done.stdout


# --- ``edgespec serve``: its first output and how it stops ----------------------------------------


SOON_S = 60
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
SERVED = ("--draft", "toy", "--port", "0")


@contextlib.contextmanager
def start_endpoint(*options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the real process and yield its URL."""
    with wait_until_ready(start("serve", *SERVED, *options), r"ready on (http://\S+)/v1") as found:
        yield found


def curl(*arguments: str) -> Any:
    done = subprocess.run(
        ["curl", "-sN", "--max-time", "30", *arguments], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@needs_curl
def test_the_first_run_tells_what_it_chose_and_its_curl_line_works() -> None:
    with start_daemon() as (address, _), start_endpoint("--verifier", address) as (url, process):
        lines = [require(process.stderr).readline() for _ in range(7)]
        words = [line.split()[0] for line in lines]
        assert words == ["draft", "verifier", "memory", "clients", "web", "chat:", "try"]
        assert f"{address}: serves toy, context 4096" in lines[1]
        done = subprocess.run(
            ["bash", "-c", lines[6].partition("try it: ")[2].replace("curl ", "curl -s ")],
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
        assert process.wait(SOON_S) == 0


@needs_curl
@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_then_tells_it() -> None:
    with start_daemon("--pass-ms", "50") as (address, _):
        with start_endpoint("--verifier", address, "--set", "endpoint.drain_s=0.2") as (
            url,
            process,
        ):
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
            assert process.wait(SOON_S) == 0
            said = require(process.stderr).read()
            assert "stopping: waiting up to 0.2 s for 1 requests" in said
            assert "Traceback" not in said


def test_flags_are_settings_of_the_endpoint() -> None:
    given = ("--port", 9, "--allow-origin", "https://a.example", "--set", "endpoint.insecure=true")
    most = ("--set", "endpoint.default_max_tokens=7")
    first = run_command("serve", *given, *most, "--help-all").stdout
    shown = yaml.safe_load(first)
    assert shown["endpoint"]["port"] == 9
    assert shown["endpoint"]["allow_origins"] == ["https://a.example"]
    assert (shown["endpoint"]["insecure"], shown["insecure"]) == (True, False)
    assert shown["endpoint"]["default_max_tokens"] == 7
    assert (
        run_command("serve", "--set", "insecure=true", "--help-all").stdout.count("insecure: true")
        == 1
    )
