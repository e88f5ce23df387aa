"""Random serving on two targets that differ in their attention, or in how their weights lie.

Sessions come and go, feed and draft trees, keep random paths, roll back, start on blocks of other
sessions (prefix hits), and lose their blocks and are computed again (evictions); tables are made
as the engine makes them. After each pass the logits of both targets are compared.

As a program, ``python -m tests.shell.backend_schedules --rows 10000`` does so with a tiny random
checkpoint until so many rows were sampled.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.targets import linear_layers as packed_linear
from edgespec.verifier.targets.kv_pool import BLOCK_SIZE
from edgespec.verifier.targets.pass_plan import AttentionBackend
from edgespec.verifier.targets.torch_target import TorchTarget
from tests.shell.attention_oracle import ReferenceAttention
from tests.shell.random_schedules import random_tree
from tests.shell.tiny_checkpoints import VOCABULARY_SIZE, tiny_config, write_checkpoint

LIMIT = 1e-5
"""Of the row's largest logit where that is above 1: float32 sums are no more exact than that."""
GREEDY = SamplingParams()
_BLOCKS = 160
_TEXT_MAX = 180


@dataclass(slots=True)
class _Session:
    key: str
    text: list[int]
    cached: int
    blocks: list[int] = field(default_factory=list)
    shared: int = 0
    """Of the blocks, the first ones that belong to another session's text."""


class Serving:
    """Two targets on one checkpoint, the second with the reference and plain weights, and random
    sessions on both."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        backend: AttentionBackend | None = None,
        *,
        packed: bool = False,
        device: str = "cpu",
    ) -> None:
        self.rng = random.Random(seed)
        self.targets = [_target(folder, packed, device), _target(folder, False, device)]
        if backend is not None:
            self.targets[0]._attention = backend
        self.targets[1]._attention = ReferenceAttention()
        self.sessions: list[_Session] = []
        self.holders = [0] * (_BLOCKS + 1)
        self.opened = 0
        self.rows = 0
        self.worst = self.worst_share = 0.0
        """The largest difference of a logit, and as a share of the row's largest logit, or of 1."""

    def step(self) -> None:
        """One pass. Raises ``AssertionError`` where the logits differ."""
        self._come_and_go()
        batch = [(s, self._request(s)) for s in self._some()]
        requests = [request for _, request in batch]
        ours, reference = (_logits(target, requests) for target in self.targets)
        self.rows += ours.shape[0]
        difference = (ours - reference).abs().amax(dim=-1)
        share = difference / reference.abs().amax(dim=-1).clamp(min=1.0)
        self.worst = max(self.worst, float(difference.max()))
        self.worst_share = max(self.worst_share, float(share.max()))
        assert self.worst_share <= LIMIT, self.worst_share
        assert torch.equal(ours.argmax(dim=-1), reference.argmax(dim=-1))
        for session, request in batch:
            path: list[int] = []
            node = self.rng.randrange(-1, len(request.tokens))
            while node >= 0:
                path.insert(0, node)
                node = request.parents[node]
            for target in self.targets:
                target.keep(session.key, path)
            session.text += [request.tokens[node] for node in path]
            session.cached = len(session.text)
            session.text.append(self.rng.randrange(VOCABULARY_SIZE))

    def _come_and_go(self) -> None:
        rng = self.rng
        for session in [s for s in self.sessions if len(s.text) > _TEXT_MAX or rng.random() < 0.05]:
            for target in self.targets:
                target.close(session.key)
            self._let_go(session)
            self.sessions.remove(session)
        while not self.sessions or (len(self.sessions) < 6 and rng.random() < 0.4):
            self._open()

    def _open(self) -> None:
        rng, self.opened = self.rng, self.opened + 1
        text = [rng.randrange(VOCABULARY_SIZE) for _ in range(rng.choice([1, 5, 40, 100]))]
        session = _Session(f"s{self.opened}", text, 0)
        donors = [s for s in self.sessions if s.cached >= BLOCK_SIZE]
        if donors and rng.random() < 0.5:
            donor = rng.choice(donors)
            most = min(donor.cached, _TEXT_MAX - len(text)) // BLOCK_SIZE
            session.shared = rng.randrange(1, most + 1)
            session.cached = session.shared * BLOCK_SIZE
            session.text = donor.text[: session.cached] + text
            session.blocks = donor.blocks[: session.shared]
            for block in session.blocks:
                self.holders[block] += 1
        for target in self.targets:
            target.open(session.key, len(session.text), GREEDY, tuple(session.text))
        self.sessions.append(session)

    def _some(self) -> list[_Session]:
        return self.rng.sample(self.sessions, self.rng.randrange(1, len(self.sessions) + 1))

    def _request(self, session: _Session) -> PassRequest:
        rng = self.rng
        if rng.random() < 0.05:  # evicted
            self._let_go(session)
            session.cached = 0
        elif rng.random() < 0.1:  # rolled back, but not into blocks of others
            least = session.shared * BLOCK_SIZE
            session.cached = rng.randrange(least, session.cached + 1)
        tokens, parents = random_tree(rng, rng.randrange(9), VOCABULARY_SIZE)
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

    def _let_go(self, session: _Session) -> None:
        for block in session.blocks:
            self.holders[block] -= 1
        session.blocks, session.shared = [], 0


def _target(folder: Path, packed: bool, device: str) -> TorchTarget:
    return TorchTarget(
        str(folder),
        name="tiny",
        vocabulary="v",
        device=device,
        max_cached_tokens=_BLOCKS * BLOCK_SIZE,
        canonical=False,
        packed=packed,
    )


def _logits(target: TorchTarget, requests: list[PassRequest]) -> torch.Tensor:
    """As ``forward``, but for the choice of tokens."""
    target._pool.reserve(requests)
    logits = target._run(requests)
    for request in requests:
        target._pool.commit(request)
    return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--packed", action="store_true", help="pack the weights of one of them")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        config = tiny_config(tie_word_embeddings=not args.packed)
        if args.packed:
            packed_linear.LEAST_WEIGHTS = 1
        folder = write_checkpoint(Path(scratch) / "tiny", config)
        serving = Serving(folder, args.seed, packed=args.packed)
        while serving.rows < args.rows:
            serving.step()
    sys.stdout.write(
        f"{serving.rows} rows of {serving.opened} sessions: every argmax equal, "
        f"logits within {serving.worst:.1e}, and within {serving.worst_share:.1e} of the row's"
        f" largest, limit {LIMIT:.0e}\n"
    )


if __name__ == "__main__":
    main()
