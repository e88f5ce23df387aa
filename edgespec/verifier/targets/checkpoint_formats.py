"""Checkpoints that come quantised: which ones are loaded, and what the others lack.

transformers does the reading. Where it can turn the stored numbers into ordinary weights, a CPU is
served those: its products are the dense ones, and canonical mode holds. Other formats compute with
kernels of packages of their own, in plain mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

from edgespec.verifier.targets.families import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    packages: tuple[str, ...] = ()
    """What has to be installed, by the names of the package index."""
    unpacks: bool = False
    """Whether transformers can turn it into ordinary weights when it loads."""


FORMATS: Final = {
    "awq": CheckpointFormat(("gptqmodel", "accelerate")),
    "compressed-tensors": CheckpointFormat(("compressed-tensors",), unpacks=True),
    "fp8": CheckpointFormat(("accelerate",), unpacks=True),
    "gptq": CheckpointFormat(("gptqmodel", "optimum")),
    "mxfp4": CheckpointFormat(unpacks=True),
    "torchao": CheckpointFormat(("torchao",)),
}
"""By the ``quant_method`` of ``config.json``."""


def prepare_format(path: str, config: Any, *, on_cpu: bool) -> str:
    """The ``quant_method`` of the checkpoint, or "" for one with ordinary weights.

    On a CPU ``config`` is changed so that the weights are unpacked where they can be. Raises
    ``UnsupportedModelError`` naming the format that is not known, or the packages that are missing.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return ""
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = str(settings.get("quant_method", "unknown"))
    known = FORMATS.get(method)
    if known is None:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised as {method!r}, which is not supported; supported "
            f"are {', '.join(FORMATS)}, and ordinary weights with --quantize"
        )
    missing = [name for name in known.packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise UnsupportedModelError(
            f"{path}: the checkpoint is quantised as {method!r}, and to load it transformers needs "
            f"{' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    if on_cpu and known.unpacks:
        config.quantization_config = {**settings, "dequantize": True}
    return method


def not_loaded(path: str, method: str, error: Exception) -> UnsupportedModelError:
    """What to raise when transformers refused to load a quantised checkpoint."""
    return UnsupportedModelError(
        f"{path}: the checkpoint is quantised as {method!r}, and transformers cannot load it on "
        f"this machine: {error}"
    )
