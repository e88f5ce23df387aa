"""The file of keys: who may use a verifier, and how much of it.

    keys:
      workshop:
        sha256: 5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef
        max_sessions: 8

It holds digests only (``core/verifier/credential.py``); a key is shown once, when it is made. A
file is replaced as a whole: a verifier that reads it meanwhile finds the old one or the new one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from edgespec.config.files import replace_file
from edgespec.config.loading import ConfigError, dump_config, load_config
from edgespec.core.protocol.checks import bounded
from edgespec.core.verifier.credential import DIGEST_BYTES, Credential, KeyRing, digest

KEY_PREFIX = "edgespec-"
"""So that a key is known for one where it should not be: in a repository, say."""
_RANDOM_BYTES = 32
MAX_NAME_LENGTH = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_NAME_LENGTH - 1}}}")
_HEX = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_HEAD = (
    "# Keys of an edgespec verifier: digests and limits, 0 for no limit of its own.\n"
    "# `edgespec keys add NAME --file FILE` makes one; SIGHUP makes the verifier read this anew.\n"
)


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """One key: its digest, and what its devices may use together. 0: no limit of its own."""

    sha256: str
    max_sessions: int = 0
    context_length: int = 0
    """Prompt plus output of one session, in tokens."""
    tokens_per_s: float = 0.0
    """Of all its sessions together, in the long run."""
    priority: int = 0
    """Sessions of a higher priority get room in a pass first."""
    models: tuple[str, ...] = ()
    """Names of models it may use; empty: all."""

    def __post_init__(self) -> None:
        if not _HEX.fullmatch(self.sha256):
            raise ValueError(f"sha256 is {self.sha256[:80]!r}, but must be 64 hexadecimal digits")
        bounded("max_sessions", self.max_sessions, 0, 1024)
        bounded("context_length", self.context_length, 0, 1 << 20)
        bounded("tokens_per_s", self.tokens_per_s, 0.0, 1e9)
        bounded("priority", self.priority, -100, 100)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """All keys, by name."""

    keys: Mapping[str, KeyEntry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.keys:
            check_key_name(name)
        self.ring()

    def ring(self) -> KeyRing:
        """What a verifier asks. Raises ``ValueError`` for too many keys, or one under two names."""
        return KeyRing(
            {
                name: (bytes.fromhex(entry.sha256), _credential(name, entry))
                for name, entry in self.keys.items()
            }
        )


@dataclass(frozen=True, slots=True)
class _WrittenKeys(KeyFile):
    """Keys of a file that says which there are, if only ``keys: {}``."""

    keys: Mapping[str, KeyEntry]


def _credential(name: str, entry: KeyEntry) -> Credential:
    limits = {one.name: getattr(entry, one.name) for one in fields(entry) if one.name != "sha256"}
    return Credential(name, **limits)


def check_key_name(name: str) -> None:
    """Raises ``ValueError`` for a name that could not stand in logs and metrics as it is."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"the name {name[:80]!r} must have 1 to {MAX_NAME_LENGTH} letters, digits, dots, dashes"
            " or underscores, and begin with a letter or digit"
        )


def new_key() -> tuple[str, str]:
    """A key of 256 random bits, and its digest as the file holds it."""
    key = KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return key, digest(key).hex()


def load_keys(path: Path, *, written: bool = False) -> KeyFile:
    """The keys in a file. Raises ``ConfigError`` naming the file, the key and what is wrong.

    ``written``: an empty file is wrong as well. A verifier that runs asks for it: what an editor
    or a full disk has just cut off would else revoke all keys.
    """
    return load_config(_WrittenKeys if written else KeyFile, path)


def save_keys(path: Path, keys: KeyFile) -> None:
    """Write the file, readable for its owner alone; one that is there stays whose it is, for a
    verifier of a user of its own reads it. Raises ``ConfigError``."""
    path = path.resolve()
    try:
        replace_file(path, _HEAD + dump_config(keys), keeps_owner=True)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
