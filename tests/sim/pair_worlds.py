"""A real pair of models in virtual time: the target's texts, the draft's candidates, and worlds.

Theory of operation. The target generates each text once (``record_texts``). The draft model is run
for real at every context for which a session requests candidates, off the target's text too, and
each answer is kept in a file (``DraftModel``). So trees, depths, both ends, any link and any step
time can be played with the product's own sessions and engine. Tokens, passes, nodes and bytes are
what the real models make, and times are a function of the settings, whatever else the machine does.
A text that differs from the target's own ends the world with an error.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from edgespec.core.device.estimates import KeptEstimates, VerifierEstimates
from edgespec.core.device.events import Finish
from edgespec.core.device.goodput_policy import make_policy
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.ports import (
    Cancelled,
    Candidate,
    Drafter,
    ModelInfo,
    PassRequest,
    TargetModel,
    never_cancelled,
)
from edgespec.core.protocol.messages import EXACT_RULE, Limits, Open, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import TextTables
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import SilentDrafter
from edgespec_sim.cost_profile import TimeLaw, constant_law
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.scenario.sections import Scenario, load_scenario
from edgespec_sim.sessions import (
    Delivery,
    ServerDraftModel,
    SimulatedDevice,
    SimulatedVerifier,
    Stream,
)
from edgespec_sim.token_sources.source import Script, ScriptedTarget
from edgespec_sim.world.network import Network
from edgespec_sim.world.site import Machine

# --- the target's texts --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """The target's own output after a prompt."""

    kind: str
    """Set that the prompt is from, such as ``chat``."""
    name: str
    temperature: float
    seed: int
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """The output, an end token included."""
    max_tokens: int
    prediction: tuple[int, ...] = ()
    """Text that the client expects the output to be."""

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, seed=self.seed, max_tokens=self.max_tokens)


def record_texts(
    target: TargetModel,
    prompts: Sequence[tuple[str, str, tuple[int, ...]]],
    temperature: float,
    max_tokens: int,
) -> list[Text]:
    """Generate an output for each prompt (kind, name, tokens), all in the same passes, without
    drafts. Each output ends at ``max_tokens`` or behind an end token."""
    lives: dict[str, list[int]] = {}
    starts: dict[str, tuple[str, str, tuple[int, ...], SamplingParams]] = {}
    for number, (kind, name, prompt) in enumerate(prompts):
        sampling = SamplingParams(temperature, seed=number, max_tokens=max_tokens)
        starts[name] = kind, name, prompt, sampling
        lives[name] = list(prompt)
        target.open(name, len(prompt), sampling)
    cached, open_names, ends = dict.fromkeys(lives, 0), list(lives), set(target.info.eos_token_ids)
    while open_names:
        batch = [
            PassRequest(name, cached[name], tuple(lives[name][cached[name] :]))
            for name in open_names
        ]
        for name, found in zip(list(open_names), target.forward(batch), strict=True):
            cached[name] = len(lives[name])
            lives[name] += found.targets
            made = len(lives[name]) - len(starts[name][2])
            if lives[name][-1] in ends or made >= max_tokens:
                target.close(name)
                open_names.remove(name)
    return [
        Text(
            kind,
            name,
            temperature,
            sampling.seed,
            prompt,
            tuple(lives[name][len(prompt) :]),
            max_tokens,
        )
        for kind, name, prompt, sampling in starts.values()
    ]


def write_texts(path: Path, texts: Sequence[Text]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(one)) + "\n" for one in texts), encoding="utf-8")


def read_texts(path: Path) -> list[Text]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    lists = "prompt", "tokens", "prediction"
    return [
        Text(**{**row, **{name: tuple(row[name]) for name in lists if name in row}}) for row in rows
    ]


# --- the draft's candidates ----------------------------------------------------------------------

WIDTH: Final = 4
"""Candidates that are kept of each step."""


class PairDraft(Protocol):
    """The draft model of a pair: what both ends may draft with."""

    @property
    def info(self) -> ModelInfo: ...

    def choose(self, text: Text) -> None:
        """Answer for this text from now on."""

    def candidates(self, after: tuple[int, ...]) -> tuple[Candidate, ...]:
        """Return the candidates behind the prompt and the tokens ``after`` it, ``WIDTH`` at
        least."""


