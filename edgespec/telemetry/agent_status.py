"""What an agent does at one moment, as plain values for a page, the chat or a metric.

A status is bounded however long an agent runs, and holds no prompt and no text: addresses, counts,
times and reasons only. All times are seconds; those named ``at_s`` are of the agent's own clock,
whose value at the moment of the status is ``clock_s``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from edgespec.core.protocol.checks import one_line
from edgespec.core.protocol.messages import EXACT_RULE, DraftTotals, VerifierInfo
from edgespec.telemetry.metric_table import metrics
from edgespec.telemetry.trace import plain

FORMAT: Final = "edgespec-agent-status"
VERSION: Final = 1
MAX_GENERATIONS: Final = 32
"""Running generations that a status lists; ``running`` counts all."""
MAX_EVENTS: Final = 4096
"""Events of the timeline that are kept: ten seconds of four kinds, folded every 10 ms."""


class VerifierState(Enum):
    UNKNOWN = "unknown"
    """It was not asked yet."""
    CONNECTING = "connecting"
    READY = "ready"
    """It answered when it was last asked; no generation runs there."""
    SERVING = "serving"
    """A generation runs there."""
    AWAY = "away"
    """It cannot be reached."""
    REFUSES = "refuses"
    """It is there and lets us not in, or it is not who it should be."""
    MISFIT = "misfit"
    """It serves a model that this device cannot use."""


class EventKind(Enum):
    DRAFT = "draft"
    """A draft step ended: ``took_s``, and ``count`` guesses."""
    SEND = "send"
    """``count`` draft nodes left."""
    PASS = "pass"
    """The verifier ended a pass that took ``took_s`` and looked at ``count`` draft nodes; noted
    when its commit came, so half a round trip late."""
    COMMIT = "commit"
    """``count`` tokens came, ``accepted`` of them were drafted here, ``served`` by the verifier."""
    LINK = "link"
    """The link came up (``count`` 1) or broke (0)."""


@dataclass(slots=True)
class TimelineEvent:
    """Something that happened to the generation ``generation`` (0: to several). ``number`` counts
    all events. One may stand for several of its kind that ended within 10 ms of the first: then
    ``at_s`` is the end of the last, ``took_s`` reaches back to the beginning of the first, and the
    counts are sums."""

    number: int
    at_s: float
    generation: int
    kind: EventKind
    count: int = 0
    accepted: int = 0
    served: int = 0
    took_s: float = 0.0
    events: int = 1
    """For how many it stands."""


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """One verifier. What it never told is None."""

    address: str
    state: VerifierState = VerifierState.UNKNOWN
    since_s: float | None = None
    """For how long it has been in this state; ``ready`` and ``serving`` count as one."""
    why: str = ""
    """Why it cannot be used; empty: it can."""
    model: str = ""
    adapters: tuple[str, ...] = ()
    context_length: int | None = None
    """Prompt plus output of its own model, in tokens."""
    rtt_s: float | None = None
    pass_s: float | None = None
    sessions: int | None = None
    max_sessions: int | None = None
    drafts: DraftTotals | None = None
    """Who drafted what there, for all its devices."""

    def told(self, info: VerifierInfo) -> VerifierStatus:
        """The same with what the verifier says of itself."""
        return replace(
            self,
            model=one_line(info.model.name),
            adapters=tuple(one_line(one.name) for one in info.adapters),
            context_length=info.limits.context_length or info.model.context_length,
            pass_s=info.pass_us / 1e6 or None,
            sessions=info.sessions,
            max_sessions=info.max_sessions or None,
            drafts=info.drafts,
        )


@dataclass(frozen=True, slots=True)
class GenerationStatus:
    number: int
    link: str
    """The state of its session, such as ``streaming`` or ``backing_off``."""
    verifier: str
    age_s: float
    quiet_s: float
    """Since its last token, or since it began."""
    prompt_tokens: int
    tokens: int
    tokens_per_s: float | None
    """After the first commit; None before the second."""
    acceptance: float | None
    drafting: bool
    accepted: int
    sent: int
    passes: int
    reconnects: int
    model: str = ""
    """The model or adapter that it is of, as its verifier names it; before one has answered as it
    was asked for, and empty where it was asked for none."""
    rule: str = EXACT_RULE
    """By which drafts are accepted; with any but this one the text is LOSSY."""


@dataclass(frozen=True, slots=True)
class AgentTotals:
    """Counts since the agent was made, running generations included."""

    generations: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    accepted: int = 0
    corrected: int = 0
    steps: int = 0
    sent: int = 0
    stale: int = 0
    passes: int = 0
    rows: int = 0
    tried: int = 0
    hits: int = 0
    reconnects: int = 0
    draft_failures: int = 0
    """Generations whose drafter failed."""

    @property
    def acceptance(self) -> float | None:
        return self.hits / self.tried if self.tried else None

    @property
    def ended(self) -> dict[str, int]:
        return {"finished": self.finished, "failed": self.failed, "cancelled": self.cancelled}


@dataclass(frozen=True, slots=True)
class DraftingStatus:
    """Whether drafting is worth its cost now, and the numbers that say so."""

    worth: bool | None
    """None: there is nothing to judge by yet."""
    why: str
    acceptance: float | None = None
    """Of the generation that is judged; None until a draft of it was."""
    least_chance: float = 0.0
    """The verifier's price: a less likely node does not pay for its row."""
    credit: int | None = None
    """Nodes that the verifier takes now; None: as many as its limits say."""
    step_s: float | None = None
    tokens_per_pass: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """``budget_bytes`` and ``window`` are None without a budget; ``resting``: the guard has taken
    everything from the draft."""

    resident_bytes: int
    budget_bytes: int | None = None
    window: int | None = None
    width: int | None = None
    resting: bool = False


