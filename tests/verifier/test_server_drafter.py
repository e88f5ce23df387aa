"""The verifier's own draft model: packed steps, its cache, its memory, and refused sequences.

Oracles: each candidate is the model's own after the same text, fed at once, whatever else was in
the step and whatever was cut, evicted or shared before; the toy target's memory, which notices a
block that holds another text; a device's drafter of the same model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec.config import AgentConfig, DraftSection, PacingSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.config.verifier import LimitsSection
from edgespec.core.device.memory import MIB, MachineMemory
from edgespec.core.ports import ModelInfo, PassRequest, ServerDrafter, TargetModel
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.sampling import SamplingParams, choose, gumbel, noise_bits, warp
from edgespec.core.protocol.work import CacheShape, Candidate, DraftStep, PassResult
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.draft_round import CHOICES
from edgespec.device.build import build_agent, load_drafter
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer
from edgespec.sampling import tensors
from edgespec.verifier.build import load_server_drafter, load_target
from edgespec.verifier.targets import memory_sizing
from edgespec.verifier.targets.memory_sizing import (
    DraftMemory,
    MemoryFigures,
    PoolBudget,
    pool_tokens,
)
from edgespec.verifier.targets.paced import PacedServerDrafter
from edgespec.verifier.targets.packed_drafter import PackedDrafter
from edgespec.verifier.targets.pass_requests import check_batch
from edgespec.verifier.targets.torch_target import TorchTarget
from edgespec.verifier.targets.toy import ToyServerDrafter, ToyTarget
from tests.core.test_constraints import Automaton
from tests.kit.live_verifier import serve_toy
from tests.kit.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint
from tests.present import require
from tests.verifier.torch_schedules import GREEDY, SAMPLINGS, record_logits, torch_target

LAW = ToyModel(48, order=2, sharpness=1.5, eos_token=0)
Guess = Callable[[Sequence[int], int, SamplingParams], int]


class _ToyDraft(ToyTarget):
    """A toy draft model. Its text is cut and continues with other tokens, which a target's text
    never does. The memory behind it notices a block whose rows belong to another text."""

    def __init__(self, blocks: int, context_length: int = 4096) -> None:
        cache = CacheShape(blocks, 4)
        super().__init__(LAW, cache=cache, context_length=context_length, max_sessions=64)
        self.fed: list[PassRequest] = []
        self.broken: Callable[[Sequence[PassRequest]], Exception | None] = lambda batch: None

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        if (error := self.broken(batch)) is not None:
            raise error
        self.fed += batch
        return super().forward(batch)

    def guess(self, batch: Sequence[PassRequest], width: int) -> list[tuple[Candidate, ...]]:
        return [tuple([Candidate(t, 0.0) for t in one.targets]) for one in self.forward(batch)]

    def _check(self, batch: Sequence[PassRequest]) -> None:
        check_batch(batch, self._cached_length, self.info)


def _toy_guess(text: Sequence[int], prompt_length: int, sampling: SamplingParams) -> int:
    prompt, output = text[:prompt_length], text[prompt_length:]
    return choose(LAW.logits(text), sampling, len(text), prompt, output)


def _torch_guess(model: TorchTarget) -> Guess:
    def guess(text: Sequence[int], prompt_length: int, sampling: SamplingParams) -> int:
        model.open("alone", prompt_length, sampling)
        (found,) = model.forward([PassRequest("alone", 0, tuple(text))])
        model.close("alone")
        return found.targets[0]

    return guess


@dataclass(slots=True)
class _Session:
    """The core's state of one sequence."""

    key: str
    prompt_length: int
    sampling: SamplingParams
    text: list[int]
    cached: list[int] = field(default_factory=list)


