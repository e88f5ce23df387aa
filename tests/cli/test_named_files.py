"""Tests of files that a user names, which may be anything: a device, a pipe without another end, a
folder, a link.

Oracle: for each kind, the bytes that are read or the text of the error. Nothing may wait for ever,
replace anything but a regular file, or change the mode of anything else. Devices are
pseudo-terminals, because those belong to the user who runs the test.
"""

from __future__ import annotations

import ast
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgespec.config import AgentConfig, ConfigError, VerifierConfig, files
from edgespec.config.files import (
    TooLargeError,
    open_to_read,
    open_to_write,
    read_bytes,
    read_text,
    replace_file,
    write_output,
)
from edgespec.telemetry.recording import Recording, RecordingError
from edgespec.telemetry.trace import TraceFile
from edgespec.wire.access import ServerAccess, load_device_access, make_key
from tests.sources import is_within, parse_modules


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 0.05)


@pytest.fixture
def things(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Yield one path of each kind that is not a regular file."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link-to-pipe").symlink_to("pipe")
    master, slave = os.openpty()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        found = {
            "folder": tmp_path / "folder",
            "pipe": tmp_path / "pipe",
            "link-to-pipe": tmp_path / "link-to-pipe",
            "device": Path(os.ttyname(slave)),
            "socket": tmp_path / "socket",
        }
        yield found
    os.close(master)
    os.close(slave)


KINDS = ("folder", "pipe", "link-to-pipe", "device", "socket")


