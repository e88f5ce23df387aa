"""Configuration: oracle is that what is printed reads back equal, and that every mistake is named
with its place."""

from __future__ import annotations

import errno
import math
import os
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

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
from edgespec.config.files import replace_file
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("polcy: {}", "unknown key 'polcy'; did you mean 'policy'?"),
        ("link: {rtt: 5}", "link: unknown key 'rtt'; did you mean 'rtt_ms'?"),
        ("link: 5", "link is 5, but must be a section"),
        ("link: {rtt_ms: fast}", "link.rtt_ms is 'fast', but must be a number"),
        ("link: {loss: 1.5}", "link.loss is 1.5, but must be in [0.0, 0.99]"),
        ("policy: {gamma: 2.5}", "policy.gamma is 2.5, but must be a whole number"),
        (
            "policy: {gamma: 4}",
            "policy.gamma is 4, but policy 'goodput' has none: leave it out, or choose fixed or",
        ),
        ("policy: {name: pearl, window: 4}", "policy.window is 4, but policy 'pearl' has none"),
        ("policy: {run_ahead: yes}", "policy.run_ahead is True, but must be one of auto"),
        ("sampling: {temperature: -1}", "sampling.temperature is -1.0, but must be in [0.0"),
        ("sampling: {stop: end}", "sampling.stop is 'end', but must be a list"),
        ("sampling: {logit_bias: {a: 1}}", "sampling.logit_bias is 'a', but must be a whole"),
        ("verifier: http://a:1", "verifier is 'http://a:1', but must be host:port"),
        ("model: a\nmodel: b", ":2: key 'model' stands there twice"),
        ("link: {loss: 1e999}", "link.loss is inf, but must be a finite number"),
        (f"link: {{loss: 1{'0' * 5000}}}", "not readable as YAML: Exceeds the limit"),
        ("reconnect: {give_up_s: .nan}", "reconnect.give_up_s is nan, but must be a finite"),
        ("model: 2001-13-45", "not readable as YAML: month must be in 1..12"),
        ("? [a, b]\n: 1", ":1: a key is a sequence, but must be a single word"),
        ("link:\n  ? {a: 1}\n  : 2", ":2: a key is a mapping, but must be a single word"),
        ("sampling: {logit_bias: {? [1] : 2}}", ":1: a key is a sequence"),
        ("link: &a {x: *a}", "link: unknown key 'x'"),
        ("[" * 5000, "nested too deep"),
        ('model: "a\\ud800b"', r"model is 'a\ud800b', but must be text that UTF-8 can hold"),
        (f"model: [{'x' * 5000}]", "x...xxx"),
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


def test_aliases_do_not_make_an_error_huge(tmp_path: Path) -> None:
    """Each list holds the one before it eight times: 8**9 words, if they were all written out."""
    lists = ["&l0 [x, x]"]
    lists += [f"&l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 10)]
    text = f"model: [{', '.join(lists)}]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(AgentConfig, _file(tmp_path, text))
    assert len(str(caught.value)) < 2000


def _numbers(config: object, place: str = "") -> list[str]:
    """The dotted keys of all numbers of a configuration."""
    keys = []
    for key, hint in get_type_hints(type(config)).items():
        value = getattr(config, key)
        if is_dataclass(value):
            keys += _numbers(value, f"{place}{key}.")
        elif hint in (int, float, int | None, float | None):
            keys.append(f"{place}{key}")
    return keys


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind in (AgentConfig, VerifierConfig) for key in _numbers(kind())],
)
def test_no_number_may_be_nan_or_infinite_or_far_below_zero(kind: type[Any], key: str) -> None:
    # What a reconnection may wait is checked by its policy.
    below = () if key.startswith("reconnect.") else (-1e9, -(10**9))
    for value in (math.nan, math.inf, -math.inf, *below):
        with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*, but must be"):
            load_config(kind, None, {key: value})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load_config(AgentConfig, tmp_path / "nothing.yaml")


def test_a_mistake_of_an_option_does_not_blame_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: port is 70000"):
        load_config(VerifierConfig, _file(tmp_path, "port: 1"), {"port": 70000})


def test_a_file_that_cannot_be_replaced_stays_and_leaves_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, "before", 0o644)
    assert path.stat().st_mode & 0o777 == 0o644

    def fails(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"after")
    with pytest.raises(UnicodeEncodeError):
        replace_file(path, "\udc00")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"
