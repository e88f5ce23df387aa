"""What was asked and answered stands in no log, at any level, or in two lines of it where somebody
wants that. Oracle: words and numbers that occur nowhere else, and what the client was answered."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.config import VerifierConfig
from edgespec.config.device import LOGGED_CHARACTERS
from edgespec.core.ports import PassRequest, PassResult
from edgespec.endpoint.counts import HIDDEN, PromptLog
from edgespec.models.toy import TOY_MODEL
from edgespec.telemetry.logs import JsonFormatter, TextFormatter
from edgespec.verifier.build import load_target
from edgespec.verifier.targets.toy import ToyTarget
from tests.endpoint.live_endpoint import ask, events_of, over_toy
from tests.endpoint.test_serve_command import WITHIN_S, curl, endpoint, needs_curl
from tests.shell.live_verifier import daemon

KEY = "sesame0123456789"
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
    assert ", ".join(map(str, _ids(WORD)[:6])) not in text


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


# --- where somebody wants them -----------------------------------------------------------------


class Logged(Log):
    """Of the lines, those in JSON."""

    @property
    def found(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines if line.startswith("{")]

    def about(self, request: str) -> list[dict[str, Any]]:
        events = ("prompt", "answer")
        about = [one for one in self.found if one.get("request") == request]
        return [one for one in about if one.get("event") in events]


@pytest.fixture
def logged() -> Iterator[Logged]:
    root, handler = logging.getLogger(), Logged()
    levels = root.level, logging.getLogger("edgespec.endpoint.prompt_log").level
    root.addHandler(handler)
    root.setLevel(logging.ERROR)  # they are written all the same
    yield handler
    root.removeHandler(handler)
    root.setLevel(levels[0])
    logging.getLogger("edgespec.endpoint.prompt_log").setLevel(levels[1])


def prompt_log(*keys: str) -> PromptLog:
    found = PromptLog(keys)
    found.begin()
    return found


async def test_who_wants_prompts_finds_them_under_the_id_of_the_request(logged: Logged) -> None:
    async with over_toy(prompt_log=prompt_log()) as live:
        assert logged.found[0]["level"] == "warning"
        assert str(LOGGED_CHARACTERS) in logged.found[0]["message"]
        whole = (await ask(live, "/v1/completions", {**ASKED[0], "n": 2})).json
        prompt, *answers = logged.about(whole["id"])
        assert (prompt["event"], prompt["text"]) == ("prompt", WORD)
        assert prompt["tokens"] == whole["usage"]["prompt_tokens"]
        assert [one["text"] for one in answers] == [one["text"] for one in whole["choices"]]
        assert [one["index"] for one in answers] == [0, 1]
        assert {one["finish"] for one in answers} == {"length"}
        streamed = events_of((await ask(live, "/v1/completions", ASKED[1])).body)
        prompt, answer = logged.about(streamed[0]["id"])
        text = "".join(one["choices"][0]["text"] for one in streamed if one != "[DONE]")
        assert (prompt["text"], answer["text"]) == (WORD, text)
        chat = (await ask(live, "/v1/chat/completions", ASKED[9])).json
        prompt, answer = logged.about(chat["id"])
        assert WORD in prompt["text"]
        assert answer["text"] == chat["choices"][0]["message"]["content"]


async def test_they_stand_there_and_nowhere_else(logged: Logged) -> None:
    """Whatever is asked, and whatever goes wrong."""
    logging.getLogger().setLevel(logging.DEBUG)
    target = load_target(VerifierConfig(model="toy"))
    failing = Failing(TOY_MODEL, name="toy", vocabulary=target.info.vocabulary)
    async with over_toy(failing, prompt_log=prompt_log()) as live:
        for asked in ASKED:
            path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
            await ask(live, path, asked)
        failing.failing = True
        while failing.failing:
            await ask(live, "/v1/completions", ASKED[0])
    assert "a pass was chosen to fail" in "".join(logged.lines)
    holding = [one for one in logged.found if WORD in json.dumps(one)]
    assert holding
    assert {one["logger"] for one in holding} == {"edgespec.endpoint.prompt_log"}
    assert {one["event"] for one in holding} <= {"prompt", "answer"}
    begun = [one["request"] for one in logged.found if one.get("event") == "prompt"]
    ended = {one["request"] for one in logged.found if one.get("event") == "answer"}
    assert set(begun) == ended


async def test_long_texts_are_cut_in_the_middle_and_keys_hidden(
    logged: Logged, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 200  # the toy's context has no room for more than is logged
    monkeypatch.setattr("edgespec.endpoint.counts.LOGGED_CHARACTERS", most)
    begin, end = "b" * 300 + KEY, "e" * 300
    async with over_toy(prompt_log=prompt_log(KEY, ""), key=KEY) as live:
        asked = {"prompt": begin + end, "max_tokens": 1}
        whole = await ask(live, "/v1/completions", asked, Authorization=f"Bearer {KEY}")
        prompt, _ = logged.about(whole.json["id"])
        short = {"prompt": f"one {KEY} two", "max_tokens": 1}
        found = await ask(live, "/v1/completions", short, Authorization=f"Bearer {KEY}")
        assert logged.about(found.json["id"])[0]["text"] == f"one {HIDDEN} two"
    half = most // 2
    left = len(begin + end) - len(KEY) + len(HIDDEN) - 2 * half
    assert prompt["text"] == f"{'b' * half} [... {left} characters ...] {'e' * half}"
    assert KEY not in "".join(logged.lines)
    # Text for people stays on its line.
    (people,) = (line for line in logged.lines if line.endswith(f': "one {HIDDEN} two"'))
    assert found.json["id"] in people


LOGGED = ("--set", "endpoint.log_prompts=true")


def test_the_switch_is_off_and_in_the_file() -> None:
    call = CliRunner().invoke
    shown = call(app, ["serve", "--help-all"]).stdout
    assert "log_prompts: false" in shown
    assert "log_prompts: true" in call(app, ["serve", *LOGGED, "--help-all"]).stdout


@needs_curl
def test_serve_warns_and_writes_them_at_any_level() -> None:
    options = (*LOGGED, "--set", "log_level=error", "--set", "log_format=json")
    with daemon() as (address, _), endpoint("--verifier", address, *options) as (url, process):
        asked = {"prompt": WORD, "max_tokens": 4}
        whole = curl(f"{url}/v1/completions", "-d", json.dumps(asked))
        process.send_signal(signal.SIGTERM)
        assert process.wait(WITHIN_S) == 0
        assert process.stderr is not None
        lines = [json.loads(line) for line in process.stderr.read().splitlines()]
    ours = [one for one in lines if one["logger"] == "edgespec.endpoint.prompt_log"]
    assert [one.get("event") for one in ours] == [None, "prompt", "answer"]
    assert ours[0]["level"] == "warning"
    assert (ours[1]["text"], ours[2]["text"]) == (WORD, whole["choices"][0]["text"])
    assert {one["request"] for one in ours[1:]} == {whole["id"]}
    assert [one for one in lines if WORD in json.dumps(one)] == [ours[1]]


def _breaks(*arguments: object, **more: object) -> object:
    raise ZeroDivisionError("a bug")


def _ids(text: str) -> list[int]:
    from edgespec.models.toy import ToyTokenizer

    return ToyTokenizer().encode(text)
