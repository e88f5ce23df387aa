"""Count the modules that a drafted token crosses, from the draft model to the terminal.

    python -m benchmarks.token_path [--model MODEL] [--draft DRAFT]

A verifier and ``edgespec generate`` run as two processes with their default settings. In each of
them a profiler notes every module of edgespec of which a function runs, from one pass to a later
one: start and end of the generation are left out. The sum over both processes is printed, a module
that runs in both counts once. The profiler slows both processes down, so no time is measured.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGE: Final = str(ROOT / "edgespec") + os.sep
FIRST_PASS, LAST_PASS = 6, 22
PARTS: Final = "generate", "verifier"
MARKERS: Final = {
    "verifier": ("core/verifier/session.py", "_on_pass_done"),
    "generate": ("core/device/session.py", "read"),
}
"""The function that runs once a pass, in each process."""
PROMPT: Final = "Once upon a time there was a little girl. She had a red ball and a blue ball."


def record(part: str, path: Path, arguments: list[str]) -> None:
    """Run the command ``part`` in this process, and write the modules that run between the passes
    ``FIRST_PASS`` and ``LAST_PASS`` to ``path``."""
    place, function = MARKERS[part]
    known: dict[CodeType, str] = {}
    found: set[str] = set()
    passes = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal passes
        if event != "call":
            return
        code = frame.f_code
        module = known.get(code)
        if module is None:
            file = code.co_filename
            known[code] = module = file[len(PACKAGE) :] if file.startswith(PACKAGE) else ""
        if not module or code.co_name == "<module>":
            return
        if code.co_name == function and module == place:
            passes += 1
            if passes == LAST_PASS:
                path.write_text("\n".join(sorted(found)), encoding="utf-8")
        if FIRST_PASS <= passes < LAST_PASS:
            found.add(module)

    threading.setprofile(note)
    sys.setprofile(note)
    from edgespec.__main__ import main

    sys.argv = ["edgespec", part, *arguments]
    main()


def measure(model: str, draft: str) -> tuple[set[str], set[str]]:
    """Return the modules that run on the device and on the verifier."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {part: Path(folder) / part for part in MARKERS}

        def start(part: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "benchmarks.token_path", "--part", part]
            command += ["--record", str(paths[part]), "--", *arguments]
            return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)

        verifier = start("verifier", "--model", model, "--port", "0")
        try:
            assert verifier.stderr is not None
            lines = list[str]()
            while not (found := re.search(r"127\.0\.0\.1:\d+", "".join(lines))):
                if not (line := verifier.stderr.readline()):
                    raise SystemExit(f"the verifier did not start: {''.join(lines)}")
                lines.append(line)
            flags = ("--verifier", found.group(), "--draft", draft, "--max-tokens", "160")
            _, said = (device := start("generate", PROMPT, *flags)).communicate()
            if device.returncode:
                raise SystemExit(said)
        finally:
            verifier.terminate()
            verifier.wait()
        on_device, on_verifier = (paths[part].read_text("utf-8") for part in PARTS)
        return set(on_device.split()), set(on_verifier.split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="bundled", help="target of the verifier")
    parser.add_argument("--draft", default="bundled", help="draft model of the device")
    parser.add_argument("--part", choices=[*MARKERS], help=argparse.SUPPRESS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return record(args.part, args.record, args.arguments)
    device, verifier = measure(args.model, args.draft)
    for module in sorted(device | verifier):
        ends = ["device"] * (module in device) + ["verifier"] * (module in verifier)
        print(f"{module:44} {', '.join(ends)}")
    both = len(device & verifier)
    print(f"{len(device | verifier)} modules: {len(device)} on the device,", end=" ")
    print(f"{len(verifier)} on the verifier, {both} of them on both")


if __name__ == "__main__":
    main()
