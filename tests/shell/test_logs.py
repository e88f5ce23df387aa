"""Log lines. Oracle: what a stream was sent; a reader that takes each line for one JSON object."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec.core.protocol.messages import Commit, Open
from edgespec.device.build import build_agent
from edgespec.telemetry.logs import JsonFormatter
from edgespec.telemetry.trace import TraceFile
from tests.shell.live_verifier import daemon, start
from tests.shell.test_end_to_end import GREEDY, PROMPT, SAMPLED, collect, config, tokens
from tests.shell.watched_verifier import watched

WITHIN_S = 120


class Lines(logging.Handler):
    """Every line as JSON, read back."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]

    @property
    def streams(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == "stream"]


@pytest.fixture
def log() -> Iterator[Lines]:
    logger, handler = logging.getLogger("edgespec"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def _record(message: str, **extra: object) -> logging.LogRecord:
    return logging.getLogger("edgespec.x").makeRecord(
        "edgespec.x", logging.WARNING, "x.py", 1, message, (), None, extra=extra
    )


def test_a_json_line_is_one_object_whatever_the_message_holds() -> None:
    hostile = 'two\nlines "and" {braces} \x1b[31m \u2028 é'
    text = JsonFormatter().format(_record(hostile, fields={"tokens": 3, "level": "forged"}))
    assert "\n" not in text
    assert "\x1b" not in text
    line = json.loads(text)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"level": "warning", "logger": "edgespec.x", "message": hostile, "tokens": 3}


async def test_every_stream_has_one_line_that_says_what_it_got(log: Lines) -> None:
    async with watched() as found:
        async with (
            build_agent(config(found.address)) as one,
            build_agent(config(found.address)) as two,
        ):
            chunks = await asyncio.gather(collect(one, GREEDY), collect(two, SAMPLED))
            stats = [agent.stats for agent in (one, two)]
    assert sorted(line["tokens"] for line in log.streams) == sorted(len(tokens(c)) for c in chunks)
    accepted = [one.counters.accepted for one in stats if one is not None]
    assert sorted(line["accepted"] for line in log.streams) == sorted(accepted)
    assert len({line["request"] for line in log.streams}) == 2
    for line in log.streams:
        assert (line["reason"], line["level"], line["served"]) == ("length", "info", True)
        assert line["peer"] in line["message"]
        assert 0 < line["ttft_s"] <= line["duration_s"]
        assert line["tpot_s"] > 0


def test_all_that_a_daemon_and_a_device_say_is_json() -> None:
    form = ("--set", "log_format=json")
    with daemon(*form, "--set", "log_level=info", "--metrics-port", "0") as (address, verifier):
        where = ("--verifier", address, "--draft", "toy", "--stats")
        with start("generate", PROMPT, *where, "-n", "8", *form) as device:
            _, told = device.communicate(timeout=WITHIN_S)
        verifier.send_signal(signal.SIGTERM)
        _, said = verifier.communicate(timeout=WITHIN_S)
    lines = [json.loads(line) for line in said.splitlines()]
    assert {"loading toy ...", "stopping; the devices are told"} <= {x["message"] for x in lines}
    (stream,) = [line for line in lines if line.get("event") == "stream"]
    assert (stream["tokens"], stream["reason"]) == (8, "length")
    assert "8 tokens in" in json.loads(told.splitlines()[-1])["message"]
    assert device.returncode == verifier.returncode == 0


FULL = Path("/dev/full")


@pytest.fixture
def full() -> Path:
    """A disk that takes nothing."""
    if not FULL.exists():
        pytest.skip(f"this system has no {FULL}")
    return FULL


def test_a_full_disk_is_told_once_and_ends_the_trace(
    full: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), TraceFile(full) as trace:
        for position in range(2000):
            trace.record(1.0, "device", "s", "event", Commit(position, (1, 2, 3)))
    (record,) = caplog.records
    assert record.message == f"the trace {full} ends here: No space left on device"


def test_a_secret_is_not_traced(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceFile(path) as trace:
        trace.record(1.0, "device", "s", "event", Open("s", "", "", (1,), session_secret=b"hush"))
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["prompt"] == [1]
    assert "hush" not in line
    assert "session_secret" not in line
