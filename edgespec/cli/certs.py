"""``edgespec certs``: a CA of one's own, certificates for verifiers and devices, and pins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import EXIT_CODES, reported, say
from edgespec.config import ConfigError
from edgespec.config.device import check_address
from edgespec.config.security import host_of
from edgespec.config.setup_error import SetupError, needs
from edgespec.config.whole_file import replace_file
from edgespec.device.many_verifiers import with_port
from edgespec.wire import pinning

CA_DAYS, SERVER_DAYS, DEVICE_DAYS = 3650, 397, 397
_MAX_DAYS = 36_500

Folder = Annotated[
    Path, typer.Option("--dir", "-d", metavar="FOLDER", help="Where the files are (default: here)")
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there")]

certs = typer.Typer(
    name="certs",
    no_args_is_help=True,
    help="Make a CA, certificates for verifiers and devices, and pins.",
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
def ca(
    folder: Folder = Path(),
    name: Annotated[str, typer.Option("--name", help="What it is called")] = "edgespec CA",
    days: Annotated[
        int, typer.Option("--days", min=1, max=_MAX_DAYS, help="Valid so long")
    ] = CA_DAYS,
    force: Force = False,
) -> None:
    """Make a CA: ca.pem, to be trusted by devices, and ca.key.

    [dim]edgespec certs ca --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import make_ca
        _say(make_ca(folder, name, days, force=force), days)


@certs.command(epilog=EXIT_CODES)
def server(
    names: Annotated[
        list[str], typer.Argument(help="Host names and addresses that devices connect to")
    ],
    folder: Folder = Path(),
    out: Annotated[str, typer.Option("--out", help="Name of the files")] = "server",
    days: Annotated[
        int, typer.Option("--days", min=1, max=_MAX_DAYS, help="Valid so long")
    ] = SERVER_DAYS,
    force: Force = False,
) -> None:
    """Make a verifier's certificate, signed by the CA in the folder.

    [dim]edgespec certs server gpu-box 10.0.0.7 --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import make_server
        _say(make_server(folder, names, days, out=out, force=force), days)


@certs.command(epilog=EXIT_CODES)
def device(
    name: Annotated[str, typer.Argument(help="The device, or group of devices")],
    folder: Folder = Path(),
    days: Annotated[
        int, typer.Option("--days", min=1, max=_MAX_DAYS, help="Valid so long")
    ] = DEVICE_DAYS,
    force: Force = False,
) -> None:
    """Make a device's certificate, for a verifier with --set tls.client_ca.

    [dim]edgespec certs device laptop-7 --dir pki[/]
    """
    with reported():
        with needs("cryptography", "edgespec[certs]"):
            from edgespec.wire.certificates import make_device
        _say(make_device(folder, name, days, force=force), days)


def _host_and_port(verifier: str) -> tuple[str, int]:
    """Raises ``ConfigError``."""
    try:
        check_address(verifier)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    address = with_port(verifier)
    if not (host := host_of(address)):
        raise ConfigError(f"verifier is {verifier!r}, but must be host:port")
    return host, int(address.rpartition(":")[2])


def _say(files: tuple[Path, Path], days: int) -> None:
    certificate, key = files
    say(f"{certificate} (for {days} days) and {key} (keep it secret) were written")


@certs.command(epilog=EXIT_CODES)
def fingerprint(
    file: Annotated[Path, typer.Argument(help="A verifier's certificate, in PEM")],
) -> None:
    """Print the SHA-256 fingerprint of a certificate, to be compared with what a device sees.

    [dim]edgespec certs fingerprint pki/server.pem[/]
    """
    with reported():
        typer.echo(pinning.read(file).fingerprint)


@certs.command(epilog=EXIT_CODES)
def pin(
    verifier: Annotated[str, typer.Argument(help="HOST, or HOST:PORT")],
    expected: Annotated[
        str,
        typer.Option(
            "--fingerprint",
            metavar="sha256:HEX",
            help="What `edgespec certs fingerprint` says on the verifier; without it nothing is"
            " written",
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to keep it")
    ] = Path("verifier.pem"),
    force: Force = False,
) -> None:
    """Pin a verifier: keep its own certificate, so that a device trusts this one and no other.

    Ask whoever runs the verifier for the fingerprint, by another way than this network. A device
    then takes the file in the place of a CA's. When the verifier's certificate is renewed, pin it
    again.

    [dim]edgespec certs pin gpu-box --fingerprint sha256:4ba3... --out gpu-box.pem[/]
    [dim]edgespec generate --verifier gpu-box --ca gpu-box.pem "Hello"[/]
    """
    with reported():
        shown = pinning.fetch(*_host_and_port(verifier))
        if not expected:
            typer.echo(shown.fingerprint)
            say("nothing was written: is this what `edgespec certs fingerprint` says there?")
            say(f"  then: edgespec certs pin {verifier} --fingerprint {shown.fingerprint}")
            return
        pinning.check(shown, expected)
        if out.exists() and not force:
            raise SetupError(f"{out} is there; --force replaces it")
        replace_file(out, shown.pem, 0o644)
        say(f"{out} was written; a device with --ca {out} trusts this certificate and no other")