class ScriptedDraft:
    """A draft model without weights. Its first candidate is right with the chance ``rate``, which
    is also its confidence, behind every beginning of the text, and never off the text. The other
    candidates are always wrong."""

    def __init__(self, info: ModelInfo, rate: float) -> None:
        self.info, self._rate = info, rate
        self._text: Text | None = None
        self._right: list[bool] = []

    def choose(self, text: Text) -> None:
        if text != self._text:
            dice = random.Random(f"{text.name} {text.seed}")
            self._text = text
            self._right = [dice.random() < self._rate for _ in text.tokens]

    def candidates(self, after: tuple[int, ...]) -> tuple[Candidate, ...]:
        assert self._text is not None
        tokens, at = self._text.tokens, len(after)
        right = tokens[at] if tokens[:at] == after and at < len(tokens) else -1
        first = right if right >= 0 and self._right[at] else self._wrong(at, right)
        others = [
            one for rank in range(1, WIDTH) if (one := self._wrong(at + rank, right)) != first
        ]
        found, rest = [first, *others], math.log((1.0 - self._rate) / WIDTH)
        return tuple(
            [
                Candidate(one, rest if rank else math.log(self._rate))
                for rank, one in enumerate(found)
            ]
        )

    def _wrong(self, number: int, right: int) -> int:
        """Return a token other than ``right``."""
        token = number * 7919 % self.info.vocabulary_size
        return token if token != right else (token + 1) % self.info.vocabulary_size


class DraftModel:
    """A draft model whose candidates are computed once for each context, and kept in ``folder``, a
    file for each text. With ``load`` None only kept candidates are known."""

    def __init__(
        self, info: ModelInfo, folder: Path, load: Callable[[], Drafter] | None = None
    ) -> None:
        self.info, self.computed, self._folder, self._load = info, 0, folder, load
        self._model: Drafter | None = None
        self._text: Text | None = None
        self._known: dict[tuple[int, ...], tuple[Candidate, ...]] = {}
        self._cached: list[int] = []
        """Tokens in the cache of the model."""
        folder.mkdir(parents=True, exist_ok=True)

    def choose(self, text: Text) -> None:
        """Answer for this text from now on."""
        if text == self._text:
            return
        self._text, self._known, self._cached = text, {}, []
        if (path := self._path(text)).exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                context = (*text.tokens[: row["at"]], *row["then"])
                self._known[context] = tuple([Candidate(*one) for one in row["found"]])

    def candidates(self, after: tuple[int, ...]) -> tuple[Candidate, ...]:
        """Return the candidates behind the prompt and the tokens ``after`` it."""
        found = self._known.get(after)
        if found is None:
            found = self._known[after] = self._compute(after)
        return found

    def _path(self, text: Text) -> Path:
        return self._folder / f"{text.name}-{text.temperature:g}.jsonl"

    def _compute(self, after: tuple[int, ...]) -> tuple[Candidate, ...]:
        assert self._text is not None
        if self._model is None:
            if self._load is None:
                raise ValueError(f"{self._text.name}: no candidates are kept behind {after}")
            self._model = self._load()
        text, model = self._text, self._model
        context = [*text.prompt, *after]
        if not self._cached:
            model.begin(len(text.prompt), text.sampling)
        keep = 0
        for one, other in zip(self._cached, context[:-1], strict=False):
            if one != other:
                break
            keep += 1
        found = model.step(keep, context[keep:], WIDTH)
        self._cached, self.computed = context, self.computed + 1
        same = 0
        while same < min(len(after), len(text.tokens)) and after[same] == text.tokens[same]:
            same += 1
        row = {
            "at": same,
            "then": after[same:],
            "found": [(one.token, round(one.logprob, 4)) for one in found],
        }
        with self._path(text).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
        return tuple([Candidate(one.token, round(one.logprob, 4)) for one in found])


