"""``edgespec top``. Oracles: the status and the metrics of live parties, and the width."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from edgespec.agent.status import StatusSource
from edgespec.cli import top as top_command
from edgespec.cli.main import app
from edgespec.cli.top_view.reading import (
    ReadingError,
    agent_reading,
    parse_metrics,
    verifier_reading,
)
from edgespec.cli.top_view.source import NotThereError, Source, UnreachableError
from edgespec.cli.top_view.table import rendered
from edgespec.compose import SetupError, build_agent
from edgespec.config import AgentConfig, ConfigError, DraftSection
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.telemetry.agent_status import VerifierState
from tests.shell.live_verifier import serving
from tests.shell.status_server import status_page
from tests.shell.test_chat_parts import STATUS
from tests.shell.watched_verifier import watched

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def shown(text: str, width: int, reading: Callable[[str], object] = agent_reading) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(rendered(reading(text), width))  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def status_text(**changes: object) -> str:
    return json.dumps(replace(STATUS, **changes).as_json())  # type: ignore[arg-type]


NUMBERS = ("42.1", "78%", "51.4 ms", "412/600 MiB", "55 %")


@pytest.mark.parametrize("width", [24, 40, 60, 120])
def test_no_number_is_lost_however_narrow(width: int) -> None:
    text = shown(status_text(), width)
    for number in NUMBERS:
        assert number in text, text
    if width >= 40:
        assert all(name in text for name in ("acceptance", "round trip", "drafted tokens")), text
    assert max(map(len, text.splitlines())) <= width


def test_a_verifier_that_is_away_is_said() -> None:
    gone = replace(STATUS.verifiers[0], state=VerifierState.AWAY, since_s=12.0)
    reading = agent_reading(status_text(verifiers=(gone,)))
    assert (reading.state, reading.well) == ("gpu-box:7420: not reachable for 12 s", False)


def test_words_of_strangers_cannot_control_the_terminal() -> None:
    evil = replace(STATUS.verifiers[0], model="a\x1b]0;x\x07")
    assert "\x1b" not in shown(status_text(verifiers=(evil,)), 80)


@pytest.fixture
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked is in this process, which others may hold up."""
    monkeypatch.setattr("edgespec.cli.top_view.source.WITHIN_S", 120.0)
    monkeypatch.setattr("edgespec.agent.status.ASK_WITHIN_S", 120.0)


@pytest.mark.usefixtures("_patient")
async def test_a_live_agent_by_its_bare_address() -> None:
    async with serving() as (address, _):
        async with build_agent(AgentConfig(verifier=address, draft=DraftSection("toy"))) as agent:
            async with status_page(StatusSource(agent, (address,), "9.9")) as url:
                async for _chunk in agent.generate("abc", PARAMS):
                    pass
                where = url.removeprefix("http://").rstrip("/")
                result = await asyncio.to_thread(CliRunner().invoke, app, ["top", where, "--once"])
    assert result.exit_code == 0, result.output
    assert "agent, edgespec 9.9" in result.stdout
    assert f"{address}: ready, toy" in result.stdout
    assert "40 so far" in " ".join(result.stdout.split())


@pytest.mark.usefixtures("_patient")
async def test_a_live_verifier_and_its_rates() -> None:
    async with watched() as found:
        async with build_agent(
            AgentConfig(verifier=found.address, draft=DraftSection("toy"))
        ) as agent:
            times = iter((10.0, 14.0))
            source = Source(found.url, clock=lambda: next(times))
            first = await asyncio.to_thread(source.read)
            async for _chunk in agent.generate("abc", PARAMS):
                pass
            second = await asyncio.to_thread(source.read)
    assert source.needs_two
    assert first.title == "verifier of toy"
    rows = {row.name: row for row in second.rows}
    assert rows["tokens/s"].value == "10.0", "40 tokens in 4 s"
    assert rows["tokens/s"].note == "40 so far"
    assert rows["pass"].value.endswith(" ms")
    assert {row.name: row.value for row in first.rows}["tokens/s"] == "–"


def test_rates_are_of_the_time_between() -> None:
    names = ("pass_seconds_sum", "pass_seconds_count", "generation_tokens_total")

    def text(*values: float) -> str:
        lines = [f'edgespec_{n}{{model_name="m"}} {v}' for n, v in zip(names, values, strict=True)]
        return "# HELP x\n" + "\n".join([*lines, 'edgespec_pass_seconds_bucket{le="1"} 99'])

    before, now = parse_metrics(text(1.0, 10, 100), 0.0), parse_metrics(text(1.6, 20, 150), 2.0)
    rows = {row.name: row.value for row in verifier_reading(now, before).rows}
    assert (rows["pass"], rows["passes/s"], rows["tokens/s"]) == ("60.0 ms", "5.0", "25.0")
    idle = {row.name: row.value for row in verifier_reading(now, replace(now, at_s=0.0)).rows}
    assert (idle["pass"], idle["tokens/s"]) == ("80.0 ms", "0.0")


def test_what_is_neither_of_the_two_is_refused() -> None:
    with pytest.raises(ReadingError, match="its format is not"):
        agent_reading("{}")
    with pytest.raises(ReadingError, match="the field 'verifiers' is missing"):
        agent_reading('{"format": "edgespec-agent-status"}')
    with pytest.raises(ReadingError, match="no metrics of a verifier"):
        parse_metrics("go_goroutines 3\n", 0.0)


@pytest.mark.parametrize("url", ["", "http://", "ftp://a:1", "a:1/x", "a:99999999", "//"])
def test_what_is_no_address_is_wrong_usage(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address to watch"):
        Source(url)


def test_nobody_there_is_a_clear_error() -> None:
    result = CliRunner().invoke(app, ["top", "127.0.0.1:1", "--once"])
    assert result.exit_code == 1
    assert "nothing to watch at http://127.0.0.1:1" in result.stderr
    assert "edgespec serve" in result.stderr


class _EnoughError(Exception):
    pass


def test_one_that_goes_away_is_a_state() -> None:
    answers = iter([status_text(), UnreachableError("x: refused"), status_text(), None])

    def fetch(url: str, key: str) -> str:
        answer = next(answers)
        if answer is None:
            raise _EnoughError
        if isinstance(answer, Exception):
            raise answer
        return answer

    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    source = Source("a:1/status.json", fetch=fetch)
    with pytest.raises(_EnoughError):
        top_command._watch(source, console, 1.0, clock=lambda: 5.0, sleep=lambda s: None)
    assert isinstance(console.file, io.StringIO)
    assert "no answer for 0 s: x: refused" in console.file.getvalue()
    gone = Source("a:1", fetch=lambda url, key: fail(url))
    with pytest.raises(SetupError, match="nothing to watch at http://a:1"):
        top_command._watch(gone, console, 1.0)


def fail(url: str) -> str:
    raise NotThereError(url)
