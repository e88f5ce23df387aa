"""Training of a draft on its target's next-token distribution.

Each step takes the texts that were used least, computes the distributions of target and draft after
each prefix, and descends the loss between them (``LOSSES``). Texts are recorded ones, or are
written after prompts by the target or by the draft itself. New ones are written as they
are used up.

Drafts are exported in 4 bits, so training goes *through* the rounding (straight-through estimator,
Bengio et al. 1308.3432): the model computes with rounded weights, its gradients move weights that
are kept in full precision, and the rounded ones are saved. The exporter finds integers and scales
that reproduce them, so int4 costs no acceptance.

Random numbers depend on the seed and on counters only, never on earlier work. So a run that was
stopped and resumed ends with the same weights, if its budget counts steps.
"""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils.logging import disable_progress_bar

from edgespec.bench.intervals import Interval, mean_interval
from edgespec.core.ports import ParallelDraft
from edgespec.device.export.export import COPIED_FILES
from edgespec.models.folders import MASK_TOKEN, PARALLEL_TOKENS, trained_length
from edgespec.operating_system import move_path
from edgespec.training.kept_rows import find_rows, id_count
from edgespec.training.masked_texts import (
    add_masks,
    draw_depths,
    judge_runs,
    masked_rows,
    mean_masks,
)
from edgespec.training.settings import Budget, LossName, TrainingSettings
from edgespec.training.texts import (
    LOGITS_AT_ONCE,
    HeldBack,
    Hidden,
    Pace,
    Text,
    Writing,
    head_logits,
    hidden_rows,
    pad_texts,
    row_parts,
    write,
)
from edgespec.training.translated_texts import TranslateText
from edgespec.verifier.targets.loading import check_loading

BLOCK_SIZE: Final = 32  # weights that share a scale, as in ``models/weight_blocks.py``
LARGEST_RATE, OF_SIZE = 1e-3, 2e6
"""Learning rate of a draft with up to ``OF_SIZE`` weights. A larger draft's falls with the square
root of its size."""
LOOKS: Final = 10
"""Number of times that acceptance is measured on the held-back texts during a training."""
SAVE_EVERY_S: Final = 60.0
ROUND: Final = 32
"""Texts that are written before the next step."""
# Mean number of uses of a text, and the rounds that are written ahead. A draft's own texts become
# outdated as it learns, so few texts are kept.
_USES, _AHEAD = 4, 4
_OWN_USES, _OWN_AHEAD, _OWN_KEPT = 2, 1, 4
_ROUNDED_AT_ONCE: Final = 1 << 22  # weights
FIRST_CHOICE_WEIGHT: Final = 0.5
SELECTED_SHARE: Final = 0.4
"""Share of a step's tokens that ``selective`` learns from, as in AdaSPEC."""


# --- losses of a draft's next-token distribution q against the target's p -------------------------
#
# Each function takes log-probabilities [rows, vocabulary] of the draft and of the target, one row
# for each token to be predicted, and returns one loss per row. Gradients go into the draft alone.


def forward_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q): the draft must cover every token that is likely in the target (FastDraft,
    arXiv 2411.11055)."""
    return (target.exp() * (target - draft)).sum(-1)


def reverse_kl(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(q || p): the draft must avoid tokens that are unlikely in the target (DistillSpec,
    arXiv 2310.08461)."""
    return (draft.exp() * (draft - target)).sum(-1)


