"""``edgespec keys`` and ``edgespec certs``: API keys of devices, and certificates for TLS."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from edgespec.cli.options import read_settings
from edgespec.cli.running import reporting_errors, say
from edgespec.config import ConfigError, load_config
from edgespec.config.common import require_library
from edgespec.operating_system import HAS_FILE_MODES, lock_folder
from edgespec.wire.access import KeyEntry, KeyFile, make_key, save_keys

File = Annotated[
    Path,
    typer.Option("--file", "-f", metavar="FILE", help="File of API keys, for `verifier --keys`"),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the key's owner, which logs and metrics show")
]
_LIMITS = typer.Option(
    "--set",
    metavar="LIMIT=VALUE",
    help="Limit of this key, as explained above; may be given more than once",
)


keys = typer.Typer(
    help="Make, list and revoke API keys for a verifier (`edgespec verifier --keys FILE`)."
    "\n\nThe file holds digests and limits, but no keys. SIGHUP makes a running verifier read it"
    " again."
)


@keys.command()
def add(name: Name, file: File, limits: Annotated[list[str] | None, _LIMITS] = None) -> None:
    """Make an API key and print it. Only its digest is saved, so it cannot be shown again.

    Limits are max_sessions, context_length, tokens_per_s (for all sessions of the key together),
    priority (-100 to 100, higher ones go first) and models ([A, B]). They can be changed later in
    the file.

    [dim]edgespec keys add workshop --set max_sessions=8 --file keys.yaml[/]
    """
    with reporting_errors(), _lock_file(file):
        known = load_config(KeyFile, file) if file.exists() else KeyFile({})
        key, sha256 = make_key()
        try:
            if name in known.keys:
                raise ValueError(f"{name!r} has a key already; revoke it, or choose another name")
            given = read_settings(limits or (), form="LIMIT=VALUE")
            entry = load_config(KeyEntry, None, {**given, "sha256": sha256})
            save_keys(file, replace(known, keys={**known.keys, name: entry}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        typer.echo(key)
        if not HAS_FILE_MODES:
            say(f"note: this system keeps no file modes; {file} has the rights of its folder")
        say(
            f"{name!r} was added to {file}. Put the key on the device, in EDGESPEC_API_KEY or a"
            " file for\n--api-key-file; it is not shown again. Send SIGHUP to a running verifier."
        )


@keys.command("list")
def show(file: File) -> None:
    """List the names and limits of all keys."""
    with reporting_errors():
        known = load_config(KeyFile, file).keys
        for name, entry in sorted(known.items()):
            limits = [
                f"{one.name} {_show_value(getattr(entry, one.name))}"
                for one in fields(entry)
                if one.name != "sha256" and getattr(entry, one.name)
            ]
            typer.echo(f"{name}: {', '.join(limits) or 'no limits'}")
        if not known:
            say(f"{file} holds no keys")


@keys.command()
def revoke(name: Name, file: File) -> None:
    """Revoke a key. A running verifier ends the key's streams at SIGHUP."""
    with reporting_errors(), _lock_file(file):
        known = load_config(KeyFile, file)
        if name not in known.keys:
            listed = ", ".join(sorted(known.keys)) or "none"
            raise ConfigError(f"{file} has no key {name!r}; known: {listed}")
        remaining = {other: entry for other, entry in known.keys.items() if other != name}
        save_keys(file, replace(known, keys=remaining))
        say(f"{name!r} was revoked. Send SIGHUP to a running verifier.")


@contextlib.contextmanager
def _lock_file(file: Path) -> Iterator[None]:
    """Let one command at a time change ``file``. Otherwise a key that another command adds
    meanwhile would be lost, and could not be shown again. An error of the folder is reported when
    the file is written."""
    with lock_folder(file.resolve().parent):
        yield


def _show_value(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


Folder = Annotated[
    Path,
    typer.Option("--dir", "-d", metavar="FOLDER", help="Folder of the CA and the certificates"),
]
Hosts = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME", help="Host names and addresses by which devices reach the verifier"
    ),
]
Out = Annotated[
    str, typer.Option("--out", metavar="NAME", help="Name of the two files, NAME.pem and NAME.key")
]
Device = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the device, or of a group of devices")
]

certs = typer.Typer(
    help="Make a CA, and certificates for verifiers and devices."
    "\n\nA verifier needs its certificate and key, a device needs ca.pem. The CA's own key, ca.key,"
    " can sign a certificate for anybody: keep it on neither of them."
)


@contextlib.contextmanager
def _certificate_module() -> Iterator[ModuleType]:
    with reporting_errors(), require_library("cryptography", "edgespec[certs]"):
        from edgespec.wire import certificates

        yield certificates


@certs.command()
def ca(folder: Folder = Path()) -> None:
    """Make a CA: ca.pem, which devices trust, and ca.key, which signs certificates.

    [dim]edgespec certs ca --dir pki[/]
    """
    with _certificate_module() as made:
        _say(made.make_ca(folder), made.CA_DAYS)


@certs.command()
def server(names: Hosts, folder: Folder = Path(), out: Out = "server") -> None:
    """Make the certificate of a verifier, signed by the CA in the folder.

    [dim]edgespec certs server gpu-box 10.0.0.7 --dir pki[/]
    """
    with _certificate_module() as made:
        _say(made.make_server(folder, names, out=out), made.LEAF_DAYS)


@certs.command()
def device(name: Device, folder: Folder = Path()) -> None:
    """Make the certificate of a device, for a verifier with --set tls.client_ca=ca.pem.

    [dim]edgespec certs device laptop-7 --dir pki[/]
    """
    with _certificate_module() as made:
        _say(made.make_device(folder, name), made.LEAF_DAYS)


def _say(files: tuple[Path, Path], days: int) -> None:
    certificate, key = files
    say(f"{certificate} (valid for {days} days) and {key} (keep it secret) were written")
