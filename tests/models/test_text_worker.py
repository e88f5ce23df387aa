"""Tests of foreign chat templates and tokenizers in a process with bounds. Oracles: the result of
the same folder in this process; another process after the first one was ended; `serve` ends, and
answers other requests, while a template runs for ever."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from edgespec.config import AgentConfig, DraftSection
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.device import build
from edgespec.device.build import load_tokenizer
from edgespec.models import grammar, text_process, text_worker
from edgespec.models.folders import cache_folder, vocabulary_fingerprint
from edgespec.models.grammar import GuidanceVocabulary
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.remote_tokenizer import RemoteTokenizer
from edgespec.models.text_process import template_worker
from edgespec.models.text_worker import TextWorker, TextWorkerError
from edgespec.models.tokenizer import (
    ChatTemplate,
    ChatTemplateError,
    TextTokenizer,
    TokenizerError,
)
from tests.endpoint.live_endpoint import parse_reply, request_bytes
from tests.endpoint.test_tools_and_text import CONVERSATIONS, FAMILIES, FORECASTS, TOKENS, USER
from tests.kit.live_verifier import start, wait_until_ready
from tests.kit.tiny_checkpoints import write_tokenizer
from tests.present import require

WITHIN_S = 300
LOOPS = "{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4
GREETING = "{{ messages[0].content }}!"


@pytest.fixture(scope="module")
def worker() -> Iterator[TextWorker]:
    found = TextWorker(text_process.__file__)
    yield found
    found.close()


def pid_of(worker: TextWorker) -> int:
    return require(worker._process).pid


def render_or_refuse(template: ChatTemplate, messages: Any, tools: Any) -> str:
    """Return the rendered text, or the text of the refusal."""
    try:
        return template.render(messages, tools=tools)
    except ChatTemplateError as refusal:
        return f"refused: {refusal}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tools", [None, FORECASTS], ids=["plain", "tools"])
def test_a_child_renders_what_this_process_does(
    worker: TextWorker, family: str, tools: Any
) -> None:
    near, far = (ChatTemplate(FAMILIES[family], TOKENS, one) for one in (None, worker))
    assert far.variables == near.variables
    for messages in CONVERSATIONS:
        assert render_or_refuse(far, messages, tools) == render_or_refuse(near, messages, tools)


@pytest.mark.parametrize("content", ["", "\u20ac \U0001f600 \0", "a" * 2_000_000])
def test_a_child_renders_any_text(worker: TextWorker, content: str) -> None:
    message = {"role": "user", "content": content}
    assert ChatTemplate(GREETING, worker=worker).render([message]) == content + "!"


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{{ '%999999999d' % 1 }}", "takes more than the 192 MiB that are given"),
        ("{{ 'ab' * 300000000 }}", "takes more than the 192 MiB that are given"),
        ("{{ 'a' * 16777217 }}", "wrote 16777217 characters, at most 16777216"),
        ("{% set x = namespace(l=[1]) %}{% for i in range(99) %}{% set x.l = x.l + x.l %}"
         "{% endfor %}", "takes more than the 192 MiB that are given"),
        ("{{ raise_exception('no') }}", "refuses the messages: no"),
        ("{{ 1 / 0 }}", "failed: division by zero"),
        ("{% if %}", "failed: Expected an expression"),
        ("{% raw %}" + " " * (1 << 20), "but at most 1048576 are taken"),
    ],
    ids=["format", "repeat", "long", "doubled", "refusal", "failure", "syntax", "source"],
)  # fmt: skip
def test_a_hostile_template_costs_its_own_request_alone(
    worker: TextWorker, source: str, why: str
) -> None:
    with pytest.raises(ChatTemplateError, match=why):
        ChatTemplate(source, worker=worker).render([USER])
    assert ChatTemplate(GREETING, worker=worker).render([USER]) == f"{USER['content']}!"


def test_a_template_that_never_ends_is_ended(worker: TextWorker) -> None:
    """The limit of processor time ends it, or on a busy machine the clock."""
    ChatTemplate(GREETING, worker=worker).render([USER])
    before = pid_of(worker)
    with pytest.raises(ChatTemplateError, match="more than the 5 s of processor time"):
        ChatTemplate(LOOPS, worker=worker).render([USER])
    assert ChatTemplate(GREETING, worker=worker).render([USER]) == f"{USER['content']}!"
    assert pid_of(worker) != before


def test_a_child_that_does_not_answer_is_ended_by_the_clock(
    worker: TextWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(GREETING, worker=worker)
    template.render([USER])
    os.kill(pid_of(worker), signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(text_worker, "_ANSWER_S", 0.05)
        with pytest.raises(ChatTemplateError, match="takes more than"):
            # more than the pipe holds
            template.render([{"role": "user", "content": "a" * 1_000_000}])
    assert template.render([USER]) == f"{USER['content']}!"


def test_a_child_that_was_killed_is_replaced_and_many_may_ask(worker: TextWorker) -> None:
    template = ChatTemplate(GREETING, worker=worker)
    template.render([USER])
    os.kill(pid_of(worker), signal.SIGKILL)
    require(worker._process).wait()
    messages = [[{"role": "user", "content": f"{n}"}] for n in range(40)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(template.render, messages)) == [f"{n}!" for n in range(40)]


def test_a_child_has_no_secrets_and_no_library_that_it_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("EDGESPEC_API_KEY", "a secret")
    worker = TextWorker(text_process.__file__)
    try:
        ChatTemplate(GREETING, worker=worker).render([USER])
        process = Path("/proc", str(pid_of(worker)))
        assert b"a secret" not in (process / "environ").read_bytes()
        loaded = (process / "maps").read_text()
        for name in ("torch", "onnxruntime", "grpc", "numpy", "llguidance"):
            assert name not in loaded
        resident = int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident <= text_worker.RESIDENT_BYTES * 1.2
    finally:
        worker.close()


def test_a_closed_worker_ends_what_runs_and_starts_nothing() -> None:
    worker = TextWorker(text_process.__file__)
    ChatTemplate(GREETING, worker=worker).render([USER])
    process = require(worker._process)
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(ChatTemplate(LOOPS, worker=worker).render, [USER])
        os.kill(process.pid, signal.SIGSTOP)  # stopped, so that its time limit cannot end it
        worker.close()
        with pytest.raises(ChatTemplateError, match=r"stopping|takes more than"):
            endless.result(WITHIN_S)
    assert process.wait(WITHIN_S) == -signal.SIGKILL
    with pytest.raises(TextWorkerError, match="this side is stopping"):
        worker.call("variables", GREETING)


def bundled_copy(folder: Path, template: str) -> Path:
    shutil.copytree(resolve_source("bundled", Purpose.DRAFT).folder, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_only_the_bundled_template_is_rendered_in_this_process(tmp_path: Path) -> None:
    own = load_tokenizer(str(bundled_copy(tmp_path / "own", GREETING))).chat_template()
    assert require(own).worker is template_worker()
    assert require(load_tokenizer("bundled").chat_template()).worker is None


def test_a_memory_budget_counts_the_child_and_bounds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from edgespec.device import model_drafter

    sizes = [
        sum(
            term.bytes
            for term in model_drafter.measure_memory_question(DraftSection(model=name), 1).additions
        )
        for name in ("bundled", str(tmp_path))
    ]
    assert sizes[1] - sizes[0] == text_worker.RESIDENT_BYTES
    assert sizes[0] >= 16 << 20  # the bodies of requests
    monkeypatch.setattr(template_worker(), "most_bytes", text_worker.TEMPLATE_BYTES)
    draft = DraftSection(memory_budget="1GiB")
    agent = build.build_agent(AgentConfig(draft=draft))
    assert template_worker().most_bytes == 64 << 20
    require(agent.drafter).close()


def test_serve_answers_others_and_ends_while_a_template_never_does(tmp_path: Path) -> None:
    draft = bundled_copy(tmp_path / "draft", LOOPS)
    with wait_until_ready(start("verifier", "--port", "0", "--pass-ms", "1")) as (address, _):
        serve = start(
            *("serve", "--port", "0", "--verifier", address, "--draft", str(draft)),
            *("--set", "endpoint.drain_s=0"),
        )
        with wait_until_ready(serve, r"ready on http://127\.0\.0\.1:(\d+)/v1") as (port, process):
            chat = json.dumps({"messages": [USER], "max_tokens": 1}).encode()
            text = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
            with socket.create_connection(("127.0.0.1", int(port))) as endless:
                endless.sendall(request_bytes("/v1/chat/completions", chat))
                with socket.create_connection(("127.0.0.1", int(port))) as other:
                    other.sendall(request_bytes("/v1/completions", text))
                    assert parse_reply(b"".join(iter(lambda: other.recv(65536), b""))).status == 200
                process.send_signal(signal.SIGTERM)
                assert process.wait(WITHIN_S) == 0


# --- tokenizers that verifiers lend ---------------------------------------------------------------


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lent")
    write_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": GREETING, "bos_token": "<s>"})
    )
    return folder


@pytest.fixture(scope="module")
def far(lent: Path) -> Iterator[RemoteTokenizer]:
    found = RemoteTokenizer(lent)
    yield found
    found.close()


def test_a_far_tokenizer_is_the_near_one(far: RemoteTokenizer, lent: Path) -> None:
    """Oracle: the same folder in this process."""
    near = TextTokenizer(lent)
    assert far.vocabulary == vocabulary_fingerprint(lent / "tokenizer.json")
    assert (far.special_ids, far.special_texts) == (near.special_ids, near.special_texts)
    assert far.added == near.added
    ids = range(-1, near.id_count + 2)
    assert [far.token_bytes(n) for n in ids if n >= 0] == [
        near.token_bytes(n) for n in ids if n >= 0
    ]
    for text in ("", "the quick brown fox", " a\u20ac\U0001f600\n", "<s>the</s>"):
        for special in (True, False):
            tokens = far.encode(text, add_special_tokens=special)
            assert tokens == near.encode(text, add_special_tokens=special)
            assert far.decode(tokens, skip_special_tokens=special) == near.decode(
                tokens, skip_special_tokens=special
            )
            for place in range(len(tokens)):
                streams = far.stream(tokens[:place]), near.stream(tokens[:place])
                shown = [one.push(tokens[place:]) + one.flush() for one in streams]
                assert shown[0] == shown[1]
    for text in [*near.added, "the", "nothing"]:
        assert far.special_id(text) == near.special_id(text)
    templates = far.chat_template(), near.chat_template()
    assert templates[0] == templates[1]
    assert require(templates[0]).worker is not None


def test_a_far_vocabulary_is_the_near_one(far: RemoteTokenizer, lent: Path) -> None:
    """Oracle: the same folder in this process, also for texts with names of special tokens."""
    near = TextTokenizer(lent)
    one = GuidanceVocabulary.from_remote(far)
    other = GuidanceVocabulary.from_tokenizer(near.copy_tokenizer(), near.special_ids)
    assert (one.tokens, one.eos_token_id, one.added) == (
        other.tokens,
        other.eos_token_id,
        other.added,
    )
    assert one.special_token_ids == other.special_token_ids
    for text in ("", "the quick", " a\u20ac", "<s>the</s>", *near.added, "\x02"):
        assert one(text) == other(text)
        assert not set(one(text)) & set(one.special_token_ids)
    assert far.encode("<s>the</s>") == near.encode("<s>the</s>")


def test_constraints_read_a_lent_tokenizer_in_its_own_process(
    lent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    folder = cache_folder() / "tokenizers" / "abc"
    shutil.copytree(lent, folder)
    monkeypatch.setattr(grammar, "TextTokenizer", None)
    read = require(grammar.device_grammar_reader(str(folder)))
    made = read(Constraint(ConstraintKind.REGEX, "the quick"))
    text = TextTokenizer(lent).encode("the quick", add_special_tokens=False)
    matcher = require(made.matcher)()
    assert matcher.consume(text) == len(text)
    assert matcher.can_end


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.ByteLevel(), decoders.Strip(" ", 1, 0), decoders.WordPiece()],
    ids=["metaspace", "bytes", "strip", "wordpiece"],
)
def test_a_far_tokenizer_begins_texts_as_the_library_does(tmp_path: Path, decoder: Any) -> None:
    vocabulary = {"<unk>": 0, "\u2581a": 1, "\u0120b": 2, " c": 3, "d": 4}
    inner = Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    inner.decoder = decoder
    inner.save(str(tmp_path / "tokenizer.json"))
    near, far = TextTokenizer(tmp_path), RemoteTokenizer(tmp_path)
    try:
        for first in range(5):
            for second in range(5):
                shown = [one.stream().push([first, second]) for one in (near, far)]
                assert shown[0] == shown[1]
    finally:
        far.close()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "JSON"),
        (b"{}", "model.vocab is missing"),
        (
            b'{"a": [' + b"[]," * 12_000_000 + b"1]}",
            "its process does not start within 30 s of processor time and 64 MiB",
        ),
    ],
    ids=["no JSON", "no vocabulary", "much memory"],
)
def test_a_hostile_tokenizer_is_not_loaded(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=why):
        RemoteTokenizer(tmp_path, 64 << 20)


def test_a_tokenizer_that_fills_memory_with_a_text_costs_that_text_alone(tmp_path: Path) -> None:
    """The tokenizer has ten normalizers, each of which writes ten letters for one."""
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    found = json.loads(path.read_text())
    tenfold = {"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 10}
    found["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 10}
    path.write_text(json.dumps(found))
    tokenizer = RemoteTokenizer(tmp_path, 192 << 20)
    try:
        expected = tokenizer.encode("the")
        with pytest.raises(TokenizerError, match="the tokenizer failed: it takes more than"):
            tokenizer.encode("q")
        assert tokenizer.encode("the") == expected
    finally:
        tokenizer.close()
