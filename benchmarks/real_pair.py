"""A real pair of models in virtual time: how much faster, at which link, and which setting is best.

    python benchmarks/real_pair.py record --model TARGET --store DIR          # its texts, once
    python benchmarks/real_pair.py speed --draft DRAFT --store DIR --json FILE
        [--times 25,8,2.5] [--rtts 2,20,50,100,200] [--ways "target-only,device alone,both"]
    python benchmarks/real_pair.py networks --draft DRAFT --store DIR         # needs EDGESPEC_DATA
    python benchmarks/real_pair.py settings --draft DRAFT --store DIR
    python benchmarks/real_pair.py rules --model TARGET --draft DRAFT --store DIR

The target's texts are recorded once. The draft is run for real, and its candidates are kept in the
store, so that a second run computes nothing (``tests/sim/pair_worlds.py``). Prompts are the bench's
sets of chat, code and maths, nine of each, in the model's chat template. Each set has a device and
a verifier of its own, which keep their estimates from text to text. Only times are made up:
``--times`` are the milliseconds of a pass, of a step of the device and of a step of the server.

``speed`` compares ways of decoding over constant links. ``networks`` compares the default policy
with fixed settings on ten recorded networks: three texts of each set choose the best three fixed
settings of a network, and all texts judge them. ``settings`` compares variants of the default
policy over constant links. ``rules`` compares relaxed acceptance rules (LOSSY) with the exact one;
the target is run for real. ``check`` compares a real bench of some prompts (``edgespec
bench --chat --prompts chat --json FILE``, times emulated) with virtual time. ``race`` plays one
text, and ``speed --record`` keeps what a picture shows; ``tools.draw_race`` and
``tools.draw_bench`` draw them. Intervals are 95 % over texts. The exit status is not 0 if a text is
not the target's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from fidelity import TRACES

from edgespec.bench.intervals import mean_interval, ratio_interval
from edgespec.bench.prompts import BUILT_IN
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import VerifierConfig
from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.goodput_policy import GoodputPolicy
from edgespec.core.device.policy import GATHER_SHARE
from edgespec.core.protocol.messages import EXACT_RULE, RunAhead
from edgespec.device.build import load_tokenizer
from edgespec.device.drafters.manifest import read_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.models.tokenizer import prompt_encoder
from edgespec.verifier.build import load_target
from edgespec_sim.sessions import Delivery
from tests.sim.pair_worlds import (
    BOTH,
    DEVICE,
    SERVER,
    STREAMING,
    WAYS,
    DraftModel,
    Link,
    Outcome,
    Times,
    Way,
    constant_link,
    play,
    read_texts,
    record_texts,
    traced_link,
    write_texts,
)

KINDS: Final = ("chat", "code", "maths")
TEMPERATURES: Final = (0.0, 0.7, 1.0)
PUBLISHED: Final = {
    **{
        f"stop-and-wait {depth}": Way(
            f"stop-and-wait {depth}", FixedPolicy(depth, 1), RunAhead.NEVER
        )
        for depth in (1, 2, 4, 8, 16)
    },
    "pearl": Way("pearl", PearlPolicy(), RunAhead.NEVER),
}
"""Split decoding as published: the device waits for verdicts, and the target for drafts."""
_FEW: Final = 3
"""Texts of each set that choose the best fixed settings of a network."""
_CHOSEN: Final = 3


def record(options: argparse.Namespace) -> int:
    """Write the target's texts of each temperature into the store."""
    target = load_target(VerifierConfig(model=options.model, threads=options.threads))
    encode = prompt_encoder(load_tokenizer(options.model), chat=True)
    prompts = [
        (kind, one.name, tuple(encode(one.text))) for kind in KINDS for one in BUILT_IN[kind]
    ]
    for temperature in TEMPERATURES:
        texts = record_texts(target, prompts, temperature, options.tokens)
        write_texts(options.store / f"texts-{temperature:g}.jsonl", texts)
        print(f"{temperature:g}: {sum(len(one.tokens) for one in texts)} tokens", flush=True)
    return 0


