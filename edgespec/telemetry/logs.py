"""Log lines for people and for machines, with the stream that a line is about.

A JSON line is one object: ``time`` (UTC), ``level``, ``logger``, ``message``; ``request`` (the
stream's id) and ``exception`` if there is one; and the fields that a caller passed as
``extra={"fields": {...}}``. A message with line breaks stays on one line.
"""

from __future__ import annotations

import json
import logging
import secrets
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from edgespec.core.protocol.failures import describe_without_messages

request_id: ContextVar[str] = ContextVar("edgespec_request_id", default="")
"""Log id of the stream that the running task serves, made at its beginning; empty outside of
streams. It is unrelated to the session id, which is half of what is needed to resume a session."""


def new_request_id() -> str:
    """Return a new id of 10 hexadecimal digits. Among a million streams, (1e6)**2 / 2 / 16**10 =
    0.45 pairs have the same one."""
    return secrets.token_hex(5)


TEXT, JSON = "text", "json"


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request := _request_of(record):
            line["request"] = request
        if failure := getattr(record, "failure", ""):
            line["exception"] = failure
        elif record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        fields = getattr(record, "fields", {})
        line |= {key: value for key, value in fields.items() if key not in line}
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Formatter of text lines: level, logger, the stream's id in brackets, and the message."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s%(where)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        request = _request_of(record)
        record.where = f" [{request}]" if request else ""
        line, failure = super().format(record), getattr(record, "failure", "")
        return f"{line}\n{failure}" if failure else line


def log_failure(
    logger: logging.Logger,
    what: str,
    *values: object,
    error: BaseException,
    may_quote_client: bool,
    level: int = logging.ERROR,
) -> None:
    """Log an unexpected exception with the places where it was raised.

    Every log line with a traceback is written here (a test enforces it), since a traceback ends
    with a message that a library may have made of a client's words.

    Arguments: ``what`` and ``values`` are a format and its arguments, as for ``logger.error``.
    ``may_quote_client``: whether the failed code handled a client's words or secrets; then the
    messages of the exception and of its causes are left out."""
    if may_quote_client:
        failure = describe_without_messages(error)
    else:
        failure = "".join(traceback.format_exception(error)).rstrip()
    if logger.isEnabledFor(level):
        logger.log(level, f"{what}: %s", *values, type(error).__name__, extra={"failure": failure})


def _request_of(record: logging.LogRecord) -> str:
    """Return the stream that the caller named, else the one that the running task serves."""
    return getattr(record, "request_id", "") or request_id.get()
