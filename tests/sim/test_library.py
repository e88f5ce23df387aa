"""The simulator as a library, and bundles of results.

Oracles: what the command writes for the same seeds; the same run in this process and in several; an
own part that does what the scenario's part does gives the same numbers, and one that does something
else changes what it must change. The examples of the documentation run as they stand.
"""

from __future__ import annotations

import builtins
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import edgespec_sim as sim
from edgespec.config import ConfigError
from edgespec.core.association.policies import VerifierView
from edgespec.core.device.goodput_policy import make_policy
from edgespec_sim import bundle as bundles
from edgespec_sim import playing
from edgespec_sim.commands import play as player
from edgespec_sim.commands.main import app
from edgespec_sim.library import make_frame
from edgespec_sim.links.path import Link
from edgespec_sim.run_summary import RunSummary
from edgespec_sim.scenario.sections import load_scenario
from edgespec_sim.scenario.verifiers import Operation, law_of
from edgespec_sim.token_sources.source import TokenSource
from edgespec_sim.world.run import make_token_source
from tests.present import require
from tests.sources import ROOT

SHORT: dict[str, Any] = {
    "duration_s": 4,
    "arms": ["target-only", "edgespec"],
    "devices.laptop.workload.output_tokens": 20,
}
LIBRARY_PAGE = ROOT / "docs" / "simulator-library.md"
NOTEBOOKS = ROOT / "docs" / "notebooks"


def run(name: str = "single-device", **more: Any) -> sim.RunResult:
    return sim.run(name, **{"seeds": 1, "processes": 1, **SHORT, **more})


def numbers_of(summary: RunSummary) -> Any:
    """Return what was measured, without versions and commands."""
    return json.loads(summary.to_json())["arms"]


# --- runs and sweeps --------------------------------------------------------------------------


def test_it_measures_what_the_command_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "default_processes", lambda: 1)
    sets = [
        word
        for key, value in {**SHORT, "arms": "[target-only, edgespec]"}.items()
        for word in ("--set", f"{key}={value}")
    ]
    arguments = ["run", "single-device", "--seeds", "2", "--out", str(tmp_path), *sets]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert numbers_of(run(seeds=2).summary) == written["arms"]


def test_processes_do_not_change_a_number() -> None:
    here, there = run(seeds=2), run(seeds=2, processes=2)
    assert numbers_of(here.summary) == numbers_of(there.summary)
    assert here.requests == there.requests


def add_up(values: Iterable[Any], start: Any = 0) -> Any:
    """Add up as ``sum`` does until Python 3.11: with a rounding at each step."""
    for value in values:
        start = start + value
    return start


