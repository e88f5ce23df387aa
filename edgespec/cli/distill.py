"""``edgespec distill``: a draft learns to guess a target's tokens on a user's kind of text."""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from edgespec.bench.runner import BenchProgress
from edgespec.cli.export import DEFAULT_BITS, check_free, placed
from edgespec.cli.options import option
from edgespec.cli.running import Interrupted, Stopping, answered_by, fail, reported, say
from edgespec.config import ConfigError
from edgespec.config.common import needs
from edgespec.models import folders
from edgespec.models.tokenizer import TextTokenizer, prompt_encoder
from edgespec.training.settings import Budget, LossName, TrainingSettings

if TYPE_CHECKING:
    from edgespec.training.distill import Judged, Progress, Verdict
    from edgespec.training.texts import Pieces

_DEFAULT_MINUTES: Final = 10.0
_SAY_EVERY_S: Final = 10.0
_what, _text, _how = (
    partial(option, panel=panel) for panel in ("What is trained", "The text", "How")
)
_DEFAULTS = TrainingSettings()
_DRAFT = _what("Draft to begin with: a Hugging Face folder or Hub id")
_OUT = _what("Folder to write; must not hold anything yet, or with --online a draft", "--out")
_RESUME = _what("Go on with the run that was stopped or refused", "--resume")
_FORCE = _what("Write the draft even if it is not better", "--force")
_PROMPTS = _text(
    "Prompts, after which the target writes: JSON Lines as for `bench --prompts`, or plain text;"
    " may be given more than once",
    metavar="FILE",
)
_TEXTS = _text("Texts to learn from as they are, in the same formats", metavar="FILE")
_ONLINE = _text(
    "Texts that `--record` kept, to learn from: a draft in --out learns on, and is replaced if the"
    " new one is better beyond its interval; may be given more than once",
    "--online",
    metavar="RECORDING",
)
_CHAT = _text("Wrap prompts by the target's chat template", "--chat")
_HEAT = _text(
    "Of what is written; several take turns \\[default: 0 and 0.7]", "--temperature", "-t"
)
_LENGTH = _text("Tokens of a text, half of them for its prompt")
_LOSS = _how("What is made small; the papers are in docs/papers.md")
_MINUTES = _how(f"How long to train \\[default: {_DEFAULT_MINUTES:g}]")
_STEPS = _how("Train so many steps instead: the same seed, the same weights")
_BITS = _how("Of the export to come: 4, 8 or 32", "--bits")
_RATE = _how("0: by the size of the draft, with --online a fifth of it", "--learning-rate")
_ONLINE_RATE: Final = 0.2


def distill(
    out: Annotated[Path, _OUT],
    target: Annotated[str, _what("Target, as of a verifier")] = folders.BUNDLED,
    draft: Annotated[str, _DRAFT] = folders.BUNDLED,
    resume: Annotated[bool, _RESUME] = False,
    force: Annotated[bool, _FORCE] = False,
    prompts: Annotated[list[Path] | None, _PROMPTS] = None,
    texts: Annotated[list[Path] | None, _TEXTS] = None,
    online: Annotated[list[Path] | None, _ONLINE] = None,
    chat: Annotated[bool, _CHAT] = False,
    temperature: Annotated[list[float] | None, _HEAT] = None,
    length: Annotated[int, _LENGTH] = _DEFAULTS.length,
    loss: Annotated[LossName, _LOSS] = _DEFAULTS.loss,
    minutes: Annotated[float | None, _MINUTES] = None,
    steps: Annotated[int | None, _STEPS] = None,
    seed: Annotated[int, _how("Of all chance")] = 0,
    bits: Annotated[int, _BITS] = DEFAULT_BITS,
    learning_rate: Annotated[float, _RATE] = 0.0,
) -> None:
    """Train a draft on a target and on texts like yours, so that more guesses are right.

    Acceptance before and after is counted on texts that are held back; a draft that is not better
    is not written. Ctrl-C keeps what was learned for --resume.

    [dim]edgespec distill --prompts mine.jsonl --out ./mine[/]

    [dim]edgespec distill --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --chat --prompts mine.jsonl
    --minutes 60 --out ./mine[/]

    [dim]edgespec distill --online ./recording --out ./mine[/]
    """
    with reported():
        if sum(map(bool, (prompts, texts, online))) != 1:
            raise ConfigError("give either --prompts or --texts or --online")
        files = prompts or texts or online or []
        if chat and (not prompts or any(file.suffix != ".jsonl" for file in files)):
            raise ConfigError("--chat wraps the prompts of .jsonl files, and nothing else")
        try:
            heat = tuple(temperature or _DEFAULTS.temperatures)
            share = _ONLINE_RATE if online else 1.0
            settings = TrainingSettings(loss, seed, length, heat, bits, learning_rate, share)
            if minutes is None and steps is None:
                minutes = _DEFAULT_MINUTES
            budget = Budget(steps or 0, minutes or 0.0)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if online:
            draft = _in_use(out, draft)
        else:
            check_free(out)
        models = (
            folders.resolve_model(target, folders.Role.TARGET),
            folders.resolve_model(draft, folders.Role.DRAFT),
        )
        job = _Job(*models, files, out, settings, chat, bool(prompts), bool(online), resume, force)
        with needs("torch and transformers", "edgespec[server]"):
            job.run(budget)


