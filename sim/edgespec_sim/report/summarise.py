"""A trace added up, the devices' lines and perhaps the verifiers', as a ``RunSummary`` of one arm.

Device lines say what the user felt, verifier lines what the verifier was busy with. Clocks of two
machines are never compared here: each duration is taken on one clock.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from edgespec.core.protocol.messages import FinishReason
from edgespec_sim.report.timeline import DEVICE, Line, sized
from edgespec_sim.run_summary import (
    ArmSummary,
    GroupSummary,
    RequestRow,
    RunSummary,
    VerifierSummary,
    spread_of,
)
from edgespec_sim.sessions import message_bytes

# -----------------------------------------------------------------------------------------------
# How often the draft's first choice was the target's token, from the lines of a device's trace.
# The rule is that of ``core/device/commit_reader.py``: every position that was decided while the
# drafter had a guess there, or was making one, is one trial. The tree is not in the trace, but
# what each step was fed is: its guesses count where all tokens before them were committed.


@dataclass(frozen=True, slots=True)
class _Guess:
    base: int
    """Committed length when the step began."""
    path: tuple[int, ...]
    """Tokens from there to the guess."""
    first: int | None


class Guesses:
    """Of one generation. ``held`` is the committed length, None before it is known."""

    def __init__(self) -> None:
        self.tried = 0
        self.hits = 0
        self.held: int | None = None
        self._first = 0
        self._committed: list[int] = []
        """Tokens from position ``_first`` on."""
        self._cache: list[int] = []
        self._step_base = 0
        self._pending: dict[int, list[_Guess]] = defaultdict(list)

    def opened(self, held: int) -> None:
        """A stream was opened with this many tokens held."""
        if self.held is None:
            self.held = self._first = held

    def step(self, line: Line) -> None:
        """``StartStep``."""
        del self._cache[line["keep_length"] :]
        self._cache += line["feed"]
        if self.held is None:  # the first step is on the prompt
            self.opened(len(self._cache))
        self._step_base = self.held or 0

    def step_done(self, line: Line) -> None:
        """``StepDone``: the guesses wait to be decided, or have been meanwhile."""
        text, tokens = self._cache, [candidate["token"] for candidate in line["candidates"]]
        position = len(text)
        path = tuple(text[self._step_base :])
        guess = _Guess(self._step_base, path, tokens[0] if tokens else None)
        if position < (self.held or 0):
            if self._agrees(guess):
                self._score(guess, self._committed[position - self._first])
        elif tokens:
            self._pending[position].append(guess)

    def delivered(self, line: Line) -> None:
        """``Deliver``."""
        self.opened(line["position"])
        for position, token in enumerate(line["tokens"], start=line["position"]):
            for guess in self._pending.pop(position, ()):
                if self._agrees(guess):
                    self._score(guess, token)
                    break  # one trial a position
            self._committed.append(token)
        self.held = line["position"] + len(line["tokens"])

    def _agrees(self, guess: _Guess) -> bool:
        start = guess.base - self._first
        return tuple(self._committed[start : start + len(guess.path)]) == guess.path

    def _score(self, guess: _Guess, token: int) -> None:
        self.tried += 1
        self.hits += guess.first == token


# --- what one device session's lines add up to, request by request -----------------------------


UNFINISHED = "the trace ends before the request does"


@dataclass(slots=True)
class Request:
    """One generation, as its device counted it; times on the device's clock."""

    started_s: float
    ended_s: float
    guesses: Guesses = field(default_factory=Guesses)
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0
    """Delivered before the end token."""
    gaps_s: list[float] = field(default_factory=list)
    """Between deliveries."""
    committed: int = 0
    sent: int = 0
    accepted: int = 0
    passes: int = 0
    rows: int = 0
    connects: int = 0
    up_bytes: int = 0
    down_bytes: int = 0
    over: bool = False
    failed: str = UNFINISHED

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.started_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.tokens - 1)

    @property
    def reconnects(self) -> int:
        return max(0, self.connects - 1)


