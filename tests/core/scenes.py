"""A verifier's session and engine, driven by hand, and two targets for them.

The first target generates the fixed text ``TEXT``: its token at position p is ``TEXT[p]``, so every
answer can be written down. On the second one a pass takes a time that depends on its sessions and
rows.
"""

from __future__ import annotations

from dataclasses import replace

from edgespec.core.protocol import messages as m
from edgespec.core.protocol.acceptance import make_rule
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest, PassResult
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier import session_events as se
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.run_ahead import RUN_AHEAD
from edgespec.core.verifier.server_drafts import ServerDrafts
from edgespec.core.verifier.session import VerifySession

PROMPT = (1, 1)
TEXT = (*PROMPT, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
MODEL = ModelInfo("big", "", 50, 4096)
REQUEST = m.Open("s", "", "", PROMPT, sampling=SamplingParams(max_tokens=9))
LIMITS = m.Limits(lease_s=10.0)


def new_session(
    request: m.Open = REQUEST,
    limits: m.Limits = LIMITS,
    model: ModelInfo = MODEL,
    server_drafts: ServerDrafts | None = None,
) -> VerifySession:
    rule, run_ahead = make_rule(request.rule), RUN_AHEAD[request.run_ahead]
    session = VerifySession(request, model, limits, rule, run_ahead, 0.0, server_drafts)
    session.handle(se.Attach(request), 0.0)
    return session


def targets_of(request: PassRequest) -> tuple[int, ...]:
    """Return the fixed text's targets: after a node of depth d, the token d positions further
    on."""
    first = request.cache_length + len(request.feed)
    depths: list[int] = []
    for parent in request.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return tuple(TEXT[first + depth] for depth in (0, *depths))


def offer(session: VerifySession, rows: int = 64, now: float = 1.0) -> PassRequest:
    (action,) = session.handle(se.Offer(rows, 0.02), now)
    assert isinstance(action, se.RunPass)
    return action.request


def run_pass(session: VerifySession, now: float = 1.0) -> tuple[se.VerifyAction, ...]:
    request = offer(session, now=now)
    return session.handle(se.PassDone(targets_of(request)), now)


def chain_draft(session: VerifySession, *tokens: int, first: int = 1) -> m.Draft:
    length = session.prefix.length
    parents = (0, *range(first, first + len(tokens) - 1))
    return m.Draft(first, parents, tokens, length, session.prefix.hash_at(length))


def commit_in(actions: tuple[se.VerifyAction, ...]) -> m.Commit:
    (send,) = [a for a in actions if isinstance(a, se.Send)]
    assert isinstance(send.message, m.Commit)
    return send.message


RUNNING = replace(REQUEST, run_ahead=m.RunAhead.ALWAYS)


def new_engine(limits: ee.EngineLimits | None = None, *, contain: bool = True) -> VerifyEngine:
    return VerifyEngine(MODEL, LIMITS, limits or ee.EngineLimits(), contain=contain)


def name_session(key: str, request: m.Open = RUNNING) -> m.Open:
    return replace(request, session_id=key)


def batch_in(actions: tuple[ee.EngineAction, ...]) -> tuple[PassRequest, ...]:
    """Return the requests of the one pass among the actions."""
    (run,) = [action for action in actions if isinstance(action, ee.RunBatch)]
    return run.requests


def finish_batch(requests: tuple[PassRequest, ...]) -> ee.BatchDone:
    """Return the result of a pass over the fixed text."""
    return ee.BatchDone(
        tuple(PassResult(r.key, targets_of(r) if r.sample else ()) for r in requests)
    )


def faults_in(actions: tuple[ee.EngineAction, ...]) -> list[tuple[int, m.FaultCode]]:
    """Return the faults among the actions, each with its stream."""
    return [
        (action.stream, action.message.code)
        for action in actions
        if isinstance(action, ee.SendTo) and isinstance(action.message, m.Fault)
    ]


DECODE_S = 0.020
ENDLESS = SamplingParams(max_tokens=4_000, ignore_eos=True)
PACED_MODEL = ModelInfo("big", "", 50, 8192)
PACED_LIMITS = m.Limits(context_length=8192, max_unreceived=8192)


def paced_opening(name: str, length: int) -> m.Open:
    return m.Open(name, "", "", (1,) * length, sampling=ENDLESS, drafting=False)


class PacedEngine:
    """An engine whose passes take 20 ms, ``session_s`` for each session and ``row_s`` for each
    prompt row beyond ``free_rows``. Devices acknowledge at once; ``tokens`` counts the committed
    tokens of each session.
    """

    def __init__(
        self,
        row_s: float,
        limits: ee.EngineLimits | None = None,
        session_s: float = 0.0,
        free_rows: int = 0,
    ) -> None:
        self.now, self._row_s, self._session_s = 0.0, row_s, session_s
        self._free_rows = free_rows
        self.engine = VerifyEngine(
            PACED_MODEL, PACED_LIMITS, limits or ee.EngineLimits(), contain=False
        )
        self.tokens: dict[str, int] = {}
        self.faults: list[m.Fault] = []
        self._streams = 0
        self._batch: tuple[PassRequest, ...] = ()
        self._stream_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}

    def open(self, name: str, length: int = 1, credential: Credential = ANYBODY) -> None:
        self._streams += 1
        self._stream_of[name], self._name_of[self._streams] = self._streams, name
        self.tokens[name] = 0
        opened = ee.StreamOpened(self._streams, paced_opening(name, length), credential=credential)
        self._do(self.engine.handle(opened, self.now))
        if name not in self.engine.sessions:
            del self._stream_of[name]

    def close(self, name: str) -> None:
        self._do(
            self.engine.handle(ee.StreamMessage(self._stream_of.pop(name), m.Cancel()), self.now)
        )

    def lose(self, name: str) -> None:
        """Let the session lose its device."""
        self._do(self.engine.handle(ee.StreamLost(self._stream_of.pop(name)), self.now))

    def run_pass(self) -> dict[str, int]:
        """Finish the running pass and return the rows of each session in it. If none is running,
        poll the engine at its deadline and return an empty dict."""
        batch, self._batch = self._batch, ()
        rows = {request.key: len(request.feed) for request in batch}
        if not batch:
            assert self.engine.deadline is not None
            assert self.engine.deadline > self.now, "a busy poll"
            self.now = self.engine.deadline
            self._do(self.engine.handle(ee.Poll(), self.now))
            return rows
        extra = sum(count - 1 for count in rows.values())
        extra = max(0, extra - self._free_rows)
        self.now += DECODE_S + self._session_s * len(batch) + self._row_s * extra
        results = [PassResult(one.key, (7,) if one.sample else ()) for one in batch]
        self._do(self.engine.handle(ee.BatchDone(tuple(results)), self.now))
        return rows

    def run_until(self, at_s: float) -> None:
        while self.now < at_s:
            self.run_pass()

    def _do(self, actions: tuple[ee.EngineAction, ...]) -> None:
        for action in actions:
            match action:
                case ee.RunBatch(requests):
                    self._batch = requests
                case ee.SendTo(stream, m.Commit(position, tokens)) if tokens:
                    self.tokens[self._name_of[stream]] += len(tokens)
                    received = m.Received(position + len(tokens), 0)
                    self._do(self.engine.handle(ee.StreamMessage(stream, received), self.now))
                case ee.SendTo(_, m.Fault() as fault):
                    self.faults.append(fault)
