"""Files that others can write or read. Oracle: the modes that PostgreSQL's key files may have, with
the group let in as mounted secrets need it."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgespec.cli.main import app
from edgespec.config import AgentConfig, ConfigError, EndpointSection
from edgespec.core.verifier.credential import Credential
from edgespec.wire.access import ServerAccess, check_file_permissions, device_access, endpoint_key
from tests.shell.guarded import keys_in, verifier_config
from tests.shell.pki import Pki


@pytest.mark.parametrize("mode", [0o602, 0o666, 0o777])
@pytest.mark.parametrize(("secret", "advice"), [(True, "600"), (False, "o-w")])
def test_what_others_can_write_is_refused(
    mode: int, secret: bool, advice: str, tmp_path: Path
) -> None:
    path = tmp_path / "a file"
    path.touch()
    path.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.; run: chmod {advice} '{path}'"):
        check_file_permissions(path, secret=secret)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o600, 0o640, 0o440, 0o660])
def test_a_secret_that_others_can_read_is_warned_of_once(
    mode: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link, which has mode 0777, is judged by its file, as a mounted secret is."""
    (path := tmp_path / "key").touch()
    path.chmod(mode)
    (link := tmp_path / "link").symlink_to(path)
    for _ in range(2):
        check_file_permissions(link, secret=True)
        check_file_permissions(path, secret=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if mode & 0o004 else 0)
    assert all(line.endswith(f"(mode {mode:04o}); run: chmod 600 {link}") for line in said)


def test_a_reload_that_finds_keys_others_can_write_keeps_the_old_ones(tmp_path: Path) -> None:
    key = keys_in(path := tmp_path / "keys.yaml", "one")["one"]
    access = ServerAccess(verifier_config(keys=path))
    keys_in(path, "two")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match=r"keys\.yaml: others can write"):
        access.reload()
    assert access.authenticate(key) == Credential("one")
    with pytest.raises(ConfigError, match=r"keys\.yaml: others can write"):
        ServerAccess(verifier_config(keys=path))
    path.chmod(0o644)  # it holds digests
    assert access.reload().keys.revoked == ("one",)


def test_all_files_that_say_who_is_who_are_looked_at(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = Pki(tmp_path).device(shown=True)
    (key := tmp_path / "api.key").write_text("edgespec-key\n")
    key.chmod(0o644)
    config = AgentConfig(tls=tls, api_key_file=str(key))
    for path in (*map(Path, (tls.ca, tls.client_cert, tls.client_key)), key):
        before = path.stat().st_mode
        path.chmod(0o666)
        with pytest.raises(ConfigError, match=f"{path.name}: others can write"):
            device_access(config, {})
        path.chmod(before)
    assert device_access(config, {}).key == "edgespec-key"
    assert endpoint_key(EndpointSection(key_file=str(key)), {}) == "edgespec-key"
    assert [record.getMessage() for record in caplog.records] == [
        f"{key}: others can read this secret (mode 0644); run: chmod 600 {key}"
    ]


def test_a_configuration_that_others_can_write_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "verifier.yaml").write_text("model: toy\n")
    path.chmod(0o666)
    result = CliRunner().invoke(app, ["verifier", "--config", str(path), "--help-all"])
    assert result.exit_code == 2
    assert "others can write this file" in result.output
