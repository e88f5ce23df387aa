"""``edgespec profile``: measures a real run and fits the laws of its times to both sides' traces.

Theory of operation. Traces record when each operation began and ended: a draft step from its
``StartStep`` to the next ``StepDone`` of the session, a pass from ``RunBatch`` to ``BatchDone``, a
message from ``Transmit`` or ``SendTo`` to its arrival at the other side. Each operation becomes a
sample of (rows, cached tokens, sessions, seconds). A law is fitted to the samples of each kind in
four steps: the cost of a cached token, the cost of a further session, the median at each number of
rows, and the scatter of the samples around the result.

Both traces must be on one clock, like those of two processes on one Linux machine
(``time.monotonic`` is CLOCK_MONOTONIC, which counts from the machine's start). A message that
arrives before it was sent is an error.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from edgespec.bench import report
from edgespec.bench.measurement import LentDrafter
from edgespec.bench.prompts import DEFAULT_PROMPTS
from edgespec.bench.runner import BenchProgress
from edgespec.cli.bench import fetch_verifier_info
from edgespec.cli.options import option
from edgespec.cli.running import reporting_errors, run
from edgespec.cli.verifier import PLAIN_STREAMING, verifier_process
from edgespec.config import AgentConfig, ConfigError, DraftSection
from edgespec.config.files import temporary_folder, write_output
from edgespec.core.device.comparison_policies import FixedPolicy, PearlPolicy, WindowedPolicy
from edgespec.core.ports import Drafter
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device import build
from edgespec.device.agent import Agent, AgentOptions
from edgespec.telemetry.trace import TraceFile
from edgespec_sim.cost_profile import CostProfile, ProfileError, TimeLaw, constant_law
from edgespec_sim.report.timeline import TraceLine, read_lines

QUANTILES = 21

# The slowest hundredth is due to the machine (other programs, paging), not to the operation.
_CLIP_PERCENT = 99

# Above 8 rows, neighbouring numbers of rows share a median: each bin is a third wider than the
# last.
_EXACT_ROWS, _BIN_GROWTH = 8, 1.33
_LEAST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured operation."""

    rows: int
    context_length: int
    seconds: float
    sessions: int = 1


@dataclass(slots=True)
class Samples:
    """All operations found in a pair of traces."""

    draft_steps: list[Sample] = field(default_factory=list)
    passes: list[Sample] = field(default_factory=list)
    messages: list[Sample] = field(default_factory=list)
    """Messages sent while no other session was open. With several sessions, messages also wait for
    the one machine that plays all devices. If there were always several, this holds all
    messages."""
    turnarounds: list[Sample] = field(default_factory=list)
    connects: list[float] = field(default_factory=list)
    """Seconds from asking for a stream until the verifier has its first message."""


def collect_samples(device: Iterable[TraceLine], verifier: Iterable[TraceLine]) -> Samples:
    """Collect the operations of a run from its two traces. Raises ``ProfileError`` if they are not
    of one run on one clock."""
    found = Samples()
    try:
        _read_verifier_trace(verifier, found, _read_device_trace(device, found))
    except (KeyError, TypeError) as error:
        raise ProfileError(f"a line of the traces lacks something: {error}") from error
    for what, samples in (
        ("draft step", found.draft_steps),
        ("pass", found.passes),
        ("message that both sides saw", found.messages),
    ):
        if not samples:
            raise ProfileError(f"the traces hold no {what}")
    least_s = min(sample.seconds for sample in found.messages)
    if least_s < 0:
        raise ProfileError(
            f"a message arrived {-least_s:.6f} s before it was sent: the traces are not on one"
            " clock"
        )
    return found


_MessageTimes = dict[tuple[str, str, int], float]
"""Time at which a message was sent or arrived, by (session, kind, first node id or position)."""


@dataclass(slots=True)
class _DeviceTimes:
    sent: _MessageTimes = field(default_factory=dict)
    arrived: _MessageTimes = field(default_factory=dict)
    connecting: dict[str, float] = field(default_factory=dict)


