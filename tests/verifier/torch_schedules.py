"""Random schedules of passes on torch targets: texts, tokens, logits or bits must equal those of a
plain schedule, whatever is drafted and whichever sessions share the passes.

Run as a program, ``python -m tests.verifier.torch_schedules FOLDER:DTYPE ...``, this file checks
the bits of a checkpoint in a process whose instruction set the environment may have restricted.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from edgespec.core.ports import PassRequest, PassResult, TargetModel
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.torch_target import TorchTarget

GREEDY = SamplingParams()
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=0.8, seed=(1 << 64) - 1),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, seed=6),
    SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={11: 2.0}
    ),
    SamplingParams(
        temperature=0.7, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.3, seed=8
    ),
)
Tree = tuple[tuple[int, ...], tuple[int, ...]]


def torch_target(folder: Path, **options: Any) -> TorchTarget:
    settings: dict[str, Any] = {"device": "cpu", "max_cached_tokens": 2048, **options}
    return TorchTarget(str(folder), name="tiny", vocabulary="v", **settings)


class Recorder:
    """A target whose every pass leaves its logits in ``logits``; canonical unless ``options``
    override it."""

    def __init__(self, folder: Path, dtype: str = "float32", **options: Any):
        settings = {"device": "cpu", "max_cached_tokens": 8192, "canonical": True, **options}
        self.target = TorchTarget(str(folder), name="tiny", vocabulary="v", dtype=dtype, **settings)
        self.vocabulary_size = self.target.info.vocabulary_size
        self._recorded = record_logits(self.target)

    @property
    def logits(self) -> torch.Tensor:
        return self._recorded[-1]

    def reference(self, text: list[int], first: int) -> torch.Tensor:
        """Return the logits that predict text[first], text[first + 1], .., one token per pass."""
        target, rows = self.target, []
        target.open("reference", first, GREEDY)
        target.forward([PassRequest("reference", 0, tuple(text[:first]))])
        rows.append(self.logits[0])
        for position in range(first, len(text)):
            target.forward([PassRequest("reference", position, (text[position],))])
            rows.append(self.logits[0])
        target.close("reference")
        return torch.stack(rows)


def record_logits(target: TorchTarget) -> deque[torch.Tensor]:
    """Record the logits of the target's last pass, from now on."""
    run, found = target._run, deque[torch.Tensor](maxlen=1)

    def record(batch: Sequence[PassRequest]) -> torch.Tensor:
        logits = run(batch)
        found.append(logits.clone())
        return logits

    target._run = record  # type: ignore[method-assign]
    return found


def random_tree(rng: random.Random, count: int, vocabulary_size: int) -> Tree:
    tokens = tuple(rng.randrange(vocabulary_size) for _ in range(count))
    reach = rng.choice([1, 3, count])
    return tokens, tuple(rng.randrange(max(-1, i - reach), i) for i in range(count))


def random_path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    path: list[int] = []
    node = rng.randrange(-1, len(parents))
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


# --- bits -----------------------------------------------------------------------------------


def check_random_schedule(rng: random.Random, recorder: Recorder, length: int) -> None:
    """Cut a random prompt at random places, then run a random tree among other sessions' work: the
    bits must be those of one token per pass, after right and wrong nodes alike."""
    target, size = recorder.target, recorder.vocabulary_size
    prompt = [rng.randrange(size) for _ in range(length)]
    tokens, parents = random_tree(rng, rng.randrange(1, 14), size)
    feed_length = rng.randrange(1, min(length, 12))
    target.open("tested", length, GREEDY)
    cached = 0
    while cached < length - feed_length:
        stop = min(cached + rng.choice([1, 3, 17, 100, 400]), length - feed_length)
        target.forward([PassRequest("tested", cached, tuple(prompt[cached:stop]), sample=False)])
        cached = stop
    tested = PassRequest("tested", cached, tuple(prompt[cached:]), tokens, parents)
    batch = [tested, *_other_sessions(rng, recorder)]
    rng.shuffle(batch)
    target.forward(batch)
    before = sum(_sampled_rows(r) for r in batch[: batch.index(tested)])
    logits = recorder.logits[before : before + _sampled_rows(tested)]
    for request in batch:
        target.close(request.key)
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else ()), node])
    for node in [n for n in range(len(tokens)) if n not in parents]:
        expected = recorder.reference(prompt + [tokens[n] for n in paths[node]], length)
        assert torch.equal(logits[0], expected[0])
        for depth, ancestor in enumerate(paths[node]):
            assert torch.equal(logits[1 + ancestor], expected[1 + depth]), (node, parents)


