"""``edgespec certs``: a CA of one's own, and certificates for verifiers and devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import EXIT_CODES, reported, say
from edgespec.config.setup_error import needs

Folder = Annotated[
    Path, typer.Option("--dir", "-d", metavar="FOLDER", help="Where the files are (default: here)")
]

certs = typer.Typer(
    name="certs",
    no_args_is_help=True,
    help="Make a CA, and certificates for verifiers and devices.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


@certs.callback()
def main() -> None:
    """Make a CA, and certificates for verifiers and devices.

    A verifier needs its certificate and key, a device ca.pem. The CA's own key, ca.key, signs
    whatever is to be trusted: keep it on neither of them.
    """


@certs.command(epilog=EXIT_CODES)
def ca(folder: Folder = Path()) -> None:
    """Make a CA: ca.pem, to be trusted by devices, and ca.key.

    [dim]edgespec certs ca --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import CA_DAYS, make_ca
        _say(make_ca(folder), CA_DAYS)


@certs.command(epilog=EXIT_CODES)
def server(
    names: Annotated[
        list[str], typer.Argument(help="Host names and addresses that devices connect to")
    ],
    folder: Folder = Path(),
    out: Annotated[str, typer.Option("--out", help="Name of the files")] = "server",
) -> None:
    """Make a verifier's certificate, signed by the CA in the folder.

    [dim]edgespec certs server gpu-box 10.0.0.7 --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import LEAF_DAYS, make_server
        _say(make_server(folder, names, out=out), LEAF_DAYS)


@certs.command(epilog=EXIT_CODES)
def device(
    name: Annotated[str, typer.Argument(help="The device, or group of devices")],
    folder: Folder = Path(),
) -> None:
    """Make a device's certificate, for a verifier with --set tls.client_ca.

    [dim]edgespec certs device laptop-7 --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import LEAF_DAYS, make_device
        _say(make_device(folder, name), LEAF_DAYS)


def _say(files: tuple[Path, Path], days: int) -> None:
    certificate, key = files
    say(f"{certificate} (for {days} days) and {key} (keep it secret) were written")