@dataclass(frozen=True, slots=True)
class AgentStatus:
    version: str
    clock_s: float
    uptime_s: float
    running: int
    tokens_per_s: float
    """Of all generations, over the last seconds."""
    verifiers: tuple[VerifierStatus, ...]
    generations: tuple[GenerationStatus, ...]
    totals: AgentTotals
    drafting: DraftingStatus
    memory: MemoryStatus
    events: tuple[TimelineEvent, ...] = ()
    last_event: int = 0
    """The number of the newest event, to ask for those behind it."""
    lost_events: int = 0
    """Of those behind the number that was asked for, how many are not kept any more."""
    draft: str = ""
    """The name of the draft model; empty without."""
    policy: str = ""

    @property
    def verifier(self) -> VerifierStatus | None:
        """The one that serves; else the first that is not away, else the first."""
        ranks = {VerifierState.SERVING: 0, VerifierState.READY: 1, VerifierState.CONNECTING: 2}
        return min(self.verifiers, key=lambda one: ranks.get(one.state, 3), default=None)

    @property
    def up(self) -> dict[str, float]:
        """By its address: 1 for a verifier that serves or is ready, else 0."""
        there = (VerifierState.READY, VerifierState.SERVING)
        return {one.address: float(one.state in there) for one in self.verifiers}

    @property
    def rtts_s(self) -> dict[str, float]:
        return {one.address: one.rtt_s for one in self.verifiers if one.rtt_s is not None}

    @property
    def passes_s(self) -> dict[str, float]:
        return {one.address: one.pass_s for one in self.verifiers if one.pass_s is not None}

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version_of_format": VERSION, **plain(self)}


METRICS_PREFIX: Final = "edgespec_agent_"
AGENT_METRICS: Final = metrics("""
gauge num_requests_running running Texts that are being generated
counter requests_started_total totals.generations Texts begun
counter requests_finished_total{reason} totals.ended Texts that ended
counter prompt_tokens_total totals.prompt_tokens Prompt tokens of the texts begun
counter generation_tokens_total totals.tokens Tokens that users were given
counter corrected_tokens_total totals.corrected Of these, where a draft sent was wrong
gauge tokens_per_second tokens_per_s Tokens a second of all texts, over the last five seconds
counter draft_steps_total totals.steps Draft steps that ended well
counter draft_failures_total totals.draft_failures Texts that lost their drafts to a failure
counter spec_decode_num_draft_tokens_total totals.sent Draft nodes sent
counter spec_decode_num_accepted_tokens_total totals.accepted Draft nodes that became tokens
counter stale_nodes_total totals.stale Draft nodes that the verifier dropped when they came
counter judged_positions_total totals.tried Positions decided while the draft had a guess there
counter first_choice_hits_total totals.hits Of these, those that its first choice won
counter passes_total totals.passes The verifier's passes for these texts, as far as it told
counter reconnects_total totals.reconnects Streams that were lost and tried again
gauge drafting_worth drafting.worth 1: drafts pay for their rows now; 0: they rest
gauge row_price drafting.least_chance The least chance that pays for a row; 0: any does
gauge verifier_up{verifier} up 1: it serves, or answered when it was last asked
gauge rtt_seconds{verifier} rtts_s Round trip to the verifier
gauge pass_seconds{verifier} passes_s Length of the verifier's passes
gauge memory_resident_bytes memory.resident_bytes Resident memory of the process
gauge memory_budget_bytes memory.budget_bytes What the process may take; absent without a budget
""")
