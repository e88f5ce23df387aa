"""Entry points of the commands ``edgespec`` and ``edgespec-sim``.

Only the standard library is imported at the top, because Ctrl-C has to be handled before the other
imports begin. An older Python must be able to read this file, so that it can say which it needs.
"""

from __future__ import annotations

import importlib
import signal
import sys

_OLDEST_PYTHON = (3, 11)


def main() -> None:
    """Run ``edgespec`` with the arguments of this process, and exit."""
    _run("edgespec.cli.main")


def simulator() -> None:
    """Run ``edgespec-sim`` with the arguments of this process, and exit."""
    _run("edgespec_sim.commands.main")


def _run(module: str) -> None:
    if problem := find_unsupported_python(sys.version_info[:3]):
        sys.exit(problem)
    # A Ctrl-C during the imports ends the process at once, because an exception inside an import
    # would be printed in one of many ways. ``start`` installs another handler. If a shell runs the
    # command in the background, the signal stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = importlib.import_module(module).app
    importlib.import_module("edgespec.cli.main").start(app)


def find_unsupported_python(version: tuple[int, ...]) -> str:
    """Return an error message for a Python that is too old, else an empty text."""
    if version >= _OLDEST_PYTHON:
        return ""
    needed, found = (".".join(map(str, one)) for one in (_OLDEST_PYTHON, version))
    return (
        f"error: edgespec needs Python {needed} or newer, but this is {found} ({sys.executable});"
        f" install a newer one and run: python{needed} -m pip install edgespec"
    )


if __name__ == "__main__":
    main()