def add_up_compensated(values: Iterable[Any], start: Any = 0) -> Any:
    """Add up as ``sum`` does from Python 3.12 on: floats with their rounding errors kept
    (Neumaier 1974)."""
    kept, listed = 0.0, list(values)
    if not any(isinstance(one, float) for one in (start, *listed)):
        return add_up(listed, start)
    for value in listed:
        total = start + value
        larger, smaller = (start, value) if abs(start) >= abs(value) else (value, start)
        kept += (larger - total) + smaller
        start = total
    return start + kept


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        ("household", {"duration_s": 3}),
        (
            "full-verifier",
            {
                "duration_s": 4,
                "warm_up_s": 1,
                "drain_s": 0,
                "devices.laptop.count": 6,
                "devices.laptop.workload.output_tokens": 30,
                "devices.laptop.workload.start_within_s": 1,
            },
        ),
        ("mec", {"duration_s": 3}),
    ],
    ids=["devices", "server drafts", "cells"],
)
def test_no_number_depends_on_how_python_rounds_sums(
    scenario: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two versions of Python give the same numbers. Oracle: ``sum`` of either version, in one."""
    assert add_up([0.1] * 10) != add_up_compensated([0.1] * 10) == 1.0
    found = []
    for builtin in (add_up, add_up_compensated):
        monkeypatch.setattr(builtins, "sum", builtin)
        result = sim.run(scenario, seeds=2, processes=1, **settings)
        found.append((numbers_of(result.summary), result.requests))
        monkeypatch.undo()
    assert found[0] == found[1]


def test_requests_are_those_of_every_arm_and_seed() -> None:
    result = run(seeds=3)
    for arm in result.summary.arms:
        mine = [one for one in result.requests if one.arm == arm.arm]
        assert {one.seed for one in mine} == {1, 2, 3}
        assert sum(one.row.tokens for one in mine) == arm.all.tokens
        # A way takes at least half of the round trip and the message's own time (0.3 ms).
        assert min(require(one.row.up_way_s) for one in mine if one.row.up_way_s) >= 0.0253
        up_bytes = sum(one.row.up_bytes for one in mine)
        assert up_bytes / arm.all.tokens == pytest.approx(arm.all.up_bytes_per_token)


def test_a_trace_is_kept_on_request() -> None:
    result = run(trace=True)
    assert {line["side"] for line in result.trace} == {"device", "verifier"}
    assert run().trace == ()


def test_keys_have_dots_or_double_underscores() -> None:
    dotted: dict[str, Any] = {"links.internet.rtt_ms": 5}
    one = run(**dotted)
    other = run(links__internet__rtt_ms=5)
    assert numbers_of(one.summary) == numbers_of(other.summary) != numbers_of(run().summary)


def test_none_is_the_null_of_a_key() -> None:
    """A rule that needs null: a cost names one of its sources, and tokens of a tape no
    acceptance."""
    roofline = "llama-3.1-8b-bf16@h200"
    result = run(
        verifiers__server__pass_time__ms=None,
        verifiers__server__pass_time__roofline=roofline,
        tokens__acceptance=None,
    )
    assert result.scenario.tokens.acceptance is None
    assert result.scenario.verifiers["server"].pass_time.roofline == roofline
    with pytest.raises(ConfigError, match=r"pass_time\.ms, profile, roofline: one of these"):
        run(verifiers__server__pass_time__roofline=roofline)


def test_a_scenario_may_be_an_object() -> None:
    loaded = load_scenario("single-device", SHORT)
    result = sim.run(loaded, seeds=1, processes=1)
    assert numbers_of(result.summary) == numbers_of(run().summary)
    shorter = sim.run(loaded, seeds=1, processes=1, duration_s=2.0, arms=["target-only"])
    assert shorter.scenario.duration_s == 2.0
    assert [one.arm for one in shorter.summary.arms] == ["target-only"]
    with pytest.raises(ValueError, match=r"links\.internet\.rtt_ms changes a part of a Scenario"):
        sim.run(loaded, seeds=1, links__internet__rtt_ms=5)


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"links__internet__delay_ms": 5}, ConfigError, "delay_ms"),
        ({"duration_s": -1}, ConfigError, "duration_s"),
        ({"arms": ["fastest"]}, ConfigError, "fastest"),
        ({"processes": 0}, ValueError, "processes is 0"),
    ],
    ids=["unknown key", "value", "arm", "processes"],
)
def test_a_wrong_argument_is_named(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        run(**given)


def test_an_unknown_arm_names_the_known_ones() -> None:
    with pytest.raises(KeyError, match="no arm 'both': the run has target-only, edgespec"):
        run().arm("both")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_watcher_follows_and_cancels(processes: int) -> None:
    seen: list[sim.PlayProgress] = []
    run(seeds=2, processes=processes, progress=seen.append)
    assert seen[0].is_new_round
    assert seen[0].done_s == 0.0
    done_s = [one.done_s for one in seen]
    assert done_s == sorted(done_s)
    assert all(one.done_s <= one.total_s for one in seen)

    class EnoughError(Exception):
        pass

    def stop(progress: sim.PlayProgress) -> None:
        if progress.done_s > 0.0:
            raise EnoughError

    with pytest.raises(EnoughError):
        run(seeds=2, processes=processes, progress=stop)


def test_a_sweep_is_a_grid_of_runs() -> None:
    vary: dict[str, Sequence[object]] = {
        "links.internet.rtt_ms": [5, 50],
        "tokens.acceptance": [0.5, 0.9],
    }
    grid = sim.sweep("single-device", vary, seeds=1, processes=1, **SHORT)
    assert [tuple(point.varied.values()) for point in grid.points] == [
        (5, 0.5),
        (5, 0.9),
        (50, 0.5),
        (50, 0.9),
    ]
    alone = run(links__internet__rtt_ms=50, tokens__acceptance=0.5)
    assert numbers_of(grid.points[2].summary) == numbers_of(alone.summary)
    rows = grid.frame() if isinstance(grid.frame(), list) else grid.frame().to_dict("records")
    assert [(row["tokens.acceptance"], row["arm"]) for row in rows[:3]] == [
        (0.5, "target-only"),
        (0.5, "edgespec"),
        (0.9, "target-only"),
    ]
    with pytest.raises(ValueError, match="the grid has 10001 points, but the limit is 10000"):
        sim.sweep("single-device", {"gamma": range(10_001)})


def test_a_run_can_be_written_as_the_command_writes_it(tmp_path: Path) -> None:
    result = run()
    written = {path.name for path in sim.write_run(result, tmp_path / "out")}
    assert {"summary.json", "report.html", "arms.csv", "requests.csv"} <= written
    with pytest.raises(ValueError, match="holds another run"):
        sim.write_run(result, tmp_path / "out")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_are_those_of_the_library_that_is_installed(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of the library shows that it is used, and how it is called."""

    class DataFrame(list[Any]):
        def __init__(self, rows: list[Any], **more: Any) -> None:
            super().__init__(rows)

        @classmethod
        def from_records(cls, rows: list[Any]) -> DataFrame:
            return cls(rows)

    installed = ModuleType(library)
    monkeypatch.setattr(installed, "DataFrame", DataFrame, raising=False)
    monkeypatch.setattr(
        "edgespec_sim.library.importlib",
        SimpleNamespace(
            util=SimpleNamespace(find_spec=lambda name: name if name == library else None),
            import_module=lambda name: {library: installed}[name],
        ),
    )
    frame = make_frame([{"a": 1}])
    assert isinstance(frame, DataFrame)
    assert list(frame) == [{"a": 1}]


def test_plans_answer() -> None:
    plan = sim.plan_link(rtt_ms=20.0, acceptance=0.9, server_draft_ms=0.0, seeds=1, processes=1)
    assert plan.advice.arm.value == "edgespec"
    answer = sim.plan_capacity(
        users=4,
        tpot_p95_ms=60.0,
        ttft_p95_ms=800.0,
        max_seconds=1.0,
        processes=1,
        devices__laptop__workload__output_tokens=40,
    )
    assert answer["users"] == 4
    assert answer["verifiers"] == 1
    with pytest.raises(ValueError, match="either --users or --rate"):
        sim.plan_capacity(tpot_p95_ms=60.0)


def test_a_script_needs_no_guard(tmp_path: Path) -> None:
    """Each process that plays worlds would otherwise begin the script again."""
    script = tmp_path / "script.py"
    script.write_text(
        "import edgespec_sim as sim\n"
        "print('begun', flush=True)\n"
        f"result = sim.run('single-device', seeds=2, processes=2, **{SHORT!r})\n"
        "print(len(result.summary.arms), flush=True)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "begun\n2\n", done.stderr


# --- own parts --------------------------------------------------------------------------------


class SameTime:
    """The pass time of ``single-device``, as an own law."""

    def seconds(
        self, rows: int, context_length: int = 0, chance: float = 0.5, sessions: int = 1
    ) -> float:
        cost = load_scenario("single-device").verifiers["server"].pass_time
        law = law_of(cost, Operation.TARGET_PASS, Path())
        return law.seconds(rows, context_length, chance, sessions)


class SameTokens:
    def make_source(self, seed: int) -> TokenSource:
        return make_token_source(load_scenario("single-device"), seed, Path())


class SameAssociation:
    def rank(self, device: str, verifiers: Sequence[VerifierView]) -> Sequence[str]:
        return [min(verifiers, key=lambda one: (one.round_s, one.sessions)).address]


class Wire:
    """A link that takes half of ``rtt_s`` each way and has no queue."""

    def __init__(self, rtt_s: float) -> None:
        self.rtt_s = rtt_s

    def make_links(self, device: int, seed: int) -> tuple[Link, Link]:
        return self, self

    def arrival(self, now_s: float, size_bytes: int, /) -> float:
        return now_s + self.rtt_s / 2


class Impatient:
    """Two requests without a pause."""

    def next_request(self, device: int, number: int, dice: random.Random) -> sim.NextRequest | None:
        return sim.NextRequest(0.0, 10, 5) if number < 2 else None


@pytest.mark.parametrize(
    "parts",
    [
        sim.Parts(policy=make_policy()),
        sim.Parts(pass_times={"server": SameTime()}),
        sim.Parts(token_source=SameTokens()),
    ],
    ids=["policy", "pass time", "tokens"],
)
def test_an_own_part_with_the_same_behaviour_changes_nothing(parts: sim.Parts) -> None:
    ours, theirs = run(parts=parts), run()
    assert numbers_of(ours.summary) == numbers_of(theirs.summary)
    (note,) = [one for one in ours.summary.notes if one.startswith("Own parts")]
    assert parts.names[0] in note


def test_an_own_association_is_used() -> None:
    same = sim.run(
        "mec", seeds=1, processes=1, duration_s=3.0, parts=sim.Parts(association=SameAssociation())
    )
    theirs = sim.run("mec", seeds=1, processes=1, duration_s=3.0)
    assert numbers_of(same.summary) == numbers_of(theirs.summary)

    class Nowhere:
        def rank(self, device: str, verifiers: Sequence[VerifierView]) -> Sequence[str]:
            return ["nowhere"]

    with pytest.raises(ValueError, match="ranked \\['nowhere'\\], but offered were"):
        sim.run("mec", seeds=1, duration_s=3.0, parts=sim.Parts(association=Nowhere()))


def test_an_own_link_takes_its_time() -> None:
    result = run(parts=sim.Parts(links={"internet": Wire(0.3)}))
    for one in result.requests:
        # The way, and 0.3 ms of a message.
        assert one.row.up_way_s == pytest.approx(0.1503)
        assert require(one.row.ttft_s) > 0.3


def test_an_own_workload_decides_what_users_send() -> None:
    result = run(parts=sim.Parts(workloads={"laptop": Impatient()}))
    assert [one.row.tokens for one in result.requests if one.arm == "target-only"] == [5, 5]


def test_parts_of_the_script_itself_are_played_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process could not import a class of ``__main__`` or of a function."""
    played: list[int] = []
    workers = playing.Workers

    def count(processes: int, *rest: Any, **more: Any) -> playing.Workers:
        played.append(processes)
        return workers(processes, *rest, **more)

    class Local(SameTime):
        pass

    monkeypatch.setattr("edgespec_sim.library.Workers", count)
    run(processes=2, parts=sim.Parts(pass_times={"server": Local()}))
    run(processes=2, parts=sim.Parts(pass_times={"server": SameTime()}))
    assert played == [1, 2]


@pytest.mark.parametrize(
    ("parts", "more", "text"),
    [
        (sim.Parts(links={"wan": Wire(0.1)}), {}, "parts.links has 'wan', .* has internet"),
        (sim.Parts(pass_times={"gpu": SameTime()}), {}, "parts.pass_times has 'gpu'"),
        (sim.Parts(workloads={"phone": Impatient()}), {}, "parts.workloads has 'phone'"),
        (
            sim.Parts(links={"internet": Wire(0.1)}),
            {"links__internet__loss": 0.1},
            "a loss or a trace",
        ),
        (
            sim.Parts(links={"internet": Wire(0.1)}),
            {"links__air": {"loss": 0.1}, "devices__laptop__path": ["air", "internet"]},
            "packets are lost on air",
        ),
        (
            sim.Parts(workloads={"laptop": Impatient()}),
            {"arrivals__rate": 1.0},
            "with arrivals users do not think",
        ),
        (
            sim.Parts(pass_times={"server": SameTime()}),
            {"verifiers__server__stages": {"nodes": 2}},
            "layers lie on several machines",
        ),
    ],
    ids=["link", "pass time", "workload", "loss", "path", "arrivals", "stages"],
)
def test_a_part_without_a_place_is_refused(
    parts: sim.Parts, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        run(parts=parts, **more)


# --- documentation ----------------------------------------------------------------------------

_BLOCKS = re.findall(r"```python\n(.*?)```", LIBRARY_PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("block", _BLOCKS, ids=range(len(_BLOCKS)))
def test_an_example_of_the_page_runs(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example plays as it stands, but for one seed of a few seconds."""
    played: list[sim.RunResult] = []
    real: Callable[..., sim.RunResult] = sim.run

    def brief(scenario: str, **more: Any) -> sim.RunResult:
        played.append(real(scenario, **{**more, "seeds": 1, "duration_s": 4.0, "processes": 1}))
        return played[-1]

    monkeypatch.setattr("edgespec_sim.library.run", brief)
    exec(block, {"sim": sim})
    (result,) = played
    assert all(one.all.tokens for one in result.summary.arms)
    assert all(not one.all.mismatches for one in result.summary.arms)


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    notebook = json.loads((NOTEBOOKS / "ping_to_plot.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]
    plotting = [line for cell in cells[:2] for line in cell.splitlines() if line.strip()]
    assert len(plotting) <= 15
    (tmp_path / "office.ping.txt").write_bytes((NOTEBOOKS / "office.ping.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    real: Callable[..., sim.RunResult] = sim.run
    monkeypatch.setattr(
        "edgespec_sim.library.run",
        lambda *given, **more: real(*given, **{**more, "seeds": 8, "duration_s": 6.0}),
    )
    for cell in cells:
        exec(cell, names)
    assert len(names["values"]) == 3
    assert (tmp_path / "office.zip").is_file()


# --- bundles ----------------------------------------------------------------------------------

PING = "\n".join(
    f"64 bytes from 192.0.2.1: icmp_seq={number} ttl=60 time={20 + number % 7}.5 ms"
    for number in range(1, 40)
)


def rewrite(path: Path, change: Callable[[str, bytes], bytes]) -> None:
    """Change members of a zip file."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, change(name, content))


def make_bundle(folder: Path) -> Path:
    """Write a bundle of a run on a ping log, and remove the log."""
    log = folder / "ride.ping.txt"
    log.write_text(PING, encoding="utf-8")
    traced: dict[str, Any] = {
        "links__internet__trace": "ride.ping.txt",
        "links__internet__rtt_ms": 0,
    }
    result = run(seeds=2, folder=folder, **traced)
    sim.write_bundle(folder / "out.zip", result)
    log.unlink()
    return folder / "out.zip"


def test_a_bundle_is_played_again_bit_for_bit(tmp_path: Path) -> None:
    found = sim.rerun(make_bundle(tmp_path), processes=1)
    assert found.is_same
    assert found.compared > 500
    assert found.about == f"the same, bit for bit: {found.compared:,} values"


def test_equal_runs_make_equal_bundles(tmp_path: Path) -> None:
    result = run()
    for name in ("a.zip", "b.zip"):
        sim.write_bundle(tmp_path / name, result)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


def test_both_directions_of_a_packet_trace_are_stored(tmp_path: Path) -> None:
    for suffix in ("up", "down"):
        text = "".join(f"{ms}\n" for ms in range(2, 4000, 2))
        (tmp_path / f"cell.{suffix}").write_text(text, encoding="utf-8")
    traced: dict[str, Any] = {"links__internet__trace": "cell.up", "links__internet__rtt_ms": 10}
    sim.write_bundle(tmp_path / "out.zip", run(folder=tmp_path, **traced))
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        stored = {name for name in archive.namelist() if name.startswith("files/")}
    assert {Path(name).suffix for name in stored} == {".up", ".down"}
    for suffix in ("up", "down"):
        (tmp_path / f"cell.{suffix}").unlink()
    assert sim.rerun(tmp_path / "out.zip", processes=1).is_same


def test_a_changed_number_is_found(tmp_path: Path) -> None:
    path = make_bundle(tmp_path)

    def change(name: str, content: bytes) -> bytes:
        if name != "summary.json":
            return content
        summary = json.loads(content)
        summary["arms"][1]["all"]["tokens"] += 1
        summary["arms"][0]["all"]["tokens_per_pass"] *= 1 + 1e-12
        return json.dumps(summary).encode()

    rewrite(path, change)
    found = sim.rerun(path, processes=1)
    assert (found.differing, found.rounded) == (2, 1)
    assert not found.is_rounding_only
    assert "arms[1].all.tokens: " in " ".join(found.differences)
    assert found.about.startswith("not the same: 2 of")


def test_rounding_alone_is_told_apart(tmp_path: Path) -> None:
    path = make_bundle(tmp_path)

    def change(name: str, content: bytes) -> bytes:
        if name != "requests.jsonl":
            return content
        rows = [json.loads(line) for line in content.splitlines()]
        rows[0]["ttft_s"] *= 1 + 1e-13
        return b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    rewrite(path, change)
    found = sim.rerun(path, processes=1)
    assert (found.is_same, found.is_rounding_only) == (False, True)


def test_a_file_over_the_bound_must_be_at_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "MAX_FILE_BYTES", 100)
    log = tmp_path / "ride.ping.txt"
    log.write_text(PING, encoding="utf-8")
    result = run(folder=tmp_path, links__internet__trace=str(log), links__internet__rtt_ms=0)
    path = tmp_path / "out.zip"
    sim.write_bundle(path, result)
    assert sim.rerun(path, processes=1).is_same
    log.write_text(PING.replace("20.5", "21.5"), encoding="utf-8")
    with pytest.raises(sim.BundleError, match="SHA-256"):
        sim.rerun(path)
    log.unlink()
    with pytest.raises(sim.BundleError, match="too large for the bundle and is not here"):
        sim.rerun(path)


def test_own_parts_have_no_bundle(tmp_path: Path) -> None:
    result = run(parts=sim.Parts(pass_times={"server": SameTime()}))
    with pytest.raises(sim.BundleError, match="a bundle cannot hold code"):
        sim.write_bundle(tmp_path / "out.zip", result)


def not_a_zip(path: Path) -> None:
    path.write_bytes(b"PK, but not a zip file")


def another_format(path: Path) -> None:
    rewrite(path, lambda name, content: content.replace(b'"version": 1', b'"version": 9'))


def no_summary(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    del members["summary.json"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (not_a_zip, "not readable as a bundle"),
        (another_format, "not a bundle of format edgespec-bundle version 1"),
        (no_summary, "not readable as a bundle"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_bundle_is_named(
    damage: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    path = tmp_path / "out.zip"
    sim.write_bundle(path, run())
    damage(path)
    with pytest.raises(sim.BundleError, match=text):
        sim.rerun(path)


def test_a_member_that_is_huge_when_unpacked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.zip"
    sim.write_bundle(path, run())
    monkeypatch.setattr(bundles, "_MAX_MEMBER_BYTES", 50)
    with pytest.raises(sim.BundleError, match="but the limit is 50"):
        sim.rerun(path)


def test_stored_names_stay_in_the_folder(tmp_path: Path) -> None:
    """A stranger's bundle may name any path for its files."""
    path = make_bundle(tmp_path)

    def change(name: str, content: bytes) -> bytes:
        if name != "bundle.json":
            return content
        head = json.loads(content)
        entry = head["files"]["links.internet.trace"]
        entry["stored"] = ["../../outside.txt"]
        return json.dumps(head).encode()

    rewrite(path, change)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../../outside.txt", PING)
    assert sim.rerun(path, processes=1).is_same
    assert not list(tmp_path.parent.glob("**/outside.txt"))


def test_the_commands_write_and_play_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(player, "default_processes", lambda: 1)
    monkeypatch.setattr(playing, "default_processes", lambda: 1)
    path = tmp_path / "out.zip"
    sets = ["--set", "duration_s=3", "--set", "arms=[target-only, edgespec]"]
    runner = CliRunner()
    out = str(tmp_path / "run")
    arguments = ["run", "single-device", "--seed", "3", "--bundle", str(path), "--out", out, *sets]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "bundle: out.zip" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    done = runner.invoke(app, ["rerun", str(path)])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("the same, bit for bit: ")

    def change(name: str, content: bytes) -> bytes:
        return content.replace(b'"tokens": ', b'"tokens": 1') if name == "summary.json" else content

    rewrite(path, change)
    done = runner.invoke(app, ["rerun", str(path)])
    assert done.exit_code == 1
    assert "arms[0].all.tokens: " in done.stdout
    assert runner.invoke(app, ["rerun", str(tmp_path / "none.zip")]).exit_code == 1


def test_a_commit_is_that_of_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip("no git checkout: there is no commit to compare with")
    assert bundles.find_commit().rstrip("+") == done.stdout.strip()
    monkeypatch.setenv("PATH", "")
    assert bundles.find_commit() == ""


def test_a_result_keeps_its_scenario() -> None:
    result = run()
    assert result.scenario == replace(load_scenario("single-device", SHORT))
