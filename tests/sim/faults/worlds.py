"""Whole worlds from one seed: devices, links, a verifier and every kind of fault, with checks.

``run_world(options, seed)`` plays the product's own sessions in virtual time until every device has
its text. Links delay, jitter, repeat and break; the verifier restarts and loses all sessions;
device processes are replaced by new ones that hold the delivered tokens; drafts are forged; passes,
sequences, sessions and the verifier's own drafts fail; the cache is too small for all. None of that
may change a token: ``checks`` compares every step with the target's own stream, computed without
any of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from edgespec.core.device.comparison_policies import WindowedPolicy
from edgespec.core.device.events import DraftCounters, Fail, Finish, LinkState
from edgespec.core.device.kept_prefixes import KeptPrefixes
from edgespec.core.device.link_session import ReconnectPolicy
from edgespec.core.device.memory import SMALLEST_WINDOW, DraftAllowance, MemoryGuard
from edgespec.core.device.policy import DraftPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.guarded_drafter import MEASURE_EVERY_S, CacheGroup, GuardedDrafter
from edgespec.core.ports import Cancelled, CapacityError, Drafter, never_cancelled
from edgespec.core.protocol import messages as m
from edgespec.core.protocol.acceptance import ExactRule, Walk
from edgespec.core.protocol.credential import ANYBODY, Credential
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.protocol.text_lookup import EarlierTexts, TextTables
from edgespec.core.protocol.tree import SpeculationTree
from edgespec.core.protocol.work import CacheShape, Candidate, DraftStep, PassRequest, PassResult
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.draft_round import LONGEST_CHAIN
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineAction, EngineEvent, EngineLimits
from edgespec.core.verifier.run_ahead import RUN_AHEAD, RunAheadPolicy, RunAheadView
from edgespec.core.verifier.session import VerifySession
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.sessions import ServerDraftModel, SimulatedDevice, SimulatedVerifier, Stream
from edgespec_sim.world.device_memory import WindowedDrafter
from tests.adversarial import WrappedDrafter
from tests.sim.faults import checks

DrafterFactory = Callable[[ToyModel], Drafter]


def good_drafter(model: ToyModel) -> Drafter:
    """Make a drafter that is right about eight times of ten."""
    return ToyDrafter(model.perturbed(0.3))


class PredictionKind(Enum):
    """How the prediction of a device differs from its output."""

    RIGHT = "right"
    EDITED = "edited"
    """Tokens are inserted, deleted and replaced, and a block is moved."""
    OTHER = "other"
    """Random tokens, also beyond the vocabulary."""
    SHIFTED = "shifted"
    """The output begins in the middle of it."""
    REPEATED = "repeated"
    """The output and its beginnings, one after another."""


def predict(
    kind: PredictionKind, output: Sequence[int], vocabulary_size: int, dice: random.Random
) -> tuple[int, ...]:
    """Return a prediction of ``output`` that is wrong in the way of ``kind``."""
    other = [dice.randrange(vocabulary_size + 2) for _ in range(dice.choice((0, 1, 9, 200)))]
    match kind:
        case PredictionKind.RIGHT:
            return tuple(output)
        case PredictionKind.OTHER:
            return tuple(other)
        case PredictionKind.SHIFTED:
            return (*other, *output, *other)
        case PredictionKind.REPEATED:
            return tuple(token for end in range(len(output) + 1) for token in output[:end])
    found = list(output)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(found) + 1)
        length = dice.choice((0, 1, 1, 3))
        found[at : at + length] = other[: dice.choice((0, 1, 1, 3))]
    start, end = sorted((dice.randrange(len(found) + 1), dice.randrange(len(found) + 1)))
    return (*found[:start], *found[end:], *found[start:end])


@dataclass(frozen=True, slots=True)
class WorldOptions:
    """The settings of a world, without its seed. Times are in seconds; chances are per message or
    pass."""

    model: ToyModel = field(default_factory=lambda: ToyModel(vocabulary_size=8, order=2))
    drafter: DrafterFactory = good_drafter
    policies: tuple[DraftPolicy, ...] = (WindowedPolicy(),)
    """Draft policies of the devices, one each."""
    credentials: tuple[Credential, ...] = (ANYBODY,)
    """Credentials that the devices show, in turn."""
    prompt_length: int = 3
    shared_length: int = 0
    """Number of prompt tokens that are the same for all devices."""
    chat: bool = False
    """Whether each device but the first continues the text of the device before it, once that is
    complete. Its prompt is then that text and ``prompt_length`` tokens, if the context has room for
    it."""
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=24))
    """Sampling parameters; device i adds i to the seed."""
    run_ahead: m.RunAhead = m.RunAhead.AUTO
    drafting: bool = True
    device_text: bool = False
    """Whether devices also draft by lookup in their text."""
    prediction: PredictionKind | None = None
    """Error of the devices' predictions; None: they have no prediction."""
    draft_context_length: int = 1 << 16
    """Context of the devices' draft model; 0: they have none."""
    limits: m.Limits = field(default_factory=lambda: m.Limits(lease_s=5.0))
    engine_limits: EngineLimits = field(default_factory=EngineLimits)
    delay_s: float = 0.02
    """One-way delay; a connection takes two."""
    jitter_s: float = 0.0
    """Jitter added to a message's delay, uniformly from 0; order is kept."""
    step_s: float = 0.005
    pass_s: float = 0.02
    row_s: float = 0.0
    """Seconds that each row adds to a pass."""
    faults_until_s: float = 1.0
    cuts: int = 0
    """Broken links of each device, and replaced processes of it."""
    replacements: int = 0
    restarts: int = 0
    """Restarts of the verifier, which then cannot be reached for up to ``downtime_s``."""
    downtime_s: float = 0.3
    duplicate_chance: float = 0.0
    forge_chance: float = 0.0
    """Chance that a forged draft follows a draft."""
    batch_failure_chance: float = 0.0
    """Chance that a pass with more than one session fails."""
    target_failure_chance: float = 0.0
    """Chance that an operation of the target fails, before it and after it."""
    server_drafter: DrafterFactory | None = None
    """The verifier's own draft model, if ``EngineLimits.drafter`` states that it has one."""
    server_step_s: float = 0.0025
    refusal_chance: float = 0.0
    """Chance that a step of that model has no room for a sequence."""
    drafter_failure_chance: float = 0.0
    """Chance that a step of that model fails; the model is then off for good."""
    session_failure_chance: float = 0.0
    """Chance that a session's acceptance rule or run-ahead policy raises when it is called."""

    names_prefixes: bool = False
    """Whether devices name the beginnings of their texts (``EngineLimits.prefix_bytes``). All
    devices belong to one agent."""
    resident_bytes: Callable[[float], int] | None = None
    """Memory that every device's process holds beside its draft, by time, of ``governors.BUDGET``.
    Only with one leaf per step."""

    @property
    def quiet(self) -> bool:
        """Whether this world has no faults."""
        chances = (
            self.duplicate_chance,
            self.forge_chance,
            self.batch_failure_chance,
            self.target_failure_chance,
            self.session_failure_chance,
            self.refusal_chance,
            self.drafter_failure_chance,
        )
        return not (self.cuts or self.replacements or self.restarts or any(chances))


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """One device's generation: the output that it had to deliver (and did), and the counters of its
    last process."""

    expected: checks.Expected
    counters: DraftCounters
    ended_s: float


