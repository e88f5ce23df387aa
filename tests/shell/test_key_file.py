"""The file of keys and ``edgespec keys``. Oracle: what is printed opens, and nothing else does."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from edgespec.cli import credentials as keys_command
from edgespec.cli.main import app
from edgespec.config import ConfigError
from edgespec.config.key_file import KeyFile, load_keys, save_keys
from edgespec.core.verifier.credential import Credential, digest

SHA256 = digest("x").hex()


def keys(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


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
        (
            f"keys: {{a: {{sha256: {SHA256}}}, b: {{sha256: {SHA256}}}}}",
            "'a' and 'b' have",
        ),
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
