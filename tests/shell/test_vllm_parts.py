"""What runs inside vLLM, without vLLM: the worker's choice of tokens, the scheduler's guest list.

Oracle of the worker: the scalar specification of sampling. The scheduler stands on a stand-in for
vLLM's, which notes whom it was asked to schedule.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.core.protocol.sampling import SamplingParams, choose
from edgespec.verifier.engines.vllm.target import Wanted
from edgespec.verifier.engines.vllm.worker import (
    EXTRA,
    NoProposer,
    WorkerExtension,
    arguments_of,
    sampling_of,
)

SIZE = 50
PENALISED = SamplingParams(
    temperature=0.8,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias={4: 2.0, 9: -1.0},
    seed=(1 << 64) - 1,
)


@dataclass
class _SamplerOutput:
    sampled_token_ids: torch.Tensor
    logprobs_tensors: None


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The two modules of vLLM that are named, and nothing in them but what is used."""
    for name in ("vllm", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    outputs: Any = ModuleType("vllm.v1.outputs")
    outputs.SamplerOutput = _SamplerOutput
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    scheduler: Any = ModuleType("vllm.v1.core.sched.scheduler")
    scheduler.Scheduler = _Scheduler
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.scheduler", scheduler)
    ours = "edgespec.verifier.engines.vllm.scheduler"
    sys.modules.pop(ours, None)
    yield
    sys.modules.pop(ours, None)


# --- the worker -------------------------------------------------------------------------------


@dataclass
class _Runner:
    """As much of vLLM's model runner as is used: one row of ``texts`` a request."""

    texts: dict[str, list[int]]
    params: dict[str, tuple[int, SamplingParams]]
    logits: torch.Tensor
    drafts: list[list[int]]
    discarded: list[bool] = field(default_factory=list)
    logprobs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = {
            name: SimpleNamespace(
                sampling_params=SimpleNamespace(extra_args={EXTRA: arguments_of(*params)})
            )
            for name, params in self.params.items()
        }
        self.discard_request_mask = SimpleNamespace(
            np=np.array(self.discarded or [False] * len(self.texts))
        )
        self.execute_model_state = (SimpleNamespace(edgespec_logprobs=self.logprobs),)
        self.speculative_config: str | None = "on"

    @property
    def input_batch(self) -> Any:
        names = list(self.texts)
        tokens = np.zeros((len(names), 64), dtype=np.int32)
        for row, text in enumerate(self.texts.values()):
            tokens[row, : len(text)] = text
        return SimpleNamespace(
            num_reqs=len(names),
            req_ids=names,
            req_id_to_index={name: row for row, name in enumerate(names)},
            token_ids_cpu=tokens,
            num_tokens_no_spec=np.array([len(text) for text in self.texts.values()]),
        )

    def execute_model(self, scheduler_output: Any) -> str | None:
        return self.speculative_config

    def sample_tokens(self, grammar_output: object) -> Any:
        metadata: Any = SimpleNamespace(
            num_draft_tokens=[len(one) for one in self.drafts],
            draft_token_ids=torch.tensor([token for one in self.drafts for token in one]),
        )
        if self.speculative_config is None:
            metadata = None
        output = self._sample(self.logits, metadata)
        return SimpleNamespace(sampled_token_ids=output.sampled_token_ids.tolist())

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        raise AssertionError("vLLM's own sampler is not asked")


def _installed(runner: _Runner) -> Any:
    worker = WorkerExtension()
    worker.model_runner = runner
    worker.edgespec_install()
    return runner.sample_tokens(None)


def _logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, SIZE), generator=torch.Generator().manual_seed(seed)) * 3


def _expected(runner: _Runner, name: str, row: int, path: list[int]) -> int:
    length, params = runner.params[name]
    tokens = runner.texts[name] + path
    logits = runner.logits[row].tolist()
    return choose(logits, params, len(tokens), tokens[:length], tokens[length:])


def test_tokens_follow_our_law_with_and_without_drafts() -> None:
    texts = {"a": [1, 2, 3, 4, 4], "b": [7, 8], "c": [5, 6, 7]}
    params = {"a": (3, PENALISED), "b": (2, SamplingParams()), "c": (1, PENALISED)}
    runner = _Runner(texts, params, _logits(3 + 1 + 2), [[], [], []])
    first = _expected(runner, "a", 0, [])
    runner.drafts = [[first, 11], [], [12]]
    output = _installed(runner)
    a = [first, _expected(runner, "a", 1, [first])]
    if a[1] == 11:
        a.append(_expected(runner, "a", 2, [first, 11]))
    b, c = [_expected(runner, "b", 3, [])], [_expected(runner, "c", 4, [])]
    rows = [a, b, c]
    assert output.sampled_token_ids == [one + [-1] * (3 - len(one)) for one in rows]
    targets, scores, failure = output.edgespec_rows["a"]
    assert targets == (*a[:2], _expected(runner, "a", 2, [first, 11]))
    assert scores == ()
    assert failure == ""


def test_a_step_without_drafts_is_no_speculation() -> None:
    texts = {"a": [1, 2], "b": [3, 4]}
    params = {name: (2, PENALISED) for name in texts}
    runner = _Runner(texts, params, _logits(2), [[], []])
    expected = [[_expected(runner, "a", 0, [])], [_expected(runner, "b", 1, [])]]
    assert _installed(runner).sampled_token_ids == expected
    step = SimpleNamespace(scheduled_spec_decode_tokens={})
    assert runner.execute_model(step) is None
    assert runner.sample_tokens(None).sampled_token_ids == expected
    step.scheduled_spec_decode_tokens["a"] = [5]
    assert runner.execute_model(step) == "on"


