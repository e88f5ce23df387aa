"""What a watched agent or verifier said, as rows of a table: name, value, and a note."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgespec.core.protocol.printable import one_line
from edgespec.telemetry.agent_status import FORMAT

_SAMPLE: Final = re.compile(r"(edgespec_\w+|process_\w+)(?:\{(.*)\})? (\S+)")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NONE: Final = "–"
_SPAN_S: Final = 0.2
"""Two fetches that are closer together say nothing about a rate."""


class ReadingError(ValueError):
    """What came is neither an agent's status nor a verifier's metrics."""


@dataclass(frozen=True, slots=True)
class Row:
    """``note`` may be left out where there is no room; the value never."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    title: str
    state: str
    """One line; empty when there is nothing to say."""
    well: bool
    rows: tuple[Row, ...]


# --- an agent -----------------------------------------------------------------------------------


def agent_reading(text: str) -> Reading:
    """Of ``/status.json``. Raises ``ReadingError``."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        verifier = _best(data["verifiers"])
        return Reading(
            title=f"agent, edgespec {_said(data['version'])}, up for {_duration(data['uptime_s'])}",
            state=_state(verifier),
            well=verifier is not None and verifier["state"] != "away",
            rows=tuple(_agent_rows(data, verifier)),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ReadingError(f"no status of an agent: {_why(error)}") from error


def _agent_rows(data: Mapping[str, Any], verifier: Mapping[str, Any] | None) -> list[Row]:
    totals, drafting, memory = data["totals"], data["drafting"], data["memory"]
    worth = {True: "yes", False: "not now", None: "not known"}[drafting["worth"]]
    rtt_s = None if verifier is None else verifier["rtt_s"]
    pass_s = None if verifier is None else verifier["pass_s"]
    rows = [
        Row("texts running", f"{data['running']:,}", f"{totals['generations']:,} so far"),
        Row("tokens/s", f"{data['tokens_per_s']:.1f}", f"{totals['tokens']:,} so far"),
        Row(
            "acceptance",
            _percent(drafting["acceptance"] if totals["tried"] else None),
            _per_pass(drafting["tokens_per_pass"]),
        ),
        Row("drafting pays", worth, _said(drafting["why"])),
        Row("round trip", _ms(rtt_s)),
        Row("pass", _ms(pass_s)),
    ]
    if verifier is not None and verifier["max_sessions"]:
        rows.append(Row("sessions there", f"{verifier['sessions']} of {verifier['max_sessions']}"))
    if drafting.get("rung"):
        rows.append(Row("drafting ladder", _said(drafting["rung"])))
    budget = memory["budget_bytes"]
    share = f"{memory['resident_bytes'] / budget:.0%} of the budget" if budget else "no budget"
    rows.append(Row("memory", _mib(memory["resident_bytes"], budget), share))
    if (battery := data["battery"]) is not None:
        note = "charging" if battery["plugged"] else "on battery"
        rows.append(Row("battery", f"{battery['percent']:.0f} %", note))
    rows += [
        Row("drafted tokens", f"{totals['accepted']:,}", f"of {totals['tokens']:,}"),
        Row("nodes sent", f"{totals['sent']:,}", f"{totals['stale']:,} came too late"),
        Row("reconnects", f"{totals['reconnects']:,}", f"{totals['failed']:,} texts failed"),
    ]
    for one in data["generations"]:
        speed = _NONE if one["tokens_per_s"] is None else f"{one['tokens_per_s']:.1f} tok/s"
        count = one.get("unverified", 0)
        more = f" and {count:,} unverified" if count else ""
        model = f" of {_said(one['model'])}" if one.get("model") else ""
        note = f"{one['tokens']:,} tokens{more}{model}, {_said(one['link'])}, accepted"
        rows.append(Row(f"text {one['number']}", speed, f"{note} {_percent(one['acceptance'])}"))
    return rows


def _best(verifiers: list[dict[str, Any]]) -> dict[str, Any] | None:
    for wanted in ("serving", "ready", "connecting"):
        for one in verifiers:
            if one["state"] == wanted:
                return one
    return verifiers[0] if verifiers else None


def _state(verifier: Mapping[str, Any] | None) -> str:
    if verifier is None:
        return "it knows no verifier"
    words = {"away": "not reachable", "unknown": "not asked yet"}
    state = words.get(verifier["state"], _said(verifier["state"]))
    since = verifier["since_s"]
    for_s = f" for {_duration(since)}" if since is not None and verifier["state"] == "away" else ""
    model = f", {_said(verifier['model'])}" if verifier["model"] else ""
    return f"{_said(verifier['address'])}: {state}{for_s}{model}"


# --- a verifier ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """One fetch of metrics: the sum of each metric over its labels, and when it was fetched."""

    values: Mapping[str, float]
    model: str
    at_s: float


def parse_metrics(text: str, at_s: float) -> Samples:
    """Of Prometheus' text format. Raises ``ReadingError`` when no metric of a verifier is there."""
    values: dict[str, float] = {}
    model = ""
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        labels = dict(_LABEL.findall(found[2] or ""))
        model = model or labels.get("model_name", "")
        if found[1].endswith("_bucket"):
            continue
        try:
            values[found[1]] = values.get(found[1], 0.0) + float(found[3])
        except ValueError:
            continue
    if "edgespec_generation_tokens_total" not in values:
        raise ReadingError(
            "no metrics of a verifier: edgespec_generation_tokens_total is not there"
        )
    return Samples(values, one_line(model), at_s)