def _read_device_trace(lines: Iterable[TraceLine], found: Samples) -> _DeviceTimes:
    times = _DeviceTimes()
    steps: dict[str, tuple[float, int, int]] = {}
    for line in lines:
        at_s, session = float(line["at_s"]), line["session"]
        match line["name"]:
            case "StartStep":
                rows = len(line["feed"]) + line.get("places", 1) - 1
                steps[session] = at_s, rows, line["keep_length"]
            case "StepDone" if session in steps:
                began_s, fed, kept = steps.pop(session)
                found.draft_steps.append(Sample(fed, kept, at_s - began_s))
            case "Connect":
                times.connecting[session] = at_s
            case "Transmit" if line["message"]["name"] == "Draft":
                times.sent[session, "Draft", line["message"]["first_node_id"]] = at_s
            case "Commit":
                times.arrived.setdefault((session, "Commit", line["position"]), at_s)
    return times


def _read_verifier_trace(lines: Iterable[TraceLine], found: Samples, device: _DeviceTimes) -> None:
    sessions: dict[int, str] = {}
    crowded: list[Sample] = []
    live: set[int] = set()
    running: tuple[float, int, int, int] | None = None
    ended_s: float | None = None  # the end of the pass, if the last event was that end
    for line in lines:
        at_s, name = float(line["at_s"]), line["name"]
        if line["kind"] == "event":
            ended_s = at_s if name == "BatchDone" else None
        transit_s: float | None = None
        match name:
            case "RunBatch":
                requests = line["requests"]
                rows = sum(len(one["feed"]) + len(one["tokens"]) for one in requests)
                running = at_s, rows, sum(one["cache_length"] for one in requests), len(requests)
                if ended_s is not None:  # Work was waiting, so this is the turnaround.
                    found.turnarounds.append(Sample(1, 0, at_s - ended_s))
            case "BatchDone" if running is not None:
                began_s, rows, cached, count = running
                running = None
                found.passes.append(Sample(rows, cached, at_s - began_s, count))
            case "BatchFailed":
                running = None
            case "StreamOpened":
                session = sessions[line["stream"]] = line["request"]["session_id"]
                live.add(line["stream"])
                if session in device.connecting:
                    found.connects.append(at_s - device.connecting.pop(session))
            case "StreamLost" | "CloseStream":
                live.discard(line["stream"])
            case "StreamMessage" if line["message"]["name"] == "Draft":
                key = sessions.get(line["stream"], ""), "Draft", line["message"]["first_node_id"]
                if (sent_s := device.sent.pop(key, None)) is not None:
                    transit_s = at_s - sent_s
            case "SendTo" if line["message"]["name"] == "Commit":
                key = sessions.get(line["stream"], ""), "Commit", line["message"]["position"]
                if (arrived_s := device.arrived.pop(key, None)) is not None:
                    transit_s = arrived_s - at_s
        if transit_s is not None:
            (found.messages if len(live) == 1 else crowded).append(Sample(1, 0, transit_s))
    found.messages = found.messages or crowded


def fit_law(samples: Sequence[Sample]) -> TimeLaw:
    """Fit a time law to ``samples``, of which there must be at least one."""
    context_s = _slope_s(
        samples,
        lambda sample: (sample.rows, sample.sessions),
        lambda sample: sample.context_length,
        lambda sample: sample.seconds,
    )

    def without_context_s(sample: Sample) -> float:
        return sample.seconds - context_s * sample.context_length

    session_s = _slope_s(
        samples, lambda sample: (sample.rows,), lambda sample: sample.sessions, without_context_s
    )
    table = []
    for group in _bin_by_rows(samples):
        rows = median([sample.rows for sample in group])
        plain = [without_context_s(one) - session_s * (one.sessions - 1) for one in group]
        table.append((rows, max(0.0, median(plain)), len(group)))
    law = TimeLaw(_make_nondecreasing(table), context_s, session_s=session_s)
    ratios = [
        one.seconds / expected_s if (expected_s := _expected_s(one, law)) else 1.0
        for one in samples
    ]
    highest = _cut_quantiles(ratios, 100)[_CLIP_PERCENT]
    spread = _cut_quantiles([min(ratio, highest) for ratio in ratios], QUANTILES - 1)
    return replace(law, spread=tuple(round(float(ratio), 5) for ratio in spread))


def _cut_quantiles(values: Sequence[float], parts: int) -> Sequence[float]:
    """Return the least value, the values that cut the rest into ``parts`` equal parts, and the
    greatest."""
    found: list[float] = np.quantile(values, np.linspace(0.0, 1.0, parts + 1)).tolist()
    return found


