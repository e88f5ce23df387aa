"""The last answer of each verifier, kept in the user's cache.

A process that knows its verifier's last answer can send its first prompt together with its
greeting, one round trip earlier, and shows nothing before the real answer is there and is the same.
So a file that is old or wrong costs time and never changes an output.

Each address has one JSON file, readable by its user alone. The load of a verifier is not kept.
"""

from __future__ import annotations

import hashlib
import json
import logging
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from edgespec.config.files import read_text, replace_file
from edgespec.core.protocol.messages import VerifierInfo
from edgespec.models.folders import cache_folder
from edgespec.wire import codec
from edgespec.wire.tokenizer_lending import Announcement

MAX_KEPT: Final = 64
"""Most addresses whose answers are kept, as many as a device can have; the oldest are deleted."""
_MAX_BYTES: Final = 1 << 20
_FORMAT: Final = "edgespec-verifier-1"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Greeting:
    """A verifier's answer to the first calls of a device."""

    info: VerifierInfo
    announced: Announcement | None = None
    """Texts that the verifier lends. None if it lends none, or was not asked."""
    refusal: str = ""
    """Why the verifier lends no texts."""

    def is_same_as(self, other: Greeting) -> bool:
        """Return whether both name the same models and texts. Their loads may differ."""
        return (self.info.models, self.announced) == (other.info.models, other.announced)


def recall_greeting(address: str) -> Greeting | None:
    """Return the last answer of the verifier at ``address``, or None if there is none that can be
    read."""
    try:
        data = json.loads(read_text(_path_of(address), _MAX_BYTES))
        return _parse_greeting(data, address)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        _log.info("the last answer of %s cannot be read: %s", address, error)
        return None


def store_greeting(address: str, greeting: Greeting) -> None:
    """Keep the answer of the verifier at ``address``. A disk that fails is reported to the log."""
    info = replace(greeting.info, sessions=0, max_sessions=0, pass_us=0, drafts=None)
    announced = greeting.announced
    content = {
        "format": _FORMAT,
        "address": address,
        "info": b64encode(codec.encode_info(info)).decode(),
        "announced": None if announced is None else _to_json(announced),
        "refusal": greeting.refusal,
    }
    try:
        path = _path_of(address)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, json.dumps(content))
        _delete_oldest(path.parent)
    except OSError as error:
        _log.info("the answer of %s is not kept: %s", address, error)


def _path_of(address: str) -> Path:
    """Return the file of an address. Raises ``OSError`` if this user has no cache."""
    name = hashlib.sha256(address.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return cache_folder() / "verifiers" / f"{name}.json"


def _delete_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda one: one.stat().st_mtime)
    for path in files[:-MAX_KEPT]:
        path.unlink(missing_ok=True)


def _to_json(announced: Announcement) -> dict[str, Any]:
    found = {
        name: value.hex() if isinstance(value, bytes) else value
        for name, value in asdict(replace(announced, facts=None)).items()
    }
    return found | {"facts": announced.facts and _to_json(announced.facts)}


def _parse_greeting(data: Any, address: str) -> Greeting:
    if data["format"] != _FORMAT or data["address"] != address:
        raise ValueError(f"it is not the answer of {address}")
    info = codec.decode_info(b64decode(data["info"], validate=True))
    announced = data["announced"]
    return Greeting(info, announced and _parse_announcement(announced), str(data["refusal"]))


def _parse_announcement(data: Any) -> Announcement:
    return Announcement(
        sha256=bytes.fromhex(data["sha256"]),
        size=int(data["size"]),
        tokenizer_sha256=bytes.fromhex(data["tokenizer_sha256"]),
        facts=data["facts"] and _parse_announcement(data["facts"]),
    )