def verifier_reading(now: Samples, before: Samples | None) -> Reading:
    """Rates are over the time since ``before``; without it, or where nothing happened since, means
    are over all time and rates are not known."""
    span_s = 0.0 if before is None else now.at_s - before.at_s
    last = None if before is None or span_s < _SPAN_S else before

    def count(name: str) -> float:
        return now.values.get(f"edgespec_{name}", 0.0)

    def added(name: str) -> float:
        earlier = 0.0 if last is None else last.values.get(f"edgespec_{name}", 0.0)
        return max(0.0, count(name) - earlier)  # it may have been started anew

    def ratio(above: str, below: str) -> float | None:
        recent = added(below)
        if recent:
            return added(above) / recent
        return count(above) / count(below) if count(below) else None

    def rate(name: str) -> str:
        return _NONE if last is None else f"{added(name) / span_s:.1f}"

    drafted = "spec_decode_num_draft_tokens_total"
    accepted = "spec_decode_num_accepted_tokens_total"
    resident = now.values.get("process_resident_memory_bytes")
    rows = [
        Row("sessions", f"{count('num_requests_running'):.0f}", "that decode"),
        Row("queue", f"{count('num_requests_waiting'):.0f}", "that wait for room or a pass"),
        Row("detached", f"{count('num_requests_detached'):.0f}", "whose link is lost"),
        Row(
            "tokens/s",
            rate("generation_tokens_total"),
            f"{count('generation_tokens_total'):,.0f} so far",
        ),
        Row("acceptance", _percent(ratio(accepted, drafted)), "of the draft nodes looked at"),
        Row("pass", _ms(ratio("pass_seconds_sum", "pass_seconds_count")), "mean"),
        Row("passes/s", rate("pass_seconds_count")),
        Row("rows a pass", _plain(ratio("pass_rows_sum", "pass_rows_count"))),
        Row("KV cache", _percent(count("kv_cache_usage_perc")), "held"),
        Row("round trip", _ms(ratio("rtt_seconds_sum", "rtt_seconds_count")), "mean"),
        Row(
            "time a token",
            _ms(ratio("inter_token_latency_seconds_sum", "inter_token_latency_seconds_count")),
            "mean, after the first",
        ),
        Row(
            "first token",
            _ms(ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count")),
            "mean",
        ),
        Row("preemptions", f"{count('preemptions_total'):,.0f}", "so far"),
        Row("failed passes", f"{count('failed_passes_total'):,.0f}", "so far"),
    ]
    if resident is not None:
        rows.append(Row("memory", _mib(resident)))
    return Reading(f"verifier of {now.model}", "", True, tuple(rows))


# --- how values are written -----------------------------------------------------------------------


def _percent(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _ms(seconds: float | None) -> str:
    return _NONE if seconds is None else f"{seconds * 1e3:.1f} ms"


def _plain(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _per_pass(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} tokens a pass"


def _mib(size: float, budget: float | None = None) -> str:
    of = f"/{budget / (1 << 20):.0f}" if budget else ""
    return f"{size / (1 << 20):.0f}{of} MiB"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _said(text: object) -> str:
    """What came over a network, before a person sees it."""
    return one_line(str(text))


def _why(error: Exception) -> str:
    return f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
