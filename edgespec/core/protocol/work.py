"""Work orders from sessions to models and their results, as plain data.

``ports.py`` defines the protocols of the models that carry them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.core.protocol.pictures import PictureInput
from edgespec.core.statically_frozen import statically_frozen

# Scores are log-probabilities of the raw distribution: before temperature, truncation, penalties
# and bias. They never change an output, and are computed only for sessions that asked. This is the
# scalar specification; the engines' targets have fast forms of it.

MAX_LOGPROBS = 20
"""Maximum number of top tokens that a session may ask for at each position."""
MIN_LOGPROB = -9999.0
"""Value that stands for minus infinity, which JSON cannot express (OpenAI's number)."""


@statically_frozen
class TokenScore:
    """Log-probabilities at one position. They are natural logarithms, at most 0 up to rounding, and
    at least ``MIN_LOGPROB``."""

    logprob: float
    """Log-probability of the committed token."""
    margin: float
    """Difference between the two likeliest tokens. Near 0, another rounding could have chosen the
    other one."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, likeliest first."""


def score_token(logits: Sequence[float], token: int, count: int) -> TokenScore:
    """Return the score of ``token`` with the ``count`` likeliest tokens.

    Worked example: of the logits (0, log 3) the second has the probability 3 / 4, so its score is
    log 0.75 = -0.288, with a margin of log 3 = 1.099."""
    norm = _log_sum_exp(logits)
    order = sorted(range(len(logits)), key=lambda one: (-logits[one], one))
    top = tuple([(one, _bound_logprob(logits[one] - norm)) for one in order[:count]])
    margin = logits[order[0]] - logits[order[1]] if len(order) > 1 else -MIN_LOGPROB
    return TokenScore(_bound_logprob(logits[token] - norm), min(margin, -MIN_LOGPROB), top)


def _bound_logprob(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def _log_sum_exp(logits: Sequence[float]) -> float:
    largest = max(logits)
    return largest + math.log(math.fsum([math.exp(logit - largest) for logit in logits]))


@statically_frozen
class NodeScore:
    """Probability of a draft node's token at its position, for rules that may accept it although it
    is not the target's own token (``core/protocol/acceptance.py``).

    The distribution is the one that the output is drawn from: after constraint, bias, penalties,
    temperature and truncation. For greedy sampling it is that of temperature 1."""

    logprob: float
    """Log-probability of the node's token (natural logarithm); minus infinity if sampling excludes
    it."""
    best_logprob: float
    """Log-probability of the likeliest token."""
    rank: int
    """Number of tokens that are likelier."""
    entropy: float
    """Entropy of the distribution, in nats."""
    raw_logprob: float
    """Log-probability as in ``TokenScore.logprob``, which no sampling parameter changes."""

    @property
    def margin(self) -> float:
        """Difference to the likeliest token's log-probability, in nats; 0 for that token itself."""
        return self.best_logprob - self.logprob


def score_node(law: Sequence[float], logits: Sequence[float], token: int) -> NodeScore:
    """Return the score of ``token``, drafted behind the row ``logits``.

    ``law`` is what ``sampling.warp`` makes of that row under the constraint's mask.

    Worked example: of the laws (0, log 3) the first token has rank 1, the probability 1 / 4, a
    margin of log 3 = 1.099 and, like the other one, an entropy of 0.562."""
    norm = _log_sum_exp(law)
    logprobs = [logit - norm for logit in law]
    entropy = -math.fsum([math.exp(one) * one for one in logprobs if one > -math.inf])
    rank = sum([logit > law[token] for logit in law])
    raw = _bound_logprob(logits[token] - _log_sum_exp(logits))
    return NodeScore(
        logprob=logprobs[token],
        best_logprob=max(logprobs),
        rank=rank,
        entropy=entropy,
        raw_logprob=raw,
    )


@statically_frozen
class ModelInfo:
    name: str
    vocabulary: str
    """Fingerprint of the vocabulary: equal for two models exactly when every token id has the same
    bytes."""
    vocabulary_size: int
    context_length: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    """Fingerprint of the model: equal for two verifiers exactly when they serve the same weights,
    number format and vocabulary. Empty: not reported."""
    pictures: PictureInput | None = None
    """Bounds on pictures, if the model reads them; None: it reads text only."""


@statically_frozen
class CacheShape:
    """Shape of a target's KV cache: ``block_count`` blocks of ``block_tokens`` rows each."""

    block_count: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.block_count * self.block_tokens


@statically_frozen
class Candidate:
    """A token that a draft source offers for the next position."""

    token: int
    logprob: float
    """Log-probability under the draft's own distribution; recorded, never sent."""


@statically_frozen
class PassRequest:
    """One session's part of a packed pass.

    The cache holds positions 0 .. ``cache_length - 1``. ``feed`` are committed tokens at the
    positions from ``cache_length`` on. ``tokens``/``parents`` are tree nodes behind the last fed
    token: node ``i`` hangs on node ``parents[i] < i``, or on the last fed token for -1. A node of
    depth d (1 for parent -1) has position ``cache_length + len(feed) - 1 + d``."""

    key: str
    cache_length: int
    feed: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sample: bool = True
    """False if the feed ends before the committed prefix does (prefill), so that nothing is
    sampled."""
    blocks: tuple[int, ...] = ()
    """The session's blocks of the KV cache, in the order of its positions; empty for a target whose
    blocks are not managed (``core/verifier/block_ledger.py``). Full blocks before ``cache_length``
    may be shared with other sessions."""
    server_nodes: int = 0
    """Number of the last nodes that the verifier drafted itself and not the device
    (``core/verifier/server_drafts.py``). The target treats all nodes alike."""
    logprobs: int = 0
    """Number of likeliest tokens to score at each sampled row; 0: no scores at all."""
    node_scores: bool = False
    """Whether to return each node's ``NodeScore``, for a relaxed rule."""

    def with_blocks(self, blocks: tuple[int, ...]) -> PassRequest:
        """Return the same request on these blocks. Copying field by field is cheaper than
        ``replace``."""
        return PassRequest(
            key=self.key,
            cache_length=self.cache_length,
            feed=self.feed,
            tokens=self.tokens,
            parents=self.parents,
            sample=self.sample,
            blocks=blocks,
            server_nodes=self.server_nodes,
            logprobs=self.logprobs,
            node_scores=self.node_scores,
        )

    @property
    def row_count(self) -> int:
        return len(self.feed) + len(self.tokens)

    @property
    def device_nodes(self) -> int:
        """Number of the nodes that the device drafted."""
        return len(self.tokens) - self.server_nodes


@statically_frozen
class PassShape:
    """Bounds on what a target can compute in one pass. The defaults are unlimited."""

    trees: bool = True
    max_nodes: int = 1 << 16
    max_rows: int = 1 << 16
    speculator_tokens: int = 0
    """Number of tokens that the target's own speculator can propose behind a pass, in
    ``PassResult.guesses``; 0: it has none."""
    speculator_blocks: bool = False
    """True if the speculator proposes all its tokens in one run, so that fewer take as long."""


@statically_frozen
class PassResult:
    """Result of one session's part of a pass.

    ``targets[0]`` is the target's own token after the last fed token, ``targets[1 + i]`` the one
    after node ``i``, given its path. It is empty if nothing was sampled."""

    key: str
    targets: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    """Scores, one for each of ``targets``, if the request asked for them."""
    guesses: tuple[int, ...] = ()
    """Tokens that the target's own speculator proposes behind the tokens that this pass commits
    (``PassShape.speculator_tokens``)."""
    node_scores: tuple[NodeScore, ...] = ()
    """Scores, one for each node, if the request asked for them."""


@statically_frozen
class DraftStep:
    """One session's part of a packed draft step of the server's draft model.

    The first ``keep_length`` tokens of its cache stay, which may be fewer than there are, and
    ``feed`` follows at the positions from ``keep_length`` on."""

    key: str
    keep_length: int
    feed: tuple[int, ...]
    guess: bool = True
    """False for a part of a prompt, behind which no candidates are needed."""
