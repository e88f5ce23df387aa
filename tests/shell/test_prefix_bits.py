"""Shared and private prefixes give the same bits.

Oracle: the same sessions one after the other, on an engine that shares nothing and is sent no
drafts; every row that is sampled must have the same logits bit for bit, and every text be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from edgespec.core.protocol.messages import Commit, Draft, Limits, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.tree import CommittedPrefix
from edgespec.core.protocol.work import CacheShape, PassRequest
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    CloseSequence,
    EngineAction,
    EngineEvent,
    EngineLimits,
    KeepNodes,
    OpenSequence,
    RunBatch,
    SendTo,
    StreamMessage,
    StreamOpened,
)
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, write_checkpoint
from tests.shell.torch_schedules import Recorder

CONTEXT = 240
SAMPLINGS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        seed=5,
        max_tokens=24,
        ignore_eos=True,
    ),
)
Texts = dict[str, tuple[int, ...]]
Logits = dict[tuple[str, int], torch.Tensor]
"""By session and the position that is sampled from them."""


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    threads = torch.get_num_threads()
    recorder = Recorder(write_checkpoint(tmp_path_factory.mktemp("tiny")))
    torch.set_num_threads(threads)
    return recorder


def tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + 31 * i * i + 17 * i) % VOCABULARY_SIZE for i in range(count))


@dataclass
class Serving:
    """An engine and the target, each pass at once; a device that knows its text drafts it, each
    right token behind a wrong sibling, so that kept rows have to move."""

    recorder: Recorder
    share: SharePrefixes
    blocks: int = 200
    known: Texts = field(default_factory=dict)
    texts: Texts = field(default_factory=dict)
    logits: list[tuple[tuple[str, int], torch.Tensor]] = field(default_factory=list)
    rows: int = 0

    def __post_init__(self) -> None:
        limits = EngineLimits(
            cache=CacheShape(self.blocks, 16), max_rows_per_session=48, share_prefixes=self.share
        )
        info = self.recorder.target.info
        self.engine = VerifyEngine(info, Limits(context_length=CONTEXT), limits, contain=False)
        self.names: dict[int, str] = {}
        self.now = 0.0

    def play(self, *opens: Open) -> None:
        """Open them at once, and go on until all have their text."""
        events: list[EngineEvent] = []
        for request in opens:
            stream = len(self.names) + 1
            self.names[stream] = request.session_id
            self.texts[request.session_id] = (*request.prompt, *request.committed)
            events.append(StreamOpened(stream, request))
        while events:
            self.now += 0.01
            for action in self.engine.handle(events.pop(0), self.now):
                events += self._do(action)

    def _do(self, action: EngineAction) -> Sequence[EngineEvent]:
        target = self.recorder.target
        match action:
            case OpenSequence(key, prompt_length, sampling, text):
                target.open(key, prompt_length, sampling, text)
            case KeepNodes(key, nodes):
                target.keep(key, nodes)
            case CloseSequence(key):
                target.close(key)
            case RunBatch(requests):
                results = target.forward(requests)
                self._note(requests)
                return [BatchDone(tuple(results))]
            case SendTo(stream, Commit() as commit):
                name = self.names[stream]
                assert commit.position == len(self.texts[name])
                self.texts[name] += commit.tokens
                held = StreamMessage(stream, Received(len(self.texts[name]), 0))
                drafts = () if commit.finish else self._drafts(stream, name)
                return [held, *drafts]
        return []

    def _note(self, requests: Sequence[PassRequest]) -> None:
        row = 0
        for request in requests:
            self.rows += request.row_count
            if request.sample:
                length = request.cache_length + len(request.feed)
                self.logits.append(((request.key, length), self.recorder.logits[row]))
                row += 1 + len(request.tokens)

    def _drafts(self, stream: int, name: str) -> list[StreamMessage]:
        held = self.texts[name]
        right = self.known.get(name, ())[len(held) :][:4]
        if not right:
            return []
        first = 10 * len(held)
        nodes = [t for token in right for t in ((token + 1) % VOCABULARY_SIZE, token)]
        parents = [0, 0, *(first + 1 + 2 * (i // 2) for i in range(len(nodes) - 2))]
        base_hash = CommittedPrefix(held).hash_at(len(held))
        draft = Draft(first, tuple(parents), tuple(nodes), len(held), base_hash)
        return [StreamMessage(stream, draft)]


def generations(sampling: SamplingParams, first: Texts) -> list[Open]:
    """One system prompt, the same request again, a chat's next turn and a device that comes back;
    the later ones go on with texts in ``first``."""
    system = tokens(1, 100)

    def request(name: str, prompt: tuple[int, ...], committed: tuple[int, ...] = ()) -> Open:
        return Open(name, "", "", prompt, committed, sampling=sampling, run_ahead=RunAhead.ALWAYS)

    opens = [request("a", system + tokens(2, 7)), request("b", system + tokens(3, 28))]
    opens.append(replace(opens[1], session_id="same"))
    if first:
        opens.append(request("next turn", first["a"] + tokens(4, 9)))
        text = first["b"]
        opens.append(request("back", text[:128], text[128:141]))
    return opens


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_shared_and_private_prefixes_give_the_same_bits(
    recorder: Recorder, sampling: SamplingParams
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # canonical mode's own
    try:
        first = Serving(recorder, SharePrefixes.NONE)
        first.play(generations(sampling, {})[0])
        first.play(generations(sampling, {})[1])
        opens = generations(sampling, first.texts)
        private = Serving(recorder, SharePrefixes.NONE)
        for request in opens:
            private.play(request)
        expected: Logits = dict(private.logits)
        assert private.engine.keeper.prefix_hit_tokens == 0

        shared = Serving(recorder, SharePrefixes.ALL, known=private.texts)
        for request in opens:
            shared.play(request)
        _check(shared, private.texts, expected)
        # Whole blocks of 16: of b the system prompt, of the same one all, of the others all but
        # what the last pass left.
        assert shared.engine.keeper.prefix_hit_tokens >= 96 + 112 + 112 + 128
        assert shared.rows < private.rows

        crowded = Serving(recorder, SharePrefixes.ALL, blocks=15, known=private.texts)
        crowded.play(*opens)
        _check(crowded, private.texts, expected)
        assert crowded.engine.keeper.evictions > 0
        assert crowded.engine.keeper.prefix_hit_tokens > 0
    finally:
        torch.set_num_threads(threads)


def _check(serving: Serving, texts: Texts, expected: Logits) -> None:
    assert serving.texts == texts
    assert len(serving.logits) > 30
    for place, logits in serving.logits:
        assert torch.equal(logits, expected[place]), place
    ledger = serving.engine.keeper.ledger
    assert ledger is not None
    assert ledger.free_count == ledger.block_count
