"""Configuration files of 0.1.0, in which every key stands with its default, are read by today's
code, or answered with what stands in the place of a key.

Oracle: values in the files that are not today's defaults, and the keys that are named as without
effect. ``earlier/`` holds what the states of 20 and 28 November printed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from edgespec.config import AgentConfig, ConfigError, VerifierConfig, load_config
from edgespec.config.loading import plain
from edgespec.config.retired import REFUSED, WITHOUT_EFFECT

EARLIER = Path(__file__).parent / "earlier"
PROBES = ["failover.ask_s", "failover.settle_s"]


def list_values(section: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from list_values(value, f"{place}{key}.")
        else:
            yield f"{place}{key}", value


@pytest.mark.parametrize(
    ("kind", "name", "different", "without_effect"),
    [
        (
            AgentConfig,
            "device-2026-11-20.yaml",
            {"draft.bits": 4, "policy.name": "windowed", "reconnect.longest_s": 5.0},
            [],
        ),
        (
            AgentConfig,
            "device-2026-11-28.yaml",
            {"draft.bits": 4, "draft.window": 0, "endpoint.max_body_bytes": 4 << 20},
            PROBES,
        ),
        (
            VerifierConfig,
            "verifier-2026-11-20.yaml",
            {"limits.max_cached_tokens": 65_536, "limits.max_nodes_outstanding": 128},
            [],
        ),
        (
            VerifierConfig,
            "verifier-2026-11-28.yaml",
            {"limits.max_cached_tokens": 65_536, "limits.max_nodes_outstanding": 128},
            [],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_of_an_earlier_version_is_read(
    kind: type[Any],
    name: str,
    different: dict[str, object],
    without_effect: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = load_config(kind, EARLIER / name)
    today = dict(list_values(plain(kind())))
    read = dict(list_values(plain(config)))
    assert {key: value for key, value in read.items() if today[key] != value} == different
    assert len(caplog.messages) == len(without_effect)
    for key, message in zip(without_effect, caplog.messages, strict=True):
        assert f"{name}: {key} has no effect" in message
        assert "remove it" in message


def test_a_key_without_effect_is_named_once_where_it_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "device.yaml"
    path.write_text("failover: {ask_s: 2.0}\nmodel: m\n", encoding="utf-8")
    config = load_config(AgentConfig, path, {"failover.settle_s": 1.0, "rule": "exact"})
    assert config == AgentConfig(model="m")
    assert [message.partition(":")[2] for message in caplog.messages] == [
        " failover.ask_s has no effect: since 0.2.0 a first generation waits for no probes;"
        " remove it",
        " failover.settle_s has no effect: since 0.2.0 a first generation waits for no probes",
    ]
    assert caplog.messages[0].startswith(f"{path}:")
    assert caplog.messages[1].startswith("command line:")


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        (AgentConfig, "offline: draft", "key 'offline' is gone; use fallback: draft"),
        (AgentConfig, "policy: {leaves: 2}", "policy: key 'leaves' is gone; a draft step"),
        (VerifierConfig, "tensor_parallel: {size: 2}", "key 'tensor_parallel' is gone; use engine"),
        (VerifierConfig, "offline: draft", "unknown key 'offline'"),
        (AgentConfig, "failover: 5", "failover is 5, but must be a section"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_that_is_gone_is_answered_with_what_to_do(
    kind: type[Any], text: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "edgespec.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as raised:
        load_config(kind, path)
    assert words in str(raised.value)


def test_no_key_that_is_gone_exists() -> None:
    today = {
        kind.__name__: dict(list_values(plain(kind()))) for kind in (AgentConfig, VerifierConfig)
    }
    for kind, keys in WITHOUT_EFFECT.items():
        assert not [key for key in keys if key in today[kind]]
    for section in ("AgentConfig", "VerifierConfig"):
        assert not [key for key in REFUSED[section] if key in today[section]]
