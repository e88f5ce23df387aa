"""Drafts made of a target's own layers: how often they are right, what they cost, what they bring.

    edgespec distill --target T --prompts many.jsonl --chat --record --out texts -t 0
    edgespec distill --target T --prompts chat.jsonl --chat --record --out judged -t 0
    python benchmarks/draft_curve.py cuts --target T --texts texts --judged judged
        [--counts 30,28,26] [--choose-by 6] [--stride 3]
    python benchmarks/draft_curve.py train --target T --texts texts --out CHECKPOINT
        [--layers 0,1,29] [--vocabulary 8192] [--loss first-choice] [--steps 200] [--rows 4]
    python benchmarks/draft_curve.py judge --judged judged --store DIR T-INT4 DRAFT...
    python benchmarks/draft_curve.py grid --judged judged --reference T-INT4

``texts`` and ``judged`` are recordings of the target's own greedy texts, after different prompts.
A draft is *right* where its first choice behind a prefix of ``judged`` is the token there, which is
the acceptance of a chain of one at temperature 0.

``cuts`` leaves out layers of the target and trains nothing. For each count of layers it compares
blocks of neighbours to leave out (each ``--stride``-th one) with leaving out the layers that matter
least one by one, on a few of ``texts``; the best way is judged, in float32.
``train`` trains a part of the target, or all of it, through the rounding. It prints the learning
curve at ten places, by processor time, on a few of ``texts`` that are held back and choose the best
weights. It continues with the state beside ``--out`` after an interruption. With ``--steps 0``
the part is written as it is.
``judge`` runs exported drafts for real. The first one is the reference, whose step stands for 8 ms
of virtual time; a step of another draft takes as much of that as its processor time. A pass takes
25 ms. ``grid`` shows for made-up drafts which share of right choices pays at which time of a step.
They are right more often where the reference is more certain.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, Final
from zlib import crc32

import torch

from edgespec.bench.intervals import mean_interval, ratio_interval
from edgespec.core.ports import Candidate, ModelInfo
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.drafters.manifest import read_manifest
from edgespec.device.drafters.onnx_drafter import OnnxDrafter
from edgespec.device.export.export import export_draft
from edgespec.models.folders import model_info
from edgespec.telemetry.recording import read_recording
from edgespec.training.cut import cut_model, select_frequent_ids, soften
from edgespec.training.distill import (
    Distillation,
    Progress,
    choose_threads,
    load_model,
    read_state,
    save_state,
    write_checkpoint,
)
from edgespec.training.settings import Budget, LossName, TrainingSettings
from edgespec.training.texts import HeldBack, Text, end_ids, read_pieces
from tests.sim import pair_worlds as pw

_CONTEXT: Final = 1024
_BEHIND, _STEPS = 256, 60
_PASS_MS, _STEP_MS, _SERVER_MS = 25.0, 8.0, 2.5
_SHARES: Final = (0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9)


def read_judged(path: Path, vocabulary: str) -> list[Text]:
    return [Text(one.tokens.tolist(), one.start) for one in read_recording(path, vocabulary)]


def read_texts(path: Path, length: int, vocabulary: str) -> list[Text]:
    pieces = read_pieces([path], lambda text: [], length, vocabulary, as_prompts=False)
    return [piece for text in pieces for piece in text]


def make_held_back(texts: Sequence[Text], size: int) -> HeldBack:
    """Return the texts as held back, with their own tokens as the target's choices among ``size``
    ids."""
    wanted = [torch.tensor(text.tokens[text.start :]) for text in texts]
    rounds = [(list(range(len(texts))), [(0.0, [tuple(text) for text in texts], wanted)])]
    return HeldBack(None, (), 0, size, lambda: None, kept=rounds)


def show(values: Sequence[float], digits: int = 3) -> str:
    low, high = mean_interval(values)
    return f"{fmean(values):.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


# --- cuts without training -----------------------------------------------------------------------


class CutModel:
    """A model of which some layers can be left out for a while."""

    def __init__(self, model: Any) -> None:
        self._model, self._layers = model, list(model.base_model.layers)
        self.count = len(self._layers)

    def acceptance(self, kept: Sequence[int], held: HeldBack) -> list[float]:
        """Return the share of right choices in each text, with the layers ``kept``."""
        self._model.base_model.layers = torch.nn.ModuleList([self._layers[one] for one in kept])
        self._model.config.num_hidden_layers = len(kept)
        try:
            return held.acceptance(self._model)[0.0]
        finally:
            self._model.base_model.layers = torch.nn.ModuleList(self._layers)
            self._model.config.num_hidden_layers = self.count


def run_cuts(options: argparse.Namespace) -> None:
    """Print how often parts of the target are right that were not trained."""
    vocabulary = model_info(options.target).vocabulary
    target = load_model(options.target, exact=True)
    torch.set_num_threads(options.threads)
    size = int(target.config.vocab_size)
    texts = read_texts(options.texts, options.length, vocabulary)[: options.choose_by]
    choosing = make_held_back(texts, size)
    judged = make_held_back(read_judged(options.judged, vocabulary)[: options.limit], size)
    whole = CutModel(target)

    def score(kept: Sequence[int]) -> float:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fmean(whole.acceptance(kept, choosing))

    everything = list(range(whole.count))
    alone = {one: score([x for x in everything if x != one]) for one in everything}
    order = sorted(everything, key=lambda one: -alone[one])
    print("layers that matter least first:", ",".join(map(str, order)), flush=True)
    print("| layers | left out | right |\n| ---: | --- | --- |")
    for count in map(int, options.counts.split(",")):
        gone = whole.count - count
        firsts = range(0, count + 1, options.stride)
        ways = [list(range(first, first + gone)) for first in firsts]
        ways.append(sorted(order[:gone]))
        parts = [[one for one in everything if one not in set(way)] for way in ways]
        best = max(parts, key=score) if gone else everything
        left_out = ",".join(str(one) for one in everything if one not in set(best)) or "–"
        print(f"| {count} | {left_out} | {show(whole.acceptance(best, judged))} |", flush=True)


# --- training ------------------------------------------------------------------------------------


def run_train(options: argparse.Namespace) -> None:
    """Train a part of the target and print its learning curve."""
    vocabulary = model_info(options.target).vocabulary
    texts = read_texts(options.texts, options.length, vocabulary)
    choosing = texts[:: max(1, len(texts) // options.choose_by)][: options.choose_by]
    texts = [text for text in texts if text not in choosing]
    target = load_model(options.target, exact=True)
    if options.threads:
        torch.set_num_threads(options.threads)
    else:
        choose_threads(target)
    size, kept = int(target.config.vocab_size), None
    if options.vocabulary:
        ends = {one for one in end_ids(target) if one is not None}
        kept = select_frequent_ids(texts, size, options.vocabulary, ends)
        known = set(kept.ids)
        share = fmean(token in known for one in choosing for token in one.tokens[one.start :])
        print(f"{share:.3f} of the tokens held back have a row", flush=True)
    is_part = bool(options.layers or kept)
    draft = cut_model(target, [int(one) for one in options.layers.split(",") if one], kept)
    print(f"logits times {soften(draft, texts[:8])}", flush=True)
    weights = sum(weight.numel() for weight in draft.parameters())
    count = sum(len(one.tokens) - one.start for one in texts)
    print(f"{weights / 1e6:.1f} M weights; {len(texts)} texts, {count} tokens to learn", flush=True)
    settings = TrainingSettings(
        LossName(options.loss),
        length=options.length,
        rows=options.rows,
        learning_rate=options.rate,
        temperatures=(0.0,),
    )
    held = make_held_back(choosing, size)
    job = Distillation(target, draft, texts, held, settings, lambda: None)
    state = options.out.with_name(f"{options.out.name}.state")
    spent_s = 0.0
    if state.exists():
        saved = read_state(state)
        spent_s = saved.pop("spent_s")
        job.restore(saved)
    began_s = time.process_time()
    score, seen = job.acceptance, job.tokens

    def print_point(loss: float) -> None:
        minutes = (spent_s + time.process_time() - began_s) / 60
        print(f"| {seen} | {minutes:.1f} | {score:.3f} | {loss:.3f} |", flush=True)

    def save() -> None:
        save_state(state, {**job.state(), "spent_s": spent_s + time.process_time() - began_s})

    def report(now: Progress) -> None:
        nonlocal score, seen
        if now.acceptance != score:
            score = now.acceptance
            print_point(now.loss)
        seen = job.tokens

    print("| tokens | processor minutes | right | loss |\n| ---: | ---: | ---: | ---: |")
    print_point(math.nan)
    if options.steps or options.minutes:
        budget = Budget(0 if options.minutes else options.steps, options.minutes)
        job.run(budget, report, save)
    score, seen = fmean(held.acceptance(draft)[0.0]), job.tokens
    print_point(math.nan)
    options.out.mkdir(parents=True, exist_ok=True)
    write_checkpoint(draft, options.target, options.out, options.length - 1, is_new=is_part)
    state.unlink(missing_ok=True)


# --- exported drafts -----------------------------------------------------------------------------


def measure_step_ms(folder: Path, threads: int) -> float:
    """Return the processor time of a step, the median of several."""
    drafter, times = OnnxDrafter(folder, threads=threads), list[float]()
    drafter.begin(_BEHIND, SamplingParams())
    (best,) = drafter.step(0, [1] * _BEHIND, 1)
    for place in range(_BEHIND, _BEHIND + _STEPS):
        began = time.process_time()
        (best,) = drafter.step(place, [best.token], 1)
        times.append(1e3 * (time.process_time() - began))
    drafter.close()
    return median(times)


def measure_right(folder: Path, texts: Sequence[Text]) -> list[float]:
    """Return the share of right first choices in each text."""
    drafter, shares = OnnxDrafter(folder, threads=1), list[float]()
    for text in texts:
        drafter.begin(text.start, SamplingParams())
        hits, fed = 0, 0
        for place in range(text.start, len(text.tokens)):
            (best,) = drafter.step(fed, text.tokens[fed:place], 1)
            hits += best.token == text.tokens[place]
            fed = place
        shares.append(hits / (len(text.tokens) - text.start))
    drafter.close()
    return shares


def make_outputs(texts: Sequence[Text]) -> list[pw.Text]:
    """Return the texts as outputs after prompts, for worlds in virtual time."""
    return [
        pw.Text(
            "chat",
            f"judged-{number}",
            0.0,
            number,
            tuple(text.tokens[: text.start]),
            tuple(text.tokens[text.start :]),
            len(text.tokens) - text.start,
        )
        for number, text in enumerate(texts)
    ]


def export_if_needed(path: Path, work: Path) -> Path:
    """Return the folder of an exported draft; a checkpoint is exported to 4 bits into ``work``."""
    if (path / "model.onnx").is_file():
        return path
    folder = work / path.resolve().name
    if not folder.exists():
        export_draft(path, folder, context_length=_CONTEXT)
    return folder


def run_judge(options: argparse.Namespace) -> None:
    """Print what exported drafts cost and bring beside the first one, and beside lookup."""
    reference = read_manifest(options.drafts[0]).model
    texts = read_judged(options.judged, reference.vocabulary)[: options.limit]
    outputs, rtts = make_outputs(texts), [*map(float, options.rtts.split(","))]
    links = [pw.constant_link(rtt) for rtt in rtts]
    worlds: dict[tuple[str, str], list[float]] = {}

    def play(name: str, way: pw.Way, step_ms: float, model: pw.DraftModel) -> None:
        times = pw.Times.of_ms(_PASS_MS, step_ms, _SERVER_MS)
        for link in links:
            found = pw.play(outputs, way, link, times, model)
            worlds[name, link.name] = [one.tpot_ms for one in found]

    def describe(name: str) -> Iterator[str]:
        for link in links:
            base, mine = worlds["target-only", link.name], worlds[name, link.name]
            low, high = ratio_interval(base, mine)
            yield f"{fmean(base) / fmean(mine):.2f} ({low:.2f}–{high:.2f})"

    nothing = pw.DraftModel(reference, options.store / "none")
    play("target-only", pw.STREAMING, _STEP_MS, nothing)
    print("| draft | MiB | right | ms a step, 1 thread | 2 threads | virtual ms |", end="")
    print("".join(f" speed at {rtt:g} ms |" for rtt in rtts), "with lookup |" * len(rtts))
    print("| --- | ---: | --- | ---: | ---: | ---: |" + " --- |" * 2 * len(rtts))
    play("lookup", pw.LOOKUP, 0.0, nothing)
    print(f"| lookup | 0 | – | 0 | 0 | 0 | {' | '.join(describe('lookup'))} |", flush=True)
    first_ms = 0.0
    for path in options.drafts:
        folder = export_if_needed(path, options.store)
        name = path.resolve().name
        stored = sum(one.stat().st_size for one in folder.glob("model.onnx*"))
        right = measure_right(folder, texts)
        one, two = (measure_step_ms(folder, threads) for threads in (1, 2))
        first_ms = first_ms or one
        virtual_ms = _STEP_MS * one / first_ms
        model = pw.DraftModel(
            reference,
            options.store / f"{name}-candidates",
            lambda folder=folder: OnnxDrafter(folder, threads=1),  # type: ignore[misc]
        )
        play(name, pw.DEVICE, virtual_ms, model)
        columns = [f"{stored / 2**20:.1f}", show(right), f"{one:.2f}", f"{two:.2f}"]
        columns += [f"{virtual_ms:.2f}", *describe(name)]
        if options.lookup:
            play(f"{name}+", pw.DEVICE_AND_LOOKUP, virtual_ms, model)
            columns += describe(f"{name}+")
        print(f"| {name} | {' | '.join(columns)} |", flush=True)


# --- made-up drafts ------------------------------------------------------------------------------


class MadeUpDraft(pw.DraftModel):
    """A draft that is right by chance, more often where the reference is more certain.

    ``scores`` holds, for each place of each text, the logit of the reference's certainty of its
    first choice there. The chance of the made-up draft is the sigmoid of that and a shift, with
    which the mean over all places is ``share``. The draft knows the chance, and has no second
    choice."""

    def __init__(
        self, info: ModelInfo, folder: Path, scores: Mapping[str, Sequence[float]], share: float
    ) -> None:
        super().__init__(info, folder)
        every = [score for text in scores.values() for score in text]
        low, high = -30.0, 30.0
        while high - low > 1e-6:
            shift = (low + high) / 2
            is_low = fmean(chance_of(score + shift) for score in every) < share
            low, high = (shift, high) if is_low else (low, shift)
        self._chances = {name: [chance_of(x + low) for x in text] for name, text in scores.items()}
        self._name, self._tokens = "", tuple[int, ...]()

    def choose(self, text: pw.Text) -> None:
        self._tokens, self._name = text.tokens, text.name

    def candidates(self, after: tuple[int, ...]) -> tuple[Candidate, ...]:
        place = min(len(after), len(self._tokens) - 1)
        chance = self._chances[self._name][place]
        drawn = crc32(f"{self._name}:{place}".encode()) / 2**32
        is_right = after == self._tokens[:place] and drawn < chance
        token = self._tokens[place]
        return (Candidate(token if is_right else (token + 1) % 1000, math.log(chance)),)


def chance_of(score: float) -> float:
    """Return the sigmoid of ``score``, kept a little away from 0 and 1."""
    return min(0.999, max(0.001, 1.0 / (1.0 + math.exp(-score))))


def measure_scores(folder: Path, texts: Sequence[Text]) -> list[list[float]]:
    """Return the logit of the draft's certainty of its first choice at each place of the texts."""
    drafter, found = OnnxDrafter(folder, threads=1), list[list[float]]()
    for text in texts:
        drafter.begin(text.start, SamplingParams())
        scores, fed = list[float](), 0
        for place in range(text.start, len(text.tokens)):
            (best,) = drafter.step(fed, text.tokens[fed:place], 1)
            chance = min(0.999, max(0.001, math.exp(best.logprob)))
            scores.append(math.log(chance / (1.0 - chance)))
            fed = place
        found.append(scores)
    drafter.close()
    return found


