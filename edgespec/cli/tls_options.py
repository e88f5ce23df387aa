"""Options for TLS, of both ends, and the keys of the configuration that they override."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import typer

WHERE: Final = "Where"
"""The panel of a device's options on its way to a verifier."""
SERVICE: Final = "Service"
"""The panel of a verifier's on whom it serves, and how."""

# --- the device's ---------------------------------------------------------------------------

Tls = Annotated[
    bool | None,
    typer.Option(
        "--tls/--no-tls",
        help="Encrypt, and trust the CAs that the system trusts",
        rich_help_panel=WHERE,
    ),
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", help="Encrypt, and trust this CA", rich_help_panel=WHERE),
]
ClientCert = Annotated[
    str | None,
    typer.Option(
        "--client-cert",
        metavar="FILE",
        help="This device's certificate, if the verifier wants one",
        rich_help_panel=WHERE,
    ),
]
ClientKey = Annotated[
    str | None,
    typer.Option(
        "--client-key", metavar="FILE", help="The private key of that", rich_help_panel=WHERE
    ),
]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--server-name",
        metavar="NAME",
        help="Name in the verifier's certificate (default: the host)",
        rich_help_panel=WHERE,
    ),
]

DEVICE_TLS_KEYS: Final[Mapping[str, str]] = {
    "tls": "tls.enabled",
    "ca": "tls.ca",
    "client_cert": "tls.client_cert",
    "client_key": "tls.client_key",
    "server_name": "tls.server_name",
}

# --- the verifier's -------------------------------------------------------------------------

TlsCert = Annotated[
    str | None,
    typer.Option(
        "--tls-cert",
        metavar="FILE",
        help="Encrypt, with this certificate (`edgespec certs`)",
        rich_help_panel=SERVICE,
    ),
]
TlsKey = Annotated[
    str | None,
    typer.Option("--tls-key", metavar="FILE", help="Its private key", rich_help_panel=SERVICE),
]
ClientCa = Annotated[
    str | None,
    typer.Option(
        "--client-ca",
        metavar="FILE",
        help="Let in devices with a certificate of this CA only",
        rich_help_panel=SERVICE,
    ),
]

VERIFIER_TLS_KEYS: Final[Mapping[str, str]] = {
    "tls_cert": "tls.cert",
    "tls_key": "tls.key",
    "client_ca": "tls.client_ca",
}
