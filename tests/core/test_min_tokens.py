"""``min_tokens`` as a part of the sampling law.

Oracle: the scalar specification, one token after the other, of logits from which the end tokens are
removed by hand while the generation is too short.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.core.device import events as ev
from edgespec.core.protocol.messages import Cancel, FaultCode, Limits, Open
from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams, choose
from edgespec.core.toy_model import ToyModel
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyServerDrafter, ToyTarget
from tests.core.draft_scripts import GREETING, new_session
from tests.core.test_constraints import EOS, Automaton, automata, drafted_text

MODEL = ToyModel(vocabulary_size=8, order=2, seed=4, eos_token=EOS, eos_probability=0.6)
PROMPT = [1, 2, 3]
LAWS = (
    SamplingParams(),
    SamplingParams(temperature=1.1, top_p=0.9, min_p=0.01, seed=9, presence_penalty=0.5),
    SamplingParams(temperature=0.8, top_k=3, seed=2, logit_bias={EOS: 5.0, 6: 2.0}),
)
Allowed = Callable[[Sequence[int]], set[int]]


def allow_everything(output: Sequence[int]) -> set[int]:
    return set(range(8))


def generate_by_law(params: SamplingParams, allowed: Allowed = allow_everything) -> list[int]:
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    output: list[int] = []
    while len(output) < params.max_tokens and not ends.intersection(output[-1:]):
        text, may_come = [*PROMPT, *output], allowed(output)
        if len(output) < params.min_tokens:
            may_come = may_come - ends or may_come
        row = [x if t in may_come else -math.inf for t, x in enumerate(MODEL.logits(text))]
        output.append(choose(row, params, len(text), PROMPT, output))
    return output


@settings(max_examples=150)
@given(
    law=st.sampled_from(LAWS),
    least=st.integers(0, 20),
    stops=st.sets(st.integers(0, 7), max_size=8),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_drafts_change_nothing_and_no_end_comes_before_its_time(
    law: SamplingParams, least: int, stops: set[int], ignore_eos: bool, seed: int
) -> None:
    params = replace(
        law,
        min_tokens=least,
        max_tokens=20,
        stop_token_ids=tuple(sorted(stops)),
        ignore_eos=ignore_eos,
    )
    expected = generate_by_law(params)
    if len(stops | set(() if ignore_eos else (EOS,))) < 8:
        assert len(expected) >= least

    def guess(output: Sequence[int], dice: random.Random) -> int:
        on_the_way = list(output) == expected[: len(output)] != expected
        right = expected[len(output)] if on_the_way else EOS
        return dice.choice((right, right, dice.randrange(8)))

    target = ToyTarget(MODEL)
    ends = params.end_tokens((EOS,))
    assert drafted_text(target, PROMPT, params, guess, seed, ends=ends) == expected


@given(automata(), st.sampled_from(LAWS), st.integers(1, 20), st.integers(0, 1 << 16))
def test_a_constrained_text_is_as_long_as_its_grammar_lets_it_be(
    automaton: Automaton, law: SamplingParams, least: int, seed: int
) -> None:
    params = replace(law, min_tokens=least, max_tokens=20, constraint=automaton.constraint())
    expected = generate_by_law(params, automaton.allowed)
    if len(expected) < least + 1 and expected[-1] == EOS:
        assert automaton.allowed(expected[:-1]) == {EOS}

    def guess(output: Sequence[int], dice: random.Random) -> int:
        on_the_way = list(output) == expected[: len(output)] != expected
        return expected[len(output)] if on_the_way and dice.random() < 0.7 else dice.randrange(8)

    assert drafted_text(ToyTarget(MODEL), PROMPT, params, guess, seed) == expected


@pytest.mark.parametrize("law", LAWS)
def test_drafts_follow_the_same_law(law: SamplingParams) -> None:
    params = replace(law, min_tokens=6, max_tokens=12, stop_token_ids=(5,))
    expected = generate_by_law(params)
    assert EOS in generate_by_law(replace(params, min_tokens=0))[:6], "else nothing is held off"
    drafter, info = ToyDrafter(MODEL), ToyTarget(MODEL).info
    drafter.begin(len(PROMPT), params)
    server = ToyServerDrafter(MODEL, info)
    server.open("s", len(PROMPT), params)
    cached, text = 0, list(PROMPT)
    for token in expected:
        guesses = drafter.step(cached, text[cached:], 8)
        assert guesses[0].token == token
        if len(text) - len(PROMPT) < 6:
            assert not {EOS, 5}.intersection(one.token for one in guesses)
        cached = len(text)
        text.append(token)


def test_a_mask_covers_the_vocabulary_and_nothing_else() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(3, 99))
    held = MinTokensMask(params, 10, (0,))
    mask = held.mask(None, 1)
    assert mask is not None
    assert [t for t in range(16) if mask[t >> 3] >> (t & 7) & 1] == [1, 2, 4, 5, 6, 7, 8, 9]
    assert held.mask(None, 2) is None
    assert held.mask(b"\x09", 1) == b"\x09", "an end comes where nothing else may"
    assert held.mask(b"\x0b", 1) == b"\x02"
    assert MinTokensMask(params, 1, (0,)).mask(None, 0) is None


def test_a_verifier_that_does_not_say_that_it_keeps_it_is_left() -> None:
    sampling = SamplingParams(min_tokens=7)
    request = Open("s", "", "", (1, 1), sampling=sampling)
    for told, why in ((7, None), (0, "the verifier is too old for min_tokens 7")):
        session = new_session(request=request)
        session.handle(ev.Start(), 0.0)
        session.handle(ev.Connected(), 0.0)
        actions = session.handle(replace(GREETING, limits=Limits(), min_tokens=told), 0.0)
        failures = [one for one in actions if isinstance(one, ev.Fail)]
        if why is None:
            assert not failures
        else:
            assert ev.Transmit(Cancel()) in actions
            assert [(one.code, one.why.startswith(why)) for one in failures] == [
                (FaultCode.INVALID, True)
            ]


def test_more_than_the_most_cannot_be_the_least() -> None:
    with pytest.raises(ValueError, match="min_tokens is 9, but max_tokens is 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
