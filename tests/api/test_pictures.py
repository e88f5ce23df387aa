"""Pictures through the Python API, over real gRPC.

Oracle: the toy's law for these pictures, token by token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import edgespec
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.config.verifier import LimitsSection
from edgespec.core.protocol.pictures import PictureInput
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.models.toy import TOY_MODEL, TOY_PICTURE, ToyTokenizer
from edgespec.verifier.targets.toy import ToyTarget
from tests.kit.live_verifier import serve_toy, toy_text, wait_until
from tests.kit.pictures import gif, jpeg, png, webp

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.7, seed=4)
CAT = png(70, 40, size=200_000, seed=3)


def ask(*pictures: Any, text: str = "what") -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]


def agent_of(address: str, draft: str = "toy") -> edgespec.Agent:
    draft_section = DraftSection(model=draft)
    return edgespec.Agent(AgentConfig(verifier=address, tokenizer="toy", draft=draft_section))


def expected(prompt: str, *pictures: bytes) -> tuple[int, ...]:
    target = ToyTarget(TOY_MODEL, pictures=PictureInput(TOY_PICTURE))
    seed = target.read_pictures((), pictures, ()).content
    assert isinstance(seed, int)
    return tuple(toy_text(ToyTokenizer().encode(prompt), PARAMS, TOY_MODEL.perturbed(0.5, seed)))


@pytest.mark.parametrize("draft", ["none", "toy", "lookup"])
async def test_a_chat_with_pictures_is_the_targets_own(draft: str, tmp_path: Path) -> None:
    file = tmp_path / "cat.png"
    file.write_bytes(CAT)
    async with serve_toy() as (address, verifier), agent_of(address, draft) as agent:
        first = await agent.chat(ask(edgespec.picture_part(file)), sampling=PARAMS)
        second = await agent.chat(ask(edgespec.picture_part(CAT)), sampling=PARAMS)
        assert first.tokens == second.tokens == expected("9what ", CAT)
        assert verifier.engine.pictures.received_bytes == len(CAT)
        assert first.stats.counters.picture_bytes == len(CAT)
        assert second.stats.counters.picture_bytes == 0


def test_a_part_names_its_format(tmp_path: Path) -> None:
    kinds = [
        edgespec.picture_part(data)["image_url"]["url"].partition(";")[0]
        for data in (png(), gif(1, 1), jpeg(1, 1), webp(1, 1))
    ]
    assert kinds == ["data:image/png", "data:image/gif", "data:image/jpeg", "data:image/webp"]
    with pytest.raises(ValueError, match="the picture is no picture in a known format"):
        edgespec.picture_part(b"text")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match=r"a\.txt is no picture in a known format"):
        edgespec.picture_part(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        pytest.param(
            edgespec.picture_part(png(9000, 9000)),
            "has 9000 x 9000 = 81000000 pixels, but a picture may have at most 16777216",
            id="pixels",
        ),
        pytest.param(
            {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
            "is an address on the web, which is not fetched here: send a data URL",
            id="address",
        ),
    ],
)
async def test_a_picture_that_cannot_be_is_a_value_error(part: Any, words: str) -> None:
    async with serve_toy() as (address, _), agent_of(address) as agent:
        with pytest.raises(ValueError, match=words):
            await agent.chat(ask(part))


async def test_a_text_model_is_named() -> None:
    config = VerifierConfig(model="toy", port=0, limits=LimitsSection(picture_mib=0))
    async with serve_toy(config=config) as (address, _), agent_of(address) as agent:
        with pytest.raises(ValueError, match="the messages have pictures, but 'toy' reads text"):
            await agent.chat(ask(edgespec.picture_part(CAT)))


@pytest.mark.parametrize("first_reads", [True, False])
async def test_of_two_verifiers_one_that_reads_pictures_answers(first_reads: bool) -> None:
    blind = VerifierConfig(model="toy", port=0, limits=LimitsSection(picture_mib=0))
    async with serve_toy(config=blind) as (one, _), serve_toy() as (other, verifier):
        addresses = (other, one) if first_reads else (one, other)
        config = AgentConfig(verifier=addresses, tokenizer="toy", draft=DraftSection(model="none"))
        async with edgespec.Agent(config) as agent:
            await agent.models()
            device = await agent._loaded()
            await device.warm_up()
            pool: Any = device.transport
            await wait_until(
                lambda: all(known.info for known in pool.failover.candidates.listed.values())
            )
            for _ in range(3):
                found = await agent.chat(ask(edgespec.picture_part(CAT)), sampling=PARAMS)
                assert found.tokens == expected("9what ", CAT)
        assert verifier.engine.pictures.received_bytes == len(CAT)
