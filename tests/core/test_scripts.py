"""Golden texts of both sessions.

They hold all events and actions in a few scenes (``transcripts``), and scripts of a device's
session (``device_scripts``), of its failover (``failover_scripts``) and of a ``VerifyEngine``
(``engine_scripts``). One test covers an engine's reaction to a bug.

Oracle: the texts, read by a person when they change. To accept a change, run ``REWRITE_SCRIPTS=1
pytest`` with this file, and review the difference. (The tests hide all ``EDGESPEC_`` variables from
themselves, so the name does not begin so.) A file of scripts holds cases (``== name``), and a case
holds commands. Each command's actions stand below it, indented by four blanks. A line that begins
with ``.`` sets the scene and shows no actions, because other cases show them. The target of an
engine generates ``TEXT``. The commands are the methods of ``DeviceScript``, ``FailoverScript`` and
``EngineScript``; ``name=value`` are keywords.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, cast

import pytest

from edgespec.core.association import failover_events as fe
from edgespec.core.association.failover import Failover, FailoverPolicy
from edgespec.core.association.known_verifiers import CLOSED
from edgespec.core.association.policies import Association
from edgespec.core.device import events as de
from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.acceptance import ExactRule, Walk
from edgespec.core.protocol.constraint import Constraint, ConstraintKind
from edgespec.core.protocol.credential import Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, ModelInfo, PassRequest, PassResult
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.block_ledger import SharePrefixes
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.session import VerifySession
from tests.core import draft_scripts
from tests.core.draft_scripts import REQUEST as ASKED
from tests.core.scenes import (
    LIMITS,
    MODEL,
    PROMPT,
    REQUEST,
    batch_in,
    faults_in,
    finish_batch,
    name_session,
)
from tests.present import require
from tests.sim.faults.worlds import WorldOptions, run_world

TRANSCRIPTS = Path(__file__).parent / "transcripts"


def _options(policy: DraftPolicy, run_ahead: m.RunAhead, cuts: int = 0) -> WorldOptions:
    return WorldOptions(
        model=ToyModel(vocabulary_size=16, order=2, seed=1),
        policies=(policy,),
        sampling=SamplingParams(max_tokens=5),
        run_ahead=run_ahead,
        delay_s=0.02,
        step_s=0.01,
        pass_s=0.03,
        cuts=cuts,
        faults_until_s=0.4,
    )


SCENES = {  # each with the reason why it is worth reading
    "pearl_with_a_miss": (_options(PearlPolicy(3), m.RunAhead.NEVER), r"CORRECTED"),
    "hedged_window_with_run_ahead": (
        _options(WindowedPolicy(2), m.RunAhead.ALWAYS),
        r"stale=[1-9]",
    ),
    "reconnect": (_options(WindowedPolicy(), m.RunAhead.AUTO, cuts=1), r"LinkDown[\s\S]*Attach"),
}


def spell(value: object) -> str:
    """Return a short repr: the class and the fields that differ from their defaults."""
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, tuple):
        return "[" + " ".join(spell(item) for item in value) + "]"
    if is_dataclass(value) and not isinstance(value, type):
        shown = [
            f"{field.name}={spell(getattr(value, field.name))}"
            for field in fields(value)
            if getattr(value, field.name) != _default_of(field)
        ]
        return f"{type(value).__name__}({', '.join(shown)})"
    return repr(value)


def _default_of(field: Field[object]) -> object:
    factory = field.default_factory
    return field.default if factory is MISSING else factory()


def _play(options: WorldOptions, monkeypatch: pytest.MonkeyPatch) -> str:
    lines: list[str] = []

    def watch(side: str, kind: type[DraftSession] | type[VerifySession]) -> None:
        handle = kind.handle

        def watched(session: Any, event: Any, now: float) -> tuple[Any, ...]:
            actions: tuple[Any, ...] = handle(session, event, now)
            tree = session.tree if kind is DraftSession else session.inbox.tree
            state = f"{session.state.value}, {session.prefix.length} held, {len(tree.nodes)} nodes"
            lines.append(f"{now * 1e3:8.1f} {side} {spell(event)} -> {state}")
            lines.extend(f"{'':20}{spell(action)}" for action in actions)
            return actions

        monkeypatch.setattr(kind, "handle", watched)

    watch("device  ", DraftSession)
    watch("verifier", VerifySession)
    run_world(options, 1)
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", SCENES)
def test_the_transcript_is_as_ever(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, shows = SCENES[name]
    path, said = TRANSCRIPTS / f"{name}.txt", _play(options, monkeypatch)
    assert re.search(shows, said), f"{name} does not show {shows}"
    if REWRITE:
        path.write_text(said, encoding="utf-8")
    assert said.splitlines() == path.read_text(encoding="utf-8").splitlines()
    assert {path.stem for path in TRANSCRIPTS.glob("*")} == set(SCENES)


REWRITE = bool(os.environ.get("REWRITE_SCRIPTS"))


def parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


class Script:
    """A case's clock, and the commands of its lines, which are methods of the class."""

    now = 0.0

    def run(self, line: str) -> list[str]:
        """Carry out one command; return its actions and the state that it shows."""
        words = line.split()
        names = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        found = getattr(self, words[0])(*[word for word in words[1:] if "=" not in word], **names)
        if not isinstance(found, tuple):
            return [found] if found else []
        return [spell(action) for action in found]

    def at(self, now: str) -> None:
        self.now = float(now)


