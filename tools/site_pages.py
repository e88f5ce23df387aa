"""A hook of MkDocs. Files outside ``docs/`` that pages link to become files of the site, below
``repository/``, and links between the two lead there.

Pages are written for both places, so a link such as ``../deploy/README.md`` works in the
repository, and on the site once this hook has rewritten it. The hook also copies every page's
Markdown to its place on the site, for the links of ``llms.txt``. It imports nothing of the project,
since the site is built in an environment of its own.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
DOCS: Final = "docs"
OUTSIDE: Final = "repository"
"""Folder of the site that holds files from outside ``docs/``."""
LINK: Final = re.compile(r"(\]\()([^)\s]+)(\))")
_ROW: Final = re.compile(r"^\|.*$", re.MULTILINE)
_CODE: Final = re.compile(r"`[^`]+`")
_FENCE: Final = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def site_path(repository_path: str) -> str:
    """Return the place on the site of a file of the repository, such as ``cli.md`` for
    ``docs/cli.md`` and ``repository/deploy/README.md`` for ``deploy/README.md``."""
    inside = repository_path.removeprefix(f"{DOCS}/")
    return inside if inside != repository_path else f"{OUTSIDE}/{repository_path}"


def repository_path(site_path: str) -> str:
    """Return the file of the repository that stands at a place of the site."""
    outside = site_path.removeprefix(f"{OUTSIDE}/")
    return outside if outside != site_path else f"{DOCS}/{site_path}"


def read_links(text: str, page: str) -> Iterator[tuple[str, str]]:
    """Yield each relative link of a page as it is written, and the path of the repository that it
    leads to. ``page``: path of the page in the repository."""
    for part in _FENCE.split(text):
        if part.startswith("```"):
            continue
        for _, link, _ in LINK.findall(part):
            path = link.partition("#")[0]
            if path and "://" not in link and not link.startswith(("mailto:", "/")):
                yield link, posixpath.normpath(posixpath.join(posixpath.dirname(page), path))


def find_outside_files(root: Path = ROOT) -> list[str]:
    """Return the files outside ``docs/`` that pages link to, directly or through one another, as
    paths in the repository. A link that leads nowhere is left to the site's own check."""
    found: set[str] = set()
    waiting = [path.relative_to(root).as_posix() for path in (root / DOCS).rglob("*.md")]
    while waiting:
        page = waiting.pop()
        for _, target in read_links((root / page).read_text(encoding="utf-8"), page):
            is_outside = not target.startswith((f"{DOCS}/", "../"))
            if is_outside and target not in found and (root / target).is_file():
                found.add(target)
                if target.endswith(".md"):
                    waiting.append(target)
    return sorted(found)


def rewrite(text: str, page: str) -> str:
    """Return the page's text with relative links as they are on the site. ``page``: its path in the
    repository."""
    here = posixpath.dirname(site_path(page))

    def replace(match: re.Match[str]) -> str:
        links = dict(read_links(match.group(), page))
        if not (target := links.get(match[2])):
            return match.group()
        moved = posixpath.relpath(site_path(target), here or ".")
        anchor = match[2].partition("#")
        return f"{match[1]}{moved}{anchor[1]}{anchor[2]}{match[3]}"

    parts = _FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def unescape_pipes(text: str) -> str:
    """Return a page's text in which code in tables has its pipes as they are. GitHub wants ``\\|``
    there, which Python-Markdown would print."""

    def unescape(row: re.Match[str]) -> str:
        return _CODE.sub(lambda code: code.group().replace("\\|", "|"), row.group())

    return _ROW.sub(unescape, text)


def on_files(files: Any, config: Any) -> Any:
    """Add the files outside ``docs/`` (an event of MkDocs)."""
    # MkDocs is imported by name, since the environment that checks types has none.
    file: Any = importlib.import_module("mkdocs.structure.files").File
    for path in find_outside_files():
        files.append(file.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Prepare the text of a page (an event of MkDocs)."""
    return unescape_pipes(rewrite(markdown, repository_path(page.file.src_uri)))


def on_post_build(config: Any) -> None:
    """Copy the Markdown of every page to the site (an event of MkDocs)."""
    pages = (path.relative_to(ROOT).as_posix() for path in (ROOT / DOCS).rglob("*.md"))
    outside = (path for path in find_outside_files() if path.endswith(".md"))
    for path in (*pages, *outside):
        copy = Path(config["site_dir"]) / site_path(path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy)