def run_grid(options: argparse.Namespace) -> None:
    """Print the speed over target-only by share of right choices and time of a step."""
    info = read_manifest(options.reference).model
    texts = read_judged(options.judged, info.vocabulary)[: options.limit]
    outputs = make_outputs(texts)
    measured = measure_scores(options.reference, texts)
    scores = {one.name: found for one, found in zip(outputs, measured, strict=True)}
    links = [pw.constant_link(float(rtt)) for rtt in options.rtts.split(",")]
    steps = [*map(float, options.steps_ms.split(","))]
    with TemporaryDirectory() as work:
        drafts = [MadeUpDraft(info, Path(work), scores, share) for share in _SHARES]
        for link in links:
            print(f"| {link.name}: ms a step | " + " | ".join(f"{one:g}" for one in _SHARES), "|")
            print("| ---: |" + " ---: |" * len(_SHARES))
            times = pw.Times.of_ms(_PASS_MS, _STEP_MS, _SERVER_MS)
            base = [one.tpot_ms for one in pw.play(outputs, pw.STREAMING, link, times, drafts[0])]
            for step_ms in steps:
                times = pw.Times.of_ms(_PASS_MS, step_ms, _SERVER_MS)
                cells = []
                for draft in drafts:
                    found = pw.play(outputs, pw.DEVICE, link, times, draft)
                    cells.append(f"{fmean(base) / fmean(one.tpot_ms for one in found):.2f}")
                print(f"| {step_ms:g} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    parts: Mapping[str, argparse.ArgumentParser] = {
        run.__name__.removeprefix("run_"): commands.add_parser(
            run.__name__.removeprefix("run_"), help=run.__doc__
        )
        for run in (run_cuts, run_train, run_judge, run_grid)
    }
    for name, run in zip(parts, (run_cuts, run_train, run_judge, run_grid), strict=True):
        parts[name].set_defaults(run=run)
        if name != "train":
            parts[name].add_argument("--judged", type=Path, required=True, help="to judge by")
    for name in ("cuts", "train"):
        parts[name].add_argument("--target", type=Path, required=True, help="checkpoint's folder")
        parts[name].add_argument("--texts", type=Path, required=True, help="recording to learn")
        parts[name].add_argument("--length", type=int, default=512, help="tokens of a text")
        parts[name].add_argument("--threads", type=int, default=1, help="0 chooses")
        parts[name].add_argument("--choose-by", type=int, default=6, help="of them held back")
    for name in ("judge", "grid"):
        parts[name].add_argument("--rtts", default="20,50", help="milliseconds, with commas")
    for name in ("cuts", "judge", "grid"):
        parts[name].add_argument("--limit", type=int, default=1000, help="texts to judge by")
    cuts, train, judge, grid = parts.values()
    cuts.add_argument("--counts", default="30,28,26,24,20,15,10,6,4,2", help="layers to keep")
    cuts.add_argument("--stride", type=int, default=1, help="between blocks to compare")
    train.add_argument("--layers", default="", help="numbers, such as 0,1,29; empty for all")
    train.add_argument("--vocabulary", type=int, default=0, help="ids to keep; 0 for all")
    train.add_argument("--loss", default="first-choice", help="as of `edgespec distill`")
    train.add_argument("--steps", type=int, default=200)
    train.add_argument("--minutes", type=float, default=0.0, help="instead of steps")
    train.add_argument("--rows", type=int, default=4, help="texts of a step")
    train.add_argument("--rate", type=float, default=0.0, help="learning rate; 0 derives it")
    train.add_argument("--out", type=Path, required=True, help="folder for the trained draft")
    judge.add_argument("drafts", type=Path, nargs="+", help="exported drafts or checkpoints")
    judge.add_argument("--store", type=Path, required=True, help="folder for candidates")
    judge.add_argument("--lookup", action="store_true", help="also beside lookup")
    grid.add_argument("--reference", type=Path, required=True, help="exported draft of the target")
    grid.add_argument("--steps-ms", default="1,2,4,6,8", help="with commas")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