class _Core:
    """A core whose sessions open, draft chains, are corrected, and close; each candidate is
    checked."""

    def __init__(
        self,
        drafter: ServerDrafter,
        guess: Guess,
        size: int,
        seed: int,
        samplings: Sequence[SamplingParams] = SAMPLINGS,
    ) -> None:
        self._drafter, self._guess, self._size = drafter, guess, size
        self._samplings = samplings
        self._rng = random.Random(seed)
        self._sessions: list[_Session] = []
        self._prompts = [[self._rng.randrange(1, size) for _ in range(60)] for _ in range(2)]
        self._opened = self.guesses = self.misses = 0

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self._come_and_go()
            some = self._rng.sample(self._sessions, self._rng.randrange(1, len(self._sessions) + 1))
            for _ in range(self._rng.randrange(1, 5)):
                self._step(some)
            for session in some:  # committed: a part of the chain, and a token of the target's
                least = session.prompt_length
                most = self._rng.randrange(len(session.text) - 4, len(session.text) + 1)
                del session.text[max(least, most) :]
                session.text.append(self._rng.randrange(1, self._size))

    def _step(self, sessions: Sequence[_Session]) -> None:
        steps = [self._request(one) for one in sessions]
        for session, step, found in zip(sessions, steps, self._drafter.step(steps), strict=True):
            session.cached[step.keep_length :] = step.feed
            if not step.guess:
                assert not found
            elif not found:
                self.misses += 1
                session.cached.clear()
            else:
                self.guesses += 1
                text = session.cached
                assert found[0].token == self._guess(text, session.prompt_length, session.sampling)
                assert len({one.token for one in found}) == len(found) <= CHOICES
                session.text[len(text) :] = [found[0].token]

    def _request(self, session: _Session) -> DraftStep:
        cached, text = session.cached, session.text
        pairs = zip(cached, text, strict=False)
        keep = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(cached), len(text)))
        keep = min(keep, len(text) - 1)
        if self._rng.random() < 0.1:
            keep = self._rng.randrange(keep + 1)
        stop = len(text) if self._rng.random() < 0.7 else min(len(text), keep + 20)
        return DraftStep(session.key, keep, tuple(text[keep:stop]), stop == len(text))

    def _come_and_go(self) -> None:
        rng = self._rng
        for session in [one for one in self._sessions if len(one.text) > 150 or rng.random() < 0.1]:
            self._drafter.close(session.key)
            self._sessions.remove(session)
        while not self._sessions or (len(self._sessions) < 6 and rng.random() < 0.4):
            shared = rng.choice(self._prompts)[: rng.randrange(61)]
            text = [*shared, *(rng.randrange(1, self._size) for _ in range(rng.randrange(1, 9)))]
            self._opened += 1
            sampling = self._samplings[self._opened % len(self._samplings)]
            session = _Session(f"s{self._opened}", len(text), sampling, text)
            self._drafter.open(session.key, len(text), sampling)
            self._sessions.append(session)


def _guess_first(drafter: ServerDrafter, *step: Any) -> Candidate:
    ((found, *_),) = drafter.step([DraftStep(*step)])
    return found


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("draft"))


# --- guesses --------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("blocks", [1000, 40])
def test_every_guess_is_the_models_own_whatever_was_cut_shared_or_evicted(
    blocks: int, share: bool
) -> None:
    for seed in range(2):
        drafter = PackedDrafter(_ToyDraft(blocks), share_prefixes=share)
        core = _Core(drafter, _toy_guess, LAW.vocabulary_size, seed)
        core.run(60)
        assert core.guesses > 200
        assert (core.misses > 0, drafter.evictions > 0) == (blocks == 40, blocks == 40)
        assert drafter.shared_tokens > (100 if share else -1)


@pytest.mark.parametrize(("context", "window"), [(32, None), (4096, 50)])
def test_a_text_beyond_the_window_goes_on_from_its_second_half(
    context: int, window: int | None
) -> None:
    """The toy looks at two tokens, so its candidates follow from the whole text; penalties count
    the tokens in the window."""
    model = _ToyDraft(60, context)
    drafter = PackedDrafter(model, window=window)
    plain = [one for one in SAMPLINGS if not one.is_penalised]
    core = _Core(drafter, _toy_guess, LAW.vocabulary_size, 3, plain)
    core.run(60)
    assert core.guesses > 100
    most = window or context
    assert max(request.cache_length + request.row_count for request in model.fed) == most
    assert any(
        request.cache_length == 0 and request.row_count == most // 2 for request in model.fed
    )


