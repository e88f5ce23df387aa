"""Write ``docs/settings.md``, the reference of all configuration keys, from ``edgespec.config``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from edgespec.cli.options import Key, documented_keys
from edgespec.config import AgentConfig, VerifierConfig
from edgespec.config.groups import Group
from edgespec.config.loading import plain

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Every key of a device and of a verifier, written from the fields in `edgespec/config` by
`python -m tools.write_settings`; a test fails when this page and the code differ. A key is set by
`--set KEY=VALUE`, or in a YAML file for `--config`; the keys that people set every day have options
as well ([options, files and keys](cli.md#options-files-and-keys)).

There are three groups:

* **Stable** keys are for everyday use. They keep their names and meanings from release to release.
* **Advanced** keys have defaults that suit nearly everybody, and a release may change them. The
  draft policies `windowed`, `pearl` and `fixed` are here: they exist for comparison only.
* **Emulation** makes a machine behave like slower hardware, or a link like a longer one. It is for
  tests, demonstrations and measurements, and slows down everything that it touches.
"""
_TITLES = {
    Group.STABLE: "Stable keys",
    Group.ADVANCED: "Advanced keys",
    Group.EMULATION: "Emulation",
}


def page() -> str:
    return "\n".join(
        [HEAD, *_role("The device", AgentConfig), *_role("The verifier", VerifierConfig)]
    )


def _role(name: str, kind: type[Any]) -> Iterator[str]:
    keys = documented_keys(kind).values()
    for group in Group:
        yield f"## {name}: {_TITLES[group].lower()}\n"
        yield "| key | default | meaning |"
        yield "| --- | --- | --- |"
        yield from (_row(key) for key in keys if key.group is group)
        yield ""


def _row(key: Key) -> str:
    default = yaml.safe_dump(plain(key.default), default_flow_style=True, width=1 << 20)
    default = default.removesuffix("...\n").strip().replace("''", "")
    meaning = key.text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return f"| `{key.name}` | {f'`{default}`' if default else 'empty'} | {meaning} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
