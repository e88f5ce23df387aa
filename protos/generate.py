"""Generate ``edgespec/wire/pb`` from ``protos/edgespec/v1/*.proto``.

    python protos/generate.py [FOLDER]

The virtual path in ``-I`` makes protoc write imports that are right for the package. The generator
is pinned, because code from a newer one demands a newer protobuf at run time: code from 1.80.0
runs with protobuf 6.33.5 up to 8. No service stubs are generated; the transport passes raw bytes
through ``codec.py``, so that a malformed message ends one stream and not a handler.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

GENERATOR = "1.80.0"
PACKAGE = "edgespec/wire/pb"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos" / "edgespec" / "v1"


def unavailable() -> str | None:
    """Why code cannot be generated here, or None."""
    try:
        found = version("grpcio-tools")
    except PackageNotFoundError:
        return f"grpcio-tools is not installed, but {GENERATOR} is needed"
    return None if found == GENERATOR else f"grpcio-tools is {found}, but must be {GENERATOR}"


def generate(folder: Path) -> list[Path]:
    """Write the modules and their stubs below ``folder``; the files written, sorted.

    Raises ``RuntimeError`` when the generator is missing, of another version, or fails.
    """
    if reason := unavailable():
        raise RuntimeError(reason)
    from grpc_tools import protoc

    names = sorted(f"{PACKAGE}/{path.name}" for path in SOURCES.glob("*.proto"))
    status = protoc.main(
        [
            "protoc",
            f"-I{PACKAGE}={SOURCES}",
            f"--python_out={folder}",
            f"--pyi_out={folder}",
            *names,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc ended with status {status} for {', '.join(names)}")
    return sorted((folder / PACKAGE).glob("*_pb2.py*"))


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    for written in generate(target):
        print(written)