@dataclass(frozen=True, slots=True)
class WorldResult:
    devices: tuple[DeviceResult, ...]
    passes: int
    """Passes of all verifiers; the rows follow."""
    rows: int
    faults: int
    """Faults that took place."""
    evictions: int
    """Sessions that lost their cache to others, at the last verifier."""
    hit_tokens: int
    """Committed tokens that the last verifier found cached and did not compute."""
    server_guesses: int = 0
    """Nodes of the verifiers' own draft models in passes, and the accepted ones."""
    server_accepted: int = 0
    drafters_off: int = 0
    """Verifiers whose draft model failed."""
    named_tokens: int = 0
    """Ids that verifiers had and devices did not send, and beginnings that verifiers lacked."""
    prefix_misses: int = 0


# Devices of random worlds are short of memory, so that their memory guard has much to do. It
# measures and recovers in fractions of a second here, so that it moves up and down within a world.
# Its decisions may change no token, which is what the worlds check.


BUDGET: Final = 1 << 20

_ROW_BYTES, _MARGIN = 1024, 1 << 14

_FULL = DraftAllowance(4 * SMALLEST_WINDOW, 3)

_GUARD_LOOK_S, _RECOVERY_S = 0.05, 0.1

_CLOCK_RATE = MEASURE_EVERY_S / _GUARD_LOOK_S

