"""Envoy leads a conversation to its verifier, with the project's own configuration of it.

Oracles: Envoy's validation, what each verifier counts, and the toy's own text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import yaml

from edgespec.config import AgentConfig, DraftSection, LimitsSection
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.verifier.build import build_verifier, load_target
from edgespec.verifier.daemon import Verifier
from edgespec.wire.grpc_server import GrpcServer
from tests.shell.deploy_tools import judged
from tests.shell.envoy_proxy import Proxy, certain, envoy, proxy, with_certificates
from tests.shell.failing_verifiers import PACED, PATIENT
from tests.shell.gate import Gate
from tests.shell.live_verifier import GatedTarget, toy_text
from tests.shell.pki import NAMES, Pki
from tests.shell.test_replicas import PARAMS, served

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
            prompt += [*toy_text(prompt, PARAMS), 7, 8, 9]
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