# --- cells ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of decoding on one link, for the texts of one set at one temperature."""

    kind: str
    temperature: float
    link: Link
    way: Way
    limit: int = 1000
    """Number of texts, from the first."""


@dataclass(frozen=True, slots=True)
class Played:
    """The outcomes of a cell's texts."""

    kind: str
    temperature: float
    link: str
    way: str
    texts: tuple[Outcome, ...]


def open_draft(store: Path, draft: Path) -> DraftModel:
    """Return the draft model of a folder, which is loaded when a candidate is not in the store."""
    info = read_manifest(draft).model
    return DraftModel(info, store / draft.resolve().name, lambda: OnnxDrafter(draft, threads=1))


def play_cells(store: Path, draft: Path, times: Times, cells: Sequence[Cell]) -> list[Played]:
    """Play cells of one set, one after another."""
    model = open_draft(store, draft)
    found, read = [], dict[float, list[Any]]()
    for cell in cells:
        if cell.temperature not in read:
            read[cell.temperature] = read_texts(store / f"texts-{cell.temperature:g}.jsonl")
        texts = [one for one in read[cell.temperature] if one.kind == cell.kind][: cell.limit]
        outcomes = play(texts, cell.way, cell.link, times, model)
        found.append(
            Played(cell.kind, cell.temperature, cell.link.name, cell.way.name, tuple(outcomes))
        )
    return found