"""Ratio of a guarded drafter's clock to the world's."""


def guard_drafter(drafter: Drafter, options: WorldOptions, queue: EventQueue) -> Drafter:
    """Put the drafter under a memory budget, if the options have one."""
    others = options.resident_bytes
    if others is None:
        return drafter
    rows = WindowedDrafter(drafter, _FULL.window, _FULL.width, _ROW_BYTES)
    guard = MemoryGuard(BUDGET, _MARGIN, _FULL, _ROW_BYTES, _RECOVERY_S * _CLOCK_RATE)
    caches = CacheGroup(
        guard,
        lambda: others(queue.now) + rows.held_tokens * _ROW_BYTES,
        lambda: queue.now * _CLOCK_RATE,
    )
    return GuardedDrafter(rows, caches)


class CheckedDrafter(WrappedDrafter):
    """A drafter that checks its cache at every step: it must hold the device's committed prefix and
    one path of its tree."""

    def __init__(self, inner: Drafter, tree: SpeculationTree) -> None:
        super().__init__(inner)
        self._tree, self._tokens = tree, list[int]()

    def step(
        self,
        keep_length: int,
        feed: Sequence[int],
        width: int,
        cancelled: Cancelled = never_cancelled,
    ) -> tuple[Candidate, ...]:
        kept = len(self._tokens)
        checks.require(keep_length <= kept, f"keeps {keep_length} of {kept}")
        self._tokens[keep_length:] = feed
        prefix = self._tree.prefix.tokens
        whole = self._tokens[: len(prefix)] == prefix
        checks.require(whole, "the draft's cache lacks the prefix")
        path = self._tokens[len(prefix) :]
        paths = [self._tree.path(node.id) for node in self._tree.nodes.values()]
        known = not path or path in paths
        checks.require(known, f"the draft's cache holds {path}, which is no path")
        return super().step(keep_length, feed, width, cancelled)


class InjectedFailure(Exception):
    """The exception that a world raises in a target or a session's machine."""


class WatchedEngine(VerifyEngine):
    """An engine that notes that it handled an event, for only then the checks have anything new to
    check."""

    handled = True

    def handle(self, event: EngineEvent, now: float) -> tuple[EngineAction, ...]:
        self.handled = True
        return super().handle(event, now)


class CheckedTarget(ToyTarget):
    """A toy target that passes every request to ``check``, and fails passes of several sessions.
    The toy's own memory checks that each block holds the content that its session expects.

    ``break_down`` is called before and after each operation and may raise ``InjectedFailure``.
    """

    check: checks.PassCheck

    def __init__(
        self,
        model: ToyModel,
        cache: CacheShape | None,
        fails: Callable[[], bool],
        break_down: Callable[[], None],
    ) -> None:
        super().__init__(model, cache=cache)
        self._fails, self._break_down = fails, break_down

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        self._break_down()
        super().open(key, prompt_length, sampling, text)
        self._break_down()

    def forward(self, batch: Sequence[PassRequest]) -> list[PassResult]:
        self.check.check(batch)
        if len(batch) > 1 and self._fails():
            raise CapacityError(f"a pass of {len(batch)} sessions was chosen to fail")
        self._break_down()
        try:
            results = super().forward(batch)
        except ValueError as error:  # a wrong length, a wrong block, another text in a block
            raise checks.CheckFailure(f"the target refused a pass: {error}") from error
        self._break_down()
        return results

    def keep(self, key: str, nodes: Sequence[int]) -> None:
        self._break_down()
        super().keep(key, nodes)
        self._break_down()

    def close(self, key: str) -> None:
        super().close(key)
        self._break_down()


