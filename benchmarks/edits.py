"""Edits of files: how much faster is a device that has the old file, and where does it lie?

    python benchmarks/edits.py play --tokenizer TOKENIZER --json FILE      # needs EDGESPEC_DATA
        [--rtts 2,50,200] [--pass-ms 25] [--row-ms 0.05] [--step-ms 2.5] [--rate 0.8] [--each 26]
    python benchmarks/edits.py print FILE FILE                             # of parts by --kind
    python benchmarks/edits.py show --tokenizer TOKENIZER --kind renamed   # what an edit looks like
    python benchmarks/edits.py campaign --tokenizer TOKENIZER --texts 10000
    python benchmarks/edits.py real --model MODEL --rtt 50                 # over gRPC, in real time

``play`` makes edits by program from public code and prose in ``$EDGESPEC_DATA/corpus``: a few
hundred tokens of a file, and the same with one edit. A scripted target writes the edited file, in
virtual time. A pass takes ``--pass-ms`` and ``--row-ms`` for each further row, a step of the
server's draft model ``--step-ms``; that model is right with the chance ``--rate``. The device has
no model, and its drafts take no time. The settings say where the old file is:

    prediction   in the client's prediction, and not in the prompt
    both         in the prediction and in the prompt
    prompt       in the prompt, where the server sees it too
    corpus       among the files of ``draft.corpus`` on the device
    earlier      in an earlier conversation of this device
    wrong        nowhere; the prediction is another file

Each kind of edit has a device and a verifier of its own for each setting, which keep their
estimates from text to text. ``campaign`` plays texts with every source at the same time: right,
wrong, cut off, late and mixed, at random links, prices and policies, and counts the texts
that differ. ``real`` runs a real target behind gRPC and an emulated
link; the prediction is its own greedy output with words changed. Intervals are 95 % over edits. The
exit status is not 0 if a text is not the target's own.
"""

from __future__ import annotations

import argparse
import asyncio
import builtins
import json
import keyword
import lzma
import os
import random
import re
import sys
import tempfile
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Final

from edgespec.bench.intervals import ratio_interval
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config.common import SetupError
from edgespec.core.device.goodput_policy import PolicyName, make_policy
from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.text_lookup import EarlierTexts, TextTables
from edgespec.device.build import load_tokenizer
from edgespec.device.followed_corpus import FollowedCorpus
from edgespec.models.model_source import Purpose, resolve_source
from edgespec_sim.cost_profile import TimeLaw, constant_law
from tests.sim.pair_worlds import (
    Link,
    Outcome,
    ScriptedDraft,
    Text,
    Times,
    Way,
    constant_link,
    play,
)

MIN_TOKENS, MAX_TOKENS = 150, 500
_CODE: Final = ("cpython311_lib.txt.xz",)
_PROSE: Final = ("python_peps.txt.xz", "books_public_domain.txt.xz")


# --- edits ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Edit:
    """A part of a file before and after one edit."""

    kind: str
    task: str
    """The user's request, in words."""
    old: str
    new: str


