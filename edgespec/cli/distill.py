"""``edgespec distill``: train a draft to predict a target's tokens on a user's kind of text."""

from __future__ import annotations

import hashlib
import math
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer
from rich.console import Console

from edgespec.bench.runner import BenchProgress
from edgespec.cli.export import DEFAULT_BITS, check_is_empty, output_folder
from edgespec.cli.options import option
from edgespec.cli.running import (
    Interrupted,
    StopRequest,
    fail,
    reporting_errors,
    say,
    signals_handled_by,
)
from edgespec.config import ConfigError
from edgespec.config.common import require_library
from edgespec.config.files import read_text
from edgespec.core.device.memory import AUTO, MachineMemory, MemoryBudget, parse_budget
from edgespec.core.ports import ParallelDraft
from edgespec.models import folders
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.text_process import template_worker
from edgespec.models.tokenizer import TextTokenizer, prompt_encoder
from edgespec.operating_system import move_path
from edgespec.telemetry.process_memory import machine_memory
from edgespec.telemetry.recording import PROMPT_TOKENS, Recording, read_recording
from edgespec.training.settings import Budget, LossName, TrainingSettings

if TYPE_CHECKING:
    from edgespec.core.ports import ModelInfo
    from edgespec.models.translation import Translation
    from edgespec.training.distill import Judged, Progress, Verdict
    from edgespec.training.masked_texts import RunsOfText
    from edgespec.training.memory_plan import TrainingMemory
    from edgespec.training.texts import HeldBack, Pieces, Text, Writing

_DEFAULT_MINUTES: Final = 10.0
_SAY_EVERY_S: Final = 10.0
_SOFTENED_BY: Final = 8
"""Texts by which the logits of a new part of a model are scaled."""
_MOST_RECORDED_BYTES: Final = 4 << 30
_what, _text, _how = (partial(option, panel=panel) for panel in ("Models", "Texts", "Training"))
_DEFAULTS = TrainingSettings()
_TARGET = _what("Target model, as of `edgespec verifier`", metavar="MODEL")
_DRAFT = _what(
    "Draft to begin with: a Hugging Face folder, a .gguf file or a Hub id \\[default: bundled; with"
    " --layers or --vocabulary, the target]",
    metavar="MODEL",
)
_LAYERS = _what(
    "Keep only these layers, counted from 0, so that a step takes less time: 0,1,2 keeps the first"
    " three, and first layers are the best beginning",
    metavar="N,N,...",
)
_VOCABULARY = _what(
    "Keep only the table rows of the N ids that are the most frequent in the texts; other ids are"
    " never proposed",
    metavar="N",
)
_OUT = _what(
    "Folder to write, which must be empty or not exist; with --online, a draft; with --record, a"
    " recording",
    "--out",
)
_RESUME = _what("Continue the run that was stopped or refused", "--resume")
_FORCE = _what("Write the draft even if it is not better", "--force")
_PROMPTS = _text(
    "Prompts that the target continues, and the draft learns from: JSON Lines as for"
    " `bench --prompts`, or plain text; may be given more than once",
    metavar="FILE",
)
_TEXTS = _text("Texts that the draft learns from as they are, in the same formats", metavar="FILE")
_ONLINE = _text(
    "Recordings of `--record` to learn from, for a regular run: the draft in --out is trained"
    " further, and replaced if the new one is clearly better; may be given more than once",
    "--online",
    metavar="RECORDING",
)
_RECORD = _text(
    "Train nothing: let the target continue each --prompts once at each temperature and add its"
    " texts to the recording --out, for --texts; given again, it continues with the others",
    "--record",
)
_CHAT = _text("Wrap each prompt in the target's chat template", "--chat")
_HEAT = _text(
    "Temperature at which texts are written; several are used in turn \\[default: 0 and 0.7]",
    *("--temperature", "-t"),
    metavar="NUMBER",
)
_LENGTH = _text("Longest text in tokens, of which the prompt is half")
_LOSS = _how(
    f"Loss that training minimises: {', '.join(loss.value for loss in LossName)};"
    " docs/papers.md compares them",
    metavar="NAME",
)
_MINUTES = _how(
    "Time limit of the whole command: loading, writing texts, training and judging"
    f" \\[default: {_DEFAULT_MINUTES:g}]"
)
_MEMORY = _how(
    "Most memory that the process may hold, as 4GiB or 50%; auto takes nearly all that is free",
    *("--memory-budget",),
    metavar="SIZE",
)
_HELD_BACK_SHARE: Final = 0.2
"""Share of the minutes for preparing held-back texts. A slow machine prepares fewer texts."""
_SLACK: Final = 1.3
"""Margin for the last judgement, relative to the first one, because machines are sometimes busy."""
_WRITING_S: Final = 5.0
"""Seconds to write the draft and to end."""
_STEPS = _how("Steps to train, instead of minutes; the same seed then gives the same weights")
_SEED = _how("Seed of all random choices")
_BITS = _how("Bits of the later export, for which the draft is trained: 4, 8 or 32", "--bits")
_PARALLEL = _how(
    "Positions, up to 16, that one run of the draft is to fill: it learns to guess behind mask"
    " tokens (PARD). It pays where a draft step takes about as long as a token of the server; 8 is"
    " usual, 1 is an ordinary draft",
    "--parallel",
    metavar="K",
)
_RATE = _how(
    "Learning rate; 0 derives it from the size of the draft, and takes a fifth with --online and"
    " --parallel, so that a good draft does not forget",
    "--learning-rate",
)
_CAREFUL_RATE: Final = 0.2