def _before(out: Path) -> Path:
    """Where the draft is kept that was in ``out`` before."""
    return out.with_name(f"{out.name}.before")


def _in_use(out: Path, draft: str) -> str:
    """The draft to begin with, by its name: the one in ``out``, or else ``draft``."""
    if (before := _before(out)).exists():
        folders.check_checkpoint(before)  # it will be removed
        if not out.exists():  # a run was killed between two renames
            before.rename(out)
    return str(out) if out.is_dir() and any(out.iterdir()) else draft


@dataclass
class _Job:
    """One training, from its files to its folder."""

    target: Path
    draft: Path
    files: Sequence[Path]
    out: Path
    settings: TrainingSettings
    chat: bool
    as_prompts: bool
    online: bool
    resume: bool
    force: bool

    def __post_init__(self) -> None:
        self._kept = self.out.with_name(f"{self.out.name}.training")
        folders.check_folder(self.target)
        if (self.draft / folders.DRAFT_MANIFEST).is_file() and not any(
            self.draft.glob("*.safetensors")
        ):
            raise folders.ModelFolderError(
                f"{self.draft}: an exported draft has no weights to be trained; give the"
                " checkpoint that it was made from"
            )
        folders.check_checkpoint(self.draft)
        theirs, own = folders.model_info(self.target), folders.model_info(self.draft)
        if theirs.vocabulary != own.vocabulary:
            raise folders.ModelFolderError(
                f"the draft's vocabulary is {own.vocabulary}, the target's {theirs.vocabulary}: a"
                " draft can only learn from a target with the same tokenizer"
            )
        self._vocabulary = theirs.vocabulary
        context = min(theirs.context_length, own.context_length)
        if (length := self.settings.length) > context:
            raise ConfigError(f"length is {length}, but the context is {context} tokens")

    def run(self, budget: Budget) -> None:
        from edgespec.training import distill as training
        from edgespec.training.texts import HeldBack, Text, read_pieces, split

        begun = f"{self._kept} is a run that was not finished"
        resume = self.resume
        if self.online and self._kept.exists() and not resume:
            say(f"{begun}: it goes on, with the texts it had")
            resume = True
        if self._kept.exists() != resume:
            none = f"there is no {self._kept} to go on from"
            fail(none if resume else f"{begun}: give --resume, or remove it")
        kept = training.read_state(self._kept) if resume else {}
        length = self.settings.length
        if lines := kept.get("pieces"):
            pieces = [[Text(*piece) for piece in text] for text in lines]
        else:
            encode = prompt_encoder(TextTokenizer(self.target), chat=self.chat)
            how = (encode, length, self._vocabulary)
            pieces = read_pieces(self.files, *how, as_prompts=self.as_prompts)
        parts, known = split(pieces, self.settings.seed), self._identity(pieces)
        for name, value in known.items() if resume else ():
            if kept.get(name) != value:
                raise folders.ModelFolderError(
                    f"{self._kept}: {name} was {kept.get(name)}, but is {value}; --resume goes on"
                    " with the same models, texts and settings"
                )
        target = training.load_model(self.target, exact=False)
        draft = training.load_model(self.draft, exact=True)
        size = min(target.config.vocab_size, draft.config.vocab_size)
        stopping = Stopping()
        with answered_by(stopping.ask):
            held = len(parts.choosing) + len(parts.judging)
            say(f"{len(parts.training)} texts to learn from; the {held} held back are prepared")
            choosing, judging = (
                HeldBack(target, held, length // 2, size, stopping.check)
                for held in (parts.choosing, parts.judging)
            )
            before = judging.acceptance(draft)
            given = (parts.training, choosing, self.settings, stopping.check)
            job = training.Distillation(target, draft, *given)
            if resume:
                job.restore(kept["state"])

            def save() -> None:
                # A recording has other texts by the time that a run goes on.
                lines = [[tuple(piece) for piece in text] for text in pieces if self.online]
                self._kept.parent.mkdir(parents=True, exist_ok=True)
                training.save_state(self._kept, {**known, "pieces": lines, "state": job.state()})

            try:
                with _shown() as report:
                    job.run(budget, report, save)
                verdict = training.Verdict.of(before, judging.acceptance(draft))
            except Interrupted:
                save()
                say(f"stopped; {self._kept} keeps what was learned, and --resume goes on")
                raise
        self._finish(draft, verdict, improved=job.improved)

    def _identity(self, pieces: Pieces) -> dict[str, str]:
        """What a run that goes on must have in common with the one that was stopped."""
        settings = self.settings
        return {
            "target": folders.weights_fingerprint(self.target),
            "draft": folders.weights_fingerprint(self.draft),
            "texts": hashlib.sha256(repr(pieces).encode()).hexdigest()[:32],
            **{name: str(getattr(settings, name)) for name in settings.__slots__},
        }

    def _finish(self, draft: Any, verdict: Verdict, *, improved: bool) -> None:
        from edgespec.training.distill import write_checkpoint

        typer.echo(_table(verdict))
        sure = improved and verdict.gain.interval[0] > 0
        if self.online and not (self.force or sure):
            self._kept.unlink()
            typer.echo("not better beyond its interval: no draft is written, none is replaced")
            return
        if not (self.force or (improved and verdict.gain.mean > 0)):
            fail(
                "the draft guesses no better on texts that it did not learn from, so nothing was"
                f" written. {self._kept} is kept: --resume with more minutes goes on, --resume"
                " --force writes it as it is"
            )
        if verdict.gain.interval[0] <= 0:
            say("warning: not better beyond its interval; more texts or minutes would tell")
        with placed(self.out, _before(self.out) if self.online else None) as work:
            write_checkpoint(draft, self.draft, work, self.settings.length - 1)
        self._kept.unlink()
        if self.online:
            takes = f"a device that starts takes it: --draft {self.out}"
            typer.echo(f"{self.out} is written; {takes}")
            return
        bits = self.settings.bits
        words = ["edgespec", "export", str(self.out), f"{self.out}-draft"]
        words += [] if bits == DEFAULT_BITS else ["--bits", str(bits)]
        typer.echo(f"{self.out} is written; export it:\n{shlex.join(words)}")


def _table(verdict: Verdict) -> str:
    def words(judged: Judged, sign: str = "") -> str:
        low, high = judged.interval
        return f"{judged.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

    texts = f"acceptance, texts held back: {verdict.texts}"
    lines = [f"{texts:<36}{'before':<24}{'after':<24}gain"]
    for heat, (before, after, gain) in verdict.by_temperature.items():
        name = f"temperature {heat:g}" if heat else "greedy"
        lines.append(f"{name:<36}{words(before):<24}{words(after):<24}{words(gain, '+')}")
    return "\n".join(lines)


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """Shows each step on a terminal; elsewhere a line every while and with each new acceptance."""
    said_s, told, console = 0.0, 0.0, Console(stderr=True)
    with BenchProgress(console) as bar:
        bar.expect(1.0)
        bar.say("the first texts are being written")

        def report(now: Progress) -> None:
            nonlocal said_s, told
            words = (
                f"step {now.step} ({now.share:.0%})  loss {now.loss:.3f}  acceptance"
                f" {now.acceptance:.3f}  {now.left_s / 60:.1f} min left"
            )
            late = now.acceptance != told or time.monotonic() - said_s > _SAY_EVERY_S
            if late or console.is_terminal:
                bar.say(words)
                said_s, told = time.monotonic(), now.acceptance
            bar.update(bar.task_ids[0], completed=now.share)

        yield report
