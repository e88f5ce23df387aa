"""Build the packages, and try the wheel in a clean environment for each extra.

    python -m pip install build twine uv
    python -m tools.check_release [--extras cpu serve ...] [--pythons python3.12 ...] [--out FILE]

The wheel and the source archive are built and judged by twine; the wheel holds no tests and no
records and is small enough. Then each extra is installed from the wheel into an environment of its
own and runs its smoke test (``smoke_test.py``): with the newest versions of its libraries and with
the lowest that ``pyproject.toml`` allows. ``--out`` gets a table with the versions and sizes. Exits
with 1 if anything fails, after everything was tried.

uv resolves and installs. An index, a folder of wheels and certificates that pip was given by its
variables (``PIP_INDEX_URL``, ``PIP_FIND_LINKS``, ``PIP_CERT``) hold for it too. ``--torch`` pins
PyTorch, whose newest build for Linux takes gigabytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.smoke_test import CHECKS

ROOT = Path(__file__).resolve().parent.parent
MAX_WHEEL_BYTES = 45_000_000
PACKAGES = ("edgespec/", "edgespec_sim/", "edgespec_uara/")
NO_PART_OF_A_WHEEL = ("tests/", "records/", "benchmarks/", "docs/", "__pycache__/")
NEWEST, LOWEST = "newest", "lowest"
SHOWN = (
    *("grpcio", "protobuf", "numpy", "tokenizers", "huggingface-hub", "onnxruntime", "torch"),
    *("transformers", "onnx", "starlette", "llguidance", "cryptography", "plotly", "scipy"),
)
"""Libraries whose versions the table shows."""
TIMEOUT_S = 900
SHOW_VERSION = "import platform; print(platform.python_version())"


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of one environment."""

    extra: str
    python: str
    resolution: str
    versions: dict[str, str]
    size_bytes: int
    failure: str
    """Output of what failed; empty if the smoke test passed."""

    def to_row(self) -> str:
        """Return a row of the table, in markdown."""
        shown = ", ".join(
            f"{name} {self.versions[name]}" for name in SHOWN if name in self.versions
        )
        state = "failed" if self.failure else "passed"
        size_mb = f"{self.size_bytes / 1e6:.0f}"
        cells = (self.extra, self.python, self.resolution, shown, size_mb, state)
        return f"| {' | '.join(cells)} |"


HEAD = "| extra | Python | versions | of which | MB installed | smoke test |\n" + "|---" * 6 + "|"


class CheckError(Exception):
    """A step failed. The message holds what it printed."""


def call(*words: str | Path, cwd: Path = ROOT) -> str:
    """Run a program and return its output. Raises ``CheckError``."""
    command = [str(word) for word in words]
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=make_environment(),
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CheckError(f"{' '.join(command)}: {error}") from error
    if done.returncode:
        raise CheckError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    return done.stdout


def make_environment() -> dict[str, str]:
    """Return the environment of programs: without edgespec's own variables, and with pip's settings
    under the names that uv reads."""
    found = {name: text for name, text in os.environ.items() if not name.startswith("EDGESPEC_")}
    found.pop("PYTHONPATH", None)
    names = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_CERT": "SSL_CERT_FILE"}
    names["PIP_FIND_LINKS"] = "UV_FIND_LINKS"
    return found | {new: found[old] for old, new in names.items() if old in found}


def build(out: Path) -> Path:
    """Build both packages into ``out``, and return the wheel. Raises ``CheckError``."""
    call(sys.executable, "-m", "build", "--outdir", out)
    call(sys.executable, "-m", "twine", "check", "--strict", *sorted(out.iterdir()))
    (wheel,) = out.glob("*.whl")
    return wheel


def find_faults(wheel: Path) -> Iterator[str]:
    """Yield what is wrong with the content and the size of a wheel."""
    if (size := wheel.stat().st_size) > MAX_WHEEL_BYTES:
        yield f"{wheel.name} has {size} bytes, but at most {MAX_WHEEL_BYTES} are allowed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for name in names:
        if not name.startswith(PACKAGES) and ".dist-info/" not in name:
            yield f"{name} belongs to no package"
        if any(f"/{part}" in f"/{name}" for part in NO_PART_OF_A_WHEEL):
            yield f"{name} is no part of a wheel"
    for needed in ("edgespec/py.typed", "edgespec/commit.txt", "edgespec_sim/scenarios/city.yaml"):
        if needed not in names:
            yield f"{needed} is missing"


