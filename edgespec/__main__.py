"""Entry points of the commands ``edgespec`` and ``edgespec-sim``.

Only the standard library is imported at the top, because Ctrl-C has to be handled before the other
imports begin.
"""

from __future__ import annotations

import importlib
import signal


def main() -> None:
    """Run ``edgespec`` with the arguments of this process, and exit."""
    _run("edgespec.cli.main")


def simulator() -> None:
    """Run ``edgespec-sim`` with the arguments of this process, and exit."""
    _run("edgespec_sim.commands.main")


def _run(module: str) -> None:
    # A Ctrl-C during the imports ends the process at once, because an exception inside an import
    # would be printed in one of many ways. ``start`` installs another handler. If a shell runs the
    # command in the background, the signal stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = importlib.import_module(module).app
    importlib.import_module("edgespec.cli.main").start(app)


if __name__ == "__main__":
    main()
