"""Tests of installations: the line of ``--version``, and the one line that a bad one gets.

Oracles: the metadata that a test writes, git's own word for this checkout, and the command that
each line has to name.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from edgespec import __version__
from edgespec.__main__ import find_unsupported_python
from edgespec.cli import installation
from edgespec.models.onnx_packages import EXTRAS, advise_provider
from tests.kit.live_verifier import child_environment
from tests.sources import ROOT
from tools.check_release import find_faults

WITHIN_S = 200
MAIN = "from edgespec.__main__ import main; main()"
SIMULATOR = "from edgespec.__main__ import simulator; simulator()"


def run(
    code: str, *arguments: object, path: Path | None = None, cwd: Path = ROOT
) -> tuple[int, str, str]:
    """Run Python code with these arguments; ``path`` comes first on the module search path."""
    environment = child_environment()
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join((str(path), environment["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=WITHIN_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def write_package(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write the metadata of an installed distribution."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    text = "\n".join(("Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines, ""))
    (about / "METADATA").write_text(text, encoding="utf-8")


# --- version, commit and extras -------------------------------------------------------------------


def test_the_version_is_one_line_with_commit_and_extras() -> None:
    code, output, _ = run(MAIN, "--version")
    (line,) = output.splitlines()
    assert code == 0
    assert line.startswith(f"edgespec {__version__}")
    assert f"Python {sys.version_info[0]}.{sys.version_info[1]}." in line
    assert "extras: " in line or "no package metadata" in line


def test_the_commit_is_that_of_the_build_else_that_of_the_checkout(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "edgespec"
    package.mkdir(parents=True)
    assert installation.find_commit(package) == ""
    (package / installation.COMMIT_FILE).write_text("0123abcd\n", encoding="ascii")
    assert installation.find_commit(package) == "0123abcd"
    command = ["git", "rev-parse", "HEAD"]
    known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    found = installation.find_commit(ROOT / "edgespec")
    assert known.startswith(found.removesuffix("-dirty"))


@pytest.mark.parametrize(
    ("installed", "extras"),
    [
        pytest.param({}, [], id="none"),
        pytest.param({"onnx": "1.20"}, ["export"], id="one"),
        pytest.param({"onnx": "1.17"}, [], id="too old"),
        pytest.param({"onnx": "1.20", "gguf": "1"}, ["both", "export"], id="two"),
    ],
)
def test_an_extra_is_listed_once_all_its_libraries_are_there(
    installed: dict[str, str], extras: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A requirement for another system does not count, and neither does the base install."""
    needs = (
        *("Provides-Extra: export", "Provides-Extra: both", "Provides-Extra: elsewhere"),
        "Requires-Dist: numpy",
        "Requires-Dist: onnx>=1.18; extra == 'export'",
        "Requires-Dist: onnx; extra == 'both'",
        "Requires-Dist: gguf; extra == 'both'",
        "Requires-Dist: nothing; sys_platform == 'none' and extra == 'elsewhere'",
    )
    write_package(tmp_path, "edgespec", "9", *needs)
    for name, version in installed.items():
        write_package(tmp_path, name, version)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installation.find_extras() == extras


def test_without_metadata_no_extra_is_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import packaging.requirements  # noqa: F401 # it could not be found below

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert installation.find_extras() is None
    assert installation.describe_installation().endswith(", no package metadata")


@pytest.mark.parametrize(
    ("typed", "completions"),
    [
        ("edgespec gen", {"generate"}),
        ("edgespec generate --draft-c", {"--draft-corpus"}),
        ("edgespec nothing", set()),
    ],
)
def test_a_shell_completes_commands_and_options(
    typed: str, completions: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variables are those by which typer's script for bash asks. Commands are imported late."""
    monkeypatch.setenv("_EDGESPEC_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    code = f"import sys; sys.argv[0] = 'edgespec'; {MAIN}"
    assert set(run(code)[1].split()) == completions


# --- the wheel ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        pytest.param("", "", id="good"),
        pytest.param("edgespec/tests/test_x.py", "is no part of a wheel", id="a test"),
        pytest.param("edgespec/records/bench.json", "is no part of a wheel", id="a record"),
        pytest.param("tools/check_release.py", "belongs to no package", id="a tool"),
    ],
)
def test_a_wheel_holds_the_packages_and_nothing_else(
    added: str, fault: str, tmp_path: Path
) -> None:
    path = tmp_path / "edgespec-9-py3-none-any.whl"
    names = ["edgespec/py.typed", "edgespec/commit.txt", "edgespec_sim/scenarios/city.yaml"]
    names += ["edgespec-9.dist-info/METADATA", *([added] if added else [])]
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    found = list(find_faults(path))
    assert [fault in one for one in found] == ([True] if fault else [])