LIMIT_NAMES = {field.name for field in fields(m.Limits)}
POLICIES: dict[str, DraftPolicy] = {
    "windowed": WindowedPolicy(),
    "pearl": PearlPolicy(9),
    "wide": FixedPolicy(9, width=2),
    "pair": WindowedPolicy(2, window=40),
}


class DeviceScript(Script):
    """A script of one device's session. In words of its texts a ``_`` is a blank."""

    session: DraftSession

    def device(self, policy: str = "windowed", **names: str) -> None:
        """Create the device's session, with a policy and changes to the usual request."""
        kind = names.get("constraint")
        constraint = None if kind is None else Constraint(ConstraintKind(kind), "a")
        sampling = SamplingParams(max_tokens=int(names.get("max", 20)), constraint=constraint)
        run_ahead = m.RunAhead(names.get("run_ahead", "auto"))
        silent = "silent" in names
        request = replace(ASKED, sampling=sampling, run_ahead=run_ahead, drafting=not silent)
        self.session = draft_scripts.new_session(POLICIES[policy], request)

    def streaming(self, **names: str) -> None:
        """Connect and greet the session."""
        for event in (de.Start(), de.Connected()):
            self.session.handle(event, self.now)
        self.greet(**names)

    def start(self) -> Any:
        return self.session.handle(de.Start(), self.now)

    def connected(self) -> Any:
        return self.session.handle(de.Connected(), self.now)

    def greet(self, **names: str) -> Any:
        bounds = {name: int(value) for name, value in names.items() if name in LIMIT_NAMES}
        greeting = replace(
            draft_scripts.GREETING,
            limits=m.Limits(**bounds),
            fingerprint=names.get("model", ""),
            constrained="constrained" in names,
        )
        return self.session.handle(greeting, self.now)

    def commit(self, position: str, tokens: str = "", **names: str) -> Any:
        finish = m.FinishReason(names.pop("finish")) if "finish" in names else None
        counts = {name: int(value) for name, value in names.items()}
        commit = m.Commit(int(position), parse_numbers(tokens), finish=finish, **cast(Any, counts))
        return self.session.handle(commit, self.now)

    def guess(self, tokens: str = "") -> Any:
        return self.session.handle(draft_scripts.finish_step(*parse_numbers(tokens)), self.now)

    def step_failed(self, why: str) -> Any:
        return self.session.handle(de.StepFailed(why.replace("_", " ")), self.now)

    def down(self, why: str, *flags: str, again: str = "") -> Any:
        again_s = float(again) if again else None
        down = de.LinkDown(why.replace("_", " "), "final" not in flags, again_s)
        return self.session.handle(down, self.now)

    def fault(self, code: str, why: str, retry: str = "0") -> Any:
        return self.session.handle(
            m.Fault(m.FaultCode[code], why.replace("_", " "), float(retry)), self.now
        )

    def stop(self, reason: str = "stop") -> Any:
        return self.session.handle(de.Stop(m.FinishReason(reason)), self.now)

    def tick(self) -> Any:
        return self.session.handle(de.Tick(), self.now)

    def due(self) -> Any:
        """Advance to the deadline."""
        self.now = require(self.session.deadline)
        return self.tick()

    def back(self, **names: str) -> Any:
        """Let the back-off pass, and greet a new stream."""
        self.due()
        self.connected()
        return self.greet(**names)

    def show(self) -> str:
        one, counters = self.session, self.session.counters
        counted = {f.name: getattr(counters, f.name) for f in fields(counters)}
        told = "".join(f" {name}={spell(value)}" for name, value in counted.items() if value)
        held = f"output {list(one.prefix.output)}, {len(one.tree.nodes)} nodes"
        until = f"deadline {spell(one.deadline)}, context {one.limits.context_length}"
        return f"{one.state.value}, {held}, {until};{told}"