def test_of_a_long_prompt_the_last_window_is_computed_when_a_guess_is_wanted() -> None:
    model = _ToyDraft(60)
    drafter = PackedDrafter(model, window=40)
    rng = random.Random(1)
    text = [rng.randrange(1, 48) for _ in range(500)]
    drafter.open("s", len(text), SamplingParams(temperature=1.0, seed=2))
    for start in range(0, 480, 32):
        step = DraftStep("s", start, tuple(text[start : start + 32]), guess=False)
        assert drafter.step([step]) == [()]
    assert sum(request.row_count for request in model.fed) == 32
    found = _guess_first(drafter, "s", 480, tuple(text[480:]))
    assert found.token == _toy_guess(text, 500, SamplingParams(temperature=1.0, seed=2))
    assert model.fed[-1].row_count == 40
    # The text is cut, to a length before the window.
    _guess_first(drafter, "s", 470, (1,))
    _guess_first(drafter, "s", 300, (1,))
    assert model.fed[-1].row_count == 20


def test_a_window_of_a_torch_model_is_a_text_of_its_own(folder: Path) -> None:
    sampling = SamplingParams(temperature=0.9, seed=4)
    model = torch_target(folder, canonical=False)
    drafter = PackedDrafter(torch_target(folder, canonical=False), window=32)
    rng = random.Random(1)
    text = [rng.randrange(300) for _ in range(33)]
    drafter.open("s", 33, sampling)
    for keep in (0, *range(33, 44)):
        text.append(_guess_first(drafter, "s", keep, tuple(text[keep:])).token)
        model.open("s", 1, sampling)
        model.shift("s", 17)
        (result,) = model.forward([PassRequest("s", 0, tuple(text[17:-1]))])
        model.close("s")
        assert text[-1] == result.targets[0]


def test_packed_steps_of_a_torch_model_guess_what_it_says_alone(folder: Path) -> None:
    drafter = PackedDrafter(torch_target(folder, canonical=False, max_cached_tokens=200))
    alone = _torch_guess(torch_target(folder, canonical=False))
    core = _Core(drafter, alone, 300, seed=1)
    core.run(60)
    assert core.guesses > 150
    assert drafter.evictions > 0


