"""The commands ``edgespec`` and ``edgespec-sim``, from the first import on.

Nothing but the standard library is imported here at the top: what a Ctrl-C does must be settled
before the other imports begin.
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
    # Until there is something to tidy up, a Ctrl-C ends the process as it ends any other: an
    # exception inside an import would be printed in many ways. ``start`` takes over. Where a shell
    # has sent the command to the background, the signal stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    app = importlib.import_module(module).app
    importlib.import_module("edgespec.cli.main").start(app)


if __name__ == "__main__":
    main()
