"""An interpreter that stands for an exporter's environment, for tests: it answers the calls that
``edgespec export --exporter optimum`` makes, without torch.

    fake_exporter.py MODE GRAPH -- what an interpreter is given

MODE: ``good``; ``fails``: dies with words; ``hangs``: starts a
child of its own, writes both process ids and waits; ``bare``: lacks a module; ``empty``: writes
nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path


def main(mode: str, graph: str, given: list[str]) -> int:
    if given[0] == "-c":
        assert given[1] == "import optimum.exporters.onnx", given
        return int(mode == "bare")
    assert given[:2] == ["-m", "optimum.exporters.onnx"], given
    sys.stdout.write("loading the model\rtracing\x1b[31m it\n")
    sys.stdout.flush()
    if mode == "fails":
        sys.stderr.write("ValueError: this family is unknown here\n")
        return 3
    if mode == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        pids = Path(graph).with_name("pids")
        pids.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
        pids.with_suffix(".new").rename(pids)
        signal.pause()
    if mode != "empty":
        shutil.copyfile(graph, Path(given[-1]) / "model.onnx")
        Path(given[-1], "tokenizer.json").write_text("{}")  # as the exporter's library has it
    return 0


if __name__ == "__main__":
    at = sys.argv.index("--")
    mode, graph = sys.argv[1:at]
    sys.exit(main(mode, graph, sys.argv[at + 1 :]))
