"""The pages as a site: every page is in the navigation, lists are made from it, links are rewritten
for the site, and the README keeps its size, its first screen and the figures of the measurements.

Oracle: the navigation in ``mkdocs.yml``, the tables of the pages of measurements, and MkDocs itself
where it is installed.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import edgespec
from tests.sources import ROOT
from tools import site_pages, write_index

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_page_is_in_the_navigation() -> None:
    listed = [page.path for page in write_index.read_pages()]
    assert len(listed) == len(set(listed))
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    inside = {path for path in listed if path.startswith("docs/")}
    missing = pages - inside - {"docs/README.md"}
    assert not missing, (
        f"add them to nav in mkdocs.yml, then run: python -m tools.write_index: {missing}"
    )
    assert not inside - pages


def test_lists_of_pages_are_current() -> None:
    run = "run: python -m tools.write_index"
    assert write_index.INDEX.read_text(encoding="utf-8") == write_index.write_page(), run
    assert write_index.LLMS.read_text(encoding="utf-8") == write_index.write_llms(), run


def test_the_list_for_language_models_has_the_form_of_llmstxt_org() -> None:
    lines = write_index.write_llms().splitlines()
    assert re.fullmatch(r"# \S.*", lines[0])
    assert re.fullmatch(r"> \S.*", lines[2])
    behind = [line for line in lines[3:] if line]
    assert all(re.fullmatch(r"## .+|- \[[^\]]+\]\([^)\s]+\): .+", line) for line in behind)


@pytest.mark.parametrize(
    ("page", "link", "on_the_site"),
    [
        ("docs/cli.md", "operator-guide.md#keys", "operator-guide.md#keys"),
        ("docs/cli.md", "../benchmarks/README.md", "repository/benchmarks/README.md"),
        (
            "docs/endpoint/limits.md",
            "../../deploy/README.md#a-device",
            "../repository/deploy/README.md#a-device",
        ),
        ("docs/endpoint/limits.md", "../cli.md", "../cli.md"),
        ("deploy/README.md", "../docs/memory.md", "../../memory.md"),
        ("deploy/README.md", "envoy/envoy.yaml", "envoy/envoy.yaml"),
        ("README.md", "docs/idea.md", "../idea.md"),
        ("docs/cli.md", "https://example.org/a.md", "https://example.org/a.md"),
        ("docs/cli.md", "#models", "#models"),
    ],
)
def test_a_link_leads_to_its_place_on_the_site(page: str, link: str, on_the_site: str) -> None:
    assert site_pages.rewrite(f"a [b]({link}) c", page) == f"a [b]({on_the_site}) c"
    fenced = f"```\n[b]({link})\n```"
    assert site_pages.rewrite(fenced, page) == fenced


def test_code_in_tables_has_its_pipes_as_they_are() -> None:
    assert site_pages.unescape_pipes("| `a\\|b` | c |\nd `e\\|f`") == "| `a|b` | c |\nd `e\\|f`"


def test_files_that_pages_link_to_come_along() -> None:
    found = site_pages.find_outside_files()
    assert {"CHANGELOG.md", "deploy/README.md", "benchmarks/README.md"} <= set(found)
    assert not [path for path in found if path.startswith("docs/")]


def _mkdocs() -> list[str]:
    """Return the command of MkDocs here or in the environment of ``make docs``; skip without."""
    if importlib.util.find_spec("mkdocs") and importlib.util.find_spec("material"):
        return [sys.executable, "-m", "mkdocs"]
    if beside := shutil.which("mkdocs", path=str(ROOT / ".venv-docs" / "bin")):
        return [beside]
    pytest.skip("MkDocs is not installed: make docs")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    # With --quiet warnings would not count.
    command = [*_mkdocs(), "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    assert (tmp_path / "site/measurements/speed/index.html").is_file()
    assert (tmp_path / "site/llms.txt").is_file()
    assert (tmp_path / "site/repository/deploy/README.md").is_file()


# --- the version ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "pattern"),
    [
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("CITATION.cff", r"^version: (.+)$"),
        ("deploy/README.md", r"edgespec/(?:verifier|device):(\S+)"),
        ("deploy/compose.yaml", r"edgespec/(?:verifier|device):(\S+)"),
        ("deploy/docker/device.Dockerfile", r"edgespec/device:(\S+)"),
        ("deploy/docker/verifier.Dockerfile", r"edgespec/verifier:(\S+)"),
        ("deploy/kubernetes/base/statefulset.yaml", r"edgespec/verifier:(\S+)"),
        ("deploy/kubernetes/overlays/public/kustomization.yaml", r"newTag: (\S+)"),
    ],
)
def test_there_is_one_version(path: str, pattern: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    found = re.findall(pattern, text, re.MULTILINE)
    assert found
    assert set(found) == {edgespec.__version__}


def test_the_changelog_begins_with_what_is_to_come_and_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[(.+?)\](?: - \d{4}-\d\d-\d\d)?$", changelog, re.MULTILINE)
    assert headings[:2] == ["Unreleased", edgespec.__version__]


# --- the README ---------------------------------------------------------------------------------


def test_the_readme_is_short_and_begins_with_what_a_visitor_needs() -> None:
    assert len(README.splitlines()) <= 150
    screen = README.splitlines()[:18]
    first = "\n".join(screen)
    assert "docs/pictures/race.svg" in first
    (commands,) = re.findall(r"```sh\n(.*?)```", first, re.DOTALL)
    assert len(commands.splitlines()) == 3
    assert re.search(r"^\*\*\d\.\d+ times as fast\*\*", first, re.MULTILINE)


def cells(page: str, *row: str) -> list[str]:
    """Return the cells of a table's row that begins with ``row``, its first numbers alone."""
    for line in (ROOT / "docs/measurements" / page).read_text(encoding="utf-8").splitlines():
        found = [cell.strip(" *") for cell in line.strip().strip("|").split("|")]
        if found[: len(row)] == list(row):
            return [re.split(r"[ ×]", cell.strip("* "))[0] for cell in found[len(row) :]]
    raise AssertionError(f"{page} has no row that begins with {row}")


