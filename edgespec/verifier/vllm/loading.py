"""Loads a target on vLLM from the configuration, and tests it before it serves."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Final

from edgespec.config import VerifierConfig
from edgespec.config.common import SetupError
from edgespec.core.ports import ModelInfo, PassRequest
from edgespec.core.protocol.messages import MAX_ADAPTERS
from edgespec.core.protocol.pictures import PictureInput, ReadPictures
from edgespec.core.protocol.sampling import SamplingParams, noise_bits
from edgespec.models import folders
from edgespec.models.model_source import Purpose, resolve_source
from edgespec.verifier.vllm.pictures import PictureProcessor
from edgespec.verifier.vllm.target import Adapter, VllmTarget, accepted_tokens
from edgespec.verifier.vllm.versions import TESTED, check_install, release_of

_LOG = logging.getLogger(__name__)
# A flag of vLLM's server, not of its engine, so it is read here.
FLAG: Final = "--lora-modules"


def split_adapters(
    flags: Sequence[str], model_name: str
) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """Return the adapters that ``flags`` name, and the flags without them.

    Raises ``ValueError`` that names an invalid value, or a name that is used twice or is the
    model's.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(FLAG, FLAG.replace("a-m", "a_m"), nargs="*", action="extend", default=[])
    given, others = parser.parse_known_args(flags)
    found = [_parse_adapter(value) for value in given.lora_modules]
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"{FLAG} names {len(found)} adapters, but at most {MAX_ADAPTERS}")
    names = [model_name]
    for one in found:
        if one.name in names:
            raise ValueError(f"{FLAG}: the name {one.name!r} is used twice")
        names.append(one.name)
    return tuple(found), tuple(others)


