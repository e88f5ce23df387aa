"""``edgespec keys`` and ``edgespec certs``: who may use a verifier, and how both sides trust it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from edgespec.cli.options import read_settings
from edgespec.cli.running import reported, say
from edgespec.config import ConfigError, load_config
from edgespec.config.common import needs
from edgespec.wire.access import KeyEntry, KeyFile, make_key, save_keys

File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The file of keys")]
Name = Annotated[str, typer.Argument(help="For logs and metrics: whose key it is")]
_LIMITS = typer.Option("--set", metavar="LIMIT=VALUE", help="What it may use; see above")


keys = typer.Typer(
    help="Make, list and revoke the keys that a verifier lets in (`edgespec verifier --keys FILE`)."
    "\n\nThe file holds digests and limits, no key. SIGHUP makes a running verifier read it again."
)


@keys.command()
def add(name: Name, file: File, limits: Annotated[list[str] | None, _LIMITS] = None) -> None:
    """Make a key and print it, this once: only its digest is kept.

    Limits are max_sessions, context_length, tokens_per_s (of all its sessions together), priority
    (-100 to 100, higher goes first) and models ([A, B]). They can be changed in the file.

    [dim]edgespec keys add workshop --set max_sessions=8 --file keys.yaml[/]
    """
    with reported(), _alone(file):
        known = load_config(KeyFile, file) if file.exists() else KeyFile({})
        key, sha256 = make_key()
        try:
            if name in known.keys:
                raise ValueError(f"{name!r} has a key already; revoke it, or take another name")
            given = read_settings(limits or (), form="LIMIT=VALUE")
            entry = load_config(KeyEntry, None, {**given, "sha256": sha256})
            save_keys(file, replace(known, keys={**known.keys, name: entry}))
        except ValueError as error:
            raise ConfigError(str(error)) from error
        typer.echo(key)
        say(
            f"{name!r} was added to {file}. The device takes the key from EDGESPEC_API_KEY or the"
            " file\nthat api_key_file names; it is not shown again. A running verifier learns of it"
            " by SIGHUP."
        )


@keys.command("list")
def show(file: File) -> None:
    """List names and limits."""
    with reported():
        known = load_config(KeyFile, file).keys
        for name, entry in sorted(known.items()):
            limits = [
                f"{one.name} {_shown(getattr(entry, one.name))}"
                for one in fields(entry)
                if one.name != "sha256" and getattr(entry, one.name)
            ]
            typer.echo(f"{name}: {', '.join(limits) or 'no limits'}")
        if not known:
            say(f"{file} holds no key")


@keys.command()
def revoke(name: Name, file: File) -> None:
    """Take a key away. A running verifier ends its streams at SIGHUP."""
    with reported(), _alone(file):
        known = load_config(KeyFile, file)
        if name not in known.keys:
            listed = ", ".join(sorted(known.keys)) or "none"
            raise ConfigError(f"{file} has no key {name!r}; known: {listed}")
        left = {other: entry for other, entry in known.keys.items() if other != name}
        save_keys(file, replace(known, keys=left))
        say(f"{name!r} was revoked. A running verifier learns of it by SIGHUP.")


@contextlib.contextmanager
def _alone(file: Path) -> Iterator[None]:
    """One command at a time: what another has added since the file was read would be lost, and its
    key is not shown again. A folder that cannot be opened is told of when the file is written."""
    try:
        folder = os.open(file.resolve().parent, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _shown(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"


Folder = Annotated[Path, typer.Option("--dir", "-d", metavar="FOLDER", help="Where the files are")]
Hosts = Annotated[
    list[str], typer.Argument(help="Host names and addresses that devices connect to")
]
Out = Annotated[str, typer.Option("--out", help="Name of the files")]
Device = Annotated[str, typer.Argument(help="The device, or group of devices")]

certs = typer.Typer(
    help="Make a CA, and certificates for verifiers and devices."
    "\n\nA verifier needs its certificate and key, a device ca.pem. The CA's own key, ca.key, signs"
    " whatever is to be trusted: keep it on neither of them."
)


@contextlib.contextmanager
def _makers() -> Iterator[ModuleType]:
    with reported(), needs("cryptography", "edgespec[certs]"):
        from edgespec.wire import certificates

        yield certificates


@certs.command()
def ca(folder: Folder = Path()) -> None:
    """Make a CA: ca.pem, to be trusted by devices, and ca.key.

    [dim]edgespec certs ca --dir pki[/]
    """
    with _makers() as made:
        _say(made.make_ca(folder), made.CA_DAYS)


@certs.command()
def server(names: Hosts, folder: Folder = Path(), out: Out = "server") -> None:
    """Make a verifier's certificate, signed by the CA in the folder.

    [dim]edgespec certs server gpu-box 10.0.0.7 --dir pki[/]
    """
    with _makers() as made:
        _say(made.make_server(folder, names, out=out), made.LEAF_DAYS)


@certs.command()
def device(name: Device, folder: Folder = Path()) -> None:
    """Make a device's certificate, for a verifier with --set tls.client_ca.

    [dim]edgespec certs device laptop-7 --dir pki[/]
    """
    with _makers() as made:
        _say(made.make_device(folder, name), made.LEAF_DAYS)


def _say(files: tuple[Path, Path], days: int) -> None:
    certificate, key = files
    say(f"{certificate} (for {days} days) and {key} (keep it secret) were written")
