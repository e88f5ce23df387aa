"""Real models behind the composition root, over the real wire: exact whatever drafts. The shipped
pair, whose draft is worth shipping; a checkpoint, which is exported first."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent, load_drafter, with_port
from edgespec.models.folders import Role, resolve_model
from edgespec.models.tokenizer import TextTokenizer
from edgespec.verifier.build import load_target
from tests.present import present
from tests.shell.live_verifier import serving
from tests.shell.tiny_checkpoints import write_checkpoint

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

PROMPTS = (
    "Once upon a time there was a",
    "def read_lines(path):\n",
    "<|user|>A farmer has 12 hens and buys 7 more. How many hens are there?<|assistant|>",
    "The parser reads the file and",
)
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)
SAMPLED = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    seed=5,
    max_tokens=24,
    ignore_eos=True,
)
DRAFTS = ("none", "bundled")
# The verifier waits for drafts, so that there are some to accept on any machine.
WAITING = PolicySection(run_ahead=RunAhead.NEVER)


async def test_the_text_is_the_targets_own_whatever_drafts() -> None:
    """Oracles: what it says without a draft, and transformers' greedy text. Of that text the draft
    is right at 65 positions in 100 at least, and the random one by chance alone."""
    from transformers import AutoModelForCausalLM

    folder = resolve_model("bundled", Role.TARGET)
    tokenizer = TextTokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    texts: dict[str, list[list[int]]] = {}
    config = VerifierConfig(model="bundled", port=0, server_drafts=False)
    async with serving(load_target(config), config=config) as (address, _):
        for draft in DRAFTS:
            device = AgentConfig(address, draft=DraftSection(draft), policy=WAITING)
            async with build_agent(device) as agent:
                texts[draft] = [
                    [t async for chunk in agent.generate(prompt, params) for t in chunk.tokens]
                    for prompt in PROMPTS
                    for params in (GREEDY, SAMPLED)
                ]
                assert agent.stats is not None
                assert agent.stats.counters.draft_failure == ""
                assert (agent.stats.counters.sent > 0) == (draft != "none")
    assert all(texts[draft] == texts["none"] for draft in DRAFTS)
    for prompt, text in zip(PROMPTS, texts["none"][::2], strict=True):
        ids = model.dummy_inputs["input_ids"].new_tensor([tokenizer.encode(prompt)])
        said = model.generate(
            ids, do_sample=False, repetition_penalty=1.0, max_new_tokens=48, eos_token_id=None
        )
        assert said[0, ids.shape[1] :].tolist() == text
    for draft, least, most in (("bundled", 0.65, 1.0), ("random", 0.0, 0.02)):
        drafter = present(load_drafter(AgentConfig(draft=DraftSection(draft))))
        hits = 0
        for prompt, text in zip(PROMPTS, texts["none"][::2], strict=True):
            feed, keep = tokenizer.encode(prompt), 0
            drafter.begin(len(feed), GREEDY)
            for token in text:
                hits += drafter.step(keep, feed, 1)[0].token == token
                keep, feed = keep + len(feed), [token]
        assert least <= hits / (48 * len(PROMPTS)) <= most
        drafter.close()


def test_cut_off_weights_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises((SetupError, OSError, ValueError), match="cut"):
        load_target(VerifierConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("address", "whole"),
    [
        ("host", "host:7420"),
        ("host:1", "host:1"),
        ("[::1]", "[::1]:7420"),
        ("[::1]:2", "[::1]:2"),
        ("unix:verifier.sock", "unix:verifier.sock"),
    ],
)
def test_an_address_without_a_port_gets_the_default_one(address: str, whole: str) -> None:
    assert with_port(address) == whole