def fit_profile(samples: Samples, name: str, about: dict[str, str]) -> CostProfile:
    message = fit_law(samples.messages)
    # A pass starts in the very event that ends the previous one. The time between two passes is
    # then part of the pass, and this law is 0.
    turnaround = fit_law(samples.turnarounds) if samples.turnarounds else constant_law(0.0)
    connect_s = 0.0
    if samples.connects:
        connect_s = max(0.0, median(samples.connects) - message.seconds(1))
    return CostProfile(
        name=name,
        draft_step=fit_law(samples.draft_steps),
        target_pass=fit_law(samples.passes),
        message=message,
        turnaround=turnaround,
        connect_s=round(connect_s, 7),
        about=about,
    )


def fit_errors(samples: Sequence[Sample], law: TimeLaw) -> tuple[float, float]:
    """Return the error of the law against the measured medians at each number of rows, as shares of
    them: the mean over the samples, and the greatest."""
    errors = []
    for group in _bin_by_rows(samples):
        measured_s = median([sample.seconds for sample in group])
        fitted_s = median([_expected_s(sample, law) for sample in group])
        errors += [abs(fitted_s / measured_s - 1) if measured_s else 0.0] * len(group)
    return fmean(errors), max(errors)


def _slope_s(
    samples: Sequence[Sample],
    alike: Callable[[Sample], tuple[int, ...]],
    more: Callable[[Sample], int],
    seconds: Callable[[Sample], float],
) -> float:
    """Return the seconds that one unit of ``more`` adds: the median slope between samples that are
    otherwise alike (Theil-Sen), and at least 0. Samples that do not differ in ``more`` are
    skipped."""
    slopes: list[float] = []
    for group in _group_by(samples, alike):
        ordered = sorted(group, key=more)
        half = len(ordered) // 2
        # Each is paired with one of the other half, since pairs far apart have the least noise.
        for low, high in zip(ordered[:half], ordered[len(ordered) - half :], strict=True):
            if (apart := more(high) - more(low)) > 0:
                slopes.append((seconds(high) - seconds(low)) / apart)
    return max(0.0, median(slopes)) if len(slopes) >= _LEAST_SAMPLES else 0.0


