"""Tests of the configuration. Oracle: a printed configuration reads back equal, and the error for
every mistake names its place."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import partial
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
from edgespec.wire.access import KeyFile, digest


def write_config(folder: Path, text: str) -> Path:
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
    assert load_config(type(config), write_config(tmp_path, dump_config(config))) == config


def test_options_win_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    path = write_config(tmp_path, "sampling: {temperature: 0.7, seed: 5}\nlink:\n  rtt_ms: 9\n")
    config = load_config(AgentConfig, path, {"sampling.seed": 6, "policy.gamma": None})
    assert (config.sampling.seed, config.sampling.temperature) == (6, 0.7)
    assert (config.link.rtt_ms, config.policy.gamma) == (9.0, None)


MISTAKES = (Path(__file__).parent / "config_mistakes.txt").read_text(encoding="utf-8")
READ: dict[str, Callable[[Path], object]] = {
    "agent": partial(load_config, AgentConfig),
    "verifier": partial(load_config, VerifierConfig),
    "keys": partial(load_config, KeyFile),
}


@pytest.mark.parametrize("mistake", re.findall(r"^\w.* => .*$", MISTAKES, re.MULTILINE))
def test_a_mistake_is_named_with_its_place(mistake: str, tmp_path: Path) -> None:
    head, _, message = mistake.partition(" => ")
    kind, _, text = head.partition(" | ")
    text = re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    path = write_config(tmp_path, text.replace(r"\n", "\n").replace("SHA", digest("x").hex()))
    with pytest.raises(ConfigError) as caught:
        READ[kind](path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_aliases_do_not_make_an_error_huge(tmp_path: Path) -> None:
    """Each list holds the previous one eight times, so writing all of it out would take 8**9
    words."""
    lists = ["&l0 [x, x]"]
    lists += [f"&l{n} [{', '.join([f'*l{n - 1}'] * 8)}]" for n in range(1, 10)]
    text = f"model: [{', '.join(lists)}]\n"
    with pytest.raises(ConfigError) as caught:
        load_config(AgentConfig, write_config(tmp_path, text))
    assert len(str(caught.value)) < 2000


def number_keys(config: object, place: str = "") -> list[str]:
    """Return the dotted keys of all numbers of a configuration."""
    keys = []
    for key, hint in get_type_hints(type(config)).items():
        value = getattr(config, key)
        if is_dataclass(value):
            keys += number_keys(value, f"{place}{key}.")
        elif hint in (int, float, int | None, float | None):
            keys.append(f"{place}{key}")
    return keys


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind in (AgentConfig, VerifierConfig) for key in number_keys(kind())],
)
def test_no_number_may_be_nan_or_infinite_or_far_below_zero(kind: type[Any], key: str) -> None:
    # The reconnect policy checks its own lower bounds.
    below = () if key.startswith("reconnect.") else (-1e9, -(10**9))
    for value in (math.nan, math.inf, -math.inf, *below):
        with pytest.raises(ConfigError, match=rf"{re.escape(key)} is .*, but must be"):
            load_config(kind, None, {key: value})


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: No such file"):
        load_config(AgentConfig, tmp_path / "nothing.yaml")


def test_a_mistake_of_an_option_does_not_blame_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^command line: port is 70000"):
        load_config(VerifierConfig, write_config(tmp_path, "port: 1"), {"port": 70000})


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