class CheckedDraftModel(ServerDraftModel):
    """A verifier's draft model that checks its caches: they must hold the session's text, and the
    tokens that were fed after it. ``break_down`` may raise; ``refuses`` returns whether room is
    missing."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        step_s: Callable[[int], float],
        texts: Mapping[str, VerifySession],
        guessed: set[tuple[int, ...]],
        refuses: Callable[[], bool],
        break_down: Callable[[], None],
    ) -> None:
        super().__init__(make, step_s)
        self._texts, self._guessed, self._refuses = texts, guessed, refuses
        self._break_down = break_down
        self._held: dict[str, list[int]] = {}
        self._lost: set[str] = set()
        """Sequences that were refused a part of a prompt. Before the next step they look the same
        as successful ones."""

    def open(
        self, key: str, prompt_length: int, sampling: SamplingParams, text: Sequence[int] = ()
    ) -> None:
        super().open(key, prompt_length, sampling, text)
        self._held[key] = []
        self._lost.discard(key)

    def step(self, batch: Sequence[DraftStep]) -> list[tuple[Candidate, ...]]:
        self._break_down()
        keys = {step.key for step in batch}
        checks.require(0 < len(keys) == len(batch), "a draft step is empty, or has one twice")
        guesses = super().step(batch)
        self._break_down()
        return guesses

    def _step_one(self, step: DraftStep) -> tuple[Candidate, ...]:
        key, held = step.key, self._held[step.key]
        prefix = self._texts[key].prefix.tokens
        kept, known = step.keep_length, len(held)
        if kept > known and key in self._lost:
            self._lost.discard(key)
            return ()
        checks.require(kept <= known, f"{key}: the draft keeps {kept} of {known}")
        held[kept:] = step.feed
        shared = min(len(held), len(prefix))
        fine = held[:shared] == prefix[:shared]
        checks.require(fine, f"{key}: the draft's cache holds another text")
        whole = not step.guess or len(held) >= len(prefix)
        checks.require(whole, f"{key}: a guess is wanted behind {len(held)} of {len(prefix)}")
        if self._refuses():
            held.clear()
            self._sequences[key].truncate(0)
            if not step.guess:
                self._lost.add(key)
            return ()
        guesses = super()._step_one(step)
        for guess in guesses:
            text = (*held, guess.token)
            self._guessed.update(text[:end] for end in range(len(prefix) + 1, len(text) + 1))
        return guesses


@dataclass(frozen=True, slots=True)
class FragileRule:
    """The exact rule, which may raise in the middle of a session's event."""

    break_down: Callable[[], None]

    def walk(
        self, tokens: Sequence[int], parents: Sequence[int], targets: Sequence[int], *_: Any
    ) -> Walk:
        self.break_down()
        return ExactRule().walk(tokens, parents, targets)


@dataclass(frozen=True, slots=True)
class FragileRunAhead:
    """A run-ahead policy that may raise when a session is offered a pass."""

    inner: RunAheadPolicy
    break_down: Callable[[], None]

    def __call__(self, view: RunAheadView) -> float:
        self.break_down()
        return self.inner(view)


# Worlds end well or not at all: their devices never give up.
_RECONNECT = ReconnectPolicy(0.05, 0.4, give_up_first_s=1e6, give_up_s=1e6, answer_s=2.0)

_FORGED_ID = 1 << 40

_LOOK_S = 0.1

# Twenty times the events of the longest world, to stop a world that loops without moving its clock.
_EVENTS_MAX = 40_000


def run_world(options: WorldOptions, seed: int) -> WorldResult:
    """Play one world to its end. Raises ``CheckFailure`` at the first violation; any other
    exception is a bug too."""
    return _World(options, random.Random(seed)).run()


class _JitteryPath:
    """A path that delays each message by a random time, in order."""

    def __init__(
        self, queue: EventQueue, delay_s: float, jitter_s: float, dice: random.Random
    ) -> None:
        self._queue, self._delay_s, self._jitter_s, self._dice = queue, delay_s, jitter_s, dice
        self._last_s = 0.0

    def send(self, size_bytes: int, deliver: Callable[[], None]) -> None:
        at = self._queue.now + self._delay_s + self._dice.uniform(0.0, self._jitter_s)
        self._last_s = max(self._last_s, at)
        self._queue.at(self._last_s, deliver)