class Table:
    """Plays cells in processes, one for each set of prompts, and finds their outcomes again."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.played: dict[tuple[float, str, str], tuple[Outcome, ...]] = {}
        self._options = options
        self._times = Times.of_ms(*map(float, options.times.split(",")))

    def play(
        self,
        temperatures: Sequence[float],
        links: Sequence[Link],
        ways: Sequence[Way],
        limit: int = 1000,
    ) -> None:
        """Play each way on each link at each temperature."""
        options = self._options
        work = [
            [
                Cell(kind, temperature, link, way, limit)
                for temperature in temperatures
                for link in links
                for way in ways
            ]
            for kind in options.kinds.split(",")
        ]
        run = partial(play_cells, options.store, options.draft, self._times)
        with get_context("spawn").Pool(options.jobs) as pool:
            for part in pool.imap(run, work):
                for one in part:
                    key = one.temperature, one.link, one.way
                    self.played[key] = (*self.played.get(key, ()), *one.texts)

    def write(self, path: Path | None) -> None:
        """Write all outcomes to a file."""
        if path is None:
            return
        rows = [
            {"temperature": temperature, "link": link, "way": way, "texts": [*map(asdict, texts)]}
            for (temperature, link, way), texts in self.played.items()
        ]
        head = {"command": sys.argv, "machine": describe_machine(), "versions": list_versions()}
        head |= {"times_ms": self._options.times, "draft": self._options.draft.name}
        path.write_text(json.dumps({**head, "cells": rows}) + "\n", encoding="utf-8")


def shown(value: float, interval: Sequence[float], digits: int = 2) -> str:
    low, high = interval
    return f"{value:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def time_ratio(upper: Sequence[Outcome], lower: Sequence[Outcome], digits: int = 2) -> str:
    """Return the time a token of ``upper`` over that of ``lower``, with its interval."""
    above, below = ([one.tpot_ms for one in side] for side in (upper, lower))
    return shown(fmean(above) / fmean(below), ratio_interval(above, below), digits)


# --- speed ---------------------------------------------------------------------------------------


def describe(texts: Sequence[Outcome], base: Sequence[Outcome]) -> str:
    """Return the columns of one way on one link."""
    tpots = [one.tpot_ms for one in texts]
    tokens = sum(one.tokens for one in texts)
    tried = sum(one.tried for one in texts)

    def per_token(value: Callable[[Outcome], float]) -> float:
        return sum(map(value, texts)) / tokens

    columns = [
        shown(fmean(tpots), mean_interval(tpots), 1),
        time_ratio(base, texts) + "×",
        f"{fmean(one.ttft_ms for one in texts):.0f}",
        f"{tokens / sum(one.passes for one in texts):.2f}",
        f"{per_token(lambda one: one.server_ms):.1f}",
        f"{per_token(lambda one: one.sent - one.accepted):.2f}",
        f"{per_token(lambda one: one.up_bytes):.1f}",
        f"{per_token(lambda one: one.down_bytes):.1f}",
        f"{sum(one.hits for one in texts) / tried:.2f}" if tried else "–",
    ]
    return " | ".join(columns)


def print_columns(
    table: Table, temperatures: Sequence[float], links: Sequence[Link], ways: Sequence[Way]
) -> None:
    """Print all columns of each way on each link."""
    print("| T | link | who drafts | ms a token | speed | TTFT | tokens/pass | server ms |", end="")
    print(" wasted/token | bytes up | bytes down | right |")
    print("| ---: | --- | --- | --- | --- |" + " ---: |" * 7)
    for temperature in temperatures:
        for link in links:
            base = table.played[temperature, link.name, STREAMING.name]
            for way in ways:
                texts = table.played[temperature, link.name, way.name]
                print(f"| {temperature:g} | {link.name} | {way.name} | {describe(texts, base)} |")
    print()


def print_speeds(
    table: Table, temperatures: Sequence[float], links: Sequence[Link], ways: Sequence[Way]
) -> None:
    """Print the speed of each way over streaming, and of both ends over each end alone."""
    names = [one.name for one in ways if one.name != STREAMING.name]
    ends = [one for one in (DEVICE.name, SERVER.name) if one in names and BOTH.name in names]
    columns = [*names, *(f"time of both over {one}" for one in ends)]
    print(f"| T | link | {' | '.join(columns)} |\n| ---: | --- |" + " --- |" * len(columns))
    for temperature in temperatures:
        for link in links:

            def found(name: str, at: tuple[float, str] = (temperature, link.name)) -> Any:
                return table.played[(*at, name)]

            cells = [time_ratio(found(STREAMING.name), found(name)) + "×" for name in names]
            cells += [time_ratio(found(BOTH.name), found(end)) for end in ends]
            print(f"| {temperature:g} | {link.name} | {' | '.join(cells)} |")
    print()


def print_kinds(
    table: Table,
    temperatures: Sequence[float],
    links: Sequence[Link],
    ways: Sequence[Way],
    kinds: Sequence[str],
) -> None:
    """Print the speed of each way over streaming by the set of prompts."""
    print(f"| T | link | who drafts | {' | '.join(kinds)} |\n| ---: | --- | --- |", end="")
    print(" --- |" * len(kinds))
    for temperature in temperatures:
        for link in links:
            for way in ways[1:]:
                cells = []
                for kind in kinds:
                    theirs, mine = (
                        [
                            one
                            for one in table.played[temperature, link.name, name]
                            if one.kind == kind
                        ]
                        for name in (STREAMING.name, way.name)
                    )
                    cells.append(time_ratio(theirs, mine) + "×")
                print(f"| {temperature:g} | {link.name} | {way.name} | {' | '.join(cells)} |")


def speed(options: argparse.Namespace) -> int:
    """Print a table of ways of decoding by link, temperature and set of prompts."""
    known = {**WAYS, **PUBLISHED}
    table, ways = Table(options), [known[name] for name in options.ways.split(",")]
    temperatures = [*map(float, options.temperatures.split(","))]
    links = [constant_link(float(rtt)) for rtt in options.rtts.split(",")]
    table.play(temperatures, links, ways)
    table.write(options.json)
    if options.record is not None:
        rtts = map(float, options.rtts.split(","))
        write_record(options, table, dict(zip(rtts, links, strict=True)))
    print_columns(table, temperatures, links, ways)
    print_speeds(table, temperatures, links, ways)
    print_kinds(table, temperatures, links, ways, options.kinds.split(","))
    return 0


_RECORDED: Final = {
    STREAMING.name: "target-only",
    DEVICE.name: "edgespec",
    SERVER.name: "server-draft",
    BOTH.name: "both",
}
"""Names of the arms in the pictures' records."""


