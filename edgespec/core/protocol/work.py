"""What the sessions ask of models, as plain data; ``ports.py`` says who carries it out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgespec.core.statically_frozen import statically_frozen

# Scores are log-probabilities of the raw distribution: before temperature, truncation, penalties
# and bias. They never change a text, and are computed for sessions that ask. This is the scalar
# specification; ``targets`` hold the fast forms.

MAX_LOGPROBS = 20
"""Top tokens that a session may ask for, a position."""
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has no word for (OpenAI's number)."""


@statically_frozen
class TokenScore:
    """Natural logarithms, at most 0 up to rounding, at least ``LEAST_LOGPROB``."""

    logprob: float
    """Of the committed token."""
    margin: float
    """Between the two likeliest tokens: near 0 another rounding could have chosen the other."""
    top: tuple[tuple[int, float], ...]
    """The likeliest tokens and their log-probabilities, likeliest first."""


def score_token(logits: Sequence[float], token: int, count: int) -> TokenScore:
    """The score of ``token`` with the ``count`` likeliest tokens.

    Worked number: of the logits (0, log 3) the second has the probability 3 / 4, so its score is
    log 0.75 = -0.288, with a margin of log 3 = 1.099."""
    norm = _log_sum_exp(logits)
    order = sorted(range(len(logits)), key=lambda one: (-logits[one], one))
    top = tuple([(one, _bounded(logits[one] - norm)) for one in order[:count]])
    margin = logits[order[0]] - logits[order[1]] if len(order) > 1 else -LEAST_LOGPROB
    return TokenScore(_bounded(logits[token] - norm), min(margin, -LEAST_LOGPROB), top)


def _bounded(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def _log_sum_exp(logits: Sequence[float]) -> float:
    largest = max(logits)
    return largest + math.log(math.fsum([math.exp(logit - largest) for logit in logits]))


@statically_frozen
class NodeScore:
    """What a pass says of a drafted token at its place, for rules that may take it although it is
    not the target's own (``core/verifier/relaxed_rules.py``).

    Probabilities are those that the text is drawn from: after constraint, bias, penalties,
    temperature and truncation; a greedy text's are those of temperature 1."""

    logprob: float
    """Natural logarithm; minus infinity for a token that the session's sampling rules out."""
    best_logprob: float
    """Of the likeliest token."""
    rank: int
    """How many tokens are likelier."""
    entropy: float
    """Of the distribution, in nats."""
    raw_logprob: float
    """As ``TokenScore.logprob``, which no sampling parameter changes."""

    @property
    def margin(self) -> float:
        """To the likeliest token, in nats; 0 for that one."""
        return self.best_logprob - self.logprob


def score_node(law: Sequence[float], logits: Sequence[float], token: int) -> NodeScore:
    """``logits`` is the row behind which ``token`` is drafted, ``law`` what ``sampling.warp`` makes
    of it under the constraint's mask.

    Worked number: of the laws (0, log 3) the first token has rank 1, the probability 1 / 4, a
    margin of log 3 = 1.099 and, like the other one, an entropy of 0.562."""
    norm = _log_sum_exp(law)
    logprobs = [logit - norm for logit in law]
    entropy = -math.fsum([math.exp(one) * one for one in logprobs if one > -math.inf])
    rank = sum([logit > law[token] for logit in law])
    raw = _bounded(logits[token] - _log_sum_exp(logits))
    return NodeScore(logprobs[token], max(logprobs), rank, entropy, raw)


@statically_frozen
class ModelInfo:
    name: str
    vocabulary: str
    """Fingerprint: equal for two models exactly when every token id means the same text."""
    vocabulary_size: int
    context_length: int
    """Prompt plus output, in tokens."""
    eos_token_ids: tuple[int, ...] = ()
    fingerprint: str = ""
    """Equal for two verifiers exactly when they serve the same model: weights, number format and
    vocabulary. Empty: not told."""


@statically_frozen
class CacheShape:
    """A target's key-value cache: ``block_count`` blocks of ``block_tokens`` rows each."""

    block_count: int
    block_tokens: int

    @property
    def tokens(self) -> int:
        return self.block_count * self.block_tokens


@statically_frozen
class Candidate:
    """One guess for the next token."""

    token: int
    logprob: float
    """Under the draft's own distribution; recorded, never sent."""


@statically_frozen
class PassRequest:
    """One session's part of a packed forward pass.

    The cache holds positions 0 .. ``cache_length - 1``. ``feed`` are committed tokens at positions
    ``cache_length`` ..; ``tokens``/``parents`` are tree nodes behind the last fed token: node ``i``
    hangs on node ``parents[i] < i``, or on the last fed token for -1. A node of depth d (1 for
    parent -1) has position ``cache_length + len(feed) - 1 + d``."""

    key: str
    cache_length: int
    feed: tuple[int, ...]
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    sample: bool = True
    """False: the feed ends before the committed prefix does (prefill); nothing is sampled."""
    blocks: tuple[int, ...] = ()
    """The session's blocks of the key-value cache, in the order of its positions; empty for a
    target that keeps no such account (``core/verifier/block_ledger.py``). Full blocks before
    ``cache_length`` may stand in other sessions' tables too."""
    served: int = 0
    """How many of the nodes, the last ones, are guesses of the verifier's own and not the device's
    (``core/verifier/served_drafts.py``). The target treats all alike."""
    logprobs: int = 0
    """How many of the likeliest tokens to score at each sampled row; 0: no scores at all."""
    node_scores: bool = False
    """Whether to say of each node how likely the target holds it, for a relaxed rule."""

    def with_blocks(self, blocks: tuple[int, ...]) -> PassRequest:
        """The same request on these blocks; field by field, which is cheaper than ``replace``."""
        return PassRequest(
            self.key,
            self.cache_length,
            self.feed,
            self.tokens,
            self.parents,
            self.sample,
            blocks,
            self.served,
            self.logprobs,
            self.node_scores,
        )

    @property
    def row_count(self) -> int:
        return len(self.feed) + len(self.tokens)

    @property
    def drafted(self) -> int:
        """How many of the nodes the device drafted."""
        return len(self.tokens) - self.served


@statically_frozen
class PassShape:
    """What a target can take of one pass; the defaults: whatever it is given."""

    trees: bool = True
    max_nodes: int = 1 << 16
    max_rows: int = 1 << 16
    own_drafts: int = 0
    """How many tokens the target's own speculator can propose behind a pass, for
    ``PassResult.guesses``; 0: it has none."""


@statically_frozen
class PassResult:
    """``targets[0]`` is the target's own token after the last fed token, ``targets[1 + i]`` the
    one after node ``i`` (given its path). Empty when nothing was sampled."""

    key: str
    targets: tuple[int, ...]
    scores: tuple[TokenScore, ...] = ()
    """Of ``targets``, one each, if the request asked for them."""
    guesses: tuple[int, ...] = ()
    """What the target's own speculator proposes behind the tokens that this pass commits
    (``PassShape.own_drafts``)."""
    node_scores: tuple[NodeScore, ...] = ()
    """Of the nodes, one each, if the request asked for them."""


@statically_frozen
class DraftStep:
    """One session's part of a packed step of the verifier's own draft model: of its cache
    ``keep_length`` tokens stay, which may be fewer than there are, and ``feed`` follows at the
    positions ``keep_length`` .."""

    key: str
    keep_length: int
    feed: tuple[int, ...]
    guess: bool = True
    """False: a part of a prompt; what comes behind it is not wanted."""
