"""A trace of draft steps, read back. Oracle: the session's own counters, which saw
the tree that a trace does not hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.bench.profile_fit import Samples, _device_side
from edgespec.core.device.link_keeper import ReconnectPolicy
from edgespec.core.device.policy import WindowedPolicy
from edgespec.core.device.session import DraftSession
from edgespec.core.protocol.messages import Limits, Open
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.core.toy_model import ToyModel
from edgespec.core.verifier.engine import VerifyEngine
from edgespec.core.verifier.engine_events import EngineLimits
from edgespec.device.drafters.toy import ToyDrafter
from edgespec.telemetry.trace import TraceFile
from edgespec.verifier.targets.toy import ToyTarget
from edgespec_sim.event_queue import EventQueue
from edgespec_sim.report.summarise import DeviceTally
from edgespec_sim.report.timeline import DeviceSpans, read_lines
from edgespec_sim.sessions import FixedDelay, PassTime, SimulatedDevice, SimulatedVerifier, Stream


def _step_s(kept: int, fed: int) -> float:
    return 0.008 + 0.0004 * (fed - 1)


def _played(path: Path, seed: int) -> DraftSession:
    queue, model = EventQueue(), ToyModel(vocabulary_size=16, order=2, seed=seed)
    target, drafter = ToyTarget(model), ToyDrafter(model.perturbed(0.3))
    engine = VerifyEngine(target.info, Limits(), EngineLimits(server_drafts=False))
    verifier = SimulatedVerifier(queue, engine, target, PassTime(queue, lambda batch: 0.025))
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=80)
    session = DraftSession(
        Open("one", "", "", (1, 2, 3), sampling=sampling),
        WindowedPolicy(2),
        ReconnectPolicy(),
        1 << 16,
    )

    def connect() -> tuple[Stream, float]:
        stream = Stream(queue, FixedDelay(queue, 0.025), FixedDelay(queue, 0.025))
        verifier.accept(stream)
        return stream, 0.05

    with TraceFile(path) as trace:
        SimulatedDevice(queue, session, drafter, _step_s, connect, trace).start()
        queue.run(until_s=60.0)
    return session


@pytest.mark.parametrize("seed", range(3))
def test_trials_and_hits_are_those_of_the_session(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "trace.jsonl"
    counters = _played(path, seed).counters
    assert counters.committed == 80
    tally, spans, samples = DeviceTally(), DeviceSpans([]), Samples()
    lines = list(read_lines([path]))
    for line in lines:
        tally.read(line)
        spans.read(line)
    (request,) = tally.requests
    assert (request.guesses.tried, request.guesses.hits) == (counters.tried, counters.hits)
    steps = [span for span in spans.spans if span.name == "draft step"]
    assert len(steps) == counters.steps
    most = max(int(span.args["fed"]) for span in steps[1:])
    _device_side(lines, samples)
    assert max(sample.rows for sample in samples.draft_steps[1:]) == most