def describe_times(times: str) -> str:
    pass_ms, step_ms, server_ms = times.split(",")
    return (
        f"virtual time: target {pass_ms} ms a pass, draft {step_ms} ms a step, on the server"
        f" {server_ms} ms"
    )


def write_record(options: argparse.Namespace, table: Table, links: Mapping[float, Link]) -> None:
    """Write what ``tools.draw_bench`` draws: greedy times a token by round trip."""
    rows, tokens = [], 0
    for rtt_ms, link in links.items():
        base = [one.tpot_ms for one in table.played[0.0, link.name, STREAMING.name]]
        for way, arm in _RECORDED.items():
            texts = table.played[0.0, link.name, way]
            tpots = [one.tpot_ms for one in texts]
            tokens += sum(one.tokens for one in texts)
            interval = [round(one, 3) for one in mean_interval(tpots)]
            rows.append(
                {
                    "arm": arm,
                    "rtt_ms": rtt_ms,
                    "mismatches": 0,
                    "tpot_ms_mean": round(fmean(tpots), 3),
                    "speedup": round(fmean(base) / fmean(tpots), 3),
                    "interval": {"tpot_ms_mean": interval},
                }
            )
    names = [one.name for kind in options.kinds.split(",") for one in BUILT_IN[kind]]
    settings = {
        "repeats": 1,
        "prompt_names": names,
        "max_tokens": 96,
        "vanilla_gamma": {},
        "target_name": options.target,
        "draft_name": options.draft_name,
        "temperature": 0.0,
        "timing": describe_times(options.times),
    }
    head = {
        "command": f"python benchmarks/real_pair.py speed --times {options.times}",
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": list_versions(),
        "settings": settings,
        "results": [{"tokens": tokens}],
    }
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    lines = ",\n ".join(map(json.dumps, rows))
    text = "{" + ",\n".join([*parts, f'"summary": [\n {lines}\n]']) + "}\n"
    options.record.write_text(text, encoding="utf-8")


def play_race(options: argparse.Namespace) -> int:
    """Write what ``tools.draw_race`` draws: one greedy text under four ways of decoding."""
    texts = read_texts(options.store / "texts-0.jsonl")
    text = next(one for one in texts if one.name == options.text)
    text = replace(text, tokens=text.tokens[: options.tokens], max_tokens=options.tokens)
    model = open_draft(options.store, options.draft)
    times, link = Times.of_ms(*map(float, options.times.split(","))), constant_link(options.rtt)
    tokenizer = load_tokenizer(options.model)
    shown = {
        "plain streaming": STREAMING,
        "edgespec, device alone": DEVICE,
        "the server alone": SERVER,
        "edgespec, both": BOTH,
    }
    arms = {}
    for name, way in shown.items():
        deliveries: list[Delivery] = []
        play([text], way, link, times, model, watch=deliveries.append)
        (delivery,) = deliveries
        first_s = delivery.times_s[0]
        arms[name] = {
            "at_ms": [round(1e3 * (at_s - first_s)) for at_s in delivery.times_s],
            "kinds": "".join(one.value[0] for one in delivery.kinds),
        }
    stream, pieces = tokenizer.stream(), []
    for token in text.tokens:
        pieces.append(stream.push([token]))
    prompt = next(one.text for one in BUILT_IN[text.kind] if one.name == text.name)
    pass_ms, step_ms, server_ms = map(float, options.times.split(","))
    settings = {
        "rtt_ms": options.rtt,
        "pass_ms": pass_ms,
        "draft_ms": step_ms,
        "server_draft_ms": server_ms,
        "prompt_name": text.name,
        "pair": f"{options.target} and {options.draft_name}, in virtual time",
    }
    content = {
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": settings,
        "prompt": prompt + "\n\n",
        "tokens": pieces,
        "arms": arms,
    }
    options.record.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


