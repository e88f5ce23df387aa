"""Status of an agent at one moment, as plain values for a page, the chat or a metric.

A status has a bounded size however long an agent runs. It contains addresses, counts, times and
reasons, and never a prompt or an output. All times are seconds. Times named ``at_s`` are on the
agent's own clock, whose value at the moment of the status is ``clock_s``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from edgespec.core.protocol.checks import make_one_line
from edgespec.core.protocol.messages import EXACT_RULE, DraftTotals, VerifierInfo
from edgespec.telemetry.metric_table import parse_metrics
from edgespec.telemetry.trace import to_plain_data

FORMAT: Final = "edgespec-agent-status"
VERSION: Final = 1
MAX_GENERATIONS: Final = 32
"""Limit on the running generations that a status lists; ``running`` counts every one."""
MAX_EVENTS: Final = 4096
"""Limit on the kept events of the timeline: ten seconds of four kinds, one every 10 ms."""


class VerifierState(Enum):
    UNKNOWN = "unknown"
    """The verifier was not contacted yet."""
    CONNECTING = "connecting"
    READY = "ready"
    """The verifier answered the last probe, and no generation runs there."""
    SERVING = "serving"
    """A generation runs there."""
    AWAY = "away"
    """The verifier cannot be reached."""
    REFUSES = "refuses"
    """The verifier refuses this device, or its identity is not the expected one."""
    MISFIT = "misfit"
    """The verifier serves a model that this device cannot use."""


class EventKind(Enum):
    DRAFT = "draft"
    """A draft step ended. ``took_s`` is its duration, ``count`` the draft nodes that it made."""
    SEND = "send"
    """``count`` draft nodes were sent."""
    PASS = "pass"
    """The verifier finished a pass of ``took_s`` seconds over ``count`` draft nodes. The event is
    recorded when the pass's commit arrives, half a round trip late."""
    COMMIT = "commit"
    """``count`` tokens arrived. The device had drafted ``accepted`` of them, the verifier
    ``served``."""
    LINK = "link"
    """The link was established (``count`` 1) or broke (0)."""