def distill(
    out: Annotated[Path, _OUT],
    target: Annotated[str, _TARGET] = folders.BUNDLED,
    draft: Annotated[str | None, _DRAFT] = None,
    layers: Annotated[str, _LAYERS] = "",
    vocabulary: Annotated[int, _VOCABULARY] = 0,
    resume: Annotated[bool, _RESUME] = False,
    force: Annotated[bool, _FORCE] = False,
    prompts: Annotated[list[Path] | None, _PROMPTS] = None,
    texts: Annotated[list[Path] | None, _TEXTS] = None,
    online: Annotated[list[Path] | None, _ONLINE] = None,
    record: Annotated[bool, _RECORD] = False,
    chat: Annotated[bool, _CHAT] = False,
    temperature: Annotated[list[float] | None, _HEAT] = None,
    length: Annotated[int, _LENGTH] = _DEFAULTS.length,
    loss: Annotated[LossName, _LOSS] = _DEFAULTS.loss,
    minutes: Annotated[float | None, _MINUTES] = None,
    steps: Annotated[int | None, _STEPS] = None,
    seed: Annotated[int, _SEED] = 0,
    bits: Annotated[int, _BITS] = DEFAULT_BITS,
    parallel: Annotated[int, _PARALLEL] = 1,
    learning_rate: Annotated[float, _RATE] = 0.0,
    memory_budget: Annotated[str, _MEMORY] = AUTO,
) -> None:
    """Train a draft on texts like yours, so that the target accepts more of its tokens.

    Acceptance before and after is measured on texts that are held back. A draft that is not better
    is not written. Ctrl-C and the time limit save the state of the training for --resume.

    [dim]edgespec distill --prompts mine.jsonl --out ./mine[/]

    [dim]edgespec distill --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --chat --prompts mine.jsonl
    --minutes 60 --out ./mine[/]

    [dim]edgespec distill --online ./recording --out ./mine[/]

    A draft that fills eight positions in one run:

    [dim]edgespec distill --prompts mine.jsonl --parallel 8 --out ./mine[/]

    A small draft from the target's own layers, on texts that the target wrote before:

    [dim]edgespec distill --target ./t --prompts mine.jsonl --chat --record --out t.texts[/]

    [dim]edgespec distill --target ./t --layers 0,1,2 --vocabulary 16384 --texts t.texts
    --loss next-token --out ./d[/]
    """
    began_s = time.monotonic()
    with reporting_errors():
        if sum(map(bool, (prompts, texts, online))) != 1:
            raise ConfigError("give exactly one of --prompts, --texts and --online")
        files = prompts or texts or online or []
        if chat and (not prompts or any(file.suffix != ".jsonl" for file in files)):
            raise ConfigError(
                "--chat is given, but it applies to --prompts in .jsonl files only: leave it out"
            )
        try:
            heat = tuple(temperature or _DEFAULTS.temperatures)
            share = _CAREFUL_RATE if online or parallel > 1 else 1.0
            settings = TrainingSettings(
                *(loss, seed, length, heat, bits, learning_rate, share), parallel=parallel
            )
            if minutes is None and steps is None:
                minutes = _DEFAULT_MINUTES
            budget = Budget(steps or 0, minutes or 0.0)
            memory = parse_budget(memory_budget, "--memory-budget")
        except ValueError as error:
            raise ConfigError(str(error)) from error
        part = _Part(_read_layers(layers), vocabulary)
        whole = f"{folders.BUNDLED}:target" if target == folders.BUNDLED else target
        if draft is None:
            draft = whole if part else folders.BUNDLED
        if record:
            if not prompts:
                raise ConfigError("--record is given, but it continues --prompts only: give them")
            if part or resume or force or memory_budget != AUTO or parallel != 1:
                raise ConfigError(
                    "--record trains nothing, so leave out --layers, --vocabulary, --resume,"
                    " --force, --parallel and --memory-budget"
                )
            draft = whole
        elif online:
            draft = _in_use(out, draft)
            if draft == str(out):  # it became a part in an earlier run
                part = _Part((), 0)
        else:
            check_is_empty(out)
        models = (
            resolve_source(target, Purpose.TARGET).folder,
            resolve_source(draft, Purpose.DRAFT_WEIGHTS).folder,
        )
        job = _Job(
            *models,
            files,
            out,
            settings,
            part,
            chat=chat,
            as_prompts=bool(prompts),
            online=bool(online),
            resume=resume,
            force=force,
            memory=memory,
            began_s=began_s,
        )
        with require_library("torch and transformers", "edgespec[server]"):
            job.record(budget) if record else job.run(budget)


