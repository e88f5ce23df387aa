"""Installs real clients and runs them against an endpoint: ``make clients``.

Each client of ``clients.yaml`` is installed into an environment of its own below
``EDGESPEC_CLIENTS`` (the user's cache by default), where only what is missing is fetched. It is
then run by its driver against ``edgespec serve`` in front of the scripted target, and in front of
SmolLM2 if that was pulled. A table at the end shows what worked, and why the rest did not.

A client has a home folder and a working folder of its own, none of the user's keys, and a time
limit. Whatever it started ends with it, also at Ctrl-C.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import psutil
from rich.console import Console
from rich.table import Table

from edgespec.config.files import user_folder
from edgespec.models.catalogue import Side, find_pulled, read_catalogue
from tests.clients import scripted_model
from tests.clients.table import (
    ASK,
    DRIVERS,
    WORKS,
    Check,
    Client,
    Kind,
    Results,
    read_results,
    read_table,
    write_results,
)
from tests.sources import ROOT

SCRIPTED: Final = "scripted"
SMOLLM2: Final = "smollm2"
_PAIR: Final = "smollm2-135m"
"""Name of SmolLM2 in the catalogue of ``edgespec pull``."""
_FOLDER_VARIABLE: Final = "EDGESPEC_CLIENTS"
_MODELS_VARIABLE: Final = "EDGESPEC_MODELS"
_START_WITHIN_S: Final = 120.0
_INSTALL_WITHIN_S: Final = 1200.0
_READY: Final = ".ready"
_MOST_SHOWN: Final = 300
"""Characters of an error that are kept."""
_PASSED_ON: Final = ("LANG", "LC_ALL", "SSL_CERT_FILE", "SYSTEMROOT")
"""Variables of the user that a client gets."""
_LEAST_WIDTH: Final = 120
"""Columns of the table at the end, also where the output is no terminal."""
_TERMINAL_CODES: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SUBREAPER: Final = 36
"""``PR_SET_CHILD_SUBREAPER`` of Linux."""

console = Console(highlight=False, markup=False, soft_wrap=True)


# --- processes ------------------------------------------------------------------------------------


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent ends, so that they can be found. Only Linux
    has this; elsewhere a client that detaches a process may leave it behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)


def end_processes(kept: Collection[psutil.Process] = ()) -> None:
    """End all processes below this one, except ``kept`` and what these started."""
    spared = set(kept)
    for one in kept:
        with suppress(psutil.NoSuchProcess):
            spared |= set(one.children(recursive=True))
    # A process that ends may leave others to this one, so look again until there are none.
    for send in (psutil.Process.terminate, psutil.Process.kill, psutil.Process.kill):
        found = [one for one in psutil.Process().children(recursive=True) if one not in spared]
        if not found:
            return
        for one in found:
            with suppress(psutil.NoSuchProcess):
                send(one)
        psutil.wait_procs(found, timeout=3.0)


@contextmanager
def start_server(
    name: str, command: Sequence[str], ready: str, folder: Path
) -> Iterator[tuple[str, psutil.Process]]:
    """Run a server, and yield what ``ready`` finds in a line of its output, and the process. Raises
    ``RuntimeError`` with what it wrote if it ends before."""
    log = folder / f"{name}.log"
    with log.open("wb") as written:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(ready, line):
                yield found[1], psutil.Process(process.pid)
                return
        raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-2000:]}")
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class Target:
    """An endpoint to which clients are pointed."""

    name: str
    url: str
    tokenizer: Path
    """Folder with the tokenizer, for clients that count tokens."""
    servers: tuple[psutil.Process, ...]


@contextmanager
def serve_target(name: str, model: str, folder: Path) -> Iterator[Target]:
    """Run a verifier of ``model`` and an endpoint in front of it."""
    with ExitStack() as stack:
        start = partial(start_server, folder=folder)
        if name == SCRIPTED:
            command = ["tests.clients.scripted_model", model]
        else:
            command = ["edgespec", "verifier", "--model", model, "--set", f"name={name}"]
            command += ["--port", "0"]
        address, verifier = stack.enter_context(
            start(f"{name}-verifier", command, r"ready on (\S+:\d+)")
        )
        serve = ["edgespec", "serve", "--verifier", address, "--draft", "lookup", "--port", "0"]
        url, endpoint = stack.enter_context(
            start(f"{name}-endpoint", serve, r"ready on (http://\S+)/v1")
        )
        yield Target(name, url, Path(model), (verifier, endpoint))


def find_smollm2() -> str:
    """Return the reference of SmolLM2 if it is on this machine, else an empty text."""
    if named := os.environ.get(_MODELS_VARIABLE):
        file = Path(named) / read_catalogue()[_PAIR].target.file
        return str(file) if file.is_file() else ""
    pulled = find_pulled(_PAIR, Side.TARGET)
    return "" if pulled is None else str(pulled.locate())


# --- environments ---------------------------------------------------------------------------------


def clients_folder() -> Path:
    """Return the folder that holds the clients' environments."""
    if named := os.environ.get(_FOLDER_VARIABLE):
        return Path(named).expanduser().resolve()
    return user_folder("XDG_CACHE_HOME", ".cache", "clients")


