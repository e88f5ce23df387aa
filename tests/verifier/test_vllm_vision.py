"""A small vision model on the real vLLM. Skipped where vLLM is not installed: ``make unit-vllm``.

Oracles: vLLM without drafts for the same prompt and pictures, and transformers in float32 for the
greedy text behind a picture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch

import edgespec
from edgespec.config import AgentConfig, DraftSection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.config.verifier import LimitsSection
from edgespec.core.ports import PassRequest
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.verifier.build import load_target
from edgespec.verifier.vllm.target import VllmTarget, accepted_tokens
from edgespec.verifier.vllm.versions import check_install
from tests.kit.live_verifier import serve_toy
from tests.kit.pictures import gif, png, solid_png


def _find_missing() -> str:
    try:
        check_install()
    except SetupError as error:
        return str(error)
    return ""


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(bool(_find_missing()), reason=_find_missing()),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own warnings: it is loaded in this process
]
SMALL = ("--enforce-eager", "--kv-cache-memory-bytes", "200000000")
COLORS = ((200, 30, 60), (20, 220, 90), (255, 255, 255), (10, 10, 240), (120, 120, 0))
LENGTH = 24
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.95, repetition_penalty=1.1, seed=7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.verifier.vision_models import write_idefics

    return write_idefics(tmp_path_factory.mktemp("idefics"))


@pytest.fixture(scope="module")
def target(folder: Path) -> VllmTarget:
    limits = LimitsSection(max_sessions=6, max_pictures=4)
    config = VerifierConfig(model=str(folder), engine="vllm", engine_flags=SMALL, limits=limits)
    found = load_target(config)
    assert isinstance(found, VllmTarget)
    return found


def picture(number: int) -> bytes:
    return solid_png(40 + number, 56, COLORS[number % len(COLORS)])


def prompt_of(text: str, token: int) -> list[int]:
    """Return the bytes of ``text`` as the tokenizer numbers them, with ``token`` for each ``#``."""
    from tests.verifier.vision_models import byte_tokenizer

    tokenizer = byte_tokenizer()
    parts = [tokenizer.encode(one, add_special_tokens=False) for one in text.split("#")]
    return [one for part in parts for one in (*part, token)][:-1]


def generate(
    target: VllmTarget,
    prompt: Sequence[int],
    pictures: Sequence[bytes],
    params: SamplingParams,
    guess: Sequence[int] = (),
) -> list[int]:
    """Generate behind a prompt with pictures, drafting from ``guess``."""
    placeholder = target.info.pictures
    assert placeholder is not None
    positions = [at for at, one in enumerate(prompt) if one == placeholder.token]
    text, cached = list(prompt), 0
    target.open("s", len(prompt), params, tuple(prompt))
    if pictures:
        target.use_pictures("s", target.read_pictures(prompt, pictures, positions))
    while (done := len(text) - len(prompt)) < params.max_tokens:
        chain = tuple(guess[done : done + 5]) if done else ()
        parents = tuple(range(-1, len(chain) - 1))
        request = PassRequest("s", cached, tuple(text[cached:]), chain, parents)
        (result,) = target.forward([request])
        accepted = accepted_tokens(result.targets, chain)
        cached = len(text) + len(accepted) - 1
        text += accepted
    target.close("s")
    return text[len(prompt) :][: params.max_tokens]


PROMPTS = ("what is # ?", "#", "# and # differ", "first # then a longer text, and # at the end")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_behind_pictures_are_equal_with_and_without_drafts(
    target: VllmTarget, params: SamplingParams
) -> None:
    assert target.info.pictures is not None
    differing, texts = 0, set()
    for seed, words in enumerate(PROMPTS * 5):
        prompt = prompt_of(words, target.info.pictures.token)
        pictures = [picture(seed + at) for at in range(words.count("#"))]
        seeded = replace(params, seed=seed)
        plain = generate(target, prompt, pictures, seeded)
        without = generate(target, prompt_of(words, 64), (), seeded)
        wrong = [(one + 1) % target.info.vocabulary_size for one in plain]
        for guess in (plain, wrong, without):
            differing += generate(target, prompt, pictures, seeded, guess) != plain
        texts.add(tuple(plain))
    assert differing == 0
    assert len(texts) > len(PROMPTS), "the text depends on the picture"


def test_greedy_texts_are_those_of_transformers(target: VllmTarget, folder: Path) -> None:
    from PIL import Image
    from transformers import AutoProcessor, Idefics3ForConditionalGeneration

    assert target.info.pictures is not None
    model = Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    for number in range(4):
        prompt = prompt_of("what is # ?", target.info.pictures.token)
        found = generate(target, prompt, [picture(number)], GREEDY)
        images = Image.open(BytesIO(picture(number)))
        inputs = processor(text="what is <image> ?", images=images, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        assert output[0, inputs["input_ids"].shape[1] :].tolist() == found


def test_the_rows_of_a_picture_are_counted(target: VllmTarget) -> None:
    from tests.verifier.vision_models import ROWS

    assert target.info.pictures is not None
    prompt = prompt_of("# #", target.info.pictures.token)
    read = target.read_pictures(prompt, [picture(0), picture(1)], [0, 2])
    assert read.extra_tokens == 2 * (ROWS - 1)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(png(64, 64), "a PNG file cannot be decoded", id="header-alone"),
        pytest.param(gif(4, 4), "cannot be decoded|Failed to load", id="gif-without-frame"),
        pytest.param(picture(0)[:-30], "Failed to load image", id="cut"),
    ],
)
def test_a_damaged_picture_is_refused(target: VllmTarget, data: bytes, words: str) -> None:
    assert target.info.pictures is not None
    prompt = prompt_of("#", target.info.pictures.token)
    with pytest.raises(ValueError, match=words):
        target.read_pictures(prompt, [data], [0])


async def test_a_chat_with_pictures_goes_through(target: VllmTarget, folder: Path) -> None:
    """From the Python API over the wire: the same text with drafts, without them, and again."""
    async with serve_toy(target) as (address, verifier):
        texts = set()
        for draft in ("none", "lookup", "lookup"):
            config = AgentConfig(
                verifier=address, tokenizer=str(folder), draft=DraftSection(model=draft)
            )
            async with edgespec.Agent(config) as agent:
                for _ in range(2):
                    content = [
                        edgespec.picture_part(picture(1)),
                        {"type": "text", "text": "what is this? what is this?"},
                    ]
                    found = await agent.chat(
                        [{"role": "user", "content": content}], sampling=SAMPLED
                    )
                    texts.add(found.tokens)
        assert len(texts) == 1
        store = verifier.engine.pictures
        assert (store.missed, store.found) == (3, 3)  # each agent names under a key of its own


async def test_a_damaged_picture_is_an_error_of_the_request(
    target: VllmTarget, folder: Path
) -> None:
    async with serve_toy(target) as (address, _):
        config = AgentConfig(
            verifier=address, tokenizer=str(folder), draft=DraftSection(model="none")
        )
        async with edgespec.Agent(config) as agent:
            content = [edgespec.picture_part(png(64, 64))]
            with pytest.raises(edgespec.InvalidRequest, match="a PNG file cannot be decoded"):
                await agent.chat([{"role": "user", "content": content}])