class DeviceTally:
    """Feed it one session's lines in order; generations that follow each other are kept apart."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._streaming = False
        self._ends = False

    def read(self, line: Line) -> None:
        name, at_s = line["name"], line["at_s"]
        if name == "Start":
            self.requests.append(Request(at_s, at_s))
            self._streaming = self._ends = False
        if not self.requests or self.requests[-1].over:
            return  # the trace begins in the middle, or this is what comes after the end
        request = self.requests[-1]
        request.ended_s = at_s
        match name:
            case "Connect":
                request.connects += 1
            case "Connected":
                self._streaming = True
            case "Disconnect" | "LinkDown":
                self._streaming = False
            case "StartStep":
                request.guesses.step(line)
            case "StepDone":
                request.guesses.step_done(line)
            case "Transmit":
                self._send(request, line["message"])
            case "Commit" if self._streaming:
                self._receive(request, line)
            case "Deliver":
                self._deliver(request, line)
            case "Finish":
                request.over, request.failed = True, ""
            case "Fail":
                request.over, request.failed = True, str(line["why"]) or "failed"

    def _send(self, request: Request, message: Line) -> None:
        request.up_bytes += _payload_bytes(message)
        if message["name"] == "Draft":
            request.sent += len(message["tokens"])
        elif message["name"] == "Open":
            request.guesses.opened(len(message["prompt"]) + len(message["committed"]))

    def _receive(self, request: Request, line: Line) -> None:
        request.down_bytes += _payload_bytes(line)
        if line["position"] <= (request.guesses.held or 0):
            request.passes += bool(line["verify_us"])
            request.rows += line["rows"]
        self._ends = line["finish"] == FinishReason.STOP.value

    def _deliver(self, request: Request, line: Line) -> None:
        request.guesses.delivered(line)
        request.committed += len(line["tokens"])
        request.accepted += line["kinds"].count("accepted")
        # What a stop id ended ends with that id, which the user is not shown.
        count = len(line["tokens"]) - self._ends
        if not count:
            return
        at_s = line["at_s"]
        if request.last_s is not None:
            request.gaps_s.append(at_s - request.last_s)
        request.first_s = at_s if request.first_s is None else request.first_s
        request.last_s = at_s
        request.tokens += count


def _payload_bytes(message: Line) -> int:
    payload = sized(message)
    return 0 if payload is None else message_bytes(payload)


# --- what one verifier's lines add up to -------------------------------------------------------


class VerifierTally:
    """Feed it one verifier's lines in order."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.passes = 0
        self.rows = 0
        self.sessions_in_passes = 0
        self.busy: list[tuple[float, float]] = []
        """Begin and end of each pass."""
        self.queues_s: list[float] = []
        self.sessions: set[str] = set()
        self._begun_s: float | None = None

    def read(self, line: Line) -> None:
        at_s = line["at_s"]
        self.first_s = at_s if self.first_s is None else self.first_s
        self.last_s = at_s
        match line["name"]:
            case "StreamOpened":
                self.sessions.add(line["request"]["session_id"])
            case "RunBatch":
                self._begin(at_s, line["requests"])
            case "BatchDone" | "BatchFailed":
                if self._begun_s is not None:
                    self.busy.append((self._begun_s, at_s))
                self._begun_s = None
            case "SendTo" if line["message"]["name"] == "Commit":
                if line["message"]["rows"]:
                    self.queues_s.append(line["message"]["queue_us"] / 1e6)

    def _begin(self, at_s: float, requests: list[Line]) -> None:
        self._begun_s = at_s
        self.passes += 1
        self.sessions_in_passes += len(requests)
        for request in requests:
            self.rows += len(request["feed"]) + len(request["tokens"])


MAX_ROWS: Final = 300
_NO_VERIFIER: Final = "Only devices' traces were given: the verifiers' load is not known."
_DevicesOf = dict[str, DeviceTally]
_VerifiersOf = dict[str, VerifierTally]