def _other_sessions(rng: random.Random, recorder: Recorder) -> list[PassRequest]:
    """Return the requests of up to three other sessions."""
    requests = []
    for index in range(rng.randrange(4)):
        key = f"other {index}"
        recorder.target.open(key, 1, GREEDY)
        size = recorder.vocabulary_size
        feed = tuple(rng.randrange(size) for _ in range(rng.choice([1, 2, 5, 40])))
        tokens, parents = random_tree(rng, rng.randrange(6), size)
        sample = bool(tokens) or rng.random() < 0.5
        requests.append(PassRequest(key, 0, feed, tokens, parents, sample))
    return requests


def _sampled_rows(request: PassRequest) -> int:
    return 1 + len(request.tokens) if request.sample else 0


# --- texts ----------------------------------------------------------------------------------


def generate_greedily(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens of transformers' own ``generate``, whatever the end
    token is."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
    )
    text: list[int] = out[0, len(prompt) :].tolist()
    return text


def decode_alone(
    target: TargetModel, prompt: list[int], count: int, params: SamplingParams = GREEDY
) -> list[int]:
    """Decode one token per pass, without drafts."""
    target.open("alone", len(prompt), params)
    text, cached = list(prompt), 0
    for _ in range(count):
        text += target.forward([PassRequest("alone", cached, tuple(text[cached:]))])[0].targets
        cached = len(text) - 1
    target.close("alone")
    return text[len(prompt) :]


def decode_beside(
    target: TargetModel,
    prompts: Sequence[list[int]],
    texts: Sequence[list[int]],
    params: Sequence[SamplingParams] = (GREEDY,),
) -> list[list[int]]:
    """Return the tokens that ``target`` generates after each of ``prompts``, as many as each of
    ``texts`` has.

    Each pass serves some of the sessions. ``texts`` are the expected outputs. The drafts are trees
    that hide some of the text among wrong nodes, chains of the text, chains of wrong tokens, or
    nothing. The first half of a long prompt is fed in a pass of its own.
    """
    rng, size = random.Random(len(prompts)), target.info.vocabulary_size
    written = [list(prompt) for prompt in prompts]
    cached = [0] * len(prompts)
    for index, prompt in enumerate(prompts):
        target.open(f"s{index}", len(prompt), params[index % len(params)])
        if len(prompt) > 8:
            cached[index] = len(prompt) // 2
            half = tuple(prompt[: cached[index]])
            target.forward([PassRequest(f"s{index}", 0, half, sample=False)])
    goals = [len(prompt) + len(text) for prompt, text in zip(prompts, texts, strict=True)]
    while unfinished := [i for i, goal in enumerate(goals) if len(written[i]) < goal]:
        batch = []
        for index in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            ahead = texts[index][len(written[index]) - len(prompts[index]) :]
            tokens, parents = _random_draft(rng, ahead[: rng.randrange(7)], size)
            feed = tuple(written[index][cached[index] :])
            batch.append(PassRequest(f"s{index}", cached[index], feed, tokens, parents))
        for request, result in zip(batch, target.forward(batch), strict=True):
            assert request.key == result.key
            index = int(request.key[1:])
            kept, new = accept_nodes(request, result)
            target.keep(request.key, kept)
            cached[index] = len(written[index]) + len(kept)
            written[index] += new
    for index in range(len(prompts)):
        target.close(f"s{index}")
    return [
        text[len(prompt) : goal] for text, prompt, goal in zip(written, prompts, goals, strict=True)
    ]


def _random_draft(rng: random.Random, right: Sequence[int], vocabulary_size: int) -> Tree:
    tokens: list[int] = []
    parents: list[int] = []
    last = -1
    for token in right:
        for _ in range(rng.choice([0, 0, 1, 2])):
            tokens.append(rng.randrange(vocabulary_size))
            parents.append(rng.choice([last, len(tokens) - 2]))
        tokens.append(token)
        parents.append(last)
        last = len(tokens) - 1
    for _ in range(rng.randrange(3)):
        tokens.append(rng.randrange(vocabulary_size))
        parents.append(len(tokens) - 2)
    return tuple(tokens), tuple(parents)


def accept_nodes(request: PassRequest, result: PassResult) -> tuple[list[int], list[int]]:
    """Return the nodes that are the target's own tokens, and the tokens that the pass commits."""
    kept: list[int] = []
    new = [result.targets[0]]
    for node, (token, parent) in enumerate(zip(request.tokens, request.parents, strict=True)):
        if parent == (kept[-1] if kept else -1) and token == new[-1]:
            kept.append(node)
            new.append(result.targets[1 + node])
    return kept, new


# --- targets beside each other --------------------------------------------------------------

_BLOCKS = 128
_TEXT_MAX = 180


@dataclass(slots=True)
class _Session:
    key: str
    text: list[int]
    cached: int
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    """Number of the first blocks that belong to another session's text."""


