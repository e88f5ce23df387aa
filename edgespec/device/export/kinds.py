"""Which exporters of others there are: what each needs and how it is called.

Optimum's ONNX exporter needs transformers 4, our verifier transformers 5: so each has an
environment of its own, whose versions are pinned here as they were tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH_EXPORT = "edgespec.device.export.scripts.torch_export"
REFERENCE = "edgespec.device.export.scripts.reference_logits"
# One version, as a newer one from whatever index pip knows may bring CUDA along.
_TORCH = "torch==2.13.0"
OWN = "edgespec"
"""The exporter of this project, which needs no torch."""


@dataclass(frozen=True, slots=True)
class ExporterKind:
    """One exporter. ``bits`` are those that it can write by itself, or that its float32 graph can
    be rounded to here."""

    name: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    """What has to be importable, in the order of ``requirements``' first ones."""
    bits: tuple[int, ...]
    arguments: Callable[[Path, Path, int], tuple[str, ...]]
    """Of the Python interpreter: for a source folder, a folder to write, and bits."""
    rounds: bool = False
    """Is what it writes float32 whatever the bits, so that it is rounded afterwards?"""


def script(module: str) -> str:
    """The file of a stand-alone program of this package, by its module's name."""
    return str(Path(__file__).parent / "scripts" / f"{module.rpartition('.')[2]}.py")


def _optimum(source: Path, target: Path, bits: int) -> tuple[str, ...]:
    task = ("--task", "text-generation-with-past")
    return ("-m", "optimum.exporters.onnx", "--model", str(source), *task, str(target))


def _genai(source: Path, target: Path, bits: int) -> tuple[str, ...]:
    precision = {4: "int4", 32: "fp32"}[bits]
    builder = "onnxruntime_genai.models.builder"
    places = ("-m", str(source), "-i", str(source), "-o", str(target))
    options = ("--extra_options", "int4_accuracy_level=4") if bits == 4 else ()
    return ("-m", builder, *places, "-p", precision, "-e", "cpu", *options)


def _torch(source: Path, target: Path, bits: int) -> tuple[str, ...]:
    return (script(TORCH_EXPORT), str(source), str(target))


KINDS = {
    kind.name: kind
    for kind in (
        ExporterKind(
            "optimum",
            (
                "optimum==2.1.0",
                "optimum-onnx==0.1.0",
                "transformers==4.57.6",
                _TORCH,
                "onnx>=1.18",
                "onnxruntime>=1.23",
                "protobuf>=6.33.5,<7",
            ),
            ("optimum.exporters.onnx", "transformers", "torch", "onnx", "onnxruntime"),
            (4, 8, 32),
            _optimum,
            rounds=True,
        ),
        ExporterKind(
            "genai",
            (
                "onnxruntime-genai==0.18.0",
                "onnx-ir>=0.1.10",
                "transformers>=5.17,<6",
                _TORCH,
                "onnx>=1.18",
                "onnxruntime>=1.23",
            ),
            ("onnxruntime_genai", "onnx_ir", "transformers", "torch", "onnx", "onnxruntime"),
            (4, 32),
            _genai,
        ),
        ExporterKind(
            "torch",
            ("transformers>=5.17,<6", _TORCH, "onnx>=1.18", "onnxscript>=0.5"),
            ("transformers", "torch", "onnx", "onnxscript"),
            (4, 8, 32),
            _torch,
            rounds=True,
        ),
    )
}