@pytest.mark.parametrize("large", [False, True])
def test_choices_are_the_best_by_the_law_in_its_scalar_form(
    large: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law applies to all rows at once, and row by row as over a large vocabulary on a CPU."""
    monkeypatch.setattr(tensors, "_LARGE_VOCABULARY", 1 if large else 1 << 20)
    model = torch_target(folder, canonical=False)
    logits = record_logits(model)
    drafter = PackedDrafter(model)
    for index, sampling in enumerate(SAMPLINGS):
        drafter.open(f"s{index}", 3, sampling)
    found = drafter.step([DraftStep(f"s{i}", 0, (5, 6, 7 + i)) for i in range(len(SAMPLINGS))])
    for i, (row, some, params) in enumerate(zip(logits[-1], found, SAMPLINGS, strict=True)):
        law = warp(row.tolist(), params, (5, 6, 7 + i))
        noisy = [
            one + (0.0 if params.is_greedy else gumbel(noise_bits(params.seed, 3, token)))
            for token, one in enumerate(law)
        ]
        best = sorted(range(len(law)), key=lambda token: -noisy[token])[:CHOICES]
        assert [one.token for one in some] == best
        norm = math.log(math.fsum(map(math.exp, law)))
        wanted = [law[token] - norm for token in best]
        assert [one.logprob for one in some] == pytest.approx(wanted, abs=1e-4)


def test_a_constraint_forces_the_draft_as_it_does_the_target() -> None:
    grammar = Automaton(({5: 1}, {7: 2, 9: 2}, {3: 0}), frozenset())
    sampling = replace(GREEDY, constraint=grammar.constraint())
    model = _ToyDraft(50)
    drafter = PackedDrafter(model)
    drafter.open("s", 2, sampling)
    drafter.open("free", 1, GREEDY)
    text = [11, 12]
    for _ in range(9):
        keep = len(text) - 1 if text[2:] else 0
        text.append(_guess_first(drafter, "s", keep, tuple(text[keep:])).token)
        assert text[-1] in grammar.allowed(text[2:-1])
    # A token that the grammar forbids leaves no candidates; the other sequences of the step go on.
    left, right = drafter.step([DraftStep("s", len(text) - 1, (6,)), DraftStep("free", 0, (6,))])
    assert not left
    assert right
    _guess_first(drafter, "s", 0, tuple(text))


def test_a_constraint_that_nobody_reads_gets_no_guess() -> None:
    unread = Constraint(ConstraintKind.REGEX, "a+")
    drafter = PackedDrafter(_ToyDraft(50))
    drafter.open("s", 2, replace(GREEDY, constraint=unread))
    assert drafter.step([DraftStep("s", 0, (11, 12))]) == [()]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_agrees_with_the_device_because_both_use_the_same_noise(temperature: float) -> None:
    """Oracle: a device's drafter of the same weights, at four bits; another seed is the control."""
    folder = resolve_source("bundled", Purpose.DRAFT).folder
    text = TextTokenizer(folder).encode("def read_lines(path):\n    with open(path) as file:\n")
    device = require(load_drafter(AgentConfig(draft=DraftSection("bundled"))))
    drafter = PackedDrafter(TorchTarget(str(folder), name="d", vocabulary="v", canonical=False))
    sampling = SamplingParams(temperature=temperature, seed=7)
    device.begin(len(text), sampling)
    for key, seed in (("same", 7), ("other", 8)):
        drafter.open(key, len(text), replace(sampling, seed=seed))
    feed, keep, same, other = tuple(text), 0, 0, 0
    for _ in range(120):
        token = device.step(keep, feed, 1)[0].token
        steps = [DraftStep(key, keep, feed) for key in ("same", "other")]
        found = [choices[0].token == token for choices in drafter.step(steps)]
        same, other = same + found[0], other + found[1]
        keep, feed = keep + len(feed), (token,)
    device.close()
    assert same > 96
    assert same > other + 12 or temperature == 0.0


# --- the cache ------------------------------------------------------------------------------


def _open(drafter: PackedDrafter, *keys: str, prompt_length: int = 20) -> None:
    for key in keys:
        drafter.open(key, prompt_length, GREEDY)


PROMPT = tuple(range(1, 41))


def test_a_prompt_that_another_fed_is_not_computed_again() -> None:
    for share, rows in ((True, 4), (False, 40)):
        model = _ToyDraft(50)
        drafter = PackedDrafter(model, share_prefixes=share)
        _open(drafter, "a", "b")
        drafter.step([DraftStep("a", 0, PROMPT)])
        model.fed.clear()
        # The text is fed in two parts, as the core feeds a long one.
        drafter.step([DraftStep("b", 0, PROMPT[:21], guess=False)])
        drafter.step([DraftStep("b", 21, PROMPT[21:])])
        assert sum(request.row_count for request in model.fed) == rows + share
        assert model.fed[-1].sample


def test_the_sequence_not_used_for_longest_makes_room_and_finds_its_blocks_again() -> None:
    model = _ToyDraft(25)
    drafter = PackedDrafter(model, share_prefixes=False)
    _open(drafter, "a", "b", "c")
    for key in ("b", "a"):
        drafter.step([DraftStep(key, 0, PROMPT)])
    drafter.step([DraftStep("c", 0, PROMPT[::-1])])
    assert drafter.evictions == 1
    stays, gone = drafter.step([DraftStep("a", 40, (1,)), DraftStep("b", 40, (1,))])
    assert stays
    assert not gone  # evicted, which the core learns now
    model.fed.clear()
    _guess_first(drafter, "b", 0, (*PROMPT, 1))
    assert drafter.evictions == 2
    assert sum(request.row_count for request in model.fed) <= 30


def test_who_finds_no_room_in_a_step_is_left_out_alone() -> None:
    drafter = PackedDrafter(_ToyDraft(15))
    _open(drafter, "a", "b")
    steps = [DraftStep("a", 0, PROMPT), DraftStep("b", 0, PROMPT[::-1])]
    found = drafter.step(steps)
    assert found[0]
    assert not found[1]
    assert drafter.evictions == 0
    drafter.close("a")
    assert drafter.step(steps[1:])[0]


def test_what_the_draft_cannot_look_at_gets_no_guess() -> None:
    """No candidates follow if the cache is missing, if the beginning of a grammar is outside the
    window, or if the sequence was not opened."""
    drafter = PackedDrafter(_ToyDraft(50), window=24)
    _open(drafter, "a", "b")
    grammar = Automaton(({5: 0},), frozenset())
    drafter.open("c", 10, replace(GREEDY, constraint=grammar.constraint()))
    steps = [
        DraftStep("b", 5, (1,)),
        DraftStep("c", 0, (*PROMPT[:10], *(5,) * 30)),
        DraftStep("nobody", 0, (1,)),
    ]
    assert drafter.step(steps) == [()] * 3
    assert () not in drafter.step([DraftStep(key, 0, PROMPT[:24]) for key in "ab"])
    assert () not in drafter.step([DraftStep("c", 0, (*PROMPT[:10], *(5,) * 10))])


def test_a_token_that_only_the_target_has_is_fed_as_an_end_of_text() -> None:
    """Oracle: the candidates after the stand-in token itself; later tokens are drafted as usual."""
    drafter = PackedDrafter(_ToyDraft(50))
    (stand_in,) = drafter.info.eos_token_ids
    _open(drafter, "a", "b")
    beyond, plain = ((*PROMPT, token, 3) for token in (LAW.vocabulary_size + 7, stand_in))
    found, expected = drafter.step([DraftStep("a", 0, beyond), DraftStep("b", 0, plain)])
    assert found == expected != ()
    assert drafter.step([DraftStep("a", len(beyond), (1,))]) != [()]


def test_an_id_that_means_another_text_is_no_guess() -> None:
    drafter = PackedDrafter(_ToyDraft(50))
    _open(drafter, "a")
    (found,) = drafter.step([DraftStep("a", 0, PROMPT)])
    other = PackedDrafter(_ToyDraft(50), apart=[found[0].token])
    _open(other, "a")
    assert other.step([DraftStep("a", 0, PROMPT)]) == [found[1:]]


def test_padding_of_the_drafts_vocabulary_is_no_guess() -> None:
    drafter = PackedDrafter(_ToyDraft(50), vocabulary_size=1)
    _open(drafter, "a")
    assert drafter.step([DraftStep("a", 0, PROMPT)]) == [()]
    assert drafter.step([DraftStep("a", 40, (1,))]) == [()]


def test_a_model_that_fails_says_so_and_nothing_of_that_step_is_trusted() -> None:
    model = _ToyDraft(50)
    drafter = PackedDrafter(model)
    _open(drafter, "a", "b")
    drafter.step([DraftStep("a", 0, PROMPT)])
    model.broken = lambda batch: RuntimeError("the device is gone")
    with pytest.raises(RuntimeError, match="the device is gone"):
        drafter.step([DraftStep("a", 40, (1,)), DraftStep("b", 0, PROMPT)])
    model.broken = lambda batch: None
    model.fed.clear()
    assert drafter.step([DraftStep("a", 41, (1,))]) == [()]
    drafter.step([DraftStep("a", 0, PROMPT)])
    assert model.fed[0].row_count == 40


# --- the toy --------------------------------------------------------------------------------


def test_a_toy_is_always_right() -> None:
    info = ModelInfo("toy", "v", LAW.vocabulary_size, 4096, (0,))
    drafter: ServerDrafter = ToyServerDrafter(LAW, info)
    sampling = SamplingParams(temperature=1.0, seed=3)
    drafter.open("s", 1, sampling)
    text = [1]
    for _ in range(500):
        found = _guess_first(drafter, "s", len(text) - 1, (text[-1],))
        text.append(_toy_guess(text, 1, sampling))
        assert found.token == text[-1]
    assert drafter.step([DraftStep("s", 600, (1,))]) == [()]
    assert drafter.step([DraftStep("s", 1, (1,))]) == [()]
    assert drafter.step([DraftStep("s", 0, (1,), guess=False)]) == [()]
    assert drafter.step([DraftStep("s", 1, (1,))]) != [()]


def test_a_toy_has_as_much_room_as_it_is_given() -> None:
    drafter = ToyServerDrafter(LAW, ModelInfo("toy", "v", 48, 64, (0,)), max_cached_tokens=50)
    for key in "ab":
        drafter.open(key, 1, GREEDY)
    first, second = drafter.step([DraftStep("a", 0, PROMPT), DraftStep("b", 0, PROMPT)])
    assert first
    assert not second
    drafter.close("a")
    assert drafter.step([DraftStep("b", 0, PROMPT)]) != [()]
    assert drafter._sequences["b"].tokens == list(PROMPT)


# --- its pace, its memory, and what is refused ----------------------------------------------


@pytest.mark.parametrize(
    ("guess", "work_s", "expected_s"), [(True, 0.0, 0.013), (False, 0.0, 0.003), (True, 0.05, 0.05)]
)
def test_a_paced_step_takes_its_time_in_all(guess: bool, work_s: float, expected_s: float) -> None:
    now_s = 0.0

    def nap(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    class Inner(ToyServerDrafter):
        def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
            nap(work_s)
            return super().step(batch)

    inner = Inner(LAW, ModelInfo("toy", "v", 48, 64, (0,)))
    paced: ServerDrafter = PacedServerDrafter(inner, 10.0, 1.0, nap, lambda: now_s)
    paced.open("s", 3, GREEDY)
    assert (paced.step([DraftStep("s", 0, (1, 2, 3), guess)]) != [()]) == guess
    assert now_s == pytest.approx(expected_s, abs=2e-4)
    paced.close("s")


def _machine(available: int) -> Callable[[], MachineMemory]:
    return lambda: MachineMemory(available, available, 0)


_FEW = LimitsSection(max_cached_tokens=2048, max_sessions=4)


def _bundled(limits: LimitsSection = _FEW, draft: str = "bundled") -> VerifierConfig:
    return VerifierConfig(draft=draft, limits=limits, device="cpu")


def test_the_bundled_pair_drafts_for_itself() -> None:
    """The draft model stays beside a canonical target, which has set torch to one thread."""
    config = _bundled()
    target = load_target(config)
    drafter = load_server_drafter(config, target)
    assert isinstance(drafter, PackedDrafter)
    prompt = TextTokenizer(resolve_source("bundled", Purpose.TARGET).folder).encode(
        "Once upon a time there"
    )
    target.open("s", len(prompt), GREEDY)
    drafter.open("s", len(prompt), GREEDY)
    text, right = list(prompt), 0
    for place in range(60):
        keep = len(text) - 1 if place else 0
        feed = tuple(text[keep:])
        (found,) = drafter.step([DraftStep("s", keep, feed)])
        text += target.forward([PassRequest("s", keep, feed)])[0].targets
        right += bool(found) and found[0].token == text[-1]
    assert right >= 40
    paced = load_server_drafter(replace(config, pacing=PacingSection(draft_ms=1.0)), target)
    assert isinstance(paced, PacedServerDrafter)
    assert load_server_drafter(replace(config, draft=""), target) is None


def test_a_budget_pays_for_the_keys_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = LimitsSection(kv_budget="8MiB", max_sessions=4, max_rows_per_pass=64)
    alone = load_target(_bundled(limits=limits, draft=""))
    config = _bundled(limits=limits)
    target = load_target(config)
    drafter = load_server_drafter(config, target)
    assert isinstance(drafter, PackedDrafter)
    assert alone.cache is not None
    assert target.cache is not None
    # Six layers of two heads of the target, three of one of the draft, 64 numbers of four bytes.
    target_bytes, draft_bytes = 2 * 6 * 2 * 64 * 4, 2 * 3 * 64 * 4
    assert alone.cache.tokens == 8 * MIB // target_bytes // 16 * 16
    assert target.cache.tokens == 8 * MIB // (target_bytes + draft_bytes) // 16 * 16
    model: TargetModel = drafter._model
    assert model.cache == target.cache
    monkeypatch.setattr(memory_sizing, "machine_memory", _machine(9 * MIB))
    with pytest.raises(ValueError, match=r"kv_budget is 8MiB: .*the draft model's weights take"):
        load_target(config)


def test_a_share_of_a_gpu_pays_for_both() -> None:
    """The pool may use 9,000 of 10,000 bytes: 4,000 are in use, the draft's weights take 1,000 and
    a pass 500. The rest goes into rows of 10 bytes, 1 (the copy of a layer of ten) and 4."""
    figures = MemoryFigures(10_000, 6000, 500, 64, token_bytes=10, layer_count=10)
    budget = PoolBudget(None, 0.9, 64, DraftMemory(weights=1000, token_bytes=4))
    assert pool_tokens(budget, figures, 1 << 20) == 3500 // 15 // 16 * 16


def test_too_little_memory_for_both_is_said_before_the_draft_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = _bundled()
    target = load_target(config)
    monkeypatch.setattr(memory_sizing, "machine_memory", _machine(9 * MIB))
    with pytest.raises(ValueError, match=r"2048 cached tokens, .* but 0\.01 GiB are free beside"):
        load_server_drafter(config, target)


def test_a_draft_with_another_tokenizer_is_refused_before_the_target_is_loaded(
    folder: Path,
) -> None:
    for model, draft in (("bundled", str(folder)), ("bundled", "toy"), ("toy", "bundled")):
        with pytest.raises(SetupError, match=r"draft .* has another tokenizer than"):
            load_target(VerifierConfig(model=model, draft=draft))
    exported = folder.parent / "exported"
    write_checkpoint(exported)
    (exported / "model.safetensors").unlink()
    for draft, why in (
        ("lookup", "draft: model 'lookup' is neither"),
        (str(exported), r"draft: .*no \*\.safetensors file"),
    ):
        with pytest.raises(ValueError, match=why):
            load_target(VerifierConfig(draft=draft))


def test_a_draft_whose_vocabulary_is_padded_more_serves(folder: Path, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=384)
    padded = write_checkpoint(tmp_path / "padded", config, tiny_tensors(config))
    settings = VerifierConfig(model=str(folder), draft=str(padded), device="cpu")
    target = load_target(settings)
    drafter = require(load_server_drafter(settings, target))
    drafter.open("s", 1, SamplingParams(temperature=100.0))
    tokens = [drafter.step([DraftStep("s", 0, (1,) * n)])[0] for n in range(1, 100)]
    assert {len(one) for one in tokens} > {CHOICES}
    assert all(guess.token < target.info.vocabulary_size for one in tokens for guess in one)


# --- in service -----------------------------------------------------------------------------


async def test_a_verifier_that_drafts_says_the_same_in_fewer_passes() -> None:
    """The number of saved passes depends on the machine: the first round runs whatever a step
    takes."""
    text = "Once upon a time there was a little girl who"
    paces = PacingSection(pass_ms=40.0, draft_ms=1.0)
    sampled = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    asked = (replace(sampled, temperature=0.0), sampled)
    device = DraftSection("none")
    texts: dict[str, list[list[int]]] = {}
    passes: dict[str, int] = {}
    accepted: dict[str, int] = {}
    for draft in ("", "bundled"):
        config = replace(_bundled(draft=draft), port=0, server_drafts=False, pacing=paces)
        async with serve_toy(config=config) as (address, verifier):
            async with build_agent(AgentConfig(address, draft=device)) as agent:
                texts[draft] = [
                    [t async for chunk in agent.generate(text, one) for t in chunk.tokens]
                    for one in asked
                ]
            passes[draft] = verifier.engine.passes
            accepted[draft] = verifier.engine.draft_counts.model.accepted
    assert texts[""] == texts["bundled"]
    assert [len(one) for one in texts[""]] == [40, 40]
    assert accepted[""] == 0 < accepted["bundled"]
    assert passes["bundled"] == passes[""] - accepted["bundled"]
