"""Configuration: oracle is that what is printed reads back equal, and that every mistake is named
with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.config import (
    AgentConfig,
    ConfigError,
    DraftSection,
    LinkSection,
    PolicyName,
    PolicySection,
    VerifierConfig,
    dump_config,
    load_config,
)
from edgespec.core.messages import RunAhead
from edgespec.core.sampling import SamplingParams


def _file(folder: Path, text: str) -> Path:
    path = folder / "edgespec.yaml"
    path.write_text(text, encoding="utf-8")
    return path


FULL = AgentConfig(
    verifier="[::1]:9",
    draft=DraftSection(model="none", bits=8),
    link=LinkSection(rtt_ms=12.5, loss=0.01),
    policy=PolicySection(PolicyName.PEARL, 4, 1, None, RunAhead.NEVER),
    sampling=SamplingParams(temperature=0.5, logit_bias={3: -1.0}, stop=("\n", "é"), seed=2**40),
)


@pytest.mark.parametrize(
    "config", [AgentConfig(), VerifierConfig(), FULL, VerifierConfig(canonical=False, port=0)]
)
def test_a_printed_config_reads_back_equal(config: Any, tmp_path: Path) -> None:
    assert load_config(type(config), _file(tmp_path, dump_config(config))) == config


def test_options_win_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    path = _file(tmp_path, "sampling: {temperature: 0.7, seed: 5}\nlink:\n  rtt_ms: 9\n")
    config = load_config(AgentConfig, path, {"sampling.seed": 6, "policy.gamma": None})
    assert (config.sampling.seed, config.sampling.temperature) == (6, 0.7)
    assert (config.link.rtt_ms, config.policy.gamma) == (9.0, None)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(AgentConfig, _file(tmp_path, "# nothing\n")) == AgentConfig()


def test_exponents_without_a_dot_are_numbers(tmp_path: Path) -> None:
    """YAML 1.1 takes them for text."""
    assert load_config(AgentConfig, _file(tmp_path, "link: {loss: 1e-3}")).link.loss == 1e-3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: {}", "unknown key 'polcy'; did you mean 'policy'?"),
        ("link: {rtt: 5}", "link: unknown key 'rtt'; did you mean 'rtt_ms'?"),
        ("link: {zzz: 5}", "link: unknown key 'zzz'; known are rtt_ms,"),
        ("link: 5", "link is 5, but must be a section"),
        ("link: {rtt_ms: fast}", "link.rtt_ms is 'fast', but must be a number"),
        ("link: {rtt_ms: true}", "link.rtt_ms is True, but must be a number"),
        ("link: {loss: 1.5}", "link.loss is 1.5, but must be in [0.0, 0.99]"),
        ("link: {loss: .nan}", "link.loss is nan"),
        ("policy: {gamma: 2.5}", "policy.gamma is 2.5, but must be a whole number"),
        ("policy: {gamma: 99}", "policy.gamma is 99, but must be in [1, 32]"),
        ("policy: {name: eagle}", "policy.name is 'eagle', but must be one of windowed, pearl"),
        ("policy: {run_ahead: yes}", "policy.run_ahead is True, but must be one of auto"),
        ("sampling: {temperature: -1}", "sampling.temperature is -1.0, but must be in [0.0"),
        ("sampling: {stop: end}", "sampling.stop is 'end', but must be a list"),
        ("sampling: {logit_bias: {a: 1}}", "sampling.logit_bias is 'a', but must be a whole"),
        ("verifier: ''", "verifier is empty"),
        ("verifier: http://a:1", "verifier is 'http://a:1', but must be host:port"),
        ("verifier: 5", "verifier is 5, but must be text"),
        ("model: a\nmodel: b", ":2: key 'model' stands there twice"),
        ("a: [", "not readable as YAML"),
        ("- a", "holds a list"),
    ],
)
def test_a_mistake_is_named_with_its_place(text: str, message: str, tmp_path: Path) -> None:
    path = _file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(AgentConfig, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load_config(AgentConfig, tmp_path / "nothing.yaml")


def test_a_mistake_of_an_option_does_not_blame_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: port is 70000"):
        load_config(VerifierConfig, _file(tmp_path, "port: 1"), {"port": 70000})
