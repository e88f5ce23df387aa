"""The project's own files and their imports, for the tests that read source."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "edgespec/wire/pb/"
# Import name -> folder. ``sim`` is not a package: its packages are imported by their own names.
PACKAGES = {
    "edgespec": "edgespec",
    "edgespec_sim": "sim/edgespec_sim",
    "edgespec_uara": "sim/edgespec_uara",
}
_NOT_OURS = {"build", "dist", "runs", "logs", "__pycache__", "node_modules"}


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file as text and tree. ``path`` is relative to the root, with slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The name under which it is imported: ``edgespec.core.protocol.tree``,
        ``edgespec_sim.world``."""
        dotted = self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        return dotted.removeprefix("sim.") if dotted.startswith("sim.edgespec_") else dotted

    @property
    def is_package(self) -> bool:
        return self.path.endswith("/__init__.py")


def parse(path: str, text: str) -> Module:
    return Module(path, text, ast.parse(text, filename=path))


@cache
def project_files() -> tuple[str, ...]:
    """Return the paths that git would commit; without git (a release tarball), those of a walk over
    the tree."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = listing.stdout.split("\0") if listing.returncode == 0 else _walk(ROOT)
    return tuple(sorted({name for name in names if name and (ROOT / name).is_file()}))


def _walk(folder: Path) -> Iterator[str]:
    for entry in folder.iterdir():
        if entry.name in _NOT_OURS or (entry.name.startswith(".") and entry.name != ".ci"):
            continue
        if entry.is_dir():
            yield from _walk(entry)
        else:
            yield entry.relative_to(ROOT).as_posix()


@cache
def parse_modules() -> tuple[Module, ...]:
    """Return every Python file written by hand."""
    return tuple(
        parse(path, (ROOT / path).read_text(encoding="utf-8"))
        for path in project_files()
        if path.endswith(".py") and not path.startswith(GENERATED)
    )


@dataclass(frozen=True, slots=True)
class Import:
    name: str
    line: int


def list_imports(module: Module) -> Iterator[Import]:
    """Yield all names that a file imports, anywhere in it and in every spelling.

    ``from a.b import c`` yields both ``a.b`` and ``a.b.c``, since either may be the module.
    """
    for node in ast.walk(module.tree):
        match node:
            case ast.Import(names=aliases):
                yield from (Import(alias.name, node.lineno) for alias in aliases)
            case ast.ImportFrom(names=aliases):
                base = node.module or ""  # ruff forbids relative imports
                yield Import(base, node.lineno)
                yield from (Import(f"{base}.{alias.name}", node.lineno) for alias in aliases)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function).split(".")[-1] in ("import_module", "__import__"):
                    yield Import(name, node.lineno)


def is_within(name: str, package: str) -> bool:
    """Return whether ``name`` is that package or is inside it."""
    return name == package or name.startswith(package + ".")
