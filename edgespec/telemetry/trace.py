"""Trace of a run: one JSON object a line, for every event that a session received and every action
that it returned.

Metrics, timelines, replay and golden tests read it. A line has ``at_s`` (the side's monotonic
clock), ``side`` ("device" or "verifier"), ``session`` (a session id or stream number), ``kind``
("event" or "action"), ``name`` (the class) and the fields of the class, except fields that its repr
leaves out (``repr=False``: secrets). Tokens are ids, never text. With ``HiddenTokens`` even the ids
are replaced.

A trace is best effort: a full disk ends the trace with one warning, and never the run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol, Self, TextIO

from edgespec.config.files import open_to_write
from edgespec.core.protocol.messages import MAX_TOKEN_ID

TOKEN_FIELDS: Final = frozenset("tokens prompt committed feed text targets stop_token_ids".split())
"""Names of fields in the core's classes that are sequences of token ids."""
_MAX_SUBSTITUTES: Final = 1 << 20


class HiddenTokens:
    """Substitute token ids for one trace, so that its text cannot be read.

    Equal tokens have equal substitutes, and a substitute has as many bytes on the wire. So
    everything that is counted, compared or timed is as in an open trace. This is a substitution
    cipher: it hides a text from casual readers of the file, not from a cryptanalyst with much of
    it. Stop strings are replaced by their lengths, and hashes of prefixes by keyed ones, since a
    chain of open hashes would reveal each token to a search over the vocabulary."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self._substitutes: dict[int, int] = {}
        self._used: set[int] = set()

    def substitute(self, name: str, value: Any) -> Any:
        match name, value:
            case ("token", int()):
                return self.substitute_token(value)
            case ("stop", tuple() | list()):
                return [f"{len(one)} characters" for one in value]
            case ("logit_bias", Mapping()):
                return {self.substitute_token(int(one)): bias for one, bias in value.items()}
            case ("top", tuple() | list()):
                return [(self.substitute_token(one), *rest) for one, *rest in value]
            case ("base_hash", int()) if value:
                digest = hashlib.blake2b(b"prefix %d" % value, key=self._key, digest_size=8)
                return int.from_bytes(digest.digest()[:4], "big") or 1
            case (_, tuple() | list()) if name in TOKEN_FIELDS:
                return [
                    self.substitute_token(one) if isinstance(one, int) else one for one in value
                ]
        return value

    def substitute_token(self, token: int) -> int:
        """Return the substitute of a token: another id of the same size as a varint."""
        if not 0 <= token <= MAX_TOKEN_ID:
            return token
        if token in self._substitutes:
            return self._substitutes[token]
        if (
            len(self._substitutes) >= _MAX_SUBSTITUTES
        ):  # more tokens than any vocabulary: begin again
            self._substitutes.clear()
            self._used.clear()
        varint_bytes = max(1, -(-token.bit_length() // 7))
        minimum = 0 if varint_bytes == 1 else 1 << 7 * (varint_bytes - 1)
        count = min(1 << 7 * varint_bytes, MAX_TOKEN_ID + 1) - minimum
        while (substitute := minimum + secrets.randbelow(count)) in self._used:
            continue
        self._used.add(substitute)
        self._substitutes[token] = substitute
        return substitute


_log = logging.getLogger(__name__)


class Tracer(Protocol):
    """Receiver of the events and actions of sessions."""

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        """Record one event or action. Must not raise and must not keep ``item`` alive."""


class TraceFile:
    """Writer of a trace to ``path``, which it replaces. A context manager; output is buffered until
    ``close``.

    ``hidden`` has the substitutes for tokens; None writes the ids themselves. Only opening raises,
    ``OSError``. If a write fails or a line cannot be formed, the trace ends there, and the file
    keeps what was written before."""

    def __init__(self, path: Path, hidden: HiddenTokens | None = None) -> None:
        self._path, self._hidden = path, hidden
        self._file: TextIO | None = open_to_write(path)

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        if self._file is None:
            return
        try:
            line = {
                "at_s": round(at_s, 6),
                "side": side,
                "session": session,
                "kind": kind,
                "name": type(item).__name__,
                **_plain_fields(item, self._hidden),
            }
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except (
            OSError,
            TypeError,
            ValueError,
        ) as error:  # an item without JSON, too
            self.close(error)

    def close(self, why: Exception | None = None) -> None:
        """Write the buffered lines and close the file. A second call does nothing. ``why``: the
        error that ends the trace before the run."""
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
        except OSError as error:  # the buffer of a failed write is still full
            why = why or error
        if why is not None:
            words = getattr(why, "strerror", None) or why
            _log.warning("the trace %s ends here: %s", self._path, words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _plain_fields(item: object, hidden: HiddenTokens | None) -> dict[str, Any]:
    if not is_dataclass(item):
        return {"value": str(item)}
    # A field that a class keeps out of its repr, such as a session's secret, stays out of the trace
    # too.
    shown_fields = {field.name: getattr(item, field.name) for field in fields(item) if field.repr}
    if hidden is not None:
        shown_fields = {
            name: hidden.substitute(name, value) for name, value in shown_fields.items()
        }
    return {name: _to_plain_value(value, hidden) for name, value in shown_fields.items()}


def _to_plain_value(value: Any, hidden: HiddenTokens | None) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {"name": type(value).__name__, **_plain_fields(value, hidden)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [_to_plain_value(item, hidden) for item in value]
    if isinstance(value, dict):
        return {str(key): _to_plain_value(item, hidden) for key, item in value.items()}
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def to_plain_data(value: Any) -> Any:
    """Return ``value`` as dicts, lists, numbers and texts, with floats rounded to a millionth."""
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_plain_data(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain_data(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_data(one) for one in value]
    if isinstance(value, Enum):
        return value.value
    return round(value, 6) if isinstance(value, float) else value
