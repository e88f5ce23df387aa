"""Code in vLLM's worker that chooses tokens by this project's sampling law, for text and drafts
alike.

vLLM's runner computes logits for the last row of each text and for each draft behind it, and then
calls ``_sample``. Here that is ``sampling/tensors.py``: a draft is accepted if it equals the token
that was chosen for its place. In a step without drafts speculation is switched off in the runner,
because it would cost more than a tiny model's pass. Each tensor-parallel rank has all logits and
chooses the same tokens.

A speculator of vLLM's own with a forward pass (a draft model, EAGLE, MTP, DFlash) has a cache that
must follow the text, so it runs in every step. It chooses by the same law with the same noise: what
it proposes for a sampled text is what the target chooses where both models agree. One that fills a
block in one run (PARD, P-EAGLE, DFlash, Medusa) draws each place of it with the noise of that
place; penalties count the tokens before the block only.

vLLM builds a speculator for as many tokens as bound all drafts of a step. A block has its own
number, with which it was trained, so it is set here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from edgespec.core.ports import ModelOutputError
from edgespec.core.protocol.sampling import MinTokensMask, SamplingParams
from edgespec.core.protocol.work import PassRequest, TokenScore
from edgespec.sampling.tensors import (
    SampleBlock,
    TextOccurrences,
    choose_tokens,
    is_plain,
    score_passes,
)
from edgespec.verifier.vllm.target import accepted_tokens

EXTRA = "edgespec"
"""Key in a request's ``extra_args`` of the settings by which its tokens are chosen."""
Row = tuple[tuple[int, ...], tuple[TokenScore, ...], str]


class NoProposer:
    """A draft model in vLLM's sense that never proposes anything, since devices draft."""

    def __init__(self, vllm_config: object) -> None:
        del vllm_config

    def load_model(self, *_: object, **__: object) -> None:
        pass

    def propose(self, sampled: Sequence[object], *_: object, **__: object) -> list[list[int]]:
        return [[] for _ in sampled]


class WorkerExtension:
    """The class given to vLLM as ``--worker-extension-cls``; its methods are called on every
    worker."""

    model_runner: Any

    def edgespec_install(self, method: str = "", block: int = 0) -> None:
        """Choose tokens by this project's law from now on. The arguments describe vLLM's own
        speculator, as in ``RunnerSampling``."""
        RunnerSampling(self.model_runner, method, block)


def run_worker(reason: str, *arguments: Any, **named: Any) -> None:
    """Run vLLM's worker in a process of its own.

    If it cannot start, the reason is written to the file ``reason``: vLLM itself only logs it in
    that process, and raises "see stack trace" in the process that started it.
    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.__init__ = recording_reason(Path(reason), WorkerProc.__init__)
    WorkerProc.worker_main(*arguments, **named)


def recording_reason(path: Path, start: Callable[..., None]) -> Callable[..., None]:
    """Return ``start`` wrapped so that its exception is also written to the file ``path``."""

    def started(*arguments: Any, **named: Any) -> None:
        try:
            start(*arguments, **named)
        except Exception as error:
            path.write_text(f"{type(error).__name__}: {error}")
            raise

    return started


class _Text:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.params = sampling_of(arguments)
        self._eos_token_ids = tuple(arguments["eos_token_ids"])
        self._held: MinTokensMask | None = None
        self._extra_rows = int(arguments.get("extra_rows", 0))
        """Rows that pictures take more than their placeholders. The noise of a token belongs to its
        position, which counts a picture as one token."""
        self._prompt_length = int(arguments["prompt_length"]) + self._extra_rows
        self._tokens: list[int] = []
        self._counts: TextOccurrences | None = None

    def block(
        self, name: str, tokens: Any, end: int, drafts: tuple[int, ...], vocabulary_size: int
    ) -> SampleBlock:
        """Return the sampling rows at position ``end`` and behind each draft.

        ``tokens`` is the runner's row of token ids; ``vocabulary_size`` is that of the logits.
        """
        positions: Sequence[int] = range(end, end + 1 + len(drafts))
        masks = self._masks(positions, vocabulary_size)
        positions = self._shift(positions)
        if not self.params.is_penalised:
            return SampleBlock(name, self.params, positions, masks=masks)
        known = len(self._tokens)
        self._tokens += tokens[known:end].tolist()
        counts = self._counts = self._counts or TextOccurrences(self._prompt_length)
        counts.update(self._tokens, known)
        parents = range(-1, len(drafts) - 1)
        before = counts.occurrences_before(drafts, parents)
        return SampleBlock(
            key=name, params=self.params, positions=positions, occurrences=before, masks=masks
        )

    def guess(
        self, name: str, end: int, chain: Sequence[int], places: int, vocabulary_size: int
    ) -> SampleBlock:
        """Return the ``places`` sampling rows behind ``chain``, which continues the tokens of the
        last ``block``."""
        positions: Sequence[int] = range(end + len(chain), end + len(chain) + places)
        masks = self._masks(positions, vocabulary_size)
        positions = self._shift(positions)
        if self._counts is None:
            return SampleBlock(name, self.params, positions, masks=masks)
        found = self._counts.occurrences_before(chain, range(-1, len(chain) - 1))
        last = replace(found, output_counts=found.output_counts[-1:].repeat(places, axis=0))
        return SampleBlock(
            key=name, params=self.params, positions=positions, occurrences=last, masks=masks
        )

    def _shift(self, rows: Sequence[int]) -> Sequence[int]:
        """Return the positions of rows of vLLM's text, which count a picture as one token."""
        return [row - self._extra_rows for row in rows] if self._extra_rows else rows

    def _masks(self, positions: Sequence[int], vocabulary_size: int) -> Sequence[bytes | None]:
        """Return the masks by which ``min_tokens`` excludes end tokens at these positions."""
        if positions[0] - self._prompt_length >= self.params.min_tokens:
            return ()
        if self._held is None:
            self._held = MinTokensMask(self.params, vocabulary_size, self._eos_token_ids)
        return [self._held.mask(None, at - self._prompt_length) for at in positions]