def _bin_by_rows(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Group samples by rows. Large numbers of rows share a bin, and a bin with too few samples
    joins the next."""

    def bin_of(sample: Sample) -> tuple[int, ...]:
        if sample.rows <= _EXACT_ROWS:
            return (sample.rows,)
        return (_EXACT_ROWS + 1 + int(math.log(sample.rows / _EXACT_ROWS) / math.log(_BIN_GROWTH)),)

    bins: list[list[Sample]] = []
    for group in _group_by(samples, bin_of):
        if bins and len(bins[-1]) < _LEAST_SAMPLES:
            bins[-1].extend(group)
        else:
            bins.append(list(group))
    if len(bins) > 1 and len(bins[-1]) < _LEAST_SAMPLES:
        last = bins.pop()
        bins[-1].extend(last)
    return bins


def _group_by(
    samples: Sequence[Sample], key: Callable[[Sample], tuple[int, ...]]
) -> Iterator[list[Sample]]:
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    yield from (groups[value] for value in sorted(groups))


def _make_nondecreasing(
    table: Sequence[tuple[float, float, int]],
) -> tuple[tuple[float, float], ...]:
    """Make the table nondecreasing, since more rows never take less time. Neighbours in the wrong
    order get their mean, weighted by their samples (pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, weight, number of entries]
    for _, seconds, count in table:
        pools.append([seconds, count, 1])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            mean, weight, entries = pools.pop()
            before = pools[-1]
            before[0] = (before[0] * before[1] + mean * weight) / (before[1] + weight)
            before[1] += weight
            before[2] += entries
    means = [mean for mean, _, entries in pools for _ in range(int(entries))]
    return tuple((rows, round(mean, 7)) for (rows, _, _), mean in zip(table, means, strict=True))


def _expected_s(sample: Sample, law: TimeLaw) -> float:
    return law.seconds(sample.rows, sample.context_length, sessions=sample.sessions)


# --- the workloads whose traces a profile is fitted to -----------------------------------------
# The workloads cover steps and passes of every size that occurs: plain streaming (one row per
# pass), drafts of several widths and lengths (rows in between), sessions side by side, and prompts
# from a line to a page. One session drafts at a time, as on a device; the others only stream.


OpenAgent = Callable[[AgentOptions, bool], Agent]
"""Makes an agent that drafts (True) or not, and whose trace is kept. The caller closes it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Generations of one kind. Of ``streaming_beside`` + 1 generations that run at once, the first
    one drafts."""

    name: str
    options: AgentOptions
    drafts: bool = True
    streaming_beside: int = 0
    prompt_length: int = 32
    tokens: int = 48
    repeats: int = 1


_PLAIN = AgentOptions(run_ahead=RunAhead.ALWAYS)
_PROMPT_LENGTHS = (8, 64, 128, 256, 384)


def make_workloads(quick: bool) -> tuple[Workload, ...]:
    """Return the workloads in order. The first one only warms up."""
    scale = 1 if quick else 3
    drafting = {
        "width 1": AgentOptions(WindowedPolicy(width=1), RunAhead.NEVER),
        "width 2": AgentOptions(WindowedPolicy(width=2), RunAhead.AUTO),
        "width 4": AgentOptions(WindowedPolicy(width=4), RunAhead.NEVER),
        "draft, send, wait": AgentOptions(FixedPolicy(4), RunAhead.NEVER),
        "pre-verify": AgentOptions(PearlPolicy(), RunAhead.NEVER),
    }
    return (
        Workload("warm-up", AgentOptions(), tokens=8),
        Workload("plain streaming", _PLAIN, drafts=False, repeats=2 * scale),
        *(Workload(f"drafting, {name}", one, repeats=scale) for name, one in drafting.items()),
        *(
            Workload(
                f"{count} sessions at once",
                AgentOptions(),
                streaming_beside=count - 1,
                repeats=scale,
            )
            for count in (2, 4, 8, 16)
        ),
        *(
            Workload(
                f"prompts of {length} tokens",
                AgentOptions(),
                prompt_length=length,
                tokens=12,
                repeats=2 + scale,
            )
            for length in _PROMPT_LENGTHS
        ),
    )


def _expected_tokens(workload: Workload) -> float:
    """Return the expected duration of a workload, in tokens of one session."""
    return workload.repeats * (workload.tokens * (1 + workload.streaming_beside / 4) + 4)


async def run_workloads(
    plan: Sequence[Workload],
    text: Sequence[int],
    context_length: int,
    open_agent: OpenAgent,
    progress: BenchProgress,
) -> None:
    """Play the workloads in order. Prompts are cut from ``text``, which is repeated as often as
    needed. A workload whose prompt and output exceed ``context_length`` is left out. Raises
    ``GenerationError``."""
    progress.expect(sum(map(_expected_tokens, plan)))
    for workload in plan:
        if workload.prompt_length + workload.tokens <= context_length:
            progress.say(f"profile: {workload.name}")
            for repeat in range(workload.repeats):
                await _play(workload, repeat, text, open_agent)
        progress.done(workload.name, _expected_tokens(workload))


async def _play(
    workload: Workload, repeat: int, text: Sequence[int], open_agent: OpenAgent
) -> None:
    agents = [open_agent(workload.options, workload.drafts)]
    agents += [open_agent(_PLAIN, False) for _ in range(workload.streaming_beside)]
    # An end token would make the lengths depend on the text.
    sampling = SamplingParams(max_tokens=workload.tokens, ignore_eos=True)

    async def generate(number: int, agent: Agent) -> None:
        start = 11 * (7 * repeat + number) % len(text)  # a different beginning for each
        prompt = tuple(islice(cycle(text), start, start + workload.prompt_length))
        async for _ in agent.generate(prompt, sampling):
            pass

    try:
        await asyncio.gather(*(generate(*numbered) for numbered in enumerate(agents)))
    finally:
        for agent in agents:
            await agent.close()


# --- the command ---------------------------------------------------------------------------------

DEVICE_TRACE, VERIFIER_TRACE = "device.jsonl", "verifier.jsonl"
_OUT = option("File to write the profile to", "--out", "-o", metavar="FILE")


def profile(
    out: Annotated[Path, _OUT] = Path("profile.json"),
    model: Annotated[
        str,
        option("Target model: bundled, a folder, a Hub id or a GGUF file", envvar="EDGESPEC_MODEL"),
    ] = "bundled",
    draft: Annotated[
        str, option("Draft model: bundled, a folder or a Hub id", envvar="EDGESPEC_DRAFT")
    ] = "bundled",
    pass_ms: Annotated[
        float, option("Milliseconds per pass of an emulated slower target; 0: no emulation")
    ] = 0.0,
    draft_ms: Annotated[
        float, option("Milliseconds per step of an emulated slower draft; 0: no emulation")
    ] = 0.0,
    quick: Annotated[
        bool, option("Measure with a third of the repeats, which is faster", "--quick")
    ] = False,
) -> None:
    """Measure the time of draft steps, target passes and messages, and write it as a profile.

    Runs the real models over a real connection on this machine, in less than a minute for the
    bundled pair. The simulator replays a profile on any number of devices, links and verifiers."""
    with reporting_errors():
        if out.is_dir():
            raise ConfigError(f"--out is {str(out)!r}, which is a folder, but must be a file")
        stderr = Console(stderr=True)
        needed = ConfigError(f"--draft is {draft!r}, but a profile needs a draft model")
        if draft == build.LOOKUP:
            raise needed
        drafter = build.load_drafter(
            AgentConfig(draft=DraftSection(model=draft, draft_ms=draft_ms))
        )
        if drafter is None:
            raise needed
        arguments = ["--model", model, "--pass-ms", f"{pass_ms:g}"]
        with temporary_folder() as traces:
            try:
                run(_measure_costs(drafter, draft, arguments, traces, quick, stderr))
            finally:
                drafter.close()
            name = f"{draft} drafting for {model}"
            _fit_and_write(traces / DEVICE_TRACE, traces / VERIFIER_TRACE, out, name, stderr)


async def _measure_costs(
    drafter: Drafter, draft: str, arguments: list[str], traces: Path, quick: bool, stderr: Console
) -> None:
    tokenizer = build.load_tokenizer(
        build.tokenizer_reference(AgentConfig(draft=DraftSection(model=draft)))
    )
    text = [token for prompt in DEFAULT_PROMPTS for token in tokenizer.encode(prompt.text)]
    arguments = [*arguments, PLAIN_STREAMING, f"--set=trace={traces / VERIFIER_TRACE}"]
    plan = make_workloads(quick)
    with BenchProgress(stderr) as progress, TraceFile(traces / DEVICE_TRACE) as tracer:
        async with verifier_process(arguments) as (address, _):

            def open_agent(options: AgentOptions, drafts: bool) -> Agent:
                lent = LentDrafter(drafter) if drafts else None
                transport = build.connect(address)
                encode, stream = tokenizer.encode, tokenizer.stream
                return Agent(transport, lent, encode, stream, options, tracer=tracer)

            context_length = (await fetch_verifier_info(address)).model.context_length
            fits = min(context_length, drafter.info.context_length)
            await run_workloads(plan, text, fits, open_agent, progress)


def _fit_and_write(device: Path, verifier: Path, out: Path, name: str, stderr: Console) -> None:
    """Fit the profile, write it to ``out`` and print its figures. Raises ``ValueError`` and
    ``OSError``."""
    samples = collect_samples(read_lines([device]), read_lines([verifier]))
    found = fit_profile(samples, name, report.describe_origin())
    write_output(out, found.to_json())
    steps, passes = found.draft_step, found.target_pass
    for what, law, mine in (
        ("draft step", steps, samples.draft_steps),
        ("target pass", passes, samples.passes),
    ):
        mean, worst = fit_errors(mine, law)
        typer.echo(
            f"{what}: {law.seconds(1) * 1e3:.2f} ms at one row and {law.context_s * 1e6:.2f} us for"
            f" each cached token; differs from the medians of {len(mine)} samples by {mean:.1%} on"
            f" average, by {worst:.1%} at worst"
        )
    typer.echo(
        f"a further session adds {passes.session_s * 1e3:.2f} ms to a pass; a message takes"
        f" {found.message.seconds(1) * 1e3:.2f} ms, a stream opens in"
        f" {found.connect_s * 1e3:.2f} ms"
    )
    stderr.print(f"written: {out}", markup=False, highlight=False, soft_wrap=True)
