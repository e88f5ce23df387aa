"""What was asked and answered stands in no log, at any level. Oracle: words and numbers that
occur nowhere else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from edgespec.config import VerifierConfig
from edgespec.core.ports import PassRequest, PassResult
from edgespec.models.toy import TOY_MODEL, ToyTokenizer
from edgespec.telemetry.logs import JsonFormatter, TextFormatter
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.endpoint.live_endpoint import ask, over_toy

WORD = "Xylophonquark"
SCHEMA = {"type": "object", "properties": {WORD: {"type": "string"}}}


class Log(logging.Handler):
    """All lines of all loggers, in both formats."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += [one.format(record) for one in (JsonFormatter(), TextFormatter())]


@pytest.fixture
def log() -> Iterator[Log]:
    root, handler = logging.getLogger(), Log()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


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


async def test_no_request_leaves_its_words_in_a_log(log: Log) -> None:
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
    text = "\n".join(log.lines)
    assert "a pass was chosen to fail" in text  # it is told that it failed, and not what was asked
    assert "the last line" in text
    assert WORD not in text
    assert ", ".join(map(str, ToyTokenizer().encode(WORD)[:6])) not in text


async def test_a_bug_while_a_request_is_answered_leaves_none_either(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with over_toy() as live:
        monkeypatch.setattr(live.endpoint.agent, "_session", _breaks)
        monkeypatch.setattr(live.endpoint.tokenizer, "render_chat", _breaks)
        for asked in (ASKED[0], ASKED[9]):
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            assert (await ask(live, path, asked)).status == 500
        await asyncio.sleep(0)
    text = "\n".join(log.lines)
    assert "a bug" in text
    assert WORD not in text


def _breaks(*arguments: object, **more: object) -> object:
    raise ZeroDivisionError("a bug")