def test_a_text_that_is_not_computed_to_its_end_gets_no_token() -> None:
    texts = {"a": [1, 2], "b": [3, 4]}
    params = {name: (2, SamplingParams()) for name in texts}
    runner = _Runner(texts, params, _logits(2), [[], []], discarded=[True, False])
    output = _installed(runner)
    assert output.sampled_token_ids == [[-1], [_expected(runner, "b", 1, [])]]
    assert set(output.edgespec_rows) == {"b"}


def test_logits_that_are_no_numbers_fail_one_request() -> None:
    texts = {"a": [1, 2], "b": [3, 4]}
    params = {name: (2, SamplingParams()) for name in texts}
    logits = _logits(4)
    logits[1, 7] = torch.nan
    runner = _Runner(texts, params, logits, [[5], [6]])
    output = _installed(runner)
    assert output.edgespec_rows["a"][0] == ()
    assert "must be finite" in output.edgespec_rows["a"][2]
    assert output.sampled_token_ids[0] == [0, -1], "a token that nobody sees"
    assert output.edgespec_rows["b"][0][0] == _expected(runner, "b", 2, [])


def test_parameters_survive_the_way_to_the_worker() -> None:
    found = sampling_of(arguments_of(7, PENALISED))
    assert found == PENALISED
    assert NoProposer(None).propose([1, 2, 3]) == [[], [], []]


# --- the scheduler ----------------------------------------------------------------------------


class _Scheduler:
    """vLLM's, as far as it is used: schedules all it finds."""

    def __init__(self) -> None:
        self.running: list[Any] = []
        self.waiting = _Queue()
        self.scheduler_config = SimpleNamespace(long_prefill_token_threshold=0)
        self.full = False
        self.num_spec_tokens = 15
        self.seen: list[tuple[str, list[int]]] = []
        self.started: list[str] = []

    def schedule(self, throttle_prefills: bool = False) -> Any:
        self.seen = [(one.request_id, one.spec_token_ids) for one in self.running]
        self.started = [one.request_id for one in self.waiting]
        return SimpleNamespace(total_num_scheduled_tokens=0 if self.full else 1)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> str:
        return "outputs"

    def _preempt_request(self, request: Any, timestamp: float) -> None:
        self.waiting.insert(0, request)


class _Queue(list[Any]):
    def remove_requests(self, requests: list[Any]) -> None:
        self[:] = [one for one in self if one not in requests]

    def add_request(self, request: Any) -> None:
        self.append(request)


def _request(name: str, missing: int = 1) -> Any:
    return SimpleNamespace(
        request_id=name, num_tokens=10, num_computed_tokens=10 - missing, spec_token_ids=[]
    )


def _scheduler() -> Any:
    return importlib.import_module("edgespec.verifier.engines.vllm.scheduler").DraftScheduler()


def _names(requests: list[Any]) -> list[str]:
    return [one.request_id for one in requests]


def test_a_step_has_the_sessions_it_was_made_for() -> None:
    scheduler = _scheduler()
    scheduler.running = [_request("a"), _request("b"), _request("c", missing=5)]
    scheduler.waiting += [_request("d"), _request("e")]
    scheduler.wanted = {
        "c": Wanted(64, (1, 2)),
        "a": Wanted(4, (3, 4, 5), logprobs=2),
        "e": Wanted(7),
    }
    output = scheduler.schedule()
    assert scheduler.seen == [("c", []), ("a", [3, 4, 5])], "drafts stand behind the whole text"
    assert scheduler.started == ["e"]
    assert scheduler.scheduler_config.long_prefill_token_threshold == 64
    assert output.edgespec_logprobs == {"a": 2}
    scheduler.wanted = {"a": Wanted(1)}
    scheduler.schedule()
    assert scheduler.scheduler_config.long_prefill_token_threshold == 16, "a padded chain"
    scheduler.running.sort(key=lambda one: "cab".index(one.request_id))
    assert _names(scheduler.running) == ["c", "a", "b"]
    assert sorted(_names(scheduler.waiting)) == ["d", "e"]


def test_who_stands_aside_gives_up_its_cache_when_there_is_no_room() -> None:
    scheduler = _scheduler()
    scheduler.running = [_request("a"), _request("b"), _request("c")]
    scheduler.wanted = {"a": Wanted(1)}
    scheduler.schedule()
    assert _names(scheduler.waiting) == []
    scheduler.full = True
    scheduler.schedule()
    assert _names(scheduler.waiting) == [], "it was not known before"
    scheduler.schedule()
    assert _names(scheduler.waiting) == ["c"]
    assert _names(scheduler.running) == ["a", "b"]


def test_the_queues_are_whole_again_when_vllm_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = _scheduler()
    scheduler.running, scheduler.wanted = [_request("a"), _request("b")], {"a": Wanted(1)}
    scheduler.waiting.append(_request("c"))

    def fail(self: object, throttle_prefills: bool = False) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(_Scheduler, "schedule", fail)
    with pytest.raises(RuntimeError, match="no"):
        scheduler.schedule()
    assert _names(scheduler.running) == ["a", "b"]
    assert _names(scheduler.waiting) == ["c"]