class EngineScript(Script):
    """A script of one engine. If ``says`` is given, its target generates this token in every
    row."""

    says: int | None = None
    adapters: tuple[ModelInfo, ...] = ()

    def __init__(self) -> None:
        self.running = tuple[PassRequest, ...]()
        self.model, self.limits, self.engine_limits = MODEL, LIMITS, ee.EngineLimits()
        self._engine: VerifyEngine | None = None

    @property
    def engine(self) -> VerifyEngine:
        if self._engine is None:
            self._engine = VerifyEngine(
                self.model, self.limits, self.engine_limits, contain=False, adapters=self.adapters
            )
        return self._engine

    def bounds(self, **names: str) -> None:
        """Set limits of the engine and the protocol, the model's end token, and adapters."""
        for name, value in names.items():
            if name == "eos":
                self.model = replace(MODEL, eos_token_ids=parse_numbers(value))
            elif name == "says":
                self.says = int(value)
            elif name == "adapters":
                self.model = replace(MODEL, fingerprint="base")
                found = (replace(MODEL, name=one, fingerprint=one) for one in value.split(","))
                self.adapters = tuple(found)
            elif name == "share":
                share = SharePrefixes(value)
                self.engine_limits = replace(self.engine_limits, share_prefixes=share)
            elif name == "cache":
                self.engine_limits = replace(
                    self.engine_limits, cache=CacheShape(*parse_numbers(value))
                )
            elif name in {field.name for field in fields(ee.EngineLimits)}:
                self.engine_limits = replace(self.engine_limits, **cast(Any, {name: int(value)}))
            else:
                self.limits = replace(self.limits, **{name: int(value)})

    def show(self) -> str:
        """Show the sessions, and what the engine waits for."""
        names = " ".join(
            f"{key}:{one.state.value}{'' if one.attached else ' detached'},"
            f" output {list(one.prefix.output)}, {len(one.inbox.tree.nodes)} nodes;"
            for key, one in self.engine.sessions.items()
        )
        return f"{names or 'nobody'} deadline {self.engine.deadline}"

    def open(self, stream: str, key: str, **names: str) -> Any:
        sampling = SamplingParams(
            max_tokens=int(names.get("max", 9)),
            stop_token_ids=parse_numbers(names.get("stop", "")),
            ignore_eos="ignore_eos" in names,
        )
        models = names.get("key_models")
        credential = Credential(
            names.get("whose", ""),
            max_sessions=int(names.get("key_sessions", 0)),
            context_length=int(names.get("key_context", 0)),
            models=tuple(models.split(",")) if models else (),
            tokens_per_s=float(names.get("rate", 0)),
        )
        request: m.Open = replace(
            REQUEST,
            session_id=key,
            prompt=parse_numbers(names.get("tokens", ""))
            or (1,) * int(names.get("prompt", len(PROMPT))),
            committed=parse_numbers(names.get("committed", "")),
            sampling=sampling,
            run_ahead=m.RunAhead(names.get("run_ahead", "always")),
            drafting="silent" not in names,
            model=names.get("model", ""),
            rule=names.get("rule", "exact"),
            session_secret=names.get("secret", "").encode(),
        )
        return self._handle(
            ee.StreamOpened(int(stream), request, names.get("peer", ""), credential)
        )

    def draft(self, stream: str, tokens: str = "", **names: str) -> Any:
        """Send a chain on the committed prefix, or with the given parents or base."""
        first, nodes = int(names.get("first", 1)), parse_numbers(tokens)
        chain = (0, *range(first, first + len(nodes) - 1)) if nodes else ()
        parents = parse_numbers(names["parents"]) if "parents" in names else chain
        key = self.engine.registry.key_of.get(int(stream))
        base = code = 0
        if key is not None and 0 in parents:
            prefix = self.engine.sessions[key].prefix
            base = int(names.get("base", prefix.length))
            code = 1 if base > prefix.length or "other" in names else prefix.hash_at(base)
        return self._receive(stream, m.Draft(first, parents, nodes, base, code))

    def received(self, stream: str, position: str, echo: str = "0") -> Any:
        return self._receive(stream, m.Received(int(position), int(echo)))

    def cancel(self, stream: str) -> Any:
        return self._receive(stream, m.Cancel())

    def lost(self, stream: str) -> Any:
        return self._handle(ee.StreamLost(int(stream)))

    def caught_up(self, stream: str) -> Any:
        return self._handle(ee.StreamCaughtUp(int(stream)))

    def done(self, behind: str = "", without: str = "") -> Any:
        """Let the running pass end well, without the result of one session if ``without``
        names it."""
        result = finish_batch(self.running) if self.says is None else self._repeat_token(self.says)
        left = tuple(one for one in result.results if one.key != without)
        return self._handle(replace(result, results=left, behind=parse_numbers(behind)))

    def _repeat_token(self, token: int) -> ee.BatchDone:
        each = ((r.key, (token,) * (1 + len(r.tokens)) if r.sample else ()) for r in self.running)
        return ee.BatchDone(tuple(PassResult(key, targets) for key, targets in each))

    def finish(self) -> None:
        """Run passes until no session wants one; all devices acknowledge everything."""
        while self.engine.running:
            self.done()
            for key, session in tuple(self.engine.sessions.items()):
                self.received(str(self.engine.registry.stream_of[key]), str(session.prefix.length))

    def cached(self) -> str:
        """Show what sessions found in the cache, and how much of it is held."""
        cache, ledger = self.engine.cache_scheduler, self.engine.cache_scheduler.ledger
        assert ledger is not None
        found = f"{cache.prefix_hit_tokens} of {cache.prefix_query_tokens} tokens were found"
        return f"{found}, {ledger.block_count - ledger.free_count} blocks are held"

    def failed(self, why: str, *flags: str, culprit: str = "") -> Any:
        event = ee.BatchFailed(why, "full" in flags, culprit, "requested" in flags)
        return self._handle(event)

    def sequence_failed(self, key: str, why: str, *flags: str) -> Any:
        return self._handle(ee.SequenceFailed(key, why, "full" in flags))

    def probed(self, why: str = "") -> Any:
        return self._handle(ee.ProbeDone(why or None))

    def poll(self) -> Any:
        return self._handle(ee.Poll())

    def sleep(self, until: str) -> Any:
        """Poll at each deadline before this time."""
        actions: tuple[ee.EngineAction, ...] = ()
        while (at := self.engine.deadline) is not None and at <= float(until):
            self.now = max(self.now, at)
            actions += self._handle(ee.Poll())
        self.now = float(until)
        return actions

    def _receive(self, stream: str, message: m.Draft | m.Received | m.Cancel) -> Any:
        return self._handle(ee.StreamMessage(int(stream), message))

    def _handle(self, event: ee.EngineEvent) -> tuple[ee.EngineAction, ...]:
        actions = self.engine.handle(event, self.now)
        for action in actions:
            if isinstance(action, ee.RunBatch):
                self.running = action.requests
        return actions


