"""Tests of constraints read with llguidance. Oracles: the scalar law without drafts, Python's own
``json`` and ``re``, and a few lines that check a value against a schema."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgespec.cli.generate import constraint_of
from edgespec.config import ConfigError
from edgespec.core.protocol.constraint import (
    ConstrainedText,
    Constraint,
    ConstraintError,
    ConstraintKind,
    Matcher,
    pack_mask,
)
from edgespec.core.protocol.messages import FaultCode, Limits, Open
from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.device.agent import Agent, GenerationError
from edgespec.device.drafters.toy import toy_info
from edgespec.models.grammar import (
    GrammarReader,
    GuidanceVocabulary,
    make_letters_tokenizer,
)
from edgespec.models.tokenizer import TokenBytes
from edgespec.sampling.tensors import SampleBlock, choose_tokens
from edgespec.testing import LoopbackTransport
from edgespec.verifier.daemon import Verifier
from edgespec.verifier.targets.torch_target import TorchTarget
from edgespec.verifier.targets.toy import ToyTarget
from tests.core.test_constraints import EOS, drafted_text, lawful_text
from tests.kit import tiny_checkpoints
from tests.kit.letters import LETTERS, MODEL, READER, Untried, connect_pair, text_of
from tests.kit.live_verifier import child_environment
from tests.present import require

PROMPT = [40, 50]


def byte_words() -> str:
    """Return a ``tokenizer.json`` with one token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(letters)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    return str(words.to_str())


SAMPLED = SamplingParams(temperature=0.9, seed=5, top_p=0.95, max_tokens=400)
WORD: Mapping[str, Any] = {"type": "string", "pattern": "^[a-z]{1,6}$"}


def schema(value: Any) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def fits(value: Any, wanted: Mapping[str, Any]) -> bool:
    if "enum" in wanted:
        return value in wanted["enum"]
    match wanted["type"]:
        case "object":
            inner = wanted["properties"]
            return list(value) == list(inner) and all(fits(value[k], inner[k]) for k in inner)
        case "array":
            return len(value) <= wanted["maxItems"] and all(fits(v, wanted["items"]) for v in value)
        case "integer":
            return type(value) is int and wanted["minimum"] <= value <= wanted["maximum"]
        case "boolean":
            return type(value) is bool
        case _:
            return re.fullmatch("[a-z]{1,6}", value) is not None


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3)
    return names.map(
        lambda found: {
            "type": "object",
            "properties": found,
            "required": list(found),
            "additionalProperties": False,
        }
    )


SCHEMAS = objects(
    st.recursive(
        st.sampled_from(
            [
                WORD,
                {"type": "boolean"},
                {"type": "integer", "minimum": -5, "maximum": 99},
                {"enum": ["red", "green", 3, None]},
            ]
        ),
        lambda inner: (
            objects(inner) | inner.map(lambda one: {"type": "array", "items": one, "maxItems": 2})
        ),
        max_leaves=4,
    )
)


def mostly_right(expected: list[int], size: int) -> Callable[[Sequence[int], random.Random], int]:
    """Return a drafter that is right two times in three, over ``size`` tokens."""

    def guess(output: Sequence[int], dice: random.Random) -> int:
        right = expected[len(output)] if output == expected[: len(output)] != expected else 7
        return dice.choice((right, right, dice.randrange(size)))

    return guess


@settings(max_examples=8)
@given(SCHEMAS, st.integers(0, 1 << 16), st.booleans())
def test_every_text_fits_its_schema_and_drafts_change_nothing(
    wanted: Any, seed: int, greedy: bool
) -> None:
    constraint = READER(schema(wanted))
    law = SamplingParams(max_tokens=400) if greedy else replace(SAMPLED, seed=seed)
    params = replace(law, constraint=constraint)
    alone = ConstrainedText(constraint, (EOS,))

    def mask(output: Sequence[int]) -> bytes:
        alone.follow(output)
        found = require(alone.mask())
        return found

    expected = lawful_text(MODEL, PROMPT, params, mask)
    assert expected[-1] == EOS
    assert fits(json.loads(text_of(expected)), wanted)

    guess = mostly_right(expected, len(LETTERS))
    assert drafted_text(ToyTarget(MODEL), PROMPT, params, guess, seed) == expected


