"""Real models behind the composition root: torch target, exported ONNX draft.

Oracle: target-only streaming through the same parts. In canonical float32 the drafted text is that
text, token for token.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.config import (
    AgentConfig,
    DraftSection,
    PolicySection,
    VerifierConfig,
)
from edgespec.config.common import SetupError
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.build import build_agent, load_drafter, with_port
from edgespec.verifier.build import load_target
from tests.shell.live_verifier import serving
from tests.shell.tiny_checkpoints import write_checkpoint

# The verifier waits for drafts, so that there are some to accept on any machine.
WAITING = PolicySection(run_ahead=RunAhead.NEVER)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


async def test_real_models_give_the_targets_text(checkpoint: Path) -> None:
    settings = VerifierConfig(model=str(checkpoint), port=0, device="cpu")
    params = [
        SamplingParams(max_tokens=24, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.8, seed=4),
    ]
    texts: dict[str, list[list[int]]] = {"none": [], str(checkpoint): []}
    said: list[str] = []
    accepted = 0
    async with serving(load_target(settings), config=settings) as (address, _):
        for draft, found in texts.items():
            config = AgentConfig(
                address, "", str(checkpoint), DraftSection(model=draft), policy=WAITING
            )
            async with build_agent(config, say=said.append) as agent:
                for sampling in params:
                    chunks = agent.generate("the quick brown", sampling)
                    found.append([token async for chunk in chunks for token in chunk.tokens])
                assert agent.stats is not None
                accepted = agent.stats.counters.accepted
    assert texts[str(checkpoint)] == texts["none"]
    assert [len(text) for text in texts["none"]] == [24, 24]
    assert accepted > 0
    assert len(said) == 1
    assert "exporting" in said[0]


def test_an_export_is_found_again_until_the_weights_change(
    checkpoint: Path, tmp_path: Path
) -> None:
    said: list[str] = []
    for folder in (write_checkpoint(tmp_path / "a"), tmp_path / "a"):
        drafter = load_drafter(AgentConfig(draft=DraftSection(str(folder))), say=said.append)
        assert drafter is not None
        drafter.close()
    assert len(said) == 1
    weights = tmp_path / "a" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    drafter = load_drafter(AgentConfig(draft=DraftSection(str(tmp_path / "a"))), say=said.append)
    assert drafter is not None
    drafter.close()
    assert len(said) == 2


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