class FailoverScript(Script):
    """A script of a device that has the verifiers a and b. In words a ``_`` is a blank."""

    def __init__(self) -> None:
        self.knows("listed")

    def knows(self, how: str, *addresses: str) -> None:
        """Set the verifiers in their order of choice."""
        self.failover = Failover(FailoverPolicy(), Association(how), 1)
        self.failover.handle(fe.Known(addresses or ("a", "b")), 0.0)

    def event(self, kind: str, *words: str, **names: str) -> Any:
        """Handle any event, given by its class and fields."""
        given = [_parse_value(word) for word in words]
        named = {name: _parse_value(word) for name, word in names.items()}
        return self.failover.handle(getattr(fe, kind)(*given, **named), self.now)

    def answered(self, address: str, rtt: str, *adapters: str, held: str = "0") -> Any:
        models = tuple(replace(SERVED, name=name, fingerprint=name) for name in adapters)
        info = m.VerifierInfo(SERVED, m.Limits(), int(held), 8, 20_000, models)
        return self.failover.handle(fe.ProbeAnswered(address, info, float(rtt)), self.now)

    def greeted(self, route: str) -> Any:
        model = m.ModelIdentity(SERVED.name, SERVED.fingerprint, 4096)
        return self.failover.handle(fe.Greeted(int(route), model), self.now)

    def due(self) -> Any:
        self.now = require(self.failover.deadline)
        return self.failover.handle(fe.Tick(), self.now)

    def show(self) -> str:
        listed = self.failover.candidates.listed
        open_ = [name for name, one in listed.items() if one.breaker.state is not CLOSED]
        routes = "".join(
            f" {number}: served by {' '.join(one.served)}, {one.failovers} failovers;"
            for number, one in self.failover.routes.items()
        )
        return f"deadline {spell(self.failover.deadline)}, left alone {open_};{routes}"