def try_extra(extra: str, python: str, resolution: str, wheel: Path, torch: str) -> Trial:
    """Install ``extra`` from the wheel into a new environment, and run its smoke test there."""
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="edgespec-release-") as temporary:
        folder = Path(temporary)
        environment, empty = folder / "environment", folder / "empty"
        empty.mkdir()
        interpreter = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
        try:
            call("uv", "venv", "--quiet", "--no-python-downloads", "--python", python, environment)
            python = call(interpreter, "-c", SHOW_VERSION).strip()
            pins = folder / "pins.txt"
            pins.write_text(f"torch=={torch}\n", encoding="utf-8")
            if resolution == LOWEST:
                # The requirements of a file are its own, so their lowest versions are taken; those
                # of a wheel would be the requirements of a requirement.
                given = ("--resolution", "lowest-direct", "--constraint", pins, "--quiet")
                extras = () if extra == "base" else ("--extra", extra)
                named = ("--python", interpreter, "--output-file", folder / "lowest.txt")
                call("uv", "pip", "compile", "pyproject.toml", *extras, *given, *named)
                pins = folder / "lowest.txt"
            wanted = str(wheel) if extra == "base" else f"edgespec[{extra}] @ {wheel.as_uri()}"
            installed = ("--python", interpreter, "--constraint", pins)
            call("uv", "pip", "install", "--quiet", *installed, wanted)
            listed = call("uv", "pip", "list", "--format", "json", "--python", interpreter)
            versions = {one["name"]: one["version"] for one in json.loads(listed)}
            call(interpreter, "-I", ROOT / "tools/smoke_test.py", extra, cwd=empty)
            failure = ""
        except CheckError as error:
            failure = str(error)
        return Trial(extra, python, resolution, versions, measure_size(environment), failure)


def measure_size(folder: Path) -> int:
    """Return the bytes of all files below ``folder``."""
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.check_release", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("--extras", nargs="+", default=list(CHECKS), choices=list(CHECKS))
    parser.add_argument(
        "--pythons", nargs="+", default=[sys.executable], help="interpreters to try each extra on"
    )
    parser.add_argument(
        "--versions",
        nargs="+",
        default=[NEWEST, LOWEST],
        choices=[NEWEST, LOWEST],
        help="versions of the libraries",
    )
    parser.add_argument("--torch", default="2.13.0", help="version of PyTorch for `server`")
    parser.add_argument("--dist", type=Path, help="folder that keeps the built packages")
    parser.add_argument("--out", type=Path, help="file for the table, in markdown")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check everything. Returns the exit code."""
    given = read_arguments(arguments)
    if shutil.which("uv") is None:
        print("uv is not installed: python -m pip install build twine uv", file=sys.stderr)
        return 1
    failed = False
    rows = [HEAD]
    with tempfile.TemporaryDirectory(prefix="edgespec-dist-") as temporary:
        dist = given.dist or Path(temporary)
        dist.mkdir(parents=True, exist_ok=True)
        try:
            wheel = build(dist)
        except CheckError as error:
            print(error, file=sys.stderr)
            return 1
        for path in sorted(dist.iterdir()):
            print(f"{path.name}: {path.stat().st_size / 1e6:.1f} MB")
        for fault in find_faults(wheel):
            print(f"FAULT {fault}", file=sys.stderr)
            failed = True
        for python in given.pythons:
            for extra in given.extras:
                for resolution in given.versions:
                    trial = try_extra(extra, python, resolution, wheel, given.torch)
                    rows.append(trial.to_row())
                    print(rows[-1], flush=True)
                    if trial.failure:
                        print(trial.failure, file=sys.stderr, flush=True)
                        failed = True
    if given.out:
        given.out.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
