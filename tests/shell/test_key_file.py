"""The file of keys, ``edgespec keys``, and files that others can write or read. Oracles: what is
printed opens, and nothing else does; the modes that PostgreSQL's key files may have, with the group
let in as mounted secrets need it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from edgespec.cli import credentials as keys_command
from edgespec.config import AgentConfig, ConfigError, EndpointSection
from edgespec.config.key_file import KeyFile, load_keys, save_keys
from edgespec.core.verifier.credential import Credential, digest
from edgespec.wire.access import check_file_permissions, device_access, endpoint_key
from tests.shell.live_verifier import call
from tests.shell.pki import Pki

SHA256 = digest("x").hex()


def keys(*arguments: str | Path) -> Result:
    return call("keys", *arguments)


def test_a_key_is_printed_once_and_only_its_digest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    given = ("max_sessions=8", "context_length=4096", "tokens_per_s=12.5", "priority=-2")
    limits = [f"--set={one}" for one in (*given, "models=[big, small]")]
    made = keys("add", "workshop", *limits, "--file", path)
    assert made.exit_code == 0, made.output
    key = made.stdout.strip()
    assert len(key) > 40
    assert key not in path.read_text()
    assert key not in made.stderr
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    credential = Credential("workshop", 8, 4096, 12.5, -2, ("big", "small"))
    assert load_keys(path).ring().credential(key) == credential
    other = keys("add", "phone.7", "--file", path).stdout.strip()
    ring = load_keys(path).ring()
    assert ring.credential(other) == Credential("phone.7")
    assert ring.credential(key) == credential
    assert ring.credential(key + "x") is None
    assert ring.credential("") is None
    shown = keys("list", "--file", path).stdout.splitlines()
    assert shown[0] == "phone.7: no limits"
    assert shown[1].startswith("workshop: max_sessions 8, context_length 4096, tokens_per_s 12.5,")
    assert shown[1].endswith("priority -2, models big/small")


def test_a_revoked_key_opens_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    first = keys("add", "first", "--file", path).stdout.strip()
    second = keys("add", "second", "--file", path).stdout.strip()
    assert keys("revoke", "first", "--file", path).exit_code == 0
    ring = load_keys(path).ring()
    assert ring.credential(first) is None
    assert ring.credential(second) == Credential("second")
    gone = keys("revoke", "first", "--file", path)
    assert gone.exit_code == 2
    assert "has no key 'first'; known: second" in gone.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [("", "name ''"), ("two words", "'two words'"), ("x" * 65, "1 to 64 letters"), ("-x", "begin")],
)
def test_a_name_that_logs_could_not_show_is_refused(name: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    refused = keys("add", "--file", path, "--", name)
    assert refused.exit_code == 2
    assert why in refused.stderr
    assert not path.exists()


def test_a_name_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    keys("add", "one", "--file", path)
    before = path.read_text()
    wrong = keys("add", "two", "--set", "sesions=3", "--file", path)
    assert (wrong.exit_code, path.read_text()) == (2, before)
    assert "unknown key 'sesions'" in wrong.stderr
    again = keys("add", "one", "--file", path)
    assert (again.exit_code, path.read_text()) == (2, before)
    assert "'one' has a key already" in again.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keys: {a: {sha256: abc}}", "keys.a.sha256 is 'abc', but must be 64 hexadecimal digits"),
        ("keys: {a: {}}", "keys.a: key 'sha256' is missing"),
        (f"keys: {{a: {{sha256: {SHA256}, priority: 101}}}}", "priority is 101, but must be in"),
        (f"keys: {{a: {{sha256: {SHA256}}}, b: {{sha256: {SHA256}}}}}", "'a' and 'b' have"),
        (f"keys: {{a: {{sha256: {SHA256}, sesions: 1}}}}", "unknown key 'sesions'"),
        ("keys: [a]", "keys is ['a'], but must be keys and values"),
        ("a: 1", "unknown key 'a'"),
    ],
)
def test_mistakes_in_a_file_are_named_with_their_place(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_keys(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


OWNER, GROUP = 4711, 4712


@pytest.mark.parametrize(
    ("may", "given", "mode"),
    [
        ((True, True), (OWNER, GROUP), 0o640),
        ((False, True), (-1, GROUP), 0o640),
        ((False, False), None, 0o600),  # or a group that never could would read it
    ],
)
def test_the_file_of_a_service_stays_the_services(
    may: tuple[bool, bool],
    given: tuple[int, int] | None,
    mode: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = (tmp_path / "keys.yaml").resolve()
    assert keys("add", "a", "--file", path).exit_code == 0
    path.chmod(0o640)
    find, owners = os.stat, list[tuple[int, int]]()

    def stat_of(one: Any, *arguments: Any, **more: Any) -> os.stat_result:
        found = find(one, *arguments, **more)
        return os.stat_result((*found[:4], OWNER, GROUP, *found[6:10])) if one == path else found

    def chown(one: object, owner: int, group: int) -> None:
        if not all(allowed or new < 0 for allowed, new in zip(may, (owner, group), strict=True)):
            raise PermissionError(1, "Operation not permitted")
        owners.append((owner, group))

    monkeypatch.setattr(os, "stat", stat_of)
    monkeypatch.setattr(os, "chown", chown)
    assert keys("add", "b", "--file", path).exit_code == 0
    monkeypatch.undo()
    assert owners == ([] if given is None else [given])
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert sorted(load_keys(path).keys) == ["a", "b"]


@pytest.mark.parametrize("command", ["add", "revoke"])
def test_no_other_command_changes_the_file_meanwhile(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that was added between reading and writing would be lost."""
    path = tmp_path / "keys.yaml"
    name = "a" if command == "add" else "b"
    assert keys("add", "b", "--file", path).exit_code == 0
    alone: list[bool] = []

    def save(path: Path, known: KeyFile) -> None:
        other = os.open(tmp_path, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            alone.append(True)
        finally:
            os.close(other)
        save_keys(path, known)

    monkeypatch.setattr(keys_command, "save_keys", save)
    assert keys(command, name, "--file", path).exit_code == 0
    assert alone == [True]


# --- files that others can write or read ----------------------------------------------------------


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
    result = call("verifier", "--config", path, "--help-all")
    assert result.exit_code == 2
    assert "others can write this file" in result.output