def _parse_value(word: str) -> object:
    """Parse a number, a yes or no, a fault's code or text."""
    if word in m.FaultCode.__members__:
        return m.FaultCode[word]
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word.replace("_", " ")


SERVED = ModelInfo("big", "words", 100, 4096, (), "fp-1")
SCRIPTS: dict[str, type[Script]] = {
    "device_scripts": DeviceScript,
    "engine_scripts": EngineScript,
    "failover_scripts": FailoverScript,
}
FILES = [path for name in SCRIPTS for path in sorted((Path(__file__).parent / name).glob("*.txt"))]


def replay_case(case: str, script: Script) -> str:
    """Play the case again; return its commands, each with its results below it."""
    name, *lines = case.splitlines()
    out = [name]
    for line in lines:
        if line.startswith("    ") or not line.strip():
            continue
        out.append(line)
        commands = [] if line.startswith("#") else line.removeprefix(". ").split("; ")
        shown = [f"    {one}" for command in commands for one in script.run(command)]
        out += [] if line.startswith(". ") else shown
    return "\n".join(out)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_all_is_as_the_scripts_say(path: Path) -> None:
    text, kind = path.read_text(), SCRIPTS[path.parent.name]
    said = [replay_case(f"== {case.strip()}", kind()) for case in text.split("== ") if case.strip()]
    if REWRITE:
        path.write_text("\n\n".join(said) + "\n")
    assert "\n\n".join(said).splitlines() == text.splitlines()


class _Broken:
    """A rule that raises for the second session of a pass."""

    def __init__(self) -> None:
        self.walks = 0

    def walk(
        self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int], *_: Any
    ) -> Walk:
        self.walks += 1
        if self.walks == 3:
            raise ZeroDivisionError("a bug")
        return ExactRule().walk(tokens, parents, targets)


def _three_sessions(engine: VerifyEngine) -> ee.BatchDone:
    """Return the end of one pass over sessions a, b and c on streams 1, 2 and 3."""
    first = batch_in(engine.handle(ee.StreamOpened(1, name_session("a")), 0.0))
    engine.handle(ee.StreamOpened(2, name_session("b")), 0.0)
    engine.handle(ee.StreamOpened(3, name_session("c")), 0.0)
    return finish_batch(batch_in(engine.handle(finish_batch(first), 0.1)))


def test_a_bug_in_one_session_ends_that_session() -> None:
    broken = _Broken()
    engine = VerifyEngine(MODEL, LIMITS, ee.EngineLimits(), lambda _: broken)
    actions = engine.handle(_three_sessions(engine), 0.2)
    ((stream, code),) = faults_in(actions)
    assert code is m.FaultCode.INTERNAL
    assert code.retryable
    (report,) = [action for action in actions if isinstance(action, ee.ReportFailure)]
    assert "ZeroDivisionError" in report.details
    assert ee.CloseSequence(report.key) in actions
    assert ee.CloseStream(stream) in actions
    assert set(engine.sessions) == {"a", "b", "c"} - {report.key}
    assert {request.key for request in batch_in(actions)} == set(engine.sessions)


def test_tests_see_the_bug_itself() -> None:
    broken = _Broken()
    engine = VerifyEngine(MODEL, LIMITS, ee.EngineLimits(), lambda _: broken, contain=False)
    event = _three_sessions(engine)
    with pytest.raises(ZeroDivisionError):
        engine.handle(event, 0.2)
