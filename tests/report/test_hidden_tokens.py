"""A trace does not tell which tokens a text had, and everything else as before. Oracles: an open
trace of the same run, line by line, and the reports of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.running import trace_to
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.core.protocol.messages import Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent
from edgespec.telemetry.trace import TOKEN_FIELDS, HiddenTokens, TraceFile, Tracer
from edgespec_sim.report.summarise import summarise
from edgespec_sim.report.timeline import read_lines
from tests.report.samples import agent_config
from tests.shell.live_verifier import serving

HIDDEN = HiddenTokens()
PARAMS = SamplingParams(
    max_tokens=40,
    temperature=0.9,
    seed=11,
    stop=("a stop text",),
    stop_token_ids=(61,),
    logit_bias={60: -2.0},
    ignore_eos=True,
)
PROMPT = "a prompt that nobody should read 123"


@dataclass(frozen=True)
class Both:
    """The same run to both."""

    plain: Tracer
    hidden: Tracer

    def record(self, at_s: float, side: str, session: str, kind: str, item: object) -> None:
        self.plain.record(at_s, side, session, kind, item)
        self.hidden.record(at_s, side, session, kind, item)


async def _run(folder: Path) -> None:
    with (
        TraceFile(folder / "plain.jsonl") as plain,
        TraceFile(folder / "hidden.jsonl", HIDDEN) as hidden,
    ):
        both = Both(plain, hidden)
        async with serving() as (address, verifier):
            verifier._tracer = both
            async with build_agent(agent_config(address, 0.0), tracer=both) as agent:
                async for _ in agent.generate(PROMPT, PARAMS, logprobs=3):
                    pass


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("traces")
    asyncio.run(_run(folder))
    return folder / "plain.jsonl", folder / "hidden.jsonl"


def fields_of(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All fields of a line with their names, also of what lies in it; a bias has none."""
    if isinstance(value, dict) and name != "logit_bias":
        for key, one in value.items():
            yield key, one
            yield from fields_of(one, key)
    elif isinstance(value, list):
        for one in value:
            yield from fields_of(one, name)


def test_lines_differ_in_tokens_alone(traces: tuple[Path, Path]) -> None:
    plain, hidden = (list(read_lines([path])) for path in traces)
    assert {line["side"] for line in plain} == {"device", "verifier"}
    assert len(plain) == len(hidden)
    hide, changed = HIDDEN, set()
    for open_line, line in zip(plain, hidden, strict=True):
        pairs = zip(fields_of(open_line), fields_of(line), strict=True)
        for (name, before), (same, after) in pairs:
            assert name == same
            if before != after and not (isinstance(before, dict) and name != "logit_bias"):
                changed.add(name)
            if name in TOKEN_FIELDS and isinstance(before, list):
                assert after == [hide.token(one) for one in before]
            if name == "logit_bias":
                assert after == {str(hide.token(60)): -2.0}
    single = {"token", "base_hash", "top", "stop", "logit_bias"}
    assert {"tokens", "prompt", "feed", "targets", "stop_token_ids", *single} <= changed
    lists_of_lists = {"candidates", "results", "requests", "scores", "logprobs"}
    assert changed <= TOKEN_FIELDS | single | lists_of_lists


def test_names_are_as_many_and_as_long_as_the_tokens() -> None:
    hide, tokens = HiddenTokens(), [*range(300), *range(16_380, 16_390), (1 << 31) - 1]
    names = [hide.token(one) for one in tokens]
    assert len(set(names)) == len(tokens)
    assert [max(1, -(-one.bit_length() // 7)) for one in names] == [
        max(1, -(-one.bit_length() // 7)) for one in tokens
    ]
    assert [hide.token(one) for one in tokens] == names != tokens


def test_no_text_is_left(traces: tuple[Path, Path]) -> None:
    assert "a stop text" in traces[0].read_text()
    assert "a stop text" not in traces[1].read_text()


def test_reports_are_the_same(traces: tuple[Path, Path]) -> None:
    plain, hidden = (summarise(read_lines([path])) for path in traces)
    assert plain == hidden


@pytest.mark.parametrize("config", [AgentConfig(), VerifierConfig()])
def test_the_command_line_hides_tokens_unless_told_not_to(
    config: AgentConfig | VerifierConfig, tmp_path: Path
) -> None:
    told = []
    for number, tokens in enumerate((config.trace_tokens, "plain")):
        path = tmp_path / f"{number}.jsonl"
        with trace_to(str(path), tokens) as tracer:
            tracer.record(0.0, "device", "s", "action", Open("s", "", "", tuple(range(1, 40))))
        told.append(json.loads(path.read_text())["prompt"])
    assert told[0] != told[1] == list(range(1, 40))