def start_writer(content: bytes, path: Path) -> subprocess.Popen[bytes]:
    """Start a process that writes to a pipe as soon as the pipe has a reader."""
    process = subprocess.Popen(["sh", "-c", 'cat > "$0"', path], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.close()
    return process


# --- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("read", [lambda path: read_bytes(path, 100), open_to_read])
def test_what_nothing_comes_from_is_an_error(
    things: dict[str, Path], kind: str, read: Callable[[Path], object]
) -> None:
    why = "delivered nothing" if "pipe" in kind else "."
    with pytest.raises(OSError, match=why) as caught:
        read(things[kind])
    assert caught.value.filename in (things[kind], str(things[kind]))


def test_a_pipe_with_a_writer_is_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PATIENCE_S", 60.0)
    os.mkfifo(tmp_path / "pipe")
    with start_writer(b"a\r\nb", tmp_path / "pipe"):
        assert read_text(tmp_path / "pipe", 4) == "a\nb"
    with start_writer(b"1\n2\n", tmp_path / "pipe"), open_to_read(tmp_path / "pipe") as file:
        assert list(file) == ["1\n", "2\n"]


def test_what_a_shell_substitutes_is_read() -> None:
    """``<(command)`` is a path below /dev/fd."""
    reading, writing = os.pipe()
    os.write(writing, b"some")
    os.close(writing)
    assert read_bytes(Path(f"/dev/fd/{reading}"), 10) == b"some"
    os.close(reading)


@pytest.mark.parametrize(("content", "most"), [(b"", 0), (b"ab", 2), (b"ab", 5)])
def test_a_file_is_read_up_to_its_limit(tmp_path: Path, content: bytes, most: int) -> None:
    (tmp_path / "file").write_bytes(content)
    assert read_bytes(tmp_path / "file", most) == content
    (tmp_path / "file").write_bytes(bytes(most + 1))
    with pytest.raises(TooLargeError, match=f"{most + 1} bytes, but at most {most}"):
        read_bytes(tmp_path / "file", most)


def test_a_device_without_end_is_too_large() -> None:
    with pytest.raises(TooLargeError, match="at most 1000"):
        read_bytes(Path("/dev/zero"), 1000)


def test_a_reload_ends_where_the_keys_have_become_a_pipe(tmp_path: Path) -> None:
    """A failed reload must not block the next one: a revoked key goes, whatever the file was
    meanwhile."""
    (key, digest), path = make_key(), tmp_path / "keys.yaml"
    path.write_text(f"keys:\n  one: {{sha256: {digest}}}\n", encoding="utf-8")
    access = ServerAccess(VerifierConfig(model="toy", keys=str(path)))
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(
        ConfigError, match=r"keys\.yaml: is a pipe or a device that delivered nothing"
    ):
        access.reload()
    assert access.authenticate(key) is not None
    path.unlink()
    path.write_text("keys: {}\n", encoding="utf-8")
    assert access.reload().keys.revoked == ("one",)
    assert access.authenticate(key) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_file_that_is_no_file_is_named(things: dict[str, Path], kind: str) -> None:
    config = AgentConfig(api_key_file=str(things[kind]))
    with pytest.raises(ConfigError, match=str(things[kind])):
        load_device_access(config, {})


# --- writing --------------------------------------------------------------------------------------


def _write_recording(path: Path) -> None:
    Recording(path, 1 << 20)


def _kept_secret(path: Path) -> None:
    replace_file(path, "secret")


@pytest.mark.parametrize("write", [_write_recording, _kept_secret])
@pytest.mark.parametrize("kind", KINDS)
def test_only_regular_files_become_ours(
    things: dict[str, Path], kind: str, write: Callable[[Path], None]
) -> None:
    before = os.stat(things[kind])
    with pytest.raises((OSError, RecordingError)) as caught:
        write(things[kind])
    assert str(things[kind].resolve()) in str(caught.value) or str(things[kind]) in str(
        caught.value
    )
    after = os.stat(things[kind])
    assert (after.st_mode, after.st_ino) == (before.st_mode, before.st_ino)


def test_a_file_behind_a_link_is_replaced_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, real = tmp_path / "link", tmp_path / "there/real"
    link.symlink_to(real)
    replace_file(link, "first")  # the link led nowhere
    replace_file(link, "second")
    assert link.is_symlink()
    assert real.read_text() == "second"
    assert [path.name for path in real.parent.iterdir()] == ["real"]


def test_an_output_goes_into_a_pipe_and_keeps_a_files_mode(tmp_path: Path) -> None:
    new = tmp_path / "not/yet/there"
    write_output(new, "one")
    assert stat.S_IMODE(new.stat().st_mode) == 0o644
    new.chmod(0o600)
    write_output(new, "two")
    assert (new.read_text(), stat.S_IMODE(new.stat().st_mode)) == ("two", 0o600)
    reading, writing = os.pipe()
    write_output(Path(f"/dev/fd/{writing}"), "three")
    os.close(writing)
    with open(reading) as file:
        assert file.read() == "three"


@pytest.mark.parametrize("write", [open_to_write, TraceFile, lambda path: write_output(path, "x")])
@pytest.mark.parametrize("kind", ["folder", "pipe", "link-to-pipe", "socket"])
def test_what_nobody_reads_is_an_error(
    things: dict[str, Path], kind: str, write: Callable[[Path], object]
) -> None:
    why = "is a pipe without a reader" if "pipe" in kind else "."
    with pytest.raises(OSError, match=why) as caught:
        write(things[kind])
    assert caught.value.filename in (things[kind], str(things[kind]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_output(Path("/dev/full"), "text")


@pytest.mark.skipif(shutil.which("mkfifo") is None, reason="no mkfifo here")
def test_a_trace_goes_into_a_pipe_that_is_read(tmp_path: Path) -> None:
    os.mkfifo(path := tmp_path / "pipe")
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with TraceFile(path) as tracer:
        tracer.record(1.0, "device", "s", "event", object())
    assert os.read(reading, 100).startswith(b'{"at_s":1.0')
    os.close(reading)


# --- all places that open files -------------------------------------------------------------------

# Modules that may open files by themselves, and why. Users do not name the files of these modules
# one by one.
OWN = {
    "edgespec.config.files": "the one place",
    "edgespec.bench.prompts": "comes with the package",
    "edgespec.bench.report": "the kernel's",
    "edgespec.cli.main": "the null device",
    "edgespec.cli.installation": "comes with the package",
    "edgespec.device.borrowed_tokenizer": "in our cache",
    "edgespec.device.followed_corpus": "in our cache",
    "edgespec.device.drafters.manifest": "in a model's folder",
    "edgespec.endpoint.pages": "comes with the package",
    "edgespec.models": "in a model's folder",
    "edgespec.operating_system": "the terminal, and a folder for its lock",
    "edgespec.telemetry.process_memory": "the kernel's",
    "edgespec.telemetry.recording": "checks what it has opened",
    "edgespec.training.distill": "beside the folder that is written",
    "edgespec.verifier": "in a model's folder, the kernel's, or a temporary one",
    "edgespec_sim.commands.run": "in the folder of a run",
    "edgespec_sim.report": "in the folder of a run",
    "edgespec_uara": "in the folder of a run",
}
_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}


def opens_file(call: ast.Call) -> bool:
    """Return whether a call opens a file by its name: builtins, ``os.open``, methods of a path."""
    match call.func:
        case ast.Name(id="open"):
            return True
        case ast.Attribute(value=ast.Name(id="os"), attr="open"):
            return True
        case ast.Attribute(attr="open"):  # an engine's ``open`` opens a stream, not a file
            modes = [one.value for one in call.args if isinstance(one, ast.Constant)]
            named = [one.arg for one in call.keywords]
            return "encoding" in named or any(str(mode) in ("r", "rb", "w", "wb") for mode in modes)
        case ast.Attribute(attr=name):
            return name in _METHODS
    return False


def test_every_file_that_a_user_names_is_opened_in_one_place() -> None:
    found = {
        module.name
        for module in parse_modules()
        if is_within(module.name, "edgespec")
        or is_within(module.name, "edgespec_sim")
        or is_within(module.name, "edgespec_uara")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and opens_file(node)
    }
    strays = {name for name in found if not any(is_within(name, own) for own in OWN)}
    assert strays == set(), "read and write with edgespec.config.files"
    unused = {own for own in OWN if not any(is_within(name, own) for name in found)}
    assert unused == set()
