"""``edgespec doctor --probe``: what a probe is told.

Oracle: the state of the server."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner, Result

from edgespec.cli.main import app
from edgespec.core.ports import LinkError
from edgespec.wire.grpc_client import SERVING, ask_health
from edgespec.wire.tls import channel_credentials
from tests.shell.echo_verifier import PATIENCE_S, echo, served
from tests.shell.live_verifier import daemon
from tests.shell.pki import certs

NAME = "gpu-box"


def call(address: str, *arguments: str, seconds: str = "60") -> Result:
    words = ("doctor", "--probe", seconds, "--verifier", address, *arguments)
    return CliRunner().invoke(app, words)


def test_a_verifier_that_serves_is_exit_code_0() -> None:
    with daemon() as (address, _):
        result = call(address)
    assert (result.exit_code, result.stdout) == (0, f"{SERVING}\n")


def test_nobody_there_is_exit_code_1_and_one_line() -> None:
    result = call("127.0.0.1:1", seconds="1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "error: no health from 127.0.0.1:1: " in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((NAME, "--probe", "0"), "--probe is 0, but must be in (0, 600]"),
        ((NAME, "--probe", "nan"), "--probe is nan"),
        ((NAME, "--set", "tls.client_cert=c.pem"), "client_cert is given without client_key"),
        (("::1",), "an IPv6 address must be like [::1]:7420"),
        (("gpu-box:99999",), "its port must be in [1, 65535]"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_not_serving_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def not_serving(address: str, **_: object) -> str:
        return "NOT_SERVING"

    monkeypatch.setattr("edgespec.wire.grpc_client.ask_health", not_serving)
    result = call("gpu-box")
    assert (result.exit_code, result.stdout) == (1, "NOT_SERVING\n")
    assert result.stderr == "error: the verifier at gpu-box:7420 says NOT_SERVING\n"


async def test_a_proxy_of_the_environment_is_left_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    async with served() as (server, _):
        where = f"127.0.0.1:{server.port}"
        assert await ask_health(where, timeout_s=PATIENCE_S) == SERVING


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA and a certificate for ``NAME``."""
    folder = tmp_path_factory.mktemp("tls")
    certs("ca", "--dir", folder)
    certs("server", NAME, "--dir", folder)
    return folder


async def test_tls_by_the_name_in_the_certificate(identity: Path) -> None:
    ours = channel_credentials(identity / "ca.pem", None, None)
    systems = channel_credentials(None, None, None)
    pair = ((identity / "server.key").read_bytes(), (identity / "server.pem").read_bytes())
    async with served(echo, credentials=grpc.ssl_server_credentials([pair])) as (server, _):
        address = f"127.0.0.1:{server.port}"
        found = await ask_health(address, credentials=ours, server_name=NAME, timeout_s=PATIENCE_S)
        assert found == SERVING
        for wrong, name in ((ours, ""), (systems, NAME), (None, "")):
            with pytest.raises(LinkError, match="no health from"):
                await ask_health(address, credentials=wrong, server_name=name, timeout_s=20.0)