SPEED, RTTS = "speed.md", ("2", "20", "50", "100", "200")
PREDICTION = cells("edits.md", "in the prediction", "the device")[0:5:2]
ALL_RTTS = "{} times as fast at 2 ms, {} at 20, {} at 50, {} at 100, {} at 200"
WHO = ("server alone", "both")
# Each text is in the README, and what is in its table is in the longer table of the page too.
IN_BOTH = {
    "the device alone": (
        f"| {ALL_RTTS}",
        [cells(SPEED, rtt, "device alone")[1] for rtt in RTTS],
    ),
    "a draft in 8 bits": (f"| {ALL_RTTS} |", [cells(SPEED, "0", rtt)[0] for rtt in RTTS]),
    "a prediction": (
        "| {} times as fast at 2 ms, {} at 50, {} at 200 without any model;",
        [value.removesuffix(".0") for value in PREDICTION],
    ),
    "a corpus": (
        "| {} times as fast at 2 ms, {} at 50, {} at 200 |",
        cells("edits.md", "among the files of `draft.corpus`", "the device")[0:5:2],
    ),
}
IN_README = {
    "the first number": ("**{} times as fast**", [cells(SPEED, "20", "device alone")[1]]),
    "a server that drafts": (
        "is {} times as fast without a device, and {} times with one",
        [cells(SPEED, "20", who)[1] for who in WHO],
    ),
}


@pytest.mark.parametrize("case", [*IN_BOTH, *IN_README])
def test_the_readme_has_the_figures_of_the_tables(case: str) -> None:
    text, values = {**IN_BOTH, **IN_README}[case]
    assert text.format(*values) in README
    if case in IN_BOTH:
        longer = (ROOT / "docs/when-it-helps.md").read_text(encoding="utf-8")
        assert text.format(*values) in longer
