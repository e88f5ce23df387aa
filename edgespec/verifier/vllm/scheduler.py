"""vLLM's scheduler with injected drafts: a step computes only the sessions that it was made for.

Before each step the driver sets ``wanted``. Requests of other sessions are put aside while vLLM's
own ``schedule`` runs: they keep their cache and make no progress. Each wanted request whose text is
fully computed gets its drafts, and vLLM verifies them as if its own draft model had proposed them.
Proposals of vLLM's own speculator are read from the requests, and are verified only if they come
back as such drafts. When a step found no room at all, the next one first takes the cache of a
request that was put aside.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from edgespec.verifier.vllm.target import StepRequest


class DraftScheduler(Scheduler):  # type: ignore[misc]
    """The class given to vLLM as ``--scheduler-cls``. It does not support asynchronous
    scheduling."""

    wanted: Mapping[str, StepRequest] | None = None
    """Sessions of the next step by request id; None means all, without drafts."""
    draft_steps = 0
    """Tokens that vLLM's own speculator is to propose behind the step."""
    rows: Mapping[str, Any] = {}
    """Results of the last step that the worker returns besides tokens (``worker.py``)."""
    _starved = False

    def schedule(self, throttle_prefills: bool = False) -> Any:
        wanted = self.wanted
        if wanted is None:
            return super().schedule(throttle_prefills)
        by_id = {request.request_id: request for request in self.running}
        aside = [request for name, request in by_id.items() if name not in wanted]
        if self._starved and aside:
            self._preempt_request(aside.pop(), time.monotonic())
        self.running: list[Any] = [by_id[name] for name in wanted if name in by_id]
        held = [request for request in self.waiting if request.request_id not in wanted]
        self.waiting.remove_requests(held)
        for request in self.running:
            decodes = request.num_tokens - request.num_computed_tokens == 1
            request.spec_token_ids = list(wanted[request.request_id].drafts) if decodes else []
        # vLLM pads a request that begins one token behind a cached prefix to a whole chain.
        self.scheduler_config.long_prefill_token_threshold = max(
            1 + self.num_spec_tokens, *[one.rows for one in wanted.values()]
        )
        try:
            output = super().schedule(throttle_prefills)
        finally:
            self.running += aside
            for request in held:
                self.waiting.add_request(request)
        self._starved = output.total_num_scheduled_tokens == 0
        output.num_spec_tokens_to_schedule = self.draft_steps
        output.edgespec_logprobs = {
            name: one.logprobs for name, one in wanted.items() if one.logprobs
        }
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self.rows = getattr(model_runner_output, "edgespec_rows", {})
        return super().update_from_output(scheduler_output, model_runner_output)