def total_variation(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return TV(p, q), the share that even the best coupling rejects (DistillSpec, arXiv
    2310.08461)."""
    return 0.5 * (draft.exp() - target.exp()).abs().sum(-1)


def first_choice(draft: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) plus half the cross-entropy of the target's likeliest token, on which
    greedy acceptance depends. The bundled pair was trained with this loss."""
    best = target.argmax(-1, keepdim=True)
    likelihood = draft.gather(-1, best).squeeze(-1)
    return forward_kl(draft, target) - FIRST_CHOICE_WEIGHT * likelihood


def measure_lag(draft: torch.Tensor, target: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return by how much the draft is worse than ``reference``, a trained draft of its size: one
    number per row (AdaSPEC, arXiv 2510.19779)."""
    return (forward_kl(draft, target) - forward_kl(reference, target)).detach()


def mark_furthest(behind: torch.Tensor, share: float) -> torch.Tensor:
    """Return bool [rows] that marks the ``share`` of rows, at least one, that are furthest
    ``behind``. Rows that no draft of this size can learn are left out. Ties go to the first rows.
    """
    order = behind.argsort(descending=True, stable=True)
    chosen = torch.zeros(len(behind), dtype=torch.bool, device=behind.device)
    chosen[order[: max(1, round(share * len(behind)))]] = True
    return chosen


LOSSES: Final[Mapping[LossName, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    LossName.FIRST_CHOICE: first_choice,
    LossName.FORWARD_KL: forward_kl,
    LossName.REVERSE_KL: reverse_kl,
    LossName.TOTAL_VARIATION: total_variation,
    LossName.SELECTIVE: forward_kl,
}
"""Loss function by name, but for ``next-token``, which has no distribution of the target.
``selective`` uses only the rows that ``mark_furthest`` finds, once there is a reference."""


def next_token(draft: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of ``tokens`` [rows], by row of the draft's tables; -1 stands for
    one that the draft has no row for, which costs nothing. A text that the target itself wrote
    greedily holds its first choices, so that the target need not be run again."""
    likelihood = draft.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(-1)
    return torch.where(tokens < 0, torch.zeros_like(likelihood), -likelihood)


def load_model(folder: Path, *, exact: bool) -> Any:
    """Return the model in ``folder``, on a GPU if there is one. With ``exact``, and on every CPU,
    it is in float32. Raises ``ValueError`` or ``OSError``, which name the folder."""
    disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32 if exact or device == "cpu" else "auto",
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, info = loaded
    check_loading(str(folder), info)
    return model.to(device).eval()


def choose_threads(model: Any) -> int:
    """Let PyTorch use all threads or one, whichever is quicker, and return the number.

    On a busy machine threads wait for one another in each operation. With two threads on two cores
    that fifteen other processes used too, a text took twenty times as long as with one."""
    tokens = torch.zeros(8, 8, dtype=torch.long, device=model.device)
    seconds = {}
    for count in (torch.get_num_threads(), 1):
        torch.set_num_threads(count)
        with torch.inference_mode():
            model(tokens, use_cache=False, logits_to_keep=1)  # the first one starts the threads
            began = time.monotonic()
            model(tokens, use_cache=False, logits_to_keep=1)
        seconds[count] = time.monotonic() - began
    best = min(seconds, key=lambda count: seconds[count])
    torch.set_num_threads(best)
    return best


def round_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` [N, K] rounded to the 4-bit grid of its blocks of 32 along K. A last block
    that is not full is padded with zeros for the computation."""
    filled = torch.nn.functional.pad(weight, (0, -weight.shape[-1] % BLOCK_SIZE))
    blocks = filled.unflatten(-1, (-1, BLOCK_SIZE))
    peak = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = torch.where(peak == 0, torch.ones_like(peak), peak / -8)
    values = (blocks / scale).round().clamp(-8, 7) * scale
    cut: torch.Tensor = values.flatten(-2)[..., : weight.shape[-1]]
    return cut


def rate_factor(share: float) -> float:
    """Return the learning-rate factor after ``share`` of the budget: 2 % warm-up, a constant part,
    and a linear descent to 0.02 over the last 45 %."""
    if share < 0.02:
        return share / 0.02
    return max(0.02, min(1.0, (1.0 - share) / 0.45))


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a training after a step."""

    step: int
    share: float
    """Share of the budget that is used up."""
    loss: float
    acceptance: float
    """Last acceptance that was measured on held-back texts. For a parallel draft it is the tokens
    of a run that are accepted."""
    left_s: float
    tokens_per_s: float
    """Predicted tokens that were learned from, per second since the training began."""


class TimeUpError(Exception):
    """The time is over before there is a text to learn from."""


def _unlimited_s() -> float:
    """Return infinity, as the seconds left of a training without a time limit."""
    return math.inf


class Distillation:
    """Training of ``draft`` on ``target``, which ends with the weights that were best on
    ``choosing``.

    ``pieces``: prompts, which ``target`` continues, or texts as they are. A loss on the draft's own
    samples uses their beginnings as prompts.
    ``check``: called at points where the training can stop without a loss; it may raise. ``state``
    then returns all that ``restore`` needs.
    ``texts_at_once``, ``written_at_once``: most texts that are learned from, or written, in one
    pass.
    ``mask_token``: id that stands for a token that is not known yet, for a parallel draft.
    ``translate``: returns a text of the target in the ids of a draft with another tokenizer, which
    learns from the texts' own tokens only. None: the draft has the target's ids.

    ``selective`` spends half of the budget on a reference, then begins again with the initial
    draft."""

    def __init__(
        self,
        target: Any,
        draft: Any,
        pieces: Sequence[Text],
        choosing: HeldBack,
        settings: TrainingSettings,
        check: Callable[[], None],
        texts_at_once: int = ROUND,
        written_at_once: int = ROUND,
        mask_token: int = 0,
        translate: TranslateText | None = None,
    ) -> None:
        self._mask_token = mask_token
        self._target, self._draft, self._choosing = target, draft, choosing
        self._texts_at_once, self._written_at_once = texts_at_once, written_at_once
        self._settings, self._check = settings, check
        self._translate = translate
        self._size = id_count(draft)
        if translate is None:
            self._size = min(target.config.vocab_size, self._size)
        self._rows = find_rows(draft)
        self._own = settings.loss.on_own_samples
        prompts = [piece for piece in pieces if self._own or piece.is_prompt]
        self._prompts = [ids[: max(start, len(ids) // 2)] for ids, start in prompts]
        self._texts = self._in_draft_ids(
            [piece for piece in pieces if not (self._own or piece.is_prompt)]
        )
        self._uses = [0] * len(self._texts)
        self._written = self._looked = self._step = 0
        self._seconds = self._round_s = 0.0
        self._tokens = 0
        self._left_s: Callable[[], float] = _unlimited_s
        self._reads = settings.loss.reads_target or None
        self._selective = settings.loss is LossName.SELECTIVE
        self._initial = self._weights() if self._selective else {}
        self._first_score = self._look()
        self._reference: Any = None
        self._begin()

    def _begin(self) -> None:
        """Begin a training of the weights that the draft has now."""
        self._masters = [weight.detach().clone() for weight in self._draft.parameters()]
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.best_score = self.acceptance = self._first_score
        self._best: dict[str, torch.Tensor] = {}
        self._place()

    @property
    def tokens(self) -> int:
        """Predicted tokens that were learned from."""
        return self._tokens

    @property
    def improved(self) -> bool:
        """Whether a checkpoint was better on the held-back texts than the initial draft."""
        return bool(self._best)

    def run(
        self,
        budget: Budget,
        report: Callable[[Progress], None],
        save: Callable[[], None],
        left_s: Callable[[], float] | None = None,
        wrote: Callable[[Writing], None] = lambda now: None,
    ) -> None:
        """Train until the budget is used up, then restore the best weights. If none ``improved``,
        the last weights stay.

        ``report``: called after each step.
        ``save``: called about once a minute.
        ``left_s``: returns the seconds that a budget of minutes leaves to the training. None means
        that the training may use the whole budget.
        ``wrote``: called while texts are written between steps.

        A step or a round of texts that could not end in time is not begun. Raises ``TimeUpError``
        if the time ends before the first step, ``ValueError`` if the loss is not finite, and
        anything that ``check`` and ``save`` raise."""
        began = saved = time.monotonic()
        before, step_s = self._seconds, 0.0
        if budget.steps:
            left_s = _unlimited_s
        elif left_s is None:
            ends = began + 60.0 * budget.minutes - before
            left_s = lambda: ends - time.monotonic()  # noqa: E731
        self._left_s = left_s

        def used() -> float:
            """Return the share of the budget that is used up."""
            if budget.steps:
                return min(1.0, self._step / budget.steps)
            left = left_s()
            if left <= 0.0 or left < step_s:
                return 1.0
            return self._seconds / (self._seconds + left)

        if self._step == 0 and used() >= 1.0:
            raise TimeUpError
        share = used()
        self._looked = min(self._looked, int(LOOKS * share))
        while True:
            self._check()
            if int(LOOKS * share) > self._looked:
                self.acceptance = self._look()
                if self.acceptance > self.best_score:
                    self.best_score, self._best = self.acceptance, self._weights()
                self._looked = int(LOOKS * share)
            if share >= 1.0:
                break
            if self._selective and self._reference is None and share >= 0.5:
                self._reference = copy.deepcopy(self._draft)
                self._draft.load_state_dict(self._initial)
                self._begin()
            self._write_ahead(wrote)
            step_began = time.monotonic()
            loss = self._learn(share)
            self._step += 1
            now = time.monotonic()
            self._seconds, step_s = before + now - began, now - step_began
            share = used()
            if budget.steps:
                remaining_s = self._seconds * (1.0 - share) / share
            else:
                remaining_s = max(0.0, left_s())
            rate_s = self._tokens / max(1e-9, self._seconds)
            report(Progress(self._step, share, loss, self.acceptance, remaining_s, rate_s))
            if now - saved > SAVE_EVERY_S:
                save()
                saved = time.monotonic()
        if self._best:
            self._draft.load_state_dict(self._best)

    def _learn(self, share: float) -> float:
        """Take one step on the texts that were used least, and return the mean loss per token."""
        settings, dice = self._settings, random.Random(f"{self._settings.seed}:{self._step}")
        masks = random.Random(f"{settings.seed}:{self._step}:masks")
        order = sorted((used, dice.random(), at) for at, used in enumerate(self._uses))
        chosen = [at for _, _, at in order[: settings.rows]]
        texts = [self._texts[at] for at in chosen]
        total = sum(len(text.tokens) - text.start for text in texts)
        loss = 0.0
        for first in range(0, len(texts), self._texts_at_once):
            self._check()
            loss += self._add_gradients(texts[first : first + self._texts_at_once], total, masks)
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss is {loss} at step {self._step}: give a --learning-rate below"
                f" {self._learning_rate():.1e}"
            )
        for master, weight in zip(self._masters, self._draft.parameters(), strict=True):
            master.grad, weight.grad = weight.grad, None
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        for group in self._optimizer.param_groups:
            # Each half of ``selective`` is a training of its own.
            group["lr"] = self._learning_rate() * rate_factor(
                2 * share % 1 if self._selective else share
            )
        self._optimizer.step()
        self._place()
        for at in chosen:
            self._uses[at] += 1
        self._tokens += total
        return loss

    def _add_gradients(self, texts: Sequence[Text], total: int, dice: random.Random) -> float:
        """Add the gradients of the given texts' share of a loss over ``total`` tokens, and return
        that share. ``dice`` choose where a parallel draft learns from masks.

        The draft's decoder runs once, forward and backward. In between, its head and the loss are
        computed for a few rows at a time, so that no tensor holds the logits of all tokens."""
        tokens, places = pad_texts(texts, self._draft.device)
        tokens_after, masked = tokens.flatten()[places + 1], None
        with torch.no_grad():
            wanted = self._reads and self._hidden(self._target, tokens, places)
        if (count := self._settings.parallel) > 1:
            choose = draw_depths(count, dice)
            masked = add_masks(texts, self._mask_token, choose, self._draft.device)
            tokens_after = tokens_after[masked.wanted]
            wanted = wanted and (wanted[0], wanted[1][masked.wanted])

        def draft_rows(model: Any) -> Hidden:
            if masked is None:
                return self._hidden(model, tokens, places)
            with self._autocast(tokens.device.type):
                return masked_rows(model, masked)

        with torch.no_grad():
            theirs = self._reference and draft_rows(self._reference)
        output, reached = draft_rows(self._draft)
        leaf = reached.detach().requires_grad_()
        own, parts = (output, leaf), list(row_parts(len(reached), self._size, LOGITS_AT_ONCE))
        weights = torch.ones(len(reached), device=leaf.device)
        if theirs and wanted:
            with torch.no_grad():
                behind = torch.cat([self._behind(own, wanted, theirs, part) for part in parts])
            weights = mark_furthest(behind, SELECTED_SHARE) / SELECTED_SHARE
        found, whole = 0.0, total * (1.0 + mean_masks(count))
        for part in parts:
            with torch.no_grad():
                law = wanted and self._log_law(self._target, wanted, part)
            guess = self._log_law(self._draft, own, part)
            if law is None:
                losses = next_token(guess, self._learned_rows(tokens_after[part]))
            else:
                losses = LOSSES[self._settings.loss](guess, law)
            value = (losses * weights[part]).sum() / whole
            value.backward()
            found += float(value.detach())
        reached.backward(leaf.grad)
        return found

    def _behind(self, own: Hidden, wanted: Hidden, theirs: Hidden, part: slice) -> torch.Tensor:
        target = self._log_law(self._target, wanted, part)
        draft, reference = (
            self._log_law(model, hidden, part)
            for model, hidden in ((self._draft, own), (self._reference, theirs))
        )
        return measure_lag(draft, target, reference)

    def _hidden(self, model: Any, tokens: torch.Tensor, places: torch.Tensor) -> Hidden:
        with self._autocast(tokens.device.type):
            return hidden_rows(model, tokens, places)

    def _log_law(self, model: Any, hidden: Hidden, part: slice) -> torch.Tensor:
        """Return the log-probabilities [rows, vocabulary] of the rows in ``part``, among the ids
        that the draft has rows for."""
        output, rows = hidden
        with self._autocast(rows.device.type):
            logits = head_logits(model, output, rows[part])
        if self._rows is None:
            logits = logits[:, : self._size]
        elif logits.shape[-1] != len(self._rows.ids):
            logits = logits[:, self._rows.ids]
        return logits.float().log_softmax(-1)

    def _learned_rows(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the draft's row of each token, or -1 for one that it cannot propose."""
        if self._rows is None:
            return torch.where(tokens < self._size, tokens, -1)
        found = self._rows.of_ids[tokens]
        return torch.where(self._rows.ids[found] == tokens, found, -1)

    def _autocast(self, kind: str) -> Any:
        # A CPU without AVX-512 takes two to ten times as long with bfloat16.
        quick = kind != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=quick)

    def _write_ahead(self, report: Callable[[Writing], None]) -> None:
        """Let target or draft write texts until there are enough for the next steps. The first step
        needs one round; the rounds ahead are added within the next few steps."""
        settings, model, uses, ahead = self._settings, self._target, _USES, _AHEAD
        if self._own:
            model, uses, ahead = self._draft, _OWN_USES, _OWN_AHEAD
        wanted = self._step * settings.rows / uses + min(ahead, 1 + self._step) * ROUND
        if not (self._own or any(settings.temperatures)):
            wanted = min(wanted, len(self._prompts))
        count = settings.length // 2
        while self._prompts and self._written < wanted:
            if self._texts and self._left_s() < 2 * self._round_s:
                return  # texts that are written so late would hardly be learned from
            began = time.monotonic()
            numbers = range(self._written, self._written + ROUND)
            prompts = [self._prompts[number % len(self._prompts)] for number in numbers]
            heat = [self._temperature(number) for number in numbers]
            seeds = [settings.seed * 1_000_003 + number for number in numbers]
            pace = Pace(report, "texts to learn from", count * ROUND)
            try:
                new = write(
                    *(model, prompts, heat, seeds, count, self._check_time),
                    pace.count,
                    self._written_at_once,
                )
            except TimeUpError:
                if self._texts:
                    return
                raise
            new = self._in_draft_ids(new)
            self._round_s = time.monotonic() - began
            # The new texts start at the lowest number of uses. With 0, only they would be chosen
            # for a while.
            self._uses += [min(self._uses, default=0)] * len(new)
            self._texts += new
            if self._own:
                del self._texts[: -_OWN_KEPT * ROUND], self._uses[: -_OWN_KEPT * ROUND]
            self._written += ROUND

    def _in_draft_ids(self, texts: Sequence[Text]) -> list[Text]:
        """Return texts in the ids of the draft, but for texts that become too short."""
        if self._translate is None:
            return list(texts)
        return [found for text in texts if (found := self._translate(text)) is not None]

    def _check_time(self) -> None:
        self._check()
        if self._left_s() <= 0.0:
            raise TimeUpError

    def _temperature(self, number: int) -> float:
        """Return the temperature of the text of this number. A greedy text is written only once
        after each prompt."""
        heat = self._settings.temperatures
        passes = number // len(self._prompts)
        found = heat[(number + passes) % len(heat)]
        return found if found or passes < len(heat) else max(heat)

    def _place(self) -> None:
        """Put the weights into the model, rounded if it is exported in 4 bits."""
        with torch.no_grad():
            for master, weight in zip(self._masters, self._draft.parameters(), strict=True):
                if self._settings.bits != 4 or master.ndim != 2:
                    weight.copy_(master)
                    continue
                rows = max(1, _ROUNDED_AT_ONCE // master.shape[-1])
                for fine, coarse in zip(master.split(rows), weight.split(rows), strict=True):
                    coarse.copy_(round_weight(fine))

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self._draft.state_dict().items()}

    def _look(self) -> float:
        if (count := self._settings.parallel) > 1:
            runs = judge_runs(self._draft, self._choosing, self._mask_token, count).values()
            return fmean(one.tokens_per_run for one in chain.from_iterable(runs))
        shares = self._choosing.acceptance(self._draft).values()
        return fmean(chain.from_iterable(shares))

    def _learning_rate(self) -> float:
        size = sum(weight.numel() for weight in self._masters)
        by_size = LARGEST_RATE * min(1.0, math.sqrt(OF_SIZE / size))
        return self._settings.learning_rate or self._settings.rate_share * by_size

    def state(self) -> dict[str, Any]:
        """Return all that changes, in types that ``torch.load`` reads without running code."""
        return {
            "counters": [self._step, self._written, self._looked],
            "numbers": [self._seconds, self.acceptance, self.best_score, float(self._tokens)],
            "masters": self._masters,
            "optimizer": self._optimizer.state_dict(),
            "best": self._best,
            "reference": self._reference and self._reference.state_dict(),
            "texts": [tuple(text) for text in self._texts],
            "uses": self._uses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a ``state`` of the same models, texts and settings."""
        self._step, self._written, self._looked = state["counters"]
        self._seconds, self.acceptance, self.best_score, tokens = state["numbers"]
        self._tokens = int(tokens)
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"], strict=True):
                master.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self._best = state["best"]
        if state["reference"]:
            self._reference = copy.deepcopy(self._draft)
            self._reference.load_state_dict(state["reference"])
        self._texts = [Text(*text) for text in state["texts"]]
        self._uses = state["uses"]
        self._place()


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to the file ``path`` in one step. Raises ``OSError`` and leaves the file
    unchanged if that fails."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        move_path(partial, path)
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            partial.unlink()
        # torch raises an error of its own for an error of the disk.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        raise OSError(f"{path} cannot be written: {cause}") from error


def read_state(path: Path) -> dict[str, Any]:
    """Return the state that ``save_state`` wrote. Raises ``OSError``, or ``ValueError`` that names
    the file."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # errors of zip, pickle and torch have no common base
        raise ValueError(f"{path} holds no state of a training: {error}") from error
    return found


def write_checkpoint(
    draft: Any,
    source: Path,
    folder: Path,
    length: int,
    *,
    is_new: bool = False,
    parallel: ParallelDraft | None = None,
) -> None:
    """Write ``draft``, trained on texts of ``length`` tokens, into ``folder``, with the tokenizer
    of ``source``, the folder of the initial draft. A draft that ``is_new``, a part of its source,
    has learned from no longer texts. ``parallel`` is how it fills several positions in one run, if
    it learned that; without it, the draft is an ordinary one. Raises ``OSError``."""
    if is_new:
        draft.config.trained_length = length
    elif known := trained_length(source):
        draft.config.trained_length = max(known, length)
    # A draft that went on learning without masks would fill them worse and worse.
    for name in (MASK_TOKEN, PARALLEL_TOKENS):
        vars(draft.config).pop(name, None)
    if parallel is not None:
        setattr(draft.config, MASK_TOKEN, parallel.mask_token)
        setattr(draft.config, PARALLEL_TOKENS, parallel.tokens)
    draft.generation_config = GenerationConfig()  # the source's may be invalid; it is copied below
    try:
        draft.save_pretrained(folder)
    except SafetensorError as error:
        raise OSError(f"{folder} cannot be written: {error}") from error
    for written in folder.glob("*.safetensors"):
        written.chmod(0o644)  # the usual mode of a file; a temporary one is private
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in COPIED_FILES:
        if name != "config.json" and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


class Judged(NamedTuple):
    """Mean over texts, with its 95 % interval."""

    mean: float
    interval: Interval


def make_judged(values: Sequence[float]) -> Judged:
    return Judged(fmean(values), mean_interval(values))


@dataclass(frozen=True, slots=True)
class Verdict:
    """Acceptance on texts that were not used to choose a checkpoint."""

    by_temperature: dict[float, tuple[Judged, Judged, Judged]]
    """Acceptance before and after the training, and the gain of each text, by temperature."""
    gain: Judged
    """Gain over all temperatures."""
    texts: int

    @classmethod
    def of(cls, before: dict[float, list[float]], after: dict[float, list[float]]) -> Verdict:
        rows, gains = {}, []
        for heat, old in before.items():
            gain = [value - was for was, value in zip(old, after[heat], strict=True)]
            rows[heat] = make_judged(old), make_judged(after[heat]), make_judged(gain)
            gains.append(gain)
        whole = make_judged([fmean(values) for values in zip(*gains, strict=True)])
        return cls(rows, whole, len(gains[0]))
