"""``edgespec keys``: make, list and revoke the keys that a verifier lets in."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated

import typer

from edgespec.cli.running import EXIT_CODES, reported, say
from edgespec.config import ConfigError
from edgespec.config.key_file import (
    KeyEntry,
    KeyFile,
    check_key_name,
    load_keys,
    new_key,
    save_keys,
)

if sys.platform != "win32":
    import fcntl

File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The file of keys")]
Name = Annotated[str, typer.Argument(help="For logs and metrics: whose key it is")]

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="Make, list and revoke the keys that a verifier lets in.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


@keys.callback()
def main() -> None:
    """Make, list and revoke the keys that a verifier lets in (`edgespec verifier --keys FILE`).

    The file holds digests and limits, no key. SIGHUP makes a running verifier read it again.
    """


@keys.command(epilog=EXIT_CODES)
def add(
    name: Name,
    file: File,
    sessions: Annotated[
        int, typer.Option("--sessions", help="Sessions at a time (default: no own limit)")
    ] = 0,
    context: Annotated[
        int, typer.Option("--context", help="Tokens of prompt and output together")
    ] = 0,
    tokens_per_s: Annotated[
        float, typer.Option("--tokens-per-s", help="Of all its sessions together")
    ] = 0.0,
    priority: Annotated[int, typer.Option("--priority", help="Higher goes first, -100 to 100")] = 0,
    models: Annotated[
        str, typer.Option("--models", metavar="A,B", help="Models it may use (default: all)")
    ] = "",
) -> None:
    """Make a key and print it, this once: only its digest is kept.

    [dim]edgespec keys add workshop --sessions 8 --file keys.yaml[/]
    """
    with reported(), _alone(file):
        known = _read(file)
        try:
            check_key_name(name)
            if name in known.keys:
                raise ValueError(f"{name!r} has a key already; revoke it, or take another name")
            key, sha256 = new_key()
            names = tuple(word.strip() for word in models.split(",") if word.strip())
            entry = KeyEntry(sha256, sessions, context, tokens_per_s, priority, names)
            save_keys(file, replace(known, keys={**known.keys, name: entry}))
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(str(error)) from error
        typer.echo(key)
        say(
            f"{name!r} was added to {file}. The device takes the key from EDGESPEC_API_KEY or"
            " --api-key-file;\nit is not shown again. A running verifier learns of it by SIGHUP."
        )


@keys.command("list", epilog=EXIT_CODES)
def show(file: File) -> None:
    """List names and limits."""
    with reported():
        known = load_keys(file).keys
        for name, entry in sorted(known.items()):
            limits = [
                f"{one.name} {_shown(getattr(entry, one.name))}"
                for one in fields(entry)
                if one.name != "sha256" and getattr(entry, one.name)
            ]
            typer.echo(f"{name}: {', '.join(limits) or 'no limits'}")
        if not known:
            say(f"{file} holds no key")


@keys.command(epilog=EXIT_CODES)
def revoke(name: Name, file: File) -> None:
    """Take a key away. A running verifier ends its streams at SIGHUP."""
    with reported(), _alone(file):
        known = load_keys(file)
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
        if sys.platform != "win32":
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _read(file: Path) -> KeyFile:
    """The file, or an empty one where there is none yet."""
    return load_keys(file) if file.exists() else KeyFile()


def _shown(value: object) -> str:
    return "/".join(map(str, value)) if isinstance(value, tuple) else f"{value:g}"
