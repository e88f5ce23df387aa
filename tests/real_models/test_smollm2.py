"""SmolLM2-135M-Instruct, served as users serve it.

Oracles: transformers' model of the same weights, whose likeliest token is compared at each place of
a text; the output without drafts; transformers' rendering of the chat template; the ``gguf``
library's numbers.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.config import DraftSection
from edgespec.core.protocol.messages import FinishReason
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.models.tokenizer import TextTokenizer, render_chat
from tests.kit.live_verifier import child_environment
from tests.kit.real_models import PROMPTS, Judgement, Output, RealModel, generate, report, served

pytestmark = pytest.mark.slow

LENGTH = 96
NO_DRAFT = DraftSection(model="none")


def chat_ids(model: RealModel, *turns: str) -> list[int]:
    """Return the prompt of a conversation whose messages are a user's and the model's in turns."""
    tokenizer = resolve_source(str(model.folder), Purpose.TEXTS).load_tokenizer()
    assert isinstance(tokenizer, TextTokenizer)
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return tokenizer.encode(render_chat(tokenizer, messages), add_special_tokens=False)


async def test_greedy_texts_are_those_of_transformers(smollm2: RealModel) -> None:
    prompts = [chat_ids(smollm2, text) for text in PROMPTS]
    greedy = SamplingParams(temperature=0.0, max_tokens=LENGTH)
    async with served(smollm2) as address:
        outputs = await generate(address, smollm2, [(one, greedy) for one in prompts], NO_DRAFT)
    judgement = Judgement()
    for prompt, output in zip(prompts, outputs, strict=True):
        judgement.judge(smollm2.reference, prompt, output.tokens)
        ended = output.tokens[-1] in smollm2.target.info.eos_token_ids
        assert output.finish is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert ended or len(output.tokens) == LENGTH
    report(f"\nSmolLM2 beside transformers: {judgement}")
    assert judgement.texts >= 24
    assert judgement.wrong == []


async def test_a_text_is_the_one_that_transformers_generates_by_itself(smollm2: RealModel) -> None:
    """The other tests judge a text behind itself. Here transformers writes with its own cache."""
    import torch

    prompt = chat_ids(smollm2, PROMPTS[0])
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    async with served(smollm2) as address:
        (output,) = await generate(address, smollm2, [(prompt, greedy)], NO_DRAFT)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = smollm2.reference.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=32
        )
    assert found[0, len(prompt) :].tolist() == output.tokens


async def test_an_end_token_ends_a_text_unless_it_is_too_early(smollm2: RealModel) -> None:
    prompt = chat_ids(smollm2, "Reply with one word: what colour is snow?")
    ends = smollm2.target.info.eos_token_ids
    greedy = SamplingParams(temperature=0.0, max_tokens=64)
    async with served(smollm2) as address:
        (plain,) = await generate(address, smollm2, [(prompt, greedy)], NO_DRAFT)
        least = len(plain.tokens) + 5
        longer = replace(greedy, min_tokens=least)
        drafts = (NO_DRAFT, DraftSection(model=str(smollm2.folder)))
        later = [
            (await generate(address, smollm2, [(prompt, longer)], draft))[0] for draft in drafts
        ]
    assert plain.finish is FinishReason.STOP
    assert [token for token in plain.tokens if token in ends] == [plain.tokens[-1]]
    assert later[0].tokens == later[1].tokens
    assert len(later[0].tokens) >= least
    assert not set(later[0].tokens[:least]) & set(ends)
    judgement = Judgement()
    judgement.judge(smollm2.reference, prompt, later[0].tokens, banned=ends, ban_length=least)
    judgement.judge(smollm2.reference, prompt, plain.tokens)
    assert judgement.wrong == []


def sampled_cases(
    model: RealModel, texts: Sequence[str], length: int
) -> list[tuple[Sequence[int], SamplingParams]]:
    return [
        (
            chat_ids(model, text),
            SamplingParams(temperature=temperature, seed=number, max_tokens=length),
        )
        for number, text in enumerate(texts)
        for temperature in (0.0, 0.7, 1.0)
    ]


async def test_no_draft_changes_a_text(smollm2: RealModel) -> None:
    """Drafts of the int4 export and of lookup, on the device, on the verifier and on both."""
    cases = sampled_cases(smollm2, PROMPTS[1:16:7], 24)
    int4 = DraftSection(model=str(smollm2.folder))
    lookup = DraftSection(model="lookup")
    found: dict[str, list[Output]] = {}
    async with served(smollm2) as address:
        found["none"] = await generate(address, smollm2, cases, NO_DRAFT)
        found["int4"] = await generate(address, smollm2, cases, int4)
    async with served(smollm2, server_drafts=True) as address:
        found["int4, server lookup"] = await generate(address, smollm2, cases, int4)
        found["lookup on both"] = await generate(address, smollm2, cases, lookup)
    plain = found.pop("none")
    report(
        f"\n{len(cases)} texts, {sum(len(one.tokens) for one in plain)} tokens an arm; differing:"
    )
    for name, outputs in found.items():
        differing = sum(a.tokens != b.tokens for a, b in zip(plain, outputs, strict=True))
        accepted, passes = (
            sum(getattr(one, what) for one in outputs) for what in ("accepted", "passes")
        )
        report(f"  {name}: {differing} texts; {accepted} tokens accepted, {passes} passes")
        assert [one.tokens for one in outputs] == [one.tokens for one in plain], name
        assert [one.finish for one in outputs] == [one.finish for one in plain], name
        assert passes < sum(one.passes for one in plain), name
    assert sum(one.accepted for one in found["int4"]) > 0


async def test_a_chat_shows_the_replies_to_the_templates_prompts(
    smollm2: RealModel, smollm2_path: Path
) -> None:
    """Two turns of the real command, whose target and draft are both the GGUF file."""
    from transformers import AutoTokenizer

    reader = AutoTokenizer.from_pretrained(smollm2.folder)
    questions = ("What is the capital of France?", "And of Italy?")
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    command = [sys.executable, "-m", "edgespec", "chat", "--draft", str(smollm2_path)]
    command += ["--temperature", "0", "--max-tokens", "32"]
    async with served(smollm2) as address:
        messages: list[dict[str, str]] = []
        for question in questions:
            messages.append({"role": "user", "content": question})
            rendered: Any = reader.apply_chat_template(messages, add_generation_prompt=True)
            ids = list(rendered["input_ids"])
            turns = [message["content"] for message in messages]
            assert chat_ids(smollm2, *turns) == ids
            (output,) = await generate(address, smollm2, [(ids, greedy)], NO_DRAFT)
            reply = str(reader.decode(output.tokens, skip_special_tokens=True))
            messages.append({"role": "assistant", "content": reply})
        process = await asyncio.create_subprocess_exec(
            *command,
            "--verifier",
            address,
            env=child_environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        typed = "".join(f"{question}\n" for question in questions)
        shown, said = await process.communicate(typed.encode())
    assert process.returncode == 0, said.decode()
    assert messages[1]["content"] in shown.decode(), shown.decode()
    assert messages[3]["content"] in shown.decode(), shown.decode()
    assert "Paris" in messages[1]["content"]


def test_every_weight_is_the_number_in_the_file(smollm2: RealModel) -> None:
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    names = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": 9, "attn_k": 3}
    tensors = GGUFReader(smollm2.path).tensors
    with safe_open(smollm2.folder / "model.safetensors", "numpy") as weights:
        left = set(weights.keys())
        for tensor in tensors:
            *layer, stem, kind = str(tensor.name).removeprefix("blk.").split(".")
            prefix = f"model.layers.{layer[0]}." if layer else ""
            name = f"{prefix}{names[stem]}.{kind}"
            expected: Any = dequantize(tensor.data, tensor.tensor_type)
            if stem in heads:  # llama.cpp interleaves the halves of each head
                pairs = expected.reshape(heads[stem], -1, 2, expected.shape[-1])
                expected = pairs.swapaxes(1, 2).reshape(expected.shape)
            assert np.array_equal(weights.get_tensor(name), expected), name
            left.remove(name)
    assert left == set()
