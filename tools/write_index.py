"""Write ``docs/README.md``, the page that lists all pages, and ``docs/llms.txt``, the same list for
language models (https://llmstxt.org), from the navigation in ``mkdocs.yml``.

A page is described by the first sentence behind its title.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import yaml

from tools.site_pages import DOCS, ROOT, repository_path

CONFIG: Final = ROOT / "mkdocs.yml"
INDEX: Final = ROOT / DOCS / "README.md"
LLMS: Final = ROOT / DOCS / "llms.txt"
_ABOUT: Final = (
    "Speculative decoding between an edge device and a GPU server: a small model on the device"
    " drafts, the big model decides, and the output is the big model's own, token for token."
)
_FENCE: Final = "```"


@dataclass(frozen=True, slots=True)
class Page:
    """One page of the navigation. ``path``: in the repository. ``place``: relative to ``docs/``.
    ``section``: the headings above it, such as ``("Use", "Endpoint")``."""

    path: str
    place: str
    section: tuple[str, ...]

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @property
    def title(self) -> str:
        found = re.match(r"# (.+)", self.text)
        if found is None:
            raise ValueError(f"{self.path}: the first line is no title (# ...)")
        return found[1].replace("`", "")

    @property
    def summary(self) -> str:
        """The first sentence behind the title, without links. Raises ``ValueError`` if a page
        begins with a heading, a table, a list or a program."""
        behind = self.text.split("\n", 1)[1].strip()
        paragraph = " ".join(behind.split("\n\n", 1)[0].split())
        if not paragraph or paragraph.startswith(("#", "|", "- ", "* ", "1.", "!", _FENCE)):
            raise ValueError(f"{self.path}: begin with a sentence that says what the page has")
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph).replace("**", "")
        return re.split(r"(?<=[.?])\s", plain, maxsplit=1)[0]


class _Loader(yaml.SafeLoader):
    """YAML loader that reads the names of Python objects in ``mkdocs.yml`` as nothing."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def read_pages() -> list[Page]:
    """Return the pages of the navigation in its order, without ``docs/README.md`` itself."""
    navigation = yaml.load(CONFIG.read_text(encoding="utf-8"), _Loader)["nav"]
    return [page for page in _walk(navigation, ()) if page.place != INDEX.name]


def _walk(items: list[Any], section: tuple[str, ...]) -> Iterator[Page]:
    for item in items:
        if isinstance(item, str):
            path = repository_path(item)
            place = item if path.startswith(f"{DOCS}/") else f"../{path}"
            yield Page(path=path, place=place, section=section)
        else:
            for title, below in item.items():
                yield from _walk(below, (*section, title))


def write_page() -> str:
    """Return the text of ``docs/README.md``."""
    lines = [
        "# edgespec",
        "",
        _ABOUT,
        "",
        "All pages, written by `python -m tools.write_index` from the navigation in `mkdocs.yml`.",
    ]
    section: tuple[str, ...] = ()
    for page in read_pages():
        if page.section != section:
            if page.section[:1] != section[:1]:
                lines += ["", f"## {page.section[0]}"]
            if page.section[1:]:
                lines += ["", f"### {page.section[-1]}"]
            lines.append("")
            section = page.section
        lines.append(f"* [{page.title}]({page.place}): {page.summary}")
    return "\n".join(lines) + "\n"


def write_llms() -> str:
    """Return the text of ``docs/llms.txt``. Links lead to Markdown, in the repository and on the
    site, where files from outside ``docs/`` stand below ``repository/``."""
    lines = ["# edgespec", "", f"> {_ABOUT}"]
    section = ""
    for page in read_pages():
        if page.section[0] != section:
            section = page.section[0]
            lines += ["", f"## {section}", ""]
        place = (
            page.place.replace("../", "repository/", 1)
            if page.place.startswith("../")
            else page.place
        )
        lines.append(f"- [{page.title}]({place}): {page.summary}")
    return "\n".join(lines) + "\n"


def main() -> None:
    INDEX.write_text(write_page(), encoding="utf-8")
    LLMS.write_text(write_llms(), encoding="utf-8")
    print(f"wrote {INDEX.relative_to(ROOT)} and {LLMS.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
