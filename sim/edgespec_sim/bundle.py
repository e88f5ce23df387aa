"""Bundles: a result with everything that made it, in one zip file that anybody can play again.

Layout of the file:

    bundle.json       format, settings, seeds, environment, and the files that the scenario names
    scenario.yaml     the scenario with all its keys
    files/            traces, tapes, profiles and arrivals, under numbers
    summary.json      the results by arm
    requests.jsonl    every request that counts

``rerun`` plays the scenario of a bundle again and compares every number. Worlds are deterministic,
so the same version of the simulator gives the same bits. A file that is too large for the bundle is
recorded by its hash, and has to lie at its old place for a rerun.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import subprocess
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

from edgespec.config.files import open_to_read, read_bytes, replace_file
from edgespec_sim.library import RunResult, make_result
from edgespec_sim.links.network_trace import find_file
from edgespec_sim.playing import (
    SeedPlan,
    Watcher,
    Workers,
    default_processes,
    environment,
    ignore_progress,
    simulate,
)
from edgespec_sim.scenario.sections import Scenario, load_scenario

FORMAT: Final = "edgespec-bundle"
VERSION: Final = 1
MAX_FILE_BYTES: Final = 64 << 20
"""Largest file of a scenario that is stored in a bundle. Larger ones are recorded by their hash."""
MAX_BUNDLE_BYTES: Final = 1 << 30
ROUNDING: Final = 1e-9
"""Relative difference that is put down to the rounding of another version of Python."""
_MAX_DIFFERENCES: Final = 20
_MAX_MEMBER_BYTES: Final = 1 << 28
_PART_BYTES: Final = 1 << 20
_GIT_TIMEOUT_S: Final = 10.0
# Fixed, so that equal results give equal bundles.
_ZIP_DATE: Final = (2026, 1, 1, 0, 0, 0)


class BundleError(ValueError):
    """A bundle cannot be written or read. The message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """The content of a bundle."""

    path: Path
    head: Mapping[str, Any]
    """The content of ``bundle.json``."""
    summary: Mapping[str, Any]
    requests: tuple[Mapping[str, Any], ...]

    @property
    def seed_plan(self) -> SeedPlan:
        """The seeds that were played, as a plan that plays exactly these."""
        return SeedPlan(self.head["first_seed"], self.head["seeds"])


@dataclass(frozen=True, slots=True)
class Comparison:
    """The outcome of a rerun."""

    compared: int
    """Number of values that were compared."""
    differences: tuple[str, ...]
    """Values that differ, as text with both values; at most the first ``_MAX_DIFFERENCES``."""
    differing: int
    """Number of values that differ."""
    rounded: int
    """Number of values that differ by no more than ``ROUNDING``. They are counted in
    ``differing`` too."""
    recorded: Mapping[str, str]
    """Environment of the bundle."""
    found: Mapping[str, str]
    """Environment of the rerun."""

    @property
    def is_same(self) -> bool:
        """Whether every value is the same, bit for bit."""
        return not self.differing

    @property
    def is_rounding_only(self) -> bool:
        """Whether the values that differ do so by rounding alone."""
        return self.differing == self.rounded

    @property
    def about(self) -> str:
        """The verdict in a sentence."""
        if self.is_same:
            return f"the same, bit for bit: {self.compared:,} values"
        if self.is_rounding_only:
            return (
                f"the same but for rounding: {self.differing:,} of {self.compared:,} values differ,"
                f" none by more than {ROUNDING:g} of its size"
            )
        return f"not the same: {self.differing:,} of {self.compared:,} values differ"


# --- writing ----------------------------------------------------------------------------------


def write_bundle(path: Path | str, result: RunResult) -> None:
    """Write a result and what made it to a zip file, in one step. An existing file is replaced.

    Raises:
        BundleError: The result has own parts, whose code a bundle cannot hold, or a file of the
            scenario cannot be read.
        OSError: The bundle cannot be written.
    """
    path, scenario, folder = Path(path), result.scenario, result.folder
    summary = result.summary
    if (own := [note for note in summary.notes if note.startswith("Own parts")]) != []:
        raise BundleError(f"{path}: not written, because a bundle cannot hold code. {own[0]}")
    members: dict[str, bytes] = {}
    files = {}
    for number, (key, name) in enumerate(_list_files(scenario)):
        files[key] = _store_file(members, number, key, name, folder)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "scenario": summary.name,
        "first_seed": summary.seed,
        "seeds": summary.seeds,
        "ask": summary.settings.get("ask"),
        "environment": dict(summary.environment),
        "commit": find_commit(),
        "files": files,
    }
    members["bundle.json"] = _json_bytes(head)
    members["scenario.yaml"] = str(summary.settings["yaml"]).encode()
    members["summary.json"] = summary.to_json().encode()
    rows = [{"arm": one.arm, "seed": one.seed, **asdict(one.row)} for one in result.requests]
    members["requests.jsonl"] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(members):
            info = zipfile.ZipInfo(name, _ZIP_DATE)
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(info, members[name])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, content.getvalue(), 0o644)


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()


