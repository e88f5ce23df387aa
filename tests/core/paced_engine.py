"""A ``VerifyEngine`` with a target on which a pass takes its sessions' and rows' time."""

from __future__ import annotations

from edgespec.core.protocol.messages import Cancel, Commit, Fault, Limits, Open, Received
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import ModelInfo, PassRequest, PassResult
from edgespec.core.verifier.credential import ANYBODY, Credential
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import (
    BatchDone,
    EngineAction,
    EngineLimits,
    Poll,
    RunBatch,
    SendTo,
    StreamLost,
    StreamMessage,
    StreamOpened,
)

DECODE_S = 0.020
ENDLESS = SamplingParams(max_tokens=4_000, ignore_eos=True)
MODEL = ModelInfo("big", "", 50, 8192)
LIMITS = Limits(context_length=8192, max_unreceived=8192)


def opening(name: str, length: int) -> Open:
    return Open(name, "", "", (1,) * length, sampling=ENDLESS, drafting=False)


class PacedEngine:
    """A pass takes 20 ms, ``session_s`` for each session and ``row_s`` for each prompt row. Devices
    acknowledge at once; ``tokens`` counts what each session committed."""

    def __init__(
        self, row_s: float, limits: EngineLimits | None = None, session_s: float = 0.0
    ) -> None:
        self.now, self._row_s, self._session_s = 0.0, row_s, session_s
        self.engine = VerifyEngine(MODEL, LIMITS, limits or EngineLimits(), contain=False)
        self.tokens: dict[str, int] = {}
        self.faults: list[Fault] = []
        self._streams = 0
        self._batch: tuple[PassRequest, ...] = ()
        self._stream_of: dict[str, int] = {}
        self._name_of: dict[int, str] = {}

    def open(self, name: str, length: int = 1, credential: Credential = ANYBODY) -> None:
        self._streams += 1
        self._stream_of[name], self._name_of[self._streams] = self._streams, name
        self.tokens[name] = 0
        opened = StreamOpened(self._streams, opening(name, length), credential=credential)
        self._take(self.engine.handle(opened, self.now))
        if name not in self.engine.sessions:
            del self._stream_of[name]

    def close(self, name: str) -> None:
        self._take(self.engine.handle(StreamMessage(self._stream_of.pop(name), Cancel()), self.now))

    def lose(self, name: str) -> None:
        """The device is gone."""
        self._take(self.engine.handle(StreamLost(self._stream_of.pop(name)), self.now))

    def run_pass(self) -> dict[str, int]:
        """The rows that each session had in the pass that ends now; empty if none was running: then
        the engine is polled at its deadline."""
        batch, self._batch = self._batch, ()
        rows = {request.key: len(request.feed) for request in batch}
        if not batch:
            assert self.engine.deadline is not None
            assert self.engine.deadline > self.now, "a busy poll"
            self.now = self.engine.deadline
            self._take(self.engine.handle(Poll(), self.now))
            return rows
        extra = sum(count - 1 for count in rows.values())
        self.now += DECODE_S + self._session_s * len(batch) + self._row_s * extra
        results = [PassResult(one.key, (7,) if one.sample else ()) for one in batch]
        self._take(self.engine.handle(BatchDone(tuple(results)), self.now))
        return rows

    def run_until(self, at_s: float) -> None:
        while self.now < at_s:
            self.run_pass()

    def _take(self, actions: tuple[EngineAction, ...]) -> None:
        for action in actions:
            match action:
                case RunBatch(requests):
                    self._batch = requests
                case SendTo(stream, Commit(position, tokens)) if tokens:
                    self.tokens[self._name_of[stream]] += len(tokens)
                    received = Received(position + len(tokens), 0)
                    self._take(self.engine.handle(StreamMessage(stream, received), self.now))
                case SendTo(_, Fault() as fault):
                    self.faults.append(fault)