# --- the default beside fixed settings -----------------------------------------------------------


def fixed_settings() -> list[Way]:
    """Return the fixed ways of decoding with which the default is compared."""
    found = [STREAMING]
    for ahead in (RunAhead.NEVER, RunAhead.AUTO):
        behind = "" if ahead is RunAhead.NEVER else ", run-ahead"
        for width in (1, 2, 4):
            found += [
                Way(f"depth {depth}, width {width}{behind}", FixedPolicy(depth, width), ahead)
                for depth in range(1, 9)
            ]
        found.append(Way(f"pearl{behind}", PearlPolicy(), ahead))
        for width in (1, 2):
            policy = WindowedPolicy(width=width, gather_share=GATHER_SHARE)
            found.append(Way(f"windowed, width {width}{behind}", policy, ahead))
    return found


def networks(options: argparse.Namespace) -> int:
    """Print the default's time a token over that of the best fixed setting of each network."""
    folder = Path(os.environ["EDGESPEC_DATA"]) / "traces"
    fixed, few, whole = fixed_settings(), Table(options), Table(options)
    temperatures = [*map(float, options.temperatures.split(","))]
    print("| network | T | default, ms a token | best fixed | ms a token | default over it |")
    print("| --- | ---: | ---: | --- | ---: | --- |")
    ratios = dict[float, list[float]]()
    for trace in TRACES:
        link = traced_link(folder / trace)
        for temperature in temperatures:
            few.play([temperature], [link], fixed, _FEW)
            means = {
                way.name: fmean(one.tpot_ms for one in few.played[temperature, link.name, way.name])
                for way in fixed
            }
            chosen = sorted(fixed, key=lambda way: means[way.name])[:_CHOSEN]
            whole.play([temperature], [link], [DEVICE, *chosen])
            found = whole.played
            ours = found[temperature, link.name, DEVICE.name]
            best = min(
                (found[temperature, link.name, way.name] for way in chosen),
                key=lambda texts: fmean(one.tpot_ms for one in texts),
            )
            name = next(way for way in chosen if found[temperature, link.name, way.name] is best)
            mean, other = (fmean(one.tpot_ms for one in side) for side in (ours, best))
            ratios.setdefault(temperature, []).append(mean / other)
            print(
                f"| {link.name} | {temperature:g} | {mean:.2f} | {name.name} | {other:.2f} |"
                f" {time_ratio(ours, best, 3)} |",
                flush=True,
            )
    for temperature, values in ratios.items():
        print(
            f"temperature {temperature:g}: mean of {len(values)} networks"
            f" {shown(fmean(values), mean_interval(values), 3)}, highest {max(values):.3f}"
        )
    whole.write(options.json)
    return 0


# --- variants of the default ---------------------------------------------------------------------


def variants() -> list[Way]:
    """Return variants of the default policy, the default first."""

    def goodput(name: str, **changes: Any) -> Way:
        return replace(
            DEVICE, name=name, policy=GoodputPolicy(gather_share=GATHER_SHARE, **changes)
        )

    found = [DEVICE]
    found += [goodput(f"width {width}", width=width) for width in (1, 3, 4)]
    found += [
        goodput(f"second candidates from a chance of {chance:g}", min_candidate_chance=chance)
        for chance in (0.0, 0.1)
    ]
    found += [goodput(f"window of {steps} steps", window=steps) for steps in (1, 2, 4, 8, 16)]
    found += [
        replace(
            DEVICE,
            name=f"by rank, width {width}",
            policy=WindowedPolicy(width=width, gather_share=GATHER_SHARE),
        )
        for width in (1, 2)
    ]
    found.append(replace(DEVICE, name="with lookup", device_lookup=True))
    return found