class Serving:
    """Two targets with room for at least 2048 cached tokens, whose tokens must be equal in every
    pass (``same_tokens``).

    Sessions open and close, feed and draft trees, keep random paths, roll back, start on blocks of
    other sessions (prefix hits), and lose their blocks and are computed again (evictions). Tables
    are made as the engine makes them. ``check`` is called after each pass of both.
    """

    def __init__(
        self,
        one: TargetModel,
        two: TargetModel,
        check: Callable[[], None] = lambda: None,
        *,
        seed: int | str = 0,
        samplings: Sequence[SamplingParams] = (GREEDY,),
        same_tokens: bool = True,
    ) -> None:
        self.rng, self.targets, self._check = random.Random(seed), (one, two), check
        self._samplings, self._same_tokens = samplings, same_tokens
        self.sessions: list[_Session] = []
        self.holders = [0] * (_BLOCKS + 1)
        self.opened = self.hits = self.rows = 0

    def run(self, rows: int) -> None:
        """Run until this many rows were sampled."""
        while self.rows < rows:
            self._step()
        self._close(self.sessions)

    def _step(self) -> None:
        rng = self.rng
        self._close([s for s in self.sessions if len(s.text) > _TEXT_MAX or rng.random() < 0.05])
        while not self.sessions or (len(self.sessions) < 6 and rng.random() < 0.4):
            self._open()
        some = rng.sample(self.sessions, rng.randrange(1, len(self.sessions) + 1))
        batch = [self._request(session) for session in some]
        results, others = (target.forward(batch) for target in self.targets)
        assert results == others or not self._same_tokens, batch
        self._check()
        for session, request, result in zip(some, batch, results, strict=True):
            self.rows += len(result.targets)
            path = random_path(rng, request.parents)
            for target in self.targets:
                target.keep(session.key, path)
            session.text += [request.tokens[node] for node in path]
            session.cached = len(session.text)
            session.text.append(result.targets[1 + path[-1] if path else 0])

    def _close(self, sessions: list[_Session]) -> None:
        for session in sessions:
            for target in self.targets:
                target.close(session.key)
            self._release_blocks(session)
        self.sessions = [session for session in self.sessions if session not in sessions]

    def _open(self) -> None:
        rng, self.opened = self.rng, self.opened + 1
        size = self.targets[0].info.vocabulary_size
        text = [rng.randrange(size) for _ in range(rng.choice([1, 5, 40, 100]))]
        session = _Session(f"s{self.opened}", text, 0)
        donors = [s for s in self.sessions if s.cached >= BLOCK_SIZE]
        if donors and rng.random() < 0.5:
            donor, self.hits = rng.choice(donors), self.hits + 1
            most = min(donor.cached, _TEXT_MAX - len(text)) // BLOCK_SIZE
            session.shared = rng.randrange(1, most + 1)
            session.cached = session.shared * BLOCK_SIZE
            session.text = donor.text[: session.cached] + text
            session.blocks = donor.blocks[: session.shared]
            for block in session.blocks:
                self.holders[block] += 1
        params = self._samplings[self.opened % len(self._samplings)]
        for target in self.targets:
            target.open(session.key, len(session.text), params, tuple(session.text))
        self.sessions.append(session)

    def _request(self, session: _Session) -> PassRequest:
        rng = self.rng
        if rng.random() < 0.05:  # evicted
            self._release_blocks(session)
            session.cached = 0
        elif rng.random() < 0.1:  # rolled back, but not into blocks of others
            least = session.shared * BLOCK_SIZE
            session.cached = rng.randrange(least, session.cached + 1)
        size = self.targets[0].info.vocabulary_size
        tokens, parents = random_tree(rng, rng.randrange(9), size)
        feed = tuple(session.text[session.cached :])
        wanted = -(-(session.cached + len(feed) + len(tokens)) // BLOCK_SIZE)
        free = [block for block in range(1, _BLOCKS + 1) if not self.holders[block]]
        fresh = rng.sample(free, max(0, wanted - len(session.blocks)))
        for block in fresh:
            self.holders[block] += 1
        session.blocks += fresh
        return PassRequest(
            session.key, session.cached, feed, tokens, parents, blocks=tuple(session.blocks)
        )

    def _release_blocks(self, session: _Session) -> None:
        for block in session.blocks:
            self.holders[block] -= 1
        session.blocks, session.shared = [], 0


def main(models: list[str]) -> None:
    for model in models:
        folder, _, dtype = model.partition(":")
        recorder, rng = Recorder(Path(folder), dtype), random.Random(dtype)
        for length in (5, 130, 300):
            check_random_schedule(rng, recorder, length)
        sys.stdout.write(f"{dtype} {recorder.target.mode}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