# --- installations that cannot work ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "is_refused"),
    [((3, 8, 18), True), ((3, 10, 13), True), ((3, 11, 0), False), ((3, 14, 0), False)],
)
def test_an_old_python_is_named_with_the_one_that_is_needed(
    version: tuple[int, ...], is_refused: bool
) -> None:
    problem = find_unsupported_python(version)
    assert bool(problem) is is_refused
    if is_refused:
        assert "needs Python 3.11 or newer, but this is " + ".".join(map(str, version)) in problem
        assert "python3.11 -m pip install edgespec" in problem


@pytest.mark.parametrize(
    ("library", "code", "words", "extra"),
    [
        ("onnxruntime", MAIN, "plan memory", "cpu"),
        ("onnx", MAIN, "export bundled:draft out", "export"),
        ("starlette", MAIN, "serve --draft toy", "serve"),
        ("torch", MAIN, "verifier --model bundled --port 0", "server"),
        ("cryptography", MAIN, "certs ca", "certs"),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    library: str, code: str, words: str, extra: str, tmp_path: Path
) -> None:
    hidden = f"import sys; sys.modules[{library!r}] = None; {code}"
    found, _, errors = run(hidden, *words.split(), cwd=tmp_path)
    assert found == 1, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert f"pip install 'edgespec[{extra}]'" in line
    assert library in line


ELF_OF_ANOTHER_PROCESSOR = b"\x7fELF\x02\x01\x01" + bytes(9) + struct.pack("<HHI", 3, 243, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="another format of libraries")
def test_an_onnxruntime_for_another_processor_is_named(tmp_path: Path) -> None:
    """The library is one for RISC-V, of which only the head is looked at."""
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text("from onnxruntime import state\n", encoding="utf-8")
    (package / "state.abi3.so").write_bytes(ELF_OF_ANOTHER_PROCESSOR + bytes(64))
    write_package(tmp_path, "onnxruntime", "9.9")
    code, _, errors = run(MAIN, "plan", "memory", path=tmp_path)
    (line,) = errors.splitlines()
    assert code == 1
    assert line.startswith("error: onnxruntime cannot be loaded (")
    assert "another processor or another Python" in line
    again = "pip uninstall -y onnxruntime && pip install --no-cache-dir 'edgespec[cpu]'"
    assert line.endswith(f"run: {again}")


@pytest.mark.parametrize("is_broken", [False, True], ids=["works", "broken"])
def test_two_onnxruntimes_are_one_line_that_mends_them(is_broken: bool, tmp_path: Path) -> None:
    """The one that was installed last may work, so the command goes on then."""
    write_package(tmp_path, "onnxruntime", "9.9")
    write_package(tmp_path, "onnxruntime-gpu", "9.9")
    if is_broken:
        (tmp_path / "onnxruntime").mkdir()
        text = "raise ImportError('undefined symbol')\n"
        (tmp_path / "onnxruntime" / "__init__.py").write_text(text, encoding="utf-8")
    code, _, errors = run(MAIN, "plan", "memory", path=tmp_path)
    (line,) = errors.splitlines()
    assert code == int(is_broken)
    assert "onnxruntime and onnxruntime-gpu are installed together" in line
    mended = "pip install --no-cache-dir 'edgespec[gpu]'"
    assert line.endswith(f"pip uninstall -y onnxruntime onnxruntime-gpu && {mended}")


@pytest.mark.parametrize(
    ("provider", "said"),
    [
        ("CUDAExecutionProvider", "'edgespec[gpu]'"),
        ("DmlExecutionProvider", "'edgespec[directml]'"),
        ("OpenVINOExecutionProvider", "'edgespec[openvino]'"),
        ("CoreMLExecutionProvider", "comes with onnxruntime on macOS"),
    ],
)
def test_a_provider_that_is_not_there_is_named_with_what_brings_it(
    provider: str, said: str
) -> None:
    assert said in advise_provider(provider)
    assert advise_provider("CPUExecutionProvider") == ""


def test_every_runtime_has_an_extra() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for distribution, extra in EXTRAS.items():
        (line,) = project["optional-dependencies"][extra]
        assert line.startswith(f"{distribution}>=")