def summarise(lines: Iterable[Line], name: str = "run", *, simulated: bool = False) -> RunSummary:
    """``name`` is that of the run and of its arm. Raises ``ValueError`` for a trace without a
    request."""
    devices: _DevicesOf = defaultdict(DeviceTally)
    verifiers: _VerifiersOf = defaultdict(VerifierTally)
    first_s, last_s = math.inf, -math.inf
    for line in lines:
        if line["side"] == DEVICE:
            first_s, last_s = min(first_s, line["at_s"]), max(last_s, line["at_s"])
            devices[line["session"]].read(line)
        else:
            verifiers[line["session"]].read(line)
    requests = [(key, one) for key, tally in devices.items() for one in tally.requests]
    if not requests:
        raise ValueError("no device's trace, or none with a request: no Start is in it")
    duration_s = last_s - first_s
    if verifiers:  # devices may be on machines with clocks of their own; verifiers share one
        seen_s = [at_s for one in verifiers.values() for at_s in (one.first_s or 0.0, one.last_s)]
        longest_s = max(one.ended_s - one.started_s for _, one in requests)
        duration_s = max(max(seen_s) - min(seen_s), longest_s)
    served_by = {key: of for of, verifier in verifiers.items() for key in verifier.sessions}
    whole = _whole([one for _, one in requests], duration_s)
    rows = tuple(
        _row(key, served_by.get(key, ""), one, requests[0][1].started_s)
        for key, one in requests[:MAX_ROWS]
    )
    notes = () if verifiers else (_NO_VERIFIER,)
    arm = ArmSummary(
        arm=name,
        label="as traced",
        all=whole,
        groups={},
        verifiers=tuple(_load(of, tally, duration_s) for of, tally in verifiers.items()),
        bounds={},
        rows=rows,
    )
    return RunSummary(
        name=name,
        about="Summed up from the trace of a run.",
        tokens_from="the trace",
        seed=None,
        simulated=simulated,
        duration_s=duration_s,
        arms=(arm,),
        notes=notes,
    )


def _whole(requests: Sequence[Request], duration_s: float) -> GroupSummary:
    done = [one for one in requests if not one.failed]
    tokens = sum(one.tokens for one in requests)
    committed = sum(one.committed for one in requests)
    tried = sum(one.guesses.tried for one in requests)
    wasted = sum(one.sent - one.accepted for one in requests)
    return GroupSummary(
        requests=len(done),
        failed=len(requests) - len(done),
        tokens=tokens,
        ttft_s=spread_of([one.ttft_s for one in done if one.ttft_s is not None]),
        tpot_s=spread_of([one.tpot_s for one in done if one.tpot_s is not None]),
        itl_s=spread_of([gap for one in requests for gap in one.gaps_s]),
        tokens_per_second=_per(tokens, duration_s),
        tokens_per_pass=_per(committed, sum(one.passes for one in requests)),
        acceptance=_per(sum(one.guesses.hits for one in requests), tried) if tried else None,
        wasted_per_token=_per(wasted, committed),
        up_bytes_per_token=_per(sum(one.up_bytes for one in requests), committed),
        down_bytes_per_token=_per(sum(one.down_bytes for one in requests), committed),
        reconnects=sum(one.reconnects for one in requests),
    )


def _row(device: str, verifier: str, one: Request, zero_s: float) -> RequestRow:
    guesses = one.guesses
    return RequestRow(
        device=device,
        verifier=verifier,
        started_s=one.started_s - zero_s,
        ttft_s=one.ttft_s,
        tpot_s=one.tpot_s,
        tokens=one.tokens,
        tokens_per_pass=_per(one.committed, one.passes),
        acceptance=guesses.hits / guesses.tried if guesses.tried else None,
        failed=one.failed,
    )


def _load(name: str, tally: VerifierTally, duration_s: float) -> VerifierSummary:
    return VerifierSummary(
        name=name or "verifier",
        utilisation=_per(sum(end_s - start_s for start_s, end_s in tally.busy), duration_s),
        passes=tally.passes,
        rows_per_pass=_per(tally.rows, tally.passes),
        sessions_per_pass=_per(tally.sessions_in_passes, tally.passes),
        queue_s=spread_of(tally.queues_s),
    )


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0