def is_installed(client: Client, environment: Path) -> bool:
    """Return whether exactly the packages of the table are in the environment."""
    ready = environment / _READY
    return ready.is_file() and ready.read_text() == "\n".join(client.packages)


def install(client: Client, environment: Path) -> None:
    """Install the packages of a client. Raises ``RuntimeError`` with the installer's last words.

    An installation that was interrupted goes on where it was."""
    environment.mkdir(parents=True, exist_ok=True)
    with (environment / ".installing").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may install the same client
        if not is_installed(client, environment):
            _install_packages(client, environment)


def _install_packages(client: Client, environment: Path) -> None:
    if client.pip:
        python = environment / "bin" / "python"
        # uv is many times as fast, but does not see a package that another folder lends.
        uv = None if client.uses_torch else shutil.which("uv")
        if not python.is_file():
            make = (
                [uv, "venv", "--allow-existing", "--python", sys.executable]
                if uv
                else [sys.executable, "-m", "venv"]
            )
            _install_step([*make, str(environment)], environment)
        if client.uses_torch:
            own = [one for one in sys.path if one.endswith("site-packages")]
            (packages,) = environment.glob("lib/python*/site-packages")
            (packages / "edgespec_checkout.pth").write_text("\n".join(own))
        pip = [str(python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        pip.append("--no-compile")  # the first run compiles what it needs
        if uv:
            pip = [uv, "pip", "install", "--python", str(python)]
        flags = os.environ.get("PIP_FLAGS", "").split()
        _install_step([*pip, *flags, *client.pip], environment)
    if client.npm:
        if shutil.which("npm") is None:
            raise RuntimeError("npm is not installed here: install Node.js 20 or newer")
        (environment / "package.json").write_text('{"private": true}')
        npm = ["npm", "install", "--no-audit", "--no-fund", "--save-exact", *client.npm]
        _install_step(npm, environment)
    (environment / _READY).write_text("\n".join(client.packages))


def _install_step(command: Sequence[str], environment: Path) -> None:
    log = environment / "install.log"
    with log.open("ab") as written:
        done = subprocess.run(
            command,
            cwd=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=_INSTALL_WITHIN_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {log.read_text(errors='replace')[-1500:]}")


# --- running --------------------------------------------------------------------------------------


def parts_for(client: Client, target: str) -> dict[str, Check]:
    """Return the parts that are run against a target. Only the scripted one is sure to call tools,
    and the prompts of agents are longer than SmolLM2's context."""
    if target == SCRIPTED:
        return dict(client.parts)
    if client.kind is Kind.AGENT:
        return {}
    return {part: one for part, one in client.parts.items() if not one.needs_script}


def run_client(name: str, client: Client, target: Target, environment: Path) -> dict[str, str]:
    """Run a client's driver. Return for each part ``WORKS`` or what went wrong."""
    parts = parts_for(client, target.name)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        scratch = Path(made)
        (work := scratch / "work").mkdir()
        (home := scratch / "home").mkdir()
        variables = {
            **{key: os.environ[key] for key in _PASSED_ON if key in os.environ},
            "PATH": os.pathsep.join(
                [
                    str(environment / "bin"),
                    str(environment / "node_modules" / ".bin"),
                    os.environ.get("PATH", os.defpath),
                ]
            ),
            "HOME": str(home),
            "TMPDIR": str(scratch),
            "PYTHONPYCACHEPREFIX": str(environment / "pycache"),
            "EDGESPEC_CLIENT_URL": target.url,
            "EDGESPEC_CLIENT_MODEL": target.name,
            "EDGESPEC_CLIENT_PARTS": " ".join(parts),
            "EDGESPEC_CLIENT_ASK": json.dumps(ASK),
            "EDGESPEC_CLIENT_TOKENIZER": str(target.tokenizer),
        }
        command = _driver_command(client, environment)
        with (scratch / "out").open("wb") as out, (scratch / "err").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            end = "ended with {} before this part"
            try:
                end = end.format(process.wait(client.limit_s))
            except subprocess.TimeoutExpired:
                end = f"no result within {client.limit_s:g} s"
            finally:
                end_processes(target.servers)
        shown = parse_lines((scratch / "out").read_text(errors="replace"))
        err_end = _shorten((scratch / "err").read_text(errors="replace"))
    found = dict[str, str]()
    for part, check in parts.items():
        if part not in shown:
            found[part] = f"{end}: {err_end}" if err_end else end
        elif "error" in shown[part]:
            found[part] = _shorten(shown[part]["error"])
        else:
            found[part] = judge(check, shown[part]["shows"], is_scripted=target.name == SCRIPTED)
    return found


def _driver_command(client: Client, environment: Path) -> list[str]:
    if client.driver.endswith(".mjs"):
        # Node looks for packages beside the script.
        for one in ("parts.mjs", client.driver):
            shutil.copy(DRIVERS / one, environment / one)
        return ["node", str(environment / client.driver)]
    python = environment / "bin" / "python" if client.pip else Path(sys.executable)
    return [str(python), str(DRIVERS / client.driver)]


def parse_lines(written: str) -> dict[str, dict[str, str]]:
    """Return the lines that a driver wrote, by part. Whatever else was printed is ignored."""
    found = dict[str, dict[str, str]]()
    for line in written.splitlines():
        if line.startswith('{"part":'):
            with suppress(ValueError):
                data = json.loads(line)
                found[data["part"]] = data
    return found


def _shorten(text: str) -> str:
    """Return the end of a message in one line."""
    words = " ".join(_TERMINAL_CODES.sub("", text).split())
    return words if len(words) <= _MOST_SHOWN else f"... {words[-_MOST_SHOWN:]}"


# --- judging --------------------------------------------------------------------------------------


def judge(check: Check, shown: str, *, is_scripted: bool) -> str:
    """Return ``WORKS`` if a part showed what it must, else what it showed."""
    judges = _SCRIPTED_JUDGES if is_scripted else _REAL_JUDGES
    with suppress(ValueError, KeyError, TypeError):
        if judges[check](shown):
            return WORKS
    return f"not what it must show ({check.value}): {_shorten(shown)!r}"


def _is_city(shown: str) -> bool:
    found = json.loads(shown)
    return set(found) == {"city", "country"} and all(isinstance(one, str) for one in found.values())


def _is_thought(shown: str) -> bool:
    thought, _, answer = shown.partition("|")
    return thought.strip() == scripted_model.THOUGHT and answer.strip() == scripted_model.ANSWER


def _is_task(shown: str) -> bool:
    notes, _, answer = shown.partition("|")
    return notes == "one\ntwo\n" and scripted_model.RESULT in answer and "two" in answer


def _is_edited(shown: str) -> bool:
    notes, _, answer = shown.partition("|")
    return notes == "one\ntwo\n" and "Applied edit" in answer


_WEATHER: Final = "21 degrees in Paris"
_CITY: Final = {"city": "Paris", "country": "France"}
_REAL_JUDGES: Final[Mapping[Check, Callable[[str], bool]]] = {
    Check.ANSWER: lambda shown: bool(shown.strip()) and shown != "None",
    Check.CITY: _is_city,
    Check.NUMBER: lambda shown: float(shown) == float(shown),
    Check.TEXT: lambda shown: bool(shown.strip()) and shown != "None",
}
_SCRIPTED_JUDGES: Final[Mapping[Check, Callable[[str], bool]]] = {
    **_REAL_JUDGES,
    Check.ANSWER: lambda shown: scripted_model.ANSWER in " ".join(shown.split()),
    Check.CITY: lambda shown: json.loads(shown) == _CITY,
    Check.CITY_AFTER_CALL: lambda shown: json.loads(shown) == _CITY,
    Check.WEATHER: lambda shown: scripted_model.RESULT in shown and _WEATHER in shown,
    Check.SECTIONS: lambda shown: scripted_model.ANSWER in " ".join(shown.split()),
    Check.CALLED: lambda shown: bool(shown.strip()) and shown != "None",
    Check.THOUGHT: _is_thought,
    Check.TASK: _is_task,
    Check.EDITS: _is_edited,
    Check.ARGUMENTS: lambda shown: json.loads(shown) == {"city": "Paris"},
}


# --- the command ----------------------------------------------------------------------------------


def main() -> int:
    """Run the command. Return 1 if a client failed."""
    options = _parse_options()
    if options.list:
        for name, client in read_table().items():
            console.print(f"{name:18} {' '.join(client.packages) or client.not_run}")
        return 0
    chosen = choose_clients(options.clients)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return _run_all(chosen, options)
    except KeyboardInterrupt:
        console.print("interrupted; what was installed stays")
        return 128 + signal.SIGINT
    finally:
        end_processes()


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.run",
        description="Install real clients and run them against an endpoint. Use it after a change"
        " of the HTTP APIs, and to learn whether a new version of a client still works.",
    )
    parser.add_argument("clients", nargs="*", help="names of clients to run; none: all of them")
    parser.add_argument("--list", action="store_true", help="show the clients and their versions")
    parser.add_argument(
        "--target",
        choices=(SCRIPTED, SMOLLM2, "both"),
        default="both",
        help="model behind the endpoint. The scripted one makes the calls that a test prescribes."
        f" SmolLM2 is left out if it was not pulled (edgespec pull {_PAIR})",
    )
    parser.add_argument(
        "--install-only", action="store_true", help="install what is missing, and run nothing"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write what was seen to tests/clients/results.yaml, from which docs/clients.md is made"
        " (python -m tools.write_clients)",
    )
    return parser.parse_args()


def choose_clients(names: Sequence[str]) -> dict[str, Client]:
    """Return the clients with the given names, or all that are run. Raises ``SystemExit`` for a
    name that the table lacks."""
    table = read_table()
    if unknown := [name for name in names if name not in table]:
        raise SystemExit(f"no client is named {unknown[0]!r}; known are {', '.join(table)}")
    chosen = {name: table[name] for name in names or table}
    for name in names:
        if table[name].not_run:
            raise SystemExit(f"{name} is not run: {table[name].not_run}")
    return {name: client for name, client in chosen.items() if client.driver}


def _run_all(chosen: Mapping[str, Client], options: argparse.Namespace) -> int:
    folder = clients_folder()
    failures = _install_all(chosen, folder)
    if options.install_only:
        return 1 if failures else 0
    results: dict[str, Results] = {}
    for target, model in _models(options.target):
        for name, found in _run_target(target, model, chosen, folder, failures):
            before = results.get(name, Results(chosen[name].packages, {}))
            results[name] = replace(before, targets={**before.targets, target: found})
            if options.record:
                _record(name, results[name])
    _show_table(results)
    every = [
        one
        for found in results.values()
        for part in found.targets.values()
        for one in part.values()
    ]
    return 1 if failures or any(one != WORKS for one in every) else 0


def _record(name: str, found: Results) -> None:
    """Write what was seen now; what was seen of other targets with the same packages stays."""
    known = read_results()
    before = known.get(name)
    if before is not None and before.packages == found.packages:
        found = replace(found, targets={**before.targets, **found.targets})
    write_results({**known, name: found})


def _models(target: str) -> Iterator[tuple[str, str]]:
    """Yield each target that is asked for, with its model; an empty model means the scripted
    one."""
    if target != SMOLLM2:
        yield SCRIPTED, ""
    if target != SCRIPTED:
        if model := find_smollm2():
            yield SMOLLM2, model
        else:
            console.print(f"SmolLM2 is left out: run edgespec pull {_PAIR}, or set EDGESPEC_MODELS")


def _install_all(chosen: Mapping[str, Client], folder: Path) -> dict[str, str]:
    """Install what is missing. Return why clients could not be installed."""
    failures = dict[str, str]()
    for name, client in chosen.items():
        environment = folder / name
        if is_installed(client, environment):
            continue
        began = time.monotonic()
        console.print(f"installing {name}: {' '.join(client.packages)}")
        try:
            install(client, environment)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            failures[name] = _shorten(str(error))
            console.print(f"  failed: {failures[name]}", style="red")
        else:
            console.print(f"  done in {time.monotonic() - began:.0f} s")
    return failures


def _run_target(
    target: str, model: str, chosen: Mapping[str, Client], folder: Path, failures: Mapping[str, str]
) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield what each client showed against one target."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        if target == SCRIPTED:
            model = str(scripted_model.write_model(Path(made) / SCRIPTED))
        with serve_target(target, model, Path(made)) as served:
            console.print(f"{target}: {served.url}")
            for name, client in chosen.items():
                parts = parts_for(client, target)
                if not parts:
                    continue
                if name in failures:
                    why = f"not installed: {failures[name]}"
                    yield name, dict.fromkeys(parts, why)
                    continue
                began = time.monotonic()
                found = run_client(name, client, served, folder / name)
                failed = [part for part, one in found.items() if one != WORKS]
                state = f"failed: {', '.join(failed)}" if failed else "works"
                console.print(f"  {name:18} {time.monotonic() - began:5.0f} s  {state}")
                yield name, found


def _show_table(results: Mapping[str, Results]) -> None:
    table = Table(
        "client", "packages", "target", "parts that work", "what failed", show_lines=False
    )
    for name, found in results.items():
        for target, parts in found.targets.items():
            works = [part for part, one in parts.items() if one == WORKS]
            failed = dict[str, list[str]]()
            for part, one in parts.items():
                if one != WORKS:
                    failed.setdefault(one, []).append(part)
            reasons = [f"{' '.join(which)}: {why}" for why, which in failed.items()]
            packages = " ".join(found.packages)
            table.add_row(name, packages, target, " ".join(works), "\n".join(reasons))
    wide = Console(highlight=False, markup=False)
    wide.width = max(wide.width, _LEAST_WIDTH)
    wide.print(table)


if __name__ == "__main__":
    sys.exit(main())