class RecordedDrafter:
    """A ``Drafter`` with the candidates of a ``PairDraft``. It has a cache of its own, so that a
    device and a verifier may draft the same text with one model."""

    inner: Drafter | None = None

    def __init__(self, model: PairDraft) -> None:
        self.info, self._model = model.info, model
        self._tokens: list[int] = []
        self._prompt_length = 1

    def begin(self, prompt_length: int, sampling: SamplingParams) -> None:
        self._prompt_length, self._tokens = prompt_length, []

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        assert keep_length <= len(self._tokens)
        assert 1 <= width <= WIDTH
        self._tokens[keep_length:] = feed
        after = tuple(self._tokens[self._prompt_length :])
        return self._model.candidates(after)[:width]

    def close(self) -> None:
        self._tokens = []


# --- worlds --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Times:
    """Durations of passes and steps. A number of milliseconds is the same for any rows."""

    target_pass: TimeLaw
    device_step: TimeLaw
    server_step: TimeLaw

    @classmethod
    def of_ms(cls, pass_ms: float, device_ms: float, server_ms: float) -> Times:
        return cls(*(constant_law(ms / 1e3) for ms in (pass_ms, device_ms, server_ms)))


@dataclass(frozen=True, slots=True)
class Way:
    """A way of decoding."""

    name: str
    policy: DraftPolicy = field(default_factory=make_policy)
    run_ahead: RunAhead = RunAhead.AUTO
    device_model: bool = True
    device_lookup: bool = False
    server_model: bool = False
    server_lookup: bool = False
    prediction: bool = False
    """Whether the device drafts from the text's prediction."""
    rule: str = EXACT_RULE

    @property
    def drafts(self) -> bool:
        """Whether the device drafts."""
        return self.device_model or self.device_lookup or self.prediction


class Link(NamedTuple):
    """The path between device and verifier: a scenario with one device and one verifier."""

    name: str
    scenario: Scenario
    folder: Path


def constant_link(rtt_ms: float) -> Link:
    """Return a link that takes ``rtt_ms`` for a round trip and nothing else."""
    section: dict[str, Any] = {"links.internet.rtt_ms": rtt_ms, "links.internet.jitter_ms": 0}
    section |= {"links.internet.up_mbps": float("inf"), "links.internet.down_mbps": float("inf")}
    scenario = load_scenario("single-device", {**section, "connected": True})
    return Link(f"RTT {rtt_ms:g} ms", scenario, Path())


def traced_link(trace: Path) -> Link:
    """Return a recorded network."""
    settings = {
        "links.network.trace": str(trace.resolve()),
        "connected": True,
        "duration_s": 36_000,
    }
    return Link(trace.name, load_scenario("replay", settings), trace.parent)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The measurements of one text under one way of decoding."""

    name: str
    kind: str
    tokens: int
    passes: int
    tpot_ms: float
    ttft_ms: float
    sent: int
    accepted: int
    steps: int
    tried: int
    hits: int
    replaced: int
    up_bytes: int
    down_bytes: int
    server_ms: float
    """Milliseconds of passes and of the server's draft steps."""


