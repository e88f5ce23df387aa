"""Shared parts of the tests of keys and TLS: configurations of both ends, key files, a prompt, and
certificates as ``edgespec certs`` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.config import (
    AgentConfig,
    DeviceTlsSection,
    DraftSection,
    ServerTlsSection,
    VerifierConfig,
)
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent, Chunk
from edgespec.models.toy import ToyTokenizer
from edgespec.wire.access import KeyEntry, KeyFile, make_key, save_keys
from tests.kit.live_verifier import toy_text

PROMPT = "the quick brown fox"
PARAMS = SamplingParams(max_tokens=30, temperature=0.9, seed=5)
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)
EXPECTED = toy_text(ToyTokenizer().encode(PROMPT), PARAMS)
QUICK = ReconnectPolicy(first_s=0.01, longest_s=0.05, give_up_first_s=1.0, give_up_s=20.0)
PATIENCE_S = 60.0


def verifier_config(
    tls: ServerTlsSection | None = None, keys: Path | None = None
) -> VerifierConfig:
    return VerifierConfig(
        model="toy", port=0, tls=tls or ServerTlsSection(), keys="" if keys is None else str(keys)
    )


def device_config(address: str, tls: DeviceTlsSection | None = None) -> AgentConfig:
    return AgentConfig(
        verifier=address,
        tokenizer="toy",
        draft=DraftSection(model="toy"),
        reconnect=QUICK,
        tls=tls or DeviceTlsSection(),
    )


async def collect(agent: Agent, params: SamplingParams = PARAMS) -> list[int]:
    chunks: list[Chunk] = [chunk async for chunk in agent.generate(PROMPT, params)]
    return [token for chunk in chunks for token in chunk.tokens]


def keys_in(path: Path, *names: str, **limits: Any) -> dict[str, str]:
    """Write a file of new keys, and return the keys by name."""
    made = {name: make_key() for name in names}
    entries = {name: KeyEntry(of_key, **limits) for name, (_, of_key) in made.items()}
    save_keys(path, KeyFile(entries))
    return {name: key for name, (key, _) in made.items()}


NAMES = ("localhost", "127.0.0.1")


def run_certs(*arguments: str | Path) -> None:
    """Run ``edgespec certs ...``, which has to succeed."""
    done = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert done.exit_code == 0, done.output


class Pki:
    """A CA in ``folder``, with one certificate for a verifier on this machine and one for a
    device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run_certs("ca", "--dir", folder)
        run_certs("server", *NAMES, "--dir", folder)
        run_certs("device", "device", "--dir", folder)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def renew_server(self, *names: str) -> None:
        """Replace the certificate and the key in the same files."""
        for name in ("server.pem", "server.key"):
            (self.folder / name).unlink()
        run_certs("server", *(names or NAMES), "--dir", self.folder)

    def server(self, *, mutual: bool = False) -> ServerTlsSection:
        return ServerTlsSection(
            self.path("server.pem"), self.path("server.key"), self.path("ca.pem") if mutual else ""
        )

    def device(self, *, shown: bool = False, server_name: str = "") -> DeviceTlsSection:
        return DeviceTlsSection(
            ca=self.path("ca.pem"),
            client_cert=self.path("device.pem") if shown else "",
            client_key=self.path("device.key") if shown else "",
            server_name=server_name,
        )