def _list_files(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """Yield the key and the value of each setting of a scenario that may name a file."""
    yield "tokens.tape", scenario.tokens.tape
    if scenario.arrivals is not None and scenario.arrivals.file:
        yield "arrivals.file", scenario.arrivals.file
    if scenario.radio is not None and scenario.radio.mobility:
        yield "radio.mobility", scenario.radio.mobility
    for name, link in scenario.links.items():
        if link.trace:
            yield f"links.{name}.trace", link.trace
    for name, device in scenario.devices.items():
        if device.draft.profile:
            yield f"devices.{name}.draft.profile", device.draft.profile
        if device.profile:
            yield f"devices.{name}.profile", device.profile
    for name, verifier in scenario.verifiers.items():
        if verifier.pass_time.profile:
            yield f"verifiers.{name}.pass_time.profile", verifier.pass_time.profile
        if verifier.ran is not None and verifier.ran.file:
            yield f"verifiers.{name}.ran.file", verifier.ran.file


def _store_file(
    members: dict[str, bytes], number: int, key: str, name: str, folder: Path
) -> dict[str, Any]:
    """Add a file of the scenario to ``members``, with the file of the other direction beside it if
    there is one. Returns its entry in the head; without ``stored`` the name is no file but one that
    the simulator knows."""
    path = find_file(name, folder)
    if not path.is_file():
        return {"name": name}
    entry: dict[str, Any] = {"name": name, "sha256": [], "stored": []}
    for one in (path, _other_direction(path)):
        if one is None or not one.is_file():
            continue
        try:
            size = one.stat().st_size
            if size > MAX_FILE_BYTES:
                entry["sha256"].append(_hash_file(one))
                entry["stored"].append("")
                continue
            content = read_bytes(one, MAX_FILE_BYTES)
        except OSError as error:
            raise BundleError(f"{key}: {one}: cannot be read: {error.strerror}") from error
        stored = f"files/{number}-{_safe_name(path)}{one.suffix}"
        members[stored] = content
        entry["sha256"].append(hashlib.sha256(content).hexdigest())
        entry["stored"].append(stored)
    return entry


def _other_direction(path: Path) -> Path | None:
    """Return the file of the other direction of a packet trace (``NAME.up`` and ``NAME.down``)."""
    other = {".up": ".down", ".down": ".up"}.get(path.suffix)
    return None if other is None else path.with_suffix(other)


def _safe_name(path: Path) -> str:
    return "".join(one if one.isalnum() or one in "._-" else "_" for one in path.stem)[:64]


def find_commit() -> str:
    """Return the commit of the checkout that this package runs from, with ``+`` behind it if files
    were changed since. Empty if it runs from an installation or git is missing."""
    command = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--abbrev=40")
    try:
        done = subprocess.run(
            [*command, "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


# --- reading and playing again -----------------------------------------------------------------


def read_bundle(path: Path) -> Bundle:
    """Read a bundle. Raises ``BundleError`` and ``OSError``."""
    if path.stat().st_size > MAX_BUNDLE_BYTES:
        size = path.stat().st_size
        raise BundleError(f"{path}: has {size:,} bytes, but the limit is {MAX_BUNDLE_BYTES:,}")
    try:
        with zipfile.ZipFile(path) as archive:
            head = json.loads(_read_member(archive, "bundle.json"))
            if (head["format"], head["version"]) != (FORMAT, VERSION):
                raise BundleError(f"{path}: not a bundle of format {FORMAT} version {VERSION}")
            summary = json.loads(_read_member(archive, "summary.json"))
            lines = _read_member(archive, "requests.jsonl").splitlines()
            return Bundle(path, head, summary, tuple(json.loads(line) for line in lines))
    except BundleError:
        raise
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError) as error:
        raise BundleError(f"{path}: not readable as a bundle: {error}") from error


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a member of a zip file. Its size is checked first: a small file may hold a huge
    one."""
    size = archive.getinfo(name).file_size
    if size > _MAX_MEMBER_BYTES:
        raise ValueError(f"{name} has {size:,} bytes, but the limit is {_MAX_MEMBER_BYTES:,}")
    return archive.read(name)


def rerun(
    path: Path | str, *, processes: int | None = None, progress: Watcher = ignore_progress
) -> Comparison:
    """Play the scenario of a bundle again, on the same seeds, and compare every value.

    Raises ``BundleError``, ``OSError``, and what ``run`` raises."""
    bundle = read_bundle(Path(path))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        scenario = _unpack(bundle, folder)
        with Workers(processes or default_processes(), progress) as workers:
            point = simulate(scenario, bundle.seed_plan, folder, workers, None)
        result = make_result(point, bundle.seed_plan)
    summary = json.loads(result.summary.to_json())
    rows = [{"arm": one.arm, "seed": one.seed, **asdict(one.row)} for one in result.requests]
    recorded = {"arms": bundle.summary["arms"], "requests": list(bundle.requests)}
    found = {"arms": summary["arms"], "requests": json.loads(json.dumps(rows))}
    differences = list(_compare("", recorded, found))
    return Comparison(
        compared=_count_values(recorded),
        differences=tuple(text for text, _ in differences[:_MAX_DIFFERENCES]),
        differing=len(differences),
        rounded=sum(is_rounding for _, is_rounding in differences),
        recorded={**bundle.head["environment"], "commit": bundle.head["commit"]},
        found={**environment(), "commit": find_commit()},
    )


def _unpack(bundle: Bundle, folder: Path) -> Scenario:
    """Write the files of a bundle into ``folder``, and return its scenario, which names them there.

    Raises ``BundleError`` if a file that the bundle does not hold is missing or was changed."""
    overrides: dict[str, object] = {}
    with zipfile.ZipFile(bundle.path) as archive:
        scenario_file = folder / "scenario.yaml"
        replace_file(scenario_file, _read_member(archive, "scenario.yaml"))
        for key, entry in bundle.head["files"].items():
            for index, stored in enumerate(entry.get("stored", ())):
                if stored:
                    # The name in a stranger's file is not trusted with a path.
                    target = folder / PurePosixPath(stored).name
                    replace_file(target, _read_member(archive, stored))
                else:
                    target = find_file(entry["name"], Path())
                    _check_large_file(bundle.path, key, target, entry["sha256"][index])
                if index == 0:
                    overrides[key] = str(target)
    return load_scenario(str(scenario_file), overrides)


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    with open_to_read(path) as file:
        while part := file.buffer.read(_PART_BYTES):
            digest.update(part)
    return digest.hexdigest()


def _check_large_file(bundle: Path, key: str, path: Path, wanted: str) -> None:
    if not path.is_file():
        raise BundleError(
            f"{bundle}: {key} is {path}, which was too large for the bundle and is not here"
        )
    found = _hash_file(path)
    if found != wanted:
        raise BundleError(f"{bundle}: {key} is {path}, whose SHA-256 is {found}, but was {wanted}")


def _compare(place: str, recorded: Any, found: Any) -> Iterator[tuple[str, bool]]:
    """Yield each value that differs, as text, and whether it differs by rounding alone."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in dict.fromkeys((*recorded, *found)):
            missing = object()
            one, other = recorded.get(name, missing), found.get(name, missing)
            inner = f"{place}.{name}" if place else name
            if one is missing or other is missing:
                yield f"{inner}: only in the {'rerun' if one is missing else 'bundle'}", False
            else:
                yield from _compare(inner, one, other)
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{place}: {len(recorded)} entries in the bundle, {len(found)} now", False
        for index, (one, other) in enumerate(zip(recorded, found, strict=False)):
            yield from _compare(f"{place}[{index}]", one, other)
    elif recorded != found:
        is_rounding = (
            isinstance(recorded, float)
            and isinstance(found, float)
            and math.isclose(recorded, found, rel_tol=ROUNDING, abs_tol=1e-12)
        )
        yield f"{place}: {recorded!r} in the bundle, {found!r} now", is_rounding


def _count_values(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(_count_values, value.values()))
    return sum(map(_count_values, value)) if isinstance(value, list) else 1
