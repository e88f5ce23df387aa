"""What vLLM has said of one session's text, and what that answers of a pass. Pure.

Theory of operation. vLLM has a text of its own for each session: the prompt, and all tokens that it
has chosen, which may be more than the session has committed. A pass asks for the target's token
behind the committed prefix and behind each draft of a chain as far as it is right. So the drafts
are first compared with the tokens that are known: what agrees is accepted, the first known token
that no draft names is the correction, and nothing has to be computed. Where the known tokens end,
what is left of the chain goes into vLLM's next step, and the comparison is made again.

Worked example: vLLM's text is ``a b c``, the session has committed ``a`` and drafts ``b c d e``.
``b`` and ``c`` are known to be right; a step with the drafts ``d e`` says ``d f``: answer b c d f.
"""

from __future__ import annotations

from collections.abc import Sequence

from edgespec.core.protocol.work import PassRequest, PassResult, TokenScore
from edgespec.verifier.engines.vllm.step import Stepped, Wanted

NO_SCORE = TokenScore(0.0, 0.0, ())
"""Of a row that nobody looks at, because its path is not the text."""


class UnknownScoresError(ValueError):
    """Tokens are known without the scores that a pass asks for; the text has to be begun anew at
    the end of the prefix."""


class KnownText:
    """``tokens`` is the text as vLLM has it."""

    def __init__(self, text: Sequence[int]) -> None:
        self.tokens = list(text)
        self.computed = 0
        """Of these, how many are in vLLM's cache. It takes them out when it needs the room."""
        self._given = len(self.tokens)
        self._scores: dict[int, TokenScore] = {}
        """By position, of the tokens that nobody has asked for yet."""
        self._rows_from = 0
        """Where the text ended before the last step that made it grow, and what the target said
        there and behind each draft."""
        self._rows: tuple[int, ...] = ()

    def take(self, stepped: Stepped) -> None:
        """A step is over."""
        self.computed = stepped.computed
        if not stepped.tokens:
            return
        self._rows_from, self._rows = len(self.tokens), stepped.targets
        for offset, score in enumerate(stepped.scores[: len(stepped.tokens)]):
            self._scores[self._rows_from + offset] = score
        self.tokens += stepped.tokens

    def answer(self, request: PassRequest) -> PassResult | Wanted:
        """The result of ``request``, whose nodes are a chain; or the step that is missing for it.

        Raises ``ValueError`` when the request does not fit the text, and ``UnknownScoresError``.
        """
        end = request.cache_length + len(request.feed)
        self._check(request, end)
        if not request.sample:
            if self.computed >= end or len(self.tokens) > self._given:
                return PassResult(request.key, ())
            return Wanted(len(request.feed))
        chain, accepted, known = request.tokens, 0, self.tokens
        while end + accepted < len(known):
            if accepted == len(chain) or chain[accepted] != known[end + accepted]:
                return self._result(request, end, accepted)
            accepted += 1
        drafts = chain[accepted:]
        return Wanted(max(len(request.feed), 1) + len(drafts), drafts, request.logprobs)

    def _check(self, request: PassRequest, end: int) -> None:
        key = request.key
        if any(parent != node - 1 for node, parent in enumerate(request.parents)):
            raise ValueError(f"{key!r}: parents are {request.parents}, but must be a chain")
        if end > len(self.tokens):
            raise ValueError(f"{key!r}: a prefix of {end} tokens, but {len(self.tokens)} are known")
        if tuple(self.tokens[request.cache_length : end]) != request.feed:
            raise ValueError(f"{key!r}: fed tokens differ from those that vLLM has")
        if request.sample and end < self._given:
            raise ValueError(f"{key!r}: {end} tokens are before the {self._given} of the opening")

    def _result(self, request: PassRequest, end: int, accepted: int) -> PassResult:
        """``accepted`` drafts are right, and the token behind them is known."""
        size = 1 + len(request.tokens)
        targets = self.tokens[end : end + accepted + 1]
        # Behind a wrong draft the rows of the last step tell more; else the guess stands for it.
        for node in range(len(targets), size):
            row = end + node - self._rows_from
            guess = request.tokens[min(node, size - 2)]
            targets.append(self._rows[row] if 0 < row < len(self._rows) else guess)
        self._rows = ()  # the next pass may have another chain
        if not request.logprobs:
            return PassResult(request.key, tuple(targets))
        known = [self._scores.get(end + offset) for offset in range(accepted + 1)]
        scores = [score for score in known if score is not None]
        if len(scores) < len(known):
            raise UnknownScoresError(f"{request.key!r}: no scores at position {end}")
        for position in [one for one in self._scores if one < end]:
            del self._scores[position]
        filled = scores + [NO_SCORE] * (size - len(scores))
        return PassResult(request.key, tuple(targets), tuple(filled))