def play(
    texts: Sequence[Text],
    way: Way,
    link: Link,
    times: Times,
    draft: PairDraft,
    target: TargetModel | None = None,
    watch: Callable[[Delivery], None] = lambda delivery: None,
    tables: TextTables | None = None,
) -> list[Outcome]:
    """Play the texts one after another on one device and one verifier, which keep their estimates.

    Args:
        texts: The outputs, with their prompts and predictions.
        way: Which ends draft, and from what.
        link: The path between both ends.
        times: Durations of passes and of draft steps.
        draft: The draft model of either end.
        target: For relaxed rules; None takes the texts as they are recorded.
        watch: Called with each output as it arrived.
        tables: Earlier texts of the device's user. None: there are none at the start.

    Raises:
        RuntimeError: A text does not end, or is not the target's own under the exact rule.
    """
    scripts = {one.prompt: Script(one.tokens, (0,) * len(one.tokens)) for one in texts}
    queue = EventQueue()
    network = Network(queue, link.scenario, "1", link.folder)
    group, verifier_name = (
        next(iter(one)) for one in (link.scenario.devices, link.scenario.verifiers)
    )
    model = target or ScriptedTarget(draft.info, lambda prompt, length: scripts[prompt])
    rules = (EXACT_RULE,) if way.rule == EXACT_RULE else (EXACT_RULE, way.rule)
    limits = EngineLimits(drafter=way.server_model, server_drafts=way.server_lookup, rules=rules)
    engine = VerifyEngine(model.info, Limits(context_length=1 << 16), limits)
    machine = Machine(queue, times.target_pass, "")
    server = ServerDraftModel(lambda: RecordedDrafter(draft), times.server_step.seconds)
    verifier = SimulatedVerifier(
        queue, engine, model, machine, drafter=server if way.server_model else None
    )
    learned, estimates = KeptEstimates(), VerifierEstimates()
    if tables is None and way.device_lookup:
        tables = TextTables(ngrams=True)
    drafter: Drafter = RecordedDrafter(draft) if way.device_model else SilentDrafter(draft.info)
    found = []
    for number, text in enumerate(texts):
        draft.choose(text)
        streams: list[Stream] = []

        def connect(streams: list[Stream] = streams) -> tuple[Stream, float]:
            up, down, connect_s = network.route(group, 0, verifier_name, 1)
            verifier.accept(stream := Stream(queue, up, down))
            streams.append(stream)
            return stream, connect_s

        request = Open(
            session_id=f"{text.name}#{number}",
            model="",
            vocabulary="",
            prompt=text.prompt,
            sampling=text.sampling,
            run_ahead=way.run_ahead,
            rule=way.rule,
            drafting=way.drafts,
        )
        session = DraftSession(
            request,
            way.policy,
            ReconnectPolicy(give_up_first_s=600.0, give_up_s=600.0),
            draft.info.context_length,
            verifier=estimates,
            learned=learned,
            text=tables if way.device_lookup else None,
            prediction=text.prediction if way.prediction else (),
        )
        step_law = times.device_step if way.device_model else constant_law(0.0)
        ended: list[bool] = []
        device = SimulatedDevice(
            queue,
            session,
            drafter,
            lambda kept, fed, law=step_law: law.seconds(fed, kept),  # type: ignore[misc]
            connect,
            on_end=lambda ended=ended: ended.append(True),  # type: ignore[misc]
        )
        begun_s, busy_s = queue.now, machine.counters.busy_s
        device.start()
        while not ended:
            queue.run(queue.now + 1.0)
            if queue.now > begun_s + 3600.0:
                raise RuntimeError(f"{text.name}: did not end in an hour")
        delivery, counters = device.delivery, session.counters
        if not isinstance(delivery.ended, Finish):
            raise RuntimeError(f"{text.name}: {delivery.ended}")
        if way.rule == EXACT_RULE and tuple(delivery.tokens) != text.tokens:
            raise RuntimeError(f"{text.name}: the output is not the target's own")
        watch(delivery)
        times_s, count = delivery.times_s, len(delivery.tokens)
        found.append(
            Outcome(
                name=text.name,
                kind=text.kind,
                tokens=count,
                passes=counters.passes,
                tpot_ms=1e3 * (times_s[-1] - times_s[0]) / max(1, count - 1),
                ttft_ms=1e3 * (times_s[0] - begun_s),
                sent=counters.sent,
                accepted=counters.accepted,
                steps=counters.steps,
                tried=counters.tried,
                hits=counters.hits,
                replaced=counters.replaced,
                up_bytes=sum(one.up_bytes for one in streams),
                down_bytes=sum(one.down_bytes for one in streams),
                server_ms=1e3 * (machine.counters.busy_s - busy_s),
            )
        )
    return found


STREAMING: Final = Way("target-only", run_ahead=RunAhead.ALWAYS, device_model=False)
DEVICE: Final = Way("device alone")
LOOKUP: Final = Way("device lookup", device_model=False, device_lookup=True)
DEVICE_AND_LOOKUP: Final = Way("device and lookup", device_lookup=True)
SERVER: Final = Way(
    "server alone", run_ahead=RunAhead.ALWAYS, device_model=False, server_model=True
)
BOTH: Final = Way("both", server_model=True)
WAYS: Final[Mapping[str, Way]] = {
    one.name: one for one in (STREAMING, DEVICE, LOOKUP, DEVICE_AND_LOOKUP, SERVER, BOTH)
}
