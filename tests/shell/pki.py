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

    def write_expired(self, stem: str) -> None:
        """Replace a certificate by one of the same CA that has just expired; the key stays."""
        from datetime import UTC, datetime, timedelta

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

        path = self.folder / f"{stem}.pem"
        old = x509.load_pem_x509_certificate(path.read_bytes())
        ca_key = load_pem_private_key((self.folder / "ca.key").read_bytes(), None)
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(
            old.issuer, old.subject, old.public_key(), x509.random_serial_number(), None, None
        )
        builder = builder.not_valid_before(now - timedelta(days=9))
        builder = builder.not_valid_after(now - timedelta(minutes=1))
        for extension in old.extensions:
            builder = builder.add_extension(extension.value, extension.critical)
        signed = builder.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type] # it is of P-256
        path.write_bytes(signed.public_bytes(Encoding.PEM))
