"""Scripts of a ``VerifyEngine``: what happens, and below it all that the engine asks for.

Oracle: the files in ``engine_scripts``, read by a person when they change. A file holds cases
(``== name``), a case commands, and each command's actions stand below it behind four blanks (but
for those of a line that begins with ``.``: they are the same in each case, and the first shows
them); the target says ``fixed_text``. To accept a change: ``REWRITE_SCRIPTS=1 pytest`` with this file, and
look at the difference. The commands are the methods of ``Script``; ``name=value`` are keywords.
"""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import pytest

from edgespec.core.protocol.messages import Cancel, Draft, Open, Received, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.work import CacheShape, PassRequest
from edgespec.core.verifier import engine_events as ee
from edgespec.core.verifier.credential import Credential
from edgespec.core.verifier.engine import VerifyEngine
from tests.core.engine_scenes import done
from tests.core.fixed_text import LIMITS, MODEL, PROMPT, REQUEST
from tests.core.test_transcripts import _spell as spell

FOLDER = Path(__file__).parent / "engine_scripts"
REWRITE = bool(os.environ.get("REWRITE_SCRIPTS"))


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(",") if word)


class Script:
    """One engine and the clock of its case."""

    def __init__(self) -> None:
        self.now, self.running = 0.0, tuple[PassRequest, ...]()
        self.model, self.limits, self.engine_limits = MODEL, LIMITS, ee.EngineLimits()
        self._engine: VerifyEngine | None = None

    @property
    def engine(self) -> VerifyEngine:
        if self._engine is None:
            self._engine = VerifyEngine(self.model, self.limits, self.engine_limits, contain=False)
        return self._engine

    def run(self, line: str) -> list[str]:
        """Carry out one command; the actions, and what it asks to be shown."""
        words = line.split()
        names = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        found = getattr(self, words[0])(*[word for word in words[1:] if "=" not in word], **names)
        if not isinstance(found, tuple):
            return [found] if found else []
        for action in found:
            if isinstance(action, ee.RunBatch):
                self.running = action.requests
        return [spell(action) for action in found]

    # --- what an engine is, and when ------------------------------------------------------------

    def bounds(self, **names: str) -> None:
        """Limits of the engine, of the protocol, and the model's end token."""
        for name, value in names.items():
            if name == "eos":
                self.model = replace(MODEL, eos_token_ids=numbers(value))
            elif name == "cache":
                self.engine_limits = replace(self.engine_limits, cache=CacheShape(*numbers(value)))
            elif name in {field.name for field in fields(ee.EngineLimits)}:
                self.engine_limits = replace(self.engine_limits, **cast(Any, {name: int(value)}))
            else:
                self.limits = replace(self.limits, **{name: int(value)})

    def at(self, now: str) -> None:
        self.now = float(now)

    def show(self) -> str:
        """Who is there, and what the engine waits for."""
        names = " ".join(
            f"{key}:{one.state.value}{'' if one.attached else ' detached'},"
            f" output {list(one.prefix.output)}, {len(one.inbox.tree.nodes)} nodes;"
            for key, one in self.engine.sessions.items()
        )
        return f"{names or 'nobody'} deadline {self.engine.deadline}"

    # --- streams --------------------------------------------------------------------------------

    def open(self, stream: str, key: str, **names: str) -> Any:
        sampling = SamplingParams(
            max_tokens=int(names.get("max", 9)),
            stop_token_ids=numbers(names.get("stop", "")),
            ignore_eos="ignore_eos" in names,
        )
        credential = Credential(names.get("whose", ""), tokens_per_s=float(names.get("rate", 0)))
        request: Open = replace(
            REQUEST,
            session_id=key,
            prompt=(1,) * int(names.get("prompt", len(PROMPT))),
            committed=numbers(names.get("committed", "")),
            sampling=sampling,
            run_ahead=RunAhead(names.get("run_ahead", "always")),
            drafting="silent" not in names,
            model=names.get("model", ""),
            rule=names.get("rule", "exact"),
            session_secret=names.get("secret", "").encode(),
        )
        return self._handle(
            ee.StreamOpened(int(stream), request, names.get("peer", ""), credential)
        )

    def draft(self, stream: str, tokens: str = "", **names: str) -> Any:
        """A chain on the committed prefix, unless the parents or the base say otherwise."""
        first, nodes = int(names.get("first", 1)), numbers(tokens)
        chain = (0, *range(first, first + len(nodes) - 1)) if nodes else ()
        parents = numbers(names["parents"]) if "parents" in names else chain
        key = self.engine.registry.key_of.get(int(stream))
        base = code = 0
        if key is not None and 0 in parents:
            prefix = self.engine.sessions[key].prefix
            base = int(names.get("base", prefix.length))
            code = 1 if base > prefix.length or "other" in names else prefix.hash_at(base)
        return self._said(stream, Draft(first, parents, nodes, base, code))

    def received(self, stream: str, position: str, echo: str = "0") -> Any:
        return self._said(stream, Received(int(position), int(echo)))

    def cancel(self, stream: str) -> Any:
        return self._said(stream, Cancel())

    def lost(self, stream: str) -> Any:
        return self._handle(ee.StreamLost(int(stream)))

    def caught_up(self, stream: str) -> Any:
        return self._handle(ee.StreamCaughtUp(int(stream)))

    # --- the target -----------------------------------------------------------------------------

    def done(self, behind: str = "", without: str = "") -> Any:
        """The pass that runs ends well, less the result of one session."""
        result = done(self.running)
        left = tuple(one for one in result.results if one.key != without)
        return self._handle(replace(result, results=left, behind=numbers(behind)))

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

    def _said(self, stream: str, message: Draft | Received | Cancel) -> Any:
        return self._handle(ee.StreamMessage(int(stream), message))

    def _handle(self, event: ee.EngineEvent) -> tuple[ee.EngineAction, ...]:
        return self.engine.handle(event, self.now)


def played(case: str) -> str:
    """The case anew: its commands, and below each what comes of it."""
    name, *lines = case.splitlines()
    script, out = Script(), [name]
    for line in lines:
        if line.startswith("    ") or not line.strip():
            continue
        out.append(line)
        if line.startswith(". "):
            for command in line[2:].split("; "):
                script.run(command)
        elif not line.startswith("#"):
            out += [f"    {shown}" for shown in script.run(line)]
    return "\n".join(out)


def cases(path: Path) -> list[str]:
    return [f"== {case.strip()}" for case in path.read_text().split("== ") if case.strip()]


CASES = [(path, case) for path in sorted(FOLDER.glob("*.txt")) for case in cases(path)]


@pytest.mark.parametrize(
    ("path", "case"),
    CASES,
    ids=[f"{path.stem}: {case.splitlines()[0][3:]}" for path, case in CASES],
)
def test_the_engine_does_as_its_script_says(path: Path, case: str) -> None:
    if not REWRITE:
        assert played(case).splitlines() == [line for line in case.splitlines() if line.strip()]


def test_scripts_are_written_anew_when_asked() -> None:
    if REWRITE:
        for path in {path for path, _ in CASES}:
            path.write_text("\n\n".join(played(case) for case in cases(path)) + "\n")
    assert CASES