@dataclass(slots=True)
class TimelineEvent:
    """Something that happened to the generation ``generation``, or to several (0). ``number``
    counts all events.

    One event may stand for several of its kind that ended within 10 ms of the first. Then ``at_s``
    is the end of the last, ``took_s`` reaches back to the beginning of the first, and the counts
    are sums."""

    number: int
    at_s: float
    generation: int
    kind: EventKind
    count: int = 0
    accepted: int = 0
    served: int = 0
    took_s: float = 0.0
    events: int = 1
    """Number of events that this one stands for."""


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """Status of one verifier. Values that it never reported are None."""

    address: str
    state: VerifierState = VerifierState.UNKNOWN
    since_s: float | None = None
    """Seconds in this state; ``ready`` and ``serving`` count as one state."""
    why: str = ""
    """Reason why the verifier cannot be used; empty if it can."""
    model: str = ""
    adapters: tuple[str, ...] = ()
    context_length: int | None = None
    """Limit on prompt plus output of the verifier's own model, in tokens."""
    rtt_s: float | None = None
    pass_s: float | None = None
    sessions: int | None = None
    max_sessions: int | None = None
    drafts: DraftTotals | None = None
    """Draft nodes and accepted ones by draft source, for all devices of this verifier."""

    def with_info(self, info: VerifierInfo) -> VerifierStatus:
        """Return this status with the values that the verifier reports in ``info``."""
        return replace(
            self,
            model=make_one_line(info.model.name),
            adapters=tuple(make_one_line(one.name) for one in info.adapters),
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
    """State of the generation's session, such as ``streaming`` or ``backing_off``."""
    verifier: str
    age_s: float
    quiet_s: float
    """Seconds since the last token, or since the generation began."""
    prompt_tokens: int
    tokens: int
    tokens_per_s: float | None
    """Tokens a second after the first commit; None before the second."""
    acceptance: float | None
    drafting: bool
    accepted: int
    sent: int
    passes: int
    reconnects: int
    model: str = ""
    """Name of the model or adapter, as its verifier reports it. Until a verifier has answered it is
    the requested name, which may be empty."""
    rule: str = EXACT_RULE
    """Rule by which drafts are accepted. With any other than ``exact`` the output is LOSSY."""


@dataclass(frozen=True, slots=True)
class AgentTotals:
    """Counts since the agent was created, running generations included."""

    generations: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    accepted: int = 0
    predicted_sent: int = 0
    """Draft nodes that were sent from predictions."""
    predicted_accepted: int = 0
    corrected: int = 0
    steps: int = 0
    sent: int = 0
    stale: int = 0
    passes: int = 0
    rows: int = 0
    tried: int = 0
    hits: int = 0
    reconnects: int = 0
    named_tokens: int = 0
    """Ids that were not sent, because a verifier had them."""
    prefix_misses: int = 0
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
    """Whether drafting pays for its cost now, with the numbers that decide it."""

    worth: bool | None
    """Whether drafting pays; None before there is anything to judge by."""
    why: str
    acceptance: float | None = None
    """Acceptance rate of the judged generation; None until one of its draft nodes was judged."""
    least_chance: float = 0.0
    """The verifier's price of a row: a draft node with a lower chance does not pay for its row."""
    credit: int | None = None
    """Draft nodes that the verifier accepts now; None: as many as its limits allow."""
    step_s: float | None = None
    tokens_per_pass: float | None = None
    tokens_per_s: float | None = None
    """Tokens a second of the judged generation after its first pass; None before its second."""
    plain_tokens_per_s: float | None = None
    """Estimate of what plain streaming would have made (``core/device/streaming_speed.py``)."""
    lead: str = ""
    """Whether the draft model can be ahead of the verifier, by how much, and what would change it
    (``core/device/lead.py``). Empty until steps, passes and the round trip were timed."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory of the process. ``budget_bytes`` and ``window`` are None without a budget.
    ``resting``: the memory guard has withdrawn all memory from the draft."""

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
    """Tokens a second of all generations, over the last seconds."""
    verifiers: tuple[VerifierStatus, ...]
    generations: tuple[GenerationStatus, ...]
    totals: AgentTotals
    drafting: DraftingStatus
    memory: MemoryStatus
    events: tuple[TimelineEvent, ...] = ()
    last_event: int = 0
    """Number of the newest event; a later request passes it to get only newer ones."""
    lost_events: int = 0
    """Number of requested events that are no longer kept."""
    draft: str = ""
    """Name of the draft model; empty without one."""
    translated_share: float | None = None
    """Share of the target's words that are one word of the draft, for a draft with another
    tokenizer. None for a draft with the target's."""
    policy: str = ""

    @property
    def verifier(self) -> VerifierStatus | None:
        """Return the verifier that serves, else the first that is ready or connecting, else the
        first."""
        ranks = {VerifierState.SERVING: 0, VerifierState.READY: 1, VerifierState.CONNECTING: 2}
        return min(self.verifiers, key=lambda one: ranks.get(one.state, 3), default=None)

    @property
    def up(self) -> dict[str, float]:
        """Return 1 for each verifier that serves or is ready, else 0, by address."""
        there = (VerifierState.READY, VerifierState.SERVING)
        return {one.address: float(one.state in there) for one in self.verifiers}

    @property
    def rtts_s(self) -> dict[str, float]:
        return {one.address: one.rtt_s for one in self.verifiers if one.rtt_s is not None}

    @property
    def passes_s(self) -> dict[str, float]:
        return {one.address: one.pass_s for one in self.verifiers if one.pass_s is not None}

    def as_json(self) -> dict[str, Any]:
        return {"format": FORMAT, "version_of_format": VERSION, **to_plain_data(self)}


METRICS_PREFIX: Final = "edgespec_agent_"
AGENT_METRICS: Final = parse_metrics("""
gauge num_requests_running running Generations that run now
counter requests_started_total totals.generations Generations begun
counter requests_finished_total{reason} totals.ended Generations ended, by reason
counter prompt_tokens_total totals.prompt_tokens Prompt tokens of the generations begun
counter generation_tokens_total totals.tokens Tokens returned to users
counter corrected_tokens_total totals.corrected Tokens at positions where a sent draft was wrong
gauge tokens_per_second tokens_per_s Tokens a second of all generations, over five seconds
counter draft_steps_total totals.steps Draft steps completed
counter draft_failures_total totals.draft_failures Generations whose drafter failed
counter spec_decode_num_draft_tokens_total totals.sent Draft nodes sent
counter spec_decode_num_accepted_tokens_total totals.accepted Draft nodes accepted
counter prediction_nodes_total totals.predicted_sent Draft nodes sent from predictions
counter accepted_prediction_tokens_total totals.predicted_accepted Accepted nodes of predictions
counter stale_nodes_total totals.stale Draft nodes that arrived late or invalid and were dropped
counter judged_positions_total totals.tried Decided positions with a candidate of the draft
counter first_choice_hits_total totals.hits Positions where the draft's first candidate was right
counter passes_total totals.passes Verifier passes for this agent's generations, as reported
counter reconnects_total totals.reconnects Streams that were lost and opened again
counter named_tokens_total totals.named_tokens Token ids not sent, because the verifier had them
counter prefix_misses_total totals.prefix_misses Ids sent a trip late: the verifier lacked them
gauge drafting_worth drafting.worth 1 if drafting pays for its rows now, else 0
gauge row_price drafting.least_chance Least acceptance chance that pays for a row; 0: any does
gauge verifier_up{verifier} up 1 if the verifier serves or answered the last probe, else 0
gauge rtt_seconds{verifier} rtts_s Round-trip time to the verifier
gauge pass_seconds{verifier} passes_s Duration of the verifier's passes
gauge memory_resident_bytes memory.resident_bytes Resident memory of the process
gauge memory_budget_bytes memory.budget_bytes Memory budget; absent without one
""")
