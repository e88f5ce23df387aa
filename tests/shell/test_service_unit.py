"""The user unit of ``edgespec serve``. Oracles: ``systemd-analyze``, the file in ``deploy``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from edgespec.cli.service_unit import (
    UNIT_NAME,
    ServiceSettings,
    command_line,
    memory_max_bytes,
    render_unit,
)
from tests.shell.deploy_tools import DEPLOY, judged, tool

MIB = 1 << 20
SHOWN = ServiceSettings(
    "/opt/edgespec/bin/edgespec",
    ("serve", "--config", "/etc/edgespec/serve.yaml"),
    memory_budget_bytes=600 * MIB,
)


def something() -> str:
    found = shutil.which("true")
    assert found is not None
    return found


@pytest.fixture(params=[False, True], ids=["filters", "isolated"])
def unit(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A unit as it would be installed, with words that need care, and a program that is there."""
    words = ("serve", "--draft", 'a folder/50% "q4" $HOME;x', "--tokenizer", "")
    settings = ServiceSettings(something(), words, 600 * MIB, isolated=bool(request.param))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # of a user who is logged in
    path = tmp_path / UNIT_NAME
    path.write_text(render_unit(settings))
    return path


def verified(path: Path) -> list[str]:
    """What systemd says of this unit."""
    analyze = tool("systemd-analyze", "apt-get install systemd")
    said = judged(analyze, "--user", "verify", "--man=no", path)
    return [line for line in said.splitlines() if path.name in line]


def test_systemd_understands_every_line(unit: Path) -> None:
    assert verified(unit) == []


def test_a_mistake_would_be_found(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("NoNewPrivileges=yes", "NoNewPriviledges=yes"))
    (found,) = verified(unit)
    assert "'NoNewPriviledges'" in found


def test_the_file_to_be_copied_is_what_would_be_made() -> None:
    path = DEPLOY / "systemd" / UNIT_NAME
    assert path.read_text(encoding="utf-8") == render_unit(SHOWN)


def test_words_are_words_whatever_is_in_them() -> None:
    assert command_line(["a", "b c", "100%", "$HOME", 'say "x"', "back\\slash", ""]) == (
        'a "b c" 100%% $$HOME "say \\"x\\"" back\\\\slash ""'
    )


def test_memory_is_enforced_above_the_budget_and_only_with_one() -> None:
    assert memory_max_bytes(600 * MIB) == 664 * MIB
    assert memory_max_bytes(2048 * MIB) == 2253 * MIB
    assert "MemoryMax=664M\n" in render_unit(SHOWN)
    assert "Memory" not in render_unit(ServiceSettings("/bin/edgespec"))


def test_what_needs_a_namespace_is_asked_for_only_where_it_was_wanted() -> None:
    assert "Protect" not in render_unit(SHOWN)
    assert "NoNewPrivileges=yes" in render_unit(SHOWN)
    isolated = render_unit(ServiceSettings("/bin/edgespec", isolated=True, notify=True))
    assert "ProtectSystem=strict" in isolated
    assert "Type=notify" in isolated


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"program": "edgespec"}, "program is 'edgespec', but must be an absolute path"),
        ({"program": "/e", "memory_budget_bytes": 5}, "memory_budget_bytes is 5, but must be"),
        ({"program": "/e", "arguments": ("a\nExecStartPre=/bin/evil",)}, "control character"),
    ],
)
def test_what_no_unit_can_be_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServiceSettings(**settings)  # type: ignore[arg-type]