def settings(options: argparse.Namespace) -> int:
    """Print each variant's time a token over the default's."""
    table, ways = Table(options), variants()
    temperatures = [*map(float, options.temperatures.split(","))]
    links = [constant_link(float(rtt)) for rtt in options.rtts.split(",")]
    table.play(temperatures, links, ways)
    table.write(options.json)
    print("| T | variant | " + " | ".join(one.name for one in links) + " |")
    print("| ---: | --- |" + " --- |" * len(links))
    for temperature in temperatures:
        for way in ways:
            cells = [
                time_ratio(
                    table.played[temperature, link.name, way.name],
                    table.played[temperature, link.name, DEVICE.name],
                    3,
                )
                for link in links
            ]
            print(f"| {temperature:g} | {way.name} | {' | '.join(cells)} |")
    return 0


# --- relaxed rules -------------------------------------------------------------------------------

_RULES: Final = ("typical", "dsd:0.5", "dsd:0.2", "bild:2", "top-k:2")


def rules(options: argparse.Namespace) -> int:
    """Print the speed of each relaxed rule over the exact one, and the tokens that it replaced."""
    target = load_target(VerifierConfig(model=options.model, threads=options.threads))
    model = open_draft(options.store, options.draft)
    times, link = Times.of_ms(*map(float, options.times.split(","))), constant_link(20.0)
    waits = Way("stop-and-wait, four deep", FixedPolicy(4), RunAhead.NEVER)
    print("| T | way | rule | ms a token | speed over exact | tokens/pass | replaced |")
    print("| ---: | --- | --- | --- | --- | ---: | ---: |")
    for temperature in map(float, options.temperatures.split(",")):
        texts = [
            replace(one, max_tokens=options.tokens, tokens=one.tokens[: options.tokens])
            for one in read_texts(options.store / f"texts-{temperature:g}.jsonl")
            if int(one.name.rpartition("-")[2]) <= options.each
        ]
        for way in (DEVICE, waits):
            exact: list[Outcome] = []
            for rule in (EXACT_RULE, *_RULES):
                found = play(texts, replace(way, rule=rule), link, times, model, target)
                exact = exact or found
                per_pass = sum(one.tokens for one in found) / sum(one.passes for one in found)
                tpots = [one.tpot_ms for one in found]
                shares = [one.replaced / one.tokens for one in found]
                print(
                    f"| {temperature:g} | {way.name} | {rule} | {fmean(tpots):.1f} |"
                    f" {time_ratio(exact, found)} | {per_pass:.2f} |"
                    f" {100 * fmean(shares):.1f} % |",
                    flush=True,
                )
    return 0


# --- beside a real bench -------------------------------------------------------------------------

_WAY_OF_ARM: Final = {"target-only": STREAMING, "edgespec": DEVICE}