@dataclass(slots=True)
class _Chain:
    """Tokens that a step appends to a text that ended at ``end``: its own, then the proposed
    ones."""

    text: _Text
    end: int
    tokens: list[int]


class RunnerSampling:
    """Replaces ``_sample`` in vLLM's model runner.

    ``method`` is that of vLLM's own speculator, empty without one. ``block`` is the number of
    tokens that it proposes in one run; 0 if it proposes them one by one."""

    def __init__(self, runner: Any, method: str = "", block: int = 0) -> None:
        self._runner, self._sample_tokens = runner, runner.sample_tokens
        self._texts: dict[str, _Text] = {}
        self._logprobs: dict[str, int] = {}
        self._rows: dict[str, Row] = {}
        self._execute_model, self._speculation = runner.execute_model, runner.speculative_config
        runner.execute_model = self.execute_model
        runner.sample_tokens, runner._sample = self.sample_tokens, self.sample
        self._chains: dict[str, _Chain] = {}
        self._fits = True
        self._block = self._places = 0
        """Tokens of a block that the drafter fills by masked rows, and of one that it fills in this
        step; 0 for other drafters."""
        drafter: Any = getattr(runner, "drafter", None)
        self._drafter, self._follows_text = drafter, hasattr(drafter, "_sample_draft_tokens")
        if self._follows_text:
            self._best_guesses = drafter._sample_draft_tokens
            self._fits_in_drafter = runner._input_fits_in_drafter
            runner._input_fits_in_drafter = self.fits_in_drafter
            if not drafter.use_heterogeneous_vocab:  # else its tokens are not the target's
                drafter._sample_draft_tokens = self.guess
            if block:
                self._block = block
                self._reused_slots = (
                    drafter.extra_slots_per_request - drafter.net_num_new_slots_per_request
                )
        elif method == "medusa":
            drafter.propose = self.propose_heads
        elif method == "suffix":
            self._propose, drafter.num_speculative_tokens = drafter.propose, block
            drafter.propose, self._follows_text = self.propose_suffixes, True
        elif method == "custom_class":
            self._follows_text = True  # the user's class may remember what it sees

    def execute_model(self, scheduler_output: Any, *rest: Any, **named: Any) -> Any:
        """Run the runner's method, with speculation hidden from it if there are no drafts, none are
        wanted, and no drafter has to follow the text."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        steps = scheduler_output.num_spec_tokens_to_schedule
        wanted = self._follows_text or steps > 0
        self._runner.speculative_config = self._speculation if drafts or wanted else None
        if self._block:
            # Rows of masks write no cache that is read later, so without a proposal there are none.
            self._places = self._block if steps else 1
            self._drafter.extra_slots_per_request = self._places
            self._drafter.net_num_new_slots_per_request = self._places - self._reused_slots
        return self._execute_model(scheduler_output, *rest, **named)

    def fits_in_drafter(self, metadata: Any) -> bool:
        """Call the runner's method and remember its result: the runner proposes zeros for all texts
        if one of them nears the end of its context."""
        self._fits = bool(self._fits_in_drafter(metadata))
        return self._fits

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Call the runner's method, and attach all rows' targets to the output for the
        scheduler."""
        state, self._rows = self._runner.execute_model_state, {}
        self._logprobs = {} if state is None else getattr(state[0], "edgespec_logprobs", {})
        output = self._sample_tokens(grammar_output)
        if hasattr(output, "sampled_token_ids"):
            output.edgespec_rows = self._rows
        if not self._fits:
            self._runner._draft_token_req_ids = None
        return output

    def guess(self, hidden_states: torch.Tensor, metadata: Any) -> tuple[torch.Tensor, None]:
        """Replace the drafter's ``_sample_draft_tokens``, which vLLM calls after ``_sample``, once
        for each place of the proposals or once for a block, whose rows follow one another.
        Returns int64 [rows]."""
        places = self._places or 1
        chains = self._chains_of(hidden_states.shape[0] // places)
        if all(one is None or is_plain(one.text.params) for _, one in chains):
            return self._best_guesses(hidden_states, metadata)[0], None
        logits = self._drafter.model.compute_logits(hidden_states)
        return self._choose_guesses(logits, chains, places), None

    def propose_heads(
        self, num_speculative_tokens: int, target_hidden_states: torch.Tensor, **_: object
    ) -> torch.Tensor | list[list[int]]:
        """Replace ``propose`` of a drafter with a head for each place (Medusa). Returns int64
        [requests, heads], or empty lists if nothing is wanted."""
        requests, model = target_hidden_states.shape[0], self._drafter.model
        if not num_speculative_tokens:
            return [[] for _ in range(requests)]
        logits = torch.stack(model.compute_logits(model(target_hidden_states)), dim=1)
        places = logits.shape[1]
        tokens = self._choose_guesses(logits.flatten(0, 1), self._chains_of(requests), places)
        return tokens.view(requests, places)

    def propose_suffixes(
        self, num_speculative_tokens: int, input_batch: Any, *rest: Any, **named: Any
    ) -> Any:
        """Replace ``propose`` of suffix decoding, which proposes at most a fixed number, and ends
        what it knows of each text that the batch lacks. Here that is a text that a step leaves out,
        so the batch seems to have them all. Tokens that are not wanted are not fetched."""
        known = {**dict.fromkeys(self._runner.requests, -1), **input_batch.req_id_to_index}
        batch = SimpleNamespace(
            req_ids=input_batch.req_ids,
            req_id_to_index=known,
            num_tokens_no_spec=input_batch.num_tokens_no_spec,
            num_prompt_tokens=input_batch.num_prompt_tokens,
            token_ids_cpu=input_batch.token_ids_cpu,
        )
        return self._propose(self._drafter.num_speculative_tokens, batch, *rest, **named)

    def _chains_of(self, requests: int) -> list[tuple[str, _Chain | None]]:
        names = self._runner.input_batch.req_ids[:requests]
        return [(name, self._chains.get(name)) for name in names]

    def _choose_guesses(
        self, logits: torch.Tensor, chains: list[tuple[str, _Chain | None]], places: int
    ) -> torch.Tensor:
        """Return the drafter's tokens, int64 [rows]: ``places`` behind each chain, by the target's
        law and its noise. They are appended to the chains."""
        blocks = [
            SampleBlock(name, SamplingParams(), range(places))
            if chain is None
            else chain.text.guess(name, chain.end, chain.tokens, places, logits.shape[-1])
            for name, chain in chains
        ]
        try:
            tokens = choose_tokens(logits, blocks)
        # A drafter whose logits are not finite may propose anything, and fails no session.
        except ModelOutputError:
            tokens = logits.argmax(dim=-1).tolist()
        for index, (_, chain) in enumerate(chains):
            if chain is not None:
                chain.tokens += tokens[index * places : (index + 1) * places]
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Replace ``GPUModelRunner._sample``.

        Returns int32 [requests, 1 + most drafts]: the accepted tokens and one more, then -1.
        ``metadata`` None means that there are no drafts.
        """
        from vllm.v1.outputs import SamplerOutput

        batch = self._runner.input_batch
        counts: list[int] = [0] * batch.num_reqs if metadata is None else metadata.num_draft_tokens
        guesses: list[int] = metadata.draft_token_ids.tolist() if any(counts) else []
        sampled = torch.full((len(counts), 1 + max(counts)), -1, dtype=torch.int32)
        self._chains = {}
        discarded = self._runner.discard_request_mask.np
        blocks: list[SampleBlock] = []
        rows: list[int] = []
        drafts: dict[str, tuple[int, ...]] = {}
        row = guess = 0
        for index, count in enumerate(counts):
            if not discarded[index]:
                name = batch.req_ids[index]
                drafts[name] = tuple(guesses[guess : guess + count])
                tokens, end = batch.token_ids_cpu[index], int(batch.num_tokens_no_spec[index])
                text = self._text_of(name)
                self._chains[name] = _Chain(text, end, [])
                blocks.append(text.block(name, tokens, end, drafts[name], logits.shape[-1]))
                rows += range(row, row + 1 + count)
            row, guess = row + 1 + count, guess + count
        if len(rows) < row:
            logits = logits[rows]
        self._choose(logits, blocks, drafts)
        for name, chain in drafts.items():
            accepted = accepted_tokens(self._rows[name][0], chain)
            self._chains[name].tokens += accepted
            index = batch.req_id_to_index[name]
            sampled[index, : len(accepted)] = torch.tensor(accepted, dtype=torch.int32)
        return SamplerOutput(sampled.to(logits.device), None)

    def _text_of(self, name: str) -> _Text:
        requests = self._runner.requests
        if len(self._texts) > 2 * len(requests):
            self._texts = {key: one for key, one in self._texts.items() if key in requests}
        if (text := self._texts.get(name)) is None:
            text = _Text(requests[name].sampling_params.extra_args[EXTRA])
            self._texts[name] = text
        return text

    def _choose(
        self, logits: torch.Tensor, blocks: list[SampleBlock], drafts: dict[str, tuple[int, ...]]
    ) -> None:
        """Fill ``_rows``; a request whose logits are not finite fails alone, with the reason."""
        while blocks:
            try:
                tokens = choose_tokens(logits, blocks)
            except ModelOutputError as error:
                self._rows[error.key] = (), (), str(error)
                keep = [one.key != error.key for one in blocks for _ in one.positions]
                logits = logits[torch.tensor(keep, device=logits.device)]
                blocks = [one for one in blocks if one.key != error.key]
                continue
            scores: dict[str, tuple[TokenScore, ...]] = {}
            if self._logprobs:
                asked = [
                    PassRequest(key, 0, (), drafts[key], logprobs=self._logprobs.get(key, 0))
                    for key in [one.key for one in blocks]
                ]
                scores = score_passes(logits, asked, tokens)
            first = 0
            for one in blocks:
                last = first + len(one.positions)
                self._rows[one.key] = tuple(tokens[first:last]), scores.get(one.key, ()), ""
                first = last
            return


_CHOOSING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    # The end tokens belong to the law while ``min_tokens`` excludes them.
    *("min_tokens", "max_tokens", "ignore_eos"),
)


def arguments_of(
    prompt_length: int, sampling: SamplingParams, eos_token_ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the contents of a request's ``extra_args``: plain data, as it may go to another
    process."""
    found = {name: getattr(sampling, name) for name in _CHOOSING}
    bias = [list(one) for one in sampling.logit_bias.items()]
    ends = {"eos_token_ids": list(eos_token_ids), "stop_token_ids": list(sampling.stop_token_ids)}
    return {**found, **ends, "prompt_length": prompt_length, "logit_bias": bias}


def sampling_of(arguments: dict[str, Any]) -> SamplingParams:
    """Return the parameters that choose tokens. The session ends the text; its end tokens matter
    here only while ``min_tokens`` excludes them."""
    found = {name: arguments[name] for name in _CHOOSING}
    stops = tuple(arguments["stop_token_ids"])
    return SamplingParams(**found, stop_token_ids=stops, logit_bias=dict(arguments["logit_bias"]))
