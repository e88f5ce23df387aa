"""A runner for a shell script as if on a machine of its own. It records the files that the script
left and the host names that it looked up.

Run it as a program: ``python lone_machine.py FOLDER SCRIPT [alone]``. The script has an empty home,
an empty folder for temporary files and an empty working folder, all in FOLDER. With ``alone`` this
process has its own namespaces (``unshare``): the loopback is the only network, and a name server in
this file answers every look-up with "no such name" and records it, also look-ups of native code.
Without ``alone`` Python's audit hook sees the look-ups of Python only. Afterwards FOLDER/found.json
holds the exit code, the output, the files left, and the names.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[2]
MOUNT_BIND: Final = 4096
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR, IFF_UP = 0x8913, 0x8914, 0x8916, 0x1
_DEADLINE_S: Final = 300.0
_NO_SUCH_NAME: Final = 0x8183  # a response, recursion available, code 3

AUDIT = """
import os, sys
def hook(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host and host not in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "::"):
        with open(os.environ["LOOK_UPS"], "a") as file:
            print(host, file=file)
sys.addaudithook(hook)
"""

PRELUDE = """
set -eu
# A script that fails ends what it started: else its output would be waited for until the deadline.
started=
trap 'kill -KILL $started 2> /dev/null || :' EXIT
edgespec() { "$PYTHON" -m edgespec "$@"; }
simulator() { "$PYTHON" -c 'from edgespec.__main__ import simulator; simulator()' "$@"; }
# Start in the background, and wait for its first line.
serving() {
    mkfifo "$TMPDIR/said"
    (exec "$PYTHON" -m edgespec "$@" > "$TMPDIR/said") &
    started="$started $!"
    read -r line < "$TMPDIR/said"
    rm "$TMPDIR/said"
}
stopped() { kill -TERM "$1"; wait "$1" || test $? = 143; }
"""


@cache
def why_not_alone() -> str:
    """Return why no namespaces can be had here; empty where they can."""
    if shutil.which("unshare") is None:
        return "no unshare (util-linux) here"
    tried = subprocess.run([*_ALONE, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode else ""


_ALONE = (
    *("unshare", "--map-root-user", "--net", "--mount"),
    *("--pid", "--fork", "--kill-child", "--mount-proc"),  # so that no process outlives the script
)


class Found:
    """The files, the output and the look-ups of a script."""

    def __init__(self, record: dict[str, object], folder: Path) -> None:
        self.exit_code = record["exit_code"]
        self.printed = str(record["printed"])
        self.look_ups = record["look_ups"]
        self.files = sorted(
            path.relative_to(folder).as_posix()
            for place in ("home", "tmp", "work")
            for path in (folder / place).rglob("*")
            if not path.is_dir()
        )


def run_alone(script: str, folder: Path) -> Found:
    """Run ``script`` (of sh, after ``PRELUDE``) with nothing but ``folder``."""
    command = [sys.executable, __file__, str(folder), script]
    command = command if why_not_alone() else [*_ALONE, *command, "alone"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Found(json.loads((folder / "found.json").read_text(encoding="utf-8")), folder)


def _child_environment(folder: Path, port: int) -> dict[str, str]:
    """Return the whole environment of the script, without anything that a shell or a CI runner
    sets."""
    return {
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PATH": os.environ["PATH"],
        "LANG": "C.UTF-8",
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join((str(folder / "audit"), str(ROOT), str(ROOT / "sim"))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "LOOK_UPS": str(folder / "look-ups"),
        "PORT": str(port),
    }


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | IFF_UP))
        # The resolver looks nothing up on a machine whose only address is 127.0.0.1
        # (AI_ADDRCONFIG).
        second = struct.pack("16sHH4s8x", b"lo:1", socket.AF_INET, 0, socket.inet_aton("192.0.2.1"))
        fcntl.ioctl(any_socket, SIOCSIFADDR, second)


def _put_over(content: str, path: str, folder: Path) -> None:
    """Replace the content of ``path`` by ``content``, in this mount namespace only."""
    own = folder / Path(path).name
    own.write_text(content, encoding="ascii")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(str(own).encode(), os.path.realpath(path).encode(), b"", MOUNT_BIND, None):
        raise OSError(ctypes.get_errno(), f"cannot mount over {path}")


def _answer_look_ups(names: socket.socket, record: Path) -> None:
    """Record each question and answer that the name does not exist."""
    while True:
        question, peer = names.recvfrom(2048)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode("ascii", "replace"))
            at += 1 + question[at]
        with record.open("a", encoding="utf-8") as file:
            file.write(".".join(labels) + "\n")
        end = at + 5  # the type and the class follow the name
        head = question[:2] + struct.pack(">5H", _NO_SUCH_NAME, 1, 0, 0, 0)
        names.sendto(head + question[12:end], peer)


def main() -> None:
    folder, script = Path(sys.argv[1]), sys.argv[2]
    look_ups = folder / "look-ups"
    for name in ("home", "tmp", "work", "audit"):
        (folder / name).mkdir(parents=True)
    (folder / "audit/sitecustomize.py").write_text(AUDIT, encoding="utf-8")
    if sys.argv[3:] == ["alone"]:
        _raise_loopback()
        _put_over("nameserver 127.0.0.1\n", "/etc/resolv.conf", folder)
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names.bind(("127.0.0.1", 53))
        threading.Thread(target=_answer_look_ups, args=(names, look_ups), daemon=True).start()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        ["sh", "-c", PRELUDE + script],
        cwd=folder / "work",
        env=_child_environment(folder, port),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_DEADLINE_S,
        check=False,
    )
    found = look_ups.read_text(encoding="utf-8").split() if look_ups.exists() else []
    record = {
        "exit_code": done.returncode,
        "printed": done.stdout,
        "look_ups": sorted(set(found)),
    }
    (folder / "found.json").write_text(json.dumps(record), encoding="utf-8")


if __name__ == "__main__":
    main()