def test_torch_chooses_as_the_scalar_law_does() -> None:
    dice, size = random.Random(1), 70  # not a whole number of bytes
    rows = torch.randn(12, size, generator=torch.Generator().manual_seed(1))
    masks: list[bytes | None] = [pack_mask(dice.sample(range(90), 9)) for _ in range(12)]
    masks[3] = None
    for law in (SamplingParams(), SAMPLED, replace(SAMPLED, top_k=5)):
        blocks = [
            SampleBlock("a", law, range(5), masks=masks[:5]),
            SampleBlock("b", law, range(7, 9)),
            SampleBlock("c", law, range(20, 25), masks=masks[7:]),
        ]
        positions = [*range(5), 7, 8, *range(20, 25)]
        used = [*masks[:5], None, None, *masks[7:]]
        before = rows.clone()
        assert choose_tokens(rows, blocks) == [
            choose(row, law, at, mask=mask)
            for row, at, mask in zip(rows.tolist(), positions, used, strict=True)
        ]
        assert torch.equal(rows, before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TorchTarget, Path]:
    folder = tiny_checkpoints.write_tokenizer(tmp_path_factory.mktemp("tiny"))
    config = tiny_checkpoints.tiny_config(vocab_size=tiny_checkpoints.VOCABULARY_SIZE + 50)
    tiny_checkpoints.write_checkpoint(folder, config, tiny_checkpoints.tiny_tensors(config))
    return TorchTarget(str(folder), name="tiny", vocabulary=""), folder


