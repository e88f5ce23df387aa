"""The three sources of tokens: what they promise to worlds, and that misuse is an error.

Oracle: ``expected`` of the source beside a plain decoding of its own target, one token a pass; the
ranks of a walk beside those of the script.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.core.ports import Drafter, PassRequest, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.telemetry.match_tape import (
    MISS,
    MatchTape,
    TapedGeneration,
    TapeError,
    read_tape,
    walk_along,
    write_tape,
)
from edgespec_sim.token_sources.acceptance_process import fit
from edgespec_sim.token_sources.source import (
    ProcessSource,
    Request,
    ScriptError,
    TapeSource,
    TokenSource,
    ToySource,
    tape_named,
)

TOY = ToySource(ToyModel(64, order=3), 0.25, SamplingParams(temperature=0.7, seed=4))
LAW = fit(tape_named("bundled-greedy"))
PROCESS = ProcessSource(LAW.at(0.8), seed=3)
TAPE = TapeSource(tape_named("bundled-sampled"), seed=5)
SOURCES: dict[str, TokenSource] = {"toy": TOY, "process": PROCESS, "tape": TAPE}
every_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


def decoded(target: TargetModel, request: Request) -> list[int]:
    """One token a pass, the prompt in pieces of 5."""
    tokens, cached = list(request.prompt), 0
    target.open("a", len(request.prompt), request.sampling)
    ends = target.info.eos_token_ids
    while len(tokens) - len(request.prompt) < request.sampling.max_tokens:
        feed = tuple(tokens[cached:][:5])
        sample = cached + len(feed) == len(tokens)
        (result,) = target.forward([PassRequest("a", cached, feed, sample=sample)])
        target.keep("a", ())
        cached += len(feed)
        if sample:
            tokens.append(result.targets[0])
            if tokens[-1] in ends:
                break
    target.close("a")
    return tokens[len(request.prompt) :]


def begun(drafter: Drafter, request: Request) -> Drafter:
    drafter.begin(len(request.prompt), request.sampling)
    return drafter


@every_source
def test_the_target_says_what_is_expected(source: TokenSource) -> None:
    for number in range(4):
        request = source.request(number, 13, 24)
        assert decoded(source.target(), request) == list(source.expected(request, 24))
        assert list(source.expected(request, 7)) == list(source.expected(request, 24))[:7]


def test_a_tape_is_walked_as_it_was_recorded() -> None:
    source = TapeSource(tape_named("bundled-greedy"))
    taped = {g.prompt: g for g in source.tape.generations}
    for number in range(len(taped)):
        for length in (0, 40):  # the recorded prompt, and one of the world's length
            request = source.request(number, length, 1000)
            tokens = source.expected(request, 1000)
            drafter = begun(source.drafter(), request)
            ranks = walk_along(drafter.step, request.prompt, tokens, source.tape.width).ranks
            if length == 0:
                assert ranks == taped[request.prompt].ranks
                assert tuple(tokens) == taped[request.prompt].tokens


def test_guesses_differ_and_only_the_right_one_is_right() -> None:
    request = PROCESS.request(2, 9, 200)
    text = PROCESS.expected(request, 200)
    drafter = begun(PROCESS.drafter(), request)
    drafter.step(0, request.prompt, 4)
    for at, token in enumerate(text[:-1]):
        guesses = [c.token for c in drafter.step(9 + at, (token,), 4)]
        assert len(set(guesses)) == 4
        rank = guesses.index(text[at + 1]) if text[at + 1] in guesses else MISS
        # One off script, nothing it says is the script's; back on it, all is as before.
        wrong = (text[at + 1] + 1) % 32_000
        off = [c.token for c in drafter.step(10 + at, (wrong,), 4)]
        assert at + 2 >= len(text) or text[at + 2] not in off
        again = [c.token for c in drafter.step(9 + at, (token,), 4)]
        assert again == guesses
        assert rank == MISS or again[rank] == text[at + 1]


def test_the_cache_contract_is_checked() -> None:
    request = PROCESS.request(0, 9, 20)
    drafter, target = begun(PROCESS.drafter(), request), PROCESS.target()
    with pytest.raises(ScriptError, match="3 tokens kept, but 0 are cached"):
        drafter.step(3, (1,), 1)
    with pytest.raises(ScriptError, match="before the prompt is complete"):
        drafter.step(0, request.prompt[:4], 1)
    with pytest.raises(ScriptError, match="width is 9"):
        drafter.step(0, request.prompt, 9)
    with pytest.raises(ScriptError, match="'a' is not open"):
        target.forward([PassRequest("a", 0, request.prompt)])
    target.open("a", 9, request.sampling)
    with pytest.raises(ScriptError, match="already open"):
        target.open("a", 9, request.sampling)
    token = target.forward([PassRequest("a", 0, request.prompt, (5,), (-1,))])[0].targets[0]
    with pytest.raises(ScriptError, match="no path from the root"):
        target.keep("a", (1,))
    target.keep("a", ())
    with pytest.raises(ScriptError, match="not the target's own"):
        target.forward([PassRequest("a", 9, (token + 1,))])
    with pytest.raises(ScriptError, match="11 tokens kept, but 10 are cached"):
        target.forward([PassRequest("a", 11, (token,))])


def test_a_tape_by_name_by_file_and_by_neither(tmp_path: Path) -> None:
    generation = TapedGeneration("g", (1, 2), (3, 4), (0, MISS))
    tape = MatchTape("t", "d", 1, (generation,), (4,), {"machine": "none"})
    write_tape(tape, tmp_path / "mine.jsonl")
    assert tape_named("mine.jsonl", tmp_path) == tape
    assert read_tape(tmp_path / "mine.jsonl") == tape
    assert tape_named("bundled-greedy", tmp_path).width >= 3
    with pytest.raises(TapeError, match=r"bundled are bundled-greedy, bundled-sampled"):
        tape_named("yours.jsonl", tmp_path)


def test_a_text_ends_where_its_tape_does() -> None:
    """At its end token whatever is asked for, else where the recording stopped."""
    ended = TapedGeneration("g", (1, 2), (3, 4), (0, 0))
    stopped = TapedGeneration("h", (1, 3), (3, 5, 6), (0, 0, 0))
    source = TapeSource(MatchTape("t", "d", 1, (ended, stopped), (4,)))
    asked = {request.prompt: request for request in (source.request(n, 0, 50) for n in (0, 1))}
    assert asked[1, 2].sampling.max_tokens == 50
    assert asked[1, 3].sampling.max_tokens == 3
    assert [list(source.expected(asked[p], 50)) for p in asked] == [
        list(ended.tokens if p == (1, 2) else stopped.tokens) for p in asked
    ]