def check(options: argparse.Namespace) -> int:
    """Print a real bench's greedy times a token and tokens a pass beside those in virtual time."""
    bench = json.loads(options.bench.read_text(encoding="utf-8"))
    asked = bench["settings"]
    assert asked["temperature"] == 0.0, "the bench must be greedy"
    texts = {one.name: one for one in read_texts(options.store / "texts-0.jsonl")}
    chosen = [texts[name] for name in asked["prompt_names"]]
    times = Times.of_ms(asked["pass_ms"], asked["draft_ms"], asked["server_draft_ms"])
    model = open_draft(options.store, options.draft)
    print("| RTT ms | arm | ms a token, real | virtual | over real | tokens/pass, real | virtual |")
    print("| ---: | --- | ---: | ---: | --- | ---: | ---: |")
    for row in bench["results"]:
        link = constant_link(row["rtt_ms"])
        found = play(chosen, _WAY_OF_ARM[row["arm"]], link, times, model)
        ours = [one.tpot_ms for one in found]
        tokens = sum(one.tokens for one in found) / sum(one.passes for one in found)
        print(
            f"| {row['rtt_ms']:g} | {row['arm']} | {fmean(row['tpots_ms']):.1f} |"
            f" {fmean(ours):.1f} | {fmean(ours) / fmean(row['tpots_ms']):.3f}"
            f" | {row['tokens_per_pass']:.2f} | {tokens:.2f} |"
        )
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record", help="record the target's texts")
    recording.add_argument("--model", required=True, help="target")
    recording.add_argument("--tokens", type=int, default=96, help="of each text")
    recording.add_argument("--threads", type=int, default=1)
    recording.set_defaults(run=record)
    everything = [recording]
    for command, temperatures in ((speed, "0,0.7,1"), (networks, "0,0.7"), (settings, "0,0.7,1")):
        one = commands.add_parser(command.__name__, help=command.__doc__)
        one.add_argument("--draft", type=Path, required=True, help="folder of an exported draft")
        one.add_argument("--times", default="25,8,2.5", help="ms of pass, step, server's step")
        one.add_argument("--temperatures", default=temperatures, help="with commas")
        one.add_argument("--kinds", default=",".join(KINDS), help="sets of prompts, with commas")
        one.add_argument("--rtts", default="2,20,50,100,200", help="milliseconds, with commas")
        known = ", ".join([*WAYS, *PUBLISHED])
        one.add_argument(
            "--ways", default=",".join(WAYS), help=f"of speed, with commas, of: {known}"
        )
        one.add_argument("--json", type=Path, help="file for the outcomes of all texts")
        one.add_argument("--jobs", type=int, default=2, help="processes")
        one.add_argument("--record", type=Path, help="of speed: file for `tools.draw_bench`")
        one.add_argument("--target", default="SmolLM2-135M-Instruct", help="name for a picture")
        one.add_argument("--draft-name", default="its export in 4 bits", help="for a picture")
        one.set_defaults(run=command)
        everything.append(one)
    relaxed = commands.add_parser("rules", help=rules.__doc__)
    relaxed.add_argument("--model", required=True, help="target")
    relaxed.add_argument("--draft", type=Path, required=True, help="folder of an exported draft")
    relaxed.add_argument("--times", default="25,8,2.5", help="ms of pass, step, server's step")
    relaxed.add_argument("--temperatures", default="0,1", help="with commas")
    relaxed.add_argument("--each", type=int, default=3, help="texts of each set")
    relaxed.add_argument("--tokens", type=int, default=48, help="of each text")
    relaxed.add_argument("--threads", type=int, default=1)
    relaxed.set_defaults(run=rules)
    racing = commands.add_parser("race", help=play_race.__doc__)
    racing.add_argument("--model", required=True, help="target, for its tokenizer")
    racing.add_argument("--draft", type=Path, required=True, help="folder of an exported draft")
    racing.add_argument("--times", default="25,8,2.5", help="ms of pass, step, server's step")
    racing.add_argument("--rtt", type=float, default=50, help="milliseconds")
    racing.add_argument("--text", default="chat-7", help="name of the prompt")
    racing.add_argument("--tokens", type=int, default=64)
    racing.add_argument("--target", default="SmolLM2-135M-Instruct", help="name for the picture")
    racing.add_argument("--draft-name", default="its export in 4 bits", help="for the picture")
    racing.add_argument("--record", type=Path, required=True, help="file for `tools.draw_race`")
    racing.set_defaults(run=play_race)
    checking = commands.add_parser("check", help=check.__doc__)
    checking.add_argument("--draft", type=Path, required=True, help="folder of an exported draft")
    checking.add_argument("--bench", type=Path, required=True, help="of `edgespec bench --json`")
    checking.set_defaults(run=check)
    everything += [relaxed, racing, checking]
    for one in everything:
        one.add_argument("--store", type=Path, required=True, help="folder of texts and candidates")
    options = parser.parse_args()
    run: Callable[[argparse.Namespace], int] = options.run
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
