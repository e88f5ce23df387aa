"""The adapters (LoRA) that are served by name, from vLLM's own flag for them.

``--lora-modules NAME=FOLDER ...`` is a flag of vLLM's server, which is not used here, and not of
its engine: so it is read here, and the engine is told of each adapter by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from edgespec.core.ports import ModelInfo
from edgespec.core.protocol.messages import MAX_ADAPTERS
from edgespec.models.folders import adapter_fingerprint
from edgespec.verifier.engines.vllm.step import Adapter

FLAG: Final = "--lora-modules"


def split_adapters(
    flags: Sequence[str], model_name: str
) -> tuple[tuple[Adapter, ...], tuple[str, ...]]:
    """The adapters that ``flags`` name, and the flags without them. Raises ``ValueError`` naming
    the value that cannot be, or a name that is there twice or the model's."""
    found: list[Adapter] = []
    others: list[str] = []
    among = False
    for flag in flags:
        name, equals, value = flag.partition("=")
        if name.replace("_", "-") == FLAG:
            among = True
            if equals:
                found.append(_adapter(value))
        elif flag.startswith("-"):
            among = False
            others.append(flag)
        elif among:
            found.append(_adapter(flag))
        else:
            others.append(flag)
    if len(found) > MAX_ADAPTERS:
        raise ValueError(f"{FLAG} names {len(found)} adapters, but at most {MAX_ADAPTERS}")
    names = [model_name]
    for one in found:
        if one.name in names:
            raise ValueError(f"{FLAG}: the name {one.name!r} is there twice")
        names.append(one.name)
    return tuple(found), tuple(others)


def _adapter(value: str) -> Adapter:
    name, _, path = value.partition("=")
    if not name or not path:
        raise ValueError(f"{FLAG} is {value!r}, but must be NAME=FOLDER")
    folder = Path(path).expanduser().resolve()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / file).is_file():
            raise ValueError(f"{FLAG} is {value!r}, but {folder / file} is not there")
    try:
        return Adapter(name, folder, adapter_fingerprint(folder))
    except (OSError, ValueError) as error:
        raise ValueError(f"{FLAG} is {value!r}, but {folder} is no adapter: {error}") from error


def served_adapters(model: ModelInfo, adapters: Iterable[Adapter]) -> tuple[ModelInfo, ...]:
    """``model`` with each of them: another name, another fingerprint, so that nobody takes one for
    the other."""
    return tuple(
        replace(model, name=one.name, fingerprint=f"{one.fingerprint}-on-{model.fingerprint}")
        for one in adapters
    )
