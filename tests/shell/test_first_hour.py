"""What somebody sees who tries it for the first time. Oracle: the words, and the sums in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.cli.device import Progress, for_trying, worth
from edgespec.cli.verifier import next_command
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.core.device.estimates import DraftEstimates
from edgespec.core.device.events import DraftCounters
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import GenerationStats
from edgespec.device.build import with_model_sampling


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


def test_what_drafts_brought_in_one_line() -> None:
    progress, estimates = Progress(), DraftEstimates()
    progress.first_s, progress.last_s = 1.0, 1.5
    progress.tokens, progress.first_count = [0] * 51, 1
    estimates.pass_s.add(0.02)
    stats = GenerationStats(DraftCounters(committed=51, accepted=30), estimates)
    assert worth(progress, stats) == (
        "100.0 tokens a second · 2.00 times as fast as streaming, one token a pass of 20 ms ·"
        " 30 of 51 tokens (59%) drafted here"
    )
    alone = GenerationStats(DraftCounters(committed=51), estimates)
    assert worth(progress, alone) == "100.0 tokens a second · 0 of 51 tokens (0%) drafted here"
    assert worth(Progress(), stats) == worth(progress, None) == ""