class _Part(NamedTuple):
    """The part of a model that a draft begins as."""

    layers: tuple[int, ...]
    """Numbers of the layers; empty for all."""
    vocabulary: int
    """Number of ids; 0 for all."""

    def __bool__(self) -> bool:
        return bool(self.layers or self.vocabulary)


def _read_layers(text: str) -> tuple[int, ...]:
    """Return the numbers in ``text``. Raises ``ConfigError``."""
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ConfigError(f"layers is {text!r}, but must be numbers such as 0,1,29")
    return tuple(map(int, parts))


def _find_former_draft(out: Path) -> Path:
    """Return the folder in which the former draft of ``out`` is kept."""
    return out.with_name(f"{out.name}.before")


def _in_use(out: Path, draft: str) -> str:
    """Return the name of the draft to begin with: the one in ``out``, if there is one, else
    ``draft``."""
    if (before := _find_former_draft(out)).exists():
        folders.check_checkpoint(before)  # it will be removed
        if not out.exists():  # a run was killed between two renames
            move_path(before, out)
    return str(out) if out.is_dir() and any(out.iterdir()) else draft


@dataclass
class _Job:
    """One training, from its files to its folder."""

    target: Path
    draft: Path
    files: Sequence[Path]
    out: Path
    settings: TrainingSettings
    part: _Part
    chat: bool
    as_prompts: bool
    online: bool
    resume: bool
    force: bool
    memory: MemoryBudget
    began_s: float
    """When the command began, by the monotonic clock."""

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
        self._pair: Translation | None = None
        if theirs.vocabulary != own.vocabulary:
            self._translate_draft(theirs, own)
        self._vocabulary = theirs.vocabulary
        context = min(theirs.context_length, own.context_length)
        if (length := self.settings.length) > context:
            raise ConfigError(f"length is {length}, but the context is {context} tokens")

    def _translate_draft(self, target: ModelInfo, draft: ModelInfo) -> None:
        """Prepare the training of a draft with another tokenizer. Raises ``ConfigError`` for a
        setting that such a draft cannot have, and ``ValueError`` for a tokenizer without bytes."""
        from edgespec.models.byte_vocabulary import ByteVocabulary
        from edgespec.models.translation import Translation, describe_translation

        if self.part:
            raise ConfigError(
                "--layers and --vocabulary are given, but they cut a draft with the target's"
                " tokenizer only: leave them out"
            )
        if self.settings.loss not in (LossName.NEXT_TOKEN, _DEFAULTS.loss):
            raise ConfigError(
                f"--loss is {self.settings.loss.value}, but a draft with another tokenizer learns"
                f" from the target's texts only: leave it out, or give {LossName.NEXT_TOKEN.value}"
            )
        if (places := self.settings.parallel) != 1:
            raise ConfigError(
                f"--parallel is {places}, but a draft with another tokenizer is asked for one"
                " position at a time: leave it out"
            )
        self.settings = replace(self.settings, loss=LossName.NEXT_TOKEN)
        self._pair = Translation(
            ByteVocabulary(TextTokenizer(self.target, template_worker()), target.name),
            ByteVocabulary(TextTokenizer(self.draft, template_worker()), draft.name),
            target_ends=target.eos_token_ids,
            draft_ends=draft.eos_token_ids,
        )
        say(describe_translation(self._pair))
        say("it learns from the target's texts in its own words, and is judged by these words")

    def run(self, budget: Budget) -> None:
        from edgespec.training import distill as training
        from edgespec.training.kept_rows import id_count
        from edgespec.training.texts import HeldBack, Pace, Text, read_pieces, split
        from edgespec.training.translated_texts import translate_text

        begun = f"{self._kept} holds a run that was not finished"
        resume = self.resume
        if self.online and self._kept.exists() and not resume:
            say(f"{begun}: continuing it, with the texts it had")
            resume = True
        if self._kept.exists() != resume:
            none = f"--resume is given, but there is no {self._kept} to continue"
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
                    f"{self._kept}: {name} was {kept.get(name)}, but is {value}; --resume needs the"
                    " same models, texts and settings"
                )
        target = training.load_model(self.target, exact=False)
        draft = self._begin_draft(target, parts.training)
        if not budget.steps and target.device.type == "cpu":  # the sums depend on it
            training.choose_threads(target)
        memory = self._planned(target, draft)
        say(f"memory: {memory}")
        mask = self._choose_mask(draft, pieces)
        size, translate, pair = id_count(draft), None, self._pair
        if pair is None:
            size = min(target.config.vocab_size, size)
        else:
            translate = partial(translate_text, pair, length=length)
        held: list[list[Any]] = kept.get("held") or [[], []]
        spent_s: float = kept.get("spent_s", 0.0)
        reserve_s = 0.0
        held_ready: bool = kept.get("held_ready", False)
        stopping = StopRequest()
        job: training.Distillation | None = None

        def left_s() -> float:
            """Return the seconds left for training: the end of the command is set aside."""
            if budget.steps:
                return math.inf
            used_s = spent_s + time.monotonic() - self.began_s
            return 60.0 * budget.minutes - used_s - reserve_s

        def check_time() -> None:
            stopping.raise_if_requested()
            # Once the draft has trained, it is judged, for which time was set aside.
            if job is None and left_s() <= 0.0:
                raise training.TimeUpError

        def save() -> None:
            # A recording may have other texts when the run is resumed.
            lines = [[tuple(piece) for piece in text] for text in pieces if self.online]
            self._kept.parent.mkdir(parents=True, exist_ok=True)
            state = kept.get("state") if job is None else job.state()
            spent = {"spent_s": spent_s + time.monotonic() - self.began_s}
            content = {**known, **spent, "pieces": lines, "held": held}
            content |= {"held_ready": held_ready, "state": state}
            training.save_state(self._kept, content)

        count = len(parts.choosing) + len(parts.judging)
        what = "acceptance" if mask is None else "right tokens a run"
        with signals_handled_by(stopping.request), _show_progress(what) as shown:
            say(f"{len(parts.training)} texts to learn from; {count} are held back and prepared")
            try:
                enough_s = (1.0 - _HELD_BACK_SHARE) * 60.0 * budget.minutes
                at_once = memory.written_at_once
                most = sum(one.is_prompt for one in (*parts.choosing, *parts.judging))
                pace = Pace(shown.wrote, "texts held back", most * (length // 2) * 2)
                choosing, judging = (
                    HeldBack(
                        *(target, some, length // 2, size, check_time),
                        kept=rounds,
                        wrote=pace.count,
                        # A resumed run judges by the same texts as before.
                        is_enough=lambda: held_ready or left_s() < enough_s,
                        at_once=at_once,
                        translate=translate,
                    )
                    for some, rounds in zip((parts.choosing, parts.judging), held, strict=True)
                )
                held_ready = True
                if len(choosing) + len(judging) < count:
                    used = f"{len(choosing) + len(judging)} of the {count} texts held back"
                    say(f"{used} are used: the others would take too much of the time")
                looked_s = time.monotonic()
                before = self._judge(draft, judging, mask)
                reserve_s = _SLACK * (time.monotonic() - looked_s) + _WRITING_S
                given = (parts.training, choosing, self.settings, stopping.raise_if_requested)
                job = training.Distillation(
                    *(target, draft, *given, memory.texts_at_once, memory.written_at_once),
                    mask_token=mask.mask_token if mask else 0,
                    translate=translate,
                )
                if kept.get("state"):
                    job.restore(kept["state"])
                job.run(budget, shown.stepped, save, left_s, shown.wrote)
                after = self._judge(draft, judging, mask)
            except Interrupted:
                save()
                say(f"stopped; {self._kept} keeps what was learned, and --resume continues")
                raise
            except training.TimeUpError:
                save()
                ready = sum(len(seeds) for rounds in held for seeds, _ in rounds)
                fail(
                    f"the {budget.minutes:g} minutes are over before the first step: {ready} of"
                    f" {count} texts held back are written. {self._kept} keeps them: --resume with"
                    " more --minutes continues, or begin again with a smaller --length"
                )
        self._finish(draft, before, after, mask, save, improved=job.improved)

    def _choose_mask(self, draft: Any, pieces: Pieces) -> ParallelDraft | None:
        """Return how the draft is to fill several positions; None for an ordinary draft. Raises
        ``ConfigError``."""
        from edgespec.training.kept_rows import find_rows
        from edgespec.training.masked_texts import choose_mask_token
        from edgespec.training.texts import end_ids

        count, config = self.settings.parallel, self.draft / "config.json"
        if count == 1:
            return None
        known = folders.read_parallel_draft(self.draft)
        if known is not None and not self.part.vocabulary:
            return ParallelDraft(known.mask_token, count)
        rows, tokenizer = find_rows(draft), self.draft / "tokenizer.json"
        ids = range(int(draft.config.vocab_size)) if rows is None else rows.ids.tolist()
        added = folders.read_json(tokenizer).get("added_tokens") or []
        special = {one["id"] for one in added if one.get("special")}
        names = ("bos_token_id", "pad_token_id", "unk_token_id")
        used = end_ids(draft) | {folders.read_json(config).get(name) for name in names}
        templates = [
            read_text(self.draft / name, folders.MAX_TOKENIZER_BYTES)
            for name in ("chat_template.jinja", "tokenizer_config.json")
            if (self.draft / name).is_file()
        ]
        # Roles of a chat are special tokens too, and texts without chats do not have them.
        used |= {one["id"] for one in added if any(one["content"] in text for text in templates)}
        used |= {token for text in pieces for piece in text for token in piece.tokens}
        try:
            token = choose_mask_token(ids, folders.token_count(self.draft), special, used)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        say(f"the mask token is id {token}")
        return ParallelDraft(token, count)

    def _judge(self, draft: Any, judging: HeldBack, mask: ParallelDraft | None) -> _Judgement:
        """Judge the draft on the held-back texts."""
        from edgespec.training.masked_texts import judge_runs

        acceptance = judging.acceptance(draft)
        if mask is None:
            return _Judgement(acceptance, {})
        return _Judgement(acceptance, judge_runs(draft, judging, mask.mask_token, mask.tokens))

    def _begin_draft(self, target: Any, texts: Sequence[Text]) -> Any:
        """Return the draft to be trained: the initial one, or a part of it. Raises
        ``ConfigError``."""
        from edgespec.training import distill as training
        from edgespec.training.cut import cut_model, select_frequent_ids, soften
        from edgespec.training.kept_rows import find_rows
        from edgespec.training.texts import end_ids

        draft = training.load_model(self.draft, exact=True)
        if not self.part:
            return draft
        kept, count = None, self.part.vocabulary
        if count and find_rows(draft) is not None:
            raise ConfigError(f"--vocabulary {count}: {self.draft} has a part of the ids already")
        try:
            if count:
                ends = {one for one in end_ids(target) if one is not None}
                kept = select_frequent_ids(texts, int(draft.config.vocab_size), count, ends)
            draft = cut_model(draft, self.part.layers, kept)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        soften(draft, [text for text in texts if not text.is_prompt][:_SOFTENED_BY])
        return draft

    def record(self, budget: Budget) -> None:
        """Let the target write its texts into the recording ``out``, until each is there or the
        minutes are over. Raises ``RecordingError``, and ``ModelFolderError`` or ``OSError`` for the
        prompts."""
        import torch

        from edgespec.training import distill as training
        from edgespec.training.texts import Pace, read_pieces, write

        encode = prompt_encoder(TextTokenizer(self.target), chat=self.chat)
        length = self.settings.length
        pieces = read_pieces(self.files, encode, length, self._vocabulary, as_prompts=True)
        recording = Recording(self.out, _MOST_RECORDED_BYTES)
        there = Counter(
            tuple(text.tokens[: text.start]) for text in read_recording(self.out, self._vocabulary)
        )
        wanted = list[tuple[list[int], float, int]]()
        different = {tuple(piece.tokens): piece for (piece,) in pieces}
        for number, piece in enumerate(different.values()):
            for heat in self.settings.temperatures:
                kept = tuple(piece.tokens[-PROMPT_TOKENS:])
                if there[kept]:
                    there[kept] -= 1
                else:
                    wanted.append((piece.tokens, heat, self.settings.seed * 1_000_003 + number))
        say(f"{len(wanted)} texts to write into {self.out}")
        model = training.load_model(self.target, exact=False)
        if model.device.type == "cpu" and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            model.to(torch.bfloat16)  # twice as quick; other texts than in float32 are as good
        stopping, ends_s = StopRequest(), self.began_s + 60.0 * budget.minutes

        def check() -> None:
            stopping.raise_if_requested()
            if budget.minutes and time.monotonic() > ends_s:
                raise training.TimeUpError

        written = 0
        with (
            signals_handled_by(stopping.request),
            _show_progress() as shown,
            suppress(training.TimeUpError),
        ):
            pace = Pace(shown.wrote, "texts", length // 2 * len(wanted))
            for first in range(0, len(wanted), training.ROUND):
                part = wanted[first : first + training.ROUND]
                prompts, heats, seeds = zip(*part, strict=True)
                for text in write(model, prompts, heats, seeds, length // 2, check, pace.count):
                    prompt, answer = text.tokens[: text.start], text.tokens[text.start :]
                    recording.add(self._vocabulary, prompt, answer)
                written += len(part)
        typer.echo(
            f"{written} of {len(wanted)} texts were added to {self.out}; learn from them: --texts"
            f" {self.out}"
        )

    def _planned(self, target: Any, draft: Any) -> TrainingMemory:
        """Plan the memory of the device that trains. Raises ``ValueError``."""
        import torch

        from edgespec.training import distill as training
        from edgespec.training.memory_plan import plan_memory

        if target.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(target.device)
            machine = MachineMemory(total, free, torch.cuda.memory_allocated(target.device))
        else:
            machine = machine_memory()
        limit = self.memory.resolve(machine)
        how = (self.settings, training.ROUND, machine.resident, limit)
        return plan_memory(target, draft, *how)

    def _identity(self, pieces: Pieces) -> dict[str, str]:
        """Return the properties in which a resumed run must equal the one that was stopped."""
        settings = self.settings
        return {
            "target": folders.weights_fingerprint(self.target),
            "draft": folders.weights_fingerprint(self.draft),
            "texts": hashlib.sha256(repr(pieces).encode()).hexdigest()[:32],
            "part": str(tuple(self.part)),
            **{name: str(getattr(settings, name)) for name in settings.__slots__},
        }

    def _finish(
        self,
        draft: Any,
        before: _Judgement,
        after: _Judgement,
        mask: ParallelDraft | None,
        save: Callable[[], None],
        *,
        improved: bool,
    ) -> None:
        from edgespec.training.distill import Verdict, write_checkpoint

        verdict = Verdict.of(before.acceptance, after.acceptance)
        typer.echo(_write_table(verdict, "acceptance"))
        if mask is not None:
            verdict = Verdict.of(before.tokens_per_run, after.tokens_per_run)
            typer.echo(_write_table(verdict, f"right tokens a run of {mask.tokens}"))
            typer.echo(_write_places(after))
        sure = improved and verdict.gain.interval[0] > 0
        if self.online and not (self.force or sure):
            self._kept.unlink(missing_ok=True)
            typer.echo("not better beyond its interval, so no draft is written or replaced")
            return
        if not (self.force or (improved and verdict.gain.mean > 0)):
            save()
            fail(
                "the draft guesses no better on texts that it did not learn from, so nothing was"
                f" written. {self._kept} is kept: --resume with more minutes continues, --resume"
                " --force writes the draft as it is"
            )
        if verdict.gain.interval[0] <= 0:
            say("warning: not better beyond its interval; give more texts or minutes to be sure")
        with output_folder(self.out, _find_former_draft(self.out) if self.online else None) as work:
            length = self.settings.length - 1
            is_new = bool(self.part)
            write_checkpoint(draft, self.draft, work, length, is_new=is_new, parallel=mask)
        self._kept.unlink(missing_ok=True)
        if self.online:
            typer.echo(f"{self.out} is written; use it: --draft {self.out}")
            return
        bits = self.settings.bits
        words = ["edgespec", "export", str(self.out), f"{self.out}-draft"]
        words += [] if bits == DEFAULT_BITS else ["--bits", str(bits)]
        typer.echo(f"{self.out} is written; export it for devices:\n{shlex.join(words)}")


@dataclass(frozen=True)
class _Judgement:
    """How a draft did on held-back texts, by temperature and text."""

    acceptance: dict[float, list[float]]
    """Share of the target's choices that the draft makes too, one position at a time."""
    runs: dict[float, list[RunsOfText]]
    """Runs over several positions; empty for an ordinary draft."""

    @property
    def tokens_per_run(self) -> dict[float, list[float]]:
        """Mean number of right tokens that runs begin with."""
        return {heat: [one.tokens_per_run for one in texts] for heat, texts in self.runs.items()}


def _write_places(judged: _Judgement) -> str:
    """Return a table of how often each place of a run is right if those before it are."""
    count = len(next(iter(judged.runs.values()))[0].right)
    title = "right by place, if those before are"
    lines = [f"{title:<44}" + "".join(f"{place:<7}" for place in range(1, count + 1))]
    for heat, texts in judged.runs.items():
        reached = sum(one.runs for one in texts)
        shares = ""
        for place in range(count):
            right = sum(one.right[place] for one in texts)
            shares += f"{right / reached if reached else 0.0:<7.3f}"
            reached = right
        lines.append(f"{f'temperature {heat:g}' if heat else 'greedy':<44}{shares}".rstrip())
    return "\n".join(lines)


def _write_table(verdict: Verdict, what: str) -> str:
    def words(judged: Judged, sign: str = "") -> str:
        low, high = judged.interval
        return f"{judged.mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"

    texts = f"{what}, texts held back: {verdict.texts}"
    lines = [f"{texts:<44}{'before':<24}{'after':<24}gain"]
    for heat, (before, after, gain) in verdict.by_temperature.items():
        name = f"temperature {heat:g}" if heat else "greedy"
        lines.append(f"{name:<44}{words(before):<24}{words(after):<24}{words(gain, '+')}")
    return "\n".join(lines)


class _Shown:
    """Progress of texts and steps: a bar on a terminal, elsewhere a line now and then and with each
    new acceptance."""

    def __init__(self, bar: BenchProgress, what: str, *, is_terminal: bool) -> None:
        self._bar, self._what, self._is_terminal = bar, what, is_terminal
        self._said_s = self._told = 0.0
        bar.expect(1.0)

    def stepped(self, now: Progress) -> None:
        """Show a step."""
        left = f"{now.tokens_per_s:.0f} tokens/s  {now.left_s / 60:.1f} min left"
        words = (
            f"step {now.step} ({now.share:.0%})  loss {now.loss:.3f}  {self._what}"
            f" {now.acceptance:.3f}  {left}"
        )
        self._say(words, now.share, at_once=now.acceptance != self._told)
        self._told = now.acceptance

    def wrote(self, now: Writing) -> None:
        """Show texts that are being written."""
        words = (
            f"writing {now.what}: {now.tokens} of at most {now.most_tokens} tokens "
            f" {now.tokens_per_s:.0f} tokens/s  {now.left_s / 60:.1f} min left"
        )
        self._say(words, now.tokens / max(1, now.most_tokens), at_once=False)

    def _say(self, words: str, share: float, *, at_once: bool) -> None:
        if self._is_terminal or at_once or time.monotonic() - self._said_s > _SAY_EVERY_S:
            self._bar.say(words)
            self._said_s = time.monotonic()
        self._bar.update(self._bar.task_ids[0], completed=share)


@contextmanager
def _show_progress(what: str = "acceptance") -> Iterator[_Shown]:
    """Show the progress of a training, in which ``what`` is judged now and then."""
    console = Console(stderr=True)
    with BenchProgress(console) as bar:
        yield _Shown(bar, what, is_terminal=console.is_terminal)