def test_a_model_with_words_and_padding_is_held_to_a_schema(tiny: tuple[TorchTarget, Path]) -> None:
    """Oracle: the output without drafts, and the letters that the tokens stand for."""
    from tokenizers import Tokenizer

    target, folder = tiny
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert words.get_vocab_size() < target.info.vocabulary_size  # the other ids are padding
    wanted = {
        "type": "object",
        "properties": {"a": WORD, "b": {"type": "integer", "minimum": 0, "maximum": 300}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    reader = GrammarReader((folder / "tokenizer.json").read_text)
    reader.trials = Untried()
    params = replace(SAMPLED, constraint=reader(schema(wanted)))
    expected = drafted_text(target, [5, 6], params, lambda *_: 9, 0)
    written = b"".join(map(TokenBytes(words), expected[:-1]))
    assert fits(json.loads(written), wanted)

    guess = mostly_right(expected, 300)
    for seed in (1, 2):
        held = expected[: 4 * (seed - 1)]
        assert drafted_text(target, [5, 6], params, guess, seed, held=held) == expected


ENDLESS = schema({"allOf": [{"type": "string", "pattern": f".*a{n}.*"} for n in range(30)]})


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("json_schema", "{", "json_schema cannot be used: Expecting"),
        ("json_schema", '{"type": "objekt"}', "json_schema cannot be used: Invalid type: objekt"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: .*"not"'),
        (
            "json_schema",
            '{"$ref": "http://127.0.0.1:9/x.json"}',
            "json_schema cannot be used: .*retriev",
        ),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("regex", "(a", "regex cannot be used"),
        ("grammar", 'root ::= "a', "not readable as GBNF: Unexpected end"),
        ("grammar", "root ::= @(*5000", "not readable as GBNF"),
        ("grammar", "x ::= @x*8192", "GBNF of 8198 characters"),
        ("grammar", "root ::= foo", "not readable as GBNF: Rule 'foo' not found"),
        ("grammar", 'foo ::= "a"', "not readable as GBNF: No 'root' rule found"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(kind: str, text: str, why: str) -> None:
    text = re.sub(r"@(.)\*(\d+)", lambda found: found[1] * int(found[2]), text)
    with pytest.raises(ConstraintError, match=why):
        READER(Constraint(ConstraintKind(kind), text))


def test_a_grammar_of_llama_cpp_is_as_good_as_one_of_lark() -> None:
    gbnf, lark = 'root ::= "a" rest\nrest ::= [b-c]*', 'start: "a" REST\nREST: /[b-c]*/'
    one, other = (
        ConstrainedText(READER(Constraint(ConstraintKind.GRAMMAR, text)), (EOS,))
        for text in (gbnf, lark)
    )
    for text in ("", "a", "ab", "acb"):
        output = [LETTERS.index(letter) for letter in text]
        one.follow(output)
        other.follow(output)
        assert one.mask() == other.mask() != b""


def test_the_files_of_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "it"
    file.write_text("start: /é/")
    assert constraint_of(None, None) is None
    assert constraint_of(None, file) == Constraint(ConstraintKind.GRAMMAR, "start: /é/")
    assert constraint_of(file, None) == Constraint(ConstraintKind.JSON_SCHEMA, "start: /é/")
    with pytest.raises(ConfigError, match="--json-schema and --grammar are both given"):
        constraint_of(file, file)
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="it: is not UTF-8 text: byte 0xff at position 0"):
        constraint_of(file, None)
    file.write_text("a" * 32_769)
    with pytest.raises(ConfigError, match="it: 32769 bytes, but at most 32768 are read"):
        constraint_of(file, None)


WITHIN_S = 120.0
EASY = [schema({"enum": [number]}) for number in range(9)]
TOO_MUCH = "takes more time or memory than is given"


def wait_until(holds: Callable[[], object]) -> None:
    """Wait until ``holds`` is true, however slow this machine is."""
    end, pause = time.monotonic() + WITHIN_S, threading.Event()
    while not holds():
        assert time.monotonic() < end
        pause.wait(0.01)


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until_busy(pid: int) -> None:
    """Wait until a process has used half a second of processor time."""
    stat, ticks = Path(f"/proc/{pid}/stat"), os.sysconf("SC_CLK_TCK")
    wait_until(lambda: int(stat.read_text().rpartition(")")[2].split()[11]) > ticks / 2)


@pytest.fixture
def trying(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarReader]:
    """Yield a reader whose trials have ample time, however busy the machine is."""
    monkeypatch.setattr("edgespec.models.grammar._TRIAL_WITHIN_S", WITHIN_S)
    found = GrammarReader(lambda: make_letters_tokenizer(LETTERS, EOS))
    yield found
    found.close()


def one_pid(reader: GrammarReader) -> int:
    """Wait for the one process that will soon run, and return its pid."""
    wait_until(lambda: reader.trials.processes._running)
    (process,) = reader.trials.processes._running
    return process.pid


def test_each_grammar_has_a_process_that_ends_with_it(trying: GrammarReader) -> None:
    for easy in EASY[:4]:
        assert trying(easy).matcher is not None
    with pytest.raises(ConstraintError, match="Invalid type: objekt"):
        trying(schema({"type": "objekt"}))
    with pytest.raises(ConstraintError, match="grammar cannot be used: no text fits it"):
        trying(Constraint(ConstraintKind.GRAMMAR, "root ::= root"))
    with pytest.raises(ConstraintError, match="over the limit step_lexer_fuel of 100,000 of its"):
        trying(Constraint(ConstraintKind.REGEX, "a{99999999}"))
    assert not trying.trials.processes._running
    trying.close()
    with pytest.raises(ConstraintError, match="this side is stopping"):
        trying(EASY[5])


def test_who_asks_for_something_endless_keeps_nobody_waiting(trying: GrammarReader) -> None:
    """Oracle: an endless trial, stopped by a signal so that its time limit cannot end it, is still
    unfinished when all others are done. If its process is killed, as the kernel kills one that
    takes all memory, the error says so."""
    with ThreadPoolExecutor(1) as threads:
        for killed, easy_ones in ((True, EASY[:4]), (False, EASY[4:8])):
            endless = threads.submit(trying, ENDLESS)
            wait_until_busy(pid := one_pid(trying))
            os.kill(pid, signal.SIGSTOP)
            for easy in easy_ones:
                assert trying(easy).matcher is not None
            assert not endless.done()
            if killed:
                os.kill(pid, signal.SIGKILL)
            else:
                trying.close()
            with pytest.raises(ConstraintError, match=TOO_MUCH if killed else "is stopping"):
                endless.result(WITHIN_S)
    assert not trying.trials.processes._running


def test_a_schema_that_takes_for_ever_is_stopped(trying: GrammarReader) -> None:
    """The limit of processor time ends it. Without a separate process this would never end."""
    with pytest.raises(ConstraintError, match=TOO_MUCH):
        trying(ENDLESS)
    assert not trying.trials.processes._running
    assert trying(schema({"type": "object"})).matcher is not None


KILLED = """
import sys, threading
from edgespec.models.grammar import (
    GrammarReader,
    GuidanceVocabulary,
    make_letters_tokenizer,
)
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
reader = GrammarReader(lambda: make_letters_tokenizer("ab", 1))
endless = Constraint(ConstraintKind.JSON_SCHEMA, sys.argv[1])
threading.Thread(target=reader, args=(endless,), daemon=True).start()
while not reader.trials.processes._running:
    threading.Event().wait(0.01)
print(*[process.pid for process in reader.trials.processes._running], flush=True)
sys.stdin.read()
"""


def test_none_outlives_a_parent_that_was_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, ENDLESS.text],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        (pid,) = map(int, require(parent.stdout).readline().split())
        parent.kill()
    wait_until(lambda: not is_running(pid))


def test_a_grammar_is_tried_with_the_special_tokens_of_its_vocabulary(tmp_path: Path) -> None:
    folder = tiny_checkpoints.write_tokenizer(tmp_path)
    reader = GrammarReader((folder / "tokenizer.json").read_text)
    from tokenizers import Tokenizer

    known = Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
    number, token = next(iter(known.items()))
    for text in (f'start: "a" <[{number}]>', f'start: "a" {token.content}'):
        assert reader(Constraint(ConstraintKind.GRAMMAR, text)).matcher is not None
    with pytest.raises(ConstraintError, match="nobody"):
        reader(Constraint(ConstraintKind.GRAMMAR, "start: <|nobody|>"))
    reader.close()


ADDED = {"<tool_call>": False, "</tool_call>": False, "[TOOL]": False, "<think>": True}
"""Whether each added token is special, by the token's text."""


def with_added(tokenizer: str) -> str:
    made = json.loads(tokenizer)
    size = 1 + max([*made["model"]["vocab"].values(), *(one["id"] for one in made["added_tokens"])])
    kept = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for place, (content, special) in enumerate(ADDED.items()):
        made["added_tokens"].append(
            {"id": size + place, "content": content, "special": special, **kept}
        )
    return json.dumps(made)


def metaspace_tokenizer() -> str:
    """Make a tokenizer like Llama 2's: a space is added before each text, and rare bytes are
    tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", *(f"<0x{value:02X}>" for value in range(256))]
    letters = '▁abcdefghijklmnopqrstuvwxyz<>_/[]{}:"TOL'
    words += [*letters, "▁t", "to", "ca", "ll"]
    merges = [("▁", "t"), ("t", "o"), ("c", "a"), ("l", "l")]
    made = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, merges, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made.to_str()


@pytest.fixture(scope="module", params=["byte level", "metaspace"])
def added_words(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    if request.param == "metaspace":
        return with_added(metaspace_tokenizer())
    folder = tiny_checkpoints.write_tokenizer(tmp_path_factory.mktemp("added"))
    return with_added((folder / "tokenizer.json").read_text())


@pytest.mark.parametrize(
    ("kind", "text", "written"),
    [
        (ConstraintKind.GRAMMAR, 'start: "<tool_call>" "\\n" "{}"', "<tool_call>\n{}"),
        (ConstraintKind.GRAMMAR, 'start: <tool_call> "\\n{" /[a-c]/ "}"', "<tool_call>\n{?}"),
        (ConstraintKind.GRAMMAR, 'start: "[TOOL]" "x" | "[TOOLS]" "y"', None),
        (ConstraintKind.GRAMMAR, 'start: "a" <think> "b" // <think> and "<tool_call>"', None),
        (ConstraintKind.GRAMMAR, 'root ::= "<think>" [a-b]+ "</think>"', None),
        (ConstraintKind.REGEX, "<think>a b</think>", "<think>a b</think>"),
        (ConstraintKind.REGEX, "(<tool_call>| <t[a-z]*>)x", None),
        (ConstraintKind.REGEX, " to<\\|end\\|>do", " to<|end|>do"),
        (ConstraintKind.JSON_SCHEMA, '{"enum": ["<think>", "<tool_call>", "[TOOL]é"]}', None),
    ],
)
def test_a_mask_and_its_matcher_agree_on_the_text_of_added_tokens(
    added_words: str, kind: ConstraintKind, text: str, written: str | None
) -> None:
    """Oracle: the matcher accepts each token that a mask allows, and the tokens' text is the
    constraint's. A mask allows a special token only if the constraint names it as such."""
    from tokenizers import Tokenizer

    words = Tokenizer.from_str(added_words)
    special = {i for i, one in words.get_added_tokens_decoder().items() if one.special}
    bytes_of, dice = TokenBytes(words), random.Random(text)
    reader = GrammarReader(lambda: added_words)
    reader.trials = Untried()
    make = require(reader(Constraint(kind, text)).matcher)
    for _ in range(6):
        matcher = make()
        output: list[int] = []
        while any(mask := matcher.mask()):
            named = [token for token in range(8 * len(mask)) if mask[token >> 3] >> (token & 7) & 1]
            for token in dice.sample(named, min(len(named), 20)):
                assert matcher.consume([token]) == 1, (token, bytes_of(token))
                matcher.rollback(1)
            assert matcher.mask() == mask
            output.append(dice.choice(named))
            assert matcher.consume(output[-1:]) == 1
            if matcher.can_end and dice.random() < 0.5:
                break
        assert matcher.can_end
        shown = b"".join(map(bytes_of, output)).decode()
        assert re.fullmatch(re.escape(written or shown).replace("\\?", "."), shown), shown
        allowed = {words.token_to_id("<think>")} if "<think>" in text else set()
        assert special & set(output) <= (allowed if 'start: "a" <think>' in text else set())


@pytest.mark.parametrize("is_special", [False, True], ids=["added", "special"])
def test_masks_stay_right_when_a_token_that_is_named_by_its_id_is_taken_back(
    is_special: bool,
) -> None:
    """Oracle: a matcher that read the same output and never went back. Drafts beyond the end of a
    call are consumed and taken back so."""
    from tokenizers import AddedToken, Tokenizer

    words = Tokenizer.from_str(byte_words())
    words.add_tokens([AddedToken(one, special=is_special) for one in ("<call>", "</call>")])
    begin, end = (require(words.token_to_id(one)) for one in ("<call>", "</call>"))
    grammar = (
        f"start: free (call free)*\nfree: <[^{begin}]>*\n"
        f'call: <[{begin}]> "\\n" arguments "}}\\n" <[{end}]>\n'
        'arguments: %json {"type": "object", "properties": {"a": {"type": "string"}}}'
    )
    reader = GrammarReader(words.to_str)
    reader.trials = Untried()
    make = require(reader(Constraint(ConstraintKind.GRAMMAR, grammar)).matcher)
    likely = words.encode('So <call>\n{"a": "b"}}\n</call> <call>\n{"a": "c"}}\n</call>!').ids
    others = [begin, end, *words.encode('"\\}]:{, a').ids]
    assert {begin, end} <= set(likely)
    for seed in range(80):
        dice = random.Random(seed)
        matcher, output = make(), likely[: dice.randrange(4, len(likely))]
        assert matcher.consume(output) == len(output)
        for _ in range(25):
            if dice.random() < 0.4:
                count = dice.randint(1, min(4, len(output)))
                matcher.rollback(count)
                del output[len(output) - count :]
                again = make()
                assert again.consume(output) == len(output)
                assert matcher.mask() == again.mask(), (seed, words.decode(output))
            elif dice.random() < 0.3:
                matcher.mask()
            else:
                place = len(output)
                is_likely = place < len(likely) and dice.random() < 0.6
                token = likely[place] if is_likely else dice.choice(others)
                output += [token] * matcher.consume([token])
            if not output:
                break


@pytest.mark.parametrize(
    "text", ["", "a", " a", "to call", "  ", "<think>", "[TOOL] é", "\t\n", "\x02"]
)
def test_a_text_has_tokens_that_stand_for_it(added_words: str, text: str) -> None:
    words = GuidanceVocabulary.from_json(added_words)
    special = set(words.special_token_ids)
    for written in (text.encode(), text.encode()[:-1], text.encode()[1:]):
        found = words(written)
        assert b"".join(words.tokens[token] for token in found) == written
        assert not special & set(found)


def test_json_in_a_grammar_has_no_white_space_without_end(trying: GrammarReader) -> None:
    inner = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
    constraint = Constraint(ConstraintKind.GRAMMAR, f'start: "(" %json {inner} ")"')
    matcher = require(trying(constraint).matcher)()
    opened = [LETTERS.index(letter) for letter in "({"]
    assert matcher.consume(opened) == 2
    taken = matcher.consume([LETTERS.index(" ")] * 100)
    assert 1 <= taken <= 17
    rest = [LETTERS.index(letter) for letter in '"a": 5})']
    assert matcher.consume(rest) == len(rest)
    assert matcher.can_end


BOMB = Constraint(ConstraintKind.REGEX, "(((a|b){1,20}){1,20}){1,20}")


def consume_letters(matcher: Matcher, letters: str) -> None:
    for letter in letters:
        assert any(matcher.mask())
        assert matcher.consume([LETTERS.index(letter)]) == 1


def test_a_text_that_asks_for_too_much_names_the_limit_and_harms_no_other_text() -> None:
    """Oracle: an earlier text of the same constraint goes on, and so does a new one."""
    reader = GrammarReader(lambda: make_letters_tokenizer(LETTERS, EOS))
    reader.trials = Untried()
    make = require(reader(BOMB).matcher)
    modest, greedy = make(), make()
    consume_letters(modest, "ab")
    dice = random.Random(1)
    why = (
        r"the regex asks for too much work behind \d+ tokens: it is over the limit"
        r" step_lexer_fuel of 100,000"
    )
    with pytest.raises(ConstraintError, match=why):
        consume_letters(greedy, "".join(dice.choices("ab", k=2_000)))
    consume_letters(modest, "a")
    assert modest.consume([LETTERS.index("x")]) == 0  # a refusal is no failure
    consume_letters(make(), "ba")


def test_a_verifier_blames_the_grammar_and_not_its_model() -> None:
    """The limit is met while a token is consumed, and the library raises no error."""
    reader = GrammarReader(lambda: make_letters_tokenizer(LETTERS, EOS))
    reader.trials = Untried()
    texts = [require(reader(BOMB).matcher)() for _ in range(6)]
    dice, failed = random.Random(1), 0
    while failed < 4:
        place = dice.randrange(6)
        try:
            if any(texts[place].mask()):
                token = LETTERS.index(dice.choice("ab"))
                assert texts[place].consume([token]) == 1  # its mask allows the token
        except ConstraintError as error:
            assert "limit step_lexer_fuel of 100,000" in str(error)  # noqa: PT017
            texts[place] = require(reader(BOMB).matcher)()
            failed += 1


CAT = schema(
    {
        "type": "object",
        "properties": {"name": WORD, "lives": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["name", "lives"],
        "additionalProperties": False,
    }
)


async def generate_text(one: Agent, constraint: Constraint, prompt: str = "cat") -> str:
    params = replace(SAMPLED, constraint=constraint)
    return "".join([chunk.text async for chunk in one.generate(prompt, params)])


async def test_a_device_without_the_library_gets_the_same_text() -> None:
    async with connect_pair(READER, READER) as with_it, connect_pair(READER, None) as without:
        text = await generate_text(with_it, CAT)
        assert set(json.loads(text)) == {"name", "lives"}
        assert await generate_text(without, CAT) == text
        for one in (with_it, without):
            assert require(one.stats).counters.draft_failure == ""


async def test_a_verifier_says_what_it_cannot_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = schema({"type": "objekt"})
    async with connect_pair(READER, None) as one:
        with pytest.raises(GenerationError, match="Invalid type: objekt") as caught:
            await generate_text(one, bad)
        assert caught.value.code is FaultCode.INVALID
        monkeypatch.setattr("edgespec.models.grammar.find_spec", lambda name: None)
        with pytest.raises(GenerationError, match=r"pip install 'edgespec\[grammar\]'"):
            await generate_text(one, CAT)
    async with connect_pair(None, None) as one:
        with pytest.raises(GenerationError, match="this verifier does not support json_schema"):
            await generate_text(one, CAT)


async def test_tokens_that_the_grammar_does_not_take_cannot_be_resumed() -> None:
    verifier = Verifier(
        ToyTarget(MODEL, vocabulary=toy_info(MODEL).vocabulary), Limits(), read_constraint=READER
    )
    transport = LoopbackTransport(verifier.serve, lambda: verifier.info)
    stream = await transport.connect()
    params = replace(SAMPLED, constraint=CAT)
    await stream.send(Open("s", "", "", (5,), (LETTERS.index("{"), 7), params))
    said = await stream.receive()
    assert "accepts only 1 of the 2 tokens that the device already holds" in str(said)
    await stream.close()
    await transport.close()
    await verifier.stop()
