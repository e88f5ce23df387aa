"""Description of this installation: version, commit, Python and extras, for ``--version``.

A wheel holds the commit it was built from in ``edgespec/commit.txt``, which the build writes. In a
checkout git says which it is.
"""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Final

from edgespec import __version__

COMMIT_FILE: Final = "commit.txt"
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S: Final = 5.0
_FOR_DEVELOPERS: Final = ("dev", "docs")


def describe_installation() -> str:
    """Return one line with the version, the commit if it is known, the Python and the extras."""
    commit = find_commit(_PACKAGE)
    release = f"{__version__} (commit {commit})" if commit else __version__
    extras = find_extras()
    listed = "no package metadata" if extras is None else f"extras: {', '.join(extras) or 'none'}"
    return f"edgespec {release}, Python {platform.python_version()}, {listed}"


def find_commit(package: Path) -> str:
    """Return the commit that the files in the folder ``package`` were made from, with ``-dirty`` if
    a checkout has other changes; empty if it is not known."""
    try:
        return (package / COMMIT_FILE).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        pass
    if not (package.parent / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
    try:
        done = subprocess.run(
            command,
            cwd=package.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
            check=True,
            encoding="ascii",
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, or it refuses this folder
        return ""
    return done.stdout.strip()


def find_extras() -> list[str] | None:
    """Return the extras of edgespec whose libraries are all installed, in versions that they allow.
    None where edgespec itself is not installed as a package, but only found on the path."""
    from packaging.requirements import Requirement

    try:
        about = distribution("edgespec")
    except PackageNotFoundError:
        return None
    needed = [Requirement(line) for line in about.requires or ()]
    found = []
    for extra in about.metadata.get_all("Provides-Extra") or ():
        # On another system an extra may need nothing; then it is not listed.
        own = [
            one
            for one in needed
            if one.marker is not None
            and one.marker.evaluate({"extra": extra})
            and not one.marker.evaluate({"extra": ""})
        ]
        if own and extra not in _FOR_DEVELOPERS and all(map(_is_installed, own)):
            found.append(extra)
    return sorted(found)


def _is_installed(requirement: object) -> bool:
    from packaging.requirements import Requirement

    assert isinstance(requirement, Requirement)
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return False
    return requirement.specifier.contains(found, prereleases=True)