def _parse_adapter(value: str) -> Adapter:
    name, _, path = value.partition("=")
    if not name or not path:
        raise ValueError(f"{FLAG} is {value!r}, but must be NAME=FOLDER")
    folder = Path(path).expanduser().resolve()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"{FLAG} is {value!r}, but {folder / file} does not exist")
    try:
        return Adapter(name, folder, folders.adapter_fingerprint(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{FLAG} is {value!r}, but {folder} is no adapter: {error}") from error


def served_adapters(model: ModelInfo, adapters: Iterable[Adapter]) -> tuple[ModelInfo, ...]:
    """Return ``model`` once per adapter, with the adapter's name and a fingerprint of both."""
    return tuple(
        replace(model, name=one.name, fingerprint=f"{one.fingerprint}-on-{model.fingerprint}")
        for one in adapters
    )


# vLLM's flags that users must not pass, because the engine depends on them; with the option of the
# verifier that replaces each, if there is one.
OURS: Final = {
    "--model": "--model",
    "--dtype": "--set dtype=",
    "--max-model-len": "--max-model-len",
    "--max-num-seqs": "--set limits.max_sessions=",
    "--scheduler-cls": "",
    "--worker-extension-cls": "",
    "--async-scheduling": "",
    "--enable-prefix-caching": "",
    "--skip-tokenizer-init": "",
    "--max-loras": "",
}


def refuse_our_flags(flags: Sequence[str]) -> None:
    """Raise ``ValueError`` that names the first flag which the verifier itself sets."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name not in OURS:
            continue
        hint = f"use {OURS[name]}, before the --" if OURS[name] else "the engine needs its own"
        raise ValueError(f"flag {name} cannot be passed to vLLM: {hint}")


# Self-test. The parts of vLLM that are used may change without notice, and a draft in the wrong
# place would change texts silently. So texts are generated without drafts, with right ones, with
# wrong ones, and with those of vLLM's own speculator if there is one; greedy and sampled. All must
# agree, and right drafts must save steps of vLLM. In low precision a near tie may fall differently
# for a row that is computed beside others, so one of ``TEXTS`` texts of a kind may differ; an error
# in the injection changes nearly all. A speculator must propose something in a text that repeats
# one token.

TEXTS: Final = 3
_PROMPT: Final = 12
_LENGTH: Final = 20
_CHAIN: Final = 4
_REPEATED: Final = 32
_FORCED: Final = 1e4
_PICTURE_SIDE: Final = 64


def self_test(target: VllmTarget) -> list[str]:
    """Return descriptions of all failures; empty if the test passed."""
    kinds = {
        "greedy": SamplingParams(),
        "sampled": SamplingParams(
            temperature=0.9, top_p=0.95, repetition_penalty=1.1, frequency_penalty=0.2
        ),
    }
    failures: list[str] = []
    for kind, params in kinds.items():
        failures += _compare_outputs(target, kind, params)
    return failures or _check_forced(target) or _check_pictures(target)


def _compare_outputs(target: VllmTarget, kind: str, params: SamplingParams) -> list[str]:
    size = target.info.vocabulary_size
    own = target.pass_shape.speculator_tokens
    equal = {"right": 0, "wrong": 0} | ({"vLLM's own": 0} if own else {})
    steps_saved = False
    for seed in range(TEXTS):
        prompt = [noise_bits(seed, position, 0) % size for position in range(_PROMPT)]
        seeded = replace(params, seed=seed)
        plain, steps = generate(target, prompt, seeded, _LENGTH, ())
        right, fewer = generate(target, prompt, seeded, _LENGTH, plain)
        shifted = [(token + 1) % size for token in plain]
        wrong, _ = generate(target, prompt, seeded, _LENGTH, shifted)
        equal["right"] += right == plain
        equal["wrong"] += wrong == plain
        if own:
            equal["vLLM's own"] += generate(target, prompt, seeded, _LENGTH)[0] == plain
        steps_saved |= fewer <= steps // 2
    failures = [
        f"{TEXTS - count} of {TEXTS} {kind} texts differ with {drafts} drafts"
        for drafts, count in equal.items()
        if count < TEXTS - 1
    ]
    if not steps_saved:
        failures.append(f"right drafts of {kind} texts save no steps")
    return failures


def _check_pictures(target: VllmTarget) -> list[str]:
    """Return what is wrong with drafts behind a picture. Its rows shift all positions, and some
    models number them in a way of their own."""
    if (bounds := target.info.pictures) is None:
        return []
    size, place = target.info.vocabulary_size, _PROMPT // 2
    equal = {"right": 0, "wrong": 0}
    for seed in range(TEXTS):
        prompt = [noise_bits(seed, position, 1) % size for position in range(_PROMPT)]
        # A chance placeholder would want a picture too.
        prompt = [(token + (token == bounds.token)) % size for token in prompt]
        prompt[place] = bounds.token
        params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=seed)
        read = target.read_pictures(prompt, [_make_picture()], [place])
        plain, _ = generate(target, prompt, params, _LENGTH, (), read)
        shifted = [(token + 1) % size for token in plain]
        for drafts, guess in (("right", plain), ("wrong", shifted)):
            found, _ = generate(target, prompt, params, _LENGTH, guess, read)
            equal[drafts] += found == plain
    return [
        f"{TEXTS - count} of {TEXTS} texts behind a picture differ with {drafts} drafts"
        for drafts, count in equal.items()
        if count < TEXTS - 1
    ]


def _make_picture() -> bytes:
    """Return a picture of two colours as a PNG file."""
    from PIL import Image

    picture = Image.new("RGB", (_PICTURE_SIDE, _PICTURE_SIDE), (200, 30, 60))
    picture.paste((20, 220, 90), (0, 0, _PICTURE_SIDE // 2, _PICTURE_SIDE))
    file = BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _check_forced(target: VllmTarget) -> list[str]:
    token = target.info.vocabulary_size // 2
    for temperature in (0.0, 0.9):
        params = SamplingParams(temperature=temperature, logit_bias={token: _FORCED})
        text, _ = generate(target, [token], params, 3, ())
        if text != [token] * 3:
            return [f"a bias of {_FORCED:g} on token {token} gives the tokens {text}"]
        if not target.pass_shape.speculator_tokens:
            continue
        before = target.proposed
        text, _ = generate(target, [token] * _REPEATED, params, _LENGTH)
        if text != [token] * _LENGTH:
            return [f"with vLLM's own drafts a bias on token {token} gives the tokens {text}"]
        if target.proposed == before:
            return ["vLLM's own speculator proposes nothing"]
    return []


def generate(
    target: VllmTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    length: int,
    guess: Sequence[int] | None = None,
    pictures: ReadPictures | None = None,
) -> tuple[list[int], int]:
    """Generate ``length`` tokens behind ``prompt``, which may have ``pictures``; return them and
    the number of steps.

    ``guess`` is drafted for the output, a few tokens per pass; None uses what vLLM itself proposes.
    """
    key, text, cached, before = "\0self-test", list(prompt), 0, target.steps
    chain: tuple[int, ...] = ()
    target.open(key, len(prompt), params, prompt)
    if pictures is not None:
        target.use_pictures(key, pictures)
    target.set_draft_steps(target.pass_shape.speculator_tokens if guess is None else 0)
    while (done := len(text) - len(prompt)) < length:
        if guess is not None:
            chain = tuple(guess[done : done + _CHAIN]) if done else ()
        parents = tuple(range(-1, len(chain) - 1))
        (result,) = target.forward(
            [
                PassRequest(
                    key=key,
                    cache_length=cached,
                    feed=tuple(text[cached:]),
                    tokens=chain,
                    parents=parents,
                )
            ]
        )
        accepted = accepted_tokens(result.targets, chain)
        cached = len(text) + len(accepted) - 1
        target.keep(key, range(len(accepted) - 1))
        text += accepted
        chain = result.guesses
    target.close(key)
    target.set_draft_steps(0)
    return text[len(prompt) : len(prompt) + length], target.steps - before


def vllm_target(config: VerifierConfig, name: str) -> VllmTarget:
    """Return the target of ``config`` on vLLM.

    Raises ``SetupError`` if vLLM is not installed or has another version, cannot load the model, or
    fails the self-test; and ``ValueError`` that names the file or the flag.
    """
    version = check_install()
    refuse_our_flags(config.engine_flags)
    adapters, flags = split_adapters(config.engine_flags, name)
    source = resolve_source(config.model, Purpose.TARGET)
    info, weights = source.info, source.fingerprint
    _set_vllm_environment(config.log_level)
    from edgespec.verifier.vllm.core import VllmCore

    core = VllmCore(
        model=str(source.folder),
        settings=config,
        flags=flags,
        adapters=adapters,
        eos_token_ids=info.eos_token_ids,
    )
    served = ModelInfo(
        name=name,
        vocabulary=info.vocabulary,
        vocabulary_size=info.vocabulary_size,
        context_length=core.context_length,
        eos_token_ids=info.eos_token_ids,
        fingerprint=f"{weights}-{core.number_format}",
        pictures=_find_picture_input(config, core.pictures),
    )
    tested = "" if release_of(version) == TESTED else f", never run by this project as {TESTED} was"
    mode = (
        f"vLLM {version}{tested}, {core.number_format} (texts may differ where two tokens nearly"
        " tie)"
    )
    if (speculator := core.speculator).tokens:
        what = "blocks of" if speculator.blocks else "up to"
        mode += f", drafts of its own ({speculator.method}, {what} {speculator.tokens} tokens)"
    if served.pictures is not None:
        mode += ", reads pictures"
    target = VllmTarget(
        core,
        served,
        config.limits.max_sessions,
        mode=mode,
        max_nodes=core.max_drafts,
        max_rows=core.max_rows,
        adapters=served_adapters(served, adapters),
        speculator_tokens=speculator.tokens,
        speculator_blocks=speculator.blocks,
        read_pictures=None if core.pictures is None else core.pictures.read,
    )
    try:
        failures = self_test(target)
    except Exception as error:  # a first step may run out of anything
        core.shut_down()
        raise SetupError(
            f"vLLM {version} fails in the self-test on {source.folder}:"
            f" {type(error).__name__}: {error}"
        ) from error
    if failures:
        core.shut_down()
        raise SetupError(
            f"vLLM {version} does not pass the self-test on {source.folder}, so it would serve"
            f" wrong texts: {'; '.join(failures)}"
        )
    return target


def _find_picture_input(
    config: VerifierConfig, processor: PictureProcessor | None
) -> PictureInput | None:
    """Return the placeholder and the bounds of pictures; None if the model reads none."""
    if processor is None:
        return None
    if processor.placeholder is None:
        _LOG.warning("pictures are refused: %s", processor.why)
        return None
    return config.limits.picture_input(processor.placeholder)


def _set_vllm_environment(log_level: str) -> None:
    """Set environment variables that vLLM reads once, when it is imported.

    Standard output is reserved for the ready line, and vLLM's usage statistics are off. The first
    of vLLM's two model runners is selected: its drafts are lists in this process, and its choice of
    tokens can be replaced. A single worker runs in this process. On GPUs that is vLLM's own choice;
    on CPUs it would start a process for it, and the two would wait for each other by a busy loop.
    """
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", log_level.upper())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
