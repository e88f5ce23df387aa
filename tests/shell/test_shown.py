"""What a user is shown: chunks on a terminal and in a pipe, what drafts brought, the demo's table,
and what somebody sees who tries it for the first time. Oracle: the bytes and numbers, by hand."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgespec.cli.demo import Arm, report
from edgespec.cli.device import JsonView, Progress, TextView, for_trying, summary
from edgespec.cli.verifier import next_command
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.device.events import TokenKind
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Chunk, Piece
from edgespec.device.build import with_model_sampling

EVIL = "a\x1b]0;owned\x07b\n"
HARMLESS = "a\N{REPLACEMENT CHARACTER}]0;owned\N{REPLACEMENT CHARACTER}b\n"


def chunk(text: str, finish: FinishReason | None = None) -> Chunk:
    return Chunk(3, (1,), (Piece(text, TokenKind.DECODED),), finish)


@pytest.mark.parametrize(
    ("color", "terminal", "shown"),
    [(False, False, EVIL), (False, True, HARMLESS), (True, True, HARMLESS)],
)
def test_a_text_cannot_control_the_terminal(
    color: bool, terminal: bool, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color, terminal)
    view.show(chunk(EVIL))
    view.end()
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("finish", list(FinishReason))
def test_a_full_context_is_said_beside_the_text(
    finish: FinishReason, capsys: pytest.CaptureFixture[str]
) -> None:
    view = TextView(color=False)
    view.show(chunk("text", finish))
    view.end()
    out, err = capsys.readouterr()
    assert out == "text\n"
    assert ("context is full" in err) == (finish is FinishReason.CONTEXT)
    progress = Progress()
    progress.add(chunk("text", finish))
    assert f"ended by {finish.value}" in summary(progress, None)
    JsonView().show(chunk("text", finish))
    assert f'"finish": "{finish.value}"' in capsys.readouterr().out


PLAIN = Arm("target only", [(1, 2)], [0.0750], Counter(tokens=192, passes=192))
DRAFTED = Arm(
    "with drafts", [(1, 2)], [0.0300], Counter(tokens=192, passes=80, tried=600, hits=420)
)


def shown(width: int, plain: Arm = PLAIN, drafted: Arm = DRAFTED) -> list[str]:
    output = io.StringIO()
    report(Console(file=output, width=width), plain, drafted)
    return [re.sub(" +", " ", line).strip() for line in output.getvalue().splitlines()]


def test_another_text_is_an_error() -> None:
    with pytest.raises(SetupError, match="drafts changed the text"):
        shown(80, drafted=Arm("with drafts", [(1, 3)]))


def served(name: str) -> ModelInfo:
    return ModelInfo(name, "v", 64, 512)


def test_the_bundled_pair_does_not_loop_unless_it_is_told_how_to_sample() -> None:
    usual = AgentConfig()
    assert for_trying(usual, served("bundled")).sampling.repetition_penalty == 1.15
    assert for_trying(usual, served("other")) == usual
    chosen = AgentConfig(sampling=SamplingParams(temperature=0.5))
    assert for_trying(chosen, served("bundled")) == chosen


@pytest.mark.parametrize(
    ("said", "found"),
    [
        (None, {}),
        ({"temperature": 0.6}, {}),
        ({"temperature": 0.6, "do_sample": True}, {"temperature": 0.6}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "x": 1},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"do_sample": True, "top_p": 7, "top_k": "many", "temperature": True}, {}),
        ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ],
)
def test_what_is_left_open_is_as_the_model_says(
    said: dict[str, object] | None, found: dict[str, float], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if said is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(said))
    sampling = with_model_sampling(SamplingParams(seed=3), str(tmp_path))
    assert sampling == SamplingParams(seed=3, **found)  # type: ignore[arg-type]
    chosen = SamplingParams(top_p=0.5)
    assert with_model_sampling(chosen, str(tmp_path)) == chosen


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"model": "bundled"}, ""),
        ({"model": "bundled", "host": "0.0.0.0"}, ""),
        ({"model": "bundled", "host": "::1"}, " --verifier [::1]:7420"),
        ({"model": "toy", "port": 9}, " --verifier 127.0.0.1:9 --draft toy"),
        (
            {"model": "some/model", "host": "10.0.0.7", "port": 9},
            " --verifier 10.0.0.7:9 --draft lookup",
        ),
    ],
)
def test_a_verifier_says_what_to_type_next(given: dict[str, Any], command: str) -> None:
    config = VerifierConfig(insecure=True, **given)
    assert next_command(config, config.port) == f'edgespec generate "def fibonacci(n):"{command}'
