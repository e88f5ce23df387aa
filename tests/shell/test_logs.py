"""Log lines, in which nothing stands of what was asked and answered. Oracles: what a stream was
sent; a reader that takes each line for one JSON object; words that occur nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest, PassResult
from edgespec.core.protocol.messages import Commit, Open
from edgespec.device.build import build_agent
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.logs import JsonFormatter, TextFormatter
from edgespec.telemetry.trace import TraceFile
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.endpoint.live_endpoint import ask, over_toy
from tests.shell.live_verifier import daemon, start
from tests.shell.test_end_to_end import GREEDY, PROMPT, SAMPLED, collect, config, tokens
from tests.shell.watched_verifier import watched

WITHIN_S = 120


class Lines(logging.Handler):
    """Every line as JSON, read back."""

    logger, level = "edgespec", logging.INFO

    def __init__(self) -> None:
        super().__init__(self.level)
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


@contextlib.contextmanager
def heard(handler: Lines) -> Iterator[Lines]:
    logger = logging.getLogger(handler.logger)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(handler.level)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def log() -> Iterator[Lines]:
    with heard(Lines()) as found:
        yield found


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


WORD = "Xylophonquark"
SCHEMA = {"type": "object", "properties": {WORD: {"type": "string"}}}


class Everything(Lines):
    """All lines of all loggers at any level, in both formats."""

    logger, level = "", logging.DEBUG

    def emit(self, record: logging.LogRecord) -> None:
        self.texts += [one.format(record) for one in (JsonFormatter(), TextFormatter())]


@pytest.fixture
def all_lines() -> Iterator[Lines]:
    with heard(Everything()) as found:
        yield found


class Failing(ToyTarget):
    """Fails once, in a pass."""

    failing = False

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        if self.failing:
            self.failing = False
            raise RuntimeError("a pass was chosen to fail")
        return super().forward(batch)


ASKED: tuple[dict[str, Any], ...] = (
    {"prompt": WORD, "max_tokens": 4},
    {"prompt": WORD, "max_tokens": 4, "stream": True, "stop": [WORD]},
    {"prompt": WORD, "max_tokens": 4, "regex": f"({WORD}"},
    {"prompt": WORD, "max_tokens": 4, "grammar": f"start: {WORD}"},
    {"prompt": WORD, "max_tokens": WORD},
    {"prompt": [WORD, 1], "max_tokens": 4},
    {"prompt": [1, 1 << 40], "max_tokens": 4},
    {"prompt": WORD, WORD: 1},
    {"prompt": WORD, "prompt_cache_key": WORD, "max_tokens": 4},
    {"messages": [{"role": "user", "content": WORD}], "max_tokens": 4},
    {"messages": [{"role": WORD, "content": WORD}]},
    {
        "messages": [{"role": "user", "content": WORD}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "max_tokens": 4,
    },
)


async def test_no_request_leaves_its_words_in_a_log(all_lines: Lines) -> None:
    target = load_target(VerifierConfig(model="toy"))
    assert isinstance(target, ToyTarget)
    failing = Failing(TOY_MODEL, name="toy", vocabulary=target.info.vocabulary)
    statuses = set[int]()
    async with over_toy(failing) as live:
        for asked in ASKED:
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            statuses.add((await ask(live, path, asked)).status)
        failing.failing = True
        while failing.failing or 200 not in statuses:  # it has met a pass, however busy this is
            statuses.add((await ask(live, "/v1/completions", ASKED[0])).status)
        logging.getLogger("edgespec").info("the last line")
    assert {200, 400} <= statuses
    text = "\n".join(all_lines.texts)
    assert "a pass was chosen to fail" in text  # it is told that it failed, and not what was asked
    assert "the last line" in text
    assert WORD not in text
    assert ", ".join(map(str, ToyTokenizer().encode(WORD)[:6])) not in text


async def test_a_bug_while_a_request_is_answered_leaves_none_either(
    all_lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_toy() as live:
        monkeypatch.setattr(live.endpoint.agent, "_session", _breaks)
        monkeypatch.setattr(live.endpoint.tokenizer, "render_chat", _breaks)
        for asked in (ASKED[0], ASKED[9]):
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            assert (await ask(live, path, asked)).status == 500
        await asyncio.sleep(0)
    text = "\n".join(all_lines.texts)
    assert "a bug" in text
    assert WORD not in text


def _breaks(*arguments: object, **more: object) -> object:
    raise ZeroDivisionError("a bug")