class _Doubling(Stream):
    """A stream on which drafts and commits arrive twice if ``twice`` holds; the repeats must do no
    harm."""

    twice: Callable[[], bool]

    def send_up(self, message: m.Uplink) -> None:
        super().send_up(message)
        if isinstance(message, m.Draft) and self.twice():
            super().send_up(message)

    def send_down(self, message: m.Downlink) -> None:
        super().send_down(message)
        if isinstance(message, m.Commit) and self.twice():
            super().send_down(message)


@dataclass(slots=True)
class _PassTime:
    """A machine that does one pass at a time and nothing else."""

    queue: EventQueue
    pass_s: Callable[[tuple[PassRequest, ...]], float]

    def run(self, requests: tuple[PassRequest, ...], done: Callable[[], None]) -> None:
        self.queue.after(self.pass_s(requests), done)

    def draft(self, keys: Sequence[str], seconds: float, done: Callable[[], None]) -> None:
        self.queue.after(seconds, done)


class _World:
    def __init__(self, options: WorldOptions, dice: random.Random) -> None:
        self.options, self.dice, self.queue = options, dice, EventQueue()
        self.records: dict[str, checks.StreamRecord] = {}
        self.targets: list[ToyTarget] = []
        self.engines: list[WatchedEngine] = []
        self.faults = 0
        self.down_until_s = 0.0
        self.kept = KeptPrefixes(b"world", least_tokens=1) if options.names_prefixes else None
        self.streams: list[Stream] = []
        self.server = self._start_verifier()
        size, sampling = options.model.vocabulary_size, options.sampling
        self.expected: list[checks.Expected] = []
        self.devices: list[SimulatedDevice] = []
        self.replaced: set[int] = set()
        """Indices of devices whose process was replaced."""
        for index in range(len(options.policies)):
            prompt = self._prompt(index, size)
            mine = replace(sampling, seed=sampling.seed + index)
            context_length = options.limits.context_length
            self.expected.append(checks.target_stream(options.model, prompt, mine, context_length))
            request = m.Open(
                session_id=f"device {index}",
                model="",
                vocabulary="",
                prompt=tuple(prompt),
                sampling=mine,
                run_ahead=options.run_ahead,
                drafting=options.drafting,
            )
            self.devices.append(self._start_device(index, request))
        self.ended_s = [0.0] * len(self.devices)
        self.device_checks = [
            checks.DeviceCheck(one, options.limits, text=options.device_text)
            for one in self.expected
        ]

    # --- parts -----------------------------------------------------------------------------

    def _start_verifier(self) -> SimulatedVerifier:
        options = self.options
        bounds = options.engine_limits
        target = CheckedTarget(
            options.model,
            bounds.cache,
            lambda: self._happens(options.batch_failure_chance),
            self._make_breakdown(options.target_failure_chance),
        )
        self.targets.append(target)
        fragile = self._make_breakdown(options.session_failure_chance)
        engine = WatchedEngine(
            target.info,
            options.limits,
            bounds,
            lambda rule: FragileRule(fragile),
            lambda kind: FragileRunAhead(RUN_AHEAD[kind], fragile),
            contain=options.session_failure_chance > 0,
        )
        guessed: set[tuple[int, ...]] = set()
        target.check = checks.PassCheck(
            engine.sessions, self.records, options.limits, bounds, guessed
        )
        drafter = self._draft_model(engine, guessed)
        compute = _PassTime(self.queue, self._pass_s)
        checks.EntryCheck(engine)
        self.engines.append(engine)
        return SimulatedVerifier(self.queue, engine, target, compute, drafter=drafter)

    def _draft_model(
        self, engine: VerifyEngine, guessed: set[tuple[int, ...]]
    ) -> CheckedDraftModel | None:
        options, make = self.options, self.options.server_drafter
        if make is None:
            return None
        return CheckedDraftModel(
            lambda: make(options.model),
            lambda rows: options.server_step_s + options.row_s * rows,
            engine.sessions,
            guessed,
            lambda: self._happens(options.refusal_chance),
            self._make_breakdown(options.drafter_failure_chance),
        )

    def _pass_s(self, requests: tuple[PassRequest, ...]) -> float:
        rows = sum(request.row_count for request in requests)
        return self.options.pass_s + self.options.row_s * rows

    def _start_device(self, index: int, request: m.Open) -> SimulatedDevice:
        options = self.options
        session = DraftSession(
            request,
            options.policies[index],
            _RECONNECT,
            options.draft_context_length,
            jitter_seed=self.dice.getrandbits(32),
            text=self._list_texts(index) if options.device_text else None,
            prediction=self._predict(index),
            kept=self.kept,
        )
        inner = CheckedDrafter(options.drafter(options.model), session.tree)
        drafter = guard_drafter(inner, options, self.queue)
        device = SimulatedDevice(
            self.queue,
            session,
            drafter,
            lambda kept, fed: options.step_s,
            lambda: self._connect(index),
        )
        device.delivery.tokens.extend(request.committed)
        self.queue.after(self.dice.uniform(0.0, 0.1), lambda: self._begin(index, device))
        return device

    def _list_texts(self, index: int) -> TextTables:
        """Return the tables of a device's user, the same for each process that takes its place. Of
        three devices two have earlier texts, which are right or wrong in every way."""
        expected, size = self.expected[index], self.options.model.vocabulary_size
        dice = random.Random(f"earlier texts of {expected.prompt} {index}")
        tables = TextTables(ngrams=True, earlier=EarlierTexts(dice.choice((128, 4096))))
        assert tables.earlier is not None
        for kind in dice.choices(tuple(PredictionKind), k=dice.choice((0, 1, 3))):
            text = (*expected.prompt[-dice.randrange(1, 4) :], *expected.tokens)
            tables.earlier.add([one % size for one in predict(kind, text, size, dice)])
        return tables

    def _predict(self, index: int) -> tuple[int, ...]:
        """Return the prediction of a device, the same for each process that takes its place.

        A draft model has the ids of its vocabulary alone, so what is beyond reaches only the
        verifier, from a device without a draft model."""
        options, expected = self.options, self.expected[index]
        if options.prediction is None:
            return ()
        size, dice = options.model.vocabulary_size, random.Random(f"{index} {expected.prompt}")
        found = predict(options.prediction, expected.tokens, size, dice)
        has_model = options.draft_context_length > 0
        return tuple([token for token in found if token < size]) if has_model else found

    def _prompt(self, index: int, vocabulary_size: int) -> list[int]:
        """Return the shared beginning, or the text of the device before, and tokens of its own."""
        options = self.options
        prompt = [self.dice.randrange(vocabulary_size) for _ in range(options.prompt_length)]
        if not index:
            return prompt
        before = self.expected[index - 1]
        text = (*before.prompt, *before.tokens)
        if options.chat and len(text) + len(prompt) < options.limits.context_length:
            return [*text, *prompt]
        shared = options.shared_length
        return [*self.expected[0].prompt[:shared], *prompt[shared:]]

    def _begin(self, index: int, device: SimulatedDevice) -> None:
        """Start the device, or try again soon if the text that it continues is not complete."""
        waits = self.options.chat and index and self.devices[index - 1].delivery.ended is None
        if waits and device is self.devices[index]:
            self.queue.after(_LOOK_S, lambda: self._begin(index, device))
        else:
            device.start()

    def _connect(self, index: int) -> tuple[Stream, float] | None:
        if self.queue.now < self.down_until_s:
            return None
        delay_s, jitter_s = self.options.delay_s, self.options.jitter_s
        stream = _Doubling(
            self.queue,
            _JitteryPath(self.queue, delay_s, jitter_s, self.dice),
            _JitteryPath(self.queue, delay_s, jitter_s, self.dice),
        )
        stream.twice = lambda: self._happens(self.options.duplicate_chance)
        credentials = self.options.credentials
        self.server.accept(stream, credentials[index % len(credentials)])
        self.streams.append(stream)
        deliver, record = stream.to_verifier, checks.StreamRecord(self.expected[index])

        def receive(message: m.Uplink) -> None:
            match message:
                case m.Open():
                    if (before := self.records.get(message.session_id)) is not None:
                        record.drafted |= before.drafted
                    self.records[message.session_id] = record
                    record.received = message.prompt_length + message.committed_length
                case m.Draft():
                    record.note(message)
                case m.Received(position):
                    record.received = max(record.received, position)
            deliver(message)
            if isinstance(message, m.Draft) and self._happens(self.options.forge_chance):
                self.faults += 1
                forged = self._forge(message)
                record.drafted.update(forged.tokens)
                deliver(forged)
                for session in self.server.engine.sessions.values():
                    fooled = max(session.inbox.tree.nodes, default=0) >= _FORGED_ID
                    checks.require(not fooled, "a draft on another text was taken")

        stream.to_verifier = receive
        return stream, 2 * delay_s

    def _forge(self, draft: m.Draft) -> m.Draft:
        """Return a draft on another text, on tokens not committed yet, or with unknown parents."""
        token = self.dice.randrange(self.options.model.vocabulary_size)
        far = self.dice.randrange(5, 100)
        return self.dice.choice(
            (
                m.Draft(_FORGED_ID, (0,), (token,), draft.base_position, draft.base_hash ^ 1),
                m.Draft(_FORGED_ID, (0,), (token,), draft.base_position + far, 0),
                m.Draft(draft.first_node_id, (_FORGED_ID, _FORGED_ID), (token, 0)),
                m.Draft(draft.first_node_id, (0,), (token,), 0, 0),
            )
        )

    # --- faults ----------------------------------------------------------------------------

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.queue.now < self._faults_end_s and self.dice.random() < chance

    def _make_breakdown(self, chance: float) -> Callable[[], None]:
        def maybe_raise() -> None:
            if self._happens(chance):
                self.faults += 1
                raise InjectedFailure("chosen to fail")

        return maybe_raise

    @property
    def _faults_end_s(self) -> float:
        return self.options.faults_until_s

    def _schedule_faults(self) -> None:
        options = self.options
        for index in range(len(self.devices)):
            for _ in range(options.cuts):
                self._schedule_once(lambda index=index: self._cut(self.devices[index]))  # type: ignore[misc]
            for _ in range(options.replacements):
                self._schedule_once(lambda index=index: self._replace(index))  # type: ignore[misc]
        for _ in range(options.restarts):
            self._schedule_once(self._restart)

    def _schedule_once(self, fault: Callable[[], None]) -> None:
        self.queue.at(self.dice.uniform(0.0, self.options.faults_until_s), fault)

    def _cut(self, device: SimulatedDevice) -> None:
        if device.stream is not None:
            self.faults += 1
            device.stream.cut(self.dice.uniform(0.0, 0.1), self.dice.uniform(0.0, 0.5))

    def _replace(self, index: int) -> None:
        """Replace the process without closing its stream; the new one holds only the
        delivered tokens."""
        device = self.devices[index]
        if device.delivery.ended is not None:
            return
        self.faults += 1
        session = device.session
        session.link.state, session.link.deadline = LinkState.DONE, None
        if device.stream is not None:
            device.stream.cut(0.0, self.dice.uniform(0.0, 0.5))
            device.stream = None
        held = tuple(device.delivery.tokens)
        self.devices[index] = self._start_device(index, replace(session.request, committed=held))
        self.replaced.add(index)

    def _restart(self) -> None:
        """Let another verifier take over, without any state of the old one."""
        self.faults += 1
        self.down_until_s = self.queue.now + self.dice.uniform(0.0, self.options.downtime_s)
        self.server.halt()
        self.server = self._start_verifier()
        for stream in self.streams:
            stream.cut(self.dice.uniform(0.0, 0.1), 0.0)

    # --- play ------------------------------------------------------------------------------

    def run(self) -> WorldResult:
        for device in self.devices:
            checks.require(device.delivery.ended is None, "ended before it began")
        self._schedule_faults()
        until_s = self._longest_s()
        events = 0
        while not self._all_ended() and self.queue.step(until_s):
            events += 1
            checks.require(events <= _EVENTS_MAX, f"{events} events, and no end")
            if self.server.gave_up is not None:
                self._restart()  # like a supervisor
            self._check_step()
        self._check_end(until_s)
        self.queue.run(self.queue.now + self.options.limits.lease_s + 2.0)
        self._check_nothing_left()
        results = (
            DeviceResult(expected, device.session.counters, ended_s)
            for expected, device, ended_s in zip(
                self.expected, self.devices, self.ended_s, strict=True
            )
        )
        passes = sum(target.passes for target in self.targets)
        rows = sum(target.rows for target in self.targets)
        cache_scheduler = self.server.engine.cache_scheduler
        drafts = [engine.draft_counts for engine in self.engines]
        return WorldResult(
            tuple(results),
            passes,
            rows,
            self.faults,
            cache_scheduler.evictions,
            cache_scheduler.prefix_hit_tokens,
            sum(one.model.nodes for one in drafts),
            sum(one.model.accepted for one in drafts),
            sum(one.failures for one in drafts),
            sum(engine.prefixes.found_tokens for engine in self.engines),
            sum(engine.prefixes.missed for engine in self.engines),
        )

    def _longest_s(self) -> float:
        """Return the virtual seconds by which everything must have ended. They are far too few for
        a verifier that waits for a draft in vain (``never_run_ahead``) at every other token."""
        options = self.options
        count = len(self.devices)
        rtt_s = 2 * (options.delay_s + options.jitter_s)
        pass_s = options.pass_s + 10 * count * options.row_s
        if options.server_drafter is not None:  # a round before each pass
            pass_s += LONGEST_CHAIN * (options.server_step_s + count * options.row_s)
        token_s = 2 * rtt_s + (count + 3) * pass_s + 40 * options.step_s
        tokens = sum(len(expected.tokens) for expected in self.expected)
        prompts = sum(len(expected.prompt) for expected in self.expected)
        prefill_s = prompts * pass_s
        settled_s = 1.0 if options.quiet else options.faults_until_s + options.downtime_s + 5.0
        if options.engine_limits.cache is not None:  # they take turns, and recompute lost rows
            token_s *= 2 * count
        rates = [one.tokens_per_s for one in options.credentials if one.tokens_per_s]
        if rates:
            settled_s += 2 * tokens / min(rates)
        own = any(one.max_sessions for one in options.credentials)
        if own or options.engine_limits.max_sessions < count:  # the others try again every second
            settled_s += (options.limits.lease_s + 1.0) * count
        return settled_s + prefill_s + (tokens + 2) * token_s

    def _all_ended(self) -> bool:
        return all(device.delivery.ended is not None for device in self.devices)

    def _check_step(self) -> None:
        engine, limits = self.engines[-1], self.options.limits
        handled, engine.handled = engine.handled, False
        if handled:
            checks.check_ledger(engine)
            checks.check_credentials(engine)
        evictable = bool(self.options.engine_limits.cache or self.options.target_failure_chance)
        for index, (device, expected) in enumerate(zip(self.devices, self.expected, strict=True)):
            mine, whose = device.session, device.session.request.session_id
            if device.delivery.ended is None:
                self.ended_s[index] = self.queue.now
            self.device_checks[index].look(mine, device.delivery.tokens, index in self.replaced)
            session = engine.sessions.get(whose)
            if session is None:
                continue
            if handled:
                checks.check_session(session, expected, limits, evictable=evictable)
            ahead = session.prefix.length - mine.prefix.length
            if ahead < 0:
                raise checks.CheckFailure(f"{whose}: {-ahead} tokens ahead of the verifier")

    def _check_end(self, until_s: float) -> None:
        for device, expected in zip(self.devices, self.expected, strict=True):
            whose, ended = device.session.request.session_id, device.delivery.ended
            match ended:
                case None:
                    held = f"{len(device.delivery.tokens)} of {len(expected.tokens)} tokens"
                    raise checks.CheckFailure(f"{whose}: has {held} after {until_s:.1f} s")
                case Fail(why):
                    raise checks.CheckFailure(f"{whose}: failed: {why}")
                case Finish(reason):
                    checks.require(reason is expected.reason, f"{whose}: ended with {reason}")
            whole = tuple(device.delivery.tokens) == expected.tokens
            checks.require(whole, f"{whose}: ended with {len(device.delivery.tokens)} tokens")

    def _check_nothing_left(self) -> None:
        checks.check_at_rest(self.server.engine)
        for device in self.devices:
            key = device.session.request.session_id
            try:
                self.targets[-1]._sequence(key)
            except ValueError:
                continue
            raise checks.CheckFailure(f"{key}: its sequence is still open")
