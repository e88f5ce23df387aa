"""One line at the end of each stream: what it got, how fast, why it ended, and whose it was."""

from __future__ import annotations

import logging

from edgespec.telemetry.stream_meter import StreamRecord

_LOG = logging.getLogger(__name__)


def log_stream(record: StreamRecord) -> None:
    """Say at level INFO how the stream went; see ``StreamMeter``."""
    if not _LOG.isEnabledFor(logging.INFO):
        return
    fields = {
        "event": "stream",
        "reason": record.reason,
        "served": record.opened,
        "resumed": record.resumed,
        "prompt_tokens": len(record.request.prompt),
        "tokens": record.tokens,
        "accepted": record.accepted,
        "nodes": record.nodes,
        "ttft_s": _rounded(record.ttft_s),
        "tpot_s": _rounded(record.tpot_s),
        "duration_s": _rounded(record.ended_at - record.opened_at),
        "key": record.credential,
        "peer": record.peer,
    }
    extra = {"request_id": record.request_id, "fields": fields}
    _LOG.info("%s", _in_words(record), extra=extra)


def _in_words(record: StreamRecord) -> str:
    words = [f"{record.tokens} tokens, {record.accepted} of {record.nodes} drafted ones accepted"]
    if (ttft_s := record.ttft_s) is not None:
        words.append(f"first after {ttft_s * 1e3:.0f} ms")
    if (tpot_s := record.tpot_s) is not None:
        words.append(f"then {tpot_s * 1e3:.1f} ms a token")
    whose = f"key {record.credential} at {record.peer}" if record.credential else record.peer
    outcome = "ended" if record.opened else "refused"
    return f"stream of {whose} {outcome} ({record.reason}): {', '.join(words)}"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
