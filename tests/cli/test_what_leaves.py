"""Tests of the files that a command leaves on a machine and of the names that it looks up: only
what its user asked for.

Oracle: each script lists every file that it may leave. No script may look a name up, because its
verifier is given by its loopback address. The variables that silence other libraries are listed in
``edgespec.TELEMETRY_OFF``; child processes, images and units must have them too.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import shlex
from pathlib import Path

import pytest

import edgespec
from tests.kit.live_verifier import run_python
from tests.kit.lone_machine import run_alone, why_not_alone
from tests.sources import ROOT, list_imports, parse_modules

VERIFIER = "serving verifier --port $PORT; verifier=$!\n"
THE_ONE = "--verifier 127.0.0.1:$PORT"
BUNDLED = ROOT / "edgespec/models/bundled"
COMPLETION = """
"$PYTHON" -c "
import json, sys, urllib.request
body = json.dumps({'model': 'edgespec', 'prompt': 'Hello', 'max_tokens': 8}).encode()
head = {'Content-Type': 'application/json'}
request = urllib.request.Request(sys.argv[1] + '/completions', body, head)
print(urllib.request.urlopen(request).status)
" "${line##* }"
"""
LENT = "home/.cache/edgespec/tokenizers/*"
REMEMBERED = "home/.cache/edgespec/verifiers/*"
"""The target's tokenizer files, which the verifier sends once."""
SIMULATED = ("summary.json", "report.html", "*.csv", "*.json", "*.svg", "*.js", "*.jsonl")
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    # Any file beside the output named in the list is a fault.
    "everyday": (
        f"{VERIFIER}edgespec generate Hello -n 8 {THE_ONE}\n"
        f"edgespec doctor {THE_ONE}\n"
        f"HOME=/dev/null/none edgespec generate Hello -n 8 {THE_ONE}\n"
        f"edgespec generate Hello -n 8 {THE_ONE} --record kept --draft-corpus kept\n"
        "stopped $verifier",
        ("work/kept", "home/.cache/edgespec/corpus/*", LENT, REMEMBERED),
    ),
    "credentials": (
        "edgespec keys add me --file keys.yaml\nedgespec keys list --file keys.yaml\n"
        "edgespec certs ca . && edgespec certs server localhost --ca-dir . --out-dir .\n"
        "edgespec plan link --rtt-ms 80 --acceptance 0.7\n",
        ("work/keys.yaml", "work/*.pem", "work/*.key", "work/*.crt"),
    ),
    "chat": (
        f"{VERIFIER}echo Hello | edgespec chat -n 8 {THE_ONE}\nstopped $verifier",
        ("home/.local/state/edgespec/*", LENT, REMEMBERED),
    ),
    "serve": (
        f"{VERIFIER}serving serve --port 0 {THE_ONE}\n{COMPLETION}stopped $!; stopped $verifier",
        (LENT, REMEMBERED),
    ),
    "demo": ("edgespec demo", (LENT, REMEMBERED)),
    "bench": ("edgespec bench --arms target-only,edgespec,both --limit 1 -n 8 --repeats 1", ()),
    "profile": ("edgespec profile --quick --out profile.json", ("work/profile.json",)),
    "export": (
        f"edgespec export {BUNDLED / 'draft'} draft",
        ("work/draft/*",),
    ),
    "distill": (
        f"edgespec distill --texts {ROOT / 'README.md'} --length 32 --steps 1 --force --out mine",
        ("work/mine/*",),
    ),
    "simulator": (
        "simulator run household --seeds 1 --out out\n",
        tuple(f"work/out/{name}" for name in SIMULATED),
    ),
}
QUICK = ("everyday", "credentials")


def test_the_recorder_sees_files_and_look_ups(tmp_path: Path) -> None:
    script = (
        'touch "$HOME/.trace" && ln -s nowhere "$TMPDIR/link"\n'
        '"$PYTHON" -c \'import socket; socket.getaddrinfo("python.example.test", 1)\' || true\n'
    )
    found = run_alone(script, tmp_path)
    assert found.files == ["home/.trace", "tmp/link"]
    assert found.look_ups == ["python.example.test"]


def test_the_recorder_sees_look_ups_of_native_code(tmp_path: Path) -> None:
    if why := why_not_alone():
        pytest.skip(f"look-ups of native code cannot be recorded: {why}")
    found = run_alone("getent hosts native.example.test || true", tmp_path)
    assert found.look_ups == ["native.example.test"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SCRIPTS]
)
def test_nothing_is_left_and_nobody_looked_for(tmp_path: Path, name: str) -> None:
    script, allowed = SCRIPTS[name]
    found = run_alone(script, tmp_path)
    assert found.exit_code == 0, found.printed
    surplus = [f for f in found.files if not any(fnmatch.fnmatch(f, one) for one in allowed)]
    assert surplus == [], found.printed
    assert found.look_ups == []
    assert "elemetry" not in found.printed


def test_the_variables_win_and_reach_child_processes() -> None:
    """They win over a different value that the user has set, and hold for a library loaded
    later."""
    code = (
        "import edgespec, json, subprocess, sys\n"
        "child = 'import json, os; print(json.dumps(dict(os.environ)))'\n"
        "print(subprocess.check_output([sys.executable, '-c', child], text=True))\n"
    )
    done = run_python("-c", code, env=dict.fromkeys(edgespec.TELEMETRY_OFF, "maybe"))
    seen = json.loads(done.stdout)
    assert {name: seen[name] for name in edgespec.TELEMETRY_OFF} == edgespec.TELEMETRY_OFF


def test_hugging_face_reads_them() -> None:
    code = (
        "import edgespec.models.folders\n"
        "from huggingface_hub import constants\n"
        "print(constants.HF_HUB_DISABLE_TELEMETRY)"
    )
    assert run_python("-c", code).stdout.split()[-1] == "True"


def test_only_one_place_imports_onnxruntime() -> None:
    """Oracle: the syntax tree of every file, tests and benchmarks included. A name given to
    ``import_module`` counts as well."""
    found = set()
    for module in parse_modules():
        if any(one.name.partition(".")[0] == "onnxruntime" for one in list_imports(module)):
            found.add(module.path)
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and "import" in ast.unparse(node.func).split(".")[-1]:
                words = [w.value for w in node.args if isinstance(w, ast.Constant)]
                if any(str(word).partition(".")[0] == "onnxruntime" for word in words):
                    found.add(module.path)
    assert found == {"edgespec/models/onnx_runtime.py"}


def test_onnxruntime_says_no_more_where_it_was_imported_before() -> None:
    """In that case the variable comes too late, so the call that stops its events must still be
    made."""
    code = (
        "import onnxruntime\ncalls = []\nonnxruntime.disable_telemetry_events = lambda: "
        "calls.append(1)\nimport edgespec.device.drafters.onnx_drafter\nprint(len(calls))"
    )
    assert run_python("-c", code).stdout.split() == ["1"]


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "deploy/docker").iterdir()), *sorted((ROOT / "deploy/systemd").glob("*.s*"))],
    ids=lambda path: path.name,
)
def test_images_and_units_have_the_variables(path: Path) -> None:
    """Other programs in the image or unit need the variables too."""
    words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    found = dict(word.removeprefix("Environment=").partition("=")[::2] for word in words)
    assert {name: found.get(name) for name in edgespec.TELEMETRY_OFF} == edgespec.TELEMETRY_OFF
