"""Certificates for tests, made by the product's own command."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.config import DeviceTlsSection, ServerTlsSection

NAMES = ("localhost", "127.0.0.1")


def certs(*arguments: str | Path) -> None:
    """``edgespec certs ...``, which has to succeed."""
    done = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    assert done.exit_code == 0, done.output


class Pki:
    """A CA in ``folder``, a certificate for a verifier here and one for a device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certs("ca", "--dir", folder)
        certs("server", *NAMES, "--dir", folder)
        certs("device", "device", "--dir", folder)

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def renew_server(self, *names: str) -> None:
        """Another certificate and key in the same files."""
        for name in ("server.pem", "server.key"):
            (self.folder / name).unlink()
        certs("server", *(names or NAMES), "--dir", self.folder)

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