@cache
def read_documents(folder: Path, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the documents in these files of the corpus."""
    found: list[str] = []
    for name in names:
        with lzma.open(folder / name, "rt", encoding="utf-8") as file:
            found += file.read().split("<|doc|>\n")[1:]
    return tuple(found)


def take_part(dice: random.Random, documents: Sequence[str], begins: str) -> str:
    """Return some 900 to 1300 characters of a document, in whole paragraphs, from a line on that
    matches ``begins``."""
    while True:
        lines = dice.choice(documents).splitlines()
        starts = [at for at, line in enumerate(lines) if re.match(begins, line)]
        if not starts:
            continue
        start, length, size = dice.choice(starts), 0, dice.randrange(900, 1300)
        end = start
        while end < len(lines) and (length < size or lines[end].strip()):
            length += len(lines[end]) + 1
            end += 1
        if size <= length < 2 * size:
            return "\n".join(lines[start:end]).rstrip() + "\n"


def rename(dice: random.Random, code: str) -> tuple[str, str] | None:
    """Rename a name that stands there four to twelve times."""
    words = Counter(re.findall(r"\b[a-z_][a-z_0-9]{2,}\b", code))
    names = [
        word
        for word, count in sorted(words.items())
        if 4 <= count <= 12 and not keyword.iskeyword(word) and not hasattr(builtins, word)
    ]
    fresh = [one for one in _NEW_NAMES if one not in words]
    if not names or not fresh:
        return None
    old, new = dice.choice([one for one in names if one != "self"] or names), dice.choice(fresh)
    return f"Rename {old} to {new}", re.sub(rf"\b{old}\b", new, code)


_NEW_NAMES: Final = (
    *("payload", "entry_list", "source_path", "remaining", "handler", "current_state", "outcome"),
    *("parsed_value", "registry", "block_size", "offset_table", "pending", "visitor", "header_map"),
)


def add_parameter(dice: random.Random, code: str) -> tuple[str, str] | None:
    """Add a parameter to a function, a use of it, and give it at each call."""
    found = list(re.finditer(r"^( *)def (\w+)\(([^()\n]*)\):\n", code, re.MULTILINE))
    if not found:
        return None
    match = dice.choice(found)
    indent, name, given = match.groups()
    new = dice.choice(("timeout", "strict", "encoding", "limit", "verbose"))
    head = f"{indent}def {name}({given}{', ' if given.strip() else ''}{new}=None):\n"
    use = f"{indent}    if {new} is not None:\n{indent}        self._{new} = {new}\n"
    before, behind = code[: match.start()], code[match.end() :]
    call = re.compile(rf"(\b{name}\([^()\n]+)\)")
    before, behind = (call.sub(rf"\1, {new}={new})", one) for one in (before, behind))
    return f"Give {name} a parameter {new}", before + head + use + behind


def move_function(dice: random.Random, code: str) -> tuple[str, str] | None:
    """Move a function to another place among its neighbours."""
    indent = "    " if len(re.findall(r"^    def ", code, re.MULTILINE)) > 1 else ""
    parts = re.split(rf"^(?={indent}(?:def|class) )", code, flags=re.MULTILINE)
    if len(parts) < 4:
        return None
    head, *parts = [part.rstrip("\n") for part in parts]
    moved = parts.pop(at := dice.randrange(len(parts)))
    target = dice.choice([place for place in range(len(parts) + 1) if place != at])
    parts.insert(target, moved)
    gap = "\n\n" if indent else "\n\n\n"
    return "Move a function", gap.join([part for part in (head, *parts) if part]) + "\n"


def change_constant(dice: random.Random, code: str) -> tuple[str, str] | None:
    """Change one to three numbers or texts."""
    found = list(re.finditer(r"(?<![\w.])(?:\d+(?:\.\d+)?|'[^'\n]{2,20}'|\"[^\"\n]{2,20}\")", code))
    if len(found) < 3:
        return None
    new = code
    for match in sorted(dice.sample(found, dice.randrange(1, 4)), key=lambda one: -one.start()):
        literal = match.group()
        if literal[0] in "'\"":
            value = f"{literal[0]}{dice.choice(_NEW_NAMES)}{literal[0]}"
        else:
            value = str(dice.randrange(10, 9000))
        new = new[: match.start()] + value + new[match.end() :]
    return "Change a constant", new


def reflow(dice: random.Random, prose: str) -> tuple[str, str] | None:
    """Break the lines of all paragraphs at another width."""
    width = dice.choice((56, 64, 88, 100))
    parts = [
        part if re.match(r"[\s#*\-.=|>]", part) else textwrap.fill(" ".join(part.split()), width)
        for part in prose.rstrip("\n").split("\n\n")
    ]
    return f"Reflow the text to {width} columns", "\n\n".join(parts) + "\n"


def translate_comments(dice: random.Random, code: str) -> tuple[str, str] | None:
    """Put German words into comments and descriptions, by a small dictionary."""
    count = 0

    def translate(match: re.Match[str]) -> str:
        nonlocal count
        word = match.group()
        found = _GERMAN.get(word.lower())
        if found is None:
            return word
        count += 1
        return found.capitalize() if word[0].isupper() else found

    lines, inside = [], False
    for line in code.split("\n"):
        quotes = line.count('"""')
        is_text = inside or quotes > 0
        inside ^= quotes % 2 == 1
        place = 0 if is_text else line.find("#")
        if place >= 0:
            line = line[:place] + re.sub(r"[A-Za-z]+", translate, line[place:])
        lines.append(line)
    return ("Translate the comments to German", "\n".join(lines)) if count >= 6 else None


_GERMAN: Final = dict(
    pair.split(":")
    for pair in (
        "the:das a:ein an:ein of:von to:zu and:und or:oder is:ist are:sind be:sein in:in if:wenn"
        " this:dies that:dass for:für with:mit not:nicht from:aus by:durch on:auf as:wie it:es"
        " return:liefere returns:liefert file:Datei files:Dateien name:Name names:Namen list:Liste"
        " string:Zeichenkette value:Wert values:Werte object:Objekt class:Klasse method:Methode"
        " function:Funktion number:Zahl line:Zeile lines:Zeilen use:benutze used:benutzt"
        " when:wenn will:wird can:kann must:muss may:darf all:alle no:kein only:nur first:erste"
        " last:letzte new:neu default:Vorgabe error:Fehler code:Code message:Nachricht type:Typ"
        " given:gegeben then:dann else:sonst so:also we:wir you:du at:bei into:hinein has:hat"
        " have:haben which:welche up:auf out:aus one:eins two:zwei each:jede any:jede"
    ).split()
)


def delete_lines(dice: random.Random, text: str) -> tuple[str, str] | None:
    """Delete three to eight lines."""
    lines = text.split("\n")
    count = dice.randrange(3, 9)
    start = dice.randrange(2, len(lines) - count - 1) if len(lines) > count + 4 else 0
    if not start:
        return None
    return f"Delete lines {start + 1} to {start + count}", "\n".join(
        lines[:start] + lines[start + count :]
    )


def insert_lines(dice: random.Random, text: str, others: Sequence[str]) -> tuple[str, str] | None:
    """Insert three to six lines of another document."""
    lines, other = text.split("\n"), [one for one in dice.choice(others).split("\n") if one.strip()]
    count = dice.randrange(3, 7)
    if len(other) < count or len(lines) < 8:
        return None
    start, place = dice.randrange(len(other) - count + 1), dice.randrange(2, len(lines) - 2)
    block = other[start : start + count]
    if sum(map(len, block)) > 400:
        return None
    return f"Insert {count} lines", "\n".join(lines[:place] + block + lines[place:])


KINDS: Final = (
    *("renamed", "new parameter", "moved function", "changed constant", "reflowed paragraph"),
    *("translated comment", "deleted lines", "inserted lines"),
)
_BEGINS_CODE: Final = r"(?:    )?(?:def|class) "
_BEGINS_PROSE: Final = r"[A-Z][a-z]+ \w+"


def make_edits(folder: Path, kind: str) -> Iterator[Edit]:
    """Yield edits of a kind without end, always the same ones."""
    dice = random.Random(kind)
    code, prose = read_documents(folder, _CODE), read_documents(folder, _PROSE)
    edits: dict[str, Callable[[random.Random, str], tuple[str, str] | None]] = {
        "renamed": rename,
        "new parameter": add_parameter,
        "moved function": move_function,
        "changed constant": change_constant,
        "reflowed paragraph": reflow,
        "translated comment": translate_comments,
        "deleted lines": delete_lines,
    }
    number = 0
    while True:
        number += 1
        takes_prose = kind == "reflowed paragraph"
        if kind in ("deleted lines", "inserted lines"):
            takes_prose = number % 2 == 0
        documents, begins = (prose, _BEGINS_PROSE) if takes_prose else (code, _BEGINS_CODE)
        old = take_part(dice, documents, begins)
        if kind == "inserted lines":
            made = insert_lines(dice, old, documents)
        else:
            made = edits[kind](dice, old)
        if made is not None and made[1] != old:
            yield Edit(kind, made[0], old, made[1])


# --- texts ---------------------------------------------------------------------------------------

PREDICTION, BOTH, PROMPT = "prediction", "prediction and prompt", "prompt"
CORPUS, EARLIER, WRONG = "corpus", "earlier conversation", "wrong prediction"
SETTINGS: Final = (PREDICTION, BOTH, PROMPT, CORPUS, EARLIER, WRONG)


@dataclass(frozen=True, slots=True)
class Case:
    """An edit in tokens."""

    edit: Edit
    task: tuple[int, ...]
    """The request without the file."""
    old: tuple[int, ...]
    output: tuple[int, ...]
    """The edited file, and the end token."""


def make_cases(folder: Path, reference: str, kind: str, count: int) -> list[Case]:
    """Return the first edits of a kind whose outputs have ``MIN_TOKENS`` to ``MAX_TOKENS``."""
    tokenizer = load_tokenizer(reference)
    end = min(model_info(reference).eos_token_ids, default=0)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    found = list[Case]()
    for edit in make_edits(folder, kind):
        old, new = encode(edit.old), encode(edit.new)
        if MIN_TOKENS <= len(new) <= MAX_TOKENS and MIN_TOKENS <= len(old) <= MAX_TOKENS:
            # The number makes every prompt another one, as the scripted target needs it.
            task = encode(f"{edit.task} in file {len(found) + 1}. Write the whole file.\n\n")
            found.append(Case(edit, tuple(task), tuple(old), (*new, end)))
            if len(found) == count:
                break
    return found


def model_info(reference: str) -> ModelInfo:
    source = resolve_source(reference, Purpose.TEXTS)
    return source.vocabulary_info(1 << 16)


def make_texts(cases: Sequence[Case], setting: str) -> list[Text]:
    """Return what the target writes, with the prompt and the prediction of a setting."""
    found = []
    for number, case in enumerate(cases):
        prediction: tuple[int, ...] = ()
        if setting in (PREDICTION, BOTH):
            prediction = case.old
        elif setting == WRONG:  # a file that has nothing to do with it
            prediction = cases[(number + len(cases) // 2) % len(cases)].old
        has_file = setting in (BOTH, PROMPT)
        found.append(
            Text(
                kind=case.edit.kind,
                name=f"{case.edit.kind}-{number}",
                temperature=0.0,
                seed=number,
                prompt=(*case.old, *case.task) if has_file else case.task,
                tokens=case.output,
                max_tokens=len(case.output),
                prediction=prediction,
            )
        )
    return found


def write_project(folder: Path, cases: Sequence[Case]) -> None:
    """Write the old files into a folder, as a project that is being worked on."""
    for number, case in enumerate(cases):
        path = folder / f"{number % 7}" / f"{case.edit.kind.replace(' ', '_')}_{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(case.edit.old, encoding="utf-8")


def open_project(project: Path, reference: str, cache: Path) -> FollowedCorpus:
    """Return the files of a folder as ``draft.corpus`` has them, with the index in ``cache``."""
    encode = partial(load_tokenizer(reference).encode, add_special_tokens=False)
    os.environ["XDG_CACHE_HOME"] = str(cache)
    vocabulary = resolve_source(reference, Purpose.TEXTS).vocabulary
    return FollowedCorpus([str(project)], vocabulary, encode, lambda text: None)


def make_tables(cases: Sequence[Case], setting: str, reference: str, cache: Path) -> TextTables:
    """Return what the device knows of other texts in a setting."""
    tables = TextTables(ngrams=True, earlier=EarlierTexts())
    if setting == CORPUS:
        project = cache / "project"
        write_project(project, cases)
        tables.corpus = open_project(project, reference, cache)
    if setting == EARLIER:
        assert tables.earlier is not None
        for case in cases:  # a tool returned each file in a conversation of its own
            tables.earlier.add((*case.task[:1], *case.old, *case.task[-3:]))
    return tables


# --- arms ----------------------------------------------------------------------------------------

STREAMING: Final = Way("streaming", run_ahead=RunAhead.ALWAYS, device_model=False)
SERVER_LOOKUP: Final = replace(STREAMING, name="server lookup", server_lookup=True)
SERVER_MODEL: Final = replace(STREAMING, name="server model", server_model=True)
SERVER: Final = replace(SERVER_LOOKUP, name="server model and lookup", server_model=True)
DEVICE: Final = Way("device", device_model=False, device_lookup=True, prediction=True)
BOTH_ENDS: Final = replace(DEVICE, name="both ends", server_model=True, server_lookup=True)
ARMS: Final = (STREAMING, SERVER_LOOKUP, SERVER_MODEL, SERVER, DEVICE, BOTH_ENDS)


def list_arms(setting: str) -> tuple[Way, ...]:
    """Return the arms that are played in a setting. What the server does alone depends on the
    prompt only, so it is played once for each kind of prompt."""
    return ARMS if setting == home_of(setting) else (DEVICE, BOTH_ENDS)


def home_of(setting: str) -> str:
    """Return the setting with the same prompts in which the server's own arms are played."""
    return PROMPT if setting in (BOTH, PROMPT) else PREDICTION


@dataclass(frozen=True, slots=True)
class Costs:
    """Durations in milliseconds, and how often the server's draft model is right."""

    pass_ms: float
    row_ms: float
    step_ms: float
    rate: float

    @property
    def times(self) -> Times:
        one_s, row_s = self.pass_ms / 1e3, self.row_ms / 1e3
        law = TimeLaw(((1.0, one_s), (2.0, one_s + row_s)))
        return Times(law, constant_law(0.0), constant_law(self.step_ms / 1e3))


@dataclass(frozen=True, slots=True)
class Work:
    """All arms of one kind of edit in one setting."""

    folder: Path
    tokenizer: str
    kind: str
    setting: str
    each: int
    rtts: tuple[float, ...]
    costs: Costs


Cells = Mapping[tuple[str, str, float, str], list[Outcome]]
"""Outcomes by setting, kind, round trip in milliseconds, and arm."""


def play_work(work: Work) -> tuple[Work, dict[tuple[float, str], list[Outcome]], list[str]]:
    """Play the arms of a piece of work, one after another. Return the outcomes by round trip and
    arm, and a line for each text that differs."""
    cases = make_cases(work.folder, work.tokenizer, work.kind, work.each)
    texts = make_texts(cases, work.setting)
    draft = ScriptedDraft(model_info(work.tokenizer), work.costs.rate)
    found, differ = dict[tuple[float, str], list[Outcome]](), list[str]()
    with tempfile.TemporaryDirectory() as cache:
        for rtt in work.rtts:
            link: Link = constant_link(rtt)
            for way in list_arms(work.setting):
                if not way.drafts and rtt != work.rtts[0]:
                    # A distant server alone sends everything later, and nothing further apart.
                    if (work.rtts[0], way.name) in found:
                        found[rtt, way.name] = found[work.rtts[0], way.name]
                    continue
                tables = None
                if way.device_lookup:
                    tables = make_tables(cases, work.setting, work.tokenizer, Path(cache))
                try:
                    outcomes = play(texts, way, link, work.costs.times, draft, tables=tables)
                except RuntimeError as error:
                    differ.append(f"{work.setting}, {work.kind}, {way.name}, {link.name}: {error}")
                    continue
                found[rtt, way.name] = outcomes
    return work, found, differ


def shown_ratio(upper: Sequence[Outcome], lower: Sequence[Outcome]) -> str:
    """Return the time a token of ``upper`` over that of ``lower``, with its interval."""
    above, below = ([one.tpot_ms for one in side] for side in (upper, lower))
    low, high = ratio_interval(above, below)
    return f"{fmean(above) / fmean(below):.2f} ({low:.2f}–{high:.2f})"


def play_all(options: argparse.Namespace) -> int:
    """Print the speed of each arm in each setting, by round trip and by kind of edit."""
    rtts = tuple(float(one) for one in options.rtts.split(","))
    costs = Costs(options.pass_ms, options.row_ms, options.step_ms, options.rate)
    asked = options.settings.split(",") if options.settings else SETTINGS
    settings = [one for one in SETTINGS if one in (*asked, *map(home_of, asked))]
    kinds = [one for one in KINDS if options.kind in ("", one)]
    work = [
        Work(options.folder, options.tokenizer, kind, setting, options.each, rtts, costs)
        for kind in kinds
        for setting in settings
    ]
    cells = dict[tuple[str, str, float, str], list[Outcome]]()
    differ, begun_s = list[str](), time.monotonic()
    with get_context("spawn").Pool(options.jobs) as pool:
        for done, found, wrong in pool.imap_unordered(play_work, work):
            differ += wrong
            for (rtt, arm), outcomes in found.items():
                cells[done.setting, done.kind, rtt, arm] = outcomes
            seconds = time.monotonic() - begun_s
            print(f"{seconds:5.0f} s  {done.setting}, {done.kind}", file=sys.stderr, flush=True)
    print_tables(cells)
    print(f"\n{sum(map(len, cells.values()))} texts, {len(differ)} arms with a text that differs")
    for line in differ:
        print(line)
    if options.json is not None:
        write_outcomes(options, cells)
    return 1 if differ else 0


def print_files(options: argparse.Namespace) -> int:
    """Print the tables of several files that ``play`` wrote, as if it had been one."""
    cells = dict[tuple[str, str, float, str], list[Outcome]]()
    for path in options.files:
        for row in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            key = row["setting"], row["kind"], row["rtt_ms"], row["arm"]
            cells[key] = [Outcome(**one) for one in row["texts"]]
    print_tables(cells)
    print(f"\n{sum(map(len, cells.values()))} texts")
    return 0


def print_tables(cells: Cells) -> None:
    settings = [one for one in SETTINGS if any(one == key[0] for key in cells)]
    kinds = [one for one in KINDS if any(one == key[1] for key in cells)]
    rtts = sorted({key[2] for key in cells})
    print_speeds(cells, settings, kinds, rtts)
    print_kinds(cells, settings, kinds, rtts)


def print_speeds(
    cells: Cells,
    settings: Sequence[str],
    kinds: Sequence[str],
    rtts: Sequence[float],
) -> None:
    """Print the speed over streaming of each arm in each setting, with all kinds together."""

    def gather(setting: str, rtt: float, arm: str) -> list[Outcome]:
        return [one for kind in kinds for one in cells[setting, kind, rtt, arm]]

    columns = "".join(f" RTT {rtt:g} | median | tokens/pass |" for rtt in rtts)
    print(
        f"| the old file | who drafts |{columns}\n| --- | --- |{' --- | ---: | ---: |' * len(rtts)}"
    )
    for setting in settings:
        for arm in [one.name for one in list_arms(setting) if one is not STREAMING]:
            row = []
            for rtt in rtts:
                base = gather(home_of(setting), rtt, STREAMING.name)
                mine = gather(setting, rtt, arm)
                speeds = [b.tpot_ms / m.tpot_ms for b, m in zip(base, mine, strict=True)]
                per_pass = sum(one.tokens for one in mine) / sum(one.passes for one in mine)
                row += [f"{shown_ratio(base, mine)}×", f"{median(speeds):.2f}×", f"{per_pass:.1f}"]
            print(f"| {setting} | {arm} | {' | '.join(row)} |")
    print()


def print_kinds(
    cells: Cells, settings: Sequence[str], kinds: Sequence[str], rtts: Sequence[float]
) -> None:
    """Print the device's speed over streaming by kind of edit."""
    print(f"| the old file | RTT | {' | '.join(kinds)} |\n| --- | ---: |{' --- |' * len(kinds)}")
    for setting in settings:
        for rtt in rtts:
            row = []
            for kind in kinds:
                base = cells[home_of(setting), kind, rtt, STREAMING.name]
                row.append(f"{shown_ratio(base, cells[setting, kind, rtt, DEVICE.name])}×")
            print(f"| {setting} | {rtt:g} | {' | '.join(row)} |")


def write_outcomes(options: argparse.Namespace, cells: Cells) -> None:
    rows = [
        {
            **{"setting": setting, "kind": kind, "rtt_ms": rtt, "arm": arm},
            "texts": [asdict(one) for one in texts],
        }
        for (setting, kind, rtt, arm), texts in cells.items()
    ]
    head = {"command": sys.argv, "machine": describe_machine(), "versions": list_versions()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**head, "cells": rows}) + "\n", encoding="utf-8")


def show(options: argparse.Namespace) -> int:
    """Print one edit as a difference."""
    import difflib

    for number, edit in enumerate(make_edits(options.folder, options.kind or KINDS[0])):
        if number == options.number:
            old, new = (one.splitlines() for one in (edit.old, edit.new))
            print(edit.task)
            print("\n".join(difflib.unified_diff(old, new, "old", "new", lineterm="", n=1)))
            break
    return 0


# --- every source at once ------------------------------------------------------------------------


def spoil(dice: random.Random, case: Case, other: Case, size: int) -> tuple[int, ...]:
    """Return a prediction for a case that is right, wrong or in between."""
    old, new = list(case.old), list(case.output)
    kinds = ("old", "new", "cut", "other", "shuffled", "mixed", "noise", "doubled", "backwards")
    match dice.choice(kinds):
        case "old":
            return tuple(old)
        case "new":
            return tuple(new)
        case "cut":
            return tuple(new[: dice.randrange(len(new))])
        case "other":
            return other.old
        case "shuffled":
            dice.shuffle(old)
            return tuple(old)
        case "mixed":
            at, place = dice.randrange(len(new)), dice.randrange(len(old))
            return (*new[:at], *other.old[:20], *old[place:])
        case "noise":
            return tuple([one if dice.random() < 0.7 else dice.randrange(size) for one in new])
        case "doubled":
            return (*old, *new, *old)
        case _:
            return tuple(reversed(new))


def play_batch(given: tuple[Path, str, int, int]) -> tuple[int, list[str]]:
    """Play texts with random sources, prices and links. Return their number, and a line for each
    batch with a text that differs."""
    folder, tokenizer, seed, count = given
    dice = random.Random(seed)
    info = model_info(tokenizer)
    cases = campaign_cases(folder, tokenizer)
    chosen = [dice.choice(cases) for _ in range(count)]
    texts = []
    for number, case in enumerate(chosen):
        begin = dice.randrange(max(1, len(case.output) - 40))
        output = case.output[begin : begin + dice.randrange(20, 120)]
        prompt = (*case.task, number, *(case.old if dice.random() < 0.5 else case.old[:5]))
        prediction = spoil(dice, case, dice.choice(cases), info.vocabulary_size)
        text = Text(case.edit.kind, f"{seed}-{number}", 0.0, number, prompt, output, len(output))
        texts.append(replace(text, prediction=prediction))
    way = Way(
        "random",
        run_ahead=dice.choice((RunAhead.AUTO, RunAhead.AUTO, RunAhead.ALWAYS, RunAhead.NEVER)),
        policy=make_policy(dice.choice([*PolicyName])),
        device_model=dice.random() < 0.5,
        device_lookup=dice.random() < 0.7,
        prediction=dice.random() < 0.8,
        server_model=dice.random() < 0.5,
        server_lookup=dice.random() < 0.5,
    )
    if not way.drafts:
        way = replace(way, prediction=True)
    if way.run_ahead is RunAhead.ALWAYS and dice.random() < 0.5:
        way = replace(way, run_ahead=RunAhead.AUTO)
    tables = TextTables(ngrams=True, max_leaders=256, earlier=EarlierTexts(4096))
    if dice.random() < 0.7:
        tables.corpus = campaign_corpus(folder, tokenizer)
    for case in dice.sample(cases, 3):
        assert tables.earlier is not None
        tables.earlier.add(case.old)
    one_s, row_s = dice.choice((0.005, 0.025, 0.04)), dice.choice((0.0, 5e-5, 1e-3))
    times = Times(
        TimeLaw(
            ((1.0, one_s), (2.0, one_s + row_s)), spread=dice.choice(((1.0,), (0.7, 1.0, 2.0)))
        ),
        constant_law(dice.choice((0.001, 0.008, 0.03))),
        constant_law(0.0025),
    )
    link = constant_link(dice.choice((0.0, 1.0, 5.0, 20.0, 80.0, 300.0)))
    draft = ScriptedDraft(info, dice.choice((0.02, 0.5, 0.8, 0.97)))
    try:
        play(texts, way, link, times, draft, tables=tables)
    except Exception as error:
        return count, [f"seed {seed}: {error!r}: {way}, {link.name}"]
    return count, []


@cache
def campaign_cases(folder: Path, tokenizer: str) -> tuple[Case, ...]:
    return tuple(case for kind in KINDS for case in make_cases(folder, tokenizer, kind, 4))


@cache
def campaign_corpus(folder: Path, tokenizer: str) -> FollowedCorpus:
    """Return a corpus of the old files, every second one with lines in another order."""
    dice = random.Random(1)
    with tempfile.TemporaryDirectory() as cache_folder:
        project = Path(cache_folder) / "project"
        write_project(project, campaign_cases(folder, tokenizer))
        for path in sorted(project.rglob("*.txt"))[::2]:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            dice.shuffle(lines)
            path.write_text("".join(lines), encoding="utf-8")
        return open_project(project, tokenizer, Path(cache_folder))


def campaign(options: argparse.Namespace) -> int:
    """Play texts with every source at once, and count the ones that differ."""
    each = 10
    seeds = range(options.first, options.first + -(-options.texts // each))
    work = [(options.folder, options.tokenizer, seed, each) for seed in seeds]
    played, differ, begun_s = 0, list[str](), time.monotonic()
    with get_context("spawn").Pool(options.jobs) as pool:
        for count, wrong in pool.imap_unordered(play_batch, work, chunksize=4):
            played += count
            differ += wrong
            for line in wrong:
                print(line, flush=True)
            if played % 1000 < each:
                seconds = time.monotonic() - begun_s
                print(f"{seconds:5.0f} s  {played} texts", file=sys.stderr, flush=True)
    print(f"{played} texts, {len(differ)} batches of {each} with a text that differs")
    return 1 if differ else 0


# --- a real target behind gRPC -------------------------------------------------------------------


def change_words(text: str, dice: random.Random, share: float) -> str:
    """Return the text with a share of its words replaced, left out or doubled."""
    parts = re.split(r"(\s+)", text)
    for at in range(0, len(parts), 2):
        if dice.random() < share:
            parts[at] = dice.choice(("", f"{parts[at]} {parts[at]}", dice.choice(_NEW_NAMES)))
    return "".join(parts)


async def run_real(options: argparse.Namespace) -> int:
    """Stream and predict in turns, and print the speed beside the one in virtual time."""
    from edgespec.bench.prompts import BUILT_IN
    from edgespec.cli.verifier import verifier_process
    from edgespec.config import LinkSection
    from edgespec.core.protocol.sampling import SamplingParams
    from edgespec.device import build
    from edgespec.device.agent import Agent
    from edgespec.models.tokenizer import prompt_encoder
    from edgespec.wire.shaped import ShapedTransport

    tokenizer, dice = load_tokenizer(options.model), random.Random(3)
    encode = prompt_encoder(tokenizer, chat=True)
    plain = partial(tokenizer.encode, add_special_tokens=False)
    prompts = [one for kind in ("chat", "code") for one in BUILT_IN[kind][: options.prompts]]
    settings = ["--model", options.model, "--set=server_drafts=false"]
    settings += ["--pass-ms", f"{options.pass_ms:g}", f"--set=threads={options.threads}"]
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    seconds: dict[str, list[float]] = {"streaming": [], "prediction": []}
    texts, passes, differ = list[Text](), 0, 0
    async with verifier_process(settings) as (address, _):
        up, down = build.link_models(LinkSection(rtt_ms=options.rtt))
        transport = ShapedTransport(build.connect(address), up, down)
        async with Agent(transport, None, tokenizer.encode, tokenizer.stream) as agent:

            async def generate(prompt: Sequence[int], prediction: Sequence[int]) -> list[int]:
                found, times_s = list[int](), list[float]()
                async for chunk in agent.generate(prompt, sampling, prediction=prediction):
                    found += chunk.tokens
                    times_s += [time.monotonic()] * len(chunk.tokens)
                arm = "prediction" if prediction else "streaming"
                seconds[arm].append((times_s[-1] - times_s[0]) / (len(found) - 1))
                return found

            await generate(encode(prompts[0].text), ())  # the first one is not counted
            seconds["streaming"].clear()
            for number, one in enumerate(prompts):
                prompt = encode(one.text)
                output = await generate(prompt, ())
                changed = change_words(tokenizer.decode(output), dice, options.share)
                prediction = plain(changed)
                differ += await generate(prompt, prediction) != output
                assert agent.stats is not None
                passes += agent.stats.counters.passes
                text = Text(
                    "real", one.name, 0.0, number, tuple(prompt), tuple(output), len(output)
                )
                texts.append(replace(text, prediction=tuple(prediction)))
    costs = Costs(options.pass_ms, 0.0, 2.5, 0.8)
    arms = (STREAMING, replace(DEVICE, device_lookup=False))
    draft, link = ScriptedDraft(model_info(options.model), 0.8), constant_link(options.rtt)
    virtual = [play(texts, way, link, costs.times, draft) for way in arms]
    real = [[1e3 * one for one in seconds[arm]] for arm in ("streaming", "prediction")]
    for name, (base_ms, mine_ms), played in (
        ("real", real, passes),
        (
            "virtual",
            [[one.tpot_ms for one in outcomes] for outcomes in virtual],
            sum(one.passes for one in virtual[1]),
        ),
    ):
        low, high = ratio_interval(base_ms, mine_ms)
        print(
            f"| {name} | {fmean(base_ms):.1f} | {fmean(mine_ms):.1f} |"
            f" {fmean(base_ms) / fmean(mine_ms):.2f}× ({low:.2f}–{high:.2f}) |"
            f" {len(texts) * options.tokens / played:.1f} |"
        )
    print(f"{len(texts)} texts of {options.tokens} tokens, {differ} differ")
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    data = os.environ.get("EDGESPEC_DATA", "../shared/data")
    playing = commands.add_parser("play", help=play_all.__doc__)
    playing.add_argument("--rtts", default="2,50,200", help="milliseconds, with commas")
    playing.add_argument("--pass-ms", type=float, default=25.0, help="a pass of one row")
    playing.add_argument("--row-ms", type=float, default=0.05, help="each further row of a pass")
    playing.add_argument("--step-ms", type=float, default=2.5, help="a step of the server's draft")
    playing.add_argument("--rate", type=float, default=0.8, help="how often that draft is right")
    playing.add_argument("--each", type=int, default=26, help="edits of each kind")
    playing.add_argument("--settings", default="", help=f"of: {', '.join(SETTINGS)}")
    playing.add_argument("--json", type=Path, help="file for the outcomes of all texts")
    playing.set_defaults(run=play_all)
    printing = commands.add_parser("print", help=print_files.__doc__)
    printing.add_argument("files", type=Path, nargs="+", help="JSON files of `play`")
    printing.set_defaults(run=print_files)
    showing = commands.add_parser("show", help=show.__doc__)
    showing.add_argument("--number", type=int, default=0, help="of the edit")
    showing.set_defaults(run=show)
    for one in (playing, showing):
        one.add_argument("--kind", default="", help=f"one of: {', '.join(KINDS)}")
    everywhere = commands.add_parser("campaign", help=campaign.__doc__)
    everywhere.add_argument("--texts", type=int, default=10_000)
    everywhere.add_argument("--first", type=int, default=0, help="seed of the first ten texts")
    everywhere.set_defaults(run=campaign)
    for one in (playing, everywhere):
        one.add_argument("--jobs", type=int, default=2, help="processes")
    for one in (playing, showing, everywhere):
        one.add_argument("--tokenizer", default="smollm2-135m", help="folder or model")
        one.add_argument("--data", type=Path, default=data, help="folder of public data")
    really = commands.add_parser("real", help=run_real.__doc__)
    really.add_argument("--model", default="smollm2-135m", help="target")
    really.add_argument("--rtt", type=float, default=50.0, help="milliseconds")
    really.add_argument("--pass-ms", type=float, default=100.0, help="least duration of a pass")
    really.add_argument("--tokens", type=int, default=96, help="of each text")
    really.add_argument("--prompts", type=int, default=3, help="of each of two kinds")
    really.add_argument("--share", type=float, default=0.04, help="of words that are changed")
    really.add_argument("--threads", type=int, default=1)
    really.set_defaults(run=lambda options: asyncio.run(run_real(options)))
    options = parser.parse_args()
    if options.run in (play_all, show, campaign):
        options.folder = options.data / "corpus"
        if not (options.folder / _CODE[0]).exists():
            print(f"skipped: {options.folder} has no public data; set EDGESPEC_DATA or --data")
            return 0
    if options.run in (play_all, campaign):
        try:
            model_info(options.tokenizer)
        except (SetupError, ValueError) as error:
            print(f"skipped: --tokenizer {options.tokenizer} cannot be used: {error}")
            return 0
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
