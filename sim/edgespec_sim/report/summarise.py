"""A trace added up: one or both sides' lines as a ``RunSummary`` of one arm.

Device lines say what the user felt, verifier lines what the verifier was busy with. Without device
lines the times are those of the verifier, the link left out, and a note says so. Clocks of two
machines are never compared here: each duration is taken on one clock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final

from edgespec.telemetry.run_summary import (
    ArmSummary,
    GroupSummary,
    RequestRow,
    RunSummary,
    Series,
    VerifierSummary,
    spread_of,
)
from edgespec_sim.report.device_tally import DeviceTally, Request
from edgespec_sim.report.trace_lines import DEVICE, Line
from edgespec_sim.report.verifier_tally import ServedSession, VerifierTally

MAX_ROWS: Final = 300
_STEPS: Final = 60
_ONE_SIDE: Final = (
    "Only a verifier's trace was given: times are those at the verifier, the link left out."
)
_NO_VERIFIER: Final = "Only devices' traces were given: the verifiers' load is not known."
_DevicesOf = dict[str, DeviceTally]
_VerifiersOf = dict[str, VerifierTally]


def summarise(lines: Iterable[Line], name: str = "run", *, simulated: bool = False) -> RunSummary:
    """``name`` is that of the run and of its arm. Raises ``ValueError`` for a trace without a
    request."""
    devices: _DevicesOf = defaultdict(DeviceTally)
    verifiers: _VerifiersOf = defaultdict(VerifierTally)
    extent = _Extent()
    for line in lines:
        if line["side"] == DEVICE:
            extent.add(line["at_s"])
            devices[line["session"]].read(line)
        else:
            verifiers[line["session"]].read(line)
    duration_s = _duration_s(devices, verifiers, extent)
    requests = [(key, one) for key, tally in devices.items() for one in tally.requests]
    if requests:
        served_by = {key: of for of, verifier in verifiers.items() for key in verifier.sessions}
        whole = _whole([one for _, one in requests], duration_s)
        rows = tuple(
            _row(key, served_by.get(key, ""), one, requests[0][1].started_s)
            for key, one in requests[:MAX_ROWS]
        )
        notes = () if verifiers else (_NO_VERIFIER,)
    else:
        served = [(of, key, one) for of, v in verifiers.items() for key, one in v.sessions.items()]
        if not served:
            raise ValueError("the trace holds no request: no Start and no StreamOpened")
        whole = _whole_served([one for _, _, one in served], duration_s)
        rows = tuple(
            _served_row(of, key, one, served[0][2].opened_s) for of, key, one in served[:MAX_ROWS]
        )
        notes = (_ONE_SIDE,)
    arm = ArmSummary(
        arm=name,
        label="as traced",
        all=whole,
        groups={},
        verifiers=tuple(_load(of, tally, duration_s) for of, tally in verifiers.items()),
        bounds={},
        series=tuple(_series(devices, verifiers, duration_s)),
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


class _Extent:
    """First and last moment on one clock."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0

    def add(self, at_s: float) -> None:
        self.first_s = at_s if self.first_s is None else min(at_s, self.first_s)
        self.last_s = max(at_s, self.last_s)

    @property
    def length_s(self) -> float:
        return 0.0 if self.first_s is None else self.last_s - self.first_s


def _duration_s(devices: _DevicesOf, verifiers: _VerifiersOf, extent: _Extent) -> float:
    """Devices may be on machines with clocks of their own; verifiers are taken to share one."""
    if not verifiers:
        return extent.length_s
    whole = _Extent()
    for verifier in verifiers.values():
        whole.add(verifier.first_s or 0.0)
        whole.add(verifier.last_s)
    longest_s = max(
        (one.ended_s - one.started_s for tally in devices.values() for one in tally.requests),
        default=0.0,
    )
    return max(whole.length_s, longest_s)


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


def _whole_served(sessions: Sequence[ServedSession], duration_s: float) -> GroupSummary:
    tokens = sum(one.tokens for one in sessions)
    done = [one for one in sessions if one.finished]
    firsts = [_ttft_s(one) for one in done]
    tpots = [_tpot_s(one) for one in done]
    return GroupSummary(
        requests=len(done),
        failed=len(sessions) - len(done),
        tokens=tokens,
        ttft_s=spread_of([value for value in firsts if value is not None]),
        tpot_s=spread_of([value for value in tpots if value is not None]),
        itl_s=spread_of([gap for one in sessions for gap in one.gaps_s]),
        tokens_per_second=_per(tokens, duration_s),
        tokens_per_pass=_per(tokens, sum(one.passes for one in sessions)),
        acceptance=None,
        wasted_per_token=0.0,
        up_bytes_per_token=0.0,
        down_bytes_per_token=0.0,
        reconnects=0,
    )


def _served_row(verifier: str, device: str, one: ServedSession, zero_s: float) -> RequestRow:
    return RequestRow(
        device=device,
        verifier=verifier,
        started_s=one.opened_s - zero_s,
        ttft_s=_ttft_s(one),
        tpot_s=_tpot_s(one),
        tokens=one.tokens,
        tokens_per_pass=_per(one.tokens, one.passes),
        acceptance=None,
        failed="" if one.finished else "not finished at the verifier",
    )


def _ttft_s(one: ServedSession) -> float | None:
    return None if one.first_s is None else one.first_s - one.opened_s


def _tpot_s(one: ServedSession) -> float | None:
    if one.first_s is None or one.last_s is None or one.tokens < 2:
        return None
    return (one.last_s - one.first_s) / (one.tokens - 1)


def _load(name: str, tally: VerifierTally, duration_s: float) -> VerifierSummary:
    return VerifierSummary(
        name=name or "verifier",
        utilisation=_per(sum(end_s - start_s for start_s, end_s in tally.busy), duration_s),
        passes=tally.passes,
        rows_per_pass=_per(tally.rows, tally.passes),
        sessions_per_pass=_per(tally.sessions_in_passes, tally.passes),
        queue_s=spread_of(tally.queues_s),
    )


def _series(devices: _DevicesOf, verifiers: _VerifiersOf, duration_s: float) -> Iterable[Series]:
    """Tokens a second, on the verifiers' clock if there is one."""
    commits = [commit for verifier in verifiers.values() for commit in verifier.commits]
    what = "tokens committed" if commits else "tokens delivered"
    times = commits or [one for tally in devices.values() for one in tally.deliveries]
    if not times or duration_s <= 0.0:
        return
    step_s = duration_s / _STEPS
    zero_s = min(
        [v.first_s for v in verifiers.values() if v.first_s is not None]
        if commits
        else [one.started_s for tally in devices.values() for one in tally.requests]
    )
    counts = [0] * _STEPS
    for at_s, tokens in times:
        counts[min(int((at_s - zero_s) / step_s), _STEPS - 1)] += tokens
    yield Series(what, "tokens/s", step_s, tuple(count / step_s for count in counts))


def _per(amount: float, of: float) -> float:
    return amount / of if of else 0.0
