"""Conversations as files: one JSON object each, for the user's eyes only.

They lie in ``$XDG_STATE_HOME/edgespec/conversations`` (by default ``~/.local/state``), with mode
0600 in a folder of mode 0700, and are replaced in one step, so a file is never half written. Of
those that were kept by themselves the newest ``MAX_KEPT`` stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from edgespec.config.files import replace_file

FORMAT: Final = "edgespec-conversation"
VERSION: Final = 1
MAX_KEPT: Final = 200
MAX_BYTES: Final = 16 << 20
MAX_MESSAGES: Final = 10_000
_ROLES: Final = ("system", "user", "assistant")


class ConversationError(ValueError):
    """A conversation cannot be read or written; the message names the file and what is wrong."""


@dataclass(slots=True)
class Record:
    """A conversation: who said what, oldest first. ``system`` comes before all messages."""

    model: str = ""
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    begun: str = ""
    """When, in UTC, as ISO 8601."""

    @property
    def asked(self) -> list[dict[str, str]]:
        """What the model is told: the system's text, if there is one, and the messages."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def as_json(self) -> str:
        data = {
            "format": FORMAT,
            "version": VERSION,
            "model": self.model,
            "begun": self.begun,
            "system": self.system,
            "messages": self.messages,
        }
        return json.dumps(data, ensure_ascii=False, indent=1) + "\n"


def is_utf8(text: str) -> bool:
    """Whether it can be written: half of a surrogate pair, or a byte that is none, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def now_text() -> str:
    """This moment, in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def state_folder() -> Path:
    """``$XDG_STATE_HOME/edgespec``, by default ``~/.local/state/edgespec``. Raises ``OSError``
    where this user has no home."""
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "edgespec"
    try:
        return Path.home() / ".local" / "state" / "edgespec"
    except RuntimeError as error:
        why = "this user has no home folder: set HOME or XDG_STATE_HOME, or give --no-history"
        raise OSError(why) from error


def conversations_folder() -> Path:
    return state_folder() / "conversations"


def new_path() -> Path:
    """Where a conversation that begins now is kept; its name sorts by time."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return conversations_folder() / f"{stamp}-{secrets.token_hex(3)}.json"


def private_folder(folder: Path) -> None:
    """Make ``folder``, which only its owner may enter. Raises ``OSError``."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def write(path: Path, record: Record) -> None:
    """Replace ``path`` in one step. Raises ``ConversationError``; then ``path`` is as it was."""
    try:
        private_folder(path.parent)
        replace_file(path, record.as_json())
    except (OSError, UnicodeError) as error:
        raise ConversationError(f"{path}: cannot be written: {_why(error)}") from error


class KeptFile:
    """Where one chat keeps its conversation, while nobody else does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _stamp(path)

    def write(self, record: Record) -> bool:
        """Whether it lies in another file from here on, for another chat has written to this one,
        whose conversation stays as it is. Raises ``ConversationError``."""
        moved = _stamp(self.path) not in (None, self._seen)
        if moved:
            self.path = new_path()
        write(self.path, record)
        self._seen = _stamp(self.path)
        return moved


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Changes with every write; None: there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def write_new(path: Path, record: Record) -> None:
    """As ``write``, but a file that is there is only replaced if it is a conversation."""
    if path.exists():
        try:
            read(path)
        except ConversationError as error:
            raise ConversationError(
                f"{path} exists and is no conversation; it stays as it is, give another name"
            ) from error
    write(path, record)


def read(path: Path) -> Record:
    """Raises ``ConversationError``."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # of a device, say, there is no end
        if len(data) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes, but at most so many are read")
        return _record(json.loads(data.decode("utf-8")))
    except (OSError, RecursionError, ValueError) as error:
        raise ConversationError(f"{path}: no conversation: {_why(error)}") from error


def newest() -> Path | None:
    """The conversation that was changed last, if one was kept."""
    found = _kept()
    return found[-1] if found else None


def forget_oldest() -> None:
    """Keep the newest ``MAX_KEPT`` conversations."""
    for path in _kept()[:-MAX_KEPT]:
        with contextlib.suppress(OSError):
            path.unlink()


def _kept() -> list[Path]:
    """By the time of their last change, the newest last."""
    found = []
    with contextlib.suppress(OSError):
        for path in conversations_folder().glob("*.json"):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.name, path))
    return [path for _, _, path in sorted(found)]


def _record(data: Any) -> Record:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    if data.get("version") != VERSION:
        raise ValueError(f"its version is {data.get('version')!r}, but must be {VERSION}")
    messages = data.get("messages")
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        raise ValueError(f"messages must be a list of at most {MAX_MESSAGES}")
    return Record(
        model=_text(data, "model"),
        system=_text(data, "system"),
        messages=[_message(number, one) for number, one in enumerate(messages)],
        begun=_text(data, "begun"),
    )


def _message(number: int, one: Any) -> dict[str, str]:
    if not isinstance(one, dict) or one.get("role") not in _ROLES:
        raise ValueError(f"messages[{number}] must have a role of {', '.join(_ROLES)}")
    content = one.get("content")
    if not isinstance(content, str) or not is_utf8(content):
        raise ValueError(f"messages[{number}] must have a content, which is text")
    return {"role": one["role"], "content": content}


def _text(data: dict[str, Any], name: str) -> str:
    value = data.get(name, "")
    if not isinstance(value, str) or not is_utf8(value):
        raise ValueError(f"{name} is {value!r}, but must be text")
    return value


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
